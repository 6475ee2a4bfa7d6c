"""Where the steps of a run lie, what its clock says and its memory holds, of runs that are written down."""

from __future__ import annotations

import contextlib
import weakref
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Optimizer, Rprop

from flopmeter import load_hardware
from flopmeter.records import Storage
from flopmeter.run import clocks
from flopmeter.run.device_memory import DeviceMemory
from flopmeter.run.graph_pools import GraphPool
from flopmeter.run.step_parts import (
    OutermostCall,
    Parts,
    leading_class,
    parts_between,
    parts_of_leading_class,
    parts_of_rounds,
    with_what_recurs,
)
from flopmeter.run.updates import Optimizers, OwnUpdates
from flopmeter.timing.peak_memory import CONTEXT_BYTES

STEPS = [20, 30, 40]


def test_a_run_without_a_step_is_all_setup_and_one_step_is_the_first():
    assert parts_between(10, [], "x") == Parts(range(10), None, None, 0, "x")
    assert parts_between(10, [20], "x") == Parts(range(10), range(10, 20), None, 1, "x")


@pytest.mark.parametrize(
    ("evaluations", "steady", "number", "evaluation", "later"),
    [
        ([], (30, 40), 3, None, [(20, 30), (30, 40)]),
        ([(33, 36)], (20, 30), 2, None, [(20, 30)]),
        ([(22, 24)], (30, 40), 3, None, [(30, 40)]),
        ([(12, 15)], (30, 40), 3, None, [(20, 30), (30, 40)]),  # in the first step
        ([(22, 24), (31, 32), (34, 36)], (30, 40), 3, (31, 36), [(20, 30), (30, 40)]),
        ([(20, 30), (30, 40)], (30, 40), 3, (30, 40), [(20, 30), (30, 40)]),
        ([(28, 33)], (30, 40), 3, None, [(20, 30), (30, 40)]),  # lies in no step
        ([(35, 45)], (30, 40), 3, None, [(20, 30), (30, 40)]),
    ],
)
def test_the_steady_step_is_the_last_without_an_evaluation_or_the_last(evaluations, steady, number, evaluation, later):
    found = parts_between(10, STEPS, "x", [range(*each) for each in evaluations])
    assert (found.setup, found.first, found.count) == (range(10), range(10, 20), 3)
    assert (found.steady, found.steady_number) == (range(*steady), number)
    assert found.evaluation == (None if evaluation is None else range(*evaluation))
    assert [ops for _, ops in found.later] == [range(*each) for each in later]


MODULES = {name: type(name, (nn.Identity,), {})() for name in ("Encoder", "Decoder", "Draft", "Teacher", "Other")}


def call(name: str, start: int, stop: int) -> OutermostCall:
    return OutermostCall(weakref.ref(MODULES[name]), name, range(start, stop), False, False, False)


@pytest.mark.parametrize(
    ("before", "within", "start"),
    [
        ([("Teacher", 5, 8)], [("Teacher", 22, 25)], 5),
        ([("Encoder", 0, 3), ("Teacher", 5, 8)], [("Encoder", 20, 22), ("Teacher", 22, 25)], 0),
        ([("Other", 0, 3), ("Teacher", 5, 8)], [("Encoder", 20, 22), ("Teacher", 22, 25)], 5),
        ([("Encoder", 0, 3), ("Other", 5, 8)], [("Encoder", 20, 22), ("Teacher", 22, 25)], 8),
        ([("Teacher", 5, 8)], [("Teacher", 30, 33)], 8),  # of the third step
        ([("Teacher", 9, 12)], [("Teacher", 22, 25)], 8),  # it ran in the first step already
        ([("Encoder", 1, 2), ("Teacher", 5, 20)], [("Teacher", 20, 21)], 5),
        ([], [("Teacher", 22, 25)], 8),
    ],
)
def test_the_first_step_starts_with_what_the_second_calls_first(before, within, start):
    calls = [call(*each) for each in (*before, *within)]
    assert with_what_recurs(8, [20, 30, 40], calls) == with_what_recurs(8, [20, 30], calls) == start
    assert with_what_recurs(8, [20], calls) == 8


