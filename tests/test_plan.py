"""Plans: against closed forms, torch's own meshes and schedules, and programs that are metered whole."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from gloo import printed_by_ranks
from pipeline_programs import scheduled
from torch import nn
from torch.distributed.pipelining import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from flopmeter import PlanError, Split, plan
from flopmeter.ask.plan.blocks import Blocks
from flopmeter.ask.plan.compose import Bound, SplitWork, compose, layers_by_stage
from flopmeter.ask.plan.layers import LayerCosts, PartCost, PassCost, meter_layers
from flopmeter.ask.plan.memory import RankMemory, memory_of
from flopmeter.ask.plan.optimizer_costs import OptimizerCost, OptimizerCosts
from flopmeter.ask.plan.picture import split_bars
from flopmeter.ask.plan.program import Where
from flopmeter.ask.plan.schedules import most_in_flight, order_of
from flopmeter.ask.plan.splits import Bounds, Shape, splits
from flopmeter.ask.plan.subject import subject_of
from flopmeter.ask.plan.whole import meter_whole
from flopmeter.cli import main
from flopmeter.device.cluster import Cluster, Link, load_cluster
from flopmeter.device.hardware import load_hardware
from flopmeter.distributed import world
from flopmeter.distributed.ranks import run_ranks
from flopmeter.models.llama import Llama, LlamaConfig
from flopmeter.report.plots import PlotError

pytestmark = pytest.mark.filterwarnings("ignore")
H100 = load_hardware("h100-sxm5-80gb")
DGX = load_cluster("dgx-h100")
FREE_LINK = Link(name="free", transport="nvlink", bandwidth_gb_per_s=1e5, achieved=1.0, source="none")
FREE = Cluster(name="free", title="free links", gpus_per_node=64, start_us=0.0, intra=FREE_LINK)
SMALL = LlamaConfig(layers=3, width=2048, heads=16, kv_heads=8, hidden=5632, vocabulary=32000)
PLAIN = Split(dp=1, fsdp=1, tp=1, cp=1, pp=1, ep=1, microbatch=1, recompute="none", schedule="none")
NO_STEP = OptimizerCost(0.0, 0.0, 0.0, 0.0)
ONE_GPU = {"tp": 1, "cp": 1, "pp": 1}


def pass_of(seconds: float) -> PassCost:
    return PassCost(compute_seconds=seconds, model_flops=1)


def costs_by_hand(forward: float, backward: float, parameters: int = 0, activations: int = 0) -> LayerCosts:
    """Layers alike, and nothing outside of them."""
    nothing = PartCost(PassCost(), PassCost(), 0)
    kept = Blocks((activations, 2 * parameters), (0,), (~0, 1), gradients=frozenset({1}))
    layer = PartCost(pass_of(forward), pass_of(backward), parameters, kept)
    return LayerCosts({0: layer}, nothing, nothing, 0, NO_STEP, (), ())


def work(split: Split, costs: LayerCosts, layers: int, microbatches: int, cluster: Cluster = FREE) -> SplitWork:
    return SplitWork(split, [0] * layers, costs, microbatches * split.replicas * split.microbatch, H100, cluster)


# --- closed forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8), (4, 40), (8, 16)])
def test_a_pipeline_takes_as_long_as_its_microbatches_and_the_stages_before(ranks: int, microbatches: int):
    """(m + p - 1) passes of a stage: GPipe and Megatron-LM (arXiv 1811.06965, 2104.04473). Forty are extrapolated."""
    step = compose(
        work(replace(PLAIN, pp=ranks, schedule="1f1b", gather="step"), costs_by_hand(1.0, 2.0), ranks, microbatches)
    )
    assert step.seconds == pytest.approx(3.0 * (microbatches + ranks - 1), rel=1e-3)
    assert step.seconds_by_bound["bubble"] == pytest.approx(3.0 * (ranks - 1), rel=1e-2)


@pytest.mark.parametrize("chunks", [2, 4])
def test_stages_of_several_chunks_make_the_bubble_so_much_smaller(chunks: int):
    """Megatron-LM, arXiv 2104.04473, section 2.2: (p - 1) / v passes of a whole rank."""
    split = replace(PLAIN, pp=4, schedule="interleaved", chunks=chunks, gather="step")
    step = compose(work(split, costs_by_hand(1.0, 2.0), 4 * chunks, 8))
    assert step.seconds == pytest.approx(3.0 * chunks * (8 + 3 / chunks), rel=1e-3)


def deferred(costs: LayerCosts, weights: float, held: int = 0) -> LayerCosts:
    """Of each layer's backward pass so long for gradients of weights."""
    return costs._replace(layers={0: costs.layers[0]._replace(weights=pass_of(weights), held_bytes=held)})


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (4, 40), (8, 16)])
def test_gradients_of_weights_fill_the_bubble(ranks: int, microbatches: int):
    """ZB-H1, arXiv 2401.10241, table 2: (p - 1) (F + B - W) in place of (p - 1) (F + B + W), with F = B = W = 1."""
    split = replace(PLAIN, pp=ranks, schedule="zero-bubble", gather="step")
    step = compose(work(split, deferred(costs_by_hand(1.0, 2.0), 1.0), ranks, microbatches))
    assert step.seconds == pytest.approx(3.0 * microbatches + ranks - 1, rel=1e-3)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("weights", [0.0, 0.4, 1.0])
