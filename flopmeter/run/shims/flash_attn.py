"""flash-attn (github.com/Dao-AILab/flash-attention): its attention functions, as torch's own FlashAttention-2 kernel.

Tensors are [batch, length, heads, head size], where torch has heads before the length. A causal mask of flash-attn is
aligned to the last key, torch's to the first: with as many queries as keys they are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_REFUSED = ("window_size", "softcap", "alibi_slopes", "return_attn_probs")
_OFF: dict[str, tuple[Any, ...]] = {"window_size": ((-1, -1),), "softcap": (0.0,)}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    **options: Any,
) -> Tensor:
    """Raises NotImplementedError for options that torch's kernel does not have, and for a causal mask over other
    numbers of queries and keys."""
    for name in _REFUSED:
        if options.get(name) not in (None, False, *_OFF.get(name, ())):
            raise NotImplementedError(f"flopmeter's shim of flash_attn has no {name}: leave it out, or use sdpa")
    if causal and q.shape[1] != k.shape[1]:
        raise NotImplementedError("flopmeter's shim of flash_attn: a causal mask needs as many queries as keys")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out: Tensor = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            dropout_p=dropout_p,
            is_causal=causal,
            scale=softmax_scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return out.transpose(1, 2)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Tensor:
    """`qkv` is [batch, length, 3, heads, head size]."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Tensor:
    """`kv` is [batch, length, 2, heads, head size]."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **options)


_FUNCTIONS = {
    "flash_attn_func": flash_attn_func,
    "flash_attn_qkvpacked_func": flash_attn_qkvpacked_func,
    "flash_attn_kvpacked_func": flash_attn_kvpacked_func,
}
MODULES = {"flash_attn": _FUNCTIONS, "flash_attn.flash_attn_interface": _FUNCTIONS}