@pytest.mark.parametrize(
    ("names", "start", "ends", "said"),
    [
        ("Encoder Decoder Encoder Decoder", 0, [20, 40], "Encoder, Decoder"),
        ("Encoder Decoder Decoder Encoder Decoder Decoder", 0, [30, 60], "Encoder, Decoder ×2"),
        ("Other Encoder Decoder Encoder Decoder", 10, [30, 50], "Encoder, Decoder"),
        ("Encoder Decoder Encoder Decoder Encoder", 0, [20, 40], "Encoder, Decoder"),
        ("Draft Draft Other Draft Draft Other", 0, [30, 60], "Draft ×2, Other"),
        ("Other Teacher Encoder Decoder Encoder Decoder", 20, [40, 60], "Encoder, Decoder"),
        ("Other Decoder Encoder Decoder Encoder Decoder Encoder", 10, [30, 50, 70], "Decoder, Encoder"),
        ("Other Decoder Draft Encoder Decoder Encoder Decoder Encoder", None, [], ""),  # it called a decoder before
        ("Encoder Decoder Encoder Decoder Other", 0, [20, 40], "Encoder, Decoder"),  # the last comes after the rounds
        ("Encoder Decoder Encoder Decoder Other Teacher", 0, [20, 40], "Encoder, Decoder"),
        ("Encoder Decoder Encoder Decoder Other Other", None, [], ""),
        ("Encoder Decoder Encoder", None, [], ""),
        ("Other Encoder Decoder Encoder", None, [], ""),  # one round and a half
        ("Encoder Decoder Draft Teacher", None, [], ""),
        ("Draft Draft Draft Draft", None, [], ""),
        ("Other Draft Draft Draft Draft", None, [], ""),
    ],
)
def test_a_round_is_the_shortest_sequence_of_calls_that_comes_again_up_to_the_end(names, start, ends, said):
    """Each call runs ten ops."""
    calls = [call(name, 10 * place, 10 * place + 10) for place, name in enumerate(names.split())]
    found = parts_of_rounds(calls)
    if start is None:
        assert found is None
    else:
        assert found == parts_between(start, ends, f"rounds of calls: {said}")
        assert not found.may_prepare


@pytest.mark.parametrize(
    ("names", "may_prepare"),
    [
        ("Encoder Decoder Draft Other", True),  # none has come again
        ("Encoder Decoder Draft Other Decoder", True),  # the second of a round, perhaps
        ("Other Draft Draft Encoder Draft Draft", True),  # two drafts a round
        ("Draft Draft Draft Draft", False),
        ("Encoder Draft Draft Draft Draft Draft Other Draft Draft", True),  # the first of a round, perhaps
        ("Encoder Draft Draft Other" + 5 * " Draft", True),
        ("Encoder Draft Draft Other" + 6 * " Draft", False),
    ],
)
def test_one_knows_that_calls_are_no_part_of_rounds_when_they_have_come_again_for_long(names, may_prepare):
    calls = [call(name, 10 * place, 10 * place + 10) for place, name in enumerate(names.split())]
    assert parts_of_rounds(calls) is None
    assert parts_of_leading_class(0, calls).may_prepare is may_prepare


def test_rounds_that_are_a_small_end_of_the_program_are_none():
    """Three steps of 100 ops, and 12 tiles of two calls, of which one runs an op: the rounds are most of the program if
    the other runs 50 ops, and not if it runs 10."""

    def pipeline(ops_of_tile: int) -> list[OutermostCall]:
        lengths = [("Teacher", 100)] * 3 + [("Other", 1), ("Decoder", ops_of_tile)] * 12
        ends = list(accumulate(length for _, length in lengths))
        return [call(name, end - length, end) for (name, length), end in zip(lengths, ends, strict=True)]

    assert parts_of_rounds(pipeline(10)) is None
    assert leading_class(pipeline(10)) == "Teacher"
    assert parts_of_rounds(pipeline(50)).marked_by == "rounds of calls: Other, Decoder"


