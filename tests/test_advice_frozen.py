"""Advice to freeze weights whose gradients nothing reads, against the program that does."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flopmeter
from flopmeter import FlopMeter

H100 = "h100-sxm5-80gb"
# fp32: 1,000 words, and twice a norm, 512 x 1,536 + 1,536 and 512 x 512 + 512.
BACKBONE_BYTES = 4 * (1000 * 512 + 2 * (2 * 512 + 513 * 1536 + 513 * 512))


class Layer(nn.Module):
    """nn.TransformerEncoderLayer runs other ops where nothing asks for a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(512), nn.Linear(512, 3 * 512), nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 8, 64)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 512)
        self.backbone = nn.Sequential(Layer(), Layer())
        self.head = nn.Linear(512, 10)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.backbone(self.words(ids))[:, 0])


def trained(*frozen: str, updated: str | tuple[str, ...] = "", by_hand: bool = False, clears: bool = True):
    """The report of a step. `updated`: the weights that are, by how their names begin. Of `frozen` none asks for a
    gradient."""
    with torch.device("meta"):
        model = Classifier()
        ids, labels = torch.zeros(32, 128, dtype=torch.int64), torch.zeros(32, dtype=torch.int64)
    for name, weight in model.named_parameters():
        weight.requires_grad_(not name.startswith(frozen or "-"))
    some = [weight for name, weight in model.named_parameters() if name.startswith(updated) and weight.requires_grad]
    optimizer = torch.optim.AdamW(some, fused=True)
    for _ in range(2):
        with FlopMeter(H100) as meter:
            F.cross_entropy(model(ids), labels).backward()
            if by_hand:
                with torch.no_grad():
                    for weight in some:
                        weight -= 0.1 * weight.grad
            else:
                optimizer.step()
            if clears:
                model.zero_grad()
    return meter.report()


def told(report):
    return [each for each in report.advice if each.remedy.startswith("requires_grad_(False)")]


@pytest.mark.parametrize("clears", [True, False], ids=["cleared", "never cleared"])
@pytest.mark.parametrize("by_hand", [True, False], ids=["by hand", "AdamW"])
@pytest.mark.parametrize(
    ("updated", "frozen"),
    [("head", ("words", "backbone")), (("head", "backbone"), ("words",)), (("backbone", "words"), ("head",))],
    ids=["the head", "all but the table", "all but the head"],
)
def test_freezing_what_nothing_updates_is_priced_as_the_program_that_does(updated, frozen, by_hand, clears):
    plain, mended = (trained(*names, updated=updated, by_hand=by_hand, clears=clears) for names in ((), frozen))
    gain = plain.seconds - mended.seconds
    if gain < 0.03 * plain.seconds:
        assert not told(plain)
    else:
        (advice,) = told(plain)
        assert advice.gain_seconds == pytest.approx(gain, rel=0.05, abs=0.005 * plain.seconds)
        assert updated != "head" or advice == plain.advice[0]
        assert updated != "head" or f"computed of {BACKBONE_BYTES / 1e6:.1f} MB of weights" in advice.why
    assert not told(mended)


def test_nothing_is_told_to_freeze_where_all_is_updated_or_nothing_is():
    assert not told(trained())
    with FlopMeter(H100) as meter:
        model = Classifier().to("meta")
        model(torch.zeros(32, 128, dtype=torch.int64, device="meta")).sum().backward()
    assert not told(meter.report())


def test_gradients_that_are_read_are_no_advice_to_freeze():
    """The slope of the loss by its input runs through the same layers."""
    with torch.device("meta"):
        model, head = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]), nn.Linear(2048, 2048)
        x = torch.empty(4096, 2048, requires_grad=True)
    seconds = {}
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    for is_frozen in (False, True):
        model.requires_grad_(not is_frozen)
        with FlopMeter(H100) as meter:
            head(model(x)).sum().backward()
            optimizer.step()
        report = seconds[is_frozen] = meter.report()
        assert len(told(report)) == (not is_frozen)
    (advice,) = told(seconds[False])
    assert advice.run_seconds_then == pytest.approx(seconds[True].seconds, rel=0.01)
    assert sum(kernel.cost.macs for kernel in seconds[True].kernels) == 4096 * 2048 * 2048 * (5 + 5 + 1)


def test_weights_that_a_compiled_optimizer_updates_are_not_told_to_be_frozen():
    """Beside others that an eager one updates, as in nanochat."""
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)), torch.empty(4096, 2048)
    first, second = (torch.optim.SGD(layer.parameters(), 0.1, foreach=True) for layer in model)
    step = torch.compile(first.step)
    with FlopMeter(H100) as meter:
        model(x).sum().backward()
        step()
        second.step()
    assert any(op.graph is not None for op in meter.trace.ops)
    assert not told(meter.report())


def adversarial(detaches: bool, freezes: bool, sets_to_none: bool = True):
    """The report of the third step of a generator and its critic."""
    with torch.device("meta"):
        generator = nn.Sequential(nn.Linear(128, 1024), nn.ReLU(), nn.Linear(1024, 4096))
        critic = nn.Sequential(nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 1))
    of_generator, of_critic = (torch.optim.SGD(net.parameters(), 0.1, fused=True) for net in (generator, critic))
    with torch.device("meta"), FlopMeter(H100) as meter:
        for _ in range(3):
            start = len(meter.trace.ops)
            made = generator(torch.rand(4096, 128))
            loss = critic(made.detach() if detaches else made).mean() - critic(torch.rand(4096, 4096)).mean()
            of_critic.zero_grad(sets_to_none)
            loss.backward()
            of_critic.step()
            critic.requires_grad_(not freezes)
            loss = critic(generator(torch.rand(4096, 128))).mean()
            of_generator.zero_grad(sets_to_none)
            loss.backward()
            of_generator.step()
            critic.requires_grad_(True)
    return meter.report(ops=range(start, len(meter.trace.ops)))


