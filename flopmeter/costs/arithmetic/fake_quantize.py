"""Fake quantization, by which networks learn to bear int8: numbers go to the nearest step of a grid and back. The ops
launch several kernels below the dispatcher, and some wait for numbers that the host asks for (torch's sources:
aten/src/ATen/native/quantized, FakeQuantPer*Affine.cpp, cuda/FakeQuantizeCore.cu and cuda/FusedObsFakeQuant.cu)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flopmeter.costs.rules import in_one_piece, make_cost, rule, scratch
from flopmeter.records import ELEMENTWISE, MOVEMENT, REDUCTION, Call, Cost, Region, TensorSpec
from flopmeter.torch_names.operators import aten

_OF_TENSOR = 5  # (clamp(round(x / scale) + zero) - zero)·scale, with one over the scale computed before
_OF_CHANNELS, _MASK_OF_CHANNELS = 6, 4  # where it is computed for each number; the mask needs no way back
# For each number inside of the grid: its step and back (5), dY in its place (1), dY·(value - x)/scale·factor (4).
_GRADIENTS, _GRADIENTS_OF_CHANNELS = 10, 11
_AVERAGES = 2 * 3  # old + share·(new - old), of the least and the largest number
_GRID = 9  # (most - least)/steps, two candidates for the zero point, how far each is off, rounding
_SYMMETRIC_GRID = _GRID + 4  # the larger of two quotients, times both ends


@rule(aten.fake_quantize_per_tensor_affine_cachemask, aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams)
def of_tensor(call: Call) -> Cost:
    """One kernel for the numbers and the mask of those inside of the grid."""
    return make_cost(call, ELEMENTWISE, _OF_TENSOR * call.inputs[0].numel)


@rule(aten.fake_quantize_per_channel_affine_cachemask)
def of_channels(call: Call) -> tuple[Cost, ...]:
    x, scale, zero = call.inputs
    return _by_channels(call, x, scale, zero, call.outputs)


@rule(aten._fake_quantize_learnable_per_tensor_affine)
def learnable_of_tensor(call: Call) -> tuple[Cost, ...]:
    """The mask is computed and dropped: the gradients compute it again."""
    (x, scale, zero), (out,) = call.inputs, call.outputs
    return *_asked(call, [scale, zero]), _with_mask(call, x, out)


@rule(aten._fake_quantize_learnable_per_tensor_affine_backward)
def learnable_of_tensor_backward(call: Call) -> tuple[Cost, ...]:
    grad, x, scale, zero = call.inputs
    return *_asked(call, [scale, zero]), *_gradients(call, (x, grad), _GRADIENTS)


@rule(aten._fake_quantize_learnable_per_channel_affine)
def learnable_of_channels(call: Call) -> tuple[Cost, ...]:
    (x, scale, zero), (out,) = call.inputs, call.outputs
    rounded = scratch(zero, 2)
    mask = scratch(out, 3)._replace(dtype=torch.bool)
    return (
        *_rounded(call, zero, rounded),
        make_cost(call, MOVEMENT, read=(rounded,), written=(rounded,)),  # to int32, of the same width
        *_asked_for_ends(call, rounded),
        *_two_passes(call, (x, scale, rounded), out, mask),
    )


@rule(aten._fake_quantize_learnable_per_channel_affine_backward)
def learnable_of_channels_backward(call: Call) -> tuple[Cost, ...]:
    grad, x, scale, zero = call.inputs
    rounded = scratch(zero, 4)
    return (
        *_rounded(call, zero, rounded),
        *_asked_for_ends(call, rounded),
        *_gradients(call, (x, grad, scale, rounded), _GRADIENTS_OF_CHANNELS),
    )


@rule(aten._fused_moving_avg_obs_fq_helper)
def observed(call: Call) -> tuple[Cost, ...]:
    """The range of the numbers is averaged into that of earlier steps, the grid follows from it, and the numbers go to
    the grid. Whether each of these is done is decided by a switch on the device; for channels the host asks."""
    names = ("self", "observer_on", "fake_quant_on", "running_min", "running_max", "scale", "zero_point")
    x, observes, quantizes, *kept = map(call.argument, names)
    by_channels = call.argument("per_row_fake_quant")
    channels = x.shape[call.argument("ch_axis")] if by_channels else 1
    low, high, scale, zero = (in_one_piece(spec, (channels,)) for spec in kept)
    least, most = (in_one_piece(scratch(x, number), (channels,)) for number in (1, 2))
    of_grid = _SYMMETRIC_GRID if call.argument("symmetric_quant") else _GRID
    costs = [
        *_copies(call, x, by_channels),
        make_cost(call, REDUCTION, read=(x,), written=(least, most)),
        make_cost(
            call, ELEMENTWISE, _AVERAGES * channels, read=(least, most, low, high, observes), written=(low, high)
        ),
        make_cost(call, ELEMENTWISE, of_grid * channels, read=(low, high, quantizes), written=(scale, zero)),
    ]
    if by_channels:
        return *costs, *_asked(call, [quantizes]), *_by_channels(call, x, scale, zero, call.outputs)
    read = (x, scale, zero, quantizes)
    return *costs, make_cost(call, ELEMENTWISE, _OF_TENSOR * x.numel, read=read, written=call.outputs)


def _by_channels(
    call: Call, x: TensorSpec, scale: TensorSpec, zero: TensorSpec, outputs: tuple[TensorSpec, ...]
) -> tuple[Cost, ...]:
    out, mask = outputs
    checks = () if zero.is_floating else _asked_for_ends(call, zero)
    return *checks, *_two_passes(call, (x, scale, zero), out, mask)


def _two_passes(call: Call, read: tuple[TensorSpec, ...], out: TensorSpec, mask: TensorSpec) -> tuple[Cost, ...]:
    """The mask, and then the numbers."""
    return (
        make_cost(call, ELEMENTWISE, _MASK_OF_CHANNELS * out.numel, read=read, written=(mask,)),
        make_cost(call, ELEMENTWISE, _OF_CHANNELS * out.numel, read=read, written=(out,)),
    )


def _with_mask(call: Call, x: TensorSpec, out: TensorSpec) -> Cost:
    mask = scratch(out)._replace(dtype=torch.bool)
    return make_cost(call, ELEMENTWISE, _OF_TENSOR * x.numel, read=(x,), written=(out, mask))


def _rounded(call: Call, zero: TensorSpec, rounded: TensorSpec) -> tuple[Cost, ...]:
    """Rounding is one operation, the clamp to the grid none."""
    return (
        make_cost(call, ELEMENTWISE, zero.numel, read=(zero,), written=(rounded,)),
        make_cost(call, ELEMENTWISE, read=(rounded,), written=(rounded,)),
    )


def _gradients(call: Call, read: tuple[TensorSpec, ...], flops: int) -> tuple[Cost, ...]:
    """The kernel for the gradient of the numbers. It also writes a number for each of them for scale and zero point,
    which a kernel each sums up."""
    of_x, *of_grid = call.outputs
    parts = [scratch(of_x, number) for number in (1, 2)]
    sums = (
        make_cost(call, REDUCTION, part.numel, read=(part,), written=(out,))
        for part, out in zip(parts, of_grid, strict=True)
    )
    return make_cost(call, ELEMENTWISE, flops * of_x.numel, read=read, written=(of_x, *parts)), *sums


def _copies(call: Call, x: TensorSpec, by_channels: bool) -> Iterable[Cost]:
    """The numbers in one piece; the channels of another axis than the first as rows."""
    dense = in_one_piece(scratch(x, 3), x.shape)
    is_permuted = by_channels and len(x.shape) != 2 and call.argument("ch_axis") != 0
    if x.stride != dense.stride:
        yield make_cost(call, MOVEMENT, read=(x,), written=(dense,))
    if is_permuted:
        yield make_cost(call, MOVEMENT, read=(x,), written=(dense,))


def _asked_for_ends(call: Call, zero: TensorSpec) -> tuple[Cost, ...]:
    """The host asks whether the least and the largest zero point lie on the grid."""
    ends = [in_one_piece(scratch(zero, number), (1,)) for number in (5, 6)]
    return make_cost(call, REDUCTION, read=(zero,), written=ends), *_asked(call, ends)


def _asked(call: Call, numbers: Iterable[TensorSpec]) -> tuple[Cost, ...]:
    """The host copies each number and waits for it."""
    return tuple(
        make_cost(call, MOVEMENT, read=(number,), written=(Region(None, number.nbytes),), blocks_host=True)
        for number in numbers
    )
