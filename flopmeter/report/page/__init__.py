"""The report as one HTML page that needs nothing else: no network, no script to be read, one to sort its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files

from flopmeter.report.figures import modules_to_depth, roofline_of
from flopmeter.report.page.marks import colours, definitions
from flopmeter.report.page.markup import Markup, join, tag
from flopmeter.report.page.memory import memory_timeline
from flopmeter.report.page.roofline import axes_for, draw_roofline
from flopmeter.report.page.tables import rows_table
from flopmeter.report.quantities import percent_of, with_prefix
from flopmeter.report.report import By, Report
from flopmeter.report.winning import where_to_win
from flopmeter.timing.peak_memory import usable_bytes

MOST_MODULES, MOST_ROWS = 2000, 300  # in a table: beyond that nobody reads, and the page grows

# Nothing may be fetched, whatever a name in the report looks like.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(report: Report, title: str, lines: Sequence[str]) -> str:
    """The whole document. `title` and `lines` are what the text report has above and below its table."""
    body = tag(
        "main",
        definitions(),
        _header(report, title),
        _section("Where to win", *_where_to_win(report)),
        _section("What the time goes to", _regimes(report), rows_table(report, report.rows(), "class")),
        _section("Roofline", *_rooflines(report)),
        _section("Memory", memory_timeline(report)),
        _section("Phases", rows_table(report, report.rows("phase"), "phase")),
        _modules(report),
        _longest(report, "Ops", "op"),
        _longest(report, "Kernels", "kernel"),
        _section("Conventions, assumptions and notes", tag("ul", *(tag("li", line) for line in lines), class_="notes")),
    )
    head = join(
        [
            Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
            Markup('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
            tag("title", title),
            Markup(f"<style>{_asset('page.css')}{colours()}</style>"),
        ]
    )
    script = Markup(f"<script>{_asset('page.js')}</script>")
    return f"<!doctype html>\n{tag('html', tag('head', head), tag('body', body, script), lang='en')}\n"


def _asset(name: str) -> str:
    return files("flopmeter.report.page").joinpath(name).read_text(encoding="utf-8")


def _section(heading: str, *parts: Markup) -> Markup:
    return tag("section", tag("h2", heading), *parts)


def _header(report: Report, title: str) -> Markup:
    """What ran where, and the figures that are asked for first."""
    what, *where = title.split(" · ")
    facts = _facts(report)
    cards = (
        tag("div", tag("dt", name), tag("dd", tag("b", figure), tag("span", more))) for name, figure, more in facts
    )
    return tag(
        "header", tag("h1", what), tag("p", " · ".join(where)), tag("dl", *cards, class_="facts"),
        tag("p", report.ran.line),
    )  # fmt: skip


def _where_to_win(report: Report) -> Iterator[Markup]:
    heading, *lines = where_to_win(report) or ["Nothing ran on the device."]
    yield tag("p", heading[:1].upper() + heading[1:])
    yield tag("ul", *(tag("li", line.strip(" -")) for line in lines), class_="notes")


def _facts(report: Report) -> Iterator[tuple[str, str, str]]:
    """Name, figure and a word more."""
    low, high = (with_prefix(seconds, "s") for seconds in (report.seconds_low, report.seconds_high))
    yield "predicted time", with_prefix(report.seconds, "s"), f"{low} to {high}"
    yield (
        "bound by",
        report.regime,
        f"{percent_of(report.seconds_by_regime[report.regime], report.seconds):.0f} % of the wall-clock",
    )
    rate = with_prefix(report.flops / report.seconds if report.seconds else 0, "FLOP/s")
    yield "work", with_prefix(report.flops, "FLOP"), f"{rate}, MFU {report.mfu:.1%}"
    yield "moved", with_prefix(report.bytes_read + report.bytes_written, "B"), f"{len(report.kernels)} kernels"
    yield "peak memory", with_prefix(report.peak_memory_bytes, "B"), _verdict(report)


def _verdict(report: Report) -> str:
    device = report.hardware
    if device.memory_bytes is None:
        return "memory of the device unknown"
    fits = "fits" if report.memory.fits(device) else "does NOT fit"
    return f"{fits} {with_prefix(usable_bytes(device), 'B')} usable"


def _regimes(report: Report) -> Markup:
    """The wall-clock as a bar of its shares; one too short for its name has it in the text below."""
    shares = {regime: percent_of(seconds, report.seconds) for regime, seconds in report.seconds_by_regime.items()}
    parts = [
        tag("span", f"{regime} {share:.0f} %" if share >= 12 else "", class_=regime, style=f"flex-grow:{share:.2f}")
        for regime, share in shares.items()
        if share > 0
    ]
    text = "Shares of the wall-clock: " + ", ".join(f"{regime} {share:.0f} %" for regime, share in shares.items()) + "."
    return tag("figure", tag("div", *parts, class_="regimes", aria_hidden="true"), tag("figcaption", text))


def _rooflines(report: Report) -> list[Markup]:
    """Of the report, and of what torch.compile would make of it, on the same axes."""
    reports = [report, report.compiled] if report.compiled else [report]
    rooflines = [roofline_of(each) for each in reports]
    axes = axes_for(rooflines)
    drawn = (draw_roofline(shown, each.mode, axes) for shown, each in zip(rooflines, reports, strict=True))
    figures = tag("div", *drawn, class_="pair")
    about = (
        "Each dot is a kernel, or several alike; its area is its share of the device's time, its shape its class, as"
        " above. Solid roofs are the datasheet's, dashed ones what is sustained."
    )
    return [tag("p", about), figures]


def _modules(report: Report) -> Markup:
    rows, depth = modules_to_depth(report, MOST_MODULES)
    about = Markup("")
    if depth is not None:
        about = tag("p", f"To depth {depth}; deeper modules are part of the rows above them.")
    return _section("Modules", about, rows_table(report, rows, "module", is_tree=True))


def _longest(report: Report, heading: str, by: By) -> Markup:
    """The rows that take the most time, and what is left out."""
    rows = report.rows(by)
    shown = rows[:MOST_ROWS]
    about = Markup("")
    if len(shown) < len(rows):
        share = sum(row.seconds for row in shown) / (report.kernel_seconds or 1.0)
        about = tag("p", f"The {len(shown)} of {len(rows)} rows that take the most time, {share:.1%} of it.")
    return _section(heading, about, rows_table(report, shown, by))
