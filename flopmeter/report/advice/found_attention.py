"""The attentions of a program that write their scores to memory.

Around each softmax, one that is written out too, the tensors of the scores' size are found (scores, mask,
probabilities, dropout, their gradients). All ops that touch one are the attention, with the copies that only feed its
products or take their results.

On the math path of scaled_dot_product_attention torch also casts q, k and v to fp32, multiplies q and k by the root of
the scale, and casts the result back (_scaled_dot_product_attention_math in ATen/native/transformers/attention.cpp).
These ops are not the program's own, and belong to the attention too.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Literal, NamedTuple

import torch

from flopmeter.costs.access import HALVES
from flopmeter.records import CompiledKernel, Op, TensorSpec
from flopmeter.report.advice.graph import Graph
from flopmeter.report.advice.rewrite import is_dense, is_view
from flopmeter.torch_names.operators import aten

Operands = tuple[TensorSpec, TensorSpec, TensorSpec]
ProductStep = Literal["scaling", "cast", "copy"]
"""What an op next to a product of attention does to an operand or a result."""
COPIES: frozenset[ProductStep] = frozenset({"copy"})

_SOFTMAX = (aten._softmax, aten._safe_softmax)
_PRODUCTS = (aten.bmm, aten.baddbmm, aten.mm, aten.matmul)
_COPIES = (aten.clone, aten._to_copy, aten.copy_, aten.contiguous)
_COPIED_IN_KERNELS = {"clone", "contiguous", "copy_", "_to_copy", "mul"}  # with the scale
_RESHAPES = (aten.expand, aten.view, aten._unsafe_view)
_TRIANGLES = (aten.tril, aten.triu)
_ADDITIONS = (aten.add, aten.add_)
_FILLS = (aten.masked_fill, aten.masked_fill_, aten.where)
_COMPARISONS = (aten.le, aten.lt, aten.ge, aten.gt)
_NOT_ON_SCORES = (*_PRODUCTS, *_SOFTMAX, *_COPIES, aten._softmax_backward_data)


class FoundAttention(NamedTuple):
    """An attention: its ops, by their indices in the trace, and what goes in and out."""

    forward: tuple[int, ...]  # in order
    backward: tuple[int, ...]
    scoring: int  # of the forward ops: q @ k^T
    mixing: int  # of the forward ops: p @ v
    scores: TensorSpec  # that the softmax takes: [..., queries, keys]
    on_scores: tuple[Op, ...]  # those, in both passes, that make scores of scores: what scales, masks or bends them
    qkv: Operands  # before what only prepares them
    result: int  # the storage that the program is given
    given: TensorSpec | None  # the gradient of its result, before what only prepares it
    gradients: frozenset[int]  # storages that its backward pass gives to the program
    averages: frozenset[int]  # storages of the mean of the heads' probabilities, which nn.MultiheadAttention gives too
    is_causal: bool
    dropout: float
    masks: tuple[TensorSpec, ...]  # on the scores, as the program has them; none if all are causal
    mask_gradient: TensorSpec | None  # of the scores' size: what the sum that gives a mask its gradient reads

    @property
    def ops(self) -> set[int]:
        return {*self.forward, *self.backward}

    @property
    def ends(self) -> tuple[int, ...]:
        """The ops in whose places fused ones stand: of the forward pass, and of the backward pass if there is one."""
        return self.mixing, *self.backward[-1:]


def softmaxes(graph: Graph, *, of_math_path: bool) -> Iterator[int]:
    """The softmaxes of forward passes that can be of scores: those of SDPA's math path, which alone runs _safe_softmax,
    or all others."""
    for index, op in enumerate(graph.ops):
        is_wanted = (op.packet is aten._safe_softmax) == of_math_path and op.phase in ("forward", "recompute")
        if is_wanted and _is_softmax(graph, index) and len(op.inputs[0].shape) > 2:
            yield index


def _is_softmax(graph: Graph, index: int) -> bool:
    """Whether the op is a softmax, or the exponential in one that is written out, which sums each row."""
    op = graph.ops[index]
    if op.packet is not aten.exp:
        return op.packet in _SOFTMAX
    out = op.outputs[0]
    readers = (graph.ops[place] for place in graph.readers(out.storage))
    sums = (each for each in readers if each.packet is aten.sum)
    return any(each.inputs[0].shape == out.shape and each.outputs[0].shape == (*out.shape[:-1], 1) for each in sums)


def attention_around(graph: Graph, softmax: int, steps: Set[ProductStep] = COPIES) -> FoundAttention | None:
    """The attention of a softmax, with ops next to its products that do one of these steps. None if no matmul makes its
    scores, or none takes its probabilities."""
    around = AroundSoftmax(graph, softmax, graph.ops[softmax].inputs[0])
    return around.one_attention(sum(_is_softmax(graph, index) for index in around.ops), steps)


class AroundSoftmax:
    """The ops around a softmax of these scores: those that touch a tensor of the scores' size, and then those next to
    its products."""

    def __init__(self, graph: Graph, softmax: int, scores: TensorSpec) -> None:
        self._graph, self._phase, self.scores = graph, graph.ops[softmax].phase, scores
        self.of_scores = self._storages_of_scores(graph.ops[softmax])
        touching = (index for number in self.of_scores for index in graph.touching[number])
        self.ops = {index for index in touching if not is_view(graph.ops[index])}
        self.products = [index for index in sorted(self.ops) if graph.ops[index].packet in _PRODUCTS]

    def _storages_of_scores(self, softmax: Op) -> set[int]:
        """Storages of the scores' size that ops other than matmuls make from one another."""
        found = {spec.storage for spec in (*softmax.inputs, *softmax.outputs) if self._is_alike(spec)}
        todo = list(found)
        while todo:
            ops = (self._graph.ops[index] for index in self._graph.touching[todo.pop()])
            for spec in (spec for op in ops if op.packet not in _PRODUCTS for spec in (*op.inputs, *op.outputs)):
                is_new = self._is_alike(spec) and spec.storage not in found
                if is_new and self._graph.maker(spec.storage) is not None:
                    found.add(spec.storage)
                    todo.append(spec.storage)
        return self._made_of_products(found)

    def _is_alike(self, spec: TensorSpec) -> bool:
        size = self.scores
        return spec.numel == size.numel and spec.shape[-2:] == size.shape[-2:] and is_dense(spec)

    def _made_of_products(self, storages: set[int]) -> set[int]:
        """Those of the storages that matmuls make, and what is made of them: not a mask that is as large. (A backward
        pass makes none.)"""
        made = set[int]()
        for index in sorted({place for number in storages for place in self._graph.touching[number]}):
            op = self._graph.ops[index]
            if op.packet in _PRODUCTS or op.phase == "backward" or not made.isdisjoint(op.reads):
                made |= op.makes & storages
        return made

    def makes_scores(self, product: int) -> bool:
        return not self.of_scores.isdisjoint(self._graph.ops[product].makes)

    def one_attention(self, softmaxes: int, steps: Set[ProductStep] = COPIES) -> FoundAttention | None:
        """The attention, if one product makes its scores, another takes its probabilities, and it has one softmax."""
        products = [index for index in self.products if self._graph.ops[index].phase == self._phase]
        scoring = [index for index in products if self.makes_scores(index)]
        mixing = [index for index in products if not self.makes_scores(index)]
        is_one = len(scoring) == len(mixing) == softmaxes == 1
        return self._attention(scoring[0], mixing[0], steps) if is_one else None

    def _attention(self, scoring: int, mixing: int, steps: Set[ProductStep]) -> FoundAttention:
        ops, touching = self._graph.ops, [self._graph.ops[index] for index in sorted(self.ops)]
        operands = {index: self._take_operands(ops[index], steps) for index in self.products}
        results = {
            index: self._take_after(ops[index], steps) for index in self.products if not self.makes_scores(index)
        }
        self._take_reshapes_before(scoring)
        self._take_reshapes_before(mixing)
        masks, mask_gradient = self._masks(touching)
        if mask_gradient is not None:  # the program goes on to sum it up
            self.ops = {index for index in self.ops if not self._sums_mask_gradient(ops[index])}
        backward = [index for index in sorted(self.ops) if ops[index].phase == "backward"]
        gradients = {made for index, made in results.items() if index in backward}
        if steps != COPIES:  # what the math path does not finish keeps its layout
            gradients = {made for made in gradients if self._graph.maker(made) not in self.products}
        given = (operands[index][0] for index in self.products if index in backward and self.makes_scores(index))
        q, k = operands[scoring][-2:]
        return FoundAttention(
            forward=tuple(sorted(self.ops.difference(backward))),
            backward=tuple(backward),
            scoring=scoring,
            mixing=mixing,
            scores=self.scores,
            on_scores=tuple(op for op in touching if self._is_on_scores(op)),
            qkv=(q, k, operands[mixing][-1]),
            result=results[mixing],
            given=next(given, None),
            gradients=frozenset(gradients),
            averages=self._averages(touching),
            is_causal=not masks and self._has_causal_mask(touching),
            dropout=next((float(op.call.args[1]) for op in touching if op.packet is aten.native_dropout), 0.0),
            masks=masks,
            mask_gradient=mask_gradient,
        )

    def _take_operands(self, product: Op, steps: Set[ProductStep]) -> list[TensorSpec]:
        operands = (spec for spec in product.inputs if spec.storage not in self.of_scores)
        return [self._take_before(spec, steps) for spec in operands]

    def _take_before(self, operand: TensorSpec, steps: Set[ProductStep]) -> TensorSpec:
        """The operand before the ops that only prepare it: nothing else reads what they make. Before a cast the
        program's own ops begin."""
        while (maker := self._graph.maker(operand.storage)) is not None:
            op = self._graph.ops[maker]
            step = _step_of(op)
            if step is None or step not in steps or not self._graph.is_read_only_by(operand.storage, self.ops):
                break
            self.ops.add(maker)
            operand = op.inputs[0] if not ops_in(op) else operand._replace(storage=op.inputs[0].storage)
            if step == "cast":
                break
            if step == "scaling":
                steps = steps - {"scaling"}
        return operand

    def _take_after(self, product: Op, steps: Set[ProductStep]) -> int:
        """The storage of the product's result, which these ops finish, each step once and in this order. The math path
        scales gradients alone. Where all but copies are the program's own steps, the result is what it copies."""
        storage = product.outputs[0].storage
        for step in ("scaling", "cast", "copy"):
            readers = self._graph.readers(storage)
            if len(readers) != 1 or readers[0] in self.ops:
                break
            op = self._graph.ops[readers[0]]
            if step in steps and step == _step_of(op) and (step != "scaling" or op.phase == "backward"):
                self.ops.add(readers[0])
                storage = op.outputs[0].storage
        return product.outputs[0].storage if steps == COPIES else storage

    def _take_reshapes_before(self, product: int) -> None:
        """The views that torch.matmul makes of its operands before a product of batches."""
        index = product - 1
        while index in self.ops or self._graph.ops[index].packet in _RESHAPES:
            self.ops.add(index)
            index -= 1

    def _is_on_scores(self, op: Op) -> bool:
        return op.packet not in _NOT_ON_SCORES and any(out.numel == self.scores.numel for out in op.outputs)

    def _averages(self, touching: list[Op]) -> frozenset[int]:
        means = (op for op in touching if op.packet is aten.mean and op.phase != "backward")
        made = (spec for op in means for spec in op.outputs)
        return frozenset(spec.storage for spec in made if spec.shape[-2:] == self.scores.shape[-2:])

    def _masks(self, touching: list[Op]) -> tuple[tuple[TensorSpec, ...], TensorSpec | None]:
        """What is added to the scores and what says where they are filled, which SDPA takes as its mask, and what the
        sum that gives it its gradient reads. A causal one is among them beside others alone: SDPA takes either."""
        ops = (op for op in touching if op.packet in (*_ADDITIONS, *_FILLS) and op.phase != "backward")
        given = ((op, spec) for op in ops for spec in op.inputs if spec.storage not in self.of_scores)
        masks = dict.fromkeys(
            spec
            for op, spec in given
            if spec.shape[-1:] == self.scores.shape[-1:] and (op.packet in _ADDITIONS or spec.dtype is torch.bool)
        )
        if all(map(self._is_causal_mask, masks)):
            return (), None
        gradients = (op.inputs[0] for op in touching if self._sums_mask_gradient(op))
        return tuple(masks), next(gradients, None)

    def _sums_mask_gradient(self, op: Op) -> bool:
        """Whether it sums the gradients that all sequences, or all heads, give to a mask that they share."""
        if op.phase != "backward" or op.packet is not aten.sum:
            return False
        return op.outputs[0].shape[-2:] == self.scores.shape[-2:]

    def _has_causal_mask(self, touching: list[Op]) -> bool:
        given = (spec for op in touching for spec in op.inputs)
        return any(self._is_causal_mask(spec) for spec in given if spec.distinct_elements < self.scores.numel)

    def _is_causal_mask(self, spec: TensorSpec) -> bool:
        """Whether it says for each pair of places in a square of scores whether one comes after the other: it was made
        of comparisons of places, or all sequences share it, which is assumed to be causal."""
        *_, queries, keys = self.scores.shape
        if queries != keys or spec.shape[-2:] != (queries, keys):
            return False
        return spec.distinct_elements == queries * keys or _compares_places(self._graph, spec.storage)


