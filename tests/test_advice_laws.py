"""Advice under changes of a program that must, or must not, change it."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopmeter import FlopMeter, load_hardware
from flopmeter.device.hardware import AnyHardware
from flopmeter.report.report import Report
from flopmeter.timing.peak_memory import CONTEXT_BYTES

H100, HALF = "h100-sxm5-80gb", torch.bfloat16


def meta(*shape: int, dtype: torch.dtype = HALF) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def layers(width: int, depth: int) -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))).to(HALF)


def trained(model: nn.Module, batch: int, width: int, device: AnyHardware = H100) -> Report:
    with FlopMeter(device) as meter:
        model(meta(batch, width)).sum().backward()
        model.zero_grad()
    return meter.report()


@pytest.mark.parametrize(("batch", "width", "depth"), [(16, 2048, 4), (96, 4096, 2), (512, 8192, 1)])
def test_a_larger_batch_is_told_until_twice_of_it_brings_less_than_a_tenth(batch, width, depth):
    """The time of what is one batch now, of the same model on so many more items."""
    model = layers(width, depth)
    told = [each for each in trained(model, batch, width).advice if "times the batch" in each.remedy]
    times = int(re.match(r"\d+", told[0].remedy).group()) if told else 1  # type: ignore[union-attr]

    def of_one(factor: int) -> float:
        return trained(model, batch * factor, width).seconds / factor

    if told:
        assert told[0].run_seconds_then == pytest.approx(of_one(times), rel=0.02)
        assert of_one(times) * 1.1 <= of_one(times // 2) * 1.02
    if times < 64:
        assert of_one(2 * times) * 1.1 > of_one(times) * 0.98


@pytest.mark.parametrize("fitting", [2, 4, 8])
def test_a_larger_batch_is_told_as_far_as_it_fits(fitting):
    """In a device that has room for the weights, and half as many items again as the ones that fit."""
    model = layers(2048, 4)
    one, two = (trained(model, batch, 2048).memory.peak_bytes for batch in (16, 32))
    usable = one + round((1.5 * fitting - 1) * (two - one))
    device = load_hardware(H100).replace(memory_gb=(usable + CONTEXT_BYTES) / 1e9)
    (told,) = [each for each in trained(model, 16, 2048, device).advice if "times the batch" in each.remedy]
    assert told.remedy.startswith(f"{fitting} times the batch")


def test_weights_that_are_kept_for_later_take_their_room_once_however_large_the_batch():
    """Of 84 GB the weights of 300 steps take 40: with a batch they would leave room for two."""
    model = layers(2048, 16)
    with FlopMeter(H100) as meter:
        kept = [weight.detach().clone() for _ in range(300) for weight in model.parameters()]
        start = len(meter.trace.ops)
        model(meta(16, 2048)).sum().backward()
        model.zero_grad()
        report = meter.report(ops=range(start, len(meter.trace.ops)))
    assert report.memory.at_peak["copies of weights"] == sum(weight.nbytes for weight in kept) > 40e9
    told, alone = (
        [each.remedy for each in one.advice if "times the batch" in each.remedy]
        for one in (report, trained(model, 16, 2048))
    )
    assert told == alone != []


def padded(x: Tensor, lengths: Tensor) -> Tensor:
    """Attention whose mask is made of the lengths of the sequences."""
    batch, _, tokens, _ = x.shape
    places = torch.arange(tokens, device="meta")
    mask = (places >= lengths[:, None, None, None]).expand(batch, 1, tokens, tokens).clone()
    return (x @ x.mT).masked_fill(mask, -1e4).softmax(-1) @ x


def causal(x: Tensor, lengths: Tensor) -> Tensor:
    tokens = x.shape[-2]
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device="meta").triu(1)
    return (x @ x.mT).masked_fill(mask, -1e4).softmax(-1) @ x


def padded_fused(x: Tensor, lengths: Tensor) -> Tensor:
    batch, _, tokens, _ = x.shape
    places = torch.arange(tokens, device="meta")
    mask = (places >= lengths[:, None, None, None]).expand(batch, 1, tokens, tokens).clone()
    return F.scaled_dot_product_attention(x, x, x, attn_mask=~mask, scale=1.0)


def causal_fused(x: Tensor, _: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=1.0)


@pytest.mark.parametrize("layers", [("padded", "causal"), ("causal", "padded"), ("causal", "causal")], ids=" ".join)
def test_of_two_attentions_either_may_come_first_and_a_mask_of_padding_is_still_made(layers: tuple[str, str]):
    """Told of both at once, against the mended program."""
    written = {"padded": (padded, padded_fused), "causal": (causal, causal_fused)}
    told, mended = (_attended([written[name][which] for name in layers]) for which in (0, 1))
    then = next(each for each in told.advice if "scaled_dot" in each.remedy).run_seconds_then
    assert then == pytest.approx(mended.seconds, rel=0.11)  # of 100 us: views of the host are left


def _attended(layers: list[Callable[[Tensor, Tensor], Tensor]]) -> Report:
    x, lengths = meta(16, 2, 1024, 64), meta(16, dtype=torch.int64)
    with FlopMeter(H100) as meter, torch.no_grad():
        for layer in layers:
            x = layer(x, lengths)
    return meter.report()


def remedies(device: str, *, reads: bool, passes: int = 40) -> list[str]:
    x = meta(64, 64, dtype=torch.float32)
    with FlopMeter(device) as meter, torch.no_grad():
        y, known = x, torch.arange(4, device="meta")
        for _ in range(passes):
            y = (y @ x).relu()
        if reads:
            known[0].item()
    return [each.remedy for each in meter.report().advice]


def test_a_graph_is_told_where_the_host_is_late_and_never_waits_for_the_device():
    of_graphs = ("CUDA graph", "reduce-overhead")
    told = {
        (device, reads): any(name in each for each in remedies(device, reads=reads) for name in of_graphs)
        for device in (H100, "cpu-epyc-9654")
        for reads in (False, True)
    }
    assert told == {
        (H100, False): True, (H100, True): False, ("cpu-epyc-9654", False): False, ("cpu-epyc-9654", True): False
    }  # fmt: skip


def in_steps(module: nn.Module, x: Tensor, steps: int, *, saves: bool) -> Tensor:
    """x + module(x), again and again. The backward pass runs the module at the values that were saved, or goes back
    from the result, as an adjoint method does: x is its result less module(x)."""

    class Steps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *parameters):
            visited = [x]
            for _ in range(steps):
                visited.append(visited[-1] + module(visited[-1]))
            ctx.save_for_backward(*(visited[:-1] if saves else visited[-1:]))
            return visited[-1]

        @staticmethod
        def backward(ctx, gradient):
            saved = list(ctx.saved_tensors)
            x = saved.pop()
            for step in range(steps):
                with torch.enable_grad():
                    held = x.detach().requires_grad_()
                    result = module(held)
                (change,) = torch.autograd.grad(result, held, gradient)
                if step < steps - 1:
                    x = saved.pop() if saves else x - result.detach()
                gradient = gradient + change
            return (gradient, *(None for _ in module.parameters()))

    return Steps.apply(x, *module.parameters())


@pytest.mark.parametrize("saves", [True, False])
def test_only_a_forward_pass_that_begins_with_saved_values_is_a_checkpoint(saves):
    module, x = layers(2048, 2), meta(2048, 2048).requires_grad_()
    with FlopMeter(H100) as meter:
        in_steps(module, x, 6, saves=saves).sum().backward()
    assert ("no checkpointing" in [told.remedy for told in meter.report().advice]) == saves
