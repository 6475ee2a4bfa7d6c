"""A script as rank 0, and as each rank that it waits for or exchanges messages with, such as stages of a pipeline.

The ranks run one after another in this process (distributed/ranks.py). A rank that waits for another one starts again
once that one has come so far, so a script must do the same each time.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from typing import TextIO

from flopmeter.ask.pipeline import pipeline_of
from flopmeter.costs import kernels_of
from flopmeter.costs.data_movement.communication import message_peers
from flopmeter.device.cluster import cluster_of
from flopmeter.device.hardware import Hardware
from flopmeter.distributed.ranks import run_ranks
from flopmeter.meter import reports_together
from flopmeter.records.traces import part_of
from flopmeter.report.quantities import duration, percent
from flopmeter.run.own_code import forgotten_after
from flopmeter.run.registrations import registered_until_here
from flopmeter.run.report import RunReport
from flopmeter.run.script import Ending, Script, run
from flopmeter.run.session import ScriptSession, Wishes
from flopmeter.run.world import environment

ALONE = "setup and first step are those of rank 0 alone, which waits for no message there"
ENDS_LATER = 1.01  # times the step of rank 0, for another rank to be named
MOST_RANKS = 32  # each takes as long as the script takes once


@dataclass(frozen=True, slots=True)
class RanAsRank:
    """One rank that has run."""

    session: ScriptSession
    ending: Ending


def run_as_ranks(
    script: Script, hardware: str | os.PathLike[str] | Hardware, wishes: Wishes, variables: Mapping[str, str]
) -> dict[int, RanAsRank]:
    """Run the script with these variables of the environment. What is shown is what rank 0 writes.

    Raises WorldError where ranks wait for each other for ever.
    """
    shown = _WrittenOnce(sys.stdout), _WrittenOnce(sys.stderr)

    def run_rank(rank: int) -> RanAsRank:
        session = ScriptSession(hardware, wishes, rank)
        with (
            session.open(),
            environment(variables),
            _output_of(rank, shown),
            registered_until_here(),
            forgotten_after(),
        ):
            ending = run(script, session)
            session.note_switches()
        return RanAsRank(session, ending)

    return run_ranks(
        [0], run_rank, grows=True, peers=_peers, most=MOST_RANKS, is_failed=lambda ran: ran.ending.has_failed
    )


def first_failed(runs: Mapping[int, RanAsRank]) -> RanAsRank | None:
    """The first rank whose script ended in an error."""
    return next((each for each in runs.values() if each.ending.error is not None), None)


def _peers(ran: RanAsRank) -> set[int]:
    """The ranks with which a rank exchanges messages in a step."""
    session = ran.session
    if session.steps.parts(session.now()).ends_with_call:  # ranks do not end it at the same place
        return set()
    return message_peers(kernels_of(part_of(session.meter.trace, session.step_ops())))


def report_of(runs: Mapping[int, RanAsRank], program: str) -> RunReport:
    """Rank 0's report, on the clock of all ranks. Raises NothingRanError, and HangError where messages do not meet."""
    session = runs[0].session
    report = session.report(program)
    if len(runs) == 1:
        return report
    sessions = {rank: each.session for rank, each in runs.items()}
    meters = {rank: each.meter for rank, each in sessions.items()}
    ops = {rank: each.step_ops() for rank, each in sessions.items()}
    together = reports_together(meters, session.wishes.mode, ops)
    noted = dict.fromkeys(note for each in together.values() for note in each.notes)
    assumed = dict.fromkeys(text for each in together.values() for text in each.assumptions)
    pipeline = pipeline_of(together, cluster_of(session.hardware), are_stages=False)
    waits = percent(pipeline.rows[0].bubble_seconds / pipeline.seconds)
    notes = [*noted, f"communication includes the bubble, in which rank 0 waits for other ranks: {waits} % of the step"]
    if pipeline.seconds > ENDS_LATER * together[0].seconds:
        notes.append(f"rank 0 ends first: until all ranks have ended a step takes {duration(pipeline.seconds)}")
    notes += [ALONE, *session.own_notes()]
    caution = report.step.caution  # about rank 0: memory that grows, data that are loaded too slowly
    step = replace(together[0], notes=tuple(notes), assumptions=tuple(assumed), caution=caution)
    by_part = {name: step if part is report.step else part for name, part in report.by_part.items()}
    return replace(report, step=step, by_part=by_part, pipeline=pipeline)


class _WrittenOnce(io.TextIOBase):
    """A stream of rank 0. What it wrote before it started again is not written twice."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._length = self._place = 0  # characters that were shown, and where this run of the rank is in them

    def start(self) -> None:
        self._place = 0

    def go_on(self) -> None:
        """What comes now is new, even if this run wrote less than the one before: libraries warn once per process."""
        self._place = self._length

    def write(self, text: str) -> int:
        new = text[max(self._length - self._place, 0) :]
        self._place += len(text)
        self._length = max(self._length, self._place)
        self._stream.write(new)
        return len(text)

    def flush(self) -> None:
        # From Python 3.13 on a stream that ends flushes, and it is an error if the one below is gone.
        if not self._stream.closed:
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


@contextmanager
def _output_of(rank: int, shown: tuple[_WrittenOnce, _WrittenOnce]) -> Iterator[None]:
    """The output of other ranks goes nowhere, except the traceback of one that fails."""
    out, errors = shown if rank == 0 else (io.StringIO(), shown[1])
    for stream in shown if rank == 0 else ():
        stream.start()
    with redirect_stdout(out), redirect_stderr(errors):
        yield
