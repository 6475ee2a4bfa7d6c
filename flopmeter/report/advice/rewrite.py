"""Traces with one thing changed: other tensors, ops left out, ops put in. The result is priced like any trace."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence, Set
from itertools import accumulate, chain, takewhile
from typing import Any

import torch
from torch._ops import OpOverload

from flopmeter.records import Call, CompiledKernel, Op, OpsBody, TensorSpec, Trace, TritonBody
from flopmeter.records.tensors import growth
from flopmeter.records.traces import rearranged
from flopmeter.torch_names.operators import Absent, aten

PRODUCTS = (aten.mm, aten.addmm)  # of linear layers, forward and backward
CASTS = (aten._to_copy, aten.clone)

# Not group norms, whose means have the type of what they read (ATen/native/group_norm.cpp).
_NORMS = (aten.native_layer_norm, aten._fused_rms_norm, aten.native_batch_norm, aten.cudnn_batch_norm)

Mark = Hashable
"""What a change needs to know of a storage."""


def with_tensors(
    trace: Trace,
    change: Callable[[TensorSpec, Mark], TensorSpec],
    mark: Callable[[int], Mark] = lambda _: None,
    dtypes: Mapping[torch.dtype, torch.dtype] | None = None,
) -> Trace:
    """The trace with every tensor of every call changed: `change` gets its spec and `mark` of its storage's number in
    the trace. `dtypes`: what replaces types in arguments (`dtype=torch.float32`)."""
    known: dict[tuple[Call, tuple[Mark, ...]], Call] = {}

    def changed(op: Op) -> Op:
        marks = tuple(mark(number) for number in op.storages)
        call = known.get((op.call, marks))
        if call is None:
            call = known[op.call, marks] = changed_call(op.call, marks, change, dtypes or {})
        return op._replace(call=call)

    templates = [run._replace(op=changed(run.op)) for run in trace.templates]
    return dataclasses.replace(trace, ops=list(map(changed, trace.ops)), templates=templates)


def changed_call(
    call: Call,
    marks: tuple[Mark, ...],
    change: Callable[[TensorSpec, Mark], TensorSpec],
    dtypes: Mapping[torch.dtype, torch.dtype],
) -> Call:
    def of(value: Any) -> Any:
        if isinstance(value, TensorSpec):
            return change(value, marks[value.storage])
        if isinstance(value, CompiledKernel):
            return value.with_tensors(of)
        if type(value) is tuple:
            return tuple(of(part) for part in value)
        return dtypes.get(value, value) if isinstance(value, torch.dtype) else value

    kwargs = {name: of(value) for name, value in call.kwargs.items()}
    args, inputs, outputs = of(call.args), of(call.inputs), of(call.outputs)
    if (args, kwargs, inputs, outputs) == (call.args, call.kwargs, call.inputs, call.outputs):
        return call  # whose costs are known
    return _with_body(call, dataclasses.replace(call, args=args, kwargs=kwargs, inputs=inputs, outputs=outputs))


def _with_body(call: Call, changed: Call) -> Call:
    """The changed call, doing inside what the call does, and more of it where its tensors have grown."""
    body = call.body
    if isinstance(body, TritonBody | OpsBody):
        pairs = list(zip(chain(call.inputs, call.outputs), chain(changed.inputs, changed.outputs), strict=True))
        more = growth(pairs)
        if isinstance(body, TritonBody):
            body = body.times(more)
        else:
            body = body.on({before.storage: now.storage for before, now in pairs}, max(1, int(more)))
    return dataclasses.replace(changed, groups=call.groups, body=body)


def in_templates(trace: Trace) -> set[int]:
    """The ops that torch itself runs in place of a kernel that exists only compiled: no line of the program is theirs
    to change."""
    return {index for run in trace.templates for index in range(run.start, min(run.stop, len(trace.ops)))}


def in_place_of(
    op: Op,
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    inputs: Iterable[TensorSpec],
    outputs: Iterable[TensorSpec] = (),
) -> Op:
    """Another call in the place of an op. Its tensors are numbered as storages of the trace."""
    read, made = tuple(inputs), tuple(outputs)
    numbers = tuple(dict.fromkeys(spec.storage for spec in (*read, *made)))
    place = {number: local for local, number in enumerate(numbers)}

    def local(value: Any) -> Any:
        return each_tensor(value, lambda spec: spec._replace(storage=place[spec.storage]))

    options = {name: local(value) for name, value in kwargs.items()}
    return op._replace(call=Call(func, local(args), options, local(read), local(made)), storages=numbers)


def rebuilt(op: Op, change: Callable[[TensorSpec], TensorSpec]) -> Op:
    """The op with its tensors changed. `change` gets each with the number of its storage in the trace."""

    def of(value: Any) -> Any:
        return each_tensor(value, lambda spec: change(spec._replace(storage=op.storages[spec.storage])))

    call = op.call
    kwargs = {name: of(value) for name, value in call.kwargs.items()}
    placed = in_place_of(op, call.func, of(call.args), kwargs, map(change, op.inputs), map(change, op.outputs))
    return placed._replace(call=_with_body(call, placed.call))


def each_tensor(value: Any, change: Callable[[TensorSpec], TensorSpec]) -> Any:
    """The argument with its tensors changed, those in lists and tuples and of a compiler's kernel too."""
    if isinstance(value, TensorSpec):
        return change(value)
    if isinstance(value, CompiledKernel):
        return value.with_tensors(change)
    return tuple(each_tensor(part, change) for part in value) if type(value) in (tuple, list) else value


