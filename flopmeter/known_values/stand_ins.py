"""Stand-ins: what a program gets when it reads an unknown value, if the user said `unknown="stand-in"`.

One for each kind of number. A loss of 1.0 is finite, has a logarithm and divides; a count of 0 and a condition that
does not hold leave loops and special cases as they are. Each use is an assumption, noted with the program's line.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopmeter.known_values.assumptions import CONDITION_FAILS, MOST_TURNS, EndlessLoopError
from flopmeter.known_values.replay import Invocation, Knowledge
from flopmeter.known_values.values import no_modes

FLOAT, INTEGER, CONDITION = 1.0, 0, False


def note(known: Knowledge, dtype: torch.dtype, func: Any) -> float | int | bool:
    """The stand-in for one number of the type; its use is noted.

    Raises EndlessLoopError where one line asks for ever.
    """
    value: float | int | bool
    if dtype is torch.bool:
        rule, value = CONDITION_FAILS, CONDITION
    elif dtype.is_floating_point or dtype.is_complex:
        rule, value = f"stand-in {FLOAT} for an unknown float", FLOAT
    else:
        rule, value = f"stand-in {INTEGER} for an unknown integer", INTEGER
    use = known.assume.note(rule, func)
    if use.count >= MOST_TURNS:
        raise EndlessLoopError(
            f"{use.where} asked {use.count:,} times for a value that is not known here ({rule}): a loop that waits for "
            "another answer never ends. Bound its turns, as in `for _ in range(50)`"
        )
    return value


def on_host(known: Knowledge, call: Invocation) -> Tensor:
    """For a copy of an unknown tensor to the host: one of its shape, full of stand-ins."""
    (source, *_), dtype = call.args, call.kwargs.get("dtype")
    value = note(known, source.dtype, call.func)
    with no_modes():
        return torch.full_like(source, value, dtype=dtype or source.dtype, device="cpu")


def into_host(known: Knowledge, call: Invocation) -> Tensor:
    """For an unknown tensor that is copied into one of the host."""
    target, source = call.args[:2]
    value = note(known, source.dtype, call.func)
    with no_modes():
        filled: Tensor = target.fill_(value)
    return filled
