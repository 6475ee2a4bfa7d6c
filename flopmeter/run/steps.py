"""Where a program's steps begin and end: setup, the first step, the steady step.

What ends a step, the first of these that applies:

- training: an optimizer has stepped. Of several optimizers the one that stepped first counts, so that each of them
  steps once in a step; others that step after it, with no backward pass between, end the same step.
- training without torch's optimizers: the next call of the outermost module that is trained begins; where the program
  trains tensors of no module, backward() has returned.
- inference: a replay of the program's CUDA graph, or of several in turn, has ended; else a call of the outermost module
  (or of the compiled function outside of modules) that the program calls most often.

Everything from one end to the next belongs to the step: data, forward, backward, and what the program does with the
loss. Everything before the first forward pass that records gradients is setup.

A program that was told to stop after some number of steps, and only infers, stops after that many calls, and after
CALLS_WATCHED at least, so that what it calls now and then belongs to its rounds. While it may still train (it has made
an optimizer, or its own code mentions training), it goes on, and after SECONDS_WITHOUT_WORD the user is told how to end
it; likewise after as long a wait between two steps.

Between two updates a program may also evaluate, every so many steps or at the end of an epoch: it calls what it trains
(or a copy, such as an average of its weights) in eval mode, with no backward pass. The steady step is one without an
evaluation, if there is one. What every step does, such as the rollouts of reinforcement learning, is a part of it.
"""

from __future__ import annotations

import functools
import importlib
import time
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import CodeType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import CheckpointFunction

from flopmeter.records import DEFAULT_STREAM
from flopmeter.run.own_code import OwnCode
from flopmeter.run.patches import Patch, applied
from flopmeter.run.step_parts import (
    GraphReplay,
    OutermostCall,
    Parts,
    parts_between,
    parts_of_leading_class,
    parts_of_replays,
    parts_of_rounds,
    with_what_recurs,
)
from flopmeter.run.streams import CudaGraph
from flopmeter.run.updates import Optimizers, OwnUpdates
from flopmeter.torch_names.around import around
from flopmeter.torch_names.frames import callers
from flopmeter.torch_names.private import graph_task, is_compiled_backward
from flopmeter.trace import streams
from flopmeter.trace.module_paths import class_of

AUTO, OPTIMIZER, FORWARD = "auto", "optimizer", "forward"
NVTX = "nvtx:"
CALLS_WATCHED = 32  # calls of modules before a program is taken to only infer; a turn of encoder and decoder has fewer
MOST_WARM_UPS = 32  # steps before a capture; torch's recipes for CUDA graphs have 3, and 11 with DDP
SECONDS_WITHOUT_WORD = 60.0  # of a program that may still train, before its user is told that none of its calls did


class StepsDone(BaseException):
    """Raised when as many steps ran as were asked for. No `except Exception` of the program catches it."""


class WatchedRun(Protocol):
    """The run, as its steps see it."""

    def now(self) -> int:
        """The number of ops so far."""

    def has_backward(self, ops: range) -> bool:
        """Whether a backward pass is among these ops."""

    def updates_weights(self, ops: range) -> bool:
        """Whether one of these ops, outside of modules, writes weights."""

    def note_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """The program has these beside the one that stepped."""

    def is_on_device(self, ops: range) -> bool:
        """Whether one of these ops ran on the GPU; a call of a module on the CPU is no step."""

    def patience_s(self, only_infers: bool, may_take_times: bool) -> float:
        """How long a program without an optimizer may go on after as many steps as were asked for, to end by itself and
        print what it found: seconds of this machine, by whether it has only inferred and whether its code has words of
        taking times. Where these do not do, the parts of the run are those before they began, so that they do not hang
        on the speed of this machine."""