def test_a_zero_bubble_schedule_is_never_slower_than_1f1b(weights: float, chunks: int):
    costs = deferred(costs_by_hand(1.0, 2.0), weights)
    one_each = replace(PLAIN, pp=4, schedule="1f1b" if chunks == 1 else "interleaved", chunks=chunks, gather="step")
    plain, zero = (
        compose(work(split, costs, 4 * chunks, 8)).seconds
        for split in (one_each, replace(one_each, schedule="zero-bubble"))
    )
    assert zero <= plain * (1 + 1e-6)  # messages have a latency


def test_a_zero_bubble_schedule_keeps_activations_and_gradients_until_the_weights_have_theirs():
    """ZB-H1 (arXiv 2401.10241, figure 3): each of four ranks holds four microbatches at most, and gradients of as many
    backward passes as have no pass for weights yet."""
    costs = deferred(costs_by_hand(1.0, 2.0, activations=1000), 1.0, held=10)
    each = work(replace(PLAIN, pp=4, schedule="zero-bubble", gather="step"), costs, 4, 8)
    assert [RankMemory(each, rank).step().peak_bytes for rank in range(4)] == [4010, 4020, 4030, 4040]


def test_gathers_and_scatters_behind_long_layers_cost_the_first_and_the_last_of_them():
    layers, numel = 8, 100_000_000
    sharded = work(replace(PLAIN, fsdp=8, tp=8), costs_by_hand(1.0, 2.0, numel), layers, 1, DGX)  # a rank of each node
    alone = compose(work(PLAIN, costs_by_hand(1.0, 2.0), layers, 1)).seconds
    step = compose(sharded)
    port = 0.94 * 50e9
    first, last = (nbytes * numel * 7 / 8 / port for nbytes in (2, 4))  # in bf16 and in fp32
    exposed = step.seconds_by_bound["communication"]
    assert exposed == pytest.approx(first + last, rel=0.05)
    assert step.seconds > alone + exposed  # copies into and out of buffers, and what collectives take from layers


def test_replicas_that_sum_gradients_over_a_port_take_two_more_passes_of_a_shard():
    numel = 1_000_000_000
    split = replace(PLAIN, fsdp=8, dp=8)
    step = compose(work(split, costs_by_hand(1.0, 2.0, numel), 1, 1, DGX))
    shard_sum = 2 * 7 / 8 * 4 * numel / 8 / (0.94 * 50e9)  # a ring over eight nodes
    assert step.seconds_by_bound["communication"] > shard_sum


