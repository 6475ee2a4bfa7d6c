"""Tables whose rows are looked up: by products with ones and zeros, and with gradients that have all rows."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Container, Iterator

from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.report.advice.fused_attention import dense_in
from flopmeter.report.advice.remedies import Proposal, of_ops, priced, remedy, with_other_ops
from flopmeter.report.advice.rewrite import CASTS, PRODUCTS, in_place_of, is_view, with_ops, with_tensors
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten, aten_overloads

_DENSE_GRADIENTS = {aten.embedding_dense_backward: 1, aten._embedding_bag_backward: 1}  # place of the indices


@remedy
def dense_gradients_of_embeddings(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Tables of which a step reads few rows, and whose gradients and optimizer go through all of them. The change is
    priced with a table of as many rows as are read; a row that is read twice counts twice. An optimizer with states
    does on these rows what it did on all, and sums those that were read twice as the dense gradient's kernels do; what
    SparseAdam launches op by op is not priced."""
    rows: dict[int, tuple[int, int]] = {}  # of each gradient: of the table, of the batch
    for op in trace.ops:
        place = _DENSE_GRADIENTS.get(op.packet)
        if place is not None and op.outputs[0].is_strided:
            count = rows.get(op.outputs[0].storage, (0, 0))[1] + op.inputs[place].numel
            rows[op.outputs[0].storage] = op.outputs[0].shape[0], count
    tables = _only_looked_up(trace, {whole: read for whole, read in rows.values() if FEW_ROWS * read < whole})
    if not tables or report.cluster is not None:
        return

    def cut(spec: TensorSpec, size: object) -> TensorSpec:
        if not isinstance(size, tuple) or not spec.shape or spec.shape[0] != size[0] or not spec.is_strided:
            return spec
        return spec._replace(shape=(size[1], *spec.shape[1:]))

    then = _with_sparse_gradients(with_tensors(trace, cut, tables.get), tables)
    touching = (
        index
        for index, op in enumerate(trace.ops)
        if op.phase != "forward" and not tables.keys().isdisjoint(op.storages)
    )
    yield Proposal(
        "the gradient and the optimizer go through all rows of a table, of which a step reads few",
        "Embedding(sparse=True) with SGD or SparseAdam, which leave rows that were not read as they are",
        priced(report, then), of_ops(trace, touching),
    )  # fmt: skip


def _with_sparse_gradients(trace: Trace, tables: Container[int]) -> Trace:
    """The trace, of tables with few rows, in which each that SGD trains without states gives its gradient as these rows
    with their places: the lookup's is there already, autograd copies it, and SGD adds each gradient to its parameter
    with a kernel of its own."""
    others = (op for op in trace.ops if op.phase == "optimizer" and op.packet not in (aten._foreach_add_, aten.add_))
    with_states = set[int]().union(*(op.reads for op in others))
    storages, put_in, put_before = [*trace.storages], dict[int, Op](), defaultdict[int, list[Op]](list)
    sparse = dict[int, TensorSpec]()
    for index, op in enumerate(trace.ops):
        place = _DENSE_GRADIENTS.get(op.packet)
        if place is not None and op.outputs[0].storage in tables and op.outputs[0].storage not in with_states:
            out, places = op.outputs[0], op.inputs[place]
            rows = out._replace(held_bytes=out.nbytes + places.nbytes, held_values=out.numel)
            sparse[out.storage], given = rows, rows._replace(storage=op.inputs[0].storage)
            if op.packet is aten._embedding_bag_backward:
                given = rows._replace(storage=len(storages))
                storages.append(dataclasses.replace(storages[out.storage], role=None))
                put_before[index].append(_of_rows(op, given))
            put_in[index] = in_place_of(op, aten_overloads.clone.default, (given,), {}, (given,), (rows,))
        elif op.packet is aten._foreach_add_ and not sparse.keys().isdisjoint(op.reads):
            both = len(op.inputs) // 2
            pairs = zip(op.inputs[:both], (sparse.get(spec.storage, spec) for spec in op.inputs[both:]), strict=True)
            options = {"alpha": op.call.argument("alpha")}
            adds = [in_place_of(op, aten_overloads.add_.Tensor, pair, options, pair, pair[:1]) for pair in pairs]
            *put_before[index], put_in[index] = adds
    return with_ops(dataclasses.replace(trace, storages=storages), (), put_in, put_before)


