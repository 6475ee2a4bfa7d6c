"""What the advice says of torch.autocast, beside the same program under it."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import flopmeter
from flopmeter import FlopMeter

H100 = "h100-sxm5-80gb"


class EagerAttention(nn.Module):
    """With softmax and dropout between its products, and a residual stream that stays in fp32."""

    def __init__(self, width: int = 768, heads: int = 12):
        super().__init__()
        self.heads = heads
        self.token = nn.Embedding(32000, width)
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(width, 32000)

    def forward(self, tokens):
        x = self.token(tokens)
        qkv = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, 2))
        q, k, v = qkv
        weights = self.dropout((q @ k.transpose(2, 3) / 8).softmax(3))
        return self.head(x + self.dropout(self.out((weights @ v).transpose(1, 2).flatten(2))))


class Gated(nn.Module):
    """A layer of Llama's kind, run again in the backward pass."""

    def __init__(self, width: int = 1024):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False) if self.training else self.layer(x)

    def layer(self, x):
        q, k, v = (part.unflatten(2, (16, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.layers, self.head = nn.Embedding(9000, 512), nn.LSTM(512, 512, 2), nn.Linear(512, 9000)

    def forward(self, tokens):
        return self.head(self.layers(self.token(tokens))[0])


def images() -> nn.Module:
    """Batch norms, of which cuDNN takes those in fp32 alone, instance norms and transposed convolutions."""
    block = [nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    up = [nn.ConvTranspose2d(64, 32, 4, 2, 1), nn.InstanceNorm2d(32), nn.GELU()]
    return nn.Sequential(
        nn.Conv2d(3, 64, 4, 2, 1), *block, *up, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 9)
    )


PROGRAMS = {
    "eager attention": (EagerAttention, (8, 512)),
    "layers that are checkpointed": (lambda: nn.Sequential(nn.Embedding(9000, 1024), Gated(), Gated()), (4, 1024)),
    "recurrent layers": (Recurrent, (16, 2048)),
    "images": (images, (64, 3, 112, 112)),
}


def report(
    name: str, *, trains: bool, under_autocast: bool = False, dtype: torch.dtype = torch.float32, mode: str = "eager"
):
    make, shape = PROGRAMS[name]
    with torch.device("meta"):
        model = make().train(trains).to(dtype)
        given = torch.empty(shape, dtype=dtype) if len(shape) == 4 else torch.zeros(shape, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    with FlopMeter(H100) as meter:
        for _ in range(2):
            first = len(meter.trace.ops)
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16, enabled=under_autocast), torch.set_grad_enabled(trains):
                scores = model(given).flatten(0, -2)
                wanted = torch.zeros(scores.shape[0], dtype=torch.long, device="meta")
                loss = F.cross_entropy(scores, wanted)
            if trains:
                loss.backward()
                optimizer.step()
    return meter.report(mode=mode, ops=range(first, len(meter.trace.ops)))


def milliseconds_told(report) -> float:
    told = next(each.remedy for each in report.advice if each.remedy.startswith("bfloat16"))
    number, unit = re.search(r"torch\.autocast .* \(then ([\d.]+) (µs|ms)\)", told).groups()
    return float(number) * {"ms": 1, "µs": 1e-3}[unit]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_autocast_is_priced_as_the_program_under_it_takes(name, trains):
    before, mended = (report(name, trains=trains, under_autocast=each) for each in (False, True))
    assert milliseconds_told(before) == pytest.approx(1e3 * mended.seconds, rel=0.05)


@pytest.mark.parametrize("trains", [True, False])
def test_bfloat16_is_priced_with_the_batch_norms_that_run_in_it(trains):
    """cuDNN takes them in fp32 and not in bf16."""
    before, mended = (report("images", trains=trains, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    told = next(each for each in before.advice if each.remedy.startswith("bfloat16"))
    assert told.gain_seconds == pytest.approx(before.seconds - mended.seconds, rel=0.03)


def test_of_layers_that_run_as_one_op_no_time_under_autocast_is_told():
    """It takes them apart."""
    layer = nn.TransformerEncoderLayer(768, 12, dim_feedforward=3072, batch_first=True, device="meta").eval()
    with FlopMeter(H100) as meter, torch.no_grad():
        layer(torch.empty(32, 512, 768, device="meta"))
    assert "torch.autocast where weights have to stay fp32" in meter.report().advice[0].remedy
    assert "then" not in meter.report().advice[0].remedy


def test_by_the_rules_of_fusion_the_casts_are_in_the_compiled_kernels():
    before, mended = (
        report("eager attention", trains=True, under_autocast=each, mode="compiled") for each in (False, True)
    )
    assert milliseconds_told(before) == pytest.approx(1e3 * mended.seconds, rel=0.05)


def test_of_kernels_that_the_compiler_wrote_no_time_under_autocast_is_told():
    """Its casts are in kernels that it would write then."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)), torch.empty(4096, 1024)
    with FlopMeter(H100, compile=True) as meter:
        torch.compile(model)(x).sum().backward()
    (told,) = [each.remedy for each in meter.report().advice if each.remedy.startswith("bfloat16")]
    assert told.endswith("torch.autocast where weights have to stay fp32")


def recurrent_step(dtype=None):
    """A training step of one layer whose size cuDNN's kernel for fp16 takes, under autocast with that type."""
    with flopmeter.cuda(H100) as device:
        layer, x = nn.LSTM(512, 512).to(device), torch.empty(100, 32, 512, device=device)
        optimizer = torch.optim.SGD(layer.parameters())
        with torch.autocast("cuda", dtype or torch.float16, enabled=dtype is not None):
            loss = layer(x)[0].float().sum()
        loss.backward()
        optimizer.step()
    return device.report().step


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_recurrent_layer_is_told_that_under_autocast_one_kernel_runs_all_of_its_steps(dtype):
    before, mended = recurrent_step(), recurrent_step(dtype)
    told = next(each for each in before.advice if each.remedy.startswith("torch.autocast, under which recurrent"))
    assert told.gain_seconds == pytest.approx(before.seconds - mended.seconds, rel=0.05)
    assert mended.seconds < 0.5 * before.seconds
