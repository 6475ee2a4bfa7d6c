"""Reductions, scans and pooling: FLOPs per input element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, prod
from typing import NamedTuple

import torch
from torch._ops import OpOverloadPacket

from flopmeter.costs.index_arithmetic import LONG_QUOTIENT_OPERATIONS, QUOTIENTS_OF_AVERAGE, place_operations
from flopmeter.costs.multi_tensor import in_launches
from flopmeter.costs.reduce_grid import scan_grid_of
from flopmeter.costs.rules import (
    COMPLEX_ADD,
    COMPLEX_MULTIPLY,
    COMPLEX_OTHER,
    in_one_piece,
    is_complex,
    make_contraction,
    make_cost,
    rule,
    scratch,
    zeros,
)
from flopmeter.costs.windows import covered
from flopmeter.records import ELEMENTWISE, MOVEMENT, REDUCTION, Call, Cost, Matmul, Region, TensorSpec
from flopmeter.records.memory_format import is_channels_last
from flopmeter.torch_names.operators import aten, aten_overloads


class PerInput(NamedTuple):
    """Operations for each input element, and for each output element."""

    flops: int
    transcendentals: int = 0
    output_flops: int = 0
    output_transcendentals: int = 0


_COMPARES = (
    aten.amax, aten.amin, aten.aminmax, aten.argmax, aten.argmin, aten.any, aten.all, aten.median,
    aten.nanmedian, aten.mode, aten.equal, aten.adaptive_max_pool2d,
    aten.adaptive_max_pool3d, aten.fractional_max_pool2d, aten.fractional_max_pool3d, aten.hash_tensor,
    aten._is_all_true, aten._is_any_true,
)  # fmt: skip
_PER_INPUT: dict[OpOverloadPacket, PerInput] = {
    **dict.fromkeys(_COMPARES, PerInput(0)),
    aten.sum: PerInput(1),
    aten.nansum: PerInput(1),
    aten.mean: PerInput(1, output_flops=1),  # sum, then one division
    aten.prod: PerInput(1),
    aten.var: PerInput(3, 0, 4),  # sum 1, sum of squares 2; mean, its square, subtract, divide
    aten.var_mean: PerInput(3, 0, 4),
    aten.std: PerInput(3, 0, 5, 1),  # and a root
    aten.std_mean: PerInput(3, 0, 5, 1),
    aten._adaptive_avg_pool2d: PerInput(1, output_flops=1),
    aten._adaptive_avg_pool3d: PerInput(1, output_flops=1),
    aten.col2im: PerInput(1),  # overlapping windows add up
}

_SCANS: dict[OpOverloadPacket, PerInput] = {
    **dict.fromkeys((aten.cumsum, aten.cumsum_, aten.cumprod, aten.cumprod_), PerInput(1)),
    **dict.fromkeys((aten.cummax, aten.cummin), PerInput(0)),
    aten.logcumsumexp: PerInput(4, 2),  # per step: subtract, exp, log1p, add
}

_COMPLEX_FACTORS = {
    **dict.fromkeys((aten.sum, aten.nansum, aten.mean, aten.cumsum, aten.cumsum_, aten.col2im), COMPLEX_ADD),
    **dict.fromkeys((aten.prod, aten.cumprod, aten.cumprod_), COMPLEX_MULTIPLY),
}


def reduction(call: Call) -> Cost:
    """The default for every op that torch tags as a reduction, and for the table above."""
    per = _PER_INPUT.get(call.func.overloadpacket, PerInput(1))
    (x, *_), outputs = call.inputs, call.outputs[0].numel if call.outputs else 0
    n = x.numel
    return make_cost(
        call,
        REDUCTION,
        per.flops * n + per.output_flops * outputs,
        transcendentals=per.transcendentals * n + per.output_transcendentals * outputs,
        complex_factor=_COMPLEX_FACTORS.get(call.func.overloadpacket, COMPLEX_OTHER),
    )


rule(*_PER_INPUT)(reduction)


@rule(*_SCANS)
def scan(call: Call) -> Cost:
    per, x = _SCANS[call.func.overloadpacket], call.inputs[0]
    grid = scan_grid_of(x, call.argument("dim"))
    return make_cost(
        call,
        REDUCTION,
        per.flops * x.numel,
        transcendentals=per.transcendentals * x.numel,
        complex_factor=_COMPLEX_FACTORS.get(call.func.overloadpacket, COMPLEX_OTHER),
        access=None if grid else "scan",
        grid=grid,
    )


@rule(aten.unfold_backward)
def unfold_backward(call: Call) -> tuple[Cost, Cost]:
    """Zeros, to which the gradient of each window is added (aten/src/ATen/native/cuda/UnfoldBackwardKernel.cu)."""
    (grad,), (out,) = call.inputs, call.outputs
    places = Region(out, min(grad.numel * out.dtype.itemsize, out.nbytes))
    added = make_cost(call, REDUCTION, grad.numel, read=(grad, places), written=(places,), complex_factor=COMPLEX_ADD)
    return zeros(call, out), added


@rule(aten.logsumexp)
def logsumexp(call: Call) -> tuple[Cost, ...]:
    """The maximum of each row, 0 in place of an infinite one; x less that; exp; sum; log; the maximum added back: each
    step a kernel (aten/src/ATen/native/ReduceOps.cpp)."""
    (x,), (out,) = call.inputs, call.outputs
    maxima, sizes, terms = scratch(out, 1), scratch(out, 2), scratch(x._replace(dtype=out.dtype), 4)
    infinite = scratch(out._replace(dtype=torch.bool), 3)

    def step(read: tuple[TensorSpec, ...], written: TensorSpec, flops: int = 0, functions: int = 0) -> Cost:
        reduces = read[0].numel > written.numel
        op_class = REDUCTION if reduces else ELEMENTWISE
        return make_cost(call, op_class, flops, transcendentals=functions, read=read, written=(written,))

    return (
        step((x,), maxima),
        step((maxima,), sizes, out.numel),
        step((sizes,), infinite),
        step((maxima, infinite), maxima),
        step((x, maxima), terms, x.numel),
        step((terms,), terms, x.numel, x.numel),
        step((terms,), out, x.numel),
        step((out,), out, out.numel, out.numel),
        step((out, maxima), out, out.numel),
    )


@rule(aten_overloads.max.dim, aten_overloads.min.dim, aten_overloads.max.default, aten_overloads.min.default)
def extremum(call: Call) -> Cost:
    """Comparisons only. (The two-operand forms of max and min are element-wise.)"""
    return make_cost(call, REDUCTION)


# Operations and functions for each element of a norm of that order. Order 0: an add; 1: absolute value, add; 2: square,
# add; infinity: absolute value; any other: absolute value, power, add. |a + bi| is sqrt(a·a + b·b): four, one function.
_NORMS = {0: (1, 0), 1: (2, 0), 2: (2, 0), inf: (1, 0), -inf: (1, 0), "other": (3, 1)}
_NORMS_OF_COMPLEX = {0: (1, 0), 1: (5, 1), 2: (4, 0), inf: (4, 1), -inf: (4, 1), "other": (6, 2)}


@rule(aten.linalg_vector_norm, aten.norm, aten._foreach_norm, aten._foreach_powsum)
def vector_norm(call: Call) -> Cost:
    """A sum (or maximum) over the elements, then a root where the order has one (`powsum` leaves that out)."""
    given = call.get("ord", call.get("p"))
    order = 2 if given is None else given
    table = _NORMS_OF_COMPLEX if is_complex(call) else _NORMS
    flops, transcendentals = table.get(order, table["other"])
    n = sum(spec.numel for spec in call.inputs)
    has_root = order not in (0, 1, inf, -inf) and call.func.overloadpacket is not aten._foreach_powsum
    roots = has_root * sum(spec.numel for spec in call.outputs)
    cost = make_cost(
        call,
        REDUCTION,
        flops * n + roots,
        transcendentals=transcendentals * n + roots,
        fused_multiply_add=order == 2,
        complex_factor=1,
    )
    return in_launches(cost, (spec.numel for spec in call.inputs), 1) if call.name.startswith("_foreach") else cost


@rule(aten.max_pool2d_with_indices, aten.max_pool3d_with_indices)
def max_pool(call: Call) -> Cost:
    """Only comparisons, of the elements that the windows cover."""
    dims = 2 if call.func.overloadpacket is aten.max_pool2d_with_indices else 3
    windows = call.outputs[0].numel
    return make_cost(
        call,
        REDUCTION,
        read=(_pooled(call, dims, call.argument("dilation")),),
        index_operations=place_operations(windows, windows * _window(call, dims)),
    )


def _window(call: Call, dims: int) -> int:
    """How many elements a window of a pooling has."""
    kernel = call.argument("kernel_size")
    return int(prod(kernel) if len(kernel) == dims else kernel[0] ** dims)


def _pooled(call: Call, dims: int, dilation: Sequence[int]) -> TensorSpec:
    """The part of the input that the windows of a pooling cover; without a stride they lie side by side."""
    kernel, stride, padding = (call.argument(name) for name in ("kernel_size", "stride", "padding"))
    windows = call.outputs[0].shape[-dims:]
    (x,) = call.inputs
    return covered(x, windows, kernel, stride or kernel, padding, dilation)


_POOLED_DIMS = {aten.avg_pool2d: 2, aten.avg_pool3d: 3,
                aten.avg_pool2d_backward: 2, aten.avg_pool3d_backward: 3}  # fmt: skip


@rule(*_POOLED_DIMS)
def average_pool(call: Call) -> Cost:
    """One add per window element, one division per window. Backward reads the gradient only."""
    is_backward = len(call.inputs) == 2
    windows = call.inputs[0] if is_backward else call.outputs[0]
    dims = _POOLED_DIMS[call.func.overloadpacket]
    window = _window(call, dims)
    read = call.inputs[0] if is_backward else _pooled(call, dims, (1,))
    x, out = call.inputs[-1], call.outputs[0]
    places = place_operations(out.numel, window * windows.numel)
    if dims == 2 and is_channels_last(x.shape, x.stride):
        places += QUOTIENTS_OF_AVERAGE * LONG_QUOTIENT_OPERATIONS * out.numel
    return make_cost(call, REDUCTION, (window + 1) * windows.numel, read=(read,), index_operations=places)


_GATHERED = (  # a thread for each element of the gradient: nothing has to be zero before
    aten.upsample_nearest1d_backward, aten.upsample_nearest3d_backward, aten._upsample_nearest_exact1d_backward,
    aten._upsample_nearest_exact3d_backward,
)  # fmt: skip


@rule(
    aten.max_pool2d_with_indices_backward, aten.max_pool3d_with_indices_backward, aten.adaptive_max_pool2d_backward,
    aten.adaptive_max_pool3d_backward, aten.fractional_max_pool2d_backward, aten.fractional_max_pool3d_backward,
    aten.reflection_pad1d_backward, aten.reflection_pad2d_backward, aten.reflection_pad3d_backward,
    aten.replication_pad1d_backward, aten.replication_pad2d_backward, aten.replication_pad3d_backward, *_GATHERED,
)  # fmt: skip
def overlapping_gradients(call: Call) -> tuple[Cost, ...]:
    """Each output gradient is added where its value came from; of the input only the shape matters. A trace of a
    ResNet's training has the zeros before it (max_pool2d)."""
    grad, (out,) = call.inputs[0], call.outputs
    places = None
    if call.func.overloadpacket is aten.max_pool2d_with_indices_backward:  # each element asks all its windows
        places = place_operations(out.numel, grad.numel * _window(call, 2))
    added = make_cost(
        call, REDUCTION, grad.numel, read=(grad, *call.inputs[2:]), complex_factor=COMPLEX_ADD, index_operations=places
    )
    return (added,) if call.func.overloadpacket in _GATHERED else (zeros(call, out), added)


