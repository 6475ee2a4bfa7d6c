"""PyTorch's caching allocator for CUDA: how much memory it takes from the device.

It follows c10/cuda/CUDACachingAllocator.cpp. Requests are rounded up. Small and large ones of each stream have a pool:
what one stream has freed serves no other. The free block that fits best is split, and free neighbours are merged.
Memory comes from the device in segments, which are kept: only when the device has none left are unused segments given
back. With expandable segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True) a pool is one segment that grows page
by page, and any free page can be given back.
"""

from __future__ import annotations

import os
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import NamedTuple, Protocol

from flopmeter.records import DEFAULT_STREAM

MIB = 2**20
BLOCK_BYTES = 512  # kMinBlockSize: every size is a multiple
SMALL_BYTES = MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: segments of the small pool
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer: segments for large requests ...
OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: ... below this size; from it on each gets its own ...
SEGMENT_STEP_BYTES = 2 * MIB  # kRoundLarge: ... rounded to this
SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class OutOfMemoryError(Exception):
    """The device has no room for the segment that is needed."""


class Lifetime(Protocol):
    """Memory that is needed from op `born` until before op `died`."""

    @property
    def nbytes(self) -> int: ...
    @property
    def born(self) -> int: ...
    @property
    def died(self) -> int | None: ...
    @property
    def stream(self) -> int:
        """The stream that was current when the memory was asked for."""


def round_up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


def expands_segments() -> bool:
    """Whether the environment asks for expandable segments, as torch reads it."""
    return any("expandable_segments:true" in os.environ.get(name, "").lower() for name in SETTINGS)


def serve(lifetimes: Iterable[Lifetime], steps: int, capacity: int | None = None) -> int:
    """The most bytes of the device that the allocator holds while it serves the lifetimes in order.

    At each op memory is freed first and then allocated. Raises OutOfMemoryError if `capacity` bytes are not enough.
    """
    allocator = CachingAllocator(capacity)
    needed = [lifetime for lifetime in lifetimes if lifetime.nbytes]
    born: dict[int, list[int]] = {}
    died: dict[int | None, list[int]] = {}
    for number, lifetime in enumerate(needed):
        born.setdefault(max(lifetime.born, 0), []).append(number)
        died.setdefault(lifetime.died, []).append(number)
    held: dict[int, Piece] = {}
    for moment in range(steps + 1):
        for number in died.get(moment, ()):
            if number in held:
                allocator.free(held.pop(number))
        for number in born.get(moment, ()):
            held[number] = allocator.allocate(needed[number].nbytes, needed[number].stream)
    return allocator.peak_reserved_bytes


class Pool(NamedTuple):
    is_small: bool
    stream: int


_pool = cache(Pool)


@dataclass(slots=True, eq=False)
class Piece:
    """A part of a segment, used or free, between its neighbours."""

    nbytes: int
    address: int
    pool: Pool
    before: Piece | None = None
    after: Piece | None = None
    is_free: bool = field(init=False)


