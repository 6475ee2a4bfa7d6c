"""Checks of arguments: each raises a one-line error before anything is metered."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from typing import Any


def is_number(value: object) -> bool:
    """Whether it is a finite number. True and False are none."""
    return type(value) is not bool and isinstance(value, Real) and math.isfinite(value)


def is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


def is_whole(value: Any, least: int = 1) -> bool:
    return type(value) is not bool and isinstance(value, Integral) and int(value) >= least


def check_whole(error: type[ValueError] = ValueError, least: int = 1, **numbers: object) -> None:
    """Raises the error for numbers that are not whole or below `least`. None: the argument was not given."""
    wanted = "must be a positive whole number" if least == 1 else f"must be a whole number from {least} on"
    _check(lambda number: number is None or is_whole(number, least), wanted, error, numbers)


def check_positive(error: type[ValueError] = ValueError, **numbers: object) -> None:
    """Raises the error for numbers that are not positive. None: the argument was not given."""
    _check(lambda number: number is None or is_positive(number), "must be a positive number", error, numbers)


def check_not_negative(**numbers: object) -> None:
    _check(lambda number: is_number(number) and number >= 0, "must be a number from 0 on", ValueError, numbers)


def check_share(error: type[ValueError], **shares: object) -> None:
    _check(lambda share: is_number(share) and 0 <= share <= 1, "is a share from 0 to 1", error, shares)


def check_flags(**flags: object) -> None:
    _check(lambda flag: isinstance(flag, bool), "must be True or False", TypeError, flags)


def check_mapping(example: str, **mappings: object) -> None:
    _check(lambda value: isinstance(value, Mapping), f"must be a mapping such as {example}", TypeError, mappings)


def _check(holds: Callable[[Any], bool], wanted: str, error: type[Exception], given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if not holds(value):
            raise error(f"{name} {wanted}, not {value!r}")


def check_callable(what: str, function: object) -> None:
    """Raises TypeError for what cannot be called. `what`: who calls it, and with what."""
    if not callable(function):
        raise TypeError(f"{what}, not {function!r}")
