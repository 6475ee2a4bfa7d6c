"""flash-attn (github.com/Dao-AILab/flash-attention): its attention functions, as torch's own call of that library;
attention over a cache, as one kernel that appends new keys too (csrc/flash_attn/flash_api.cpp, `mha_fwd_kvcache`);
its rotary embedding, as one kernel each way (flash_attn/ops/triton/rotary.py); its norms, as torch's.

Tensors are [batch, length, heads, head size]; sequences that lie end to end are [tokens, heads, head size].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from flopmeter.costs import make_cost
from flopmeter.costs.contractions.attention import attention
from flopmeter.costs.traffic import as_regions
from flopmeter.known_values.entry_points import open_ones
from flopmeter.known_values.values import no_modes
from flopmeter.records import Call, Cost, Region
from flopmeter.run.shims.kernel import kernel
from flopmeter.torch_names.operators import aten

NO_WINDOW = (-1, -1)
_NOT_TORCHS = ("softcap", "return_attn_probs")  # what torch's call of the library does not have
_NOT_OVER_CACHES = (*_NOT_TORCHS, "alibi_slopes", "rotary_cos", "return_softmax_lse")


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    **options: Any,
) -> Tensor:
    """Raises NotImplementedError for options that torch's call of the library does not have."""
    return _attend(
        q, k, v, (None, None, q.shape[1], k.shape[1]), dropout_p, softmax_scale, causal, window_size, options
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    block_table: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """With a `block_table`, `k` and `v` are pools of pages, [pages, tokens of a page, heads, head size]."""
    longest = int(max_seqlen_q), int(max_seqlen_k)
    if block_table is None:
        lengths = (cu_seqlens_q, cu_seqlens_k, *longest)
        return _attend(q, k, v, lengths, dropout_p, softmax_scale, causal, window_size, options)
    _refuse(options, *_NOT_OVER_CACHES)
    _assume("packed sequences that are all as long as the longest", "flash_attn_varlen_func")
    return _over_cache(q, k, v, cu_seqlens_q, block_table, None, None, *longest, causal, list(window_size))


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Tensor:
    """`qkv` is [batch, length, 3, heads, head size]."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Tensor:
    """`kv` is [batch, length, 2, heads, head size]."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Tensor:
    """`qkv` is [tokens, 3, heads, head size]."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = NO_WINDOW,
    **options: Any,
) -> Tensor:
    """The cache is [batch, length, heads, head size] or, with a `block_table`, a pool of pages. `k` and `v` are
    appended to it. Its sequences count with their mean length; where `cache_seqlens` is not known, with a full cache
    (*assumed*). Raises NotImplementedError for a rotary embedding, which the package's kernel can do on the way.
    """
    _refuse({"rotary_cos": rotary_cos, **options}, *_NOT_OVER_CACHES)
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    keys = min(_mean(cache_seqlens, room) + (0 if k is None else k.shape[1]), room)
    return _over_cache(
        q, k_cache, v_cache, cache_seqlens, block_table, k, v, q.shape[1], keys, causal, list(window_size)
    )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[Tensor | None, Tensor | None, int, int],
    dropout: float,
    scale: float | None,
    causal: bool,
    window: Sequence[int],
    options: dict[str, Any],
) -> Tensor:
    _refuse(options, *_NOT_TORCHS)
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"FlashAttention only supports fp16 and bf16 data type, not {q.dtype}")
    left, right = window
    return torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, dropout, causal, False, scale=scale,
        window_size_left=left, window_size_right=right, alibi_slopes=options.get("alibi_slopes"),
    )[0]  # fmt: skip


def _mean(lengths: Tensor | None, room: int) -> int:
    """The mean length of the sequences in a cache that has room for so many tokens each, rounded up."""
    known = open_ones()[-1] if open_ones() else None
    if lengths is None or known is None:
        return room
    if not known.values.knows(lengths):
        _assume("a cache that is full", "flash_attn_with_kvcache")
        return room
    with no_modes():
        return -int(-known.values.read(lengths).sum() // lengths.numel())


def _assume(rule: str, function: str) -> None:
    for known in open_ones()[-1:]:
        known.assume.note(rule, function)


def _cache_cost(call: Call) -> Cost:
    """The library's price over so many keys. What these sequences hold is read, and what is new written."""
    query, key, value, pages = (call.argument(name) for name in ("query", "key", "value", "block_table"))
    news = [new for name in ("new_key", "new_value") if (new := call.argument(name)) is not None]
    longest, (left, right) = call.argument("max_k"), call.argument("window_size")
    kwargs = {name: call.argument(name) for name in ("query", "key", "value", "max_q", "max_k", "is_causal")}
    # With a tensor of where sequences begin, whichever it is, the library's price goes by max_q and max_k.
    kwargs |= {"cum_seq_q": query, "window_size_left": left, "window_size_right": right}
    cost = attention(Call(aten._flash_attention_forward.default, (), kwargs, call.inputs, call.outputs))
    seen = longest if left < 0 else min(longest, left + call.argument("max_q"))
    tokens = (query if pages is None else pages).shape[0] * seen
    held = [Region(each, min(each.nbytes, tokens * each.nbytes // prod(each.shape[:2]))) for each in (key, value)]
    added = [Region(into, new.nbytes) for into, new in zip((key, value), news, strict=False)]
    rest = [spec for spec in call.inputs if spec not in (key, value)]
    return replace(cost, name=call.name, reads=as_regions([*rest, *held]), writes=as_regions([*call.outputs, *added]))


@kernel("flash_attn_over_cache", _cache_cost, mutates=("key", "value"))
def _over_cache(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor | None,
    block_table: Tensor | None,
    new_key: Tensor | None,
    new_value: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    window_size: list[int],
) -> Tensor:
    return torch.empty_like(query)


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
        return _rotate(x, cos, sin)

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
        if given is not None and not (isinstance(given, (int, float)) and given == 0):  # none
            raise NotImplementedError(f"flopmeter's shim of flash_attn has no {name}: leave it out")


_FUNCTIONS = {
    "flash_attn_func": flash_attn_func,
    "flash_attn_qkvpacked_func": flash_attn_qkvpacked_func,
    "flash_attn_kvpacked_func": flash_attn_kvpacked_func,
    "flash_attn_varlen_func": flash_attn_varlen_func,
    "flash_attn_varlen_qkvpacked_func": flash_attn_varlen_qkvpacked_func,
    "flash_attn_with_kvcache": flash_attn_with_kvcache,
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
