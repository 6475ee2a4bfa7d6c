"""What would make a run faster: the same kernels with more FLOP/s, more bandwidth, faster links or a faster host.

Only what bounds a run can help it: more FLOP/s do nothing for a memory-bound run, and a faster host nothing for a
compute-bound one (Horace He, 'Making Deep Learning Go Brrrr From First Principles', 2022).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from flopmeter.device.cluster import Cluster, Link
from flopmeter.device.hardware import Hardware
from flopmeter.records import Regime
from flopmeter.report.report import Report
from flopmeter.timing import Host, KernelPrices, Launched, LaunchPrices, host_seconds, host_steps, time_kernels

RESOURCES: dict[Regime, str] = {
    "compute": "FLOP/s", "memory": "bandwidth", "communication": "link speed", "overhead": "host speed",
}  # fmt: skip
"""What bounds a run in each regime."""

MOST_TIMES = 64.0  # no device generation is further away than that
_STEPS = 6  # bisections of one doubling: the boundary is known to 2^(1/64), 1 %

_RATES = (
    "vector_tflop_per_s", "matrix_tflop_per_s", "matrix_fp16_accumulate_tflop_per_s", "emulated_tflop_per_s",
)  # fmt: skip


class Boundary(NamedTuple):
    """The run is bound by `regime` once the device has `times` as much of what bounds it now."""

    times: float
    regime: Regime


class WhatIf(NamedTuple):
    """How many times as fast the run would be with twice the FLOP/s ('compute'), twice the bandwidth ('memory'), links
    twice as fast ('communication', in a run with collectives) or half the host time ('overhead'), and how much more of
    what bounds it now makes something else bound it; None: not up to 64 times as much."""

    speedup: Mapping[Regime, float]
    boundary: Boundary | None


def what_if(report: Report, host: Host | None = None) -> WhatIf:
    """The what-if of a report that was priced with `host`."""
    doubled = {regime: improved(report, regime, 2.0, host) for regime in report.seconds_by_regime}
    speedup = {regime: report.seconds / other.seconds for regime, other in doubled.items()}
    return WhatIf(speedup, next_boundary(report, host))


def next_boundary(report: Report, host: Host | None) -> Boundary | None:
    """How many times as much there must be of what bounds the run now, until something else bounds it."""
    low = 1.0
    while low < MOST_TIMES:
        high = 2 * low
        if improved(report, report.regime, high, host).regime != report.regime:
            break
        low = high
    else:
        return None
    for _ in range(_STEPS):
        middle = (low * high) ** 0.5
        if improved(report, report.regime, middle, host).regime == report.regime:
            low = middle
        else:
            high = middle
    return Boundary(high, improved(report, report.regime, high, host).regime)


def improved(report: Report, regime: Regime, times: float, host: Host | None = None) -> Report:
    """The same kernels, each at its old clock, with `times` as much of what bounds a run of that regime."""
    host, device = host or report.hardware.host, _unlimited(report)
    if regime == "overhead":
        host = dataclasses.replace(host, relative_time=host.relative_time / times)
    elif regime == "communication":
        assert report.cluster is not None  # else links bound nothing
        report = dataclasses.replace(report, cluster=_faster_links(report.cluster, times))
    else:
        device = _with_more(device, regime, times)

    def clock_of(number: int, *_: object) -> float:
        return report.timings[number].clock

    prices = LaunchPrices(report.launches, KernelPrices(device, report.switches), report.cluster, clock_of)
    steps = host_steps(report.launches, device, host)
    return dataclasses.replace(
        report,
        hardware=device,
        timings=time_kernels(Launched(report.launches, prices, steps)),
        host_seconds=host_seconds(steps),
    )


def _unlimited(report: Report) -> Hardware:
    """The device without a power limit, so that kernels keep their clocks: the question is about one resource, not
    about the power that it would need."""
    device = report.hardware
    return device if report.clock.idle_watts is None else device.at_boost()


def _with_more(hardware: Hardware, regime: Regime, times: float) -> Hardware:
    if regime == "memory":
        return hardware.replace(memory_bandwidth_gb_per_s=times * hardware.memory_bandwidth_gb_per_s)
    tables = {name: getattr(hardware, name) for name in _RATES}
    return hardware.replace(
        **{name: {dtype: times * rate for dtype, rate in rates.items()} for name, rates in tables.items()}
    )


def _faster_links(cluster: Cluster, times: float) -> Cluster:
    def faster(link: Link) -> Link:
        return dataclasses.replace(link, bandwidth_gb_per_s=times * link.bandwidth_gb_per_s)

    inter = None if cluster.inter is None else faster(cluster.inter)
    return dataclasses.replace(cluster, intra=faster(cluster.intra), inter=inter)
