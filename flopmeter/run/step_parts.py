"""The parts of a run (setup, first step, steady step), found from where its steps ended and which modules it called."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a run, each as the ops that ran in it. `marked_by` says what ended a step."""

    setup: range
    first: range | None  # None: no step ended
    steady: range | None  # None: only one step ended
    count: int
    marked_by: str
    steady_number: int = 0  # of the steady step, from 1 on
    evaluation: range | None = None  # in the steady step, if every step has one: from the first call to the last
    ends_with_call: bool = False  # of a module. In a pipeline, what the call made is sent in the next step then
    later: tuple[tuple[int, range], ...] = ()  # numbers and ops of steps after the first that evaluate if it does
    before: tuple[str, int] | None = None  # a class that is trained, and its calls without gradients in the setup
    stopped_untrained: bool = False  # the program was ended although it had only inferred
    without: tuple[tuple[str, int], ...] = ()  # optimizers that do not step in the steady step; in how many others
    may_prepare: bool = False  # rounds of calls or replays may follow, of which these are less than two


class GraphReplay(NamedTuple):
    """A replay of a CUDA graph."""

    graph: range  # the ops that it captured
    end: int  # in ops


class OutermostCall(NamedTuple):
    """A call of a module that no other module called, or of a compiled function outside of modules."""

    module: weakref.ref[Any]  # or the function's code
    name: str  # the module's class, or the function
    ops: range
    learns: bool  # it remembered gradients
    evaluates: bool  # what the leading optimizer updates, in eval mode, or without gradients a copy of it
    is_copy: bool  # an average of the weights, or a teacher


def parts_between(start: int, ends: list[int], marked_by: str, evaluations: Sequence[range] = ()) -> Parts:
    """The parts of a run whose first step began at `start`. The steady step is the last one without an evaluation, or
    the last one if each has one."""
    if not ends:
        return Parts(range(start), None, None, 0, marked_by)
    setup, first, count = range(start), range(start, ends[0]), len(ends)
    if count == 1:
        return Parts(setup, first, None, count, marked_by)
    steps = [(number, range(*pair)) for number, pair in enumerate(pairwise(ends), start=2)]
    within = {
        number: [each for each in evaluations if each.start >= ops.start < each.stop <= ops.stop]
        for number, ops in steps
    }
    number, steady = max(steps, key=lambda step: (not within[step[0]], step[0]))
    evaluation = range(within[number][0].start, within[number][-1].stop) if within[number] else None
    later = tuple(step for step in steps if bool(within[step[0]]) == bool(evaluation))
    return Parts(setup, first, steady, count, marked_by, number, evaluation, later=later)


def with_usual_step(parts: Parts, ops_and_shapes: Callable[[range], tuple[Hashable, Hashable]]) -> Parts:
    """The parts with the last step that has the shapes of most, since the last batch of an epoch may be smaller. Only
    steps with the ops of the last one count. Where most differ it stays, and so it does where each step evaluates."""
    if parts.first is None or parts.steady is None or parts.evaluation is not None:
        return parts
    found = [(step, *ops_and_shapes(step[1])) for step in ((1, parts.first), *parts.later)]
    _, ops, _ = found[-1]  # of the steady step
    alike = [(step, shapes) for step, its_ops, shapes in found if its_ops == ops]
    (usual, times), *_ = Counter(shapes for _, shapes in alike).most_common(1)
    (number, steady), _ = next(each for each in reversed(alike) if each[1] == usual)
    is_most = 2 * times > len(alike)  # and so two at least, of which one is not the first
    return replace(parts, steady=steady, steady_number=number) if is_most else parts


def with_what_recurs(start: int, ends: Sequence[int], calls: Sequence[OutermostCall]) -> int:
    """Where the first step starts: with what the second step calls before the forward pass that trains, such as a
    teacher, if the program called the same before the first one."""
    if len(ends) < 2:
        return start
    second = [call.name for call in calls if ends[0] <= call.ops.start < ends[1]]
    first = [call for call in calls if call.ops.stop <= ends[0]]
    for name, call in zip(reversed(second), reversed(first), strict=False):
        if name != call.name:
            break
        start = min(start, call.ops.start)
    return start


