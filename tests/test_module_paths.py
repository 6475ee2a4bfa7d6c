"""Where an op belongs, in modules with many children, and in those that change between calls."""

from __future__ import annotations

import sys

import torch
from torch import nn

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
