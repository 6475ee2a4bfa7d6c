"""What layers keep in a plan: against hand arithmetic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from flopmeter import ParallelPlan, Split, plan
from flopmeter.ask.plan.layers import LayerCosts, LayersJob, meter_layers
from flopmeter.ask.plan.subject import subject_of
from flopmeter.device.cluster import load_cluster
from flopmeter.device.hardware import load_hardware
from flopmeter.models.llama import Llama, LlamaConfig

pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH, HIDDEN, LENGTH = 2048, 5632, 1024
CONFIG = LlamaConfig(layers=3, width=WIDTH, heads=16, kv_heads=16, hidden=HIDDEN, vocabulary=32000)
PLAIN = Split(dp=1, fsdp=1, tp=1, cp=1, pp=1, ep=1, microbatch=1, recompute="full", schedule="none")


def costs(split: Split, build: object = CONFIG) -> LayerCosts:
    device, links = load_hardware("h100-sxm5-80gb"), load_cluster("dgx-h100")
    return meter_layers(LayersJob(subject_of(build), split.shape, LENGTH, device, links, "eager", {}))


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


def test_a_split_near_the_limit_of_memory_is_said_to_be_there() -> None:
    """Allocators reserve more than is in use."""

    def planned(memory: float) -> ParallelPlan:
        return plan(CONFIG, 8, memory=memory, length=LENGTH, only={"tp": 1, "cp": 1, "pp": 1}, rows=1)

    needed = planned(80e9).rows[0].peak_memory_bytes
    assert "near the limit" in str(planned(1.05 * needed))
    assert "near the limit" not in str(planned(80e9))
