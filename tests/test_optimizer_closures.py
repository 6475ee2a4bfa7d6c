"""Optimizers that are given a closure, as all of Lightning's: the loss that it computes is none of the optimizer's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopmeter import FlopMeter


def metered(call):
    """The second step of a small classifier, whose loss is computed outside of modules."""
    model = nn.Linear(64, 512, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loss():
        optimizer.zero_grad()
        value = F.cross_entropy(model(torch.empty(128, 64, device="meta")), torch.empty(128, 512, device="meta"))
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return value

    for _ in range(2):
        with FlopMeter("h100-sxm5-80gb") as meter:
            call(optimizer, loss)
    return meter


def before_the_step(optimizer, loss):
    loss()
    optimizer.step()


@pytest.mark.parametrize("call", [
    lambda optimizer, loss: optimizer.step(loss),
    lambda optimizer, loss: optimizer.step(closure=loss),
], ids=["first argument", "by its name"])  # fmt: skip
def test_a_step_with_a_closure_has_the_phases_and_the_memory_of_one_after_it(call):
    within, apart = metered(call), metered(before_the_step)
    phases = [[(op.call.name, op.phase) for op in meter.trace.ops] for meter in (within, apart)]
    assert phases[0] == phases[1]
    assert {phase for name, phase in phases[0] if "softmax" in name} == {"forward", "backward"}
    assert within.report().memory.at_peak == apart.report().memory.at_peak
    assert within.report().seconds == pytest.approx(apart.report().seconds)


def test_what_follows_a_closure_is_the_optimizers_again():
    """Also where another optimizer steps inside of the closure."""
    weight = nn.Parameter(torch.empty(8, 8, device="meta"))
    inner, outer = torch.optim.SGD([weight]), torch.optim.SGD([weight])

    def loss():
        weight.grad = weight.detach().sin()
        inner.step()
        weight.grad = weight.detach().cos()

    with FlopMeter() as meter:
        outer.step(loss)
    phases = [op.phase for op in meter.trace.ops if op.call.name in ("sin", "_foreach_add_", "add_", "cos")]
    assert phases == ["forward", "optimizer", "forward", "optimizer"]


class LooksAgain(torch.optim.SGD):
    """Calls a module in its step, and no closure."""

    def __init__(self, module):
        super().__init__(module.parameters(), lr=0.1)
        self.module = module

    @torch.no_grad()
    def step(self):
        self.module(torch.empty(4, 8, device="meta"))
        super().step()


def test_a_module_that_an_optimizer_calls_runs_forward():
    module = nn.Linear(8, 8, device="meta")
    optimizer = LooksAgain(module)
    module(torch.empty(4, 8, device="meta")).sum().backward()
    with FlopMeter() as meter:
        optimizer.step()
    phases = {op.call.name: op.phase for op in meter.trace.ops}
    assert phases["addmm"] == "forward"
    assert phases["_foreach_add_"] == "optimizer"


def test_of_each_group_of_an_optimizer_it_is_noted_how_many_weights_have_gradients():
    """Of three, two and two: all but one, both and none."""
    weights = [nn.Parameter(torch.empty(8, device="meta")) for _ in range(7)]
    optimizer = torch.optim.SGD(
        [{"params": weights[:3]}, {"params": weights[3:5]}, {"params": weights[5:]}], fused=True
    )
    for weight in weights[1:5]:
        weight.grad = torch.empty_like(weight)
    with FlopMeter() as meter:
        optimizer.step()
    (step,) = meter.trace.optimizer_steps
    assert step.groups == (2, 2)
