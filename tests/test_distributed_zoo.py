"""What programs for CUDA and NCCL ask of torch.distributed: each runs in a world, or ends in one error that helps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from flopmeter import FlopMeter
from flopmeter.distributed import WorldError, world

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, FP32 = 256, 4
NUMEL = 2 * (WIDTH * WIDTH + WIDTH)


def layers() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def x() -> torch.Tensor:
    return torch.empty(32, WIDTH, device="meta")


def sent(program: Callable[[DeviceMesh], Callable[[], object]], steps: int = 1) -> dict[str, int]:
    """The bytes of each sort of collective in a step after the first ones."""
    with world(4, {"dp": 4}) as mesh:
        step = program(mesh)
        for _ in range(steps):
            step()
        with FlopMeter("h100-sxm5-80gb") as meter:
            step()
        rows = meter.report().rows("op")
    return {row.name: row.bytes_written for row in rows if row.name.startswith("c10d::")}


def ddp(hook: Callable[..., object] | None = None, state: object = None, **options: object) -> Callable[..., object]:
    def program(mesh: DeviceMesh) -> Callable[[], object]:
        model = DistributedDataParallel(layers(), **options)
        if hook is not None:
            model.register_comm_hook(state, hook)
        return lambda: model(x()).sum().backward()

    return program


def test_ddp_with_device_ids_sends_every_gradient():
    assert sent(ddp(device_ids=[0], output_device=0), steps=2)["c10d::allreduce_"] == NUMEL * FP32


def test_the_bf16_hook_sends_half_of_the_bytes():
    assert sent(ddp(default_hooks.bf16_compress_hook), steps=2)["c10d::allreduce_"] == NUMEL * FP32 // 2


def test_powersgd_sends_little():
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    assert 0 < sent(ddp(powerSGD_hook.powerSGD_hook, state), steps=4)["c10d::allreduce_"] < NUMEL * FP32 / 10


def test_a_sharded_optimizer_broadcasts_what_it_stepped():
    def program(mesh: DeviceMesh) -> Callable[[], object]:
        model = DistributedDataParallel(layers())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-3)

        def step() -> None:
            model(x()).sum().backward()
            optimizer.step()

        return step

    assert sent(program, steps=2)["c10d::broadcast_"] >= NUMEL * FP32


def test_a_group_of_nccl_is_one_of_the_world():
    def program(mesh: DeviceMesh) -> Callable[[], object]:
        group = dist.new_group([0, 1], backend="nccl")
        return lambda: dist.all_reduce(x(), group=group)

    assert sent(program) == {"c10d::allreduce_": 32 * WIDTH * FP32}


def test_a_program_that_opens_the_process_group_goes_on_in_the_world():
    def program(mesh: DeviceMesh) -> Callable[[], object]:
        dist.init_process_group("nccl", world_size=4, rank=0)
        dist.init_process_group("nccl", world_size=4)
        dist.init_process_group("nccl", rank=0)
        return lambda: dist.all_reduce(x())

    assert sent(program) == {"c10d::allreduce_": 32 * WIDTH * FP32}
    with world(4), pytest.raises(WorldError, match="asks for rank 0 of 8, but the world that is open is rank 0 of 4"):
        dist.init_process_group("nccl", world_size=8, rank=0)


@pytest.mark.parametrize("affine", [True, False])
def test_sync_batch_norm_gathers_two_numbers_a_channel_and_a_count_and_sums_two_backward(affine: bool):
    """torch's own docs: mean, 1/deviation and count of each rank; two sums of gradients."""

    def program(mesh: DeviceMesh) -> Callable[[], object]:
        norm = nn.SyncBatchNorm(8, affine=affine, device="meta")
        return lambda: norm(torch.empty(4, 8, 16, 16, device="meta", requires_grad=True)).sum().backward()

    assert sent(program) == {"c10d::_allgather_base_": 4 * (2 * 8 + 1) * FP32, "c10d::allreduce_": 2 * 8 * FP32}
    assert sent(program, steps=0) == sent(program)  # also where a meter is open from the start


