"""How the threads of torch's kernel for sums, means, maxima and norms share their inputs (Reduce.cuh in
aten/src/ATen/native/cuda, `setReduceConfig`): few outputs keep few thread blocks busy, which walk their inputs one
after another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, gcd, prod

from flopmeter.records import TensorSpec

MOST_THREADS, WARP_THREADS = 512, 32
LOADS_AT_A_TIME = 4  # of a thread, and the elements of one load where these lie side by side (`vt0`)
LEAST_CONTIGUOUS = 128  # inputs of an output, from which on a thread loads several side by side
VALUES_OF_WARP = 16  # from so many for each thread, warp after warp, on, the warps of a block share an output
VALUES_FOR_BLOCKS = 256  # and from so many on several blocks, which leave each thread 16
TRIPS_BETWEEN_BLOCKS = 3  # a block stores its part, counts itself, and the last one loads all parts


def serial_loads(x: TensorSpec, dims: Sequence[int]) -> int:
    """Memory accesses of a thread that wait for one another, beside the first."""
    wide = sorted((x.stride[dim], size, dim) for dim, size in enumerate(x.shape) if size > 1)
    reduced, kept = ([entry for entry in wide if (entry[-1] in dims) is taken] for taken in (True, False))
    if not reduced or 0 in x.shape:
        return 0
    inputs, outputs = (prod(size for _, size, _ in entries) for entries in (reduced, kept))
    along_inputs = reduced[0] == wide[0]
    width, height, together = (inputs, outputs, 1) if along_inputs else (outputs, inputs, _outputs_together(wide))
    if along_inputs and wide[0][0] == 1 and inputs >= LEAST_CONTIGUOUS and _is_one_run(reduced):
        width //= LOADS_AT_A_TIME
    columns, rows = _block(width // together, height, MOST_THREADS // together)
    values = ceil(inputs / columns) if along_inputs else inputs
    trips = 0
    if values >= min(rows * VALUES_OF_WARP, VALUES_FOR_BLOCKS):
        values = ceil(values / rows)
        if values >= VALUES_FOR_BLOCKS:
            values, trips = VALUES_OF_WARP, TRIPS_BETWEEN_BLOCKS
    return ceil(values / LOADS_AT_A_TIME) - 1 + trips


def _outputs_together(wide: list[tuple[int, int, int]]) -> int:
    """Neighbouring outputs that a thread loads at once: 4, 2 or 1, where every row of them begins aligned."""
    (stride, size, _), *others = wide
    return gcd(LOADS_AT_A_TIME, size, *(step for step, _, _ in others)) if stride == 1 else 1


def _is_one_run(dims: list[tuple[int, int, int]]) -> bool:
    """Whether torch walks these dimensions as one."""
    return all(step * size == outer for (step, size, _), (outer, _, _) in pairwise(dims))


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Threads of a block, side by side and one above another: powers of two."""
    widest, highest = (1 << (max(1, min(size, most)).bit_length() - 1) for size in (width, height))
    rows = min(highest, most // min(widest, WARP_THREADS))
    return min(widest, most // rows), rows
