"""A patch of torch that a run with a device named cuda needs: what is replaced, by what, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from flopmeter.torch_names.replaced import own, put


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
            undoing.append(replace(patch, value=own(patch.owner, patch.name)))
            undo.callback(_put, undoing[-1])
            _put(patch)
        yield undoing


@contextmanager
def hidden(undoing: list[Patch]) -> Iterator[None]:
    """In this context everything that `applied` has replaced is as it was. Contexts may be nested."""
    with ExitStack() as redo:
        for patch in reversed(undoing):
            now = own(patch.owner, patch.name)
            if now is not patch.value:
                redo.callback(_put, replace(patch, value=now))
                _put(patch)
        yield


def _put(patch: Patch) -> None:
    put(patch.owner, patch.name, patch.value)
