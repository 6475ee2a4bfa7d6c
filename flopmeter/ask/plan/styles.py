"""Tensor parallelism of models of transformers, in torch's own styles.

Attention, embeddings and dense layers are split as transformers itself would. Layers of experts are split as
Megatron-Core and torchtitan do: each tensor parallel rank routes its part of the tokens, so that experts, which are
split by `ep`, and what else is in the layer are whole there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from flopmeter.ask.plan.experts import holders_of_experts

# Multi-head latent attention (arXiv 2405.04434): what makes heads from the latents is split, latents are not. Models
# whose plan says nothing of their attention have it.
_LATENT = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}


def styles_of_transformers(model: nn.Module) -> dict[str, Any]:
    """The styles for `parallelize_module`; none if the plan of transformers has one that torch lacks."""
    holders = set(holders_of_experts(model))
    plan = {
        name: style
        for name, style in (getattr(model, "tp_plan", None) or {}).items()
        if not any(_is_inside(name, holder) for holder in holders)
    }
    if not any(".self_attn." in name for name in plan):
        plan |= dict(_of_latents(model))
    of_layers = any("*" in name or ".self_attn." in name for name in plan)
    styles = _styles_of_torch()
    if not of_layers or not set(plan.values()) <= styles.keys():
        return {}
    return {name: styles[style] for name, style in plan.items() if styles[style]} | {
        name: _part_of_tokens() for name in holders
    }


def _is_inside(pattern: str, holder: str) -> bool:
    """Whether the name of the plan (with * for numbers of layers) belongs to experts, or to an expert that all tokens
    share. A dense layer of the same name has its products directly in it."""
    parts, own = pattern.split("."), holder.split(".")
    alike = len(parts) > len(own) and all(part in ("*", other) for part, other in zip(parts, own, strict=False))
    return alike and "expert" in parts[len(own)]


def _of_latents(model: nn.Module) -> Iterator[tuple[str, str]]:
    for name, module in model.named_modules():
        if name.endswith(".self_attn") and hasattr(module, "kv_b_proj"):
            yield from ((f"{name}.{part}", style) for part, style in _LATENT.items() if hasattr(module, part))


def _styles_of_torch() -> dict[str, Any]:
    """By transformers' names; None for one that moves nothing in a forward pass."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import parallel as tp

    return {
        "colwise": tp.ColwiseParallel(),
        "rowwise": tp.RowwiseParallel(),
        "embedding_rowwise": tp.RowwiseParallel(input_layouts=Replicate()),
        "colwise_gather_output": tp.ColwiseParallel(output_layouts=Replicate()),
        "replicated_with_grad_allreduce": None,
    }


def _part_of_tokens() -> Any:
    """Takes this rank's part of the tokens [batch, length, width], and gives the results of all ranks."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    return tp.PrepareModuleInputOutput(
        input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),), use_local_input=True,
        output_layouts=(Shard(1),), desired_output_layouts=(Replicate(),), use_local_output=True,
    )  # fmt: skip
