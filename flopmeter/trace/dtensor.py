"""Ops on DTensors: those that are run only to learn shapes are not metered, and how many the host dispatches is noted.

Works around: DTensor runs each op on fake tensors of the global shape. That is done on the host and once for each
shape; no kernel does it, but the dispatch modes that are on see it.
Until: DTensor switches these modes off for it.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

from torch import Tensor

from flopmeter.known_values import KnownValues
from flopmeter.records import Trace
from flopmeter.torch_names.around import around
from flopmeter.torch_names.private import PROPAGATE, no_dispatch_modes
from flopmeter.torch_names.shared_patch import SharedPatch

# An op on lists takes .6 to 2.9 µs for each DTensor of them (foreach and fused Adam, clipped gradients, 20 and 120
# parameters), where one of a few tensors takes 44 (device/profile_parts.py): a part of such an op each.
OPS_PER_LISTED = 1 / 25


def note_dtensor_op(trace: Trace, kind: type, args: tuple[Any, ...]) -> None:
    """The host dispatches an op on tensors of that type; the ops on the tensors inside come after it."""
    if _is_dtensor(kind):
        lists = (each for each in args if isinstance(each, list | tuple) and each and isinstance(each[0], Tensor))
        listed = sum(map(len, lists))
        number = len(trace.ops)
        trace.dtensor_ops[number] = trace.dtensor_ops.get(number, 0.0) + 1.0 + OPS_PER_LISTED * listed


@functools.cache
def _is_dtensor(kind: type) -> bool:
    return any(base.__name__ == "DTensor" and base.__module__.startswith("torch.") for base in kind.__mro__)


def unseen_propagation(_known: KnownValues) -> AbstractContextManager[None]:
    """In this context no dispatch mode sees the ops that DTensor runs to find shapes."""
    # A program without DTensors need not pay for their import.
    return _patch if PROPAGATE.loaded and PROPAGATE.present() else nullcontext()


def _install() -> ExitStack:
    undo = ExitStack()
    undo.enter_context(PROPAGATE.replaced(_without_modes(PROPAGATE.value)))
    return undo


_patch = SharedPatch(_install)


@around
def _without_modes(method: Any, *args: Any, **kwargs: Any) -> Any:
    with no_dispatch_modes():
        return method(*args, **kwargs)
