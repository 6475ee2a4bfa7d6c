"""When each kernel runs. The host launches kernels one after another, and the device runs them in order, each no
earlier than it was launched. If the host needs the result of a kernel, it waits for the device; a CPU is its own host
and waits for every kernel. Programs of many ranks run kernels and collectives on several streams
(launch/stream_assignment.py); the time in which a stream waits for another one counts as communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from flopmeter.device.cluster import Cluster, cluster_of, price_collective
from flopmeter.device.hardware import Hardware, Host
from flopmeter.records import COMMUNICATION, DEFAULT_STREAM, Cost, Launches, Placement, Switches, Timing
from flopmeter.timing import cpu, kernels
from flopmeter.timing.bands import BETWEEN_NODES
from flopmeter.timing.cache import cached_bytes
from flopmeter.timing.kernels import Price


def time_kernels(
    launches: Launches,
    hardware: Hardware,
    switches: Switches,
    host: Host | None = None,
    cluster: Cluster | None = None,
    clock_of: ClockOf | None = None,
) -> list[Timing]:
    """The timing of each kernel, in order. Without `host` the profile's host launches them; without `cluster`
    collectives go over the links of the device's default cluster. `clock_of` gives the clock of each kernel, as a share
    of that of `hardware`; without it all have this clock.

    Raises HardwareError if the device lacks a kernel's dtype, or if the cluster has too few GPUs.
    """
    prices = _LaunchPrices(launches, hardware, switches, cluster, clock_of)
    timings: list[Timing] = []
    enqueued = 0.0  # when the host has sent the kernel
    free: dict[int, float] = {}  # when each stream has finished its last one
    host_steps = _host_steps(launches, host or hardware.host)
    placements = launches.placements or [_ONE_STREAM] * len(launches.kernels)
    for number, (host_step, (stream, after)) in enumerate(zip(host_steps, placements, strict=True)):
        cost = launches.kernels[number].cost
        work, ramp, kernel_class, bounds, clock = prices(number)
        enqueued += host_step
        idle_from = free.get(stream, 0.0)
        sent = max(enqueued, idle_from)
        start = max(sent, *(timings[other].end_seconds for other in after)) if after else sent
        idle = sent - idle_from if stream == DEFAULT_STREAM else 0.0  # another stream has nothing to do in between
        is_collective = cost.collective is not None
        times = (*bounds, work, ramp, idle, start)
        timings.append(Timing(*times, kernel_class, enqueued, stream, start - sent, is_collective, clock=clock))
        free[stream] = start + work + ramp
        if cost.blocks_host or hardware.is_cpu:
            enqueued = free[stream]
    return timings


_ONE_STREAM = Placement(0, ())
ClockOf = Callable[[int, float], float]  # of a kernel's number, and how many of its bytes the cache holds


class _Priced(NamedTuple):
    work_seconds: float
    floor_seconds: float
    kernel_class: str
    bounds: tuple[float, float]  # compute and memory seconds
    clock: float = 1.0


class _LaunchPrices:
    """What each kernel of a run takes; equal costs are priced once."""

    def __init__(
        self,
        launches: Launches,
        hardware: Hardware,
        switches: Switches,
        cluster: Cluster | None,
        clock_of: ClockOf | None,
    ):
        self._launches, self._hardware, self._switches, self._cluster = launches, hardware, switches, cluster
        self._clock_of, self._devices = clock_of, {1.0: hardware}
        self._cached = [] if hardware.is_cpu else cached_bytes(launches.kernels, hardware.l2_cache_bytes)
        self._known: dict[tuple[Cost, float, float], Price] = {}

    def __call__(self, number: int) -> _Priced:
        cost = self._launches.kernels[number].cost
        if cost.collective is not None:
            price = price_collective(cost.collective, self._cluster or cluster_of(self._hardware))
            kernel_class = BETWEEN_NODES if price.between_nodes else COMMUNICATION
            return _Priced(price.seconds, 0.0, kernel_class, (0.0, 0.0))  # latency is part of the price
        cached = self._cached[number] if self._cached else 0.0
        clock = self._clock_of(number, cached) if self._clock_of else 1.0
        known = self._known.get((cost, cached, clock))
        if known is None:
            known = self._known[cost, cached, clock] = self._priced(cost, cached, clock)
        (compute, memory, work, latency), kernel_class = known
        ramp = self._hardware.kernel_floor_seconds + latency
        if self._launches.graphs[number] is not None:
            # The device needs some time from one node of a graph to the next; a kernel takes at least that.
            ramp = max(ramp, self._launches.mode.node_seconds - work)
        return _Priced(work, ramp, kernel_class, (compute, memory), clock)

    def _priced(self, cost: Cost, cached: float, clock: float) -> Price:
        if self._hardware.is_cpu:
            return cpu.price(cost, self._hardware, self._switches)
        if clock not in self._devices:
            self._devices[clock] = self._hardware.at_clock(clock)
        return kernels.price(cost, self._devices[clock], self._switches, cached)


def end_seconds(timings: list[Timing], launches: Launches, host: Host) -> float:
    """When the last kernel has ended and the host has launched all: the wall-clock of the run."""
    last = {timing.stream: timing.end_seconds for timing in timings}
    return max(host_seconds(launches, host), *last.values()) if last else host_seconds(launches, host)


def host_seconds(launches: Launches, host: Host) -> float:
    """How long the host takes to launch all kernels, without the time in which it waits for the device."""
    return sum(_host_steps(launches, host))


def _host_steps(launches: Launches, host: Host) -> list[float]:
    """Host seconds before each kernel is launched. For an eager kernel they are those of its op and of the views and
    module calls before it. A graph costs one call; if it is not replayed, each of its kernels costs a launch."""
    steps = []
    running: int | None = None
    for kernel, graph in zip(launches.kernels, launches.graphs, strict=True):
        if graph is None:
            step = op_seconds(kernel.cost, host) + host.before_op_seconds(kernel.views, kernel.module_calls)
        else:
            step = 0.0 if launches.mode.replays_graph else _compiled_seconds(kernel.cost, host)
            if graph != running:
                step += launches.mode.graph_call_seconds
        running = graph
        steps.append(step)
    return steps


def op_seconds(cost: Cost, host: Host) -> float:
    """What the call of an op costs the host. Products, convolutions and fused attention are kernels of libraries."""
    return host.op_seconds(is_library=cost.macs > 0)


def _compiled_seconds(cost: Cost, host: Host) -> float:
    """Of one kernel of compiled code: inductor's own, or one that is called as in eager code."""
    if cost.access == "fused":
        return host.relative_time * host.triton_launch_seconds
    return op_seconds(cost, host)
