"""Interpolation: each output is a weighted sum of the few inputs (taps) around its place.

Weights depend on the place alone and are shared by all channels: they are counted where the caller gives the places
(grid_sample) and left out where they are a regular grid. An image that is made smaller is read in part: only the taps
of each place along each axis.
"""

from __future__ import annotations

from math import ceil

from torch._ops import OpOverloadPacket

from flopmeter.costs.atomics import WORD_BYTES, additions_to_taps
from flopmeter.costs.index_arithmetic import (
    LONG_QUOTIENT_OPERATIONS,
    NEAREST_OPERATIONS,
    QUOTIENTS_OF_NEAREST,
    place_operations,
)
from flopmeter.costs.rules import COMPLEX_ADD, make_cost, rule, zeros
from flopmeter.records import MOVEMENT, REDUCTION, Call, Cost, Region, TensorSpec, ThreadGrid, VectorWork
from flopmeter.records.memory_format import is_channels_last
from flopmeter.records.powers_of_two import power_of_two_up_to
from flopmeter.torch_names.operators import aten

# (taps along each axis, axes). A line through t taps takes t multiplies and t - 1 adds, axis after axis.
_FILTERS = {
    "upsample_linear1d": (2, 1),
    "upsample_bilinear2d": (2, 2),
    "upsample_trilinear3d": (2, 3),
    "upsample_bicubic2d": (4, 2),
}
_UPSAMPLERS: dict[OpOverloadPacket, tuple[int, int]] = {getattr(aten, name): of for name, of in _FILTERS.items()}
NEAREST_THREADS = 512  # of a block
# Instructions of a thread that adds one element's gradient to its four taps, in 32 and in 16 bits, without the slow
# paths: the machine code of torch 2.15 for compute capability 9.0.
BILINEAR_GRADIENT = (130, 330)
_GRADIENTS = {getattr(aten, f"{name}_backward"): of for name, of in _FILTERS.items()}


@rule(*_UPSAMPLERS)
def upsample(call: Call) -> Cost:
    """Lines along the first axis, then one through their results, ...: for two taps and two axes (2 + 1)·3 = 9."""
    taps, axes = _UPSAMPLERS[call.func.overloadpacket]
    lines = sum(taps**axis for axis in range(axes))
    (x,), (out,) = call.inputs, call.outputs
    sizes = [min(before, taps * after) for before, after in zip(x.shape[-axes:], out.shape[-axes:], strict=True)]
    read = x._replace(shape=(*x.shape[:-axes], *sizes))
    places = place_operations(out.numel) if x.stride[1] == 1 else None  # else a thread loops over the planes
    return make_cost(call, REDUCTION, (2 * taps - 1) * lines * out.numel, read=(read,), index_operations=places)


@rule(
    aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d, aten._upsample_nearest_exact1d,
    aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d,
)  # fmt: skip
def nearest(call: Call) -> Cost:
    """Each output is a copy of one input; with fewer outputs than inputs only those are read."""
    (x,), (out,) = call.inputs, call.outputs
    places = _nearest_operations(x, out) if len(x.shape) == 4 else None
    read = x._replace(shape=tuple(map(min, x.shape, out.shape)))
    return make_cost(call, MOVEMENT, read=(read,), index_operations=places)


