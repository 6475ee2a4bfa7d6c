"""Advice against the program that follows it, and what it says of types against the vendors' tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flopmeter
from flopmeter import FlopMeter, load_hardware
from flopmeter.distributed import world
from flopmeter.report.advice.batch import depends_on_inputs
from flopmeter.report.advice.number_types import narrow_type, type_of_others

H100 = "h100-sxm5-80gb"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# --- optimizers ------------------------------------------------------------------------------------------------------


def updated(kind: str, in_a_group: int = 12, **options: Any) -> Any:
    """The report of a step that updates 12 weights of two sizes, the optimizer's states being there."""
    with FlopMeter(H100):
        weights = [nn.Parameter(torch.empty(2048, 64 * (1 + place % 2), device="meta")) for place in range(12)]
        groups = [{"params": weights[start : start + in_a_group]} for start in range(0, 12, in_a_group)]
        optimizer = getattr(torch.optim, kind)(groups, lr=1e-3, **options)
    for _ in range(2):
        with FlopMeter(H100) as meter:
            for weight in weights:
                weight.grad = torch.empty_like(weight)
            optimizer.step()
    return meter.report()


@pytest.mark.parametrize(
    ("kind", "options"),
    [("SGD", {"foreach": False}), ("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {"foreach": False})],
    ids=["SGD in a loop", "momentum", "Adam", "AdamW in a loop"],
)
def test_a_fused_optimizer_is_priced_as_the_step_that_has_it(kind, options):
    plain, fused = updated(kind, **options), updated(kind, **{**options, "foreach": None}, fused=True)
    (told,) = (each for each in plain.advice if "fused=True" in each.remedy)
    assert told.gain_seconds == pytest.approx(plain.seconds - fused.seconds, abs=1e-9)
    assert told.why.startswith(f"{len(plain.kernels)} kernels read")
    assert not any("fused=True" in each.remedy for each in fused.advice)


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "loop"])
@pytest.mark.parametrize(("kind", "in_a_group"), [("AdamW", 1), ("AdamW", 5), ("Adam", 5)])
def test_a_fused_optimizer_has_kernels_of_its_own_for_each_group_of_parameters(kind, in_a_group, foreach):
    """As where each layer has a learning rate: of 5 in a group, two groups and one of 2."""
    plain, fused = updated(kind, in_a_group, foreach=foreach), updated(kind, in_a_group, fused=True)
    (told,) = (each for each in plain.advice if "fused=True" in each.remedy)
    assert len(fused.kernels) == 2 * -(-12 // in_a_group)  # one counts steps
    assert told.gain_seconds == pytest.approx(plain.seconds - fused.seconds, abs=1e-9)


@pytest.mark.parametrize(("kind", "options"), [("Rprop", {}), ("Adagrad", {}), ("Adam", {"amsgrad": True})])
def test_states_that_are_not_those_of_a_fused_kernel_here_are_not_priced_as_if_they_were(kind, options):
    """Rprop takes signs, Adagrad has one state and a root, amsgrad three states."""
    assert not any("fused=True" in each.remedy for each in updated(kind, **options).advice)


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023 (arXiv 2302.06675): a step by the sign of the momentum, with an option of the same name."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        super().__init__(weights, {"lr": 1e-4, "fused": False})

    def step(self, closure: Any = None) -> Any:
        for weight in self.param_groups[0]["params"]:
            momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
            with torch.no_grad():
                weight.add_(momentum.lerp_(weight.grad, 0.1).sign(), alpha=-1e-4)


def test_an_optimizer_by_signs_is_not_priced_as_sgd():
    weights = [nn.Parameter(torch.empty(256, 256, device="meta")) for _ in range(32)]
    optimizer = Lion(weights)
    for _ in range(2):
        with FlopMeter(H100) as meter:
            for weight in weights:
                weight.grad = torch.empty_like(weight)
            optimizer.step()
    assert not any(each.remedy == "the optimizer's fused=True" for each in meter.report().advice)


# --- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        (H100, BF16), ("a100-sxm4-80gb", BF16), ("mi300x", BF16), ("rtx-3090", BF16),
        ("v100-sxm2-32gb", FP16), ("t4", FP16),  # matrix units in fp16 alone
        ("p100-pcie-16gb", FP16),  # none at all
    ],
)  # fmt: skip
def test_the_narrow_type_is_one_for_which_the_device_has_matrix_units(device, dtype):
    assert narrow_type(load_hardware(device)) is dtype


def products(**columns: int) -> Any:
    """The report of products of as many columns in each type."""
    types = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
    with FlopMeter(H100) as meter:
        for name, wide in columns.items():
            make = {"dtype": types[name], "device": "meta"}
            torch.empty(64, 64, **make) @ torch.empty(64, wide, **make)
    return meter.report()


