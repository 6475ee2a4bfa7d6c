"""Ops whose kernels take only some layouts: torch copies what lies otherwise before it runs them.

`x.contiguous()` stands inside of the op, where no recorder sees it. A tensor that a permutation made, such as the
patches of an image in `[batch, tokens, channels]`, keeps its order through additions and multiplications, so that each
layer norm of a vision transformer without a class token copies its input. cuBLAS takes matrices whose rows or columns
are dense; the gradient of a sum, which is one number expanded over a tensor, is none, nor is every other column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch._ops import OpOverloadPacket

from flopmeter.costs.rules import make_cost, scratch
from flopmeter.records import MOVEMENT, Call, Cost, TensorSpec
from flopmeter.records.memory_format import dense_strides, is_dense
from flopmeter.torch_names.operators import aten

# By op: the arguments of which it makes `contiguous()` ones (aten/src/ATen/native: cuda/SoftMax.cu host_softmax and
# host_softmax_backward, cuda/layer_norm_kernel.cu, group_norm.cpp, cuda/ScanUtils.cuh scan_dim).
_DENSE: Mapping[OpOverloadPacket, tuple[str, ...]] = {
    aten._softmax: ("self",),
    aten._log_softmax: ("self",),
    aten._softmax_backward_data: ("grad_output", "output"),
    aten._log_softmax_backward_data: ("grad_output", "output"),
    aten.native_layer_norm: ("input",),
    aten.native_layer_norm_backward: ("grad_out", "input"),
    aten.native_group_norm: ("input",),
    aten.native_group_norm_backward: ("grad_out", "input"),
    aten._fused_rms_norm: ("input",),
    aten._fused_rms_norm_backward: ("grad_out", "input"),
    aten.cumsum: ("self",),
    aten.cumprod: ("self",),
}

# By op: the matrices that it hands to cuBLAS (aten/src/ATen/native/cuda/Blas.cpp).
_MATRICES: Mapping[OpOverloadPacket, tuple[str, ...]] = {
    aten.mm: ("self", "mat2"),
    aten._int_mm: ("self", "mat2"),
    **dict.fromkeys((aten.addmm, aten.addmm_, aten._addmm_activation), ("mat1", "mat2")),
    aten.bmm: ("self", "mat2"),
    **dict.fromkeys((aten.baddbmm, aten.baddbmm_), ("batch1", "batch2")),
    aten.mv: ("self",),
    **dict.fromkeys((aten.addmv, aten.addmv_), ("mat",)),
}


def reads_dense(call: Call) -> bool:
    """Whether the op copies operands that are not dense. Code that inductor writes for it does not."""
    return call.func.overloadpacket in _DENSE


def multiplies_matrices(call: Call) -> bool:
    """Whether cuBLAS runs the op, so that its copies are not inductor's to write either."""
    return call.func.overloadpacket in _MATRICES


def with_dense_operands(call: Call) -> tuple[tuple[Cost, ...], Call]:
    """The copies that the op makes first, and the call as its kernels then see it."""
    packet = call.func.overloadpacket
    names = _DENSE.get(packet) or _MATRICES.get(packet, ())
    given = [call.argument(name) for name in names]
    copies = {
        spec: scratch(spec, number)._replace(stride=dense_strides(spec.shape, channels_last=False))
        for number, spec in enumerate(dict.fromkeys(given), 1)
        if isinstance(spec, TensorSpec)
        and not is_dense(spec.shape, spec.stride, channels_last=False)
        and not (_is_for_cublas(spec) if packet in _MATRICES else _is_kept(call, spec))
    }
    if not copies:
        return (), call
    first = tuple(copy_of(call, spec, copy) for spec, copy in copies.items())
    place = {argument.name: number for number, argument in enumerate(call.func._schema.arguments)}
    args, kwargs = list(call.args), dict(call.kwargs)
    for name, spec in zip(names, given, strict=True):
        if spec in copies and name in kwargs:
            kwargs[name] = copies[spec]
        elif spec in copies:
            args[place[name]] = copies[spec]
    inputs = tuple(copies.get(spec, spec) for spec in call.inputs)
    return first, replace(call, args=tuple(args), kwargs=kwargs, inputs=inputs)


def _is_for_cublas(spec: TensorSpec) -> bool:
    """Whether rows or columns are dense and do not overlap: `prepare_matrix_for_cublas` in
    aten/src/ATen/native/cuda/cuBlasCommonArgs.h, `prepare_batch_matrix_for_cublas` in Blas.cpp. Batches may lie
    anywhere, also on each other. One column of a matrix is a matrix whose rows are dense."""
    (rows, columns), (row_stride, column_stride) = spec.shape[-2:], spec.stride[-2:]
    by_rows = column_stride == 1 and row_stride >= max(1, columns)
    by_columns = row_stride == 1 and column_stride >= max(1, rows)
    is_transposed = len(spec.shape) == 2 and is_dense((columns, rows), (column_stride, row_stride), channels_last=False)
    return by_rows or by_columns or is_transposed


def _is_kept(call: Call, spec: TensorSpec) -> bool:
    """Whether the kernel walks the operand as it lies: group norm does so in channels-last from torch 2.15 on, where
    its result lies alike."""
    norms = aten.native_group_norm, aten.native_group_norm_backward
    return call.func.overloadpacket in norms and any(out.stride == spec.stride for out in call.outputs)


def copy_of(call: Call, spec: TensorSpec, copy: TensorSpec) -> Cost:
    """The kernel that copies an operand of the op into another layout."""
    return make_cost(call, MOVEMENT, read=(spec,), written=(copy,), access="strided", walks=(copy, spec))
