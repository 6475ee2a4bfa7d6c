"""Where a program's steps begin and end: setup, the first step, the steady step.

A training step ends when an optimizer has stepped. With several optimizers the one that stepped first counts, so that
each of them steps once in a step. Everything from one end to the next belongs to the step: data, forward, backward, and
what the program does with the loss. Everything before the first forward pass that records gradients is setup. In a
program that updates its weights without torch's optimizers a step is the time from one call of the outermost module
that it trains to the next; where it trains tensors of no module, from one backward() to the next. In inference it is a
call of the outermost module that the program calls most often, or a replay of its CUDA graph.

A program that was told to stop after so many steps and only infers stops too: after so many calls, and after
CALLS_WATCHED at least, so that what it calls now and then belongs to its rounds. While it may still train (it has made
an optimizer, or its own code has words of training), it goes on, and after SECONDS_WITHOUT_WORD the user is told how to
end it; so is one who waits as long between two steps.

Between two updates a program may also evaluate, every so many steps or at the end of an epoch: it calls what it trains
in eval mode, without gradients, or a copy of it, as an average of its weights. The steady step is one without that, if
there is one. What every step does, such as the rollouts of reinforcement learning, is a part of it.
"""

from __future__ import annotations

import functools
import importlib
import sys
import time
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import CheckpointFunction

from flopmeter.known_values.assumptions import caller
from flopmeter.run.own_code import OwnCode
from flopmeter.run.patches import Patch, applied
from flopmeter.torch_names.private import graph_task

AUTO, OPTIMIZER, FORWARD = "auto", "optimizer", "forward"
NVTX = "nvtx:"
CALLS_WATCHED = 32  # calls of modules before a program is taken to only infer; a turn of encoder and decoder has fewer
SECONDS_WITHOUT_WORD = 60.0  # of a program that may still train, before its user is told that none of its calls did


class StepsDone(BaseException):
    """As many steps ran as were asked for. No `except Exception` of the program catches it."""


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
    later: tuple[range, ...] = ()  # the steps after the first that are like the steady one: with or without evaluation
    before: tuple[str, int] | None = None  # a class that is trained, and its calls without gradients in the setup
    stopped_untrained: bool = False  # the program was ended although it had only inferred
    without: tuple[tuple[str, int], ...] = ()  # optimizers that do not step in the steady step; in how many others


class _OutermostCall(NamedTuple):
    module: weakref.ref[nn.Module]
    name: str  # the module's class
    ops: range
    learns: bool  # it remembered gradients
    evaluates: bool  # what the leading optimizer updates, in eval mode, or a copy of it, without gradients
    is_copy: bool  # an average of the weights, or a teacher


