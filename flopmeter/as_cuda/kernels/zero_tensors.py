"""Sums and products with tensors that are zero without memory, as torch's forward-mode gradients have them.

To learn the shape of the result, torch runs the op on copies of both on the device meta, which launches nothing on a
GPU (aten/src/ATen/native/BinaryOps.cpp). A tensor on meta would be its own copy there: zeros would be made, and the op
would run.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from flopmeter.as_cuda.emulation import Emulation
from flopmeter.torch_names import dispatcher
from flopmeter.torch_names.operators import aten_overloads
from flopmeter.torch_names.private import no_dispatch_modes


def install(scope: Emulation) -> None:
    for name, kernel in {"add": _sum, "sub": _sum, "mul": _product, "div": _product}.items():
        func = dispatcher.overload(f"{name}.Tensor")
        if func is not None:
            scope.kernel(func.name(), functools.partial(kernel, func), "ZeroTensor")


def _sum(func: OpOverload, first: Tensor, second: Tensor, *, alpha: Any = 1) -> Tensor:
    if first._is_zerotensor() and second._is_zerotensor():
        return _zeros(func, first, second)
    result = _blank(func, first, second)
    other, factor = (first, 1) if second._is_zerotensor() else (second, alpha)
    if func is aten_overloads.sub.Tensor and other is second:
        factor = -factor
    copied = aten_overloads._to_copy.default(other.expand(result.shape), dtype=result.dtype)
    return copied if factor == 1 else copied.mul(factor)


def _product(func: OpOverload, first: Tensor, second: Tensor) -> Tensor:
    zeros = _zeros(func, first, second)
    if func is aten_overloads.div.Tensor and second._is_zerotensor():
        return torch.full_like(zeros, math.nan if first._is_zerotensor() else math.inf)
    return zeros


def _blank(func: OpOverload, first: Tensor, second: Tensor) -> Tensor:
    """What the op gives, of copies that are on no device."""
    with no_dispatch_modes():
        return func(*(torch.empty(each.shape, dtype=each.dtype, device="meta") for each in (first, second)))


def _zeros(func: OpOverload, first: Tensor, second: Tensor) -> Tensor:
    like = _blank(func, first, second)
    return torch._efficientzerotensor(like.shape, dtype=like.dtype, device=first.device)
