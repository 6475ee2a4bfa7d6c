"""torch.compile of programs whose graphs hold collectives: they go through torch's compiler, collectives and all."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, randn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import flopmeter
from flopmeter.distributed import world

RANKS, ROWS, WIDTH, BF16 = 4, 256, 512, 2


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


def steady_step() -> flopmeter.Report:
    """Sequence parallelism around two products, compiled."""
    with flopmeter.cuda("h100-sxm5-80gb", gpus=RANKS, steps=3) as device:
        mesh = init_device_mesh("cuda", (RANKS,))
        model = Mlp().cuda().bfloat16()
        parallelize_module(
            model,
            mesh,
            {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))},
        )
        compiled, optimizer = torch.compile(model), torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            x = torch.randn(ROWS // RANKS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            compiled(x).sum().backward()
            optimizer.step()
    return device.report().step


@pytest.fixture(scope="module")
def step() -> flopmeter.Report:
    return steady_step()


def test_a_tensor_parallel_layer_goes_through_torchs_compiler(step: flopmeter.Report) -> None:
    assert not [note for note in step.notes if note.startswith("not compiled")]
    assert [note for note in step.notes if note.startswith("compiled: graphs, kernels")]


def test_its_graphs_gather_and_scatter_what_the_layer_does(step: flopmeter.Report) -> None:
    """Forward gathers the rows for the first product and scatters the sums of the second one. Backward gathers their
    gradient, gathers the rows again for the weight's gradient unless they were kept, and scatters that of the rows."""
    found = Counter((each.kind, each.nbytes) for kernel in step.kernels if (each := kernel.cost.collective))
    whole = ROWS * WIDTH * BF16
    assert found["reduce_scatter", whole] == 2
    assert found["all_gather", whole] in (2, 3)
    assert sum(found.values()) == found["reduce_scatter", whole] + found["all_gather", whole]
    assert step.macs == 3 * 2 * ROWS * WIDTH * 4 * WIDTH // RANKS


def test_async_tensor_parallelism_of_a_graph_counts_every_product_and_says_that_none_overlaps(
    step: flopmeter.Report,
) -> None:
    with config.patch(_micro_pipeline_tp=True):
        pipelined = steady_step()
    assert (pipelined.macs, pipelined.bytes_read) == (step.macs, step.bytes_read)
    assert [note for note in pipelined.notes if note.startswith("_micro_pipeline_tp:")]


def test_scheduling_that_would_time_products_leaves_collectives_where_they_are_and_says_so(
    step: flopmeter.Report,
) -> None:
    """Before, its graphs ran eagerly, with a note of a ZeroDivisionError: it also counts the GPUs of this machine."""
    setting = "aten_distributed_optimizations.enable_overlap_scheduling"
    with config.patch({setting: True}):
        scheduled = steady_step()
    assert (scheduled.macs, scheduled.bytes_read) == (step.macs, step.bytes_read)
    assert not [note for note in scheduled.notes if note.startswith("not compiled")]
    assert [note for note in scheduled.notes if note.startswith(f"{setting}:")]


