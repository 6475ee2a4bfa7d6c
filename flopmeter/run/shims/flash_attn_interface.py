"""FlashAttention-3 (hopper/flash_attn_interface.py of github.com/Dao-AILab/flash-attention): one kernel each way.

Its price is that library's on Hopper; on other devices, for which it has FlashAttention-2's kernels, theirs. Tensors
are [batch, length, heads, head size]; sequences that lie end to end are [tokens, heads, head size].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flopmeter.costs.access import HALVES
from flopmeter.records.work import AttentionBackend
from flopmeter.run.shims.flash_attn.attention import (
    NO_WINDOW,
    backward_cost,
    by_library,
    cache_cost,
    cached_attention,
    forward_cost,
    over_cache,
    row_sums,
)  # fmt: skip
from flopmeter.run.shims.kernel import kernel, named, refuse

_NOT_THERE = (
    "qv", "q_descale", "k_descale", "v_descale", "attention_chunk", "softcap", "seqused_q", "seqused_k", "rotary_cos",
    "cu_seqlens_q", "cu_seqlens_k_new", "return_softmax_lse",
)  # fmt: skip
_LIBRARY: AttentionBackend = "flash_3"


@kernel("flash_attn_3", lambda call: forward_cost(call, _LIBRARY))
def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor]:
    """The output, and the logarithms of the sums of each row: [batch, heads, length], or [heads, tokens]."""
    return query.new_empty((*query.shape[:-1], value.shape[-1])), row_sums(query)


@kernel("flash_attn_3_backward", lambda call: backward_cost(call, _LIBRARY))
def _backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (query, key, value))
    query_gradient, key_gradient, value_gradient = gradients
    return query_gradient, key_gradient, value_gradient


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, _, _, _, _, _ = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.rest = inputs[len(tensors) :]
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradient: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    query, key, value, starts, key_starts, out, sums = ctx.saved_tensors
    none: tuple[None, ...] = (None,) * (2 + len(ctx.rest))
    if gradient is None:
        return (None, None, None, *none)
    return (*_backward(gradient, query, key, value, out, sums, starts, key_starts, *ctx.rest), *none)


_forward.register_autograd(_gradients, setup_context=_keep)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    *qv: Any,
    window_size: Sequence[int] = NO_WINDOW,
    **options: Any,
) -> Any:
    """Raises NotImplementedError for options that the shim does not have."""
    return _attend(q, k, v, (None, None, q.shape[1], k.shape[1]), causal, window_size, qv, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    *qv: Any,
    window_size: Sequence[int] = NO_WINDOW,
    **options: Any,
) -> Any:
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    used = {"seqused_q": seqused_q, "seqused_k": seqused_k}
    return _attend(q, k, v, lengths, causal, window_size, qv, {**used, **options})


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    page_table: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """FlashAttention-2's function of that name, with `page_table` for its `block_table`."""
    refuse("flash_attn", options, _NOT_THERE)
    return cached_attention(_over_cache, q, k_cache, v_cache, k, v, block_table=page_table, **options)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Tensor | None, Tensor | None, int, int],
    causal: bool,
    window: Sequence[int],
    positional: tuple[Any, ...],
    options: dict[str, Any],
) -> Any:
    refuse("flash_attn", {"qv": next((each for each in positional if each is not None), None), **options}, _NOT_THERE)
    if q.dtype not in HALVES:
        raise NotImplementedError(f"flopmeter's shim of FlashAttention-3 takes fp16 and bf16, not {q.dtype}")
    out, sums = _forward(q, k, v, *lengths, causal, *window)
    return (out, sums) if options.get("return_attn_probs") else out


_over_cache = kernel(
    "flash_attn_3_over_cache", lambda call: by_library(call, cache_cost(call), _LIBRARY), mutates=("key", "value")
)(over_cache)

FUNCTIONS = named(flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
DISTRIBUTION = "flash_attn_3"
MODULES = {"flash_attn_interface": {"__version__": "3.0.0", **FUNCTIONS}}
