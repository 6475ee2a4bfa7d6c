"""What the scripts that validate have in common: measurements beside predictions, their table, the plain roofline."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple
from zlib import crc32

from tabulate import tabulate

from flopmeter.device.hardware import Hardware
from flopmeter.records import Cost, Switches
from flopmeter.report.report import Report

Line = dict[str, str]  # of a csv file


class Row(NamedTuple):
    """One measurement and what was predicted for it; times in seconds."""

    group: str  # operator or model family
    gpu: str
    measured: float
    predicted: float
    low: float  # the band
    high: float
    roofline: float
    name: str = ""  # of the model
    published: tuple[tuple[str, float], ...] = ()  # other predictors' seconds for the same row
    mode: str = "eager"
    held_out: bool = False  # its shape set no constant

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)


def error_table(title: str, rows: Sequence[Row], key: Callable[[Row], str]) -> dict[str, float]:
    """Print one line for each value of `key` and one for all; return the mean errors in percent."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    if len(groups) > 1:
        groups["all"] = list(rows)
    others = sorted({name for row in rows for name, _ in row.published})
    lines = [
        [name, *_summary(members), *(_published(members, other) for other in others)]
        for name, members in groups.items()
    ]
    headers = [
        "", "rows", "mean %", "median %", "bias", "rank corr.", "in band %", "band ± %", "roofline mean %",
        *(f"{o} mean %" for o in others),
    ]  # fmt: skip
    print(f"\n{title}\n{tabulate(lines, headers=headers, floatfmt='.1f', disable_numparse=[4, 5])}")
    return {name: round(100 * statistics.fmean(row.error for row in members), 1) for name, members in groups.items()}


def _summary(rows: Sequence[Row]) -> list[object]:
    errors = [100 * row.error for row in rows]
    inside = sum(row.low <= row.measured <= row.high for row in rows) / len(rows)
    width = statistics.median((row.high - row.low) / 2 / row.predicted for row in rows)
    roofline = statistics.fmean(100 * abs(row.roofline / row.measured - 1) for row in rows)
    bias = statistics.median(row.predicted / row.measured for row in rows)
    return [
        len(rows),
        statistics.fmean(errors),
        statistics.median(errors),
        f"{bias:.2f}",
        _rank_correlation(rows),
        100 * inside,
        100 * width,
        roofline,
    ]


def _published(rows: Sequence[Row], predictor: str) -> float:
    errors = [abs(seconds / row.measured - 1) for row in rows for name, seconds in row.published if name == predictor]
    return 100 * statistics.fmean(errors) if errors else float("nan")


def _rank_correlation(rows: Sequence[Row]) -> str:
    """Spearman's: the correlation of the ranks."""
    if len(rows) < 3:
        return "-"
    predicted, measured = (_ranks([getattr(row, field) for row in rows]) for field in ("predicted", "measured"))
    if len(set(predicted)) < 2 or len(set(measured)) < 2:
        return "-"
    return f"{statistics.correlation(predicted, measured):.3f}"


def _ranks(values: Iterable[float]) -> list[float]:
    """Equal values share the mean of their places."""
    places: dict[float, list[int]] = {}
    values = list(values)
    for place, value in enumerate(sorted(values)):
        places.setdefault(value, []).append(place)
    return [statistics.fmean(places[value]) for value in values]


def roofline_seconds(report: Report, device: Hardware) -> float:
    return roofline_of((kernel.cost for kernel in report.kernels), report.switches, device)


def roofline_of(costs: Iterable[Cost], switches: Switches, device: Hardware) -> float:
    """The plain roofline: each kernel at the datasheet's peaks, the larger of the two."""
    total = 0.0
    for cost in costs:
        compute = 0.0
        if cost.macs:
            peak = device.contraction_peak(switches.matmul_dtype(cost))
            compute = cost.executed_flops / peak.flop_per_s
        total += max(compute, cost.bytes / device.bandwidth_bytes_per_s)
    return total


def sampled(lines: list[Line], most: int | None) -> list[Line]:
    """At most so many of the lines, in their order: those whose checksums are lowest, whatever order they were in."""
    if most is None or len(lines) <= most:
        return lines
    drawn = sorted(range(len(lines)), key=lambda place: crc32(repr(sorted(lines[place].items())).encode()))
    return [lines[place] for place in sorted(drawn[:most])]
