"""Stand-ins: what a program gets when it reads an unknown value, if the user said `unknown="stand-in"`.

One for each kind of number. A loss of 1.0 is finite, has a logarithm and divides; a count of 0 and a condition that
does not hold leave loops and special cases as they are. Compared with exactly 1 a float is less: an error over its
tolerance, for whose `error < 1` an adaptive solver would wait for ever, as its `error <= 1` lets it go on. Where the
program raises an error in one of two cases, the other one is taken (branches.py), and a float that is compared with a
number is 1.0 there too, as if the program had read it. Each use is an assumption, noted with the program's line.

The stand-in belongs to the unknown, not to the question: few integers keep theirs with their storage, and what is
computed from them alone is computed from their stand-ins too, so that one more than an unknown count is 1.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import takewhile
from linecache import getline
from typing import Any

import torch
from torch import Tensor, nn

from flopmeter.known_values import assumptions
from flopmeter.known_values.assumptions import Assumption
from flopmeter.known_values.branches import answer_without_error
from flopmeter.known_values.replay import Invocation, Knowledge
from flopmeter.known_values.values import PAGED_BYTES, address, is_count, no_modes, spans_storage
from flopmeter.records.tensors import tensors_in
from flopmeter.torch_names.frames import callers
from flopmeter.torch_names.operators import aten_overloads as aten

FLOAT, INTEGER, CONDITION = 1.0, 0, False
_MOVES = {move.__code__ for move in (nn.Module.to, nn.Module.cpu)}  # of modules, with their weights and buffers


def compared(known: Knowledge, call: Invocation) -> Any:
    """Remembers, for a comparison of an unknown float with a number, what the stand-in would have answered."""
    result = known.replay(call)
    source, number = call.args[0], call.argument(1, "other")
    is_asked = known.assume.stands_in and source.is_meta and source.is_floating_point()
    if is_asked and isinstance(number, (int, float)) and not known.values.knows(source):
        known.as_compared[result] = answer_of_stand_in(COMPARISONS[call.func], FLOAT, number)
    return result


def keep(known: Knowledge, result: Any) -> None:
    """Gives stand-ins to unknown integers among an op's results."""
    for tensor in tensors_in(result):
        if tensor.is_meta and is_count(tensor) and address(tensor) not in known.values.cells and spans_storage(tensor):
            with no_modes():
                known.values.write(tensor, torch.full_like(tensor, INTEGER, device="cpu"))
            known.values.mark_as_stand_in(tensor)


def of_number(known: Knowledge, number: Tensor, func: Any) -> float | int | bool:
    """The stand-in for a tensor of one number."""
    value, _ = _noted(known, number.dtype, func, known.as_compared.get(number, CONDITION))
    if not known.values.has_stand_in(number):
        return value
    with no_modes():
        return known.values.read(number).item()


def on_host(known: Knowledge, call: Invocation) -> Tensor:
    """A copy of an unknown tensor on the host, of the same shape and full of stand-ins. Tensors that a module takes
    along when it moves there are not read, so no assumption is noted. Large weights stay unwritten: an offloaded model
    takes no memory of this machine."""
    (source, *_), dtype = call.args, call.kwargs.get("dtype")
    if source.layout is torch.sparse_coo:
        return _sparse_on_host(known, source, dtype or source.dtype, call.func)
    with no_modes():
        target = torch.empty_like(source, dtype=dtype or source.dtype, device="cpu")
    if not _moves_a_module():
        return _sent(known, source, target, call.func)
    _remember(known, target, None)
    if target.nbytes < PAGED_BYTES:
        with no_modes():
            target.fill_(_stand_in(target.dtype))
    return target


def _sparse_on_host(known: Knowledge, source: Tensor, dtype: torch.dtype, func: Any) -> Tensor:
    """Its elements at their places, where these are known (else all at the first one)."""
    with no_modes():
        places, values = source._indices(), source._values()
        held = known.values.read(places) if known.values.knows(places) else torch.zeros_like(places, device="cpu")
        numbers = torch.empty_like(values, dtype=dtype, device="cpu")
    _sent(known, values, numbers, func)
    with no_modes():
        return torch.sparse_coo_tensor(held, numbers, source.shape, is_coalesced=source.is_coalesced())