def test_parameters_that_stay_gathered_are_gathered_once_a_step():
    """Four microbatches: three gathers for forward, four for backward, and three scatters less; more is kept."""
    each = work(replace(PLAIN, fsdp=8, tp=8), costs_by_hand(1e-6, 1e-6, 100_000_000), 1, 4, DGX)
    once = each._replace(split=replace(each.split, gather="step"))
    port = 0.94 * 50e9 / (100_000_000 * 7 / 8)
    assert compose(each).seconds - compose(once).seconds == pytest.approx((7 * 2 + 3 * 4) / port, rel=0.2)
    assert memory_of(once).peak_bytes > memory_of(each).peak_bytes


def test_more_microbatches_take_equally_long_each():
    seconds = [
        compose(work(replace(PLAIN, fsdp=16), costs_by_hand(0.01, 0.02, 10_000_000), 4, microbatches, DGX)).seconds
        for microbatches in (1, 2, 3, 5)
    ]
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])
    assert seconds[3] - seconds[2] == pytest.approx(2 * (seconds[2] - seconds[1]))


@pytest.mark.parametrize("rank", range(4))
def test_1f1b_holds_activations_of_as_many_microbatches_as_there_are_stages_from_here(rank: int):
    split = replace(PLAIN, pp=4, schedule="1f1b", gather="step")
    with_activations = work(split, costs_by_hand(1.0, 2.0, activations=1000), 4, 8)
    assert RankMemory(with_activations, rank).step().peak_bytes == 1000 * (4 - rank)


def test_layers_are_spread_evenly_and_ends_have_the_fewer():
    assert layers_by_stage(126, 16) == [7, *[8] * 14, 7]
    assert layers_by_stage(80, 8) == [10] * 8
    assert layers_by_stage(6, 4) == [1, 2, 2, 1]


# --- torch's own ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "ranks", "microbatches", "chunks"),
    [
        (ScheduleInterleaved1F1B, 2, 4, 2),
        (ScheduleInterleaved1F1B, 4, 8, 2),
        (ScheduleInterleaved1F1B, 4, 8, 3),
        (ScheduleInterleavedZeroBubble, 4, 8, 1),
        (ScheduleInterleavedZeroBubble, 2, 4, 2),
        (ScheduleInterleavedZeroBubble, 4, 8, 3),
    ],
)
def test_passes_are_in_the_order_of_torchs_table(schedule: type, ranks: int, microbatches: int, chunks: int):
    tables: dict[int, list[Any]] = {}

    def table(rank: int) -> None:
        with world(ranks, {"pp": ranks}, rank) as mesh:
            step = scheduled(schedule, mesh, chunks=chunks, microbatches=microbatches)
            cells = [cell.cell_contents for cell in step.__closure__ or ()]
            (made,) = (each for each in cells if isinstance(each, schedule))
            tables[rank] = [action for action in made.pipeline_order[rank] if action is not None]

    run_ranks(range(ranks), table)
    for rank, actions in tables.items():
        theirs = [(a.computation_type.value, a.stage_index, a.microbatch_index) for a in actions]
        defers = schedule is ScheduleInterleavedZeroBubble
        letters = {"forward": "F", "backward": "I" if defers else "B", "weights": "W"}
        ours = order_of(rank, ranks, microbatches, chunks, defers)
        assert [(letters[each.kind], each.chunk * ranks + rank, each.microbatch) for each in ours] == theirs


@pytest.mark.parametrize("rank", range(4))
def test_1f1b_runs_each_pass_once_and_warms_up_by_the_stages_behind(rank: int):
    order = order_of(rank, 4, 8, 1)
    assert sorted(each.microbatch for each in order if each.kind == "forward") == list(range(8))
    assert sorted(each.microbatch for each in order if each.kind == "backward") == list(range(8))
    assert [each.kind for each in order].index("backward") == 4 - rank
    assert most_in_flight(order, [1.0]) == 4 - rank


