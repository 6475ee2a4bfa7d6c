"""Known values after a collective. Only this rank runs, so the values of other ranks are assumed or unknown.

All ranks of a world are taken to be equal (docs/limits.md): each holds the values that this rank holds. With
`routing="balanced"` the counts in an all-to-all of equal parts follow another law: a rank receives from each other rank
as many tokens as it sends there, so that no rank gets more than its share. Each use of a law counts as an assumption.
No assumption is needed in a group of one rank, nor for what this rank sends as the root.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import distributed_c10d

from flopmeter.known_values import messages
from flopmeter.known_values.replay import Invocation, Knowledge
from flopmeter.known_values.values import is_discrete, no_modes, spans_storage
from flopmeter.records.collectives import COLLECTIVE_OPS, Law
from flopmeter.records.tensors import tensors_in
from flopmeter.torch_names.private import resolve_group

EQUAL_RANKS = "all ranks hold the same values"
BALANCED = 'routing="balanced": received equals sent'


class Exchange(NamedTuple):
    """One collective, as a law sees it."""

    values: list[Tensor]  # what this rank sends, in the order of the arguments
    targets: int  # how many tensors this rank gets
    size: int
    rank: int
    is_balanced: bool
    argument: Callable[[str], Any]

    @property
    def is_root(self) -> bool:
        root = self.argument("root_rank")
        return bool((self.argument("src") if root is None else root) == self.rank)


class TargetValues(NamedTuple):
    """The values of the targets, in order, and the assumption behind them (None: they are certain)."""

    values: list[Tensor]
    rule: str | None = EQUAL_RANKS


Consequence = Callable[[Exchange], TargetValues | None]


def handler_of(func: Any) -> Callable[[Knowledge, Invocation], Any] | None:
    if func._schema.name in HANDLERS:
        return HANDLERS[func._schema.name]
    known = COLLECTIVE_OPS.get(func._schema.name)
    return exchange if known is not None and known.spec.law is not None and known.op.has_law else None


def wait(known: Knowledge, call: Invocation) -> Any:
    """The tensor that is waited for. On meta the op returns it in another storage."""
    result = call.run()
    if known.knows_all(call.tensors):
        with no_modes():
            known.set(result, known.values.read(call.tensors[0]).clone())
    return result


def exchange(known: Knowledge, call: Invocation) -> Any:
    """Runs a collective. The tensors that this rank receives get the values that the law gives; without a law they are
    unknown."""
    _, spec, op = COLLECTIVE_OPS[call.func._schema.name]
    argument = _arguments(call)
    group = _group(argument(op.group))
    if distributed_c10d.get_backend(group) != "fake":
        return call.run()  # a real group, which exchanges real tensors
    sources = list(tensors_in(argument(op.sent)))
    is_known = known.knows_all(sources) and not any(map(known.values.is_blank, sources))
    with no_modes():
        values = [known.values.read(source).clone() for source in sources] if is_known else []
    result = call.run()
    targets = list(tensors_in(result if op.received is None else argument(op.received)))
    if (ways := argument(op.ways)) is not None:  # a batch of sends and receives: only the latter are targets
        targets = [target for target, way in zip(targets, ways, strict=True) if "recv" in way]
    outcome = None
    if is_known:
        with no_modes():
            is_balanced = known.assume.routing is not None and known.assume.routing.is_balanced
            outcome = LAWS[spec.law](Exchange(values, len(targets), group.size(), group.rank(), is_balanced, argument))
    _give(known, targets, outcome)
    if outcome is not None and outcome.rule is not None and group.size() > 1 and targets:
        known.assume.note(outcome.rule, call.func)
    return result


def send(known: Knowledge, call: Invocation) -> Any:
    """A message to one other rank."""
    result, argument = call.run(), _arguments(call)
    group = _group(argument("process_group"))
    if messages.mailbox is not None and distributed_c10d.get_backend(group) == "fake":
        (tensor,) = argument("tensors")
        content: Any = messages.UNKNOWN
        if is_discrete(tensor) and known.values.knows(tensor):  # the receiver takes small ones
            with no_modes():
                content = known.values.read(tensor).clone()
        ranks = torch.distributed.get_process_group_ranks(group)
        messages.mailbox.send(tuple(ranks), ranks[argument("dst")], content)
    return result


def receive(known: Knowledge, call: Invocation) -> Any:
    """A message from one other rank. Its value is there once the program waits for it."""
    result, argument = call.run(), _arguments(call)
    (tensor,) = argument("tensors")
    known.forget([tensor])
    ranks, box = torch.distributed.get_process_group_ranks(_group(argument("process_group"))), messages.mailbox
    if box is not None and box.reaches(ranks[argument("src")]):
        ticket = box.expect(tuple(ranks), ranks[argument("src")])
        if is_discrete(tensor) and known.is_small(tensor):
            handle = torch.distributed.Work.unbox(result)
            messages.on_wait(handle, functools.partial(_deliver, known, tensor, box, ticket))
    return result


def _deliver(known: Knowledge, tensor: Tensor, box: messages.Mailbox, ticket: messages.Ticket) -> None:
    content = box.open(ticket)
    if content is not messages.UNKNOWN:
        _give(known, [tensor], TargetValues([content], None))


HANDLERS: dict[str, Callable[[Knowledge, Invocation], Any]] = {
    "_c10d_functional::wait_tensor": wait, "c10d::send": send, "c10d::recv_": receive,
}  # fmt: skip


def _arguments(call: Invocation) -> Callable[[str | None], Any]:
    """The arguments by name; None for one that the op does not have."""
    names = [argument.name for argument in call.func._schema.arguments]
    return lambda name: call.argument(names.index(name), name) if name is not None and name in names else None


def _give(known: Knowledge, targets: list[Tensor], outcome: TargetValues | None) -> None:
    values = [] if outcome is None else outcome.values
    fits = len(values) == len(targets) and all(v.numel() == t.numel() for v, t in zip(values, targets, strict=True))
    if not fits:
        known.forget(targets)
        return
    with no_modes():
        for target, value in zip(targets, values, strict=True):
            if known.values.knows(target) and not known.values.is_uniform(target):
                known.values.read(target).copy_(value.reshape(target.shape))
                known.values.note_write(target)
            elif spans_storage(target):
                known.set(target, value.to(target.dtype).reshape(target.shape).clone())


def _group(value: Any) -> Any:
    if isinstance(value, str):
        return resolve_group(value)
    return torch.distributed.ProcessGroup.unbox(value)


# --- laws


def all_reduced(call: Exchange) -> TargetValues | None:
    reduced = _reduced(call)
    return None if reduced is None else TargetValues(reduced)


def reduced_at_root(call: Exchange) -> TargetValues | None:
    """Only the root gets the result; the tensors of other ranks hold anything."""
    return all_reduced(call) if call.is_root else None


def reduce_scattered(call: Exchange) -> TargetValues | None:
    reduced = _reduced(call)
    if reduced is None:
        return None
    if len(reduced) == call.targets * call.size > call.targets:  # a list, a tensor for each rank
        return TargetValues(reduced[call.rank :: call.size])
    if any(whole.numel() % call.size for whole in reduced):
        return None
    return TargetValues([whole.reshape(call.size, -1)[call.rank] for whole in reduced])


def gathered(call: Exchange) -> TargetValues | None:
    """One result for each tensor that is sent, or one for each rank."""
    if call.targets == len(call.values):
        return TargetValues([value.flatten().repeat(call.size) for value in call.values])
    return TargetValues(call.values * call.size)


def broadcast(call: Exchange) -> TargetValues | None:
    """The root's values. If the root is another rank, they are known only because all ranks are taken to be equal."""
    return TargetValues(call.values, None if call.is_root else EQUAL_RANKS)


