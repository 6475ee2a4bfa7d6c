"""Where an op belongs, in modules with many children, and in those that change between calls."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopmeter import FlopMeter
from flopmeter.report.advice.passes import differentiates_gradients
from flopmeter.trace.recorder import Recorder


class Caller(nn.Module):
    """Calls modules that it is told, whether it holds them or not."""

    def forward(self, x, *modules):
        for module in modules:
            x = module(x)
        return x


def held(*modules):
    caller = Caller()
    caller.parts = nn.ModuleList(modules)
    return caller


def paths(recorder, caller, *modules):
    """Where the ops of one call belong."""
    x = torch.empty(1, device="meta")
    before = len(recorder.trace.ops)
    caller(x, *modules)
    return [op.module for op in recorder.trace.ops[before:]]


def python_calls_for(children):
    """How many Python and C functions a call of so many children takes under a recorder, its first one."""
    caller = held(*(nn.ReLU() for _ in range(children)))
    x, parts, count = torch.empty(1, device="meta"), list(caller.parts), 0

    def note(*_):
        nonlocal count
        count += 1

    with Recorder():
        sys.setprofile(note)
        try:
            caller(x, *parts)
        finally:
            sys.setprofile(None)
    return count


def test_the_work_grows_with_the_children_and_not_with_their_square():
    python_calls_for(1)  # what happens once
    few, twice, four_times = (python_calls_for(children) for children in (50, 100, 200))
    assert four_times - twice < 1.1 * 2 * (twice - few)


def test_a_child_that_comes_later_is_found_by_its_name():
    with Recorder() as recorder:
        caller = held(nn.ReLU())
        first = paths(recorder, caller, *caller.parts)
        caller.parts.append(nn.ReLU())
        caller.extra = nn.ReLU()
        assert [*first, *paths(recorder, caller, caller.parts[1], caller.extra)] == [
            "Caller.parts.0",
            "Caller.parts.1",
            "Caller.extra",
        ]


def test_a_shared_child_goes_by_its_first_name():
    one = nn.ReLU()
    with Recorder() as recorder:
        assert paths(recorder, held(one, nn.ReLU(), one), one, one) == ["Caller.parts.0"] * 2


def test_children_that_moved_before_they_were_called_go_by_their_new_names():
    first, second, third = nn.ReLU(), nn.ReLU(), nn.ReLU()
    with Recorder() as recorder:
        caller = held(first, second, third)
        assert paths(recorder, caller, first) == ["Caller.parts.0"]
        del caller.parts[1]
        caller.other = second
        assert paths(recorder, caller, second, third) == ["Caller.other", "Caller.parts.1"]


def test_a_child_in_the_place_of_one_that_is_gone_has_its_name():
    with Recorder() as recorder:
        caller = held(nn.ReLU())
        for _ in range(3):
            caller.parts[0] = nn.ReLU()
            assert paths(recorder, caller, caller.parts[0]) == ["Caller.parts.0"]


class Attempt(nn.Module):
    """Goes on where its child fails."""

    def __init__(self):
        super().__init__()
        self.child = nn.Linear(2, 1)  # which a vector of one element does not fit

    def forward(self, x):
        try:
            return self.child(x)
        except RuntimeError:
            return x + 1


def test_ops_after_a_module_that_raised_belong_to_its_caller():
    with torch.device("meta"):
        attempt = Attempt()
    with Recorder() as recorder:
        assert paths(recorder, attempt)[-1] == "Attempt"


class AddsOne(Caller):
    def forward(self, x, *modules):
        return super().forward(x, *(modules or self.parts)) + 1


def test_ops_after_a_module_below_belong_to_the_module_that_called_it():
    inner = AddsOne()
    inner.parts = nn.ModuleList([nn.ReLU()])
    with Recorder() as recorder:
        assert paths(recorder, held(inner), inner) == ["Caller.parts.0.parts.0", "Caller.parts.0"]


class WithActivation(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.activation = activation

    def forward(self, x):
        return self.activation(x)


def test_a_shared_module_belongs_to_the_layer_that_calls_it_also_after_one_whose_number_begins_alike():
    shared = nn.ReLU()
    layers = [WithActivation(shared) for _ in range(11)]
    caller = held(*layers)
    with Recorder() as recorder:
        found = paths(recorder, caller, layers[10], layers[1], layers[10])
    assert found == [f"Caller.parts.{number}.activation" for number in (10, 1, 10)]


class TrainsInItsForward(nn.Module):
    """A trainer that is a module, whose call holds whole steps."""

    def __init__(self, net):
        super().__init__()
        self.net = net
        self.optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def forward(self, x):
        for _ in range(2):
            self.net(x).sum().backward()
        self.optimizer.step()


def trained(net, trainer):
    """The ops of a trainer's call, with the phase and the module of each; and the trace."""
    with Recorder() as recorder:
        net.to("meta")
        trainer(net)(torch.empty(8, 4, device="meta"))
    return [(op.call.name, op.phase, op.module) for op in recorder.trace.ops], recorder.trace


def test_a_backward_pass_inside_of_a_module_belongs_to_the_modules_of_its_forward_pass():
    """Each layer has two products in the backward pass, but for the first one, whose input wants no gradient."""
    ops, _ = trained(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), TrainsInItsForward)
    products = [module for name, phase, module in ops if name == "mm" and phase == "backward"]
    last, first = "TrainsInItsForward.net.1", "TrainsInItsForward.net.0"
    assert products == 2 * [last, last, first]


def test_a_step_inside_of_a_module_is_the_optimizers():
    ops, _ = trained(nn.Linear(4, 4), TrainsInItsForward)
    assert ops[-1] == ("add_", "optimizer", "")


def test_gradients_that_grow_inside_of_a_module_are_told_from_gradients_of_gradients():
    """Two backward passes over a weight and a bias: two gradients are made, and two are added to."""
    ops, trace = trained(nn.Linear(4, 4), TrainsInItsForward)
    assert len(trace.accumulations) == 4
    assert [ops[each.op][0] for each in trace.accumulations[2:]] == ["add_", "add_"]
    assert not differentiates_gradients(trace)


def test_a_checkpoint_inside_of_such_a_module_still_computes_its_own_part_again():
    class Checkpointed(nn.Module):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def forward(self, x):
            return checkpoint(self.part, x, use_reentrant=False)

    ops, _ = trained(Checkpointed(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), TrainsInItsForward)
    again = [module for name, phase, module in ops if name == "addmm" and phase == "recompute"]
    assert again == 2 * ["TrainsInItsForward.net.part.0"]


def test_a_module_that_is_called_compiled_and_as_it_is_is_one_module():
    """As a language model of which only the tokens after the first one run compiled."""
    for calls in ("eager compiled eager", "compiled eager compiled"):
        net = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.ReLU())
        ways = {"eager": net, "compiled": torch.compile(net)}
        with torch.no_grad(), FlopMeter("h100-sxm5-80gb") as meter:
            for name in calls.split():
                ways[name](torch.empty(4, 4, device="meta"))
        assert {op.module for op in meter.trace.ops if op.module} == {"Sequential.0", "Sequential.1"}
