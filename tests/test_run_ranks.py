"""Programs of several ranks under `flopmeter run`: how their batches reach the GPU, which mesh they get, what starts
them."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import flopmeter

A100 = "a100-sxm4-80gb"


def test_ddp_brings_a_batch_from_the_host_to_the_gpu_of_its_device_ids():
    with flopmeter.cuda(A100, gpus=2):
        dist.init_process_group("nccl")
        model = DistributedDataParallel(nn.Linear(8, 4).cuda(), device_ids=[torch.device("cuda", 0)])
        assert model(torch.zeros(2, 8)).is_cuda
        assert model.device_ids == [0]


def test_fsdp2_without_a_mesh_shards_over_all_gpus():
    with flopmeter.cuda(A100, gpus=4) as device:
        dist.init_process_group("nccl")
        assert torch.get_device_module() is torch.cuda
        dist.barrier()
        dist.barrier(device_ids=[0])
        model = fully_shard(nn.Linear(8, 4, bias=False).cuda())
        model(torch.zeros(2, 8, device="cuda"))
    collectives = [kernel.cost.collective for kernel in device.report().step.kernels if kernel.cost.collective]
    assert [(each.kind, each.nbytes, each.ranks) for each in collectives] == [("all_gather", 4 * 8 * 4, (0, 1, 2, 3))]


def learn(rank: int, model: nn.Module) -> None:
    assert rank == 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.zeros(2, 8, device="cuda")).sum().backward()
        optimizer.step()


def test_of_processes_that_share_a_model_on_the_gpu_the_first_runs_and_is_metered():
    with flopmeter.cuda(A100, steps=3) as device:
        model = nn.Linear(8, 4, bias=False).cuda().share_memory()
        assert model.weight.is_shared()
        for rank in range(2):
            mp.get_context("spawn").Process(target=learn, args=(rank, model)).start()
    assert device.report().step.macs == 2 * 2 * 8 * 4


def start_rank(rank: int, size: int, ran: list[int]) -> None:
    dist.init_process_group("nccl", rank=rank, world_size=size)
    dist.all_reduce(torch.zeros(256, device="cuda"))
    ran.append(dist.get_world_size())


def test_of_ranks_that_a_program_starts_itself_the_first_runs_and_is_metered():
    ran: list[int] = []
    with flopmeter.cuda(A100, gpus=4) as device:
        ranks = [mp.Process(target=start_rank, args=(rank, 4, ran)) for rank in range(4)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
            assert (rank.exitcode, rank.is_alive()) == (0, False)
    assert ran == [4]
    assert [kernel.cost.collective.kind for kernel in device.report().step.kernels if kernel.cost.collective] == [
        "all_reduce"
    ]
