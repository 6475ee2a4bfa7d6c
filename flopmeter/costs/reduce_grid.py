"""How the threads of torch's kernel for sums, means, maxima and norms share their inputs (Reduce.cuh in
aten/src/ATen/native/cuda, `setReduceConfig`): few outputs keep few thread blocks busy, which walk their inputs one
after another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, gcd, prod

from flopmeter.records import TensorSpec, ThreadGrid
from flopmeter.records.powers_of_two import power_of_two_up_to

MOST_THREADS, WARP_THREADS = 512, 32
LOADS_AT_A_TIME = 4  # of a thread, and the elements of one load where these lie side by side (`vt0`)
LEAST_CONTIGUOUS = 128  # inputs of an output, from which on a thread loads several side by side
VALUES_OF_WARP = 16  # from this many per thread on, the warps of a block share an output
VALUES_FOR_BLOCKS = 256  # and from this many on several blocks do

# Integer instructions of a thread: offsets, with divisions by sizes that only the kernel's caller knows, and barriers.
# Sums of 1,000,000 x 4, 163,840 x 49 and 524,288 x 49 on an H100, where threads are many and bytes few, ask for 100
# to 120 (validation/traces, kernels_reduce).
THREAD_OPERATIONS = 100

# Registers of a thread by the number of outputs that it adds up together, in profiles of torch 2.11 on an H100.
REGISTERS = {1: 32, 2: 40, 4: 54}

# A block that scans rows adds in steps of 1, 2, 4, ... threads, each with a barrier: cycles of such a step, and integer
# instructions of a thread in it, and in as many as two more to load and store. From cumsum on an H100 (the same files):
# 64 x 1024, 8192 x 8192 and 4096 x 128256.
SCAN_CYCLES, SCAN_OPERATIONS = 270, 13


def grid_of(x: TensorSpec, dims: Sequence[int], combining: int, value_cycles: int = 0) -> ThreadGrid | None:
    """The thread blocks that reduce these dimensions; `combining`: the integer instructions that join two values;
    `value_cycles`: in which a thread does nothing else, for each value that it does not load with its neighbours. None
    where nothing is reduced."""
    wide = sorted((x.stride[dim], size, dim) for dim, size in enumerate(x.shape) if size > 1)
    reduced, kept = ([entry for entry in wide if (entry[-1] in dims) is taken] for taken in (True, False))
    if not reduced or 0 in x.shape:
        return None
    inputs, outputs = (prod(size for _, size, _ in entries) for entries in (reduced, kept))
    along_inputs = reduced[0] == wide[0]
    width, height, together = (inputs, outputs, 1) if along_inputs else (outputs, inputs, _outputs_together(wide))
    if along_inputs and wide[0][0] == 1 and inputs >= LEAST_CONTIGUOUS and _is_one_run(reduced):
        width, value_cycles = width // LOADS_AT_A_TIME, 0
    columns, rows = _block(width // together, height, MOST_THREADS // together)
    values = ceil(inputs / columns) if along_inputs else inputs
    outputs_of_block = 1 if along_inputs else columns * together
    joins = LOADS_AT_A_TIME - 1 + (columns.bit_length() - 1) * along_inputs
    joiners = 0
    if values >= min(rows * VALUES_OF_WARP, VALUES_FOR_BLOCKS):
        values, joins = ceil(values / rows), joins + rows.bit_length() - 1
        joiners = (columns * rows if along_inputs else rows) * (values >= VALUES_FOR_BLOCKS)
    else:
        outputs_of_block *= rows
    operations = THREAD_OPERATIONS + combining * joins * together
    return ThreadGrid(
        ceil(outputs / outputs_of_block),
        columns * rows,
        values,
        LOADS_AT_A_TIME,
        cycles=LOADS_AT_A_TIME * together * value_cycles,
        operations=operations,
        joiners=joiners,
        registers=REGISTERS[together],
        in_turns=bool(value_cycles) and together > 1,  # so many registers that few other threads are there meanwhile
    )


def scan_grid_of(x: TensorSpec, dim: int) -> ThreadGrid | None:
    """The thread blocks of a scan along one dimension (ScanUtils.cuh, `scan_dim`). Of the last dimension, a block takes
    several rows, and two elements for each of its threads at a time. Of others, a thread adds up a column. None for a
    tensor of one row, which cub scans in one pass."""
    size = x.shape[dim] if x.shape else 1
    if x.numel <= size:
        return None
    if dim % len(x.shape) < len(x.shape) - 1:
        outer, inner = prod(x.shape[: dim % len(x.shape)]), prod(x.shape[dim % len(x.shape) + 1 :])
        threads = min(MOST_THREADS, inner)
        return ThreadGrid(outer * ceil(inner / threads), threads, size)
    rows = x.numel // size
    log_most = MOST_THREADS.bit_length() - 1
    log_columns = min(log_most, max(4, (log_most + (size - 1).bit_length() - (rows - 1).bit_length()) // 2))
    rows_of_block, rounds = 1 << (log_most - log_columns), ceil(size / (2 << log_columns))
    operations = rounds * SCAN_OPERATIONS * (log_columns + 3)
    cycles = SCAN_CYCLES * (log_columns + 1)
    return ThreadGrid(ceil(rows / rows_of_block), MOST_THREADS, rounds, cycles=cycles, operations=operations)


def _outputs_together(wide: list[tuple[int, int, int]]) -> int:
    """Neighbouring outputs that a thread loads at once: 4, 2 or 1, where every row of them begins aligned."""
    (stride, size, _), *others = wide
    return gcd(LOADS_AT_A_TIME, size, *(step for step, _, _ in others)) if stride == 1 else 1


def _is_one_run(dims: list[tuple[int, int, int]]) -> bool:
    """Whether torch walks these dimensions as one."""
    return all(step * size == outer for (step, size, _), (outer, _, _) in pairwise(dims))


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Threads of a block, side by side and one above another: powers of two."""
    widest, highest = (power_of_two_up_to(max(1, min(size, most))) for size in (width, height))
    rows = min(highest, most // min(widest, WARP_THREADS))
    return min(widest, most // rows), rows
