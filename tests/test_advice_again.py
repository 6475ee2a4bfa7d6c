"""Advice on what a program computes again from the same tensors, against the program that keeps it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flopmeter
from flopmeter import FlopMeter

H100 = "h100-sxm5-80gb"
HALF = torch.bfloat16


def told(report):
    return [each for each in report.advice if each.remedy.startswith("compute it once")]


def last_of(step: Callable[[], object], times: int = 3):
    """The report of the last of so many steps."""
    with torch.device("meta"), FlopMeter(H100) as meter:
        for _ in range(times):
            start = len(meter.trace.ops)
            step()
    return meter.report(ops=range(start, len(meter.trace.ops)))


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (16, 64)).transpose(1, 2)


class Reader(nn.Module):
    """A layer that looks at a text."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = (nn.Linear(1024, size, dtype=HALF, device="meta") for size in (1024, 2048, 1024))

    def keys_of(self, text: torch.Tensor) -> list[torch.Tensor]:
        return [heads(each) for each in self.kv(text).chunk(2, -1)]

    def forward(self, x: torch.Tensor, text: torch.Tensor | None, kept: list[torch.Tensor] | None) -> torch.Tensor:
        q = heads(self.q(x))
        k, v = self.keys_of(text) if kept is None else kept
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("tokens", [200, 1500])
@torch.no_grad()
def test_keys_of_a_text_that_each_token_makes_anew_are_priced_as_those_that_are_kept(tokens):
    layers = [Reader() for _ in range(6)]
    text = torch.empty(32, tokens, 1024, dtype=HALF, device="meta")

    def decoding(keeps: bool) -> Callable[[], None]:
        kept = [layer.keys_of(text) if keeps else None for layer in layers]
        x = [torch.empty(32, 1, 1024, dtype=HALF, device="meta")]

        def step() -> None:
            for layer, own in zip(layers, kept, strict=True):
                x[0] = layer(x[0], text, own)

        return step

    plain, mended = last_of(decoding(False)), last_of(decoding(True))
    (advice,) = told(plain)
    assert advice.remedy == "compute it once and keep it, before the loop"
    assert advice.gain_seconds == pytest.approx(plain.seconds - mended.seconds, rel=0.05)
    assert not told(mended)


def angles(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    turns = torch.outer(torch.arange(length).float(), torch.arange(512).float())
    return turns.cos(), turns.sin()


def test_tables_that_each_layer_makes_are_priced_as_those_that_are_handed_on():
    with torch.device("meta"):
        layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(6)])

    def forward(x: torch.Tensor, hands_on: bool) -> torch.Tensor:
        tables = angles(4096)
        for layer in layers:
            cos, sin = tables if hands_on else angles(4096)
            left, right = layer(x).chunk(2, -1)
            x = torch.cat((left * cos - right * sin, right * cos + left * sin), -1)
        return x

    reports = []
    for hands_on in (False, True):
        with torch.device("meta"), FlopMeter(H100) as meter:
            forward(torch.rand(4096, 1024), hands_on).sum().backward()
        reports.append(meter.report())
    (advice,) = told(reports[0])
    assert advice.remedy == "compute it once and hand it on"
    assert advice.gain_seconds == pytest.approx(
        reports[0].seconds - reports[1].seconds, abs=0.06 * reports[0].seconds
    )  # the first layer makes them twice
    assert not told(reports[1])


def _mlp(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), *more, nn.Linear(1024, 1024)).to("meta")


@torch.no_grad()
def infers(*more: nn.Module, texts: int = 0) -> Callable[[], object]:
    """`texts`: of so many, whose tokens a layer takes by a view."""
    model, x = _mlp(*more), torch.empty(8192, 1024, device="meta")
    given = x.view(texts, -1, 1024) if texts else x
    return lambda: model(given)


