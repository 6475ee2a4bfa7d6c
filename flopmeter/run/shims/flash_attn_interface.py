"""FlashAttention-3 (hopper/flash_attn_interface.py of github.com/Dao-AILab/flash-attention).

Its price is that library's on Hopper; on other devices, for which it has FlashAttention-2's kernels, theirs. Tensors
are [batch, length, heads, head size]; sequences that lie end to end are [tokens, heads, head size].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flopmeter.run.shims.flash_attn.attention import NO_WINDOW, by_library, cache_cost, cached_attention, over_cache
from flopmeter.run.shims.flash_attn.newer import BACKEND, check_dtype, how_of, kernels_of, restore_torchs_attention
from flopmeter.run.shims.kernel import kernel, named, refuse

_NOT_THERE = (
    "qv", "q_descale", "k_descale", "v_descale", "attention_chunk", "softcap", "seqused_q", "seqused_k", "rotary_cos",
    "cu_seqlens_q", "cu_seqlens_k_new", "return_softmax_lse",
)  # fmt: skip
_KERNELS = kernels_of("flash_attn_3")


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
    """As FlashAttention-2's, which calls the table of pages `block_table`."""
    refuse("flash_attn_interface", options, _NOT_THERE)
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
    given = {"qv": next((each for each in positional if each is not None), None), **options}
    refuse("flash_attn_interface", given, _NOT_THERE)
    check_dtype(q)
    out, sums = _KERNELS.attend(q, k, v, *lengths, causal, *window)
    return (out, sums) if options.get("return_attn_probs") else out


_over_cache = kernel(
    "flash_attn_3_over_cache", lambda call: by_library(call, cache_cost(call), BACKEND), mutates=("key", "value")
)(over_cache)


# --- the compiled operators, as torch calls them once it is told to (torch/nn/attention/_fa3.py) ---------------------


def _fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_new: Tensor | None,
    v_new: Tensor | None,
    qv: Tensor | None,
    out: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    page_table: Tensor | None,
    kv_batch_idx: Tensor | None,
    leftpad_k: Tensor | None,
    rotary_cos: Tensor | None,
    rotary_sin: Tensor | None,
    seqlens_rotary: Tensor | None,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    softmax_scale: float | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    *options: Any,
) -> tuple[Tensor, Tensor, None, None]:
    """`flash_attn_3::fwd` of hopper/flash_api.cpp. Raises NotImplementedError for what the shim does not have."""
    refuse("flash_attn_interface", {"k_new": k_new, "seqused_k": seqused_k, "page_table": page_table})
    check_dtype(q)
    window = (window_size_left, window_size_right)
    how = how_of((q, k, v), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window)
    return *_KERNELS.forward((q, k, v), how, out), None, None


def _bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    softmax_scale: float | None,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
    *options: Any,
) -> None:
    """`flash_attn_3::bwd`, which writes the three gradients."""
    window = (window_size_left, window_size_right)
    how = how_of((q, k, v), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, is_causal, window)
    _KERNELS.backward_into(dq, dk, dv, dout, q, k, v, out, softmax_lse, *how)


FUNCTIONS = named(flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
DISTRIBUTION = "flash_attn_3"
MODULES = {"flash_attn_interface": {"__version__": "3.0.0", **FUNCTIONS}}
OPERATORS = {"flash_attn_3": {"fwd": _fwd, "bwd": _bwd}}
end = restore_torchs_attention
