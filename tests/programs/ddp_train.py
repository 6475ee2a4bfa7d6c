"""DistributedDataParallel as torchrun starts it.

torchrun --nproc-per-node 8 ddp_train.py
"""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("nccl")
local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank)
device = torch.device("cuda", local_rank)
model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256)).to(device)
model = DistributedDataParallel(model, device_ids=[local_rank])
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(2048, 256))
sampler = DistributedSampler(data)
for (x,) in DataLoader(data, batch_size=16, sampler=sampler):
    loss = model(x.to(device, non_blocking=True)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(dist.get_world_size(), len(sampler), total.item())
dist.destroy_process_group()