@rule(aten._adaptive_avg_pool2d_backward, aten._adaptive_avg_pool3d_backward)
def adaptive_average_pool_backward(call: Call) -> Cost:
    """Each gradient is divided by its window's size and added to all of its window."""
    grad, (out,) = call.inputs[0], call.outputs
    return make_cost(call, REDUCTION, grad.numel + out.numel, read=(grad,))


@rule(aten.count_nonzero)
def count_nonzero(call: Call) -> tuple[Cost, ...]:
    """The sum of `x != 0`, which a kernel of its own writes (aten/src/ATen/native/TensorAdvancedIndexing.cpp)."""
    (x,) = call.inputs
    if x.dtype is torch.bool:
        return (make_cost(call, REDUCTION),)
    flags = scratch(x)._replace(dtype=torch.bool)
    return make_cost(call, ELEMENTWISE, written=(flags,)), make_cost(call, REDUCTION, read=(flags,))


@rule(aten.dist)
def dist(call: Call) -> tuple[Cost, Cost]:
    """The norm of a difference, which a kernel of its own writes, of the shape to which both are broadcast."""
    shape = torch.broadcast_shapes(*(spec.shape for spec in call.inputs))
    difference = in_one_piece(scratch(call.inputs[0]), shape)
    norm = vector_norm(replace(call, inputs=(difference,)))
    return (
        make_cost(call, ELEMENTWISE, difference.numel, written=(difference,), complex_factor=COMPLEX_ADD),
        replace(norm, reads=(Region(difference, difference.nbytes),)),
    )