def test_groups_of_a_split_are_those_of_torchs_mesh():
    split = replace(PLAIN, pp=2, dp=2, fsdp=4, cp=2, tp=4)
    with world(128, split.mesh) as mesh:
        for name in split.mesh:
            assert split.group(name) == tuple(mesh[name].mesh.tolist())
        assert split.group("fsdp", "cp") == tuple(mesh["fsdp", "cp"].mesh.flatten().tolist())


@cache
def layers_of(split: Split) -> LayerCosts:
    return meter_layers(subject_of(SMALL), OptimizerCosts(Where(8192, H100, DGX, "eager", {})), split.shape)


@pytest.mark.parametrize(
    ("split", "microbatches"),
    [
        (replace(PLAIN, fsdp=16), 1),
        (replace(PLAIN, fsdp=16, gather="step"), 5),
        (replace(PLAIN, fsdp=4, tp=2, recompute="selective"), 1),
        (replace(PLAIN, fsdp=4, cp=2, recompute="full"), 1),
    ],
)
def test_a_composed_step_is_near_the_one_that_is_metered_whole(split: Split, microbatches: int):
    subject = subject_of(SMALL)
    whole = meter_whole(subject, Where(8192, H100, DGX, "eager", {}), (split, microbatches))
    step = work(split, layers_of(split), len(subject.kinds), microbatches, DGX)
    assert compose(step).seconds == pytest.approx(whole.seconds, rel=0.08)
    use = memory_of(step)
    assert use.peak_bytes == pytest.approx(whole.memory.peak_bytes, rel=0.04)
    assert use.reserved_bytes == pytest.approx(whole.memory.reserved_bytes, rel=0.02)


def test_the_next_microbatch_finds_no_buffer_of_the_last_ones_gradients():
    """FSDP2 gives it back at the end of a backward pass. That of a large vocabulary is 2.1 GB here."""
    split = replace(PLAIN, fsdp=4, recompute="full")
    subject = subject_of(replace(SMALL, vocabulary=128256))
    whole = meter_whole(subject, Where(8192, H100, DGX, "eager", {}), (split, 2))
    costs = meter_layers(subject, OptimizerCosts(Where(8192, H100, DGX, "eager", {})), split.shape)
    use = memory_of(work(split, costs, SMALL.layers, 2, DGX))
    assert use.peak_bytes == pytest.approx(whole.memory.peak_bytes, rel=0.01)


