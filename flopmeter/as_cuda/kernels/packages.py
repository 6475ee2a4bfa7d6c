"""Composites of packages that have a kernel for meta tensors besides, as some of fbgemm's.

On a GPU torch runs the composite of such an op, and the gradients of its parts.

Works around: torch takes the kernel for meta tensors in place of the composite, and no gradient passes through it: the
backward pass ends there, after a warning.
Until: torch prefers the composite for meta tensors, as it does for a GPU without a kernel.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from flopmeter.as_cuda.emulation import Emulation
from flopmeter.torch_names import dispatcher
from flopmeter.torch_names.around import around
from flopmeter.torch_names.operators import NAMESPACES_OF_TORCH
from flopmeter.torch_names.private import all_operators, has_kernel

_of_torch = set[str]()  # operators that were found to be torch's: thousands, at which nothing has to look again
_OF_BACKENDS = ("CPU", "CUDA", "Autograd")  # with one of these torch would not run the composite on a GPU either


def install(scope: Emulation) -> None:
    """For the operators that are there, and those of libraries that the program loads."""
    entered = set[str]()
    _enter_new(scope, entered)
    operators = type(torch.ops)
    scope.patch(operators, "load_library", _and_enter(scope, entered, operators.load_library))


@around
def _and_enter(scope: Emulation, entered: set[str], load: Any, *args: Any, **kwargs: Any) -> None:
    load(*args, **kwargs)
    _enter_new(scope, entered)


def _enter_new(scope: Emulation, entered: set[str]) -> None:
    others = set(all_operators()) - _of_torch
    _of_torch.update(name for name in others if name.partition("::")[0] in NAMESPACES_OF_TORCH)
    for name in filter(_has_both, others - _of_torch - entered):
        entered.add(name)
        op = dispatcher.overload(name)
        if op is not None:
            scope.kernel(name, partial(dispatcher.decompose, op), "AutogradMeta")


def _has_both(name: str) -> bool:
    is_composite = has_kernel(name, "CompositeImplicitAutograd") and has_kernel(name, "Meta")
    return is_composite and not any(has_kernel(name, key) for key in _OF_BACKENDS)
