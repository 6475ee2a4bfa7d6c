"""Attention that writes its scores to memory (found_attention.py), and the fused kernel that could take its place.

One fused op stands where the forward pass of the attention ended, and one where its backward pass did. Views of tensors
that nobody makes any more, and ops that made a causal mask, go too: they cost the host time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from math import prod
from typing import NamedTuple

from flopmeter.costs.rules import in_one_piece
from flopmeter.device.hardware import Hardware
from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.report.advice.bent_scores import FLEX, are_bent, body_of, flexed
from flopmeter.report.advice.compiled_attention import compiled_attentions
from flopmeter.report.advice.found_attention import FoundAttention, Operands, attention_around, softmaxes
from flopmeter.report.advice.fused_attention import Bias, FusedCall, NoKernelError, backend_of, fused, fused_call
from flopmeter.report.advice.graph import Graph
from flopmeter.report.advice.masks import bias_for_kernel
from flopmeter.report.advice.passes import are_differentiated
from flopmeter.report.advice.remedies import Proposal, of_ops, priced, remedy
from flopmeter.report.advice.rewrite import are_in_torch, in_templates, is_dense, with_ops, with_tensors
from flopmeter.report.report import Report

_OF_TORCH = "need_weights=False in the calls of nn.MultiheadAttention, which then runs fused attention"
_WITHOUT_MODULE = "F.scaled_dot_product_attention (attn_implementation='sdpa')"
_BUT_TWICE = ", but where gradients of gradients are taken, which it has not"

_MakesFused = Callable[[Graph, FoundAttention, Hardware], dict[int, Op]]
"""Gives the ops in place of an attention, by the indices where they stand. Raises NoKernelError if there are none."""


class _Fusible(NamedTuple):
    """Attentions that a kind of kernel can take the place of, and the kernels, by their indices."""

    found: list[FoundAttention]
    put_in: dict[int, Op]
    leaves_some: bool  # others stay as they are: a fused gradient has no gradient


@remedy
def materialised_attention(report: Report, trace: Trace) -> Iterator[Proposal]:
    """softmax(q @ k^T) @ v op by op."""
    fusible = _fusible(report, graph := Graph(trace), _fused)
    if fusible.found:
        are_averaged = all(attention.averages for attention in fusible.found)
        change = (_OF_TORCH if are_averaged else _WITHOUT_MODULE) + _BUT_TWICE * fusible.leaves_some
        yield _instead(report, graph, fusible, change)


@remedy
def materialised_attention_of_bent_scores(report: Report, trace: Trace) -> Iterator[Proposal]:
    """The same with a function on the scores, such as a soft cap."""
    fusible = _fusible(report, graph := Graph(trace), _flexed)
    if fusible.found:
        yield _instead(report, graph, fusible, FLEX)


def _fusible(report: Report, graph: Graph, kernels: _MakesFused) -> _Fusible:
    found, taken, put_in, leaves_some = list[FoundAttention](), set[int](), dict[int, Op](), False
    written_out = _written_out(graph, in_templates(graph.trace) if kernels is _flexed else ())
    for attention in (*written_out, *(compiled_attentions(graph) if kernels is _fused else ())):
        if attention.ops & taken or _gives_weights(graph, attention):
            continue
        if are_differentiated(graph.trace, attention.ops):
            leaves_some = True
            continue
        with contextlib.suppress(NoKernelError):
            put_in |= kernels(graph, attention, report.hardware)
            found.append(attention)
            taken |= attention.ops
    return _Fusible(found if are_in_torch(put_in.values()) else [], put_in, leaves_some)


def _written_out(graph: Graph, but: Collection[int]) -> Iterator[FoundAttention]:
    """The attentions that run op by op, without those of these softmaxes."""
    for softmax in softmaxes(graph, of_math_path=False):
        attention = None if softmax in but else attention_around(graph, softmax)
        if attention is not None:
            yield attention


def _gives_weights(graph: Graph, attention: FoundAttention) -> bool:
    """Whether the program reads the average of the probabilities, which no fused kernel gives."""
    return any(graph.touching[number][-1] not in attention.ops for number in attention.averages)


def _instead(report: Report, graph: Graph, fusible: _Fusible, change: str) -> Proposal:
    found, put_in, _ = fusible
    *_, queries, keys = found[0].scores.shape
    why = f"materialised: scores of {queries} × {keys} a head go to memory and back"
    calls = ((graph.ops[attention.scoring], attention.qkv[0].storage) for attention in found)
    if len({(op.module, op.phase, query) for op, query in calls}) < len(found):
        why += "; heads run one by one: priced is a call for each, one for all wins more"
    gradients = frozenset[int]().union(*(attention.gradients for attention in found))
    changed = without_attentions(graph, found, put_in, drops_masks=all(attention.is_causal for attention in found))
    return proposal(
        report, graph, why, change, found, with_tensors(changed, _heads_side_by_side, gradients.__contains__)
    )


def without_attentions(
    graph: Graph, found: Iterable[FoundAttention], put_in: dict[int, Op], *, drops_masks: bool
) -> Trace:
    """The program with other ops in place of these attentions, without views of what nobody makes any more and, if no
    fused kernel reads them, the masks that only these attentions needed."""
    needed = {number for op in put_in.values() for number in op.storages}
    gone = set[int]().union(*(attention.ops for attention in found))
    if drops_masks:
        gone |= graph.made_only_for(gone, needed)
    return with_ops(graph.trace, gone | graph.views_left_by(gone, needed), put_in)


def proposal(
    report: Report, graph: Graph, why: str, change: str, found: Collection[FoundAttention], then: Trace
) -> Proposal:
    concerns = of_ops(graph.trace, {index for attention in found for index in attention.ops})
    return Proposal(why, change, priced(report, then), concerns, f"attention ×{len(found)}")


def _heads_side_by_side(spec: TensorSpec, is_gradient: object) -> TensorSpec:
    """The same gradients as fused kernels write them: of each token all heads, with a head's width innermost."""
    if not is_gradient or not is_dense(spec) or not spec.shape:
        return spec
    if len(spec.shape) != 4:
        return in_one_piece(spec, spec.shape)
    outermost, heads, rows = sorted(range(3), key=lambda dim: (-spec.stride[dim], dim))
    stride, step = [0] * 4, 1
    for dim in (3, heads, rows, outermost):
        stride[dim], step = step, step * spec.shape[dim]
    return spec._replace(stride=tuple(stride))


