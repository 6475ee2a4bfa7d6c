"""What pictures of a report show. Two drawers use it: plots.py with matplotlib, and page/ with SVG in HTML.

Classes differ by shape and categories of memory by hatching as well as by colour, so that a picture can be
read in black and white.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, groupby, pairwise
from math import cos, dist, pi, sin
from typing import NamedTuple

from flopmeter.records import (
    ATTENTION,
    COMMUNICATION,
    CONTRACTION,
    ELEMENTWISE,
    INDEXING,
    MOVEMENT,
    NORMALIZATION,
    RANDOM,
    REDUCTION,
    SORTING,
    UNCOUNTED,
    Cost,
    Regime,
)
from flopmeter.report.report import Report
from flopmeter.report.rows import Row, as_one_layer
from flopmeter.timing.peak_memory import CATEGORIES, Category, usable_bytes_if_known


class Look(NamedTuple):
    """`marker` is matplotlib's letter: ^v<> triangles, s square, o circle, D diamond, P plus, X cross, p pentagon,
    * star."""

    colour: str
    marker: str


# Okabe and Ito's colours, which the colour-blind can tell apart; markers as in the paper's table where it has any.
CLASS_LOOKS = {
    CONTRACTION: Look("#0072B2", "^"),
    NORMALIZATION: Look("#D55E00", "s"),
    ELEMENTWISE: Look("#009E73", "o"),
    ATTENTION: Look("#CC79A7", "D"),
    REDUCTION: Look("#E69F00", "v"),
    MOVEMENT: Look("#56B4E9", ">"),
    INDEXING: Look("#F0E442", "<"),
    RANDOM: Look("#999999", "p"),
    SORTING: Look("#999999", "*"),
    COMMUNICATION: Look("#CC79A7", "P"),
    UNCOUNTED: Look("#999999", "X"),
}


# The same colours as the classes', since no picture has both.
REGIME_LOOKS: dict[Regime, Look] = {
    "compute": Look("#56B4E9", "^"),
    "memory": Look("#E69F00", "s"),
    "communication": Look("#CC79A7", "D"),
    "overhead": Look("#999999", "o"),
}


class Fill(NamedTuple):
    colour: str
    hatch: str  # as matplotlib writes it


_COLOURS = "#0072B2", "#D55E00", "#009E73", "#F0E442", "#CC79A7", "#E69F00", "#56B4E9"
_HATCHES = "", "//", "..", "--", "xx", "\\\\", "++"
CATEGORY_FILLS: dict[Category, Fill] = dict(zip(CATEGORIES, map(Fill, _COLOURS, _HATCHES), strict=True))

LEAST_INTENSITY = 1e-2  # FLOP/B that a roofline shows: a large copy with a scalar's work lies below
MOST_NAMED, LEAST_NAMED = 6, 0.02  # kernels that a roofline names, and the share of the device's time of the least
_DEEPEST = 1e-8  # of the peak: slower kernels are drawn at the bottom


class Dot(NamedTuple):
    """All kernels of one cost: the rate that one of them reaches, and the time of all."""

    name: str
    module: str  # of the first of them, with a star for each number
    op_class: str
    calls: int
    intensity: float  # FLOP/B, of what is executed
    flop_per_s: float
    seconds: float


def dots(report: Report) -> list[Dot]:
    """The kernels that have a place under a roof, those of one cost together; the most time first."""
    seconds: dict[Cost, float] = {}
    calls: dict[Cost, int] = {}
    modules: dict[Cost, str] = {}
    for kernel, timing in zip(report.kernels, report.timings, strict=True):
        seconds[kernel.cost] = seconds.get(kernel.cost, 0.0) + timing.seconds
        calls[kernel.cost] = calls.get(kernel.cost, 0) + 1
        modules.setdefault(kernel.cost, kernel.op.module)
    placed = [
        Dot(
            cost.name, as_one_layer(modules[cost]), cost.op_class, calls[cost], flops / cost.bytes,
            flops * calls[cost] / spent, spent,
        )
        for cost, spent in seconds.items()
        if cost.bytes and spent and (flops := cost.executed_flops) >= LEAST_INTENSITY * cost.bytes
    ]  # fmt: skip
    return sorted(placed, key=lambda dot: -dot.seconds)


class Roof(NamedTuple):
    """What bounds one unit of the device: the memory's slope up to the ridge point, then the unit's peak."""

    unit: str  # 'products' or 'vector'
    dtype: str
    flop_per_s: float
    bytes_per_s: float
    sustained_flop_per_s: float
    sustained_bytes_per_s: float

    def at(self, intensity: float) -> float:
        """The most FLOP/s of a kernel, by the datasheet."""
        return min(self.flop_per_s, intensity * self.bytes_per_s)

    def line(self, least: float, most: float, *, sustained: bool = False) -> list[tuple[float, float]]:
        """Its corners (FLOP/B, FLOP/s) from the least to the greatest intensity, by the datasheet or as sustained."""
        flop_per_s, bytes_per_s = self.flop_per_s, self.bytes_per_s
        if sustained:
            flop_per_s, bytes_per_s = self.sustained_flop_per_s, self.sustained_bytes_per_s
        return [(least, least * bytes_per_s), (flop_per_s / bytes_per_s, flop_per_s), (most, flop_per_s)]


class Roofline(NamedTuple):
    """The kernels under the roofs of their device."""

    dots: list[Dot]
    products: Roof  # in the program's main data type
    vector: Roof
    kernel_seconds: float

    def share_of_roof(self, dot: Dot) -> float:
        """The kernel's share of the rate that the datasheet allows it."""
        roof = self.products if dot.op_class in (CONTRACTION, ATTENTION) else self.vector
        return dot.flop_per_s / roof.at(dot.intensity)

    @property
    def unplaced_share(self) -> float:
        """The share of the device's time in kernels without FLOPs, or with hardly any."""
        return 1 - sum(dot.seconds for dot in self.dots) / self.kernel_seconds


