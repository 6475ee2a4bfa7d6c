"""What kernels find in the L2 cache: tensors that the kernels just before them wrote or read.

Written bytes push older ones out. Weights that a matmul reads in between do not count: measured additions of a residual
find it in the cache after two matmuls. The weights themselves are the first to go: matmuls that read several in turn
find them there as long as all that is read and written in between fits, and a tenth beyond it finds nothing.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from flopmeter.records import Call, Cost, Kernel, Op, Region, TensorSpec
from flopmeter.timing import constants

FEW = 16  # parts of a storage: to look at so many is faster than to find some of them
REMEMBERED = 10_000  # tensors and costs: those of a large model, whose layers repeat them


class _ByteRange(NamedTuple):
    """A part of a storage, from byte `begin` to `end`."""

    begin: int
    end: int
    filled: float = 1.0  # the share of these bytes that belongs to it: less than 1 of a slice with gaps

    @property
    def nbytes(self) -> float:
        return (self.end - self.begin) * self.filled

    def share_of(self, other: _ByteRange) -> float:
        """Which share of this part is in the other one of the same storage. Gaps that differ are taken to lie
        evenly."""
        if self == other:
            return 1.0
        within = min(self.end, other.end) - max(self.begin, other.begin)
        return max(0, within) / max(self.end - self.begin, 1) * other.filled


class _Moment(NamedTuple):
    """When a kernel was last done with a part of a storage, as two counts: the bytes that all kernels had written so
    far, and the bytes that they had fetched into the cache (touched and not found there)."""

    written: int
    fetched: float


_Seen = dict[_ByteRange, _Moment]  # the parts of one storage


class _Many(_Seen):
    """Of many parts, those that overlap another are found by their lengths, each within twice of a power of two, and
    their beginnings. Those of which nothing is in the cache any more are forgotten, whenever there are twice as many as
    before."""

    def __init__(self, parts: _Seen, cache: int) -> None:
        super().__init__(parts)
        self._cache, self._most = cache, 2 * FEW
        self._by_length: dict[int, list[_ByteRange]] = {}  # in order
        for part in parts:
            self._enter(part)

    def __setitem__(self, part: _ByteRange, now: _Moment) -> None:
        if part not in self:
            self._enter(part)
        super().__setitem__(part, now)
        if len(self) > self._most:
            for each in [each for each, moment in self.items() if _is_gone(now, self._cache, moment)]:
                del self[each]
            self._most = max(2 * len(self), FEW)

    def _enter(self, part: _ByteRange) -> None:
        bisect.insort(self._by_length.setdefault((part.end - part.begin).bit_length(), []), part)

    def __delitem__(self, part: _ByteRange) -> None:
        super().__delitem__(part)
        alike = self._by_length[(part.end - part.begin).bit_length()]
        del alike[bisect.bisect_left(alike, part)]

    def beside(self, part: _ByteRange) -> Iterator[_ByteRange]:
        """Those that overlap this part, and maybe others."""
        for bits, alike in self._by_length.items():
            first = bisect.bisect_left(alike, (part.begin - (1 << bits),))
            yield from alike[first : bisect.bisect_left(alike, (part.end + 1,))]


_TouchedBy = Callable[[Call, Cost], Sequence[tuple[int, _ByteRange]]]


def cached_bytes(kernels: Sequence[Kernel], cache: int | None) -> list[float]:
    """For each kernel in order, how many of the bytes that it reads and writes stay in a cache of this size. Bytes that
    it writes stay there if it found some of its inputs there, since the memory that it writes to was in use before too.
    Bytes that a matmul writes stay only if a kernel touched that very memory before."""
    if not cache:
        return [0.0] * len(kernels)
    now = _Moment(0, 0.0)
    seen: defaultdict[int, _Seen] = defaultdict(dict)  # by storage
    found: list[float] = []
    touched_by = functools.cache(_touched_by)  # for this trace alone: the next one's calls are others
    for kernel in kernels:
        cost = kernel.cost
        moved, written = cost.bytes, cost.bytes_written
        if cost.macs:
            still = functools.partial(_kept, moved + now.fetched, cache)
            hits = _found((*_reads(kernel), *_writes(kernel)), seen, still)
        else:
            still = functools.partial(_left, moved + now.written, cache)
            hits = _found(_reads(kernel), seen, still)
            hits += written * _share(moved, cache) if hits else 0.0
        found.append(hits)
        now = _Moment(now.written + written, now.fetched + moved - hits)
        for storage, part in _touched(kernel, touched_by):
            parts = seen[storage]
            for inner in [each for each in _beside(part, parts) if each.share_of(part) == 1.0]:
                del parts[inner]
            if len(parts) == FEW:
                parts = seen[storage] = _Many(parts, cache)
            parts[part] = now
    return found


def _beside(part: _ByteRange, parts: _Seen) -> Iterable[_ByteRange]:
    return parts.beside(part) if isinstance(parts, _Many) else parts


def _found(
    asked: Sequence[tuple[int, _ByteRange, int]], seen: defaultdict[int, _Seen], still: Callable[[_Moment], float]
) -> float:
    """How many bytes of these parts of storages are in the cache, where `still` is the share of what was seen at a
    moment that is still there."""
    hits = 0.0
    for storage, part, nbytes in asked:
        parts = seen[storage]
        hits += nbytes * min(1.0, sum(part.share_of(other) * still(parts[other]) for other in _beside(part, parts)))
    return hits


def _kept(fetched: float, cache: int, moment: _Moment) -> float:
    """The share that a matmul finds: everything while the cache holds what was fetched since, and soon nothing.
    `fetched`: bytes fetched by all kernels, that matmul included."""
    beyond = (fetched - moment.fetched) / cache - 1.0
    return min(1.0, max(0.0, 1.0 - beyond / constants.CACHE_EDGE))


def _left(written: float, cache: int, moment: _Moment) -> float:
    return _share(written - moment.written, cache)


def _is_gone(now: _Moment, cache: int, moment: _Moment) -> bool:
    return not _kept(now.fetched, cache, moment) and not _left(now.written, cache, moment)


def _share(passed: float, cache: int) -> float:
    """The share of a tensor that is still in the cache after that many bytes, this kernel's included, passed it."""
    beyond = passed / cache - constants.CACHE_SHARE_WITHOUT_MISSES
    return min(1.0, max(0.0, 1.0 - beyond / constants.CACHES_UNTIL_ALL_MISS))


