"""Experts of a layer spread over GPUs, each of which works on requests of its own (data parallel attention).

A GPU keeps all of the model but for the experts, of which it has its part, whole ones. In each layer of experts a token
is sent to the GPU of each expert that it picked, and what that made of it comes back: two all-to-alls, as in vLLM's and
SGLang's expert parallelism. Tokens pick by chance, so that one GPU gets more of them than the others, which wait for
it: the step that is metered is that of the fullest GPU.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flopmeter.ask.delays import expected_maximum
from flopmeter.ask.plan.experts import experts_of, keep_part
from flopmeter.ask.serve.cache import ServingError


class SpreadExperts:
    """What one of `ranks` GPUs does of a layer's experts, in place of the module's forward."""

    def __init__(self, experts: Any, ranks: int) -> None:
        self._run, self._ranks, self._every = experts.forward, ranks, experts.num_experts
        self.picks, self._bytes_of_token = 0, 0  # known from the first step on
        self.group = tuple(range(ranks))

    def __call__(self, tokens: Tensor, picked: Tensor, weights: Tensor) -> Tensor:
        count, width = tokens.shape
        self.picks, self._bytes_of_token = picked.shape[-1], width * tokens.element_size()
        arriving = self.arriving(count)
        arrived = tokens[torch.empty(arriving, dtype=torch.long, device=tokens.device)]
        own = arrived.new_empty(arriving, self.held).argmax(-1, keepdim=True)
        made = self._run(arrived, own, weights.new_empty(arriving, 1, dtype=tokens.dtype))
        return made[: count * self.picks].view(count, self.picks, width).sum(1)

    @property
    def held(self) -> int:
        """Experts on this GPU."""
        return self._every // self._ranks

    def arriving(self, tokens: int) -> int:
        """How many tokens the fullest GPU gets where each one sends `tokens` to `picks` of all experts: the expected
        maximum of as many normal numbers, with the variance of picks that are all different."""
        mean, every = tokens * self.picks, self._every
        variance = mean * (1 - 1 / self._ranks) * (every - self.picks) / (every - 1)
        return round(mean + math.sqrt(variance) * expected_maximum(self._ranks))

    def bytes_arriving(self, tokens: int) -> int:
        """Bytes of these tokens, in each direction."""
        return self.arriving(tokens) * self._bytes_of_token


def spread_experts(model: Any, ranks: int, title: str) -> tuple[SpreadExperts, ...]:
    """In place: the model keeps its part of the experts of each layer. Raises ServingError where that cannot be."""
    layers = experts_of(model)
    if not layers:
        raise ServingError(
            f"{title} has no experts that could be spread over GPUs: leave out expert_parallel (--expert-parallel)"
        )
    for experts in layers:
        if experts.num_experts % ranks:
            raise ServingError(f"{experts.num_experts} experts cannot be spread over {ranks} GPUs: take a divisor")
        experts.forward = SpreadExperts(experts, ranks)
        keep_part(experts, ranks)
    return tuple(experts.forward for experts in layers)
