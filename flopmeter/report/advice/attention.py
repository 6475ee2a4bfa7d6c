"""Attention that writes its scores to memory, and the fused kernel that could take its place.

Around each softmax, one that is written out too, the tensors of the scores' size are found (scores, mask,
probabilities, dropout, their gradients); all ops that touch one are the attention, with the copies that only feed these
or take their results. One fused op stands where the forward pass ended, and one where the backward pass did. Views of
tensors that nobody makes any more, and ops that made a causal mask, go too: they cost the host time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

import torch

from flopmeter.device.hardware import Hardware
from flopmeter.records import FlexBody, Op, TensorSpec, Trace
from flopmeter.report.advice.bent_scores import FLEX, are_bent, body_of, flexed
from flopmeter.report.advice.fused_attention import Bias, NoKernelError, Operands, backend_of, dense, fused
from flopmeter.report.advice.masks import bias_for_kernel
from flopmeter.report.advice.remedies import Proposal, of_ops, priced, remedy, trace_of
from flopmeter.report.advice.rewrite import are_in_torch, in_templates, is_dense, with_ops, with_tensors
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten

_SOFTMAX = (aten._softmax, aten._safe_softmax)
PRODUCTS = (aten.bmm, aten.baddbmm, aten.mm, aten.matmul)
_COPIES = (aten.clone, aten._to_copy, aten.copy_, aten.contiguous)
_RESHAPES = (aten.expand, aten.view, aten._unsafe_view)
_TRIANGLES = (aten.tril, aten.triu, aten.tril_, aten.triu_)
_ADDITIONS = (aten.add, aten.add_)
_COMPARISONS = (aten.le, aten.lt, aten.ge, aten.gt)


@remedy
def materialised_attention(report: Report) -> Iterator[Proposal]:
    """softmax(q @ k^T) @ v op by op."""
    yield from _instead(report, _fused)


@remedy
def materialised_attention_of_bent_scores(report: Report) -> Iterator[Proposal]:
    """The same with a function on the scores, such as a soft cap."""
    yield from _instead(report, _flexed)


def _instead(report: Report, kernels: _MakesFused) -> Iterator[Proposal]:
    trace = trace_of(report)
    uses = uses_of(trace)
    has_it = in_templates(trace) if kernels is _flexed else ()
    put_in: dict[int, Op] = {}
    dropped: set[int] = set()
    gradients: set[int] = set()
    found, read, needs_mask, averages = [], [], False, []
    for index, op in enumerate(trace.ops):
        if op.phase not in ("forward", "recompute") or not _is_softmax(trace, uses, index):
            continue
        if index in has_it or op.packet is aten._safe_softmax:  # of SDPA's math path: unfused_attention.py
            continue
        attention = around(trace, uses, index)
        if attention is None or attention.ops & dropped:
            continue
        averaged = _averaged_over_heads(trace, attention)
        if any(uses[number][-1] not in attention.ops for number in averaged):
            continue  # the program reads the weights, which no fused kernel gives
        try:
            put_in |= kernels(trace, attention, report.hardware)
        except NoKernelError:
            continue
        found.append(op)
        read.append((op.module, op.phase, attention.operands[0].storage))
        dropped |= attention.ops
        gradients |= attention.gradients
        needs_mask |= not attention.is_causal
        averages.append(bool(averaged))
    if not found or not are_in_torch(put_in.values()):
        return
    *_, queries, keys = found[0].inputs[0].shape
    concerns = of_ops(trace, dropped)
    if not needs_mask:
        dropped |= makers_of_masks(trace, uses, dropped, put_in)
    dropped |= views_of_nothing(trace, uses, dropped, put_in)
    then = with_tensors(with_ops(trace, dropped, put_in), _rows_innermost, lambda number: number in gradients)
    why = f"materialised: scores of {queries} × {keys} a head go to memory and back"
    if len(set(read)) < len(read):
        why += "; heads run one by one: priced is a call for each, one for all wins more"
    if kernels is _flexed:
        remedy = FLEX
    else:
        remedy = _OF_TORCH if all(averages) else "F.scaled_dot_product_attention (attn_implementation='sdpa')"
    yield Proposal(f"attention ×{len(found)}", concerns, why, remedy, priced(report, then))


_OF_TORCH = "need_weights=False in the calls of nn.MultiheadAttention, which then runs fused attention"


def _averaged_over_heads(trace: Trace, attention: Materialised) -> set[int]:
    """Storages with the average of the heads' probabilities, which nn.MultiheadAttention returns next to its result."""
    ops = (trace.ops[index] for index in attention.ops)
    means = (op for op in ops if op.packet is aten.mean and op.phase != "backward")
    return {spec.storage for op in means for spec in op.outputs if spec.shape[-2:] == attention.softmax.shape[-2:]}


