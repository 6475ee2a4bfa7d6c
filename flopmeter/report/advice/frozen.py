"""Gradients of weights that the step does not update, as of a backbone that nobody froze."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from flopmeter.records import Op, Trace
from flopmeter.report.advice.remedies import Proposal, of_ops, priced, remedy, trace_of
from flopmeter.report.advice.rewrite import is_view, with_ops
from flopmeter.report.quantities import with_prefix
from flopmeter.report.report import Report


@remedy
def gradients_of_frozen_weights(report: Report) -> Iterator[Proposal]:
    """Weights that get gradients, in a step that updates others. What a backward pass computes for them alone would not
    run if they asked for none."""
    trace = trace_of(report)
    given = {each.leaf for each in trace.accumulations if trace.storages[each.leaf].role == "parameters"}
    written = set().union(*map(_may_write, trace.ops))
    left = given - written
    if not left or not given & written or report.cluster is not None:
        return
    needless = _needless(trace, left)
    size = with_prefix(sum(trace.storages[leaf].nbytes for leaf in left), "B")
    yield Proposal(
        "", of_ops(trace, needless),
        f"gradients are computed of {size} of weights that the step does not update",
        "requires_grad_(False) for weights that nothing updates",
        priced(report, _without(trace, needless)),
    )  # fmt: skip


def _may_write(op: Op) -> set[int]:
    """A kernel that a compiler or the program wrote may write to all that it touches."""
    is_generated = op.graph is not None or op.call.body is not None
    return set(op.storages) if is_generated else {spec.storage for spec in op.written}


def _without(trace: Trace, needless: set[int]) -> Trace:
    """The trace without these ops. What autograd records goes with what it would have walked."""
    walked = {index for index, op in enumerate(trace.ops) if op.phase == "backward" and not is_view(op)}
    share = len(walked - needless) / max(1, len(walked))
    then = with_ops(trace, needless)
    passes = [each._replace(nodes=round(each.nodes * share)) for each in then.backward_passes]
    return dataclasses.replace(then, backward_passes=passes)


def _needless(trace: Trace, leaves: set[int]) -> set[int]:
    """The ops of backward passes whose results go into gradients of these leaves, or nowhere."""
    added_to = {each.op: each.leaf for each in trace.accumulations}
    gradients = {number for op, leaf in added_to.items() if leaf in leaves for number in trace.ops[op].makes}
    kept = {number for number, storage in enumerate(trace.storages) if storage.born < 0 or storage.died is None}
    kept -= gradients
    needless = set[int]()
    for index in reversed(range(len(trace.ops))):
        op = trace.ops[index]
        made = op.makes.union(spec.storage for spec in op.written)
        is_for_nothing = bool(made) and kept.isdisjoint(made) and index not in added_to
        if op.phase in ("backward", "recompute") and (is_for_nothing or added_to.get(index) in leaves):
            needless.add(index)
        else:
            kept |= op.reads
    return needless
