"""Memory in a plan: against hand arithmetic, and torch's own schedules and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from flopmeter import ParallelPlan, Split, plan, time_pipeline
from flopmeter.ask.plan.blocks import Blocks
from flopmeter.ask.plan.compose import SplitWork
from flopmeter.ask.plan.layers import LayerCosts, PartCost, PassCost, meter_layers
from flopmeter.ask.plan.memory import RankMemory, memory_of
from flopmeter.ask.plan.optimizer_costs import OptimizerCost, OptimizerCosts
from flopmeter.ask.plan.program import Where
from flopmeter.ask.plan.subject import subject_of
from flopmeter.device.cluster import load_cluster
from flopmeter.device.hardware import load_hardware
from flopmeter.models.layers import next_token_loss
from flopmeter.models.llama import Llama, LlamaConfig, rotary_table

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, HIDDEN, LENGTH = 2048, 5632, 1024
CONFIG = LlamaConfig(layers=3, width=WIDTH, heads=16, kv_heads=16, hidden=HIDDEN, vocabulary=32000)
PLAIN = Split(dp=1, fsdp=1, tp=1, cp=1, pp=1, ep=1, microbatch=1, recompute="full", schedule="none")


DEEP = replace(CONFIG, layers=8)
H100, DGX = load_hardware("h100-sxm5-80gb"), load_cluster("dgx-h100")
NUMEL = 100_000_000
NOTHING = PartCost(PassCost(), PassCost(), 0)
NO_STEP = OptimizerCost(0.0, 0.0, 0.0, 0.0)
GRADIENT = Blocks((2 * NUMEL,), (), (0,), frozenset({0}))
BY_HAND = LayerCosts({0: PartCost(PassCost(1.0), PassCost(2.0), NUMEL, GRADIENT)}, NOTHING, NOTHING, 0, NO_STEP, (), ())


def costs(split: Split, build: object = CONFIG, mode: Any = "eager") -> LayerCosts:
    return meter_layers(subject_of(build), OptimizerCosts(Where(LENGTH, H100, DGX, mode, {})), split.shape)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_layer_that_is_computed_again_keeps_its_input_alone(ranks: int) -> None:
    """In bf16, and with sequence parallelism the part of one rank."""
    found = costs(replace(PLAIN, tp=ranks))
    (layer,) = found.layers.values()
    assert layer.activation_bytes == 2 * LENGTH * WIDTH // ranks
    assert found.before.activation_bytes < layer.activation_bytes  # its output is the first layer's input


class Float8Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Float8Product.apply(x.flatten(0, 1), self.weight).unflatten(0, x.shape[:2])  # type: ignore[no-any-return, no-untyped-call]


class Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor, weight: Tensor) -> Tensor:
        one = torch.ones((), dtype=torch.float32, device=x.device)
        a, b = (each.to(torch.float8_e4m3fn) for each in (x, weight))
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient.new_empty(LENGTH, WIDTH), gradient.new_empty(WIDTH, WIDTH)


def in_float8() -> nn.Module:
    """The four products of attention in fp8; the other three as they were."""
    with torch.device("meta"):
        model = Llama(CONFIG)
    for block in model.blocks:
        for name in ("query", "key", "value", "out"):
            getattr(block.attention, name).__class__ = Float8Linear
    return model


def test_selective_recomputation_keeps_every_second_product_in_fp8_as_in_bf16() -> None:
    plain, float8 = (
        costs(replace(PLAIN, recompute="selective"), build).layers.values() for build in (CONFIG, in_float8)
    )
    assert next(iter(float8)).activation_bytes == next(iter(plain)).activation_bytes


def test_what_one_kernel_makes_and_reads_takes_no_memory() -> None:
    """Compiled, a norm and an activation leave their results alone."""
    eager, compiled = (costs(replace(PLAIN, recompute="none"), mode=mode) for mode in ("eager", "compiled"))
    of_eager, of_compiled = (sum(next(iter(each.layers.values())).blocks.nbytes) for each in (eager, compiled))
    assert of_compiled < 0.8 * of_eager
    products = 2 * LENGTH * (4 * WIDTH + 2 * HIDDEN + WIDTH)  # each product's output is there in both
    assert of_compiled > products


def stage_program(chunks: int, ranks: int) -> Callable[[Any], Callable[[], object]]:
    """Torch's own stages and schedules, FSDP2 and AdamW."""

    def program(mesh: Any) -> Callable[[], object]:
        rank = mesh.get_local_rank("pp")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        stages = []
        for number in range(rank, ranks * chunks, ranks):
            with torch.device("meta"):
                module = StageOfLlama(Llama(DEEP), number, ranks * chunks)
            for each in (*module.blocks, module):
                fully_shard(each, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)
            stages.append(
                PipelineStage(module, number, ranks * chunks, torch.device("meta"), group=mesh.get_group("pp"))
            )
        tokens = torch.empty(8, LENGTH, dtype=torch.long, device="meta")
        kind: Any = Schedule1F1B if chunks == 1 else ScheduleInterleaved1F1B
        schedule = kind(stages[0] if chunks == 1 else stages, 8, loss_fn=next_token_loss)
        optimizer = torch.optim.AdamW([each for stage in stages for each in stage.submod.parameters()])

        def step() -> None:
            optimizer.zero_grad()
            inputs = [tokens] if rank == 0 else []
            schedule.step(*inputs, target=tokens if rank == ranks - 1 else None, return_outputs=False)
            optimizer.step()

        return step

    return program


