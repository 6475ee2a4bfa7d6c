"""Who called: the Python frames of the running call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from traceback import walk_stack
from types import FrameType
from typing import Any

_OWN_REFERENCES = 3  # the frame's, that of the variable here, and that of the question


def callers() -> Iterator[FrameType]:
    """The frame that asks, and those that called it, the outermost last."""
    return (frame for frame, _ in walk_stack(sys._getframe(1)))


def locals_of(frame: FrameType) -> dict[str, Any]:
    """The frame's local variables now. Before Python 3.13 a function keeps the copy that it was asked for until it
    returns, and with it tensors that its variables no longer hold: here that copy is emptied, unless the program holds
    it too, as what locals() gave it."""
    kept = frame.f_locals
    found = dict(kept)
    is_copy = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED  # else they are the variables
    if is_copy and sys.getrefcount(kept) <= _OWN_REFERENCES:
        kept.clear()
    return found
