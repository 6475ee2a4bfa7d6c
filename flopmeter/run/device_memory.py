"""The memory of the device while a program runs: PyTorch's caching allocator over the storages that the meter sees, and
what each step leaves there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from flopmeter.device.hardware import Hardware
from flopmeter.records import Trace
from flopmeter.timing.allocator import CachingAllocator, OutOfMemoryError, round_up
from flopmeter.timing.peak_memory import usable_bytes, usable_bytes_if_known
from flopmeter.trace import streams
from flopmeter.trace.storages import StorageListener

OnOutOfMemory = Literal["raise", "report"]
GIB, MIB = 2**30, 2**20


class DeviceMemory(StorageListener):
    """Serves each storage from the allocator's model (`allocator.py`), as the device would.

    on_out_of_memory: 'raise' gives the program torch.OutOfMemoryError, as on the device; 'report' goes on without
        limit, and `overflow` says so.
    kept_scratch: the bytes that ops have asked for so far and keep for themselves (scratch.py).
    now: the number of ops so far.
    """

    def __init__(
        self,
        hardware: Hardware,
        on_out_of_memory: OnOutOfMemory,
        kept_scratch: Callable[[], int] = lambda: 0,
        now: Callable[[], int] = lambda: 0,
    ) -> None:
        self.hardware, self._raises, self._kept_scratch = hardware, on_out_of_memory == "raise", kept_scratch
        self.usable_bytes = usable_bytes_if_known(hardware)
        self._allocator = CachingAllocator(self.usable_bytes)
        self._now = now
        self._held: dict[int, Any] = {}
        self._allocated = self._peak_allocated = 0  # bytes in blocks of the allocator
        self.allocations = 0
        self.fraction = 1.0  # of the device's memory, that the process may take
        self.overflow: str | None = None  # what did not fit, in words
        self.given_back: list[tuple[int, int]] = []  # how many ops had run, and bytes, at each empty_cache()

    @property
    def allocated(self) -> int:
        return self._allocated + self._kept_scratch()

    @property
    def peak_allocated(self) -> int:
        return self._peak_allocated + self._kept_scratch()

    @property
    def reserved(self) -> int:
        return self._allocator.reserved_bytes + self._kept_scratch()

    @property
    def peak_reserved(self) -> int:
        return self._allocator.peak_reserved_bytes + self._kept_scratch()

    def reset_peaks(self) -> None:
        self._peak_allocated = self._allocated
        self._allocator.peak_reserved_bytes = self._allocator.reserved_bytes

    def set_fraction(self, fraction: float, device: Any = None) -> None:
        self.fraction = fraction
        if self.usable_bytes is not None:
            self._allocator.capacity = min(self.usable_bytes, int(fraction * (self.hardware.memory_bytes or 0)))

    def give_back(self) -> None:
        """torch.cuda.empty_cache()."""
        before = self._allocator.reserved_bytes
        self._allocator.give_back()
        self.given_back.append((self._now(), before - self._allocator.reserved_bytes))

    def free_and_total(self) -> tuple[int, int]:
        """Bytes, as torch.cuda.mem_get_info tells them. Raises HardwareError where the capacity is unknown."""
        return max(usable_bytes(self.hardware) - self.reserved, 0), self.hardware.memory_bytes or 0

    def summary(self) -> str:
        return (
            f"allocated {_size(self.allocated)} (peak {_size(self.peak_allocated)}), reserved {_size(self.reserved)} "
            f"(peak {_size(self.peak_reserved)}) by flopmeter's model of {self.hardware.title}"
        )

    def on_birth(self, number: int, device: str, nbytes: int) -> None:
        """Raises torch.OutOfMemoryError where the device has no room."""
        if device != "meta" or not nbytes:
            return
        try:
            piece = self._allocator.allocate(nbytes, streams.current())
        except OutOfMemoryError:
            text = self._no_room(nbytes)
            if self._raises:
                raise torch.OutOfMemoryError(text) from None
            self.overflow = self.overflow or text
            self._allocator.capacity = None
            piece = self._allocator.allocate(nbytes, streams.current())
        self._held[number] = piece
        self._allocated += piece.nbytes
        self.allocations += 1
        self._peak_allocated = max(self._peak_allocated, self._allocated)

    def on_death(self, number: int) -> None:
        piece = self._held.pop(number, None)
        if piece is not None:
            self._allocated -= piece.nbytes
            self._allocator.free(piece)

    def _no_room(self, nbytes: int) -> str:
        total, usable = self.hardware.memory_bytes or 0, self.usable_bytes or 0
        return (
            f"CUDA out of memory. Tried to allocate {_size(round_up(nbytes, 512))}. GPU 0 has a total capacity of "
            f"{_size(total)} of which {_size(max(usable - self.reserved, 0))} is free. Of the allocated memory "
            f"{_size(self.allocated)} is allocated by PyTorch, and {_size(self.reserved - self.allocated)} is reserved "
            f"by PyTorch but unallocated. (flopmeter's model of {self.hardware.title})"
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:.2f} MiB"


def grown_bytes(trace: Trace, step: range) -> int:
    """What each step leaves behind, in bytes: made in it, alive when the step after the next one has ended. Of the two
    steps before this one that which leaves less, since what is made once grows no more. Weights, their gradients and
    what optimizers keep do not count."""
    size = len(step)
    return min(
        _left(trace, range(step.start - back * size, step.start - (back - 1) * size), step.stop) for back in (1, 2)
    )


def _left(trace: Trace, made_in: range, end: int) -> int:
    """What these ops made and is alive after op `end` - 1."""
    return sum(
        storage.nbytes
        for storage in trace.storages
        if storage.born in made_in
        and storage.role is None
        and storage.device == trace.device
        and (storage.died is None or storage.died >= end)
    )
