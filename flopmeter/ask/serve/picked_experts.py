"""Experts that transformers runs on all tokens, those that a token did not pick too, as engines run them.

Works around: Llama 4's layers of experts repeat every token for each expert, weigh it with zero where it did not pick
the expert, and multiply all of them, so that a step reads every expert and does that many times the FLOPs.
Until: transformers calls them with tokens, picks and weights, as it calls those of other models.
"""

from __future__ import annotations

import functools
import inspect
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn


def pick_experts(model: Any) -> None:
    """Has the experts of each such layer take the tokens that picked them, in grouped products."""
    for module in model.modules():
        if all(hasattr(module, name) for name in ("router", "experts", "shared_expert", "top_k")):
            experts = module.experts
            if len(inspect.signature(experts.forward).parameters) == 1:
                vars(experts).update(_LAID, _apply_gate=functools.partial(_gated, experts))
                grouped = import_module("transformers.integrations.moe").grouped_mm_experts_forward
                setattr(experts, "forward", functools.partial(grouped, experts))  # noqa: B010
                setattr(module, "forward", functools.partial(_mixed, module))  # noqa: B010


_LAID = {
    "has_gate": True, "has_bias": False, "has_post_expert_norm": False, "is_transposed": True, "is_concatenated": True,
    "_is_expert_parallel": False,
}  # fmt: skip
"""What transformers asks of experts: gate next to up, weights [experts, inputs, outputs], all on this rank."""


def _gated(experts: Any, gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, dim=-1)
    return up * experts.act_fn(gate)


def _mixed(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    tokens = hidden.reshape(-1, hidden.shape[-1])
    scores = nn.functional.linear(tokens, layer.router.weight)
    weights, picked = torch.topk(scores, layer.top_k, dim=-1)
    out = layer.experts(tokens, picked, weights.float().sigmoid().to(tokens.dtype))
    return out.add_(layer.shared_expert(tokens)), scores