@rule(aten._cdist_forward)
def cdist(call: Call) -> Cost | tuple[Cost, ...]:
    """All pairs of rows. The Euclidean distance of more than 25 rows goes through a matmul, unless
    `compute_mode` is 2; where it is 1, that of few rows does too."""
    x, y = call.inputs
    mode = call.argument("compute_mode")
    through_product = mode == 1 or (mode in (None, 0) and max(x.shape[-2], y.shape[-2]) > 25)
    if call.argument("p") == 2 and through_product:
        return euclidean_dist(call)
    pairs = call.outputs[0].numel
    return _distances(call, pairs * x.shape[-1], pairs)


@rule(aten._euclidean_dist)
def euclidean_dist(call: Call) -> tuple[Cost, ...]:
    """|x|² + |y|² - 2x·y. torch appends the squared norms and ones to -2x and y, so that one matmul of depth + 2 gives
    the sum, which is clamped before the root (aten/src/ATen/native/Distance.cpp)."""
    (x, y), (out,) = call.inputs, call.outputs
    doubled, (norms_x, ones_x), (norms_y, ones_y) = scratch(x, 1), _norms_and_ones(x, 2), _norms_and_ones(y, 4)
    wide_x, wide_y = (_of_depth(scratch(spec, 6 + place), x.shape[-1] + 2) for place, spec in enumerate((x, y)))
    *batch, rows, columns = out.shape
    return (
        *_squared(call, x, norms_x, ones_x),
        *_squared(call, y, norms_y, ones_y),
        make_cost(call, ELEMENTWISE, x.numel, read=(x,), written=(doubled,)),
        make_cost(call, MOVEMENT, read=(doubled, norms_x, ones_x), written=(wide_x,)),
        make_cost(call, MOVEMENT, read=(y, ones_y, norms_y), written=(wide_y,)),
        make_contraction(call, [Matmul(prod(batch), rows, columns, x.shape[-1] + 2)], read=(wide_x, wide_y)),
        make_cost(call, ELEMENTWISE, read=(out,)),
        make_cost(call, ELEMENTWISE, out.numel, transcendentals=out.numel, read=(out,)),
    )


