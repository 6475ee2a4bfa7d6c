"""Memory that kernels move in addition to what they touch: devices read and write it in sectors, and elements that lie
apart leave a part of each unused."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from flopmeter.costs.scatter import SECTOR_BYTES
from flopmeter.device.hardware import Hardware
from flopmeter.records import Cost, Region, TensorSpec
from flopmeter.timing import constants


class _Gapped(NamedTuple):
    """A region with gaps, which leaves a part of its sectors unused."""

    place: TensorSpec  # alike for regions between each other, such as even and odd places of a tensor
    touched_bytes: int
    sector_bytes: int


def unused_bytes(cost: Cost, hardware: Hardware) -> int:
    """Bytes that a kernel moves between memory and cache in addition to those that it touches. Where it writes a part
    of a sector, the rest is read first, unless the cache holds all of them."""
    sector = constants.AMD_LINE_BYTES if hardware.vendor == "amd" else SECTOR_BYTES
    read, written = _gapped(cost.reads, sector), _gapped(cost.writes, sector)
    if not read and not written:
        return 0
    are_read = {each.place for each in read}
    alone = [each for each in written if each.place not in are_read]
    filled = sum(each.sector_bytes for each in alone if each.sector_bytes > (hardware.l2_cache_bytes or 0))
    return _unused(read) + sum(each.sector_bytes - each.touched_bytes for each in written) + filled


def _unused(read: Sequence[_Gapped]) -> int:
    """Bytes of sectors that nothing read uses. Interleaved regions, such as even and odd places of a tensor, are read
    at once. (What `cat` writes interleaved is not written at once.)"""
    touched: Counter[TensorSpec] = Counter()
    for each in read:
        touched[each.place] += each.touched_bytes
    moved = {each.place: each.sector_bytes for each in read}
    return sum(max(0, moved[place] - touched[place]) for place in moved)


def _gapped(regions: Sequence[Region], sector_bytes: int) -> list[_Gapped]:
    """The regions with gaps that are touched in full; of others it is not known which parts are touched."""
    found = []
    for spec, nbytes in regions:
        if spec is not None and spec.is_strided and nbytes == spec.nbytes:
            moved = sectors_of(spec.shape, spec.stride, spec.dtype.itemsize, sector_bytes)
            if moved > nbytes:
                found.append(_Gapped(spec._replace(offset=0), nbytes, moved))
    return found


@functools.lru_cache(4096)
def sectors_of(shape: tuple[int, ...], stride: tuple[int, ...], item_bytes: int, sector_bytes: int) -> int:
    """Bytes of the sectors that hold the elements, if the first starts one."""
    moved = span = item_bytes  # of all dimensions so far: bytes of their sectors, and from the first to the last
    for step, size in sorted(zip(stride, shape, strict=True)):
        if not step or size == 1:
            continue
        step_bytes = step * item_bytes
        whole_span = step_bytes * (size - 1) + span
        if step_bytes < sector_bytes:  # neighbours share sectors
            moved = whole_span
        elif step_bytes > span:
            moved = size * min(step_bytes, sector_bytes * ceil(moved / sector_bytes))
        else:
            moved = min(size * moved, whole_span)
        span = whole_span
    return moved
