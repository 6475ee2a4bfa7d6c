"""A patch of torch that a run with a device named cuda needs: what is replaced, by what, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Patch:
    """`owner.name` is `value` while the run is open."""

    owner: Any
    name: str
    value: Any
    reason: str


@contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    """Apply them in order, and undo them in reverse order, also after an error."""
    with ExitStack() as undo:
        for patch in patches:
            own = vars(patch.owner)
            if patch.name in own:
                undo.callback(setattr, patch.owner, patch.name, own[patch.name])
            else:  # inherited, or not there at all
                undo.callback(delattr, patch.owner, patch.name)
            setattr(patch.owner, patch.name, patch.value)
        yield
