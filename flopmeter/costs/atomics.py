"""Atomic additions: what the L2 cache is asked for where threads add to elements that others add to as well.

The cache adds what the threads of a warp send to one sector in one go, unless several of them name the same word: these
are added one after another. An element of 16 bits is added as a half of its word. Threads that add to the first half
and those that add to the second take different branches (fastAtomicAdd in aten/src/ATen/native/cuda/KernelUtils.cuh),
so that a warp sends two instructions; and these return what was there before (ATOM in the machine code of torch 2.15),
which those in 32 bits do not (REDG).
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import ceil

from flopmeter.costs.scatter import SECTOR_BYTES, WARP
from flopmeter.records import Atomics, TensorSpec

WORD_BYTES = 4
# Warps that are looked at: the first ones, which begin at all places of a row and of a small image.
SAMPLED_WARPS = 64


@functools.lru_cache(1024)
def additions_to_taps(grad: TensorSpec, target: TensorSpec, taps: int, *, align_corners: bool) -> Atomics:
    """Of a kernel with a thread for each element of `grad` (N, C, ...), in the order of memory, that adds to so many
    taps of each. All count as the first tap does, which lies where the element does in the smaller image."""
    warps = ceil(grad.numel / WARP)
    rounds, instructions, sampled = 0, 0, 0
    places = list(_first_taps(grad, target, align_corners=align_corners))
    for first in range(0, len(places), WARP):
        warp = places[first : first + WARP]
        parts = {place % WORD_BYTES for place in warp}
        rounds += sum(_rounds(place for place in warp if place % WORD_BYTES == part) for part in parts)
        instructions += len(parts)
        sampled += 1
    share = taps * warps / max(sampled, 1)
    returned = ceil(share * instructions) if target.dtype.itemsize < WORD_BYTES else 0
    return Atomics(ceil(share * rounds), returned)


def _rounds(places: Iterable[int]) -> int:
    """How often the cache adds for one instruction, whose threads name these bytes."""
    of_sector: dict[int, int] = {}
    for word, threads in Counter(place // WORD_BYTES for place in places).items():
        sector = word * WORD_BYTES // SECTOR_BYTES
        of_sector[sector] = max(of_sector.get(sector, 0), threads)
    return sum(of_sector.values())


def _first_taps(grad: TensorSpec, target: TensorSpec, *, align_corners: bool) -> Iterator[int]:
    """Where in `target`, in bytes, the first tap of each element lies, in the order in which elements of `grad` lie in
    memory."""
    fastest_first = sorted(range(len(grad.shape)), key=lambda dim: (grad.stride[dim], -dim))
    taps = [_taps_along(grad.shape[dim], target.shape[dim], align_corners=align_corners) for dim in fastest_first]
    steps = [target.stride[dim] * target.dtype.itemsize for dim in fastest_first]
    for element in range(min(grad.numel, SAMPLED_WARPS * WARP)):
        place, rest = 0, element
        for along, step in zip(taps, steps, strict=True):
            rest, coordinate = divmod(rest, len(along))
            place += along[coordinate] * step
        yield place


def _taps_along(size: int, small: int, *, align_corners: bool) -> Sequence[int]:
    """The first tap of each place along a dimension (area_pixel_compute_source_index in UpSample.cuh)."""
    if size == small:
        return range(size)
    if align_corners:
        return [place * (small - 1) // max(size - 1, 1) for place in range(size)]
    return [int(max(0.0, (place + 0.5) * small / size - 0.5)) for place in range(size)]
