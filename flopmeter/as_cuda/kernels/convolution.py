"""The memory format of a convolution's result and gradients: cuDNN keeps that of input and weight. Torch's Meta kernels
return NCHW, and gradients, before torch 2.12, in what the gradient of the result suggests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopmeter.as_cuda.emulation import Emulation
from flopmeter.records.memory_format import CHANNELS_LAST, is_channels_last, torch_strides
from flopmeter.torch_names import dispatcher
from flopmeter.torch_names.operators import aten_overloads

_CONVOLUTION = aten_overloads.convolution.default
_GRADIENTS = aten_overloads.convolution_backward.default
_IN_TORCHSCRIPT = aten_overloads._convolution.default  # torch 2.11 has no kernel of it for meta
NCHW = torch.contiguous_format
_FLAGS = 4  # its last arguments, which only choose among libraries


def install(scope: Emulation) -> None:
    """The dispatch mode calls this override itself. A registered kernel would stay in torch's table of Python kernels
    for other modes even after its registration was removed."""
    scope.overrides[_CONVOLUTION] = convolution
    scope.overrides[_IN_TORCHSCRIPT] = lambda *args: convolution(*args[:-_FLAGS])
    if dispatcher.running_version() < (2, 12):
        scope.overrides[_GRADIENTS] = gradients


def convolution(tensor: Tensor, weight: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
    """The convolution, its result in cuDNN's layout."""
    out: Tensor = _CONVOLUTION(tensor, weight, *rest, **kwargs)
    if not dispatcher.is_emulated(tensor) or not runs_channels_last(tensor, weight):
        return out
    return torch.empty_like(out, memory_format=CHANNELS_LAST[out.dim()])


def gradients(gradient: Tensor, tensor: Tensor, weight: Tensor, *rest: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """The convolution's gradients, in cuDNN's layout."""
    found: tuple[Tensor | None, ...] = _GRADIENTS(gradient, tensor, weight, *rest, **kwargs)
    if not dispatcher.is_emulated(gradient):
        return found
    formats = CHANNELS_LAST if runs_channels_last(tensor, weight) else dict.fromkeys(CHANNELS_LAST, NCHW)
    return tuple(
        each if each is None or each.dim() < 4 else torch.empty_like(each, memory_format=formats[each.dim()])
        for each in found
    )


def runs_channels_last(tensor: Tensor, weight: Tensor) -> bool:
    """Whether input or weight is channels-last, and they are not fp64: `cudnn_conv_suggest_memory_format` in
    aten/src/ATen/native/ConvUtils.h. Without cuDNN the results of convolutions on CUDA are contiguous (NCHW)."""
    if tensor.dtype == torch.float64 or not torch.backends.cudnn.enabled:
        return False
    return any(is_channels_last(each.shape, torch_strides(each)) for each in (tensor, weight))