def test_the_leading_class_runs_most_ops_of_those_that_are_called_again():
    """A prompt of 900 ops once, a decoder of 50 ops 10 times, an embedding of one op 20 times."""
    once, often = [call("Encoder", 0, 900)], [call("Other", 0, 1)] * 20
    assert leading_class([*once, *often, *[call("Decoder", 0, 50)] * 10]) == "Decoder"
    assert leading_class([*once, call("Decoder", 0, 50)]) == "Encoder"


def updates(calls: list[tuple[str, int]], backward: set[int]) -> tuple[list[int | None], OwnUpdates]:
    own = OwnUpdates(lambda ops: not backward.isdisjoint(ops))
    return [own.call(*each) for each in calls], own


def test_a_step_without_an_optimizer_goes_from_one_call_of_what_learns_to_the_next():
    calls = [("Net", 3), ("Other", 6), ("Net", 10), ("Other", 12), ("Net", 20), ("Net", 24), ("Net", 28)]
    found, own = updates(calls, {5, 15, 25})
    assert found == [None, None, 1, None, 2, None, 3]  # nothing learns between 20 and 24
    assert (own.trained, own.start, own.ends(99)) == ("Net", 3, [10, 20, 28])


def test_a_layer_that_was_called_once_to_build_the_model_is_not_what_learns():
    found, own = updates([("Layer", 1), ("Net", 2), ("Net", 10), ("Layer", 11), ("Net", 20)], {5, 15})
    assert found == [None, None, 1, None, 2]
    assert (own.trained, own.start) == ("Net", 2)


@pytest.mark.parametrize(
    ("calls", "backward", "ends"),
    [([("Net", 3)], {5}, [30]), ([("Net", 3)], {2}, []), ([("Net", 3)], {30}, []), ([], {5}, [])],
)
def test_one_call_with_a_backward_pass_behind_it_is_one_step_up_to_the_end(calls, backward, ends):
    assert updates(calls, backward)[1].ends(30) == ends


def test_an_optimizer_that_steps_first_leads_and_of_others_it_is_told_in_how_many_steps_they_step(monkeypatch):
    """A moment is the number of ops before it. A step that ran none is no step."""
    moment = 0
    optimizers = Optimizers(lambda: moment)
    monkeypatch.setattr(Optimizer, "__init__", optimizers.patch().value)
    kinds = (Rprop, SGD, Adagrad, Adadelta)
    _never, leading, other, late = (kind([nn.Parameter(torch.zeros(2))], lr=1.0) for kind in kinds)

    def step(optimizer: Optimizer, begins: int, ends: int) -> str:
        nonlocal moment
        moment = begins
        optimizers.begin()
        moment = ends
        return optimizers.stepped(optimizer)

    assert not optimizers.one_has_stepped
    assert [step(other, at, at) for at in (1, 2)] == ["counts for nothing"] * 2
    assert optimizers.idle_updates == 2
    assert not optimizers.one_has_stepped
    assert step(leading, 8, 10) == "leads"
    assert [step(other, at - 1, at) for at in (5, 8, 15, 20)] == ["follows"] * 4
    assert step(leading, 18, 20) == "leads"
    assert optimizers.idle_updates == 2

    def told(steady: range) -> dict[str, int]:
        idle = optimizers.not_stepping_in(steady, [10, 20, 30])
        return {name.partition(" of ")[0]: steps for name, steps in idle}

    # Adagrad: twice in the first step, and twice in the second
    assert told(range(20, 30)) == {"Rprop": 0, "Adagrad": 2, "Adadelta": 0}
    assert told(range(10, 20)) == {"Rprop": 0, "Adadelta": 0}
    step(other, 29, 30)
    assert told(range(20, 30)) == {"Rprop": 0, "Adadelta": 0}
    step(late, 27, 28)
    assert told(range(20, 30)) == {"Rprop": 0}
    assert told(range(10, 20)) == {"Rprop": 0, "Adadelta": 1}

    model = nn.Linear(2, 2)
    leading.add_param_group({"params": [model.weight]})
    assert optimizers.leader_updates(nn.Sequential(model))
    assert not optimizers.leader_updates(nn.Linear(2, 2))
    leading.param_groups[0]["params"] = [model.bias]
    assert optimizers.leader_updates_copy_of(nn.Linear(2, 2))
    assert not optimizers.leader_updates_copy_of(nn.Linear(2, 3))


