"""scaled_dot_product_attention that torch runs op by op, on its math path, because no fused kernel takes the call.

The math path casts what it is given to fp32, multiplies q and k by the root of the scale, and casts the result back
(_scaled_dot_product_attention_math in ATen/native/transformers/attention.cpp): none of these ops is the program's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import torch

from flopmeter.costs.access import HALVES
from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.report.advice.attention import ends, makers_of_masks, results, views_of_nothing
from flopmeter.report.advice.found_attention import PRODUCTS, Materialised, around, reads_elsewhere, uses_of
from flopmeter.report.advice.fused_attention import Bias, dense, fused
from flopmeter.report.advice.passes import are_differentiated
from flopmeter.report.advice.remedies import Proposal, of_ops, priced, remedy
from flopmeter.report.advice.rewrite import (
    Mark,
    are_in_torch,
    in_templates,
    makes_no_storage,
    with_ops,
    with_tensors,
)
from flopmeter.report.report import Report
from flopmeter.report.unfused_attention import Unfused
from flopmeter.torch_names.operators import aten


class _MathPath(NamedTuple):
    """A call of attention on the math path."""

    attention: Materialised
    ops: set[int]  # with the casts and the scaling
    gradients: set[int]  # storages that its backward pass gives to the program
    call: Unfused | None  # None: no change is known that a fused kernel would take


@remedy
def attention_that_no_kernel_takes(report: Report, trace: Trace) -> Iterator[Proposal]:
    """A call of scaled_dot_product_attention that could run as one kernel, and does not."""
    by_cause = defaultdict[tuple[str, str], list[_MathPath]](list)
    for path in math_paths(trace, report.unfused):
        if path.call is not None and not are_differentiated(trace, path.ops):
            by_cause[path.call.why, path.call.remedy].append(path)
    for cause, paths in by_cause.items():
        put_in = {place: op for path in paths for place, op in _fused(trace, path).items()}
        if are_in_torch(put_in.values()):
            yield _proposal(report, trace, *cause, paths, put_in)


def _proposal(
    report: Report, trace: Trace, why: str, change: str, paths: list[_MathPath], put_in: dict[int, Op]
) -> Proposal:
    uses, dropped = uses_of(trace), set[int]().union(*(path.ops for path in paths))
    gradients = {number: path.call for path in paths for number in path.gradients}
    concerns = of_ops(trace, dropped)
    if all(path.call is not None and path.call.mask is None for path in paths):
        dropped |= makers_of_masks(trace, uses, dropped, put_in)
    dropped |= views_of_nothing(trace, uses, dropped, put_in)
    then = with_tensors(with_ops(trace, dropped, put_in), _as_operand, gradients.get)
    return Proposal(
        f"scaled_dot_product_attention runs op by op (its math path): {why}", change, priced(report, then), concerns,
        f"attention ×{len(paths)}",
    )  # fmt: skip


def _as_operand(spec: TensorSpec, call: Mark) -> TensorSpec:
    """The same gradient with the layout of q, k or v, as fused kernels write it."""
    operands = call.qkv if isinstance(call, Unfused) else ()
    like = next((each for each in operands if each.shape == spec.shape), None)
    if like is None:
        return spec
    steps = [step or spec.numel for step in like.strides]  # repeated along the batch, which is the outermost
    stride, size = [0] * len(steps), 1
    for dim in sorted(range(len(steps)), key=lambda dim: (steps[dim], -dim)):
        stride[dim], size = size, size * spec.shape[dim]
    return spec._replace(stride=tuple(stride))


def math_paths(trace: Trace, calls: tuple[Unfused, ...]) -> Iterator[_MathPath]:
    """The calls that the program made of SDPA's math path: only that runs this softmax."""
    inside, uses = in_templates(trace), None
    for index, op in enumerate(trace.ops):
        if op.packet is not aten._safe_softmax or op.phase not in ("forward", "recompute") or index in inside:
            continue
        uses = uses_of(trace) if uses is None else uses
        attention = around(trace, uses, index)
        if attention is not None:
            yield _path(trace, uses, attention, _call_of(attention.softmax, calls))


def _call_of(scores: TensorSpec, calls: tuple[Unfused, ...]) -> Unfused | None:
    fitting = (each for each in calls if (each.heads, *each.lengths) == scores.shape[-3:])
    return next(fitting, None)


def _path(trace: Trace, uses: dict[int, list[int]], attention: Materialised, call: Unfused | None) -> _MathPath:
    ops, gradients = set(attention.ops), set[int]()
    casts = call is None or call.is_half
    for index in [each for each in sorted(attention.ops) if trace.ops[each].packet in PRODUCTS]:
        for spec in trace.ops[index].inputs:
            ops |= set(_before(trace, uses, spec.storage, ops, casts=casts))
        for spec in trace.ops[index].outputs:
            after = _after(trace, uses, spec.storage, index, ops)
            ops |= set(after)
            if trace.ops[index].phase == "backward":
                gradients |= {out.storage for place in after for out in trace.ops[place].outputs}
    return _MathPath(attention, ops, gradients, call)