class Adapted(nn.Module):
    """A frozen linear layer beside two narrow ones that are trained."""

    def __init__(self, frozen: nn.Linear):
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, 16, bias=False)
        self.up = nn.Linear(16, frozen.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


def adapted_llama() -> nn.Module:
    model = Llama(SMALL).requires_grad_(False)
    for block in model.blocks:
        for name in ("query", "value"):
            setattr(block.attention, name, Adapted(getattr(block.attention, name)))
    return model


@pytest.mark.parametrize(("fsdp", "microbatches", "gather"), [(4, 1, "microbatch"), (4, 3, "step")])
def test_parameters_that_are_not_trained_have_no_gradients_and_no_state(fsdp, microbatches, gather):
    """Beside torch's own FSDP2."""
    split = replace(PLAIN, fsdp=fsdp, gather=gather)
    subject = subject_of(adapted_llama)
    costs = meter_layers(subject, OptimizerCosts(Where(8192, H100, DGX, "eager", {})), split.shape)
    whole = meter_whole(subject, Where(8192, H100, DGX, "eager", {}), (split, microbatches))
    step = work(split, costs, SMALL.layers, microbatches, DGX)
    assert compose(step).seconds == pytest.approx(whole.seconds, rel=0.08)
    assert memory_of(step).peak_bytes == pytest.approx(whole.memory.peak_bytes, rel=0.04)
    assert subject.trained == SMALL.layers * 16 * (2048 + 2048 + 2048 + 1024)  # of queries and of values


def test_gradients_of_every_products_output_are_held_until_the_weights_have_theirs():
    """Of a Llama's layer: queries and the output, keys and values of 8 heads of 16, gate and up, down."""
    outputs = 2 * 2048 + 2 * 1024 + 2 * 5632 + 2048
    layer = layers_of(replace(PLAIN, fsdp=16)).layers[0]
    assert layer.held_bytes == 8192 * outputs * 2
    assert layer.weights.model_flops == 2 * 8192 * (layer.parameters - 2 * 2048)  # all but those of norms


def mixture(width: int = 512, layers: int = 3) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.Qwen3MoeConfig(
        hidden_size=width, moe_intermediate_size=width // 2, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, num_experts=16, num_experts_per_tok=4, vocab_size=2000, max_position_embeddings=2048,
        head_dim=64,
    )  # fmt: skip


@cache
def layers_of_mixture(ep: int) -> LayerCosts:
    shape = Shape(1, 1, ep, 8, "none")
    return meter_layers(subject_of(mixture()), OptimizerCosts(Where(2048, H100, DGX, "eager", {})), shape)


def test_experts_over_ranks_do_the_same_work_with_a_part_of_the_parameters():
    one, four = (layers_of_mixture(ep).layers[0] for ep in (1, 4))
    experts = 16 * 3 * 512 * 256
    assert (one.expert_parameters, four.expert_parameters) == (experts, experts // 4)
    assert one.parameters - four.parameters == experts * 3 // 4
    assert four.forward.model_flops == pytest.approx(one.forward.model_flops, rel=1e-3)  # tokens of as many come here
    assert one.forward.communication_seconds == 0 < four.forward.communication_seconds
    linear = one.parameters - experts + experts * 4 // 16 - 512 * 2 - 128  # of a token, without norms
    assert one.weights.model_flops == pytest.approx(2 * linear * 8 * 2048, rel=1e-3)


def test_experts_over_all_shards_are_not_gathered_and_keep_no_more_state():
    numel = 100_000_000
    costs = costs_by_hand(1e-6, 1e-6, numel)
    of_experts = costs._replace(layers={0: costs.layers[0]._replace(expert_parameters=numel)})
    split = replace(PLAIN, fsdp=8, tp=8)  # one rank of each node
    whole = compose(work(split, costs, 1, 1, DGX))
    own = compose(work(replace(split, ep=8), of_experts, 1, 1, DGX))
    port = 0.94 * 50e9 / (numel * 7 / 8)
    assert own.seconds_by_bound["communication"] < 1e-4  # collectives of one rank
    assert whole.seconds_by_bound["communication"] == pytest.approx((2 * 2 + 4) / port, rel=0.2)
    unsplit = compose(work(split, of_experts, 1, 1, DGX))
    assert unsplit == whole  # ep 1: experts are parameters as all others


def test_a_composed_step_of_experts_is_near_the_one_that_is_metered_whole():
    subject, split = subject_of(mixture()), replace(PLAIN, fsdp=8, ep=4, microbatch=8)
    whole = meter_whole(subject, Where(2048, H100, DGX, "eager", {}), (split, 1))
    step = SplitWork(split, subject.kinds, layers_of_mixture(4), 64, H100, DGX)
    assert compose(step).seconds == pytest.approx(whole.seconds, rel=0.1)
    assert memory_of(step).peak_bytes == pytest.approx(whole.memory.peak_bytes, rel=0.05)


def test_split_experts_answer_as_whole_ones_in_real_processes(tmp_path: Path):
    for off_by, moved in printed_by_ranks(Path(__file__).with_name("split_experts_program.py"), 2, tmp_path):
        assert off_by < 1e-5
        assert moved


# --- the answer -----------------------------------------------------------------------------------------------------


@cache
def small_plan(**options: Any) -> Any:
    return plan(SMALL, 8, H100, length=1024, only=ONE_GPU | {"microbatch": 1}, dollars_per_gpu_hour=3.6, **options)


def test_the_answer_is_the_fastest_that_fits():
    found = small_plan()
    assert found.best is found.rows[0]
    assert [row.seconds for row in found.rows] == sorted(row.seconds for row in found.rows)
    assert all(row.peak_memory_bytes <= row.usable_memory_bytes for row in found.rows)
    assert found.best.split.recompute == "none"  # there is room for all activations
    assert found.best.tokens_per_s == pytest.approx(8 * 1024 / found.best.seconds)
    assert found.best.dollars_per_step == pytest.approx(8 * found.best.seconds * 3.6 / 3600)
    assert sum(found.best.seconds_by_bound.values()) == pytest.approx(found.best.seconds)


def test_twice_the_gpus_never_make_a_step_of_as_many_sequences_longer():
    seconds = [
        plan(
            SMALL, gpus, H100, 1e12, batch=8, length=1024, only=ONE_GPU | {"recompute": "none", "microbatch": 1}, rows=1
        ).best.seconds
        for gpus in (1, 2, 4, 8)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_the_picture_has_a_bar_for_each_split_parted_by_what_binds_it(tmp_path: Path):
    pytest.importorskip("matplotlib")
    found = small_plan()
    (panel,) = split_bars(found).axes
    lengths = [[1e3 * row.seconds_by_bound[bound] for row in found.rows] for bound in get_args(Bound)]
    for bars, expected in zip(panel.containers, filter(any, lengths), strict=True):
        assert [bar.get_width() for bar in bars] == pytest.approx(expected)
    with pytest.raises(PlotError, match="no splits"):
        split_bars(replace(found, rows=()))


def test_splits_that_differ_in_their_gathers_are_told_apart_in_words():
    row = small_plan().rows[0]
    told = {replace(row, split=replace(row.split, fsdp=2, pp=1, gather=each)).passes for each in ("microbatch", "step")}
    assert len(told) == 2


def test_less_memory_never_makes_a_faster_plan():
    room = small_plan()
    tight = small_plan(memory=0.97 * room.best.reserved_memory_bytes)
    assert tight.best.seconds >= room.best.seconds
    assert tight.may_fit < room.may_fit


def test_where_nothing_fits_the_least_hungry_splits_say_so():
    none = small_plan(memory=1e9)
    assert none.best is None
    assert none.may_fit == 0
    assert "none of the splits fits in memory" in str(none)


def test_wishes_are_kept_and_never_make_it_faster():
    free, kept = small_plan(), plan(SMALL, 8, H100, length=1024, only=ONE_GPU | {"microbatch": 1, "recompute": "full"})
    assert {row.split.recompute for row in kept.rows} == {"full"}
    assert kept.best.seconds > free.best.seconds


def test_a_plan_is_shown_in_each_format():
    found = small_plan()
    assert "| split" in found.render("markdown")
    (row, *_) = csv.DictReader(io.StringIO(found.render("csv")))
    assert float(row["seconds"]) == found.best.seconds
    assert json.loads(found.render("json"))["rows"][0]["fsdp"] == found.best.split.fsdp
    assert "fastest of what fits: fsdp 8" in str(found)
    assert "assumed: 8 sequences a step" in str(found)


def test_rows_can_be_metered_whole():
    found = plan(SMALL, 8, H100, length=1024, only=ONE_GPU | {"recompute": "none"}, rows=2, whole=1)
    whole = [row for row in found.rows if row.how == "whole"]
    assert len(whole) == 1
    assert whole[0].seconds != whole[0].composed_seconds
    first, second = (row.mfu * row.seconds for row in found.rows)  # FLOPs of the same sequences by the same peak
    assert first == pytest.approx(second)
    assert "s whole; composed it was" in str(found)


class Serial(Executor):
    """Runs what it is given at once, and counts."""

    def __init__(self) -> None:
        self.jobs = 0

    def submit(self, run: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.jobs += 1
        future: Future[Any] = Future()
        future.set_result(run(*args, **kwargs))
        return future


def test_any_executor_runs_the_jobs():
    executor = Serial()
    assert small_plan(executor=executor).rows == small_plan().rows
    assert executor.jobs == 3  # a shape for each way to recompute


class Mixer(nn.Module):
    """Layers of two kinds, which no config describes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class Mixers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(1000, 512)
        self.layers = nn.ModuleList(Mixer(512) if i % 2 else nn.Linear(512, 512) for i in range(6))
        self.head = nn.Linear(512, 1000)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_a_function_that_makes_a_model_is_planned_with_a_layer_of_each_kind():
    assert subject_of(Mixers).kinds == (0, 1, 0, 1, 0, 1)
    found = plan(Mixers, 4, H100, length=256, only={"microbatch": 1, "recompute": "none"})
    assert {row.split.tp for row in found.rows} == {1}
    assert "no tensor parallelism: the model has no plan for it" in str(found)


def compiled_mixers() -> nn.Module:
    model = Mixers()
    for layer in model.layers:
        layer.compile()
    return model


def test_layers_that_the_model_compiles_are_eager_unless_the_mode_says_otherwise():
    only = {"microbatch": 1, "recompute": "none", "pp": 1}
    told = "layers run eagerly, though the model compiles them"
    for mode in ("eager", "compiled"):
        found, plain = (plan(make, 4, H100, length=256, mode=mode, only=only) for make in (compiled_mixers, Mixers))
        assert found.best.seconds == plain.best.seconds
        assert (told in str(found), told in str(plain)) == (mode == "eager", False)


class CallsForward(Mixers):
    """Hooks of its layers do not run."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer.forward(x)
        return self.head(x)


def test_what_torchs_compiler_compiles_is_planned_as_compiled_without_a_word_about_the_mode():
    tiny = LlamaConfig(layers=1, width=256, heads=4, kv_heads=4, hidden=512, vocabulary=1024)
    found = plan(
        tiny, 2, H100, length=2048, only=ONE_GPU | {"microbatch": 1, "recompute": "none"}, rows=1, compile=True
    )
    assert "kernels and recomputation are those of torch's own compiler" in str(found)


def test_layers_that_are_not_called_as_modules_are_no_layers_without_cost():
    with pytest.raises(PlanError, match=r"nothing ran in layers of .*block\(x\)"):
        plan(CallsForward, 4, H100, length=256, only={"microbatch": 1, "recompute": "none"})


def test_styles_of_the_callers_own_split_a_model():
    styles = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}
    only = {"microbatch": 1, "recompute": "none", "fsdp": 1, "pp": 1}
    found = plan(Mixers, 4, H100, length=256, only=only, tensor_parallel=styles)
    assert {row.split.tp for row in found.rows} == {1, 2, 4}


def test_a_config_of_transformers_brings_its_own_plan():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=1000, max_position_embeddings=128,
    )  # fmt: skip
    found = plan(config, 4, H100, only={"microbatch": 1, "recompute": "none", "cp": 1, "tp": [1, 2]}, rows=20)
    assert {row.split.tp for row in found.rows} == {1, 2}
    assert "4 sequences of 128 tokens" in found.title


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"build": "llama-4"}, "is no model: give .*llama-3-70b"),
        ({"build": 3}, "a model's name, a config, a module or a function"),
        ({"build": "bert-large"}, "Bert.loss does not take token ids alone"),
        ({"build": lambda: nn.Linear(2, 2)}, "Linear has no ModuleList"),
        ({"world": 0}, "world must be a positive whole number"),
        ({"batch": 7}, "no split of 8 GPUs divides 7 sequences"),
        ({"only": {"tp": 8}, "length": 2047}, "no split of 8 GPUs divides 8 sequences of 2,047 tokens"),
        (
            {"only": {"tp": 8}, "length": 2047},
            r"another batch= \(--batch\), length= \(--seq\) or world= \(--gpus\) may",
        ),
        ({"memory": -1.0}, "memory must be a positive number"),
        ({"only": {"gpus": 3}}, "known are pp, dp, fsdp"),
        ({"only": {"tp": "two"}}, "'two' is no whole number"),
        ({"only": {"recompute": "half"}}, "'half' is none of none, selective, full"),
        ({"only": {"ep": 8}}, "ep is 1 here with only=.*: the model has no experts"),
    ],
)
def test_wrong_options_are_one_clear_error(options: dict[str, Any], message: str):
    given = {"build": SMALL, "world": 8, "only": ONE_GPU, **options}
    with pytest.raises(PlanError, match=message):
        plan(given.pop("build"), given.pop("world"), H100, **given)


