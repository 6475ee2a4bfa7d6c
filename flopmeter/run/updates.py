"""What updates the weights of a program: its optimizers, or its own code."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from torch import nn
from torch.optim.optimizer import Optimizer

from flopmeter.known_values.assumptions import caller
from flopmeter.run.patches import Patch
from flopmeter.torch_names.around import around
from flopmeter.torch_names.frames import callers

_STEP = Optimizer.profile_hook_step(lambda optimizer: None).__code__  # what torch wraps around each class's step()


class Optimizers:
    """The optimizers that the program makes. The one that steps first leads: its steps end those of the program."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now
        self._leading: weakref.ref[Optimizer] | None = None
        self._made = weakref.WeakKeyDictionary[Optimizer, str]()  # where the program made each
        self._others: dict[str, list[int]] = {}  # where each of those that do not lead has stepped
        self._stepping: list[int] = []  # of those that are stepping: where each began
        self._updated_now: set[int] = set()  # parameters that the leader has updated in this step
        self._updates, self._updates_before = 0, 0  # of the leader, in this step and in the one before
        self.were_made = False
        self.idle_updates = 0  # calls of optimizer.step() that ran no op

    def patch(self) -> Patch:
        reason = "a program with an optimizer has its steps where that one steps"
        return Patch(Optimizer, "__init__", self._noting_made(Optimizer.__init__), reason)

    @around
    def _noting_made(self, init: Callable[..., None], optimizer: Optimizer, /, *args: Any, **kwargs: Any) -> None:
        self.were_made = True
        self._made[optimizer] = caller()
        init(optimizer, *args, **kwargs)

    @property
    def all_made(self) -> list[Optimizer]:
        return list(self._made)

    def begin(self, *_: Any) -> None:
        """An optimizer begins to step."""
        self._stepping.append(self._now())

    def stepped(self, optimizer: Optimizer) -> Literal["leads", "follows", "counts for nothing"]:
        """The optimizer has stepped: whether it leads, or is another one. A step without ops does not count: a wrapper
        only accumulated gradients. Nor does one within another optimizer's step."""
        if self._stepping and self._stepping.pop() == self._now():
            self.idle_updates += 1
            return "counts for nothing"
        is_part = _steps_in_another(optimizer)
        if self._leader is None and not is_part:
            self._leading = weakref.ref(optimizer)
        if optimizer is self._leader and not is_part:
            return "leads"
        self._others.setdefault(self._named(optimizer), []).append(self._now())
        return "counts for nothing" if is_part else "follows"

    def begins_anew(self, has_backward_since: Callable[[], bool]) -> bool:
        """Whether the leader's update that has ended is the first of a step. DeepSpeed's ZeRO steps one group of
        parameters after another: what updates others than those before it, with no backward pass between, goes on
        with their step."""
        updated = set(map(id, self._updated()))
        anew = not self._updated_now or not updated.isdisjoint(self._updated_now) or has_backward_since()
        if anew:
            self._updates_before, self._updates, self._updated_now = self._updates, 0, set()
        self._updates += 1
        self._updated_now |= updated
        return anew

    def goes_on(self) -> None:
        """Another optimizer's update belongs to the step that the leader's has ended."""
        self._updates += 1

    @property
    def may_go_on(self) -> bool:
        """Whether the step before had more updates than this one so far."""
        return self._updates < self._updates_before

    def not_stepping_in(self, steady: range, ends: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Optimizers that the program has made, but which do not step in this step, such as a generator's that steps
        every fifth time; and in how many steps, of which these are the ends, they did."""
        for name in dict.fromkeys(self._named(each) for each in self._made if each is not self._leader):
            updates = self._others.get(name, [])
            if not any(steady.start < update <= steady.stop for update in updates):
                yield name, len({bisect_left(ends, update) for update in updates})

    @property
    def one_has_stepped(self) -> bool:
        return self._leading is not None

    def leader_updates(self, module: nn.Module) -> bool:
        """Whether the leader updates the module or a part of it."""
        return not set(map(id, self._updated())).isdisjoint(map(id, module.parameters()))

    def leader_updates_copy_of(self, module: nn.Module) -> bool:
        """Whether the leader updates tensors of the same shapes as the module's weights."""
        return sorted(tuple(each.shape) for each in self._updated()) == sorted(
            tuple(each.shape) for each in module.parameters()
        )

    def _updated(self) -> list[nn.Parameter]:
        groups = getattr(self._leader, "param_groups", ())
        return [parameter for group in groups for parameter in group["params"]]

    @property
    def _leader(self) -> Optimizer | None:
        return self._leading() if self._leading else None

    def _named(self, optimizer: Optimizer) -> str:
        return f"{type(optimizer).__name__} of {self._made.get(optimizer, 'unknown')}"


class OwnUpdates:
    """The steps of a program that trains without an optimizer of torch's. A step lasts from one call of the outermost
    module that learns to the next, if there was a backward pass between them."""

    def __init__(self, has_backward: Callable[[range], bool]) -> None:
        self._has_backward = has_backward
        self.trained = ""  # the class of that module
        self.start = 0  # of the first step
        self._first_called: dict[str, int] = {}  # where each class that learns was
        self._ends: list[int] = []

    def call(self, name: str, now: int) -> int | None:
        """A module of that class, which learns, is called. Returns how many steps have ended, if one ends here. The
        first that is called again after a backward pass marks the steps: what only built a model is not."""
        if not self.trained:
            self.trained, self.start = name, now
        first_called = self._first_called.setdefault(name, now)
        marks = name == self.trained if self._ends else first_called < now
        if not marks or not self._has_backward(range(self._ends[-1] if self._ends else self.start, now)):
            return None
        if not self._ends:
            self.trained, self.start = name, first_called
        self._ends.append(now)
        return len(self._ends)

    def ends(self, total: int) -> list[int]:
        """Where steps ended in a run of that many ops."""
        if self.trained and not self._ends and self._has_backward(range(self.start, total)):
            return [total]
        return self._ends


def _steps_in_another(optimizer: Optimizer) -> bool:
    """Whether the optimizer steps inside the `step()` of another one, a container, to which the whole step belongs."""
    return any(frame.f_code is _STEP and frame.f_locals["self"] is not optimizer for frame in callers())
