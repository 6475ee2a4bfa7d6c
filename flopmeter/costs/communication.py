"""Collectives: what they read and write of this rank's memory, and what the group does together.

`torch.ops._c10d_functional` returns new tensors, `torch.ops.c10d` writes into what it is passed. Sums that a reduction
makes are not counted: they are done in passing, at the rate of the links.
"""

from __future__ import annotations

from typing import Any

import torch

from flopmeter.costs.rules import FREE, make_cost, rule
from flopmeter.records import COMMUNICATION, Call, Collective, CollectiveKind, Cost, Group, TensorSpec

c10d = torch.ops.c10d
functional = torch.ops._c10d_functional


def collective(call: Call, kind: CollectiveKind, nbytes: int, ranks: tuple[int, ...] | None = None) -> Cost:
    """The cost of one collective of the group that the call was passed, or of those ranks."""
    return make_cost(call, COMMUNICATION, collective=Collective(kind, nbytes, ranks or _group(call).ranks))


@rule(functional.all_reduce, functional.all_reduce_, functional.all_reduce_coalesced, functional.all_reduce_coalesced_)
def all_reduce(call: Call) -> Cost:
    """Every rank gets the sum."""
    return collective(call, "all_reduce", _nbytes(call.inputs))


@rule(functional.all_gather_into_tensor, functional.all_gather_into_tensor_coalesced)
def all_gather(call: Call) -> Cost:
    """Every rank gets the parts of all."""
    return collective(call, "all_gather", _nbytes(call.outputs))


@rule(functional.all_gather_into_tensor_out)
def all_gather_out(call: Call) -> Cost:
    """The same into a tensor that is there."""
    return collective(call, "all_gather", _nbytes(call.argument("out")))


@rule(functional.reduce_scatter_tensor, functional.reduce_scatter_tensor_coalesced)
def reduce_scatter(call: Call) -> Cost:
    """Each rank gets its part of the sum."""
    return collective(call, "reduce_scatter", _nbytes(call.inputs))


@rule(*([functional.reduce_scatter_tensor_out] if hasattr(functional, "reduce_scatter_tensor_out") else []))
def reduce_scatter_out(call: Call) -> Cost:
    """The same into a tensor that is there."""
    return collective(call, "reduce_scatter", _nbytes(call.argument("input")))


@rule(functional.all_to_all_single, *([torch.ops._dtensor.shard_dim_alltoall]))
def all_to_all(call: Call) -> Cost:
    """Each rank sends every other a part of its input."""
    return collective(call, "all_to_all", _nbytes(call.inputs))


@rule(functional.broadcast, functional.broadcast_)
def broadcast(call: Call) -> Cost:
    """One rank's tensor to all."""
    return collective(call, "broadcast", _nbytes(call.inputs))


@rule(functional.wait_tensor)
def wait(call: Call) -> tuple[Cost, ...]:
    """Makes the stream wait; no kernel."""
    return FREE


_IN_PLACE: dict[Any, tuple[CollectiveKind, str]] = {
    c10d.allreduce_: ("all_reduce", "tensors"),
    c10d.allreduce_coalesced_: ("all_reduce", "tensors"),
    c10d.allgather_: ("all_gather", "output_tensors"),
    c10d._allgather_base_: ("all_gather", "output_tensor"),
    c10d.allgather_coalesced_: ("all_gather", "output_lists"),
    c10d.allgather_into_tensor_coalesced_: ("all_gather", "outputs"),
    c10d.reduce_scatter_: ("reduce_scatter", "input_tensors"),
    c10d._reduce_scatter_base_: ("reduce_scatter", "input_tensor"),
    c10d.reduce_scatter_tensor_coalesced_: ("reduce_scatter", "inputs"),
    c10d.alltoall_: ("all_to_all", "input_tensors"),
    c10d.alltoall_base_: ("all_to_all", "input"),
    c10d.broadcast_: ("broadcast", "tensors"),
    c10d.reduce_: ("reduce", "tensors"),
    c10d.gather_: ("gather", "output_tensors"),
    c10d.scatter_: ("scatter", "input_tensors"),
}
"""The kind, and the argument that holds the whole."""


@rule(*_IN_PLACE)
def in_place(call: Call) -> Cost:
    """A collective of c10d. Gather and scatter are those of the root: the other ranks are passed a part."""
    kind, whole = _IN_PLACE[call.func.overloadpacket]
    nbytes = _nbytes(call.argument(whole))
    if kind in ("gather", "scatter"):
        nbytes = max(nbytes, len(_group(call).ranks) * _nbytes(call.argument(_PART[kind])))
    return collective(call, kind, nbytes)


_PART = {"gather": "input_tensors", "scatter": "output_tensors"}


@rule(c10d.send, c10d.recv_, c10d.recv_any_source_)
def point_to_point(call: Call) -> Cost:
    """From one rank to another."""
    group = _group(call)
    is_send = call.func.overloadpacket is c10d.send
    peer = (
        call.args[2] if call.func.overloadpacket is not c10d.recv_any_source_ else (group.rank + 1) % len(group.ranks)
    )
    ranks = tuple(sorted((group.ranks[group.rank], group.ranks[peer])))
    return collective(call, "send" if is_send else "recv", _nbytes(call.inputs), ranks)


@rule(c10d.barrier, c10d.monitored_barrier_)
def barrier(call: Call) -> Cost:
    """No rank goes on before all are there; the host waits for it."""
    whole = Collective("barrier", 0, _group(call).ranks)
    return make_cost(call, COMMUNICATION, read=0, written=0, collective=whole, blocks_host=True)


def _group(call: Call) -> Group:
    return next(value for value in (*call.args, *call.kwargs.values()) if isinstance(value, Group))


def _nbytes(specs: Any) -> int:
    """Of a tensor, or of all in a (nested) list."""
    if isinstance(specs, TensorSpec):
        return specs.nbytes
    return sum(map(_nbytes, specs))
