"""Types of torch that take the device named cuda: torch.device, torch.Generator, torch.cuda.FloatTensor and its kin.

Works around: a torch without an accelerator, whose types refuse one.
Until: tensors without memory can call their device cuda.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from flopmeter.run.patches import Patch
from flopmeter.torch_names.around import around

META = torch.device("meta")
_true_generator: Any = torch.Generator
_true_device: Any = torch.device


class Names(Protocol):
    """The device named cuda."""

    name: torch.device

    def real(self, value: Any) -> Any:
        """META for the name of the device."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether the tensor is on it."""


def _in_place_of(true: Any) -> Any:
    """A metaclass for a class that replaces `true`: instances of `true` are its own, and the two are equal."""

    class InPlaceOf(type(true)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, true)

        def __eq__(cls, other: Any) -> bool:
            return other is true or other is cls

        def __hash__(cls) -> int:
            return hash(true)

    return InPlaceOf


def true_type(annotation: Any) -> Any:
    """torch's own type where that is annotated by what stands in for it."""
    is_type = isinstance(annotation, type)
    return next((true for true in (_true_device, _true_generator) if is_type and annotation == true), annotation)


def device_type() -> type:
    """torch.device, where an index alone means cuda. It makes torch's own devices."""

    class device(metaclass=_in_place_of(_true_device)):  # type: ignore[metaclass]  # noqa: N801 - torch's name
        __module__, __qualname__ = "torch", "device"  # as pickle looks for it

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and type(args[0]) is int and not kwargs:
                args = ("cuda", *args)
            return _true_device(*args, **kwargs)

    return device


def generator_type(cuda: Names) -> type:
    """torch.Generator, which also takes the device named cuda. Ops on meta take such a generator and draw nothing."""

    class NamedGenerator(_true_generator, metaclass=_in_place_of(_true_generator)):  # type: ignore[metaclass,misc]
        def __new__(cls, device: Any = "cpu") -> Any:
            is_named = cuda.real(device) is META
            made = _true_generator.__new__(cls, "cpu" if is_named else device)
            made.is_named = is_named
            return made

        def __init__(self, device: Any = "cpu") -> None: ...

        @property
        def device(self) -> torch.device:
            return cuda.name if self.is_named else torch.device("cpu")

    return NamedGenerator


class LegacyType:
    """torch.cuda.FloatTensor and its kin: makes tensors of a dtype from sizes or data, and tells which are of it."""

    def __init__(self, name: str, dtype: torch.dtype, cuda: Names) -> None:
        self.__name__, self.dtype, self._cuda = name, dtype, cuda

    def __instancecheck__(self, value: Any) -> bool:
        if not isinstance(value, Tensor) or value.dtype != self.dtype or value.layout != torch.strided:
            return False
        return self._cuda.holds(value)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = getattr(torch, self.__name__)(*args, **kwargs)
        return made.to(META)


class DefaultType:
    """torch.set_default_tensor_type, which takes torch.cuda.HalfTensor and its kin: a number type and the device, which
    torch.Tensor(2, 3) also has then."""

    def __init__(self) -> None:
        self._is_named = False

    def patches(self) -> Iterator[Patch]:
        why = "torch.cuda.HalfTensor and its kin may be the default"
        yield Patch(torch, "set_default_tensor_type", self._set(torch.set_default_tensor_type), why)
        yield Patch(Tensor, "__new__", self._new(Tensor.__new__), why)

    @around
    def _set(self, original: Callable[[Any], None], kind: Any) -> None:
        if isinstance(kind, str) and kind.startswith("torch.cuda."):
            kind = getattr(torch.cuda, kind.removeprefix("torch.cuda."))
        self._is_named = isinstance(kind, LegacyType)
        torch.set_default_device("cuda" if self._is_named else None)
        if self._is_named:
            torch.set_default_dtype(kind.dtype)
        else:
            original(kind)

    @around
    def _new(self, original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        if not self._is_named or cls is not Tensor or kwargs:
            return original(cls, *args, **kwargs)
        if all(isinstance(arg, int) for arg in args):
            return torch.empty(args or (0,), device=META)
        return original(cls, *args).to(META)


class CudaDevice:
    """What `flopmeter.cuda` gives: it stands where a device is asked for, and becomes the report."""

    type = "cuda"

    def __init__(self, device: torch.device) -> None:
        self.device, self.index = device, device.index

    def __str__(self) -> str:
        return str(self.device)
