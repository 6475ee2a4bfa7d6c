"""Reductions, scans, pooling and the losses that end in a sum: FLOPs per input element."""

from __future__ import annotations

from math import inf, prod

import torch
from torch._ops import OpOverloadPacket

from flopmeter.costs.rules import make_cost, rule
from flopmeter.records import REDUCTION, Call, Cost

aten = torch.ops.aten

# Per input element: (FLOPs, transcendentals), and FLOPs per output element.
_PER_INPUT: dict[OpOverloadPacket, tuple[int, int, int]] = {
    aten.sum: (1, 0, 0),
    aten.nansum: (1, 0, 0),
    aten.mean: (1, 0, 1),  # sum, then one division
    aten.prod: (1, 0, 0),
    aten.amax: (0, 0, 0),
    aten.amin: (0, 0, 0),
    aten.aminmax: (0, 0, 0),
    aten.argmax: (0, 0, 0),
    aten.argmin: (0, 0, 0),
    aten.any: (0, 0, 0),
    aten.all: (0, 0, 0),
    aten.count_nonzero: (0, 0, 0),
    aten.logsumexp: (3, 1, 2),  # subtract the maximum, exp, sum; log and add back
    aten.var: (3, 0, 4),  # sum 1, sum of squares 2; mean, its square, subtract, divide
    aten.var_mean: (3, 0, 4),
    aten.std: (3, 0, 5),
    aten.std_mean: (3, 0, 5),
    aten.cumsum: (1, 0, 0),
    aten.cumsum_: (1, 0, 0),
    aten.cumprod: (1, 0, 0),
    aten.cumprod_: (1, 0, 0),
    aten.cummax: (0, 0, 0),
    aten.cummin: (0, 0, 0),
    aten.logcumsumexp: (4, 2, 0),  # per step: subtract, exp, log1p, add
    aten.trace: (1, 0, 0),
    aten.median: (0, 0, 0),
    aten.nanmedian: (0, 0, 0),
    aten.mode: (0, 0, 0),
    aten.equal: (0, 0, 0),
    aten.is_nonzero: (0, 0, 0),
    aten.max_pool2d_with_indices: (0, 0, 0),
    aten.max_pool3d_with_indices: (0, 0, 0),
    aten.adaptive_max_pool2d: (0, 0, 0),
    aten.adaptive_max_pool3d: (0, 0, 0),
    aten.max_pool2d_with_indices_backward: (1, 0, 0),  # windows overlap: gradients add
    aten.max_pool3d_with_indices_backward: (1, 0, 0),
    aten.adaptive_max_pool2d_backward: (1, 0, 0),
    aten.adaptive_max_pool3d_backward: (1, 0, 0),
    aten.upsample_nearest1d_backward: (1, 0, 0),  # the gradients of all copies add up
    aten.upsample_nearest2d_backward: (1, 0, 0),
    aten.upsample_nearest3d_backward: (1, 0, 0),
    aten._upsample_nearest_exact1d_backward: (1, 0, 0),
    aten._upsample_nearest_exact2d_backward: (1, 0, 0),
    aten._upsample_nearest_exact3d_backward: (1, 0, 0),
    aten._adaptive_avg_pool2d: (1, 0, 1),
    aten._adaptive_avg_pool3d: (1, 0, 1),
    aten._adaptive_avg_pool2d_backward: (1, 0, 1),
    aten._adaptive_avg_pool3d_backward: (1, 0, 1),
}


def reduction(call: Call) -> Cost:
    """The default for every op that torch tags as a reduction, and for the table above."""
    per_input, transcendentals, per_output = _PER_INPUT.get(call.func.overloadpacket, (1, 0, 0))
    n, outputs = call.inputs[0].numel, call.outputs[0].numel if call.outputs else 0
    return make_cost(
        call, REDUCTION, per_input * n + per_output * outputs, transcendentals=transcendentals * n
    )


rule(*_PER_INPUT)(reduction)


@rule(aten.max.dim, aten.min.dim, aten.max.default, aten.min.default)
def extremum(call: Call) -> Cost:
    """Comparisons only. (The two-operand forms of max and min are element-wise.)"""
    return make_cost(call, REDUCTION)


@rule(aten.linalg_vector_norm, aten.norm, aten._foreach_norm)
def vector_norm(call: Call) -> Cost:
    """Order 2: square and add, then a root. Order 1 and 0: one add. Infinity: comparisons. Else a power."""
    names = {argument.name for argument in call.func._schema.arguments}
    order = call.argument("ord" if "ord" in names else "p")
    n = sum(spec.numel for spec in call.inputs)
    outputs = sum(spec.numel for spec in call.outputs)
    if order in (inf, -inf):
        return make_cost(call, REDUCTION)
    if order in (0, 1):
        return make_cost(call, REDUCTION, n)
    is_square = order in (2, None)
    return make_cost(
        call, REDUCTION, 2 * n + outputs, transcendentals=outputs + (0 if is_square else n), fused_multiply_add=is_square
    )


@rule(aten.avg_pool2d, aten.avg_pool3d, aten.avg_pool2d_backward, aten.avg_pool3d_backward)
def average_pool(call: Call) -> Cost:
    """One add per window element, one division per window."""
    is_backward = len(call.inputs) == 2
    windows = call.inputs[0] if is_backward else call.outputs[0]
    dims = 3 if "3d" in call.func.overloadpacket.__name__ else 2
    kernel = call.argument("kernel_size")
    window = prod(kernel) if len(kernel) == dims else kernel[0] ** dims
    return make_cost(call, REDUCTION, (window + 1) * windows.numel)


@rule(aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss)
def distance_loss(call: Call) -> Cost:
    """Difference and square (smooth: also two scalings), summed unless kept per element."""
    n = call.inputs[0].numel
    per_element = 2 if call.func.overloadpacket is aten.mse_loss else 4
    is_summed = call.argument("reduction") != 0
    return make_cost(call, REDUCTION, (per_element + is_summed) * n)


@rule(aten.binary_cross_entropy)
def binary_cross_entropy(call: Call) -> Cost:
    """-(y·log x + (1 - y)·log(1 - x)): two logs, two multiplies, two differences, add, negate."""
    n = call.inputs[0].numel
    is_summed = call.argument("reduction") != 0
    return make_cost(call, REDUCTION, (8 + is_summed) * n, transcendentals=2 * n)


@rule(aten.nll_loss_forward, aten.nll_loss2d_forward)
def nll_loss(call: Call) -> Cost:
    """Picks one log-probability per target, negates and adds it. Reads those, not the whole matrix."""
    x, target, *weight = call.inputs
    rows = target.numel
    read = rows * x.dtype.itemsize + target.nbytes + sum(w.nbytes for w in weight)
    return make_cost(call, REDUCTION, 2 * rows, read=read)


@rule(aten.nll_loss_backward, aten.nll_loss2d_backward)
def nll_loss_backward(call: Call) -> Cost:
    """Fills the gradient with zeros and writes one value per target (the log-probabilities are not read)."""
    grad_out, x, target, *weight = call.inputs
    (grad,) = call.outputs
    read = grad_out.nbytes + target.nbytes + sum(w.nbytes for w in weight)
    return make_cost(call, REDUCTION, target.numel, read=read, written=grad.nbytes + target.numel * x.dtype.itemsize)