def test_sync_batch_norm_in_evaluation_sends_nothing():
    assert (
        sent(lambda mesh: lambda: nn.SyncBatchNorm(8, device="meta").eval()(torch.empty(4, 8, 2, device="meta"))) == {}
    )


@pytest.mark.parametrize("strategy", ["NO_SHARD", "SHARD_GRAD_OP", "FULL_SHARD"])
def test_fsdp1_gathers_for_each_pass_for_one_or_never(strategy: str):
    """In the order of the strategies: parameters whole, whole from forward to backward, and of one layer at a time.
    Each linear layer is a flat parameter; the outermost has none."""

    def program(mesh: DeviceMesh) -> Callable[[], object]:
        model = FullyShardedDataParallel(
            layers(),
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            device_id=0,
            use_orig_params=True,
        )
        return lambda: model(x()).sum().backward()

    gathers = {"NO_SHARD": 0, "SHARD_GRAD_OP": 1, "FULL_SHARD": 2}[strategy]
    found = sent(program)
    assert found.get("c10d::_allgather_base_", 0) == gathers * NUMEL * FP32
    if gathers:
        assert found["c10d::_reduce_scatter_base_"] == NUMEL * FP32 // 4  # written: a shard
    else:
        assert found["c10d::allreduce_"] == NUMEL * FP32


def test_fsdp2_without_a_mesh_shards_over_the_world():
    def program(mesh: DeviceMesh) -> Callable[[], object]:
        model = layers()
        for layer in (*model, model):
            fully_shard(layer)
        return lambda: model(x()).sum().backward()

    assert sent(program)["c10d::_allgather_base_"] == 2 * NUMEL * FP32  # forward and backward


def test_fsdp1_moves_a_module_that_was_made_on_the_cpu_and_sends_it_to_all_ranks():
    def program(mesh: DeviceMesh) -> Callable[[], object]:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model = FullyShardedDataParallel(model, device_id=0, sync_module_states=True)
        assert all(parameter.is_meta for parameter in model.parameters())
        with FullyShardedDataParallel.state_dict_type(
            model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True)
        ):
            assert sum(weight.numel() for weight in model.state_dict().values()) == NUMEL
        return lambda: model(x()).sum().backward()

    assert sent(program)["c10d::_allgather_base_"] == NUMEL * FP32  # the outermost stays whole until the backward pass


@pytest.mark.parametrize(("placement", "shape"), [(Shard(0), (3, 7)), (Replicate(), (10, 7))])
def test_random_dtensors_have_the_shape_of_their_part(placement: Placement, shape: tuple[int, int]):
    with world(4) as mesh:
        made = torch.distributed.tensor.randn((10, 7), device_mesh=mesh, placements=[placement])
    assert made.to_local().shape == shape


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (lambda mesh: CPUOffloadPolicy(), "leave CPUOffloadPolicy out"),
        (lambda mesh: FullyShardedDataParallel(layers(), cpu_offload=CPUOffload(True)), "leave cpu_offload out"),
    ],
    ids=["FSDP2's CPU offload", "FSDP1's CPU offload"],
)
def test_what_cannot_run_is_one_error_that_says_what_to_do(program: Callable[..., object], message: str):
    with pytest.raises(WorldError, match=message):
        sent(program)
    assert CPUOffloadPolicy().pin_memory  # nothing is left behind


