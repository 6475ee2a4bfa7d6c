"""Programs of several ranks under `flopmeter run`: how their batches reach the GPU, which mesh they get, what starts
them."""

from __future__ import annotations

import copy
import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as TableShard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import flopmeter
from flopmeter.records.work import HostCopy

A100 = "a100-sxm4-80gb"


def test_ddp_takes_the_device_without_an_index():
    with flopmeter.cuda("a100-sxm4-80gb"):
        dist.init_process_group("nccl", rank=0, world_size=1, init_method="tcp://localhost:1")
        model = DistributedDataParallel(nn.Linear(8, 4).cuda(), device_ids=[torch.device("cuda")])
        assert model.device_ids == [0]


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


def test_a_mesh_says_that_it_is_of_gpus():
    """Programs make tensors on the device that their mesh names."""
    with flopmeter.cuda(A100, gpus=4) as device:
        mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("outer", "inner"))
        assert (mesh.device_type, mesh["inner"].device_type) == ("cuda", "cuda")
        assert init_device_mesh("cpu", (4,)).device_type == "cpu"
        model = fully_shard(nn.Linear(8, 4, bias=False, device=mesh.device_type), mesh=mesh)
        model(torch.zeros(2, 8, device=mesh.device_type))
        sharded = distribute_tensor(torch.zeros(4, 4), mesh["inner"], [Shard(0)])
        assert sharded.device == torch.device("cuda", 0)
        assert sharded.to_local().shape == (2, 4)
    kinds = [kernel.cost.collective.kind for kernel in device.report().step.kernels if kernel.cost.collective]
    assert kinds == ["all_gather"]


def test_a_copy_of_a_sharded_tensor_is_sharded():
    """It has no address on a GPU, as on the CPU, by which torch knows to clone it."""
    with flopmeter.cuda(A100, gpus=4) as device:
        mesh = init_device_mesh("cuda", (4,))
        sharded = distribute_tensor(torch.zeros(8, 4), mesh, [Shard(0)])
        copied = copy.deepcopy({"kept": sharded})["kept"]
        assert (sharded.data_ptr(), copied.placements) == (0, (Shard(0),))
        assert copied.to_local().data_ptr() != sharded.to_local().data_ptr()
    copies = [kernel for kernel in device.report().step.kernels if kernel.op.call.name == "clone"]
    assert [kernel.cost.bytes_written for kernel in copies] == [2 * 4 * 4]


@pytest.mark.parametrize(("every", "is_told"), [(1, False), (2, True)])
def test_ranks_that_exchange_nothing_in_the_step_are_told_of(every: int, is_told: bool):
    """Local SGD: parameters are averaged once every so many steps."""
    with flopmeter.cuda(A100, gpus=4, steps=3) as device:
        dist.init_process_group("nccl")
        model = nn.Linear(8, 4, bias=False).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(1, 5):
            model(torch.zeros(2, 8, device="cuda")).sum().backward()
            if step % every == 0:
                dist.all_reduce(model.weight.data)
            optimizer.step()
    assert any("4 ranks exchange nothing" in note for note in device.report().step.notes) is is_told


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


def start_with(rank: int, path: str, ran: list[int]) -> None:
    torch.zeros(1, device="cuda")
    ran.append(rank)


def test_a_process_is_a_rank_where_a_parameter_says_so_also_the_only_one():
    for gpus in (1, 2):
        ran: list[int] = []
        with flopmeter.cuda(A100, gpus=gpus):
            for rank in range(gpus):
                mp.get_context("spawn").Process(target=start_with, args=(rank, "config.yaml", ran)).start()
        assert ran == [0]


def test_fsdp2_brings_a_model_that_was_made_on_the_cpu_to_the_gpu():
    with flopmeter.cuda(A100, gpus=4) as device:
        dist.init_process_group("nccl")
        model = nn.Linear(1024, 1024, bias=False)
        weight = model.weight
        fully_shard(model)
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        assert weight is not model.weight
        assert model.weight.device.type == "cuda"
    moved = [each for kernel in device.report().step.kernels if (each := kernel.cost.collective)]
    assert [(each.kind, each.nbytes) for each in moved] == [("all_gather", 4 << 20), ("reduce_scatter", 4 << 20)]


