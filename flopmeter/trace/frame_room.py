"""Room for Python's frames.

CPython since 3.11 keeps the frames of a thread in chunks of 16 KiB: one is mapped for a call that does not fit into the
last, and unmapped when that call returns. A loop at a depth where its calls just do not fit does so each time, which takes
a thousand times as long as a call elsewhere. Torch's compiler has stacks so deep that half of the time for a large graph
went there. (https://github.com/python/cpython/issues/142183: 3.15 and the last of 3.13 and 3.14 keep one chunk.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

FRAME_WORDS = 1 << 17  # 1 MiB: its chunk, the next power of two, has as much again for the frames of what it calls


def with_frame_room(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose calls find their frames' room in one chunk. What of it no frame comes to is not touched."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=FRAME_WORDS)
    return functools.wraps(function)(call)
