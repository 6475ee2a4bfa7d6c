"""What a run costs the host: ops, views, module calls, autograd, calls of compiled graphs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flopmeter.costs.contractions.rnn import runs_as_one_kernel
from flopmeter.device.hardware import Hardware, Host
from flopmeter.records import CONTRACTION, Cost, Kernel, Launches
from flopmeter.records.work import RecurrentWork, VectorWork

CAST = "_to_copy"


class HostStep(NamedTuple):
    """Seconds of the host for one kernel: until it is launched, and for further ones that its op launches, of which the
    device may begin with the first."""

    before: float
    further: float


def host_seconds(launches: Launches, hardware: Hardware, host: Host) -> float:
    """How long the host takes to launch all kernels, without the time in which it waits for the device."""
    return sum(before + further for before, further in host_steps(launches, hardware, host))


def host_steps(launches: Launches, hardware: Hardware, host: Host) -> Iterator[HostStep]:
    """For an eager kernel they are those of its op and of autograd's work for it, and of the views and module calls
    before it, which come before the call of a compiled graph, too. A graph costs one call; if it is not replayed, each
    of its kernels costs a launch."""
    autograd = _Autograd(launches, host)
    running: int | None = None
    called: int | None = None  # of the compiler's graphs, several of which may be priced as one
    for kernel, graph in zip(launches.kernels, launches.graphs, strict=True):
        outside, is_replayed = 0.0, False
        if graph is None or kernel.op.graph not in (None, called):
            outside = host.before_op_seconds(kernel.views, kernel.module_calls)
        called = kernel.op.graph
        if graph is None:
            step = op_seconds(kernel.cost, host) + autograd.seconds(kernel)
        else:
            mode = launches.mode_of(graph)
            is_replayed = mode.replays_graph
            step = 0.0 if is_replayed else _compiled_seconds(kernel.cost, host)
            if graph != running:
                tensors = (launches.tensors or {}).get(graph, 0)
                step += host.relative_time * (mode.graph_call_seconds + tensors * mode.graph_tensor_seconds)
        running = graph
        yield HostStep(step + outside, 0.0 if is_replayed else further_seconds(kernel.cost, hardware, host))


class _Autograd:
    """What autograd costs the host: it records each eager op of a forward pass whose gradient is asked for, views
    too, and calls a node for each in the backward pass. Which nodes an op of the backward pass belongs to is not known,
    so that all of these bear the same part. What a checkpoint runs a second time is recorded then, not before."""

    def __init__(self, launches: Launches, host: Host) -> None:
        eager = [kernel for kernel, graph in zip(launches.kernels, launches.graphs, strict=True) if graph is None]
        backward = sum(kernel.op.phase == "backward" for kernel in eager)
        recorded = sum(1 + kernel.views for kernel in eager if kernel.op.phase == "forward")
        self._record_seconds = host.record_seconds if backward else 0.0
        self._nodes_seconds = recorded * host.node_seconds / max(1, backward)

    def seconds(self, kernel: Kernel) -> float:
        match kernel.op.phase:
            case "forward":
                return (1 + kernel.views) * self._record_seconds
            case "backward":
                return self._nodes_seconds
        return 0.0


def further_seconds(cost: Cost, hardware: Hardware, host: Host) -> float:
    """What the host takes to launch the further kernels of an op: of a factorization, or of a recurrent network. (The
    seconds of another op were set on programs whose ops launch a few kernels, and hold them.)"""
    if cost.op_class != CONTRACTION:
        return 0.0
    match cost.work:
        case VectorWork(kernels=calls):
            return (calls - 1) * host.further_launch_seconds
        case RecurrentWork(recurrence=recurrence) if not runs_as_one_kernel(recurrence, hardware):
            return recurrence.steps * len(recurrence.matmuls) * host.recurrent_step_seconds
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
