"""Collectives: what they read and write of this rank's memory, and what the group does together.

The table in records/collectives.py says which op is which collective and how large it is. The additions of a reduction
are not counted: the links bound it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from flopmeter.costs.rules import FREE, dtype_name, make_cost, rule
from flopmeter.costs.traffic import as_regions
from flopmeter.device.hardware import Host
from flopmeter.records import COMMUNICATION, Call, Collective, CollectiveKind, Cost, Kernel, Op, RankGroup, TensorSpec
from flopmeter.records.collectives import COLLECTIVE_OPS, COLLECTIVES, FUNCTIONAL, IN_SWITCH_TYPES, KnownOp
from flopmeter.torch_names.operators import Packets

functional = Packets(FUNCTIONAL)


def _packet(name: str) -> Any:
    namespace, _, op = name.partition("::")
    return getattr(Packets(namespace), op)


@rule(*map(_packet, COLLECTIVE_OPS))
def collective(call: Call) -> tuple[Cost, ...]:
    """Any op of the table: one kernel, but for a batch of sends and receives."""
    known = COLLECTIVE_OPS[call.func._schema.name]
    if known.op.ways is not None:
        return tuple(_batch(call, known, call.argument(known.op.ways)))
    if known.kind == "barrier":  # no rank goes on before all are there; the host waits for it
        return (replace(_cost(call, "barrier", 0, group_of(call).ranks), reads=(), writes=(), blocks_host=True),)
    if known.kind in ("send", "recv"):
        return (_message(call, known.kind, call.inputs, _peer(call, known)),)
    group = group_of(call)
    sent, received = (_nbytes(specs) for specs in (_sent(call, known), _received(call, known)))
    size = known.spec.size(sent, received, len(group.ranks))
    if known.kind == "all_to_all":
        size = _exchanged(call, known, group, size)
    return (_cost(call, known.kind, size, group.ranks),)


@rule(functional.wait_tensor, functional.wait_tensors)
def wait(call: Call) -> tuple[Cost, ...]:
    """Makes the stream wait; no kernel."""
    return FREE


def _batch(call: Call, known: KnownOp, ways: Iterable[str]) -> Iterator[Cost]:
    """The messages of a batch, one after another. NCCL runs them together."""
    assert known.op.peer is not None
    for way, peer, tensor in zip(ways, call.argument(known.op.peer), call.inputs, strict=True):
        yield _message(call, "send" if "send" in way else "recv", (tensor,), peer)


def _message(call: Call, kind: CollectiveKind, specs: tuple[TensorSpec, ...], peer: int) -> Cost:
    """One message between this rank and another one of the group."""
    group = group_of(call)
    pair = tuple(sorted((group.ranks[group.rank], group.ranks[peer])))
    touched = as_regions(specs)
    reads, writes = (touched, ()) if kind == "send" else ((), touched)
    nbytes = _nbytes(specs)
    size = COLLECTIVES[kind].size(nbytes, nbytes, len(pair))
    return replace(_cost(call, kind, size, pair), reads=reads, writes=writes)


def _cost(call: Call, kind: CollectiveKind, nbytes: int, ranks: tuple[int, ...]) -> Cost:
    per_node = group_of(call).gpus_per_node
    adds_in_switch = "in-switch" not in COLLECTIVES[kind].wire or dtype_name(call) in IN_SWITCH_TYPES
    return make_cost(call, COMMUNICATION, work=Collective(kind, nbytes, ranks, per_node, adds_in_switch))


def group_of(call: Call) -> RankGroup:
    """The process group of a collective's call."""
    group = call.argument(COLLECTIVE_OPS[call.func._schema.name].op.group)
    assert isinstance(group, RankGroup)
    return group


def is_message(cost: Cost) -> bool:
    """Whether it is a send or a receive, between two ranks."""
    return cost.collective is not None and cost.collective.kind in ("send", "recv")


def message_ends(kernel: Kernel) -> tuple[int, int]:
    """The global ranks of a message's sender and receiver. This rank is one of them."""
    assert kernel.cost.collective is not None
    group, pair = group_of(kernel.op.call), kernel.cost.collective.ranks
    own = group.ranks[group.rank]
    (peer,) = set(pair) - {own} or {own}
    return (own, peer) if kernel.cost.collective.kind == "send" else (peer, own)


