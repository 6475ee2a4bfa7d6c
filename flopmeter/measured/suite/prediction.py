"""The prediction of a case of the suite: made again on meta, it runs under the meter in the way it was measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from flopmeter.costs import kernels_of
from flopmeter.device.hardware import Hardware
from flopmeter.measured.suite.cases import Case, CaseRun, Maker, UnknownCaseError, switches_of
from flopmeter.measured.suite.kernels import KERNELS
from flopmeter.measured.suite.programs import PROGRAMS
from flopmeter.meter import FlopMeter, Mode
from flopmeter.report.report import Report
from flopmeter.timing import uncertainty

CASES: dict[str, Callable[..., CaseRun]] = {**KERNELS, **PROGRAMS}


class CasePrediction(NamedTuple):
    """Seconds of one call: device time for a kernel on a GPU, else wall-clock."""

    seconds: float
    low: float  # the band
    high: float
    device_seconds: float  # of its kernels
    report: Report
    calls: int  # of the case, in the report


def copies_of(case: Case, device: str, copies: Callable[[int], int]) -> tuple[list[CaseRun], int]:
    """The case made on a device, as often as `copies` says for the bytes of its weights; and those bytes."""
    if case.kind not in CASES:
        raise UnknownCaseError(f"no case of the suite is of the kind {case.kind!r}; known: {', '.join(CASES)}")
    sizes = {name: value for name, value in case.inputs.items() if name != "dtype"}
    make = Maker(device, str(case.inputs["dtype"]))
    try:
        runs = [CASES[case.kind](make, **sizes)]
        weight_bytes = make.weight_bytes
        for _ in range(1, copies(weight_bytes)):
            make.next_copy()
            runs.append(CASES[case.kind](make, **sizes))
    except TypeError as error:
        raise UnknownCaseError(f"{case.name}: these are not the inputs of its kind ({error})") from None
    return runs, weight_bytes


def predict(case: Case, device: Hardware, copies: int = 1) -> CasePrediction:
    """Raises UnknownCaseError for a case that cannot be made here, HardwareError where the device has no such rate."""
    runs, _ = copies_of(case, "meta", lambda _: copies)
    if case.kind in PROGRAMS:
        return _of_program(case, runs[0], device)
    meter = FlopMeter(device, as_cuda=not device.is_cpu, clocks=case.clocks)
    with switches_of(case), torch.no_grad(), meter:
        for run in [*runs, *runs]:  # the first round leaves in the cache what the measured ones find there
            run()
    report, calls = meter.report(mode="eager" if device.is_cpu else "eager-cudagraph"), 2 * copies
    timings, seconds, timed = report.timings, report.seconds, calls
    if not device.is_cpu:
        timings, timed = timings[len(timings) // 2 :], copies
        seconds = sum(timing.seconds for timing in timings)
    band = uncertainty(timings, seconds, device)
    device_seconds = report.kernel_seconds / calls
    return CasePrediction(seconds / timed, band.low / timed, band.high / timed, device_seconds, report, calls)


def _of_program(case: Case, run: CaseRun, device: Hardware) -> CasePrediction:
    mode: Mode = "compiled" if case.inputs.get("mode") == "compiled" else "eager"
    with switches_of(case):
        with FlopMeter(device, as_cuda=not device.is_cpu):
            run()  # an optimizer's first step makes its state
        with FlopMeter(device, as_cuda=not device.is_cpu, clocks=case.clocks) as meter:
            run()
    report = meter.report(mode=mode)
    return CasePrediction(report.seconds, report.seconds_low, report.seconds_high, report.kernel_seconds, report, 1)


def work_of(case: Case) -> tuple[int, int]:
    """FLOPs and bytes of one call, on no device in particular."""
    (run,), _ = copies_of(case, "meta", lambda _: 1)
    with FlopMeter(as_cuda=False) as meter, torch.no_grad():
        run()
    costs = [kernel.cost for kernel in kernels_of(meter.trace)]
    return sum(cost.flops for cost in costs), sum(cost.bytes for cost in costs)
