"""Profiler traces of real runs: DIR holds Chrome traces of torch.profiler, recorded with shapes (*.json, *.json.gz).

Measured is the time of an op's kernels on the device, so neither the host nor the profiler's cost there counts. A kind
of call is an op with its shapes. A trace that cannot be compared (no profile of its device) is named with the reason.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

from tabulate import tabulate
from validate_kernels import duration

from flopmeter import HardwareError
from flopmeter.measured import Check, CheckRow, ProfileError, check
from flopmeter.timing.bands import Band, band

LARGEST_MISSES = 10
MOST_SHAPES = 70  # characters
LEAST_SECONDS = 2e-6  # of a call that counts for its class; shorter ones are all latency


def traces(folder: Path) -> dict[str, dict[str, float]]:
    """Print the tables of all traces in the folder; return the four figures of each."""
    checks: dict[str, Check] = {}
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")]):
        try:
            checks[path.name.partition(".json")[0]] = check(path)
        except (HardwareError, ProfileError) as reason:
            print(f"\n{path.name}: {reason}")
    headers = ["", "GPU", "kinds", "calls", "measured ms", "aten priced %", "pred./meas.", "alone"]
    headers += ["weighted error %", "floor/meas."]
    print(f"\ntraces\n{tabulate([_line(name, one) for name, one in checks.items()], headers=headers, floatfmt='.2f')}")
    for name, one in checks.items():
        _by_duration(name, one)
        _largest_misses(name, one)
    _by_kernel_class(checks.values())
    return {f"trace {name}": _figures(one) for name, one in checks.items()}


def _line(name: str, found: Check) -> list[object]:
    calls = sum(row.calls for row in found.rows)
    floor = sum(row.floor_seconds for row in found.rows) / _measured(found.rows)
    measured = 1e3 * _measured(found.rows)
    return [name, found.hardware.name, len(found.rows), calls, measured, *_figures(found).values(), floor]


def _figures(found: Check) -> dict[str, float]:
    return {
        "aten priced %": round(100 * found.priced_share, 1),
        "predicted / measured": round(found.predicted_seconds / _measured(found.rows), 3),
        "of calls beside no other stream": round(found.alone_predicted_seconds / found.alone_measured_seconds, 3),
        "weighted error %": round(100 * found.weighted_error, 1),
    }


def _by_duration(name: str, found: Check) -> None:
    """By the time of one call: how much of the trace it is, and how far off."""
    groups: dict[str, list[CheckRow]] = {}
    for row in sorted(found.rows, key=_seconds_of_call):
        groups.setdefault(duration(_seconds_of_call(row)), []).append(row)
    lines = [
        [
            group,
            sum(row.calls for row in rows),
            1e3 * _measured(rows),
            sum(row.predicted_seconds for row in rows) / _measured(rows),
            100 * sum(abs(row.predicted_seconds - row.measured_seconds) for row in rows) / _measured(rows),
        ]
        for group, rows in groups.items()
    ]
    headers = ["one call", "calls", "measured ms", "pred./meas.", "weighted error %"]
    print(f"\n{name}, by duration\n{tabulate(lines, headers=headers, floatfmt='.2f')}")


def _largest_misses(name: str, found: Check) -> None:
    rows = sorted(found.rows, key=lambda row: -abs(row.predicted_seconds - row.measured_seconds))[:LARGEST_MISSES]
    lines = [
        [
            row.name,
            row.calls,
            1e6 * _seconds_of_call(row),
            1e6 * row.predicted_seconds / row.calls,
            1e3 * (row.predicted_seconds - row.measured_seconds),
            f"{row.dtype} {row.shapes[:MOST_SHAPES]}",
        ]
        for row in rows
    ]
    headers = ["largest misses", "calls", "measured µs", "predicted µs", "miss ms, all", "inputs"]
    print(f"\n{name}\n{tabulate(lines, headers=headers, floatfmt='.2f')}")


def _measured(rows: Iterable[CheckRow]) -> float:
    return sum(row.measured_seconds for row in rows)


def _seconds_of_call(row: CheckRow) -> float:
    return row.measured_seconds / row.calls


def _by_kernel_class(checks: Iterable[Check]) -> None:
    """Of all traces, by class of kernel: how far measured times are from predicted ones, and how many in the band."""
    groups: dict[str, list[tuple[CheckRow, Band]]] = {}
    for one in checks:
        for row in one.rows:
            if row.kernel_class and _seconds_of_call(row) >= LEAST_SECONDS:
                groups.setdefault(row.kernel_class, []).append((row, band(row.kernel_class, one.hardware)))
    lines = [_line_of_class(name, rows) for name, rows in groups.items()]
    headers = ["kernel class", "kinds", "measured ms", "a tenth below", "median", "a tenth above", "time in band %"]
    print(f"\nmeasured / predicted, calls weighted by their time\n{tabulate(lines, headers=headers, floatfmt='.2f')}")


def _line_of_class(name: str, rows: list[tuple[CheckRow, Band]]) -> list[object]:
    ratios = sorted((row.measured_seconds / row.predicted_seconds, row.measured_seconds) for row, _ in rows)
    measured = _measured(row for row, _ in rows)
    reached = list(accumulate(seconds for _, seconds in ratios))
    quantiles = [ratios[bisect_left(reached, share * measured)][0] for share in (0.1, 0.5, 0.9)]
    inside = _measured(row for row, of_class in rows if of_class.holds(row.measured_seconds, row.predicted_seconds))
    return [name, len(rows), 1e3 * measured, *quantiles, 100 * inside / measured]