class Materialised(NamedTuple):
    """The ops of one attention, and the inputs of its matmuls."""

    ops: set[int]
    scores: int  # op: q @ k^T
    values: int  # op: p @ v
    softmax: TensorSpec
    operands: tuple[TensorSpec, TensorSpec, TensorSpec]  # q, k, v before any copy
    gradients: set[int]  # storages that its backward pass gives to others
    is_causal: bool
    dropout: float
    biases: tuple[TensorSpec, ...]  # added to the scores, as the program has them
    bias_gradient: TensorSpec | None  # of the scores' size: what the sum that gives the bias its gradient reads


_MakesFused = Callable[[Trace, Materialised, Hardware], dict[int, Op]]
"""Gives the fused ops, by the index of the op in whose place they stand. Raises NoKernelError if there are none."""


def uses_of(trace: Trace) -> dict[int, list[int]]:
    """The ops that touch each storage."""
    uses: dict[int, list[int]] = defaultdict(list)
    for index, op in enumerate(trace.ops):
        for number in set(op.storages):
            uses[number].append(index)
    return uses


def around(trace: Trace, uses: dict[int, list[int]], softmax: int) -> Materialised | None:
    """The attention around a softmax. None if no matmul makes its scores, or none takes its probabilities."""
    ops, spec = trace.ops, trace.ops[softmax].inputs[0]
    if len(spec.shape) < 3:
        return None
    scores = _of_scores(trace, uses, softmax)
    touched = {index for number in scores for index in uses[number] if not is_view(ops[index])}
    if sum(_is_softmax(trace, uses, index) for index in touched) != 1:
        return None
    products = [index for index in sorted(touched) if ops[index].packet in PRODUCTS]
    phase = ops[softmax].phase
    made = [index for index in products if ops[index].phase == phase and _writes(ops[index], scores)]
    taken = [index for index in products if ops[index].phase == phase and not _writes(ops[index], scores)]
    if len(made) != 1 or len(taken) != 1:
        return None
    dropped = touched | _copies_around(trace, uses, touched, scores)
    dropped |= {place for index in (*made, *taken) for place in _reshapes_before(trace, index, dropped)}
    q, k = ops[made[0]].inputs[-2:]
    (v,) = (each for each in ops[taken[0]].inputs if each.storage not in scores)
    operands = tuple(_before_copies(trace, each, dropped) for each in (q, k, v))
    assert len(operands) == 3
    backward = (ops[index] for index in products if ops[index].phase == "backward")
    gradients = {out.storage for op in backward for out in op.outputs} - scores
    biases, gradient = _biases(trace, uses, touched, scores, spec)
    is_causal = not biases and _is_causal(trace, uses, touched, spec)
    if gradient is not None:
        dropped -= {index for index in touched if _sums_bias_gradient(ops[index], spec)}
    return Materialised(
        dropped, made[0], taken[0], spec, operands, gradients, is_causal, _dropout(trace, touched), biases, gradient
    )


def _is_softmax(trace: Trace, uses: dict[int, list[int]], index: int) -> bool:
    """Whether the op is a softmax, or the exponential in one that is written out, which sums each row."""
    op = trace.ops[index]
    if op.packet is not aten.exp:
        return op.packet in _SOFTMAX
    out = op.outputs[0]
    readers = (trace.ops[place] for place in uses[out.storage] if place > index)
    sums = (each for each in readers if each.packet is aten.sum and each.phase == op.phase)
    return any(each.inputs[0].shape == out.shape and each.outputs[0].shape == (*out.shape[:-1], 1) for each in sums)


def _biases(
    trace: Trace, uses: dict[int, list[int]], touched: set[int], scores: set[int], square: TensorSpec
) -> tuple[tuple[TensorSpec, ...], TensorSpec | None]:
    """What is added to the scores and is no causal mask (SDPA takes it as its mask), and the op that gives it its
    gradient."""
    ops = [trace.ops[index] for index in sorted(touched)]
    added = (
        spec
        for op in ops
        if op.phase != "backward" and op.packet in _ADDITIONS
        for spec in op.inputs
        if spec.storage not in scores and len(spec.shape) >= 2 and spec.shape[-1] == square.shape[-1]
    )
    biases = tuple(spec for spec in added if not _is_causal_mask(trace, uses, spec, square))
    summed = (op.inputs[0] for op in ops if _sums_bias_gradient(op, square))
    return biases, next(summed, None) if biases else None


