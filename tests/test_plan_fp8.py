"""Plans with products in fp8: against the same plan in bf16 and arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter, PlanError, plan
from flopmeter.ask.plan.fp8 import in_fp8
from flopmeter.ask.plan.layers import LayerCosts, meter_layers
from flopmeter.ask.plan.optimizer_costs import OptimizerCosts
from flopmeter.ask.plan.program import Where
from flopmeter.ask.plan.splits import Shape
from flopmeter.ask.plan.subject import subject_of
from flopmeter.device.cluster import load_cluster
from flopmeter.device.hardware import load_hardware
from flopmeter.models.llama import LlamaConfig

pytestmark = pytest.mark.filterwarnings("ignore")
H100, DGX = load_hardware("h100-sxm5-80gb"), load_cluster("dgx-h100")
LARGE = LlamaConfig(layers=2, width=8192, heads=64, kv_heads=8, hidden=28672, vocabulary=32000)
LENGTH = 4096


def layer_of(config: LlamaConfig, fp8: bool, tp: int = 1) -> LayerCosts:
    shape = Shape(tp, 1, 1, 1, "none")
    return meter_layers(subject_of(config, fp8=fp8), OptimizerCosts(Where(LENGTH, H100, DGX, "compiled", {})), shape)


@pytest.mark.parametrize("tp", [1, 8])
def test_large_layers_do_the_same_products_in_less_time(tp: int):
    """Twice the rate of the products, and casts beside them."""
    (wide,), (narrow,) = (layer_of(LARGE, fp8, tp).layers.values() for fp8 in (False, True))
    assert narrow.forward.model_flops == pytest.approx(wide.forward.model_flops, rel=1e-3)  # casts count, too
    assert narrow.backward.model_flops == pytest.approx(wide.backward.model_flops, rel=1e-3)
    assert 0.45 < narrow.forward.compute_seconds / wide.forward.compute_seconds < 0.8
    assert narrow.forward.seconds + narrow.backward.seconds < 0.85 * (wide.forward.seconds + wide.backward.seconds)
    assert narrow.parameters == wide.parameters
    norms = 2 * LARGE.width  # in bf16
    assert narrow.gathered_bytes == narrow.parameters - norms + 2 * norms
    assert wide.gathered_bytes == 2 * wide.parameters


def test_small_layers_gain_little_for_the_casts():
    small = replace(LARGE, width=1024, heads=8, hidden=2816)
    (wide,), (narrow,) = (layer_of(small, fp8).layers.values() for fp8 in (False, True))
    assert narrow.forward.seconds > 0.85 * wide.forward.seconds


def test_a_linear_layer_runs_three_products_in_fp8_and_keeps_its_bias():
    """Forward, and in the backward pass one for the input and one for the weight, each of 2 x 64 x 32 x 48 FLOPs."""
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 5)).bfloat16()  # 5 columns are no multiple of 16
        x = torch.empty(64, 32, dtype=torch.bfloat16, requires_grad=True)
    in_fp8([layer])
    with FlopMeter(H100) as meter:
        layer(x).sum().backward()
    products = [kernel.cost for kernel in meter.report().kernels if kernel.cost.macs]
    in_narrow = [2 * cost.macs for cost in products if cost.name == "_scaled_mm"]
    assert in_narrow == [2 * 64 * 32 * 48] * 3
    assert layer[0].bias.grad.shape == (48,)


def test_a_device_without_fp8_is_refused_in_one_line_and_the_plan_says_what_runs_in_it():
    with pytest.raises(PlanError, match=r"^fp8: NVIDIA A100-SXM4-80GB has no matrix units for it$"):
        plan(LARGE, 8, "a100-sxm4-80gb", fp8=True)
    found = plan(LARGE, 8, H100, length=LENGTH, fp8=True, only={"tp": 1, "cp": 1, "pp": 1, "microbatch": 1}, rows=1)
    assert "products run in fp8 in the linear layers of each layer" in str(found)
    assert "mode='compiled' (--mode compiled) fuses them" in str(found)  # eager casts may cost more than fp8 gains
