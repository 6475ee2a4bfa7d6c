"""Attributes of libraries, of modules and of classes, in whose place others stand for a time."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

_ABSENT = object()


def own(owner: Any, name: str) -> Any:
    """The attribute as the owner holds it, for `put`, also where it has none of its own."""
    return vars(owner).get(name, _ABSENT)


def put(owner: Any, name: str, value: Any) -> None:
    if value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def replace(undo: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Puts the value in the attribute's place until `undo` is closed."""
    undo.callback(put, owner, name, own(owner, name))
    setattr(owner, name, value)
