"""Matrix products and convolutions, forward and backward: 2·M·N·K each."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from flopmeter.costs.rules import COMPLEX_ADD, COMPLEX_MULTIPLY, FREE, make_contraction, make_cost, rule
from flopmeter.records import ELEMENTWISE, REDUCTION, Call, Convolution, Cost, Matmul, TensorSpec

aten = torch.ops.aten
_GENERAL = (aten.convolution, aten._convolution)  # they say whether it is transposed


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


@rule(aten.addmm, aten.addmm_, aten.baddbmm, aten.baddbmm_)
def addmm(call: Call) -> Cost:
    """beta·bias + alpha·(a @ b): the product, then per output one add and one multiply for each of
    alpha and beta that is not 1. cuBLAS does it in the product's epilogue."""
    return _scaled_sum(call, _product(*call.inputs[1:3]))


@rule(aten._addmm_activation)
def addmm_activation(call: Call) -> Cost:
    """addmm with ReLU (0) or GELU (tanh, 9 with one function) in the epilogue."""
    product = _product(*call.inputs[1:3])
    gelus = product.m * product.n if call.argument("use_gelu") else 0
    return _scaled_sum(call, product, more_flops=9 * gelus, transcendentals=gelus)


@rule(aten.addbmm, aten.addbmm_)
def addbmm(call: Call) -> Cost:
    """beta·input + alpha·sum over the batch of (a @ b): one product whose depth is batch·k."""
    a, b = call.inputs[1:3]
    batch, m, k = a.shape
    return _scaled_sum(call, Matmul(1, m, b.shape[-1], batch * k))


@rule(aten.mv)
def mv(call: Call) -> Cost:
    """[m, k] @ [k]."""
    m, k = call.inputs[0].shape
    return make_contraction(call, [Matmul(1, m, 1, k)])


@rule(aten.addmv, aten.addmv_)
def addmv(call: Call) -> Cost:
    """beta·input + alpha·(A @ x)."""
    m, k = call.inputs[1].shape
    return _scaled_sum(call, Matmul(1, m, 1, k))


@rule(aten.dot, aten.vdot)
def dot(call: Call) -> Cost:
    """[k] · [k]."""
    return make_contraction(call, [Matmul(1, 1, 1, call.inputs[0].numel)])


@rule(aten.addr, aten.addr_)
def addr(call: Call) -> Cost:
    """beta·input + alpha·(x ⊗ y)."""
    x, y = call.inputs[1:3]
    return _scaled_sum(call, Matmul(1, x.numel, y.numel, 1))


@rule(aten._trilinear)
def trilinear(call: Call) -> Cost:
    """Sums over an index space that three tensors span, each broadcast over its `expand` dimensions (bilinear
    layers): the first two are multiplied over what the third lacks, the result with the third over the rest."""
    first, second, third = (
        _unsqueezed(spec.shape, call.argument(f"expand{i}")) for i, spec in enumerate(call.inputs, 1)
    )
    summed_early = {dim for dim in call.argument("sumdim") if dim in call.argument("expand3")}
    pair = torch.broadcast_shapes(first, second)
    kept = [1 if dim in summed_early else size for dim, size in enumerate(pair)]
    macs = prod(pair), prod(torch.broadcast_shapes(tuple(kept), third))
    return make_contraction(call, [Matmul(1, 1, 1, count) for count in macs])


@rule(aten.conv_tbc)
def conv_tbc(call: Call) -> Cost:
    """x [T, B, C_in], filters [kernel, C_in, C_out], and the bias."""
    (kernel, c_in, c_out), (out,) = call.inputs[1].shape, call.outputs
    product = Matmul(1, out.shape[0] * out.shape[1], c_out, c_in * kernel)
    return make_contraction(call, [product], extra=((ELEMENTWISE, out.numel),), tf32_switch="cudnn")


@rule(
    aten.convolution, aten._convolution, aten.cudnn_convolution,
    aten.mkldnn_convolution, aten.cudnn_convolution_transpose,
)  # fmt: skip
def convolution(call: Call) -> tuple[Cost, ...]:
    """An implicit product of [output positions, (C_in/groups)·kernel] with the filters, per group.

    A transposed convolution does the same arithmetic with input and output exchanged. The full kernel is
    counted at the border, padding included. cuDNN leaves the bias to a kernel of its own.
    """
    x, weight = call.inputs[:2]
    (out,) = call.outputs
    packet = call.func.overloadpacket
    transposed = packet is aten.cudnn_convolution_transpose or (packet in _GENERAL and call.argument("transposed"))
    product = _implicit_product(x, weight, out, transposed, call.argument("groups"))
    shape = _shape(call, weight, x if transposed else out, transposed)
    main = make_contraction(call, [product], read=(x, weight), written=(out,), tf32_switch="cudnn", convolution=shape)
    bias = call.inputs[2] if len(call.inputs) > 2 else None
    if bias is None:
        return (main,)
    return (main, make_cost(call, ELEMENTWISE, out.numel, read=(out, bias), written=(out,), access="broadcast"))


