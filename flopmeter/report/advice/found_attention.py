"""The attentions of a program that write their scores to memory.

Around each softmax, one that is written out too, the tensors of the scores' size are found (scores, mask,
probabilities, dropout, their gradients); all ops that touch one are the attention, with the copies that only feed these
or take their results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterator
from typing import NamedTuple

from flopmeter.records import Op, TensorSpec, Trace
from flopmeter.report.advice.rewrite import is_dense, makes_no_storage
from flopmeter.torch_names.operators import aten

SOFTMAX = (aten._softmax, aten._safe_softmax)
PRODUCTS = (aten.bmm, aten.baddbmm, aten.mm, aten.matmul)
COPIES = (aten.clone, aten._to_copy, aten.copy_, aten.contiguous)
RESHAPES = (aten.expand, aten.view, aten._unsafe_view)
_TRIANGLES = (aten.tril, aten.triu, aten.tril_, aten.triu_)
_ADDITIONS = (aten.add, aten.add_)
_COMPARISONS = (aten.le, aten.lt, aten.ge, aten.gt)


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
    touched = {index for number in scores for index in uses[number] if not makes_no_storage(ops[index])}
    if sum(is_softmax(trace, uses, index) for index in touched) != 1:
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


def is_softmax(trace: Trace, uses: dict[int, list[int]], index: int) -> bool:
    """Whether the op is a softmax, or the exponential in one that is written out, which sums each row."""
    op = trace.ops[index]
    if op.packet is not aten.exp:
        return op.packet in SOFTMAX
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


def reads_elsewhere(trace: Trace, uses: dict[int, list[int]], storage: int, within: Container[int]) -> bool:
    """Whether an op other than those `within`, and the one that made the storage, does more than look at it."""
    born = trace.storages[storage].born
    others = (index for index in uses[storage] if index != born and index not in within)
    return not all(makes_no_storage(trace.ops[index]) for index in others)


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
    while index in dropped or trace.ops[index].packet in RESHAPES:
        yield index
        index -= 1


def _copies_before(trace: Trace, uses: dict[int, list[int]], storage: int, within: set[int]) -> list[int]:
    """The copies that made a storage which no other op reads, the last one first."""
    chain: list[int] = []
    while True:
        born = trace.storages[storage].born
        if born < 0 or not _is_copy(trace.ops[born]):
            return chain
        if reads_elsewhere(trace, uses, storage, within.union(chain)):
            return chain
        chain.append(born)
        storage = trace.ops[born].inputs[0].storage


def _is_copy(op: Op) -> bool:
    return op.packet in COPIES and bool(op.inputs) and op.inputs[0].dtype == op.outputs[0].dtype


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
            if makes_no_storage(op) or not _writes(op, {number}):
                continue
            compares |= op.packet in _TRIANGLES or (op.packet in _COMPARISONS and len(op.inputs) == 2)
            todo += op.reads - known
            known |= op.reads
    return compares


def _dropout(trace: Trace, touched: set[int]) -> float:
    ops = (trace.ops[index] for index in touched)
    return next((float(op.call.args[1]) for op in ops if op.packet is aten.native_dropout), 0.0)
