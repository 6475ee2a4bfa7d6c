"""flash-attn (github.com/Dao-AILab/flash-attention): each file here says which of its files it stands for.

Tensors are [batch, length, heads, head size]; sequences that lie end to end are [tokens, heads, head size].
"""

from __future__ import annotations

from typing import Any

from flopmeter.run.shims.flash_attn import attention, benchmarks, by_blocks, collectives, norms, padding, rotary
from flopmeter.run.shims.kernel import named

_ROTARY = named(
    rotary.apply_rotary_emb, rotary.apply_rotary_emb_qkv_, rotary.apply_rotary_emb_kv_, rotary.RotaryEmbedding
)  # fmt: skip
_NORMS = named(norms.layer_norm_fn, norms.rms_norm_fn, norms.RMSNorm)

DISTRIBUTION = "flash-attn"
MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": "2.8.3", **attention.FUNCTIONS},
    "flash_attn.bert_padding": named(
        padding.unpad_input, padding.pad_input, padding.index_first_axis, padding.index_put_first_axis,
        padding.rearrange, padding.repeat,
    ),
    "flash_attn.flash_attention": named(attention.FlashAttention),
    "flash_attn.flash_attn_interface": {**attention.FUNCTIONS, **by_blocks.FUNCTIONS},
    "flash_attn.layers": {},
    "flash_attn.layers.rotary": {**_ROTARY, "apply_rotary_emb_func": rotary.apply_rotary_emb},
    "flash_attn.losses": {},
    "flash_attn.losses.cross_entropy": named(norms.CrossEntropyLoss),
    "flash_attn.modules": {},
    "flash_attn.modules.mha": {
        **attention.FUNCTIONS,
        **named(attention.FlashSelfAttention, attention.FlashCrossAttention),
    },
    "flash_attn.ops": {},
    "flash_attn.ops.activations": named(norms.swiglu, norms.bias_gelu_impl, norms.fast_gelu_impl),
    "flash_attn.ops.fused_dense": named(norms.FusedDense, norms.fused_dense_func),
    "flash_attn.ops.layer_norm": named(norms.layer_norm, norms.dropout_add_layer_norm),
    "flash_attn.ops.rms_norm": named(norms.rms_norm, norms.dropout_add_rms_norm, norms.RMSNorm),
    "flash_attn.ops.triton": {},
    "flash_attn.ops.triton.cross_entropy": named(norms.cross_entropy_loss),
    "flash_attn.ops.triton.layer_norm": _NORMS,
    "flash_attn.ops.triton.rotary": named(rotary.apply_rotary),
    "flash_attn.utils": {},
    "flash_attn.utils.benchmark": named(
        benchmarks.benchmark_forward, benchmarks.benchmark_backward, benchmarks.benchmark_combined,
        benchmarks.benchmark_fwd_bwd, benchmarks.benchmark_all,
    ),
    "flash_attn.utils.distributed": named(
        collectives.all_gather, collectives.all_gather_raw, collectives.reduce_scatter, collectives.reduce_scatter_raw,
        collectives.all_reduce, collectives.all_reduce_raw,
    ),
}  # fmt: skip
