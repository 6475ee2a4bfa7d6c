"""Work that a program asks for without need: products wider than its others, masks, gradients and loops that torch has
a cheaper way for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain

import torch
from torch._ops import OpOverload

from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.records.dtypes import name_of
from flopmeter.report.advice.fused_attention import NoKernelError, backend_of, with_chosen_kernels, with_kernel
from flopmeter.report.advice.remedies import Proposal, are_in_torch, priced, remedy, trace_of, type_of_others
from flopmeter.report.advice.rewrite import changed_call, in_place_of, with_ops, with_tensors
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten, aten_overloads

_CASTS = (aten._to_copy, aten.copy_, aten.clone)
_WEIGHTS = ("parameters", "gradients", "optimizer state")


@remedy
def wide_products(report: Report) -> Iterator[Proposal]:
    """Products and attention in fp32 in a program whose others are in 16 bits, as a stray `.float()` leaves them."""
    narrow = type_of_others(report)
    wide = [kernel for kernel in report.kernels if kernel.cost.macs and kernel.cost.dtype == "fp32"]
    if narrow is None or not wide:
        return
    trace = trace_of(report)
    ids = {id(op) for kernel in wide for op in kernel.ops}
    places = [index for index, op in enumerate(trace.ops) if id(op) in ids]
    touched = {number for index in places for number in trace.ops[index].storages}
    touched = {number for number in touched if trace.storages[number].role not in _WEIGHTS}

    def narrowed(spec: TensorSpec, is_touched: object) -> TensorSpec:
        return spec._replace(dtype=narrow) if is_touched and spec.dtype is torch.float32 else spec

    then = with_tensors(trace, narrowed, touched.__contains__)
    products = {index: _all_narrowed(then.ops[index], narrowed) for index in places}
    idle = {index for index, op in enumerate(then.ops) if _is_idle_cast(op) and not _is_idle_cast(trace.ops[index])}
    then = with_chosen_kernels(with_ops(then, idle, products), report.hardware)
    about = ids | {id(trace.ops[index]) for index in idle}
    yield Proposal(
        "", lambda kernel: any(id(op) in about for op in kernel.ops),
        f"fp32, where the program's other products are in {name_of(narrow)}",
        f"{str(narrow).removeprefix('torch.')} there too: without .float(), or inside of torch.autocast",
        priced(report, then),
    )  # fmt: skip


def _all_narrowed(op: Op, narrowed: Callable[[TensorSpec, object], TensorSpec]) -> Op:
    return op._replace(call=changed_call(op.call, (True,) * len(op.storages), narrowed, {}))


def _is_idle_cast(op: Op) -> bool:
    if op.call.func.overloadpacket not in _CASTS or not op.outputs:
        return False
    return all(spec.dtype == op.outputs[0].dtype for spec in op.inputs)


@remedy
def masks_of_places(report: Report) -> Iterator[Proposal]:
    """Fused attention with a square mask that all sequences share, which is assumed to be causal."""
    trace = trace_of(report)
    put_in = {}
    for index, op in enumerate(trace.ops):
        end = "_backward" if op.call.name.endswith("_backward") else ""
        mask = op.call.get("attn_bias")
        if not isinstance(mask, TensorSpec) or trace.storages[op.storages[mask.storage]].role == "parameters":
            continue
        q, k, v = op.call.inputs[1:4] if end else op.call.inputs[:3]
        queries, keys = q.shape[-2], k.shape[-2]
        if queries != keys or queries == 1 or mask.distinct_elements != queries * keys:
            continue
        try:
            backend = backend_of((q, k, v), report.hardware, is_causal=True, dropout=op.call.argument("dropout_p"))
        except NoKernelError:
            continue
        put_in[index] = with_kernel(op, backend, end, is_causal=True)
    if put_in and are_in_torch(put_in.values()):
        about = {id(trace.ops[index]) for index in put_in}
        yield Proposal(
            "", lambda kernel: any(id(op) in about for op in kernel.ops),
            "all pairs are computed, and a mask is read for them that all sequences share",
            "is_causal=True in place of the mask, if it is the causal one", priced(report, with_ops(trace, (), put_in)),
        )  # fmt: skip


_DENSE_GRADIENTS = {aten.embedding_dense_backward: 1, aten._embedding_bag_backward: 1}  # place of the indices


@remedy
def dense_gradients_of_embeddings(report: Report) -> Iterator[Proposal]:
    """Tables of which a step reads few rows, and whose gradients and optimizer go through all of them. Priced is a
    table of as many rows as are read: each counts, also where one is read twice."""
    trace = trace_of(report)
    rows: dict[int, tuple[int, int]] = {}  # of each gradient: of the table, of the batch
    for op in trace.ops:
        place = _DENSE_GRADIENTS.get(op.call.func.overloadpacket)
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

    then = with_tensors(trace, cut, tables.get)
    about = {
        id(op)
        for op in trace.ops
        if op.phase != "forward" and any(number in tables for number in op.storages)
    }  # fmt: skip
    yield Proposal(
        "", lambda kernel: any(id(op) in about for op in kernel.ops),
        "the gradient and the optimizer go through all rows of a table, of which a step reads few",
        "Embedding(sparse=True) with SGD or SparseAdam, which leave rows that were not read as they are",
        priced(report, then),
    )  # fmt: skip


FEW_ROWS = 4  # times as many rows has a table as a step reads, for sparse gradients to be worth their indices


def _only_looked_up(trace: Trace, sizes: dict[int, int]) -> dict[int, tuple[int, int]]:
    """Of each storage of such a table, its gradient and its states: the rows that it has and those that are read. Not
    of a table that products read too, as one that is shared with a head."""
    found: dict[int, tuple[int, int]] = {}
    in_products: set[int] = set()
    for op in trace.ops:
        is_product = op.call.func.overloadpacket in (aten.mm, aten.addmm, aten.bmm)
        for spec in (*op.inputs, *op.outputs):
            if spec.shape and spec.shape[0] in sizes and len(spec.shape) == 2 and spec.is_strided:
                found[spec.storage] = spec.shape[0], sizes[spec.shape[0]]
            if is_product:
                in_products.add(spec.storage)
    shared = {found[number] for number in in_products & set(found)}
    return {number: size for number, size in found.items() if size not in shared}


@remedy
def filled_gradients(report: Report) -> Iterator[Proposal]:
    """Gradients that are filled with zeros, to which the backward pass then adds."""
    trace = trace_of(report)
    fills = {index for index, op in enumerate(trace.ops) if _fills_gradients(trace, op)}
    left = {spec.storage for index in fills for spec in trace.ops[index].inputs}
    takes = {}
    for each in trace.accumulations:
        op = trace.ops[each.op]
        if op.call.func.overloadpacket is aten.add_ and op.inputs[0].storage in left:
            takes[each.op] = _takes(op)
            left.discard(op.inputs[0].storage)
    if takes and report.cluster is None:
        about = {id(trace.ops[index]) for index in fills | set(takes)}
        yield Proposal(
            "gradients", lambda kernel: any(id(op) in about for op in kernel.ops),
            "they are filled with zeros, then read and added to", "zero_grad(set_to_none=True)",
            priced(report, with_ops(trace, fills, takes)),
        )  # fmt: skip


def _takes(add: Op) -> Op:
    """What autograd does where a leaf has no gradient: it keeps what it was given, without a kernel."""
    given = add.inputs[1]
    return in_place_of(add, aten_overloads.detach.default, (given,), {}, (given,), (given,))


def _fills_gradients(trace: Trace, op: Op) -> bool:
    if op.call.func.overloadpacket not in (aten.zero_, aten._foreach_zero_) or op.phase == "backward":
        return False
    return all(trace.storages[spec.storage].role == "gradients" for spec in op.inputs)


LEAST_LOOP = 16  # tensors: a loop over fewer is no loop over a model's parameters
_FOREACH: dict[object, OpOverload] = {
    aten.linalg_vector_norm: aten_overloads._foreach_norm.Scalar,
    aten.mul_: aten_overloads._foreach_mul_.Scalar,
    aten.div_: aten_overloads._foreach_div_.Scalar,
    aten.add_: aten_overloads._foreach_add_.List,
    aten.sub_: aten_overloads._foreach_sub_.List,
    aten.lerp_: aten_overloads._foreach_lerp_.Scalar,
    aten.copy_: aten_overloads._foreach_copy_.default,
    aten.zero_: aten_overloads._foreach_zero_.default,
}


@remedy
def loops_over_tensors(report: Report) -> Iterator[Proposal]:
    """An op that the program calls for one parameter, gradient or average after the other, outside of modules.
    Optimizers that have a kernel for all of it are told so (optimizers.py)."""
    trace = trace_of(report)
    phases = {"forward"} if any(step.takes_fused for step in trace.optimizer_steps) else {"forward", "optimizer"}
    loops: dict[OpOverload, list[int]] = defaultdict(list)
    for index, op in enumerate(trace.ops):
        func = _FOREACH.get(op.call.func.overloadpacket)
        if func is not None and not op.module and op.phase in phases and op.region is None:
            loops[func].append(index)
    put_in, dropped = {}, set()
    for func, loop in loops.items():
        if len({trace.ops[index].storages[0] for index in loop}) == len(loop) >= LEAST_LOOP:
            put_in[loop[-1]] = _at_once(func, [trace.ops[index] for index in loop])
            dropped |= set(loop)
    if not put_in or not are_in_torch(put_in.values()):
        return
    about = {id(trace.ops[index]) for index in dropped}
    yield Proposal(
        "", lambda kernel: any(id(op) in about for op in kernel.ops),
        f"{len(dropped)} kernels for one tensor each", "torch._foreach_ functions (in clip_grad_norm_, foreach=True)",
        priced(report, with_ops(trace, dropped, put_in)),
    )  # fmt: skip


def _at_once(func: OpOverload, ops: list[Op]) -> Op:
    """One op for the tensors of all of them; numbers are taken from the first."""
    of_inputs = [tuple(op.inputs[number] for op in ops) for number in range(min(len(op.inputs) for op in ops))]
    lists = iter(of_inputs)
    args = tuple(next(lists) if isinstance(value, TensorSpec) else value for value in ops[0].call.args)
    outputs = () if func._schema.name.endswith("_") else (op.outputs[0] for op in ops)
    kwargs = {name: value for name, value in ops[0].call.kwargs.items() if not isinstance(value, TensorSpec)}
    return in_place_of(ops[-1], func, args, kwargs, chain(*of_inputs), outputs)
