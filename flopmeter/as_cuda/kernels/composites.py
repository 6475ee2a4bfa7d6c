"""Composite ops that run one CUDA kernel on CUDA and decompose into several ops on meta.

Each override decides as the named C++ function does when CUDA takes its kernel; in all other cases the composite
decomposes as usual. rms_norm needs no override: it calls `_fused_rms_norm` on every device, for which `meta_kernels`
registers a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from flopmeter.as_cuda.emulation import DispatcherKernel, Emulation
from flopmeter.records.memory_format import CHANNELS_LAST
from flopmeter.torch_names import dispatcher

aten = torch.ops.aten

BATCH_NORM_MAX_BATCH_TRAINING = 880801
"""Largest batch of cuDNN's spatial batch norm in training (select_batch_norm_backend in Normalization.cpp)."""
BATCH_NORM_MAX_BATCH_EVAL = 65535
"""Largest batch of cuDNN's spatial batch norm in evaluation (the same function)."""
LAYER_NORM_REFUSES_MIXED_TYPES = (2, 14)
"""The first torch whose layer norm raises on simulated CUDA tensors when it does on CUDA."""
INT32_MAX = 2**31 - 1
"""cuDNN's batch norm indexes elements with 32 bits."""


def install(scope: Emulation) -> None:
    """Dispatch dropout, softmax and batch norm on meta tensors as CUDA would."""
    scope.override(aten.dropout.default, dropout)
    scope.override(aten.softmax.int, _half_to_float(aten.softmax.int, aten._softmax.default))
    scope.override(aten.log_softmax.int, _half_to_float(aten.log_softmax.int, aten._log_softmax.default))
    if dispatcher.running_version() >= LAYER_NORM_REFUSES_MIXED_TYPES:
        scope.override(aten.layer_norm.default, layer_norm)
    scope.override(aten.allclose.default, allclose)
    scope.override(aten.one_hot.default, one_hot, vmap_key=None)  # vmap: torch's own way, which compares
    scope.override(aten.batch_norm.default, batch_norm, vmap_key=None)  # vmap: no memory-format query there


def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """Ones scattered into zeros (aten/src/ATen/native/Onehot.cpp). On meta torch compares with all classes instead."""
    if tensor.dtype is not torch.int64 or tensor.numel() == 0 or num_classes < -1:
        return dispatcher.decompose(aten.one_hot.default, tensor, num_classes)
    classes = int(tensor.max().item()) + 1 if num_classes == -1 else num_classes
    ones = torch.zeros((*tensor.shape, classes), dtype=tensor.dtype, device=tensor.device)
    return ones.scatter_(-1, tensor.unsqueeze(-1), 1)


def allclose(tensor: Tensor, other: Tensor, *options: Any) -> bool:
    """isclose, and one read (aten/src/ATen/native/TensorCompare.cpp). Under a dispatch mode torch shows one op."""
    return bool(aten.isclose.default(tensor, other, *options).all())


def install_ctc_loss(scope: Emulation) -> None:
    """On CUDA ctc_loss reads its lengths on the host. Under a dispatch mode torch would not."""
    scope.override(aten.ctc_loss.Tensor, ctc_loss)


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *options: Any
) -> Tensor:
    """ctc_loss of tensors in aten/src/ATen/native/LossCTC.cpp."""
    lengths = [lengths.to("cpu", torch.long).tolist() for lengths in (input_lengths, target_lengths)]
    return aten.ctc_loss.IntList(log_probs, targets, *lengths, *options)


def install_functorch(scope: Emulation) -> None:
    """Ops that torch.func decomposes before autograd sees them.

    dropout has a kernel of its own at the top of torch.func's stack. `_fused_rms_norm` and `mish_backward` have an
    autograd formula, but the dispatcher does not use it for tensors that torch.func.grad wraps.
    """
    front = "FuncTorchDynamicLayerFrontMode"
    plain_dropout = torch.library.get_kernel("aten::dropout", front)

    def transformed_dropout(keyset: Any, tensor: Tensor, p: float, train: bool) -> Any:
        if dispatcher.is_emulated(tensor) and runs_native_dropout(tensor, p, train):
            return aten.native_dropout(tensor, p, train)[0]
        return plain_dropout.call_boxed(keyset, tensor, p, train)

    scope.kernel("aten::dropout", transformed_dropout, front, with_keyset=True)
    for op in ("aten::_fused_rms_norm", "aten::mish_backward"):
        differentiated = _autograd_formula(op)
        # The first key only for FakeTensors on meta, which keep the composite.
        for key in ("AutogradMeta", "AutogradOther"):
            scope.kernel(op, differentiated, key, with_keyset=True)


