"""Tensors that are on no device: those of a model that a program makes on the device meta before its weights arrive.

Where meta stands for a GPU, these go on saying meta. They take no memory there, and ops on them launch nothing.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from flopmeter.known_values.values import address
from flopmeter.records.tensors import tensors_in


class MarkedStorages:
    """Storages by address, as long as they live; it keeps none alive."""

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def add(self, tensor: Tensor | torch.UntypedStorage) -> None:
        storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else tensor
        place = storage._cdata
        self._storages[place] = weakref.ref(storage, lambda _: self._storages.pop(place, None))

    def has(self, tensor: Tensor) -> bool:
        return bool(self._storages) and address(tensor) in self._storages

    def has_storage(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._storages


class ShapesOnly(MarkedStorages):
    """The storages of tensors that are shapes only."""

    def covers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the op's result is shapes only too: not if it asks for a device, or is given another storage."""
        if not self._storages or kwargs.get("device") is not None:
            return False
        if any(isinstance(arg, torch.UntypedStorage) and not self.has_storage(arg) for arg in args):
            return False
        tensors = list(tensors_in((args, kwargs)))
        return bool(tensors) and all(map(self.has, tensors))

    def run(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self.add(tensor)
        return result
