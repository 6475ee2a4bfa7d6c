"""flash-attn (github.com/Dao-AILab/flash-attention): its attention functions, as torch's own call of that library;
attention over a cache, as one kernel that appends new keys too (csrc/flash_attn/flash_api.cpp, `mha_fwd_kvcache`);
its rotary embedding, as one kernel each way (flash_attn/ops/triton/rotary.py); its norms, as torch's.

Tensors are [batch, length, heads, head size]; sequences that lie end to end are [tokens, heads, head size].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils import benchmark

from flopmeter.costs import make_cost
from flopmeter.costs.contractions.attention import attention
from flopmeter.costs.traffic import as_regions
from flopmeter.known_values.entry_points import open_ones
from flopmeter.known_values.values import no_modes
from flopmeter.records import Call, Cost, Region
from flopmeter.run.shims.kernel import kernel
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


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *lengths: Any, **options: Any) -> Tensor:
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, *lengths, **options)


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
) -> Any:
    """With return_attn_probs also the logarithms of the sums, and no weights: these need dropout."""
    _refuse(options, *_NOT_TORCHS, *(["return_attn_probs"] if dropout else []))
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"FlashAttention only supports fp16 and bf16 data type, not {q.dtype}")
    left, right = window
    out, sums, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *lengths, dropout, causal, False, scale=scale,
        window_size_left=left, window_size_right=right, alibi_slopes=options.get("alibi_slopes"),
    )  # fmt: skip
    return (out, sums, None) if options.get("return_attn_probs") else out


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


class _RotaryWithin(torch.autograd.Function):
    """Turns a part of a tensor in place, and its gradient: one kernel each way, which touches that part alone."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, part: slice, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(cos, sin)
        _Rotary.apply(packed[:, :, part].flatten(2, 3), cos, sin)  # type: ignore[no-untyped-call]
        ctx.mark_dirty(packed)
        return packed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        _Rotary.apply(grad[:, :, ctx.part].flatten(2, 3), *ctx.saved_tensors)  # type: ignore[no-untyped-call]
        return grad, None, None, None


class RotaryEmbedding(torch.nn.Module):
    """The module around it (flash_attn/layers/rotary.py): tables of cos and sin as long as the longest sequence, q and
    k in one kernel where they are packed with v, else q in one and k in another, all in place."""

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        pos_idx_in_fp32: bool = True,
        device: Any = None,
    ) -> None:
        super().__init__()
        _refuse({"scale_base": scale_base}, "scale_base")
        self.dim, self.base, self.interleaved, self.pos_idx_in_fp32 = dim, base, interleaved, pos_idx_in_fp32
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.scale_base = self.scale = None
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None

    def _compute_inv_freq(self, device: Any = None) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        if seqlen > self._seq_len_cached or self._cos_cached is None or self._cos_cached.dtype != dtype:
            angles = torch.outer(torch.arange(seqlen, device=device, dtype=torch.float32), self.inv_freq)
            self._seq_len_cached = seqlen
            self._cos_cached, self._sin_cached = angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(
        self, qkv: Tensor, kv: Tensor | None = None, seqlen_offset: int = 0, max_seqlen: int | None = None, **rest: Any
    ) -> Any:
        """`qkv` is [batch, length, 3, heads, head size], or q without the 3, and `kv` has 2 there."""
        _refuse({"seqlen_offset": seqlen_offset, **rest}, "seqlen_offset", "cu_seqlens", "num_heads_q")
        self._update_cos_sin_cache(max_seqlen or qkv.shape[1], qkv.device, qkv.dtype)
        tables = self._cos_cached, self._sin_cached
        if kv is None:
            return _RotaryWithin.apply(qkv, slice(0, 2), *tables)  # type: ignore[no-untyped-call]
        turned = apply_rotary_emb(qkv, *tables, interleaved=self.interleaved)  # type: ignore[arg-type]
        return turned, _RotaryWithin.apply(kv, slice(0, 1), *tables)  # type: ignore[no-untyped-call]


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


