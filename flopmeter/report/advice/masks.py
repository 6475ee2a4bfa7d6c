"""What a program adds to its scores, or says where it fills them, as the one mask that a fused kernel takes.

A tensor that is the same for all sequences or heads is read again for each, without memory for that. Several, such as
the bias by position and the mask of windows that Swin adds one after the other, are added up first. What every n-th
sequence shares, such as a mask of windows, is written out for all of them, since no strides say so. Rows that are not
aligned are padded by scaled_dot_product_attention itself, and their gradients are cut out again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from flopmeter.as_cuda.attention import MASK_ALIGNMENT
from flopmeter.records import Op, TensorSpec
from flopmeter.report.advice.found_attention import FoundAttention
from flopmeter.report.advice.fused_attention import Bias, NoKernelError, dense, dense_in
from flopmeter.report.advice.graph import Graph
from flopmeter.report.advice.rewrite import in_place_of
from flopmeter.torch_names.operators import aten_overloads


class _Places:
    """Ops that go, in whose places others stand, one after the other."""

    def __init__(self, ops: Sequence[Op], free: Iterable[int], scores: TensorSpec) -> None:
        by_result = dict[int, tuple[int, Op]]()  # each storage once: ops in place and views have it again
        for index in free:
            op = ops[index]
            if op.makes - op.reads or op.outputs[0].numel == scores.numel:
                by_result.setdefault(op.outputs[0].storage, (index, op))
        self._left = list(by_result.values())
        self.taken: dict[int, Op] = {}

    def made(
        self,
        func: OpOverload,
        read: tuple[TensorSpec, ...],
        shape: tuple[int, ...],
        *rest: Any,
        dtype: torch.dtype | None = None,
    ) -> TensorSpec:
        """What the op makes of these tensors. Raises NoKernelError where no place is left."""
        if not self._left:
            raise NoKernelError
        index, op = self._left.pop(0)
        given = (*read, op.outputs[0])[0]
        out = dense(shape, dtype or given.dtype, given.device)._replace(storage=op.outputs[0].storage)
        self.taken[index] = in_place_of(op, func, (*read, *rest), {}, read, (out,))
        return out


def bias_for_kernel(
    graph: Graph, attention: FoundAttention, batch_and_heads: tuple[int, ...]
) -> tuple[Bias | None, dict[int, Op]]:
    """The mask of [batch, heads, queries, keys], and the ops that make it and its gradient, in the places of ops of
    both passes that go, by their indices. None where nothing is added, or nothing that is known here. Raises
    NoKernelError if there are too few places."""
    added, sizes = attention.masks, (*batch_and_heads, *attention.scores.shape[-2:])
    gradient, whole = attention.mask_gradient, _whole(added, sizes)
    if whole is None:
        return None, {}
    free = (index for index in attention.forward if attention.scoring <= index < attention.mixing)
    scores = attention.scores
    places, places_back = _Places(graph.ops, free, scores), _Places(graph.ops, attention.backward[:-1], scores)
    mask = _one_mask(added, scores.dtype, places)
    part, whole = whole, (whole[0] if whole[0] == 1 else sizes[0], *whole[1:])
    if whole != part:
        again = _spread(mask, part, sizes[0] // part[0])
        mask = places.made(aten_overloads.clone.default, (again,), whole)
    padded = (*whole[:-1], whole[-1] + -whole[-1] % MASK_ALIGNMENT)
    if padded != whole:
        mask = places.made(aten_overloads.constant_pad_nd.default, (mask,), padded, (0, padded[-1] - whole[-1]), 0)
    if gradient is not None:
        _sum_gradients(dense_in(gradient, whole), part, padded, places_back)
    strides = dense(padded, mask.dtype, mask.device).stride  # kernels want the keys innermost
    steps = tuple(step if size > 1 else 0 for size, step in zip(whole, strides, strict=True))
    return Bias(mask._replace(shape=sizes, stride=steps), gradient), places.taken | places_back.taken


def _one_mask(masks: Sequence[TensorSpec], dtype: torch.dtype, places: _Places) -> TensorSpec:
    """What is added to the scores in place of all these. SDPA itself makes numbers of a mask of truths."""
    truths = [spec for spec in masks if spec.dtype is torch.bool]
    added = _joined([spec for spec in masks if spec.dtype is not torch.bool], aten_overloads.add.Tensor, places)
    filled = _joined(truths, aten_overloads.bitwise_and.Tensor, places)
    if added is None:
        assert filled is not None  # nobody asks where nothing is on the scores
        numbers = tuple(places.made(aten_overloads.scalar_tensor.default, (), (), value, dtype=dtype)
                        for value in (0.0, float("-inf")))  # fmt: skip
        return places.made(aten_overloads.where.self, (filled, *numbers), filled.shape, dtype=dtype)
    if filled is None:
        return added
    func = aten_overloads.masked_fill.Scalar
    return places.made(func, (added, filled), _of_both(added, filled), float("-inf"))


def _joined(masks: Sequence[TensorSpec], func: OpOverload, places: _Places) -> TensorSpec | None:
    """All of them by an op of two."""
    whole = masks[0] if masks else None
    for other in masks[1:]:
        assert whole is not None
        whole = places.made(func, (whole, other), _of_both(whole, other))
    return whole


def _of_both(one: TensorSpec, other: TensorSpec) -> tuple[int, ...]:
    return tuple(map(max, _in_four(one.shape), _in_four(other.shape)))


def _spread(spec: TensorSpec, part: tuple[int, ...], times: int) -> TensorSpec:
    return spec._replace(shape=(times, *part), stride=(0, *dense(part, spec.dtype, spec.device).stride))


def _sum_gradients(given: TensorSpec, part: tuple[int, ...], padded: tuple[int, ...], places: _Places) -> None:
    """The gradient of a mask that was padded, and that of one that was written out for several, which is summed up. The
    program's own sum, which would read the result, is left as it is and reads all of them."""
    whole = given.shape
    if padded != whole:
        wide = places.made(aten_overloads.slice_backward.default, (given,), padded, padded, 3, 0, whole[-1], 1)
        narrow = (0, whole[-1] - padded[-1])
        inner = wide._replace(shape=whole)
        given = places.made(aten_overloads.constant_pad_nd.default, (inner,), whole, narrow, 0)
    if whole != part:
        parts = (whole[0] // part[0], *part)
        places.made(aten_overloads.sum.dim_IntList, (dense_in(given, parts),), part, (0,))


def _whole(added: Sequence[TensorSpec], sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of the sum of all that is added, of which the first dimension may divide the batch."""
    shapes = [_in_four(spec.shape) for spec in added]
    if not shapes:
        return None
    whole = tuple(max(each) for each in zip(*shapes, strict=True))
    are_alike = all(size in (1, most) for shape in shapes for size, most in zip(shape, whole, strict=True))
    fits = sizes[0] % whole[0] == 0 and all(a in (1, b) for a, b in zip(whole[1:], sizes[1:], strict=True))
    return whole if are_alike and fits else None


def _in_four(shape: tuple[int, ...]) -> tuple[int, ...]:
    shape = (1,) * (4 - len(shape)) + shape
    return (prod(shape[:-3]), *shape[-3:])