class Steps:
    """Watches a program and notes, as numbers of ops, where its steps end.

    marker: 'optimizer', 'forward' (calls of the outermost module), 'nvtx:NAME' (ends of that range),
        'module:function' (returns of that function), or 'auto': optimizers, else forward.
    most: raise StepsDone when so many have ended; None: never.
    tell: says a line to the user while the program runs.
    """

    def __init__(self, run: WatchedRun, marker: str, most: int | None, tell: Callable[[str], None]) -> None:
        self._run, self._marker, self._most = run, marker, most
        self._ends: list[int] = []  # of marked steps
        self._warm_ups = 0  # of these, before a CUDA graph is captured
        self._calls: list[OutermostCall] = []
        self._function_calls: list[OutermostCall] = []  # of compiled functions, outside of modules
        self._replays: list[GraphReplay] = []
        self._optimizers, self._own_updates = Optimizers(run.now), OwnUpdates(run.has_backward)
        self._calls_before: list[OutermostCall] = []  # the first update: without gradients, of what it updates
        self._depth = 0
        self._call_start = 0  # of the outermost call
        self._first_forward: int | None = None  # of a training program: where its first step began
        self._calls_start: int | None = None
        self._backwards: list[int] = []  # of a program that has called no module: where each backward() ended
        self._next_look = CALLS_WATCHED  # at whether the program only infers: so many calls and replays
        self._own_code, self._word = OwnCode(), _Word(tell)
        self._enough: tuple[Parts, float] | None = None  # the parts after `most` steps, and when on this machine
        self._is_stopped = False

    @property
    def idle_updates(self) -> int:
        """Calls of optimizer.step() that ran no op."""
        return self._optimizers.idle_updates

    @contextmanager
    def watching(self) -> Iterator[None]:
        """In this context the program's steps are noted. Raises ValueError for a marker that names no function."""
        self._own_code = OwnCode()
        self._word.wait()
        with ExitStack() as undo:
            undo.callback(register_module_forward_pre_hook(self._enter_module).remove)
            undo.callback(register_module_forward_hook(self._leave_module, always_call=True).remove)
            if self._marker in (AUTO, OPTIMIZER):
                backward = self._watched_backward(torch.autograd.backward)
                why = "the steps of a program that updates tensors of its own"
                patches = [self._optimizers.patch(), Patch(torch.autograd, "backward", backward, why)]
                undo.enter_context(applied(patches))
                undo.callback(register_optimizer_step_pre_hook(self._optimizers.begin).remove)
                undo.callback(register_optimizer_step_post_hook(self._stepped).remove)
            elif ":" in self._marker and not self._marker.startswith(NVTX):
                undo.enter_context(applied([self._marked_function()]))
            elif self._marker == NVTX or (self._marker != FORWARD and not self._marker.startswith(NVTX)):
                raise ValueError(
                    f"unknown step marker {self._marker!r}: give optimizer, forward, nvtx:NAME or module:function"
                )
            yield

    @around
    def aside(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The function, whose calls of modules are no steps: it only prepares or traces later calls."""
        self._depth += 1
        try:
            return function(*args, **kwargs)
        finally:
            self._depth -= 1

    def on_range_end(self, name: str) -> None:
        """Called when an nvtx range ends."""
        if self._marker == NVTX + name:
            self._end()

    def on_compiled_call(self, owner: nn.Module | Optimizer | CodeType) -> Callable[[], None]:
        """A module, an optimizer or a function begins to run compiled, without hooks. Returns a function to call at
        its end."""
        if isinstance(owner, nn.Module):
            self._enter_module(owner, ())
            return functools.partial(self._leave_module, owner)
        if isinstance(owner, CodeType):
            return functools.partial(self._leave_function, owner, self._run.now(), len(self._calls))
        if self._marker not in (AUTO, OPTIMIZER):
            return lambda: None
        self._optimizers.begin()
        return functools.partial(self._stepped, owner)

    def on_replay(self, captured: range) -> None:
        """Called when a CUDA graph that captured these ops was replayed. If a step ended in them, one ends again."""
        self._replays.append(GraphReplay(captured, self._run.now()))
        if any(captured.start < end <= captured.stop for end in self._ends):
            self._end()
        self._stop_inference()

    def parts(self, total: int) -> Parts:
        """What ran so far, of `total` ops."""
        if self._enough and self._is_stopped:
            return self._enough[0]
        if self._ends:
            return self._marked_parts()
        if ends := self._own_updates.ends(total):
            marked_by = self._marked_by_own_updates(ends)
            return replace(parts_between(self._own_updates.start, ends, marked_by), ends_with_call=True)
        if self._replays and self._marker == AUTO:
            return parts_of_replays(self._replays)
        if self._marker in (AUTO, FORWARD) and (calls := self._calls_until(total)):
            return replace(self._parts_of_calls(total, calls), ends_with_call=True)
        if len(self._backwards) > 1:  # after one alone anything may come
            return parts_between(0, self._backwards, "backward(), with neither an optimizer nor a module")
        return Parts(range(total), None, None, 0, "nothing")

    def _marked_by_own_updates(self, ends: list[int]) -> str:
        """Where no weight is seen to change, the program may want gradients for something else, such as what its inputs
        contribute, or may have put new weights in the place of the old ones."""
        trains = self._run.updates_weights(range(self._own_updates.start, ends[-1]))
        how = "trained without an optimizer" if trains else "with backward passes and no optimizer"
        return f"calls of {self._own_updates.trained}, {how}"

    def _marked_parts(self) -> Parts:
        start = self._first_forward if self._marker in (AUTO, OPTIMIZER) else self._calls_start
        start = with_what_recurs(min(start or 0, self._ends[0]), self._ends, self._calls)
        by = {AUTO: "optimizer.step()", OPTIMIZER: "optimizer.step()", FORWARD: "calls of the outermost module"}
        evaluations = [call.ops for call in self._evaluations()]
        found = parts_between(start, self._ends, by.get(self._marker, self._marker), evaluations)
        names = [call.name for call in self._calls_before if call.ops.stop <= start]
        return replace(
            found,
            before=(names[0], len(names)) if names else None,
            without=tuple(self._optimizers.not_stepping_in(found.steady, self._ends)) if found.steady else (),
            ends_with_call=self._marker == FORWARD,
        )

    def _parts_of_calls(self, total: int, calls: list[OutermostCall]) -> Parts:
        """If a program also evaluates, its steps are the calls that record gradients."""
        trains = self._run.has_backward(range(total))
        calls = [call for call in calls if call.learns and trains] or calls
        if self._marker == AUTO and (found := parts_of_rounds(calls)):
            return found
        start = calls[0].ops.start if self._calls_start is None else min(self._calls_start, calls[0].ops.start)
        return parts_of_leading_class(start, calls)

    def _end(self) -> None:
        self._ends.append(self._run.now())
        self._word.wait()
        self._warm_ups += self._is_warm_up()
        self._stop_after_most()

    def _end_update(self) -> None:
        """The leading optimizer has updated. If the step before had more updates, this one may go on."""
        since = range(self._ends[-1] if self._ends else 0, self._run.now())
        if self._optimizers.begins_anew(lambda: self._run.has_backward(since)):
            if self._has_enough():
                raise StepsDone
            self._end()
        else:
            self._ends[-1] = self._run.now()
            self._stop_after_most()

    def _has_enough(self) -> bool:
        return self._most is not None and len(self._ends) - self._warm_ups >= self._most

    def _stop_after_most(self) -> None:
        if self._has_enough() and not self._optimizers.may_go_on:
            raise StepsDone

    def _is_warm_up(self) -> bool:
        """Whether the step that ended only prepares the capture of a CUDA graph. torch's recipe runs some such steps on
        a stream of their own before it."""
        is_before = not self._replays and not CudaGraph.capturing and self._warm_ups < MOST_WARM_UPS
        return is_before and streams.current() != DEFAULT_STREAM and self._own_code.may_capture()

    def _stop_inference(self) -> None:
        """A call or a replay has ended. Looked at less and less often, since telling rounds takes as long as there are
        calls."""
        count = len(self._calls) + len(self._function_calls) + len(self._replays)
        if self._marker != AUTO or self._most is None or count < self._next_look:
            return
        self._next_look = count + max(1, count // 8)
        if self._ends:
            self._word.say_once(
                f"{len(self._ends):,} of {self._most:,} steps so far, and {count:,} calls: if this evaluates, the "
                "script's own options may end it sooner; Ctrl-C reports what ran"
            )
            return
        everything = range(self._run.now())
        if self._run.has_backward(everything) or self.parts(everything.stop).count < self._most:
            return
        if not self._optimizers.were_made and not self._own_code.may_train():
            self._stop(only_infers=True)
            return
        self._word.say_once(
            f"{count:,} calls so far, and nothing has trained: if this only infers, Ctrl-C reports what ran, and "
            "--step-marker forward stops it after --steps calls"
        )

    def _stop(self, only_infers: bool) -> None:
        """Called when a program without an optimizer has made as many steps as were asked for."""
        before, since_s = self._enough or (None, 0.0)
        is_new = before is None or before.stopped_untrained != only_infers
        if is_new or (before and before.may_prepare):
            parts = replace(self.parts(self._run.now()), stopped_untrained=only_infers)
            if is_new or not parts.may_prepare:
                since_s = time.monotonic()
                self._enough = parts, since_s
        patience_s = self._run.patience_s(only_infers, self._own_code.may_take_times())
        # Ranks end at the same step, so no clock may tell; and a first round may have more calls than are watched.
        may_be_within_round = not patience_s and self._enough is not None and self._enough[0].may_prepare
        if time.monotonic() - since_s >= patience_s and not may_be_within_round:
            self._is_stopped = True
            raise StepsDone

    def _stepped(self, optimizer: Optimizer, *_: Any) -> None:
        is_first = not self._optimizers.one_has_stepped
        match self._optimizers.stepped(optimizer):
            case "leads":
                self._run.note_optimizers([each for each in self._optimizers.all_made if each is not optimizer])
                if is_first:
                    self._calls_before = list(self._untrained_calls())
                self._end_update()
            case "follows" if self._ends and not self._run.has_backward(range(self._ends[-1], self._run.now())):
                self._optimizers.goes_on()
                self._ends[-1] = self._run.now()
                self._stop_after_most()

    def _is_outermost(self) -> bool:
        """Whether no other module is running. What a checkpoint calls again in a backward pass belongs to that pass,
        and so does a compiled backward pass."""
        return self._depth == 0 and graph_task() == -1 and not is_compiled_backward()

    def _enter_module(self, module: nn.Module, _inputs: Any) -> None:
        if self._is_outermost():
            self._call_start = self._run.now()
            if self._calls_start is None:
                self._calls_start = self._run.now()
            learns = _learns(module) and _records_gradients()
            if self._first_forward is None and learns:
                self._first_forward = self._run.now()
            if self._marker == AUTO and not self._optimizers.were_made and learns:
                ended = self._own_updates.call(class_of(module), self._run.now())
                if ended and self._most is not None and ended >= self._most:
                    self._stop(only_infers=False)
        self._depth += 1

    @around
    def _watched_backward(self, backward: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        now = self._run.now()
        if self._marker != AUTO or self._optimizers.were_made or self._calls or not self._run.is_on_device(range(now)):
            return
        self._backwards.append(now)
        if self._most is not None and len(self._backwards) >= max(self._most, CALLS_WATCHED):
            self._stop(only_infers=False)

    def _leave_module(self, module: nn.Module, *_: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        ops = range(self._call_start, self._run.now())
        if self._is_outermost() and self._run.is_on_device(ops) and any(True for _ in module.parameters()):
            records = _records_gradients()
            learns = _learns(module) and records
            evaluates = is_copy = False
            if self._optimizers.one_has_stepped and not (records and module.training):
                is_updated = self._optimizers.leader_updates(module)
                is_copy = not is_updated and not records and self._optimizers.leader_updates_copy_of(module)
                evaluates = is_copy or (is_updated and not module.training)
            called = weakref.ref(module), class_of(module), ops
            self._calls.append(OutermostCall(*called, learns, evaluates, is_copy))
            if self._marker == FORWARD:
                self._end()
            self._stop_inference()

    def _leave_function(self, code: CodeType, start: int, calls: int) -> None:
        """A compiled function that is no module's has run. Where modules ran in it one by one, their calls count."""
        ops = range(start, self._run.now())
        if self._is_outermost() and self._run.is_on_device(ops) and len(self._calls) == calls:
            name = code.co_qualname
            self._function_calls.append(OutermostCall(weakref.ref(code), name, ops, False, False, False))
            self._stop_inference()

    def _calls_until(self, total: int) -> list[OutermostCall]:
        """The calls that may be steps: of compiled functions, too, in a program that only infers."""
        if not self._function_calls or self._run.has_backward(range(total)):
            return self._calls
        return sorted((*self._calls, *self._function_calls), key=lambda call: call.ops.start)

    def _untrained_calls(self) -> Iterator[OutermostCall]:
        """Calls without gradients of what the leading optimizer updates."""
        for call in self._calls:
            module = call.module()
            if module is not None and not call.learns and self._optimizers.leader_updates(module):
                yield call

    def _evaluations(self) -> list[OutermostCall]:
        """The calls that evaluate. A copy that every step calls is a teacher, and no evaluation."""
        found = [call for call in self._calls if call.evaluates and not (call.learns and self._is_trained_by(call))]
        starts = [call.ops.start for call in found if call.is_copy]
        steps = {bisect_right(self._ends, start) for start in starts}
        is_teacher = steps.issuperset(range(1, len(self._ends)))
        return [call for call in found if not (call.is_copy and is_teacher)]

    def _is_trained_by(self, call: OutermostCall) -> bool:
        """Whether what a call in eval mode recorded may serve a backward pass, as where batch norms are frozen. A
        program that only forgot no_grad calls the same in training mode before one."""
        same = (each for each in self._calls if each.module == call.module and each.ops.start >= call.ops.stop)
        then = next((each for each in same if each.learns and not each.evaluates), None)
        return then is None or self._run.has_backward(range(call.ops.stop, then.ops.start))

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


class _Word:
    """A line to a user who has waited long for a step: how to end the run. It is said once."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._has_told = tell, False
        self.wait()

    def wait(self) -> None:
        """Something has just been seen: the user waits from now on."""
        self._since_s = time.monotonic()

    def say_once(self, line: str) -> None:
        if not self._has_told and time.monotonic() - self._since_s > SECONDS_WITHOUT_WORD:
            self._has_told = True
            self._tell(line)


_SEGMENT = CheckpointFunction.forward.__code__


def _records_gradients() -> bool:
    """Whether the call is a part of what is trained: a reentrant checkpoint calls its segment without gradients, and
    again in the backward pass."""
    return torch.is_grad_enabled() or any(frame.f_code is _SEGMENT for frame in callers())


def _learns(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
