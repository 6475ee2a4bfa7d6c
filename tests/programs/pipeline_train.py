"""Trains a pipeline with a stage on each rank, by a schedule of torch's that argv names; steps are equal."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

WIDTH, ROWS, MICROBATCHES = 8192, 16384, 8
dist.init_process_group("nccl")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
print(f"rank {rank} of {ranks}")
with torch.device("cuda"):
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
stage = PipelineStage(layers, rank, ranks, torch.device("cuda"))
schedule = get_schedule_class(sys.argv[1])(stage, n_microbatches=MICROBATCHES, loss_fn=F.mse_loss)
optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(ROWS, WIDTH, device="cuda")
    schedule.step(*([x] if rank == 0 else []), target=x if rank == ranks - 1 else None)
    optimizer.step()
    optimizer.zero_grad()
    print("a step")
dist.destroy_process_group()