def _sums_bias_gradient(op: Op, square: TensorSpec) -> bool:
    """Whether it sums the gradients that all sequences, or all heads, give to a bias that they share."""
    if op.phase != "backward" or op.packet is not aten.sum:
        return False
    return op.inputs[0].shape[-2:] == op.outputs[0].shape[-2:] == square.shape[-2:]


def _of_scores(trace: Trace, uses: dict[int, list[int]], softmax: int) -> set[int]:
    """Storages of the scores' size that ops other than matmuls make from one another."""
    square = trace.ops[softmax].inputs[0]
    scores = {spec.storage for spec in (*trace.ops[softmax].inputs, *trace.ops[softmax].outputs)}
    todo = list(scores)
    while todo:
        for index in uses[todo.pop()]:
            op = trace.ops[index]
            if op.packet in PRODUCTS:
                continue
            for spec in (*op.inputs, *op.outputs):
                alike = spec.numel == square.numel and spec.shape[-2:] == square.shape[-2:] and is_dense(spec)
                if alike and spec.storage not in scores and trace.storages[spec.storage].born >= 0:
                    scores.add(spec.storage)
                    todo.append(spec.storage)
    return scores


def _writes(op: Op, storages: set[int]) -> bool:
    return any(spec.storage in storages for spec in op.outputs)


def is_view(op: Op) -> bool:
    """Whether it returns a view; an op in place does."""
    return bool(op.outputs) and op.makes <= op.reads


def _copies_around(trace: Trace, uses: dict[int, list[int]], touched: set[int], scores: set[int]) -> set[int]:
    """Copies whose result only these ops read, and copies that only transpose a result of these ops."""
    copies: set[int] = set()
    for index in touched:
        op = trace.ops[index]
        if op.packet not in PRODUCTS:
            continue
        for spec in op.inputs:
            chain = _copies_before(trace, uses, spec.storage, touched | copies) if spec.storage not in scores else ()
            copies |= set(chain)
        for spec in op.outputs:
            after = () if spec.storage in scores else uses[spec.storage]
            copies |= {place for place in after if place > index and _is_copy(trace.ops[place])}
    return copies


def _reshapes_before(trace: Trace, product: int, dropped: set[int]) -> Iterator[int]:
    """The views that torch.matmul makes of its operands before a product of batches."""
    index = product - 1
    while index in dropped or trace.ops[index].packet in _RESHAPES:
        yield index
        index -= 1


def _copies_before(trace: Trace, uses: dict[int, list[int]], storage: int, within: set[int]) -> list[int]:
    """The copies that made a storage which no other op reads, the last one first."""
    chain: list[int] = []
    while True:
        born = trace.storages[storage].born
        if born < 0 or not _is_copy(trace.ops[born]):
            return chain
        others = {index for index in uses[storage] if index != born and not is_view(trace.ops[index])}
        if not others <= within | set(chain):
            return chain
        chain.append(born)
        storage = trace.ops[born].inputs[0].storage


def _is_copy(op: Op) -> bool:
    return op.packet in _COPIES and bool(op.inputs) and op.inputs[0].dtype == op.outputs[0].dtype


def _before_copies(trace: Trace, spec: TensorSpec, dropped: set[int]) -> TensorSpec:
    born = trace.storages[spec.storage].born
    while born in dropped and _is_copy(trace.ops[born]):
        spec = trace.ops[born].inputs[0]
        born = trace.storages[spec.storage].born
    return spec


def _is_causal(trace: Trace, uses: dict[int, list[int]], touched: set[int], square: TensorSpec) -> bool:
    """Whether a mask of [queries, keys] is applied to a square of scores that says for each pair of places whether one
    comes after the other: it was made of comparisons of places, or all sequences share it, which is assumed to be
    causal."""
    masks = (spec for index in touched for spec in trace.ops[index].inputs)
    return any(_is_causal_mask(trace, uses, spec, square) for spec in masks if spec.distinct_elements < square.numel)


def _is_causal_mask(trace: Trace, uses: dict[int, list[int]], spec: TensorSpec, square: TensorSpec) -> bool:
    *_, queries, keys = square.shape
    if not queries == keys > 1 or spec.shape[-2:] != (queries, keys):
        return False
    return spec.distinct_elements == queries * keys or _compares_places(trace, uses, spec.storage)


