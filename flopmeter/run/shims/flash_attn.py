"""flash-attn (github.com/Dao-AILab/flash-attention): its attention functions, as torch's own FlashAttention-2 kernel;
its rotary embedding, as one kernel each way (flash_attn/ops/triton/rotary.py); its norms, as torch's.

Tensors are [batch, length, heads, head size], where torch has heads before the length. A causal mask of flash-attn is
aligned to the last key, torch's to the first: with as many queries as keys they are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopmeter.costs import make_cost
from flopmeter.records import Call, Cost
from flopmeter.run.shims.kernel import kernel

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


def _rotary_cost(call: Call) -> Cost:
    """Two products and a sum for each element that is turned; the others are copied."""
    x, cos = call.inputs[:2]
    turned = x.numel // x.shape[-1] * 2 * cos.shape[-1]
    return make_cost(call, "element-wise", 3 * turned)


@kernel("rotary", _rotary_cost)
def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        out: Tensor = _rotate(x, cos, sin)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _rotate(gradient, *ctx.saved_tensors), None, None


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False, **options: Any
) -> Tensor:
    """`x` is [batch, length, heads, head size]; `cos` and `sin` are [length, half of what is turned].

    Raises NotImplementedError for sequences packed into one, and for offsets.
    """
    _refuse(options, "seqlen_offsets", "cu_seqlens")
    out: Tensor = _Rotary.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return x.copy_(out) if inplace and not torch.is_grad_enabled() else out


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    **options: Any,
) -> Any:
    """The residual is added by a kernel of its own, where flash-attn's does both."""
    _refuse(options, "x1", "weight1", "bias1", "rowscale")
    x = torch.nn.functional.dropout(x, dropout_p) if dropout_p else x
    total = x if residual is None else x + residual
    total = total.float() if residual_in_fp32 else total
    normed = total.to(x.dtype)
    if is_rms_norm:
        out = torch.nn.functional.rms_norm(normed, x.shape[-1:], weight, eps)
        out = out if bias is None else out + bias
    else:
        out = torch.nn.functional.layer_norm(normed, x.shape[-1:], weight, bias, eps)
    return (out, total) if prenorm else out


def rms_norm_fn(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, **options: Any) -> Any:
    return layer_norm_fn(x, weight, bias, residual, **{**options, "is_rms_norm": True})


def _refuse(options: dict[str, Any], *names: str) -> None:
    for name in names:
        given = options.get(name)
        if given is not None and not (isinstance(given, int) and given == 0):  # an offset of 0 is none
            raise NotImplementedError(f"flopmeter's shim of flash_attn has no {name}: leave it out")


_FUNCTIONS = {
    "flash_attn_func": flash_attn_func,
    "flash_attn_qkvpacked_func": flash_attn_qkvpacked_func,
    "flash_attn_kvpacked_func": flash_attn_kvpacked_func,
}
MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": _FUNCTIONS,
    "flash_attn.flash_attn_interface": _FUNCTIONS,
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {"apply_rotary_emb": apply_rotary_emb},
    "flash_attn.ops": {},
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.layer_norm": {"layer_norm_fn": layer_norm_fn, "rms_norm_fn": rms_norm_fn},
}
