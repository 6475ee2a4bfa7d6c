"""Losses: the difference of prediction and target, summed unless the caller keeps each."""

from __future__ import annotations

from math import ceil, log2

from torch._ops import OpOverloadPacket

from flopmeter.costs.arithmetic.pointwise import PerElement, elementwise
from flopmeter.costs.rules import make_cost, rule, scratch, zeros
from flopmeter.records import ELEMENTWISE, REDUCTION, Call, Cost, Region, Scatter, TensorSpec, ThreadGrid
from flopmeter.torch_names.operators import aten

_NONE, _MEAN = 0, 1  # of `reduction` (aten/src/ATen/core/Reduction.h)


_LOSSES: dict[OpOverloadPacket, PerElement] = {
    aten.mse_loss: PerElement(2),  # (x - y)²
    aten.smooth_l1_loss: PerElement(4),  # 0.5 * (x - y)² / beta
    # 0.5 * (x - y)²; which differences lie beyond delta depends on data, as for smooth_l1_loss
    aten.huber_loss: PerElement(3),
    # -(y * log x + (1 - y) * log(1 - x)): two logs, two products, two differences, add, negate
    aten.binary_cross_entropy: PerElement(8, 2),
}

# max(0, margin - x[y] + x)**p, added over the classes, as if each row had one label: how many it has depends on data.
# The gradient takes as many for each of its elements.
_OF_ROWS = 4

_OF_DIFFERENCES: dict[OpOverloadPacket, PerElement] = {
    aten.mse_loss_backward: PerElement(3),  # 2/n * (x - y) * dy
    aten.smooth_l1_loss_backward: PerElement(4),  # (x - y) / beta * scale * dy
    aten.huber_loss_backward: PerElement(3),
}


@rule(*_LOSSES)
def loss(call: Call) -> tuple[Cost, ...]:
    """A few operations for each element of the prediction; then a sum or mean, which is a kernel of its own
    (aten/src/ATen/native/BinaryOps.cpp, Loss.cpp; `apply_loss_reduction`)."""
    x, (flops, transcendentals) = call.inputs[0], _LOSSES[call.func.overloadpacket]
    terms = _terms(call)
    each = make_cost(call, ELEMENTWISE, flops * x.numel, transcendentals=transcendentals * x.numel, written=(terms,))
    return (each, *_reduced(call, terms))


@rule(aten.soft_margin_loss)
def soft_margin_loss(call: Call) -> tuple[Cost, ...]:
    """log1p(exp(-x * y)), each step a kernel that works in place after the first (Loss.cpp)."""
    x, target = call.inputs
    terms = _terms(call)
    steps = [((x,), 0), ((terms, target), 0), ((terms,), x.numel), ((terms,), x.numel)]
    return (
        *(
            make_cost(call, ELEMENTWISE, x.numel, transcendentals=functions, read=read, written=(terms,))
            for read, functions in steps
        ),
        *_reduced(call, terms),
    )


def _terms(call: Call) -> TensorSpec:
    """Where the terms are written that are added up: the result if the caller keeps each."""
    return call.outputs[0] if call.argument("reduction") == _NONE else scratch(call.inputs[0])


def _reduced(call: Call, terms: TensorSpec) -> tuple[Cost, ...]:
    if call.argument("reduction") == _NONE:
        return ()
    return (make_cost(call, REDUCTION, _reduction_flops(call, terms.numel), read=(terms,)),)


@rule(aten.multi_margin_loss, aten.multilabel_margin_loss_forward)
def loss_of_rows(call: Call) -> Cost:
    """Operations for each element of the prediction, and one to add it up; a mean divides the sum."""
    n = call.inputs[0].numel
    return make_cost(call, REDUCTION, _OF_ROWS * n + _reduction_flops(call, n))


def _reduction_flops(call: Call, terms: int) -> int:
    """To add up the terms, and to divide their sum for a mean."""
    return {_NONE: 0, _MEAN: terms + 1}.get(call.argument("reduction"), terms)


@rule(aten.mse_loss_backward, aten.smooth_l1_loss_backward, aten.huber_loss_backward)
def difference_backward(call: Call) -> tuple[Cost, Cost]:
    """The table's operations, written over zeros (BinaryOps.cpp, PointwiseOps.cpp; so in traces of training)."""
    (out,) = call.outputs
    return zeros(call, out), elementwise(call, _OF_DIFFERENCES[call.func.overloadpacket])


@rule(aten.soft_margin_loss_backward)
def soft_margin_loss_backward(call: Call) -> tuple[Cost, ...]:
    """z = exp(-y·x) of three kernels; then y·z, times -1 or -1/n, over z + 1, times dy, each step a kernel
    (Loss.cpp)."""
    (grad, x, target), (out,) = call.inputs, call.outputs
    negated, z = scratch(x, 1), scratch(x, 2)
    steps = [
        ((target,), negated), ((negated, x), z), ((z,), z), ((target, z), out), ((out,), out), ((z,), z),
        ((out, z), out), ((out, grad), out),
    ]  # fmt: skip
    return tuple(
        make_cost(call, ELEMENTWISE, x.numel, transcendentals=x.numel * (number == 2), read=read, written=(written,))
        for number, (read, written) in enumerate(steps)
    )


