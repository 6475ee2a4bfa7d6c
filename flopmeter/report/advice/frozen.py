"""Gradients of weights that nothing reads: of a backbone that nobody froze, or cleared before an optimizer's step."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator

from flopmeter.records import BEFORE, Op, Trace
from flopmeter.report.advice.gradients import fills_gradients
from flopmeter.report.advice.remedies import Proposal, of_ops, priced, remedy, trace_of
from flopmeter.report.advice.rewrite import is_view, with_ops
from flopmeter.report.quantities import with_prefix
from flopmeter.report.report import Report


@remedy
def gradients_of_frozen_weights(report: Report) -> Iterator[Proposal]:
    """Weights that get gradients, in a step that updates others."""
    trace = trace_of(report)
    yield from _without_gradients(
        report, {each.op for each in trace.accumulations if each.leaf not in _written(trace)},
        "gradients are computed of {} of weights that the step does not update",
        "requires_grad_(False) for weights that nothing updates",
    )  # fmt: skip


@remedy
def gradients_that_are_cleared(report: Report) -> Iterator[Proposal]:
    """Gradients that no optimizer reads before they are cleared, as of a critic in its generator's backward pass."""
    trace = trace_of(report)
    updated, cleared = _written(trace), _cleared_unread(trace)
    yield from _without_gradients(
        report, {each.op for each in trace.accumulations if each.leaf in updated and each.op in cleared},
        "gradients of {} of weights are computed, and cleared before anything reads them",
        "detach() before these weights or behind them, or requires_grad_(False) on them in that backward pass",
    )  # fmt: skip


def _without_gradients(report: Report, in_vain: set[int], why: str, remedy: str) -> Iterator[Proposal]:
    """The run without these additions to gradients, and without what a backward pass computes for them alone."""
    trace = trace_of(report)
    leaves = {each.op: each.leaf for each in trace.accumulations if trace.storages[each.leaf].role == "parameters"}
    in_vain = in_vain & leaves.keys()
    if not in_vain or report.cluster is not None or _written(trace).isdisjoint(leaves.values()):
        return
    needless = _needless(trace, in_vain)
    size = with_prefix(sum(trace.storages[leaf].nbytes for leaf in {leaves[op] for op in in_vain}), "B")
    then = priced(report, _without(trace, needless))
    yield Proposal("", of_ops(trace, needless), why.format(size), remedy, then)


def _written(trace: Trace) -> set[int]:
    return set().union(*map(_may_write, trace.ops))


def _cleared_unread(trace: Trace) -> set[int]:
    """The additions to gradients after which these are filled with zeros, or freed, unread. What is alive at the end
    goes as what was there at the start went."""
    additions = {each.op for each in trace.accumulations}
    pending: dict[int, list[int]] = defaultdict(list)  # by the storage of the gradient
    found, begun, read = set[int](), dict[int, str](), set[int]()
    for index, op in enumerate(trace.ops):
        touched = op.makes.union(op.reads)
        if index in additions:
            for number in op.makes:
                pending[number].append(index)
                begun.setdefault(number, "added to")
        elif fills_gradients(trace, op):
            for number in touched:
                found.update(pending.pop(number, ()))
                begun.setdefault(number, "cleared")
        else:
            read |= touched
            for number in touched & pending.keys():
                del pending[number]
    before = {
        number
        for number, each in enumerate(trace.storages)
        if each.role == "gradients" and each.born == BEFORE != each.died
    }
    are_unread = bool(before) and before.isdisjoint(read)
    for number, ops in pending.items():
        storage = trace.storages[number]
        is_alive = storage.died is None or storage.died >= len(trace.ops)
        if not is_alive or (begun[number] == "cleared" if storage.born == BEFORE else are_unread):
            found.update(ops)
    return found


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


def _needless(trace: Trace, in_vain: set[int]) -> set[int]:
    """The ops of backward passes whose results go into these additions to gradients alone, or nowhere."""
    additions = {each.op for each in trace.accumulations}
    gradients = {number for op in in_vain for number in trace.ops[op].makes}
    kept = {number for number, storage in enumerate(trace.storages) if storage.born < 0 or storage.died is None}
    kept -= gradients
    needless = set[int]()
    for index in reversed(range(len(trace.ops))):
        op = trace.ops[index]
        made = op.makes.union(spec.storage for spec in op.written)
        is_for_nothing = bool(made) and kept.isdisjoint(made) and index not in additions
        if op.phase in ("backward", "recompute") and (is_for_nothing or index in in_vain):
            needless.add(index)
        else:
            kept |= op.reads
    return needless
