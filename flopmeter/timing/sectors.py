"""Memory that kernels move beside what they touch: devices read and write it in sectors, and elements that lie apart
leave a part of each unused."""

from __future__ import annotations

import functools
from math import ceil

from flopmeter.costs.index_arithmetic import SECTOR_BYTES
from flopmeter.device.hardware import Hardware
from flopmeter.records import Cost, Region, TensorSpec
from flopmeter.timing import constants


def unused_bytes(cost: Cost, hardware: Hardware) -> int:
    """Bytes that a kernel moves between memory and cache beside those that it touches. Regions that lie alike in one
    storage, such as even and odd places, are taken to be parts of the same sectors."""
    sector = constants.AMD_LINE_BYTES if hardware.vendor == "amd" else SECTOR_BYTES
    read = {_place(region): _whole(region, sector) for region in cost.reads if region.spec is not None}
    unused = sum(nbytes - touched for touched, nbytes in read.values())
    for region in cost.writes:
        if region.spec is None:
            continue
        touched, nbytes = _whole(region, sector)
        if nbytes > touched:
            # What is written of a sector is put to the rest, which is read for that, unless the cache keeps all.
            fills = nbytes > (hardware.l2_cache_bytes or 0) and _place(region) not in read
            unused += nbytes - touched + fills * nbytes
    return unused


def _whole(region: Region, sector_bytes: int) -> tuple[int, int]:
    """Bytes that are touched, and those of all their sectors. Of a tensor that is touched in part, it is not known
    where."""
    spec = region.spec
    if spec is None or not spec.is_strided or region.nbytes != spec.nbytes:
        return region.nbytes, region.nbytes
    return region.nbytes, max(region.nbytes, sectors_of(spec.shape, spec.stride, spec.dtype.itemsize, sector_bytes))


def _place(region: Region) -> TensorSpec | None:
    return region.spec and region.spec._replace(offset=0)


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
