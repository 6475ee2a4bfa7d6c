"""Where a program's steps begin and end: setup, first step, steady step."""

from __future__ import annotations

import contextlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import flopmeter
from flopmeter.run.session import Wishes

A100 = "a100-sxm4-80gb"


def test_setup_first_step_and_steady_step_are_told_apart():
    with flopmeter.cuda(A100) as device:
        model = nn.Linear(64, 64).to(device)
        with torch.no_grad():
            model(torch.zeros(1, 64, device=device))  # an evaluation before training is setup
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            model(torch.zeros(8, 64, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    report = device.report()
    assert list(report.by_part) == ["setup", "first step", "steady step"]
    assert report.by_part["setup"].macs == 64 * 64
    assert report.by_part["first step"].macs == report.by_part["steady step"].macs == 2 * 8 * 64 * 64
    assert len(report.by_part["first step"].kernels) > len(report.by_part["steady step"].kernels)  # Adam's state


def test_inputs_of_a_step_are_the_batches_that_the_host_sends_not_the_loss_that_it_reads_or_scalars():
    with flopmeter.cuda(A100) as device:
        model = nn.Linear(64, 64).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            x, scale = torch.zeros(8, 64).pin_memory(), torch.tensor(2.0)
            loss = (model(x.to(device, non_blocking=True)) * scale.to(device)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss.item()
    assert device.report().step.ran.inputs == ("float32 [8, 64]",)


def trained_and_evaluated(evaluates_before: tuple[int, ...], evaluated: nn.Module | None = None):
    """Three steps of two products of 8 x 64 x 64; an evaluation is one of 2 x 64 x 64."""
    with flopmeter.cuda(A100, steps=3) as device:
        model = nn.Linear(64, 64).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in (1, 2, 3):
            if number in evaluates_before:
                with torch.no_grad():
                    (evaluated or model).to(device).eval()(torch.zeros(2, 64, device=device))
                model.train()
            model(torch.zeros(8, 64, device=device)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return device.report()


def test_the_steady_step_is_the_last_one_without_an_evaluation():
    report = trained_and_evaluated((1, 3))
    assert report.step.macs == 2 * 8 * 64 * 64
    assert report.headline.endswith("number 2 of 3 (marked by optimizer.step()); later ones evaluate too")
    assert "in eval mode" not in report.by_part
    assert report.as_dict()["run"]["steady_number"] == 2


def test_an_evaluation_that_forgot_no_grad_is_one_and_a_training_in_eval_mode_is_none():
    """TabNet's package evaluates so. Where batch norms are frozen, what trains is in eval mode too."""
    with flopmeter.cuda(A100, steps=3) as device:
        model, frozen = nn.Linear(64, 64).to(device), nn.Linear(64, 64).to(device).eval()
        optimizer = torch.optim.SGD([*model.parameters(), *frozen.parameters()], lr=0.1)
        for number in (1, 2, 3):
            if number == 3:
                model.eval()(torch.zeros(2, 64, device=device)).cpu()
                model.train()
            (
                frozen(torch.zeros(4, 64, device=device)).sum() + model(torch.zeros(8, 64, device=device)).sum()
            ).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = device.report()
    assert report.step.macs == 2 * (8 + 4) * 64 * 64
    assert report.headline.endswith("number 2 of 3 (marked by optimizer.step()); later ones evaluate too")
    assert "in eval mode" not in report.by_part


def test_an_evaluation_of_every_step_is_part_of_it_and_a_row_of_its_own():
    report = trained_and_evaluated((2, 3))
    assert report.step.macs == (2 * 8 + 2) * 64 * 64
    assert report.by_part["in eval mode"].macs == 2 * 64 * 64
    assert report.headline.endswith("the last of 3 (marked by optimizer.step()), with calls in eval mode")


def test_a_teacher_in_eval_mode_is_no_evaluation():
    """No optimizer updates it: knowledge distillation calls it in each step."""
    report = trained_and_evaluated((1, 2, 3), evaluated=nn.Linear(64, 64))
    assert report.step.macs == (2 * 8 + 2) * 64 * 64
    assert "in eval mode" not in report.headline + "".join(report.by_part)


def test_samples_of_an_average_of_the_weights_now_and_then_are_an_evaluation():
    """A diffusion model's, which may be in training mode."""
    report = trained_and_evaluated((3,), evaluated=nn.Sequential(nn.Linear(64, 64)))
    assert report.step.macs == 2 * 8 * 64 * 64
    assert report.headline.endswith("number 2 of 3 (marked by optimizer.step()); later ones evaluate too")


def test_another_model_now_and_then_is_no_evaluation():
    report = trained_and_evaluated((3,), evaluated=nn.Linear(64, 64, bias=False))
    assert report.step.macs == (2 * 8 + 2) * 64 * 64
    assert "the last of 3 (marked by optimizer.step()); 2 such steps take" in report.headline


def test_the_first_step_has_the_teacher_that_the_others_have():
    """It runs before the forward pass that trains. An evaluation before the training comes once, and is setup."""
    with flopmeter.cuda(A100, steps=3) as device:
        teacher, model = nn.Linear(64, 128).to(device).eval(), nn.Linear(64, 64).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model(torch.zeros(2, 64, device=device))
        for _ in range(3):
            batch = torch.zeros(8, 64, device=device)
            with torch.no_grad():
                teacher(batch)
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    parts = device.report().by_part
    assert parts["setup"].macs == 2 * 64 * 64
    assert parts["first step"].macs == parts["steady step"].macs == 8 * 64 * 128 + 2 * 8 * 64 * 64


def test_calls_without_gradients_before_the_first_step_are_told():
    with flopmeter.cuda(A100, steps=2) as device:
        model = nn.Linear(64, 64).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            with torch.no_grad():
                for _ in range(5):  # a rollout, of which the first two steps make use
                    model(torch.zeros(1, 64, device=device))
            for _ in range(4):
                model(torch.zeros(8, 64, device=device)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    (note,) = (note for note in device.report().step.notes if note.startswith("before the first step"))
    assert "Linear, which is trained, was called without gradients 5 times" in note


def test_steps_that_differ_are_told_in_the_headline():
    def headline(batches):
        with flopmeter.cuda(A100, steps=4) as device:
            model = nn.Linear(4096, 4096).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in batches:
                model(torch.zeros(batch, 4096, device=device)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        report = device.report()
        assert len(report.step_seconds) == 3
        return report.headline

    assert headline([4096] * 4).endswith("(marked by optimizer.step())")
    assert "; 3 such steps take " in headline([4096, 4096, 16384, 8192])


def test_turns_of_which_the_host_takes_as_long_for_other_work_are_told_by_their_flops():
    """Continuous batching whose slots empty: the last eight turns have 24 to 17 of them."""
    with flopmeter.cuda(A100) as device:
        model = nn.Linear(64, 500).to(device)
        with torch.no_grad():
            for slots in range(32, 16, -1):
                model(torch.zeros(slots, 64, device=device))
    report = device.report()
    assert report.step_flops == tuple(2 * slots * 64 * 500 + slots * 500 for slots in range(24, 16, -1))
    assert max(report.step_seconds) < 1.05 * min(report.step_seconds)
    of_one = (2 * 64 * 500 + 500) / 1e9
    assert report.headline.endswith(
        f"; 8 such steps compute {17 * of_one:.3g} to {24 * of_one:.3g} GFLOP, {20.5 * of_one:.3g} on average"
    )


def test_where_to_win_names_the_line_of_the_script(monkeypatch):
    """A read of a value outside of modules is named by its line alone, below the working directory by a short path."""
    monkeypatch.chdir(Path(__file__).parent)
    with flopmeter.cuda(A100) as device:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.zeros(8, 64, device=device)).sum().backward()
            line = inspect.currentframe().f_lineno + 1
            sum(parameter.grad.norm().item() for parameter in model.parameters())
            optimizer.step()
    (advice,) = [each for each in device.report().step.advice if "reads of a value" in each.what]
    assert advice.where == f"test_run_steps.py:{line}"


def trained_on(batches: tuple[int, ...], *optimizer_kinds, steps: int | None = None):
    """A step for each batch of that many rows, with an optimizer for each layer of two."""
    with flopmeter.cuda(A100, steps=steps) as device:
        layers = [nn.Linear(64, 64).to(device) for _ in optimizer_kinds]
        model = nn.Sequential(*layers)
        optimizers = [kind(layer.parameters(), lr=0.1) for kind, layer in zip(optimizer_kinds, layers, strict=True)]
        for rows in batches:
            model(torch.zeros(rows, 64).to(device)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return device.report()


@pytest.mark.parametrize("steps", [None, 3])
def test_a_step_ends_with_the_last_of_the_optimizers_that_step_one_after_another(steps):
    report = trained_on((8,) * (4 if steps else 3), torch.optim.AdamW, torch.optim.SGD, steps=steps)
    phases = [op.phase for kernel in report.step.kernels for op in kernel.ops]
    assert list(dict.fromkeys(phases)) == ["forward", "backward", "optimizer"]
    ops = [op.call.name for kernel in report.step.kernels for op in kernel.ops if op.phase == "optimizer"]
    assert "_foreach_addcdiv_" in ops[:-1]  # AdamW's last
    assert ops[-1] == "_foreach_add_"  # SGD's only one
    assert report.parts.count == 3
    assert {part.macs for name, part in report.by_part.items() if name != "setup"} == {5 * 8 * 64 * 64}


@pytest.mark.parametrize(
    ("batches", "number"), [((8, 8, 2), 2), ((8, 8, 8, 2), 3), ((2, 8, 8), 3), ((8, 4, 2), 3), ((8, 8, 4, 4), 4)]
)
def test_the_steady_step_is_the_last_with_the_batch_of_most_steps(batches, number):
    report = trained_on(batches, torch.optim.SGD)
    assert report.parts.steady_number == number
    assert report.step.macs == 2 * batches[number - 1] * 64 * 64
    is_last = number == len(batches)
    assert ("most have its shapes, and a later one has not" in report.headline) == (not is_last)


def test_updates_by_gradients_that_no_backward_pass_has_made_are_steps_too():
    with flopmeter.cuda(A100) as device:
        weight = nn.Parameter(torch.zeros(64, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            weight.grad = torch.randn(64, device=device)
            optimizer.step()
    assert device.report().parts.count == 3


def test_of_two_optimizers_a_step_has_one_turn_of_each():
    with flopmeter.cuda(A100) as device:
        nets = [nn.Linear(64, 64, bias=False).to(device) for _ in range(2)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        for _ in range(3):
            for net, optimizer in zip(nets, optimizers, strict=True):
                net(torch.zeros(8, 64, device=device)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert device.report().step.macs == 2 * (2 * 8 * 64 * 64)


class Container(torch.optim.Optimizer):
    """Steps several optimizers as if they were one, and then does an op of its own."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = optimizers
        parameters = [tensor for each in optimizers for group in each.param_groups for tensor in group["params"]]
        super().__init__(parameters, {})

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.param_groups[0]["params"][0].data.relu_()


def test_an_optimizer_in_whose_step_others_step_ends_with_all_of_them():
    with flopmeter.cuda(A100, steps=3) as device:
        nets = [nn.Linear(64, 64, bias=False).to(device) for _ in range(2)]
        optimizer = Container(*[torch.optim.SGD(net.parameters(), lr=0.1, foreach=False) for net in nets])
        for _ in range(4):
            sum(net(torch.zeros(8, 64, device=device)).sum() for net in nets).backward()
            optimizer.step()
            optimizer.zero_grad()
    report = device.report()
    assert report.headline.endswith("one steady step, the last of 3 (marked by optimizer.step())")
    assert report.step.macs == 2 * (2 * 8 * 64 * 64)
    assert "relu_" in {row.name for row in report.step.rows("op")}  # it does not end with the last part of it


@pytest.mark.parametrize("keeps_groups", [False, True])
def test_groups_of_an_optimizer_that_are_stepped_one_by_one_are_one_step(keeps_groups):
    """As DeepSpeed's ZeRO steps them: stages 1 and 2 leave one group at a time, stage 3 one that has parameters. A step
    has two products forward, the gradients of two weights and of what is between them, and both updates."""
    with flopmeter.cuda(A100, steps=3) as device:
        model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(2)]).to(device)
        groups = [{"params": [layer.weight]} for layer in model]
        optimizer = torch.optim.SGD(groups, lr=0.1, foreach=False)
        whole, lists = optimizer.param_groups, [[layer.weight] for layer in model]
        for _ in range(4):
            model(torch.zeros(8, 64, device=device)).sum().backward()
            for place in range(2):
                if keeps_groups:
                    for other, group in enumerate(whole):
                        group["params"] = lists[place] if other == place else []
                else:
                    optimizer.param_groups = [whole[place]]
                optimizer.step()
            optimizer.param_groups = whole
            model.zero_grad()
    report = device.report()
    assert report.headline.endswith("one steady step, the last of 3 (marked by optimizer.step())")
    assert report.step.macs == (2 + 3) * 8 * 64 * 64
    assert {row.name: row.calls for row in report.step.rows("op")}["add_"] == 2


def test_updates_alone_and_turns_of_layers_are_steps():
    """A benchmark of an optimizer; one that trains a layer at a time, in turn."""
    for turns in (False, True):
        with flopmeter.cuda(A100, steps=3) as device:
            layers = [nn.Linear(64, 64).to(device) for _ in range(2)]
            optimizer = torch.optim.SGD(layers[0].parameters(), lr=0.1)
            for number in range(4):
                layer = layers[number % 2 if turns else 0]
                if turns or number == 0:
                    optimizer.param_groups[0]["params"] = list(layer.parameters())
                    layer(torch.zeros(8, 64, device=device)).sum().backward()
                optimizer.step()
        assert device.report().parts.count == 3


@pytest.mark.parametrize(("steps", "average"), [(3, (5 + 1) / 2), (6, (5 + 1 + 1 + 1 + 1) / 5)])
def test_an_optimizer_that_steps_every_fifth_time_is_told_with_the_average(steps, average):
    """The generator of a GAN: a step of the critic is two products, one of both ten."""
    with flopmeter.cuda(A100, steps=steps) as device:
        critic, generator = nn.Linear(4096, 4096).to(device), nn.Sequential(*[nn.Linear(4096, 4096)] * 3).to(device)
        often, seldom = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (critic, generator))
        for number in range(6):
            for net, optimizer in ((critic, often), (generator, seldom)):
                if net is critic or number % 5 == 0:
                    net(torch.zeros(16384, 4096, device=device)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
    headline = device.report().headline
    assert re.search(r", without SGD of \S*test_run_steps.py:\d+, which steps in 1 of them \(--steps", headline)
    shortest, told = (
        float(figure) for figure in re.findall(r"take ([\d.]+) to .*ms, ([\d.]+) on average", headline)[0]
    )
    assert told == pytest.approx(average * shortest, rel=0.03)


def test_an_optimizer_that_never_steps_is_told():
    with flopmeter.cuda(A100, steps=3) as device:
        nets = [nn.Linear(64, 64).to(device) for _ in range(2)]
        optimizers = [torch.optim.SGD(nets[0].parameters(), lr=0.1), torch.optim.Adam(nets[1].parameters())]
        for _ in range(3):
            nets[0](torch.zeros(8, 64, device=device)).sum().backward()
            optimizers[0].step()
    assert "which steps in none of them" in device.report().headline


def test_an_update_that_runs_no_op_is_no_step_and_is_told():
    with flopmeter.cuda(A100) as device:
        model = nn.Linear(8, 8).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.zeros(8, 8, device=device))
        optimizer.step()  # no gradients
    report = device.report()
    assert report.parts.count == 1
    assert "calls of Linear" in report.headline
    assert "1 calls of optimizer.step() ran no op, and do not count as steps" in report.step.notes


def test_inference_goes_by_the_calls_of_the_outermost_module():
    with flopmeter.cuda(A100) as device, torch.no_grad():
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()).to(device)
        for batch in (8, 16):
            model(torch.zeros(batch, 64, device=device))
    report = device.report()
    assert report.parts.marked_by == "calls of Sequential"
    assert report.step.macs == 16 * 64 * 64


def test_a_script_that_calls_layers_one_by_one_has_a_step_of_all_of_them():
    """An embedding, three layers and a head for each of four tokens, after one call of something else."""
    with flopmeter.cuda(A100) as device, torch.no_grad():
        embed, head = nn.Embedding(100, 64).to(device), nn.Linear(64, 100, bias=False).to(device)
        layers = [nn.Linear(64, 64, bias=False).to(device) for _ in range(3)]
        nn.Linear(64, 64, bias=False).to(device)(torch.zeros(1, 64, device=device))
        token = torch.zeros(8, dtype=torch.long, device=device)
        for _ in range(4):
            x = embed(token)
            for layer in layers:
                x = layer(x)
            token = head(x).argmax(-1)
    report = device.report()
    assert report.parts.marked_by == "rounds of calls: Embedding, Linear ×4"
    assert report.parts.count == 4
    assert report.step.macs == 3 * 8 * 64 * 64 + 8 * 64 * 100


def test_what_a_checkpoint_calls_again_is_no_step():
    with flopmeter.cuda(A100) as device:
        layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(device)
        x = torch.zeros(8, 64, device=device, requires_grad=True)
        checkpoint_sequential(layers, 2, x, use_reentrant=False).sum().backward()
    report = device.report()
    again = 1  # the last two layers are not checkpointed, and torch stops as soon as what was not kept is there
    assert report.step.macs == (4 + again + 2 * 4) * 8 * 64 * 64
    assert "no checkpointing" in str(report)


@pytest.mark.parametrize("microbatches", [1, 6])
def test_checkpoints_are_needless_if_one_microbatch_fits_without_however_many_a_step_has(microbatches):
    def peak_and_advice(checkpoints: bool) -> tuple[int, str]:
        with flopmeter.cuda(A100) as device:
            make = lambda: nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))  # noqa: E731
            layers = nn.ModuleList(make() for _ in range(8)).to(device)
            optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
            for _ in range(3):
                for _ in range(microbatches):
                    x = torch.zeros(1 << 16, 1024, device=device, requires_grad=True)
                    for layer in layers:
                        x = checkpoint(layer, x, use_reentrant=False) if checkpoints else layer(x)
                    x.sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        report = device.report()
        return report.step.peak_memory_bytes, str(report)

    _, told = peak_and_advice(checkpoints=True)
    without, _ = peak_and_advice(checkpoints=False)
    at_most = float(re.search(r"memory has room: at most ([\d.]+) GB", told)[1]) * 1e9
    assert without < at_most < 1.15 * without


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_the_first_step_has_what_a_reentrant_checkpoint_calls_first(has_optimizer):
    """It calls its segment without gradients; here no module is around the layers."""
    with flopmeter.cuda(A100, steps=3) as device:
        layers = [nn.Linear(64, 64).to(device) for _ in range(3)]
        parameters = [parameter for layer in layers for parameter in layer.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1) if has_optimizer else None
        for _ in range(4):
            x = torch.zeros(8, 64, device=device, requires_grad=True)
            for layer in layers:
                x = checkpoint(layer, x, use_reentrant=True)
            x.sum().backward()
            if optimizer:
                optimizer.step()
    report = device.report()
    assert report.by_part["first step"].macs == report.step.macs == 3 * 4 * 8 * 64 * 64
    assert "setup" not in report.by_part or report.by_part["setup"].macs == 0


def test_a_draft_and_its_target_are_a_step_together():
    with flopmeter.cuda(A100) as device, torch.no_grad():
        draft, target = nn.Linear(64, 64, bias=False).to(device), nn.Bilinear(64, 64, 64, bias=False).to(device)
        x = torch.zeros(8, 64, device=device)
        for _ in range(3):
            for _ in range(4):
                draft(x)
            target(x, x)
    report = device.report()
    assert report.parts.marked_by == "rounds of calls: Linear ×4, Bilinear"
    assert report.parts.count == 3


@pytest.mark.parametrize("turns", [8, 9])
def test_each_call_of_a_decoder_is_a_step_where_an_encoder_ran_once_before(turns):
    with flopmeter.cuda(A100) as device, torch.no_grad():
        encoder, decoder = nn.Embedding(10, 64).to(device), nn.Linear(64, 100, bias=False).to(device)
        x = encoder(torch.zeros(8, dtype=torch.long, device=device))
        for _ in range(turns):
            decoder(x)
    report = device.report()
    assert report.parts.count == turns
    assert report.step.macs == 8 * 64 * 100


def test_steps_may_be_marked_by_an_nvtx_range_which_is_a_row_too():
    wishes = Wishes(marker="nvtx:step")
    with flopmeter.cuda(A100, steps=2, wishes=wishes) as device:
        for _ in range(5):
            with torch.cuda.nvtx.range("step"):
                torch.ones(1000, device=device).exp()
    report = device.report()
    assert (report.parts.count, report.parts.marked_by) == (2, "nvtx:step")
    assert report.ranges["step"][0] == 1
    assert re.search(r"\nnvtx range +calls +ms\n", str(report))
    assert report.render("csv") == report.step.render("csv")
    title, *_, ranges, _ = report.render("markdown").split("\n\n")
    assert title.startswith("**program: one steady step, the last of 2")
    assert re.match(r"\| nvtx range +\| +calls \| +ms \|\n", ranges)


def test_steps_may_be_marked_by_a_method_of_a_class():
    with flopmeter.cuda(A100, steps=3, wishes=Wishes(marker="torch.nn:Linear.zero_grad")) as device:
        model, x = nn.Linear(64, 64, bias=False).to(device), torch.zeros(8, 64, device=device)
        for _ in range(5):
            model(model(x))
            model.zero_grad()
    parts = device.report().parts
    assert (parts.count, parts.marked_by) == (3, "torch.nn:Linear.zero_grad")


def test_where_calls_of_a_module_are_the_steps_a_compiled_optimizer_ends_none():
    with flopmeter.cuda(A100, wishes=Wishes(marker="forward")) as device:
        model = nn.Linear(64, 64, bias=False).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = torch.compile(optimizer.step)
        for _ in range(4):
            model(torch.zeros(8, 64, device=device)).sum().backward()
            step()
            optimizer.zero_grad()
    parts = device.report().parts
    assert (parts.count, parts.marked_by) == (4, "calls of the outermost module")


def test_calls_of_a_compiled_function_are_steps_where_calls_were_asked_for():
    with flopmeter.cuda(A100, wishes=Wishes(marker="forward")) as device:
        weight, run = torch.zeros(64, 64, device=device), torch.compile(lambda x, weight: (x @ weight).relu())
        for _ in range(3):
            run(torch.zeros(8, 64, device=device), weight)
    assert device.report().parts.count == 3


def test_in_inference_calls_that_record_gradients_are_steps_like_those_that_do_not():
    """An encoder that is frozen, and a decoder of which nobody said that it is not trained."""
    with flopmeter.cuda(A100) as device:
        encoder, decoder = (nn.Linear(64, 64, bias=False).to(device) for _ in range(2))
        encoder.requires_grad_(False)
        for _ in range(4):
            decoder(decoder(encoder(torch.zeros(8, 64, device=device))))
    report = device.report()
    assert (report.parts.count, report.parts.marked_by) == (4, "rounds of calls: Linear ×3")
    assert report.step.macs == 3 * 8 * 64 * 64


class FirstFails(nn.Linear):
    fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError
        return super().forward(x)


def test_a_call_that_runs_no_op_is_no_step():
    with flopmeter.cuda(A100) as device:
        model, x = FirstFails(64, 64, bias=False).cuda(), torch.zeros(8, 64, device="cuda")
        for model.fails in (False, True, True, False):
            with contextlib.suppress(ValueError):
                model(x)
    report = device.report()
    assert (report.parts.count, report.step.macs) == (2, 8 * 64 * 64)


def test_the_warm_up_of_graphed_callables_is_no_step():
    with flopmeter.cuda(A100, steps=3) as device:
        model = nn.Linear(64, 64).to(device)
        x = torch.zeros(8, 64, device=device)
        graphed = torch.cuda.make_graphed_callables(model, (x,), num_warmup_iters=5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            graphed(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    report = device.report()
    assert report.headline.endswith("the last of 3 (marked by optimizer.step())")
    assert report.step.macs == 2 * 8 * 64 * 64


def test_calls_after_the_warm_up_of_graphed_callables_are_steps():
    with flopmeter.cuda(A100) as device, torch.no_grad():
        model, x = nn.Linear(64, 64, bias=False).to(device), torch.zeros(8, 64, device=device)
        torch.cuda.make_graphed_callables(nn.Linear(64, 64).to(device), (x.requires_grad_(),))
        for _ in range(3):
            model(x)
    assert device.report().parts.count == 3


def test_a_frozen_model_beside_the_one_that_learns_marks_no_steps():
    """Of a program that has an optimizer and never steps it: its steps are the calls of what learns."""
    with flopmeter.cuda(A100) as device:
        frozen, model = (nn.Linear(64, 64, bias=False).to(device) for _ in range(2))
        frozen.requires_grad_(False)
        torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            model(frozen(torch.zeros(8, 64, device=device))).sum().backward()
    assert device.report().parts.marked_by == "calls of Linear"


@pytest.mark.parametrize("steps", [3, None])
def test_a_program_that_trains_tensors_of_no_module_has_a_step_from_one_backward_to_the_next(steps):
    turns = 0
    with flopmeter.cuda(A100, steps=steps) as device:
        first, second = (torch.zeros(64, 64, device=device, requires_grad=True) for _ in range(2))
        for _ in range(40):
            turns += 1
            loss = (torch.zeros(8, 64, device=device) @ first @ second).sum()
            loss.backward()
            with torch.no_grad():
                for weight in (first, second):
                    weight -= 0.1 * weight.grad
                    weight.grad = None
    report = device.report()
    assert turns == (32 if steps else 40)  # an optimizer, or a module, might have come
    assert f"the last of {turns} (marked by backward(), with neither an optimizer nor a module)" in report.headline
    assert report.step.macs == 5 * 8 * 64 * 64  # the gradient of what is given to the first product is not computed


def closures_of_lbfgs(device):
    """How often a step of LBFGS evaluates its closure, with what its group says of convergence afterwards."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=7)
    x = torch.randn(64, 8, device=device)
    losses = []

    def closure():
        optimizer.zero_grad()
        losses.append((model(x) - x.pow(2).sum(1, keepdim=True)).pow(2).mean())
        losses[-1].backward()
        return losses[-1]

    optimizer.step(closure)
    return len(losses), optimizer.param_groups[0]["tolerance_change"]


def test_lbfgs_evaluates_as_often_as_where_its_loss_goes_on_falling():
    """Unknown losses are all told as the same number, by which it had converged after the first."""
    step = torch.optim.LBFGS.step
    with flopmeter.cuda(A100) as device:
        metered = closures_of_lbfgs("cuda")
    assert torch.optim.LBFGS.step is step
    assert metered == closures_of_lbfgs("cpu") == (7, 1e-9)
    assert "LBFGS is taken not to converge before its last turn (max_iter=7)" in str(device.report())


def test_of_an_optimizer_that_steps_first_in_the_last_step_more_steps_are_told_to_have_a_later_one():
    """As an actor's, which has a turn every second time; a program under `flopmeter run` enters no meter."""

    def trained(steps: int) -> str:
        with flopmeter.cuda(A100, steps=steps) as device:
            critic, actor = nn.Linear(64, 64).to(device), nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
            actor = actor.to(device)
            often, seldom = (torch.optim.Adam(model.parameters(), foreach=False) for model in (critic, actor))
            x = torch.zeros(8, 64, device=device)
            for number in range(steps):
                if number % 2 == 0 and number:
                    actor(x).sum().backward()
                    seldom.step()
                    seldom.zero_grad()
                critic(x).sum().backward()
                often.step()
                often.zero_grad()
        return str(device.report())

    assert "(for its report, --steps of a script that goes on for longer" in trained(3)
    assert "a first step, in which" not in trained(5)


def test_a_graph_that_is_there_when_the_step_begins_is_activations_and_a_batch_is_an_input():
    """A step of a GAN ends when the discriminator has stepped. The graph of the generator's forward pass is then there:
    the results of its tanh and of its last layer, each as large as the batch."""
    with flopmeter.cuda(A100, steps=3) as device:
        generator, discriminator = (
            nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, wide)).cuda() for wide in (16, 1)
        )
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (discriminator, generator)]
        while True:
            batch = torch.randn(1000, 16, device="cuda")
            fake = generator(batch)
            for made, optimizer in zip((fake.detach(), fake), optimizers, strict=True):
                discriminator(made).sum().backward()
                optimizer.step()
                for each in optimizers:
                    each.zero_grad()
    memory = device.report().step.memory
    batch_bytes = 1000 * 16 * 4
    assert memory.timeline["inputs"][0] == pytest.approx(batch_bytes, rel=0.01)
    assert 2 * batch_bytes <= memory.timeline["activations"][0] <= 3.1 * batch_bytes