def with_ops(
    trace: Trace,
    dropped: Collection[int],
    put_in: Mapping[int, Op] | None = None,
    put_before: Mapping[int, Sequence[Op]] | None = None,
) -> Trace:
    """The trace without the ops of these indices; ops of `put_in` stand at their own indices, whether the op there is
    dropped or not, and those of `put_before` before the ops there, or at the end.

    Module calls all of whose ops are dropped go with them. What an optimizer does for each parameter it does for any
    ops.
    """
    put_in, put_before, gone = put_in or {}, put_before or {}, set(dropped) - set(put_in or {})
    calls_before = [now - before for before, now in zip((0, *trace.module_calls), trace.module_calls, strict=False)]
    ops, calls, place = list[Op](), list[int](), list[int]()  # `place`: of each old op among the new ones
    owed = 0  # calls before dropped ops that others need, too
    for index in range(len(trace.ops) + 1):
        new = put_before.get(index, ())
        ops.extend(new)
        calls.extend(0 for _ in new)
        place.append(len(ops))
        if index in gone:
            owed += _calls_of_others(trace.ops, calls_before, index, gone) if calls_before[index] else 0
        elif index < len(trace.ops):
            ops.append(put_in.get(index, trace.ops[index]))
            calls.append(calls_before[index] + owed)
            owed = 0
    storages = [
        dataclasses.replace(
            storage,
            born=storage.born if storage.born < 0 else place[min(storage.born, len(trace.ops))],
            died=None if storage.died is None else place[min(storage.died, len(trace.ops))],
        )
        for storage in trace.storages
    ]
    templates = [run._replace(start=place[run.start], stop=place[run.stop]) for run in trace.templates]
    changed = rearranged(trace, ops, list(accumulate(calls)), place, gone)
    return dataclasses.replace(changed, storages=storages, templates=templates)


def _calls_of_others(ops: Sequence[Op], calls: Sequence[int], dropped: int, gone: Set[int]) -> int:
    """How many of the module calls before a dropped op end after an op that stays. The calls before an op are those of
    the innermost modules of its path."""
    if ops[dropped].phase == "optimizer":
        return calls[dropped]
    path = ops[dropped].module.split(".")
    running = len(path)  # modules of the path whose call has not ended
    for index in range(dropped + 1, len(ops)):
        other = ops[index].module.split(".")
        begun_before = other[: len(other) - calls[index]]
        same = takewhile(lambda pair: pair[0] == pair[1], zip(path, begun_before, strict=False))
        running = min(running, sum(1 for _ in same))
        if index not in gone or running <= len(path) - calls[dropped]:
            break
    else:
        running = 0
    return max(0, calls[dropped] - (len(path) - running))


def widened(spec: TensorSpec, dim: int, times: int) -> TensorSpec:
    """The tensor with so many times the places in a dimension; one number stays one."""
    if spec.numel == 1 or times == 1:
        return spec
    shape = (*spec.shape[:dim], times * spec.shape[dim], *spec.shape[dim + 1 :])
    stride = tuple(times * step if step > spec.stride[dim] else step for step in spec.stride)
    return spec._replace(shape=shape, stride=stride)


def are_in_torch(ops: Iterable[Op]) -> bool:
    """Whether this torch has the operators that a change puts in."""
    return not any(isinstance(op.call.func, Absent) for op in ops)


def makes_no_storage(op: Op) -> bool:
    """Whether all that it returns lies in what it was given: a view, or an op in place."""
    return bool(op.call.outputs) and op.makes <= op.reads


def is_view(op: Op) -> bool:
    """Whether all that it returns lies in what it was given, which it does not write to."""
    return makes_no_storage(op) and not op.call.func._schema.is_mutable


def is_dense(spec: TensorSpec) -> bool:
    """Whether the tensor is one block of memory, in whatever order of its dimensions."""
    return spec.is_strided and spec.nbytes == spec.numel * spec.dtype.itemsize


def statistics_of(op: Op) -> set[int]:
    """The storages of what kernels that read 16 bits write in fp32 beside their result, for the backward pass: the
    means and deviations of norms, and the sums of each row of fused attention."""
    name = op.call.name
    is_kernel = op.packet in _NORMS or name.startswith("_scaled_dot_product_")
    return {spec.storage for spec in op.outputs[1:]} if is_kernel and not name.endswith("_backward") else set()


def outermost(spec: TensorSpec) -> int | None:
    """The dimension of the largest stride: that of the batch, where tensors hold one item after the other."""
    dims = [dim for dim in range(len(spec.shape)) if spec.stride[dim]]
    return max(dims, key=lambda dim: (spec.stride[dim], -dim), default=None) if spec.is_strided else None
