"""Functions that take the place of others, and call them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def around(run: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: of a function that is given another one before its arguments, makes what wraps that one.

    @around
    def load(plain, path):
        return plain(path)

    torch.load = load(torch.load)

    What comes before `plain`, such as `self`, is given when it wraps.
    """

    @functools.wraps(run)
    def wrap(*owner_and_plain: Any) -> Any:
        plain = owner_and_plain[-1]

        @functools.wraps(plain)
        def call(*args: Any, **kwargs: Any) -> Any:
            return run(*owner_and_plain, *args, **kwargs)

        return call

    return wrap
