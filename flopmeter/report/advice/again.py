"""Work that is done again: an op on tensors that hold what they held when it ran before, in the step before or earlier
in this one, as tables of angles that each layer makes, or keys and values of a text that each new token makes.

What a storage holds gets a number, as compilers number values: an op whose operands have the numbers that they had
before makes what has the number of its result before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Literal

import torch

from flopmeter.records import BEFORE, Call, Op, Storage, Trace
from flopmeter.report.advice.remedies import Proposal, has_backward, of_ops, priced, remedy
from flopmeter.report.advice.rewrite import PRODUCTS, is_view, with_ops
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten


@remedy
def computed_again(report: Report, trace: Trace) -> Iterator[Proposal]:
    earlier = trace.earlier if has_backward(trace) or _goes_on(trace) else []
    again, kept = _again(trace, earlier)
    casts = {index for index in again if _casts_a_weight(trace, trace.ops[index])}
    if casts:
        narrow = {str(trace.ops[index].outputs[0].dtype) for index in casts}
        yield _without(
            report, trace, casts, "autocast casts weights that nothing updates in each step again",
            f"keep weights that are not trained in {' or '.join(sorted(narrow))}: .to() before the loop",
        )  # fmt: skip
    across = again & kept - casts
    if across:
        yield _without(
            report, trace, across, "computed from the same tensors in each step",
            "compute it once and keep it, before the loop",
        )  # fmt: skip
    if within := again - across - casts:
        yield _without(
            report, trace, within, "computed from the same tensors more than once", "compute it once and hand it on",
        )  # fmt: skip


def _without(report: Report, trace: Trace, again: set[int], why: str, remedy: str) -> Proposal:
    """Autograd records none of these: what follows from weights that are trained changes."""
    then = with_ops(trace, again)
    pairs = zip(then.backward_passes, trace.backward_passes, strict=True)
    then = dataclasses.replace(then, backward_passes=[now._replace(nodes=before.nodes) for now, before in pairs])
    return Proposal(why, remedy, priced(report, then), of_ops(trace, again))


def _casts_a_weight(trace: Trace, op: Op) -> bool:
    if op.packet is not aten._to_copy or not op.inputs:  # torch.vmap casts numbers, too
        return False
    is_weight = trace.storages[op.inputs[0].storage].role == "parameters"
    return is_weight and op.inputs[0].dtype != op.outputs[0].dtype


def _goes_on(trace: Trace) -> bool:
    """Whether a step of inference has another input than the one before: from the host, or what that one made and
    weights are applied to (not scores that are only picked from). One that has not is a benchmark: in use each would
    get something else."""
    made = set().union(*(op.fills for op in trace.earlier))
    there = {number for number, each in enumerate(trace.storages) if each.role is None and each.born == BEFORE}
    has_weights = any(storage.role == "parameters" for storage in trace.storages)
    follows = there & made
    for op in trace.ops:
        if any(spec.device == "cpu" and spec.numel > 1 and spec.storage in there for spec in op.inputs):
            return True
        if follows.isdisjoint(op.reads):
            continue
        if not has_weights or any(trace.storages[number].role == "parameters" for number in op.reads):
            return True
        follows |= op.makes | op.fills
    return False


def _again(trace: Trace, earlier: Sequence[Op]) -> tuple[set[int], set[int]]:
    """The ops of forward passes that compute what is there already, and stays, for others that do not; and those whose
    result was there before the step."""
    ops = (*earlier, *trace.ops)
    contents = _Contents(trace.storages, {number for op in ops for number in _overwritten(op)})
    for op in earlier:
        contents.meet(op)
    contents.begin_step()
    if has_backward(trace):  # another batch may lie where the last one did
        contents.forget(number for number, storage in enumerate(trace.storages) if storage.role is None)
    learned = _learned(trace)
    known, kept = set[int](), set[int]()
    for index, op in enumerate(trace.ops):
        met = contents.meet(op)
        if met != "new" and op.phase == "forward" and learned.isdisjoint(op.makes):
            known.add(index)
            kept |= {index} if met == "before the step" else set()
    needed = {number for index, op in enumerate(trace.ops) if index not in known for number in op.reads}
    again, made = set[int](), set[int]()
    for index in sorted(known, reverse=True):
        op = trace.ops[index]
        if not is_view(op) and not needed.isdisjoint(op.makes):
            again.add(index)
            made |= op.makes
            needed |= op.reads
    views = {index for index in known - again if is_view(trace.ops[index]) and _goes_too(trace, index, again, made)}
    return again | views, kept


def _overwritten(op: Op) -> set[int]:
    return op.averages.union(spec.storage for spec in op.written)


def _learned(trace: Trace) -> set[int]:
    """What follows from weights that get gradients: a backward pass runs for each time that it is computed."""
    learned = {each.leaf for each in trace.accumulations}
    for op in trace.ops:
        if op.phase == "forward" and not learned.isdisjoint(op.reads):
            learned |= op.makes
    return learned


def _goes_too(trace: Trace, view: int, again: set[int], made: set[int]) -> bool:
    """Whether it is a view of what such an op made, or one that the program takes for such an op. A linear layer takes
    its own views of what it is given."""
    after = next((place for place in range(view + 1, len(trace.ops)) if not is_view(trace.ops[place])), None)
    if after is not None and after not in again and trace.ops[after].packet in PRODUCTS:
        return False
    return after in again or not made.isdisjoint(trace.ops[view].makes)


class _Contents:
    """What storages hold. `overwritten`: those that are written to after they were made, and do not stay."""

    def __init__(self, storages: Sequence[Storage], overwritten: set[int]) -> None:
        self._storages, self._overwritten = storages, overwritten
        self._numbers = count()
        self._held: dict[int, object] = {}  # by storage
        self._made: dict[tuple[Call, tuple[object, ...]], int] = {}
        self._kept = set[int]()  # results that stay
        self._kept_before = set[int]()  # of these, those from before the step

    def forget(self, storages: Iterator[int]) -> None:
        for number in storages:
            self._held.pop(number, None)

    def begin_step(self) -> None:
        self._kept_before = set(self._kept)

    def meet(self, op: Op) -> Literal["new", "in the step", "before the step"]:
        """Whether the op computes what another one did that ran before it, and when."""
        reads = op.reads
        changed = op.fills | op.averages
        if not _is_fixed(op, self._storages):
            self._held.update((number, next(self._numbers)) for number in changed)
            return "new"
        key = op.call, tuple(self._value(number) for number in op.storages if number in reads)
        result = self._made.setdefault(key, next(self._numbers))
        self._held.update((number, (result, op.storages.index(number))) for number in changed)
        if not changed.isdisjoint(self._overwritten):
            return "new"
        is_known = result in self._kept
        self._kept.add(result)
        return "before the step" if result in self._kept_before else "in the step" if is_known else "new"

    def _value(self, storage: int) -> object:
        return self._held.setdefault(storage, next(self._numbers))


def _is_fixed(op: Op, storages: Sequence[Storage]) -> bool:
    """Whether its operands decide its result. What lies on the host may be changed by others than torch, and no call
    says which element of a tensor there it takes: a number alone is one. A graph that is replayed has one memory for
    all replays, so that its program may have put other inputs there."""
    func = op.call.func
    is_random = torch.Tag.nondeterministic_seeded in func.tags
    is_torch = func.namespace == "aten" and op.graph is None and op.call.body is None and not op.is_replayed
    return (
        is_torch
        and not is_random
        and not any(spec.device == "cpu" and storages[spec.storage].nbytes > spec.dtype.itemsize for spec in op.inputs)
    )
