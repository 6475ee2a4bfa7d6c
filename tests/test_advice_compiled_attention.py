"""Attention written out in a compiled program: told is what the program takes that calls SDPA instead."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopmeter import FlopMeter, Report
from flopmeter.report.advice.attention import materialised_attention
from flopmeter.report.advice.needless import masks_of_tokens
from flopmeter.report.advice.remedies import Proposal, trace_of

BATCH, TOKENS, HEADS, WIDTH = 4, 1024, 12, 768
Attend = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


def written(*, causal: bool = False, dropout: float = 0.0, bend: Callable[[Tensor], Tensor] | None = None) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if bend is not None:
            scores = bend(scores)
        if mask is not None:
            scores = scores + mask
        if causal:
            places = torch.arange(q.shape[-2], device=q.device)
            scores = scores.masked_fill(places[None] > places[:, None], float("-inf"))
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return F.dropout(weights, dropout) @ v

    return attend


def fused(*, causal: bool = False, dropout: float = 0.0) -> Attend:
    return lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)


class Layer(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        return x + self.out(self.attend(*heads, mask).transpose(1, 2).flatten(2))


class Net(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attend) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


def compiled(attend: Attend, mask: Tensor | None = None, *, train: bool = True) -> Report:
    with torch.device("meta"):
        net, x = Net(attend).to(torch.bfloat16), torch.empty(BATCH, TOKENS, WIDTH, dtype=torch.bfloat16)
    with FlopMeter("h100-sxm5-80gb") as meter, torch.set_grad_enabled(train):
        out = torch.compile(net)(x, mask)
        if train:
            out.backward(torch.empty_like(out))
    return meter.report()


def told(report: Report) -> list[Proposal]:
    return list(materialised_attention(report, trace_of(report)))


@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("dropout", [0.0, 0.1], ids=["all kept", "dropout"])
def test_told_is_the_time_of_the_program_that_calls_sdpa(dropout: float, train: bool) -> None:
    report = compiled(written(causal=True, dropout=dropout), train=train)
    (proposal,) = told(report)
    mended = compiled(fused(causal=True, dropout=dropout), train=train)
    assert "scaled_dot_product_attention" in proposal.remedy
    assert proposal.then.kernel_seconds == pytest.approx(mended.kernel_seconds, rel=0.05)
    assert proposal.then.kernel_seconds < 0.8 * report.kernel_seconds


def test_attention_of_all_tokens_is_found_though_the_compiler_scales_within_the_softmax() -> None:
    (proposal,) = told(compiled(written()))
    assert proposal.then.kernel_seconds == pytest.approx(compiled(fused()).kernel_seconds, rel=0.05)


def test_what_the_compiler_takes_for_sdpa_itself_needs_no_advice() -> None:
    """As one of the patterns of torch/_inductor/fx_passes/fuse_attention.py."""
    q, k, v = (torch.empty(BATCH, HEADS, TOKENS, 64, dtype=torch.bfloat16, device="meta") for _ in range(3))
    with FlopMeter("h100-sxm5-80gb") as meter, torch.no_grad():
        torch.compile(lambda q, k, v: (q @ k.transpose(-2, -1)).div(8.0).softmax(dim=-1).matmul(v))(q, k, v)
    report = meter.report()
    assert not told(report)
    assert any("scaled_dot_product" in kernel.cost.name for kernel in report.kernels)


def test_a_mask_that_is_added_goes_to_the_fused_kernel() -> None:
    mask = torch.empty(BATCH, 1, TOKENS, TOKENS, dtype=torch.bfloat16, device="meta")
    (proposal,) = told(compiled(written(), mask, train=False))
    mended = compiled(fused(), mask, train=False)
    assert proposal.then.kernel_seconds == pytest.approx(mended.kernel_seconds, rel=0.05)


def packed(attend: Attend) -> Attend:
    """Each token looks at those before it of the same document. `mask` has the documents of each sequence."""

    def attend_within(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        places = torch.arange(TOKENS, device=q.device)
        seen = (places[None] <= places[:, None]) & (mask[:, :, None] == mask[:, None])
        return attend(q, k, v, torch.where(seen, 0.0, float("-inf")).to(q.dtype)[:, None])

    return attend_within


def test_documents_packed_into_sequences_are_no_causal_mask() -> None:
    documents = torch.empty(BATCH, TOKENS, dtype=torch.int64, device="meta")
    (proposal,) = told(compiled(packed(written()), documents, train=False))
    mended = compiled(packed(fused()), documents, train=False)
    assert proposal.then.kernel_seconds == pytest.approx(mended.kernel_seconds, rel=0.05)


def by_place(attend: Attend) -> Attend:
    """Each token looks at those before it by the positions that `mask` has for each sequence, as transformers' models
    do."""

    def attend_by_place(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        assert mask is not None
        places = torch.arange(TOKENS, device=q.device)
        seen = (places[None] <= places[:, None]) & (mask[:, :, None] == mask[:, None])
        return attend(q, k, v, seen[:, None])

    return attend_by_place


@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
def test_a_mask_made_of_the_tokens_places_is_told_to_be_left_out_if_nothing_is_packed(train: bool) -> None:
    documents = torch.empty(BATCH, TOKENS, dtype=torch.int64, device="meta")
    report = compiled(by_place(fused()), documents, train=train)
    (proposal,) = masks_of_tokens(report, trace_of(report))
    mended = compiled(fused(causal=True), train=train)
    assert "is_causal=True" in proposal.remedy
    assert "if no text is padded or packed" in proposal.remedy
    assert proposal.then.kernel_seconds == pytest.approx(mended.kernel_seconds, rel=0.05)
    assert proposal.then.kernel_seconds < 0.9 * report.kernel_seconds


def test_a_mask_of_numbers_may_say_anything() -> None:
    """A bias for each pair, or a mask that the program was given."""
    mask = torch.empty(BATCH, 1, TOKENS, TOKENS, dtype=torch.bfloat16, device="meta")
    report = compiled(fused(), mask, train=False)
    assert not list(masks_of_tokens(report, trace_of(report)))


def test_scores_that_a_function_bends_are_left_alone() -> None:
    """SDPA has no soft cap."""
    assert not told(compiled(written(bend=lambda scores: 30 * torch.tanh(scores / 30))))


def test_weights_that_the_program_returns_are_left_alone() -> None:
    weights = []

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        weights.append(F.softmax(q @ k.transpose(-2, -1), dim=-1))
        return weights[-1] @ v

    class Returning(Net):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            weights.clear()
            out = super().forward(x, mask)
            return out, weights[-1]

    with torch.device("meta"), torch.no_grad():
        net, x = Returning(attend).to(torch.bfloat16), torch.empty(BATCH, TOKENS, WIDTH, dtype=torch.bfloat16)
        with FlopMeter("h100-sxm5-80gb") as meter:
            torch.compile(net)(x)
    assert not told(meter.report())
