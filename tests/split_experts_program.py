"""Experts split over real processes, beside the whole ones.

    python tests/split_experts_program.py RANK WORLD_SIZE STORE

prints as JSON how far results and gradients are from those of the whole layer, and whether tokens travelled.
"""

from __future__ import annotations

import copy
import json
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flopmeter.ask.plan.experts import split_experts

WIDTH, EXPERTS = 16, 6


class Experts(nn.Module):
    """With the parameters and the arguments of those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.up = nn.Parameter(torch.randn(EXPERTS, 8, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 8))

    def forward(self, tokens: Tensor, picked: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(tokens)
        for expert in range(self.num_experts):
            token, place = torch.where(picked == expert)
            made = F.gelu(tokens[token] @ self.up[expert].T) @ self.down[expert].T
            out = out.index_add(0, token, made * weights[token, place, None])
        return out


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        weights, picked = self.router(x).softmax(-1).topk(2)
        return self.experts(x, picked, weights)


def main(rank: int, size: int, store: str) -> None:
    torch.manual_seed(0)
    whole = Mixture()
    mine = copy.deepcopy(whole)
    dist.init_process_group("gloo", rank=rank, world_size=size, store=dist.FileStore(store, size))
    split_experts(mine, range(size))
    experts = mine.experts
    own = slice(rank * experts.num_experts, (rank + 1) * experts.num_experts)
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            parameter.copy_(whole.experts.get_parameter(name)[own])
    tokens = torch.randn(size, 35, WIDTH)  # of each rank
    expected = [whole(each) for each in tokens]
    sum(each.square().sum() for each in expected).backward()
    found = mine(tokens[rank])
    found.square().sum().backward()
    off_by = [(found - expected[rank]).abs().max() / expected[rank].abs().max()]
    for name, parameter in experts.named_parameters():
        theirs = whole.experts.get_parameter(name).grad[own]
        off_by.append((parameter.grad - theirs).abs().max() / theirs.abs().max())
    print(json.dumps([max(float(each) for each in off_by), experts.num_experts < EXPERTS]))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
