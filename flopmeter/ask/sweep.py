"""One program at many sizes: where time starts to grow, where throughput stops growing, and what fits.

Overhead does not scale with size: where doubling the batch makes a run less than 10 % slower, the device was waiting
for the host. The exception is a run whose bytes are mostly weights, read once for any batch: there the intensity
rises with the batch ([B, D] x [D, D] with B < D) and the run is memory-bound. The regimes tell the two apart.
(Horace He, 'Making Deep Learning Go Brrrr From First Principles', 2022.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

from flopmeter.ask.checks import check_callable, is_positive
from flopmeter.ask.steps import BOUND_BY, ENERGY_PRICE, FITS, JOULES, MFU, PEAK, TIME, WATTS, Step, step_figures
from flopmeter.ask.workers import results_of
from flopmeter.device.hardware import AnyHardware, Hardware, load_hardware
from flopmeter.launch.modes import mode_called
from flopmeter.meter import DEFAULT_HARDWARE, FlopMeter, Mode
from flopmeter.report.quantities import percent
from flopmeter.report.tables import ColumnOf, Document, Shown, Table, table_of

FLAT = 1.10
"""A run that takes less than this many times as long for twice the size does not feel its size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point(Step):
    """The program at one size."""

    KEYS = (
        "size", "seconds", "items_per_s", "regime", "mfu", "flops", "bytes", "intensity", "busy_seconds",
        "host_seconds", "idle_share", "peak_memory_bytes", "usable_memory_bytes", "fits",
        "watts", "joules", "energy_dollars",
    )  # fmt: skip

    size: int
    items_per_s: float
    flops: int
    bytes: int
    busy_seconds: float
    host_seconds: float
    idle_share: float  # of `seconds`, the device waiting for the host

    @property
    def intensity(self) -> float:
        """FLOP per byte moved."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True, repr=False)
class Sweep(Shown):
    """Points by rising size."""

    title: str
    over: str  # what the sizes are: 'batch', 'seq', ...
    unit: str  # of items: 'samples', 'tokens', ...
    points: tuple[Point, ...]
    notes: tuple[str, ...]

    @property
    def knee(self) -> int | None:
        """From this size on, doubling it brings less than 10 % more items per second; None: still rising."""
        knee = None
        for before, after in reversed(list(pairwise(self.points))):
            if _per_doubling(before, after, after.items_per_s / before.items_per_s) >= FLAT:
                break
            knee = before.size
        return knee

    @property
    def largest_that_fits(self) -> int | None:
        """The largest of the sizes that fits; None if none fits or the device's memory is unknown."""
        return max((point.size for point in self.points if point.fits), default=None)

    def diagnosis(self) -> list[str]:
        """What the growth of time says, one line for each stretch of sizes with the same verdict."""
        stretches: list[tuple[str, Point, Point]] = []
        for before, after in pairwise(self.points):
            verdict = _verdict(before, after)
            if stretches and stretches[-1][0] == verdict:
                stretches[-1] = (verdict, stretches[-1][1], after)
            else:
                stretches.append((verdict, before, after))
        return [f"{self.over} {first.size} to {last.size}: {verdict}" for verdict, first, last in stretches]

    def _document(self) -> Document:
        records = [point.as_dict() for point in self.points]
        facts = {"over": self.over, "unit": self.unit, "knee": self.knee, "largest_that_fits": self.largest_that_fits}
        return Document(
            kind="sweep",
            title=self.title,
            tables=[self._table()],
            notes=[*self.diagnosis(), self._limits(), *self.notes],
            data={**facts, "diagnosis": self.diagnosis(), "points": records},
            records=records,
        )

    def _table(self) -> Table:
        before = dict(zip(self.points[1:], self.points, strict=False))

        def growth(point: Point) -> str:
            if point not in before:
                return ""
            return f"{_per_doubling(before[point], point, point.seconds / before[point].seconds):.2f}x"

        columns: list[ColumnOf[Point]] = [
            ColumnOf(self.over, lambda point: point.size, str),
            TIME,
            ColumnOf("for twice the size", growth, str),
            ColumnOf(f"{self.unit}/s", lambda point: point.items_per_s),
            MFU,
            ColumnOf("FLOP/B", lambda point: point.intensity),
            BOUND_BY,
            ColumnOf("idle %", lambda point: point.idle_share, percent),
            PEAK,
            FITS,
            WATTS,
            JOULES,
        ]
        if any(point.energy_dollars is not None for point in self.points):
            columns.append(ENERGY_PRICE)
        return table_of(columns, self.points)

    def _limits(self) -> str:
        knee = "throughput still rises at the largest size"
        if self.knee is not None:
            knee = f"the knee is at {self.over} {self.knee}: beyond it doubling brings less than 10 % more per second"
        if all(point.fits is not False for point in self.points):
            return knee
        fitting = self.largest_that_fits
        return f"{knee}; {'nothing' if fitting is None else f'at most {self.over} {fitting}'} of these fits in memory"


