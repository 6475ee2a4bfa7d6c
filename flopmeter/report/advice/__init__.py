"""Where to win: needless work in a program, and other ways to run it.

A remedy (remedies.py) rewrites the trace (rewrite.py) or chooses another mode, and has the result priced like any other
program. Each file has the remedies of one topic. spots.py says which kernels take longer than the least time that their
work can take, and why.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from flopmeter.records import Trace
from flopmeter.report.advice import (  # noqa: F401  (they enter their remedies)
    accumulation,
    again,
    attention,
    batch,
    checkpoints,
    copies,
    frozen,
    gradients,
    growing,
    host_copies,
    host_values,
    layout,
    loops,
    math_attention,
    modes,
    needless,
    number_types,
    optimizers,
    recurrent,
    recurrent_steps,
    tables,
    tokens,
    unread,
    widths,
)
from flopmeter.report.advice.remedies import REMEDIES, Proposal, everything, trace_of
from flopmeter.report.advice.spots import Timed, floor_of, modules_and_lines, places_of, spot_of, timed, wall_clock
from flopmeter.report.drawers import VIEWS, draws
from flopmeter.report.report import Report
from flopmeter.report.wins import LEAST_GAIN, MINOR_FAULT, WHOLE, Advice


class NoAdviceWarning(RuntimeWarning):
    """One kind of advice could not be looked for, by a fault of flopmeter's. The report holds without it."""


@draws(VIEWS, "advice")
def advice_of(report: Report) -> tuple[Advice, ...]:
    """The advice in the order in which to follow it. Faults come first: fixing one costs nothing, and helps in any
    mode. Then come other ways to run the program, and minor faults, by what they win. A larger batch comes last in each
    group, since it changes how a model learns."""
    if report.in_mode is None or not report.timings or not report.seconds:
        return ()
    trace = trace_of(report)
    proposals = _proposals(report, trace)
    found = [(each.times > 1, _advice(report, each)) for each in proposals if _is_about(each, report)]
    worth = [pair for pair in found if pair[1].gain_seconds >= LEAST_GAIN * report.seconds]
    worth.sort(key=lambda pair: (not _comes_first(pair[1], report), pair[0], -pair[1].gain_seconds))
    return tuple(advice for _, advice in worth)


def _proposals(report: Report, trace: Trace) -> Iterator[Proposal]:
    for remedy in REMEDIES:
        try:
            yield from remedy(report, trace)
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
            text = f"no advice about {remedy.__name__} was looked for ({fault}): please report it with your program"
            warnings.warn(text, NoAdviceWarning, stacklevel=2)


_PICO = 12  # digits of a second: below them the difference of two sums over the same kernels is rounding


def _is_about(proposal: Proposal, report: Report) -> bool:
    """Whether the report has kernels that the proposal is about: a report may be of some of the ops only."""
    return bool(proposal.then.timings) and any(proposal.concerns(kernel) for kernel, _ in timed(report))


def _comes_first(advice: Advice, report: Report) -> bool:
    return advice.is_fault and advice.gain_seconds >= MINOR_FAULT * report.seconds


def _advice(report: Report, proposal: Proposal) -> Advice:
    pairs = timed(report)
    group = [pair for pair in pairs if proposal.concerns(pair[0])]
    is_whole = len(group) == len(pairs)
    then = proposal.then.seconds / proposal.times
    gain = report.seconds - then
    # What no longer runs takes at least what the run wins, be it that kernels beside it find more in the cache.
    now = report.seconds if is_whole else max(wall_clock(group), gain)
    left = floor_of(timed(proposal.then), proposal.then) / proposal.times
    others = floor_of(pairs, report) - floor_of(group, report)
    seconds_then = now - gain
    return Advice(
        what=proposal.what or (_count(report) if proposal.concerns is everything else _names(group, report)),
        where=proposal.where or (WHOLE if is_whole else modules_and_lines(kernel for kernel, _ in group)),
        seconds_now=now,
        floor_seconds=max(0.0, min(round(left - others, _PICO), seconds_then)),
        why=proposal.why,
        remedy=proposal.remedy,
        seconds_then=seconds_then,
        run_seconds_then=then,
        is_fault=proposal.is_fault,
        places=() if proposal.concerns is everything else places_of(group),
    )


def _count(report: Report) -> str:
    count = len(report.kernels)
    return "the only kernel" if count == 1 else f"all {count} kernels"


def _names(group: list[Timed], report: Report) -> str:
    names = list(dict.fromkeys(kernel.cost.name for kernel, _ in sorted(group, key=lambda pair: -pair[1].seconds)))
    return spot_of(", ".join(names[:2]) + (", …" if len(names) > 2 else ""), group, report).what
