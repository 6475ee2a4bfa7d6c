"""The picture of a plan, for the extra `flopmeter[plot]`: a matplotlib Figure."""

from __future__ import annotations

from typing import Any, get_args

from flopmeter.ask.plan.compose import Bound
from flopmeter.ask.plan.rows import ParallelPlan
from flopmeter.report.figures import REGIME_LOOKS
from flopmeter.report.plots import PlotError, new_figure
from flopmeter.report.quantities import duration, in_gb, percent

COLOURS = {bound: look.colour for bound, look in REGIME_LOOKS.items()} | {"bubble": "#FFFFFF", "delays": "#FFFFFF"}
HATCHES = {"bubble": "//", "delays": ".."}


def split_bars(found: ParallelPlan) -> Any:
    """Each split as a bar as long as its step, parted by what the rank with the most to do does or waits for."""
    if not found.rows:
        raise PlotError("the plan has no splits to draw")
    drawn = new_figure(10.0, 1.6 + 0.42 * len(found.rows))
    panel = drawn.subplots()
    places, ends = range(len(found.rows)), [0.0] * len(found.rows)
    for bound in get_args(Bound):
        lengths = [row.share(bound) * row.seconds * 1e3 for row in found.rows]
        if not any(lengths):
            continue
        hatch = HATCHES.get(bound, "")
        bars = panel.barh(places, lengths, 0.7, ends, color=COLOURS[bound], edgecolor="black", hatch=hatch, label=bound)
        ends = [end + length for end, length in zip(ends, lengths, strict=True)]
    told = [
        f"{duration(row.seconds)}, MFU {percent(row.mfu)} %, {in_gb(row.peak_memory_bytes)} GB"
        + (" (does not fit)" if row.fits is False else "")
        for row in found.rows
    ]
    panel.bar_label(bars, labels=told, padding=4, fontsize=8)
    names = [f"{row.split.name}\n{row.passes}" for row in found.rows]
    panel.set_yticks(list(places), names, fontsize=7)
    panel.set(xlim=(0, 1.45 * max(ends)), ylim=(len(found.rows) - 0.4, -0.6), xlabel="step (ms)")
    drawn.suptitle(found.title, fontsize=9)
    handles, labels = panel.get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return drawn
