"""Measured kernels of language models: DIR has gemm.csv and others like it (ai-dynamo/aiconfigurator, microsoft/vidur).

Half of the shapes, drawn by a checksum, set no constant of the time model: they are `held out` and have tables of their
own. Rows of less than 2 µs are left out, since they measure the timer.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from zlib import crc32

import torch
from validation_rows import Line, Row, roofline_of, sampled

from flopmeter import FlopMeter, Hardware, load_hardware
from flopmeter.costs import kernels_of
from flopmeter.launch.modes import MODES, Mode, launches
from flopmeter.records import Clocks, Kernel, Launches, Switches, Timing
from flopmeter.timing import PowerLaws, RankRun, time_run, uncertainty

LEAST_SECONDS = 2e-6
REPLAYS = 36  # of a kernel in a benchmark: six layers, six times
BURST_SECONDS = 0.02  # until when a cool device keeps its boost clock (docs/limits.md)
DURATIONS = (5e-6, 1e-5, 3e-5, 1e-4, 3e-4)  # where tables by duration begin a new line, in seconds

# The tables that each file gives: by a function of these modules, which take their rows from here.
SETS = {
    "gemm": ("validate_gemm", "gemms"),
    "attention": ("validate_attention", "attentions"),
    "transformer_ops": ("validate_transformer_ops", "transformer_ops"),
    "moe": ("validate_moe", "layers"),
    "collectives": ("validate_collectives", "collectives"),
    "power": ("validate_power", "watts"),
}
Program = Callable[[], object]
Table = tuple[str, list[Row], Callable[[Row], str]]


def kernels(folder: Path, most: int | None = None) -> Iterator[Table]:
    """The tables of each file that is there, of at most so many of its rows."""
    for name, (module, function) in SETS.items():
        path = folder / f"{name}.csv"
        if path.is_file():
            rows_of = getattr(import_module(module), function)
            for title, rows in rows_of(sampled(list(csv.DictReader(path.open())), most)).items():
                yield from tables(title, rows)


def tables(title: str, rows: list[Row]) -> Iterator[Table]:
    """All rows by GPU, those that no constant was set on, and all by duration."""
    if rows:
        yield f"{title}, by GPU", rows, lambda row: row.gpu
        held_out = [row for row in rows if row.held_out]
        if held_out:
            yield f"{title}, held out, by GPU", held_out, lambda row: row.gpu
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


def kernel_row(
    group: str,
    line: Line,
    run: Program,
    shape: tuple[object, ...],
    mode: Mode = "eager-cudagraph",
    before: Program | None = None,
    as_run: Callable[[list[Kernel], Hardware], list[Kernel]] | None = None,
) -> Row:
    """A row whose kernels were measured without the host: replayed by a graph, or long after their launch. `before` ran
    just before, so that its results are in the cache; `as_run`: what a server runs in place of these kernels."""
    device = load_hardware(line["gpu"])
    return next(kernel_rows(group, line, run, shape, [device], mode, before, as_run))


def kernel_rows(
    group: str,
    line: Line,
    run: Program,
    shape: tuple[object, ...],
    devices: Sequence[Hardware],
    mode: Mode = "eager-cudagraph",
    before: Program | None = None,
    as_run: Callable[[list[Kernel], Hardware], list[Kernel]] | None = None,
) -> Iterator[Row]:
    """The same kernels, those of the first of the devices, predicted for each."""
    measured = float(line["ms"]) * 1e-3
    with torch.inference_mode(), FlopMeter(devices[0]) as meter:
        if before is not None:
            before()
        first = len(kernels_of(meter.trace))
        run()
    traced = kernels_of(meter.trace, strict=True)
    traced = as_run(traced, devices[0]) if as_run else traced
    run_of, switches = launches(traced, meter.trace, MODES[mode]), meter.trace.switches
    for device in devices:
        seconds, low, high = replayed(run_of, device, switches, first)
        roofline = roofline_of((kernel.cost for kernel in traced[first:]), switches, device)
        yield Row(group, line["gpu"], measured, seconds, low, high, roofline, held_out=is_held_out(*shape))


def replayed(run: Launches, device: Hardware, switches: Switches, first: int) -> tuple[float, float, float]:
    """How long the device is busy with the kernels from the first of this number on, and the ends of the band."""

    def timed(clocks: Clocks) -> tuple[list[Timing], float]:
        ran = RankRun(run, device, switches, device.host, None)
        timings = time_run(ran, clocks, PowerLaws()).timings[first:]
        return timings, sum(timing.seconds for timing in timings)

    timings, seconds = timed("burst")
    share = burst_share(seconds)
    if share < 1.0:
        timings, sustained = timed("sustained")
        seconds = share * seconds + (1 - share) * sustained
    band = uncertainty(timings, seconds, device)
    return seconds, band.low, band.high


def burst_share(burst_seconds: float) -> float:
    """Of kernels in a row that each take so long at the boost clock, how many run before the power controller acts."""
    return min(1.0, BURST_SECONDS / (REPLAYS * burst_seconds))