def test_the_command_prints_the_plan(capsys: pytest.CaptureFixture[str]):
    arguments = "plan gpt2-124m --gpus 4 --hardware h100-sxm5-80gb --seq 256 --workers 1 --only tp=1 cp=1 pp=1"
    assert main([*arguments.split(), "microbatch=1", "recompute=none"]) == 0
    assert "fastest of what fits: " in capsys.readouterr().out
    assert main([*arguments.split(), "microbatch=1", "recompute=none", "--memory", "0.001"]) == 1
    assert main(["plan", "gpt2-124m", "--gpus", "4", "--only", "size=3"]) == 2
    assert "write NAME=VALUE" in capsys.readouterr().err


def test_the_command_plans_for_a_profile_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("extends: h100-sxm5-80gb\ntitle: Mine\nmemory_gb: 160\nsources: {memory_gb: made up}\n")
    arguments = f"plan gpt2-124m --gpus 4 --hardware {mine} --seq 256 --only tp=1 cp=1 pp=1 microbatch=1 recompute=none"
    assert main([*arguments.split(), "--price", "mine=2"]) == 0
    assert "4 × Mine" in capsys.readouterr().out


def test_a_built_in_model_is_planned_with_sequences_that_it_takes() -> None:
    """GPT-2 has 1,024 positions; nobody said a length."""
    found = plan("gpt2-124m", 8, only={"tp": 1, "cp": 1, "pp": 1}, rows=1)
    assert "8 sequences of 1,024 tokens a step" in found.title


