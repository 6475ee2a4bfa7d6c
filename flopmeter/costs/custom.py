"""Costs of ops that are not torch's own: the user's rules, and formulas registered with torch's FLOP counter."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from flopmeter.costs.rules import Rule, make_cost, rule
from flopmeter.records import ATTENTION, CONTRACTION, ELEMENTWISE, Call, Cost, FormulaWork, TensorSpec
from flopmeter.torch_names.private import no_dispatch_modes
from flopmeter.trace.tensor_specs import as_tensors

CustomRule = Callable[[Call], "int | Cost | tuple[Cost, ...]"]


def register_cost(op: Any, *, op_class: str = ELEMENTWISE) -> Callable[[CustomRule], CustomRule]:
    """Decorator: price an op that flopmeter has no rule for.

    op: `torch.ops.mine.op` (all overloads), one overload of it, or what `torch.library.custom_op` and
        `torch.library.triton_op` return.
    op_class: the class of the report that the op belongs to, for a rule that returns a number.

    The rule takes a `Call`, with `inputs` and `outputs` (shape, dtype, numel, nbytes each) and `argument(name)`, and
    returns FLOPs as a number; bytes follow from the touched-bytes law. To say more, it returns a Cost of
    `flopmeter.costs.make_cost` (which takes the bytes read and written) or of `make_contraction` (matmuls, on the
    matrix units), or a tuple of Costs, one for each kernel; `()` if nothing is launched.

        @flopmeter.register_cost(torch.ops.mine.swiglu)
        def swiglu(call):
            return 5 * call.outputs[0].numel

    Raises ValueError if the op has a rule already, TypeError if `op` is no op.
    """
    target = _resolve(op)

    def enter(function: CustomRule) -> CustomRule:
        rule(target)(_checked(function, op_class))
        return function

    return enter


def operator_with_cost(name: str, cost: CustomRule, mutates: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: an operator of flopmeter's own, `namespace::name`, for a kernel that is not there. The function, which
    has type annotations, makes its result from shapes alone; it writes to the arguments in `mutates`."""

    def make(shapes: Callable[..., Any]) -> Any:
        operator = torch.library.custom_op(name, shapes, mutates_args=tuple(mutates))
        operator.register_fake(shapes)
        register_cost(operator)(cost)
        return operator

    return make


def torch_formula(call: Call) -> Rule | None:
    """The rule that a formula registered with `torch.utils.flop_counter.register_flop_formula` makes, or None.

    torch counts nothing but matmuls there, so the FLOPs are those of a contraction; bytes follow from the law.
    """
    from torch.utils.flop_counter import flop_registry  # not before it is asked for, since it imports triton

    formula = flop_registry.get(call.func.overloadpacket) or flop_registry.get(call.func)
    if formula is None:
        return None

    def by_formula(call: Call) -> Cost:
        made: dict[TensorSpec, Tensor] = {}
        with no_dispatch_modes():  # the formula may look at tensors, which must not be metered
            args, kwargs = as_tensors((call.args, dict(call.kwargs)), made)
            returned = as_tensors(call.outputs, made)
            flops = int(formula(*args, **kwargs, out_val=returned[0] if len(returned) == 1 else returned))
        is_integer_work = not any(spec.is_floating or spec.dtype.itemsize == 1 for spec in call.inputs)
        flops = 0 if is_integer_work else flops  # products of bytes run on the int8 unit, as in make_contraction
        counted = make_cost(call, CONTRACTION, work=FormulaWork(flops // 2))
        return replace(counted, flops_by_class=((CONTRACTION, flops),))

    return by_formula


def _resolve(op: Any) -> OpOverload | OpOverloadPacket:
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returns
    if not isinstance(op, (OpOverload, OpOverloadPacket)):
        raise TypeError(f"register_cost takes an op such as torch.ops.mine.op, not {op!r}")
    return op


def _checked(function: CustomRule, op_class: str) -> Rule:
    def checked(call: Call) -> Cost | tuple[Cost, ...]:
        cost = function(call)
        if isinstance(cost, int) and not isinstance(cost, bool) and cost >= 0:
            return make_cost(call, op_class, cost, work=FormulaWork(macs=0) if op_class == ATTENTION else None)
        if isinstance(cost, Cost) or (isinstance(cost, tuple) and all(isinstance(part, Cost) for part in cost)):
            return cost
        raise TypeError(
            f"the cost rule of {call.func} must return FLOPs >= 0, a Cost or a tuple of Costs, not {cost!r}"
        )

    checked.__name__, checked.__module__ = function.__name__, function.__module__
    return checked
