"""The picture of serving: latency over throughput, a curve for each device. For the extra `flopmeter[plot]`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from flopmeter.ask.serve.rows import Serving, ServingRow
from flopmeter.report.plots import PlotError, new_figure, plain_log_ticks

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito
_ROOM = 0.1  # of the highest rate
_MARKERS = "osD^vP*X"


def serving_curves(result: Serving) -> Any:
    """Time per token and time to the first one over tokens per second and GPU; each point is a number of requests at a
    time. A star is the point that the table has, a dashed line a latency that was asked for."""
    tickers = import_module("matplotlib.ticker")
    if not result.rows:
        raise PlotError("no device can serve the model: there is nothing to draw")
    figure = new_figure(11.0, 4.6)
    figure.suptitle(result.title, fontsize=9)
    shown = [("tpot", "time per output token"), ("ttft", "time to first token")]
    if result.rows[0].points[0].tpot_seconds is None:
        del shown[0]
    panels = figure.subplots(1, len(shown), squeeze=False)[0]
    fastest = max(point.tokens_per_s_per_gpu for row in result.rows for point in row.points)
    for panel, (name, label) in zip(panels, shown, strict=True):
        for place, row in enumerate(result.rows):
            _draw_curve(panel, row, f"{name}_seconds", place, fastest)
        if name in result.slo:
            panel.axhline(result.slo[name] * 1e3, color="black", ls="--", lw=1)
        panel.set(xlabel="tokens/s per GPU", ylabel=f"{label} (ms)", yscale="log")
        panel.set_xlim(0, 1.1 * fastest)
        panel.xaxis.set_major_formatter(tickers.EngFormatter())
        plain_log_ticks(panel.yaxis)
        panel.grid(alpha=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=5, fontsize=8, frameon=False, title_fontsize=8,
        title="numbers: requests at a time · star: what the table has",
    )  # fmt: skip
    return figure


def _draw_curve(panel: Any, row: ServingRow, latency: str, place: int, fastest: float) -> None:
    """The points of one device. `latency` names a field of ServingPoint."""
    colour, marker = _COLOURS[place % len(_COLOURS)], _MARKERS[place % len(_MARKERS)]
    rates = [point.tokens_per_s_per_gpu for point in row.points]
    milliseconds = [getattr(point, latency) * 1e3 for point in row.points]
    panel.plot(rates, milliseconds, color=colour, marker=marker, ms=4, lw=1.2, label=row.hardware)
    for point, rate, ms in zip(row.points, rates, milliseconds, strict=True):
        if rate >= _ROOM * fastest:  # left of it points are too close for numbers
            panel.annotate(str(point.batch), (rate, ms), (4, -8), textcoords="offset points", fontsize=7, color=colour)
    if row.best is not None:
        best = getattr(row.best, latency) * 1e3
        panel.plot([row.best.tokens_per_s_per_gpu], [best], color=colour, marker="*", ms=12, mec="black")
