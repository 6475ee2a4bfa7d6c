"""How results lie in memory where torch's kernels for meta tensors let them lie otherwise than CUDA's do.

The kernels that CUDA shares with the CPU say it: aten/src/ATen/native/BinaryOps.cpp, Loss.cpp, SoftMax.cpp, and of
CUDA's own cuda/Loss.cu, cuda/layer_norm_kernel.cu, cuda/Normalization.cu. What follows on a result may have to copy it,
or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flopmeter.as_cuda.emulation import DispatcherKernel, Emulation
from flopmeter.as_cuda.kernels.meta_kernels import like_second
from flopmeter.torch_names import dispatcher

_NONE, _MEAN = 0, 1  # of `reduction` (aten/src/ATen/core/Reduction.h)


def install(scope: Emulation) -> None:
    for name, kernel in _KERNELS.items():
        if dispatcher.overload(name) is not None:
            scope.meta_kernel(f"aten::{name}", kernel)


def loss_of_differences(tensor: Tensor, target: Tensor, reduction: int = _MEAN, *rest: Any) -> Tensor:
    return _reduced(tensor - target, reduction)


def cross_entropy(tensor: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN) -> Tensor:
    return _reduced(torch.empty_like(tensor), reduction)


def _reduced(terms: Tensor, reduction: int) -> Tensor:
    """A loss that is added up is written over its terms: it keeps their memory as long as it lives."""
    return terms if reduction == _NONE else terms.resize_(())


def second_without_gaps(grad: Tensor, tensor: Tensor, *rest: Any) -> Tensor:
    return _dense(tensor)


def log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return _dense(grad, input_dtype)


def layer_norm_backward(
    grad: Tensor, tensor: Tensor, shape: Sequence[int], mean: Tensor, rstd: Tensor, weight: Tensor | None,
    bias: Tensor | None, mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    wanted = zip((tensor, weight, bias), mask, strict=True)
    return tuple(_dense(of) if is_wanted and of is not None else None for of, is_wanted in wanted)


def batch_norm_backward(
    grad: Tensor, tensor: Tensor, weight: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    mean: Tensor | None, rstd: Tensor | None, train: bool, eps: float, mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Only in training do channels that lie last stay there."""
    wanted = zip((tensor, weight, weight), mask, strict=True)
    to_input, *others = (_dense(of) if is_wanted and of is not None else None for of, is_wanted in wanted)
    keeps = train and not tensor.is_contiguous() and to_input is not None
    return (torch.empty_like(tensor) if keeps else to_input, *others)


def _dense(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return torch.empty_like(like, dtype=dtype, memory_format=torch.contiguous_format)


def as_in_both(grad: Tensor, *rest: Any) -> Tensor:
    """As the sum of the gradient and the other tensor lies, which stands after the numbers of some."""
    return grad + next(each for each in rest if isinstance(each, Tensor))


_ACTIVATIONS = ("elu", "hardsigmoid", "hardswish", "hardtanh", "mish", "softplus")
_KERNELS: dict[str, DispatcherKernel] = {
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "soft_margin_loss"), loss_of_differences),
    "binary_cross_entropy": cross_entropy,
    "binary_cross_entropy_backward": like_second,
    **dict.fromkeys((f"{kind}_loss_backward" for kind in ("mse", "smooth_l1", "huber")), second_without_gaps),
    "_log_softmax_backward_data": log_softmax_backward,
    "native_layer_norm_backward": layer_norm_backward,
    "native_batch_norm_backward": batch_norm_backward,
    **dict.fromkeys((f"{kind}_backward" for kind in _ACTIVATIONS), as_in_both),
}
