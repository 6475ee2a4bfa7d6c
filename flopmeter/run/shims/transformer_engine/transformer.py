"""transformer_engine.pytorch.TransformerLayer (pytorch/transformer.py)."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopmeter.costs import make_cost
from flopmeter.records import ELEMENTWISE, Call, Cost
from flopmeter.run.shims.kernel import kernel
from flopmeter.run.shims.transformer_engine.base import refuse, set_in_children
from flopmeter.run.shims.transformer_engine.casts import activation_dtype
from flopmeter.run.shims.transformer_engine.mlp import LayerNormMLP
from flopmeter.run.shims.transformer_engine.multihead import MultiheadAttention
from flopmeter.run.shims.transformer_engine.norms import EngineRMSNorm, LayerNorm


def _add_cost(call: Call) -> Cost:
    """A sum for the bias and one for the residual; dropout is a product, with a random number an element."""
    drops, n = call.argument("dropout") > 0, call.outputs[0].numel
    numbers = n if drops else 0
    return make_cost(call, ELEMENTWISE, (2 + drops) * n, random_numbers=numbers)


@kernel("te_bias_dropout_add", _add_cost)
def _add(x: Tensor, bias: Tensor, residual: Tensor, dropout: float) -> Tensor:
    return torch.empty_like(residual)


@kernel(
    "te_dropout_backward",
    lambda call: make_cost(call, ELEMENTWISE, call.inputs[0].numel, random_numbers=call.inputs[0].numel),
)
def _drop_gradient(gradient: Tensor) -> Tensor:
    return torch.empty_like(gradient)


class _BiasDropoutAdd(torch.autograd.Function):
    """One kernel, as torch's compiler fuses it; the gradient draws the random numbers again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, residual: Tensor, dropout: float) -> Tensor:
        ctx.dropout = dropout
        return _add(x, bias, residual, dropout)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        of_x = _drop_gradient(gradient) if ctx.dropout else gradient
        of_bias = of_x.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        return of_x, of_bias, gradient, None


class TransformerLayer(nn.Module):
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        layernorm_epsilon: float = 1e-5,
        hidden_dropout: float = 0.1,
        attention_dropout: float = 0.1,
        init_method: Any = None,
        output_layer_init_method: Any = None,
        layer_number: int | None = None,
        kv_channels: int | None = None,
        self_attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        enc_dec_attn_mask_type: str = "no_mask",
        enc_dec_window_size: tuple[int, int] | None = None,
        apply_residual_connection_post_layernorm: bool = False,
        output_layernorm: bool = False,
        parallel_attention_mlp: bool = False,
        layer_type: str = "encoder",
        drop_path_rate: float = 0.0,
        fuse_qkv_params: bool = False,
        activation: str = "gelu",
        normalization: str = "LayerNorm",
        attn_input_format: str = "sbhd",
        **options: Any,
    ) -> None:
        super().__init__()
        refuse({"drop_path_rate": drop_path_rate})
        refuse(options, ("ub_tp_comm_overlap",))
        for name in ("seq_length", "micro_batch_size", "name"):
            options.pop(name, None)
        options = {name: value for name, value in options.items() if not name.startswith("ub_")}  # of that overlap
        of_attention = {name: options.pop(name) for name in list(options) if name in _OF_ATTENTION}
        self.masks = self_attn_mask_type, enc_dec_attn_mask_type
        self.windows = window_size, enc_dec_window_size
        self.hidden_dropout, self.after_norm = hidden_dropout, apply_residual_connection_post_layernorm
        self.parallel_attention_mlp, self.is_decoder = parallel_attention_mlp, layer_type == "decoder"
        shared: dict[str, Any] = {
            **options, "init_method": init_method, "output_layer_init_method": output_layer_init_method,
            "normalization": normalization, "return_bias": not parallel_attention_mlp,
            "return_layernorm_output": self.after_norm,
        }  # fmt: skip
        attention: Any = partial(
            MultiheadAttention, hidden_size, num_attention_heads, kv_channels, attention_dropout, layernorm_epsilon,
            num_gqa_groups=num_gqa_groups, fuse_qkv_params=fuse_qkv_params, qkv_format=attn_input_format,
            **of_attention, **shared,
        )  # fmt: skip
        self.self_attention = attention(input_layernorm=not output_layernorm)
        if self.is_decoder:
            self.inter_attention = attention(
                attention_type="cross", input_layernorm=True, attn_mask_type=enc_dec_attn_mask_type
            )
        self.layernorm_mlp = LayerNormMLP(
            hidden_size, ffn_hidden_size, layernorm_epsilon, activation=activation, **shared
        )
        self.layernorm: nn.Module | None = None
        if output_layernorm:
            norm = EngineRMSNorm if normalization == "RMSNorm" else LayerNorm
            given = {name: options[name] for name in ("params_dtype", "device") if name in options}
            self.layernorm = norm(hidden_size, layernorm_epsilon, **given)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        self_attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        encoder_output: Tensor | None = None,
        enc_dec_attn_mask: Any = None,
        enc_dec_attn_mask_type: str | None = None,
        enc_dec_window_size: tuple[int, int] | None = None,
        is_first_microbatch: bool | None = None,
        rotary_pos_emb: Any = None,
        **options: Any,
    ) -> Tensor:
        hidden_states = hidden_states.to(activation_dtype(hidden_states))
        for name in ("fast_zero_fill", "pad_between_seqs"):
            options.pop(name, None)
        options = {name: value for name, value in options.items() if value is not None}
        x, first = hidden_states.contiguous(), {"is_first_microbatch": is_first_microbatch}
        attended = self.self_attention(
            x, attention_mask, attn_mask_type=self_attn_mask_type or self.masks[0],
            window_size=window_size or self.windows[0], rotary_pos_emb=rotary_pos_emb, **first, **options,
        )  # fmt: skip
        if self.parallel_attention_mlp:
            return self._joined(attended + self.layernorm_mlp(x, **first), None, x)
        x = self._added(attended, x)
        if self.is_decoder:
            crossed = self.inter_attention(
                x, enc_dec_attn_mask, encoder_output, enc_dec_attn_mask_type or self.masks[1],
                enc_dec_window_size or self.windows[1], **first,
            )  # fmt: skip
            x = self._added(crossed, x)
        x = self._added(self.layernorm_mlp(x, **first), x)
        return x if self.layernorm is None else cast(Tensor, self.layernorm(x))

    def _added(self, made: Any, residual: Tensor) -> Tensor:
        """What a part returns, its bias and dropout, on top of its input, or of the normed one."""
        out, bias, *normed = (*made, None)[:3] if isinstance(made, tuple) else (made, None)
        return self._joined(out, bias, normed[0] if self.after_norm and normed else residual)

    def _joined(self, out: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        dropout = self.hidden_dropout if self.training else 0.0
        if bias is not None and os.environ.get("NVTE_BIAS_DROPOUT_FUSION", "1") == "1":
            return _BiasDropoutAdd.apply(out, bias, residual, dropout)
        out = out if bias is None else out + bias
        return residual + F.dropout(out, dropout)

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        set_in_children(self, tp_group)

    def set_context_parallel_group(self, *args: Any) -> None:
        self.self_attention.set_context_parallel_group(*args)


_OF_ATTENTION = (
    "qkv_weight_interleaved", "rotary_pos_interleaved", "qk_norm_type", "qk_norm_eps", "qk_norm_before_rope",
    "softmax_type",
)  # fmt: skip
