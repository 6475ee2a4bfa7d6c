"""What the shims share: operators of flopmeter's own for kernels of packages that are not there (a schema, shapes and a
cost), and functions by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from flopmeter.costs.custom import CustomRule, operator_with_cost


def kernel(name: str, cost: CustomRule, mutates: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: an operator `flopmeter_shims::name`."""
    return operator_with_cost(f"flopmeter_shims::{name}", cost, mutates)


def named(*values: Any) -> dict[str, Any]:
    """Functions and classes by their own names."""
    return {each.__name__: each for each in values}


def left_out(module: str, name: str) -> type:
    """What a program may import, and derive from, as long as it does not use it: internals that a library names for
    a path that its arguments do not take."""

    def refuse(self: object, *args: object, **options: object) -> None:
        raise NotImplementedError(f"flopmeter's shim of {module} has no {name}: run the script's path without it")

    return type(name, (), {"__init__": refuse})
