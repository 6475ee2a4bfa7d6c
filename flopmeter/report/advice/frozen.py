"""Gradients of weights that nothing reads, as of a backbone that nobody froze."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

from flopmeter.records import BEFORE, Accumulation, Op, Trace
from flopmeter.report.advice.gradients import fills_gradients
from flopmeter.report.advice.remedies import Proposal, of_ops, priced, remedy
from flopmeter.report.advice.rewrite import is_view, with_ops
from flopmeter.report.quantities import with_prefix
from flopmeter.report.report import Report


@remedy
def gradients_of_frozen_weights(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Weights that get gradients, in a step that trains others. What a backward pass computes for them alone would not
    run if they asked for none."""
    given = {each.leaf for each in trace.accumulations if trace.storages[each.leaf].role == "parameters"}
    left = given - _trained(trace)
    if left == given or report.cluster is not None:
        return
    if left:
        adds = {each.op for each in trace.accumulations if each.leaf in left}
        yield _without(
            report, trace, adds, left,
            "of weights that the step does not train",
            "requires_grad_(False) for weights that are not trained",
        )  # fmt: skip
    unread = {each.op: each.leaf for each in _unread(trace) if each.leaf in given - left}
    if unread:
        yield _without(
            report, trace, unread.keys(), set(unread.values()),
            "of weights, and cleared before anything reads them",
            "detach() before or behind them, requires_grad_(False) in that pass, or torch.autograd.grad(loss, inputs)",
        )  # fmt: skip


def _trained(trace: Trace) -> set[int]:
    """The weights that an optimizer has, and those that are written to in the step which reads their gradients. An
    average of weights is written to as well, but nothing reads its gradients."""
    gradients: dict[int, set[int]] = {}
    for each in trace.accumulations:
        gradients.setdefault(each.leaf, set()).update(_made(trace.ops[each.op]))
    others = [op for op in trace.ops if op.phase not in ("backward", "recompute") and not fills_gradients(trace, op)]
    read, written = set().union(*(op.reads for op in others)), set().union(*map(_may_write, trace.ops))
    return {
        leaf
        for leaf, own in gradients.items()
        if trace.storages[leaf].is_trained or (leaf in written and not own.isdisjoint(read))
    }


def _may_write(op: Op) -> set[int]:
    """A kernel that a compiler or the program wrote may write to all that it touches."""
    is_generated = op.graph is not None or op.call.body is not None
    return set(op.storages) if is_generated else {spec.storage for spec in op.written}


def _unread(trace: Trace) -> list[Accumulation]:
    """The additions to gradients that are freed, or filled with zeros, before anything else reads them."""
    end = len(trace.ops)
    gone = {number for number, storage in enumerate(trace.storages) if storage.died is not None and storage.died < end}
    gone |= _cleared_next(trace)
    adds = {each.op: each for each in trace.accumulations}
    unread = []
    for index in reversed(range(end)):
        op = trace.ops[index]
        if index in adds:
            unread += [adds[index]] if _made(op) <= gone else []
        elif fills_gradients(trace, op):
            gone |= {spec.storage for spec in op.written}
        elif not is_view(op):
            gone -= op.reads
    return unread


def _cleared_next(trace: Trace) -> set[int]:
    """Gradients that are there at the end, and cleared unread then if the next step treats them as this one did those
    that were there at its start."""
    adds = {each.op for each in trace.accumulations}
    made = set().union(*(_made(trace.ops[index]) for index in adds))
    before = {number for number, each in enumerate(trace.storages) if each.role == "gradients" and each.born == BEFORE}
    first: dict[int, bool] = {}  # whether what comes first clears it
    read = set[int]()
    for index, op in enumerate(trace.ops):
        clears = fills_gradients(trace, op)
        if not is_view(op):
            first.update(dict.fromkeys(_made(op).union(op.reads) - first.keys(), clears))
            read |= set() if clears or index in adds else op.reads
    freed = {number for number in before if trace.storages[number].died not in (None, BEFORE)}
    are_unread = bool(freed) and freed.isdisjoint(read)
    return {number for number in made if (first[number] if number in before else are_unread)}


def _made(op: Op) -> set[int]:
    return op.makes.union(spec.storage for spec in op.written)


def _without(report: Report, trace: Trace, adds: Collection[int], leaves: set[int], why: str, remedy: str) -> Proposal:
    """The run without these additions to gradients, and what was computed for them alone. What autograd records goes
    with what it would have walked."""
    needless, narrowed = _needless(trace, adds)
    walked = {index for index, op in enumerate(trace.ops) if op.phase == "backward" and not is_view(op)}
    share = len(walked - needless) / max(1, len(walked))
    then = with_ops(trace, needless, narrowed)
    passes = [each._replace(nodes=round(each.nodes * share)) for each in then.backward_passes]
    then = dataclasses.replace(then, backward_passes=passes)
    size = with_prefix(sum(trace.storages[leaf].nbytes for leaf in leaves), "B")
    about = of_ops(trace, needless | narrowed.keys())
    return Proposal(f"gradients are computed of {size} {why}", remedy, priced(report, then), about)


def _needless(trace: Trace, adds: Collection[int]) -> tuple[set[int], dict[int, Op]]:
    """The ops of backward passes whose results go into these additions to gradients, or nowhere; and what takes the
    place of those of which one result does."""
    kept = {number for number, storage in enumerate(trace.storages) if storage.born < 0 or storage.died is None}
    kept -= {number for op in adds for number in trace.ops[op].makes}
    others = {each.op for each in trace.accumulations} - set(adds)
    needless, narrowed = set[int](), dict[int, Op]()
    for index in reversed(range(len(trace.ops))):
        op = trace.ops[index]
        made = _made(op)
        is_for_nothing = bool(made) and kept.isdisjoint(made) and index not in others
        if op.phase in ("backward", "recompute") and (is_for_nothing or index in adds):
            needless.add(index)
            continue
        kept |= op.reads
        if op.phase == "backward" and not made <= kept and (now := _narrowed(op, kept)):
            narrowed[index] = now
    return needless, narrowed


def _narrowed(op: Op, kept: set[int]) -> Op | None:
    """The op with only those of its results, where it has a mask that says which are wanted."""
    call, names = op.call, [each.name for each in op.call.func._schema.arguments]
    if "output_mask" not in names or sum(call.argument("output_mask")) != len(call.outputs):
        return None
    wanted = iter([spec.storage in kept for spec in op.outputs])
    mask = tuple(each and next(wanted) for each in call.argument("output_mask"))
    values = {**dict(zip(names, call.args, strict=False)), **call.kwargs, "output_mask": mask}
    outputs = tuple(spec for spec, of_op in zip(call.outputs, op.outputs, strict=True) if of_op.storage in kept)
    return op._replace(call=dataclasses.replace(call, args=(), kwargs=values, outputs=outputs))