def test_a_model_on_meta_that_fsdp2_shards_takes_its_shard_alone():
    """By hand: a rank holds an eighth of two weights of 4 MiB; what was on meta is gone, or never was."""
    with flopmeter.cuda(A100, gpus=8, steps=2) as device:
        dist.init_process_group("nccl")
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
        for layer in (*model, model):
            fully_shard(layer)
        assert torch.cuda.max_memory_allocated() == 0
        model.to_empty(device="cuda")
        assert torch.cuda.max_memory_allocated() == 2 * (4 << 20) // 8
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            model(torch.randn(8, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert device.report().step.memory.at_peak["inputs"] < 4 << 20


@pytest.mark.parametrize("shards", ["fsdp", "tensor parallel", "by hand"])
def test_a_sharded_weight_of_a_model_on_meta_tells_meta_until_it_is_on_the_gpu(shards):
    """As torch does, by which trainers (Lightning's) know what they have to materialize."""
    with flopmeter.cuda(A100, gpus=2):
        mesh = init_device_mesh("cuda", (2,))
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(64, 64))
        if shards == "fsdp":
            fully_shard(model, mesh=mesh)
        elif shards == "tensor parallel":
            parallelize_module(model, mesh, {"0": ColwiseParallel()})
        else:
            model[0].weight = nn.Parameter(distribute_tensor(model[0].weight, mesh, [Shard(0)]))
        weight = model[0].weight
        assert (weight.is_meta, weight.is_cuda, weight.device.type) == (True, False, "meta")
        model.to_empty(device="cuda")
        weight = model[0].weight
        assert (weight.is_meta, weight.is_cuda, weight.device.type) == (False, True, "cuda")
        nn.init.trunc_normal_(weight)


def test_parameters_that_fsdp2_offloads_cross_the_hosts_link_in_every_pass():
    """By hand: a rank holds a quarter of the weight in fp32. It is copied to the GPU before both passes, and its
    gradient back; the optimizer steps on the CPU, in place: it reads weight and gradient, and writes the weight."""
    with flopmeter.cuda(A100, gpus=4, steps=3) as device:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(1024, 1024, bias=False))
        for layer in (model[0], model):
            fully_shard(layer, offload_policy=CPUOffloadPolicy())
        model.to_empty(device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        while True:
            model(torch.randn(8, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    step, shard = device.report().step, 1024 * 1024 * 4 // 4
    copies = [kernel.cost.work.link_bytes for kernel in step.kernels if isinstance(kernel.cost.work, HostCopy)]
    assert copies == [shard] * 3
    (note,) = [note for note in step.notes if note.startswith("the program computes on the CPU too")]
    assert "reads and writes 0.00315 GB, most of it in add_" in note
    assert 3 * shard == 3_145_728


def collective_ranks(step: flopmeter.Report) -> list[tuple[int, int | None]]:
    return [
        (len(each.ranks), each.gpus_per_node) for kernel in step.kernels if (each := kernel.cost.collective) is not None
    ]


def test_a_world_of_the_scripts_own_numbers_has_the_clusters_nodes():
    """A script that slurm starts names rank and size itself; 16 GPUs are two nodes and not 16."""
    with flopmeter.cuda(A100) as device:
        dist.init_process_group("nccl", rank=0, world_size=16)
        dist.all_reduce(torch.zeros(256, device="cuda"))
    step = device.report().step
    assert collective_ranks(step) == [(16, None)]
    assert not [note for note in step.notes if "launcher" in note]


def test_more_gpus_than_a_node_has_are_several_nodes_of_the_devices_cluster():
    """16 A100 are two DGX of eight, as torchrun would start them: ranks 0 to 7 are on the first."""
    with flopmeter.cuda(A100, gpus=16) as device:
        dist.init_process_group("nccl")
        assert (os.environ["LOCAL_WORLD_SIZE"], os.environ["GROUP_WORLD_SIZE"]) == ("8", "2")
        dist.all_reduce(torch.zeros(1_000_000, device="cuda"))
    assert collective_ranks(device.report().step) == [(16, 8)]


def test_a_process_group_without_a_launcher_has_one_gpu_and_a_note_says_so():
    with flopmeter.cuda(A100) as device:
        dist.init_process_group("nccl")
        dist.all_reduce(torch.zeros(256, device="cuda"))
    step = device.report().step
    assert [ranks for ranks, _ in collective_ranks(step)] == [1]
    (note,) = [note for note in step.notes if "launcher" in note]
    assert "--gpus 8" in note


def test_a_rank_reads_in_the_store_what_it_put_there_and_no_other_rank_answers():
    with flopmeter.cuda(A100, gpus=4):
        dist.init_process_group("nccl")
        store = dist.distributed_c10d._get_default_store()
        store.set("port", "1234")
        store.add("here", 1)
        assert store.get("port") == b"1234"
        assert store.add("here", 2) == 3
        with pytest.raises(dist.DistStoreError, match="timeout"):
            store.get("theirs")


def test_no_rank_is_waited_for_where_torch_is_told_to_wait_after_each_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_DIST_INIT_BARRIER", "1")
    with flopmeter.cuda(A100, gpus=4):
        dist.init_process_group("nccl", timeout=timedelta(seconds=3))  # torch would wait as long
        assert dist.new_group([0, 1], timeout=timedelta(seconds=3)).size() == 2


def test_a_group_tells_the_backend_that_was_asked_for():
    """As torch does: programs save checkpoints beside the training only where a backend takes tensors on the host."""
    with flopmeter.cuda(A100, gpus=4):
        dist.init_process_group("cpu:gloo,cuda:nccl")
        assert dist.get_backend() == dist.get_backend(dist.new_group()) == "cpu:gloo,cuda:nccl"
        assert dist.get_backend(dist.new_group([0, 1], backend="gloo")) == "gloo"
    with flopmeter.cuda(A100, gpus=4):
        dist.init_process_group()
        assert dist.get_backend() == dist.get_backend(dist.new_group()) == "nccl"


def product(rank: int, width: int) -> None:
    x = torch.zeros(width, width, device="cuda")
    x @ x


@pytest.mark.parametrize("start", ["spawn", "start_processes"])
@pytest.mark.parametrize("join", [True, False])
def test_of_the_ranks_that_torch_starts_rank_0_runs_here(start, join):
    with flopmeter.cuda(A100, gpus=2) as device:
        started = getattr(mp, start)(product, (8,), 2, join)
        assert (started is None) == join
        assert join or started.join()
    assert device.report().step.macs == 8**3


def test_a_shard_of_torchs_sharded_tensor_is_on_the_gpu_that_its_plan_names():
    """torchrec's tables are such shards."""
    with flopmeter.cuda(A100, gpus=2):
        plan = ShardMetadata(shard_offsets=[0, 0], shard_sizes=[4, 8], placement="rank:0/cuda:0")
        assert TableShard(torch.zeros(4, 8, device="cuda"), plan).tensor.device == plan.placement.device()
