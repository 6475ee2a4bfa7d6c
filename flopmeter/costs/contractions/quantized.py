"""Matmuls of fp8, fp4 and int8 operands, of packed weights, of groups and of 2:4 sparse matrices.

They are priced by the type of the first operand, which decides the unit: an fp8 matmul that writes bf16 is an
fp8 matmul, and weights packed to int4 or int8 under bf16 activations are a bf16 matmul that reads fewer bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import prod

import torch

from flopmeter.costs.rules import macs_of, make_contraction, make_product, rule
from flopmeter.records import (
    CONTRACTION,
    ELEMENTWISE,
    Call,
    Cost,
    GroupedMatmulWork,
    Kernel,
    Matmul,
    Region,
    TensorSpec,
    UnpackingMatmulWork,
)
from flopmeter.records.dtypes import name_of
from flopmeter.torch_names.operators import aten


@rule(aten._scaled_mm, aten._scaled_mm_v2)
def scaled_mm(call: Call) -> Cost:
    """(a @ b)·scale_a·scale_b + bias: one multiply per output for a scale per tensor, two for finer ones,
    done in the epilogue. Two fp4 numbers share an element."""
    a, b = call.inputs[:2]
    per_output = _multiplies_of(_scales(call)) + (call.argument("bias") is not None)
    return make_contraction(call, [_product(a, b)], extra=((ELEMENTWISE, per_output * call.outputs[0].numel),))


@rule(aten._scaled_addmm, aten._scaled_addmm_)  # torch 2.15
def scaled_addmm(call: Call) -> Cost:
    """beta·c + alpha·(a @ b)·scale_a·scale_b: the epilogue of `scaled_mm`, and an addition for c; factors other than 1
    multiply, and c is not read where beta is 0."""
    c, a, b, scales = call.inputs[0], call.argument("mat1"), call.argument("mat2"), _scales(call)
    alpha, beta = call.argument("alpha"), call.argument("beta")
    per_output = _multiplies_of(scales) + (alpha != 1) + ((1 + (beta != 1)) if beta else 0)
    extra = ((ELEMENTWISE, per_output * call.outputs[0].numel),)
    cost = make_contraction(call, [_product(a, b)], extra=extra, read=(a, b, *scales, *((c,) if beta else ())))
    return replace(cost, dtype=name_of(a.dtype))  # the type of the operands, not of c


def _scales(call: Call) -> list[TensorSpec]:
    given = (call.argument(name) for name in ("scale_a", "scale_b"))
    return [spec for value in given for spec in ((value,) if isinstance(value, TensorSpec) else value)]


def _multiplies_of(scales: list[TensorSpec]) -> int:
    """Per output: the two scales of the tensors are one factor, finer ones are two."""
    return 2 if any(scale.numel > 1 for scale in scales) else 1


def _product(a: TensorSpec, b: TensorSpec) -> Matmul:
    return Matmul(1, a.shape[0], b.shape[1], a.shape[1] * _packed(a))


@rule(aten._grouped_mm, aten._scaled_grouped_mm, aten._scaled_grouped_mm_v2)
def grouped_mm(call: Call) -> Cost:
    """One matmul a group. `offs` splits the rows of a 2-D `self` (tokens of an expert), the columns of a 2-D `mat2`, or
    their common depth where both are 2-D. Rows and columns of no group, or of an empty one, are not touched."""
    a, b, out = call.inputs[0], call.inputs[1], call.outputs[0]
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1] * _packed(a)
    per_output = (0 if call.func.overloadpacket is aten._grouped_mm else 2) + (call.argument("bias") is not None)
    if len(a.shape) == len(b.shape) == 3:
        return make_contraction(call, [Matmul(a.shape[0], m, n, k)], extra=((ELEMENTWISE, per_output * out.numel),))
    by_rows, by_columns = len(a.shape) < len(b.shape), len(a.shape) > len(b.shape)
    whole = a.shape[-2] if by_rows else b.shape[-1] if by_columns else a.shape[-1]
    ends = call.argument("offs")
    sizes = equal_groups(whole, ends.numel) if call.groups is None else call.groups
    filled, held = sum(size > 0 for size in sizes), sum(sizes)
    of_b = share_of(b, filled if by_rows else held, b.shape[0] if by_rows else whole)
    of_a = share_of(a, filled if by_columns else held, a.shape[0] if by_columns else whole)
    of_out = share_of(out, held, whole) if by_rows or by_columns else Region(out, out.nbytes)
    others = [Region(spec, spec.nbytes) for spec in dict.fromkeys(call.inputs[2:]) if spec is not ends]
    products = [
        Matmul(count, size, n, k)
        if by_rows
        else Matmul(count, m, size, k)
        if by_columns
        else Matmul(count, m, n, size * _packed(a))
        for size, count in sorted(Counter(sizes).items())
        if size or not (by_rows or by_columns)
    ]
    return make_product(
        call,
        GroupedMatmulWork(tuple(products), macs_of(call, products)),
        extra=((ELEMENTWISE, per_output * of_out.nbytes // out.dtype.itemsize),),
        read=(of_a, of_b, Region(ends, ends.nbytes), *others),
        written=(of_out,),
    )


def group_assumptions(kernels: Iterable[Kernel]) -> list[str]:
    """What is assumed about the groups of compiled matmuls: the compiler knows no values of offsets. (Of an eager op
    the assumption is listed with its line.)"""
    calls = {
        kernel.op.call for kernel in kernels if kernel.op.graph is not None and kernel.cost.op_class == CONTRACTION
    }
    names = sorted({call.name for call in calls if call.groups is None and call.get("offs") is not None})
    return [f"groups of equal length for {', '.join(names)} in compiled graphs"] if names else []


def equal_groups(whole: int, count: int) -> tuple[int, ...]:
    """The lengths of this many groups, as equal as possible."""
    size, rest = divmod(whole, max(count, 1))
    return (size + 1,) * rest + (size,) * (count - rest)


def share_of(spec: TensorSpec, part: int, whole: int) -> Region:
    """The part of a tensor that `part` of its `whole` rows, columns or matrices make up."""
    return Region(spec, spec.nbytes * part // max(whole, 1))


@rule(aten._weight_int8pack_mm, aten._weight_int4pack_mm)
def packed_weight_mm(call: Call) -> Cost:
    """x @ w^T with w unpacked on the way: of int4 with a scale and a zero point for each weight, of int8 with one scale
    for each column. (The kernels that cast x, the scales and the result from and to fp32 are left out.)"""
    matmul, is_int4 = _of_rows(call), call.func.overloadpacket is aten._weight_int4pack_mm
    work = UnpackingMatmulWork(matmul, matmul.macs, 4 if is_int4 else 8)
    scaling = 2 * matmul.n * matmul.k if is_int4 else call.outputs[0].numel
    return make_product(call, work, extra=((ELEMENTWISE, scaling),))


@rule(aten._weight_int4pack_mm_for_cpu, aten._weight_int4pack_mm_with_scales_and_zeros, aten._dyn_quant_matmul_4bit)
def int4_weight_mm(call: Call) -> Cost:
    """The int4 product on CPUs and on Intel's GPUs."""
    matmul = _of_rows(call)
    return make_contraction(call, [matmul], extra=((ELEMENTWISE, 2 * matmul.n * matmul.k),))


def _of_rows(call: Call) -> Matmul:
    """Each row of the first input, which may have any rank, times a matrix."""
    x, out = call.inputs[0], call.outputs[0]
    return Matmul(1, prod(x.shape[:-1]), out.shape[-1], x.shape[-1])


@rule(aten._sparse_semi_structured_mm, aten._sparse_semi_structured_linear, aten._cslt_sparse_mm)
def semi_structured_mm(call: Call) -> Cost:
    """2:4 sparsity: of each four weights two are stored and multiplied, so half the dense matmul."""
    out, dense = call.outputs[0], call.get("dense_B", call.get("mat2"))
    depth = call.inputs[0].shape[-1] if dense is None else dense.shape[-2]  # `linear` has its input first
    bias = out.numel if call.get("bias") is not None else 0
    product = Matmul(1, out.numel // max(out.shape[-1], 1), out.shape[-1], depth // 2)
    return make_contraction(call, [product], extra=((ELEMENTWISE, bias),))


def _packed(operand: TensorSpec) -> int:
    return 2 if operand.dtype is torch.float4_e2m1fn_x2 else 1
