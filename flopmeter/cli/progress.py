"""How far long work is: tqdm's bar where tqdm is installed, else a line for each step; nothing unless on a terminal."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")


def on_terminal(what: str) -> Callable[[Sequence[T]], Iterable[T]]:
    """For the `progress` of compare and sweep: shows on stderr how many of the steps are done."""

    def wrap(steps: Sequence[T]) -> Iterable[T]:
        if not sys.stderr.isatty() or len(steps) < 2:
            return steps
        if importlib.util.find_spec("tqdm") is None:
            return _lines(steps, what)
        bar: Iterable[T] = importlib.import_module("tqdm").tqdm(steps, desc=what, leave=False)
        return bar

    return wrap


def _lines(steps: Sequence[T], what: str) -> Iterator[T]:
    for done, step in enumerate(steps):
        print(f"{what}: {done + 1} of {len(steps)}", file=sys.stderr)
        yield step
