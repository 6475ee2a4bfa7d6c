"""The open meters of a thread are a stack: each is closed before those that were opened earlier. Two asyncio tasks of
one thread would break that order, so only one task at a time may have meters open."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, NamedTuple


class _Entry(NamedTuple):
    meter: object
    close: Callable[[], object]
    task: asyncio.Task[Any] | None


class _Stack(threading.local):
    def __init__(self) -> None:
        self.entries: list[_Entry] = []


_stack = _Stack()


def check_task() -> None:
    """Raise RuntimeError where another asyncio task of this thread has a meter open."""
    if _stack.entries and _stack.entries[-1].task not in (None, _task()):
        raise RuntimeError(
            "a FlopMeter is open in another asyncio task, and tasks of a thread take turns: each meter would count the "
            "other's ops. Let one task meter at a time (an asyncio.Lock), or meter in processes of their own"
        )


def push(meter: object, close: Callable[[], object]) -> None:
    """`meter` is open from now on, until `close` is called."""
    _stack.entries.append(_Entry(meter, close, _task()))


def is_open(meter: object) -> bool:
    """Whether a meter is open in this thread."""
    return any(entry.meter is meter for entry in _stack.entries)


def pop(meter: object) -> None:
    """Close `meter`. If a meter that was entered later is still open, it is closed too, and RuntimeError is raised."""
    innermost = _stack.entries[-1].meter
    while _stack.entries:
        entry = _stack.entries.pop()
        entry.close()
        if entry.meter is meter:
            break
    if innermost is not meter:
        raise RuntimeError(
            "a FlopMeter was left before one that was entered after it, so both counted the same ops; both are closed "
            "now. Leave them in the opposite order"
        )


def _task() -> asyncio.Task[Any] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs in this thread
        return None
