"""The report as one HTML page that needs nothing else: no network, and no script but the one that sorts its tables."""

from __future__ import annotations

from collections.abc import Sequence

from flopmeter.report.figures import modules_to_depth, roofline_of
from flopmeter.report.page.first_screen import asset, first_screen, section
from flopmeter.report.page.marks import colours, definitions
from flopmeter.report.page.markup import Markup, join, tag
from flopmeter.report.page.memory import memory_timeline
from flopmeter.report.page.roofline import axes_for, draw_roofline
from flopmeter.report.page.tables import rows_table
from flopmeter.report.report import Report
from flopmeter.report.rows import By

MOST_MODULES, MOST_ROWS = 2000, 300  # in a table: beyond that nobody reads, and the page grows

# Nothing may be fetched, whatever a name in the report looks like.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(report: Report, lines: Sequence[str]) -> str:
    """The whole document. `lines` are what the text report has below its table."""
    return document(
        report.headline,
        definitions(),
        first_screen(report),
        section("Roofline", *_rooflines(report)),
        section("Memory", memory_timeline(report)),
        section("Phases", rows_table(report, report.rows("phase"), "phase")),
        _modules(report),
        _longest(report, "Ops", "op"),
        _longest(report, "Kernels", "kernel"),
        section("Conventions, assumptions and notes", tag("ul", *(tag("li", line) for line in lines), class_="notes")),
    )


def document(title: str, *parts: Markup) -> str:
    """A page with these parts, in the style of all pages."""
    head = join(
        [
            Markup('<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'),
            Markup(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'),
            Markup('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
            tag("title", title),
            Markup(f"<style>{asset('page.css')}{asset('first_screen.css')}{colours()}</style>"),
        ]
    )
    script = Markup(f"<script>{asset('page.js')}</script>")
    body = tag("body", tag("main", *parts), script)
    return f"<!doctype html>\n{tag('html', tag('head', head), body, lang='en')}\n"


def _rooflines(report: Report) -> list[Markup]:
    """Rooflines of the report, and of what torch.compile would make of it, on the same axes."""
    reports = [report, report.compiled] if report.compiled else [report]
    rooflines = [roofline_of(each) for each in reports]
    axes = axes_for(rooflines)
    drawn = (draw_roofline(shown, each.mode, axes) for shown, each in zip(rooflines, reports, strict=True))
    figures = tag("div", *drawn, class_="pair")
    about = (
        "Each dot is a kernel, or several alike; its area is its share of the device's time, its shape its class, as"
        " above. Those that take the most time have a number. Solid roofs are the datasheet's, dashed ones what is"
        " sustained."
    )
    return [tag("p", about), figures]


def _modules(report: Report) -> Markup:
    rows, depth = modules_to_depth(report, MOST_MODULES)
    about = Markup("")
    if depth is not None:
        about = tag("p", f"To depth {depth}; deeper modules are part of the rows above them.")
    return section("Modules", about, rows_table(report, rows, "module", is_tree=True))


def _longest(report: Report, heading: str, by: By) -> Markup:
    """The rows that take the most time, and what is left out."""
    rows = report.rows(by)
    shown = rows[:MOST_ROWS]
    about = Markup("")
    if len(shown) < len(rows):
        share = sum(row.seconds for row in shown) / (report.kernel_seconds or 1.0)
        about = tag("p", f"The {len(shown)} of {len(rows)} rows that take the most time, {share:.1%} of it.")
    return section(heading, about, rows_table(report, shown, by))