def trains() -> Callable[[], object]:
    """On one batch, which is scaled first."""
    model, x = _mlp(), torch.empty(8192, 1024, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)

    def step() -> None:
        model(((x - 1) / 2).exp()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@torch.no_grad()
def adds_by_index() -> Callable[[], object]:
    """Zeros that are added to are others each time."""
    index = torch.zeros(100, dtype=torch.int64, device="meta")
    held = [torch.empty(100, 4096, device="meta")]

    def step() -> None:
        for _ in range(3):
            held[0] = torch.zeros(100, 4096).index_add_(0, index, held[0])

    return step


@torch.no_grad()
def rewrites() -> Callable[[], object]:
    """The weight is another one each time, though its memory is the same."""
    weight, x = torch.empty(1024, 1024, device="meta"), [torch.empty(8, 1024, device="meta")]

    def step() -> None:
        weight.mul_(0.5)
        x[0] = x[0] @ (weight @ weight)

    return step


@torch.no_grad()
def draws() -> Callable[[], object]:
    x = [torch.empty(1024, 1024, device="meta")]

    def step() -> None:
        for _ in range(2):
            x[0] = x[0] + torch.rand(1024, 1024)

    return step


@pytest.mark.parametrize(
    "program",
    [infers(), infers(nn.Dropout()), infers(nn.Dropout(), texts=8), trains(), adds_by_index(), rewrites(), draws()],
    ids=[
        "a benchmark",
        "one by chance",
        "one of texts",
        "training on one batch",
        "sums",
        "a weight that changes",
        "random numbers",
    ],
)
def test_what_is_the_same_for_the_benchmark_alone_or_does_not_stay_is_no_advice(program):
    assert not told(last_of(program))


def test_casts_of_a_frozen_layer_under_autocast_are_priced_as_the_layer_in_half_precision():
    """Of what is trained autocast keeps the casts until the backward pass, and the weights change."""
    reports = []
    for is_half in (False, True):
        with torch.device("meta"):
            frozen = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]).requires_grad_(False)
            frozen, head = frozen.to(HALF if is_half else torch.float32), nn.Linear(4096, 1000)
        optimizer = torch.optim.SGD(head.parameters(), 0.1, fused=True)
        with FlopMeter(H100) as meter:
            for _ in range(3):
                start = len(meter.trace.ops)
                with torch.autocast("cuda", HALF):
                    loss = head(frozen(torch.rand(64, 4096, device="meta"))).sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        reports.append(meter.report(ops=range(start, len(meter.trace.ops))))
    (advice,) = (each for each in reports[0].advice if "not trained in torch.bfloat16" in each.remedy)
    assert advice.gain_seconds == pytest.approx(reports[0].seconds - reports[1].seconds, rel=0.05)
    assert not told(reports[0])
    assert not any("not trained" in each.remedy for each in reports[1].advice)


class Attends(nn.Module):
    """Under autocast each of three layers casts the same input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(1024), nn.Linear(1024, 1024)
        self.q, self.k, self.v = (nn.Linear(1024, 1024) for _ in range(3))

    def forward(self, x: torch.Tensor, casts_once: bool) -> torch.Tensor:
        given = self.norm(x).to(HALF if casts_once else x.dtype)
        mixed = F.scaled_dot_product_attention(*(heads(layer(given)) for layer in (self.q, self.k, self.v)))
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def attends(casts_once: bool, trains: bool) -> Callable[[], object]:
    layers = nn.ModuleList([Attends() for _ in range(4)]).to("meta")
    optimizer = torch.optim.SGD(layers.parameters(), 0.1, fused=True)
    x = [torch.empty(32, 512, 1024, device="meta")]

    def step() -> None:
        with torch.set_grad_enabled(trains), torch.autocast("cuda", HALF):
            y = x[0]
            for layer in layers:
                y = layer(y, casts_once)
        if trains:
            y.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            x[0] = y

    return step


def test_an_input_that_autocast_casts_for_each_layer_is_priced_as_one_that_is_cast_before():
    plain, mended = (last_of(attends(casts_once, trains=False)) for casts_once in (False, True))
    (advice,) = told(plain)
    assert advice.remedy == "compute it once and hand it on"  # the next step has another input
    assert advice.gain_seconds == pytest.approx(plain.seconds - mended.seconds, rel=0.05)
    assert not told(mended)


def test_nothing_is_told_of_what_has_a_backward_pass_for_each_time_that_it_is_computed():
    assert not told(last_of(attends(False, trains=True)))


class Timed(nn.Module):
    """A step of diffusion."""

    def __init__(self) -> None:
        super().__init__()
        self.of_time, self.out = (nn.Linear(1024, 1024) for _ in range(2))

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.of_time(time.to("cuda").float().expand(64, 1024)))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@torch.no_grad()
def test_what_follows_from_another_element_of_a_table_in_each_step_is_not_computed_again(where):
    with flopmeter.cuda(H100) as device:
        net, x = Timed().cuda(), torch.zeros(64, 1024, device="cuda")
        for time in torch.arange(6, device=where):
            x = net(x, time)
        report = device.report()
    assert report.parts.steady is not None
    assert not told(report.step)


@pytest.mark.parametrize("training", [True, False])
def test_averages_that_a_batch_norm_updates_are_others_in_each_step(training: bool):
    """An exponential moving average of a whole state: what the model holds is multiplied anew in each step. Averages
    that evaluation leaves as they are could be multiplied once."""
    width = 1 << 14
    with torch.device("meta"):
        norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(20)).train(training)
        averages = [torch.zeros(width) for _ in range(40)]
        weight = nn.Parameter(torch.zeros(width))
    optimizer = torch.optim.SGD([weight])

    def step() -> None:
        x = torch.empty(8, width) * weight
        for norm in norms:
            x = norm(x)
        x.sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            statistics = [each for norm in norms for each in (norm.running_mean, norm.running_var)]
            for average, now in zip(averages, statistics, strict=True):
                average.mul_(0.999).add_(now * 0.001)

    assert bool(told(last_of(step))) == (not training)


def test_a_benchmark_that_picks_from_its_scores_is_still_one():
    """A step begins with what is done with the scores of the call before: no weight is applied to them."""
    with flopmeter.cuda(H100) as device, torch.no_grad():
        model, x = _mlp(nn.Dropout()).to_empty(device=device), torch.randn(8192, 1024, device=device)
        for _ in range(4):
            scores = model((x - 1) / 2)
            scores[:, -1].argmax()
        assert not told(device.report().step)
