"""Attention (transformer_engine/pytorch/attention/dot_product_attention): cuDNN's on Hopper and later, FlashAttention-2
before, as the package chooses where both are installed; NVTE_FUSED_ATTN and NVTE_FLASH_ATTN choose too."""

from __future__ import annotations

import os
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flopmeter.known_values.entry_points import note_assumption
from flopmeter.records import Call, Cost
from flopmeter.run.shims.flash_attn.attention import backward_cost, forward_cost, into, row_sums
from flopmeter.run.shims.kernel import kernel
from flopmeter.run.shims.transformer_engine.base import SavesNoScales, refuse, share_storage
from flopmeter.run.shims.transformer_engine.parallel import size_of
from flopmeter.run.shims.transformer_engine.recompute import checkpoint


@kernel("te_attention", lambda call: forward_cost(call, call.argument("library")))
def _forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, window_size_left: int, window_size_right: int, library: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """[batch, length, heads, head size], or [tokens, heads, head size]: the result, which lies as q does, and the
    logarithms of the sums."""
    wide = value.shape[-1]
    out = torch.empty_like(query) if wide == query.shape[-1] else query.new_empty((*query.shape[:-1], wide))
    return out, row_sums(query)


def _backward_cost(call: Call) -> Cost:
    return backward_cost(call, call.argument("library"))


_GRADIENTS = ("of_query", "of_key", "of_value")


@kernel("te_attention_backward", into(_backward_cost, *_GRADIENTS), mutates=_GRADIENTS)
def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, of_query: Tensor,
    of_key: Tensor, of_value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int,
    dropout_p: float, is_causal: bool, window_size_left: int, window_size_right: int, library: str,
) -> None:  # fmt: skip
    """Writes the gradients into given tensors, which lie in one storage if q, k and v do."""


class _AttentionCall(NamedTuple):
    max_q: int
    max_k: int
    dropout: float
    is_causal: bool
    left: int
    right: int
    library: str


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, how = inputs  # query, key, value, and where the sequences of both begin
        out: Tensor
        out, sums = _forward(*tensors, *how)
        ctx.save_for_backward(*tensors, out, sums)
        ctx.how = how
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, starts, key_starts, out, sums = ctx.saved_tensors
        gradients = _places(query, key, value)
        _backward(gradient, query, key, value, out, sums, *gradients, starts, key_starts, *ctx.how)
        return *gradients, None, None, None


def _places(*tensors: Tensor) -> list[Tensor]:
    """Memory for the gradients, laid out as the tensors are: in one storage if they share one."""
    elements = tensors[0].untyped_storage().nbytes() // tensors[0].element_size()
    if not share_storage(tensors) or sum(each.numel() for each in tensors) != elements:
        return [torch.empty_like(each) for each in tensors]
    storage = tensors[0].new_empty(elements)
    return [storage.as_strided(each.shape, each.stride(), each.storage_offset()) for each in tensors]


