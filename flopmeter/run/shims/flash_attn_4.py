"""FlashAttention-4 (flash_attn/cute/interface.py of github.com/Dao-AILab/flash-attention).

Its price is that of its own kernels on data-centre Blackwell, and of FlashAttention-3's on Hopper. Tensors are
[batch, length, heads, head size]; sequences that lie end to end are [tokens, heads, head size].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flopmeter.run.shims.flash_attn.newer import check_dtype, how_of, kernels_of, restore_torchs_attention
from flopmeter.run.shims.kernel import named, refuse

_NOT_THERE = (
    "softcap", "score_mod", "mask_mod", "block_sparse_tensors", "full_block_cnt", "mask_block_cnt", "seqused_q",
    "seqused_k", "page_table",
)  # fmt: skip
_ALL = (None, None)
_CAPABILITIES = (9, 10, 11)  # majors
_KERNELS = kernels_of("flash_attn_4")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = _ALL,
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """The output, and the logarithms of the sums of each row. Raises NotImplementedError for options that the shim does
    not have."""
    left, right = window_size
    return _flash_attn_fwd(q, k, v, None, None, None, None, causal, left, right, softcap=softcap, **options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = _ALL,
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    left, right = window_size
    used: dict[str, Any] = {"seqused_q": seqused_q, "seqused_k": seqused_k, "page_table": page_table}
    return _flash_attn_fwd(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, left, right,
        softcap=softcap, **used, **options,
    )  # fmt: skip


# --- what both run, and torch calls once it is told to (torch/nn/attention/_fa4.py) ----------------------------------


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    causal: bool = False,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    out: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    refuse("flash_attn.cute", options, _NOT_THERE)
    check_dtype(q)
    major, minor = torch.cuda.get_device_capability()
    if major not in _CAPABILITIES:
        raise AssertionError(f"FlashAttention-4 supports compute capabilities 9.x, 10.x and 11.x, not {major}.{minor}")
    window = _window(window_size_left, window_size_right)
    how = how_of((q, k, v), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window)
    return _KERNELS.forward((q, k, v), how, out)


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v."""
    found = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
    window = _window(window_size_left, window_size_right)
    how = how_of((q, k, v), cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window)
    _KERNELS.backward_into(*found, dout, q, k, v, out, lse, *how)
    return found


def _window(*sides: int | None) -> tuple[int, ...]:
    """As torch's call has it: -1 leaves all keys on a side visible, for which this library says None."""
    return tuple(-1 if side is None else side for side in sides)


FUNCTIONS = named(flash_attn_func, flash_attn_varlen_func)
DISTRIBUTION = "flash-attn-4"
MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": "4.0.0"},
    "flash_attn.cute": FUNCTIONS,
    "flash_attn.cute.interface": {**FUNCTIONS, **named(_flash_attn_fwd, _flash_attn_bwd)},
}
end = restore_torchs_attention
