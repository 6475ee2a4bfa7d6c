"""Checkpointing, where memory has room for the activations."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from flopmeter.costs.data_movement.communication import message_peers
from flopmeter.launch.checkpoints import detached_for
from flopmeter.records import Storage, Trace
from flopmeter.report.advice.remedies import Proposal, remedy, room_for, with_other_ops
from flopmeter.report.advice.spots import timed
from flopmeter.report.report import Report


@remedy
def needless_recomputation(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Checkpointing, although memory has room for the activations that it drops. It detaches each tensor that it saves
    and each that it gives back, which costs the host time."""
    again = _of_checkpoints(trace)
    ops = {id(trace.ops[index]) for index in again}
    recomputes = [kernel for kernel, _ in timed(report) if id(kernel.op) in ops]
    if not recomputes:  # views alone cost the device nothing
        return
    if 2 * sum(_of_the_backward_pass(report)) > len(recomputes):
        return
    gathers = any(kernel.cost.collective is not None for kernel in recomputes)  # for the backward pass too
    if gathers or message_peers(report.kernels):  # a pipeline has several microbatches under way
        return
    if room := room_for(report, _most_kept_bytes(trace, again)):
        yield with_other_ops(
            report, trace, f"the forward pass runs again, and memory has room: {room} without",
            "no checkpointing",
            again.union(detached_for(trace, again)), about=again,
        )  # fmt: skip


def _of_checkpoints(trace: Trace) -> set[int]:
    """The ops that run again, module by module. Where a module's forward pass has not run most of them, none does: a
    function of autograd may build a graph of its own in its backward pass, for a penalty whose gradient it adds."""
    before = {(op.module, op.call.name) for op in trace.ops if op.phase == "forward"}
    again = defaultdict[str, list[int]](list)
    for index, op in enumerate(trace.ops):
        if op.phase == "recompute":
            again[op.module].append(index)
    found = set[int]()
    for module, indices in again.items():
        known = sum((module, trace.ops[index].call.name) in before for index in indices)
        if not before or 2 * known >= len(indices):  # none before: only the backward pass was metered
            found.update(indices)
    return found


def _of_the_backward_pass(report: Report) -> Iterator[bool]:
    """Whether each kernel that runs again works on what the backward pass computed. No checkpoint's does, whose
    forward pass begins with what was saved; a module at another place of its solver does (adjoint methods of
    differential equations, layers that are inverted), and no forward pass has run it before."""
    computed: set[int] = set()
    for kernel, _ in timed(report):
        op = kernel.op
        goes_on = bool(op.reads & computed)
        if goes_on or (op.phase == "backward" and kernel.cost.flops):
            computed |= op.makes
        if op.phase == "recompute":
            yield goes_on


def _most_kept_bytes(trace: Trace, again: set[int]) -> int:
    """What ops that run `again` leave for other ops, in the backward pass where that is most: a forward pass that runs
    once would have to keep that much. The next microbatch takes the same place."""
    made = defaultdict[int, list[Storage]](list)
    for storage in trace.storages:
        made[storage.born].append(storage)
    left, after = Counter[int](), len(trace.ops)
    for index in reversed(range(len(trace.ops))):
        if index not in again:
            after = index
            continue
        left[index] = sum(storage.nbytes for storage in made[index] if storage.died is None or storage.died > after)
    most = now = 0
    for index, op in enumerate(trace.ops):
        now = 0 if op.phase == "forward" else now + left[index]
        most = max(most, now)
    return most
