"""xformers (github.com/facebookresearch/xformers): its attention, as the kernels that torch has too.

Tensors are [batch, length, heads, head size], or [batch, length, head size]. xformers takes FlashAttention where the
types and the mask allow it, else CUTLASS' kernel, which is torch's memory-efficient attention (xformers/ops/fmha/
dispatch.py). A mask LowerTriangularMask is aligned to the first key, as torch's is_causal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


class AttentionBias:
    """xformers.ops.AttentionBias: what a mask that is no tensor derives from."""


class LowerTriangularMask(AttentionBias):
    """A query sees the keys up to its own place."""


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Raises NotImplementedError for a mask that is neither a tensor nor LowerTriangularMask."""
    if query.ndim == 3:
        query, key, value = (each.unsqueeze(2) for each in (query, key, value))
        return memory_efficient_attention(query, key, value, attn_bias, p, scale, output_dtype=output_dtype).squeeze(2)
    if isinstance(attn_bias, AttentionBias) and type(attn_bias) is not LowerTriangularMask:
        raise NotImplementedError(f"flopmeter's shim of xformers has no {type(attn_bias).__name__}: give a tensor")
    mask = attn_bias if isinstance(attn_bias, Tensor) else None
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        out: Tensor = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            dropout_p=p,
            is_causal=isinstance(attn_bias, LowerTriangularMask),
            scale=scale,
        )
    return out.transpose(1, 2).to(output_dtype or query.dtype)


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    return x.unbind(dim)


_OPS = {
    "memory_efficient_attention": memory_efficient_attention,
    "LowerTriangularMask": LowerTriangularMask,
    "AttentionBias": AttentionBias,
    "unbind": unbind,
}
_BIASES = {"LowerTriangularMask": LowerTriangularMask, "AttentionBias": AttentionBias}
MODULES = {"xformers": {}, "xformers.ops": _OPS, "xformers.ops.fmha": _OPS, "xformers.ops.fmha.attn_bias": _BIASES}
