"""Tokens that a program computes without need: padding behind all texts of a batch, and in generation those that the
step before has computed.

Both are priced as the same ops on shorter texts. No trace says which dimension of a tensor its tokens are: those that
are as long as the texts, or as all texts of the batch together. Where a product has two of them, another dimension
happens to have that size, and nothing is proposed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from flopmeter.records import OF_WEIGHTS, Op, TensorSpec, Trace
from flopmeter.report.advice.batch import priced_if_it_fits
from flopmeter.report.advice.fused_attention import by_chosen_kernel, is_fused_attention
from flopmeter.report.advice.remedies import Proposal, has_backward, remedy
from flopmeter.report.advice.rewrite import PRODUCTS, with_ops, with_tensors
from flopmeter.report.quantities import percent
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten


@remedy
def padding_of_all_texts(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Texts padded to more than the longest of the batch. Texts that grow begin with a prompt, which may be one id."""
    found = max(trace.padding, key=lambda each: each.length - each.longest, default=None)
    if found is None or _grown(trace) is not None:
        return
    ids = trace.ops[found.op].inputs[-1]
    then = priced_if_it_fits(report, shortened(trace, ids, found.longest)) if _is_clear(trace, ids) else None
    if then is not None:
        share = percent(1 - found.longest / found.length)
        yield Proposal(
            f"of the {found.length} tokens of each text {share} % are padding, in the longest one, too",
            f"pad each batch to its longest text (here to {found.longest}), not to a length for all",
            then,
        )  # fmt: skip


@remedy
def tokens_of_the_step_before(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Generation without a cache of keys and values: each step computes all tokens so far again."""
    ids = None if has_backward(trace) else _grown(trace)
    shorter = None if ids is None or report.cluster is not None else _with_cache(trace, ids, report)
    then = None if shorter is None else priced_if_it_fits(report, shorter)
    if ids is not None and then is not None:
        yield Proposal(
            f"each step computes all {ids.shape[1]} tokens, of which the one before has computed all but the last",
            "keep keys and values of earlier tokens (a KV cache), and compute the new token alone",
            then,
        )  # fmt: skip


def _grown(trace: Trace) -> TensorSpec | None:
    """The ids that a step looks up, if they are those of the step before and one more of each text."""
    before = [op.inputs[-1] for op in trace.earlier if op.packet is aten.embedding]
    made_of = {op.outputs[0].storage: op.inputs[0] for op in (*trace.earlier, *trace.ops) if op.packet is aten.cat}
    for op in trace.ops:
        ids = op.inputs[-1] if op.packet is aten.embedding else None
        if ids is None or len(ids.shape) != 2 or ids.storage not in made_of:
            continue
        shorter = made_of[ids.storage]
        if any(spec.storage == shorter.storage and spec.shape == shorter.shape for spec in before):
            return ids if ids.shape == (shorter.shape[0], shorter.shape[1] + 1) else None
    return None


def shortened(trace: Trace, ids: TensorSpec, length: int) -> Trace:
    """The trace with texts of that length in place of those of the ids, [texts, tokens]."""
    change = _shorter(ids.shape[0], ids.shape[1], length)
    return with_tensors(
        trace,
        lambda spec, role: spec if role in OF_WEIGHTS else change(spec),
        lambda number: trace.storages[number].role,
    )


def _shorter(texts: int, before: int, now: int) -> Callable[[TensorSpec], TensorSpec]:
    sizes = {before: now, texts * before: texts * now}

    def change(spec: TensorSpec) -> TensorSpec:
        if not spec.is_strided or sizes.keys().isdisjoint(spec.shape):
            return spec
        stride = list(spec.stride)
        for size, step in zip(spec.shape, spec.stride, strict=True):
            if size in sizes and step:
                stride = [
                    own // size * sizes[size] if each > step and not each % size else own
                    for each, own in zip(spec.stride, stride, strict=True)
                ]
        return spec._replace(shape=tuple(sizes.get(size, size) for size in spec.shape), stride=tuple(stride))

    return change


def _is_clear(trace: Trace, ids: TensorSpec) -> bool:
    """Whether the tokens are one dimension of some products, and of none two."""
    texts, tokens = ids.shape
    shapes = ((*op.inputs[-2].shape, op.inputs[-1].shape[1]) for op in trace.ops if op.packet in PRODUCTS)
    counts = {sum(size in (tokens, texts * tokens) for size in shape) for shape in shapes}
    return 1 in counts and counts <= {0, 1}


def _with_cache(trace: Trace, ids: TensorSpec, report: Report) -> Trace | None:
    """One token of each text, whose query sees the keys and values of all. None where another kernel attends."""
    change = _shorter(ids.shape[0], ids.shape[1], 1)
    places = [index for index, op in enumerate(trace.ops) if is_fused_attention(op)]
    kernels = [_of_last_query(trace.ops[index], change, report) for index in places]
    put_in = {index: kernel for index, kernel in zip(places, kernels, strict=True) if kernel is not None}
    is_all = bool(put_in) and len(put_in) == len(places) and _is_clear(trace, ids)
    return with_ops(shortened(trace, ids, 1), (), put_in) if is_all else None


def _of_last_query(op: Op, change: Callable[[TensorSpec], TensorSpec], report: Report) -> Op | None:
    call = op.call
    q = call.inputs[0]
    inputs = tuple(change(spec) if spec is q else spec for spec in call.inputs)
    now = op._replace(call=dataclasses.replace(call, inputs=inputs, outputs=tuple(map(change, call.outputs))))
    return by_chosen_kernel(now, report.hardware, is_causal=False)