def scattered(call: Exchange) -> TargetValues | None:
    """The part of this rank; only the root has the whole."""
    return TargetValues([call.values[call.rank]], None) if call.is_root else None


def exchanged(call: Exchange) -> TargetValues | None:
    """An all-to-all. Equal ranks all send to this rank what it sends to itself."""
    sent, received = (call.argument(f"{way}_split_sizes") or [] for way in ("input", "output"))
    is_functional = call.argument("group_name") is not None  # such an op lists the sizes even of equal parts
    if is_functional and len({*sent, *received}) == 1:
        sent, received = [], []
    is_even = not sent and not received and len({value.numel() for value in call.values}) == 1
    if is_even and call.is_balanced:
        return TargetValues(call.values, BALANCED)
    if len(call.values) == call.size == call.targets:  # a list, a tensor for each rank
        return TargetValues([call.values[call.rank]] * call.size)
    (value,) = call.values
    if not value.dim() or (not sent and len(value) % call.size):
        return None
    own = value.split(sent or len(value) // call.size)[call.rank]
    if received and any(rows != len(own) for rows in received):
        return None
    return TargetValues([torch.cat([own] * call.size)])


def _reduced(call: Exchange) -> list[Tensor] | None:
    operation = call.argument("reduce_op")
    if not isinstance(operation, str):
        operation = torch.distributed.ReduceOp.RedOpType(operation.op()).name
    fold = _FOLDS.get(operation.lower())
    return None if fold is None else [fold(value, call.size) for value in call.values]


# The reduction of `ranks` equal values.
_FOLDS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda value, ranks: value * ranks,
    "product": lambda value, ranks: value**ranks,
    **dict.fromkeys(("avg", "min", "max", "band", "bor"), lambda value, ranks: value),
}

LAWS: dict[Law | None, Consequence] = {
    "reduced": all_reduced,
    "reduced at the root": reduced_at_root,
    "gathered": gathered,
    "reduce-scattered": reduce_scattered,
    "exchanged": exchanged,
    "broadcast": broadcast,
    "scattered": scattered,
    "unknown": lambda _: None,  # of a tensor that a single other rank sends
}
