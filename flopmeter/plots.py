"""Pictures of reports and sweeps, for the extra `flopmeter[plot]`: every function returns a matplotlib Figure.

Classes differ by marker or hatching as well as by colour, so
that a picture can be read in black and white.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

from flopmeter.memory import usable_bytes
from flopmeter.records import (
    ATTENTION,
    CONTRACTION,
    ELEMENTWISE,
    INDEXING,
    MOVEMENT,
    NORMALIZATION,
    OP_CLASSES,
    REDUCTION,
    Cost,
    Regime,
)
from flopmeter.render import headline
from flopmeter.report import By, Report, Row
from flopmeter.sweep import Sweep

# Okabe and Ito's colours, which the colour-blind can tell apart; markers as in the paper's table where it has any.
_STYLES = {
    CONTRACTION: ("#0072B2", "^"), NORMALIZATION: ("#D55E00", "s"), ELEMENTWISE: ("#009E73", "o"),
    ATTENTION: ("#CC79A7", "D"), REDUCTION: ("#E69F00", "v"), MOVEMENT: ("#56B4E9", ">"), INDEXING: ("#F0E442", "<"),
}  # fmt: skip
_OTHER = ("#888888", "X")
_REGIME_MARKS: dict[Regime, str] = {"compute": "^", "memory": "s", "overhead": "o"}
_HATCHES = ("", "//", "..", "xx", "\\\\", "++")
SPAN = (1e-2, 1e5)  # FLOP/B that a roofline shows: a large copy with a scalar's work lies below, nothing above
_LARGEST_DOT = 900.0  # points², of a kernel that takes all of the time


class PlotError(ValueError):
    """A picture cannot be drawn: matplotlib is missing, or there is nothing to show."""


class _Dot(NamedTuple):
    """All kernels of one cost: what one of them reaches, and the time of all."""

    op_class: str
    intensity: float  # FLOP/B
    flop_per_s: float
    seconds: float


def roofline(reports: Report | Sequence[Report]) -> Any:
    """Each kernel as a dot under the roof of its device, sized by its share of the device time; one panel a report.

    Kernels without FLOPs, or hardly any, have no place on the axes; the panel says how much of the time they take.
    """
    several = [reports] if isinstance(reports, Report) else list(reports)
    if not any(_dots(report) for report in several):
        raise PlotError("no kernel has FLOPs: there is nothing to place under a roofline")
    figure = _figure(6.4 * len(several), 5.0)
    panels = figure.subplots(1, len(several), sharex=True, sharey=True, squeeze=False)[0]
    for panel, report in zip(panels, several, strict=True):
        _draw_roof(panel, report)
        _draw_dots(panel, report)
        panel.set_title(headline(report), fontsize=9, loc="left")
        panel.set_xlabel("arithmetic intensity (FLOP/B)")
        panel.grid(alpha=0.3, which="major")
    panels[0].set_ylabel("achieved (FLOP/s)")
    panels[0].set_ylim(top=panels[0].get_ylim()[1] * 1e3)  # room for the legend, above the slope
    return figure


def _draw_roof(panel: Any, report: Report) -> None:
    """The memory slope, the peak of the program's products and that of the vector units; dashed: what is sustained."""
    device = report.hardware
    bandwidth, sustained = device.bandwidth_bytes_per_s, device.sustained_bandwidth_bytes_per_s
    left, right = SPAN
    panel.set(xscale="log", yscale="log", xlim=SPAN)
    for name, peak in (
        (f"{report.main_dtype} products", device.contraction_peak(report.main_dtype)),
        ("fp32 vector", device.vector_peak("fp32")),
    ):
        _draw_line(panel, peak.flop_per_s, bandwidth, "k-", 1.2)
        _draw_line(panel, peak.sustained_flop_per_s, sustained, "k--", 0.7)
        label = f"{name} {peak.flop_per_s / 1e12:g} TFLOP/s"
        panel.text(right * 0.8, peak.flop_per_s * 1.06, label, ha="right", va="bottom", fontsize=8)
    panel.text(3 * left, 5 * left * bandwidth, f"{bandwidth / 1e9:g} GB/s", rotation=38, fontsize=8)