def test_without_numpy_sequences_stay_whole_and_whoever_wishes_for_more_is_told(monkeypatch):
    """torch's context parallelism imports NumPy, which torch does not bring."""
    bounds = Bounds(8, 8, 65536, 4, 8, 8, None, True)
    assert max(split.cp for split in splits(bounds, {})) > 1
    monkeypatch.setattr("flopmeter.ask.plan.splits.find_spec", lambda name: None)
    assert {split.cp for split in splits(bounds, {})} == {1}
    with pytest.raises(PlanError, match="pip install numpy"):
        list(splits(bounds, {"cp": (2,)}))


def test_the_whole_model_is_made_once_for_all_shapes_of_its_layers():
    """Whole models have a hundred layers of which two are metered for each of hundreds of shapes."""
    made = []

    def build() -> nn.Module:
        made.append(Llama(LlamaConfig(layers=2, width=256, heads=4, kv_heads=4, hidden=512, vocabulary=512)))
        return made[-1]

    found = plan(build, 8, "h100-sxm5-80gb", length=256, only={"cp": 1, "pp": 1, "microbatch": 1}, rows=1)
    assert found.metered > 6
    assert len(made) == 2  # to look at, and to cut


def test_one_sequence_is_no_sequences():
    tiny = LlamaConfig(layers=1, width=256, heads=4, kv_heads=4, hidden=512, vocabulary=1024)
    assert " 1 sequence of 128 tokens a step" in plan(tiny, 1, batch=1, length=128).title
