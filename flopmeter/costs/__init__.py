"""What each op costs: list of Op in, list of Kernel out. Knows no device.

Look-up order: the op's own rule; a formula registered with `torch.utils.flop_counter`; then the defaults:
a view by its schema is free, an op that torch tags as pointwise or as a reduction is counted as one.
Whatever is left is *uncounted*: a kernel with bytes and without FLOPs that the report lists. So is what a rule
gives that class, such as matmuls of wide integers.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flopmeter.costs import arithmetic, contractions, data_movement  # noqa: F401  (they fill RULES)
from flopmeter.costs.arithmetic.pointwise import pointwise
from flopmeter.costs.arithmetic.reduction import reduction
from flopmeter.costs.contractions.varlen import VARLEN
from flopmeter.costs.custom import register_cost, torch_formula
from flopmeter.costs.data_movement.sparse import SPARSE
from flopmeter.costs.prims import as_aten
from flopmeter.costs.rules import FREE, RULES, Rule, make_contraction, make_cost
from flopmeter.costs.traffic import is_view, writes_nothing
from flopmeter.records import UNCOUNTED, Call, Cost, Kernel, Op, Trace
from flopmeter.records.collectives import COLLECTIVES
from flopmeter.torch_names.operators import aten_overloads

__all__ = [
    "RULES",
    "UncountedError",
    "costs_of",
    "find_rule",
    "kernels_of",
    "make_contraction",
    "make_cost",
    "register_cost",
]

_DRAW, _DIVIDE = aten_overloads.bernoulli_.float, aten_overloads.div_.Scalar
_BARRIERS = {op.name for op in COLLECTIVES["barrier"].ops}  # of the device, though their only tensor is a dummy
_REDUCTION_TAG = getattr(torch.Tag, "reduction", None)  # torch >= 2.12


class UncountedError(NotImplementedError):
    """strict=True met an op that no rule covers."""


def kernels_of(trace: Trace, *, strict: bool = False) -> list[Kernel]:
    """The kernels that the device launches for the trace, in order.

    Ops that touch nothing on the program's device are the host's own work and launch none.
    Raises UncountedError under `strict` where no rule covers an op.
    """
    device, kernels = trace.device, []
    costs: dict[Call, tuple[Cost, ...]] = {}
    views, calls_seen = 0, 0
    previous: Op | None = None
    for op, module_calls in zip(trace.ops, trace.module_calls, strict=True):
        launched = costs.get(op.call)
        if launched is None:
            launched = costs[op.call] = costs_of(op.call, strict=strict) if _runs_on(device, op.call) else FREE
        if op.call.func is _DIVIDE and _divides_fresh_mask(previous, op):
            launched = tuple(replace(cost, flops_by_class=((cost.op_class, 0),)) for cost in launched)
        previous = op
        views += not launched
        for cost in launched:
            kernels.append(Kernel((op,), cost, views, module_calls - calls_seen))
            views, calls_seen = 0, module_calls
    return kernels


def costs_of(call: Call, *, strict: bool = False) -> tuple[Cost, ...]:
    """The cost of each kernel that the call launches."""
    found = find_rule(call)
    if found is None:
        if strict:
            raise UncountedError(_how_to_add(call))
        return (make_cost(call, UNCOUNTED),)
    if writes_nothing(call):
        return FREE
    cost = found(call)
    costs = (cost,) if isinstance(cost, Cost) else cost
    if strict and any(cost.op_class == UNCOUNTED for cost in costs):
        raise UncountedError(
            f"{call.func} of {call.inputs[0].dtype} is uncounted: int8 products count as operations of their unit, no "
            "unit multiplies matrices of wider integers. Cast them, or meter with strict=False, which lists the op."
        )
    return costs


def find_rule(call: Call) -> Rule | None:
    """The rule that prices the call, or None."""
    func = call.func
    if not is_view(func) and not all(spec.is_strided for spec in (*call.inputs, *call.outputs)):
        return SPARSE.get(func) or SPARSE.get(func.overloadpacket)  # others: it depends on the values how much work
    own = RULES.get(func) or RULES.get(func.overloadpacket) or VARLEN.get(func._schema.name)
    if own is not None:
        return own
    by_formula = torch_formula(call)
    if by_formula is not None:
        return by_formula
    if is_view(func):
        return lambda _: FREE
    if (twin := as_aten(call)) is not None and (rule := find_rule(twin)) is not None:
        return lambda call: _renamed(rule(twin), call.name)
    if torch.Tag.pointwise in func.tags:
        return pointwise
    if _REDUCTION_TAG is not None and _REDUCTION_TAG in func.tags:
        return reduction
    return None


def _renamed(costs: Cost | tuple[Cost, ...], name: str) -> tuple[Cost, ...]:
    return tuple(replace(cost, name=name) for cost in ((costs,) if isinstance(costs, Cost) else costs))


def _runs_on(device: str, call: Call) -> bool:
    if call.func._schema.name in _BARRIERS:
        return True
    specs = (*call.inputs, *call.outputs)
    return any(spec.device == device for spec in specs)


def _divides_fresh_mask(previous: Op | None, op: Op) -> bool:
    """Whether this is the middle of a dropout that arrives as bernoulli_, div_ and mul, as on the CPU: the
    multiply alone counts, so that dropout is 1 FLOP an element on every device."""
    return previous is not None and previous.call.func is _DRAW and previous.storages == op.storages


def _how_to_add(call: Call) -> str:
    return (
        f"no cost rule covers {call.func}. Add one: a function of the call under "
        f"@flopmeter.register_cost(torch.ops.{call.func}) that returns its cost (see docs/contributing.md), "
        "or meter with strict=False, which lists the op as uncounted."
    )
