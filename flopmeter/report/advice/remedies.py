"""What a program can change: a function under `@remedy` looks for one kind of fault.

It yields proposals: a changed run, already priced, and the kernels that the change is about. Which of them are worth
showing is decided in `flopmeter.report.advice`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from flopmeter.launch.modes import Widened
from flopmeter.records import Kernel, Op, Trace
from flopmeter.report.advice.rewrite import with_ops
from flopmeter.report.quantities import with_prefix
from flopmeter.report.report import Report
from flopmeter.timing.peak_memory import usable_bytes_if_known


def everything(_: Kernel) -> bool:
    return True


class Proposal(NamedTuple):
    """A change of the program, and the run with it."""

    why: str
    remedy: str
    then: Report
    concerns: Callable[[Kernel], bool] = everything  # which of the report's kernels it is about
    what: str = ""  # these kernels; '' names them by their ops
    where: str = ""  # '' names the places of these kernels
    times: int = 1  # `then` does this many times the work
    is_fault: bool = True


Remedy = Callable[[Report, Trace], Iterator[Proposal]]
"""Takes a report and the trace that it is about."""
REMEDIES: list[Remedy] = []


def remedy(function: Remedy) -> Remedy:
    """Decorator: enters a function that looks for one kind of fault."""
    REMEDIES.append(function)
    return function


def priced(
    report: Report, trace: Trace | None = None, mode: str | None = None, *, widened: Widened = "as marked"
) -> Report:
    assert report.in_mode is not None  # else nobody asks for advice
    return report.in_mode(mode or report.mode, trace=trace, widened=widened)


def trace_of(report: Report) -> Trace:
    """The trace that the report is about; the meter's trace may have grown since."""
    trace, steps = report.memory.trace, report.memory.steps
    return trace if len(trace.ops) == steps else dataclasses.replace(trace, ops=trace.ops[:steps])


def room_for(report: Report, more_bytes: int) -> str | None:
    """How full the device would be with that much more at the peak, in words; None if that does not fit, or nobody
    knows what fits."""
    usable, needed = usable_bytes_if_known(report.hardware), report.memory.steady_peak_bytes + more_bytes
    if usable is None or needed > usable:
        return None
    return f"at most {with_prefix(needed, 'B')} of {with_prefix(usable, 'B')}"


def has_backward(trace: Trace) -> bool:
    return any(op.phase == "backward" for op in trace.ops)


def of_ops(trace: Trace, indices: Iterable[int]) -> Callable[[Kernel], bool]:
    """Selects the kernels that run one of these ops."""
    ids = {id(trace.ops[index]) for index in indices}
    return lambda kernel: any(id(op) in ids for op in kernel.ops)


def with_other_ops(
    report: Report,
    trace: Trace,
    why: str,
    remedy: str,
    dropped: Collection[int],
    put_in: Mapping[int, Op] | None = None,
    *,
    put_before: Mapping[int, Sequence[Op]] | None = None,
    what: str = "",
    about: Collection[int] | None = None,
) -> Proposal:
    """The run without some ops, and with others in their places or before them. The proposal is about the kernels of
    all ops that are dropped or put in, or only of those in `about`."""
    concerns = of_ops(trace, {*dropped, *(put_in or {})} if about is None else about)
    return Proposal(why, remedy, priced(report, with_ops(trace, dropped, put_in, put_before)), concerns, what)
