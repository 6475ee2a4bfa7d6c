"""Ops that the user's assumptions answer: which experts are picked, and whether all values are finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from flopmeter.known_values.assumptions import CHECKS_HOLD, Assumptions
from flopmeter.known_values.data_dependent import ask
from flopmeter.known_values.replay import Handler, Invocation, Knowledge
from flopmeter.known_values.stand_ins import compared
from flopmeter.known_values.values import address, no_modes
from flopmeter.torch_names.operators import aten_overloads as aten


def route(known: Knowledge, call: Invocation) -> Any:
    """Unknown scores pick experts by the law that the user stated."""
    scores, law = call.args[0], known.assume.routing
    assert law is not None
    if not scores.is_meta or not scores.is_floating_point() or known.values.knows(scores):
        return known.replay(call)
    result = call.run()
    chosen = result if isinstance(result, Tensor) else result[1]
    position = ROUTES[call.func]
    dim = -1 if position is None else call.argument(position, "dim", -1)
    if dim is None or not scores.dim() or not chosen.numel() or not known.is_small(chosen):
        return result
    with no_modes():
        kept = chosen.dim() == scores.dim()
        k = chosen.shape[dim] if kept else 1
        picks = law.picks(chosen.numel() // k, k, scores.shape[dim])
        shape = list(chosen.shape)
        if kept:
            del shape[dim]
        value = picks.view(*shape, k).movedim(-1, dim) if kept else picks.view(shape)
        known.set(chosen, value.to(chosen.dtype))
    # Count the assumption only when the choice is read: a softmax takes a maximum, too, but ignores its position.
    known.values.tell_of_read(chosen, known.assume.noter(law.text, call.func))
    return result


_EQUALS = (aten.eq.Tensor, aten.eq.Scalar)
_DIFFERS = (aten.ne.Tensor, aten.ne.Scalar)


def is_finite(known: Knowledge, call: Invocation) -> Any:
    """checks="hold": unknown values are neither NaN nor infinite.

    torch's isfinite(x) arrives as (x == x) * (x.abs() != inf). A comparison with -inf is not such a check, since masks
    contain -inf.
    """
    source, other = call.args[0], call.argument(1, "other")
    is_itself, is_infinity = other is source, isinstance(other, float) and other == torch.inf
    is_check = other is None or is_itself or is_infinity
    if not is_check or not source.is_meta or not source.is_floating_point() or known.values.knows(source):
        return compared(known, call)
    result = call.run()
    with no_modes():
        known.set_all(result, is_itself if call.func in _EQUALS else call.func in _DIFFERS and is_infinity)
    known.assume.note(CHECKS_HOLD, call.func)
    return result


def of_itself(known: Knowledge, call: Invocation) -> Any:
    """checks="hold": x - x is 0 of finite numbers. Straight-through estimators add it to a sample, for its gradient."""
    places = {(address(each), each.shape, each.stride(), each.storage_offset()) for each in call.tensors}
    is_itself = len(call.tensors) == 2 and len(places) == 1 and "alpha" not in call.kwargs
    if not is_itself or not call.tensors[0].is_meta or known.knows_all(call.tensors):
        return known.replay(call)
    result = call.run()
    with no_modes():
        known.set_all(result, 0)
    known.values.tell_of_read(result, known.assume.noter(CHECKS_HOLD, call.func))
    return result


def holds(known: Knowledge, call: Invocation) -> Any:
    """checks="hold": all(), equal() and allclose() of unknown values are True."""
    if known.knows_all(call.tensors):
        return ask(known, call) if torch.Tag.data_dependent_output in call.func.tags else known.replay(call)
    known.assume.note(CHECKS_HOLD, call.func)
    if torch.Tag.data_dependent_output in call.func.tags:
        return True
    result = call.run()
    with no_modes():
        known.set(result, torch.ones_like(result, device="cpu"))
    return result


def gradients_finite(known: Knowledge, call: Invocation) -> Any:
    """checks="hold": GradScaler finds no inf in the gradients, so its flag does not change."""
    known.assume.note(CHECKS_HOLD, call.func)
    return call.run()


# Ops that pick an expert or a token, and the position of their argument dim (None: the last dimension).
ROUTES: dict[OpOverload, int | None] = {
    aten.topk.default: 2,
    aten.argmax.default: 1,
    aten.max.dim: 1,
    aten.multinomial.default: None,
}

_FINITE = (aten.isnan.default, aten.isinf.default, aten.isposinf.default, aten.isneginf.default)
FINITE_CHECKS = (*_FINITE, *_EQUALS, *_DIFFERS)

CHECKS: dict[OpOverload, Handler] = {
    aten.all.default: holds,
    aten._is_all_true.default: holds,
    aten.equal.default: holds,
    aten.allclose.default: holds,
    aten._amp_foreach_non_finite_check_and_unscale_.default: gradients_finite,
    aten.sub.Tensor: of_itself,
}


def assumed_handler(func: OpOverload, assumptions: Assumptions) -> Handler | None:
    """What answers the op under these assumptions; None where they say nothing about it."""
    if assumptions.routing and func in ROUTES:
        return route
    if assumptions.checks_hold:
        return CHECKS.get(func) or (is_finite if func in FINITE_CHECKS else None)
    return None
