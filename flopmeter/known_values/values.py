"""The known values: one CPU storage for each meta storage whose content is known.

The value of a tensor is that storage, read with the tensor's dtype, size, strides and offset. So views, detach() and
dtype views need no rule, and all views see a write through one of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from flopmeter.records.memory_format import torch_strides
from flopmeter.torch_names.private import no_dispatch_modes, no_function_modes, no_transforms

# Larger values are not kept: 2^20 int64 are 8 MB, and an op on them takes 1 ms on the CPU. Masks [batch, 1, 512, 512]
# fit, and no program was seen to read a larger one.
MAX_ELEMENTS = 1 << 20
# A copy of what is known is kept up to here, as the overlapping windows of a batch of time series are. It is made when
# the program first asks for it. At most 128 MB, and some 50 ms on the CPU.
MAX_COPIED_ELEMENTS = 1 << 24
# The limit for integers and bools if the routing is assumed: masks [tokens, choices, experts] pick each expert's
# tokens. 1,000 tokens that choose 12 of 768 experts make 2^23. At most 128 MB, and some 50 ms for an op on the CPU.
MAX_ROUTED_ELEMENTS = 1 << 24
# Stand-ins of unknown integers are kept apart up to this size: counts and lengths of a batch, tokens that a draft
# proposes. An op on them takes microseconds on the CPU.
MAX_COUNTS = 1 << 12
# From here on the C library asks the system for memory of its own, which is zero, and takes none until it is written.
PAGED_BYTES = 32 * 1024 * 1024


def is_small(tensor: Tensor, most: int = MAX_ELEMENTS) -> bool:
    """Whether a value of the tensor's dtype and size is worth keeping.

    Complex values are not. Programs ask only for small tensors of floats (positions, sampling offsets, a mask's sum).
    """
    dtype = tensor.dtype
    if dtype.is_complex:
        return False
    return tensor.numel() <= (MAX_ELEMENTS if dtype.is_floating_point else most)


def is_discrete(tensor: Tensor) -> bool:
    """Whether the tensor holds integers or bools, which count, select and mask."""
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)


def is_count(tensor: Tensor) -> bool:
    """Whether the tensor holds few integers, which count or name places."""
    return is_discrete(tensor) and tensor.dtype is not torch.bool and tensor.numel() <= MAX_COUNTS


def is_weight(tensor: Tensor) -> bool:
    return tensor.requires_grad or isinstance(tensor, Parameter)


def address(tensor: Tensor) -> int:
    """The address of the tensor's storage; 0 for a tensor without a storage, such as a sparse one."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


@contextmanager
def no_modes() -> Iterator[None]:
    """Ops in this context are the meter's own: no mode and no transform of torch.func sees them; autograd is off."""
    with no_dispatch_modes(), no_function_modes(), no_transforms(), torch.no_grad():
        yield


class KnownStorage(weakref.ref[Any]):
    """The value of one meta storage. It is a weak reference: it does not keep the storage alive."""

    __slots__ = ("address", "is_blank", "is_stand_in", "is_uniform", "make", "memory", "version")

    def __new__(cls, storage: Any, memory: Any, callback: Any = None, version: int | None = None) -> KnownStorage:
        return super().__new__(cls, storage, callback)

    def __init__(self, storage: Any, memory: Any, callback: Any = None, version: int | None = None):
        self.address: int = storage._cdata
        self.memory: torch.UntypedStorage = memory
        self.make: Callable[[], torch.UntypedStorage] | None = None  # makes the memory when it is first read
        # For a value from outside of the meter: the tensor's version counter when the value was read.
        self.version = version
        self.is_uniform = False  # the memory holds one element, and every element of the storage has its value
        self.is_blank = False  # made by torch.empty and not written to yet
        self.is_stand_in = False  # unknown: the memory holds what the program gets if it reads it


class Values:
    """The known values, by storage address."""

    def __init__(self) -> None:
        self.cells: dict[int, KnownStorage] = {}
        self._unread: dict[int, Callable[[], object]] = {}  # by address: called when the value is first read

    def knows(self, tensor: Tensor) -> bool:
        """Whether the tensor's value can be read. That of a CPU tensor can; that of a weight is dropped here."""
        if not tensor.is_meta:
            return tensor.device.type == "cpu"
        cell = self.cells.get(address(tensor))
        if cell is None or cell.is_stand_in:
            return False
        if is_weight(tensor) or (cell.version is not None and not self._adopt(cell, tensor)):
            del self.cells[cell.address]
            return False
        return not cell.is_uniform or cell.memory.nbytes() == tensor.element_size()  # a view of another type has others

    def has_stand_in(self, tensor: Tensor) -> bool:
        """Whether the value is unknown, and something stands in for it."""
        cell = self.cells.get(address(tensor)) if tensor.is_meta else None
        return cell is not None and cell.is_stand_in

    def mark_as_stand_in(self, tensor: Tensor) -> None:
        """Marks what is kept of the tensor as a stand-in, not its value."""
        if (cell := self.cells.get(address(tensor))) is not None:
            cell.is_stand_in = True

    def read(self, tensor: Tensor) -> Tensor:
        """A CPU tensor that aliases the value: writing to it changes the value."""
        if not tensor.is_meta:
            return tensor
        place = address(tensor)
        if self._unread and place in self._unread:
            self._unread.pop(place)()
        cell = self.cells[place]
        if cell.make is not None:
            cell.memory, cell.make = cell.make(), None
        if cell.is_uniform:
            return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(cell.memory, 0, (), ()).expand(tensor.shape)
        return _like(tensor, cell.memory)

    def tell_of_read(self, tensor: Tensor, listener: Callable[[], object]) -> None:
        """Calls the listener when the tensor's value is read for the first time."""
        if (place := address(tensor)) in self.cells:
            self._unread[place] = listener

    def write(self, tensor: Tensor, value: Tensor) -> None:
        """Set the value of `tensor`, which must span its storage. The memory of `value` may be used for it."""
        storage = tensor.untyped_storage()
        memory = value.untyped_storage()
        same_layout = torch_strides(value) == torch_strides(tensor) and value.dtype == tensor.dtype
        if not same_layout or value.storage_offset() or memory.nbytes() != storage.nbytes():
            memory = torch.UntypedStorage(storage.nbytes(), device="cpu")
            _like(tensor, memory).copy_(value)
        self.cells[storage._cdata] = KnownStorage(storage, memory, self._on_death)
        self._unread.pop(storage._cdata, None)

    def spread(self, tensor: Tensor, value: Tensor) -> None:
        """Set all elements of `tensor`, which must span its storage, to the single element of `value`."""
        storage = tensor.untyped_storage()
        cell = KnownStorage(storage, value.to(tensor.dtype).clone().untyped_storage(), self._on_death)
        cell.is_uniform = True
        self.cells[cell.address] = cell

    def defer(self, tensor: Tensor, copy: Callable[[Tensor], Tensor]) -> None:
        """Set the value of `tensor`, which must span its storage, when it is first read: `copy` is passed a blank value
        to write it to."""
        storage = tensor.untyped_storage()
        cell = KnownStorage(storage, None, self._on_death)
        size, strides, dtype = tensor.size(), torch_strides(tensor), tensor.dtype

        def make() -> torch.UntypedStorage:
            return copy(torch.empty_strided(size, strides, dtype=dtype, device="cpu")).untyped_storage()

        cell.make = make
        self.cells[cell.address] = cell
        self._unread.pop(cell.address, None)

    def keep_each(self, tensor: Tensor) -> None:
        """The value of a uniform tensor, of which a part is about to be written, is kept element by element, or is
        unknown if that is too much."""
        storage = tensor.untyped_storage()
        cell = self.cells[storage._cdata]
        whole = torch.empty(0, dtype=tensor.dtype, device="meta").set_(storage)
        if not is_small(whole):
            self.forget(tensor)
            return
        one = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(cell.memory, 0, (), ())
        cell.memory, cell.is_uniform = one.repeat(len(whole)).untyped_storage(), False

    def is_uniform(self, tensor: Tensor) -> bool:
        """Whether the value is kept as one element for the whole tensor."""
        cell = self.cells.get(address(tensor))
        return cell is not None and cell.is_uniform

    def is_blank(self, tensor: Tensor) -> bool:
        """Whether the tensor was not written to since torch.empty made it, so that its value means nothing."""
        cell = self.cells.get(address(tensor))
        return cell is not None and cell.is_blank

    def note_write(self, tensor: Tensor) -> None:
        """The program wrote to a known tensor."""
        if (cell := self.cells.get(address(tensor))) is not None:
            cell.is_blank = False

    def forget(self, tensor: Tensor) -> None:
        self.cells.pop(address(tensor), None)

    def bring(self, twin: KnownStorage) -> None:
        """Make the value of a twin known here. Its first use checks that the twin was not written to since."""
        storage = twin()
        if storage is not None and twin.address not in self.cells:
            self.cells[twin.address] = KnownStorage(storage, twin.memory, self._on_death, twin.version)

    def _adopt(self, cell: KnownStorage, tensor: Tensor) -> bool:
        """Copy the value of a twin, unless the tensor was written to since. Says whether it did."""
        if not tensor.is_inference() and tensor._version != cell.version:
            return False
        with no_modes():  # a hook of a module may ask, which a mode would see
            cell.memory = cell.memory.clone()
        cell.version = None
        return True

    def _on_death(self, cell: KnownStorage) -> None:
        if self.cells.get(cell.address) is cell:
            del self.cells[cell.address]
            self._unread.pop(cell.address, None)


def spans_storage(tensor: Tensor) -> bool:
    """Whether each element of the storage is one element of the tensor."""
    if tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes() or tensor.storage_offset():
        return False
    expected = 1  # strides of a tensor that is dense in some order of its dimensions
    for stride, size in sorted(zip(torch_strides(tensor), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return not tensor.numel()
        expected *= size
    return True


def _like(tensor: Tensor, memory: torch.UntypedStorage) -> Tensor:
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(memory, tensor.storage_offset(), tensor.size(), torch_strides(tensor))
