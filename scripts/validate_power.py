"""Watts, and how much longer a kernel takes in a long run than in a burst: GEMMs on H200s (ai-dynamo/aiconfigurator).

A burst is 36 kernels in a row; after BURST_SECONDS the power controller acts on them too. The logger's window did not
fill in many runs of short kernels: shapes [m, n] of some groups read near to idle power at any throughput (m = 256,
n = 6144: 184 W at 10 µs and 469 TFLOP/s, 440 W at 43 µs and 600), others do not. So kernels of at least
METERED_SECONDS have tables of their own. There the rows with k = 65536 still draw a third less than all others at equal
speed: their weights were not random.
"""

from __future__ import annotations

import torch
from validate_kernels import LEAST_SECONDS, REPLAYS, burst_share, duration, is_held_out
from validation_rows import Line, Row, roofline_seconds

from flopmeter import FlopMeter, load_hardware
from flopmeter.records import Clocks
from flopmeter.report.report import Report

METERED_SECONDS = 50e-6


def watts(lines: list[Line]) -> dict[str, list[Row]]:
    """Rows of watts, of seconds, and of ratios; each named by how long its kernel takes."""
    tables: dict[str, list[Row]] = {
        "power, W": [], "power, W, kernels of at least 50 µs": [],
        "sustained over burst": [],
    }  # fmt: skip
    for line in sorted(lines, key=lambda line: float(line["sustained_ms"])):
        seconds, burst_seconds = (float(line[name]) * 1e-3 for name in ("sustained_ms", "burst_ms"))
        if seconds < LEAST_SECONDS:
            continue
        sustained, burst = _report(line, "sustained"), _report(line, "burst")
        assert sustained.watts is not None
        row = Row(
            line["dtype"], line["gpu"], float(line["watts"]), sustained.watts, 0.0, float("inf"),
            _roofline_watts(sustained), name=duration(seconds),
            held_out=is_held_out(*(int(line[size]) for size in "mnk")),
        )  # fmt: skip
        ratio = row._replace(
            measured=seconds / burst_seconds,
            predicted=sustained.seconds / _burst_seconds(sustained, burst),
            roofline=1.0,
        )
        tables["power, W"].append(row)
        if seconds >= METERED_SECONDS:
            tables["power, W, kernels of at least 50 µs"].append(row)
        tables["sustained over burst"].append(ratio)
    return tables


def _burst_seconds(sustained: Report, burst: Report) -> float:
    """Of kernels of which so many run before the controller acts, and the rest after it."""
    before = burst_share(burst.seconds / REPLAYS)
    return before * burst.seconds + (1 - before) * sustained.seconds


def _report(line: Line, clocks: Clocks) -> Report:
    m, n, k = (int(line[size]) for size in "mnk")
    x, weight = (torch.empty(rows, k, dtype=torch.bfloat16, device="meta") for rows in (m, n))
    with torch.inference_mode(), FlopMeter(load_hardware(line["gpu"]), clocks=clocks) as meter:
        for _ in range(REPLAYS):
            torch.mm(x, weight.t())
    return meter.report(mode="eager-cudagraph")


def _roofline_watts(report: Report) -> float:
    """The power limit, as much of it as the plain roofline says that the device is busy."""
    device = report.hardware
    assert device.tdp_w is not None
    return device.tdp_w * min(1.0, roofline_seconds(report, device) / report.seconds)
