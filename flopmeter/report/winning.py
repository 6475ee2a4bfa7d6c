"""Where to win, in words: the advice of a report, then what holds time over its floor without a remedy."""

from __future__ import annotations

from flopmeter.report.quantities import duration, percent_of
from flopmeter.report.report import Report
from flopmeter.report.wins import LEAST_GAIN, WAITS, WHOLE, Advice, HotSpot

MOST_ROWS = 5


def where_to_win(report: Report) -> list[str]:
    """Lines of text; none for a run of nothing."""
    if not report.timings or not report.seconds:
        return []
    advice = report.advice[:MOST_ROWS]
    spots = [spot for spot in report.hot_spots if _is_news(spot, report)]
    lines = [_heading(report)]
    for number, each in enumerate(advice, 1):
        lines += [f"  {number}. {_gain(each, report)}", f"     {_about(each)}: {each.why}"]
    rest = spots[: MOST_ROWS - len(advice)]
    if rest:
        lines.append("  most time over the floor, with no remedy of its own:" if advice else "  most time over it:")
        lines += [f"   - {_about(spot)}: {spot.why}" for spot in rest]
    return lines


def _is_news(spot: HotSpot, report: Report) -> bool:
    """Whether it is worth a line, and no advice is about it."""
    told = any(each.where == spot.where or (each.where == WHOLE and spot.why == WAITS) for each in report.advice)
    return not told and spot.over_floor >= LEAST_GAIN * report.seconds


def floor_seconds(report: Report) -> float:
    """Of all kernels: their FLOPs or bytes at the rates of the datasheet, whichever takes longer."""
    return sum(spot.floor_seconds for spot in report.hot_spots)


def _heading(report: Report) -> str:
    if report.advice:
        return "where to win (wall-clock; each change priced alone by the model, as sure as the time above):"
    floor = floor_seconds(report)
    return (
        f"near its floor: no change that flopmeter can price wins {LEAST_GAIN:.0%}; its FLOPs and bytes at the"
        f" datasheet's rates take {duration(floor)}, {percent_of(floor, report.seconds):.0f} % of the wall-clock"
    )


def _gain(advice: Advice, report: Report) -> str:
    times = report.seconds / advice.run_seconds_then
    return (
        f"{advice.remedy}: {duration(report.seconds)} to {duration(advice.run_seconds_then)}, {times:.2f}x"
        f" (wins {duration(advice.gain_seconds)})"
    )


def _about(spot: Advice | HotSpot) -> str:
    return f"{spot.what} in {spot.where}, {duration(spot.seconds_now)} over a floor of {duration(spot.floor_seconds)}"
