"""Measured kernels of language models: DIR has gemm.csv and others like it (ai-dynamo/aiconfigurator, microsoft/vidur).

Half of the shapes, drawn by a checksum, set no constant of the time model: they are `held out` and have tables of their
own. Rows of less than 2 µs are left out, since they measure the timer.
"""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from zlib import crc32

import torch
from validate import Line, Row, roofline_seconds
from validate_collectives import collectives

from flopmeter import FlopMeter, Hardware, load_hardware
from flopmeter.launch.modes import Mode
from flopmeter.timing import uncertainty

LEAST_SECONDS = 2e-6
LAYERS = 6  # that the benchmark of GEMMs replays in turn
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
        yield f"{title}, by duration", sorted(rows, key=lambda row: row.measured), lambda row: duration(row.measured)


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
) -> Row:
    """A row whose kernels were measured without the host: replayed by a graph, or long after their launch. `before` ran
    just before, so that its results are in the cache."""
    device = load_hardware(line["gpu"])
    seconds, low, high, roofline = device_seconds(run, device, mode, before)
    measured = float(line["ms"]) * 1e-3
    return Row(group, line["gpu"], measured, seconds, low, high, roofline, held_out=is_held_out(*shape))


def device_seconds(
    run: Program, device: Hardware, mode: Mode, before: Program | None = None
) -> tuple[float, float, float, float]:
    """What the device is predicted to be busy, the lower and the upper end of the band, and the plain roofline."""
    skipped, skipped_roofline = 0, 0.0
    with torch.inference_mode(), FlopMeter(device) as meter:
        if before is not None:
            before()
            report = meter.report(mode=mode)
            skipped, skipped_roofline = len(report.timings), roofline_seconds(report, device)
        run()
    report = meter.report(mode=mode)
    timings = report.timings[skipped:]
    seconds = sum(timing.seconds for timing in timings)
    band = uncertainty(timings, seconds, device)
    return seconds, band.low, band.high, roofline_seconds(report, device) - skipped_roofline


# --- the sets ----------------------------------------------------------------------------------------------------


def gemms(lines: list[Line]) -> dict[str, list[Row]]:
    """[m, k] @ [k, n], the weight as [n, k]. Of fp8 the scales are known beforehand (`fp8_static`), or the activations
    are quantised by a kernel of their own (`fp8`)."""
    rows: dict[str, list[Row]] = {"GEMM, bf16": [], "GEMM, fp8": []}
    for line in lines:
        if float(line["ms"]) * 1e-3 >= LEAST_SECONDS:
            m, n, k = (int(line[size]) for size in "mnk")
            layers = [_layer(m, n, k, line["kind"]) for _ in range(LAYERS)]
            row = kernel_row(line["kind"], line, layers[0], (m, n, k), before=_in_turn(layers))
            rows[f"GEMM, {line['dtype']}"].append(row)
    return rows


def _in_turn(layers: Sequence[Program]) -> Program:
    return lambda: [layer() for layer in layers]


def _layer(m: int, n: int, k: int, kind: str) -> Program:
    """One of the layers that the benchmark replays in turn, each with weights of its own."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float8_e4m3fn
    weight = torch.empty(n, k, dtype=dtype, device="meta").t()
    x, out = _shared(m, n, k)
    if kind == "bfloat16":
        return lambda: torch.mm(x, weight, out=out)
    one = torch.ones((), dtype=torch.float32, device="meta")

    def run() -> object:
        if kind == "fp8":
            torch.linalg.vector_norm(x, float("inf"))
        quantised = x.to(torch.float8_e4m3fn)  # their scale is a multiplication within the same kernel
        return torch._scaled_mm(quantised, weight, one, one, out_dtype=torch.bfloat16)

    return run


@functools.lru_cache(1)
def _shared(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The activations that all layers read, and the memory that all write to."""
    x, out = (torch.empty(m, columns, dtype=torch.bfloat16, device="meta") for columns in (k, n))
    return x, out


def _transformer_ops(lines: list[Line]) -> dict[str, list[Row]]:
    from validate_transformer_ops import transformer_ops  # it takes its rows from here

    return transformer_ops(lines)


def _layers_of_experts(lines: list[Line]) -> dict[str, list[Row]]:
    from validate_moe import layers

    return layers(lines)


SETS: Mapping[str, Callable[[list[Line]], dict[str, list[Row]]]] = {
    "gemm": gemms,
    "transformer_ops": _transformer_ops,
    "moe": _layers_of_experts,
    "collectives": partial(collectives, is_held_out=is_held_out),
}