def message_peers(kernels: Iterable[Kernel]) -> set[int]:
    """The ranks that this one sends messages to, or gets them from."""
    messages = [kernel for kernel in kernels if is_message(kernel.cost)]
    groups = (group_of(kernel.op.call) for kernel in messages)
    return {end for kernel in messages for end in message_ends(kernel)} - {group.ranks[group.rank] for group in groups}


def message_notes(kernels: Iterable[Kernel], running: Collection[int]) -> list[str]:
    """That nobody waits for messages of ranks that are not `running`."""
    peers = ", ".join(map(str, sorted(message_peers(kernels) - set(running))))
    if not peers:
        return []
    return [
        f"messages with rank {peers}: it does not run here and is taken to be ready, so waits for it (the bubble of a "
        "pipeline) are left out; flopmeter.time_pipeline meters the stages together"
    ]


def is_functional(op: Op) -> bool:
    """Whether it is a collective of eager code that returns its result, as DTensors use them."""
    return op.call.func.namespace == FUNCTIONAL and op.graph is None


def dtensor_notes(kernels: Iterable[Kernel], host: Host) -> list[str]:
    """What the Python of DTensors and of functional collectives takes in eager code."""
    kernels = list(kernels)
    ops = round(sum(kernel.dtensor_ops for kernel in kernels))
    collectives = sum(kernel.cost.collective is not None and is_functional(kernel.op) for kernel in kernels)
    if not ops and not collectives:
        return []
    seconds = ops * host.dtensor_op_seconds + collectives * host.functional_collective_seconds
    return [
        f"ops on DTensors ({ops:,}) and functional collectives ({collectives:,}) of eager code: their Python takes the"
        f" host {seconds * 1e3:.3g} ms, scaled from a CPU's time; torch.compile leaves it out"
    ]


def _peer(call: Call, known: KnownOp) -> int:
    """The other rank; for a receive from any source, the next rank of the group."""
    if known.op.peer is not None:
        return int(call.argument(known.op.peer))
    group = group_of(call)
    return (group.rank + 1) % len(group.ranks)


def _sent(call: Call, known: KnownOp) -> Any:
    return () if known.op.sent is None else call.argument(known.op.sent)


def _received(call: Call, known: KnownOp) -> Any:
    return call.outputs if known.op.received is None else call.argument(known.op.received)


def _exchanged(call: Call, known: KnownOp, group: RankGroup, size: int) -> int:
    """The size of an exchange of equal parts that lasts as long as this one, of `size` bytes in all.

    Where all parts of one side are equal, all ranks are assumed to send the same, as ranks of experts do. Then one rank
    gets the largest part from every rank, and the exchange lasts until that rank has all of them. Otherwise, as in a
    ring in which each rank sends everything to its neighbour, it lasts until this rank has sent and received all that
    crosses a link."""
    ranks = len(group.ranks)
    sides = [parts for parts in (_parts(call, known, way) for way in ("input", "output")) if parts]
    if not sides:
        return size
    if any(min(parts) == max(parts) for parts in sides):
        return ranks * max(map(max, sides))
    return max(sum(parts) - parts[group.rank] for parts in sides) * ranks // (ranks - 1)


def _parts(call: Call, known: KnownOp, way: str) -> list[int]:
    """Bytes that go to each rank (`input`) or come from it (`output`); empty where they are equal, or not known."""
    specs, rows = _sent(call, known) if way == "input" else _received(call, known), call.get(f"{way}_split_sizes")
    if rows is not None:
        (whole,) = (specs,) if isinstance(specs, TensorSpec) else specs
        return [whole.nbytes * each // sum(rows) for each in rows] if sum(rows) else []
    return [] if isinstance(specs, TensorSpec) else list(map(_nbytes, specs))


def _nbytes(specs: Any) -> int:
    """Bytes of a tensor, or of all tensors in a (nested) list."""
    if isinstance(specs, TensorSpec):
        return specs.nbytes
    return sum(map(_nbytes, specs))
