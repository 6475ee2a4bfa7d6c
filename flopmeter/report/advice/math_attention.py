"""scaled_dot_product_attention that torch runs op by op, on its math path, because no fused kernel takes the call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.report.advice.attention import proposal, without_attentions
from flopmeter.report.advice.found_attention import FoundAttention, ProductStep, attention_around, softmaxes
from flopmeter.report.advice.fused_attention import Bias, dense, fused, fused_call
from flopmeter.report.advice.graph import Graph
from flopmeter.report.advice.passes import are_differentiated
from flopmeter.report.advice.remedies import Proposal, remedy
from flopmeter.report.advice.rewrite import Mark, are_in_torch, in_templates, with_tensors
from flopmeter.report.report import Report
from flopmeter.report.unfused_attention import Unfused
from flopmeter.torch_names.operators import aten


@remedy
def attention_that_no_kernel_takes(report: Report, trace: Trace) -> Iterator[Proposal]:
    """A call of scaled_dot_product_attention that could run as one kernel, and does not."""
    graph = Graph(trace)
    by_cause = defaultdict[tuple[str, str], list[tuple[FoundAttention, Unfused]]](list)
    for attention, call in math_paths(graph, report.unfused):
        if call is not None and not are_differentiated(trace, attention.ops):
            by_cause[call.why, call.remedy].append((attention, call))
    for (why, change), paths in by_cause.items():
        put_in = {place: op for path in paths for place, op in _fused(graph, *path).items()}
        if not are_in_torch(put_in.values()):
            continue
        found = [attention for attention, _ in paths]
        changed = without_attentions(graph, found, put_in, drops_masks=all(call.mask is None for _, call in paths))
        calls = {number: call for attention, call in paths for number in attention.gradients}
        why = f"scaled_dot_product_attention runs op by op (its math path): {why}"
        yield proposal(report, graph, why, change, found, with_tensors(changed, _as_operand, calls.get))


def math_paths(graph: Graph, calls: tuple[Unfused, ...]) -> Iterator[tuple[FoundAttention, Unfused | None]]:
    """The attentions of the program that run on SDPA's math path, each with the call that was found to have no kernel.
    None: no change is known that a fused kernel would take."""
    inside = in_templates(graph.trace)
    for softmax in softmaxes(graph, of_math_path=True):
        scores = graph.ops[softmax].inputs[0]
        fitting = (each for each in calls if (each.heads, *each.lengths) == scores.shape[-3:])
        call = next(fitting, None)
        steps: set[ProductStep] = (
            {"copy", "scaling"} if call is not None and not call.is_half else {"copy", "scaling", "cast"}
        )
        attention = None if softmax in inside else attention_around(graph, softmax, steps)
        if attention is not None:
            yield attention, call


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


def _fused(graph: Graph, attention: FoundAttention, call: Unfused) -> dict[int, Op]:
    """The kernel that takes the changed call, by the index of the op in whose place it stands. What the change itself
    copies is not priced."""
    q, k, v = (
        dense(operand.shape, operand.dtype, spec.device)._replace(stride=operand.strides, storage=spec.storage)
        for operand, spec in zip(call.qkv, attention.qkv, strict=True)
    )
    bias = _bias(graph, attention, call, (*q.shape[:-2], *call.lengths))
    instead = fused_call(attention, (q, k, v), q.dtype, is_causal=call.is_causal, dropout=call.dropout_p, bias=bias)
    return {place: fused(graph.ops[place], instead, call.backend) for place in attention.ends}


def _bias(graph: Graph, attention: FoundAttention, call: Unfused, sizes: tuple[int, ...]) -> Bias | None:
    """The mask as the fused kernel adds it: repeated for each sequence and head, without memory for that."""
    if call.mask is None:
        return None
    (made,) = graph.ops[attention.scoring].makes
    ops = (graph.ops[index] for index in attention.forward)
    sums = (op for op in ops if op.packet in (aten.add, aten.add_) and made in op.reads)
    added = next(spec for op in sums for spec in op.inputs if spec.storage != made)
    shape = (1,) * (len(sizes) - len(call.mask.shape)) + call.mask.shape
    own = dense(shape, call.qkv[0].dtype, added.device)
    stride = tuple(step if size > 1 else 0 for size, step in zip(shape, own.stride, strict=True))
    return Bias(own._replace(shape=sizes, stride=stride, storage=added.storage), attention.mask_gradient)