def roofline_of(report: Report) -> Roofline:
    device, dtype = report.hardware, report.main_dtype
    slopes = device.bandwidth_bytes_per_s, device.sustained_bandwidth_bytes_per_s
    products, vector = (
        Roof(unit, dtype, peak.flop_per_s, slopes[0], peak.sustained_flop_per_s, slopes[1])
        for unit, dtype, peak in (
            ("products", dtype, device.contraction_peak(dtype)),
            ("vector", "fp32", device.vector_peak("fp32")),
        )
    )
    return Roofline(dots(report), products, vector, report.kernel_seconds)


class Range(NamedTuple):
    low: float
    high: float


_MARGIN = 1.7  # beyond the data's ends, so that no dot is cut
_NAME_ROOM = 3.0  # right of the highest intensity, times it
_LABEL_ROOM = 2.5  # above the highest roof, times its height


def ranges(rooflines: Sequence[Roofline]) -> tuple[Range, Range]:
    """The ranges of intensity and of FLOP/s that hold all dots and ridge points."""
    shown = [dot for each in rooflines for dot in each.dots]
    peak = max(each.products.flop_per_s for each in rooflines)
    ridges = [roof.flop_per_s / roof.bytes_per_s for each in rooflines for roof in (each.products, each.vector)]
    slowest = max(min((dot.flop_per_s for dot in shown), default=peak), peak * _DEEPEST)
    lowest_ridge = min(roof.flop_per_s for each in rooflines for roof in (each.products, each.vector))
    intensities = [*ridges, *(dot.intensity for dot in shown)]
    intensity = Range(max(LEAST_INTENSITY, min(intensities) / _MARGIN), max(intensities) * _NAME_ROOM)
    return intensity, Range(min(slowest, lowest_ridge) / _MARGIN, peak * _LABEL_ROOM)


def merged(shown: Sequence[Dot], at: Callable[[Dot], tuple[float, float]]) -> list[Dot]:
    """Dots of one class on one pixel as one; the most time first. `at`: where a dot is, in pixels."""

    def place(dot: Dot) -> tuple[str, int, int]:
        x, y = at(dot)
        return dot.op_class, round(x), round(y)

    found = []
    for _, several in groupby(sorted(shown, key=place), key=place):
        first, *others = sorted(several, key=lambda dot: -dot.seconds)
        names = dict.fromkeys(dot.name for dot in (first, *others))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        calls, seconds = (first.calls + sum(d.calls for d in others), first.seconds + sum(d.seconds for d in others))
        found.append(first._replace(name=first.name + more, calls=calls, seconds=seconds))
    return sorted(found, key=lambda dot: -dot.seconds)


def longest_dots(shown: Sequence[Dot], kernel_seconds: float) -> list[Dot]:
    """The dots that a picture names: those of the most time, if it is enough to be seen."""
    return [dot for dot in shown[:MOST_NAMED] if dot.seconds >= LEAST_NAMED * kernel_seconds]


Spot = tuple[float, float]  # in pixels


