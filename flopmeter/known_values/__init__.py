"""Values of meta tensors, where they follow from constants of the program.

A meta tensor has no data, but real programs ask for data: the number of images in a grid, whether a mask masks
anything, which experts a token chose. Small tensors that come from constants, or from `on_meta`, keep their values, and
every op on them is run again on the CPU. To ask for an unknown value is a `DataDependentError`, unless the user states
an assumption; each use of an assumption is counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from flopmeter.known_values import entry_points, stand_ins, twins
from flopmeter.known_values.assumptions import Assumption, Assumptions, DataDependentError
from flopmeter.known_values.recall import has_initializer, recall_buffers
from flopmeter.known_values.replay import CallWithResult, Invocation, Knowledge, RewrittenCall
from flopmeter.known_values.routing import Routing
from flopmeter.known_values.rules import ValueRule, rule_of
from flopmeter.known_values.twins import on_meta
from flopmeter.known_values.values import address, is_count
from flopmeter.records.tensors import tensors_in

__all__ = ["Assumption", "DataDependentError", "KnownValues", "on_meta"]


class KnownValues(Knowledge):
    """Stands between a dispatch mode and the kernels: the mode calls `run(...)` for `func(*args, **kwargs)`.

    `routing="balanced"`: experts and tokens picked from unknown scores (topk, argmax, max, multinomial) go round-robin;
    `{"imbalance": 1.3}` loads them unevenly (routing.py). `checks="hold"`: unknown values are finite, and an `all` of
    them is True. `mask_fraction`: this share of an unknown bool mask that selects elements is true, evenly spread, and
    this share of unknown numbers differ, or are not zero. `unknown="stand-in"`: a program that reads an unknown value
    gets a stated stand-in (stand_ins.py) instead of an error. `now`: how many ops have run.

    The mode must be off while `run` works, as it is inside `__torch_dispatch__`: replays are not part of the
    program. It must pass on `aten.item`, which has no meta kernel, as it comes.
    """

    def __init__(
        self,
        *,
        routing: Routing = None,
        checks: str | None = None,
        mask_fraction: float | None = None,
        unknown: str | None = None,
        now: Callable[[], int] = int,
    ):
        super().__init__(Assumptions(routing, checks, mask_fraction, unknown, now))
        self._rules: dict[Any, ValueRule] = {}
        self._met: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # models whose buffers were recalled

    def __enter__(self) -> KnownValues:
        entry_points.open_for(self)
        self._hook = register_module_forward_pre_hook(self._meet)
        for twin in twins.alive():
            self.values.bring(twin)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hook.remove()
        self._met.clear()
        self.values.cells.clear()
        entry_points.close_for(self)

    def run(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[Tensor],
        addresses: Iterable[int] | None = None,
        kernel: Callable[..., Any] | None = None,
    ) -> Any:
        """The result of `func(*args, **kwargs)`; values of meta tensors are answered where they are known.

        `tensors` is the flat sequence of the tensor arguments, `addresses` that of their storages
        (`untyped_storage()._cdata`) for a caller who has them, `kernel` what runs on meta in place of `func`.
        DataDependentError where a value is needed and not known.
        """
        self.ran, self.before, self.groups = None, [], None
        rule = self._rules.get(func) or self._look_up(func)
        if not rule.always:
            if addresses is None:
                addresses = map(address, tensors)
            if self.values.cells.keys().isdisjoint(addresses):
                return (kernel or func)(*args, **kwargs)
        return rule.handle(self, Invocation(func, args, kwargs, tensors, rule.writes, kernel))

    def taken_calls(self) -> tuple[list[CallWithResult], RewrittenCall | None]:
        """The calls that CUDA runs before the one that `run` was asked for, and the one that ran in its place. They are
        given once: nothing here keeps their tensors alive."""
        before, ran = self.before, self.ran
        self.before, self.ran = [], None
        return before, ran

    def stands_in_for(self, result: Any) -> bool:
        """Whether an op's result has integers that a program may read though they are unknown."""
        return self.assume.stands_in and any(map(is_count, tensors_in(result)))

    def keep_stand_ins(self, result: Any) -> None:
        """From here on the unknown integers among an op's results have stand-ins."""
        stand_ins.keep(self, result)

    def _meet(self, module: nn.Module, _inputs: Any) -> None:
        if has_initializer(module) and module not in self._met:
            self._met.update(module.modules())
            recall_buffers(module, self.values)

    def _look_up(self, func: Any) -> ValueRule:
        rule = self._rules[func] = rule_of(func, self.assume)
        return rule