class CachingAllocator:
    """Serves requests from segments of a device with `capacity` bytes (None: without limit)."""

    def __init__(self, capacity: int | None = None):
        self.capacity = capacity
        self._expands = expands_segments()
        self._last: dict[Pool, Piece] = {}  # of each expandable segment
        self._used_bytes = 0
        self._next_address = 0
        self._free: defaultdict[Pool, list[tuple[int, int, Piece]]] = defaultdict(list)  # by size, then address
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0

    def allocate(self, nbytes: int, stream: int = DEFAULT_STREAM) -> Piece:
        """A piece of at least `nbytes`. Raises OutOfMemoryError."""
        size = round_up(nbytes, BLOCK_BYTES)
        pool = _pool(size <= SMALL_BYTES, stream)
        piece = self._best_fit(size, pool)
        if piece is None:
            piece = self._expand(size, pool) if self._expands else self._new_segment(size, pool)
        rest = piece.nbytes - size
        if rest >= BLOCK_BYTES if pool.is_small or self._expands else rest > SMALL_BYTES:
            self._split(piece, size)
        piece.is_free = False
        self._used_bytes += piece.nbytes
        if self._used_bytes > self.reserved_bytes:  # pages that were given back
            self._reserve(self._used_bytes - self.reserved_bytes)
        return piece

    def free(self, piece: Piece) -> None:
        """Take the piece back and merge it with its free neighbours."""
        self._used_bytes -= piece.nbytes
        if piece.after is not None and piece.after.is_free:
            self._forget(piece.after)
            self._merge(piece, piece.after)
        if piece.before is not None and piece.before.is_free:
            piece, freed = piece.before, piece
            self._forget(piece)
            self._merge(piece, freed)
        self._offer(piece)

    def _best_fit(self, size: int, pool: Pool) -> Piece | None:
        free = self._free[pool]
        index = bisect_left(free, (size, -1))
        if self._expands and index + 1 < len(free) and free[index][2] is self._last.get(pool):
            index += 1  # the end of an expandable segment counts as large as it can become
        return free.pop(index)[2] if index < len(free) else None

    def _expand(self, size: int, pool: Pool) -> Piece:
        """The end of the pool's segment, with as many new pages as it takes."""
        last = self._last.get(pool)
        end = last if last is not None and last.is_free else None
        if end is not None:
            self._forget(end)
        lacking = round_up(
            size - (end.nbytes if end else 0), SMALL_SEGMENT_BYTES if pool.is_small else LARGE_SEGMENT_BYTES
        )
        self._reserve(lacking)
        new = Piece(lacking, self._next_address, pool, before=last)
        self._next_address += lacking
        if last is not None:
            last.after = new
        self._last[pool] = new
        if end is not None:
            self._merge(end, new)
        return end or new

    def _new_segment(self, size: int, pool: Pool) -> Piece:
        if pool.is_small:
            nbytes = SMALL_SEGMENT_BYTES
        elif size < OWN_SEGMENT_BYTES:
            nbytes = LARGE_SEGMENT_BYTES
        else:
            nbytes = round_up(size, SEGMENT_STEP_BYTES)
        self._reserve(nbytes)
        piece = Piece(nbytes, self._next_address, pool)
        self._next_address += nbytes
        return piece

    def _reserve(self, nbytes: int) -> None:
        """Reserves that many more bytes of the device."""
        if self.capacity is not None and self.reserved_bytes + nbytes > self.capacity:
            self.give_back()
            if self.reserved_bytes + nbytes > self.capacity:
                raise OutOfMemoryError(f"{nbytes} bytes more than the {self.reserved_bytes} in use are not there")
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def give_back(self) -> None:
        """Give the device those segments back that are completely free; of expandable ones, all that is free."""
        if self._expands:
            self.reserved_bytes = self._used_bytes
            return
        for free in self._free.values():
            unused = [entry for entry in free if entry[2].before is None and entry[2].after is None]
            self.reserved_bytes -= sum(size for size, _, _ in unused)
            free[:] = [entry for entry in free if entry[2].before is not None or entry[2].after is not None]

    def _split(self, piece: Piece, size: int) -> None:
        rest = Piece(piece.nbytes - size, piece.address + size, piece.pool, before=piece, after=piece.after)
        if piece.after is not None:
            piece.after.before = rest
        elif self._last.get(piece.pool) is piece:
            self._last[piece.pool] = rest
        piece.after, piece.nbytes = rest, size
        self._offer(rest)

    def _offer(self, piece: Piece) -> None:
        piece.is_free = True
        insort(self._free[piece.pool], (piece.nbytes, piece.address, piece))

    def _forget(self, piece: Piece) -> None:
        free = self._free[piece.pool]
        del free[bisect_left(free, (piece.nbytes, piece.address))]

    def _merge(self, piece: Piece, following: Piece) -> None:
        piece.nbytes += following.nbytes
        piece.after = following.after
        if following.after is not None:
            following.after.before = piece
        if self._last.get(piece.pool) is following:
            self._last[piece.pool] = piece
