"""Checkpoints of activations, by what their hooks leave in the trace."""

from __future__ import annotations

from collections.abc import Collection

from flopmeter.records import Op, Trace
from flopmeter.torch_names.operators import aten


def detached_for(trace: Trace, again: Collection[int]) -> list[int]:
    """The calls of `detach` in backward passes on storages of the ops that run `again`: what a checkpoint takes in,
    saves a second time and gives back."""
    handed_over = {number for index in again for number in trace.ops[index].storages}
    return [index for index, op in enumerate(trace.ops) if _detaches(op) and op.storages[0] in handed_over]


def hooked_checkpoints(trace: Trace) -> tuple[int, float]:
    """How many checkpoints with `use_reentrant=False` run again op by op, and how many tensors their hooks save.

    The hooks detach each tensor when it is saved again, between the ops that run again, and when it is given back.
    Nothing is detached there in a checkpoint with `use_reentrant=True`, nor where a solver calls its function anew."""
    again = [index for index, op in enumerate(trace.ops) if op.phase == "recompute" and op.graph is None]
    if not again:
        return 0, 0.0
    detached = set(detached_for(trace, again))
    runs_again, checkpoints, is_counted = set(again), 0, False
    is_running = False
    for index in range(again[0], len(trace.ops)):
        if index in runs_again:
            is_running = True
        elif index not in detached:
            is_running = is_counted = False
        elif is_running and not is_counted:
            checkpoints, is_counted = checkpoints + 1, True
    return checkpoints, len(detached) / 2 if checkpoints else 0.0


def _detaches(op: Op) -> bool:
    return op.phase == "backward" and op.packet is aten.detach
