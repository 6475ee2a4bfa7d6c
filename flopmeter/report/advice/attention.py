"""Attention that writes its scores to memory (found_attention.py), and the fused kernel that could take its place.

One fused op stands where the forward pass of the attention ended, and one where its backward pass did. Views of tensors
that nobody makes any more, and ops that made a causal mask, go too: they cost the host time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from math import prod

import torch

from flopmeter.costs.rules import in_one_piece
from flopmeter.device.hardware import Hardware
from flopmeter.records import FlexBody, Op, TensorSpec, Trace
from flopmeter.report.advice.bent_scores import FLEX, are_bent, body_of, flexed
from flopmeter.report.advice.found_attention import (
    COPIES,
    PRODUCTS,
    RESHAPES,
    SOFTMAX,
    Materialised,
    around,
    is_softmax,
    uses_of,
)
from flopmeter.report.advice.fused_attention import Bias, NoKernelError, Operands, backend_of, dense, fused
from flopmeter.report.advice.masks import bias_for_kernel
from flopmeter.report.advice.passes import are_differentiated
from flopmeter.report.advice.remedies import Proposal, of_ops, priced, remedy
from flopmeter.report.advice.rewrite import (
    are_in_torch,
    in_templates,
    is_dense,
    makes_no_storage,
    with_ops,
    with_tensors,
)
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten

_OF_TORCH = "need_weights=False in the calls of nn.MultiheadAttention, which then runs fused attention"
_WITHOUT_MODULE = "F.scaled_dot_product_attention (attn_implementation='sdpa')"
_BUT_TWICE = ", but where gradients of gradients are taken, which it has not"

_MakesFused = Callable[[Trace, Materialised, Hardware], dict[int, Op]]
"""Gives the fused ops, by the index of the op in whose place they stand. Raises NoKernelError if there are none."""


@remedy
def materialised_attention(report: Report, trace: Trace) -> Iterator[Proposal]:
    """softmax(q @ k^T) @ v op by op."""
    yield from _instead(report, trace, _fused)


@remedy
def materialised_attention_of_bent_scores(report: Report, trace: Trace) -> Iterator[Proposal]:
    """The same with a function on the scores, such as a soft cap."""
    yield from _instead(report, trace, _flexed)


def _instead(report: Report, trace: Trace, kernels: _MakesFused) -> Iterator[Proposal]:
    uses, change = uses_of(trace), _FusedInstead()
    has_it = in_templates(trace) if kernels is _flexed else ()
    for index, op in enumerate(trace.ops):
        if op.phase not in ("forward", "recompute") or not is_softmax(trace, uses, index):
            continue
        if index in has_it or op.packet is aten._safe_softmax:  # of SDPA's math path: math_attention.py
            continue
        attention = around(trace, uses, index)
        if attention is None or attention.ops & change.dropped:
            continue
        averaged = _averaged_over_heads(trace, attention)
        if any(uses[number][-1] not in attention.ops for number in averaged):
            continue  # the program reads the weights, which no fused kernel gives
        if are_differentiated(trace, attention.ops):
            change.leaves_some = True  # a fused gradient has none
            continue
        with contextlib.suppress(NoKernelError):
            change.add(op, attention, kernels(trace, attention, report.hardware), is_averaged=bool(averaged))
    if not change.found or not are_in_torch(change.put_in.values()):
        return
    concerns = of_ops(trace, change.dropped)
    then = priced(report, change.made(trace, uses))
    yield Proposal(change.why, change.remedy(kernels), then, concerns, f"attention ×{len(change.found)}")


class _FusedInstead:
    """The attentions of a program that are to be fused."""

    def __init__(self) -> None:
        self.found: list[Op] = []  # the softmax of each
        self.put_in: dict[int, Op] = {}
        self.dropped: set[int] = set()
        self._gradients: set[int] = set()
        self._read = set[tuple[str, str, int]]()  # module, phase and storage of the queries
        self._needs_mask = False
        self._all_average = True
        self.leaves_some = False

    def add(self, softmax: Op, attention: Materialised, put_in: dict[int, Op], *, is_averaged: bool) -> None:
        self.found.append(softmax)
        self.put_in |= put_in
        self.dropped |= attention.ops
        self._gradients |= attention.gradients
        self._read.add((softmax.module, softmax.phase, attention.operands[0].storage))
        self._needs_mask |= not attention.is_causal
        self._all_average &= is_averaged

    @property
    def why(self) -> str:
        *_, queries, keys = self.found[0].inputs[0].shape
        one_by_one = "; heads run one by one: priced is a call for each, one for all wins more"
        materialised = f"materialised: scores of {queries} × {keys} a head go to memory and back"
        return materialised + one_by_one * (len(self._read) < len(self.found))

    def remedy(self, kernels: _MakesFused) -> str:
        if kernels is _flexed:
            return FLEX
        return (_OF_TORCH if self._all_average else _WITHOUT_MODULE) + _BUT_TWICE * self.leaves_some

    def made(self, trace: Trace, uses: dict[int, list[int]]) -> Trace:
        """The changed program, without what only these attentions needed."""
        dropped = set(self.dropped)
        if not self._needs_mask:
            dropped |= makers_of_masks(trace, uses, dropped, self.put_in)
        dropped |= views_of_nothing(trace, uses, dropped, self.put_in)
        changed = with_ops(trace, dropped, self.put_in)
        return with_tensors(changed, _rows_innermost, lambda number: number in self._gradients)


def _averaged_over_heads(trace: Trace, attention: Materialised) -> set[int]:
    """Storages with the average of the heads' probabilities, which nn.MultiheadAttention returns next to its result."""
    ops = (trace.ops[index] for index in attention.ops)
    means = (op for op in ops if op.packet is aten.mean and op.phase != "backward")
    return {spec.storage for op in means for spec in op.outputs if spec.shape[-2:] == attention.softmax.shape[-2:]}


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
            readers = {index for index in uses[spec.storage] if not makes_no_storage(trace.ops[index])} - {born}
            if readers <= gone and not any(trace.storages[each.storage].role for each in trace.ops[born].inputs):
                gone.add(born)
                todo.append(born)
    return gone - dropped


def views_of_nothing(trace: Trace, uses: dict[int, list[int]], dropped: set[int], put_in: dict[int, Op]) -> set[int]:
    needed = {number for op in put_in.values() for number in op.storages}
    views: set[int] = set()
    for number in {number for index in dropped for number in trace.ops[index].storages} - needed:
        rest = set(uses[number]) - dropped
        if trace.storages[number].born in dropped and all(makes_no_storage(trace.ops[index]) for index in rest):
            views |= rest
    return views


def _rows_innermost(spec: TensorSpec, is_gradient: object) -> TensorSpec:
    """The same gradients with a head's width innermost, as fused kernels write them."""
    if not is_gradient or not is_dense(spec) or not spec.shape or spec.stride[-1] == 1:
        return spec
    return in_one_piece(spec, spec.shape)


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
    others = (*PRODUCTS, *SOFTMAX, *COPIES, *RESHAPES, aten._softmax_backward_data)
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
    return in_one_piece(spec, (*batch_and_heads, *sizes))


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
    return in_one_piece(spec, (1, count, rows, width))
