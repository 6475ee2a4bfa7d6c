"""The picture of a sweep, for the extra `flopmeter[plot]`: a matplotlib Figure."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from flopmeter.ask.sweep import Sweep
from flopmeter.report.figures import REGIME_LOOKS
from flopmeter.report.plots import new_figure, plain_log_ticks

_MOST_TICKS = 9  # sizes that have room under a panel


def sweep_curve(result: Sweep) -> Any:
    """Time, throughput and memory over the size, each point marked by what bounds it."""
    sizes = [point.size for point in result.points]
    figure = new_figure(12.0, 4.2)
    figure.suptitle(result.title, fontsize=10)
    time, rate, memory = figure.subplots(1, 3)
    _draw_curve(time, result, [point.seconds * 1e3 for point in result.points], "time (ms)")
    time.plot(sizes, [point.host_seconds * 1e3 for point in result.points], "k:", lw=1, label="host")
    time.plot(sizes, [point.busy_seconds * 1e3 for point in result.points], "k--", lw=1, label="device busy")
    time.set_yscale("log")
    plain_log_ticks(time.yaxis)
    _draw_curve(rate, result, [point.items_per_s for point in result.points], f"throughput ({result.unit}/s)")
    rate.set_ylim(0, 1.08 * max(point.items_per_s for point in result.points))
    rate.yaxis.set_major_formatter(import_module("matplotlib.ticker").EngFormatter())
    if result.knee is not None:
        rate.axvline(result.knee, color="black", ls="--", lw=1)
        rate.text(result.knee, 0.02, f" knee: {result.knee}", transform=rate.get_xaxis_transform(), fontsize=8)
    _draw_curve(memory, result, [point.peak_memory_bytes / 1e9 for point in result.points], "peak memory (GB)")
    usable = result.points[0].usable_memory_bytes
    memory.set_yscale("log")  # so that both a small batch and the memory of a large device can be seen
    if usable is not None:
        memory.axhline(usable / 1e9, color="black", ls="-.", lw=1, label="memory of the device")
    plain_log_ticks(memory.yaxis)
    legends = (panel.get_legend_handles_labels() for panel in (time, memory))
    known = {text: handle for legend in legends for handle, text in zip(*legend, strict=True)}
    figure.legend(known.values(), known, loc="outside lower center", ncols=6, fontsize=8, frameon=False)
    return figure


def _draw_curve(panel: Any, result: Sweep, values: Sequence[float], label: str) -> None:
    sizes = [point.size for point in result.points]
    panel.set_xscale("log", base=2)
    panel.plot(sizes, values, color="black", lw=0.8)
    for regime, (colour, marker) in REGIME_LOOKS.items():
        own = [place for place, point in enumerate(result.points) if point.regime == regime]
        panel.plot([sizes[p] for p in own], [values[p] for p in own], marker, ls="", mec="black", mfc=colour, ms=7,
                   label=f"{regime}-bound" if own else None)  # fmt: skip
    every = -(-len(sizes) // _MOST_TICKS)
    panel.set_xticks(sizes[::every], [f"{size:,}" for size in sizes[::every]], fontsize=8, rotation=30)
    panel.minorticks_off()
    panel.set(xlabel=result.over, ylabel=label)
    panel.grid(alpha=0.3)
