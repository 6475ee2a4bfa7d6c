"""Steps of a plan put together from layers whose costs are given: causes, groups of ranks and bytes by hand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter, Split, load_hardware, plan
from flopmeter.ask.plan.blocks import Blocks
from flopmeter.ask.plan.compose import SplitWork, compose
from flopmeter.ask.plan.layers import LayerCosts, PartCost, PassCost, meter_layers
from flopmeter.ask.plan.memory import RankMemory, least_bytes, memory_of
from flopmeter.ask.plan.optimizer_costs import OptimizerCost, OptimizerCosts
from flopmeter.ask.plan.program import Where, backward, split_layers
from flopmeter.ask.plan.splits import Shape
from flopmeter.ask.plan.subject import subject_of, tokens_of
from flopmeter.device.cluster import Cluster, Link, load_cluster, price_collective
from flopmeter.distributed import world
from flopmeter.models.llama import Llama, LlamaConfig
from flopmeter.records import Collective

pytestmark = pytest.mark.filterwarnings("ignore")
H100 = load_hardware("h100-sxm5-80gb")
BANDWIDTH = 0.91 * 3350e9
ONE = Split(dp=1, fsdp=1, tp=1, cp=1, pp=1, ep=1, microbatch=1, recompute="none", schedule="none")
NOTHING = PartCost(PassCost(), PassCost(), 0)
NO_STEP = OptimizerCost(0.0, 0.0, 0.0, 0.0)


def links(gpus_per_node: int) -> Cluster:
    near = Link(name="in", transport="nvlink", bandwidth_gb_per_s=100, achieved=1, source="none")
    far = Link(name="between", transport="network", bandwidth_gb_per_s=10, achieved=1, source="none")
    return Cluster(name="mine", title="mine", gpus_per_node=gpus_per_node, start_us=0, intra=near, inter=far)


def work(split: Split, layer: PartCost, layers: int, microbatches: int, gpus_per_node: int = 8, **costs) -> SplitWork:
    every = LayerCosts({0: layer}, NOTHING, NOTHING, 0, NO_STEP, (), ())._replace(**costs)
    batch = microbatches * split.microbatch * split.replicas
    return SplitWork(split, [0] * layers, every, batch, H100, links(gpus_per_node))


def test_a_step_has_each_cause_as_often_as_there_are_layers_and_microbatches() -> None:
    """Three layers, five microbatches of two sequences."""
    layer = PartCost(PassCost(1.0, 2.0, 3.0, 4.0), PassCost(10.0, 20.0, 30.0, 40.0), 0)
    step = compose(work(replace(ONE, microbatch=2), layer, 3, 5))
    assert step.microbatches == 5
    assert step.seconds_by_bound == pytest.approx(
        {"compute": 165, "memory": 330, "communication": 495, "overhead": 660, "bubble": 0}
    )


def test_passes_for_inputs_and_for_weights_are_the_whole_backward_pass() -> None:
    """Four microbatches on each of two stages: a forward pass of 1 s, of 5 s backward 2 for weights, and as much
    memory traffic again."""
    layer = PartCost(PassCost(1.0, 1.0), PassCost(5.0, 5.0), 0, weights=PassCost(2.0, 2.0))
    split = replace(ONE, pp=2, schedule="zero-bubble", gather="step")
    step = compose(work(split, layer, 2, 4))
    assert step.seconds_by_bound["compute"] == step.seconds_by_bound["memory"] == pytest.approx(4 * (1 + 5))


@pytest.mark.parametrize(("gpus_per_node", "seconds"), [(2, 1.0), (8, 0.1)])
def test_stages_of_a_pipeline_are_as_far_apart_as_the_ranks_between_them(gpus_per_node: int, seconds: float) -> None:
    """10 GB from the second tensor parallel pair to the first and back; forward a second, backward two."""
    layer = PartCost(PassCost(1.0), PassCost(2.0), 0)
    split = replace(ONE, pp=2, tp=2, schedule="1f1b", gather="step")
    step = compose(work(split, layer, 2, 1, gpus_per_node, boundary_bytes=10**10))
    assert step.seconds == pytest.approx(6 + 2 * seconds, rel=1e-3)


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 7])
def test_gradients_of_each_microbatch_but_the_first_are_added(shards: int, microbatches: int) -> None:
    """Two layers, of whose parameters a quarter is frozen. Alone, gradients stay in bf16: two are read and one is
    written. FSDP2 adds in fp32, into what it makes of those of the first one. Beside that, what it takes to bring all
    there and away once: copies of two times two bytes out of each gather, and of six into a scatter."""
    numel, trained = 4e9, 3e9
    layer = PartCost(PassCost(), PassCost(), int(numel), frozen_parameters=int(numel - trained))
    split = replace(ONE, fsdp=shards, gather="step")
    step = compose(work(split, layer, 2, microbatches, optimizer=NO_STEP._replace(seconds_per_parameter=1e-12)))
    added = (6 * (microbatches - 1), (2 + 4 + (2 + 8) * (microbatches - 1)) * (microbatches > 1))[shards - 1] * trained
    copied = (4 * numel + 6 * trained) * (shards > 1)
    expected = 2 * (added + copied) / BANDWIDTH + 2 * trained / shards * 1e-12
    assert step.seconds_by_bound["memory"] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("frozen", [0, 1_500_000_000])
def test_experts_are_gathered_by_the_ranks_that_have_the_same_ones(frozen: int) -> None:
    """Four ranks share what is no expert; ranks 0 and 2 have the same experts, two of six billion numbers. Gathered are
    two bytes of each twice, scattered four of those that are trained, one after the other as nothing is computed. What
    arrived is copied beside the next gather, of which there is one after each but the last."""
    layer = PartCost(PassCost(), PassCost(), 6_000_000_000, expert_parameters=2_000_000_000, frozen_parameters=frozen)
    split = replace(ONE, fsdp=4, ep=2)
    each = work(split, layer, 1, 1, optimizer=NO_STEP._replace(seconds_per_parameter=1e-12))
    step, share = compose(each), 1 - frozen / 6e9

    def seconds(kind: str, nbytes: float, ranks: tuple[int, ...]) -> float:
        return price_collective(Collective(kind, int(nbytes), ranks), each.cluster).seconds

    gathers = seconds("all_gather", 8e9, (0, 1, 2, 3)) + seconds("all_gather", 4e9, (0, 2))
    scatters = seconds("reduce_scatter", 16e9 * share, (0, 1, 2, 3)) + seconds("reduce_scatter", 8e9 * share, (0, 2))
    beside = 2 * (2 * 8e9 + 4e9) / BANDWIDTH
    assert step.seconds_by_bound["communication"] == pytest.approx(2 * gathers + scatters - beside, rel=0.001)
    copies = (2 * 2 * 12e9 + 6 * 6e9 * share) / BANDWIDTH
    kept = (4e9 + 2 * 2e9) / 4 * share
    assert step.seconds_by_bound["memory"] == pytest.approx(copies + kept * 1e-12, rel=0.03)  # some beside what arrives


def test_experts_of_the_next_layer_are_gathered_while_one_computes() -> None:
    """Frozen parameters have nothing to scatter, and ten seconds of a layer hide the gathers of the next: what is left
    to wait for are those of the first, of which experts arrive while the rest is copied."""
    busy = PassCost(compute_seconds=10.0)
    layer = PartCost(busy, busy, 6_000_000_000, expert_parameters=2_000_000_000, frozen_parameters=6_000_000_000)
    step = compose(each := work(replace(ONE, fsdp=4, ep=2), layer, 4, 1))
    of_first = (Collective("all_gather", 8_000_000_000, (0, 1, 2, 3)), Collective("all_gather", 4_000_000_000, (0, 2)))
    expected = sum(price_collective(gather, each.cluster).seconds for gather in of_first) - 2 * 8e9 / BANDWIDTH
    assert step.seconds_by_bound["communication"] == pytest.approx(expected, rel=0.001)


def test_replicas_without_shards_sum_their_gradients_and_copy_nothing() -> None:
    layer = PartCost(PassCost(), PassCost(), 10**9)
    each = work(replace(ONE, dp=2), layer, 1, 1)
    summed = price_collective(Collective("all_reduce", 4 * 10**9, (0, 1)), each.cluster).seconds
    step = compose(each)
    assert step.seconds_by_bound["communication"] == pytest.approx(summed, rel=1e-3)
    assert step.seconds_by_bound["memory"] == 0


def test_what_a_stage_receives_is_in_its_buffers_and_not_kept_again() -> None:
    """Two stages of a layer that keeps its input of 1,000 bytes; four messages of 300 bytes, each with a buffer. The
    first stage holds two microbatches, with what it sent until the backward pass."""
    kept = Blocks((1000,), (0,), (~0,), received=frozenset({0}))
    layer = PartCost(PassCost(1.0), PassCost(2.0), 0, kept)
    each = work(replace(ONE, pp=2, schedule="1f1b", gather="step"), layer, 2, 4, boundary_bytes=300)
    peaks = [RankMemory(each, rank).step().peak_bytes for rank in (0, 1)]
    assert peaks == [4 * 300 + 2 * (1000 + 300), 4 * 300]


@pytest.mark.parametrize("fsdp", [1, 4])
@pytest.mark.parametrize("frozen", [0, 250_000, 1_000_000])
def test_no_split_takes_less_memory_than_the_least_and_its_state_is_that(fsdp: int, frozen: int) -> None:
    """A number in fp32 and Adam's two averages; without shards its gradient and its copy in bf16, too; of frozen ones
    that alone."""
    layer = PartCost(PassCost(), PassCost(), 1_000_000, frozen_parameters=frozen)
    each = work(replace(ONE, fsdp=fsdp), layer, 2, 1)
    least = least_bytes(each)
    assert least <= memory_of(each).peak_bytes
    of_trained = 12 if fsdp > 1 else 12 + 4 + 2
    assert least == 2 * (of_trained * (1_000_000 - frozen) + 2 * frozen) / fsdp


def test_a_compiled_layer_waits_for_each_collective_of_tensor_parallelism_and_computes_with_none_beside_it() -> None:
    """With sequence parallelism each half of a layer gathers 2,048 tokens and scatters their sums, in either
    direction. Compiled, they run on the stream that computes."""
    config = LlamaConfig(layers=2, width=2048, heads=16, kv_heads=8, hidden=5632, vocabulary=1000)
    cluster = load_cluster("dgx-h100")
    where = Where(2048, H100, cluster, "compiled", {})
    layer = meter_layers(subject_of(partial(Llama, config)), OptimizerCosts(where), Shape(8, 1, 1, 1, "none")).layers[0]
    seconds = sum(
        price_collective(Collective(kind, 2048 * 2048 * 2, tuple(range(8))), cluster).seconds
        for kind in ("all_gather", "reduce_scatter")
    )
    assert layer.forward.communication_seconds == pytest.approx(2 * seconds, rel=1e-6)
    assert layer.backward.communication_seconds == pytest.approx(2 * seconds, rel=1e-6)
    others = layer.forward.seconds - layer.forward.communication_seconds
    assert layer.forward.compute_seconds + layer.forward.memory_seconds < others


class Listed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(1000, 256), nn.Linear(256, 1000)
        self.layers: Any = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def in_order(self) -> Iterable[nn.Module]:
        return self.layers

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        for layer in self.in_order():
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


class Named(Listed):
    """The same layers in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"layer {place}": layer for place, layer in enumerate(self.layers)})

    def in_order(self) -> Iterable[nn.Module]:
        return self.layers.values()