def told_of_clearing(report):
    return [each for each in report.advice if "cleared before anything reads them" in each.why]


@pytest.mark.parametrize("sets_to_none", [True, False], ids=["freed", "zeros"])
@pytest.mark.parametrize(("detaches", "freezes"), [(False, False), (True, False), (False, True)])
def test_gradients_that_the_other_network_clears_are_priced_as_the_program_without_them(
    detaches, freezes, sets_to_none
):
    plain, mended = adversarial(detaches, freezes, sets_to_none), adversarial(True, True, sets_to_none)
    (advice,) = told_of_clearing(plain)
    # An addition to zeros is still there where zeros are written first.
    assert advice.run_seconds_then == pytest.approx(mended.seconds, rel=0.01 if sets_to_none else 0.05)
    assert not told(plain)
    assert not told_of_clearing(mended)


def test_gradients_that_several_batches_add_up_are_read():
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(2048, 2048), nn.Linear(2048, 2048)), torch.empty(4096, 2048)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
    with FlopMeter(H100) as meter:
        for _ in range(3):
            start = len(meter.trace.ops)
            for _ in range(2):
                model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    report = meter.report(ops=range(start, len(meter.trace.ops)))
    assert not told(report)
    assert not told_of_clearing(report)


def images() -> nn.Module:
    """Layers whose backward pass makes the gradients of input and weights in one call."""
    layers = [nn.Conv2d(3, 128, 3, 1, 1), nn.GroupNorm(8, 128), nn.ReLU(), nn.Conv2d(128, 128, 3, 1, 1)]
    return nn.Sequential(*layers, nn.BatchNorm2d(128), nn.LayerNorm(64), nn.Linear(64, 64)).to("meta")


def last_of(step, times=3):
    with FlopMeter(H100) as meter:
        for _ in range(times):
            start = len(meter.trace.ops)
            step()
    return meter.report(ops=range(start, len(meter.trace.ops)))


def behind_a_trained_layer(is_frozen, clears):
    first, fixed = nn.Conv2d(3, 3, 3, 1, 1, device="meta"), images().requires_grad_(not is_frozen)
    optimizer = torch.optim.SGD(first.parameters(), 0.1, fused=True)

    def step():
        fixed(first(torch.empty(64, 3, 64, 64, device="meta"))).sum().backward()
        optimizer.step()
        first.zero_grad()
        if clears:
            fixed.zero_grad()

    return step


def beside_its_average(is_frozen, clears):
    """A teacher, which follows the weights that are trained."""
    net = images()
    teacher = copy.deepcopy(net).requires_grad_(not is_frozen)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, fused=True)

    def step():
        x = torch.empty(64, 3, 64, 64, device="meta")
        F.mse_loss(net(x), teacher(x)).backward()
        optimizer.step()
        net.zero_grad()
        if clears:
            teacher.zero_grad()
        with torch.no_grad():
            for mean, weight in zip(teacher.parameters(), net.parameters(), strict=True):
                mean.lerp_(weight, 0.01)

    return step


@pytest.mark.parametrize("clears", [True, False], ids=["cleared", "never cleared"])
@pytest.mark.parametrize("program", [behind_a_trained_layer, beside_its_average])
def test_a_fixed_network_is_priced_as_one_that_asks_for_no_gradients(program, clears):
    plain, mended = (last_of(program(is_frozen, clears)) for is_frozen in (False, True))
    (advice,) = told(plain)
    assert advice.run_seconds_then == pytest.approx(mended.seconds, rel=0.02)
    assert not told(mended)


def attacked(asks_for_input, fills=False):
    """An image is changed along the gradient of the loss before the network trains on it."""
    net = images()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, fused=True)

    def step():
        x = torch.empty(64, 3, 64, 64, device="meta")
        change = torch.zeros_like(x, requires_grad=True)
        loss = net(x + change).sum()
        if asks_for_input:
            change.grad = torch.autograd.grad(loss, change)[0]
        else:
            loss.backward()
        change.data.add_(change.grad.sign(), alpha=0.01)
        optimizer.zero_grad(set_to_none=not fills)
        net(x + change.detach()).sum().backward()
        optimizer.step()

    return step


@pytest.mark.parametrize("fills", [True, False], ids=["filled with zeros", "dropped"])
def test_gradients_of_an_attack_that_are_cleared_unread_are_priced_as_the_pass_for_the_input_alone(fills):
    plain, mended = (last_of(attacked(asks_for_input, fills)) for asks_for_input in (False, True))
    (advice,) = told_of_clearing(plain)
    assert advice.run_seconds_then == pytest.approx(mended.seconds, rel=0.02)
    assert not told(plain)
    assert not told_of_clearing(mended)


def test_weights_that_an_optimizer_has_are_not_told_to_be_frozen_though_it_steps_later():
    with flopmeter.cuda(H100) as device:
        body, head = nn.Linear(2048, 2048, device="cuda"), nn.Linear(2048, 2048, device="cuda")
        often, seldom = torch.optim.SGD(head.parameters(), 0.1), torch.optim.SGD(body.parameters(), 0.1)
        for step in range(1, 4):
            head(body(torch.zeros(4096, 2048, device="cuda"))).sum().backward()
            often.step()
            often.zero_grad()
            if step % 4 == 0:
                seldom.step()
                seldom.zero_grad()
        report = device.report()
    assert not told(report.step)
