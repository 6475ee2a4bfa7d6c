"""Trains a pipeline whose messages are written out: GPipe by send and recv, or 1F1B by batches of them."""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

SHAPE, MICROBATCHES = (16384, 8192), 8
dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
with torch.device("cuda"):
    layers = nn.Sequential(*(nn.Linear(SHAPE[1], SHAPE[1], bias=False) for _ in range(4)))
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
kept: list[tuple[Tensor, Tensor]] = []


def exchange(*messages: tuple[str, Tensor, int]) -> None:
    """Messages as (send or recv, tensor, the other rank); there is none before the first rank or after the last."""
    messages = tuple(each for each in messages if 0 <= each[2] < ranks)
    if sys.argv[1] == "GPipe":
        for way, tensor, peer in messages:
            getattr(dist, way)(tensor, peer)
    elif messages:
        batch = [dist.P2POp(getattr(dist, f"i{way}"), tensor, peer) for way, tensor, peer in messages]
        for work in dist.batch_isend_irecv(batch):
            work.wait()


def forward(x: Tensor) -> Tensor:
    kept.append((x, layers(x.requires_grad_(rank > 0))))
    return kept[-1][1].detach()


def backward(gradient: Tensor) -> Tensor:
    x, out = kept.pop(0)
    out.backward(gradient)
    return out if x.grad is None else x.grad


def empty() -> Tensor:
    return torch.empty(SHAPE, device="cuda")


for _ in range(3):
    ahead = MICROBATCHES if sys.argv[1] == "GPipe" else min(ranks - rank - 1, MICROBATCHES)
    for _ in range(ahead):
        exchange(("recv", x := empty(), rank - 1))
        exchange(("send", forward(x), rank + 1))
    if ahead < MICROBATCHES:
        exchange(("recv", x := empty(), rank - 1))
    for left in reversed(range(MICROBATCHES - ahead)):
        out, gradient = forward(x), empty()
        exchange(("send", out, rank + 1), ("recv", gradient, rank + 1))
        gradient = backward(gradient)
        if left:
            exchange(("send", gradient, rank - 1), ("recv", x := empty(), rank - 1))
        else:
            exchange(("send", gradient, rank - 1))
    for _ in range(ahead):
        exchange(("recv", gradient := empty(), rank + 1))
        exchange(("send", backward(gradient), rank - 1))
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
