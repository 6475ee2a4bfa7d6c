"""Tensors that stay the same objects when they move between the CPU and the device named cuda.

Works around: between CPU and meta torch makes another tensor, where between CPU and CUDA it replaces the contents.
Until: tensors without memory can call their device cuda.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from flopmeter.known_values.values import no_modes
from flopmeter.run.truth import set_true_data, true_is_meta


def set_data(tensor: Tensor, data: Tensor) -> None:
    """`tensor.data = data`: torch replaces the contents between CPU and CUDA, and refuses to between CPU and meta."""
    if true_is_meta(tensor) == true_is_meta(data) or tensor.grad is not None:
        set_true_data(tensor, data)
        return
    with no_modes():
        inside = data.detach().requires_grad_(tensor.requires_grad)
    with _keeping_class_and_attributes(tensor), _ignoring_weak_references():
        torch.utils.swap_tensors(tensor, inside)


@contextmanager
def parameters_keep_identity(module: Module) -> Iterator[None]:
    """Between CPU and CUDA a module's parameters stay the same objects, which an optimizer may already hold. Between
    CPU and meta torch makes new ones, unless it is told to swap their contents."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with _keeping_class_and_attributes(*module.parameters()), _ignoring_weak_references():
            yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


@contextmanager
def _keeping_class_and_attributes(*tensors: Tensor) -> Iterator[None]:
    """torch.utils.swap_tensors swaps more than the contents: also the class, which a lazy parameter would lose, and the
    attributes that a program gave to a parameter."""
    before = [(type(tensor), dict(vars(tensor))) for tensor in tensors]
    try:
        yield
    finally:
        for tensor, (kind, attributes) in zip(tensors, before, strict=True):
            if type(tensor) is not kind:
                tensor.__class__ = kind
            vars(tensor).update({**attributes, **vars(tensor)})


@contextmanager
def _ignoring_weak_references() -> Iterator[None]:
    """torch.utils.swap_tensors refuses a tensor with weak references. Here these keep the same object."""
    looks_for = torch.utils.weakref  # type: ignore[attr-defined]
    torch.utils.weakref = SimpleNamespace(getweakrefs=lambda _: [])  # type: ignore[attr-defined, assignment]
    try:
        yield
    finally:
        torch.utils.weakref = looks_for  # type: ignore[attr-defined]


def script_to(module: Module, *args: Any, **kwargs: Any) -> Module:
    """A TorchScript module makes a tensor whenever it is asked for one, so it is given other tensors."""
    each: Any
    for each in module.modules():
        for name, tensor in (*each.named_parameters(recurse=False), *each.named_buffers(recurse=False)):
            moved = tensor.detach().to(*args, **kwargs)
            whole = tensor.to(moved.device)  # modules cast floats alone
            each._c.setattr(name, moved.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else whole)
        if each._c.hasattr("_flat_weights"):  # a recurrent layer holds its weights in a list, too
            each._c.setattr("_flat_weights", [each._c.getattr(name) for name in each._c.getattr("_flat_weights_names")])
    return module
