"""Measured kernels of language models: DIR has gemm.csv and others like it (ai-dynamo/aiconfigurator, microsoft/vidur).

Half of the shapes, drawn by a checksum, set no constant of the time model: they are `held out` and have tables of their
own. Rows of less than 2 µs are left out, since they measure the timer.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from zlib import crc32

import torch
from validate import Line, Row, roofline_seconds
from validate_power import watts

from flopmeter import FlopMeter, Hardware, load_hardware
from flopmeter.launch.modes import Mode
from flopmeter.timing import uncertainty

LEAST_SECONDS = 2e-6
DURATIONS = (5e-6, 1e-5, 3e-5, 1e-4, 3e-4)  # where tables by duration begin a new line, in seconds

Program = Callable[[], object]
Table = tuple[str, list[Row], Callable[[Row], str]]


def kernels(folder: Path) -> Iterator[Table]:
    """The tables of each file that is there."""
    for name, rows_of in SETS.items():
        path = folder / f"{name}.csv"
        if path.is_file():
            for title, rows in rows_of(list(csv.DictReader(path.open()))).items():
                yield from tables(title, rows)


def tables(title: str, rows: list[Row]) -> Iterator[Table]:
    """All rows by GPU, those that no constant was set on, and all by duration."""
    if rows:
        yield f"{title}, by GPU", rows, lambda row: row.gpu
        yield f"{title}, held out, by GPU", [row for row in rows if row.held_out], lambda row: row.gpu
        yield f"{title}, by duration", *_by_duration(rows)


def _by_duration(rows: list[Row]) -> tuple[list[Row], Callable[[Row], str]]:
    """Rows that measure something else than time are in order, and named by it."""
    if rows[0].name:
        return rows, lambda row: row.name
    return sorted(rows, key=lambda row: row.measured), lambda row: duration(row.measured)


def duration(seconds: float) -> str:
    for least, most in zip((0.0, *DURATIONS), DURATIONS, strict=False):
        if seconds < most:
            return f"{least * 1e6:.0f} to {most * 1e6:.0f} µs"
    return f"over {DURATIONS[-1] * 1e6:.0f} µs"


def is_held_out(*shape: object) -> bool:
    """Whether the rows of this shape set no constant."""
    return crc32(repr(shape).encode()) % 2 == 1


def kernel_row(group: str, line: Line, run: Program, shape: tuple[object, ...], mode: Mode = "eager-cudagraph") -> Row:
    """A row whose kernels were measured without the host: replayed by a graph, or long after their launch."""
    device = load_hardware(line["gpu"])
    seconds, low, high, roofline = device_seconds(run, device, mode)
    measured = float(line["ms"]) * 1e-3
    return Row(group, line["gpu"], measured, seconds, low, high, roofline, held_out=is_held_out(*shape))


def device_seconds(run: Program, device: Hardware, mode: Mode) -> tuple[float, float, float, float]:
    """What the device is predicted to be busy, the lower and the upper end of the band, and the plain roofline."""
    with torch.inference_mode(), FlopMeter(device) as meter:
        run()
    report = meter.report(mode=mode)
    band = uncertainty(report.timings, report.kernel_seconds, device)
    return report.kernel_seconds, band.low, band.high, roofline_seconds(report, device)


# --- the sets ----------------------------------------------------------------------------------------------------


def gemms(lines: list[Line]) -> dict[str, list[Row]]:
    """[m, k] @ [k, n], the weight as [n, k]. Of fp8 the scales are known beforehand (`fp8_static`), or the activations
    are quantised by a kernel of their own (`fp8`)."""
    rows: dict[str, list[Row]] = {"GEMM, bf16": [], "GEMM, fp8": []}
    for line in lines:
        if float(line["ms"]) * 1e-3 >= LEAST_SECONDS:
            m, n, k = (int(line[size]) for size in "mnk")
            run = _gemm(m, n, k) if line["dtype"] == "bf16" else _fp8_gemm(m, n, k, line["kind"])
            rows[f"GEMM, {line['dtype']}"].append(kernel_row(line["kind"], line, run, (m, n, k)))
    return rows


def _gemm(m: int, n: int, k: int) -> Program:
    x, weight = (torch.empty(rows, k, dtype=torch.bfloat16, device="meta") for rows in (m, n))
    return lambda: torch.mm(x, weight.t())


def _fp8_gemm(m: int, n: int, k: int, kind: str) -> Program:
    x, weight = (torch.empty(rows, k, dtype=torch.float8_e4m3fn, device="meta") for rows in (m, n))
    activations = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
    one = torch.empty((), dtype=torch.float32, device="meta")

    def run() -> object:
        quantised = x if kind == "fp8_static" else (activations * one).to(torch.float8_e4m3fn)
        return torch._scaled_mm(quantised, weight.t(), one, one, out_dtype=torch.bfloat16)

    return run


def _watts(lines: list[Line]) -> dict[str, list[Row]]:
    return watts(lines, is_held_out, duration)


SETS: Mapping[str, Callable[[list[Line]], dict[str, list[Row]]]] = {"gemm": gemms, "power": _watts}