def _norms_and_ones(x: TensorSpec, number: int) -> tuple[TensorSpec, TensorSpec]:
    return _of_depth(scratch(x, number), 1), _of_depth(scratch(x, number + 1), 1)


def _of_depth(spec: TensorSpec, depth: int) -> TensorSpec:
    return in_one_piece(spec, (*spec.shape[:-1], depth))


def _squared(call: Call, x: TensorSpec, norms: TensorSpec, ones: TensorSpec) -> tuple[Cost, ...]:
    """The squares, their sums, and that many ones."""
    squares = scratch(x, 8)
    return (
        make_cost(call, ELEMENTWISE, x.numel, read=(x,), written=(squares,)),
        make_cost(call, REDUCTION, x.numel, read=(squares,), written=(norms,)),
        make_cost(call, MOVEMENT, read=(), written=(ones,)),
    )


@rule(aten._cdist_backward)
def cdist_backward(call: Call) -> Cost:
    """For each pair and dimension: the difference, its power over the distance's, times the gradient, added."""
    x = call.inputs[1]
    terms = call.inputs[0].numel * x.shape[-1]
    return make_cost(call, REDUCTION, _distance_gradient_flops(call.argument("p")) * terms)


@rule(aten._pdist_forward)
def pdist(call: Call) -> Cost:
    """The pairs i < j of the rows of one matrix."""
    (out,) = call.outputs
    (x,) = call.inputs
    return _distances(call, out.numel * x.shape[-1], out.numel)


@rule(aten._pdist_backward)
def pdist_backward(call: Call) -> Cost:
    """As cdist's, and each pair's gradient goes to both of its rows."""
    terms = call.inputs[2].numel * call.inputs[1].shape[-1]
    return make_cost(call, REDUCTION, (_distance_gradient_flops(call.argument("p")) + 1) * terms)


def _distances(call: Call, terms: int, distances: int) -> Cost:
    """Order 2: difference, square, add and a root at the end. Order 1: difference, absolute value, add. 0: no
    absolute value; infinity: no sum. Any other: difference, absolute value, power, add; a power at the end."""
    order = call.argument("p")
    per_term = {0: 2, 1: 3, 2: 3, inf: 2}.get(order, 4)
    roots = distances * (order not in (0, 1, inf))
    powers = terms * (order not in (0, 1, 2, inf))
    return make_cost(call, REDUCTION, per_term * terms + roots, transcendentals=roots + powers)


def _distance_gradient_flops(order: float) -> int:
    """Order 1: difference, sign times gradient, add. Order 2: difference, times gradient over distance, add."""
    return {0: 0, 1: 3, 2: 4, inf: 3}.get(order, 6)
