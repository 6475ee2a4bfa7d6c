"""The change that is told of channels_last, beside the program whose weights and images lie so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopmeter import FlopMeter
from flopmeter.report.advice.layout import channels_last
from flopmeter.report.advice.remedies import trace_of

HALF = torch.bfloat16
COPY = dict.fromkeys(("copy_", "_to_copy", "clone"), "copy")


class Residual(nn.Module):
    def __init__(self, norm) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(128, 128, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(norm() for _ in range(2))

    def forward(self, x):
        return x + self.second(F.silu(self.norms[1](self.first(F.silu(self.norms[0](x))))))


class ChannelsInnermost(nn.Module):
    """As in ConvNeXt: a layer norm and linear layers over the channels, between turns of the dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(128, 128, 7, padding=3, groups=128), nn.LayerNorm(128)
        self.wide, self.narrow = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x):
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + self.narrow(F.gelu(self.wide(y))).permute(0, 3, 1, 2)


class Neighbours(nn.Module):
    """As in DGCNN: features of each point's neighbours, which the program copies into NCHW."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(128, 128, 1, bias=False), nn.BatchNorm2d(128)

    def forward(self, x):
        features = (x + 1).permute(0, 3, 1, 2).contiguous()
        return F.leaky_relu(self.norm(self.conv(features))).amax(-1)


class ByParts(nn.Module):
    """Channels that are joined and taken apart again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(128, 128, 3, padding=1)

    def forward(self, x):
        one, other = self.second(torch.cat([x, self.first(x)], 1)).chunk(2, 1)
        return one * other.sigmoid()


def stem(*layers: nn.Module, width: int = 128) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 4, 4), *layers)


PROGRAMS = {
    "batch norms": (lambda: stem(*(Residual(lambda: nn.BatchNorm2d(128)) for _ in range(2))), (32, 3, 224, 224), True),
    "group norms": (lambda: stem(*(Residual(lambda: nn.GroupNorm(8, 128)) for _ in range(2))), (32, 3, 224, 224), True),
    "channels innermost": (lambda: stem(*(ChannelsInnermost() for _ in range(2))), (32, 3, 224, 224), False),
    "copied into NCHW": (Neighbours, (8, 1024, 20, 128), False),
    "parts": (lambda: stem(ByParts(), width=64), (32, 3, 224, 224), True),
}


def metered(name, *, in_order=torch.contiguous_format):
    make, shape, trains = PROGRAMS[name]
    with torch.device("meta"):
        model = make().to(HALF).to(memory_format=in_order)
        images = torch.empty(shape, dtype=HALF)
    with FlopMeter("h100-sxm5-80gb") as meter, torch.set_grad_enabled(trains):
        out = model(images.to(memory_format=in_order) if shape[1] == 3 else images)
        if trains:
            out.backward(torch.empty_like(out))
    return meter.report()


def kernels_in(report):
    costs = (kernel.cost for kernel in report.kernels)
    return sorted((COPY.get(cost.name, cost.name), cost.flops, cost.bytes_read, cost.bytes_written) for cost in costs)


@pytest.mark.parametrize("name", PROGRAMS)
def test_channels_last_is_priced_with_the_copies_of_what_lies_in_another_order(name):
    report, mended = metered(name), metered(name, in_order=torch.channels_last)
    (told,) = channels_last(report, trace_of(report))
    assert kernels_in(told.then) == kernels_in(mended)
    assert told.then.kernel_seconds == pytest.approx(mended.kernel_seconds, rel=0.01)
