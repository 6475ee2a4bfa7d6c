"""The change that is told of types of numbers, kernel by kernel: it runs what torch runs for the program that is
mended."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopmeter import FlopMeter
from flopmeter.report.advice.autocast import autocast
from flopmeter.report.advice.chosen_kernels import with_chosen_kernels
from flopmeter.report.advice.number_types import narrower_numbers
from flopmeter.report.advice.remedies import priced, trace_of

H100 = "h100-sxm5-80gb"
HALF = torch.bfloat16


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32000, 1024), nn.Linear(1024, 32000)
        self.norm, self.root_norm = nn.LayerNorm(1024), nn.RMSNorm(1024)

    def forward(self, words):
        x = self.root_norm(self.norm(self.table(words)))
        x = F.gelu(x.softmax(-1) + x.cumsum(-1) + F.dropout(x, 0.1))
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.groups = nn.Conv2d(64, 128, 3), nn.BatchNorm2d(128), nn.GroupNorm(8, 128)

    def forward(self, images):
        return F.mse_loss(y := self.groups(self.norm(self.conv(images)).relu()), torch.zeros_like(y))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(512, 1536), nn.Linear(512, 512)

    def forward(self, x):
        q, k, v = (part.unflatten(2, (8, 64)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        return F.mse_loss(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), x)


PROGRAMS = {
    "words": (Words, lambda _: torch.zeros(8, 512, dtype=torch.long, device="meta")),
    "images": (Images, lambda dtype: torch.empty(32, 64, 56, 56, dtype=dtype, device="meta")),
    "heads": (Heads, lambda dtype: torch.empty(8, 512, 512, dtype=dtype, device="meta")),
}


def training_step(name, *, dtype=torch.float32, under_autocast=False):
    """Gradients are made anew, and nothing is left of those before."""
    make, data = PROGRAMS[name]
    with torch.device("meta"):
        model, given = make().to(dtype), data(dtype)
    with FlopMeter(H100) as meter:
        with torch.autocast("cuda", HALF, enabled=under_autocast):
            loss = model(given)
        loss.backward()
    return meter.report()


def kernels_in(report):
    """Which seed is read, and the type of the loss alone, are left out."""
    costs = [(kernel.cost, kernel.op.phase) for kernel in report.kernels]
    return sorted((c.name, phase, c.flops, c.bytes_read // 64, c.bytes_written // 64) for c, phase in costs)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_in_16_bits_keeps_what_its_norms_and_attention_leave_for_the_backward_pass_in_fp32(name):
    report, mended = training_step(name), training_step(name, dtype=HALF)
    (told,) = narrower_numbers(report, trace_of(report))
    assert kernels_in(told.then) == kernels_in(mended)


@pytest.mark.parametrize("name", PROGRAMS)
def test_autocast_casts_the_gradients_of_all_weights_that_it_cast(name):
    report, mended = training_step(name), training_step(name, under_autocast=True)
    then = with_chosen_kernels(autocast(trace_of(report), HALF), report.hardware)
    assert kernels_in(priced(report, then)) == kernels_in(mended)


def test_sums_under_autocast_are_in_fp32():
    def step(*, under_autocast):
        with torch.device("meta"):
            model, x = nn.Linear(1024, 4096), torch.empty(4096, 1024)
        with FlopMeter(H100) as meter, torch.no_grad(), torch.autocast("cuda", HALF, enabled=under_autocast):
            model(x).sum()
        return meter.report()

    report, mended = step(under_autocast=False), step(under_autocast=True)
    told, true = (priced(report, autocast(trace_of(report), HALF)).kernels[-1].cost, mended.kernels[-1].cost)
    assert (told.name, told.bytes_read, told.bytes_written) == (true.name, true.bytes_read, true.bytes_written)
