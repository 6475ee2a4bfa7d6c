"""Patterns of public packages that once stopped, or were told wrongly, as small programs of our own.

Elsewhere: a sampler that finds its step by its time and a detection head that makes anchors by their strides
(test_known_floats.py), ops that packages call and nobody else does (test_costs_composed.py).
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import flopmeter
from flopmeter import DataDependentError, FlopMeter, on_meta


class FastNorm(nn.LayerNorm):
    """A layer norm in the 16 bits of autocast, as timm's fast norms: it asks by the device of its input."""

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            x, weight, bias = x.to(dtype), self.weight.to(dtype), self.bias.to(dtype)
        else:
            weight, bias = self.weight, self.bias
        with torch.amp.autocast(device_type=device, enabled=False):
            return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class Measured(nn.Module):
    """It runs itself once while it is built, to see how large its features are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 4, 4), FastNorm(64)
        self.features = self(torch.zeros(1, 3, 32, 32)).shape[1]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.stem(x).flatten(2).mT.contiguous())


@pytest.mark.parametrize(("under_autocast", "element_bytes"), [(False, 4), (True, 2)])
def test_a_fast_norm_stays_in_the_16_bits_of_autocast(under_autocast: bool, element_bytes: int):
    with FlopMeter("a100-sxm4-80gb") as meter, torch.device("meta"), torch.no_grad():
        model = Measured()  # on one image, which reads 64 features at 64 places in fp32
        with torch.autocast("cuda", dtype=torch.float16, enabled=under_autocast):
            model(torch.empty(8, 3, 32, 32))
    norms = next(row for row in meter.report().rows("op") if "layer_norm" in row.name)
    places, channels = 8 * 8, 64
    assert model.features == places
    assert norms.bytes_read == (places + 2) * channels * 4 + (8 * places + 2) * channels * element_bytes


def padded(mask: Tensor) -> bool:
    """Images of several sizes in one batch: whether any place of the features is padding decides what runs."""
    small = nn.functional.interpolate(mask[None].float(), size=(8, 8)).to(torch.bool)[0]
    return not bool(torch.all(small))


def test_a_mask_of_padding_is_known_if_it_is_small_and_the_error_says_how_small():
    mask = torch.ones(4, 64, 64, dtype=torch.bool)
    with FlopMeter():
        assert not padded(on_meta(mask))
        mask[3, 32:] = False
        assert padded(on_meta(mask))
        with pytest.raises(DataDependentError, match=r"1,048,576 elements.*checks=\"hold\"\) for tests .* of a mask"):
            padded(on_meta(torch.ones(4, 1024, 1024, dtype=torch.bool)))
    with FlopMeter(checks="hold") as meter:
        assert not padded(on_meta(torch.ones(4, 1024, 1024, dtype=torch.bool)))
    assert len(meter.report().assumptions) == 1


def test_no_routing_is_told_where_every_token_goes_through_every_expert():
    """As experts of few tokens do, each weighted by its score or by zero: who was picked changes no kernel."""
    flops = set()
    for routing in (None, "balanced", {"imbalance": 1.5}):
        with FlopMeter("h100-sxm5-80gb", routing=routing) as meter, torch.device("meta"):
            tokens, router, experts = torch.empty(16, 64), nn.Linear(64, 8), torch.empty(8, 64, 64)
            values, picked = router(tokens).topk(2)
            weights = torch.zeros(16, 8).scatter_(1, picked, values.softmax(-1))
            (torch.bmm(tokens.expand(8, 16, 64), experts) * weights.mT[..., None]).sum(0)
        report = meter.report()
        assert report.assumptions == ()
        flops.add(report.flops)
    assert len(flops) == 1


def test_activations_that_wait_on_the_host_go_there_and_back():
    """A layer keeps its input and its weight for the backward pass: 1 MB and 4 MB each way, over PCIe 5.0 x16."""

    def step(offloads: bool):
        with flopmeter.cuda("h100-sxm5-80gb") as device:
            model, x = (
                nn.Linear(1024, 1024, bias=False).cuda(),
                torch.zeros(256, 1024, device="cuda", requires_grad=True),
            )
            for _ in range(3):
                with torch.autograd.graph.save_on_cpu(pin_memory=True) if offloads else nullcontext():
                    out = model(x)
                out.sum().backward()
        return device.report().step

    kept, offloaded = step(False), step(True)
    least_seconds = 2 * 5 * 2**20 / 64e9
    assert kept.flops == offloaded.flops
    assert least_seconds < offloaded.kernel_seconds - kept.kernel_seconds < 2 * least_seconds
