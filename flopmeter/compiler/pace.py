"""What Python does while torch compiles that takes longer than the compiling, for a large graph.

Frames: CPython since 3.11 keeps those of a thread in chunks of 16 KiB. One is mapped for a call that does not fit into
the last, and unmapped when that call returns: a loop at a depth where its calls do not fit does so each time, which
takes a thousand times as long as another call. Half of the time of BERT-large's training step with AdamW went there.
(https://github.com/python/cpython/issues/142183: 3.15 and the last of 3.13 and 3.14 keep one chunk.)

Garbage: nearly all that the compiler makes stays until its graph is done, and Python goes through it again and again.

Hashes: inductor keeps what kernels read and write in sets, and a set that is made of sets asks for each hash anew, of a
symbolic index.

Lists of tensors: a step of an optimizer that updates hundreds at once has a list of results for each of its ops, and
each item that is taken from one goes through all of the list again. So do two of inductor's passes that look for nodes
whose values are out of date, and what fuses the kernels of the list with one more of hundreds of step counters.
"""

from __future__ import annotations

import functools
import gc
import operator
from collections.abc import Callable, Iterator
from typing import Any

from flopmeter.torch_names import compiler as names
from flopmeter.torch_names.private import PrivateName

FRAME_WORDS = 1 << 17  # 1 MiB: its chunk, the next power of two, has as much again for the frames of what it calls


def wrappers() -> Iterator[tuple[PrivateName, Callable[[Any], Any]]]:
    yield names.DEP_HASH, around_hash
    yield names.SET_MAKING, around_set_making
    yield names.SET_UNION, around_union
    yield names.SET_INTERSECTION, around_intersection
    yield names.SET_DIFFERENCE, around_difference
    yield names.ORIGINS, around_origins
    yield names.UPDATE_VALUES, around_update
    yield names.MORE_MEMORY, around_memory
    yield names.IS_NAMED_TUPLE, functools.cache


def undisturbed(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which compiles, without two delays: its frames find room in one chunk of memory (of which only what
    they fill is touched), and no garbage is collected meanwhile."""

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
    """Wraps the hash of an object that does not change."""

    @functools.wraps(plain)
    def kept(instance: Any) -> int:
        held = vars(instance)
        if "_hash" not in held:
            held["_hash"] = plain(instance)
        return held["_hash"]

    return kept


def around_set_making(plain: Callable[..., None]) -> Callable[..., None]:
    """Wraps the constructor of inductor's sets: a copy of a set keeps the hashes of its elements."""

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


def around_intersection(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wraps the intersection, whose order is that of the smaller set, or of the second of two equally large."""

    @functools.wraps(plain)
    def intersection(one: Any, other: Any) -> Any:
        if type(other) is not type(one):
            return plain(one, other)
        small, large = (one, other) if len(one) < len(other) else (other, one)
        kept = large._dict
        return one._from_dict({each: None for each in small._dict if each in kept})

    return intersection


def around_difference(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Wraps what removes one set's elements from another, in place."""

    @functools.wraps(plain)
    def difference(one: Any, other: Any) -> Any:
        if type(other) is not type(one) or other is one:
            return plain(one, other)
        discard = one._dict.pop
        for each in other._dict:
            discard(each, None)
        return one

    return difference


def around_origins(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the search for the ops from which those arguments of an op come that are not buffers yet. In a list of
    tensors it need not look at buffers, nor again at the list while the others in it are the same."""
    buffer = names.IR.owner.ComputedBuffer
    last: tuple[Any, list[Any], Any] = None, [], None  # a list, what is no buffer in it, where that comes from

    @functools.wraps(plain)
    def origins(args: Any, kwargs: Any) -> Any:
        nonlocal last
        if not args or type(args[0]) is not list:
            return plain(args, kwargs)
        items, rest = args[0], args[1:]
        data = [_inner(each) for each in items]
        loops = [each for each in data if type(each) is not buffer]
        if last[0] is not items or len(loops) != len(last[1]) or not all(map(operator.is_, loops, last[1])):
            open_ = [each for each, held in zip(items, data, strict=True) if type(held) is not buffer]
            last = items, loops, plain([open_], {})
        return last[2] | plain(rest, kwargs) if rest or kwargs else last[2]

    return origins


def around_update(plain: Callable[[Any], int]) -> Callable[[Any], int]:
    """Wraps the update of the values of a graph's nodes: where none was changed there is nothing to update."""

    @functools.wraps(plain)
    def update(updater: Any) -> int:
        graph = getattr(updater, "gm", updater).graph  # torch 2.11 holds the graph itself
        if any(getattr(updater, "subgraph_updaters", ())):
            return plain(updater)
        is_known = (updater.hash_node(node) in updater.processed_hashes for node in graph.nodes)
        return 0 if all(is_known) else plain(updater)

    return update


def around_memory(plain: Callable[[Any, Any, Any], bool]) -> Callable[[Any, Any, Any], bool]:
    """Wraps the question whether fusing two kernels may need more memory. It does not if what one of them reads stays
    in memory anyway."""

    @functools.wraps(plain)
    def increases(scheduler: Any, one: Any, other: Any) -> bool:
        smaller = min(one, other, key=lambda node: len(node.read_writes.reads))
        buffers = (scheduler.name_to_buf.get(read.name) for read in smaller.read_writes.reads)
        if all(buffer is None or len(buffer.users) != 1 for buffer in buffers):
            return False
        return plain(scheduler, one, other)

    return increases


def _inner(value: Any) -> Any:
    """The data of a box around a box."""
    return getattr(getattr(value, "data", None), "data", None)
