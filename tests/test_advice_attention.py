"""What is told of attention whose scores go to memory: the change that the program itself can make."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter


class Mixes(nn.Module):
    """torch's own attention, whose averaged weights are given too unless it is told otherwise."""

    def __init__(self, need_weights: bool, reads: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(1024, 16, batch_first=True)
        self.need_weights, self.reads = need_weights, reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed, weights = self.attention(x, x, x, need_weights=self.need_weights)
        return x + mixed + weights.sum() if self.reads else x + mixed


def report_of(need_weights: bool, device: str, reads: bool = False):
    with torch.device("meta"):
        net = nn.Sequential(*[Mixes(need_weights, reads) for _ in range(2)]).bfloat16()
        x = torch.empty(16, 1024, 1024, dtype=torch.bfloat16)
    with FlopMeter(device) as meter:
        net(x).sum().backward()
    return meter.report()


@pytest.mark.parametrize("device", ["h100-sxm5-80gb", "a100-sxm4-80gb"])
def test_attention_of_torch_that_gives_weights_which_nobody_reads_is_told_to_need_none(device):
    """nn.MultiheadAttention is not the program's own code: `need_weights=False` lets it run SDPA."""
    before, mended = report_of(True, device), report_of(False, device)
    first = before.advice[0]
    assert first.remedy == "need_weights=False in the calls of nn.MultiheadAttention, which then runs fused attention"
    assert first.gain_seconds == pytest.approx(before.seconds - mended.seconds, rel=0.05)  # it scales q by itself, too


def test_weights_that_are_read_are_needed():
    told = [each.remedy for each in report_of(True, "h100-sxm5-80gb", reads=True).advice]
    assert not any("need_weights" in remedy for remedy in told)
