"""Rows of products that nobody reads, as the scores of all tokens of a prompt where the last one's are wanted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise, product

import torch

from flopmeter.costs.rules import in_one_piece
from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.records.memory_format import dense_strides
from flopmeter.report.advice.remedies import Proposal, has_backward, remedy, with_other_ops
from flopmeter.report.advice.rewrite import CASTS, PRODUCTS, is_view, rebuilt
from flopmeter.report.report import Report

LEAST_UNREAD = 2  # times as many rows are made as are read


@remedy
def unread_rows(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Products with rows that nobody reads. Not in training, where these rows have gradients of zeros."""
    if has_backward(trace):
        return
    rows = _read_rows(trace)
    put_in = {}
    for index, op in enumerate(trace.ops):
        kept = rows.get(op.outputs[0].storage) if op.outputs else None
        made_here = kept and trace.storages[op.outputs[0].storage].born == index
        if kept and (made_here or not is_view(op)):
            put_in[index] = _cut(op, rows, kept)
        elif not is_view(op) and not rows.keys().isdisjoint(op.storages):
            put_in[index] = _cut(op, rows, [])
    about = {index for index in put_in if trace.ops[index].packet in PRODUCTS}
    if about:
        yield with_other_ops(
            report, trace, "of most rows that it makes nothing is read",
            "take the rows that are read before the product (logits_to_keep of transformers), not after it",
            (), put_in, about=about,
        )  # fmt: skip


def _read_rows(trace: Trace) -> dict[int, list[int]]:
    """The rows that are read, where few are, of each storage that a product begins and nobody reads any more at the
    end."""
    made_as = _made_as(trace)
    read: dict[int, set[int] | None] = {}  # by storage; None: all
    for index in range(len(trace.ops) - 1, -1, -1):
        op = trace.ops[index]
        if is_view(op):
            continue
        out = op.outputs[0] if len(op.outputs) == 1 else None
        through = out is not None and _goes_row_by_row(op, out) and trace.storages[out.storage].born == index
        for spec in op.inputs:
            storage = made_as.get(spec.storage, spec.storage)
            own = read.get(out.storage) if through and out is not None else _rows_of(spec, storage, trace)
            before = read.setdefault(storage, set())
            read[storage] = None if own is None or before is None else before | own
    given_on = set(made_as.values())
    found = {
        storage: sorted(rows)
        for storage, rows in read.items()
        if rows and (trace.storages[storage].died is not None or storage in given_on)
    }
    found = {storage: rows for storage, rows in found.items() if _begins_with_product(trace, storage, found)}
    return found | {before: found[made] for before, made in made_as.items() if made in found}


def _made_as(trace: Trace) -> dict[int, int]:
    """By a storage that the step before has left, this one reads and the program drops: the storage that this step
    leaves to the next, if there is one of that size. A step of inference ends with a call, whose result is read only in
    the next one."""
    left = defaultdict[int, list[int]](list)
    for number, storage in enumerate(trace.storages):
        if storage.born >= 0 and (storage.died is None or storage.died > len(trace.ops)):
            left[storage.nbytes].append(number)
    found = defaultdict[int, set[int]](set)
    for number in {number for op in trace.ops if not is_view(op) for number in op.reads}:
        storage = trace.storages[number]
        if storage.born < 0 and storage.died is not None and storage.role is None:
            found[storage.nbytes].add(number)
    pairs = ((before, left[nbytes]) for nbytes, before in found.items())
    return {before: made[0] for (before, *others), made in pairs if not others and len(made) == 1}


def _begins_with_product(trace: Trace, storage: int, found: dict[int, list[int]]) -> bool:
    born = trace.storages[storage].born
    if born < 0:
        return False
    op = trace.ops[born]
    if op.packet in PRODUCTS:
        steps = {after - before for before, after in pairwise(found[storage])}
        return len(steps) <= 1 and LEAST_UNREAD * len(found[storage]) <= op.outputs[0].shape[0]
    return _goes_row_by_row(op, op.outputs[0]) and any(
        spec.storage in found and _begins_with_product(trace, spec.storage, found) for spec in op.inputs
    )


def _goes_row_by_row(op: Op, out: TensorSpec) -> bool:
    """Whether each row of the result, in one block, is made of the same row of the one operand."""
    return (
        (op.packet in CASTS or torch.Tag.pointwise in op.call.func.tags)
        and not op.call.func._schema.is_mutable
        and len(op.inputs) == 1
        and op.inputs[0].shape == out.shape
        and all(spec.stride == dense_strides(spec.shape, channels_last=False) for spec in (op.inputs[0], out))
    )


def _rows_of(spec: TensorSpec, storage: int, trace: Trace) -> set[int] | None:
    """The rows, of the length of what the storage's first op made, that are read whole; None: all, or no such rows."""
    born = trace.storages[storage].born
    if born < 0 or not spec.is_strided or not spec.shape:
        return None
    op = trace.ops[born]
    if not op.outputs:  # a compiled graph's memory, into which a Triton kernel writes first
        return None
    made = op.outputs[0]
    if op.packet not in PRODUCTS and not _goes_row_by_row(op, made):
        return None
    size = made.shape[-1] if made.shape else 0
    is_of_rows = spec.shape[-1] == size and spec.stride[-1] == 1 and not any(step % size for step in spec.stride[:-1])
    if not size or not is_of_rows or spec.offset % size or spec.numel * LEAST_UNREAD > made.numel:
        return None
    lines = (
        range(0, count * step or 1, step or 1) for count, step in zip(spec.shape[:-1], spec.stride[:-1], strict=True)
    )
    return {(spec.offset + sum(places)) // size for places in product(*lines)}


def _cut(op: Op, rows: dict[int, list[int]], kept: list[int]) -> Op:
    """The op with tensors of only these rows; a product reads as many rows of its operand as it makes."""
    is_product = op.packet in PRODUCTS
    left = op.inputs[-2] if is_product and kept else None

    def cut(spec: TensorSpec) -> TensorSpec:
        if spec.storage in rows:
            count = len(rows[spec.storage])
            shape = spec.shape if spec.numel == count * spec.shape[-1] else (count, spec.shape[-1])
            return in_one_piece(spec, shape)._replace(offset=0)
        if left is not None and spec.storage == left.storage and spec.shape == left.shape:
            step = kept[1] - kept[0] if len(kept) > 1 else 1
            return spec._replace(shape=(len(kept), spec.shape[1]), stride=(spec.stride[0] * step, spec.stride[1]))
        return spec

    return rebuilt(op, cut)
