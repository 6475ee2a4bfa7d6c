"""Python objects that ranks send each other. torch packs them into tensors, which have no contents on meta.

Ranks that run together (ranks.py) get what the others really sent. Where only one rank runs, objects of another rank
are an error, except for a broadcast: the objects that this rank passes are assumed to be those of all ranks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from flopmeter.distributed.errors import WorldError
from flopmeter.known_values import messages
from flopmeter.known_values.collectives import EQUAL_RANKS
from flopmeter.known_values.entry_points import note_assumption
from flopmeter.torch_names.around import around


def lone_store() -> Any:
    """The store of a world of which one rank runs, with what this rank puts there. To wait for another is an error."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(timedelta(seconds=1))
    return store


Ranks = tuple[int, ...]


def _in_group(
    answer: Callable[[functools.partial[Any], dict[str, Any], Ranks], Any],
) -> Callable[..., Callable[..., Any]]:
    """Around a function of torch's that sends objects through a group: on the group's ranks `answer` is asked instead,
    with torch's own call, its arguments by name and the global ranks of the group."""

    @around
    def asked(plain: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(plain).bind(*args, **kwargs).arguments
        if dist.get_rank(given.get("group")) < 0:
            return plain(*args, **kwargs)
        ranks = tuple(dist.get_process_group_ranks(given.get("group")))
        return answer(functools.partial(plain, *args, **kwargs), given, ranks)

    return asked


@_in_group
def sent(send: functools.partial[Any], given: dict[str, Any], ranks: Ranks) -> Any:
    """torch's send_object_list. Its two messages are part of the program's set-up, and are not recorded."""
    if messages.mailbox is None:
        return send()
    receiver = _peer(ranks, given.get("dst"), given.get("group_dst"))
    messages.mailbox.send(ranks, receiver, list(given["object_list"]), has_objects=True)
    return None


@_in_group
def received(_: functools.partial[Any], given: dict[str, Any], ranks: Ranks) -> int:
    """torch's recv_object_list."""
    box, sender = messages.mailbox, _peer(ranks, given.get("src"), given.get("group_src"))
    if box is None or not box.reaches(sender):
        raise _of_another_rank("recv_object_list")
    given["object_list"][:] = box.open(box.expect(ranks, sender, has_objects=True))
    return sender


@_in_group
def answered(receive: functools.partial[Any], given: dict[str, Any], ranks: Ranks) -> Any:
    """torch's broadcast_object_list or scatter_object_list."""
    box, name = messages.mailbox, receive.func.__name__
    source = _peer(ranks, given.get("src"), given.get("group_src"))
    if source == dist.get_rank():
        if box is not None:
            sent = given["object_list"] if name == _BROADCAST else given["scatter_object_input_list"]
            box.send(ranks, messages.ALL, list(sent), has_objects=True)
        return receive()
    ticket = box.expect_for_all(ranks, source) if box is not None and box.reaches(source) else None
    is_needed = name != _BROADCAST or any(item is None for item in given["object_list"])
    if is_needed and box is not None and ticket is not None:
        objects = box.open(ticket)
        if name == _BROADCAST:
            given["object_list"][:] = objects
        else:
            given["scatter_object_output_list"][0] = objects[ranks.index(dist.get_rank())]
    elif is_needed:
        raise _of_another_rank(name)
    else:
        note_assumption(EQUAL_RANKS, name)
    return None


_BROADCAST = "broadcast_object_list"

# How each function is answered, by its name in torch.distributed.
ANSWERS = {
    "broadcast_object_list": answered,
    "scatter_object_list": answered,
    "send_object_list": sent,
    "recv_object_list": received,
}


def _of_another_rank(name: str) -> WorldError:
    return WorldError(
        f"{name}: the objects are those of another rank, which does not run. Give this rank the objects, make the "
        "sender the rank that is metered: world(..., rank=...), or run the stages of a pipeline together: "
        "flopmeter.time_pipeline(...), or flopmeter run for a script"
    )


def _peer(ranks: Ranks, peer: int | None, group_peer: int | None) -> int:
    """The global rank of the sender or receiver."""
    return ranks[group_peer] if group_peer is not None else int(peer or 0)
