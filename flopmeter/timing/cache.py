"""What kernels find in the L2 cache: tensors that the kernels just before them wrote or read.

Written bytes push older ones out. Weights that a matmul reads in between do not count: measured additions of a residual
find it in the cache after two matmuls. The weights themselves are the first to go: matmuls that read several in turn
find them there as long as all that is read and written in between fits (with hardly anything between all and nothing,
on the L40S of [aiconfigurator]).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from flopmeter.records import Kernel, Op, Region, TensorSpec
from flopmeter.timing import constants


class _ByteRange(NamedTuple):
    """A part of a storage, from byte `begin` to `end`."""

    storage: int
    begin: int
    end: int

    def share_of(self, other: _ByteRange) -> float:
        """Which share of this part is in the other one."""
        within = min(self.end, other.end) - max(self.begin, other.begin)
        return max(0, within) / max(self.end - self.begin, 1)


class _Seen(NamedTuple):
    """The moment when a kernel was last done with a part of a storage, as two counts: the bytes that all kernels had
    written so far, and the bytes that they had fetched into the cache (touched and not found there)."""

    part: _ByteRange
    written: int
    fetched: float


def cached_bytes(kernels: Sequence[Kernel], cache: int | None) -> list[float]:
    """For each kernel in order, how many of the bytes that it reads and writes stay in a cache of this size. Bytes that
    it writes stay there if it found some of its inputs there, since the memory that it writes to was in use before too.
    Bytes that a matmul writes stay only if a kernel touched that very memory before."""
    if not cache:
        return [0.0] * len(kernels)
    written_so_far, fetched_so_far = 0, 0.0
    seen: dict[int, list[_Seen]] = {}  # by storage
    found: list[float] = []
    for kernel in kernels:
        moved, written = kernel.cost.bytes, kernel.cost.bytes_written
        if kernel.cost.macs:
            still = functools.partial(_is_whole, moved + fetched_so_far, cache)
            hits = sum(nbytes * _held(part, seen, still) for part, nbytes in (*_reads(kernel), *_writes(kernel)))
        else:
            still = functools.partial(_left, moved + written_so_far, cache)
            hits = sum(nbytes * _held(part, seen, still) for part, nbytes in _reads(kernel))
            hits += written * _share(moved, cache) if hits else 0.0
        found.append(hits)
        written_so_far, fetched_so_far = written_so_far + written, fetched_so_far + moved - hits
        for part in _touched(kernel):
            others = [each for each in seen.get(part.storage, ()) if each.part.share_of(part) != 1.0]
            seen[part.storage] = [*others, _Seen(part, written_so_far, fetched_so_far)]
    return found


def _held(part: _ByteRange, seen: Mapping[int, Sequence[_Seen]], still: Callable[[_Seen], float]) -> float:
    """The share of a part that is in the cache, where `still` is the share of what was seen that is still there."""
    return min(1.0, sum(part.share_of(each.part) * still(each) for each in seen.get(part.storage, ())))


def _is_whole(fetched: float, cache: int, each: _Seen) -> float:
    """Whether a matmul finds it: all or nothing. `fetched`: by all kernels, that matmul included."""
    return float(fetched - each.fetched <= cache)


def _left(written: float, cache: int, each: _Seen) -> float:
    return _share(written - each.written, cache)


def _share(passed: float, cache: int) -> float:
    """The share of a tensor that is still in the cache after so many bytes, this kernel's included, passed it."""
    beyond = passed / cache - constants.CACHE_SHARE_WITHOUT_MISSES
    return min(1.0, max(0.0, 1.0 - beyond / constants.CACHES_UNTIL_ALL_MISS))


def _writes(kernel: Kernel) -> Iterator[tuple[_ByteRange, int]]:
    """Parts of storages that the kernel of one op writes, with the bytes."""
    if len(kernel.ops) == 1:
        yield from _in_storages(kernel.ops[0], kernel.cost.writes)


def _reads(kernel: Kernel) -> Iterator[tuple[_ByteRange, int]]:
    """Parts of storages that the kernel reads, with the bytes. Of a fused kernel only the sum of the bytes is known."""
    if len(kernel.ops) == 1:
        yield from _in_storages(kernel.ops[0], kernel.cost.reads)
        return
    parts = {_part(op, spec) for op in kernel.ops for spec in op.call.inputs}
    storages = {part.storage for part in parts}
    for storage in storages:
        own = [part for part in parts if part.storage == storage]
        whole = _ByteRange(storage, min(part.begin for part in own), max(part.end for part in own))
        yield whole, kernel.cost.bytes_read // len(storages)


def _touched(kernel: Kernel) -> Iterator[_ByteRange]:
    """What the kernel leaves in the cache. Of a tensor of which it touches a part, such as one expert's weights, it is
    not known which."""
    regions = (*kernel.cost.reads, *kernel.cost.writes)
    partly = {region.spec for region in regions if region.spec is not None and region.nbytes < region.spec.nbytes}
    named = {region.spec for region in regions} if len(kernel.ops) == 1 else set()
    for op in kernel.ops:
        specs = (spec for spec in (*op.call.inputs, *op.call.outputs) if not named or spec in named or None in named)
        yield from (_part(op, spec) for spec in specs if spec not in partly)


def _part(op: Op, spec: TensorSpec) -> _ByteRange:
    item = spec.dtype.itemsize
    reach = sum((size - 1) * abs(stride) for size, stride in zip(spec.shape, spec.stride, strict=True)) + 1
    begin = spec.offset * item if spec.is_strided else 0
    return _ByteRange(op.storages[spec.storage], begin, begin + (reach * item if spec.is_strided else spec.nbytes))


def _in_storages(op: Op, regions: Sequence[Region]) -> Iterator[tuple[_ByteRange, int]]:
    for spec, nbytes in regions:
        if spec is not None and spec.storage >= 0:
            yield _part(op, spec), nbytes
