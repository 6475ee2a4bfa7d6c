"""A trace whose tensors have other types: where CUDA chooses a kernel by the type, the ops are those of the new one."""

from __future__ import annotations

import dataclasses

import torch

from flopmeter.device.hardware import Hardware
from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.report.advice.fused_attention import by_chosen_kernel
from flopmeter.report.advice.rewrite import are_in_torch, with_ops
from flopmeter.torch_names.operators import aten, aten_overloads

_ATTENTION = (aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_efficient_attention_backward)


def with_chosen_kernels(trace: Trace, device: Hardware) -> Trace:
    """Attention that ran on the kernel that takes any type, and batch norms that ran on cuDNN's."""
    put_in = {}
    for index, op in enumerate(trace.ops):
        if op.packet in _ATTENTION:
            has_mask = isinstance(op.call.argument("attn_bias"), TensorSpec)
            chosen = None if has_mask else by_chosen_kernel(op, device, is_causal=op.call.argument("is_causal"))
        elif op.packet in (aten.cudnn_batch_norm, aten.cudnn_batch_norm_backward):
            chosen = _batch_norm(op)
        else:
            continue
        if chosen is not None and are_in_torch([chosen]):
            put_in[index] = chosen
    return with_ops(trace, (), put_in)


def _batch_norm(op: Op) -> Op | None:
    """cuDNN takes no bf16, and fp16 with weights in fp32 alone (select_batch_norm_backend, ATen/native/
    Normalization.cpp)."""
    call = op.call
    tensor, weight = call.argument("input"), call.argument("weight")
    if torch.bfloat16 not in (tensor.dtype, weight.dtype) and (tensor.dtype, weight.dtype) != (torch.float16,) * 2:
        return None
    if op.packet is aten.cudnn_batch_norm:
        new = dataclasses.replace(call, func=aten_overloads.native_batch_norm.default, outputs=call.outputs[:3])
        return op._replace(call=new)
    names = ("grad_output", "input", "weight", "running_mean", "running_var", "save_mean", "save_var")
    given = [call.argument(name) for name in names]
    args = (*given, True, call.argument("epsilon"), (True, True, True))
    inputs = tuple(each for each in given if isinstance(each, TensorSpec))
    func = aten_overloads.native_batch_norm_backward.default
    return op._replace(call=dataclasses.replace(call, func=func, args=args, kwargs={}, inputs=inputs))