@rule(aten.multi_margin_loss_backward, aten.multilabel_margin_loss_backward)
def loss_of_rows_backward(call: Call) -> Cost:
    return make_cost(call, ELEMENTWISE, _OF_ROWS * call.outputs[0].numel)


@rule(aten.binary_cross_entropy_with_logits)
def cross_entropy_with_logits(call: Call) -> tuple[Cost, ...]:
    """(1 - y)·x - log_sigmoid(x), each step a kernel: 1 - y; times x; log_sigmoid (3, two functions); subtract;
    times the weights; then the sum or mean. With `pos_weight`, log_sigmoid is first multiplied by (w - 1)·y + 1."""
    x, target = call.inputs[:2]
    weight, positive = call.argument("weight"), call.argument("pos_weight")
    is_reduced = call.argument("reduction") != _NONE
    n, total = x.numel, scratch(x, 1) if is_reduced else call.outputs[0]
    logs, factors = scratch(x, 2), scratch(x, 3)

    def step(flops: int, read: tuple[TensorSpec, ...], written: TensorSpec, transcendentals: int = 0) -> Cost:
        reads, (writes,) = ([Region(spec, x.nbytes) for spec in specs] for specs in (read, (written,)))
        functions = transcendentals * n
        return make_cost(call, ELEMENTWISE, flops * n, transcendentals=functions, read=reads, written=(writes,))

    steps = [step(1, (target,), total), step(1, (total, x), total), step(3, (x,), logs, 2)]
    if positive is not None:
        steps += [step(1, (target,), factors), step(1, (factors,), factors), step(1, (logs, factors), logs)]
    steps.append(step(1, (total, logs), total))
    if weight is not None:
        steps.append(step(1, (total, weight), total))
    if is_reduced:
        steps.append(make_cost(call, REDUCTION, _reduction_flops(call, n), read=(Region(total, x.nbytes),)))
    return tuple(steps)


@rule(aten.nll_loss_forward, aten.nll_loss2d_forward)
def nll_loss(call: Call) -> Cost:
    """Picks one log-probability per target, negates and adds it, weighted where weights come, which are then added
    too. Reads those, not the whole matrix."""
    x, target, *weight = call.inputs
    rows = target.numel
    picked = Region(x, rows * x.dtype.itemsize)
    weighted = rows * len(weight)
    is_summed = call.argument("reduction") != _NONE
    flops = rows + weighted + weighted * is_summed + _reduction_flops(call, rows)
    return make_cost(call, REDUCTION, flops, read=(picked, target, *weight), grid=_one_block(call, 2))


@rule(aten.nll_loss_backward, aten.nll_loss2d_backward)
def nll_loss_backward(call: Call) -> tuple[Cost, Cost]:
    """Zeros, and one value for each target (the log-probabilities are not read)."""
    grad_out, x, target, *weight = call.inputs
    (grad,) = call.outputs
    named = Region(grad, target.numel * x.dtype.itemsize)
    stored = make_cost(
        call,
        REDUCTION,
        target.numel,
        read=(grad_out, target, *weight),
        written=(named,),
        scatter=Scatter(target.numel, target.numel),
        grid=_one_block(call, 1),
    )
    return zeros(call, grad), stored


def _one_block(call: Call, accesses: int) -> ThreadGrid | None:
    """One block takes all rows of a matrix whose losses are added up, each thread one after another: it loads the
    target, and forward the log-probability that this names (`nll_loss_forward_reduce_cuda_kernel_2d`, and
    `nll_loss_threads`, in aten/src/ATen/native/cuda/NLLLoss.cu)."""
    x, target = call.argument("self"), call.argument("target")
    if len(x.shape) != 2 or not target.numel or call.argument("reduction") == _NONE:
        return None
    threads = 2 ** max(5, min(10, round(log2(target.numel / 16))))
    return ThreadGrid(1, threads, accesses * ceil(target.numel / threads))


@rule(aten._ctc_loss)
def ctc_loss(call: Call) -> Cost:
    """For each step and state of the lattice (2 labels + 1), the logarithm of a sum of three: three differences
    with the maximum, three exp, two adds, log, add the maximum back, add the step's log-probability."""
    states = call.outputs[1].numel
    return make_cost(call, REDUCTION, 11 * states, transcendentals=4 * states)


@rule(aten._ctc_loss_backward)
def ctc_loss_backward(call: Call) -> Cost:
    """The same lattice from the end; alpha + beta added to each label's total (two exp, log: 6); then
    (exp(lp) - exp(total + nll - lp))·dy for each class (7, two functions)."""
    states, classes = call.argument("log_alpha").numel, call.outputs[0].numel
    return make_cost(call, REDUCTION, 17 * states + 7 * classes, transcendentals=7 * states + 2 * classes)
