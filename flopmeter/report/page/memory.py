"""What is alive over the run, by category, as SVG: over the wall-clock, and op by op."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from flopmeter.report.figures import MemoryPicture, memory_picture
from flopmeter.report.page.axes import Axis, horizontal, picture, vertical
from flopmeter.report.page.marks import hatch, swatch
from flopmeter.report.page.markup import Markup, join, tag
from flopmeter.report.quantities import scale, with_prefix
from flopmeter.report.report import Report
from flopmeter.timing.peak_memory import Category

_WIDTH, _HEIGHT = 480.0, 320.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 72.0, _WIDTH - 12, 24.0, _HEIGHT - 50
_PER_PIXEL = 2  # columns: more would be finer than screens show
_CHARACTER, _LINE = 7.5, 16.0  # pixels that text takes
_HEADROOM = 1.15  # above the peak, for its label


class _Across(NamedTuple):
    """The horizontal axis: where each step lies on it."""

    axis: Axis
    labels: list[str]
    title: str
    place: Callable[[int], float]  # the pixel of a step


def memory_timeline(report: Report) -> Markup:
    """The pictures and their legend; a note instead where nothing was held."""
    shown = memory_picture(report)
    if shown is None:
        return tag("p", "The program holds no memory on its device.")
    over_ops = Axis(0, max(1, shown.steps - 1), _LEFT, _RIGHT)
    across = [_Across(over_ops, [f"{op:g}" for op in over_ops.ticks], "op", over_ops.at)]
    if shown.starts is not None and report.seconds:
        across.insert(0, _over_time(shown.starts, report.seconds))
    pictures = (tag("figure", _drawn(shown, each)) for each in across)
    return join([tag("div", *pictures, class_="pair"), _legend(report, shown)])


def _over_time(starts: Sequence[float], seconds: float) -> _Across:
    axis = Axis(0, seconds, _LEFT, _RIGHT)
    divisor, unit = scale([seconds], "s")
    labels = [f"{second / divisor:.4g}" for second in axis.ticks]
    return _Across(axis, labels, f"time ({unit})", lambda step: axis.at(starts[step]))


def _drawn(shown: MemoryPicture, across: _Across) -> Markup:
    size = Axis(0, max(_HEADROOM * shown.peak_bytes, 1.08 * (shown.limit_bytes or 0)), _BOTTOM, _TOP)
    divisor, unit = scale([size.high], "B")
    return picture(
        _WIDTH,
        _HEIGHT,
        f"Memory alive over {across.title}, peak {with_prefix(shown.peak_bytes, 'B')}",
        horizontal(across.axis, _TOP, _BOTTOM, across.labels, across.title),
        vertical(size, _LEFT, _RIGHT, [f"{nbytes / divisor:g}" for nbytes in size.ticks], f"alive ({unit})"),
        _areas(shown, across, size),
        _phases(shown.phases, across),
        _limit(shown.limit_bytes, size),
        _peak(shown, across.place(shown.peak_step), size),
    )


def _areas(shown: MemoryPicture, across: _Across, size: Axis) -> Markup:
    """Each category as a band on top of those before it. Memory that is alive stays so until the next step. Where
    several steps fall into one column of the picture, the one with the most alive is drawn, so that no peak is lost."""
    by_column = groupby(range(shown.steps), lambda step: int(_PER_PIXEL * across.place(step)))
    columns = [list(steps) for _, steps in by_column]
    totals = shown.totals
    highest = [max(column, key=totals.__getitem__) for column in columns]
    heights = [list(accumulate(alive[step] for alive in shown.areas.values())) for step in highest]
    edges = [*(across.place(column[0]) for column in columns), across.axis.end]
    return _bands(shown.areas, edges, heights, size)


def _bands(areas: Mapping[Category, object], edges: list[float], heights: list[list[int]], size: Axis) -> Markup:
    bands = []
    for place, category in enumerate(areas):
        upper = _staircase(edges, [size.at(column[place]) for column in heights])
        lower = _staircase(edges, [size.at(column[place - 1] if place else 0) for column in heights])
        outline = "M" + "L".join([*upper, *reversed(lower)]) + "Z"
        bands.append(tag("path", tag("title", category), class_="area", d=outline, fill=hatch(category)))
    # In the ink of the page: a peak of a few ops is thinner than a pixel, and its outline is all that shows.
    whole = _staircase(edges, [size.at(column[-1]) for column in heights])
    return join([*bands, tag("path", class_="phase", d="M" + "L".join(whole))])


def _staircase(edges: list[float], levels: list[float]) -> list[str]:
    """Points along the levels, without those that lie on a straight line between others."""
    points = []
    level_before = None
    for (start, end), level in zip(pairwise(edges), levels, strict=True):
        if level == level_before:
            points.pop()
        else:
            points.append(f"{start:.1f} {level:.1f}")
        points.append(f"{end:.1f} {level:.1f}")
        level_before = level
    return points


def _phases(phases: Sequence[tuple[str, int]], across: _Across) -> Markup:
    """A line where each phase begins, with its name where there is room."""
    starts = [across.place(step) for _, step in phases]
    lines = []
    for (name, _), x, end in zip(phases, starts, [*starts, across.axis.end][1:], strict=True):
        lines.append(tag("path", class_="phase", d=f"M{x:.1f} {_TOP - 16:.1f}V{_BOTTOM:.1f}"))
        if end - x > _CHARACTER * len(name):
            lines.append(tag("text", name, x=x + 4, y=_TOP - 8))
    return join(lines)


def _limit(limit: int | None, size: Axis) -> Markup:
    if limit is None:
        return Markup("")
    y = size.at(limit)
    line = tag("path", class_="roof sustained", d=f"M{_LEFT:.1f} {y:.1f}H{_RIGHT:.1f}")
    label = f"memory of the device {with_prefix(limit, 'B')}"
    return join([line, tag("text", label, class_="halo", x=_RIGHT - 4, y=y - 5, text_anchor="end")])


def _peak(shown: MemoryPicture, x: float, size: Axis) -> Markup:
    """Where the most is alive, and how much. The text stands beside the point if the label of the device's memory is
    above it."""
    y = size.at(shown.peak_bytes)
    is_close = shown.limit_bytes is not None and abs(size.at(shown.limit_bytes) - y) < 2 * _LINE
    is_left = x < (_LEFT + _RIGHT) / 2
    dot = tag("circle", class_="peak", cx=x, cy=y, r=4)
    aside = 8.0 if is_left else -8.0
    label = tag(
        "text", f"peak {with_prefix(shown.peak_bytes, 'B')}", class_="halo strong", x=x + aside,
        y=y + (_LINE if is_close else -5), text_anchor="start" if is_left else "end",
    )  # fmt: skip
    return join([dot, label])


def _legend(report: Report, shown: MemoryPicture) -> Markup:
    """Each category with what it holds at the peak."""
    at_peak = report.memory.at_peak
    entries = (
        tag("li", swatch(hatch(category)), f"{category} {with_prefix(at_peak[category], 'B')}")
        for category in shown.areas
    )
    where = report.memory.peak_place and f" at {report.memory.peak_place}"
    peak = f"At the peak of {with_prefix(shown.peak_bytes, 'B')}{where}:"
    return join([tag("p", peak), tag("ul", *entries, class_="legend")])
