"""Floats that steer a program, checks that everything is finite, and lengths that the host reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from flopmeter import DataDependentError, FlopMeter, on_meta


def euler(device: str, bring: Callable[[Tensor], Tensor]) -> list[float]:
    """A sampler: the step is found by its time, and its noise decides how far to go."""
    sigmas, times = bring(torch.linspace(14.6, 0.03, 5)), bring(torch.linspace(999, 0, 5))
    latents, said = torch.zeros(1, 4, 8, 8, device=device), []
    for time in times[:-1]:
        index = (times == time).nonzero().item()
        if sigmas[index] > 1:
            latents = latents * (sigmas[index + 1] - sigmas[index])
        said.append(round((sigmas[index + 1] - sigmas[index]).item(), 4))
    return said


def strides(device: str, bring: Callable[[Tensor], Tensor]) -> list[Any]:
    """A detection head: each level makes its anchors by its stride."""
    made = []
    for level, stride in zip((8, 4), bring(torch.tensor([8.0, 16.0])), strict=True):
        made.append(torch.full((level, 1), stride, device=device)[0].item())
        made.append(int(stride) * level)
    return made


def written(device: str, bring: Callable[[Tensor], Tensor]) -> list[float]:
    """In-place updates through a view, and a buffer that is filled from a constant."""
    table = bring(torch.tensor([0.5, 1.5, 2.5]))
    table[1:].mul_(2)
    kept = torch.empty(3, device=device)
    kept.copy_(table)
    return [*table.tolist(), *kept.tolist()]


def weights_of_classes(device: str, bring: Callable[[Tensor], Tensor]) -> list[Any]:
    weight = bring(torch.tensor([1.0, 0.0, 3.0], dtype=torch.float16))
    return [weight.nonzero().flatten().tolist(), bool((weight > 2).any()), weight.float().sum().item()]


PROGRAMS = {program.__name__: program for program in (euler, strides, written, weights_of_classes)}


@pytest.mark.parametrize("bring", [lambda x: x.to("meta"), on_meta, lambda x: torch.as_tensor(x, device="meta")])
@pytest.mark.parametrize("name", PROGRAMS)
def test_floats_that_steer_a_program_are_known_as_on_the_cpu(name: str, bring: Callable[[Tensor], Tensor]):
    with FlopMeter():
        answer = PROGRAMS[name]("meta", bring)
    assert answer == PROGRAMS[name]("cpu", lambda x: x)


def test_a_float_that_unknown_data_was_written_to_is_unknown():
    scale = torch.tensor([0.5, 2.0])
    with FlopMeter():
        for write in (
            lambda x: x.add_(torch.rand(2, device="meta")),
            lambda x: x[:1].copy_(torch.rand(1, device="meta")),
            lambda x: torch.rand(2, device="meta", out=x),
        ):
            twin = scale.to("meta")
            write(twin)
            with pytest.raises(DataDependentError):
                twin.tolist()
        assert scale.to("meta").tolist() == [0.5, 2.0]


@pytest.mark.parametrize("training", [True, False])
def test_statistics_that_a_batch_norm_updated_are_unknown(training: bool):
    norm = on_meta(nn.BatchNorm2d(4)).train(training)
    with FlopMeter():
        assert norm.running_mean.tolist() == [0, 0, 0, 0]
        norm(torch.rand(2, 4, 8, 8, device="meta"))
        if training:
            with pytest.raises(DataDependentError):
                norm.running_mean.tolist()
            with pytest.raises(DataDependentError):
                norm.running_var.tolist()


def test_a_batch_norm_that_was_made_in_the_meter_forgets_its_start():
    with FlopMeter(), torch.device("meta"):
        norm = nn.BatchNorm1d(4)
        norm(torch.rand(2, 4))
        with pytest.raises(DataDependentError):
            norm.running_var.tolist()


# --- checks="hold"

SMALL, LARGE = (3,), (2048, 1024)  # the second is more than values are kept for

FINITE: dict[str, tuple[Callable[[Tensor], Any], bool]] = {
    "any of isnan": (lambda x: bool(torch.isnan(x).any()), False),
    "any of isinf, or of isnan": (lambda x: bool(torch.isinf(x).any() or torch.isnan(x).any()), False),
    "any of both": (lambda x: bool((torch.isinf(x) | torch.isnan(x)).any()), False),
    "any of not isfinite": (lambda x: bool((~torch.isfinite(x)).any()), False),
    "all of isfinite": (lambda x: bool(torch.isfinite(x).all()), True),
    "none differs from itself": (lambda x: bool((x != x).any()), False),
    "isnan of a scalar": (lambda x: bool(torch.isnan(x.sum())), False),
    "isfinite of a scalar": (lambda x: bool(torch.isfinite(x.mean())), True),
    "any of isposinf or isneginf": (lambda x: bool(torch.isposinf(x).any() or torch.isneginf(x).any()), False),
    "isinf of a scalar": (lambda x: torch.isinf(x.mean()).item(), False),
}


@pytest.mark.parametrize("shape", [SMALL, LARGE])
@pytest.mark.parametrize("name", FINITE)
def test_checks_hold_where_a_program_asks_whether_all_is_finite(name: str, shape: tuple[int, ...]):
    ask, expected = FINITE[name]
    assert ask(torch.zeros(shape)) == expected  # what finite values answer
    with FlopMeter(checks="hold") as meter:
        assert ask(torch.rand(shape, device="meta")) == expected
    assert all(
        text.startswith('checks="hold" (unknown values are finite, and what tests them holds) for aten.')
        for text in meter.report().assumptions
    )
    assert meter.report().assumptions
    with FlopMeter(), pytest.raises(DataDependentError):
        ask(torch.rand(shape, device="meta"))


@pytest.mark.parametrize(
    "ask", [lambda x: bool((x > 0).any()), lambda x: bool((x == -math.inf).any()), lambda x: bool((x == 0).any())]
)
def test_checks_hold_decides_nothing_else(ask: Callable[[Tensor], bool]):
    with FlopMeter(checks="hold"), pytest.raises(DataDependentError):
        ask(torch.rand(3, device="meta"))


def test_checks_hold_leaves_known_values_as_they_are():
    with FlopMeter(checks="hold") as meter:
        x = torch.tensor([1.0, math.nan, math.inf]).to("meta")
        assert [torch.isnan(x).tolist(), torch.isinf(x).tolist()] == [[False, True, False], [False, False, True]]
    assert meter.report().assumptions == ()


def test_gradients_are_clipped_with_an_error_if_they_are_not_finite():
    weight = nn.Parameter(torch.empty(4, 4, device="meta"))
    with FlopMeter(checks="hold") as meter:
        weight.grad = torch.rand(4, 4, device="meta")
        nn.utils.clip_grad_norm_([weight], 1.0, error_if_nonfinite=True)
    assert all(text.startswith('checks="hold"') for text in meter.report().assumptions)


# --- ctc_loss


def ctc(lengths: Any) -> tuple[list[str], int]:
    """The ops of a step, and its FLOPs."""
    scores = torch.rand(8, 2, 5, device="meta", requires_grad=True)
    targets = torch.zeros(2, 3, dtype=torch.long, device="meta")
    with FlopMeter() as meter:
        nn.functional.ctc_loss(scores.log_softmax(-1), targets, *lengths).backward()
    return [str(op.call.func) for op in meter.trace.ops if "ctc" in str(op.call.func)], meter.report().flops


def test_ctc_loss_takes_lengths_that_on_meta_brought_in():
    """CUDA reads lengths on the host and runs the kernels of lists."""
    as_lists = ctc([(8, 7), (3, 2)])
    assert as_lists[0] == ["aten._ctc_loss.default", "aten._ctc_loss_backward.default"]
    lengths = (torch.tensor([8, 7]), torch.tensor([3, 2]))
    assert ctc(on_meta(lengths)) == as_lists
    assert ctc(lengths) == as_lists


def test_ctc_loss_of_lengths_that_nobody_knows_is_refused():
    with pytest.raises(DataDependentError):
        ctc([torch.randint(8, (2,), device="meta") for _ in range(2)])


def chosen(scores: Tensor) -> Tensor:
    """Which tokens an expert gets, as Megatron-LM masks them: zeros like the scores, ones where an expert is picked."""
    picks = torch.topk(scores, k=2, dim=1).indices
    mask = torch.zeros_like(scores).int().scatter(1, picks, 1).bool()
    return torch.arange(len(scores), device=scores.device).expand(4, -1).masked_select(mask.T.contiguous())


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("tokens", [16, 1 << 19])  # a float mask of more than 2^20 elements, too
def test_a_mask_that_begins_as_zeros_like_the_scores_selects_as_many_as_were_picked(tokens, checkpointed):
    """Also where a checkpoint computes the forward pass again in the middle of the backward pass."""
    sizes = []

    def experts(x: Tensor) -> Tensor:
        sizes.append(len(chosen(x)))
        return x.exp()

    with FlopMeter(routing="balanced"):
        x = torch.empty(tokens, 4, device="meta", requires_grad=True)
        y = checkpoint(experts, x, use_reentrant=False) if checkpointed else experts(x)
        y.sum().backward()
    assert sizes == [2 * tokens] * (2 if checkpointed else 1)


def test_what_is_written_into_zeros_like_another_is_unknown():
    with FlopMeter():
        unknown = torch.empty(3, device="meta").exp()
        zeros = torch.zeros_like(unknown)
        doubled = torch.full_like(unknown, 2.5) * 2
        assert zeros.tolist() == [0.0] * 3
        assert doubled.tolist() == [5.0] * 3
        zeros[1:].add_(unknown[1:])
        with pytest.raises(DataDependentError):
            zeros.tolist()


PARTS_WRITTEN: dict[str, Callable[[Tensor], Any]] = {
    "one": lambda x: x[0].fill_(4.0),
    "a slice": lambda x: x[1:].zero_(),
    "through a view": lambda x: x.view(2, 2)[1].add_(1),
    "all": lambda x: x.fill_(3.0),
    "all, by itself": lambda x: x.add_(1),
    "by a mask": lambda x: x.masked_fill_(torch.tensor([True, False, True, False], device=x.device), 2.0),
}


@pytest.mark.parametrize("name", PARTS_WRITTEN)
def test_a_constant_like_another_of_which_a_part_is_written_is_what_it_is_on_the_cpu(name):
    true = torch.ones(4)
    PARTS_WRITTEN[name](true)
    with FlopMeter():
        made = torch.ones_like(torch.empty(4, device="meta").exp())
        PARTS_WRITTEN[name](made)
        assert made.tolist() == true.tolist()
        large = torch.zeros_like(torch.empty(1 << 21, device="meta").exp())
        large[:4].fill_(1.0)
        with pytest.raises(DataDependentError):
            large[:1].tolist()


def test_bytes_of_a_constant_like_another_are_not_all_alike():
    with FlopMeter():
        ones = torch.ones_like(torch.empty(2, device="meta").exp())
        assert ones.view(torch.int32).tolist() == torch.ones(2).view(torch.int32).tolist()
        with pytest.raises(DataDependentError):
            ones.view(torch.uint8).tolist()


def windows_with_enough(series: Tensor, is_there: Tensor, width: int = 120) -> tuple[int, float]:
    """A loader of time series: all overlapping windows, of which those that have enough are taken."""
    both = torch.stack([series, is_there], 1)
    windows = both.unfold(-1, width, 1).permute(0, 2, 3, 1).flatten(0, 1)
    series.zero_()
    is_there[0].fill_(0.0)  # the windows are copies
    windows[-1] = 0
    enough = windows[:, :, 1].sum(1) >= 0.95 * width
    return len(torch.nonzero(enough)), windows[:, :, 1].mean().item()


def test_the_sum_of_a_mask_is_known_through_a_copy_of_many_times_its_size():
    """Six million elements, of which 32 thousand are different."""
    torch.manual_seed(0)
    series, is_there = torch.randn(32, 1000), (torch.rand(32, 1000) > 0.05).float()
    with FlopMeter("a100-sxm4-80gb"):
        count, mean = windows_with_enough(series.to("meta"), is_there.to("meta"))
    assert windows_with_enough(series, is_there) == (count, pytest.approx(mean, rel=1e-6))
    assert 0 < count < 32 * 881
