"""Scattered accesses: what an element-wise kernel asks caches for where neighbours in the output lie far apart.

The 32 threads of a warp take elements that are neighbours in the output. Where these are neighbours in an operand, too,
they lie in a line or two of the first-level cache. Where they lie far apart in it (NCHW read as NHWC, a transposed
matrix), each lies in a line of its own, which the cache looks up one after another; and each brings a sector from the
second level, unless a warp of the same block has brought that sector before.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import ceil

from flopmeter.costs.index_arithmetic import ELEMENT_THREADS, MergedDimension, elements_of_thread, walked_runs
from flopmeter.records import Scatter, TensorSpec

WARP = 32
# Bytes of a line, which is looked up as a whole, and of a sector of it, which is brought alone (Nsight Compute's
# documentation, 'L1TEX').
LINE_BYTES, SECTOR_BYTES = 128, 32


def scatter_of(operands: Sequence[TensorSpec]) -> Scatter:
    """How the accesses of a kernel are scattered that walks these operands, outputs first."""
    on_device, runs = walked_runs(operands)
    if not runs or not operands[0].numel:
        return Scatter()
    block = ELEMENT_THREADS * elements_of_thread(operands[0])
    of_operands = [_of_block(tuple(runs), place, spec.dtype.itemsize, block) for place, spec in enumerate(on_device)]
    blocks = ceil(operands[0].numel / block)
    lookups, requests, lines = (sum(column) for column in zip(*of_operands, strict=True))
    return Scatter(blocks * lookups, blocks * requests, lines) if lookups else Scatter()


@functools.lru_cache(4096)
def _of_block(runs: tuple[MergedDimension, ...], operand: int, item_bytes: int, block: int) -> tuple[int, int, int]:
    """Lookups, requests and lines of the first block in an operand, in addition to those that neighbours would need."""
    offsets = [0]
    for size, steps in runs:
        wanted = min(size, ceil(block / len(offsets)))
        offsets = [place * steps[operand] + offset for place in range(wanted) for offset in offsets]
    places = [offset * item_bytes for offset in offsets[:block]]
    lookups, requests, brought = 0, 0, set[int]()
    for first in range(0, len(places), WARP):
        touched = {place // SECTOR_BYTES for place in places[first : first + WARP]}
        lookups += _lines(touched)
        requests += _lines(touched - brought)
        brought |= touched
    of_neighbours = ceil(len(places) / WARP) * ceil(WARP * item_bytes / LINE_BYTES)
    if lookups <= of_neighbours:
        return 0, 0, 0
    return lookups - of_neighbours, max(0, requests - of_neighbours), _lines(brought)


def _lines(sectors: set[int]) -> int:
    return len({sector * SECTOR_BYTES // LINE_BYTES for sector in sectors})
