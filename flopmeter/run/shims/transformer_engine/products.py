"""Matmuls (transformer_engine/common/gemm/cublaslt_gemm.cu): torch's where it has the call, operators of flopmeter's
own where cuBLASLt does more in the epilogue: GELU beside its input, the gradient of GELU, the sum of a bias' gradient,
and adding to a gradient in fp32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flopmeter.costs import make_contraction
from flopmeter.records import ELEMENTWISE, Call, Cost, Matmul, TensorSpec
from flopmeter.records.dtypes import name_of
from flopmeter.run.shims.kernel import kernel
from flopmeter.run.shims.transformer_engine.casts import MatmulOperand, packing, swizzle, there

GELU, GELU_GRADIENT = 9, 18  # operations an element, in the form with tanh (costs/arithmetic/pointwise.py)


def _matmul(left: TensorSpec, right: TensorSpec) -> Matmul:
    depth = left.shape[1] * packing(left.dtype)
    return Matmul(1, left.shape[0], right.shape[1], depth)


def _gelu_cost(call: Call) -> Cost:
    left, right = call.argument("left"), call.argument("right")
    each = GELU + (call.argument("bias") is not None)
    n = call.outputs[0].numel
    return make_contraction(call, [_matmul(left, right)], extra=((ELEMENTWISE, each * n),), transcendentals=n)


@kernel("te_gemm_gelu", _gelu_cost)
def gemm_gelu(left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """GELU of the product, and the product, which its gradient needs."""
    out = left.new_empty(left.shape[0], right.shape[1])
    return out, torch.empty_like(out)


def _gelu_gradient_cost(call: Call) -> Cost:
    left, right = call.argument("left"), call.argument("right")
    n = call.outputs[0].numel
    return make_contraction(call, [_matmul(left, right)], extra=((ELEMENTWISE, GELU_GRADIENT * n),), transcendentals=n)


@kernel("te_gemm_gelu_gradient", _gelu_gradient_cost)
def gemm_gelu_gradient(before: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The product times the derivative of GELU at `before`."""
    return torch.empty_like(before)


def _weight_gradient_cost(call: Call) -> Cost:
    """A product; with a bias also the sum of the left factor over the depth. A gradient that it adds to is read too."""
    left, right, into = call.argument("left"), call.argument("right"), call.get("into")
    adds = left.numel if call.argument("bias_gradient") else 0
    adds += into.numel if into is not None and call.argument("accumulates") else 0
    read = tuple(spec for spec in call.inputs if spec is not into or call.argument("accumulates"))
    written = call.outputs if into is None else (into, *call.outputs)
    cost = make_contraction(call, [_matmul(left, right)], extra=((ELEMENTWISE, adds),), read=read, written=written)
    return replace(cost, dtype=name_of(left.dtype))  # not that of what is added to


@kernel("te_gemm_bias_gradient", _weight_gradient_cost)
def gemm_bias_gradient(left: Tensor, right: Tensor, bias_gradient: bool) -> tuple[Tensor, Tensor]:
    return left.new_empty(left.shape[0], right.shape[1]), left.new_empty(left.shape[0])


@kernel("te_gemm_into", _weight_gradient_cost, mutates=("into",))
def gemm_into(
    into: Tensor,
    left: Tensor,
    right: Tensor,
    left_scales: Tensor | None,
    right_scales: Tensor | None,
    accumulates: bool,
    bias_gradient: bool,
) -> Tensor:
    """The product is written to, or added to, a gradient that is there; the bias' gradient, which may be empty."""
    return left.new_empty(left.shape[0] if bias_gradient else 0)


def output(x: MatmulOperand, weight: MatmulOperand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x @ weight^T + bias."""
    left, right = there(x.rows), there(weight.rows)
    if not x.is_scaled:
        return left @ right.t() if bias is None else torch.addmm(bias, left, right.t())
    bias = bias.bfloat16() if bias is not None and dtype is torch.float32 else bias  # cuBLAS adds none in fp32
    return _scaled(left, there(x.row_scales), right, there(weight.row_scales), dtype, bias)


def input_gradient(gradient: MatmulOperand, weight: MatmulOperand, dtype: torch.dtype) -> Tensor:
    """gradient @ weight."""
    left = there(gradient.rows)
    if not gradient.is_scaled:
        return left @ there(weight.rows)
    return _scaled(left, there(gradient.row_scales), there(weight.columns), there(weight.column_scales), dtype)


def weight_gradient(
    gradient: MatmulOperand,
    x: MatmulOperand,
    dtype: torch.dtype,
    into: Tensor | None,
    accumulates: bool,
    bias_gradient: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """gradient^T @ x, and the bias' gradient if it is asked for."""
    is_scaled = gradient.is_scaled
    left = there(gradient.columns) if is_scaled else there(gradient.rows).t()
    right = there(x.columns).t() if is_scaled else there(x.rows)
    if into is not None:
        scales = gradient.column_scales, x.column_scales
        of_bias = gemm_into(into, left, right, *scales, accumulates, bias_gradient)
        return None, of_bias if bias_gradient else None
    if is_scaled:
        return _scaled(left, there(gradient.column_scales), right.t(), there(x.column_scales), dtype), None
    return gemm_bias_gradient(left, right, True) if bias_gradient else (left @ right, None)


def _scaled(
    left: Tensor, left_scales: Tensor, right: Tensor, right_scales: Tensor, dtype: torch.dtype, bias: Any = None
) -> Tensor:
    """left [M, K] @ right [N, K]^T."""
    if left_scales.dtype is not torch.float32:  # MXFP8 and NVFP4
        left_scales, right_scales = swizzle(left_scales), swizzle(right_scales)
    elif right_scales.ndim == 2:
        right_scales = right_scales.t()
    return torch._scaled_mm(left, right.t(), left_scales, right_scales, bias=bias, out_dtype=dtype, use_fast_accum=True)
