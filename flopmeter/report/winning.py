"""Where to win, in words: the advice of a report, then the hot spots that no advice is about."""

from __future__ import annotations

from typing import NamedTuple

from flopmeter.records import Regime
from flopmeter.report.quantities import duration, percent, percent_of
from flopmeter.report.report import Report
from flopmeter.report.wins import LEAST_GAIN, WAITS, WAITS_FOR_STEPS, WHOLE, Advice, HotSpot

MOST_ROWS = 5
NEAR_FLOOR = 0.7  # of the wall-clock is the floor: then the run is near it, since kernels never get nearer
_FLOORS: dict[Regime, str] = {
    "compute": "its FLOPs at the datasheet's peak",
    "memory": "its bytes at the datasheet's bandwidth",
    "communication": "its collectives over these links",
    "overhead": "the launches of its kernels",
}


class Remedied(NamedTuple):
    """One piece of advice, in words."""

    remedy: str
    gain: str  # what the whole run takes now and then
    about: str  # which kernels, over which floor, and why


class WhereToWin(NamedTuple):
    heading: str
    advice: list[Remedied]
    rest_heading: str
    rest: list[str]  # hot spots that no advice is about


def where_to_win(report: Report) -> WhereToWin | None:
    """Where a run can win time, in words; None if nothing ran."""
    if not report.timings or not report.seconds:
        return None
    advice = report.advice[:MOST_ROWS]
    spots = [spot for spot in report.hot_spots if _is_news(spot, report)][: MOST_ROWS - len(advice)]
    return WhereToWin(
        _heading(report),
        [Remedied(each.remedy, _gain(each, report), f"{_about(each)}: {each.why}") for each in advice],
        "furthest above the floor, with no remedy of its own:" if advice else "furthest above it:",
        [f"{_about(spot)}: {spot.why}" for spot in spots],
    )


def cautions(report: Report) -> list[str]:
    """What the reader must know before believing the time; often nothing."""
    return [line for line in (report.caution, _of_first_step(report), _of_uncounted(report)) if line]


def _of_uncounted(report: Report) -> str:
    names = ", ".join(f"{row.name} ({row.calls})" for row in report.uncounted)
    return f"the time may be far too small: of {names} only the bytes are known" if names else ""


def _of_first_step(report: Report) -> str:
    """A note that the run is a first step, which later ones differ from; '' if it is not."""
    later = report.later_step_seconds
    if later is None or later > (1 - LEAST_GAIN) * report.seconds:
        return ""
    return (
        f"a first step, in which the optimizer makes its states; a later one takes {duration(later)}"
        " (for its report, --steps of a script that goes on for longer, else a step before the meter is entered)"
    )


def in_lines(shown: WhereToWin | None) -> list[str]:
    """The answer of where_to_win as lines of text; no lines for None."""
    if shown is None:
        return []
    lines = [shown.heading]
    for number, each in enumerate(shown.advice, 1):
        lines += [f"  {number}. {each.remedy}: {each.gain}", f"     {each.about}"]
    if shown.rest:
        lines += [f"  {shown.rest_heading}", *(f"   - {line}" for line in shown.rest)]
    return lines


def _is_news(spot: HotSpot, report: Report) -> bool:
    """Whether a hot spot is worth a line: it is large enough, and no advice is about it."""
    told = any(
        each.where == spot.where
        or set(spot.places) <= set(each.places)
        or (each.where == WHOLE and spot.why in (WAITS, WAITS_FOR_STEPS))
        for each in report.advice
    )
    return not told and spot.over_floor >= LEAST_GAIN * report.seconds


def floor_seconds(report: Report) -> float:
    """The floor of all kernels: their FLOPs or bytes at the rates of the datasheet, whichever takes longer."""
    return sum(spot.floor_seconds for spot in report.hot_spots)


def _heading(report: Report) -> str:
    if report.advice:
        how = "wall-clock; needless work first; each change predicted alone, with the uncertainty of the time above"
        return f"where to win ({how}):"
    floor = floor_seconds(report)
    of_floor = (
        f"its FLOPs and bytes at the datasheet's rates take {duration(floor)},"
        f" {percent_of(floor, report.seconds):.0f} % of the wall-clock"
    )
    if report.in_mode is None:
        return f"where time is lost (no change is priced for one rank of several): {of_floor}"
    return f"{_nearness(report, floor)}: no change that flopmeter can price wins {percent(LEAST_GAIN)} %; {of_floor}"


def _nearness(report: Report, floor: float) -> str:
    """Which floor the run is near. That of compute or memory is named only where the run really is near it: kernels may
    reach far less."""
    if report.regime in ("compute", "memory") and floor < NEAR_FLOOR * report.seconds:
        return f"near the floor of the kernels that there are, {report.regime}-bound but above that of the device"
    return f"near its floor, {_FLOORS[report.regime]}"


def _gain(advice: Advice, report: Report) -> str:
    times = report.seconds / advice.run_seconds_then
    return (
        f"{duration(report.seconds)} to {duration(advice.run_seconds_then)}, {times:.2f}x"
        f" (wins {duration(advice.gain_seconds)})"
    )


def _about(spot: Advice | HotSpot) -> str:
    over = f" over a floor of {duration(spot.floor_seconds)}" if spot.floor_seconds else ""
    return f"{spot.what} in {spot.where}, {duration(spot.seconds_now)}{over}"