def _nearest_operations(x: TensorSpec, out: TensorSpec) -> int:
    """Integer operations of an image's threads, those beyond its edges included (UpSampleNearest2d.cu)."""
    if x.stride[1] == 1:
        return QUOTIENTS_OF_NEAREST * LONG_QUOTIENT_OPERATIONS * out.numel
    images, channels, height, width = out.shape
    across = power_of_two_up_to(width)
    along = max(1, min(power_of_two_up_to(height), NEAREST_THREADS // across))
    threads = ceil(width / across) * across * ceil(height / along) * along
    return NEAREST_OPERATIONS * images * channels * threads


@rule(*_GRADIENTS)
def upsample_backward(call: Call) -> tuple[Cost, ...]:
    """Each gradient times each tap's weight is added to that tap: 2. Along one axis a thread gathers what belongs to an
    element; otherwise a thread adds a gradient's parts to zeros (aten/src/ATen/native/cuda/UpSample*.cu)."""
    packet = call.func.overloadpacket
    taps, axes = _GRADIENTS[packet]
    (grad,), (out,) = call.inputs, call.outputs
    flops = 2 * taps**axes * grad.numel
    if packet is aten.upsample_bilinear2d_backward:
        instructions = BILINEAR_GRADIENT[grad.dtype.itemsize < WORD_BYTES] * grad.numel
        atomics = additions_to_taps(grad, out, taps**axes, align_corners=call.argument("align_corners"))
        work = VectorWork(instructions=instructions, atomics=atomics)
        return zeros(call, out), make_cost(call, REDUCTION, flops, work=work)
    added = make_cost(call, REDUCTION, flops, index_operations=place_operations(grad.numel))
    return (added,) if axes == 1 else (zeros(call, out), added)


@rule(aten.upsample_nearest2d_backward, aten._upsample_nearest_exact2d_backward)
def nearest_backward(call: Call) -> Cost:
    """Each element of the input sums the gradients of its copies. In NCHW a thread does so for one element of an image
    after another, and waits for each row of copies (upsample_nearest2d_backward_out_frame)."""
    (grad,), (out,) = call.inputs, call.outputs
    images, _, height, _ = out.shape
    if is_channels_last(grad.shape, grad.stride):
        places = QUOTIENTS_OF_NEAREST * LONG_QUOTIENT_OPERATIONS * out.numel
        return make_cost(call, REDUCTION, grad.numel, complex_factor=COMPLEX_ADD, index_operations=places)
    rows = images * ceil(grad.shape[2] / max(height, 1))
    blocks = ceil(out.numel / max(images, 1) / NEAREST_THREADS)
    grid = ThreadGrid(blocks, NEAREST_THREADS, rows, in_turns=True)
    return make_cost(call, REDUCTION, grad.numel, complex_factor=COMPLEX_ADD, grid=grid)


_SUPPORT = {
    aten._upsample_bilinear2d_aa: 1, aten._upsample_bilinear2d_aa_backward: 1,
    aten._upsample_bicubic2d_aa: 2, aten._upsample_bicubic2d_aa_backward: 2,
    aten._upsample_lanczos2d_aa: 3, aten._upsample_lanczos2d_aa_backward: 3,
}  # fmt: skip


@rule(*_SUPPORT)
def antialiased(call: Call) -> Cost:
    """A multiply-add per tap: twice the filter's support in each axis, stretched by the factor of reduction."""
    (small,), (large,) = call.inputs, call.outputs
    is_backward = call.name.endswith("_backward")
    x, out = (large, small) if is_backward else (small, large)
    support, taps = _SUPPORT[call.func.overloadpacket], 1
    for before, after in zip(x.shape[2:], out.shape[2:], strict=True):
        taps *= 2 * ceil(support * max(before / max(after, 1), 1.0))
    return make_cost(call, REDUCTION, 2 * taps * out.numel)


_SAMPLERS = (aten.grid_sampler_2d, aten.grid_sampler_3d, aten.cudnn_grid_sampler)
_NEAREST, _BICUBIC = 1, 2
_UNNORMALIZE = 4  # ((x + 1)·size - 1) / 2, for each coordinate


@rule(*_SAMPLERS)
def grid_sample(call: Call) -> Cost:
    """Per place: coordinates (4 each), distances to the neighbours (2 an axis) and the product of distances for
    each tap. Per channel: a multiply-add per tap. Reads at most all taps of all places."""
    x, grid = call.inputs
    (out,) = call.outputs
    taps, weights = _taps(call)
    axes, positions = grid.shape[-1], grid.numel // grid.shape[-1]
    flops = (axes * _UNNORMALIZE + weights) * positions + (2 * taps if taps > 1 else 0) * out.numel
    tapped = Region(x, min(taps * out.numel, x.distinct_elements) * x.dtype.itemsize)
    return make_cost(call, REDUCTION, flops, read=(tapped, grid))


@rule(aten.grid_sampler_2d_backward, aten.grid_sampler_3d_backward, aten.cudnn_grid_sampler_backward)
def grid_sample_backward(call: Call) -> Cost:
    """Per place the weights again; per channel and tap, the gradient times the weight added to the input's (2),
    and for each coordinate the value times its weight's slope times the gradient added (3)."""
    is_cudnn = call.func.overloadpacket is aten.cudnn_grid_sampler_backward
    grid, grad = (call.inputs[1], call.inputs[2]) if is_cudnn else (call.inputs[2], call.inputs[0])
    wants_input = True if is_cudnn else call.argument("output_mask")[0]
    taps, weights = _taps(call)
    axes, positions = grid.shape[-1], grid.numel // grid.shape[-1]
    per_tap = 2 * wants_input + 3 * axes * (taps > 1)
    return make_cost(call, REDUCTION, (axes * _UNNORMALIZE + weights) * positions + per_tap * taps * grad.numel)


def _taps(call: Call) -> tuple[int, int]:
    """Taps, and what their weights cost at each place. Cubic weights: 4 an axis of degree 3 (6 each)."""
    is_cudnn = call.func.overloadpacket in (aten.cudnn_grid_sampler, aten.cudnn_grid_sampler_backward)
    mode = 0 if is_cudnn else call.argument("interpolation_mode")
    axes = call.inputs[1 if is_cudnn or call.func.overloadpacket in _SAMPLERS else 2].shape[-1]
    if mode == _NEAREST:
        return 1, 0
    if mode == _BICUBIC:
        return 4**axes, 2 * 4 * 6 + 4**axes
    return 2**axes, 2 * axes + (axes - 1) * 2**axes
