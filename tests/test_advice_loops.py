"""Loops in Python over what could run at once, each with its mended twin, and loops that are none."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import flopmeter
from flopmeter import FlopMeter

H100 = "h100-sxm5-80gb"
WIDTH, HEADS, FRAMES, EXPERTS = 512, 8, 16, 8


def advised(step, steps=1):
    """The report of a step, and what it says of loops."""
    with FlopMeter(H100, checks="hold") as meter:
        for _ in range(steps):
            step()
    report = meter.report()
    return report, [each for each in report.advice if each.remedy.endswith("in place of the loop")]


class Attention(nn.Module):
    """Heads as one layer each for queries, keys and values, or all of them."""

    def __init__(self, heads: int, width: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(WIDTH, width, bias=False) for _ in range(3))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(Attention(1, WIDTH // HEADS) for _ in range(HEADS))

    def forward(self, x):
        return torch.cat([head(x) for head in self.heads], -1)


def heads_as_modules(is_mended):
    layer = (lambda: Attention(HEADS, WIDTH)) if is_mended else Heads
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), layer()) for _ in range(3))).bfloat16()
        x = torch.empty(4, 256, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    return lambda: model(x).sum().backward()


def frames_one_by_one(is_mended):
    """A convolutional network on each frame of a film."""
    with torch.device("meta"):
        net = nn.Sequential(
            nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(64, 64),
        )  # fmt: skip
        films = torch.empty(8, FRAMES, 3, 64, 64)

    def step():
        at_once = net(films.flatten(0, 1)) if is_mended else torch.cat([net(films[:, t]) for t in range(FRAMES)])
        at_once.sum().backward()

    return step


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(1000, WIDTH)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)))
        self.head = nn.Linear(WIDTH, 1000)

    def forward(self, tokens):
        return self.head(self.layers(self.table(tokens)))


def samples_one_by_one(is_mended, autocast=False):
    with torch.device("meta"):
        model = Classifier()
        tokens = torch.empty(16, 128, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def loss(part):
        return F.cross_entropy(model(part).flatten(0, 1), part.flatten())

    def step():
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            total = loss(tokens) if is_mended else sum(loss(tokens[i : i + 1]) for i in range(len(tokens))) / 16
        total.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def samples_under_autocast(is_mended):
    """The first turn casts the weights."""
    return samples_one_by_one(is_mended, autocast=True)


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.empty(EXPERTS, WIDTH, 1024)),
            nn.Parameter(torch.empty(EXPERTS, 1024, WIDTH)),
        )
        self.up_bias, self.down_bias = (
            nn.Parameter(torch.empty(EXPERTS, 1, 1024)),
            nn.Parameter(torch.empty(EXPERTS, 1, WIDTH)),
        )

    def forward(self, x):
        return torch.baddbmm(self.down_bias, torch.baddbmm(self.up_bias, x, self.up).relu(), self.down)


def an_ensemble(is_mended):
    with torch.device("meta"):
        members = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, WIDTH)) for _ in range(EXPERTS)
        )
        model = Stacked() if is_mended else members
        x = torch.empty(EXPERTS, 256, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), fused=True)

    def step():
        y = model(x) if is_mended else torch.stack([member(part) for member, part in zip(members, x, strict=True)])
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def frames_recomputed(is_mended):
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 64, 3, 2), nn.AdaptiveAvgPool2d(1))
        films = torch.empty(8, FRAMES, 3, 64, 64)

    def step():
        if is_mended:
            at_once = checkpoint(net, films.flatten(0, 1), use_reentrant=False)
        else:
            at_once = torch.cat([checkpoint(net, films[:, t], use_reentrant=False) for t in range(FRAMES)])
        at_once.sum().backward()

    return step


def residual(width):
    return nn.Sequential(nn.Linear(WIDTH, width), nn.GELU(), nn.Linear(width, WIDTH))


def both_views(is_mended):
    """Two loops over one network, each with its residual, before one backward pass."""
    with torch.device("meta"):
        net, views = residual(1024), torch.empty(2, 16, 64, WIDTH, requires_grad=True)

    def features(view):
        return view + net(view) if is_mended else torch.stack([part + net(part) for part in view])

    return lambda: F.mse_loss(*map(features, views)).backward()


def a_last_part_that_is_smaller(is_mended):
    with torch.device("meta"):
        net, parts, rest = residual(1024), torch.empty(15, 64, WIDTH), torch.empty(40, WIDTH)

    def step():
        made = [net(parts).flatten(0, 1), net(rest)] if is_mended else [net(part) for part in (*parts, rest)]
        torch.cat(made).mean().backward()

    return step


def samples_by_chance(is_mended):
    """Inference with dropout, many times for the same input."""
    with torch.device("meta"):
        net = nn.Sequential(
            nn.Linear(WIDTH, 2048), nn.Dropout(), nn.Linear(2048, 2048), nn.Dropout(), nn.Linear(2048, 16)
        )
        x = torch.empty(256, WIDTH)

    @torch.no_grad()
    def step():
        drawn = net(x.repeat(20, 1)).unflatten(0, (20, -1)) if is_mended else torch.stack([net(x) for _ in range(20)])
        return drawn.var(0)

    return step


class Classifiers(nn.Module):
    """Convolutional networks beside each other, in groups of channels."""

    def __init__(self, networks=1):
        super().__init__()
        self.networks = networks
        self.first = nn.Conv2d(3, 32 * networks, 3, 2)
        self.second = nn.Conv2d(32 * networks, 64 * networks, 3, 2, groups=networks)

    def forward(self, x):
        return self.second(self.first(x).relu()).relu().mean((2, 3))


def convolutional_networks(is_mended):
    with torch.device("meta"):
        many = Classifiers(EXPERTS) if is_mended else nn.ModuleList(Classifiers() for _ in range(EXPERTS))
        x = torch.empty(32, 3, 64, 64)
    return lambda: (many(x) if is_mended else torch.cat([one(x) for one in many], 1)).square().mean().backward()


def losses_of_classes(is_mended):
    with torch.device("meta"):
        net, x, y = nn.Linear(WIDTH, 20), torch.empty(1024, WIDTH), torch.empty(1024, 20)
    loss = F.binary_cross_entropy_with_logits

    def step():
        scores = net(x)
        (loss(scores, y) if is_mended else sum(loss(scores[:, i], y[:, i]) for i in range(20)) / 20).backward()

    return step


def heads_of_tasks(is_mended):
    """Adam reads on the host how many steps each of its weights has made."""
    with torch.device("meta"):
        body = nn.Linear(WIDTH, 1024)
        heads = nn.Linear(1024, 12) if is_mended else nn.ModuleList(nn.Linear(1024, 1) for _ in range(12))
        x = torch.empty(512, WIDTH)
    optimizer = torch.optim.Adam([*body.parameters(), *heads.parameters()])

    def step():
        features = body(x).relu()
        scores = heads(features) if is_mended else torch.cat([head(features) for head in heads], 1)
        scores.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step


@pytest.mark.parametrize(
    ("program", "remedy", "turns"),
    [
        (heads_as_modules, "one wider layer", HEADS),
        (frames_one_by_one, "one call", FRAMES),
        (samples_one_by_one, "one call", 16),
        (samples_under_autocast, "one call", 16),
        (an_ensemble, "one wider layer", EXPERTS),
        (frames_recomputed, "one call", FRAMES),
        (both_views, "one call", 16),
        (a_last_part_that_is_smaller, "one call", 15),
        (samples_by_chance, "one call", 20),
        (convolutional_networks, "one wider layer", EXPERTS),
        (losses_of_classes, "one call", 20),
        (heads_of_tasks, "one wider layer", 12),
    ],
)
def test_a_loop_over_what_could_run_at_once_is_told_at_the_price_of_the_mended_program(program, remedy, turns):
    report, (advice,) = advised(program(is_mended=False), steps=2)
    mended, none = advised(program(is_mended=True), steps=2)
    assert advice.remedy.startswith(remedy)
    assert advice.why.startswith(f"{turns} turns ")
    assert advice.is_fault
    assert advice.gain_seconds == pytest.approx(report.seconds - mended.seconds, rel=0.05)
    assert not none


def test_turns_that_add_up_in_one_tensor_are_still_independent():
    """Experts that all see all tokens; the first adds to a number, the next to a tensor."""
    with torch.device("meta"):
        experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS))
        x = torch.empty(64, WIDTH)
    report, (advice,) = advised(lambda: sum(torch.tanh(expert(x)) for expert in experts))
    (product,) = (kernel for kernel in report.kernels[:1])
    assert advice.why.startswith(f"{EXPERTS} turns ")
    assert product.cost.macs * EXPERTS == 64 * WIDTH * WIDTH * EXPERTS


def cells(model, x):
    """Each step takes the state that the one before left."""
    state = x[0]
    for part in x:
        state = torch.tanh(model(part + state))
    return state


def three_views(model, x):
    return torch.stack([model(part) for part in x[:3]])


@pytest.mark.parametrize("turns", [cells, three_views])
def test_turns_that_depend_on_each_other_or_are_few_are_no_such_loop(turns):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        x = torch.empty(16, 8, WIDTH)
    _, found = advised(lambda: turns(model, x).sum().backward())
    assert not found


def test_a_loop_in_which_the_host_decides_whether_to_go_on_is_none():
    with flopmeter.cuda(H100) as device:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)).to(device)
        loss = 0
        for part in torch.randn(16, 8, WIDTH, device=device):
            loss = loss + model(part).square().mean()
            if not loss.item() < 1e9:
                break
        loss.backward()
    assert not [each for each in device.report().step.advice if each.remedy.endswith("in place of the loop")]


def test_layers_that_follow_each_other_are_no_loop():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(12)))
        x = torch.empty(64, WIDTH)
    _, found = advised(lambda: model(x).sum().backward())
    assert not found


def test_the_batches_of_an_evaluation_are_no_loop_within_a_step():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        batches = torch.empty(16, 8, WIDTH)
    _, found = advised(torch.no_grad()(lambda: [model(batch) for batch in batches]))
    assert not found


def test_one_input_many_times_without_chance_is_a_benchmark_and_no_loop():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        x = torch.empty(8, WIDTH)
    _, found = advised(torch.no_grad()(lambda: [model(x) for _ in range(16)]))
    assert not found


@pytest.mark.parametrize(("norm", "is_told"), [(nn.BatchNorm2d, True), (nn.InstanceNorm2d, False)])
def test_batches_whose_statistics_would_become_one_are_told(norm, is_told):
    with torch.device("meta"):
        net = nn.Sequential(nn.Conv2d(3, 32, 3), norm(32), nn.ReLU())
        films = torch.empty(FRAMES, 8, 3, 32, 32)
    _, (advice,) = advised(lambda: sum(net(frame).mean() for frame in films).backward())
    assert ("batch norm would take its statistics over all of them" in advice.why) is is_told


def test_the_advice_says_how_many_loops_it_is_about():
    step = heads_as_modules(is_mended=False)
    _, (advice,) = advised(step)
    assert advice.why == f"{HEADS} turns of each of 3 loops run one after the other, though none depends on another"


def of_batches(model, batches):
    """Gradients that add up."""
    for batch in batches:
        model(batch).square().mean().backward()


def of_samples(model, batches):
    """The gradients of each sample, one by one."""
    for batch in batches:
        torch.autograd.grad(model(batch).square().mean(), list(model.parameters()))


def of_two_losses(model, batches):
    """As those of a discriminator and a generator are, which differ."""
    for batch in batches[:2]:
        model(batch).square().mean().backward()
    model(batches[2]).sigmoid().log().mean().backward()


@pytest.mark.parametrize(("passes", "number"), [(of_batches, 6), (of_samples, 6), (of_two_losses, None)])
def test_small_batches_of_one_step_are_told_with_their_number(passes, number):
    with torch.device("meta"):
        model, batches = residual(1024), torch.empty(6, 8, WIDTH)
    with FlopMeter(H100) as meter:
        passes(model, batches)
    (why,) = (each.why for each in meter.report().advice if "times the batch" in each.remedy)
    assert (f"each step has {number} backward passes" in why) == bool(number)
    assert number or "backward passes" not in why
