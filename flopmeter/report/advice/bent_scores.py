"""Scores that a function bends before their softmax, as a soft cap does: SDPA has no such function, flex_attention has.

A score_mod that does what the program does takes as many operations on each score.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from itertools import count
from typing import Any

from flopmeter.device.hardware import Hardware
from flopmeter.records import BlockCount, BodyOp, FlexBody, Op, TensorSpec
from flopmeter.report.advice.fused_attention import FusedCall, NoKernelError
from flopmeter.report.advice.rewrite import each_tensor, in_place_of
from flopmeter.torch_names.operators import aten
from flopmeter.torch_names.own_operators import own_overloads

FLEX = "torch.compile(flex_attention) with a score_mod (attn_implementation='flex_attention')"

_BENDS = (
    aten.tanh, aten.tanh_, aten.sigmoid, aten.sigmoid_, aten.relu, aten.relu_, aten.abs, aten.pow, aten.sqrt, aten.log,
    aten.gelu, aten.silu, aten.softplus,
)  # fmt: skip
_MIXES = (aten.convolution,)  # scores of several heads, as talking heads do
_BLOCK = 128  # queries, and keys, of a block: create_block_mask's default
_LEAST_CAPABILITY = (8, 0)  # Triton's products in 16 bits, from Ampere on


def are_bent(ops: Collection[Op]) -> bool:
    """Whether one of these forward ops, all of them on scores, is no part of SDPA. Raises NoKernelError where it is no
    part of flex_attention either."""
    if any(op.packet in _MIXES for op in ops):
        raise NoKernelError
    return any(op.packet in _BENDS for op in ops)


def body_of(on_scores: Sequence[Op], queries: int, keys: int, device: Hardware, *, is_causal: bool) -> FlexBody:
    """What the kernel does to each score: what these ops, each of which makes scores, do to all of them."""
    if (device.compute_capability or (0, 0)) < _LEAST_CAPABILITY:
        raise NoKernelError
    return FlexBody(_blocks(queries, keys, is_causal=is_causal), tuple(map(_on_one, on_scores)), (), False)


def flexed(op: Op, call: FusedCall, body: FlexBody) -> Op:
    """The kernel in the place of an op, forward or backward as that is."""
    qkv, out, sums = call.qkv, call.out, call.sums
    read: tuple[TensorSpec, ...]
    made: tuple[TensorSpec, ...]
    if op.phase == "backward":
        func, read, made = own_overloads.flex_attention_backward.default, (*qkv, out, sums, call.given), call.gradients
        settings: dict[str, Any] = {"grad_logsumexp": None, "blocks": (), "captured": (), "learned": ()}
    else:
        func, read, made = own_overloads.flex_attention.default, qkv, (out, sums)
        settings = {"blocks": (), "captured": (), "keeps_lse": True, "keeps_max": False}
    placed = in_place_of(op, func, read, settings, read, made)
    return placed._replace(call=dataclasses.replace(placed.call, body=body))


def _on_one(op: Op) -> BodyOp:
    def one(value: Any) -> Any:
        return each_tensor(value, lambda spec: spec._replace(shape=(), stride=(), offset=0))

    call = op.call
    kwargs = tuple((name, one(value)) for name, value in call.kwargs.items())
    return BodyOp(call.func, one(call.args), kwargs, one(call.inputs), one(call.outputs))


def _blocks(queries: int, keys: int, *, is_causal: bool) -> BlockCount:
    """The blocks in which a causal mask, or none, leaves a pair."""
    computed = pairs = partial = 0
    for rows, first in _cut(queries):
        for columns, key in _cut(keys):
            if is_causal and key >= first + rows:
                break
            computed, pairs = computed + 1, pairs + rows * columns
            partial += rows * columns if is_causal and key + columns > first + 1 else 0
    return BlockCount(1, (_BLOCK, _BLOCK), computed, pairs, partial, keys, not is_causal and queries > _BLOCK)


def _cut(length: int) -> Iterator[tuple[int, int]]:
    """The sizes of the blocks that a length is cut into, and where each begins."""
    for first in count(0, _BLOCK):
        if first >= length:
            return
        yield min(_BLOCK, length - first), first
