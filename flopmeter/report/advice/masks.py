"""What a program adds to its scores, as the one mask that a fused kernel takes.

A tensor that is the same for all sequences or heads is read again for each, without memory for that. Several, such as
the bias by position and the mask of windows that Swin adds one after the other, are added up first. What every n-th
sequence shares, such as a mask of windows, is written out for all of them, since no strides say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch._ops import OpOverload

from flopmeter.records import Op, TensorSpec
from flopmeter.report.advice.fused_attention import Bias, dense
from flopmeter.report.advice.rewrite import in_place_of
from flopmeter.torch_names.operators import aten_overloads


def bias_for_kernel(
    added: Sequence[TensorSpec],
    sizes: tuple[int, ...],
    gradient: TensorSpec | None,
    free: Mapping[int, Op],
    backward: Mapping[int, Op],
) -> tuple[Bias | None, dict[int, Op]]:
    """The mask of `sizes`, [batch, heads, queries, keys], and the ops that make it, in the places of `free` ops that
    go, by their indices, and what sums up the gradients of its parts in one of `backward`. None where nothing is added,
    or nothing that is known here."""
    whole = _whole(added, sizes)
    if whole is None:
        return None, {}
    is_repeated = whole[0] not in (1, sizes[0])
    places = [(index, op) for index, op in sorted(free.items()) if op.outputs]
    if len(places) < len(added) - 1 + is_repeated:
        return None, {}
    makers: dict[int, Op] = {}

    def made(func: OpOverload, given: tuple[TensorSpec, ...], shape: tuple[int, ...], **options: Any) -> TensorSpec:
        index, op = places.pop(0)
        out = dense(shape, added[0].dtype, added[0].device)._replace(storage=op.outputs[0].storage)
        makers[index] = in_place_of(op, func, given, options, given, (out,))
        return out

    mask = added[0]
    for other in added[1:]:
        mask = made(aten_overloads.add.Tensor, (mask, other), whole)
    strides = dense(whole, mask.dtype, mask.device).stride  # kernels want the keys innermost
    if is_repeated:
        times = sizes[0] // whole[0]
        again = mask._replace(shape=(times, *whole), stride=(0, *strides))
        whole = (sizes[0], *whole[1:])
        mask = made(aten_overloads.clone.default, (again,), whole, memory_format=torch.contiguous_format)
        strides = mask.stride
        makers |= _sum_of_parts(gradient, (times, *again.shape[1:]), backward)
    steps = tuple(step if size > 1 else 0 for size, step in zip(whole, strides, strict=True))
    return Bias(mask._replace(shape=sizes, stride=steps), gradient), makers


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


def _sum_of_parts(gradient: TensorSpec | None, parts: tuple[int, ...], free: Mapping[int, Op]) -> dict[int, Op]:
    """The sum of the gradients of what was written out `parts[0]` times. The program's own sum, which would read the
    result, is left as it is and reads all of them."""
    place = next((index for index in sorted(free) if free[index].outputs), None)
    if gradient is None or place is None:
        return {}
    op, given = free[place], dense(parts, gradient.dtype, gradient.device)._replace(storage=gradient.storage)
    out = dense(parts[1:], gradient.dtype, gradient.device)._replace(storage=op.outputs[0].storage)
    return {place: in_place_of(op, aten_overloads.sum.dim_IntList, (given, (0,)), {}, (given,), (out,))}
