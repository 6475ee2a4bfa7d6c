"""When each kernel runs. The host launches kernels one after another, and the device runs them in order, each no
earlier than it was launched. If the host needs the result of a kernel, it waits for the device; a CPU is its own host
and waits for every kernel. Programs of many ranks run kernels and collectives on several streams
(launch/stream_assignment.py, concurrency.py); the time that a stream waits for another one counts as communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from flopmeter.costs import costs_of
from flopmeter.costs.data_movement.communication import group_of, is_message, message_ends
from flopmeter.device.cluster import Cluster, CollectivePrice, cluster_of, price_collective
from flopmeter.device.hardware import Hardware
from flopmeter.records import (
    COMMUNICATION,
    DEFAULT_STREAM,
    Collective,
    Cost,
    Kernel,
    Launches,
    Placement,
    Switches,
    Timing,
)
from flopmeter.records.collectives import COLLECTIVE_OPS
from flopmeter.records.ops import Op
from flopmeter.timing import cpu, kernels, systolic
from flopmeter.timing.bands import BETWEEN_NODES
from flopmeter.timing.cache import cached_bytes
from flopmeter.timing.concurrency import Activity, Party, Stretch, run_concurrently
from flopmeter.timing.contention import Demand, Transfer, transfer_of
from flopmeter.timing.gemm_kernels import UNNAMED, NamedKernel
from flopmeter.timing.host import HostStep, host_seconds
from flopmeter.timing.kernels import Price


def time_kernels(run: Launched) -> list[Timing]:
    """The timing of each kernel, in order. The device is idle at first, unless the launches repeat: then the host is
    ahead as in a loop that runs for long.

    Raises HardwareError if the device lacks a kernel's dtype, or if the cluster has too few GPUs.
    """
    timings = _alone(run)
    return _as_a_turn(run, timings) if run.launches.repeats and timings else timings


def _alone(run: Launched, lead: float = 0.0) -> list[Timing]:
    """The timings from when the device is free. The host began `lead` seconds before."""
    return _in_order(run, lead) if run.launches.placements is None else time_ranks({0: run}, lead)[0]


def _in_order(run: Launched, lead: float) -> list[Timing]:
    """The timings of the kernels on one stream."""
    timings: list[Timing] = []
    enqueued = -lead  # when the host has sent the kernel
    free = 0.0  # when the device has finished the last one
    for number, host_step in enumerate(run.sends()):
        work, ramp, kernel_class, bounds, clock, few_flops, _ = run.prices(number)
        enqueued += host_step
        start = max(enqueued, free)
        times = (*bounds, work, ramp, start - free, start)
        timings.append(Timing(*times, kernel_class, enqueued, clock=clock, few_flops=few_flops))
        free = start + work + ramp
        if run.host_waits_for(number):
            enqueued = free
    return timings


def _as_a_turn(run: Launched, once: list[Timing]) -> list[Timing]:
    """The timings of one iteration of a loop that runs for long. `once`: the timings from an idle device. If the host
    never waits and the device takes longer, the host gets further ahead with every iteration: everything is enqueued
    before the device begins. Else the host is ahead by what the device has left to do when the host is done."""
    waits = [run.host_waits_for(number) for number in range(len(once))]
    host = host_seconds(run.steps)
    if not any(waits):
        ahead = _alone(run, host)
        if _end(ahead) > host:
            return ahead
    return once if waits[-1] else _alone(run, _end(once) - once[-1].enqueued_seconds)


def _end(timings: list[Timing]) -> float:
    return max(timing.end_seconds for timing in timings)


ClockOf = Callable[[int, float], float]  # from a kernel's number and how many of its bytes the cache holds
ROUNDING = 1e-9  # of a sum of many times


class Launched(NamedTuple):
    """What one rank launches, with its prices on its device."""

    launches: Launches
    prices: LaunchPrices
    steps: list[HostStep]  # of the host, for each kernel

    def sends(self) -> Iterator[float]:
        """Host seconds before each kernel is sent, since the one before was. Several that one op launches count as sent
        when the device can run through them without waiting for a launch."""
        late = 0.0
        for number, (before, further) in enumerate(self.steps):
            stall = 0.0
            if further and not self.prices.is_cpu:
                priced = self.prices(number)
                stall = max(0.0, further - priced.work_seconds - priced.floor_seconds)
            yield late + before + stall
            late = further - stall

    def host_waits_for(self, number: int) -> bool:
        """Whether the host goes on only when that kernel has ended."""
        return self.prices.is_cpu or self.launches.kernels[number].cost.blocks_host


def time_ranks(
    ranks: Mapping[int, Launched], lead: float = 0.0, earlier: Mapping[int, Counter[Party]] | None = None
) -> dict[int, list[Timing]]:
    """The timing of each kernel of ranks that run at the same time, by global rank, on one clock. Their hosts began
    `lead` seconds before their devices were free. `earlier`: the messages of each rank before these kernels.

    Raises HangError where they wait for each other for ever.
    """
    spans = run_concurrently({number: _works(launched) for number, launched in ranks.items()}, lead, earlier)
    return {number: _timings(launched, spans[number]) for number, launched in ranks.items()}


def _works(launched: Launched) -> list[Activity]:
    launches = launched.launches
    works = []
    placements = launches.placements or [Placement(DEFAULT_STREAM, ())] * len(launches.kernels)
    sent = zip(launches.kernels, placements, launched.sends(), strict=True)
    for number, (kernel, placement, host_step) in enumerate(sent):
        priced = launched.prices(number)
        party = _party_of(kernel)
        blocks = launched.host_waits_for(number)
        seconds = priced.work_seconds + priced.floor_seconds
        works.append(Activity(host_step, seconds, blocks, *placement, party, priced.demand))
    return works


def messages_of(ops: Iterable[Op]) -> Counter[Party]:
    """How many messages went in each direction."""
    collectives = (op for op in ops if op.call.func._schema.name in COLLECTIVE_OPS)
    kernels = (Kernel((op,), cost, 0, 0) for op in collectives for cost in costs_of(op.call))
    return Counter(party for kernel in kernels if is_message(kernel.cost) and (party := _party_of(kernel)))


def _party_of(kernel: Kernel) -> Party | None:
    if kernel.cost.collective is None:
        return None
    if is_message(kernel.cost):
        return Party(group_of(kernel.op.call).ranks, message_ends(kernel))
    return Party(kernel.cost.collective.ranks)


def _timings(launched: Launched, spans: list[Stretch]) -> list[Timing]:
    placements = launched.launches.placements
    timings = []
    for number, (enqueued, free, start, end) in enumerate(spans):
        work, ramp, kernel_class, bounds, clock, few_flops, _ = launched.prices(number)
        if end - start > (work + ramp) * (1 + ROUNDING):
            work = end - start - ramp  # others slowed it
        stream = DEFAULT_STREAM if placements is None else placements[number].stream
        sent = max(enqueued, free)
        idle = sent - free if stream == DEFAULT_STREAM else 0.0  # gaps on other streams are no idle time of the device
        is_collective = launched.launches.kernels[number].cost.collective is not None
        times = (*bounds, work, ramp, idle, start)
        waits = stream, start - sent, is_collective
        timings.append(Timing(*times, kernel_class, enqueued, *waits, clock=clock, few_flops=few_flops))
    return timings


class _Priced(NamedTuple):
    work_seconds: float
    floor_seconds: float
    kernel_class: str
    bounds: tuple[float, float]  # compute and memory seconds
    clock: float  # of that of the device
    few_flops: bool
    demand: Demand | Transfer


class KernelPrices:
    """Prices of kernels on one device. Runs may share it: equal kernels are priced once at each clock."""

    def __init__(self, hardware: Hardware, switches: Switches):
        self.hardware, self._switches = hardware, switches
        self._devices = {1.0: hardware}  # by clock
        self._known: dict[tuple[Cost, float, float, NamedKernel], Price] = {}

    def __call__(self, cost: Cost, cached: float, clock: float, ran: NamedKernel = UNNAMED) -> Price:
        """`cached`: how many of its bytes the cache holds; `clock`: a share of that of the device; `ran`: which of a
        library's kernels it is."""
        key = cost, cached, clock, ran
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._priced(*key)
        return known

    def _priced(self, cost: Cost, cached: float, clock: float, ran: NamedKernel) -> Price:
        if self.hardware.is_cpu:
            return cpu.price(cost, self.hardware, self._switches)
        if clock not in self._devices:
            self._devices[clock] = self.hardware.at_clock(clock)
        device = self._devices[clock]
        if device.systolic_array:
            return systolic.price(cost, device, self._switches, device.systolic_array)
        return kernels.price(cost, device, self._switches, cached, ran)


