"""Products that hide the collectives of tensor parallelism next to them: by hand, and as laws of a whole layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

from flopmeter import FlopMeter
from flopmeter.ask.plan.layers import meter_layers
from flopmeter.ask.plan.optimizer_costs import OptimizerCosts
from flopmeter.ask.plan.overlap import hidden_seconds
from flopmeter.ask.plan.program import Where
from flopmeter.ask.plan.splits import Shape
from flopmeter.ask.plan.subject import subject_of
from flopmeter.device.cluster import Cluster, load_cluster
from flopmeter.device.hardware import load_hardware
from flopmeter.distributed import world
from flopmeter.models.llama import LlamaConfig
from flopmeter.records import DEFAULT_STREAM
from flopmeter.report.report import Report

pytestmark = pytest.mark.filterwarnings("ignore")
DGX = load_cluster("dgx-h100")
SLOW = replace(DGX, intra=replace(DGX.intra, bandwidth_gb_per_s=1.0, in_switch=None))
RANKS = 4


def product(style: ColwiseParallel | RowwiseParallel, cluster: Cluster) -> Report:
    """Rows that are gathered before one product, or whose sums are scattered after it."""
    with world(RANKS, {"tp": RANKS}) as mesh:
        with torch.device("meta"):
            layers = nn.Sequential(nn.Linear(8192, 8192, bias=False)).bfloat16()
            gathered = isinstance(style, ColwiseParallel)
            part = torch.empty((1, 4096, 8192) if gathered else (RANKS, 4096, 8192 // RANKS), dtype=torch.bfloat16)
        styles: dict[str, object] = {"0": style}
        if gathered:
            styles[""] = PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),))
        parallelize_module(layers, mesh, styles)
        with FlopMeter("h100-sxm5-80gb", cluster=cluster) as meter, torch.no_grad():
            (layers(part) * 2).sum()
        return meter.report()


@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel(output_layouts=Shard(0))])
def test_products_of_all_parts_but_one_hide_the_collective_next_to_them(style: ColwiseParallel | RowwiseParallel):
    report = product(style, SLOW)
    (seconds,) = (t.seconds for k, t in zip(report.kernels, report.timings, strict=True) if k.cost.macs)
    assert sum(hidden_seconds(report, RANKS)) == pytest.approx(seconds * (RANKS - 1) / RANKS)


@pytest.mark.parametrize("style", [ColwiseParallel(), RowwiseParallel(output_layouts=Shard(0))])
def test_no_more_is_hidden_than_is_waited_for(style: ColwiseParallel | RowwiseParallel):
    report = product(style, replace(DGX, intra=replace(DGX.intra, bandwidth_gb_per_s=1e5)))
    waits = sum(timing.link_wait_seconds for timing in report.timings if timing.stream == DEFAULT_STREAM)
    assert sum(hidden_seconds(report, RANKS)) == pytest.approx(waits, rel=1e-6)
    assert sum(hidden_seconds(report, RANKS + 1)) == 0  # no collective is of such a group


def test_a_layer_waits_less_and_computes_as_much():
    config = LlamaConfig(layers=2, width=2048, heads=16, kv_heads=8, hidden=5632, vocabulary=32000)
    h100 = load_hardware("h100-sxm5-80gb")
    job = subject_of(config), OptimizerCosts(Where(8192, h100, DGX, "eager", {})), Shape(4, 1, 1, 1, "none")
    waits, hides = (meter_layers(*job, async_tp=async_tp).layers[0] for async_tp in (False, True))
    for way in ("forward", "backward"):
        one, other = getattr(waits, way), getattr(hides, way)
        assert 0 <= other.communication_seconds < 0.6 * one.communication_seconds
        assert (other.compute_seconds, other.memory_seconds) == (one.compute_seconds, one.memory_seconds)