def parts_of_rounds(calls: Sequence[OutermostCall]) -> Parts | None:
    """The parts of a program that only infers, with several calls a round, such as an encoder's and a decoder's. None:
    each call is a round of its own, or the rounds are a small end of the program, as the tiles of a decoder after the
    steps of a diffusion model. (What is called once, such as each layer of an encoder, is no step in any case.)"""
    found = _rounds([call.module for call in calls])
    if found is None:
        return None
    within, length = found
    rounds, others = calls[within.start : within.stop], (*calls[: within.start], *calls[within.stop :])
    modules = [call.module for call in others]
    if _ops_of([call for call in others if modules.count(call.module) > 1]) > _ops_of(rounds):
        return None
    times = Counter(call.name for call in rounds[:length])
    names = ", ".join(name if times[name] == 1 else f"{name} ×{times[name]}" for name in times)
    ends = [call.ops.stop for call in rounds[length - 1 :: length]]
    return parts_between(rounds[0].ops.start, ends, f"rounds of calls: {names}")


def parts_of_replays(replays: Sequence[GraphReplay]) -> Parts:
    """The parts of a program that replays CUDA graphs: from the end of a replay to that of the next, or of the next
    round where it replays several graphs in turn, such as those of an encoder, a model and a decoder."""
    ends, graphs = [replay.end for replay in replays], [replay.graph for replay in replays]
    found = _rounds(graphs)
    if found is None:
        by_one = parts_between(ends[0], ends[1:], "replays of a CUDA graph")
        return replace(by_one, may_prepare=_may_prepare(graphs))
    within, length = found
    ends = ends[within.start + length - 1 : within.stop : length]
    return parts_between(ends[0], ends[1:], f"rounds of {length} replays of CUDA graphs")


def parts_of_leading_class(start: int, calls: Sequence[OutermostCall]) -> Parts:
    """The parts of a program without rounds, whose setup ends at `start`."""
    name = leading_class(calls)
    of_class = [call for call in calls if call.name == name]
    found = parts_between(start, [call.ops.stop for call in of_class], f"calls of {name}")
    return replace(found, may_prepare=_may_prepare([call.module for call in calls]))


def leading_class(calls: Sequence[OutermostCall]) -> str:
    """The class whose calls are the steps of a program that calls several without rounds: of those that it calls again,
    the one that runs most ops."""
    calls_of: dict[str, list[OutermostCall]] = {}
    for call in calls:
        calls_of.setdefault(call.name, []).append(call)
    return max(calls_of, key=lambda name: (len(calls_of[name]) > 1, _ops_of(calls_of[name])))


def _may_prepare(called: list[Any]) -> bool:
    """Whether rounds may yet be seen: what is called again has not gone on for three times the longest way from a call
    to the next one of the same. (After two rounds they are seen; such a way is at most a round long.) What was called
    for the first time after others had come again, as a target after a draft's tokens, may end the first round: its
    way is that from where they began."""
    last: dict[int, int] = {}  # by the place of its first call
    longest, begin = 0, len(called)
    for place, first in enumerate(called.index(each) for each in called):
        if first in last:
            longest, begin = max(longest, place - last[first]), min(begin, first)
        elif begin < place:
            longest = max(longest, place + 1 - begin)
        last[first] = place
    return begin == len(called) or len(called) - begin < 3 * longest


def _ops_of(calls: Sequence[OutermostCall]) -> int:
    return sum(len(call.ops) for call in calls)


def _rounds(modules: list[Any]) -> tuple[range, int] | None:
    """The calls that are rounds, and how many make a round: the shortest sequence that is repeated up to the end, or
    up to calls of modules that ran only there. Before it come less than a round of other calls, or calls of modules
    that it does not have, such as an encoder or what fills a cache. None: there is none of several calls."""
    stop = len(modules)
    while stop and modules.index(modules[stop - 1]) == stop - 1:
        stop -= 1
    for length in range(1, stop // 2 + 1):
        start = stop - length
        while start and modules[start - 1] == modules[start - 1 + length]:
            start -= 1
        if stop - start < 2 * length:
            continue
        turn = modules[start : start + length]
        if start < length or not any(module in turn for module in modules[:start]):
            part = next(part for part in range(1, length + 1) if turn[:part] * (length // part) == turn)
            return (range(start, stop), part) if part > 1 else None
    return None
