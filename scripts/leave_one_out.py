"""What is a constant worth on a GPU that it was not set on? NeuSight's operators, each card left out in turn.

    python scripts/leave_one_out.py --neusight DIR

The constants of the time model that were set on these measurements are set again on the other four cards, by the least
mean error over a grid, and the card that was left out is predicted with them. A card's own rates need no leaving out:
they come from other sources, but for the V100's fp32 rate, the ceiling of a law that was set on all five (.90; .86 to
.93 with any one left out). Beside it stands what the laws of power (flopmeter/device/power.py) give, which know
nothing but the datasheet.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from tabulate import tabulate
from validate_neusight import DISPATCH_SECONDS, PROFILES, PROGRAMS, is_anomalous, operator_lines, operator_report

from flopmeter import Hardware, load_hardware
from flopmeter.costs.arithmetic.normalization import OPERATIONS_TO_COMBINE
from flopmeter.records import Cost, Switches, VectorWork
from flopmeter.timing import constants, gemm_kernels
from flopmeter.timing.kernels import price

# What each constant might be, and the operators that share it. Those in small letters belong to the family of GEMM
# kernels of vector units; OPERATIONS_TO_COMBINE is part of the costs.
Grid = Mapping[str, tuple[float, ...]]
OF_MATMULS = {"tile_exponent": (0.1, 0.15, 0.2, 0.25, 0.3), "overlap_exponent": (1.5, 2.0, 2.5, 3.0)}
OF_ROWS = {"CACHE_SHARE_WITHOUT_MISSES": (0.1, 0.2, 0.3, 0.4, 0.5), "OPERATIONS_TO_COMBINE": (200, 275, 350, 425, 500)}
GROUPS: tuple[tuple[tuple[str, ...], Grid], ...] = (
    (("linear", "bmm"), OF_MATMULS),
    (("elementwise",), {}),
    (("softmax", "layernorm"), OF_ROWS),
)


class Measured(NamedTuple):
    """A row of a file: seconds without the host's part, and the costs of its kernels."""

    operator: str
    gpu: str
    seconds: float
    costs: tuple[Cost, ...]
    switches: Switches


class Line(NamedTuple):
    """Of the table; mean errors in percent."""

    operator: str
    gpu: str
    rows: int
    shipped: float
    left_out: float
    by_law: float
    setting: str = ""


Errors = dict[tuple[str, str], float]  # mean relative error by operator and GPU


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neusight", type=Path, metavar="DIR", required=True)
    folder = parser.parse_args().neusight
    lines: list[Line] = []
    for names, grid in GROUPS:
        lines += _table([row for name in names for row in _measured(folder, name)], grid)
    lines += [
        _together(gpu, [line for line in lines if line.gpu == gpu]) for gpu in dict.fromkeys(x.gpu for x in lines)
    ]
    headers = ["", "GPU", "rows", "mean % as shipped", "left out", "by the laws of power", "set on the others"]
    print(tabulate(lines, headers, floatfmt=".1f"))


def _together(gpu: str, lines: list[Line]) -> Line:
    """All operators of a GPU, each row as heavy as another."""
    rows = sum(line.rows for line in lines)
    means = [
        sum(line.rows * error for line, error in zip(lines, column, strict=True)) / rows
        for column in zip(*((line.shipped, line.left_out, line.by_law) for line in lines), strict=True)
    ]
    return Line("all", gpu, rows, *means)


def _measured(folder: Path, name: str) -> Iterator[Measured]:
    for line in operator_lines(folder, name):
        if not is_anomalous(line):
            report = operator_report(line, PROGRAMS[name], load_hardware(PROFILES[line["gpu"]]))
            seconds = float(line["latency_ms"]) * 1e-3 - DISPATCH_SECONDS[name]
            yield Measured(name, line["gpu"], seconds, tuple(kernel.cost for kernel in report.kernels), report.switches)


def _table(rows: list[Measured], grid: Grid) -> Iterator[Line]:
    """A line for each operator and GPU."""
    devices = {row.gpu: load_hardware(PROFILES[row.gpu]) for row in rows}
    shipped = mean_errors(rows, devices)
    by_law = mean_errors(rows, {gpu: replace(device, achieved=None) for gpu, device in devices.items()})
    tried: list[tuple[dict[str, float], Errors]] = []
    for values in product(*grid.values()):
        setting = dict(zip(grid, values, strict=True))
        with set_to(setting):
            tried.append((setting, mean_errors(rows, devices, setting.get("OPERATIONS_TO_COMBINE"))))
    counts = Counter((row.operator, row.gpu) for row in rows)
    for key, count in counts.items():
        operator, gpu = key
        setting, errors = least_without(gpu, tried)
        chosen = ", ".join(f"{constant} {value:g}" for constant, value in setting.items())
        yield Line(operator, gpu, count, 100 * shipped[key], 100 * errors[key], 100 * by_law[key], chosen)


def least_without(gpu: str, tried: list[tuple[dict[str, float], Errors]]) -> tuple[dict[str, float], Errors]:
    """The setting of least mean error over the other GPUs."""
    return min(tried, key=lambda entry: fmean(error for (_, other), error in entry[1].items() if other != gpu))


def mean_errors(rows: list[Measured], devices: Mapping[str, Hardware], operations: float | None = None) -> Errors:
    errors: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        device = devices[row.gpu]
        costs = row.costs if operations is None else [_combining_in(operations, cost) for cost in row.costs]
        predicted = sum(price(cost, device, row.switches).busy.seconds + device.kernel_floor_seconds for cost in costs)
        errors[row.operator, row.gpu].append(abs(predicted / row.seconds - 1))
    return {key: fmean(values) for key, values in errors.items()}


def _combining_in(operations: float, cost: Cost) -> Cost:
    if not isinstance(cost.work, VectorWork):
        return cost
    scale = operations / OPERATIONS_TO_COMBINE
    scaled = (reread._replace(operations=round(scale * reread.operations)) for reread in cost.work.rereads)
    return replace(cost, work=cost.work._replace(rereads=tuple(scaled)))


@contextmanager
def set_to(setting: Mapping[str, float]) -> Iterator[None]:
    """The constants of the time model at these values for a while."""
    of_model = {name: value for name, value in setting.items() if hasattr(constants, name)}
    before, family = {name: getattr(constants, name) for name in of_model}, gemm_kernels.SIMT
    try:
        for name, value in of_model.items():
            setattr(constants, name, value)
        gemm_kernels.SIMT = family._replace(
            tile_exponent=setting.get("tile_exponent", family.tile_exponent),
            overlap_exponent=setting.get("overlap_exponent", family.overlap_exponent),
        )
        yield
    finally:
        for name, value in before.items():
            setattr(constants, name, value)
        gemm_kernels.SIMT = family


if __name__ == "__main__":
    main()
