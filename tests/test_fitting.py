"""What would make a step fit, against the steps that do."""

from __future__ import annotations

import json
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopmeter import FlopMeter

L4 = "l4"
GB = 1e9


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int, layers: int, words: int, checkpoints: bool) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.layers, self.checkpoints = nn.ModuleList([Layer(width) for _ in range(layers)]), checkpoints

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return self.head(x)


def trained(batch: int, *, width: int = 1024, layers: int = 12, words: int = 1000, checkpoints: bool = False):
    """The report of a later step, of `batch` texts of 1,024 tokens."""
    with torch.device("meta"):
        model = Model(width, layers, words, checkpoints)
        ids = torch.zeros(batch, 1024, dtype=torch.int64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        with FlopMeter(L4) as meter:
            F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return meter.report()


def said_of(report) -> str:
    lines = [line for line in str(report).splitlines() if line.startswith("to make it fit")]
    assert len(lines) <= 1
    return lines[0] if lines else ""


def gigabytes(said: str, what: str) -> float:
    found = re.search(re.escape(what) + r"[^;]*\(([\d.]+) GB", said)
    assert found, f"{what!r} is not in {said!r}"
    return float(found[1])


@pytest.mark.parametrize("words", [1000, 50_000], ids=["layers", "a vocabulary"])
def test_a_part_of_the_batch_takes_what_is_said(words):
    said = said_of(trained(64, words=words))
    parts = int(re.search(r"1/(\d+) of the batch", said)[1])
    fits, does_not = trained(64 // parts, words=words), trained(128 // parts, words=words)
    assert gigabytes(said, f"1/{parts} of the batch") == pytest.approx(fits.memory.steady_peak_bytes / GB, rel=0.01)
    assert not said_of(fits)
    assert said_of(does_not).count("1/2 of the batch") >= 1


def test_checkpoints_take_what_is_said_in_memory_and_time():
    plain, mended = trained(64), trained(64, checkpoints=True)
    said = said_of(plain)
    told = gigabytes(said, "a checkpoint around each of Model.layers.*")
    actual = mended.memory.steady_peak_bytes / GB
    assert actual <= told <= 1.1 * actual  # the layer that runs again takes the place of what was freed before it
    times = float(re.search(r"([\d.]+) times as long", said)[1])
    assert times == pytest.approx(mended.seconds / plain.seconds, rel=0.02)
    assert not said_of(mended)


def test_weights_that_are_too_large_alone_are_shared():
    """4,096 wide, 24 layers of 134 million: 12.9 GB of weights, as much of gradients, and twice that of AdamW."""
    report = trained(1, width=4096, layers=24)
    said = said_of(report)
    weights = sum(4 * (8 * width * width + 5 * width + 2 * width) for width in [4096] * 24)
    weights += 4 * (1000 * 4096 * 2 + 1000)
    assert "of the batch" not in said
    assert "checkpoint" not in said
    gpus = int(re.search(r"FSDP over (\d+) GPUs", said)[1])
    assert gpus == 4  # 51.6 GB of 23.2
    assert 1 <= gigabytes(said, "FSDP over 4 GPUs") / (4 * weights / gpus / GB) < 1.1  # and activations of 1,024 tokens
    assert json.loads(report.render("json"))["to_make_it_fit"] == said


def test_what_fits_or_is_no_training_is_told_nothing():
    assert not said_of(trained(1))
    with torch.device("meta"), FlopMeter(L4) as meter, torch.no_grad():
        nn.Linear(1024, 8 * 10**6)(torch.rand(1, 1024))
    assert "does NOT fit" in str(meter.report())
    assert not said_of(meter.report())