def _reads(kernel: Kernel) -> Sequence[tuple[int, _ByteRange, int]]:
    """Storages and the parts of them that the kernel reads, with the bytes. Of a compiler's kernel only the sum of the
    bytes is known, which its tensors share by their sizes."""
    if len(kernel.ops) == 1 and kernel.cost.access != "fused":
        return _numbered(kernel.ops[0], _parts(kernel.cost.reads))
    parts: dict[int, list[_ByteRange]] = {}
    made: set[int] = set()
    for op in kernel.ops:
        for spec in op.call.inputs:
            if op.storages[spec.storage] not in made:
                parts.setdefault(op.storages[spec.storage], []).append(_extent(spec))
        made |= op.makes - parts.keys()
    around = {storage: own[0] if len(set(own)) == 1 else _around(own) for storage, own in parts.items()}
    per_byte = kernel.cost.bytes_read / max(sum(part.nbytes for part in around.values()), 1)
    return [(storage, part, round(part.nbytes * per_byte)) for storage, part in around.items()]


def _around(parts: Sequence[_ByteRange]) -> _ByteRange:
    return _ByteRange(min(part.begin for part in parts), max(part.end for part in parts))


def _writes(kernel: Kernel) -> Sequence[tuple[int, _ByteRange, int]]:
    """Storages and the parts of them that the kernel of one op writes, with the bytes."""
    return _numbered(kernel.ops[0], _parts(kernel.cost.writes)) if len(kernel.ops) == 1 else []


def _numbered(op: Op, parts: Sequence[tuple[int, _ByteRange, int]]) -> Sequence[tuple[int, _ByteRange, int]]:
    """The parts with the storages' numbers in the trace, instead of those in the call."""
    storages = op.storages
    return [(storages[place], part, nbytes) for place, part, nbytes in parts]


@functools.lru_cache(REMEMBERED)
def _parts(regions: Sequence[Region]) -> Sequence[tuple[int, _ByteRange, int]]:
    known = ((spec, nbytes) for spec, nbytes in regions if spec is not None and spec.storage >= 0)
    return [(spec.storage, _extent(spec), nbytes) for spec, nbytes in known]


def _touched(kernel: Kernel, touched_by: _TouchedBy) -> Iterator[tuple[int, _ByteRange]]:
    """What the kernel leaves in the cache."""
    for op in kernel.ops:
        for place, part in touched_by(op.call, kernel.cost):
            yield op.storages[place], part


def _touched_by(call: Call, cost: Cost) -> Sequence[tuple[int, _ByteRange]]:
    """The tensors of the call that the cost names, or all if it names none of some bytes. Of a tensor of which the
    kernel touches a part, such as one expert's weights, it is not known which."""
    regions = (*cost.reads, *cost.writes)
    partly = {region.spec for region in regions if region.spec is not None and region.nbytes < region.spec.nbytes}
    named = {region.spec for region in regions}
    is_all = not named or None in named
    specs = (spec for spec in (*call.inputs, *call.outputs) if spec not in partly and (is_all or spec in named))
    return [(spec.storage, _extent(spec)) for spec in specs]


@functools.lru_cache(REMEMBERED)
def _extent(spec: TensorSpec) -> _ByteRange:
    if not spec.is_strided:
        return _ByteRange(0, spec.nbytes)
    begin, item = spec.offset * spec.dtype.itemsize, spec.dtype.itemsize
    if not spec.numel:
        return _ByteRange(begin, begin)
    reach = sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True)) + 1
    apart = math.prod(size for size, stride in zip(spec.shape, spec.stride, strict=True) if stride)
    return _ByteRange(begin, begin + reach * item, min(1.0, apart / reach))
