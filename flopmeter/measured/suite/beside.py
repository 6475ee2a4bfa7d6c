"""What a suite measured beside what is predicted for it, by kind of case."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from tabulate import tabulate

from flopmeter.device.hardware import Hardware, HardwareError
from flopmeter.measured.suite.cases import Case
from flopmeter.measured.suite.prediction import CasePrediction, predict
from flopmeter.measured.suite.programs import PROGRAMS
from flopmeter.measured.suite.run_file import CaseResult, SuiteRun

BUSY = "programs, device busy"
BURST_SECONDS = 0.02  # how long a device keeps its boost clock after a pause (flopmeter/timing/energy.py)
SHORT_SECONDS = 2e-6  # of a GPU's kernel: below this, the time is that of the launch


class Beside(NamedTuple):
    """A case as it was measured and predicted, in seconds of one call."""

    group: str
    result: CaseResult
    measured: float
    predicted: float
    low: float  # the band
    high: float
    prediction: CasePrediction


class Unpaired(NamedTuple):
    """A case without a measurement or without a prediction, and why."""

    name: str
    why: str


def pairs(run: SuiteRun, device: Hardware) -> tuple[list[Beside], list[Unpaired]]:
    """The cases of a run that were measured and can be predicted for `device`; then the others."""
    device = _as_measured(run, device)
    found: list[Beside] = []
    others: list[Unpaired] = []
    for result in run.results:
        if result.reading is None:
            others.append(Unpaired(result.case.name, f"not measured: {result.failed}"))
            continue
        try:
            prediction = predict(_as_it_ran(result), device, result.copies)
        except (ValueError, RuntimeError) as error:  # flopmeter's own errors, and torch's
            others.append(Unpaired(result.case.name, f"not predicted: {' '.join(str(error).split())[:200]}"))
            continue
        found += _beside(result, prediction, run.is_cpu)
    return found, others


def _as_it_ran(result: CaseResult) -> Case:
    """The clocks of a sample. A sample that is longer than a burst ends at the clock of a long run, and is priced at
    that clock as a whole."""
    assert result.reading is not None
    is_burst = result.reading.seconds * result.reading.calls <= BURST_SECONDS
    return result.case if is_burst else result.case._replace(clocks="sustained")


def _as_measured(run: SuiteRun, device: Hardware) -> Hardware:
    """The device under the machine's power limit. Raises HardwareError for a CPU's run on a GPU, and the reverse."""
    if device.is_cpu != run.is_cpu:
        kinds = ("a CPU", "a GPU")
        measured, other = kinds if run.is_cpu else kinds[::-1]
        raise HardwareError(f"the run was measured on {measured}, but {device.name} is {other}")
    limit_w = run.device.get("power_limit_w")
    has_own_limit = limit_w and device.tdp_w and abs(limit_w - (device.power_limit_w or device.tdp_w)) > 1
    return replace(device, power_limit_w=limit_w) if has_own_limit else device


def _beside(result: CaseResult, prediction: CasePrediction, is_cpu: bool) -> Iterator[Beside]:
    assert result.reading is not None
    case, seconds = result.case, result.reading.seconds
    pair = Beside(case.kind, result, seconds, prediction.seconds, prediction.low, prediction.high, prediction)
    if case.kind not in PROGRAMS:
        op = str(case.inputs.get("op", case.kind))
        suffix = ", sustained" if case.clocks == "sustained" else ""
        dtype = f" {case.inputs['dtype']}" if case.kind == "matmul" else ""
        if is_cpu or seconds >= SHORT_SECONDS:
            yield pair._replace(group=f"{op}{dtype}{suffix}")
        return
    yield pair._replace(group="programs")
    if not is_cpu and result.profiled_seconds:
        share = prediction.device_seconds / prediction.seconds
        yield pair._replace(
            group=BUSY, measured=result.profiled_seconds, predicted=prediction.device_seconds,
            low=prediction.low * share, high=prediction.high * share,
        )  # fmt: skip


def table(rows: Sequence[Beside], name: Callable[[Beside], str] = lambda row: row.group) -> str:
    """One line for each name: how far off, to which side, and how often the band holds."""
    groups: dict[str, list[Beside]] = {}
    for row in rows:
        groups.setdefault(name(row), []).append(row)
    lines = [[group, *_figures(members)] for group, members in groups.items()]
    headers = ["", "cases", "mean error %", "median error %", "predicted / measured", "in band %"]
    return tabulate(lines, headers=headers, floatfmt=("", "", ".1f", ".1f", ".2f", ".0f"))


def _figures(rows: Sequence[Beside]) -> Iterator[float]:
    errors = [100 * abs(row.predicted / row.measured - 1) for row in rows]
    yield len(rows)
    yield statistics.fmean(errors)
    yield statistics.median(errors)
    yield statistics.median(row.predicted / row.measured for row in rows)
    yield 100 * statistics.fmean(row.low <= row.measured <= row.high for row in rows)


def programs_table(rows: Iterable[Beside]) -> str:
    """Each program on a line of its own."""
    lines = [
        [row.result.case.name.removesuffix(" sustained"), row.measured * 1e3, row.predicted * 1e3]
        + [row.predicted / row.measured, "yes" if row.low <= row.measured <= row.high else "no"]
        for row in rows
        if row.group == "programs"
    ]
    headers = ["program", "measured ms", "predicted ms", "predicted / measured", "in band"]
    return tabulate(lines, headers=headers, floatfmt=("", ".3g", ".3g", ".2f", ""))
