"""Advice on tokens that are computed without need, against the program without them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flopmeter
from flopmeter import FlopMeter
from flopmeter.trace.padding import longest_text

H100 = "h100-sxm5-80gb"
HALF = torch.bfloat16
Kept = list[tuple[torch.Tensor, torch.Tensor]]


class Layer(nn.Module):
    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.fused, self.norm = fused, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor, mask: Any, kept: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 64)).permute(2, 0, 3, 1, 4)
        k, v = (k, v) if kept is None else kept
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None and kept is None)
        else:
            scores = q @ k.transpose(-1, -2) / 8
            mixed = (scores if mask is None else scores.masked_fill(~mask, -1e9)).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self, width: int = 768, fused: bool = True) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(5000, width), nn.Embedding(2048, width)
        self.layers = nn.ModuleList([Layer(width, fused) for _ in range(2)])
        self.head = nn.Linear(width, 5000)

    def forward(self, ids: torch.Tensor, mask: Any = None, kept: Kept | None = None) -> torch.Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for number, layer in enumerate(self.layers):
            x = layer(x, mask, kept and kept[number])
        return self.head(x)


def texts(lengths: list[int], padded_to: int, left: bool = False) -> torch.Tensor:
    """Ids 1, 2, 3, ... of texts of these lengths, and zeros."""
    ids = torch.zeros(len(lengths), padded_to, dtype=torch.int64)
    for row, length in zip(ids, lengths, strict=True):
        row[(padded_to - length if left else 0) :][:length] = torch.arange(1, length + 1)
    return ids


@pytest.mark.parametrize("left", [False, True])
def test_the_longest_text_is_where_the_last_padding_begins(left):
    assert longest_text(texts([5, 3, 7], 10, left)) == 7
    assert longest_text(texts([5, 10, 7], 10, left)) == 10  # one fills its row
    assert longest_text(texts([5, 9, 7], 10, left)) == 10  # one id at an end may be a word
    assert longest_text(texts([5, 0, 7], 10, left)) == 10  # nothing but one id: not padding as it is known
    other = texts([5, 3, 7], 10, left)
    other[1][other[1] == 0] = 4
    assert longest_text(other) == 10  # two ids


def step(ids: torch.Tensor, *, width: int = 768, fused: bool = True, masked: bool = True, trains: bool = True) -> Any:
    model = Model(width, fused).to("meta", HALF)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    with FlopMeter(H100) as meter:
        given = torch.empty_like(ids, device="meta").copy_(ids)
        mask = (given != 0)[:, None, None].expand(-1, -1, ids.shape[1], -1) if masked else None
        with torch.set_grad_enabled(trains):
            y = model(given, mask)
        if trains:
            y.sum().backward()
            optimizer.step()
    return meter.report()


def told(report: Any, what: str) -> list[Any]:
    return [each for each in report.advice if what in each.remedy]


@pytest.mark.parametrize("trains", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "not masked"])
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "written out"])
def test_padding_to_the_longest_text_is_priced_as_the_program_that_does(fused, masked, trains):
    lengths = [200 - number for number in range(64)]
    padded, mended = (step(texts(lengths, to), fused=fused, masked=masked, trains=trains) for to in (512, 200))
    (advice,) = told(padded, "pad each batch to its longest text (here to 200)")
    assert advice.why.startswith("of the 512 tokens of each text 61 % are padding")
    assert advice.run_seconds_then == pytest.approx(mended.seconds, rel=0.02)
    assert not told(mended, "longest text")


@pytest.mark.parametrize(
    ("ids", "options"),
    [(texts([200, 512], 512), {}), (texts([200] * 8, 768), {}), (texts([200] * 2, 384), {})],
    ids=["one text is as long", "as many tokens as a layer is wide", "all tokens are"],
)
def test_nothing_is_told_of_padding_that_has_to_be_or_that_no_dimension_tells(ids, options):
    assert not told(step(ids, **options), "longest text")


def generated(caches: bool, fused: bool = True, tokens: int = 700, appends: bool = True) -> Any:
    """The report of one token for eight texts, of a model of width 2048."""
    with torch.device("meta"):
        model, heads = Model(2048, fused).to(HALF), 32
        ids = torch.zeros(8, tokens, dtype=torch.int64)
        kept = [(torch.empty(8, heads, tokens + 2, 64, dtype=HALF),) * 2 for _ in model.layers]
    with FlopMeter(H100) as meter, torch.no_grad():
        for _ in range(3):
            start = len(meter.trace.ops)
            scores = model(ids[:, -1:], kept=kept) if caches else model(ids)
            new = scores[:, -1].argmax(-1, keepdim=True)
            ids = torch.cat((ids, new), 1) if appends else torch.zeros(8, tokens, dtype=torch.int64, device="meta")
    return meter.report(ops=range(start, len(meter.trace.ops)))


def test_a_cache_of_keys_and_values_is_priced_as_the_program_that_has_one():
    plain, mended = generated(caches=False), generated(caches=True)
    (advice,) = told(plain, "KV cache")
    assert "all 702 tokens" in advice.why
    assert advice.run_seconds_then == pytest.approx(mended.seconds, rel=0.03)
    assert not told(mended, "KV cache")


def test_a_cache_is_told_of_where_texts_grow_and_keys_are_seen():
    assert not told(generated(caches=False, appends=False), "KV cache")
    assert not told(generated(caches=False, fused=False), "KV cache")


def from_a_script(places: object, texts: int) -> str:
    """The report of a step that generates from a prompt of zeros, without a cache, and takes `places` of the scores."""
    with flopmeter.cuda(H100) as device, torch.no_grad():
        embedding, head = nn.Embedding(4000, 1024).to(device, HALF), nn.Linear(1024, 4000).to(device, HALF)
        layer = Layer(1024, fused=True).to(device, HALF)
        model = nn.ModuleList([embedding, layer, head])
        model.forward = lambda ids: head(layer(embedding(ids), None, None))  # type: ignore[method-assign]
        ids = torch.zeros(texts, 512, dtype=torch.int64, device=device)
        for _ in range(40):
            scores = model(ids)[:, places].flatten(1)
            ids = torch.cat((ids, scores.argmax(-1, keepdim=True)), 1)
        return str(device.report().step)


def test_the_prompt_of_texts_that_grow_is_no_padding_though_it_is_one_id_again_and_again():
    text = from_a_script(-1, texts=32)
    assert "a KV cache" in text
    assert "padding" not in text


def test_a_list_of_places_in_a_step_of_a_script_is_told_to_be_a_slice():
    text = from_a_script([-1], texts=8)
    assert "for a list of indices a slice" in text
    assert "pin_memory" not in text
