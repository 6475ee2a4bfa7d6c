"""flex_attention in a trace: one call of the kernel that torch.compile generates, with what it does to each score.

The blocks come from the BlockMask where its values are known, else from its mask_mod, which is run on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from flopmeter.as_cuda.flex_attention import FlexArguments, captured, scalars
from flopmeter.known_values import KnownValues
from flopmeter.records import BodyOp, FlexBody
from flopmeter.torch_names.dispatcher import autograd_records
from flopmeter.torch_names.own_operators import own_overloads
from flopmeter.torch_names.private import FLEX_GETITEM, no_dispatch_modes
from flopmeter.trace.flex_blocks import BlockMaskArguments, count_blocks
from flopmeter.trace.tensor_specs import build_call

SHORT_QUERY = 128
"""Fewer queries than these run in the template flex_decoding (`_use_flex_decoding` in torch/_inductor/kernel/flex)."""


class Template(NamedTuple):
    """The operator call that a trace records for a call of the higher-order op."""

    func: OpOverload
    args: tuple[Any, ...]
    body: FlexBody
    from_eager: Callable[[Any], Any]  # from the result of the higher-order op to that of `func`
    to_eager: Callable[[Any], Any]


class _Counted(NamedTuple):
    """What a template counts: blocks and ops, and the tensors that these read."""

    mask: BlockMaskArguments
    body: FlexBody
    captured: list[Tensor]


def template_of(
    func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any], values: KnownValues | None
) -> Template | None:
    """The template of a flex_attention call, whose arguments are all positional; None for other operators."""
    values = values or KnownValues()
    if func.name() == "flex_attention":
        return _forward(FlexArguments(*args, **kwargs), values)
    if func.name() == "flex_attention_backward":
        # query, key, value; out, logsumexp and the gradients of both; score_mod; its joint graph; the others
        of_forward = (*args[:3], args[7], *args[9:])
        return _backward(FlexArguments(*of_forward, **kwargs), *args[3:7], values=values)
    return None


def _counted(given: FlexArguments, values: KnownValues, *, is_backward: bool) -> _Counted:
    query, key = given.query, given.key
    mask = BlockMaskArguments.of(given.block_mask)
    score, found = _body(given.score_mod, query, given.score_buffers, has_score=True, has_gradient=is_backward)
    on_pair, of_mask = _body(mask.mask_mod, query, given.mask_buffers, has_score=False)
    blocks = count_blocks(mask, given.mask_buffers, query.shape[2], key.shape[2], values)
    splits_keys = not is_backward and _splits_keys(query, key, mask, given.kernel_options)
    return _Counted(mask, FlexBody(blocks, score, on_pair, splits_keys), [*found, *of_mask])


def _forward(given: FlexArguments, values: KnownValues) -> Template:
    mask, body, captured_ones = _counted(given, values, is_backward=False)
    keeps = (bool(given.kernel_options.get(f"OUTPUT_{name}", default)) for name, default in _OUTPUTS.items())
    args = (given.query, given.key, given.value, mask.of_keys, captured_ones, *keeps)
    return Template(own_overloads.flex_attention.default, args, body, tuple, tuple)


_OUTPUTS = {"LOGSUMEXP": True, "MAX": False}


def _backward(
    given: FlexArguments,
    out: Tensor,
    logsumexp: Tensor,
    grad_out: Tensor | None,
    grad_logsumexp: Tensor | None,
    *,
    values: KnownValues,
) -> Template:
    mask, body, captured_ones = _counted(given, values, is_backward=True)
    is_learned = [isinstance(buffer, Tensor) and buffer.requires_grad for buffer in given.score_buffers]
    learned = [buffer for buffer, needs in zip(given.score_buffers, is_learned, strict=True) if needs]
    args = (
        given.query, given.key, given.value, out, logsumexp, out if grad_out is None else grad_out, grad_logsumexp,
        [*mask.of_keys, *mask.of_queries], captured_ones, learned,
    )  # fmt: skip

    def to_eager(result: Any) -> Any:
        gradients = iter(result[3])
        return *result[:3], tuple(next(gradients) if needs else None for needs in is_learned)

    def from_eager(result: Any) -> Any:
        return *result[:3], [gradient for gradient in result[3] if isinstance(gradient, Tensor)]

    return Template(own_overloads.flex_attention_backward.default, args, body, from_eager, to_eager)


def _splits_keys(query: Tensor, key: Tensor, mask: BlockMaskArguments, kernel_options: dict[str, Any]) -> bool:
    """Whether inductor takes the template for few queries."""
    heads, sharing = query.shape[1], query.shape[1] // max(key.shape[1], 1)
    is_forced = kernel_options.get("BACKEND") == "TRITON" or kernel_options.get("FORCE_USE_FLEX_ATTENTION", False)
    fits = mask.heads == 1 or (sharing == 1 and mask.heads == heads)
    is_power_of_two = sharing & (sharing - 1) == 0
    return (
        not is_forced
        and not kernel_options.get("OUTPUT_MAX")
        and query.shape[2] < SHORT_QUERY
        and fits
        and is_power_of_two
    )


class _Collects(TorchDispatchMode):
    """Notes each op as part of the body of a kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[BodyOp] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        call = build_call(func, args, kwargs or {}, result, lambda _: 0)
        self.ops.append(BodyOp(func, call.args, tuple(call.kwargs.items()), call.inputs, call.outputs))
        return result


def _body(
    function: Callable[..., Tensor],
    query: Tensor,
    buffers: Iterable[Any],
    *,
    has_score: bool,
    has_gradient: bool = False,
) -> tuple[tuple[BodyOp, ...], list[Tensor]]:
    """The ops that the function runs on one score, and the other tensors that it reads: those that it captured, or that
    Dynamo turned into arguments."""
    given = list(buffers)
    found = captured(lambda *args: function(*args, *given), query, has_score=has_score)
    with no_dispatch_modes(), autograd_records(), torch.set_grad_enabled(has_gradient), FLEX_GETITEM.value():
        arguments = scalars(query, has_score=has_score)
        with _Collects() as mode:
            result = function(*arguments, *given)
            if has_gradient and result.requires_grad:
                wanted = [t for t in (arguments[0], *found) if t.requires_grad]
                torch.autograd.grad(result, wanted, torch.ones_like(result), allow_unused=True)
    return tuple(mode.ops), list(found)
