"""Who called: the Python frames of the running call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from traceback import walk_stack
from types import FrameType
from typing import Any


def callers() -> Iterator[FrameType]:
    """The frame that asks, and those that called it, the outermost last."""
    return (frame for frame, _ in walk_stack(sys._getframe(1)))


def locals_of(frame: FrameType) -> dict[str, Any]:
    """The frame's local variables now. Before Python 3.13 a function keeps the copy that it was asked for until it
    returns, and with it tensors that its variables no longer hold: here that copy is emptied."""
    kept = frame.f_locals
    found = dict(kept)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # else they are the variables
        kept.clear()
    return found
