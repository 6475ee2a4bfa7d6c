"""Pictures of reports, for the extra `flopmeter[plot]`: every function returns a matplotlib Figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any

from flopmeter.records import OP_CLASSES
from flopmeter.report.figures import (
    CATEGORY_FILLS,
    CLASS_LOOKS,
    LEAST_INTENSITY,
    REGIME_LOOKS,
    Dot,
    MemoryPicture,
    Range,
    Roofline,
    beside,
    longest_dots,
    memory_picture,
    merged,
    modules_to_depth,
    ranges,
    roofline_of,
)
from flopmeter.report.quantities import duration, percent_of, with_prefix
from flopmeter.report.report import Report
from flopmeter.report.rows import By, Row

_KEY_LETTERS = 88  # of a line below a panel
_LARGEST_DOT = 900.0  # points², of a kernel that takes all of the time


class PlotError(ValueError):
    """A picture cannot be drawn: matplotlib is missing, or there is nothing to show."""


def roofline(reports: Report | Sequence[Report]) -> Any:
    """Each kernel as a dot under the roof of its device, sized by its share of the device time; one panel a report.

    Kernels without FLOPs, or hardly any, have no place on the axes; the panel says how much of the time they take.
    """
    several = [reports] if isinstance(reports, Report) else reports
    if not isinstance(several, Sequence) or not all(isinstance(each, Report) for each in several):
        raise TypeError(f"roofline draws a report, as meter.report() gives it, or a list of them, not {reports!r}")
    rooflines = [roofline_of(report) for report in several]
    if not any(each.dots for each in rooflines):
        raise PlotError("no kernel has FLOPs: there is nothing to place under a roofline")
    figure = new_figure(6.4 * len(several), 7.0)
    figure.get_layout_engine().set(wspace=0.04)
    panels = figure.subplots(1, len(several), sharex=True, sharey=True, squeeze=False)[0]
    intensity, rate = ranges(rooflines)
    numbered: list[tuple[list[Dot], list[float]]] = []
    for panel, report, each in zip(panels, several, rooflines, strict=True):
        panel.set(xscale="log", yscale="log", xlim=intensity, ylim=rate)
        heights = _draw_roofs(panel, each, intensity)
        named = longest_dots(merged(each.dots, partial(_pixel, panel)), each.kernel_seconds)
        _draw_dots(panel, each, "\n".join(_key_line(number, dot, each) for number, dot in enumerate(named, 1)))
        panel.set_title(report.headline, fontsize=9, loc="left")
        panel.set_xlabel("arithmetic intensity (FLOP/B)")
        panel.grid(alpha=0.3, which="major")
        numbered.append((named, heights))
    panels[0].set_ylabel("reached (FLOP/s)")
    figure.draw_without_rendering()  # now every dot is where it will be
    for panel, each, (named, heights) in zip(panels, rooflines, numbered, strict=True):
        _number_dots(panel, each, named, heights)
    return figure


def _draw_roofs(panel: Any, shown: Roofline, intensity: Range) -> list[float]:
    """Solid: the datasheet's; dashed: what is sustained. Roofs that leave no room for a text between them share one.
    Returns the heights that have a text."""
    labels: dict[float, str] = {}  # by height
    for roof in (shown.products, shown.vector):
        panel.plot(*zip(*roof.line(*intensity), strict=True), "k-", lw=1.2)
        panel.plot(*zip(*roof.line(*intensity, sustained=True), strict=True), "k--", lw=0.7)
        near = next((height for height in labels if 0.7 < roof.flop_per_s / height < 1.4), None)
        label = f"{roof.dtype} {roof.unit} {roof.flop_per_s / 1e12:g} TFLOP/s"
        labels[near or roof.flop_per_s] = f"{labels[near]}, {label}" if near else label
    for height, label in labels.items():
        panel.text(intensity.high * 0.95, height * 1.06, label, ha="right", va="bottom", fontsize=8)
    bandwidth = shown.products.bytes_per_s
    low, high = intensity.low, shown.vector.flop_per_s / bandwidth
    on_slope = (low * high) ** 0.5  # where no dot is: above the slope, left of it
    panel.annotate(
        f"{bandwidth / 1e9:g} GB/s", (on_slope, on_slope * bandwidth), (-6, 2), textcoords="offset points", ha="right",
        va="bottom", fontsize=8,
    )  # fmt: skip
    return list(labels)


def _pixel(panel: Any, dot: Dot) -> tuple[float, float]:
    x, y = panel.transData.transform((dot.intensity, dot.flop_per_s))
    return float(x), float(y)


def _number_dots(panel: Any, shown: Roofline, named: Sequence[Dot], heights: Sequence[float]) -> None:
    """Writes a number next to each of these dots. `heights`: those of roofs that have a text."""
    per_point = panel.figure.dpi / 72
    points = [_pixel(panel, dot) for dot in named]
    radii = [per_point * (_dot_area(dot.seconds, shown) ** 0.5) / 2 for dot in named]
    right = panel.bbox.x1
    texts = [
        (right - across * per_point, panel.transData.transform((1.0, height))[1] + 6 * per_point)
        for height in heights
        for across in range(0, 130, 8)
    ] + [(x, panel.bbox.y1 + 2 * per_point) for x in range(int(panel.bbox.x0), int(right), 8)]  # not on the title
    for number, (dot, (x, y), (a, b)) in enumerate(
        zip(named, points, beside(points, radii, 12 * per_point, texts), strict=True), 1
    ):
        offset = (a - x) / per_point, (b - y) / per_point
        panel.annotate(
            str(number), (dot.intensity, dot.flop_per_s), offset, textcoords="offset points", ha="center", va="center",
            fontsize=9, fontweight="bold", zorder=5,
            arrowprops={"arrowstyle": "-", "lw": 0.6, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip


def _key_line(number: int, dot: Dot, shown: Roofline) -> str:
    """One line of the key. A fused kernel names every op in it, so the line is cut to the width of a panel."""
    rest = (
        f"{f' ×{dot.calls}' if dot.calls > 1 else ''} in {dot.module}, {100 * dot.seconds / shown.kernel_seconds:.0f} %"
    )
    room = max(24, _KEY_LETTERS - len(rest))
    name = dot.name if len(dot.name) <= room else dot.name[: room - 1] + "…"
    return f"{number}  {name}{rest}"


def _dot_area(seconds: float, shown: Roofline) -> float:
    """The area of a dot, in points²."""
    return 12 + _LARGEST_DOT * seconds / shown.kernel_seconds


def _draw_dots(panel: Any, shown: Roofline, key: str) -> None:
    """`key`: what the numbers in the picture mean."""
    for op_class in sorted({dot.op_class for dot in shown.dots}, key=OP_CLASSES.index):
        colour, marker = CLASS_LOOKS[op_class]
        own = [dot for dot in shown.dots if dot.op_class == op_class]
        share = sum(dot.seconds for dot in own) / shown.kernel_seconds
        panel.scatter(
            [dot.intensity for dot in own],
            [dot.flop_per_s for dot in own],
            s=[_dot_area(dot.seconds, shown) for dot in own],
            c=colour, marker=marker, alpha=0.7, edgecolors="black", linewidths=0.6,
            label=f"{op_class}, {100 * share:.1f} % of the time", zorder=3,
        )  # fmt: skip
    title = (
        f"{key}\n\narea: share of the time · solid: datasheet, dashed: sustained\n"
        f"without a place, under {LEAST_INTENSITY:g} FLOP/B: {100 * shown.unplaced_share:.1f} % of the time"
    )
    legend = panel.legend(
        loc="upper left", bbox_to_anchor=(0, -0.13), ncols=2, fontsize=8, title=title, title_fontsize=8,
        alignment="left", frameon=False, borderpad=0,
    )  # fmt: skip
    for handle in legend.legend_handles:
        handle.set_sizes([40])


def bars(report: Report, by: By = "class", *, most: int = 40) -> Any:
    """The shares of FLOPs and of device time of each row, with its milliseconds and what bounds it. If there are more
    than `most` rows: modules are shown only to the depth that has no more, and of other rows only those that take the
    most time."""
    all_rows = [row for row in report.rows(by) if row.calls or row.flops]
    rows = all_rows if len(all_rows) <= most else _fewer(report, by, most)
    if not rows:
        raise PlotError("the report has no rows")
    figure = new_figure(8.0, 1.4 + 0.38 * len(rows))
    panel = figure.subplots()
    positions = range(len(rows))
    flops = [percent_of(row.flops, report.flops) for row in rows]
    times = [percent_of(row.seconds, report.kernel_seconds) for row in rows]
    by_regime = [REGIME_LOOKS[row.regime].colour for row in rows]
    told = [f"{duration(row.seconds)}, {share:.1f} %, {row.regime}" for row, share in zip(rows, times, strict=True)]
    for offset, shares, label, colour, hatch, texts in (
        (-0.2, flops, "% of FLOPs", "#FFFFFF", "//", [f"{share:.1f} %" for share in flops]),
        (0.2, times, "% of device time", by_regime, "", told),
    ):  # fmt: skip
        ends = [position + offset for position in positions]
        drawn = panel.barh(ends, shares, 0.38, color=colour, edgecolor="black", hatch=hatch, label=label)
        panel.bar_label(drawn, labels=texts, padding=3, fontsize=7)
    panel.set_yticks(list(positions), [_bar_name(row, by) for row in rows], fontsize=8)
    panel.set(xlim=(0, 1.35 * max(*flops, *times, 1.0)), ylim=(len(rows) - 0.4, -0.6), xlabel="%")
    panel.set_xticks([tick for tick in panel.get_xticks() if 0 <= tick <= 100])  # beyond is room for the texts
    left_out = f"\n{len(rows)} of {len(all_rows)} rows" if len(rows) < len(all_rows) else ""
    figure.suptitle(report.headline + left_out, fontsize=9)
    figure.legend(handles=_bar_legend(panel, rows), loc="outside lower right", fontsize=8, ncols=3, frameon=False)
    return figure


def _bar_legend(panel: Any, rows: Sequence[Row]) -> list[Any]:
    """FLOPs, and the device time in a colour for each regime that a row has."""
    flops, _ = panel.containers
    patch = import_module("matplotlib.patches").Patch
    found = [regime for regime in REGIME_LOOKS if any(row.regime == regime for row in rows)]
    times = [
        patch(facecolor=REGIME_LOOKS[regime].colour, edgecolor="black", label=f"% of device time, {regime}-bound")
        for regime in found
    ]
    return [flops, *times]


def _fewer(report: Report, by: By, most: int) -> list[Row]:
    if by == "module":
        return modules_to_depth(report, most)[0]
    return sorted(report.rows(by), key=lambda row: -row.seconds)[:most]


def _bar_name(row: Row, by: By) -> str:
    """The module's path without its root, which all share."""
    return (row.name.partition(".")[2] or row.name) if by == "module" else row.name


