"""What an argument may be. Each check raises one error of one line, before anything is metered."""

from __future__ import annotations

import math
from collections.abc import Mapping
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
    """None stands for an argument that was not given."""
    wanted = "a positive whole number" if least == 1 else f"a whole number from {least} on"
    for name, number in numbers.items():
        if number is not None and not is_whole(number, least):
            raise error(f"{name} must be {wanted}, not {number!r}")


def check_positive(error: type[ValueError] = ValueError, **numbers: object) -> None:
    for name, number in numbers.items():
        if number is not None and not is_positive(number):
            raise error(f"{name} must be a positive number, not {number!r}")


def check_not_negative(**numbers: Any) -> None:
    for name, number in numbers.items():
        if not (is_number(number) and number >= 0):
            raise ValueError(f"{name} must be a number from 0 on, not {number!r}")


def check_share(error: type[ValueError] = ValueError, **shares: Any) -> None:
    for name, share in shares.items():
        if not (is_number(share) and 0 <= share <= 1):
            raise error(f"{name} is a share from 0 to 1, not {share!r}")


def check_flags(**flags: object) -> None:
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise TypeError(f"{name} must be True or False, not {flag!r}")


def check_mapping(example: str, **mappings: object) -> None:
    for name, mapping in mappings.items():
        if not isinstance(mapping, Mapping):
            raise TypeError(f"{name} must be a mapping such as {example}, not {mapping!r}")


def check_callable(what: str, function: object) -> None:
    """`what`: who calls it, and with what."""
    if not callable(function):
        raise TypeError(f"{what}, not {function!r}")
