"""Patches of torch while a device named cuda is open: what is replaced, by what, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Patch:
    """`owner.name` is `value` while the run is open."""

    owner: Any
    name: str
    value: Any
    reason: str


@contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[list[Patch]]:
    """Apply the patches in order, and undo them in reverse, also after an error. Yields the argument of `hidden`."""
    undoing: list[Patch] = []
    with ExitStack() as undo:
        for patch in patches:
            undoing.append(replace(patch, value=_own(patch)))
            undo.callback(_put, undoing[-1])
            _put(patch)
        yield undoing


@contextmanager
def hidden(undoing: list[Patch]) -> Iterator[None]:
    """In this context everything that `applied` has replaced is as it was. Contexts may be nested."""
    with ExitStack() as redo:
        for patch in reversed(undoing):
            now = _own(patch)
            if now is not patch.value:
                redo.callback(_put, replace(patch, value=now))
                _put(patch)
        yield


_ABSENT = object()  # the owner had no attribute of its own


def _own(patch: Patch) -> Any:
    return vars(patch.owner).get(patch.name, _ABSENT)


def _put(patch: Patch) -> None:
    if patch.value is _ABSENT:
        delattr(patch.owner, patch.name)
    else:
        setattr(patch.owner, patch.name, patch.value)
