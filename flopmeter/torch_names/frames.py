"""Who called: the Python frames of the running call."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from traceback import walk_stack
from types import FrameType


def callers() -> Iterator[FrameType]:
    """The frame that asks, and those that called it, the outermost last."""
    return (frame for frame, _ in walk_stack(sys._getframe(1)))