class Steps:
    """Watches a program and notes, as numbers of ops, where its steps end.

    marker: 'optimizer', 'forward' (calls of the outermost module), 'nvtx:NAME' (ends of that range),
        'module:function' (returns of that function), or 'auto': optimizers, else forward.
    most: raise StepsDone when so many have ended; None: never.
    has_backward: whether a backward pass is among these ops.
    is_on_device: whether one of these ops ran on the GPU; a call of a module on the CPU is no step.
    tell: says a line to the user while the program runs.
    """

    def __init__(
        self,
        now: Callable[[], int],
        marker: str = AUTO,
        most: int | None = None,
        has_backward: Callable[[range], bool] = lambda ops: False,
        is_on_device: Callable[[range], bool] = bool,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._now, self._marker, self._most, self._has_backward = now, marker, most, has_backward
        self._tell, self._is_on_device = tell, is_on_device
        self._ends: list[int] = []  # of marked steps
        self._calls: list[_OutermostCall] = []
        self._replays: list[int] = []  # where each replay of a CUDA graph ended
        self._leading: weakref.ref[Optimizer] | None = None
        self._made = weakref.WeakKeyDictionary[Optimizer, str]()  # where the program made each optimizer
        self._others: dict[str, list[int]] = {}  # where each of those that do not lead has stepped
        self.idle_updates = 0  # calls of optimizer.step() that ran no op
        self._updates: list[int] = []  # of optimizers that are stepping: where each began
        self._calls_before: list[_OutermostCall] = []  # its first step: without gradients, of what it updates
        self._depth = 0
        self._call_start = 0  # of the outermost call
        self._first_forward: int | None = None  # of a training program: where its first step began
        self._calls_start: int | None = None
        self._has_optimizer = False
        self._trained = ""  # the class of the module that a program trains without an optimizer
        self._training_start = 0  # of its first step
        self._first_called: dict[str, int] = {}  # in such a program: where each class that learns was first called
        self._trainings: list[int] = []  # where its steps ended
        self._backwards: list[int] = []  # of a program that has called no module: where each backward() ended
        self._next_look = CALLS_WATCHED  # at whether the program only infers: so many calls and replays
        self._own_code = OwnCode()
        self._waits_since_s = time.monotonic()
        self._has_told = self._stopped_untrained = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Raises ValueError for a marker that names no function."""
        self._own_code, self._waits_since_s = OwnCode(), time.monotonic()
        with ExitStack() as undo:
            undo.callback(register_module_forward_pre_hook(self._enter_module).remove)
            undo.callback(register_module_forward_hook(self._leave_module, always_call=True).remove)
            if self._marker in (AUTO, OPTIMIZER):
                undo.enter_context(applied([self._watched_optimizers(), self._watched_backward()]))
                undo.callback(register_optimizer_step_pre_hook(self._begin_update).remove)
                undo.callback(register_optimizer_step_post_hook(self._stepped).remove)
            elif ":" in self._marker and not self._marker.startswith(NVTX):
                undo.enter_context(applied([self._marked_function()]))
            elif self._marker == NVTX or (self._marker != FORWARD and not self._marker.startswith(NVTX)):
                raise ValueError(
                    f"unknown step marker {self._marker!r}: give optimizer, forward, nvtx:NAME or module:function"
                )
            yield

    def aside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose calls of modules are no steps: it warms up or traces what the program calls later."""

        @functools.wraps(function)
        def prepares(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1

        return prepares

    def on_range_end(self, name: str) -> None:
        """An nvtx range ends."""
        if self._marker == NVTX + name:
            self._end()

    def on_compiled_call(self, owner: nn.Module | Optimizer) -> Callable[[], None]:
        """A module or an optimizer begins to run compiled, without its hooks. Returns a function to call when that
        ends."""
        if isinstance(owner, nn.Module):
            self._enter_module(owner, ())
            return functools.partial(self._leave_module, owner)
        if self._marker not in (AUTO, OPTIMIZER):
            return lambda: None
        self._begin_update()
        return functools.partial(self._stepped, owner)

    def on_replay(self, captured: range) -> None:
        """A CUDA graph was replayed, which captured these ops. If a step ended in them, one ends again."""
        self._replays.append(self._now())
        if any(captured.start < end <= captured.stop for end in self._ends):
            self._end()
        self._stop_inference()

    def parts(self, total: int) -> Parts:
        """What ran so far, of `total` ops."""
        return replace(self._parts(total), stopped_untrained=self._stopped_untrained)

    def _parts(self, total: int) -> Parts:
        if self._ends:
            start = self._first_forward if self._marker in (AUTO, OPTIMIZER) else self._calls_start
            by = {AUTO: "optimizer.step()", OPTIMIZER: "optimizer.step()", FORWARD: "calls of the outermost module"}
            marked_by = by.get(self._marker, self._marker)
            evaluations = [call.ops for call in self._evaluations()]
            start = _with_what_recurs(min(start or 0, self._ends[0]), self._ends, self._calls)
            found = _parts(start, self._ends, marked_by, evaluations)
            names = [call.name for call in self._calls_before if call.ops.stop <= start]
            before = (names[0], len(names)) if names else None
            without = tuple(self._not_stepping_in(found.steady)) if found.steady else ()
            return replace(found, before=before, without=without, ends_with_call=self._marker == FORWARD)
        if ends := self._ends_of_trainings(total):
            found = _parts(self._training_start, ends, f"calls of {self._trained}, trained without an optimizer")
            return replace(found, ends_with_call=True)
        if self._replays and self._marker == AUTO:
            return _parts(self._replays[0], self._replays[1:], "replays of a CUDA graph")
        if self._calls and self._marker in (AUTO, FORWARD):
            # If a program also evaluates, its steps are the calls that record gradients.
            trains = self._has_backward(range(total))
            calls = [call for call in self._calls if call.learns and trains] or self._calls
            if self._marker == AUTO and (rounds := _rounds([call.module for call in calls])):
                start, length = rounds
                ends = [call.ops.stop for call in calls[start + length - 1 :: length]]
                found = _parts(calls[start].ops.start, ends, _named_round(calls[start : start + length]))
                return replace(found, ends_with_call=True)
            name, _ = Counter(call.name for call in calls).most_common(1)[0]
            ends = [call.ops.stop for call in calls if call.name == name]
            return replace(_parts(self._calls_start or 0, ends, f"calls of {name}"), ends_with_call=True)
        if len(self._backwards) > 1:  # after one alone anything may come
            return _parts(0, self._backwards, "backward(), with neither an optimizer nor a module")
        return Parts(range(total), None, None, 0, "nothing")

    def _end(self) -> None:
        self._ends.append(self._now())
        self._waits_since_s = time.monotonic()
        if self._most is not None and len(self._ends) >= self._most:
            raise StepsDone

    def _stop_inference(self) -> None:
        """A call or a replay has ended. Looked at less and less often, since telling rounds takes as long as there are
        calls."""
        count = len(self._calls) + len(self._replays)
        if self._marker != AUTO or self._most is None or count < self._next_look:
            return
        self._next_look = count + max(1, count // 8)
        if self._ends:
            self._tell_once(
                f"{len(self._ends):,} of {self._most:,} steps so far, and {count:,} calls: if this evaluates, the "
                "script's own options may end it sooner; Ctrl-C reports what ran"
            )
            return
        everything = range(self._now())
        if self._has_backward(everything) or self.parts(everything.stop).count < self._most:
            return
        if not self._has_optimizer and not self._own_code.may_train():
            self._stopped_untrained = True
            raise StepsDone
        self._tell_once(
            f"{count:,} calls so far, and nothing has trained: if this only infers, Ctrl-C reports what ran, and "
            "--step-marker forward stops it after --steps calls"
        )

    def _tell_once(self, line: str) -> None:
        """Say it to whoever has waited long for the next step."""
        if not self._has_told and time.monotonic() - self._waits_since_s > SECONDS_WITHOUT_WORD:
            self._has_told = True
            self._tell(line)

    def _begin_update(self, *_: Any) -> None:
        self._updates.append(self._now())

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer has stepped. A step without ops does not count: a wrapper only accumulated gradients."""
        if self._updates and self._updates.pop() == self._now():
            self.idle_updates += 1
            return
        leading = self._leading and self._leading()
        is_part = _steps_in_another(optimizer)
        if leading is None and not is_part:
            self._leading, leading = weakref.ref(optimizer), optimizer
            self._calls_before = list(self._untrained_calls())
        if optimizer is leading and not is_part:
            self._end()
        else:
            self._others.setdefault(self._named(optimizer), []).append(self._now())

    def _named(self, optimizer: Optimizer) -> str:
        return f"{type(optimizer).__name__} of {self._made.get(optimizer, 'unknown')}"

    def _not_stepping_in(self, steady: range) -> Iterator[tuple[str, int]]:
        """Optimizers that the program has made, but which do not step in this step, such as a generator's that steps
        every fifth time; and in how many steps they did."""
        leading = self._leading and self._leading()
        for name in dict.fromkeys(self._named(each) for each in self._made if each is not leading):
            updates = self._others.get(name, [])
            if not any(steady.start < update <= steady.stop for update in updates):
                yield name, len({bisect_left(self._ends, update) for update in updates})

    def _is_outermost(self) -> bool:
        """What a checkpoint calls again in a backward pass is a part of that pass."""
        return self._depth == 0 and graph_task() == -1

    def _enter_module(self, module: nn.Module, _inputs: Any) -> None:
        if self._is_outermost():
            self._call_start = self._now()
            if self._calls_start is None:
                self._calls_start = self._now()
            learns = _learns(module) and _records_gradients()
            if self._first_forward is None and learns:
                self._first_forward = self._now()
            if self._marker == AUTO and not self._has_optimizer and learns:
                self._begin_training(type(module).__name__)
        self._depth += 1

    def _begin_training(self, name: str) -> None:
        """A module that learns is called, and there is no optimizer. The step before has ended if it had a backward
        pass. The first that is called again after one marks the steps: what only built a model is not."""
        now = self._now()
        if not self._trained:
            self._trained, self._training_start = name, now
        first_called = self._first_called.setdefault(name, now)
        start = self._trainings[-1] if self._trainings else self._training_start
        marks = name == self._trained if self._trainings else first_called < now
        if marks and self._has_backward(range(start, now)):
            if not self._trainings:
                self._trained, self._training_start = name, first_called
            self._trainings.append(now)
            if self._most is not None and len(self._trainings) >= self._most:
                raise StepsDone

    def _ends_of_trainings(self, total: int) -> list[int]:
        if self._trained and not self._trainings and self._has_backward(range(self._training_start, total)):
            return [total]
        return self._trainings

    def _watched_optimizers(self) -> Patch:
        make = Optimizer.__init__

        @functools.wraps(make)
        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            self._has_optimizer = True
            self._made[optimizer] = caller()
            make(optimizer, *args, **kwargs)

        return Patch(Optimizer, "__init__", init, "a program with an optimizer has its steps where that one steps")

    def _watched_backward(self) -> Patch:
        run = torch.autograd.backward

        @functools.wraps(run)
        def backward(*args: Any, **kwargs: Any) -> None:
            run(*args, **kwargs)
            now = self._now()
            if self._marker != AUTO or self._has_optimizer or self._calls or not self._is_on_device(range(now)):
                return
            self._backwards.append(now)
            if self._most is not None and len(self._backwards) >= max(self._most, CALLS_WATCHED):
                raise StepsDone

        return Patch(torch.autograd, "backward", backward, "the steps of a program that updates tensors of its own")

    def _leave_module(self, module: nn.Module, *_: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        ops = range(self._call_start, self._now())
        if self._is_outermost() and self._is_on_device(ops) and any(True for _ in module.parameters()):
            records = _records_gradients()
            learns = _learns(module) and records
            evaluates = is_copy = False
            if self._leading and not records:
                is_updated = self._is_updated(module)
                is_copy = not is_updated and self._is_copy(module)
                evaluates = is_copy or (is_updated and not module.training)
            called = weakref.ref(module), type(module).__name__, ops
            self._calls.append(_OutermostCall(*called, learns, evaluates, is_copy))
            if self._marker == FORWARD:
                self._end()
            self._stop_inference()

    def _untrained_calls(self) -> Iterator[_OutermostCall]:
        """Calls without gradients of what the leading optimizer updates."""
        for call in self._calls:
            module = call.module()
            if module is not None and not call.learns and self._is_updated(module):
                yield call

    def _updated(self) -> list[nn.Parameter]:
        """What the leading optimizer updates, which has stepped."""
        groups = getattr(self._leading and self._leading(), "param_groups", ())
        return [parameter for group in groups for parameter in group["params"]]

    def _is_updated(self, module: nn.Module) -> bool:
        """Whether the module or a part of it is updated."""
        return not set(map(id, self._updated())).isdisjoint(map(id, module.parameters()))

    def _is_copy(self, module: nn.Module) -> bool:
        """Whether the module has weights of the same shapes as what is updated."""
        return sorted(tuple(each.shape) for each in self._updated()) == sorted(
            tuple(each.shape) for each in module.parameters()
        )

    def _evaluations(self) -> list[_OutermostCall]:
        """A copy that every step calls is a teacher, and no evaluation."""
        found = [call for call in self._calls if call.evaluates]
        starts = [call.ops.start for call in found if call.is_copy]
        steps = {bisect_right(self._ends, start) for start in starts}
        is_teacher = steps.issuperset(range(1, len(self._ends)))
        return [call for call in found if not (call.is_copy and is_teacher)]

    def _marked_function(self) -> Patch:
        module_name, _, path = self._marker.partition(":")
        try:
            owner: Any = importlib.import_module(module_name)
            *parents, name = path.split(".")
            for parent in parents:
                owner = getattr(owner, parent)
            function = getattr(owner, name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"the step marker {self._marker!r} names no function: {error}") from None

        def marked(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            self._end()
            return result

        return Patch(owner, name, marked, "its return ends a step")


def _with_what_recurs(start: int, ends: Sequence[int], calls: Sequence[_OutermostCall]) -> int:
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


def _rounds(modules: list[object]) -> tuple[int, int] | None:
    """Where the first round of calls starts, and how many calls a round is: the shortest sequence that comes at least
    twice, up to the end, after less than a round of others. None: there is none of several calls."""
    for length in range(1, len(modules) // 2 + 1):
        start = len(modules) - length
        while start and modules[start - 1] == modules[start - 1 + length]:
            start -= 1
        if start < length and len(modules) - start >= 2 * length:
            turn = modules[start : start + length]
            part = next(part for part in range(1, length + 1) if turn[:part] * (length // part) == turn)
            return (start, part) if part > 1 else None
    return None


def _named_round(calls: Sequence[_OutermostCall]) -> str:
    times = Counter(call.name for call in calls)
    return "rounds of calls: " + ", ".join(name if times[name] == 1 else f"{name} ×{times[name]}" for name in times)


_SEGMENT = CheckpointFunction.forward.__code__
_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__  # what torch wraps around each class's step()


def _steps_in_another(optimizer: Optimizer) -> bool:
    """Whether it steps in the `step()` of another one, a container: the whole step is that one's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _STEP and frame.f_locals["self"] is not optimizer:
            return True
        frame = frame.f_back
    return False


def _records_gradients() -> bool:
    """Whether the call is a part of what is trained: a reentrant checkpoint calls its segment without gradients, and
    again in the backward pass."""
    frame: FrameType | None = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None and frame.f_code is not _SEGMENT:
        frame = frame.f_back
    return torch.is_grad_enabled() or frame is not None


def _learns(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def _parts(start: int, ends: list[int], marked_by: str, evaluations: Sequence[range] = ()) -> Parts:
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
    later = tuple(ops for step, ops in steps if bool(within[step]) == bool(evaluation))
    return Parts(setup, first, steady, count, marked_by, number, evaluation, later=later)
