"""What is told of attention whose scores go to memory: the change that the program itself can make."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

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
    return report_of_two(lambda: Mixes(need_weights, reads), 1024, device)


def report_of_two(make: Callable[[], nn.Module], length: int, device: str):
    """Of two such layers in training, on 16 texts of that length."""
    with torch.device("meta"):
        net = nn.Sequential(make(), make()).bfloat16()
        x = torch.empty(16, length, 1024, dtype=torch.bfloat16)
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


class Capped(nn.Module):
    """Attention whose scores a soft cap bends, as in Gemma 2, written out or by flex_attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.project = how, nn.Linear(1024, 3072)
        self.mix = nn.Conv2d(16, 16, 1) if how == "talking heads" else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.project(x).view(batch, length, 3, 16, 64).permute(2, 0, 3, 1, 4)
        if self.how == "flex":
            return x + flex_attention(q, k, v, score_mod=cap, block_mask=CAUSAL).transpose(1, 2).reshape(x.shape)
        scores = self.mix(q @ k.transpose(-1, -2) / 8)
        scores = torch.tanh(scores / 50) * 50 if self.how == "capped" else scores
        after = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(after, float("-inf")).softmax(-1)
        return x + (weights @ v).transpose(1, 2).reshape(batch, length, width)


def cap(score: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
    return torch.tanh(score / 50) * 50  # torch.vmap copies the numbers


CAUSAL = create_block_mask(lambda batch, head, query, key: query >= key, None, None, 2048, 2048, "cpu").to("meta")


def report_of_capped(how: str, device: str):
    return report_of_two(lambda: Capped(how), 2048, device)


@pytest.mark.parametrize("device", ["h100-sxm5-80gb", "a100-sxm4-80gb"])
def test_scores_under_a_soft_cap_are_told_to_use_flex_attention_which_has_such_a_function(device):
    """SDPA has none: the program would compute something else."""
    before, flex = report_of_capped("capped", device), report_of_capped("flex", device)
    assert not any("scaled_dot_product_attention" in each.remedy for each in before.advice)
    (told,) = [each for each in before.advice if "flex_attention) with a score_mod" in each.remedy]
    (compiled,) = [each for each in flex.advice if each.remedy.startswith("torch.compile(flex_attention)")]
    assert told.run_seconds_then == pytest.approx(compiled.run_seconds_then, rel=0.05)


def test_no_fused_kernel_mixes_the_scores_of_heads():
    told = [each.remedy for each in report_of_capped("talking heads", "h100-sxm5-80gb").advice]
    assert not any("attention" in remedy for remedy in told)


def test_scores_that_nothing_bends_are_told_to_use_sdpa():
    told = [each.remedy for each in report_of_capped("plain", "h100-sxm5-80gb").advice]
    assert sum("attention" in remedy for remedy in told) == 1
    assert any("scaled_dot_product_attention" in remedy for remedy in told)


class Windows(nn.Module):
    """Attention in windows with a bias by position that is trained and a mask of each of 16 windows, as Swin has it."""

    def __init__(self, fused: bool, masked: bool, tokens: int) -> None:
        super().__init__()
        self.heads, self.tokens, self.windows, self.fused = 3, tokens, 16, fused
        self.qkv, self.out = nn.Linear(48, 144), nn.Linear(48, 48)
        self.bias = nn.Parameter(torch.empty(1, self.heads, self.tokens, self.tokens))
        self.masks = torch.empty(self.windows, 1, self.tokens, self.tokens, dtype=torch.bfloat16) if masked else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        square, times = (self.heads, tokens, tokens), batch // self.windows
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fused:
            mask = self.bias
            if self.masks is not None:
                mask = (mask + self.masks).expand(times, self.windows, *square).reshape(batch, *square)
            mixed = F.scaled_dot_product_attention(q, k, v, mask)
        else:
            scores = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5 + self.bias
            if self.masks is not None:
                scores = (scores.view(times, self.windows, *square) + self.masks).view(batch, *square)
            mixed = scores.softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, width))


@pytest.mark.parametrize("tokens", [344, 343])  # of which the kernel's rows of a mask are aligned, or padded
@pytest.mark.parametrize("masked", [False, True])
def test_a_fused_kernel_in_windows_pays_for_its_mask_and_for_the_gradient_of_the_bias(masked, tokens):
    """The program that is mended by hand makes the mask of bias and windows, repeats it for all, and sums up twice."""
    before, after = (report_of_windows(fused, masked, tokens) for fused in (False, True))
    (told,) = (each for each in before.advice if each.remedy.startswith("F.scaled_dot_product_attention"))
    assert told.run_seconds_then == pytest.approx(after.seconds, rel=0.05)


def report_of_windows(fused: bool, masked: bool, tokens: int):
    with torch.device("meta"):
        net = nn.Sequential(*(Windows(fused, masked, tokens) for _ in range(2))).bfloat16()
        x = torch.empty(128, tokens, 48, dtype=torch.bfloat16)
    with FlopMeter("h100-sxm5-80gb") as meter:
        net(x).sum().backward()
    return meter.report()


class Mixer(nn.Module):
    """Attention by SDPA or written out, on x of [4, 1024, 1024] in heads of 64."""

    def __init__(self, is_fused: bool) -> None:
        super().__init__()
        self.qkv, self.is_fused = nn.Linear(1024, 3072), is_fused

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, 16, -1).permute(2, 0, 3, 1, 4)
        if self.is_fused:
            mixed = F.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1) @ v
        return x + mixed.transpose(1, 2).reshape(x.shape)


def in_direction(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The change of the result as x changes, as MeanFlow takes it: the gradient of a gradient, which reads no number
    that the first one made."""
    return torch.autograd.functional.jvp(model, x, torch.ones_like(x))[1]


def test_no_fused_attention_is_told_where_gradients_of_its_gradients_are_taken():
    """torch has no gradient of a fused gradient, nor of one that torch.compile made."""
    x = torch.zeros(2, 8, 1024)
    assert torch.isfinite(in_direction(Mixer(is_fused=False), x)).all()
    with pytest.raises(RuntimeError, match=r"attention_for_cpu_backward is not implemented"):
        in_direction(Mixer(is_fused=True), x)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        in_direction(torch.compile(Mixer(is_fused=False), backend="aot_eager"), x)

    model = Mixer(is_fused=False).to("meta", torch.bfloat16)
    x = torch.empty(4, 1024, 1024, device="meta", dtype=torch.bfloat16)
    programs = {
        "once": lambda: model(x).sum().backward(),
        "twice": lambda: in_direction(model, x),
        "both": lambda: (in_direction(model, x), model(x).sum().backward()),
    }
    told: dict[str, str] = {}
    for name, program in programs.items():
        with FlopMeter("h100-sxm5-80gb") as meter:
            program()
        told[name] = "\n".join(each.remedy for each in meter.report().advice)
    assert {name for name in told if "scaled_dot_product_attention" in told[name]} == {"once", "both"}
    assert {name for name in told if "but where gradients of gradients are taken" in told[name]} == {"both"}
    assert {name for name in told if "torch.func.grad" in told[name]} == {"twice", "both"}