def _draw_line(panel: Any, flop_per_s: float, bytes_per_s: float, style: str, width_points: float) -> None:
    """Up the memory slope to the ridge point, then level."""
    left, right = SPAN
    panel.plot(
        [left, flop_per_s / bytes_per_s, right], [left * bytes_per_s, flop_per_s, flop_per_s], style, lw=width_points
    )


def _draw_dots(panel: Any, report: Report) -> None:
    dots = _dots(report)
    for op_class in sorted({dot.op_class for dot in dots}, key=OP_CLASSES.index):
        colour, marker = _STYLES.get(op_class, _OTHER)
        own = [dot for dot in dots if dot.op_class == op_class]
        share = sum(dot.seconds for dot in own) / report.kernel_seconds
        panel.scatter(
            [dot.intensity for dot in own],
            [dot.flop_per_s for dot in own],
            s=[12 + _LARGEST_DOT * dot.seconds / report.kernel_seconds for dot in own],
            c=colour, marker=marker, alpha=0.7, edgecolors="black", linewidths=0.6,
            label=f"{op_class}, {share:.0%} of the time", zorder=3,
        )  # fmt: skip
    without = 1 - sum(dot.seconds for dot in dots) / report.kernel_seconds
    title = f"not shown, under {SPAN[0]:g} FLOP/B: {without:.0%} of the time\nsolid: datasheet; dashed: sustained"
    legend = panel.legend(loc="upper left", fontsize=8, title=title, title_fontsize=8)
    for handle in legend.legend_handles:
        handle.set_sizes([40])


def _dots(report: Report) -> list[_Dot]:
    seconds: dict[Cost, float] = {}
    calls: dict[Cost, int] = {}
    for kernel, timing in zip(report.kernels, report.timings, strict=True):
        seconds[kernel.cost] = seconds.get(kernel.cost, 0.0) + timing.seconds
        calls[kernel.cost] = calls.get(kernel.cost, 0) + 1
    return [
        _Dot(cost.op_class, cost.flops / cost.bytes, cost.flops * calls[cost] / spent, spent)
        for cost, spent in seconds.items()
        if cost.bytes and cost.flops >= SPAN[0] * cost.bytes
    ]


def bars(report: Report, by: By = "class", *, most: int = 20) -> Any:
    """The shares of FLOPs and of device time of each row, at most `most` rows."""
    rows = [row for row in report.rows(by) if row.calls or row.flops][:most]
    if not rows:
        raise PlotError("the report has no rows")
    figure = _figure(8.0, 1.6 + 0.45 * len(rows))
    panel = figure.subplots()
    places = range(len(rows))
    flops = [100 * row.flops / report.flops if report.flops else 0.0 for row in rows]
    times = [100 * row.seconds / report.kernel_seconds for row in rows]
    for offset, shares, label, colour, hatch in (
        (-0.2, flops, "% of FLOPs", "#FFFFFF", "//"), (0.2, times, "% of device time", "#0072B2", ""),
    ):  # fmt: skip
        drawn = panel.barh(
            [place + offset for place in places],
            shares,
            0.38,
            color=colour,
            edgecolor="black",
            hatch=hatch,
            label=label,
        )
        panel.bar_label(drawn, fmt="%.1f", padding=3, fontsize=8)
    panel.set_yticks(list(places), [_bar_name(row, by) for row in rows])
    panel.invert_yaxis()
    panel.set(xlim=(0, 112), xlabel="%")
    figure.suptitle(headline(report), fontsize=9)
    panel.legend(loc="lower right", fontsize=8)
    return figure


def _bar_name(row: Row, by: By) -> str:
    *parents, own = row.name.split(".") if by == "module" else [row.name]
    return "   " * len(parents) + own