class Run:
    """A run of ops that each take what a list says."""

    takes_times = False

    def __init__(self) -> None:
        self.moment, self.waits, self.next = 0, False, {}

    def now(self) -> int:
        return self.moment

    def is_on_device(self, ops: range) -> bool:
        return len(ops) > 0

    def report_of(self, ops: range) -> Any:
        return SimpleNamespace(**self.next)

    def host_waits_at(self, moment: int) -> bool:
        assert moment == self.moment
        return self.waits

    def send(self, seconds: float, kernels: float, sent: float, host: float, *, blocks: bool = False) -> None:
        """Two ops of so many seconds, of which kernels take some; the host sends them in `sent` and works `host`.

        blocks: whether the host waits for the second one; for the first it is the other way round.
        """
        self.moment += 1
        self.next = {
            "seconds": seconds, "kernel_seconds": kernels, "host_seconds": host,
            "kernels": [SimpleNamespace(cost=SimpleNamespace(blocks_host=each)) for each in (not blocks, blocks)],
            "timings": [SimpleNamespace(enqueued_seconds=seconds) for seconds in (sent / 2, sent)],
        }  # fmt: skip


def test_the_hosts_clock_goes_with_what_it_sends_and_with_the_device_where_it_waits(monkeypatch):
    true = [100.0]
    monkeypatch.setattr(clocks, "_TRUE", lambda: true[0])
    run = Run()
    clock = clocks.HostClock(run)
    assert clock._seconds() == 0
    assert run.takes_times
    run.send(5, 4, 1, 0.75)  # the device is done at 5
    true[0] += 50  # what counting takes here is no time of the program
    assert clock._seconds() == 1
    run.send(3, 3, 0.25, 0.5)  # and at 8, since it is busy until 5
    assert clock._seconds() == 1.5
    true[0] += 0.25  # the host alone
    assert clock._seconds() == 1.75
    true[0] += 0.25
    run.waits = True
    assert clock._seconds() == 8
    true[0] += 2  # after the device is done, nothing waits
    assert clock._seconds() == 10
    run.waits = False
    run.send(2, 1, 0.5, 0.5, blocks=True)  # the last op is read
    assert clock._seconds() == 12
    run.send(1, 1, 0.5, 7)
    assert clock._seconds() == 19
    run.send(4, 1, 1, 1)
    assert clock._seconds() == 20
    run.waits = True
    assert clock._seconds() == 23  # 19 + 4
    run.waits = False
    run.send(0, 0, 0, 2)
    run.next |= {"kernels": [], "timings": []}  # views alone, which only the host makes
    assert clock._seconds() == 25


# --- memory ----------------------------------------------------------------------------------------------------------

MIB = 2**20
USABLE = 100 * MIB
DEVICE = load_hardware("a100-sxm4-80gb").replace(memory_gb=(CONTEXT_BYTES + USABLE) / 1e9)