def _compares_places(trace: Trace, uses: dict[int, list[int]], storage: int) -> bool:
    """Whether the storage depends on no data and was made with a triangle or by comparing two tensors."""
    known, todo, compares = {storage}, [storage], False
    while todo:
        number = todo.pop()
        if trace.storages[number].born < 0:
            return False
        for op in (trace.ops[index] for index in uses[number]):
            if is_view(op) or not _writes(op, {number}):
                continue
            compares |= op.packet in _TRIANGLES or (op.packet in _COMPARISONS and len(op.inputs) == 2)
            todo += op.reads - known
            known |= op.reads
    return compares


def _dropout(trace: Trace, touched: set[int]) -> float:
    ops = (trace.ops[index] for index in touched)
    return next((float(op.call.args[1]) for op in ops if op.packet is aten.native_dropout), 0.0)


def makers_of_masks(trace: Trace, uses: dict[int, list[int]], dropped: set[int], put_in: dict[int, Op]) -> set[int]:
    """Ops that are not views and whose results only dropped ops read."""
    needed = {number for op in put_in.values() for number in op.storages}
    gone = set(dropped)
    todo = [index for index in dropped if trace.ops[index].phase != "backward"]
    while todo:
        for spec in trace.ops[todo.pop()].inputs:
            born = trace.storages[spec.storage].born
            if born < 0 or born in gone or spec.storage in needed:
                continue
            readers = {index for index in uses[spec.storage] if not is_view(trace.ops[index])} - {born}
            if readers <= gone and not any(trace.storages[each.storage].role for each in trace.ops[born].inputs):
                gone.add(born)
                todo.append(born)
    return gone - dropped


def views_of_nothing(trace: Trace, uses: dict[int, list[int]], dropped: set[int], put_in: dict[int, Op]) -> set[int]:
    needed = {number for op in put_in.values() for number in op.storages}
    views: set[int] = set()
    for number in {number for index in dropped for number in trace.ops[index].storages} - needed:
        rest = set(uses[number]) - dropped
        if trace.storages[number].born in dropped and all(is_view(trace.ops[index]) for index in rest):
            views |= rest
    return views


def _rows_innermost(spec: TensorSpec, is_gradient: object) -> TensorSpec:
    """The same gradients with a head's width innermost, as fused kernels write them."""
    if not is_gradient or not is_dense(spec) or not spec.shape or spec.stride[-1] == 1:
        return spec
    return spec._replace(stride=dense(spec.shape, spec.dtype, spec.device).stride)


def _fused(trace: Trace, attention: Materialised, device: Hardware) -> dict[int, Op]:
    """scaled_dot_product_attention."""
    if are_bent(_on_scores(trace, attention, backward=False)):
        raise NoKernelError
    qkv, result, sums = _around_kernel(trace, attention)
    is_causal, dropout = attention.is_causal, attention.dropout
    bias, makers = _bias_in_heads(trace, attention, qkv[0].shape[:2])
    backend = backend_of(qkv, device, is_causal=is_causal, dropout=dropout, bias=bias)
    return makers | {
        place: fused(op, qkv, result, sums, backend, is_causal=is_causal, dropout=dropout, bias=bias)
        for place, op in ends(trace, attention)
    }


def _flexed(trace: Trace, attention: Materialised, device: Hardware) -> dict[int, Op]:
    """flex_attention, which has no dropout. What it would take to read a tensor that is added is not priced."""
    if not are_bent(_on_scores(trace, attention, backward=False)) or attention.dropout or attention.biases:
        raise NoKernelError
    qkv, result, sums = _around_kernel(trace, attention)
    *_, queries, keys = attention.softmax.shape

    def body(op: Op) -> FlexBody:
        on_scores = _on_scores(trace, attention, backward=op.phase == "backward")
        return body_of(on_scores, queries, keys, device, is_causal=attention.is_causal)

    return {place: flexed(op, qkv, result, sums, body(op)) for place, op in ends(trace, attention)}


def _on_scores(trace: Trace, attention: Materialised, *, backward: bool) -> list[Op]:
    """The ops that make scores of scores, in the forward pass or in both."""
    ops = (trace.ops[index] for index in sorted(attention.ops))
    others = (*PRODUCTS, *_SOFTMAX, *_COPIES, *_RESHAPES, aten._softmax_backward_data)
    return [
        op
        for op in ops
        if op.packet not in others
        and (backward or op.phase != "backward")
        and any(out.numel == attention.softmax.numel for out in op.outputs)
    ]


