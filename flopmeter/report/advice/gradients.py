"""Gradients that are made without need: filled with zeros, or by several passes through one graph; and what is recorded
for gradients that nobody asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.report.advice.passes import backward_passes, grown_in, read_in
from flopmeter.report.advice.remedies import (
    Proposal,
    priced,
    remedy,
    with_other_ops,
)
from flopmeter.report.advice.rewrite import in_place_of, is_view
from flopmeter.report.quantities import counted
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten, aten_overloads


@remedy
def filled_gradients(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Gradients that are filled with zeros, to which the backward pass then adds."""
    fills = {index for index, op in enumerate(trace.ops) if fills_gradients(trace, op)}
    takes = _taken(trace, set().union(*(trace.ops[index].reads for index in fills)), fills)
    if takes and report.cluster is None:
        yield with_other_ops(
            report, trace, "they are filled with zeros, then read and added to",
            "zero_grad(set_to_none=True)",
            fills, takes, what="gradients",
        )  # fmt: skip


def _taken(trace: Trace, left: set[int], dropped: set[int]) -> dict[int, Op]:
    """What takes the place of the first addition to each gradient that is no longer there."""
    takes = {}
    for each in trace.accumulations:
        op = trace.ops[each.op]
        if each.op not in dropped and op.packet is aten.add_ and op.inputs[0].storage in left:
            takes[each.op] = _takes(op)
            left = left - {op.inputs[0].storage}
    return takes


def _takes(add: Op) -> Op:
    """What autograd does where a leaf has no gradient yet: it keeps what it is given, without a kernel."""
    given = add.inputs[1]
    return in_place_of(add, aten_overloads.detach.default, (given,), {}, (given,), (given,))


def fills_gradients(trace: Trace, op: Op) -> bool:
    """Whether it writes zeros into gradients before a backward pass."""
    if op.packet not in (aten.zero_, aten._foreach_zero_) or op.phase == "backward":
        return False
    return all(trace.storages[spec.storage].role == "gradients" for spec in op.inputs)


@remedy
def recorded_for_nothing(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Inference outside of `torch.no_grad()`."""
    nodes = sum(end.nodes for end in trace.forward_ends)
    if not nodes or any(op.phase == "backward" for op in (*trace.earlier, *trace.ops)):
        return
    without = dataclasses.replace(trace, forward_ends=[end._replace(nodes=0) for end in trace.forward_ends])
    yield Proposal(
        f"autograd records {counted(nodes, 'node')} for a backward pass that does not come, and keeps what they read",
        "torch.inference_mode() around it, if nothing is trained",
        priced(report, without),
    )  # fmt: skip


@remedy
def graphs_walked_twice(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Backward passes of several losses through one graph (`retain_graph=True`): what they share runs for each."""
    passes = backward_passes(trace)
    activations = _activations(trace) if len(passes) > 1 else set()
    dropped, put_in = set[int](), dict[int, Op]()
    for number, early in enumerate(passes):
        kept = _outliving(trace, early, activations)
        if not kept:
            continue
        again = next((late for late in passes[number + 1 :] if _walks_same(trace, early, late, kept)), None)
        if again is None:
            continue
        shared = _shared(trace, early, again)
        reading = (index for index in shared if trace.ops[index].inputs and not is_view(trace.ops[index]))
        first = min(reading, default=None)  # a compiled pass begins with zeros for what the loss does not read
        if first is None:
            continue
        dropped |= shared
        put_in[first] = _sum_of_two(trace, early, first)
    gradients = {out.storage for index in dropped for out in trace.ops[index].outputs}
    put_in |= _taken(trace, gradients, dropped)
    if put_in:
        yield with_other_ops(
            report, trace, "backward() of several losses walks through what they share again and again",
            "one backward() of the sum of the losses, without retain_graph=True",
            dropped, put_in, about=dropped,
        )  # fmt: skip


def _walks_same(trace: Trace, early: range, late: range, kept: set[int]) -> bool:
    """Whether both add to gradients of the same leaves and walk over activations that `kept` names, which nothing reads
    between them, and nothing reads what the first made (a second derivative). Gradients of one batch after another are
    added up, too, but each batch makes its own activations."""
    if not (kept & read_in(trace, late)) - read_in(trace, range(early.stop, late.start)):
        return False
    leaves = [{each.leaf for each in trace.accumulations if each.op in part} for part in (early, late)]
    if not leaves[0] & leaves[1]:
        return False
    read = read_in(trace, range(early.stop, late.stop))
    return not any(trace.storages[number].born in early for number in read - grown_in(trace, late))


def _activations(trace: Trace) -> set[int]:
    """What forward passes made of weights and of something else: not a weight that was cast."""
    of_weights = {number for number, storage in enumerate(trace.storages) if storage.role == "parameters"}
    of_both = set[int]()
    for op in (op for op in trace.ops if op.phase == "forward"):
        read = op.reads
        if read & of_both or (read & of_weights and read - of_weights):
            of_both.update(op.makes)
        elif read & of_weights:
            of_weights.update(op.makes)
    return of_both - of_weights


def _outliving(trace: Trace, part: range, storages: set[int]) -> set[int]:
    """Those of these storages that are made before the pass, read by it, and alive after it."""
    read = ((number, trace.storages[number]) for number in storages & read_in(trace, part))
    return {number for number, each in read if each.born < part.start and (each.died is None or each.died > part.stop)}


def _shared(trace: Trace, early: range, late: range) -> set[int]:
    """The ops of the first pass that the second one runs again for other gradients. Everything that they make ends in
    gradients that the second pass adds to, and the second pass has the same op on the same activations and weights."""
    again = {each.leaf for each in trace.accumulations if each.op in late}
    added_to = {each.op: each.leaf for each in trace.accumulations if each.op in early}
    known = {_on_known(trace, trace.ops[index], early.start) for index in late}
    leads_to: dict[int, set[int]] = {}
    shared = set()
    for index in reversed(early):
        op = trace.ops[index]
        leaves = {leaf for spec in op.outputs for leaf in leads_to.get(spec.storage, ())}
        leaves |= {added_to[index]} if index in added_to else set()
        for spec in op.inputs:
            leads_to.setdefault(spec.storage, set()).update(leaves)
        on = _on_known(trace, op, early.start)
        if leaves and leaves <= again and (not on[1] or on in known):
            shared.add(index)
    return shared


def _on_known(trace: Trace, op: Op, start: int) -> tuple[object, tuple[TensorSpec, ...]]:
    """The op with its inputs replaced by what was there before the backward pass."""
    return op.call.func, tuple(spec for spec in op.inputs if trace.storages[spec.storage].born < start)


def _sum_of_two(trace: Trace, early: range, first: int) -> Op:
    """The addition of the gradients of two losses, where their passes part."""
    op = trace.ops[first]
    made = next((spec for spec in op.inputs if trace.storages[spec.storage].born in early), op.inputs[0])
    both = made, made._replace(storage=op.inputs[-1].storage)
    return in_place_of(op, aten_overloads.add_.Tensor, both, {}, both, (made,))
