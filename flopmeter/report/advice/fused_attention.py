"""Fused attention: the kernel that CUDA would choose for it, and calls of such kernels."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend

from flopmeter.as_cuda import CudaTarget
from flopmeter.as_cuda.attention_rules import Operand, SdpaCall, Settings, choose, rules_for
from flopmeter.device.hardware import Hardware
from flopmeter.records import Op, TensorSpec
from flopmeter.records.memory_format import dense_strides
from flopmeter.report.advice.found_attention import FoundAttention, Operands
from flopmeter.report.advice.rewrite import in_place_of
from flopmeter.report.unfused_attention import BACKENDS
from flopmeter.torch_names.dispatcher import running_version
from flopmeter.torch_names.operators import aten_overloads

_FUSED = "_scaled_dot_product_"  # in front of the backend in the names of torch's operators


class NoKernelError(Exception):
    """scaled_dot_product_attention would do the same op by op, as in bf16 on a T4."""


class Bias(NamedTuple):
    """What is added to the scores, [batch, heads, queries, keys], such as a mask of padding or a bias by position."""

    spec: TensorSpec
    gradient: TensorSpec | None  # None: it is not trained


def backend_of(qkv: Operands, device: Hardware, *, is_causal: bool, dropout: float, bias: Bias | None = None) -> str:
    """The kernel that CUDA would choose, by the rules of the running torch. Raises NoKernelError where it has none."""
    q, k, v = (Operand(spec.shape, spec.stride, spec.dtype, 0, False) for spec in qkv)
    settings, is_grouped = Settings.now()._replace(grad=False), q.shape[1] != k.shape[1]
    mask = bias and Operand(bias.spec.shape, bias.spec.stride, bias.spec.dtype, 0, bias.gradient is not None)
    call = SdpaCall(q, k, v, mask, dropout, is_causal, is_grouped, settings, CudaTarget.of(device))
    chosen = choose(call, rules_for(running_version()))
    if chosen is SDPBackend.MATH:
        raise NoKernelError
    return BACKENDS[chosen]


class FusedCall(NamedTuple):
    """What a fused kernel takes, and what it makes of that."""

    qkv: Operands  # [batch, heads, rows, width]
    out: TensorSpec
    sums: TensorSpec  # of each row's exponentials, for the backward pass
    given: TensorSpec  # the gradient of the result
    gradients: Operands  # of q, k and v, written over those that the program has no use for
    is_causal: bool
    dropout: float
    bias: Bias | None


def fused_call(
    attention: FoundAttention, qkv: Operands, dtype: torch.dtype, *, is_causal: bool, dropout: float, bias: Bias | None
) -> FusedCall:
    """The call in place of an attention, with a result of this type."""
    (*heads, queries, _), width, device = qkv[0].shape, qkv[2].shape[-1], qkv[0].device
    out = dense((*heads, queries, width), dtype, device)._replace(storage=attention.result)
    whole_rows = (queries * heads[1] * width, width, heads[1] * width, 1)  # heads beside one another, as kernels write
    out = out._replace(stride=whole_rows)
    sums = dense((*heads, queries), torch.float32, device)
    sums = sums._replace(storage=attention.scores.storage)  # which no other op touches any more
    given, free = attention.given or out, iter(sorted(attention.gradients))
    given = given if given.shape == out.shape else out._replace(storage=given.storage)
    q, k, v = (spec._replace(storage=next(free, spec.storage)) for spec in qkv)
    return FusedCall(qkv, out, sums, given, (q, k, v), is_causal, dropout, bias)


def fused(op: Op, call: FusedCall, backend: str) -> Op:
    """The kernel in the place of an op, forward or backward as that is. Its tensors have the numbers that the trace
    gives their storages."""
    is_backward, (qkv, out, sums, given, gradients, is_causal, dropout, bias) = op.phase == "backward", call
    read, made = ((given, *qkv, out, sums), gradients) if is_backward else (qkv, (out, sums))
    specs, results = read if bias is None else (*read, bias.spec), tuple[TensorSpec, ...](made)
    if is_backward and bias is not None and bias.gradient is not None:
        results += (bias.gradient,)
    name = f"{_FUSED}{backend}_attention{'_backward' if is_backward else ''}"
    func = getattr(aten_overloads, name).default
    settings: dict[str, Any] = {"dropout_p": dropout, "is_causal": is_causal}
    if bias is not None:
        settings["attn_bias"] = bias.spec
    return in_place_of(op, func, read, settings, specs, results)


def is_fused_attention(op: Op) -> bool:
    """Whether it is one of torch's fused kernels, forward or backward."""
    return op.call.name.startswith(_FUSED)


def operands_of(op: Op) -> Operands:
    """q, k and v of a fused attention, forward or backward."""
    q, k, v = op.inputs[1:4] if op.call.name.endswith("_backward") else op.inputs[:3]
    return q, k, v


def by_chosen_kernel(op: Op, device: Hardware, *, is_causal: bool) -> Op | None:
    """The same attention, forward or backward, without a mask and by the kernel that CUDA would choose then; None where
    there is none."""
    call, dropout = op.call, op.call.argument("dropout_p")
    try:
        backend = backend_of(operands_of(op), device, is_causal=is_causal, dropout=dropout)
    except NoKernelError:
        return None
    end = "_backward" if call.name.endswith("_backward") else ""
    func = getattr(aten_overloads, f"{_FUSED}{backend}_attention{end}").default
    mask, settings = call.get("attn_bias"), {"dropout_p": dropout, "is_causal": is_causal}
    inputs = tuple(spec for spec in call.inputs if spec is not mask)
    return op._replace(call=dataclasses.replace(call, func=func, args=inputs, inputs=inputs, kwargs=settings))


def dense(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> TensorSpec:
    return TensorSpec(shape, dense_strides(shape, channels_last=False), dtype, 0, 0, device)


def dense_in(place: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    """A dense tensor of this shape, at the start of a tensor's storage and of its type."""
    return dense(shape, place.dtype, place.device)._replace(storage=place.storage)
