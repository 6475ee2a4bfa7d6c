"""What the shims share: operators of flopmeter's own in the place of a package's kernels (a schema, shapes and a cost),
tables of functions by name, and the refusal of options that a shim does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from flopmeter.costs.custom import CustomRule, operator_with_cost


def kernel(name: str, cost: CustomRule, mutates: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: an operator `flopmeter_shims::name`."""
    return operator_with_cost(f"flopmeter_shims::{name}", cost, mutates)


def named(*values: Any) -> dict[str, Any]:
    """Functions and classes by their own names."""
    return {each.__name__: each for each in values}


def refuse(package: str, options: Mapping[str, Any], names: Iterable[str] | None = None) -> None:
    """Raises NotImplementedError if an option of these names (of all, by default) is given. None, False and 0 mean that
    it is not."""
    for name in options if names is None else names:
        given = options.get(name)
        if given is not None and not (isinstance(given, (int, float)) and given == 0):
            raise NotImplementedError(f"flopmeter's shim of {package} has no {name}: leave it out")


def left_out(module: str, name: str) -> type:
    """A class that a program may import and derive from, but not use. Libraries import such internals for paths that
    their arguments do not take."""

    def refuse(self: object, *args: object, **options: object) -> None:
        raise NotImplementedError(f"flopmeter's shim of {module} has no {name}: run the script's path without it")

    return type(name, (), {"__init__": refuse})
