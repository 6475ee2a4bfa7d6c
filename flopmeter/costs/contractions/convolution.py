"""Convolutions, forward and backward: an implicit matmul of 2·M·N·K, the bias, and the copies that a layout costs."""

from __future__ import annotations

from math import prod
from typing import Any

from flopmeter.costs.access import walk_of_sum
from flopmeter.costs.dense_operands import copy_of
from flopmeter.costs.rules import FREE, make_convolution, make_cost, reduced, rule, scratch
from flopmeter.costs.windows import covered
from flopmeter.records import ELEMENTWISE, Call, Convolution, Cost, Matmul, Planes, Region, TensorSpec
from flopmeter.records.memory_format import dense_strides, is_channels_last, is_dense
from flopmeter.torch_names.operators import aten

_GENERAL = (aten.convolution, aten._convolution)  # they say whether it is transposed


@rule(
    aten.convolution, aten._convolution, aten.cudnn_convolution,
    aten.mkldnn_convolution, aten.cudnn_convolution_transpose,
)  # fmt: skip
def convolution(call: Call) -> tuple[Cost, ...]:
    """An implicit matmul of [output positions, (C_in/groups)·kernel] with the filters, per group.

    A transposed convolution does the same arithmetic with input and output exchanged. The full kernel is counted at the
    border, padding included. cuDNN reads operands that are dense in its layout; others are copied to that layout first.
    The bias is added by a kernel of its own.
    """
    x, weight = call.inputs[:2]
    (out,) = call.outputs
    packet = call.func.overloadpacket
    transposed = packet is aten.cudnn_convolution_transpose or (packet in _GENERAL and call.argument("transposed"))
    product = _implicit_product(x, weight, out, transposed, call.argument("groups"))
    channels_last = is_channels_last(out.shape, out.stride)
    shape = _shape(call, weight, x if transposed else out, transposed, channels_last, (x, weight, out))
    layout = _ConvolutionLayout(call, (x, weight), channels_last)
    met = x if transposed else _met(call, x, weight, out)
    read = (layout.part(x, met), layout.part(weight, weight))
    product_cost = make_convolution(call, product, shape, read=read)
    kernels = [*layout.copies, product_cost]
    if len(call.inputs) > 2:
        kernels.append(_bias(call, out, call.inputs[2]))
    return tuple(kernels)


def _bias(call: Call, out: TensorSpec, bias: TensorSpec) -> Cost:
    """`output.add_(bias)`, one number for each channel (aten/src/ATen/native/cudnn/ConvShared.cpp)."""
    trailing = len(out.shape) - 2
    by_channel = bias._replace(shape=bias.shape + (1,) * trailing, stride=(1,) * (1 + trailing))
    walks = out, out, by_channel
    return make_cost(call, ELEMENTWISE, out.numel, read=(out, bias), walks=walks)


@rule(aten.cudnn_convolution_relu, aten.cudnn_convolution_add_relu)
def convolution_relu(call: Call) -> Cost:
    """One kernel: the matmul, alpha·z where there is one, the bias and ReLU (0)."""
    x, weight, *rest = call.inputs
    (out,) = call.outputs
    adds = (len(call.inputs) - 2) * out.numel
    scaled = call.func.overloadpacket is aten.cudnn_convolution_add_relu and call.argument("alpha") not in (None, 1)
    product = _implicit_product(x, weight, out, False, call.argument("groups"))
    extra = ((ELEMENTWISE, adds + scaled * out.numel),)
    shape = _shape(call, weight, out, False, is_channels_last(out.shape, out.stride), (x, weight, out))
    read = (_met(call, x, weight, out), weight, *rest)
    return make_convolution(call, product, shape, extra=extra, read=read)


