"""Watts, joules and the clock of a run.

A kernel takes energy for its arithmetic, which grows with the square of the voltage, and for the bytes that it moves;
the device draws its idle power all the time (device/power.py has the law). A power controller works over tens of
milliseconds, and kernels take microseconds: so the average of a run decides, with the time in which the device waits.
A run is priced at the boost clock first. If that takes more than the power limit, the clock of the whole run falls
until it does not: arithmetic stretches, memory traffic does not. A run that often waits for the host keeps the boost
clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from flopmeter.device import power
from flopmeter.device.cluster import Cluster
from flopmeter.device.hardware import Hardware, Host
from flopmeter.records import Clocks, Cost, Launches, RunClock, Switches, Timing
from flopmeter.timing import constants
from flopmeter.timing.convolution import suits_winograd
from flopmeter.timing.timeline import Launched, LaunchPrices, end_seconds, time_kernels, time_ranks

WITHIN = 0.002  # of the limit: so near to it the power of a run is brought
MOST_STEPS = 12
PICO = 1e-12


class Energy(NamedTuple):
    """What a kernel takes, in joules beside the idle power."""

    arithmetic: float  # at the voltage of the boost clock
    memory: float

    def at(self, clock: float) -> float:
        return self.arithmetic * power.squared_voltage(clock) + self.memory


class TimedRun(NamedTuple):
    """All kernels in time, and the clock that they ran at."""

    timings: list[Timing]
    clock: RunClock


def time_run(
    launches: Launches,
    hardware: Hardware,
    switches: Switches,
    host: Host | None = None,
    cluster: Cluster | None = None,
    clocks: Clocks = "sustained",
) -> TimedRun:
    """The timing of each kernel, in order, at the clock that the power limit leaves in a long run ('sustained') or at
    the boost clock ('burst'). CPUs and devices of unknown power have one clock, that of their profile.

    Raises HardwareError if the device lacks a kernel's dtype, or if the cluster has too few GPUs.
    """
    host, limit = host or hardware.host, hardware.limit_watts
    if limit is None or hardware.is_cpu:
        timings = time_kernels(launches, hardware, switches, host, cluster)
        return TimedRun(timings, RunClock(clocks, 1.0, None, limit))
    energies = _energies(launches, hardware, switches)
    total = Energy(sum(each.arithmetic for each in energies), sum(each.memory for each in energies))
    idle = hardware.idle_watts

    def at(ratio: float) -> tuple[list[Timing], float]:
        timings = time_kernels(launches, hardware.at_clock(ratio), switches, host, cluster)
        seconds = end_seconds(timings, launches, host)
        return timings, idle + total.at(ratio) / seconds if seconds else idle

    timings, watts = at(1.0)
    ratio = 1.0
    if clocks == "sustained" and watts > limit:
        # As if all of the run's time stretched; some of it does not, so this clock is near the end, and often low.
        seconds = end_seconds(timings, launches, host)
        guess = power.clock_within(limit - idle, total.arithmetic / seconds, total.memory / seconds)
        ratio, timings = _within(limit, watts, guess, at)
    timings = [timing._replace(joules=energy.at(ratio)) for timing, energy in zip(timings, energies, strict=True)]
    return TimedRun(timings, RunClock(clocks, ratio, idle, limit))


class RankRun(NamedTuple):
    """What one of several ranks runs, and on what."""

    launches: Launches
    hardware: Hardware
    switches: Switches
    host: Host
    cluster: Cluster | None


def time_runs(ranks: Mapping[int, RankRun], clocks: Clocks = "sustained") -> dict[int, TimedRun]:
    """The same for ranks that send each other messages, by global rank. Each device has a clock of its own: one that
    waits for others draws less.

    Raises HardwareError as `time_run` does, and HangError where ranks wait for each other for ever.
    """
    totals = {rank: _energies(run.launches, run.hardware, run.switches) for rank, run in ranks.items()}
    ratios = dict.fromkeys(ranks, 1.0)
    for _ in range(MOST_STEPS):
        timings = time_ranks({rank: _launched(run, ratios[rank]) for rank, run in ranks.items()})
        seconds = max(end_seconds(timings[rank], run.launches, run.host) for rank, run in ranks.items())
        before = ratios
        if clocks == "sustained" and seconds:
            ratios = {rank: _next_clock(run, totals[rank], before[rank], seconds) for rank, run in ranks.items()}
        if all(abs(ratios[rank] - before[rank]) <= WITHIN for rank in ranks):
            break
    timed = {}
    for rank, run in ranks.items():
        limit, ratio = run.hardware.limit_watts, before[rank]
        found = timings[rank]
        if limit is not None:
            joules = (each.at(ratio) for each in totals[rank])
            found = [timing._replace(joules=each) for timing, each in zip(found, joules, strict=True)]
        idle = None if limit is None else run.hardware.idle_watts
        timed[rank] = TimedRun(found, RunClock(clocks, ratio, idle, limit))
    return timed


def _launched(run: RankRun, ratio: float) -> Launched:
    prices = LaunchPrices(run.launches, run.hardware.at_clock(ratio), run.switches, run.cluster)
    return Launched(run.launches, prices, run.host)


def _next_clock(run: RankRun, energies: list[Energy], clock: float, seconds: float) -> float:
    """The clock at which the device keeps its limit, if the whole run stretches as the clock falls. What does not
    is seen in the next step."""
    limit = run.hardware.limit_watts
    if limit is None or run.hardware.is_cpu:
        return 1.0
    at_boost = clock * seconds
    arithmetic, memory = (sum(parts) for parts in zip(*energies, strict=True)) if energies else (0.0, 0.0)
    return power.clock_within(limit - run.hardware.idle_watts, arithmetic / at_boost, memory / at_boost)


def _within(
    limit: float, watts_at_boost: float, guess: float, at: Callable[[float], tuple[list[Timing], float]]
) -> tuple[float, list[Timing]]:
    """The largest clock at which the run draws no more than the limit: by false position from a guess, with the watts
    of an end that stays halved (Illinois)."""
    timings, watts = at(guess)
    if watts > limit and guess > power.LEAST_CLOCK:
        guess = power.LEAST_CLOCK
        timings, watts = at(guess)
    low, high = guess, 1.0
    below, above = watts - limit, watts_at_boost - limit
    found, side = (low, timings), 0
    for _ in range(MOST_STEPS):
        if below >= -WITHIN * limit:  # near enough; or memory alone takes more than the limit
            break
        middle = (low * above - high * below) / (above - below)
        timings, watts = at(middle)
        error = watts - limit
        if error <= 0:
            low, below, found = middle, error, (middle, timings)
            above, side = (above / 2 if side < 0 else above), -1
        else:
            high, above = middle, error
            below, side = (below / 2 if side > 0 else below), 1
    return found


def _energies(launches: Launches, hardware: Hardware, switches: Switches) -> list[Energy]:
    """Of each kernel. Equal costs are asked for once."""
    known: dict[Cost, Energy] = {}
    for kernel in launches.kernels:
        if kernel.cost not in known:
            known[kernel.cost] = energy(kernel.cost, hardware, switches)
    return [known[kernel.cost] for kernel in launches.kernels]


def energy(cost: Cost, hardware: Hardware, switches: Switches) -> Energy:
    """Of one kernel. What links and copy engines take is left out."""
    arithmetic = 0.0
    if cost.macs:
        peak = hardware.contraction_peak(switches.matmul_dtype(cost), fp16_accumulate=switches.fp16_accumulate)
        done: float = 2 * cost.macs - cost.masked_flops
        if peak.unit == "vector" and cost.convolution and suits_winograd(cost.convolution, cost.matmuls[0]):
            done *= constants.WINOGRAD_PATCH**2 / (3 * constants.WINOGRAD_OUTPUT) ** 2
        arithmetic += done * (peak.picojoules_per_flop or 0.0)
    others = cost.flops - 2 * cost.macs
    if others > 0:
        share = 1.0 if cost.fused_multiply_add else constants.PLAIN_ARITHMETIC_SHARE
        arithmetic += others / share * (hardware.vector_peak(cost.dtype).picojoules_per_flop or 0.0)
    moved = 0 if cost.link_bytes else cost.bytes
    return Energy(arithmetic * PICO, moved * power.byte_picojoules(hardware.memory_type) * PICO)
