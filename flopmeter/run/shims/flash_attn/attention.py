"""Its attention functions, as torch's own call of that library; attention over a cache, as one kernel that appends new
keys too (csrc/flash_attn/flash_api.cpp, `mha_fwd_kvcache`).

Tensors are [batch, length, heads, head size]; sequences that lie end to end are [tokens, heads, head size].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from flopmeter.costs.access import HALVES
from flopmeter.costs.contractions.attention import attention, attention_backward
from flopmeter.costs.traffic import as_regions
from flopmeter.known_values.entry_points import note_assumption, open_ones
from flopmeter.known_values.values import no_modes
from flopmeter.records import AttentionWork, Call, Cost, Region
from flopmeter.records.work import AttentionBackend
from flopmeter.run.shims.kernel import kernel, named, refuse
from flopmeter.torch_names.operators import aten

NO_WINDOW = (-1, -1)
_NOT_TORCHS = ("softcap",)  # what torch's call of the library does not have
_NOT_OVER_CACHES = (*_NOT_TORCHS, "return_attn_probs", "alibi_slopes", "rotary_cos", "return_softmax_lse")


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
    refuse("flash_attn", options, _NOT_OVER_CACHES)
    note_assumption("packed sequences that are all as long as the longest", "flash_attn_varlen_func")
    return _over_cache(q, k, v, cu_seqlens_q, block_table, None, None, *longest, causal, list(window_size))


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Tensor:
    """`qkv` is [batch, length, 3, heads, head size]."""
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Tensor:
    """`kv` is [batch, length, 2, heads, head size]."""
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *lengths: Any, **options: Any) -> Tensor:
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *lengths, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Tensor:
    """`qkv` is [tokens, 3, heads, head size]."""
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options)


def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **options: Any) -> Tensor:
    """The cache is [batch, length, heads, head size] or, with a `block_table`, a pool of pages. `k` and `v` are
    appended to it. Its sequences count with their mean length; where `cache_seqlens` is not known, with a full cache
    (*assumed*). Raises NotImplementedError for a rotary embedding, which the package's kernel can do on the way.
    """
    return cached_attention(_over_cache, q, k_cache, v_cache, *args, **options)


def cached_attention(
    operator: Any,
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
    """`flash_attn_with_kvcache` as a call of this operator, which has the kernel's price."""
    refuse("flash_attn", {"rotary_cos": rotary_cos, **options}, _NOT_OVER_CACHES)
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full((q.shape[0],), cache_seqlens, dtype=torch.int32, device=q.device)
    room = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    keys = min(_mean(cache_seqlens, room) + (0 if k is None else k.shape[1]), room)
    return operator(q, k_cache, v_cache, cache_seqlens, block_table, k, v, q.shape[1], keys, causal, list(window_size))


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
) -> Any:
    """Runs torch's call of the library. With return_attn_probs it also returns the row sums' logarithms; the weights,
    which would need dropout, are None."""
    refuse("flash_attn", options, (*_NOT_TORCHS, "return_attn_probs") if dropout else _NOT_TORCHS)
    if q.dtype not in HALVES:
        raise RuntimeError(f"FlashAttention only supports fp16 and bf16 data type, not {q.dtype}")
    left, right = window
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, dropout, causal, False, scale=scale,
        window_size_left=left, window_size_right=right, alibi_slopes=options.get("alibi_slopes"),
    )  # fmt: skip
    return (out, sums, None) if options.get("return_attn_probs") else out