@rule(aten.convolution_backward)
def convolution_backward(call: Call) -> tuple[Cost, ...]:
    """The gradients of input and filters are one matmul each, of the forward's size; that of the bias
    is a sum over everything but the channels."""
    grad, x, weight = call.inputs
    transposed = call.argument("transposed")
    product = _implicit_product(x, weight, grad, transposed, call.argument("groups"))
    wants_input, wants_weight, wants_bias = call.argument("output_mask")
    outputs = iter(call.outputs)
    if not (wants_input or wants_weight):
        return (_bias_gradient(call, grad, next(outputs)),) if wants_bias else FREE
    channels_last = any(is_channels_last(spec.shape, spec.stride) for spec in (x, weight))
    shape = _shape(call, weight, x if transposed else grad, transposed, channels_last, (grad, weight, x))
    layout = _ConvolutionLayout(call, (grad, x, weight), channels_last)
    kernels = layout.copies
    if wants_input:
        read = (layout.part(grad, grad), layout.part(weight, weight))
        by_input = shape._replace(computes="input gradient")
        kernels.append(make_convolution(call, product, by_input, read=read, written=(next(outputs),)))
    if wants_weight:
        batch, m, n, k = product
        by_weight = Matmul(batch, n, k, m)  # the sum runs over the positions
        met = (_met(call, grad, weight, x), x) if transposed else (grad, _met(call, x, weight, grad))
        read = (layout.part(grad, met[0]), layout.part(x, met[1]))
        of_grad, of_weight, of_input = shape.tensors
        by_filter = shape._replace(positions=(), computes="filter gradient", tensors=(of_grad, of_input, of_weight))
        kernels.append(make_convolution(call, by_weight, by_filter, read=read, written=(next(outputs),)))
    if wants_bias:
        kernels.append(_bias_gradient(call, grad, next(outputs)))
    return tuple(kernels)


def _bias_gradient(call: Call, grad: TensorSpec, written: TensorSpec) -> Cost:
    """`grad_output.sum` over all dimensions but the channels' (aten/src/ATen/native/Convolution.cpp)."""
    walked = walk_of_sum(grad, (0, *range(2, len(grad.shape))))
    return reduced(call, grad, written, walked=walked, flops=grad.numel)


def _met(call: Call, wide: TensorSpec, weight: TensorSpec, narrow: TensorSpec) -> TensorSpec:
    """The part of `wide` that the filters meet while they slide over it; they stop at the positions of `narrow`."""
    stride, padding, dilation = (call.argument(name) for name in ("stride", "padding", "dilation"))
    kernel = weight.shape[2:]
    return covered(wide, narrow.shape[-len(kernel) :], kernel, stride, padding, dilation)


class _ConvolutionLayout:
    """The operands as cuDNN reads them: `tensor.contiguous(backend_memory_format)` of each, which is a copy where it
    is not dense in that order (aten/src/ATen/native/Convolution.cpp)."""

    def __init__(self, call: Call, operands: tuple[TensorSpec, ...], channels_last: bool):
        self.copies: list[Cost] = []
        self._copied: dict[TensorSpec, TensorSpec] = {}
        for number, spec in enumerate(operands, 1):
            if not is_dense(spec.shape, spec.stride, channels_last=channels_last):
                copy = scratch(spec, number)._replace(stride=dense_strides(spec.shape, channels_last=channels_last))
                self._copied[spec] = copy
                self.copies.append(copy_of(call, spec, copy))

    def part(self, operand: TensorSpec, met: TensorSpec) -> TensorSpec | Region:
        """The part of an operand that the matmul reads: what the filters meet."""
        copy = self._copied.get(operand)
        return met if copy is None else Region(copy, met.nbytes)


def _shape(
    call: Call,
    weight: TensorSpec,
    anchor: TensorSpec,
    transposed: bool,
    channels_last: bool,
    tensors: tuple[TensorSpec, ...],
) -> Convolution:
    """What the time model needs besides the matmul; `anchor` has the positions that meet the whole kernel."""
    _, channels, *kernel = weight.shape
    steps = (*call.argument("stride"), *call.argument("dilation"))
    is_unit_step = not transposed and all(step == 1 for step in steps)
    planes = tuple(Planes(spec.shape[0], spec.shape[1], prod(spec.shape[2:])) for spec in tensors)
    return Convolution(
        channels, tuple(kernel), anchor.shape[-len(kernel) :], is_unit_step, channels_last, tensors=planes
    )


def _implicit_product(x: TensorSpec, weight: TensorSpec, out: TensorSpec, transposed: Any, groups: int) -> Matmul:
    """Filters are [C_out, C_in/groups, *kernel]; transposed ones [C_in, C_out/groups, *kernel], and it is
    the input positions that each meet the whole kernel."""
    channels, per_group, *kernel = weight.shape
    anchor = x if transposed else out
    positions = anchor.shape[0] * prod(anchor.shape[2:])
    return Matmul(groups, positions, channels // groups, per_group * prod(kernel))
