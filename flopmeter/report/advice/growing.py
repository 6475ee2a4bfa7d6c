"""Tensors that grow by `torch.cat`: each step copies all that was there before, as caches of keys and values do."""

from __future__ import annotations

from collections.abc import Iterator

from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.report.advice.copies import Whereabouts, takes
from flopmeter.report.advice.fused_attention import is_fused_attention
from flopmeter.report.advice.remedies import Proposal, has_backward, remedy, with_other_ops
from flopmeter.report.advice.rewrite import in_place_of, is_view, rebuilt
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten, aten_overloads

LEAST_STEPS = 3


@remedy
def grown_by_cat(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Tensors that each step grows by `torch.cat`. Not in training, where the backward pass reads each of them."""
    if has_backward(trace):
        return
    chains = _chains(trace)
    places = {number: place for chain in chains for number, place in _in_one_piece(trace, chain).items()}
    needed = _needed(trace, places)
    kept = [chain for chain in chains if needed.isdisjoint(trace.ops[index].outputs[0].storage for index in chain)]
    cats = {index for chain in kept for index in chain}
    places = {number: places[number] for index in cats for number in [trace.ops[index].outputs[0].storage]}
    put_in = {index: _written(op, places) for index, op in enumerate(trace.ops) if index in cats}
    put_in |= {
        index: _read(op, places)
        for index, op in enumerate(trace.ops)
        if index not in cats and not is_view(op) and not places.keys().isdisjoint(op.storages)
    }
    if cats:
        yield with_other_ops(
            report, trace, "each step copies all that the steps before made",
            "write each step's part into memory for all of them (a static cache), in place of torch.cat",
            (), put_in, put_before={index: _views(trace.ops[index], places) for index in cats}, about=cats,
        )  # fmt: skip


def _chains(trace: Trace) -> list[list[int]]:
    """Ops that put one more tensor behind what the last such op made."""
    ends: dict[int, list[int]] = {}  # by storage of what there is so far
    found: list[list[int]] = []
    for index, op in enumerate(trace.ops):
        if op.packet is not aten.cat or len(op.inputs) != 2:
            continue
        before, out = op.inputs[0], op.outputs[0]
        chain = ends.pop(before.storage, None)
        if chain is None or trace.ops[chain[-1]].outputs[0] != before:
            found.append(chain := [])
        chain.append(index)
        ends[out.storage] = chain
    return [chain for chain in found if len(chain) >= LEAST_STEPS]


def _in_one_piece(trace: Trace, chain: list[int]) -> dict[int, Whereabouts]:
    """Where the result of each op lies if all of them are written into the last one's."""
    whole = trace.ops[chain[-1]].outputs[0]
    parts = (trace.ops[index].outputs[0] for index in chain)
    return {
        part.storage: Whereabouts(part.shape, part.stride, whole._replace(shape=part.shape), chain[-1])
        for part in parts
    }


def _needed(trace: Trace, places: dict[int, Whereabouts]) -> set[int]:
    """Storages whose readers want them as they are."""
    found = set[int]()
    for op in trace.ops:
        if is_view(op) or op.packet is aten.cat:
            continue
        for spec in op.inputs:
            if (place := places.get(spec.storage)) is None:
                continue
            now = place.of(spec)
            is_taken = now is not None and (now.stride == spec.stride or is_fused_attention(op) or takes(op, now))
            if not is_taken or op.call.func._schema.is_mutable:
                found.add(spec.storage)
    return found


def _written(op: Op, places: dict[int, Whereabouts]) -> Op:
    """The kernel that copies only the new part to its place."""
    there, part = _place(op, places), op.inputs[1]
    return in_place_of(op, aten_overloads.copy_.default, (there, part), {}, (there, part), (there,))


def _place(op: Op, places: dict[int, Whereabouts]) -> TensorSpec:
    (before, part), now, dim = op.inputs, places[op.outputs[0].storage].now, op.call.argument("dim")
    return now._replace(shape=part.shape, offset=now.offset + before.shape[dim] * now.stride[dim])


def _views(op: Op, places: dict[int, Whereabouts]) -> list[Op]:
    """Views of the place of the new part, and of all that there is then; the host makes them."""
    now, dim = places[op.outputs[0].storage].now, op.call.argument("dim")
    slices = ((_place(op, places), now.shape[dim] - op.inputs[1].shape[dim]), (now, 0))
    return [
        in_place_of(op, aten_overloads.slice.Tensor, (now, dim, start, now.shape[dim]), {}, (now,), (view,))
        for view, start in slices
    ]


def _read(op: Op, places: dict[int, Whereabouts]) -> Op:
    def now(spec: TensorSpec) -> TensorSpec:
        place = places.get(spec.storage)
        return spec if place is None else place.of(spec) or spec

    return rebuilt(op, now)
