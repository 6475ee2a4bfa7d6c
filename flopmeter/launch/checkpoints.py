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
    detached = detached_for(trace, again)
    marks = dict.fromkeys(again, "a") | dict.fromkeys(detached, "d")
    runs = "".join(marks.get(index, " ") for index in range(len(trace.ops))).split()
    checkpoints = sum("ad" in run for run in runs)
    return checkpoints, len(detached) / 2 if checkpoints else 0.0


def _detaches(op: Op) -> bool:
    return op.phase == "backward" and op.packet is aten.detach