@pytest.mark.parametrize(
    ("columns", "others"),
    [
        ({"bf16": 9, "fp32": 91}, None),
        ({"bf16": 10, "fp32": 90}, BF16),  # a tenth of all
        ({"fp16": 60, "fp32": 40}, FP16),
        ({"bf16": 30, "fp16": 40, "fp32": 30}, FP16),
        ({"bf16": 40, "fp16": 30, "fp32": 30}, BF16),
        ({"fp32": 100}, None),
    ],
)
def test_a_program_is_narrow_if_a_tenth_of_its_products_are(columns, others):
    assert type_of_others(products(**columns)) is others


# --- rows that nobody reads ------------------------------------------------------------------------------------------


def scored(pick: Any, *, first: bool, cast: bool) -> Any:
    """The best of 32,768 scores for some tokens of 16 sequences of 1,024, which are picked before or after."""
    layer = nn.Linear(4096, 32768, bias=False, device="meta", dtype=BF16)
    x = torch.empty(16, 1024, 4096, device="meta", dtype=BF16)

    def run() -> None:
        out = layer(pick(x) if first else x)
        out = out.float() if cast else out
        (out if first else pick(out)).argmax(-1)

    with FlopMeter(H100) as meter, torch.no_grad():
        run()
    return meter.report()


PICKS: dict[str, Callable[[Any], Any]] = {
    "the last of each": lambda x: x[:, -1],
    "the last three, of which steps are uneven": lambda x: x[:, -3:],
    "every eighth": lambda x: x[:, ::8],
    "the first two sequences": lambda x: x[:2],
    "half of the sequences": lambda x: x[8:],
    "one token": lambda x: x[3, 5],
}


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("name", PICKS)
def test_rows_that_are_picked_after_a_product_are_told_to_be_picked_before_it(name, cast):
    after, before = (scored(PICKS[name], first=first, cast=cast) for first in (False, True))
    told = [each for each in after.advice if "rows that are read before the product" in each.remedy]
    if "uneven" in name:
        assert not told
    else:
        assert told[0].gain_seconds == pytest.approx(after.seconds - before.seconds, rel=0.02)
    assert not any("rows that are read" in each.remedy for each in before.advice)


@pytest.mark.parametrize(
    "read", [lambda x: x[:9], lambda x: x[..., :100], lambda x: x.T, lambda x: x[:, 3].sum() + x[:, 9].sum()]
)
def test_more_than_half_of_the_rows_parts_of_rows_and_uneven_ones_are_left_alone(read):
    layer = nn.Linear(512, 4096, device="meta", dtype=BF16)
    with FlopMeter(H100) as meter, torch.no_grad():
        read(layer(torch.empty(16, 512, device="meta", dtype=BF16))).float()
    assert not any("rows that are read" in each.remedy for each in meter.report().advice)


# --- masks and loops -------------------------------------------------------------------------------------------------


def attended(queries: int = 1024, keys: int = 1024, mask: Any = None, **options: Any) -> Any:
    q, k = (torch.empty(4, 16, length, 64, device="meta", dtype=BF16) for length in (queries, keys))
    with FlopMeter(H100) as meter, torch.no_grad():
        for _ in range(2):
            q = F.scaled_dot_product_attention(q + q, k, k, attn_mask=mask, **options)
    return meter.report()


def mask_of(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=BF16)


def test_a_square_mask_of_all_sequences_is_told_to_be_causal_and_wins_what_that_does():
    masked, causal = attended(mask=mask_of(1024, 1024)), attended(is_causal=True)
    (told,) = (each for each in masked.advice if "is_causal=True" in each.remedy)
    assert told.gain_seconds == pytest.approx(masked.seconds - causal.seconds, rel=0.01)
    assert any(
        "is_causal=True" in each.remedy for each in attended(mask=mask_of(1024, 1024).expand(4, 16, -1, -1)).advice
    )


@pytest.mark.parametrize(
    ("queries", "mask"),
    [
        (1024, mask_of(4, 1, 1024, 1024)),  # of each sequence its own
        (1024, mask_of(1, 1024)),  # keys that are padding
        (512, mask_of(512, 1024)),
    ],
)
def test_other_masks_are_not_told_to_be_causal(queries, mask):
    assert not any("is_causal=True" in each.remedy for each in attended(queries, mask=mask).advice)


def test_padding_of_as_many_numbers_as_a_square_is_not_told_to_be_causal():
    """Of 32 sequences and 16 heads 512 keys, as nn.MultiheadAttention has them, beside 512 queries."""
    q = torch.empty(32, 16, 512, 64, device="meta", dtype=BF16)
    with FlopMeter(H100) as meter, torch.no_grad():
        F.scaled_dot_product_attention(q, q, q, attn_mask=mask_of(32, 16, 1, 512))
    assert not any("is_causal=True" in each.remedy for each in meter.report().advice)


