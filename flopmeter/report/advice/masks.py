"""The one mask that a fused attention kernel takes, made of all that a program adds to its scores or fills them with.

A mask that all sequences or heads share is expanded with stride 0, without memory for that. Several masks, such as
Swin's bias by position and its mask of windows, are summed first. A mask that every n-th sequence shares, such as a
mask of windows, is written out for all of them, since no strides express that. Rows that are not aligned are padded,
as scaled_dot_product_attention does, and the padding is cut off their gradients.
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


class _FreeSlots:
    """Places in the trace for new ops: those of ops that the fused kernel makes superfluous, in their order."""

    def __init__(self, ops: Sequence[Op], free: Iterable[int], scores: TensorSpec) -> None:
        by_result = dict[int, tuple[int, Op]]()  # each storage once: in-place ops and views share one
        for index in free:
            op = ops[index]
            if op.makes - op.reads or op.outputs[0].numel == scores.numel:
                by_result.setdefault(op.outputs[0].storage, (index, op))
        self._left = list(by_result.values())
        self.filled: dict[int, Op] = {}  # by index in the trace

    def put(
        self,
        func: OpOverload,
        read: tuple[TensorSpec, ...],
        shape: tuple[int, ...],
        *rest: Any,
        dtype: torch.dtype | None = None,
    ) -> TensorSpec:
        """Calls `func` on the tensors `read` and the arguments `rest` in the next free slot. Returns the result: a
        dense tensor in the storage of the op that was there. Raises NoKernelError where no slot is left."""
        if not self._left:
            raise NoKernelError
        index, op = self._left.pop(0)
        like = read[0] if read else op.outputs[0]
        out = dense(shape, dtype or like.dtype, like.device)._replace(storage=op.outputs[0].storage)
        self.filled[index] = in_place_of(op, func, (*read, *rest), {}, read, (out,))
        return out


def bias_for_kernel(
    graph: Graph, attention: FoundAttention, batch_and_heads: tuple[int, ...]
) -> tuple[Bias | None, dict[int, Op]]:
    """The mask of [batch, heads, queries, keys], and the ops that make it and its gradient, by index: they replace
    superfluous ops of both passes. The mask is None where nothing is added, or nothing that SDPA could take. Raises
    NoKernelError if there are too few slots."""
    added, sizes = attention.masks, (*batch_and_heads, *attention.scores.shape[-2:])
    gradient, whole = attention.mask_gradient, _whole(added, sizes)
    if whole is None:
        return None, {}
    free = (index for index in attention.forward if attention.scoring <= index < attention.mixing)
    scores = attention.scores
    slots, slots_back = _FreeSlots(graph.ops, free, scores), _FreeSlots(graph.ops, attention.backward[:-1], scores)
    mask = _one_mask(added, scores.dtype, slots)
    part, whole = whole, (whole[0] if whole[0] == 1 else sizes[0], *whole[1:])
    if whole != part:
        again = _spread(mask, part, sizes[0] // part[0])
        mask = slots.put(aten_overloads.clone.default, (again,), whole)
    padded = (*whole[:-1], whole[-1] + -whole[-1] % MASK_ALIGNMENT)
    if padded != whole:
        mask = slots.put(aten_overloads.constant_pad_nd.default, (mask,), padded, (0, padded[-1] - whole[-1]), 0)
    if gradient is not None:
        _sum_gradients(dense_in(gradient, whole), part, padded, slots_back)
    strides = dense(padded, mask.dtype, mask.device).stride  # kernels want the keys innermost
    steps = tuple(step if size > 1 else 0 for size, step in zip(whole, strides, strict=True))
    return Bias(mask._replace(shape=sizes, stride=steps), gradient), slots.filled | slots_back.filled


def _one_mask(masks: Sequence[TensorSpec], dtype: torch.dtype, slots: _FreeSlots) -> TensorSpec:
    """The sum of all these masks. A bool mask alone becomes 0 and -inf, as SDPA itself does."""
    bools = [spec for spec in masks if spec.dtype is torch.bool]
    added = _joined([spec for spec in masks if spec.dtype is not torch.bool], aten_overloads.add.Tensor, slots)
    filled = _joined(bools, aten_overloads.bitwise_and.Tensor, slots)
    if added is None:
        assert filled is not None  # there is at least one mask
        numbers = tuple(slots.put(aten_overloads.scalar_tensor.default, (), (), value, dtype=dtype)
                        for value in (0.0, float("-inf")))  # fmt: skip
        return slots.put(aten_overloads.where.self, (filled, *numbers), filled.shape, dtype=dtype)
    if filled is None:
        return added
    func = aten_overloads.masked_fill.Scalar
    return slots.put(func, (added, filled), _of_both(added, filled), float("-inf"))


def _joined(masks: Sequence[TensorSpec], func: OpOverload, slots: _FreeSlots) -> TensorSpec | None:
    """All masks folded into one by a binary op; None if there are none."""
    whole = masks[0] if masks else None
    for other in masks[1:]:
        assert whole is not None
        whole = slots.put(func, (whole, other), _of_both(whole, other))
    return whole


def _of_both(one: TensorSpec, other: TensorSpec) -> tuple[int, ...]:
    return tuple(map(max, _in_four(one.shape), _in_four(other.shape)))


def _spread(spec: TensorSpec, part: tuple[int, ...], times: int) -> TensorSpec:
    return spec._replace(shape=(times, *part), stride=(0, *dense(part, spec.dtype, spec.device).stride))


def _sum_gradients(given: TensorSpec, part: tuple[int, ...], padded: tuple[int, ...], slots: _FreeSlots) -> None:
    """Takes the padding off the mask's gradient, and sums it over the sequences for which the mask was written out. The
    program's own sum, which would read the result, still reads the gradients of all sequences."""
    whole = given.shape
    if padded != whole:
        wide = slots.put(aten_overloads.slice_backward.default, (given,), padded, padded, 3, 0, whole[-1], 1)
        narrow = (0, whole[-1] - padded[-1])
        inner = wide._replace(shape=whole)
        given = slots.put(aten_overloads.constant_pad_nd.default, (inner,), whole, narrow, 0)
    if whole != part:
        parts = (whole[0] // part[0], *part)
        slots.put(aten_overloads.sum.dim_IntList, (dense_in(given, parts),), part, (0,))


def _whole(added: Sequence[TensorSpec], sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The broadcast shape of all masks, [batch or a divisor of it, heads, queries, keys]; None if they do not broadcast
    to `sizes`."""
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