def _around_kernel(trace: Trace, attention: Materialised) -> tuple[Operands, TensorSpec, TensorSpec]:
    """q, k and v; the result; and the sum of each row's exponentials."""
    qkv = _operands(trace, attention)
    out = trace.ops[attention.values].outputs[0]
    return qkv, *results(qkv, out.dtype, out.storage, attention)


def results(qkv: Operands, dtype: torch.dtype, storage: int, attention: Materialised) -> tuple[TensorSpec, TensorSpec]:
    """What a fused kernel makes of q, k and v: the result, in that storage, and the sum of each row's exponentials."""
    (*heads, queries, _), device = qkv[0].shape, qkv[0].device
    result = dense((*heads, queries, qkv[2].shape[-1]), dtype, device)._replace(storage=storage)
    sums = dense((*heads, queries), torch.float32, device)
    return result, sums._replace(storage=attention.softmax.storage)  # which no other op touches any more


def ends(trace: Trace, attention: Materialised) -> list[tuple[int, Op]]:
    """The ops in whose places the fused ones stand: the last of the forward pass, and of the backward pass if there is
    one."""
    backward = [index for index in attention.ops if trace.ops[index].phase == "backward"]
    return [(place, trace.ops[place]) for place in (attention.values, *([max(backward)] if backward else ()))]


def _bias_in_heads(
    trace: Trace, attention: Materialised, batch_and_heads: tuple[int, ...]
) -> tuple[Bias | None, dict[int, Op]]:
    """What is added to the scores as the fused kernel takes it, and the ops that make that of it."""
    sizes = (*batch_and_heads, *attention.softmax.shape[-2:])
    free = {index: trace.ops[index] for index in attention.ops if attention.scores <= index < attention.values}
    backward = {index: trace.ops[index] for index in attention.ops if trace.ops[index].phase == "backward"}
    backward.pop(max(backward, default=-1), None)  # where the fused kernel stands
    return bias_for_kernel(attention.biases, sizes, attention.bias_gradient, free, backward)


def _operands(trace: Trace, attention: Materialised) -> Operands:
    """q, k and v as the fused kernel takes them: [batch, heads, rows, width]."""
    queries, depth = trace.ops[attention.scores].inputs[-2].shape[-2:]
    keys, width = attention.softmax.shape[-1], trace.ops[attention.values].outputs[0].shape[-1]
    sizes = ((queries, depth), (keys, depth), (keys, width))
    q, k, v = (_in_heads(spec, *size) for spec, size in zip(attention.operands, sizes, strict=True))
    if len({spec.shape[0] for spec in (q, k, v)}) > 1:
        q, k, v = (_packed(spec, *size) for spec, size in zip(attention.operands, sizes, strict=True))
    q, k, v = (_in_batches(spec, attention.softmax.shape[:-2]) for spec in (q, k, v))
    return q, k, v


def _in_batches(spec: TensorSpec, batch_and_heads: tuple[int, ...]) -> TensorSpec:
    """The packed tensor with the scores' sequences apart from their heads, if it has as many."""
    count, sizes = spec.shape[1], spec.shape[2:]
    if spec.shape[0] > 1 or len(batch_and_heads) != 2 or count != prod(batch_and_heads) or not is_dense(spec):
        return spec
    own = dense((*batch_and_heads, *sizes), spec.dtype, spec.device)
    return own._replace(storage=spec.storage, offset=spec.offset)


def _in_heads(spec: TensorSpec, rows: int, width: int) -> TensorSpec:
    """The tensor as it lies in memory, without dimensions that only repeat it; packed if it has others than these."""
    dims = [(size, step) for size, step in zip(spec.shape, spec.stride, strict=True) if step or size == 1]
    if [size for size, _ in dims[-2:]] == [width, rows] and dims[-1][1] != 1:
        dims[-2:] = dims[:-3:-1]  # keys are transposed for the product
    if len(dims) > 4 or [size for size, _ in dims[-2:]] != [rows, width]:
        return _packed(spec, rows, width)
    shape, stride = zip(*([(1, spec.numel)] * (4 - len(dims)) + dims), strict=True)
    return spec._replace(shape=shape, stride=stride)


def _packed(spec: TensorSpec, rows: int, width: int) -> TensorSpec:
    count = max(1, spec.distinct_elements // (rows * width))
    own = dense((1, count, rows, width), spec.dtype, spec.device)
    return own._replace(storage=spec.storage, offset=spec.offset)
