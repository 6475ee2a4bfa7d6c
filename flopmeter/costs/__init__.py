"""What each op costs: list of Op in, list of Kernel out. Knows no device. `lookup` says which rule prices an op."""

from __future__ import annotations

from dataclasses import replace

# They fill RULES.
from flopmeter.costs import arithmetic, contractions, data_movement, flex_attention, triton_kernels  # noqa: F401
from flopmeter.costs.custom import register_cost
from flopmeter.costs.host_work import runs_on
from flopmeter.costs.lookup import UncountedError, costs_of, find_rule
from flopmeter.costs.rules import FREE, RULES, make_contraction, make_cost
from flopmeter.records import Call, Cost, Kernel, Op, Trace
from flopmeter.torch_names.operators import aten_overloads

__all__ = [
    "RULES",
    "CallCosts",
    "UncountedError",
    "costs_of",
    "find_rule",
    "kernels_of",
    "make_contraction",
    "make_cost",
    "register_cost",
]

_DRAW, _DIVIDE = aten_overloads.bernoulli_.float, aten_overloads.div_.Scalar


CallCosts = dict[Call, tuple[Cost, ...]]


def kernels_of(trace: Trace, *, strict: bool = False, known: CallCosts | None = None) -> list[Kernel]:
    """The kernels that the device launches for the trace, in order. `known` has the costs of calls of other traces of
    the same program, and gets those of this one.

    Ops that touch nothing on the program's device are the host's own work and launch none.
    Raises UncountedError under `strict` where no rule covers an op.
    """
    device, kernels = trace.device, []
    costs = {} if known is None else known
    views, calls_seen, dtensor_ops = 0, 0, 0.0
    previous: Op | None = None
    for index, (op, module_calls) in enumerate(zip(trace.ops, trace.module_calls, strict=True)):
        launched = costs.get(op.call)
        if launched is None:
            launched = costs[op.call] = costs_of(op.call, strict=strict) if runs_on(device, op.call) else FREE
        if op.call.func is _DIVIDE and _divides_fresh_mask(previous, op):
            launched = tuple(replace(cost, flops_by_class=((cost.op_class, 0),)) for cost in launched)
        previous = op
        views += not launched
        dtensor_ops += trace.dtensor_ops.get(index, 0.0)
        for cost in launched:
            kernels.append(Kernel((op,), cost, views, module_calls - calls_seen, dtensor_ops))
            views, calls_seen, dtensor_ops = 0, module_calls, 0.0
    return kernels


def _divides_fresh_mask(previous: Op | None, op: Op) -> bool:
    """Whether this is the middle of a dropout that arrives as bernoulli_, div_ and mul, as on the CPU: the
    multiply alone counts, so that dropout is 1 FLOP an element on every device."""
    return previous is not None and previous.call.func is _DRAW and previous.storages == op.storages