def unpad_input(
    hidden: Tensor, mask: Tensor, unused: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows that a mask names (flash_attn/bert_padding.py, operators of torch): what varlen attention takes."""
    kept = mask if unused is None else mask + unused
    indices = kept.flatten().nonzero().flatten()
    lengths = kept.sum(-1, dtype=torch.int32)
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden.flatten(0, 1), indices), indices, ends, int(lengths.max().item()), used


def pad_input(rows: Tensor, indices: Tensor, batch: int, length: int) -> Tensor:
    padded = rows.new_zeros(batch * length, *rows.shape[1:]).index_copy(0, indices, rows)
    return padded.unflatten(0, (batch, length))


def index_first_axis(rows: Tensor, indices: Tensor) -> Tensor:
    return rows.index_select(0, indices)


Measured = tuple[benchmark.Timer, benchmark.Measurement]


def benchmark_forward(function: Callable[..., Any], *inputs: Any, **options: Any) -> Measured:
    """flash_attn/utils/benchmark.py: calls under torch.utils.benchmark, which takes predicted time."""
    call, timing = _call(function, inputs, options)
    return _timed("Forward pass", call, **timing)


def benchmark_backward(function: Callable[..., Any], *inputs: Any, **options: Any) -> Measured:
    """`grad` is that of the result; else it is random."""
    gradient = options.pop("grad", None)
    call, timing = _call(function, inputs, options)
    out = call()
    out = out[0] if isinstance(out, tuple) else out
    gradient = torch.randn_like(out) if gradient is None else gradient
    return _timed("Backward pass", lambda: _backward(inputs, out, gradient), **timing)


def benchmark_combined(function: Callable[..., Any], *inputs: Any, **options: Any) -> Measured:
    gradient = options.pop("grad", None)
    call, timing = _call(function, inputs, options)

    def both() -> None:
        out = call()
        out = out[0] if isinstance(out, tuple) else out
        _backward(inputs, out, torch.randn_like(out) if gradient is None else gradient)

    return _timed("Forward + Backward pass", both, **timing)


def benchmark_fwd_bwd(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Measured, Measured]:
    forward_alone = {name: value for name, value in options.items() if name != "grad"}
    return benchmark_forward(function, *inputs, **forward_alone), benchmark_backward(function, *inputs, **options)


def benchmark_all(function: Callable[..., Any], *inputs: Any, **options: Any) -> tuple[Measured, Measured, Measured]:
    return *benchmark_fwd_bwd(function, *inputs, **options), benchmark_combined(function, *inputs, **options)


_TIMING = ("repeats", "desc", "verbose")


def _call(
    function: Callable[..., Any], inputs: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Callable[[], Any], dict[str, Any]]:
    """The function on its inputs, under autocast if `amp`; and the options of the timing among these."""
    timing = {name: options.pop(name) for name in _TIMING if name in options}
    is_on, dtype = options.pop("amp", False), options.pop("amp_dtype", torch.float16)

    def call() -> Any:
        with torch.autocast("cuda", dtype=dtype, enabled=is_on):
            return function(*inputs, **options)

    return call, timing


def _backward(inputs: tuple[Any, ...], out: Tensor, gradient: Tensor) -> None:
    for each in inputs:
        if isinstance(each, Tensor):
            each.grad = None
    out.backward(gradient, retain_graph=True)


def _timed(what: str, run: Callable[[], Any], repeats: int = 10, desc: str = "", verbose: bool = True) -> Measured:
    timer = benchmark.Timer(stmt="run()", globals={"run": run}, num_threads=torch.get_num_threads())
    found = timer.timeit(repeats)
    if verbose:
        print(desc, f"- {what}", found, sep="\n")
    return timer, found


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
    "flash_attn_varlen_kvpacked_func": flash_attn_varlen_kvpacked_func,
    "flash_attn_with_kvcache": flash_attn_with_kvcache,
}
MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": "2.8.3", **_FUNCTIONS},
    "flash_attn.bert_padding": {
        "unpad_input": unpad_input,
        "pad_input": pad_input,
        "index_first_axis": index_first_axis,
    },
    "flash_attn.flash_attn_interface": _FUNCTIONS,
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {"apply_rotary_emb": apply_rotary_emb, "RotaryEmbedding": RotaryEmbedding},
    "flash_attn.modules": {},
    "flash_attn.modules.mha": _FUNCTIONS,
    "flash_attn.ops": {},
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.layer_norm": {"layer_norm_fn": layer_norm_fn, "rms_norm_fn": rms_norm_fn},
    "flash_attn.utils": {},
    "flash_attn.utils.benchmark": {
        each.__name__: each
        for each in (benchmark_forward, benchmark_backward, benchmark_combined, benchmark_fwd_bwd, benchmark_all)
    },
}