class SplitAlongDim(torch.autograd.Function):
    """Parts of a tensor; gradients that lie in one tensor already are it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split_dim: int, split_size_or_sections: Any, squeeze: bool = False) -> Any:
        ctx.dim, ctx.like, ctx.squeeze = split_dim, (x.shape, x.stride(), x.storage_offset()), squeeze
        sizes = split_size_or_sections
        parts = torch.split(x, list(sizes) if isinstance(sizes, (tuple, list)) else sizes, dim=split_dim)
        return tuple(part.squeeze(split_dim) for part in parts) if squeeze else parts

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        shape, strides, offset = ctx.like
        whole = gradients[0].untyped_storage().nbytes()
        if share_storage(gradients) and whole == shape.numel() * gradients[0].element_size():
            return gradients[0].as_strided(shape, strides, offset), None, None, None
        parts = [each.unsqueeze(ctx.dim) for each in gradients] if ctx.squeeze else list(gradients)
        return torch.cat(parts, dim=ctx.dim), None, None, None


def _library() -> str:
    is_new = torch.cuda.get_device_capability() >= (9, 0)
    fused, flash = (os.environ.get(f"NVTE_{name}_ATTN", "1") == "1" for name in ("FUSED", "FLASH"))
    if not (fused or flash):
        return "none"
    return "cudnn" if fused and (is_new or not flash) else "flash"


class DotProductAttention(SavesNoScales):
    """transformer_engine.pytorch.DotProductAttention."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        softmax_scale: float | None = None,
        cp_group: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        refuse({"softmax_type": options.get("softmax_type", "vanilla") != "vanilla"})
        refuse(options, ("return_max_logit",))
        self.num_attention_heads, self.attention_dropout = num_attention_heads, attention_dropout
        self.qkv_format, self.attn_mask_type, self.window_size = qkv_format, attn_mask_type, window_size
        channels = kv_channels if isinstance(kv_channels, int) else kv_channels[0]
        self.softmax_scale = softmax_scale or 1 / sqrt(channels)
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.set_context_parallel_group(cp_group)

    def set_context_parallel_group(self, cp_group: Any, *args: Any, **options: Any) -> None:
        if size_of(cp_group[0] if isinstance(cp_group, list) else cp_group) > 1:
            raise NotImplementedError(
                "flopmeter's shim of transformer_engine has no context parallel attention: leave out cp_group"
            )
        self.cp_group = cp_group

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Heads are of this rank already."""

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Any = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        **options: Any,
    ) -> Tensor:
        biased = {"core_attention_bias": core_attention_bias_type != "no_bias"}
        given = {**options, **biased, "alibi_slopes": options.get("alibi_slopes") is not None}
        refuse(given, ("core_attention_bias", "alibi_slopes", "inference_params", "fp8_output", "num_splits"))
        layout, mask = qkv_format or self.qkv_format, (attn_mask_type or self.attn_mask_type).replace(",", "_")
        tensors = [each.transpose(0, 1) if layout == "sbhd" else each for each in (query_layer, key_layer, value_layer)]
        attend: Any = self._attend if mask != "arbitrary" and _library() != "none" else self._attend_by_parts
        starts = (cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv) if layout == "thd" else (None,) * 4
        window = window_size or self.window_size
        if checkpoint_core_attention:
            out = checkpoint(attend, *tensors, attention_mask, *starts, mask, window)
        else:
            out = attend(*tensors, attention_mask, *starts, mask, window)
        out = out.transpose(0, 1) if layout == "sbhd" else out
        return out.flatten(-2)

    @property
    def _dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, starts: Tensor | None, key_starts: Tensor | None,
        longest: int | None, longest_key: int | None, kind: str, window: Any,
    ) -> Any:  # fmt: skip
        if "padding" in kind and starts is None:
            note_assumption("padded sequences that are as long as the longest", "DotProductAttention")
        left, right = window or (-1, -1)
        max_q, max_k = (
            _longest(begins, given, each)
            for begins, given, each in ((starts, longest, query), (key_starts, longest_key, key))
        )
        how = _AttentionCall(
            max_q, max_k, self._dropout, "causal" in kind, left, -1 if "causal" in kind else right, _library()
        )
        return _FusedAttention.apply(query, key, value, starts, key_starts, how)

    def _attend_by_parts(self, query: Tensor, key: Tensor, value: Tensor, mask: Any, starts: Any, *rest: Any) -> Tensor:
        """Scores, their softmax and the sum of values, each by kernels of its own."""
        if starts is not None:
            raise NotImplementedError(
                "flopmeter's shim of transformer_engine has attention over packed sequences only as one kernel"
            )
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        repeats = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(repeats, 1) if repeats > 1 else each for each in (key, value))
        scores = query @ key.transpose(-1, -2) * self.softmax_scale
        kind = rest[3]
        if mask is None and "causal" in kind:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores if mask is None else scores.masked_fill(mask, -10000.0)
        weights = nn.functional.dropout(scores.softmax(-1), self._dropout, self.training)
        return (weights @ value).transpose(1, 2)


def _longest(starts: Tensor | None, given: int | None, x: Tensor) -> int:
    """The longest of packed sequences. If the program does not give it, the host reads it from the device."""
    if starts is None:
        return x.shape[1]
    return int(given) if given is not None else int((starts[1:] - starts[:-1]).max().item())