def memory_timeline(report: Report) -> Any:
    """What is alive by category, over the wall-clock (in a mode without fusion) and at each op, and the limit."""
    shown = memory_picture(report)
    if shown is None:
        raise PlotError("the program holds no memory on its device")
    across: list[tuple[str, Sequence[float]]] = [("op", range(shown.steps))]
    if shown.starts is not None:
        across.insert(0, ("time (ms)", [1e3 * second for second in shown.starts]))
    figure = new_figure(2.0 + 5.0 * len(across), 4.4)
    panels = figure.subplots(1, len(across), sharey=True, squeeze=False)[0]
    for panel, (label, places) in zip(panels, across, strict=True):
        _draw_memory(panel, shown, places, label)
    panels[0].set_ylabel("alive (GB)")
    figure.suptitle(report.headline, fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=7, frameon=False)
    return figure


def _draw_memory(panel: Any, shown: MemoryPicture, places: Sequence[float], label: str) -> None:
    """`places`: the horizontal position of each step."""
    areas = panel.stackplot(
        places, [[nbytes / 1e9 for nbytes in alive] for alive in shown.areas.values()],
        labels=list(shown.areas), colors=[CATEGORY_FILLS[name].colour for name in shown.areas], edgecolor="black",
        linewidth=0.3, step="post",
    )  # fmt: skip
    for area, name in zip(areas, shown.areas, strict=True):
        area.set_hatch(CATEGORY_FILLS[name].hatch)
    if shown.limit_bytes is not None:
        panel.axhline(shown.limit_bytes / 1e9, color="black", ls="--", lw=1, label="memory of the device")
    for phase, step in shown.phases:
        panel.axvline(places[step], color="black", lw=0.5)
        panel.text(places[step], 1.01, f" {phase}", transform=panel.get_xaxis_transform(), fontsize=8)
    at = places[shown.peak_step], shown.peak_bytes / 1e9
    is_left = at[0] < places[-1] / 2
    panel.plot(*at, "o", mfc="none", mec="black", ms=6)
    panel.annotate(
        f"peak {with_prefix(shown.peak_bytes, 'B')}", at, (8 if is_left else -8, 4), textcoords="offset points",
        ha="left" if is_left else "right", fontsize=8, fontweight="bold",
    )  # fmt: skip
    panel.margins(y=0.12)
    panel.set(xlabel=label, xlim=(0, places[-1] or 1), ylim=(0, None))


