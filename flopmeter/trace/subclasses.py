"""Tensor subclasses: which of them run aten kernels themselves, and what the others wrap."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from flopmeter.torch_names.private import no_dispatch


@functools.cache
def is_plain(kind: type) -> bool:
    """Whether tensors of the type run aten kernels themselves, rather than through code of their own."""
    if issubclass(kind, (FakeTensor, FunctionalTensor)):  # run by modes that are called after the recorder
        return True
    return kind.__torch_dispatch__ is no_dispatch  # type: ignore[attr-defined]


def is_wrapper(tensor: Tensor) -> bool:
    """Whether the tensor has no storage of its own: a DTensor or the like."""
    return not is_plain(type(tensor)) and hasattr(tensor, "__tensor_flatten__")


def wrapped(tensor: Any) -> Iterator[Tensor]:
    """The tensors that a DTensor or the like wraps, which are those with storages. A plain tensor wraps itself."""
    if not is_wrapper(tensor):
        yield tensor
        return
    for inner in map(tensor.__getattribute__, tensor.__tensor_flatten__()[0]):
        if isinstance(inner, Tensor):
            yield from wrapped(inner)
