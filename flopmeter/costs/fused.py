"""One kernel of several ops, as inductor writes it: its name, its class and its FLOPs.

torch's own compiler says which ops share a kernel and which bytes it moves (flopmeter/compiler/plan.py). For the trace
of an eager run the rules of flopmeter/launch/fusion say it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

from flopmeter.costs.atomics import WORD_BYTES
from flopmeter.costs.index_arithmetic import RANDOM_OPERATIONS
from flopmeter.costs.scatter import SECTOR_BYTES
from flopmeter.records import (
    CONTRACTION,
    ELEMENTWISE,
    NORMALIZATION,
    REDUCTION,
    Reread,
    Scatter,
    ThreadGrid,
    VectorWork,
)
from flopmeter.records.powers_of_two import power_of_two_from

MOST_NAMES = 6  # of ops, in a kernel's name
# Inductor holds rows of up to this many elements in registers, and shorter ones where elements are not neighbours in
# memory (should_use_persistent_reduction in torch/_inductor/choices.py). What follows the reduction in the kernel reads
# longer rows again.
_HELD_ELEMENTS, _HELD_ELEMENTS_APART = 1024, 64

# Elements of a row that a block takes at a time, and those of a thread (_reduction_configs and triton_config_reduction
# in runtime/triton_heuristics.py: 16 warps for 2,048 elements). The threads of a warp combine their results in five
# steps of a shuffle and an addition, and the warps in four more.
_ROW_BLOCK = 2048
_ELEMENTS_OF_THREAD = 4
_COMBINING = 18
_BLOCK_THREADS = 128  # that step through rows whose elements are not neighbours: 4 warps

# `rand` keeps one of the four numbers that ten rounds of Philox make (triton/language/random.py); torch's own kernels
# use all four.
_RANDOM_OPERATIONS = 4 * RANDOM_OPERATIONS


def vector_work(
    rereads: tuple[Reread, ...],
    grid: ThreadGrid | None,
    random_numbers: int,
    instructions: int,
    cached_bytes: int,
    *,
    reduces: bool,
) -> VectorWork:
    """The work of a kernel besides FLOPs and traffic. Addresses take none: sizes are constants in the kernel.
    `cached_bytes`: what the L2 cache gives and takes beyond the kernel's reads and writes."""
    drawn = _RANDOM_OPERATIONS * random_numbers
    apart = Scatter(requests=ceil(cached_bytes / SECTOR_BYTES))
    return VectorWork(
        rereads, drawn, grid, apart, random_numbers=random_numbers, instructions=instructions, reduces=reduces
    )


def bytes_added(elements: int) -> int:
    """What the L2 cache reads and writes for so many atomic additions, of numbers of 32 bits that lie side by side in
    rows of a sector or more (costs/atomics.py)."""
    return 2 * WORD_BYTES * elements


def name_of(ops: Iterable[str]) -> str:
    """'softmax', or 'fused(mul, softmax)', each op once."""
    names = list(dict.fromkeys(ops))
    if len(names) < 2:
        return "".join(names)
    more = [f"{len(names) - MOST_NAMES} more"] if len(names) > MOST_NAMES else []
    return f"fused({', '.join(names[:MOST_NAMES] + more)})"


def slowest_class(classes: Sequence[str]) -> str | None:
    """The class that slows the kernel most; None if it only moves, gathers or draws random numbers."""
    return next((name for name in (CONTRACTION, NORMALIZATION, REDUCTION, ELEMENTWISE) if name in classes), None)


def flops_of(op_class: str, parts: Iterable[Iterable[tuple[str, int]]]) -> tuple[tuple[str, int], ...]:
    """The FLOPs of a kernel by the classes of their ops. Its own class comes first, even with none."""
    flops = {op_class: 0}
    for name, count in (item for part in parts for item in part):
        flops[name] = flops.get(name, 0) + count
    return tuple((name, count) for name, count in flops.items() if count or name == op_class)


def is_held(reduced: int, *, is_inner: bool) -> bool:
    """Whether registers hold the rows that a kernel reduces (a persistent reduction)."""
    return reduced <= (_HELD_ELEMENTS if is_inner else _HELD_ELEMENTS_APART)


def grid_of(rows: int, reduced: int, *, is_inner: bool, loads: int = 0) -> ThreadGrid | None:
    """How threads step through rows that registers do not hold, if their elements are not neighbours in memory. A step
    is loaded once the one before it has been computed. `loads`: tensors that the kernel reads."""
    if is_inner or is_held(reduced, is_inner=False):
        return None
    rows_of_block, elements_of_step = _outer_block(power_of_two_from(rows), reduced, loads)
    return ThreadGrid(ceil(rows / rows_of_block), _BLOCK_THREADS, ceil(reduced / elements_of_step))


def _outer_block(rows: int, reduced: int, loads: int) -> tuple[int, int]:
    """Rows of a block, and how many elements of each it takes in a step (`outer_config_opt` in
    runtime/triton_heuristics.py)."""
    if rows <= 1024:
        return max(min(rows // 128, 8), 2), min(reduced, 64)
    if rows <= 8 * 4096:
        return 16, 32
    if loads >= 4 and reduced > 128:
        return 32, 64 if reduced >= 2048 else 32
    of_block = max(min(power_of_two_from(rows // 4096), 256), 64)
    return of_block, 512 // of_block


def walk_of(rows: int, reduced: int, read_bytes: int, bytes_written: int, *, is_inner: bool) -> tuple[Reread, ...]:
    """How a kernel walks the rows that it reduces. `read_bytes`: of its largest input. A kernel that writes about as
    much as it reads reads that input again for its result, if the rows are too long for registers."""
    if reduced <= 1 or not rows:
        return ()
    reads_once = is_held(reduced, is_inner=is_inner) or bytes_written < read_bytes // 2
    if reads_once and not is_inner:
        return ()  # what bounds other walks than along rows is not known here
    block = min(power_of_two_from(reduced), _ROW_BLOCK)
    passes = 1 if reads_once else 2
    accesses = passes * ceil(reduced / block) if is_inner else 0
    threads = max(1, block // _ELEMENTS_OF_THREAD)
    again, of_row = (passes - 1) * read_bytes, read_bytes // rows
    return (Reread(again, rows, of_row, threads, _COMBINING, accesses),)
