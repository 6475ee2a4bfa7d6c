"""Ops whose kernels take only some layouts: torch copies what lies otherwise before it runs them.

`x.contiguous()` stands inside of the op, where no recorder sees it. A tensor that a permutation made, such as the
patches of an image in `[batch, tokens, channels]`, keeps its order through additions and multiplications, so that each
layer norm of a vision transformer without a class token copies its input. cuBLAS takes matrices whose rows or columns
are dense; the gradient of a sum, which is one number expanded over a tensor, is none, nor is every other column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch._ops import OpOverloadPacket

from flopmeter.costs.access import HALVES, cast_operations
from flopmeter.costs.index_arithmetic import index_operations
from flopmeter.costs.rules import in_one_piece, make_cost, scratch
from flopmeter.costs.scatter import scatter_of
from flopmeter.records import MOVEMENT, Access, Call, Cost, TensorSpec, VectorWork
from flopmeter.records.memory_format import is_dense
from flopmeter.torch_names.operators import aten


def _is_contiguous(_: Call, spec: TensorSpec) -> bool:
    return is_dense(spec.shape, spec.stride, channels_last=False)


def _is_for_cublas(call: Call, spec: TensorSpec) -> bool:
    """Whether rows or columns are dense and do not overlap: `prepare_matrix_for_cublas` in
    aten/src/ATen/native/cuda/cuBlasCommonArgs.h, `prepare_batch_matrix_for_cublas` in Blas.cpp. Batches may lie
    anywhere, also on each other. One column of a matrix is a matrix whose rows are dense."""
    (rows, columns), (row_stride, column_stride) = spec.shape[-2:], spec.stride[-2:]
    by_rows = column_stride == 1 and row_stride >= columns
    by_columns = row_stride == 1 and column_stride >= rows
    return by_rows or by_columns or _is_contiguous(call, spec)


def _is_for_group_norm(call: Call, spec: TensorSpec) -> bool:
    """Whether group norm takes it as it lies: from torch 2.15 on also channels-last, if its result lies alike."""
    return _is_contiguous(call, spec) or any(out.stride == spec.stride for out in call.outputs)


def _is_for_sum(call: Call, spec: TensorSpec) -> bool:
    """Whether it has the type of the result, or is 16 bits wide for one of fp32 (`make_reduction_from_out_ty` in
    aten/src/ATen/native/ReduceOpsUtils.h): a sum over a mask works on a copy of it in int64."""
    (out, *_) = call.outputs
    return spec.dtype == out.dtype or not spec.numel or (spec.dtype in HALVES and out.dtype == torch.float32)


def _is_for_scan(call: Call, spec: TensorSpec) -> bool:
    return spec.dtype == call.outputs[0].dtype and _is_contiguous(call, spec)


def _is_by_tokens(_: Call, spec: TensorSpec) -> bool:
    """Whether all heads of a token, [B, H, S, D], lie side by side, as attention writes its result."""
    return spec.stride == _by_tokens(spec).stride


def _has_dense_rows(_: Call, spec: TensorSpec) -> bool:
    """Whether cuDNN takes it (`innermost_dO_stride` in aten/src/ATen/native/cudnn/MHA.cpp)."""
    return spec.stride[-1] == 1


class _Takes(NamedTuple):
    operands: tuple[str, ...]
    as_it_lies: Callable[[Call, TensorSpec], bool]
    casts: bool = False  # the copy has the type of the result
    by_tokens: bool = False  # the copy has all heads of a token side by side


# What each op copies unless it lies so: arguments of which it makes `contiguous()` ones (aten/src/ATen/native:
# cuda/SoftMax.cu host_softmax and host_softmax_backward, cuda/layer_norm_kernel.cu, group_norm.cpp, cuda/ScanUtils.cuh
# scan_dim), or casts to the type of its result (ReduceOps.cpp).
_INDUCTOR_WRITES: Mapping[OpOverloadPacket, _Takes] = {
    aten._softmax: _Takes(("self",), _is_contiguous),
    aten._log_softmax: _Takes(("self",), _is_contiguous),
    aten._softmax_backward_data: _Takes(("grad_output", "output"), _is_contiguous),
    aten._log_softmax_backward_data: _Takes(("grad_output", "output"), _is_contiguous),
    aten.native_layer_norm: _Takes(("input",), _is_contiguous),
    aten.native_layer_norm_backward: _Takes(("grad_out", "input"), _is_contiguous),
    aten.native_group_norm: _Takes(("input",), _is_for_group_norm),
    aten.native_group_norm_backward: _Takes(("grad_out", "input"), _is_for_group_norm),
    aten._fused_rms_norm: _Takes(("input",), _is_contiguous),
    aten._fused_rms_norm_backward: _Takes(("grad_out", "input"), _is_contiguous),
    **dict.fromkeys((aten.sum, aten.nansum, aten.mean, aten.prod), _Takes(("self",), _is_for_sum, casts=True)),
    **dict.fromkeys((aten.cumsum, aten.cumprod), _Takes(("self",), _is_for_scan, casts=True)),
}
# The matrices that are handed to cuBLAS (cuda/Blas.cpp), and gradients and results of attention
# (transformers/cuda/attention_backward.cu), in compiled code too.
_LIBRARIES_RUN: Mapping[OpOverloadPacket, _Takes] = {
    **dict.fromkeys((aten.mm, aten._int_mm, aten.bmm), _Takes(("self", "mat2"), _is_for_cublas)),
    **dict.fromkeys((aten.addmm, aten.addmm_, aten._addmm_activation), _Takes(("mat1", "mat2"), _is_for_cublas)),
    **dict.fromkeys((aten.baddbmm, aten.baddbmm_), _Takes(("batch1", "batch2"), _is_for_cublas)),
    aten.mv: _Takes(("self",), _is_for_cublas),
    **dict.fromkeys((aten.addmv, aten.addmv_), _Takes(("mat",), _is_for_cublas)),
    aten._flash_attention_backward: _Takes(("grad_out", "out"), _is_contiguous),
    aten._scaled_dot_product_flash_attention_backward: _Takes(("grad_out", "out"), _is_by_tokens, by_tokens=True),
    aten._scaled_dot_product_cudnn_attention_backward: _Takes(("grad_out",), _has_dense_rows, by_tokens=True),
    aten._efficient_attention_backward: _Takes(("grad_out_",), _is_contiguous),
    aten._scaled_dot_product_efficient_attention_backward: _Takes(("grad_out_",), _is_by_tokens, by_tokens=True),
}
_TAKES = {**_INDUCTOR_WRITES, **_LIBRARIES_RUN}
# Ops of torch.nn.attention.varlen, which exist once a program has imported it, call one of these.
_CALLS = {"torch_attn::_varlen_attn_backward": aten._flash_attention_backward}


def _called_by(call: Call) -> OpOverloadPacket:
    """The op that makes the copies."""
    return _CALLS.get(call.func._schema.name, call.func.overloadpacket)


def inductor_reads(call: Call) -> bool:
    """Whether inductor writes code for the op, which reads operands where they lie."""
    return call.func.overloadpacket in _INDUCTOR_WRITES


def a_library_reads(call: Call) -> bool:
    """Whether a library runs the op in compiled code too, so that its copies are not inductor's to write either."""
    return _called_by(call) in _LIBRARIES_RUN


