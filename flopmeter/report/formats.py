"""Report formats: a function under `@draws(FORMATS, name)` makes text of a report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from tabulate import tabulate

from flopmeter.records import CONTRACTION, ELEMENTWISE, NORMALIZATION, CompiledGraph
from flopmeter.report.columns import IN_TEXT, RAW_NAMES, ReportColumn, raw, share_of
from flopmeter.report.compilation import in_short
from flopmeter.report.drawers import FORMATS, draws
from flopmeter.report.fitting import ways_to_fit
from flopmeter.report.page import page
from flopmeter.report.quantities import HOW_ATTENTION_COUNTS, duration, figure, percent, percent_of, with_prefix
from flopmeter.report.report import Report
from flopmeter.report.rows import By, Row
from flopmeter.report.tables import Table, as_csv, grid
from flopmeter.report.winning import cautions, in_lines, where_to_win
from flopmeter.timing.peak_memory import CONTEXT_BYTES, usable_bytes

SYMBOLS = {CONTRACTION: "△", NORMALIZATION: "□", ELEMENTWISE: "○"}  # as in the paper's table
JSON_SCHEMA_VERSION = 1
GIGA = 1e9
_POWERS = {"G": GIGA, "M": 1e6, "k": 1e3}
LEAST_SHARE = 1e-3  # of the peak memory that is named
LEAST_SHOWN = 0.1  # of a unit: the largest figure of a column with two digits after the point is at least this


def table(report: Report, rows: list[Row], name: str, tablefmt: str = "simple", *, indent: bool = False) -> str:
    """Rows as a table whose first column is headed `name`; `indent` shows dotted paths as a tree."""
    columns = [_in_fitting_unit(column, rows) for column in IN_TEXT]
    cells = [(_label(row, indent), *(_cell(column, report, row) for column in columns)) for row in rows]
    return tabulate(
        cells,
        headers=(name, *(column.heading for column in columns)),
        tablefmt=tablefmt,
        floatfmt=("", *(column.digits for column in columns)),
        colalign=("left", *["right"] * (len(columns) - 1), "left"),
        preserve_whitespace=True,
    )


def _in_fitting_unit(column: ReportColumn, rows: Sequence[Row]) -> ReportColumn:
    """The column in mega or kilo where the whole table has less than a tenth of a giga. What is read and what is
    written have one unit."""
    if column.scale != GIGA:
        return column
    alike = [other for other in IN_TEXT if (other.unit, other.scale) == (column.unit, GIGA)]
    most = max((other.value(row) for other in alike for row in rows), default=GIGA)
    power = next((power for power in ("G", "M") if most >= LEAST_SHOWN * _POWERS[power]), "k")
    return column._replace(heading=column.heading.replace("G", power), scale=_POWERS[power])


def _label(row: Row, indent: bool) -> str:
    if indent:
        *parents, own = row.name.split(".")
        return "  " * len(parents) + own
    symbol = SYMBOLS.get(row.name)
    return f"{symbol} {row.name}" if symbol else row.name


def _cell(column: ReportColumn, report: Report, row: Row) -> Any:
    if column.whole:
        return share_of(column, row, report)
    value = column.value(row)
    return value if column.scale == 1 else value / column.scale


def _laid_out(
    report: Report, tables: Iterable[str], *, title: str = "", first: Sequence[str] = (), markdown: bool = False
) -> str:
    """A report as text: its head, the answer, the tables, and the small print. `title` goes above the head, lines of
    `first` above the answer."""
    heads = [f"**{line}**" if markdown else line for line in (title, report.headline) if line]
    parts = ([*first, *answer(report), *in_lines(where_to_win(report))], small_print(report))
    # An indented line continues the item of a Markdown list that is above it.
    above, below = (
        "\n".join(f"- {line}" if markdown and line[:1] != " " else line for line in lines) for lines in parts
    )
    return "\n\n".join(("\n".join(heads), above, *tables, below))


def answer(report: Report) -> list[str]:
    """What is asked first: the time, what bounds it, and whether it fits into memory."""
    streams = " on all streams" if report.kernel_seconds > 1.01 * report.seconds else ""  # more than the wall-clock
    return [
        f"predicted {duration(report.seconds)} ({duration(report.seconds_low)} to {duration(report.seconds_high)})"
        f" · device busy {duration(report.kernel_seconds)}{streams}, host {duration(report.launch_seconds)},"
        f" idle {percent_of(report.idle_seconds, report.seconds):.0f} %"
        f" · {report.flops / report.seconds / 1e12 if report.seconds else 0:.1f} TFLOP/s,"
        f" MFU {report.mfu_in_words}"
        f" · peak memory {with_prefix(report.peak_memory_bytes, 'B')}",
        f"{report.regime}-bound · of the wall-clock: {_shares(report)}",
        *cautions(report),
        _memory(report),
        *filter(None, [ways_to_fit(report)]),
    ]


def small_print(report: Report) -> list[str]:
    """What the answer rests on: power, links, how sure the times are, conventions, assumptions, and what ran."""
    device = report.hardware
    peak = device.contraction_peak(report.main_dtype)
    uncounted = ", ".join(f"{row.name} ({row.calls})" for row in report.uncounted) or "none"
    switches = report.switches
    return [
        _power(report),
        *_communication(report),
        _band(report),
        f"ridge point {device.ridge_point(report.main_dtype):.0f} FLOP/B"
        f" ({peak.flop_per_s / 1e12:g} TFLOP/s {report.main_dtype} {peak.unit},"
        f" {device.bandwidth_bytes_per_s / 1e9:g} GB/s) · uncounted: {uncounted}"
        + " · assumed: nothing"
        * (not report.assumptions),
        *(f"assumed: {text}" for text in report.assumptions),
        f"multiply-add = 2 FLOP · attention counted {HOW_ATTENTION_COUNTS[report.causal]}"
        + ", with masked blocks, which do not run" * _counts_masked_blocks(report)
        + f" · TF32 is {'on' if switches.matmul_tf32 else 'off'} for fp32 matmuls,"
        f" {'on' if switches.cudnn_tf32 else 'off'} for fp32 convolutions and RNNs",
        *in_short(report.graphs),
        "bound by: most of the row's device time; overhead is launch and drain of kernels too small for the device"
        + "; functions such as exp and erf are compute, each of many instructions" * _has_functions(report),
        *report.notes,
        report.ran.line,
    ]


def _counts_masked_blocks(report: Report) -> bool:
    """Whether the TFLOP/s of a row can exceed the peak."""
    return report.causal == "full" and any(cost.masked_flops for _, cost, *_ in report.kernels)


def _has_functions(report: Report) -> bool:
    """Whether kernels count as compute although they have few FLOPs for their bytes."""
    device = report.hardware
    return any(
        timing.is_compute and 2 * cost.flops < cost.bytes * device.ridge_point(cost.dtype)
        for (_, cost, *_), timing in zip(report.kernels, report.timings, strict=True)
        if cost.transcendentals and not cost.macs
    )


def _shares(report: Report) -> str:
    shares = report.seconds_by_regime.items()
    return ", ".join(f"{name} {percent_of(seconds, report.seconds):.0f} %" for name, seconds in shares)


def _power(report: Report) -> str:
    """The power that the device draws, and the clock at which that lets it run."""
    clock = report.clock
    at = "boost" if clock.ratio == 1 else f"{percent(clock.ratio)} % of boost"
    if report.watts is None or report.joules is None:
        return f"power unknown (the profile has no limit) · {clock.clocks} clocks: {at}"
    return (
        f"power {report.watts:.0f} of {clock.limit_watts:g} W on average, {with_prefix(report.joules, 'J')}"
        f"{_energy_price(report)} · {clock.clocks} clocks: {at}"
    )


def _energy_price(report: Report) -> str:
    """The price of energy for a million runs: that of one is too small to read."""
    if report.energy_dollars is None:
        return ""
    return f", ${figure(1e6 * report.energy_dollars)} of energy for a million runs at ${report.dollars_per_kwh:g} a kWh"


def _communication(report: Report) -> list[str]:
    """The collectives of a program of many ranks."""
    if report.cluster is None:
        return []
    count = sum(kernel.cost.collective is not None for kernel in report.kernels)
    seconds, exposed = report.communication_seconds, report.exposed_seconds
    waits = "of it exposed" if exposed <= seconds else "in which nothing computes, waits for other ranks included"
    return [
        f"communication {duration(seconds)} in {count} collectives over {report.cluster.title}, "
        f"{duration(exposed)} {waits}"
    ]


def _band(report: Report) -> str:
    """Where the band of the prediction comes from."""
    known = report.uncertainty
    seconds = dict.fromkeys((*known.validated, *known.transferred, *known.extrapolated), 0.0)
    for timing in report.timings:
        seconds[timing.kernel_class] += timing.seconds
    here, elsewhere, nowhere = (
        sum(percent_of(seconds[name], report.kernel_seconds) for name in names)
        for names in (known.validated, known.transferred, known.extrapolated)
    )
    extrapolated = f" ({'; '.join(known.extrapolated)})" if known.extrapolated else ""
    return (
        f"device time in kernel classes validated on this device {here:.0f} %, on other devices {elsewhere:.0f} %,"
        f" on none {nowhere:.0f} %{extrapolated}"
    )


def _memory(report: Report) -> str:
    """Whether it fits, what the peak is made of, and where it is."""
    memory, device = report.memory, report.hardware
    verdict = "memory of the device unknown"
    if device.memory_bytes is not None:
        fits = "fits" if memory.fits(device) else "does NOT fit"
        verdict = (
            f"{fits} {device.title}: {usable_bytes(device) / 1e9:.1f} of {device.memory_bytes / 1e9:.1f} GB usable"
            f" ({CONTEXT_BYTES / 1e9:.1f} assumed for the process)"
        )
    parts = [(name, nbytes) for name, nbytes in memory.at_peak.items() if nbytes > LEAST_SHARE * memory.peak_bytes]
    made_of = ", ".join(f"{name} {with_prefix(nbytes, 'B')}" for name, nbytes in parts)
    if memory.steady_peak_bytes > memory.peak_bytes:
        verdict += f", {with_prefix(memory.steady_peak_bytes, 'B')} from the second step on"
    at = memory.peak_place and f" · at {memory.peak_place}"
    counted = f" · {with_prefix(memory.allocated_bytes, 'B')} by torch.cuda.max_memory_allocated()"
    return f"{verdict} · at the peak: {made_of or 'nothing'}{at}{counted if report.kernels else ''}"


def grouped(
    report: Report,
    format: str,
    by: By = "class",
    more: Iterable[Table] = (),
    *,
    title: str = "",
    first: Sequence[str] = (),
) -> str:
    """The report with a row for each `by` (see Report.rows); json and html hold every grouping anyway. In text and
    markdown the tables `more` follow; `title` and `first` are those of `_laid_out`. Raises ValueError for another
    format."""
    rows, is_markdown = report.rows(by), format == "markdown"
    if format == "csv":
        return _csv_of(report, rows)
    if format not in ("text", "markdown"):
        return report.render(format)
    style = "github" if is_markdown else "simple"
    own = table(report, rows, by, style, indent=by == "module")
    tables = [own, *(grid(each, style) for each in more)]
    return _laid_out(report, tables, title=title, first=first, markdown=is_markdown)


for _format in ("text", "markdown", "csv"):
    FORMATS[_format] = partial(grouped, format=_format)


def _csv_of(report: Report, rows: Iterable[Row]) -> str:
    """Each row says what ran as well, so that rows of several reports can stand in one file."""
    facts = {"mode": report.mode, **report.ran.flat()}
    return as_csv((*RAW_NAMES, *facts), ({**raw(row), **facts} for row in rows))


TOTALS = (
    "flops", "model_flops", "executed_flops", "macs", "bytes_read", "bytes_written", "seconds", "seconds_low",
    "seconds_high", "kernel_seconds", "launch_seconds", "peak_memory_bytes", "mfu", "visible_mfu", "hfu", "regime",
    "joules", "watts", "clocks", "energy_dollars", "later_step_seconds",
)  # fmt: skip


def as_dict(report: Report) -> dict[str, Any]:
    """Everything but the kernels themselves, in plain types and SI units."""
    return {
        "schema_version": JSON_SCHEMA_VERSION,
        "title": report.headline,
        "hardware": report.hardware.name,
        "mode": report.mode,
        "ran": report.ran.as_dict(),
        "totals": {name: getattr(report, name) for name in TOTALS},
        "advice": [advice._asdict() for advice in report.advice],
        "hot_spots": [spot._asdict() for spot in report.hot_spots],
        "rows": {by: [raw(row) for row in report.rows(by)] for by in ("class", "op", "module", "phase")},
        "memory": {
            "steady_peak_bytes": report.memory.steady_peak_bytes,
            "allocated_bytes": report.memory.allocated_bytes,
            "bytes_at_peak": dict(report.memory.at_peak),
        },
        "uncounted": [raw(row) for row in report.uncounted],
        "assumptions": list(report.assumptions),
        "caution": report.caution,
        "to_make_it_fit": ways_to_fit(report),
        "conventions": {"flops_per_multiply_add": 2, "causal": report.causal, **report.switches._asdict()},
        "notes": list(report.notes),
        "graphs": [_graph_as_dict(graph) for graph in report.graphs],
    }


_OF_KERNELS = ("name", "kind", "bytes_read", "bytes_written", "flops")


def _graph_as_dict(graph: CompiledGraph) -> dict[str, Any]:
    return {
        "function": graph.function,
        "part": graph.part,
        "calls": graph.calls,
        "kernels": [{name: getattr(kernel, name) for name in _OF_KERNELS} for kernel in graph.kernels],
        "breaks": [each._asdict() for each in graph.breaks],
        "recompiled_because": graph.recompiled_because,
    }


@draws(FORMATS, "json")
def _json(report: Report) -> str:
    return json.dumps(as_dict(report), indent=2, ensure_ascii=False)


@draws(FORMATS, "html")
def _html(report: Report) -> str:
    return page(report, [*answer(report), *small_print(report)])