def test_a_bias_that_is_trained_is_not_told_to_be_a_causal_mask():
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(mask_of(1024, 1024))

        def forward(self, q: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, q, q, attn_mask=self.bias)

    with FlopMeter(H100) as meter, torch.no_grad():
        Biased()(torch.empty(4, 16, 1024, 64, device="meta", dtype=BF16))
    assert not any("is_causal=True" in each.remedy for each in meter.report().advice)


LOOPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    # one after another, and all at once; `xs`, `ys` and `zs` are lists of tensors
    "scaled": (lambda x, y, z: x.mul_(0.5), lambda xs, ys, zs: torch._foreach_mul_(xs, 0.5)),
    "multiplied": (lambda x, y, z: x.mul_(y), lambda xs, ys, zs: torch._foreach_mul_(xs, ys)),
    "divided": (lambda x, y, z: x.div_(y), lambda xs, ys, zs: torch._foreach_div_(xs, ys)),
    "added": (lambda x, y, z: x.add_(y), lambda xs, ys, zs: torch._foreach_add_(xs, ys)),
    "subtracted": (lambda x, y, z: x.sub_(y), lambda xs, ys, zs: torch._foreach_sub_(xs, ys)),
    "averaged": (lambda x, y, z: x.lerp_(y, 0.1), lambda xs, ys, zs: torch._foreach_lerp_(xs, ys, 0.1)),
    "mixed": (lambda x, y, z: x.lerp_(y, z), lambda xs, ys, zs: torch._foreach_lerp_(xs, ys, zs)),
    "copied": (lambda x, y, z: x.copy_(y), lambda xs, ys, zs: torch._foreach_copy_(xs, ys)),
    "filled": (lambda x, y, z: x.zero_(), lambda xs, ys, zs: torch._foreach_zero_(xs)),
    "measured": (lambda x, y, z: x.norm(), lambda xs, ys, zs: torch._foreach_norm(xs)),
}


def looped(count: int, run: Callable[..., Any], *, at_once: bool) -> Any:
    lists = [[torch.empty(256, 128, device="meta") for _ in range(count)] for _ in range(3)]
    with FlopMeter(H100) as meter, torch.no_grad():
        if at_once:
            run(*lists)
        else:
            for each in zip(*lists, strict=True):
                run(*each)
    return meter.report()


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_over_16_tensors_is_told_to_be_one_call_and_wins_what_that_does(name):
    one, every = LOOPS[name]
    loop, at_once = looped(16, one, at_once=False), looped(16, every, at_once=True)
    (told,) = (each for each in loop.advice if "torch._foreach_" in each.remedy)
    assert told.gain_seconds == pytest.approx(loop.seconds - at_once.seconds, rel=0.02)
    assert told.why == "16 kernels for one tensor each"
    assert not any("torch._foreach_" in each.remedy for each in looped(15, one, at_once=False).advice)


def test_one_tensor_that_is_changed_again_and_again_is_no_loop_over_tensors():
    with FlopMeter(H100) as meter:
        x = torch.empty(256, 128, device="meta")
        for _ in range(20):
            x.mul_(0.5)
    assert not any("torch._foreach_" in each.remedy for each in meter.report().advice)


# --- the batch -------------------------------------------------------------------------------------------------------


Step = Callable[[], Any]


def on_meta(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.GELU(), nn.Dropout(0.1), nn.Linear(40, 10)).to("meta")


def loss_of(scores: torch.Tensor) -> torch.Tensor:
    return scores.logsumexp(-1).sum()


def classified(batch: int) -> Step:
    model, x, labels = perceptron(), on_meta(batch, 24), torch.zeros(batch, dtype=torch.long, device="meta")
    return lambda: F.cross_entropy(model(x), labels).backward()


def convolved(batch: int) -> Step:
    layers = nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten()).to("meta")
    images = on_meta(batch, 3, 18, 18)
    return lambda: loss_of(layers(images)).backward()


def embedded(batch: int) -> Step:
    """Tokens in the first dimension, sequences in the second, which lie one after the other."""
    model = nn.Sequential(nn.Embedding(50, 24), nn.Linear(24, 50)).to("meta")
    tokens = torch.zeros(batch, 7, dtype=torch.long, device="meta").T
    return lambda: loss_of(model(tokens)).backward()


def updated_too(batch: int) -> Step:
    model, x = perceptron(), on_meta(batch, 24)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        loss_of(model(x)).backward()
        optimizer.step()

    return step


def attended_over(batch: int) -> Step:
    layer, x = nn.MultiheadAttention(24, 4, batch_first=True, device="meta"), on_meta(batch, 9, 24)
    return lambda: loss_of(layer(x, x, x, need_weights=False)[0]).backward()