def beside(points: Sequence[Spot], radii: Sequence[float], size: float, avoid: Sequence[Spot] = ()) -> list[Spot]:
    """Where the centre of a short label of that size goes beside each of the points: near to it, but not on another
    label, another point, the line between another label and its point, or something else to avoid."""
    taken: list[Spot] = []
    angles = [turn * pi / 8 for turn in range(16)]

    def trouble(place: int, spot: Spot) -> float:
        """How bad a spot is for the label of the point at that place, given the labels so far."""
        centre, lines = points[place], zip(taken, points, strict=False)
        others = (each for number, each in enumerate(zip(points, radii, strict=True)) if number != place)
        hits = sum(dist(spot, label) < size for label in taken)
        hits += sum(_from_line(label, spot, centre) < size / 2 for label in taken)
        hits += sum(_from_line(spot, *line) < size / 2 for line in lines)
        hits += sum(dist(spot, point) < own + size / 2 for point, own in others)
        hits += sum(dist(spot, point) < size for point in avoid)
        return hits * 10 * size + dist(spot, centre)

    for place, ((x, y), radius) in enumerate(zip(points, radii, strict=True)):
        away = [radius + times * size for times in (0.6, 1.2, 1.8, 2.6)]
        spots = ((x + far * cos(angle), y + far * sin(angle)) for far in away for angle in angles)
        taken.append(min(spots, key=partial(trouble, place)))
    return taken


def _from_line(spot: Spot, start: Spot, end: Spot) -> float:
    """How far a spot is from the straight line between two others."""
    (x, y), (a, b), (c, d) = spot, start, end
    squared = (c - a) ** 2 + (d - b) ** 2
    along = min(1.0, max(0.0, ((x - a) * (c - a) + (y - b) * (d - b)) / squared)) if squared else 0.0
    return dist(spot, (a + along * (c - a), b + along * (d - b)))


class MemoryPicture(NamedTuple):
    """What is alive at each step, one category on top of the other."""

    areas: Mapping[Category, Sequence[int]]  # bytes at each step; of the categories that the program has
    peak_bytes: int
    limit_bytes: int | None  # memory of the device; None if beside it the program would be a thin line at the bottom
    phases: Sequence[tuple[str, int]]  # with their first step
    starts: Sequence[float] | None  # seconds at which the device comes to each step; None in a mode that fuses ops
    peak_step: int  # the first one

    @property
    def steps(self) -> int:
        return len(next(iter(self.areas.values())))

    @property
    def totals(self) -> list[int]:
        return [sum(alive) for alive in zip(*self.areas.values(), strict=True)]


def memory_picture(report: Report) -> MemoryPicture | None:
    """The picture of a report's memory; None if nothing was alive."""
    areas = {name: alive for name, alive in report.memory.timeline.items() if any(alive)}
    if not areas:
        return None
    limit = usable_bytes_if_known(report.hardware)
    if limit is not None and limit >= 3 * report.peak_memory_bytes:
        limit = None
    peak = report.peak_memory_bytes
    starts = None if report.launches.mode.fuses else _step_starts(report)
    shown = MemoryPicture(areas, peak, limit, _phase_starts(report), starts, 0)
    return shown._replace(peak_step=shown.totals.index(peak))


def _step_starts(report: Report) -> list[float]:
    """When the first kernel of each op starts; an op without one, such as a view, has the time of the op before it. The
    last one is the end of the run."""
    first: dict[int, float] = {}
    for kernel, timing in zip(report.kernels, report.timings, strict=True):
        for op in kernel.ops:
            first.setdefault(id(op), timing.start_seconds)
    ops = report.memory.trace.ops[: report.memory.steps]
    return [*accumulate((first.get(id(op), 0.0) for op in ops), max), report.seconds]


def _phase_starts(report: Report) -> list[tuple[str, int]]:
    """Name and first op of each phase; none where they alternate too often to be labelled, as under checkpointing."""
    phases: list[str] = [op.phase for op in report.memory.trace.ops[: report.memory.steps]]
    starts = [(after, place + 1) for place, (before, after) in enumerate(pairwise(phases)) if before != after]
    starts = [(phases[0], 0), *starts] if phases else []
    return starts if len(starts) <= 6 else []


def modules_to_depth(report: Report, most: int) -> tuple[list[Row], int | None]:
    """The module tree to the depth at which it has at most that many rows (one level at least), and that depth;
    None: all of it."""
    rows = report.rows("module")
    if len(rows) <= most:
        return rows, None
    depths = [row.name.count(".") + 1 for row in rows]
    depth = max([1, *(d for d in range(2, max(depths)) if sum(own <= d for own in depths) <= most)])
    return [row for row, own in zip(rows, depths, strict=True) if own <= depth][:most], depth