def _moves_a_module() -> bool:
    program = assumptions.program_frame()
    frames = takewhile(lambda frame: frame is not program, callers())
    return any(frame.f_code in _MOVES for frame in frames)


def into_host(known: Knowledge, call: Invocation) -> Tensor:
    """Fills a tensor of the host into which an unknown tensor is copied."""
    target, source = call.args[:2]
    return _sent(known, source, target, call.func)


def _sent(known: Knowledge, source: Tensor, target: Tensor, func: Any) -> Tensor:
    value, use = _noted(known, source.dtype, func)
    stand_in = known.values.read(source) if known.values.has_stand_in(source) else torch.as_tensor(value, device="cpu")
    with no_modes():
        target.copy_(stand_in)
    _remember(known, target, known.assume.taking_back(use))
    return target


def _remember(known: Knowledge, target: Tensor, take_back: Callable[[], None] | None) -> None:
    """Remembers the weight by its storage: an offloaded weight comes back as another tensor of that storage
    (`weight.data = ...`)."""
    if target.layout is torch.strided:
        known.sent_unknown[target.untyped_storage()] = take_back


def comes_back(known: Knowledge, source: Tensor) -> bool:
    """Whether a tensor that is copied to the device holds stand-ins for an unknown one, as activations do that wait on
    the host for the backward pass. Then the copy is unknown again, and nobody has read the stand-ins: that is no
    assumption."""
    if source.layout is not torch.strided or (storage := source.untyped_storage()) not in known.sent_unknown:
        return False
    take_back = known.sent_unknown[storage]
    known.sent_unknown[storage] = None
    if take_back is not None:
        take_back()
    return True


def _noted(
    known: Knowledge, dtype: torch.dtype, func: Any, compared: bool = CONDITION
) -> tuple[float | int | bool, Assumption]:
    """The stand-in for one number of the type; its use is noted. `compared`: for a condition, the answer, unless the
    program would fail with it. Raises EndlessLoopError if one line asks again and again."""
    value: float | int | bool
    if dtype is torch.bool:
        rule, value = _of_condition(compared)
    else:
        value = _stand_in(dtype)
        rule = f"stand-in {value} for an unknown {'float' if value == FLOAT else 'integer'}"
    use = known.assume.note(rule, func)
    if use.count >= assumptions.MOST_TURNS:
        raise assumptions.EndlessLoopError(
            f"{use.where} asked {use.count:,} times for a value that is not known here ({rule}): a loop that waits for "
            "another answer never ends. Bound its turns, as in `for _ in range(50)`"
        )
    return value, use


def _stand_in(dtype: torch.dtype) -> float | int | bool:
    if dtype is torch.bool:
        return CONDITION
    return FLOAT if dtype.is_floating_point or dtype.is_complex else INTEGER


def _of_condition(compared: bool) -> tuple[str, bool]:
    """What is assumed of an unknown condition, and the answer."""
    frame = assumptions.program_frame()
    if frame is not None and (answer := answer_without_error(frame)) is not None:
        return f"{assumptions.NO_ERROR}: {answer}", answer
    if compared:
        return assumptions.CONDITION_HOLDS, True
    is_loop = frame is not None and getline(frame.f_code.co_filename, frame.f_lineno).lstrip().startswith("while ")
    return assumptions.LOOP_ENDS if is_loop else assumptions.CONDITION_FAILS, CONDITION


def answer_of_stand_in(compare: Callable[[Any, Any], Any], stand_in: float, number: Any) -> Any:
    """What a comparison with a number answers: 1.0 is less than 1, by as little as makes no other difference."""
    if stand_in == FLOAT == number and compare in _OF_ORDER:
        return compare in (operator.lt, operator.le)
    return compare(stand_in, number)


_OF_ORDER = (operator.lt, operator.le, operator.gt, operator.ge)
COMPARISONS = {getattr(aten, name).Scalar: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