def test_worlds_in_a_row_have_equal_meshes_with_groups_of_their_own():
    """DTensor takes equal meshes for the same one. Groups of the second world have other names."""
    for mesh_of in ({"cp": 1, "tp": 4}, {"dp": 64, "tp": 4}, {"pp": 1, "dp": 64, "tp": 4}):
        with world(torch.Size(mesh_of.values()).numel(), mesh_of) as mesh, FlopMeter("h100-sxm5-80gb") as meter:
            with torch.device("meta"):
                model, tokens = nn.Sequential(nn.Embedding(64, WIDTH)), torch.empty(2, 8, dtype=torch.long)
            parallelize_module(
                model, mesh["tp"], {"0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))}
            )
            model(tokens).sum().backward()
        groups = {kernel.cost.collective.ranks for kernel in meter.report().kernels if kernel.cost.collective}
        assert groups == {(0, 1, 2, 3)}


def test_a_program_is_told_that_nccl_carries_its_messages():
    with world(4):
        assert dist.get_backend() == "nccl"
        assert torch.cuda.nccl.version()[0] == 2


def test_async_tensor_parallelism_multiplies_while_parts_are_sent():
    """By hand: 4 ranks, [512, 4096] on each, gathered for a product with [4096, 1024], whose rows are scattered after
    one with [1024, 4096]. All but this rank's quarter crosses the links, in 3 parts beside products of a quarter."""
    with world(4, {"tp": 4}) as mesh:
        group = mesh.get_group().group_name
        a, b, c = (
            torch.empty(s, device="meta", dtype=torch.bfloat16) for s in ((512, 4096), (4096, 1024), (1024, 4096))
        )
        with FlopMeter("h100-sxm5-80gb") as meter:
            whole, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, group)
            z = torch.ops.symm_mem.fused_matmul_reduce_scatter(y, c, "sum", 0, group)
    assert [tuple(each.shape) for each in (whole, y, z)] == [(2048, 4096), (2048, 1024), (512, 4096)]
    report = meter.report()
    assert report.macs == 2048 * 4096 * 1024 * 2
    assert not [note for note in report.notes if "uncounted" in note]
    moved = [each for kernel in report.kernels if (each := kernel.cost.collective)]
    assert [each.kind for each in moved] == ["all_gather"] * 3 + ["all_to_all"] * 3
    gathered, scattered = (sum(each.nbytes for each in part) for part in (moved[:3], moved[3:]))
    assert gathered == pytest.approx(2048 * 4096 * 2, rel=1e-3)
    assert scattered == pytest.approx(2048 * 4096 * 2, rel=1e-3)
    assert [kernel.cost.name for kernel in report.kernels].count("mm") == 8
    assert report.exposed_seconds < 0.95 * report.communication_seconds
    assert any("symmetric memory" in each for each in report.assumptions)


def test_async_tensor_parallelism_along_the_last_dimension_splits_depth_and_width():
    with world(2, {"tp": 2}) as mesh:
        group = mesh.get_group().group_name
        a, b = torch.empty(8, 16, 64, device="meta"), torch.empty(128, 32, device="meta")
        with FlopMeter("h100-sxm5-80gb") as meter:
            whole, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 2, group)
            z = torch.ops.symm_mem.fused_matmul_reduce_scatter(whole, b, "avg", 2, group)
    assert [tuple(each.shape) for each in (whole, y, z)] == [(8, 16, 128), (8, 16, 32), (8, 16, 16)]
    assert meter.report().macs == 2 * 8 * 16 * 128 * 32


def test_copies_of_shards_sum_each_gradient_after_its_scatter():
    """HSDP: two copies of a model that two ranks share, all in fp32. Each layer is gathered for both passes."""
    with world(4, {"copies": 2, "shards": 2}) as mesh:
        model = layers()
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        with FlopMeter("h100-sxm5-80gb") as meter:
            model(x()).sum().backward()
    collectives = [kernel.cost.collective for kernel in meter.report().kernels if kernel.cost.collective]
    layer = NUMEL // 2 * FP32
    scatter_and_sum = [("reduce_scatter", layer, (0, 1)), ("all_reduce", layer // 2, (0, 2))]
    assert [(each.kind, each.nbytes, each.ranks) for each in collectives] == [
        *[("all_gather", layer, (0, 1))] * 4, *scatter_and_sum, *scatter_and_sum,
    ]  # fmt: skip