def _mean(lengths: Tensor | None, room: int) -> int:
    """The mean length of the sequences in a cache that has room for that many tokens each, rounded up."""
    known = open_ones()[-1] if open_ones() else None
    if lengths is None or known is None:
        return room
    if not known.values.knows(lengths):
        note_assumption("a cache that is full", "flash_attn_with_kvcache")
        return room
    with no_modes():
        return -int(-known.values.read(lengths).sum() // lengths.numel())


def forward_cost(call: Call, library: AttentionBackend) -> Cost:
    """The price of torch's own call of FlashAttention-2 with the same arguments, by the kernels of that library."""
    return by_library(call, attention(_as_call_of(aten._flash_attention_forward.default, call)), library)


def backward_cost(call: Call, library: AttentionBackend) -> Cost:
    return by_library(call, attention_backward(_as_call_of(aten._flash_attention_backward.default, call)), library)


def into(cost: Callable[[Call], Cost], *written: str) -> Callable[[Call], Cost]:
    """The cost of an operator that writes results into tensors it is passed, from that of one that makes them."""

    def of_call(call: Call) -> Cost:
        results = tuple(call.argument(name) for name in written)
        read = tuple(spec for spec in call.inputs if spec not in results)
        return cost(replace(call, inputs=read, outputs=(*results, *call.outputs)))

    return of_call


def _as_call_of(operator: OpOverload, call: Call) -> Call:
    has, takes = ([argument.name for argument in func._schema.arguments] for func in (call.func, operator))
    return replace(call, func=operator, args=(), kwargs={name: call.argument(name) for name in takes if name in has})


def by_library(call: Call, cost: Cost, library: AttentionBackend) -> Cost:
    assert isinstance(cost.work, AttentionWork)
    return replace(cost, name=call.name, work=cost.work._replace(backend=library))


def row_sums(query: Tensor) -> Tensor:
    """Memory for the logarithm of each row's sum of exponentials: [batch, heads, length], or [heads, tokens]."""
    *rows, heads, _ = query.shape
    return query.new_empty((*rows[:-1], heads, rows[-1]), dtype=torch.float32)


def cache_cost(call: Call) -> Cost:
    """The library's price over this many keys. What these sequences hold is read, and what is new is written."""
    query, key, value, pages = (call.argument(name) for name in ("query", "key", "value", "block_table"))
    news = [new for name in ("new_key", "new_value") if (new := call.argument(name)) is not None]
    longest, (left, right) = call.argument("max_k"), call.argument("window_size")
    # With a tensor of where sequences begin, whichever it is, the library's price goes by max_q and max_k.
    packed = {"cum_seq_q": query, "window_size_left": left, "window_size_right": right}
    alike = _as_call_of(aten._flash_attention_forward.default, call)
    cost = attention(replace(alike, kwargs={**alike.kwargs, **packed}))
    seen = longest if left < 0 else min(longest, left + call.argument("max_q"))
    tokens = (query if pages is None else pages).shape[0] * seen
    held = [Region(each, min(each.nbytes, tokens * each.nbytes // prod(each.shape[:2]))) for each in (key, value)]
    added = [Region(into, new.nbytes) for into, new in zip((key, value), news, strict=False)]
    rest = [spec for spec in call.inputs if spec not in (key, value)]
    return replace(cost, name=call.name, reads=as_regions([*rest, *held]), writes=as_regions([*call.outputs, *added]))


def over_cache(
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


_over_cache = kernel("flash_attn_over_cache", cache_cost, mutates=("key", "value"))(over_cache)


class FlashSelfAttention(torch.nn.Module):
    """flash_attn/modules/mha.py: the functions, with their options kept."""

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0, **options: Any
    ) -> None:
        super().__init__()
        self.causal, self.drop = causal, torch.nn.Dropout(attention_dropout)
        self.options = {"softmax_scale": softmax_scale, **options}

    def forward(
        self, qkv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        dropout, options = self._chosen(causal)
        if cu_seqlens is None or max_seqlen is None:
            return flash_attn_qkvpacked_func(qkv, dropout, **options)
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, dropout, **options)

    def _chosen(self, causal: bool | None) -> tuple[float, dict[str, Any]]:
        """The dropout and the other options of a call."""
        options = {**self.options, "causal": self.causal if causal is None else causal}
        return self.drop.p if self.training else 0.0, options


class FlashAttention(FlashSelfAttention):
    """flash_attn/flash_attention.py of versions before 2: it also returns weights of attention, which are None."""

    def __init__(self, softmax_scale: float | None = None, attention_dropout: float = 0.0, **factory: Any) -> None:
        super().__init__(softmax_scale=softmax_scale, attention_dropout=attention_dropout)

    def forward(  # type: ignore[override]
        self,
        qkv: Tensor,
        key_padding_mask: Tensor | None = None,
        causal: bool = False,
        cu_seqlens: Tensor | None = None,
        max_s: int | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, None]:
        refuse("flash_attn", {"key_padding_mask": key_padding_mask, "need_weights": need_weights})
        return super().forward(qkv, causal, cu_seqlens, max_s), None


class FlashCrossAttention(FlashSelfAttention):
    """Attention of q over k and v packed in one tensor, with the options of FlashSelfAttention."""

    def forward(  # type: ignore[override]
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        dropout, options = self._chosen(causal)
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, dropout, **options)
        return flash_attn_varlen_kvpacked_func(
            q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, dropout, **options
        )


FUNCTIONS = named(
    flash_attn_func, flash_attn_qkvpacked_func, flash_attn_kvpacked_func, flash_attn_varlen_func,
    flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func, flash_attn_with_kvcache,
)  # fmt: skip