def test_tensors_are_held_in_blocks_of_512_bytes_and_segments_of_the_allocator():
    """torch's allocator: up to 1 MiB is served from segments of 2 MiB, up to 10 MiB from those of 20 MiB."""
    memory = DeviceMemory(DEVICE, "raise", kept_scratch=lambda: 7)
    assert (memory.allocated, memory.reserved, memory.allocations) == (7, 7, 0)
    for number, (device, nbytes) in enumerate([("meta", 1000), ("cpu", 5000), ("meta", 0), ("meta", 3 * MIB)]):
        memory.on_birth(number, device, nbytes)
    assert (memory.allocated, memory.reserved, memory.allocations) == (1024 + 3 * MIB + 7, 22 * MIB + 7, 2)
    assert memory.free_and_total() == (USABLE - 22 * MIB - 7, CONTEXT_BYTES + USABLE)
    for number in (3, 1, 2):  # of which the device had one
        memory.on_death(number)
    assert (memory.allocated, memory.peak_allocated) == (1024 + 7, 1024 + 3 * MIB + 7)
    assert (memory.reserved, memory.peak_reserved) == (22 * MIB + 7, 22 * MIB + 7)
    memory.give_back()
    assert (memory.reserved, memory.peak_reserved) == (2 * MIB + 7, 22 * MIB + 7)
    memory.reset_peaks()
    assert (memory.peak_allocated, memory.peak_reserved) == (1024 + 7, 2 * MIB + 7)
    assert memory.summary().startswith("allocated 0.00 MiB (peak 0.00 MiB), reserved 2.00 MiB (peak 2.00 MiB) by ")


def test_what_does_not_fit_raises_as_torch_does_or_is_told_once_and_goes_on():
    memory = DeviceMemory(DEVICE, "raise")
    memory.on_birth(0, "meta", 60 * MIB)
    said = r"Tried to allocate 50.00 MiB. GPU 0 .* of which 40.00 MiB is free. .* 60.00 MiB is"
    with pytest.raises(torch.OutOfMemoryError, match=said):
        memory.on_birth(1, "meta", 50 * MIB)
    memory.on_death(1)  # which never was
    memory.on_birth(2, "meta", 40 * MIB)
    assert memory.allocated == memory.reserved == USABLE
    told = DeviceMemory(DEVICE, "report")
    for number in range(3):
        told.on_birth(number, "meta", 60 * MIB)
    assert told.allocated == 180 * MIB
    assert told.overflow is not None
    assert "60.00 MiB is allocated by PyTorch, and 0.00 MiB is reserved" in told.overflow
    assert told.free_and_total()[0] == 0


@pytest.mark.parametrize(("fraction", "fits"), [(1.0, True), (0.5, True), (0.01, False)])
def test_a_program_may_take_a_fraction_of_the_whole_memory_and_never_more_than_there_is(fraction, fits):
    """The context of the process is not in it: half of all is more than the 100 MiB beside it here."""
    assert DEVICE.memory_bytes is not None
    assert 0.01 * DEVICE.memory_bytes < 60 * MIB < USABLE < 0.5 * DEVICE.memory_bytes
    memory = DeviceMemory(DEVICE, "raise")
    memory.set_fraction(fraction)
    with contextlib.nullcontext() if fits else pytest.raises(torch.OutOfMemoryError):
        memory.on_birth(0, "meta", 60 * MIB)
    with pytest.raises(torch.OutOfMemoryError):
        memory.on_birth(1, "meta", USABLE + MIB)


def test_a_pool_of_graphs_keeps_the_most_that_its_captures_hold_at_a_time():
    """Two captures of four ops each. The first holds 100 and then 100 + 50 bytes; what is alive of it is the program's
    own. The second holds 300, of which nothing is left."""
    storages = [
        Storage(1000, "meta", -1),  # was there before
        Storage(100, "meta", 0, died=3), Storage(50, "meta", 2), Storage(70, "cpu", 2),
        Storage(200, "meta", 5, died=7), Storage(100, "meta", 6, died=8),
    ]  # fmt: skip
    trace = SimpleNamespace(ops=[None] * 4, device="meta", storages=storages[:4])
    pool = GraphPool(trace)
    pool.keep(range(4))
    assert [each.nbytes for each in trace.storages[4:]] == [150 - 50]
    trace.ops, trace.storages[4:4] = [None] * 9, storages[4:]
    pool.keep(range(5, 9))
    first, second = trace.storages[6:]
    assert (first.born, first.died, second.born, second.died) == (4, 9, 9, None)
    assert second.nbytes == 50 + 300 - 50  # the 50 of the first are alive meanwhile
    pool.give_back(range(5, 9))
    assert (second.died, trace.storages[-1].nbytes) == (9, 100)
    pool.give_back(range(4))
    assert trace.storages[-1].nbytes == 0