PICTURES: dict[str, Callable[[Report], Any]] = {
    "roofline": lambda report: roofline([report, report.compiled] if report.compiled else report),
    "classes": bars,
    "modules": lambda report: bars(report, "module"),
    "ops": lambda report: bars(report, "op"),
    "memory": memory_timeline,
}


def save(figure: Any, path: str) -> None:
    """Write a picture; the ending of the path says as what. Raises PlotError for one that matplotlib cannot write."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise PlotError(f"{path} cannot be written: {error}") from error


def new_figure(width_inches: float, height_inches: float) -> Any:
    """A figure of its own: nothing of pyplot's global state is touched."""
    try:
        figures = import_module("matplotlib.figure")
    except ImportError as error:
        raise PlotError("pictures need matplotlib: pip install 'flopmeter[plot]'") from error
    return figures.Figure(figsize=(width_inches, height_inches), layout="constrained", dpi=150)


def plain_log_ticks(axis: Any) -> None:
    """Figures instead of powers of ten, and 2 and 5 times these where an axis spans few."""
    tickers = import_module("matplotlib.ticker")
    low, high = axis.get_view_interval()
    steps = (1.0,) if high / low > 1e4 else (1.0, 2.0, 5.0)
    axis.set_major_locator(tickers.LogLocator(base=10, subs=steps))
    axis.set_major_formatter(tickers.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(tickers.NullLocator())