class StageOfLlama(nn.Module):
    def __init__(self, whole: Llama, stage: int, stages: int) -> None:
        super().__init__()
        each = len(whole.blocks) // stages
        self.config, self.blocks = whole.config, whole.blocks[stage * each : (stage + 1) * each]
        self.token = whole.token if stage == 0 else nn.Identity()
        self.head = nn.Sequential(whole.norm, whole.head) if stage == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.token(x)
        cos, sin = rotary_table(x.shape[1], self.config.head_width, self.config.rotary_base, like=x)
        for block in self.blocks:
            x = block(x, cos, sin)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("chunks", [1, 2])
def test_each_rank_of_a_pipeline_takes_what_torchs_own_schedule_takes(
    chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    schedule: Any = "1f1b" if chunks == 1 else "interleaved"
    split = replace(PLAIN, pp=2, fsdp=2, recompute="none", schedule=schedule, chunks=chunks, gather="step")
    of_layers = costs(split, DEEP)
    step = SplitWork(split, [0] * DEEP.layers, of_layers, 2 * 8, H100, DGX)
    run = time_pipeline(stage_program(chunks, 2), {"pp": 2, "dp": 2}, H100)
    for rank, report in enumerate(run.reports.values()):
        use = RankMemory(step, rank).step()
        assert use.peak_bytes == pytest.approx(report.memory.steady_peak_bytes, rel=0.05)
        assert use.reserved_bytes == pytest.approx(report.memory.steady_reserved_bytes, rel=0.05)


def test_chunks_that_are_done_give_their_gradients_back() -> None:
    """With eight microbatches of eight ranks, all of the second chunk go back before any of the first: its gradients in
    fp32 and its whole parameters in bf16 are gone when those of the first come, and its shards are there. A chunk has
    four layers."""
    once, twice = (
        memory_of(SplitWork(replace(PLAIN, pp=8, fsdp=2, gather="step", **kind), [0] * 64, BY_HAND, 16, H100, DGX))
        for kind in ({"schedule": "1f1b"}, {"schedule": "interleaved", "chunks": 2})
    )
    assert once.peak_bytes - twice.peak_bytes == 4 * (4 + 2) * NUMEL - 4 * 4 * NUMEL // 2


def test_a_split_fits_by_what_the_allocator_reserves() -> None:
    """It can give back what no piece is in use of, and does before it fails."""

    def planned(memory: float) -> ParallelPlan:
        return plan(CONFIG, 8, memory=memory, length=LENGTH, only={"tp": 1, "cp": 1, "pp": 1}, rows=1)

    with_room = planned(80e9)
    (roomy,) = with_room.rows
    assert roomy.fits
    assert "so much room is not left" not in str(with_room)
    assert roomy.peak_memory_bytes < roomy.reserved_memory_bytes
    assert "so much room is not left in 1 of these splits" in str(planned(1.05 * roomy.reserved_memory_bytes))
    tight = planned(1.001 * roomy.peak_memory_bytes)
    assert all(row.split != roomy.split or "gives unused segments back" in str(tight) for row in tight.rows)
    assert all(row.peak_memory_bytes <= 1.001 * roomy.peak_memory_bytes for row in tight.rows if row.fits)