def _step_of(op: Op) -> ProductStep | None:
    """The step that the op does, if it does nothing else. A cast is one between 16 bits and fp32."""
    if inside := ops_in(op):
        is_copy = inside <= _COPIED_IN_KERNELS and len(op.inputs) == len(op.outputs) == 1
        return "copy" if is_copy and op.inputs[0].dtype == op.outputs[0].dtype else None
    if op.packet is aten.mul and len(op.inputs) == 1:
        return "scaling"
    if op.packet not in _COPIES or not op.inputs:
        return None
    types = {op.inputs[0].dtype, op.outputs[0].dtype}
    if len(types) == 1:
        return "copy"
    return "cast" if torch.float32 in types and types & set(HALVES) else None


def ops_in(op: Op) -> set[str]:
    """The ops that a kernel of inductor's was made of; none of another one."""
    kernel = op.call.kwargs.get("kernel")
    return {origin.op for origin in kernel.origins} if isinstance(kernel, CompiledKernel) else set()


def _compares_places(graph: Graph, storage: int) -> bool:
    """Whether the storage depends on no data and was made with a triangle or by comparing two tensors."""
    known, todo, compares = {storage}, [storage], False
    while todo:
        maker = graph.maker(todo.pop())
        if maker is None:
            return False
        op = graph.ops[maker]
        compares |= op.packet in _TRIANGLES or (op.packet in _COMPARISONS and len(op.inputs) == 2)
        todo += op.reads - known
        known |= op.reads
    return compares