def _before(trace: Trace, uses: dict[int, list[int]], storage: int, within: set[int], *, casts: bool) -> list[int]:
    """The copies, the scaling and the cast that made an operand, the last one first. Before its cast the program's own
    ops begin."""
    chain: list[int] = []
    passed: set[str] = set()
    while True:
        born = trace.storages[storage].born
        step = _step(trace.ops[born]) if born >= 0 else ""
        if not step or (step != "copy" and step in passed) or (step == "cast" and not casts):
            return chain
        if reads_elsewhere(trace, uses, storage, within.union(chain)):
            return chain
        chain.append(born)
        passed.add(step)
        if step == "cast":
            return chain
        storage = trace.ops[born].inputs[0].storage


def _after(trace: Trace, uses: dict[int, list[int]], storage: int, index: int, within: set[int]) -> list[int]:
    """The scaling and the cast of a result, and a copy that only transposes it."""
    chain: list[int] = []
    passed: set[str] = set()
    while "copy" not in passed:
        readers = [place for place in uses[storage] if place > index and not makes_no_storage(trace.ops[place])]
        if len(readers) != 1 or readers[0] in within:
            return chain
        op, step = trace.ops[readers[0]], _step(trace.ops[readers[0]])
        own = {"copy", "cast", "scaling"} if op.phase == "backward" else {"copy", "cast"}
        if step not in own - passed or (step == "scaling" and "cast" in passed):
            return chain
        chain.append(readers[0])
        passed.add(step)
        index, storage = readers[0], op.outputs[0].storage
    return chain


def _step(op: Op) -> str:
    """What the op does beside the products: 'copy', 'cast' between 16 bits and fp32, 'scaling', or '' if none."""
    if len(op.inputs) != 1 or len(op.outputs) != 1 or makes_no_storage(op):
        return ""
    types = {op.inputs[0].dtype, op.outputs[0].dtype}
    if op.packet is aten.mul:
        return "scaling"
    if op.packet not in (aten.clone, aten._to_copy, aten.contiguous):
        return ""
    if len(types) == 1:
        return "copy"
    return "cast" if torch.float32 in types and types & set(HALVES) else ""


def _fused(trace: Trace, path: _MathPath) -> dict[int, Op]:
    """The kernel that takes the changed call, by the index of the op in whose place it stands. What the change itself
    copies is not priced."""
    attention, call = path.attention, path.call
    assert call is not None
    q, k = trace.ops[attention.scores].inputs[-2:]
    v = trace.ops[attention.values].inputs[-1]
    sources = [_source(trace, spec.storage, path.ops) for spec in (q, k, v)]
    device = q.device
    qkv = [
        dense(operand.shape, operand.dtype, device)._replace(stride=operand.strides, storage=source)
        for operand, source in zip(call.qkv, sources, strict=True)
    ]
    assert len(qkv) == 3
    out, sums = results((qkv[0], qkv[1], qkv[2]), qkv[0].dtype, _result(trace, path), attention)
    bias = _bias(trace, attention, call, (*qkv[0].shape[:-2], *call.lengths))
    return {
        place: fused(
            op, (qkv[0], qkv[1], qkv[2]), out, sums, call.backend, is_causal=call.is_causal,
            dropout=call.dropout_p, bias=bias,
        )
        for place, op in ends(trace, attention._replace(ops=path.ops))
    }  # fmt: skip


def _source(trace: Trace, storage: int, ops: set[int]) -> int:
    """The program's own tensor that an operand was made of."""
    while trace.storages[storage].born in ops:
        storage = trace.ops[trace.storages[storage].born].inputs[0].storage
    return storage


def _result(trace: Trace, path: _MathPath) -> int:
    """What the program is given: the product, cast and copied."""
    storage = trace.ops[path.attention.values].outputs[0].storage
    for index in sorted(path.ops):
        op = trace.ops[index]
        if index > path.attention.values and op.phase != "backward" and _step(op) and op.inputs[0].storage == storage:
            storage = op.outputs[0].storage
    return storage


def _bias(trace: Trace, attention: Materialised, call: Unfused, sizes: tuple[int, ...]) -> Bias | None:
    """The mask as the fused kernel adds it: repeated for each sequence and head, without memory for that."""
    if call.mask is None:
        return None
    made = trace.ops[attention.scores].outputs[0].storage
    ops = (trace.ops[index] for index in sorted(attention.ops))
    sums = (op for op in ops if op.packet in (aten.add, aten.add_) and op.phase != "backward" and made in op.reads)
    added = next(spec for op in sums for spec in op.inputs if spec.storage != made)
    shape = (1,) * (len(sizes) - len(call.mask.shape)) + call.mask.shape
    own = dense(shape, call.qkv[0].dtype, added.device)
    stride = tuple(step if size > 1 else 0 for size, step in zip(shape, own.stride, strict=True))
    return Bias(own._replace(shape=sizes, stride=stride, storage=added.storage), attention.bias_gradient)
