"""Transformer Engine (github.com/NVIDIA/TransformerEngine, 2.9): its layers run the kernels that they launch there, in
the order in which they do; each file here says which of its files it stands for.

Layers in 16 bits multiply by torch's own operators and flopmeter's for what cuBLASLt does in an epilogue. In fp8, MXFP8
and NVFP4 inputs, weights and gradients are cast by kernels that write rows and, where matmuls need them, columns.
"""

from __future__ import annotations

from typing import Any

from flopmeter.run.shims.kernel import left_out, named
from flopmeter.run.shims.transformer_engine import (
    attention,
    base,
    grouped,
    linear,
    losses,
    mlp,
    multihead,
    norms,
    optimizers,
    parallel,
    recipes,
    recompute,
    rotary,
    routing,
    state,
    transformer,
)  # fmt: skip

DISTRIBUTION = "transformer_engine"
begin = state.REGION.begin

_RECIPES = named(
    recipes.Format, recipes.Recipe, recipes.DelayedScaling, recipes.Float8CurrentScaling, recipes.MXFP8BlockScaling,
    recipes.Float8BlockScaling, recipes.NVFP4BlockScaling, recipes.QParams, recipes.MMParams,
)  # fmt: skip
_LAYERS = {
    **named(
        linear.Linear, linear.LayerNormLinear, mlp.LayerNormMLP, norms.LayerNorm, grouped.GroupedLinear,
        grouped.Fp8Padding, grouped.Fp8Unpadding,
    ),
    "RMSNorm": norms.EngineRMSNorm,
}  # fmt: skip
_ATTENTION = named(attention.DotProductAttention, multihead.MultiheadAttention, rotary.RotaryPositionEmbedding)
_ROTARY = named(rotary.apply_rotary_pos_emb, rotary.RotaryPositionEmbedding)
_PRECISION = {
    **named(state.autocast, state.fp8_autocast, state.quantized_model_init, state.get_default_recipe),
    **state.IS_AVAILABLE,
    "fp8_model_init": state.quantized_model_init,
}
_STATE = {**_PRECISION, **state.CHECKS, **named(state.FP8GlobalStateManager)}
_ROUTING = named(
    routing.moe_permute, routing.moe_permute_with_probs, routing.moe_unpermute, routing.moe_sort_chunks_by_index,
    routing.moe_sort_chunks_by_index_with_probs,
)  # fmt: skip
_DISTRIBUTED = named(
    recompute.checkpoint, parallel.CudaRNGStatesTracker, recompute.is_fp8_activation_recompute_enabled,
    recompute.in_fp8_activation_recompute_phase, recompute.activation_recompute_forward,
)  # fmt: skip


class QuantizedTensor:
    """A weight that is held in fp8: none is."""


class Float8Tensor(QuantizedTensor):
    """A weight in fp8 with one scale."""


class MXFP8Tensor(QuantizedTensor):
    """A weight in fp8 with a scale for each block of 32."""


# Programs name them, whether they use them or not.
_OPS = (
    "AllGather", "AllReduce", "BasicLinear", "Bias", "FusibleOperation", "GEGLU", "GELU", "LayerNorm", "Linear",
    "RMSNorm", "ReGLU", "ReLU", "ReduceScatter", "Sequential", "SiLU", "SwiGLU",
)  # fmt: skip
_ROUTERS = ("fused_topk_with_score_function", "fused_compute_score_for_moe_aux_loss", "fused_moe_aux_loss")


def _left_out(module: str, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {module: {name: left_out(module, name) for name in names}}


MODULES: dict[str, dict[str, Any]] = {
    "transformer_engine": {"__version__": "2.9.0"},
    "transformer_engine.common": {},
    "transformer_engine.common.recipe": _RECIPES,
    "transformer_engine.pytorch": {
        **_LAYERS, **_ATTENTION, **_PRECISION, **_ROUTING, **named(transformer.TransformerLayer),
        **named(recompute.checkpoint, parallel.CudaRNGStatesTracker, losses.parallel_cross_entropy),
    },
    "transformer_engine.pytorch.attention": {
        **_ATTENTION, **_ROTARY, "SplitAlongDim": attention.SplitAlongDim, "_SplitAlongDim": attention.SplitAlongDim,
    },
    "transformer_engine.pytorch.attention.rope": _ROTARY,
    "transformer_engine.pytorch.cross_entropy": named(losses.parallel_cross_entropy),
    "transformer_engine.pytorch.distributed": _DISTRIBUTED,
    "transformer_engine.pytorch.float8_tensor": named(Float8Tensor),
    "transformer_engine.pytorch.fp8": _STATE,
    "transformer_engine.pytorch.module": _LAYERS,
    "transformer_engine.pytorch.module.base": {"TransformerEngineBaseModule": base.EngineLayer},
    **_left_out("transformer_engine.pytorch.ops", _OPS),
    "transformer_engine.pytorch.optimizers": optimizers.NAMES,
    "transformer_engine.pytorch.permutation": _ROUTING,
    "transformer_engine.pytorch.quantization": _STATE,
    **_left_out("transformer_engine.pytorch.router", _ROUTERS),
    "transformer_engine.pytorch.tensor": named(QuantizedTensor, Float8Tensor, MXFP8Tensor),
    "transformer_engine.pytorch.tensor.float8_tensor": named(Float8Tensor),
    "transformer_engine.pytorch.tensor.mxfp8_tensor": named(MXFP8Tensor),
    "transformer_engine.pytorch.transformer": named(transformer.TransformerLayer),
}  # fmt: skip
