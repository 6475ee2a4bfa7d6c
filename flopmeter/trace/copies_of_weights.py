"""Which storages that were there before a part of a program hold what follows from its weights, and no data.

No module that ran and no optimizer of torch's holds them: an average of the weights (EMA) in a list or a dictionary,
weights that were saved for later, the momentum of an optimizer that the program writes out. They are told by what is
written into them: something of the shape of a weight that is computed from weights, and from the like of them, alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flopmeter.records import BEFORE, Op, StorageRole, Trace
from flopmeter.torch_names.operators import aten

_BY_PRECEDENCE: tuple[StorageRole, ...] = ("gradients", "copies of weights", "parameters")


def note_copies_of_weights(part: Trace, whole: Trace) -> None:
    """Gives these storages of a part of a trace their role: "copies of weights", or "optimizer state" where gradients
    went into them too, or "parameters" if they came from the host as such. They may have been made, and written, before
    the part."""
    kept = {
        number
        for number, storage in enumerate(part.storages)
        if storage.role is None and storage.born == BEFORE and storage.device == part.device
    }
    touching = (op for op in whole.ops if not kept.isdisjoint(op.storages))
    if all(kept.isdisjoint(op.fills) for op in touching):
        return  # no op of this program filled them: most programs' data
    follows = _Follows(whole, kept)
    for op in whole.ops:
        follows.see(op)
    for number in kept & follows.roles.keys():
        part.storages[number].role = follows.roles[number]


class _Follows:
    """Tells, op by op, what follows from weights. `roles`: of the storages that do."""

    def __init__(self, whole: Trace, kept: set[int]) -> None:
        self._shapes = shapes_of_weights(whole)
        self._open = set(kept)  # what may follow from weights or be data, if it has a weight's shape
        self.roles = _roots(whole)

    def see(self, op: Op) -> None:
        if self.roles.keys().isdisjoint(op.storages) and self._open.isdisjoint(op.storages):
            return
        results = [number for number, shape in _results(op) if shape in self._shapes and number not in self.roles]
        if not results:
            return
        inputs = [(op.storages[spec.storage], spec.shape) for spec in op.call.inputs if spec.shape]  # no single numbers
        known = {self.roles[number] for number, _ in inputs if number in self.roles}
        overwritten = {spec.storage for spec in op.written} if _only_writes(op) else set()
        others = [each for each in inputs if each[0] not in self.roles.keys() | overwritten]
        if others and not (_is_element_wise(op) and all(map(self._is_open, others))):
            return
        if known:
            self.roles |= dict.fromkeys(results, _role(known, bool(others)))
        elif others:
            self._open.update(results)

    def _is_open(self, given: tuple[int, tuple[int, ...]]) -> bool:
        number, shape = given
        return number in self._open and shape in self._shapes


def shapes_of_weights(trace: Trace) -> set[tuple[int, ...]]:
    weights = {number for number, storage in enumerate(trace.storages) if storage.role == "parameters"}
    touching = (op for op in trace.ops if not weights.isdisjoint(op.storages))
    seen = ((op.storages[spec.storage], spec.shape) for op in touching for spec in op.call.inputs)
    return {shape for number, shape in seen if number in weights}


def _roots(whole: Trace) -> dict[int, StorageRole]:
    """What follows from weights as such: themselves, their gradients and what optimizers keep. What is made of weights
    on another device alone is these weights, moved, whether or not their module runs then."""
    roots: dict[int, StorageRole] = {}
    for number, storage in enumerate(whole.storages):
        if storage.role == "parameters":
            roots[number] = "copies of weights" if storage.device == whole.device else "parameters"
        elif storage.role in ("gradients", "optimizer state"):
            roots[number] = storage.role
    for place, leaf in whole.accumulations:
        if leaf in roots and place < len(whole.ops):
            roots.update(dict.fromkeys(whole.ops[place].makes - roots.keys(), "gradients"))
    return roots


def _role(known: set[StorageRole], has_others: bool) -> StorageRole:
    """Of what follows from these. Gradients alone make gradients, as in a bucket of DDP's; added up with what was there
    before, they make the optimizer's momentum."""
    if "optimizer state" in known or ("gradients" in known and (has_others or len(known) > 1)):
        return "optimizer state"
    return next(each for each in _BY_PRECEDENCE if each in known)


def _only_writes(op: Op) -> bool:
    """Whether it does not read what it writes."""
    is_out = any(argument.is_out for argument in op.call.func._schema.arguments)
    return is_out or op.packet in (aten.copy_, aten._foreach_copy_)


def _is_element_wise(op: Op) -> bool:
    """Whether each element of the result follows from those in its place: not so of a product of data and weights."""
    func = op.call.func
    return torch.Tag.pointwise in func.tags or func._schema.is_mutable or op.packet is aten._to_copy


def _results(op: Op) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Its outputs, and what it writes in place: lists of tensors are no outputs."""
    yield from ((op.storages[spec.storage], spec.shape) for spec in op.call.outputs)
    yield from ((spec.storage, spec.shape) for spec in op.written)
