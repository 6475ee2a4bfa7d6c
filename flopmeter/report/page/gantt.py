"""Several ranks on one clock as a Gantt chart: a lane for each stream, communication hidden by compute or exposed."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from flopmeter.records import Phase
from flopmeter.report.page.axes import Axis, horizontal, picture
from flopmeter.report.page.marks import swatch
from flopmeter.report.page.markup import Markup, join, tag
from flopmeter.report.quantities import scale, with_prefix
from flopmeter.report.report import Report

Kind = Literal[Phase, "communication, hidden", "communication, exposed"]
FILLS: dict[Kind, str] = {  # of Okabe and Ito
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "recompute": "#CC79A7",
    "optimizer": "#009E73",
    "communication, hidden": "#999999",
    "communication, exposed": "#D55E00",
}
_WIDTH, _LEFT, _RIGHT, _TOP = 960.0, 152.0, 944.0, 8.0
_LANE, _BAR, _STREAM_BAR, _AXIS = 22.0, 18.0, 10.0, 52.0  # pixels: of a lane, of its bars, below all lanes
_FINEST = 2000  # bars of one kind that are closer than the picture's width over this are drawn as one


class Bar(NamedTuple):
    """Seconds on the clock of all ranks."""

    kind: Kind
    start: float
    end: float


class Lane(NamedTuple):
    """What one stream of a rank does."""

    name: str
    is_computing: bool
    bars: list[Bar]


def gantt(reports: Mapping[str, Report]) -> Markup:
    """The chart of ranks by name, whose reports are on one clock, and its legend."""
    end = max((report.seconds for report in reports.values()), default=0.0) or 1.0
    lanes = [lane for name, report in reports.items() for lane in lanes_of(name, report, end / _FINEST)]
    bottom = _TOP + _LANE * len(lanes)
    time = Axis(0, end, _LEFT, _RIGHT)
    divisor, unit = scale([end], "s")
    drawn = picture(
        _WIDTH,
        bottom + _AXIS,
        f"Time of {len(reports)} ranks: what each stream does until {with_prefix(end, 's')}",
        horizontal(time, _TOP, bottom, [f"{tick / divisor:.4g}" for tick in time.ticks], f"time ({unit})"),
        join(_drawn(lane, _TOP + _LANE * place, time) for place, lane in enumerate(lanes)),
    )
    scrolled = tag("div", drawn, class_="scroll wide", tabindex=0, role="region", aria_label="Chart of all ranks")
    found = {bar.kind for lane in lanes for bar in lane.bars}
    return tag("figure", scrolled, tag("figcaption", _legend(kind for kind in FILLS if kind in found)))


def lanes_of(name: str, report: Report, gap: float = 0.0) -> list[Lane]:
    """A lane for each stream, the computing one first. Bars of one kind closer than `gap` seconds become one."""
    streams: dict[int, list[Bar]] = {report.compute_stream: []}
    pairs = list(zip(report.kernels, report.timings, strict=True))
    busy = [
        (timing.start_seconds, timing.end_seconds)
        for _, timing in pairs
        if timing.stream == report.compute_stream and not timing.is_collective
    ]
    for kernel, timing in pairs:
        bars = streams.setdefault(timing.stream, [])
        start, end = timing.start_seconds, timing.end_seconds
        bars += _exposed_and_hidden(start, end, busy) if timing.is_collective else [Bar(kernel.op.phase, start, end)]
    links = {kind for kind in FILLS if kind.startswith("communication")}
    lanes = [Lane(name, True, _joined(streams.pop(report.compute_stream), gap))]
    for number, bars in enumerate(streams.values(), 1):
        what = "communication" if {bar.kind for bar in bars} <= links else "stream"
        lanes.append(Lane(f"{what} {number}", False, _joined(bars, gap)))
    return lanes


def _exposed_and_hidden(start: float, end: float, busy: Sequence[tuple[float, float]]) -> Iterator[Bar]:
    """A collective in parts: hidden where the computing stream is busy. `busy` is in order and does not overlap."""
    place = max(0, bisect_right(busy, (start, start)) - 1)
    while start < end:
        while place < len(busy) and busy[place][1] <= start:
            place += 1
        begins, ends = busy[place] if place < len(busy) else (end, end)
        is_hidden = begins <= start
        until = min(end, ends if is_hidden else begins)
        yield Bar("communication, hidden" if is_hidden else "communication, exposed", start, until)
        start = until


def _joined(bars: Iterable[Bar], gap: float) -> list[Bar]:
    joined: list[Bar] = []
    for bar in bars:
        if joined and joined[-1].kind == bar.kind and bar.start - joined[-1].end <= gap:
            joined[-1] = joined[-1]._replace(end=max(joined[-1].end, bar.end))
        else:
            joined.append(bar)
    return joined


def _drawn(lane: Lane, top: float, time: Axis) -> Markup:
    height = _BAR if lane.is_computing else _STREAM_BAR
    bars = (
        tag(
            "rect", tag("title", f"{bar.kind}, {with_prefix(bar.end - bar.start, 's')}"), x=time.at(bar.start),
            y=top + (_LANE - height) / 2, width=max(0.4, time.at(bar.end) - time.at(bar.start)), height=height,
            fill=FILLS[bar.kind],
        )
        for bar in lane.bars
    )  # fmt: skip
    label = tag(
        "text", lane.name, x=_LEFT - 8, y=top + _LANE / 2 + 4, text_anchor="end",
        class_="strong" if lane.is_computing else "title",
    )  # fmt: skip
    return join([label, *bars])


def _legend(kinds: Iterable[Kind]) -> Markup:
    return tag("ul", *(tag("li", swatch(FILLS[kind]), kind) for kind in kinds), class_="legend")
