"""Where Dynamo ended graphs, and why: also those that it ended before any op, of which no graph comes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from flopmeter.records import CompiledGraph, GraphBreak
from flopmeter.torch_names.around import around


class Breaks:
    """The breaks of one session. `is_here`: whether this thread compiles for it."""

    def __init__(self, is_here: Callable[[], bool]) -> None:
        self._is_here = is_here
        self._waiting: list[GraphBreak] = []  # not told yet: the next graph is told with them
        self._told: Any = None  # the reason that the last graph came with

    @around
    def noting(self, plain: Callable[..., Any], output: Any, tx: Any, reason: Any, *args: Any, **options: Any) -> Any:
        """Called by Dynamo where it ends a graph, with the reason. The graph may be empty, or be split by DDP, which
        has a reason of its own for each part."""
        result = plain(output, tx, reason, *args, **options)
        if self._is_here() and reason is not self._told:
            self._waiting += _in_words(reason)
        return result

    def before(self, model: Any) -> tuple[GraphBreak, ...]:
        """The breaks that led to this graph, and the one that ends it."""
        self._told = getattr(model, "compile_subgraph_reason", None)
        waiting, self._waiting = self._waiting, []
        return (*waiting, *_in_words(self._told))

    def end_call(self, graphs: list[CompiledGraph]) -> None:
        """Breaks after the last graph belong to that graph."""
        if self._waiting and graphs:
            graphs[-1].breaks += tuple(self._waiting)
        self._waiting, self._told = [], None


def _in_words(reason: Any) -> Iterator[GraphBreak]:
    if reason is not None and reason.graph_break:
        place = reason.user_stack[-1] if reason.user_stack else None
        text = " ".join(str(reason.reason).split())
        # For a file of an installed library only the part of the path that is the same on every machine.
        file = place.filename.replace("\\", "/").rpartition("/site-packages/")[2] if place else "?"
        yield GraphBreak(text, file, (place.lineno or 0) if place else 0)