def sweep_curve(result: Sweep) -> Any:
    """Time, throughput and memory over the size, each point marked by what bounds it."""
    sizes = [point.size for point in result.points]
    figure = _figure(12.0, 4.2)
    figure.suptitle(result.title, fontsize=10)
    time, rate, memory = figure.subplots(1, 3)
    _draw_curve(time, result, [point.seconds * 1e3 for point in result.points], "time (ms)")
    time.plot(sizes, [point.host_seconds * 1e3 for point in result.points], "k:", lw=1, label="host")
    time.plot(sizes, [point.busy_seconds * 1e3 for point in result.points], "k--", lw=1, label="device busy")
    time.set_yscale("log")
    time.legend(fontsize=8)
    _draw_curve(rate, result, [point.items_per_s for point in result.points], f"throughput ({result.unit}/s)")
    rate.set_ylim(bottom=0)
    if result.knee is not None:
        rate.axvline(result.knee, color="black", ls="--", lw=1)
        rate.text(result.knee, 0.02, f" knee: {result.knee}", transform=rate.get_xaxis_transform(), fontsize=8)
    _draw_curve(memory, result, [point.peak_memory_bytes / 1e9 for point in result.points], "peak memory (GB)")
    usable = result.points[0].usable_memory_bytes
    if usable is not None:
        memory.axhline(usable / 1e9, color="black", ls="--", lw=1, label="what the device has")
    memory.set_ylim(bottom=0)
    memory.legend(fontsize=8, loc="center left")
    return figure


def _draw_curve(panel: Any, result: Sweep, values: Sequence[float], label: str) -> None:
    sizes = [point.size for point in result.points]
    panel.set_xscale("log", base=2)
    panel.plot(sizes, values, color="#0072B2", lw=1.2)
    for regime, marker in _REGIME_MARKS.items():
        own = [place for place, point in enumerate(result.points) if point.regime == regime]
        panel.plot([sizes[p] for p in own], [values[p] for p in own], marker, ls="", mec="black", mfc="#0072B2",
                   label=f"{regime}-bound" if own else None)  # fmt: skip
    panel.set_xticks(sizes, [str(size) for size in sizes], fontsize=8, rotation=45 if len(sizes) > 8 else 0)
    panel.minorticks_off()
    panel.set(xlabel=result.over, ylabel=label)
    panel.grid(alpha=0.3)


def memory_timeline(report: Report) -> Any:
    """What is alive at each op, by category, and what the device has."""
    timeline = {name: list(alive) for name, alive in report.memory.timeline.items() if any(alive)}
    if not timeline:
        raise PlotError("the program holds no memory on its device")
    figure = _figure(8.0, 4.2)
    panel = figure.subplots()
    steps = range(len(next(iter(timeline.values()))))
    colours = [colour for colour, _ in _STYLES.values()]
    areas = panel.stackplot(
        steps, [[nbytes / 1e9 for nbytes in alive] for alive in timeline.values()],
        labels=list(timeline), colors=colours, edgecolor="black", linewidth=0.3, step="post",
    )  # fmt: skip
    for area, hatch in zip(areas, _HATCHES, strict=False):
        area.set_hatch(hatch)
    if report.hardware.memory_bytes is not None:
        usable = usable_bytes(report.hardware) / 1e9
        if usable < 3 * report.peak_memory_bytes / 1e9:  # else the program would be a thin line at the bottom
            panel.axhline(usable, color="black", ls="--", lw=1, label="what the device has")
    for name, place in _phase_starts(report):
        panel.axvline(place, color="black", lw=0.5)
        panel.text(place, 1.01, f" {name}", transform=panel.get_xaxis_transform(), fontsize=8)
    panel.set(xlabel="op", ylabel="alive (GB)", xlim=(0, max(1, len(steps) - 1)))
    panel.set_title(headline(report), fontsize=9, pad=16)
    panel.legend(loc="upper left", fontsize=8)
    return figure


def _phase_starts(report: Report) -> list[tuple[str, int]]:
    phases: list[str] = [op.phase for op in report.memory.trace.ops[: report.memory.steps]]
    starts = [(after, place + 1) for place, (before, after) in enumerate(pairwise(phases)) if before != after]
    starts = [(phases[0], 0), *starts] if phases else []
    return starts if len(starts) <= 6 else []  # checkpointing alternates between phases too often to label


def save(figure: Any, path: str) -> None:
    """Write a picture; the ending of the path says as what. Raises PlotError for one that matplotlib cannot write."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise PlotError(f"{path} cannot be written: {error}") from error


def _figure(width_inches: float, height_inches: float) -> Any:
    """A figure of its own: nothing of pyplot's global state is touched."""
    try:
        figures = import_module("matplotlib.figure")
    except ImportError as error:
        raise PlotError("pictures need matplotlib: pip install 'flopmeter[plot]'") from error
    return figures.Figure(figsize=(width_inches, height_inches), layout="constrained", dpi=150)