def _fused(graph: Graph, attention: FoundAttention, device: Hardware) -> dict[int, Op]:
    """scaled_dot_product_attention."""
    if are_bent(_forward(attention.on_scores)):
        raise NoKernelError
    qkv = _operands(graph, attention)
    bias, makers = bias_for_kernel(graph, attention, qkv[0].shape[:2])
    call = _call(graph, attention, qkv, bias)
    backend = backend_of(qkv, device, is_causal=call.is_causal, dropout=call.dropout, bias=bias)
    return makers | {place: fused(graph.ops[place], call, backend) for place in attention.ends}


def _flexed(graph: Graph, attention: FoundAttention, device: Hardware) -> dict[int, Op]:
    """flex_attention, which has no dropout. What it would take to read a tensor that is added is not priced."""
    forward, both = _forward(attention.on_scores), attention.on_scores
    if not are_bent(forward) or attention.dropout or attention.masks:
        raise NoKernelError
    call = _call(graph, attention, _operands(graph, attention), None)
    *_, queries, keys = attention.scores.shape
    bodies = (body_of(ops, queries, keys, device, is_causal=attention.is_causal) for ops in (forward, both))
    return {place: flexed(graph.ops[place], call, body) for place, body in zip(attention.ends, bodies, strict=False)}


def _forward(ops: Iterable[Op]) -> tuple[Op, ...]:
    return tuple(op for op in ops if op.phase != "backward")


def _call(graph: Graph, attention: FoundAttention, qkv: Operands, bias: Bias | None) -> FusedCall:
    dtype = graph.ops[attention.mixing].outputs[0].dtype
    return fused_call(attention, qkv, dtype, is_causal=attention.is_causal, dropout=attention.dropout, bias=bias)


def _operands(graph: Graph, attention: FoundAttention) -> Operands:
    """q, k and v as the fused kernel takes them: [batch, heads, rows, width]."""
    queries, depth = graph.ops[attention.scoring].inputs[-2].shape[-2:]
    keys, width = attention.scores.shape[-1], graph.ops[attention.mixing].outputs[0].shape[-1]
    sizes = ((queries, depth), (keys, depth), (keys, width))
    q, k, v = (_in_heads(spec, *size) for spec, size in zip(attention.qkv, sizes, strict=True))
    if len({spec.shape[0] for spec in (q, k, v)}) > 1:
        q, k, v = (_packed(spec, *size) for spec, size in zip(attention.qkv, sizes, strict=True))
    q, k, v = (_in_batches(spec, attention.scores.shape[:-2]) for spec in (q, k, v))
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