def sweep(
    fn_of_batch: Callable[[int], object],
    batches: Iterable[int],
    hardware: AnyHardware = DEFAULT_HARDWARE,
    mode: Mode = "eager",
    *,
    over: str = "batch",
    items: float = 1,
    unit: str = "samples",
    workers: int = 1,
    executor: Executor | None = None,
    progress: Callable[[Sequence[int]], Iterable[int]] = iter,
    **meter_options: Any,
) -> Sweep:
    """What running `fn_of_batch(batch)` costs at each size.

    fn_of_batch: runs the program once at that size, on meta tensors; build the model outside of it.
    batches: the sizes, positive whole numbers.
    over: what the sizes are, where not batches ('seq').
    items: how many items (tokens, images) a size of 1 has, for the throughput; `unit` names them.
    workers, executor: processes that run sizes side by side, or any concurrent.futures.Executor (see ask/workers.py).
    progress: wraps the list of sizes, as `tqdm` does.
    meter_options: of FlopMeter.

    Raises HardwareError for an unknown device or one that lacks a data type of the program, and ValueError for
    sizes that make no sense or a program that runs nothing on the device.
    """
    check_callable(f"sweep runs a function of the {over}", fn_of_batch)
    mode_called(mode)
    sizes_given: Any = batches
    if isinstance(sizes_given, str) or not isinstance(sizes_given, Iterable):
        raise TypeError(f"sizes must be a list such as [1, 2, 4], not {batches!r}")
    given = list(batches)
    if not given or not all(type(size) is int and size > 0 for size in given):
        raise ValueError(f"sizes must be positive whole numbers, at least one, not {given}")
    if not is_positive(items):
        raise ValueError(f"items must be how many {unit} a size of 1 has, more than 0, not {items!r}")
    sizes = sorted(set(given))
    job = partial(_measured, fn_of_batch, load_hardware(hardware), mode, over, items, meter_options)
    points, headlines, notes = zip(*results_of(job, sizes, workers, executor, progress), strict=True)
    return Sweep(headlines[-1], over, unit, points, tuple(dict.fromkeys(chain(*notes))))


def _measured(
    fn_of_batch: Callable[[int], object],
    device: Hardware,
    mode: Mode,
    over: str,
    items: float,
    meter_options: Mapping[str, Any],
    size: int,
) -> tuple[Point, str, tuple[str, ...]]:
    """The point of one size, the headline of its report and the notes."""
    with FlopMeter(device, **meter_options) as meter:
        fn_of_batch(size)
    report = meter.report(mode=mode)
    if not report.kernels:
        raise ValueError(f"the program ran no op on meta tensors at {over} {size}: there is nothing to sweep")
    point = Point(
        size=size,
        items_per_s=items * size / report.seconds,
        flops=report.flops,
        bytes=report.bytes_read + report.bytes_written,
        busy_seconds=report.kernel_seconds,
        host_seconds=report.launch_seconds,
        idle_share=report.idle_seconds / report.seconds,
        **step_figures(report),
    )
    return point, report.headline, report.notes


def _per_doubling(before: Point, after: Point, ratio: float) -> float:
    """The factor of growth for each doubling of the size, where something grew by `ratio` between two sizes."""
    return float(ratio ** (1 / math.log2(after.size / before.size)))


def _verdict(before: Point, after: Point) -> str:
    """What the growth of time between two sizes says."""
    if _per_doubling(before, after, after.seconds / before.seconds) >= FLAT:
        change = "" if before.regime == after.regime else f"{before.regime}- to "
        return f"{change}{after.regime}-bound, time grows with the size"
    flat = "time grows by less than 10 % per doubling"
    if before.regime == "overhead":
        return f"overhead-bound, {flat}: the device waits for the host"
    if _per_doubling(before, after, after.bytes / before.bytes) < FLAT:
        return f"{before.regime}-bound, {flat} and so do the bytes: the same weights serve more items, not overhead"
    return f"{before.regime}-bound, {flat}: kernels too small to fill the device"
