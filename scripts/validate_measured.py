"""A file of `flopmeter measure`: kernels and programs of one machine, by kind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from validation_rows import Row, roofline_of

from flopmeter import Hardware, load_hardware
from flopmeter.measured.suite.beside import BUSY, Beside, pairs
from flopmeter.measured.suite.programs import PROGRAMS
from flopmeter.measured.suite.run_file import SuiteRun, read_run


def measured_suite(path: Path, hardware: str | None) -> Iterator[tuple[str, list[Row]]]:
    """Kernels and programs of the file, predicted for `hardware` (default: the profile of the device's name, else the
    one that was calibrated with the suite). Programs wait for the host too, so on a GPU that flopmeter knows they are
    predicted a second time with the host's calibrated costs in place of the default ones."""
    run = read_run(path)
    device = run.hardware() if hardware is None else load_hardware(hardware)
    print(f"\n{path}: {run.device['name']}, {run.started}, {', '.join(map(' '.join, run.versions.items()))}")
    print(f"predicted for {device.name}: {device.sources['default']}")
    rows, others = pairs(run, device)
    for other in others:
        print(f"left out: {other.name}: {other.why}")
    yield from _tables(rows, device)
    if device.name == run.device["hardware"] and not isinstance(run.calibration, str) and not run.is_cpu:
        rows, _ = pairs(_only_programs(run), replace(device, host=run.calibrated().host))
        yield "measured programs, with the calibrated host", [_row(row, device) for row in rows if _is_wall(row)]


def _tables(rows: list[Beside], device: Hardware) -> Iterator[tuple[str, list[Row]]]:
    kernels = [_row(row, device) for row in rows if row.result.case.kind not in PROGRAMS]
    programs = [_row(row, device) for row in rows if row.result.case.kind in PROGRAMS]
    if kernels:
        yield "measured kernels", kernels
    if programs:
        yield "measured programs", programs
    once = [row for row in rows if row.group != BUSY]  # which repeats the program above it
    yield from _other_figures(once, device)


def _other_figures(rows: list[Beside], device: Hardware) -> Iterator[tuple[str, list[Row]]]:
    """Watts and bytes in place of seconds, where they were measured; without a band, and against a plain guess: the
    power limit, and the whole memory."""
    watts, memory = [], []
    for row in rows:
        result, report = row.result, row.prediction.report
        assert result.reading is not None
        plain = _row(row, device)._replace(low=0.0, high=float("inf"))
        if result.reading.watts and report.watts and device.limit_watts:
            drawn, predicted = result.reading.watts, report.watts
            watts.append(plain._replace(measured=drawn, predicted=predicted, roofline=device.limit_watts))
        if result.peak_memory_bytes and device.memory_bytes:
            held, peak = result.peak_memory_bytes, report.peak_memory_bytes
            memory.append(plain._replace(measured=held, predicted=peak, roofline=device.memory_bytes))
    if watts:
        yield "measured watts", watts
    if memory:
        yield "measured peak memory", memory


def _only_programs(run: SuiteRun) -> SuiteRun:
    results = [result for result in run.results if result.case.kind in PROGRAMS]
    return SuiteRun(**{**vars(run), "results": results})


def _is_wall(row: Beside) -> bool:
    return row.group == "programs"


def _row(row: Beside, device: Hardware) -> Row:
    report = row.prediction.report
    roofline = roofline_of((kernel.cost for kernel in report.kernels), report.switches, device) / row.prediction.calls
    return Row(
        row.group, device.name, row.measured, row.predicted, row.low, row.high, roofline, name=row.result.case.name
    )
