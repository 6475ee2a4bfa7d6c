"""Attentions whose scores a compiled program writes to memory: kernels of inductor's between two products of cuBLAS's.

torch.compile fuses what is done to the scores, but neither product; only some ways of writing an attention are taken
for scaled_dot_product_attention (torch/_inductor/fx_passes/fuse_attention.py). What a kernel does with the scores is
told by the ops that it was made of.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flopmeter.records import Op, TensorSpec
from flopmeter.report.advice.found_attention import AroundSoftmax, FoundAttention, ops_in
from flopmeter.report.advice.fused_attention import dense
from flopmeter.report.advice.graph import Graph

_SOFTMAX = {"_softmax", "softmax"}  # not _safe_softmax, which is scaled_dot_product_attention's own
_COMPARISONS = {"le", "lt", "ge", "gt", "tril", "triu"}
# What SDPA does to scores besides, and what only moves and converts them.
_PARTS = {
    *_SOFTMAX, *_COMPARISONS, "prepare_softmax_online", "mul", "div", "add", "sub", "eq", "ne", "masked_fill", "where",
    "full", "full_like", "scalar_tensor", "arange", "iota", "native_dropout", "dropout", "_to_copy", "clone",
    "bitwise_and", "bitwise_or", "bitwise_not", "logical_and", "logical_not", "copy_", "inductor_seeds", "amax", "exp",
    "sum", "bmm", "matmul", "detach", "new_ones", "zeros", "index",
}  # fmt: skip
# By which inductor scales within a softmax of what is multiplied or divided (fx_passes/joint_graph.py).
_SCALING = {"abs", "all"}
_DROPOUT_P = 0.1  # the kernel does not say how much it drops, which changes neither time nor memory


def compiled_attentions(graph: Graph) -> Iterator[FoundAttention]:
    """Those whose kernels make nothing else, and do nothing to the scores that SDPA cannot."""
    for index, op in enumerate(graph.ops):
        origins = ops_in(op)
        if op.phase != "forward" or _SOFTMAX.isdisjoint(origins) or not _are_parts(origins):
            continue
        scores = next((spec for spec in op.inputs if _is_of_product(graph, spec)), None)
        if scores is None:
            continue
        around = AroundSoftmax(graph, index, scores)
        found = around.one_attention(sum(_is_softmax(graph.ops[place]) for place in around.ops))
        if found is not None and _makes_nothing_else(graph, found, around.of_scores):
            found = _as_the_kernel_does(found, op, around.of_scores)
            if found is not None:
                yield found


def _are_parts(origins: set[str]) -> bool:
    return origins - (_SCALING if origins >= _SCALING else set()) <= _PARTS


def _is_softmax(op: Op) -> bool:
    return op.phase == "forward" and not _SOFTMAX.isdisjoint(ops_in(op))


def _is_of_product(graph: Graph, spec: TensorSpec) -> bool:
    maker = graph.maker(spec.storage)
    return maker is not None and len(spec.shape) > 2 and graph.ops[maker].call.name in ("bmm", "baddbmm")


def _makes_nothing_else(graph: Graph, found: FoundAttention, of_scores: set[int]) -> bool:
    """Whether nobody else reads scores, or what else the kernels make that work on them, and the graph gives neither to
    the program: it frees them after their last use."""
    on_scores = (graph.ops[index] for index in found.ops if not of_scores.isdisjoint(graph.ops[index].storages))
    made = set[int]().union(*(op.makes for op in on_scores if ops_in(op)))
    lives = ((number, graph.trace.storages[number].died) for number in made | of_scores)
    return all(
        graph.is_read_only_by(number, found.ops) and died is not None and died <= graph.touching[number][-1] + 1
        for number, died in lives
    )


def _as_the_kernel_does(found: FoundAttention, softmax: Op, of_scores: set[int]) -> FoundAttention | None:
    """With the mask and the dropout of the kernel that does the softmax, whose result has sequences apart from heads. A
    mask is causal if the kernel compares places, or if all sequences share it; what differs from sequence to sequence
    is priced as what SDPA adds in its place. None where it is not known how a mask lies over the scores."""
    origins, scores = ops_in(softmax), found.scores
    shapes = (spec.shape for spec in softmax.outputs if len(spec.shape) == 4 and spec.numel == scores.numel)
    shape = next(shapes, scores.shape)
    given = [spec for spec in softmax.inputs if spec.storage not in of_scores and spec.numel > 1]
    masks = [spec for spec in given if spec.shape[-1:] == shape[-1:] and _says_where(spec)]
    compares = not _COMPARISONS.isdisjoint(origins)
    is_causal = found.is_causal or (not masks and compares)
    if "index" in origins and not compares:  # a table, such as that of a bias by position
        return None
    if is_causal:
        masks = []
    elif masks and len(shape) != 4:
        return None
    return found._replace(
        scores=dense(shape, scores.dtype, scores.device)._replace(storage=scores.storage),
        masks=tuple(_added(spec, shape, scores.dtype, compares=compares) for spec in masks),
        is_causal=is_causal,
        dropout=_DROPOUT_P if origins & {"native_dropout", "dropout"} else 0.0,
        on_scores=(),
    )


def _says_where(spec: TensorSpec) -> bool:
    """Whether it holds numbers or truths for keys, or the places of each sequence's tokens, which may be packed."""
    return spec.dtype is torch.bool or spec.dtype.is_floating_point or (len(spec.shape) > 1 and spec.shape[0] > 1)


def _added(spec: TensorSpec, shape: tuple[int, ...], dtype: torch.dtype, *, compares: bool) -> TensorSpec:
    """What SDPA adds: numbers as they are, else numbers for all keys, of each query where places are compared."""
    if spec.dtype.is_floating_point:
        return spec
    queries = shape[-2] if compares else 1
    return dense((shape[0], 1, queries, shape[-1]), dtype, spec.device)._replace(storage=spec.storage)
