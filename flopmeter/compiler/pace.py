"""What Python does while torch compiles that takes longer than the compiling, for a large graph.

Frames: CPython since 3.11 keeps those of a thread in chunks of 16 KiB. One is mapped for a call that does not fit into
the last, and unmapped when that call returns: a loop at a depth where its calls do not fit does so each time, which
takes a thousand times as long as another call. Half of the time of BERT-large's training step with AdamW went there.
(https://github.com/python/cpython/issues/142183: 3.15 and the last of 3.13 and 3.14 keep one chunk.)

Garbage: nearly all that the compiler makes stays until its graph is done, and Python goes through it again and again.

Hashes: inductor keeps what kernels read and write in sets, and a set that is made of sets asks for each hash anew, of a
symbolic index.

Lists of tensors: a step of an optimizer that updates hundreds at once has a list of results for each of its ops, and
each item that is taken from one goes through all of the list again.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

from flopmeter.torch_names import compiler as names

FRAME_WORDS = 1 << 17  # 1 MiB: its chunk, the next power of two, has as much again for the frames of what it calls


def undisturbed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which compiles: its calls find their frames' room in one chunk, of which no more is touched than they
    come to, and no garbage is collected meanwhile."""

    def call(*args: Any, **kwargs: Any) -> Any:
        collects = gc.isenabled()
        gc.disable()
        try:
            return function(*args, **kwargs)
        finally:
            if collects:
                gc.enable()

    call.__code__ = call.__code__.replace(co_stacksize=FRAME_WORDS)
    return functools.wraps(function)(call)


def around_hash(plain: Callable[[Any], int]) -> Callable[[Any], int]:
    """Wraps the hash of what does not change."""

    @functools.wraps(plain)
    def kept(instance: Any) -> int:
        held = vars(instance)
        if "_hash" not in held:
            held["_hash"] = plain(instance)
        return held["_hash"]

    return kept


def around_set_making(plain: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of inductor's sets: a copy of one takes its hashes over."""

    @functools.wraps(plain)
    def make(instance: Any, *iterable: Any) -> None:
        if iterable and type(iterable[0]) is type(instance):
            plain(instance)
            instance.__ior__(iterable[0])
        else:
            plain(instance, *iterable)

    return make


def around_union(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wraps the union of two of these sets in the same way."""

    @functools.wraps(plain)
    def union(one: Any, other: Any) -> Any:
        return one.copy().__ior__(other) if type(other) is type(one) else plain(one, other)

    return union


def around_origins(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps what tells from which ops the arguments of an op come that are no buffers yet: of a list of tensors it need
    not look at buffers."""
    buffer = names.IR.owner.ComputedBuffer

    @functools.wraps(plain)
    def origins(args: Any, kwargs: Any) -> Any:
        if args and type(args[0]) is list:
            args = [[each for each in args[0] if not isinstance(_inner(each), buffer)], *args[1:]]
        return plain(args, kwargs)

    return origins


def _inner(value: Any) -> Any:
    """The data of a box around a box."""
    return getattr(getattr(value, "data", None), "data", None)