def test_layers_in_a_dictionary_are_planned_as_those_in_a_list() -> None:
    only = {"tp": 1, "cp": 1, "microbatch": 1, "recompute": "none"}
    listed, named = (plan(make, 4, "h100-sxm5-80gb", length=256, only=only) for make in (Listed, Named))
    assert named.rows == listed.rows


def test_selective_recomputation_repeats_the_second_the_fourth_and_the_sixth_product_of_a_layer() -> None:
    """Of query, key, value, out, gate, up and down: key, out and up; and no attention."""
    config = LlamaConfig(layers=2, width=256, heads=4, kv_heads=2, hidden=640, vocabulary=100)
    subject, tokens = subject_of(partial(Llama, config)), 128
    with world(1, {"rest": 1, "cp": 1, "tp": 1}) as mesh:
        model = subject.model().bfloat16()
        split_layers(subject, model, mesh, "selective", range(1))
        with FlopMeter(H100) as meter:
            backward(subject, model, mesh, tokens_of(model, 1, tokens))
    again = [kernel.cost.macs for kernel in meter.report().kernels if kernel.op.phase == "recompute"]
    assert sum(again) == config.layers * tokens * 256 * (128 + 256 + 640)


def test_splits_that_differ_in_microbatches_and_recomputation_share_the_step_of_the_optimizer() -> None:
    """It steps the same shards; half of a layer's under tensor parallelism of two has a step of its own."""
    subject = subject_of(LlamaConfig(layers=2, width=64, heads=4, kv_heads=4, hidden=128, vocabulary=256))
    optimizers = OptimizerCosts(Where(64, H100, load_cluster("dgx-h100"), "eager", {}))
    shapes = Shape(1, 1, 1, 1, "none"), Shape(1, 1, 1, 2, "full"), Shape(2, 1, 1, 1, "none")
    plain, recomputed, halved = (meter_layers(subject, optimizers, shape).optimizer for shape in shapes)
    assert recomputed is plain
    assert halved is not plain
    assert halved.bytes_per_parameter == pytest.approx(plain.bytes_per_parameter, rel=0.1)
