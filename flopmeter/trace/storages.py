"""The storages of the program: numbered when first seen, and watched by weak references, which keep none alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from flopmeter.records import BEFORE, Resize, Storage, StorageRole, Trace
from flopmeter.trace.shapes_only import ShapesOnly
from flopmeter.trace.tensor_specs import storage_of

NOWHERE = "nowhere"  # the device of a storage that is a shape only


class StorageListener:
    """Is called while the program runs, for each storage that it gets and gives back. This one does nothing."""

    def on_birth(self, number: int, device: str, nbytes: int) -> None:
        """A storage was seen for the first time, or has another size now. May raise, and then the op fails."""

    def on_death(self, number: int) -> None:
        """The storage was freed, or is about to have another size."""


class Storages:
    """Appends to a trace each storage when it is first seen, and each change of size.

    Time is the number of ops so far. `is_inside`: whether a module or a compiled function runs.
    """

    def __init__(
        self, trace: Trace, listener: StorageListener, shapes_only: ShapesOnly, is_inside: Callable[[], bool]
    ) -> None:
        self._ops, self._found, self._resizes = trace.ops, trace.storages, trace.resizes
        self._listener, self._shapes_only, self._is_inside = listener, shapes_only, is_inside
        self._alive: dict[int, _Reference] = {}  # by address
        self._without: int | None = None  # the number that all tensors without a storage share

    def number(self, tensor: Tensor, born: int, addresses: list[int]) -> int:
        """The number of the tensor's storage in the trace; its address is appended to `addresses`. A storage that was
        not seen before gets `born` as the time of its birth."""
        storage: torch.UntypedStorage | None
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            storage = storage_of(tensor)
            if storage is None:
                return self._no_storage(tensor, born)
        address = storage._cdata
        addresses.append(address)
        known = self._alive.get(address)
        if known is not None:
            return known.number
        return self._new(storage, self._device_of(tensor), born)

    def _device_of(self, tensor: Tensor) -> str:
        """Asking for the device is slow. A FakeTensor's storage is on meta, so the tensor is asked."""
        if self._shapes_only.has(tensor):
            return NOWHERE
        return "meta" if tensor.is_meta else tensor.device.type

    def _new(self, storage: torch.UntypedStorage, device: str, born: int) -> int:
        """The number of a storage that was not seen before."""
        number, address = len(self._found), storage._cdata
        self._found.append(Storage(_nbytes(storage), device, born))
        reference = self._alive[address] = _Reference(storage, self._on_death)
        reference.address, reference.number = address, number
        self._listener.on_birth(number, device, self._found[number].nbytes)
        return number

    def note(self, tensor: Tensor, role: StorageRole) -> None:
        """Set the role of the tensor's storage, unless it has one."""
        self.note_number(self.number(tensor, BEFORE, []), role)

    def note_number(self, number: int, role: StorageRole) -> None:
        """Set the role of the storage with that number, unless it has one that was noted. (Copies of weights are told
        from what ran so far, and may turn out to be a module's.)"""
        storage = self._found[number]
        if storage.role in (None, "copies of weights"):
            storage.role = role

    def note_trained(self, tensor: Tensor) -> None:
        self._found[self.number(tensor, BEFORE, [])].is_trained = True

    def note_new(self, tensor: Tensor) -> None:
        """The tensor's storage is new: the next op gave birth to it."""
        self._found[self.number(tensor, BEFORE, [])].born = len(self._ops)

    def note_numbers(self, tensor: Tensor) -> None:
        """The tensor of the host was made of numbers just now."""
        self.note_new(tensor)
        self._found[self.number(tensor, BEFORE, [])].is_of_numbers = True

    def note_sizes(self, tensors: Iterable[Tensor]) -> None:
        """The op that runs may have resized these."""
        for tensor in tensors:
            number = self.number(tensor, BEFORE, [])
            nbytes = 0 if number == self._without else _nbytes(tensor.untyped_storage())
            if nbytes != self._size(number):
                self._note_resize(Resize(len(self._ops), number, nbytes))

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> None:
        """The program resized a storage between ops: FSDP frees and gathers parameters in this way."""
        known = self._alive.get(storage._cdata)
        number = self._new(storage, storage.device.type, BEFORE) if known is None else known.number
        size = self._size(number)
        if nbytes == size:
            return
        # A storage that shrinks keeps its old size until the end of the previous op.
        self._note_resize(Resize(len(self._ops) - (nbytes < size), number, nbytes))
        self._found[number].role = "parameters"

    def outlive(self) -> None:
        """End of the trace: storages that are freed from now on count as alive at its end."""
        self._alive.clear()

    def _note_resize(self, resize: Resize) -> None:
        self._resizes.append(resize)
        self._listener.on_death(resize.storage)
        self._listener.on_birth(resize.storage, self._found[resize.storage].device, resize.nbytes)

    def _size(self, number: int) -> int:
        """The size of the storage now, in bytes."""
        sizes = (resize.nbytes for resize in reversed(self._resizes) if resize.storage == number)
        return next(sizes, self._found[number].nbytes)

    def _no_storage(self, tensor: Tensor, born: int) -> int:
        """All tensors without a storage share one number, that of a storage of size 0."""
        if self._without is None:
            self._without = len(self._found)
            self._found.append(Storage(0, tensor.device.type, born))
        return self._without

    def _on_death(self, reference: _Reference) -> None:
        self._alive.pop(reference.address, None)
        storage = self._found[reference.number]
        storage.died, storage.died_inside = len(self._ops), self._is_inside()
        self._listener.on_death(reference.number)


class _Reference(weakref.ref[Any]):
    """A weak reference to a storage that knows the storage's address and number."""

    __slots__ = ("address", "number")
    address: int
    number: int


def _nbytes(storage: torch.UntypedStorage) -> int:
    nbytes: Any = storage.nbytes()
    if type(nbytes) is int:
        return nbytes
    return int(nbytes.node.hint) if nbytes.node.has_hint() else 0  # 0: the op's record will raise