def _autograd_formula(op: str) -> DispatcherKernel:
    formula, composite = torch.library.get_kernel(op, "AutogradMeta"), torch.library.get_kernel(op, "AutogradOther")

    def differentiated(keyset: Any, first: Tensor, *args: Any) -> Any:
        return (formula if dispatcher.is_emulated(first) else composite).call_boxed(keyset, first, *args)

    return differentiated


def runs_native_dropout(tensor: Tensor, p: float, train: bool) -> bool:
    """is_fused_kernel_acceptable in aten/src/ATen/native/Dropout.cpp."""
    return train and 0 < p < 1 and tensor.numel() > 0


def dropout(tensor: Tensor, p: float, train: bool) -> Tensor:
    """One kernel that keeps a bool mask."""
    if runs_native_dropout(tensor, p, train):
        return aten.native_dropout(tensor, p, train)[0]
    return dispatcher.decompose(aten.dropout.default, tensor, p, train)


def _half_to_float(composite: OpOverload, kernel: OpOverload) -> DispatcherKernel:
    """softmax(fp16, dtype=float32) casts inside the kernel; bf16 is cast before it (SoftMax.cpp)."""

    def softmax(tensor: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        if tensor.dtype == torch.float16 and dtype == torch.float32:
            return kernel(tensor, dim, True)
        return dispatcher.decompose(composite, tensor, dim, dtype)

    return softmax


def layer_norm(
    tensor: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *rest: Any,
) -> Tensor:
    """CUDA's kernel reads weight and bias in the dtype of the input. Without rows no kernel runs."""
    other = next((each.dtype for each in (weight, bias) if each is not None and each.dtype != tensor.dtype), None)
    if other is not None and tensor.numel() > 0:
        raise RuntimeError(f"expected scalar type {_type_name(tensor.dtype)} but found {_type_name(other)}")
    return dispatcher.decompose(aten.layer_norm.default, tensor, normalized_shape, weight, bias, *rest)


def _type_name(dtype: torch.dtype) -> str:
    """The type's name in torch's errors: Half, Long."""
    return torch.empty(0, dtype=dtype, device="cpu").type().removeprefix("torch.").removesuffix("Tensor")


def batch_norm(
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    """cuDNN's kernel if it supports the case, else the composite's own decomposition into the native one."""
    statistics = running_mean, running_var
    if cudnn_enabled and _cudnn_takes_batch_norm(tensor, weight, bias, statistics, training):
        return aten.cudnn_batch_norm(_dense(tensor), weight, bias, *statistics, training, momentum, eps)[0]
    return dispatcher.decompose(
        aten.batch_norm.default, tensor, weight, bias, *statistics, training, momentum, eps, cudnn_enabled
    )


def _cudnn_takes_batch_norm(
    tensor: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: tuple[Tensor | None, Tensor | None],
    training: bool,
) -> bool:
    """select_batch_norm_backend in aten/src/ATen/native/Normalization.cpp; wrong shapes are left to torch's checks."""
    if weight is None or bias is None or tensor.dim() < 3 or not 0 < tensor.numel() < INT32_MAX:
        return False
    if any(vector is not None and vector.numel() != tensor.size(1) for vector in (weight, bias, *statistics)):
        return False
    limit = BATCH_NORM_MAX_BATCH_TRAINING if training else BATCH_NORM_MAX_BATCH_EVAL
    known = [vector is not None for vector in statistics]
    return (
        torch.bfloat16 not in (tensor.dtype, weight.dtype)
        and (tensor.dtype != torch.float16 or weight.dtype == torch.float32)
        and (all(known) or (training and not any(known)))
        and tensor.size(0) <= limit
    )


def _dense(tensor: Tensor) -> Tensor:
    """The tensor as cuDNN reads it: contiguous or channels-last."""
    layout = CHANNELS_LAST.get(tensor.dim())
    if layout is not None and tensor.is_contiguous(memory_format=layout):
        return tensor
    return tensor.contiguous()
