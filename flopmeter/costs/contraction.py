"""Matrix products and convolutions, forward and backward: 2·M·N·K each."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from flopmeter.costs.rules import FREE, make_contraction, make_cost, rule
from flopmeter.records import ELEMENTWISE, REDUCTION, Call, Cost, Matmul, TensorSpec

aten = torch.ops.aten


@rule(aten.mm, aten._int_mm)
def mm(call: Call) -> Cost:
    """[m, k] @ [k, n]."""
    a, b = call.inputs[:2]
    return make_contraction(call, [_product(a, b)])


@rule(aten.bmm)
def bmm(call: Call) -> Cost:
    """[b, m, k] @ [b, k, n]."""
    a, b = call.inputs[:2]
    return make_contraction(call, [_product(a, b)])


@rule(aten.addmm, aten.addmm_, aten._addmm_activation, aten.baddbmm, aten.baddbmm_)
def addmm(call: Call) -> Cost:
    """beta·bias + alpha·(a @ b): the product, then per output one add and one multiply for each of
    alpha and beta that is not 1. cuBLAS does it in the product's epilogue."""
    a, b = call.inputs[1:3]
    product = _product(a, b)
    per_output = 1 + sum(call.argument(scale) != 1 for scale in ("beta", "alpha"))
    bias_flops = per_output * product.batch * product.m * product.n
    return make_contraction(call, [product], extra=((ELEMENTWISE, bias_flops),))


@rule(aten.addbmm, aten.addbmm_)
def addbmm(call: Call) -> Cost:
    """beta·input + alpha·sum over the batch of (a @ b): one product whose depth is batch·k."""
    a, b = call.inputs[1:3]
    batch, m, k = a.shape
    n = b.shape[-1]
    per_output = 1 + sum(call.argument(scale) != 1 for scale in ("beta", "alpha"))
    return make_contraction(call, [Matmul(1, m, n, batch * k)], extra=((ELEMENTWISE, per_output * m * n),))


@rule(aten.mv)
def mv(call: Call) -> Cost:
    """[m, k] @ [k]."""
    m, k = call.inputs[0].shape
    return make_contraction(call, [Matmul(1, m, 1, k)])


@rule(aten.addmv, aten.addmv_)
def addmv(call: Call) -> Cost:
    """beta·input + alpha·(A @ x)."""
    m, k = call.inputs[1].shape
    per_output = 1 + sum(call.argument(scale) != 1 for scale in ("beta", "alpha"))
    return make_contraction(call, [Matmul(1, m, 1, k)], extra=((ELEMENTWISE, per_output * m),))


@rule(aten.dot, aten.vdot)
def dot(call: Call) -> Cost:
    """[k] · [k]."""
    return make_contraction(call, [Matmul(1, 1, 1, call.inputs[0].numel)])


@rule(aten.addr, aten.addr_)
def addr(call: Call) -> Cost:
    """beta·input + alpha·(x ⊗ y)."""
    x, y = call.inputs[1:3]
    per_output = 1 + sum(call.argument(scale) != 1 for scale in ("beta", "alpha"))
    outer = Matmul(1, x.numel, y.numel, 1)
    return make_contraction(call, [outer], extra=((ELEMENTWISE, per_output * x.numel * y.numel),))


@rule(aten.convolution, aten._convolution, aten.cudnn_convolution, aten.convolution_overrideable)
def convolution(call: Call) -> tuple[Cost, ...]:
    """An implicit product of [output positions, (C_in/groups)·kernel] with the filters, per group.

    A transposed convolution does the same arithmetic with input and output exchanged. The full kernel is
    counted at the border, padding included. cuDNN leaves the bias to a kernel of its own.
    """
    x, weight = call.inputs[:2]
    (out,) = call.outputs
    transposed = call.func.overloadpacket is not aten.cudnn_convolution and call.argument("transposed")
    product = _implicit_product(x, weight, out, transposed, call.argument("groups"))
    main = make_contraction(call, [product], read=(x, weight), written=(out,), tf32_switch="cudnn")
    bias = call.inputs[2] if len(call.inputs) > 2 else None
    if bias is None:
        return (main,)
    return (main, make_cost(call, ELEMENTWISE, out.numel, read=(out, bias), written=(out,)))


@rule(aten.convolution_backward)
def convolution_backward(call: Call) -> tuple[Cost, ...]:
    """The gradients of input and filters are one product each, of the forward's size; that of the bias
    is a sum over everything but the channels."""
    grad, x, weight = call.inputs[:3]
    product = _implicit_product(x, weight, grad, call.argument("transposed"), call.argument("groups"))
    wants_input, wants_weight, wants_bias = call.argument("output_mask")
    outputs = iter(call.outputs)
    kernels: list[Cost] = []
    if wants_input:
        kernels.append(_gradient(call, product, (grad, weight), next(outputs)))
    if wants_weight:
        batch, m, n, k = product
        by_weight = Matmul(batch, n, k, m)  # the positions are what is summed over
        kernels.append(_gradient(call, by_weight, (grad, x), next(outputs)))
    if wants_bias:
        kernels.append(make_cost(call, REDUCTION, grad.numel, read=(grad,), written=(next(outputs),)))
    return tuple(kernels) or FREE


def _gradient(call: Call, product: Matmul, read: tuple[TensorSpec, ...], written: TensorSpec) -> Cost:
    return make_contraction(call, [product], read=read, written=(written,), tf32_switch="cudnn")


def _product(a: TensorSpec, b: TensorSpec) -> Matmul:
    *batch, m, k = a.shape
    return Matmul(prod(batch), m, b.shape[-1], k)


def _implicit_product(x: TensorSpec, weight: TensorSpec, out: TensorSpec, transposed: Any, groups: int) -> Matmul:
    """Filters are [C_out, C_in/groups, *kernel]; transposed ones [C_in, C_out/groups, *kernel], and it is
    the input positions that each meet the whole kernel."""
    channels, per_group, *kernel = weight.shape
    anchor = x if transposed else out
    positions = anchor.shape[0] * prod(anchor.shape[2:])
    if len(anchor.shape) == len(weight.shape) - 1:  # unbatched
        positions = prod(anchor.shape[1:])
    return Matmul(groups, positions, channels // groups, per_group * prod(kernel))
