"""transformer_engine.pytorch.MultiheadAttention (pytorch/attention/multi_head_attention.py)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from flopmeter.run.shims.transformer_engine.attention import DotProductAttention, SplitAlongDim
from flopmeter.run.shims.transformer_engine.base import refuse, set_in_children
from flopmeter.run.shims.transformer_engine.linear import LayerNormLinear, Linear
from flopmeter.run.shims.transformer_engine.norms import EngineRMSNorm, LayerNorm
from flopmeter.run.shims.transformer_engine.parallel import size_of
from flopmeter.run.shims.transformer_engine.rotary import apply_rotary_pos_emb

_OF_LAYERS = (
    "fuse_wgrad_accumulation", "tp_group", "get_rng_state_tracker", "sequence_parallel", "params_dtype", "device",
)  # fmt: skip


class MultiheadAttention(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        kv_channels: int | None = None,
        attention_dropout: float = 0.1,
        layernorm_epsilon: float = 1e-5,
        init_method: Any = None,
        output_layer_init_method: Any = None,
        layer_number: int | None = None,
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        tp_size: int = 1,
        num_gqa_groups: int | None = None,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        input_layernorm: bool = False,
        attention_type: str = "self",
        set_parallel_mode: bool = False,
        fuse_qkv_params: bool = False,
        zero_centered_gamma: bool = False,
        qkv_weight_interleaved: bool = True,
        rotary_pos_interleaved: bool = False,
        bias: bool = True,
        normalization: str = "LayerNorm",
        qkv_format: str = "sbhd",
        qk_norm_type: str | None = None,
        qk_norm_eps: float = 1e-6,
        qk_norm_before_rope: bool = False,
        softmax_type: str = "vanilla",
        **options: Any,
    ) -> None:
        super().__init__()
        refuse(options, [name for name in options if name.startswith("ub_")])
        shared = {name: options[name] for name in _OF_LAYERS if name in options}
        shared |= {"tp_size": tp_size, "bias": bias, "init_method": init_method}
        size = size_of(options.get("tp_group")) if options.get("tp_group") is not None else tp_size
        self.channels = kv_channels or hidden_size // num_attention_heads
        self.groups = num_gqa_groups or num_attention_heads
        self.is_self, self.qkv_format, self.return_bias = attention_type == "self", qkv_format, return_bias
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.heads_of_rank, self.groups_of_rank = num_attention_heads // size, self.groups // size
        self.is_interleaved = qkv_weight_interleaved and fuse_qkv_params
        self.rotary_pos_interleaved, self.norms_first = rotary_pos_interleaved, qk_norm_before_rope
        self.input_layernorm, self.return_layernorm_output = input_layernorm, return_layernorm_output
        columns = {**shared, "parallel_mode": "column" if set_parallel_mode else None}
        normed = {
            "eps": layernorm_epsilon, "normalization": normalization, "zero_centered_gamma": zero_centered_gamma,
            "return_layernorm_output": return_layernorm_output,
        } if input_layernorm else {}  # fmt: skip
        of_queries = self.channels * num_attention_heads
        self._make_projections(hidden_size, of_queries, fuse_qkv_params, normed, columns)
        self.core_attention = DotProductAttention(
            num_attention_heads, self.channels, num_gqa_groups, attention_dropout, qkv_format, softmax_type=softmax_type
        )
        shared["init_method"] = output_layer_init_method
        mode = "row" if set_parallel_mode else None
        self.proj = Linear(of_queries, hidden_size, return_bias=return_bias, parallel_mode=mode, **shared)
        self.q_norm, self.k_norm = (self._head_norm(qk_norm_type, qk_norm_eps, options) for _ in range(2))

    def _make_projections(
        self, width: int, of_queries: int, is_fused: bool, normed: dict[str, Any], columns: dict[str, Any]
    ) -> None:
        """One product of query, key and value; or one of the query and, of the other sequence, one of key and value.
        Unless they are fused, each has a weight of its own. `normed`: options of the norm before the first product."""
        kind: Any = LayerNormLinear if self.input_layernorm else Linear
        of_keys = self.channels * self.groups
        if self.is_self:
            sizes = {"query": of_queries, "key": of_keys, "value": of_keys}
            rows, parts, self._first = sum(sizes.values()), sizes, "layernorm_qkv" if self.input_layernorm else "qkv"
        else:
            rows, parts = of_queries, {"query": of_queries}
            self._first = "layernorm_query" if self.input_layernorm else "query_layer"
        first = kind(width, rows, parameters_split=None if is_fused else parts, **normed, **columns)
        self.add_module(self._first, first)
        if not self.is_self:
            pair = None if is_fused else ("key", "value")
            self.key_value = Linear(width, 2 * of_keys, parameters_split=pair, **columns)

    def _head_norm(self, kind: str | None, eps: float, options: dict[str, Any]) -> nn.Module | None:
        if kind is None:
            return None
        if kind not in ("RMSNorm", "LayerNorm"):
            raise NotImplementedError(f"flopmeter's shim of transformer_engine has no qk_norm_type {kind!r}")
        norm = EngineRMSNorm if kind == "RMSNorm" else LayerNorm
        return norm(self.channels, eps, device=options.get("device", "cuda"), params_dtype=options.get("params_dtype"))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        encoder_output: Tensor | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: Any = None,
        **options: Any,
    ) -> Any:
        query, key, value, normed = self._projected(hidden_states, encoder_output, is_first_microbatch)
        query, key = self._placed(query, key, rotary_pos_emb, options.get("cu_seqlens_q"))
        core = {"attn_mask_type": attn_mask_type or self.attn_mask_type, "window_size": window_size or self.window_size}
        out = self.core_attention(query, key, value, attention_mask, qkv_format=self.qkv_format, **core, **options)
        out = self.proj(out, is_first_microbatch=is_first_microbatch)
        returned = [*(out if isinstance(out, tuple) else (out, *([None] if self.return_bias else [])))]
        returned += [normed] if self.input_layernorm and self.return_layernorm_output else []
        return returned[0] if len(returned) == 1 else tuple(returned)

    def _projected(
        self, x: Tensor, encoded: Tensor | None, is_first: bool | None
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        mixed, normed = self.get_submodule(self._first)(x, is_first_microbatch=is_first), None
        if self.input_layernorm and self.return_layernorm_output:
            mixed, normed = mixed
        if self.is_self:
            query, key, value = self._split(mixed)
        else:
            query, both = mixed, self.key_value(encoded, is_first_microbatch=is_first)
            both = both.unflatten(-1, (2, self.groups_of_rank, self.channels))
            key, value = SplitAlongDim.apply(both, both.ndim - 3, (1, 1))
        lead = mixed.ndim - 1
        query, key, value = (each.reshape(*each.shape[:lead], -1, self.channels) for each in (query, key, value))
        return query, key, value, normed

    def _split(self, mixed: Tensor) -> Any:
        """Query, key and value of a joint projection, whose heads lie interleaved by group or one kind after the
        other."""
        shared = self.heads_of_rank // self.groups_of_rank
        shape = (self.groups_of_rank, shared + 2) if self.is_interleaved else (shared + 2, self.groups_of_rank)
        apart = mixed.unflatten(-1, (*shape, self.channels))
        return SplitAlongDim.apply(apart, apart.ndim - (2 if self.is_interleaved else 3), (shared, 1, 1))

    def _placed(self, query: Tensor, key: Tensor, angles: Any, starts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Normed by head, and rotated."""
        if self.norms_first:
            query, key = self._normed_by_head(query, key)
        if angles is not None:
            of_query, of_key = angles if isinstance(angles, tuple) else (angles, angles)
            options: dict[str, Any] = {
                "tensor_format": self.qkv_format,
                "interleaved": self.rotary_pos_interleaved,
                "cu_seqlens": starts,
            }
            query = apply_rotary_pos_emb(query, of_query, **options)
            key = apply_rotary_pos_emb(key, of_key, **options)
        return (query, key) if self.norms_first else self._normed_by_head(query, key)

    def _normed_by_head(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        norms: Any = self.q_norm, self.k_norm
        return (query, key) if norms[0] is None else (norms[0](query), norms[1](key))

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        set_in_children(self, tp_group)

    def set_context_parallel_group(self, *args: Any) -> None:
        self.core_attention.set_context_parallel_group(*args)