def _of_rows(op: Op, rows: TensorSpec) -> Op:
    """The backward pass of an embedding bag that gives only these rows."""
    call, names = op.call, [each.name for each in op.call.func._schema.arguments]
    args = {**dict(zip(names, call.args, strict=False)), **call.kwargs, "sparse": True}
    made = call.outputs[0].storage
    numbers = tuple(rows.storage if place == made else number for place, number in enumerate(op.storages))
    outputs = (rows._replace(storage=made),)
    return op._replace(call=dataclasses.replace(call, args=(), kwargs=args, outputs=outputs), storages=numbers)


FEW_ROWS = 4  # times as many rows has a table as a step reads, for sparse gradients to be worth their indices


def _only_looked_up(trace: Trace, sizes: dict[int, int]) -> dict[int, tuple[int, int]]:
    """For each storage of such a table, its gradient and its states: how many rows it has and how many are read. Tables
    that products read too, or of which parts or casts are read, are left out, such as one that is shared with a
    head."""
    found: dict[int, tuple[int, int]] = {}
    copied: dict[int, tuple[int, int]] = {}
    shared: set[tuple[int, int]] = set()
    for op in trace.ops:
        for spec in (*op.inputs, *op.outputs):
            if spec.shape and spec.shape[0] in sizes and len(spec.shape) == 2 and spec.is_strided:
                found[spec.storage] = spec.shape[0], sizes[spec.shape[0]]
        read = {tables[spec.storage] for spec in op.inputs for tables in (found, copied) if spec.storage in tables}
        if op.packet in (*PRODUCTS, aten.bmm):
            shared |= read
        elif op.packet in (*CASTS, aten.cat):
            copied |= {spec.storage: table for spec in op.outputs for table in read}
    return {number: size for number, size in found.items() if size not in shared}


@remedy
def one_hot_products(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Products with rows of zeros that have a one each, which take rows of a table as an embedding does."""
    ones: dict[int, tuple[TensorSpec, int]] = {}  # storages of such rows: the indices, and how long the rows are
    put_in, dropped = {}, set()
    for index, op in enumerate(trace.ops):
        rows = next((ones[number] for number in op.storages if number in ones), None)
        if op.packet is aten.scatter_ and op.call.get("value") == 1:
            ones[op.inputs[0].storage] = op.inputs[1], op.inputs[0].shape[-1]
            dropped |= {index, trace.storages[op.inputs[0].storage].born}
        elif rows is not None and op.packet in CASTS:
            ones[op.outputs[0].storage] = rows
            dropped.add(index)
        elif rows is not None and op.packet in PRODUCTS:
            put_in[index] = _lookup(op, *rows, ones)
        elif rows is not None and not is_view(op):
            return  # something else reads them
    if put_in and not dropped & {-1}:
        yield with_other_ops(
            report, trace, "rows of a table are taken by products with zeros and a one for each row",
            "nn.Embedding, or table[indices], in place of the product with F.one_hot",
            dropped, put_in,
        )  # fmt: skip


def _lookup(op: Op, indices: TensorSpec, length: int, ones: dict[int, tuple[TensorSpec, int]]) -> Op:
    """The rows that a product takes; or, where it sums over the rows, the gradient of the table."""
    out, (left, right) = op.outputs[0], op.inputs[-2:]
    other = right if left.storage in ones else left
    if left.shape[-1] == length:
        table = dense_in(other, (length, other.numel // length))
        return in_place_of(op, aten_overloads.embedding.default, (table, indices), {}, (table, indices), (out,))
    args = other, indices, length, -1, False
    return in_place_of(op, aten_overloads.embedding_dense_backward.default, args, {}, args[:2], (out,))
