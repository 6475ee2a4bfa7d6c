"""Advice about programs that torch compiles: told is what the mended program takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flopmeter
from flopmeter import FlopMeter, Report
from flopmeter.report.advice import REMEDIES, NoAdviceWarning
from flopmeter.report.wins import Advice

DEVICE = "h100-sxm5-80gb"
HALF = torch.bfloat16


def metered(step: Callable[[], object]) -> Report:
    with FlopMeter(DEVICE) as meter:
        step()
    return meter.report()


def told(report: Report, remedy: str) -> Advice:
    (advice,) = (each for each in report.advice if remedy in each.remedy)
    return advice


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(6)))
        self.head = nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x)
        return self.head(features), features


def a_pass_for_each_result(*, is_mended: bool) -> Report:
    with torch.device("meta"):
        net, x = TwoResults().to(HALF), torch.empty(8192, 2048, dtype=HALF)
    compiled = torch.compile(net)

    def step() -> None:
        net.zero_grad()
        first, second = (result.float().square().mean() for result in compiled(x))
        if is_mended:
            (first + second).backward()
        else:
            first.backward(retain_graph=True)
            second.backward()

    return metered(step)


def test_one_backward_pass_is_told_where_a_compiled_one_runs_for_each_of_two_losses() -> None:
    """The second begins with zeros for the result that its loss does not read."""
    advice = told(a_pass_for_each_result(is_mended=False), "one backward()")
    mended = a_pass_for_each_result(is_mended=True)
    assert advice.run_seconds_then == pytest.approx(mended.seconds, rel=0.05)


def test_a_fault_in_one_kind_of_advice_costs_that_advice_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(report: Report, trace: object) -> list[object]:
        raise IndexError("tuple index out of range")

    monkeypatch.setattr(flopmeter.report.advice, "REMEDIES", [broken, *REMEDIES])
    with torch.device("meta"), FlopMeter(DEVICE) as meter:
        F.linear(torch.empty(4096, 4096), torch.empty(4096, 4096))
    with pytest.warns(NoAdviceWarning, match="no advice about broken .*IndexError: tuple index out of range"):
        advice = meter.report().advice
    assert any("TF32" in each.remedy or "bf16" in each.remedy for each in advice)


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))
        self.head = nn.Linear(1024, 32000, bias=False)

    def forward(self, x: Tensor, *, last: bool) -> Tensor:
        x = self.body(x)
        return self.head(x[:, -1:] if last else x)


def scored(*, last: bool, compiles: bool, keeps: bool = False) -> Report:
    """Of a call in a loop of calls: what is read of its scores is read before the next."""
    kept = []
    with flopmeter.cuda(DEVICE) as device, torch.no_grad():
        net, x = Scorer().to(device, HALF), torch.randn(8, 512, 1024, dtype=HALF, device=device)
        call = torch.compile(net) if compiles else net
        for _ in range(6):
            scores = call(x * 2, last=last)
            _ = scores[:, -1].float().argmax(-1)
            kept += [scores] if keeps else []
        return device.report().step


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_scores_of_tokens_that_nobody_reads_are_told_though_a_step_ends_with_the_call_that_makes_them(
    compiles: bool,
) -> None:
    advice = told(scored(last=False, compiles=compiles), "logits_to_keep")
    mended = scored(last=True, compiles=compiles)
    assert advice.run_seconds_then == pytest.approx(mended.seconds, rel=0.03)
    assert not any("logits_to_keep" in each.remedy for each in mended.advice)


def test_scores_that_the_program_keeps_may_be_read_later() -> None:
    assert not any("logits_to_keep" in each.remedy for each in scored(last=False, compiles=False, keeps=True).advice)


@pytest.mark.parametrize("lengths", [(64, 64, 64, 64), (64, 80, 96, 112)], ids=["one size", "several sizes"])
def test_a_cuda_graph_is_captured_for_each_size_of_the_inputs(lengths: tuple[int, ...]) -> None:
    """cudagraph_trees.py keeps one for each set of whole numbers that a compiled function is called with."""
    with torch.device("meta"), torch.no_grad():
        net = torch.compile(nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(8))).to(HALF))
        with FlopMeter(DEVICE) as meter:
            for length in lengths:
                net(torch.empty(length, 512, dtype=HALF))
    advice = told(meter.report(), "reduce-overhead")
    assert ("padded to a few sizes" in advice.remedy) == (len(set(lengths)) > 1)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.layer = nn.GRUCell(512, 512), nn.GRU(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(x.shape[1], 512)
        for token in x:
            state = self.cell(token, state)
        return state


def recurrent(call: Callable[[Cells], Callable[[Tensor], Tensor]]) -> Report:
    with torch.device("meta"):
        net, x = Cells().half(), torch.empty(64, 32, 512, dtype=torch.float16)

    def step() -> None:
        net.zero_grad()
        call(net)(x).float().sum().backward()

    return metered(step)


def test_cells_in_a_loop_that_is_compiled_are_told_with_all_of_their_backward_pass() -> None:
    """Inductor adds what a product gives to a gradient within the product (addmm), outside of the cell's module. Six
    small ones behind the loop are left, and the call of the graph."""
    advice = told(recurrent(torch.compile), "nn.GRU over the whole sequence")
    mended = recurrent(lambda net: lambda x: net.layer(x)[0][-1])
    assert advice.run_seconds_then == pytest.approx(mended.seconds, rel=0.15)