def with_dense_operands(call: Call) -> tuple[tuple[Cost, ...], Call]:
    """The copies that the op makes first, and the call as its kernels then see it."""
    takes = _TAKES.get(_called_by(call))
    if takes is None:
        return (), call
    given = [call.argument(name) for name in takes.operands]
    copies = {
        spec: _copied(call, scratch(spec, number), takes)
        for number, spec in enumerate(dict.fromkeys(given), 1)
        if not takes.as_it_lies(call, spec)
    }
    if not copies:
        return (), call
    first = tuple(copy_of(call, spec, copy) for spec, copy in copies.items())
    place = {argument.name: number for number, argument in enumerate(call.func._schema.arguments)}
    args, kwargs = list(call.args), dict(call.kwargs)
    for name, spec in zip(takes.operands, given, strict=True):
        if spec in copies and name in kwargs:
            kwargs[name] = copies[spec]
        elif spec in copies:
            args[place[name]] = copies[spec]
    inputs = tuple(copies.get(spec, spec) for spec in call.inputs)
    return first, replace(call, args=tuple(args), kwargs=kwargs, inputs=inputs)


def _copied(call: Call, spec: TensorSpec, takes: _Takes) -> TensorSpec:
    dtype = call.outputs[0].dtype if takes.casts else spec.dtype
    return (_by_tokens(spec) if takes.by_tokens else in_one_piece(spec, spec.shape))._replace(dtype=dtype)


def _by_tokens(spec: TensorSpec) -> TensorSpec:
    """[B, H, S, D], laid out as [B, S, H, D]."""
    batch, heads, tokens, depth = spec.shape
    of_batch, of_token, of_head, of_element = in_one_piece(spec, (batch, tokens, heads, depth)).stride
    return spec._replace(stride=(of_batch, of_head, of_token, of_element))


def copy_of(call: Call, spec: TensorSpec, copy: TensorSpec) -> Cost:
    """The kernel that copies an operand of the op into another layout, or type."""
    operands = copy, spec
    operations = index_operations(operands) + cast_operations(spec.dtype, copy.dtype) * spec.numel
    work = VectorWork(index_operations=operations, scatter=scatter_of(operands))
    access: Access | None = None if spec.stride == copy.stride else "strided"
    return make_cost(call, MOVEMENT, read=(spec,), written=(copy,), access=access, work=work)
