"""What is told of scaled_dot_product_attention that torch runs op by op: why that is, and what makes it one kernel."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopmeter import FlopMeter


class Attends(nn.Module):
    """Attention whose math path the program asks for, or whose call no fused kernel takes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.project = how, nn.Linear(1024, 3072)
        if how.startswith("prefix"):  # keys and values of an adapter, as litgpt's: one batch of them
            self.prefix = nn.Parameter(torch.empty(2, 1, 16, 512, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.project(x).view(batch, length, 3, 16, 64).permute(2, 0, 3, 1, 4)
        if self.how.startswith("prefix"):
            k, v = self.prefix if self.how == "prefix" else self.prefix.expand(2, batch, 16, 512, 64)
            mask = torch.ones(length, 512, dtype=torch.bool, device=x.device)
            mixed = F.scaled_dot_product_attention(q, k, v, mask)
        else:
            with sdpa_kernel(SDPBackend.MATH) if self.how == "math" else nullcontext():
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + mixed.transpose(1, 2).reshape(x.shape)


def report_of(how: str, device: str, dtype: torch.dtype = torch.bfloat16):
    with torch.device("meta"):
        net = nn.Sequential(*[Attends(how) for _ in range(2)]).to(dtype)
        x = torch.empty(16, 1024, 1024, dtype=dtype)
    with FlopMeter(device) as meter:
        net(x).sum().backward()
    return meter.report()


def told_of(report):
    """The advice other than another mode, which any program is given."""
    return [each for each in report.advice if each.remedy != "torch.compile"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("device", ["h100-sxm5-80gb", "a100-sxm4-80gb"])
def test_sdpa_in_a_context_of_the_math_backend_is_told_to_leave_it(device, dtype):
    """The program has no .float(), and calls SDPA already."""
    before, mended = report_of("math", device, dtype), report_of("fused", device, dtype)
    (told,) = [each for each in told_of(before) if "math path" in each.why]
    assert "sdpa_kernel" in told.why
    assert told.remedy.startswith("SDPA outside of sdpa_kernel(SDPBackend.MATH)")
    assert told.gain_seconds == pytest.approx(before.seconds - mended.seconds, rel=0.05)
    assert told.run_seconds_then == pytest.approx(mended.seconds, rel=0.05)
    assert not any("float()" in each.remedy or "attn_implementation" in each.remedy for each in before.advice)
    assert dtype is torch.float32 or told_of(before) == [told]


@pytest.mark.parametrize("device", ["h100-sxm5-80gb", "a100-sxm4-80gb"])
def test_keys_of_another_batch_than_the_queries_are_told_to_be_expanded(device):
    before, mended = report_of("prefix", device), report_of("prefix expanded", device)
    told = told_of(before)[0]
    assert "q, k and v are not of one batch" in told.why
    assert ".expand" in told.remedy
    assert told.gain_seconds == pytest.approx(before.seconds - mended.seconds, rel=0.05)
    assert not any("float()" in each.remedy or "attn_implementation" in each.remedy for each in before.advice)


def test_sdpa_that_runs_as_one_kernel_is_told_nothing_of_it():
    assert not any("math path" in each.why for each in report_of("fused", "h100-sxm5-80gb").advice)
