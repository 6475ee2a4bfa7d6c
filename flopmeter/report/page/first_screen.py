"""What a reader sees first: the main figures, where to win, what the time goes to. The page begins with it, and a
notebook shows nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

from flopmeter.report.drawers import VIEWS, draws
from flopmeter.report.fitting import ways_to_fit
from flopmeter.report.page.markup import Markup, join, tag
from flopmeter.report.page.tables import rows_table
from flopmeter.report.quantities import duration, figure, percent_of, with_prefix
from flopmeter.report.report import Report
from flopmeter.report.winning import cautions, where_to_win
from flopmeter.timing.peak_memory import usable_bytes

# In a notebook the colours are those around it, whatever theme it has.
_IN_NOTEBOOK = """
--paper: transparent; --ink: currentColor; --soft: currentColor; --line: rgb(128 128 128 / 40%);
--band: rgb(128 128 128 / 12%); --accent: #0072b2; --share: 0%; --bar: rgb(0 114 178 / 28%); max-width: 72rem;
"""
_LEAST_SHARES = 15, 25  # percent of the bar that has room for a regime's name, and for its time as well


def asset(name: str) -> str:
    """A file of this folder."""
    return files("flopmeter.report.page").joinpath(name).read_text(encoding="utf-8")


@draws(VIEWS, "notebook")
def for_notebook(report: Report) -> Markup:
    """The first screen as a piece of HTML without script, whose style reaches nothing outside of it."""
    style = Markup(f"<style>.flopmeter {{{_IN_NOTEBOOK}{asset('first_screen.css')}}}</style>")
    return tag("div", style, first_screen(report), class_="flopmeter")


def first_screen(report: Report) -> Markup:
    return join(
        [
            header(report),
            section("Where to win", *_where_to_win(report)),
            section("What the time goes to", _regimes(report), rows_table(report, report.rows(), "class")),
        ]
    )


def section(heading: str, *parts: Markup) -> Markup:
    return tag("section", tag("h2", heading), *parts)


def header(report: Report) -> Markup:
    """What ran where, and the main figures."""
    what, *where = report.headline.split(" · ")
    cards = (
        tag("div", tag("dt", name), tag("dd", tag("b", figure), tag("span", more)))
        for name, figure, more in _facts(report)
    )
    return tag(
        "header", tag("h1", what), tag("p", " · ".join(where)), tag("dl", *cards, class_="facts"),
        *(tag("p", _sentence(line)) for line in (*cautions(report), ways_to_fit(report)) if line),
        tag("p", report.ran.line),
    )  # fmt: skip


def _facts(report: Report) -> Iterator[tuple[str, str, str]]:
    """Each fact as a name, a figure and a further word."""
    low, high = (with_prefix(seconds, "s") for seconds in (report.seconds_low, report.seconds_high))
    yield "predicted time", with_prefix(report.seconds, "s"), f"{low} to {high}"
    share = percent_of(report.seconds_by_regime[report.regime], report.seconds)
    yield "bound by", report.regime, f"{share:.0f} % of the wall-clock"
    rate = with_prefix(report.flops / report.seconds if report.seconds else 0, "FLOP/s")
    yield "work", with_prefix(report.flops, "FLOP"), f"{rate}, MFU {report.mfu_in_words}"
    yield "moved", with_prefix(report.bytes_read + report.bytes_written, "B"), f"{len(report.kernels)} kernels"
    yield "peak memory", with_prefix(report.peak_memory_bytes, "B"), _verdict(report)
    if report.joules is None or report.watts is None:
        yield "energy", "unknown", "the profile has no power limit"
    else:
        price = report.energy_dollars
        cost = "" if price is None else f", ${figure(1e6 * price)} for a million runs"
        yield "energy", with_prefix(report.joules, "J"), f"{report.watts:.0f} W on average{cost}"


def _verdict(report: Report) -> str:
    device = report.hardware
    if device.memory_bytes is None:
        return "memory of the device unknown"
    fits = "fits" if report.memory.fits(device) else "does NOT fit"
    return f"{fits} {with_prefix(usable_bytes(device), 'B')} usable"


def _where_to_win(report: Report) -> Iterator[Markup]:
    shown = where_to_win(report)
    if shown is None:
        yield tag("p", "Nothing ran on the device.")
        return
    yield tag("p", _sentence(shown.heading.removeprefix("where to win ").strip("():")))
    if shown.advice:
        wins = (tag("li", tag("b", each.remedy), " ", each.gain, tag("span", each.about)) for each in shown.advice)
        yield tag("ol", *wins, class_="wins")
    if shown.rest:
        yield tag("p", _sentence(shown.rest_heading))
        yield tag("ul", *(tag("li", line) for line in shown.rest), class_="notes")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _regimes(report: Report) -> Markup:
    """The wall-clock as a bar of its shares. A share too short for its name is named in the text below."""
    shares = {regime: percent_of(seconds, report.seconds) for regime, seconds in report.seconds_by_regime.items()}
    for_name, for_time = _LEAST_SHARES

    def label(regime: str, share: float, seconds: float) -> Markup:
        time = tag("i", f"{duration(seconds)} · ") if share >= for_time else ""
        return join([f"{regime} ", time, f"{share:.0f} %"]) if share >= for_name else Markup("")

    times = report.seconds_by_regime.items()
    parts = [
        tag("span", label(regime, shares[regime], seconds), class_=regime, style=f"flex-grow:{shares[regime]:.2f}")
        for regime, seconds in times
        if shares[regime] > 0
    ]
    told = ", ".join(f"{regime} {duration(seconds)} ({shares[regime]:.0f} %)" for regime, seconds in times)
    text = f"The wall-clock of {duration(report.seconds)}: {told}."
    return tag("figure", tag("div", *parts, class_="regimes", aria_hidden="true"), tag("figcaption", text))
