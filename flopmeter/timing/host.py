"""What a run costs the host: ops, views, module calls, autograd, DTensors, calls of compiled graphs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flopmeter.costs.contractions.rnn import launched_steps
from flopmeter.costs.data_movement.communication import is_functional
from flopmeter.device.hardware import Hardware, Host
from flopmeter.records import CONTRACTION, Cost, Launches, Nodes, Op, Phase
from flopmeter.records.work import RecurrentWork, VectorWork

CAST = "_to_copy"
# The ops of FSDP2 that there is one of for each group of parameters that is gathered, and whose gradients are summed.
FSDP_GATHER, FSDP_REDUCE = "fsdp::all_gather_copy_in", ("fsdp::chunk_cat", "fsdp::chunk_cat_mixed_dtype")


class HostStep(NamedTuple):
    """Seconds of the host for one kernel: until it is launched, and for further ones that its op launches, of which the
    device may begin with the first."""

    before: float
    further: float


def host_seconds(steps: Iterable[HostStep]) -> float:
    """How long the host takes to launch all kernels, without the time in which it waits for the device."""
    return sum(before + further for before, further in steps)


def host_steps(launches: Launches, hardware: Hardware, host: Host) -> list[HostStep]:
    """For an eager kernel they are those of its op and of autograd's work for it, and of the views and module calls
    before it, which come before the call of a compiled graph, too. A graph costs one call; if it is not replayed, each
    of its kernels costs a launch."""
    steps = []
    of_autograd = _autograd_seconds(launches.nodes, host)
    running: int | None = None
    called: int | None = None  # of the compiler's graphs, several of which may be priced as one
    hooked: Op | None = None  # an op may have several kernels
    for kernel, graph in zip(launches.kernels, launches.graphs, strict=True):
        op, cost, outside, is_replayed = kernel.op, kernel.cost, 0.0, False
        if graph is None or op.graph not in (None, called):
            outside = host.before_op_seconds(kernel.views, kernel.module_calls)
            outside += kernel.dtensor_ops * host.dtensor_op_seconds
        called = op.graph
        if graph is None:
            step = op_seconds(cost, host) + of_autograd[op.phase]
            if cost.collective is not None and is_functional(op):
                step += host.functional_collective_seconds
        else:
            mode = launches.mode_of(graph)
            is_replayed = mode.replays_graph
            step = 0.0 if is_replayed else _compiled_seconds(cost, host)
            if graph != running:
                tensors = (launches.tensors or {}).get(graph, 0)
                step += host.relative_time * (mode.graph_call_seconds + tensors * mode.graph_tensor_seconds)
        if op is not hooked and not is_replayed:
            outside += _hook_seconds(op, host)
        running, hooked = graph, op
        steps.append(HostStep(step + outside, 0.0 if is_replayed else further_seconds(cost, hardware, host)))
    return steps


def _autograd_seconds(nodes: Nodes, host: Host) -> dict[Phase, float]:
    """What autograd takes beside each eager kernel of a phase."""
    return {
        "forward": nodes.of_forward * host.record_seconds,
        "backward": nodes.of_backward * host.node_seconds,
        "recompute": host.checkpoint_seconds(nodes.checkpoints, nodes.saved),
        "optimizer": 0.0,
    }


def _hook_seconds(op: Op, host: Host) -> float:
    """What FSDP2's hooks take around the op. Dynamo leaves them out of its graphs."""
    if op.call.func.namespace != "fsdp":
        return 0.0
    if op.call.name == FSDP_GATHER:
        return host.fsdp_gather_seconds(len(op.call.argument("all_gather_inputs")))
    if op.call.name in FSDP_REDUCE:
        return host.fsdp_reduce_seconds(len(op.call.argument("tensors")))
    return 0.0


def further_seconds(cost: Cost, hardware: Hardware, host: Host) -> float:
    """What the host takes to launch the further kernels of an op: of a factorization, or of a recurrent network. (The
    seconds of another op were set on programs whose ops launch a few kernels, and hold them.)"""
    if cost.op_class != CONTRACTION:
        return 0.0
    match cost.work:
        case VectorWork(kernels=calls):
            return (calls - 1) * host.further_launch_seconds
        case RecurrentWork():
            return launched_steps(cost.work, hardware) * host.recurrent_step_seconds
    return 0.0


def op_seconds(cost: Cost, host: Host) -> float:
    """What the call of an op costs the host. Products, convolutions and fused attention are kernels of libraries."""
    seconds = host.op_seconds(is_library=cost.macs > 0)
    if cost.name == CAST:
        seconds += host.cast_seconds
    return seconds + cost.staged_bytes / host.copy_bytes_per_s if cost.staged_bytes else seconds


def _compiled_seconds(cost: Cost, host: Host) -> float:
    """Host seconds of one kernel of compiled code: inductor's own, or a library's that is called as in eager code."""
    if cost.access == "fused":
        return host.relative_time * host.triton_launch_seconds
    return op_seconds(cost, host)
