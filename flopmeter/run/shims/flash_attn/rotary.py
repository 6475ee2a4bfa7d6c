"""Its rotary embedding, as one kernel each way (flash_attn/ops/triton/rotary.py, flash_attn/layers/rotary.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopmeter.costs import make_cost
from flopmeter.records import Call, Cost
from flopmeter.run.shims.kernel import kernel, refuse


def _rotary_cost(call: Call) -> Cost:
    """Two products and a sum for each element that is rotated; the others are copied."""
    x, cos = call.inputs[:2]
    rotated = x.numel // x.shape[-1] * 2 * cos.shape[-1]
    return make_cost(call, "element-wise", 3 * rotated)


@kernel("rotary", _rotary_cost)
def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x)


class Rotation(torch.autograd.Function):
    """A kernel that rotates x, and the gradient back, by the same two tables."""

    @staticmethod
    def forward(ctx: Any, rotate: Any, x: Tensor, *tables: Tensor | None) -> Tensor:
        ctx.rotate = rotate
        ctx.save_for_backward(*tables)
        rotated: Tensor = rotate(x, *tables)
        return rotated

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, ctx.rotate(gradient, *ctx.saved_tensors), None, None


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False, **options: Any
) -> Tensor:
    """`x` is [batch, length, heads, head size]; `cos` and `sin` are [length, half of what is rotated].

    Raises NotImplementedError for sequences packed into one, and for an offset for each.
    """
    _refuse_lengths(options.get("seqlen_offsets", 0))
    refuse("flash_attn", options, ("cu_seqlens",))
    out = Rotation.apply(_rotate, x, cos, sin)
    return x.copy_(out) if inplace and not torch.is_grad_enabled() else out


class _RotaryWithin(torch.autograd.Function):
    """Rotates a part of a packed tensor in place, and its gradient: each is one kernel on that part only."""

    @staticmethod
    def forward(ctx: Any, packed: Tensor, part: slice, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.part = part
        ctx.save_for_backward(cos, sin)
        Rotation.apply(_rotate, packed[:, :, part].flatten(2, -2), cos, sin)
        ctx.mark_dirty(packed)
        return packed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        Rotation.apply(_rotate, grad[:, :, ctx.part].flatten(2, -2), *ctx.saved_tensors)
        return grad, None, None, None


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """In place, q and k in one kernel: `qkv` is [batch, length, 3, heads, head size] or, with `num_heads_q`, [batch,
    length, heads of q, k and v, head size]. With tables of its own k is rotated by a kernel of its own."""
    _refuse_lengths(seqlen_offsets)
    if qkv.ndim == 5 and cos_k is None:
        return _RotaryWithin.apply(qkv, slice(0, 2), cos, sin)
    if qkv.ndim == 5:
        return _RotaryWithin.apply(_RotaryWithin.apply(qkv, slice(0, 1), cos, sin), slice(1, 2), cos_k, sin_k)
    if num_heads_q is None:
        raise ValueError("qkv of four dimensions needs num_heads_q")
    of_keys = (qkv.shape[2] - num_heads_q) // 2
    return _RotaryWithin.apply(qkv, slice(0, num_heads_q + of_keys), cos, sin)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """In place, of k: `kv` is [batch, length, 2, heads, head size]."""
    _refuse_lengths(seqlen_offsets)
    return _RotaryWithin.apply(kv, slice(0, 1), cos, sin)


def apply_rotary(
    x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None, interleaved: bool = False, inplace: bool = False, conjugate: bool = False,
) -> Tensor:  # fmt: skip
    """The kernel without its gradient (flash_attn/ops/triton/rotary.py)."""
    with torch.no_grad():
        return apply_rotary_emb(x, cos, sin, interleaved, inplace, seqlen_offsets=seqlen_offsets, cu_seqlens=cu_seqlens)


def _refuse_lengths(offsets: int | Tensor) -> None:
    """Refuses an offset for each sequence. One for all only moves the table rows that are read, and is free."""
    if isinstance(offsets, Tensor):
        refuse("flash_attn", {"seqlen_offsets": offsets})


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
        refuse("flash_attn", {"scale_base": scale_base})
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
        refuse("flash_attn", {"seqlen_offset": seqlen_offset, **rest}, ("seqlen_offset", "cu_seqlens", "num_heads_q"))
        self._update_cos_sin_cache(max_seqlen or qkv.shape[1], qkv.device, qkv.dtype)
        tables = self._cos_cached, self._sin_cached
        if kv is None:
            return _RotaryWithin.apply(qkv, slice(0, 2), *tables)
        rotated = apply_rotary_emb(qkv, *tables, interleaved=self.interleaved)  # type: ignore[arg-type]
        return rotated, _RotaryWithin.apply(kv, slice(0, 1), *tables)
