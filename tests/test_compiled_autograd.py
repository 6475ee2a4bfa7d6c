"""A backward pass that runs as a compiled graph (compiled autograd) is a backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd
from torch.utils.flop_counter import FlopCounterMode

from flopmeter import FlopMeter


def model(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 96, device=device), nn.ReLU(), nn.Linear(96, 32, device=device))


def products_on_the_cpu() -> tuple[int, int]:
    """FLOPs of the forward and of the backward pass, as torch counts them."""
    layers, x = model("cpu"), torch.randn(16, 64)
    with FlopCounterMode(display=False) as forward:
        loss = layers(x).sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("is_model_compiled", [True, False])
def test_a_compiled_backward_pass_has_the_products_of_an_eager_one_in_the_phase_backward(is_model_compiled):
    layers, x = model("meta"), torch.empty(16, 64, device="meta")
    with FlopMeter("h100-sxm5-80gb") as meter:
        forward = torch.compile(layers) if is_model_compiled else layers
        with compiled_autograd._enable(torch.compile()):
            forward(x).sum().backward()
    report = meter.report()
    counted = dict.fromkeys(("forward", "backward"), 0)
    for kernel in report.kernels:
        counted[kernel.op.phase] += 2 * kernel.cost.macs
    assert tuple(counted.values()) == products_on_the_cpu()
    assert "forward + backward" in str(report).splitlines()[0]
    assert "CompiledAutograd" not in str(report)
