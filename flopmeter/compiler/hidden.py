"""What a session hides from Dynamo and from the program while one compiles: its own hooks, warnings about them, and
stand-ins that would get into Dynamo's tables."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from flopmeter.torch_names import compiler as names


def ignore_warning(message: str) -> Callable[[], None]:
    """The function returned brings the warning back; other filters stay as the program sets them meanwhile."""
    warnings.filterwarnings("ignore", message=message)
    filters: Any = warnings.filters
    own = filters[0]

    def undo() -> None:
        if own in filters:  # a catch_warnings of the program's may have put it away
            filters.remove(own)

    return undo


def made_inside(around: Callable[[], AbstractContextManager[Any]], plain: Any) -> Callable[[], Any]:
    """Lets Dynamo make its tables of torch's functions, which it does when it first needs them, inside of `around`."""

    def table(*_: Any) -> Any:
        with contextlib.nullcontext() if plain.cache_info().currsize else around():
            return plain()

    table.cache_clear, table.cache_info = plain.cache_clear, plain.cache_info  # type: ignore[attr-defined]
    return table


@contextlib.contextmanager
def hooks_hidden() -> Iterator[None]:
    """In this context modules and optimizers are without flopmeter's hooks: Dynamo would trace into them."""
    registries = [name.value for name in names.NO_HOOKS]
    before = [dict(registry) for registry in registries]
    for registry in registries:
        for key in [key for key, hook in registry.items() if str(hook.__module__).startswith("flopmeter.")]:
            del registry[key]
    try:
        yield
    finally:
        for registry, hooks in zip(registries, before, strict=True):
            added = {key: hook for key, hook in registry.items() if key not in hooks}
            registry.clear()
            registry.update(hooks | added)
