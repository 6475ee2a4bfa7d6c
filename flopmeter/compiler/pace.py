"""What Python does while torch compiles that takes longer than the compiling, for a large graph.

Frames: CPython since 3.11 keeps those of a thread in chunks of 16 KiB. One is mapped for a call that does not fit into
the last, and unmapped when that call returns: a loop at a depth where its calls do not fit does so each time, which
takes a thousand times as long as another call. Half of the time of BERT-large's training step with AdamW went there.
(https://github.com/python/cpython/issues/142183: 3.15 and the last of 3.13 and 3.14 keep one chunk.)

Garbage: nearly all that the compiler makes stays until its graph is done, and Python goes through it again and again.

Large optimizers: a step that updates hundreds of tensors is one graph of thousands of nodes. Two of inductor's passes
go through all of it again and again: the one that looks for nodes whose values are out of date, and the question what
fusing two kernels does to the peak of memory.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

from flopmeter.torch_names import compiler as names
from flopmeter.torch_names.private import PrivateName

FRAME_WORDS = 1 << 17  # 1 MiB: its chunk, the next power of two, has as much again for the frames of what it calls


def wrappers() -> Iterator[tuple[PrivateName, Callable[[Any], Any]]]:
    yield names.UPDATE_VALUES, around_update
    yield names.MORE_MEMORY, around_memory


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
