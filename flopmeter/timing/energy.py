"""Watts, joules and clocks of a run.

A kernel takes energy for its arithmetic, which grows with the square of the voltage, and for the bytes that it moves;
the device draws its idle power all the time (device/power.py has the law). A kernel that would draw more than the
limit at the boost clock runs at the clock at which it draws the limit: arithmetic stretches, memory traffic does not.
Its neighbours, which draw less, do not make up for it. Where a step mixes both, that is what published runs say, under
four limits: prefill on an A100 at 275 W and training on A100s at 400 W, H100s at 700 and at 500 W take 4 to 7 % longer
than if the average of the run met the limit, and 0 to 11 % of the measured time is left, not 4 to 17. A controller that
lowers the clock at once and raises it slowly would do this. After a pause it lets about 20 ms pass (a burst).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from flopmeter.device import power
from flopmeter.device.cluster import Cluster
from flopmeter.device.hardware import Hardware, Host
from flopmeter.records import AttentionWork, Clocks, ConvolutionWork, Cost, Launches, RunClock, Switches, Timing
from flopmeter.timing import constants
from flopmeter.timing.attention import flop_energy
from flopmeter.timing.concurrency import Party
from flopmeter.timing.convolution import suits_winograd
from flopmeter.timing.floors import peak_of
from flopmeter.timing.gemm_kernels import UNNAMED, NamedKernel
from flopmeter.timing.host import host_seconds, host_steps
from flopmeter.timing.kernels import Price
from flopmeter.timing.timeline import ClockOf, KernelPrices, Launched, LaunchPrices, time_kernels, time_ranks

CLOCK_STEPS = 1024  # a clock is found to within this fraction of the boost clock
PICO = 1e-12


class Energy(NamedTuple):
    """What a kernel takes, in joules in addition to the idle power."""

    arithmetic: float  # at the voltage of the boost clock
    memory: float

    def at(self, clock: float) -> float:
        return self.arithmetic * power.squared_voltage(clock) + self.memory


class TimedRun(NamedTuple):
    """All kernels in time, and the clocks that they ran at."""

    timings: list[Timing]
    clock: RunClock
    host_seconds: float  # that the host takes to launch them


class RankRun(NamedTuple):
    """What one rank runs, and on which device."""

    launches: Launches
    hardware: Hardware
    switches: Switches
    host: Host
    cluster: Cluster | None


def time_run(run: RankRun, clocks: Clocks, laws: PowerLaws) -> TimedRun:
    """The timing of each kernel, in order, at the clock that the power limit leaves it in a long run ('sustained'), or
    at the boost clock ('burst'). CPUs and devices of unknown power have one clock, that of their profile. `laws`: those
    of runs on the same device at the same `clocks`, with the prices found so far.

    Raises HardwareError if the device lacks a kernel's dtype, or if the cluster has too few GPUs.
    """
    law = laws.of(run.hardware, run.switches, clocks)
    launched = _launched(run, law)
    return _timed(run, launched, time_kernels(launched), law, clocks)


def time_runs(
    ranks: Mapping[int, RankRun], clocks: Clocks, earlier: Mapping[int, Counter[Party]] | None
) -> dict[int, TimedRun]:
    """The same for ranks that send each other messages, by global rank. `earlier`: those that came before.

    Raises HardwareError as `time_run` does, and HangError where ranks wait for each other for ever.
    """
    laws = {rank: PowerLaws().of(run.hardware, run.switches, clocks) for rank, run in ranks.items()}
    launched = {rank: _launched(run, laws[rank]) for rank, run in ranks.items()}
    timings = time_ranks(launched, earlier=earlier)
    return {rank: _timed(run, launched[rank], timings[rank], laws[rank], clocks) for rank, run in ranks.items()}


class PowerLaws:
    """The law of each setting of the switches, for runs on one device at the same clocks."""

    def __init__(self) -> None:
        self._known: dict[Switches, KernelClocks | None] = {}

    def of(self, hardware: Hardware, switches: Switches, clocks: Clocks) -> KernelClocks | None:
        """None if the device has one clock, that of its profile."""
        if switches not in self._known:
            has_one = hardware.limit_watts is None or hardware.is_cpu
            self._known[switches] = None if has_one else KernelClocks(hardware, switches, clocks)
        return self._known[switches]


def _launched(run: RankRun, law: KernelClocks | None) -> Launched:
    prices = KernelPrices(run.hardware, run.switches) if law is None else law.prices
    clock_of = None if law is None else law.of_kernels(run.launches)
    steps = host_steps(run.launches, run.hardware, run.host)
    return Launched(run.launches, LaunchPrices(run.launches, prices, run.cluster, clock_of), steps)


def _timed(
    run: RankRun, launched: Launched, timings: list[Timing], law: KernelClocks | None, clocks: Clocks
) -> TimedRun:
    """The timings with the energy of each kernel, and the mean clock, weighted by work."""
    limit, host = run.hardware.limit_watts, host_seconds(launched.steps)
    if law is None:
        return TimedRun(timings, RunClock(clocks, 1.0, None, limit), host)
    timings = [
        timing._replace(joules=law.energy(kernel.cost).at(timing.clock))
        for kernel, timing in zip(run.launches.kernels, timings, strict=True)
    ]
    busy = sum(timing.work_seconds for timing in timings)
    mean = sum(timing.clock * timing.work_seconds for timing in timings) / busy if busy else 1.0
    return TimedRun(timings, RunClock(clocks, mean, run.hardware.idle_watts, limit), host)


class KernelClocks:
    """The clock of each kernel, as a share of the boost clock; it is searched once for equal kernels."""

    def __init__(self, hardware: Hardware, switches: Switches, clocks: Clocks):
        self._hardware, self._switches, self._is_sustained = hardware, switches, clocks == "sustained"
        self.prices = KernelPrices(hardware.at_boost(), switches)
        self._energies: dict[Cost, Energy] = {}
        self._known: dict[tuple[Cost, float, NamedKernel], float] = {}

    def __call__(self, cost: Cost, cached_bytes: float, ran: NamedKernel = UNNAMED) -> float:
        """The clock at which the kernel draws no more than the limit. `cached_bytes` and `ran`: see `kernels.price`."""
        if not self._is_sustained:
            return 1.0
        key = cost, cached_bytes, ran
        if key not in self._known:
            self._known[key] = self._within_limit(*key)
        return self._known[key]

    def price_alone(self, cost: Cost, ran: NamedKernel) -> Price:
        """The price of a kernel of which the cache holds nothing, at its clock."""
        return self.prices(cost, 0.0, self(cost, 0.0, ran), ran)

    def of_kernels(self, launches: Launches) -> ClockOf:
        """The clock of the kernel with that number."""
        return lambda number, cached_bytes: self(launches.kernels[number].cost, cached_bytes)

    def energy(self, cost: Cost) -> Energy:
        if cost not in self._energies:
            self._energies[cost] = energy(cost, self._hardware, self._switches)
        return self._energies[cost]

    def _within_limit(self, cost: Cost, cached_bytes: float, ran: NamedKernel) -> float:
        def fits(step: int) -> bool:
            clock = step / CLOCK_STEPS
            seconds = self.prices(cost, cached_bytes, clock, ran).busy.seconds + self._hardware.kernel_floor_seconds
            limit = self._hardware.limit_watts or float("inf")
            return self.energy(cost).at(clock) <= (limit - self._hardware.idle_watts) * seconds

        low, high = round(power.LEAST_CLOCK * CLOCK_STEPS), CLOCK_STEPS
        if fits(high):
            return 1.0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low / CLOCK_STEPS


def energy(cost: Cost, hardware: Hardware, switches: Switches) -> Energy:
    """The energy of one kernel, without that of links and copy engines."""
    arithmetic = 0.0
    if cost.macs:
        peak = peak_of(cost, hardware, switches)
        done: float = cost.product_flops
        work, has_matrix_units = cost.work, peak.unit == "matrix"
        if isinstance(work, AttentionWork) and has_matrix_units:
            done *= flop_energy(work, hardware)
        if isinstance(work, ConvolutionWork) and not has_matrix_units and suits_winograd(work.shape, work.implicit):
            done *= constants.WINOGRAD_PATCH**2 / (3 * constants.WINOGRAD_OUTPUT) ** 2
        arithmetic = done * (peak.picojoules_per_flop or 0.0)
    if cost.other_flops > 0:
        share = 1.0 if cost.fused_multiply_add else constants.PLAIN_ARITHMETIC_SHARE
        arithmetic += cost.other_flops / share * (hardware.vector_peak(cost.dtype).picojoules_per_flop or 0.0)
    moved = 0 if cost.link_bytes else cost.bytes
    return Energy(arithmetic * PICO, moved * power.byte_picojoules(hardware.memory_type) * PICO)
