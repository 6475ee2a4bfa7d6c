"""What kernels find in the L2 cache: tensors that the kernels just before them wrote or read.

Written bytes push older ones out. Weights that a matmul reads in between do not count: measured additions of a residual
find it in the cache after two matmuls. The weights themselves are the first to go: matmuls that read several in turn
find them there as long as all that is read and written in between fits (with hardly anything between all and nothing,
on the L40S of [aiconfigurator]).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flopmeter.records import Kernel, Op, Region
from flopmeter.timing import constants


class _Seen(NamedTuple):
    """The moment when a kernel was last done with a storage, as two counts: the bytes that all kernels had written so
    far, and the bytes that they had fetched into the cache (touched and not found there)."""

    written: int
    fetched: float


def cached_bytes(kernels: Sequence[Kernel], cache: int | None) -> list[float]:
    """For each kernel in order, how many of the bytes that it reads and writes stay in a cache of this size. Bytes that
    it writes stay there if it found some of its inputs there, since the memory that it writes to was in use before too.
    Bytes that a matmul writes stay only if a kernel touched that very storage before."""
    if not cache:
        return [0.0] * len(kernels)
    now = _Seen(0, 0.0)
    seen: dict[int, _Seen] = {}  # by storage
    found: list[float] = []
    for kernel in kernels:
        moved, written = kernel.cost.bytes, kernel.cost.bytes_written
        if kernel.cost.macs:
            hits: float = sum(
                nbytes
                for storage, nbytes in (*_reads(kernel), *_writes(kernel))
                if storage in seen and moved + now.fetched - seen[storage].fetched <= cache
            )
        else:
            hits = sum(
                nbytes * _share(moved + now.written - seen[storage].written, cache)
                for storage, nbytes in _reads(kernel)
                if storage in seen
            )
            hits += written * _share(moved, cache) if hits else 0.0
        found.append(hits)
        now = _Seen(now.written + written, now.fetched + moved - hits)
        seen.update((storage, now) for op in kernel.ops for storage in op.storages)
    return found


def _share(passed: int, cache: int) -> float:
    """The share of a tensor that is still in the cache after so many bytes, this kernel's included, passed it."""
    beyond = passed / cache - constants.CACHE_SHARE_WITHOUT_MISSES
    return min(1.0, max(0.0, 1.0 - beyond / constants.CACHES_UNTIL_ALL_MISS))


def _writes(kernel: Kernel) -> Iterator[tuple[int, int]]:
    """Storages that the kernel of one op writes, with the bytes."""
    if len(kernel.ops) == 1:
        yield from _in_storages(kernel.ops[0], kernel.cost.writes)


def _reads(kernel: Kernel) -> Iterator[tuple[int, int]]:
    """Storages that the kernel reads, with the bytes. For a fused kernel only the sum of the bytes is known."""
    if len(kernel.ops) == 1:
        yield from _in_storages(kernel.ops[0], kernel.cost.reads)
        return
    storages = {op.storages[spec.storage] for op in kernel.ops for spec in op.call.inputs}
    for storage in storages:
        yield storage, kernel.cost.bytes_read // len(storages)


def _in_storages(op: Op, regions: Sequence[Region]) -> Iterator[tuple[int, int]]:
    for spec, nbytes in regions:
        if spec is not None and spec.storage >= 0:
            yield op.storages[spec.storage], nbytes