class LaunchPrices:
    """The price of each kernel of a run. Without a cluster collectives go over the links of the device's default one.
    `clock_of` gives the clock of each kernel, as a share of that of the device; without it all have this clock."""

    def __init__(self, launches: Launches, price_at: KernelPrices, cluster: Cluster | None, clock_of: ClockOf | None):
        self._hardware = price_at.hardware
        self.is_cpu = self._hardware.is_cpu
        self._launches, self._price_at, self._cluster, self._clock_of = launches, price_at, cluster, clock_of
        has_cache = not (self.is_cpu or self._hardware.systolic_array)
        self._cached = cached_bytes(launches.kernels, self._hardware.l2_cache_bytes) if has_cache else []
        self._collectives: dict[Collective, CollectivePrice] = {}

    def __call__(self, number: int) -> _Priced:
        cost = self._launches.kernels[number].cost
        if cost.collective is not None:
            price = self._collective_price(cost.collective)
            kernel_class = BETWEEN_NODES if price.between_nodes else COMMUNICATION
            # Latency is part of the price.
            return _Priced(
                price.seconds, 0.0, kernel_class, (0.0, 0.0), 1.0, False, self._transfer(cost.collective, price)
            )
        cached = self._cached[number] if self._cached else 0.0
        clock = self._clock_of(number, cached) if self._clock_of else 1.0
        (compute, memory, work, latency, sms), kernel_class, few_flops = self._price_at(cost, cached, clock)
        ramp = self._hardware.kernel_floor_seconds + latency
        graph = self._launches.graphs[number]
        if graph is not None:
            # The device needs some time from one node of a graph to the next; a kernel takes at least that.
            ramp = max(ramp, self._launches.mode_of(graph).node_seconds - work)
        return _Priced(work, ramp, kernel_class, (compute, memory), clock, few_flops, Demand(compute, memory, sms))

    def _transfer(self, collective: Collective, price: CollectivePrice) -> Transfer:
        device, transport = self._hardware, cluster_of(self._hardware, self._cluster).intra.transport
        return transfer_of(collective, price, transport, device.sm_count, device.sustained_bandwidth_bytes_per_s)

    def _collective_price(self, collective: Collective) -> CollectivePrice:
        price = self._collectives.get(collective)
        if price is None:
            price = price_collective(collective, cluster_of(self._hardware, self._cluster))
            self._collectives[collective] = price
        return price