@rule(aten.cudnn_convolution_relu, aten.cudnn_convolution_add_relu)
def convolution_relu(call: Call) -> Cost:
    """One kernel: the product, alpha·z where there is one, the bias and ReLU (0)."""
    x, weight, *_ = call.inputs
    (out,) = call.outputs
    adds = (len(call.inputs) - 2) * out.numel
    scaled = call.func.overloadpacket is aten.cudnn_convolution_add_relu and call.argument("alpha") not in (None, 1)
    product = _implicit_product(x, weight, out, False, call.argument("groups"))
    extra = ((ELEMENTWISE, adds + scaled * out.numel),)
    shape = _shape(call, weight, out, False)
    return make_contraction(call, [product], extra=extra, tf32_switch="cudnn", convolution=shape)


@rule(aten.convolution_backward)
def convolution_backward(call: Call) -> tuple[Cost, ...]:
    """The gradients of input and filters are one product each, of the forward's size; that of the bias
    is a sum over everything but the channels."""
    grad, x, weight = call.inputs[:3]
    product = _implicit_product(x, weight, grad, call.argument("transposed"), call.argument("groups"))
    wants_input, wants_weight, wants_bias = call.argument("output_mask")
    outputs = iter(call.outputs)
    kernels: list[Cost] = []
    transposed = call.argument("transposed")
    shape = _shape(call, weight, x if transposed else grad, transposed)
    if wants_input:
        kernels.append(_gradient(call, product, (grad, weight), next(outputs), shape))
    if wants_weight:
        batch, m, n, k = product
        by_weight = Matmul(batch, n, k, m)  # the positions are what is summed over
        kernels.append(_gradient(call, by_weight, (grad, x), next(outputs), shape._replace(positions=())))
    if wants_bias:
        kernels.append(make_cost(call, REDUCTION, grad.numel, read=(grad,), written=(next(outputs),)))
    return tuple(kernels) or FREE


def _unsqueezed(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    sizes = list(shape)
    for dim in dims:
        sizes.insert(dim, 1)
    return tuple(sizes)


def _gradient(
    call: Call, product: Matmul, read: tuple[TensorSpec, ...], written: TensorSpec, shape: Convolution
) -> Cost:
    return make_contraction(call, [product], read=read, written=(written,), tf32_switch="cudnn", convolution=shape)


def _shape(call: Call, weight: TensorSpec, anchor: TensorSpec, transposed: bool) -> Convolution:
    """What the time model needs beside the product; `anchor` has the positions that meet the whole kernel."""
    _, channels, *kernel = weight.shape
    steps = (*call.argument("stride"), *call.argument("dilation"))
    is_dense = not transposed and all(step == 1 for step in steps)
    channel = -len(kernel) - 1
    activations = [spec for spec in call.inputs[:2] if spec is not weight]
    channels_last = any(spec.stride[channel] == 1 != spec.shape[channel] for spec in activations)
    return Convolution(channels, tuple(kernel), anchor.shape[-len(kernel) :], is_dense, channels_last)


def _scaled_sum(call: Call, product: Matmul, *, more_flops: int = 0, transcendentals: int = 0) -> Cost:
    """The product and beta·input + alpha·product. With beta 0 the input is not even read."""
    operands = call.inputs[1:3]
    beta, alpha = call.argument("beta"), call.argument("alpha")
    add, multiply = (COMPLEX_ADD, COMPLEX_MULTIPLY) if _is_complex(call) else (1, 1)
    per_output = (add if beta != 0 else 0) + multiply * ((beta not in (0, 1)) + (alpha != 1))
    sums = per_output * product.batch * product.m * product.n
    return make_contraction(
        call,
        [product],
        extra=((ELEMENTWISE, sums + more_flops),),
        read=None if beta != 0 else operands,
        transcendentals=transcendentals,
    )


def _is_complex(call: Call) -> bool:
    return any(spec.dtype.is_complex for spec in call.inputs)


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