BLOCKS = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.up, self.gate = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def test_torchtitans_pattern_has_the_products_and_the_collectives_counted_by_hand():
    """Each block is checkpointed and compiled, FSDP2 around each and around all. Recomputed are the products that
    backward needs, which the last of a block is not."""
    with flopmeter.cuda("h100-sxm5-80gb", gpus=8, steps=3) as device:
        dist.init_process_group("nccl")
        with torch.device("meta"):
            model = nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, WIDTH, bias=False))
        for place in range(BLOCKS):
            checkpointed = checkpoint_wrapper(model[place], preserve_rng_state=False)
            model[place] = fully_shard(torch.compile(checkpointed, fullgraph=True))
        fully_shard(model).to_empty(device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        while True:
            model(torch.randn(ROWS, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    step = device.report().step
    product, head = ROWS * WIDTH * 4 * WIDTH, ROWS * WIDTH * WIDTH
    of_block = 3 + 2 * 3 + 2  # forward, backward, recomputed
    assert step.macs == BLOCKS * of_block * product + 3 * head
    kinds = [kernel.cost.collective.kind for kernel in step.kernels if kernel.cost.collective]
    assert kinds.count("all_gather") == 2 * BLOCKS + 1
    assert kinds.count("reduce_scatter") == BLOCKS + 1
    assert not [note for note in step.notes if note.startswith("not compiled")]


def test_random_numbers_of_dtensor_break_a_compiled_function_where_torch_breaks_it_and_nowhere_else():
    """Before torch 2.15 it breaks where the numbers become a DTensor, with torch 2.11 also where DTensor asks whether a
    size is_nested_int; nothing of flopmeter's own may be a reason."""
    torch._dynamo.reset()
    counters["graph_break"].clear()
    with flopmeter.cuda("h100-sxm5-80gb", gpus=2, steps=3):
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (2,))
        made = torch.compile(lambda: randn(8, 8, device_mesh=mesh, placements=[Replicate()]).to_local() * 2)
        for _ in range(3):
            nn.Linear(8, 8, device="cuda")(made())
        reasons = list(counters["graph_break"])
    of_torch = ("proxy", "`is_nested_int`")
    assert [reason for reason in reasons if not any(part in reason for part in of_torch)] == []


def test_a_class_of_ops_that_take_no_time_is_bound_by_nothing():
    """DDP of one GPU: its collectives are there, and none runs."""
    with flopmeter.cuda("h100-sxm5-80gb", gpus=1) as device:
        dist.init_process_group("nccl")
        model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda())
        model(torch.zeros(8, 64, device="cuda")).sum().backward()
    (line,) = (line for line in str(device.report().step).splitlines() if line.startswith("communication"))
    assert line.split()[-1] == "–"


N = 64


def after_a_sum(x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
    return functional.all_reduce(x @ w, "sum", group) @ w


def after_a_sum_in_place(x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
    product = x @ w
    dist.all_reduce(product, group=group)
    return product @ w


def after_two_sums_at_once(x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
    one, other = functional.all_reduce_coalesced([x @ w, w @ x], "sum", group)
    return one @ other


def after_a_broadcast(x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
    return functional.broadcast(x @ w, 0, group) @ w


def after_a_sum_with_a_bias(x: Tensor, w: Tensor, group: dist.ProcessGroup) -> Tensor:
    return functional.all_reduce(torch.addmm(x, x, w), "sum", group).relu() @ w


@pytest.mark.parametrize(
    ("program", "products", "kind", "nbytes"),
    [
        (after_a_sum, 2, "all_reduce", 4 * N**2),
        (after_a_sum_in_place, 2, "all_reduce", 4 * N**2),
        (after_two_sums_at_once, 3, "all_reduce", 2 * 4 * N**2),
        (after_a_broadcast, 2, "broadcast", 4 * N**2),
        (after_a_sum_with_a_bias, 2, "all_reduce", 4 * N**2),
    ],
)
def test_a_product_whose_result_a_collective_takes_is_not_lost(program, products, kind, nbytes) -> None:
    x, w = torch.empty(2, N, N, device="meta")
    with world(2) as mesh, flopmeter.FlopMeter("h100-sxm5-80gb") as meter:
        torch.compile(program)(x, w, mesh.get_group())
    report = meter.report()
    found = [(each.kind, each.nbytes) for kernel in report.kernels if (each := kernel.cost.collective)]
    assert (report.macs, found) == (products * N**3, [(kind, nbytes)])


def test_a_compiled_layer_that_sums_over_ranks_has_the_products_of_an_eager_one() -> None:
    def step(*, is_compiled: bool) -> flopmeter.Report:
        with world(RANKS) as mesh:
            with torch.device("meta"):
                model, x = Mlp(), torch.empty(ROWS, WIDTH, requires_grad=True)
            parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
            if is_compiled:
                model.compile()
            with flopmeter.FlopMeter("h100-sxm5-80gb") as meter:
                model(x).sum().backward()
        return meter.report()

    eager, compiled = step(is_compiled=False), step(is_compiled=True)
    assert compiled.macs == eager.macs == 3 * 2 * ROWS * WIDTH * 4 * WIDTH // RANKS
    for report in (eager, compiled):
        kinds = [each.kind for kernel in report.kernels if (each := kernel.cost.collective)]
        assert kinds == ["all_reduce", "all_reduce"]  # of the result, and of the gradient of x


def test_inductors_buckets_are_one_collective_each() -> None:
    """Three sums that do not depend on each other; torch's buckets put them together."""

    def sums(x: Tensor, w: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        made = (x @ w, w @ x, w @ w)
        return [functional.all_reduce(each, "sum", group) @ x for each in made]

    x, w = torch.empty(2, N, N, device="meta")
    with world(2) as mesh, config.patch(bucket_all_reduces_fx="all"), flopmeter.FlopMeter("h100-sxm5-80gb") as meter:
        torch.compile(sums)(x, w, mesh.get_group())
    report = meter.report()
    found = [(each.kind, each.nbytes) for kernel in report.kernels if (each := kernel.cost.collective)]
    assert (report.macs, found) == (6 * N**3, [("all_reduce", 3 * 4 * N**2)])
