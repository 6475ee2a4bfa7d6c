"""Ops of several kernels that torch launches below the dispatcher, where no mode sees them: signal windows, renorm,
mvlgamma, grids of affine maps, packing of sequences. (`torch.profiler` shows their parts.)"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from torch._ops import OpOverloadPacket

from flopmeter.costs.rules import in_one_piece, make_contraction, make_cost, rule, scratch
from flopmeter.records import ELEMENTWISE, MOVEMENT, REDUCTION, Call, Cost, Matmul
from flopmeter.torch_names.operators import aten

# The element-wise kernels of a window after its arange: FLOPs and functions among them, for each element.
_COSINE = ((1, 0), (1, 1), (1, 0), (1, 0))  # beta·cos(2πn/N) + alpha: multiply, cos, multiply, add
_TWO_COSINES = ((1, 0), (1, 0), (1, 1), (1, 0), (1, 0), (1, 1), (1, 0), (1, 0), (1, 0))  # of 2πn/N and of 4πn/N
_RAMPS = ((1, 0), (0.5, 0), (0.5, 0))  # 2n/N; the second half times -1, plus 2
_KAISER = ((9, 3),)  # one kernel: i0(beta·sqrt(1 - (2n/N - 1)²)) / i0(beta)
_WINDOWS: dict[OpOverloadPacket, tuple[tuple[float, int], ...]] = {
    aten.hann_window: _COSINE,
    aten.hamming_window: _COSINE,
    aten.blackman_window: _TWO_COSINES,
    aten.bartlett_window: _RAMPS,
    aten.kaiser_window: _KAISER,
}


@rule(*_WINDOWS)
def window(call: Call) -> tuple[Cost, ...]:
    """An arange, then the arithmetic in place, one kernel for each operation."""
    (out,) = call.outputs
    passes = _WINDOWS[call.func.overloadpacket]
    return make_cost(call, MOVEMENT), *(
        make_cost(call, ELEMENTWISE, int(flops * out.numel), transcendentals=functions * out.numel, read=[out])
        for flops, functions in passes
    )


@rule(aten.renorm, aten.renorm_)
def renorm(call: Call) -> tuple[Cost, ...]:
    """The norm of each slice (square, add; a root), its factor max/(norm + eps), and the slice times that
    (aten/src/ATen/native/Normalization.cpp)."""
    (x,) = call.inputs
    slices = x.shape[call.argument("dim")]
    factors = in_one_piece(scratch(x), (slices,))._replace(dtype=x.dtype.to_real())
    norms = make_cost(
        call, REDUCTION, 2 * x.numel + slices, transcendentals=slices, written=(factors,), fused_multiply_add=True
    )
    return (
        norms,
        make_cost(call, ELEMENTWISE, 2 * slices, read=(factors,), written=(factors,), complex_factor=1),
        make_cost(call, ELEMENTWISE, x.numel, read=(x, factors)),
    )


@rule(aten.mvlgamma, aten.mvlgamma_)
def mvlgamma(call: Call) -> tuple[Cost, ...]:
    """The sum over i < p of lgamma(x - i/2), plus a constant: the terms of all elements lie side by side
    (aten/src/ATen/native/UnaryOps.cpp). The form in place copies the result."""
    (x,), (out,) = call.inputs, call.outputs
    p = call.argument("p")
    halves = in_one_piece(scratch(x), (p,))
    terms = in_one_piece(scratch(x, 2), (*x.shape, p))
    total = scratch(x, 3) if out.storage == x.storage else out
    return (
        make_cost(call, MOVEMENT, read=(), written=(halves,)),
        make_cost(call, ELEMENTWISE, terms.numel, read=(x, halves), written=(terms,)),
        make_cost(call, ELEMENTWISE, terms.numel, transcendentals=terms.numel, read=(terms,), written=(terms,)),
        make_cost(call, REDUCTION, terms.numel, read=(terms,), written=(total,)),
        make_cost(call, ELEMENTWISE, x.numel, read=(total,), written=(total,)),
        *((make_cost(call, MOVEMENT, read=(total,)),) if total is not out else ()),
    )


@rule(aten.affine_grid_generator)
def affine_grid(call: Call) -> tuple[Cost, ...]:
    """Each axis from -1 to 1 (times (n - 1)/n unless its corners are aligned), copied into its column of the points,
    whose last column is one; then the points times the map (aten/src/ATen/native/AffineGridGenerator.cpp)."""
    (theta,), (grid,) = call.inputs, call.outputs
    batch, *sizes = grid.shape[:-1]
    points = in_one_piece(scratch(grid), (batch, *sizes, len(sizes) + 1))
    column = points._replace(shape=points.shape[:-1], stride=points.stride[:-1])
    costs = []
    for size in reversed(sizes):
        axis = in_one_piece(scratch(grid, 2), (size,))
        costs.append(make_cost(call, MOVEMENT, read=(), written=(axis,)))
        if not call.argument("align_corners"):
            costs += [make_cost(call, ELEMENTWISE, size, read=(axis,), written=(axis,))] * 2
        costs.append(make_cost(call, MOVEMENT, read=(axis,), written=(column,)))
    costs.append(make_cost(call, MOVEMENT, read=(), written=(column,)))
    product = Matmul(batch, prod(sizes), len(sizes), len(sizes) + 1)
    return *costs, make_contraction(call, [product], read=(points, theta))


@rule(aten._pack_padded_sequence)
def pack_padded(call: Call) -> tuple[Cost, ...]:
    """For each run of steps with equally many sequences left, the steps are cut out; then all are joined. The number of
    cuts depends on data: they count as one copy."""
    packed = call.outputs[0]
    joined = make_cost(call, MOVEMENT, read=[packed], written=[packed])
    return replace(joined), joined
