"""Which rule prices a call. Look-up order: the op's own rule; a formula registered with `torch.utils.flop_counter`; for
a custom op in Python what its implementation runs; then the defaults: a view by its schema is free, an op that torch
tags as pointwise or as a reduction is counted as one. An op that writes into tensors given as `out=` is priced as the
one that returns new ones.
Whatever is left is *uncounted*: a kernel with bytes and without FLOPs that the report lists. Calls to which a rule
gives that class are uncounted too, such as matmuls of wide integers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch._ops import OpOverload

from flopmeter.costs.arithmetic.boxes import BOXES
from flopmeter.costs.arithmetic.pointwise import pointwise
from flopmeter.costs.arithmetic.reduction import reduction
from flopmeter.costs.contractions.expert_loops import EXPERT_LOOPS
from flopmeter.costs.contractions.varlen import VARLEN
from flopmeter.costs.custom import torch_formula
from flopmeter.costs.data_movement.indexing import accumulate_into_zeros
from flopmeter.costs.data_movement.sparse import sparse_rule
from flopmeter.costs.dense_operands import with_dense_operands
from flopmeter.costs.rules import FREE, RULES, Rule, make_cost
from flopmeter.costs.traffic import is_view, writes_nothing
from flopmeter.costs.triton_kernels import why_uncounted
from flopmeter.records import UNCOUNTED, Call, CompiledKernel, Cost, Kernel, OpsBody, Region, TritonBody
from flopmeter.torch_names.operators import aten

_BY_NAME: dict[str, Rule] = {**VARLEN, **EXPERT_LOOPS, **BOXES, "flex_lib::zeros_and_scatter": accumulate_into_zeros}
"""Rules of ops that exist once a program has imported transformers, torchvision, or a slow module of torch."""
_REDUCTION_TAG = getattr(torch.Tag, "reduction", None)  # torch >= 2.12


class UncountedError(NotImplementedError):
    """strict=True met an op that no rule covers."""


def costs_of(call: Call, *, strict: bool = False) -> tuple[Cost, ...]:
    """The cost of each kernel that the call launches."""
    copies, call = with_dense_operands(call)
    found = find_rule(call)
    if found is None:
        if strict:
            raise UncountedError(
                f"no cost rule covers {call.func}. Add one: a function of the call under "
                f"@flopmeter.register_cost(torch.ops.{call.func}) that returns its cost (see docs/contributing.md), "
                "or meter with strict=False, which lists the op as uncounted."
            )
        return (make_cost(call, UNCOUNTED),)
    if writes_nothing(call):
        return FREE
    costs = copies + _as_tuple(found(call))
    if strict and isinstance(kernel := call.kwargs.get("kernel"), CompiledKernel):
        unknown = dict.fromkeys(origin.op for origin in kernel.origins if origin.op_class == UNCOUNTED)
        if unknown:
            raise UncountedError(f"no rule counts {', '.join(unknown)} in a compiled graph; strict=False lists it")
    if strict and any(cost.op_class == UNCOUNTED for cost in costs):
        if isinstance(call.body, TritonBody):
            raise UncountedError(f"the Triton kernel {call.body.kernel} cannot be counted: {why_uncounted(call.body)}")
        raise UncountedError(
            f"{call.func} of {call.inputs[0].dtype} is uncounted: int8 products count as operations of their unit, no "
            "unit multiplies matrices of wider integers. Cast them, or meter with strict=False, which lists the op."
        )
    return costs


def find_rule(call: Call) -> Rule | None:
    """The rule that prices the call, or None."""
    func = call.func
    if func not in RULES and (same := _returning(call)) is not None:
        found = find_rule(same)
        if found is None:
            return None
        return functools.wraps(found)(lambda _: tuple(map(_in_given_tensors, _as_tuple(found(same)))))
    if not is_view(func) and not all(spec.is_strided for spec in (*call.inputs, *call.outputs)):
        return sparse_rule(call)
    own = RULES.get(func) or RULES.get(func.overloadpacket) or _BY_NAME.get(func._schema.name)
    if own is not None:
        return own
    by_formula = torch_formula(call)
    if by_formula is not None:
        return by_formula
    if isinstance(call.body, OpsBody) and not call.body.error:
        return by_implementation
    if is_view(func):
        return lambda _: FREE
    if (twin := _as_aten(call)) is not None and (rule := find_rule(twin)) is not None:
        return lambda call: tuple(replace(cost, name=call.name) for cost in _as_tuple(rule(twin)))
    if torch.Tag.pointwise in func.tags:
        return pointwise
    if _REDUCTION_TAG is not None and _REDUCTION_TAG in func.tags:
        return reduction
    return None


def _returning(call: Call) -> Call | None:
    """The same call of the op that returns what this one writes into tensors given as `out=`; None if it is no such
    op. A rule then meets no tensors among the inputs that are not read."""
    func = _form_that_returns(call.func)
    if func is None:
        return None
    given = {each.name: call.argument(each.name) for each in call.func._schema.arguments if each.is_out}
    kwargs = {name: value for name, value in call.kwargs.items() if name not in given}
    inputs = call.inputs[: len(call.inputs) - len(given)]  # a schema ends with what it writes
    outputs = tuple(spec._replace(storage=spec.storage + _NEW) for spec in call.outputs)
    return replace(call, func=func, kwargs=kwargs, inputs=inputs, outputs=outputs)


_NEW = 1 << 30  # added to the storage number of a given tensor, which may also be an operand


def _in_given_tensors(cost: Cost) -> Cost:
    """The cost of the form that returns new tensors, with the given tensors in their place."""

    def given(region: Region) -> Region:
        spec = region.spec
        if spec is None or spec.storage < _NEW:
            return region
        return Region(spec._replace(storage=spec.storage - _NEW), region.nbytes)

    return replace(cost, reads=tuple(map(given, cost.reads)), writes=tuple(map(given, cost.writes)))


def _as_tuple(costs: Cost | tuple[Cost, ...]) -> tuple[Cost, ...]:
    return (costs,) if isinstance(costs, Cost) else costs


@functools.cache
def _form_that_returns(func: OpOverload) -> OpOverload | None:
    packet, arguments = func.overloadpacket, func._schema.arguments
    asked = [(each.name, str(each.type)) for each in arguments if not each.is_out]
    if len(asked) == len(arguments):
        return None
    overload: OpOverload
    for overload in (getattr(packet, name) for name in packet.overloads()):
        if [(each.name, str(each.type)) for each in overload._schema.arguments] == asked:
            return overload
    return None


def by_implementation(call: Call) -> tuple[Cost, ...]:
    """The kernels that the Python implementation of a custom op launches."""
    assert isinstance(call.body, OpsBody)
    inner = ((op, cost) for op in call.body.ops for cost in costs_of(op.call))
    return tuple(_inside(call.name, cost, op.storages) for op, cost in inner)


def _inside(name: str, cost: Cost, storages: tuple[int, ...]) -> Cost:
    """The cost with the storages numbered as in the custom op's call. Tensors that the implementation makes for itself
    count as bytes of no particular tensor."""

    def renumbered(region: Region) -> Region:
        spec = region.spec
        if spec is None or spec.storage < 0 or storages[spec.storage] < 0:
            return Region(None, region.nbytes)
        return Region(spec._replace(storage=storages[spec.storage]), region.nbytes)

    reads, writes = tuple(map(renumbered, cost.reads)), tuple(map(renumbered, cost.writes))
    return replace(cost, name=f"{name}({cost.name})", reads=reads, writes=writes)


# --- torch.ops.prims, in which torch's reference implementations are written: each costs what the op of aten costs ----

_OTHER_NAMES = {
    "convert_element_type": "_to_copy", "device_put": "_to_copy", "copy_to": "copy_", "iota": "arange", "rev": "flip",
    "erf_inv": "erfinv",
}  # fmt: skip
# Overloads that take the arguments of the prim.
_OVERLOADS = ("Tensor", "Tensor_Tensor", "self", "dim_IntList", "default")


def _as_aten(call: Call) -> Call | None:
    """The same call of the aten op; None for other ops, and for prims without such an op."""
    if call.func.namespace != "prims":
        return None
    name = call.func.overloadpacket.__name__
    packets = aten.present(_OTHER_NAMES.get(name, name))
    found = (getattr(packet, each) for packet in packets for each in _OVERLOADS if hasattr(packet, each))
    overload: OpOverload | None = next(found, None)
    return None if overload is None else replace(call, func=overload)


# --- what a report says of custom ops that are counted, or not, by what their Python implementation runs --------------


def implementation_assumptions(kernels: Iterable[Kernel]) -> list[str]:
    """Which ops cost what their implementation runs on meta tensors: on a GPU it may go another way."""
    calls = {kernel.op.call for kernel in kernels if isinstance(kernel.op.call.body, OpsBody)}
    names = sorted({call.name for call in calls if find_rule(call) is by_implementation})
    return [f"custom ops launch what their Python runs on meta tensors: {', '.join(names)}"] if names else []


def uncounted_implementations(kernels: Iterable[Kernel]) -> list[str]:
    """Why ops are not counted though they are implemented in Python."""
    calls = {kernel.op.call for kernel in kernels if kernel.cost.op_class == UNCOUNTED}
    errors = {(call.name, call.body.error) for call in calls if isinstance(call.body, OpsBody) and call.body.error}
    return [f"uncounted: {name}, whose Python stops at tensors without values: {why}" for name, why in sorted(errors)]
