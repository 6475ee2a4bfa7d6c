"""Fused attention: q, k, v in, output and log-sum-exp out; the scores never leave the chip.

FLOPs are 2·B·H·Sq·Sk·(D + Dv) by *query* heads over the full square (the softmax between the products is
left out, as torch's counter does). Under a causal mask or a window the invisible part is `masked_flops`.
Keys and values are read at their own, grouped, head count: the touched-bytes law sees to that.
"""

from __future__ import annotations

import torch
from torch._ops import OpOverloadPacket

from flopmeter.costs.rules import make_contraction, rule
from flopmeter.records import ATTENTION, AttentionBackend, Call, Cost, Matmul, TensorSpec

aten = torch.ops.aten

_BACKENDS: dict[OpOverloadPacket, AttentionBackend] = {
    aten._scaled_dot_product_flash_attention: "flash",
    aten._scaled_dot_product_flash_attention_backward: "flash",
    aten._scaled_dot_product_efficient_attention: "efficient",
    aten._scaled_dot_product_efficient_attention_backward: "efficient",
    aten._scaled_dot_product_cudnn_attention: "cudnn",
    aten._scaled_dot_product_cudnn_attention_backward: "cudnn",
}


@rule(
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_fused_attention_overrideable,
)
def attention(call: Call) -> Cost:
    """softmax(q @ k^T) @ v with q [B, H, Sq, D], k [B, Hk, Sk, D], v [B, Hv, Sk, Dv]."""
    q, k, v = call.inputs[:3]
    scores, values = _products(q, k, v)
    masked = _masked_fraction(q, k, call.argument("is_causal"))
    flops = 2 * sum(_macs(product) for product in (scores, values))
    return make_contraction(
        call, [scores, values], op_class=ATTENTION, masked_flops=round(flops * masked), attention=_backend(call)
    )


@rule(
    aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_efficient_attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
    aten._scaled_dot_product_fused_attention_overrideable_backward,
)
def attention_backward(call: Call) -> Cost:
    """Five products: the scores again (recomputed, since they were not kept), then dv = p^T @ do,
    dp = do @ v^T, dq = ds @ k, dk = ds^T @ q. That is 2.5x the forward pass where D = Dv."""
    q, k, v = call.inputs[1:4]
    scores, values = _products(q, k, v)
    batch, sq, sk, d = scores
    dv = v.shape[-1]
    products = [scores, Matmul(batch, sk, dv, sq), Matmul(batch, sq, sk, dv), Matmul(batch, sq, d, sk), Matmul(batch, sk, d, sq)]
    masked = _masked_fraction(q, k, call.argument("is_causal"))
    flops = 2 * sum(_macs(product) for product in products)
    return make_contraction(
        call,
        products,
        op_class=ATTENTION,
        recomputed_flops=2 * _macs(scores),
        masked_flops=round(flops * masked),
        attention=_backend(call),
    )


def visible_pairs(queries: int, keys: int, *, bottom_right: bool = False, window: int | None = None) -> int:
    """(query, key) pairs that a causal mask leaves visible.

    Query i sees keys 0..i (torch's `is_causal`, aligned at the top left) or, aligned at the bottom right
    as in the flash-attention library, keys 0..i + keys - queries; with a window only the last `window`.
    """
    shift = keys - queries if bottom_right else 0
    most = keys if window is None else min(keys, window)
    # Row i sees i + shift + 1 keys, no fewer than none and no more than `most`: nothing, a ramp, a plateau.
    rows = queries - min(max(-shift, 0), queries)
    start = max(shift, 0) + 1
    ramp = min(max(most - start + 1, 0), rows)
    return ramp * start + ramp * (ramp - 1) // 2 + (rows - ramp) * most


def _backend(call: Call) -> AttentionBackend:
    return _BACKENDS.get(call.func.overloadpacket, "other")


def _products(q: TensorSpec, k: TensorSpec, v: TensorSpec) -> tuple[Matmul, Matmul]:
    batch, heads, queries, depth = q.shape
    keys = k.shape[2]
    return Matmul(batch * heads, queries, keys, depth), Matmul(batch * heads, queries, v.shape[-1], keys)


def _macs(product: Matmul) -> int:
    return product.batch * product.m * product.n * product.k


def _masked_fraction(q: TensorSpec, k: TensorSpec, is_causal: bool) -> float:
    queries, keys = q.shape[2], k.shape[2]
    if not is_causal or not queries or not keys:
        return 0.0
    return 1.0 - visible_pairs(queries, keys) / (queries * keys)