def with_data_of_its_own(batch: int) -> Step:
    """Noise is of the given batch; positions are for all."""
    model, x = perceptron(), on_meta(batch, 24)

    def step() -> None:
        noise, positions = torch.randn(batch, 24, device="meta"), torch.randn(11, 24, device="meta")
        (loss_of(model(x + noise)) + positions.sum()).backward()

    return step


def with_only_a_schedule_given(batch: int) -> Step:
    """A schedule of a loss and a counter lie on the device; the batch is made in the step, on the host."""
    model, schedule, counter = perceptron(), torch.linspace(0, 1, 11).to("meta"), torch.zeros((), device="meta")

    def step() -> None:
        counter.add_(1)
        (loss_of(model(torch.randn(batch, 24).to("meta"))) * schedule[3]).backward()

    return step


def with_lists_of_python(batch: int) -> Step:
    """What a loader collates by `torch.tensor`."""
    model, counter = perceptron(), torch.zeros((), device="meta")

    def step() -> None:
        counter.add_(1)
        x, labels = torch.tensor([[0.5] * 24] * batch), torch.tensor([3] * batch)
        F.cross_entropy(model(x.to("meta")), labels.to("meta")).backward()

    return step


def with_nothing_given(batch: int) -> Step:
    model = perceptron()
    return lambda: loss_of(model(torch.randn(batch, 24, device="meta"))).backward()


@pytest.mark.parametrize(
    "program",
    [
        classified, convolved, embedded, updated_too, attended_over, with_data_of_its_own, with_only_a_schedule_given,
        with_lists_of_python, with_nothing_given,
    ],
    ids=lambda program: program.__name__,
)  # fmt: skip
def test_what_grows_with_the_batch_is_what_is_larger_where_the_batch_is(program):
    """Metered with 32 and with 64 items, which no other size is."""
    traces = []
    for batch in (32, 64):
        step = program(batch)
        with FlopMeter(H100) as meter:
            step()
        traces.append(meter.trace)
    sizes = [[storage.nbytes for storage in trace.storages] for trace in traces]
    larger = {number for number, (one, two) in enumerate(zip(*sizes, strict=True)) if two > one}
    assert depends_on_inputs(traces[0]) == larger


# --- several losses --------------------------------------------------------------------------------------------------


class SummedOverRanks(torch.autograd.Function):
    """What enters a layer of which each rank has a part (Megatron-LM's f)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        summed = gradient.contiguous()
        torch.distributed.all_reduce(summed)
        return summed


class Part(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(SummedOverRanks.apply(x))


@pytest.mark.parametrize("layer", [nn.Linear, Part], ids=["data parallel", "tensor parallel"])
def test_one_pass_for_two_losses_is_priced_as_the_program_that_has_one_where_ranks_add_up_gradients(layer):
    reports = []
    for is_mended in (False, True):
        with world(8), torch.device("meta"), FlopMeter(H100) as meter:
            body = nn.Sequential(*(nn.Sequential(layer(2048, 2048), nn.GELU()) for _ in range(6))).to(BF16)
            heads = nn.ModuleList(nn.Linear(2048, 512, dtype=BF16) for _ in range(2))
            features = body(torch.empty(8192, 2048, dtype=BF16))
            first, second = (head(features).square().mean() for head in heads)
            if not is_mended:
                first.backward(retain_graph=True)
            (first + second if is_mended else second).backward()
            for weight in (*body.parameters(), *heads.parameters()):
                torch.distributed.all_reduce(weight.grad)
        reports.append(meter.report())
    plain, mended = reports
    (told,) = (each for each in plain.advice if each.remedy.startswith("one backward() of the sum"))
    assert told.gain_seconds == pytest.approx(plain.seconds - mended.seconds, rel=0.05)
    assert not any("retain_graph" in each.remedy for each in mended.advice)


# --- waiting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [64, 1536], ids=["host-bound", "balanced"])
def test_a_loop_that_synchronizes_is_told_what_it_wins_without(width):
    steps = {}
    for waits in (True, False):
        with flopmeter.cuda(H100) as device:
            model = nn.Sequential(*[nn.Linear(width, width) for _ in range(8)]).cuda()
            optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
            for _ in range(4):
                model(torch.zeros(512, width, device="cuda")).sum().backward()
                if waits:
                    torch.cuda.synchronize()
                optimizer.step()
                optimizer.zero_grad()
        steps[waits] = device.report().step
    gain = steps[True].seconds - steps[False].seconds
    told = [each for each in steps[True].advice if "synchronize" in each.remedy]
    assert [each.gain_seconds for each in told] == pytest.approx([gain] if gain > 0.03 * steps[True].seconds else [])
    assert len(told) == (width == 1536)
    assert not any("synchronize" in each.remedy for each in steps[False].advice)
