"""What happens when the program asks for an unknown value: an error that names the line, or a stated assumption."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import typing_extensions

from flopmeter.known_values.routing import BALANCED, Routing, routing_law
from flopmeter.known_values.values import MAX_ELEMENTS
from flopmeter.torch_names.frames import callers
from flopmeter.torch_names.private import graph_task

TORCH, _PACKAGE = (
    os.path.dirname(os.path.abspath(path)) + os.sep for path in (torch.__file__, os.path.dirname(__file__))
)
# The last two wrap functions of torch: deprecated ones, and those that run in a context.
_SKIPPED = (TORCH, _PACKAGE, typing_extensions.__file__, contextlib.__file__)
_ASKING = tuple(os.path.join(_PACKAGE, room, "") for room in ("ask", "cli"))
_TRITON = os.sep + os.path.join("triton", "runtime", "")  # between a program and the launch of its kernel


@dataclass(frozen=True, slots=True)
class Assumption:
    """One assumption at one line of the program, and how often it was made there."""

    rule: str  # 'routing="balanced"', as the user asked for it
    op: str
    where: str  # file:line
    count: int


CONDITION_FAILS = "an unknown condition does not hold"
CONDITION_HOLDS = "an unknown condition holds, as it does for a stand-in 1.0"
LOOP_ENDS = "a loop that goes on while an unknown condition holds ends"
NO_ERROR = "an unknown condition is such that the program raises no error"
LOOP_TURNS = 100  # answers to one line, from which on it is taken for the end of a loop or a check in one
MOST_TURNS = 100_000  # half a minute of answers and more: nobody writes such a loop for anything but its end


READS = {"aten._local_scalar_dense.default", "aten._to_copy.default", "aten.copy_.default"}  # each is to read a value
MOST_LINES_NAMED = 8  # of those that made one assumption


def in_words(uses: Iterable[Assumption]) -> tuple[str, ...]:
    """One text for each assumption, with the lines of the program that made it."""
    lines: dict[str, Counter[str]] = {}
    for use in uses:
        what = f"{use.rule}{_MEANS.get(use.rule, '')}{'' if use.op in READS else f' for {use.op}'}"
        lines.setdefault(what, Counter())[use.where] += use.count
    return tuple(f"{what} at {_named(where)}" for what, where in lines.items())


def _named(lines: Counter[str]) -> str:
    named = [f"{where} ({count:,}x)" for where, count in lines.most_common(MOST_LINES_NAMED)]
    more = len(lines) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


CHECKS_HOLD = 'checks="hold"'
_MEANS = {
    BALANCED: " (what unknown scores pick takes turns)",
    CHECKS_HOLD: " (unknown values are finite, and what tests them holds)",
}


def guess_of_length(uses: Iterable[Assumption]) -> str:
    """The line that decided by a guess how long the program runs; '' if there is none."""
    uses = list(uses)
    if loop := max((use for use in uses if use.rule == LOOP_ENDS), key=lambda use: use.count, default=None):
        return (
            f"a guess decides what runs: the loop at {loop.where} goes on while an unknown condition holds, and was"
            f" ended where it first asked for it ({loop.count:,} times)"
        )
    conditions = [use for use in uses if use.rule in (CONDITION_FAILS, CONDITION_HOLDS) and use.count >= LOOP_TURNS]
    most = max(conditions, key=lambda use: use.count, default=None)
    if most is None:
        return ""
    asked = f"a guess decides what runs: {most.where} asked {most.count:,} times whether an unknown condition holds"
    if most.rule == CONDITION_HOLDS:
        return f"{asked}, and was told yes, as for a value of 1.0"
    return f"{asked}, and was told no; a loop that it ends ran to its limit, a branch under it did not run"


class EndlessLoopError(RuntimeError):
    """A loop waits for a value that is not known here, so it would never end."""


# What to do where the program itself computed the values, by the name of the op that asks.
_WAYS_OUT = {
    "_local_scalar_dense": "keep logging and convergence tests (`.item()`, `float()`, `if`) outside of the meter, "
    'state FlopMeter(checks="hold") for tests on tensors that all of a mask holds or that all is finite, or meter the '
    "script with `flopmeter run` or flopmeter.cuda(...), which answer with a stand-in and list the line",
    "_to_copy": "meter the part before values go to the host (`.cpu()`, `.numpy()`), or put a stand-in that gives "
    "tensors of the same shapes in place of what works on them there (a matcher that pairs first with first, a metric)"
    ', or state FlopMeter(routing="balanced") for tokens and experts picked by score, or use flopmeter.cuda(...): '
    "there the host may keep tensors, such as activations that wait there for the backward pass",
    "nonzero": 'state what share of a mask holds, FlopMeter(mask_fraction=0.5), or routing="balanced" for tokens and '
    "experts picked by score",
}
_WAYS_OUT |= dict.fromkeys(("index", "masked_select", "repeat_interleave"), _WAYS_OUT["nonzero"])
_WAYS_OUT |= dict.fromkeys(
    ("_unique2", "unique_consecutive"), "state what share of such numbers differ, FlopMeter(mask_fraction=0.5)"
)
_WAYS_OUT["nms"] = "state what share of the boxes is kept, FlopMeter(mask_fraction=0.5)"
_FOR_ANY = (
    'state an assumption to FlopMeter: routing="balanced" for experts and tokens picked by score, checks="hold" for '
    "tests that all is finite, mask_fraction=0.5 for the share of a mask over features"
)


class DataDependentError(RuntimeError):
    """The program asked for a value that does not follow from constants or known inputs.

    `op` is the aten op that asked, `where` the file and line of the caller.
    """

    def __init__(self, op: str):
        self.op, self.where = op, caller()
        name = op.partition("::")[2] or op.partition(".")[2].partition(".")[0]
        super().__init__(
            f"{op} at {self.where} is data-dependent: it needs values of a meta tensor that are not known. If they are "
            f"inputs that steer the program (ids, masks, grids, lengths; {MAX_ELEMENTS:,} elements at most), bring "
            "them in as real tensors, through flopmeter.on_meta(...) or .to('meta') inside the context, and build "
            f"constants inside the context. If the program computed them: {_WAYS_OUT.get(name, _FOR_ANY)}."
        )


class Assumptions:
    """The user's options, and when each was used at which line; `now` counts the ops so far."""

    def __init__(
        self, routing: Routing, checks: str | None, mask_fraction: float | None, unknown: str | None,
        now: Callable[[], int],
    ):  # fmt: skip
        _one_of("checks", checks, "hold")
        _one_of("unknown", unknown, "stand-in")
        if mask_fraction is not None and not (
            isinstance(mask_fraction, (int, float)) and not isinstance(mask_fraction, bool) and 0 <= mask_fraction <= 1
        ):
            raise ValueError(f"mask_fraction must be None or a number from 0 to 1, not {mask_fraction!r}")
        self.routing = routing_law(routing)
        self.checks_hold = checks is not None
        self.mask_fraction = mask_fraction
        self.stands_in = unknown is not None
        self._now = now
        self._uses: dict[tuple[str, str, str], list[int]] = {}  # for each use how many ops had run

    def note(self, rule: str, func: Any) -> Assumption:
        """Counts one use of the rule, for the op at this line of the program."""
        return self.noter(rule, func)()

    def taking_back(self, use: Assumption) -> Callable[[], None]:
        """A function that takes back the latest use of this rule. In another thread `now` has gone on since."""
        when = self._uses[use.rule, use.op, use.where]
        latest = when[-1]
        return lambda: when.remove(latest)

    def noter(self, rule: str, func: Any) -> Callable[[], Assumption]:
        """A function that counts one use of the rule, for the op at this line of the program, when it is called."""
        use = (rule, str(func), caller())

        def counted() -> Assumption:
            when = self._uses.setdefault(use, [])
            when.append(self._now())
            return Assumption(*use, len(when))

        return counted

    def uses_in(self, ops: range | None) -> Iterator[Assumption]:
        """The assumptions used while these ops ran (None: all ops), in the order of first use. What a program asks
        during set-up decides nothing about a step."""
        for use, when in self._uses.items():
            if count := len(when) if ops is None else sum(ops.start <= now <= ops.stop for now in when):
                yield Assumption(*use, count)


def caller() -> str:
    """'file:line' of the program's innermost frame. Where flopmeter itself calls `backward()`, there is none."""
    frame = program_frame()
    if frame is None:
        return "no line of the program" if graph_task() == -1 else "the backward pass"
    # For a file of an installed library only the part of the path that is the same on every machine.
    file = frame.f_code.co_filename.replace("\\", "/").rpartition("/site-packages/")[2]
    return f"{file}:{frame.f_lineno}"


def program_frame() -> FrameType | None:
    """The innermost frame that belongs neither to torch, nor to flopmeter, nor to a dispatch mode. Where flopmeter
    called the program, it is one of the program's."""
    for frame in callers():
        code = frame.f_code
        if code.co_filename.startswith(_ASKING):  # what calls it is a command, or the line that asked
            return None
        is_skipped = code.co_filename.startswith((*_SKIPPED, "<")) or _TRITON in code.co_filename
        if not is_skipped and code.co_name != "__torch_dispatch__":
            return frame
    return None


def _one_of(option: str, given: str | None, allowed: str) -> None:
    if given not in (None, allowed):
        raise ValueError(f"{option} must be None or {allowed!r}, not {given!r}")
