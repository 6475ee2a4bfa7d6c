"""Specs of tensors in plain numbers. A symbolic size becomes the number that it stands for; a tensor without strides is
described by the bytes that it holds."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from flopmeter.known_values import DataDependentError
from flopmeter.known_values.values import no_modes
from flopmeter.records import Call, FlexBody, OpsBody, TensorSpec, TritonBody
from flopmeter.records.memory_format import torch_strides
from flopmeter.records.sparse_layouts import COMPRESSED, held_values, pointers_and_indices

_COPIES = frozenset(("aten::_to_copy", "aten::copy_", "aten::copy"))  # also between host and device
_TRUE_IS_PINNED = Tensor.is_pinned
_NUMBERS = frozenset((int, float, bool))


def has_strides(tensor: Tensor) -> bool:
    """False for sparse, nested and opaque tensors. (A COO tensor claims to have strides.)"""
    return tensor.layout is torch.strided and not tensor.is_nested


def spec_of(tensor: Tensor, storage: int, asked_by: OpOverload) -> TensorSpec:
    """The spec of a tensor whose storage has that number.

    Raises DataDependentError if a size depends on data that is not known.
    """
    if not has_strides(tensor):
        return unstrided_spec(tensor, storage)
    shape, stride, offset = plain((tensor.shape, torch_strides(tensor), tensor.storage_offset()), asked_by)
    device = tensor.device.type
    is_pinned = _is_pinned(tensor) if device == "cpu" and asked_by._schema.name in _COPIES else None
    return TensorSpec(shape, stride, tensor.dtype, storage, offset, device, is_pinned=is_pinned)


def _is_pinned(tensor: Tensor) -> bool | None:
    """None where no stand-in for a GPU is there that could pin memory."""
    return None if Tensor.is_pinned is _TRUE_IS_PINNED else tensor.is_pinned()


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of the values of a sparse tensor; None for opaque tensors."""
    with no_modes():
        if tensor.layout is torch.sparse_coo:
            return tensor._values().untyped_storage()
        return tensor.values().untyped_storage() if tensor.layout in COMPRESSED else None


def unstrided_spec(tensor: Tensor, storage: int) -> TensorSpec:
    """A spec with the strides of a dense tensor of that shape, and the bytes that the tensor really holds. A nested
    tensor counts as one row."""
    shape = (tensor.numel(),) if tensor.is_nested else tuple(tensor.shape)
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    with no_modes():
        held = _held_bytes(tensor), held_values(tensor)
    return TensorSpec(shape, stride, tensor.dtype, storage, 0, tensor.device.type, *held)


def _held_bytes(tensor: Tensor) -> int:
    """Bytes of a sparse tensor's values and indices, or of all elements of another."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values().nbytes + tensor._indices().nbytes
    if tensor.layout in COMPRESSED:
        return tensor.values().nbytes + sum(part.nbytes for part in pointers_and_indices(tensor))
    return tensor.numel() * tensor.element_size()


def plain(value: Any, asked_by: object) -> Any:
    """The value with tuples for lists and with numbers for symbols: a symbol's hint, the size that it was traced with.

    (Converting a symbol to a number would specialize the program on it.)
    Raises DataDependentError for a symbol without a hint, such as the number of nonzero elements.
    """
    if isinstance(value, (list, tuple)):
        if _NUMBERS.issuperset(map(type, value)):  # nearly always, and then it is the fastest way
            return tuple(value)
        return tuple(plain(item, asked_by) for item in value)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        if not value.node.has_hint():
            raise DataDependentError(str(asked_by))
        return value.node.hint
    return value


def hashable(value: Any, asked_by: OpOverload) -> Any:
    """A part of a key, in plain values. What cannot be hashed or compared becomes a new object, which equals none."""
    if isinstance(value, (list, tuple)):
        return tuple(hashable(item, asked_by) for item in value)
    value = plain(value, asked_by)
    try:
        hash(value)
        value == value  # noqa: B015  (what a dict asks for)
    except (TypeError, NotImplementedError):
        return object()
    return value


def build_call(
    func: OpOverload,
    args: Any,
    kwargs: Any,
    result: Any,
    number: Callable[[Tensor], int],
    groups: tuple[int, ...] | None = None,
    body: FlexBody | TritonBody | OpsBody | None = None,
) -> Call:
    """The record of a call. `number` gives the number of a tensor's storage within the call."""
    inputs: list[TensorSpec] = []
    outputs: list[TensorSpec] = []
    frozen_args = _freeze(args, func, number, inputs)
    frozen_kwargs = {name: _freeze(value, func, number, inputs) for name, value in kwargs.items()}
    _freeze(result, func, number, outputs)
    return Call(func, frozen_args, frozen_kwargs, tuple(inputs), tuple(outputs), groups, body)


def _freeze(value: Any, func: OpOverload, number: Callable[[Tensor], int], specs: list[TensorSpec]) -> Any:
    """Tensors become specs, lists tuples. (Not a nested function: one that calls itself keeps its arguments alive.)"""
    if isinstance(value, Tensor):
        specs.append(spec_of(value, number(value), func))
        return specs[-1]
    if isinstance(value, (list, tuple)):
        return tuple(_freeze(item, func, number, specs) for item in value)
    return plain(value, func)


def as_tensors(value: Any, made: dict[TensorSpec, Tensor]) -> Any:
    """The arguments with a meta tensor in place of each spec. `made` holds the tensors made so far, by spec."""
    if isinstance(value, TensorSpec):
        if value not in made:
            made[value] = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
        return made[value]
    if isinstance(value, tuple):
        return tuple(as_tensors(item, made) for item in value)
    if isinstance(value, dict):
        return {name: as_tensors(item, made) for name, item in value.items()}
    return value
