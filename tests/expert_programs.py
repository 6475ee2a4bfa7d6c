"""A layer of experts on several ranks: on meta by the meter, and on the CPU by real processes.

    python tests/expert_programs.py RANK WORLD_SIZE STORE IMBALANCE

runs it over gloo, as one of the processes, with tokens that pick experts by a law of its own making, and prints as JSON
what the process exchanges and computes. It knows nothing of flopmeter.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 96, 16, 32, 16, 2


class Experts(nn.Module):
    """Counts go first, then features, as DeepSeek and torchtitan do it; results come back the same way."""

    def __init__(self, device: str):
        super().__init__()
        self.ranks = dist.get_world_size()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False, device=device)
        self.here = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN, device=device), nn.Linear(HIDDEN, WIDTH, device=device))
            for _ in range(EXPERTS // self.ranks)
        )
        self.rows: list[int] = []  # of each expert here
        self.bytes: list[tuple[int, int]] = []  # sent and received by each exchange of features

    def forward(self, tokens: Tensor, scores: Tensor | None = None) -> Tensor:
        scores = self.router(tokens) if scores is None else scores
        picked = scores.topk(CHOSEN).indices.flatten()
        order = picked.argsort()
        sent = torch.bincount(picked, minlength=EXPERTS)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        sent_of, received_of = (counts.view(self.ranks, -1).sum(1).tolist() for counts in (sent, received))
        features = self.exchange(tokens[order // CHOSEN], received_of, sent_of)
        owner = torch.arange(len(self.here), device=tokens.device).repeat(self.ranks).repeat_interleave(received)
        results = torch.zeros_like(features)
        for number, expert in enumerate(self.here):
            (own,) = (owner == number).nonzero(as_tuple=True)
            self.rows.append(len(own))
            results[own] = expert(features[own])
        return self.exchange(results, sent_of, received_of)

    def exchange(self, rows: Tensor, received_of: list[int], sent_of: list[int]) -> Tensor:
        into = rows.new_empty(sum(received_of), rows.shape[1])
        self.bytes.append((rows.nbytes, into.nbytes))
        dist.all_to_all_single(into, rows, received_of, sent_of)
        return into


def scores_of(imbalance: float) -> Tensor:
    """Scores whose two largest are the experts that a token picks. Slots are given out one by one: expert e owns those
    from the sum of the line up to e to that up to e + 1, where the line falls from the imbalance to 2 - imbalance."""
    slots = TOKENS * CHOSEN
    line = [imbalance - 2 * (imbalance - 1) * e / (EXPERTS - 1) for e in range(EXPERTS)]
    owner, done = [], 0.0
    for expert, share in enumerate(line):
        done += share * slots / EXPERTS
        owner += [expert] * (round(done) - len(owner))
    scores = torch.zeros(TOKENS, EXPERTS)
    for slot, expert in enumerate(owner):
        scores[slot % TOKENS, expert] = 2.0 - slot // TOKENS
    return scores


def main(rank: int, size: int, store: str, imbalance: float) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=size, init_method=f"file://{store}")
    layer = Experts("cpu")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(torch.zeros(TOKENS, WIDTH), scores_of(imbalance))
    dist.destroy_process_group()
    router = 2 * TOKENS * WIDTH * EXPERTS  # which the meter runs, too
    print(json.dumps({"rows": layer.rows, "bytes": layer.bytes, "flops": counter.get_total_flops() + router}))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
