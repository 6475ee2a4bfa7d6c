"""When each kernel runs: the host enqueues kernels one after another, the device runs them in order, each no
earlier than it was enqueued. A kernel whose result the host needs makes the host wait for the device; a CPU is its
own host, so there every kernel does.
"""

from __future__ import annotations

from flopmeter.hardware import Hardware, Host
from flopmeter.modes import Launches
from flopmeter.records import Cost, Switches, Timing
from flopmeter.timing.kernels import Price, price


def time_kernels(launches: Launches, hardware: Hardware, switches: Switches, host: Host | None = None) -> list[Timing]:
    """The timing of each kernel in order; without `host`, sent by the profile's own.

    Raises HardwareError where the device lacks a kernel's dtype.
    """
    prices: dict[Cost, Price] = {}
    timings: list[Timing] = []
    floor = hardware.kernel_floor_seconds
    enqueued = free = 0.0  # when the host has sent the kernel; when the device has finished the last one
    host_steps = _host_steps(launches, host or hardware.host)
    for (_, cost, _, _), graph, host_step in zip(launches.kernels, launches.graphs, host_steps, strict=True):
        priced = prices.get(cost)
        if priced is None:
            priced = prices[cost] = price(cost, hardware, switches)
        (compute, memory, work), kernel_class = priced
        enqueued += host_step
        start = max(enqueued, free)
        # A node of a graph takes no less than the device needs to step to the next one.
        ramp = floor if graph is None else max(floor, launches.mode.node_seconds - work)
        timings.append(Timing(compute, memory, work, ramp, start - free, start, kernel_class, enqueued))
        free = start + work + ramp
        if cost.blocks_host or hardware.is_cpu:
            enqueued = free
    return timings


def host_seconds(launches: Launches, host: Host) -> float:
    """How long the host takes to enqueue all kernels, not counting where it waits for the device."""
    return sum(_host_steps(launches, host))


def _host_steps(launches: Launches, host: Host) -> list[float]:
    """Host seconds before each kernel is sent. An eager kernel costs its op, the views and the module calls
    before it; a graph costs one call, and each of its kernels a launch where the graph is not replayed."""
    kernels, graphs, mode = launches
    steps = []
    running: int | None = None
    for (_, _, views, module_calls), graph in zip(kernels, graphs, strict=True):
        if graph is None:
            step = host.launch_seconds + views * host.view_seconds + module_calls * host.module_call_seconds
        else:
            step = mode.launch_seconds + (mode.graph_call_seconds if graph != running else 0.0)
        running = graph
        steps.append(step)
    return steps
