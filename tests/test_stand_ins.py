"""What a program reads in place of an unknown value with `unknown="stand-in"`, and what the report says of it."""

import re

import pytest
import torch

from flopmeter import FlopMeter
from flopmeter.known_values.assumptions import EndlessLoopError

FLOAT = "stand-in 1.0 for an unknown float"
INTEGER = "stand-in 0 for an unknown integer"
CONDITION = "an unknown condition does not hold"


def read(run):
    """What the program got from unknown numbers, and what the report says is assumed, without the lines."""
    with FlopMeter("h100-sxm5-80gb", unknown="stand-in") as meter:
        got = run(torch.empty(3, device="meta").exp())
    return got, [re.sub(r" at \S+:\d+", "", text) for text in meter.report().assumptions]


@pytest.mark.parametrize(
    ("run", "expected", "rule"),
    [
        (lambda x: x.sum().item(), 1.0, FLOAT),
        (lambda x: torch.complex(x, x)[0].item(), 1.0, FLOAT),
        (lambda x: x.argmax().item(), 0, INTEGER),
        (lambda x: (x > 0).any().item(), False, CONDITION),
        (lambda x: 5 if x.sum() > 2 else 7, 7, CONDITION),
        (lambda x: 5 if x.sum() else 7, 5, FLOAT),  # 1.0 is true
    ],
)
def test_each_kind_of_number_has_its_stand_in(run, expected, rule):
    got, assumed = read(run)
    assert (got, type(got)) == (expected, type(expected))
    assert assumed == [f"{rule} (1x)"]


def test_a_copy_to_the_host_is_full_of_stand_ins_in_the_type_asked_for():
    got, assumed = read(lambda x: x.half().to("cpu", torch.float64))
    assert (got.dtype, got.device.type) == (torch.float64, "cpu")
    assert got.tolist() == [1.0] * 3
    assert assumed == [f"{FLOAT} (1x)"]


def test_a_copy_into_a_tensor_of_the_host_overwrites_it_with_stand_ins():
    host = torch.full((3,), 9)
    got, assumed = read(lambda x: host.copy_(x.argsort()))
    assert got is host
    assert host.tolist() == [0, 0, 0]
    assert assumed == [f"{INTEGER} (1x)"]


def test_the_stand_in_of_a_copy_is_that_of_the_type_it_comes_from():
    host = torch.full((3,), 9.0)
    _, assumed = read(lambda x: host.copy_(x > 0))
    assert host.tolist() == [0.0, 0.0, 0.0]
    assert assumed == [f"{CONDITION} (1x)"]


def test_lines_that_read_the_same_kind_of_number_are_listed_together_the_busiest_first():
    def run(x):
        for _ in range(3):
            x.sum().item()
        return x.max().item(), x.argmax().item()

    with FlopMeter("h100-sxm5-80gb", unknown="stand-in") as meter:
        run(torch.empty(3, device="meta").exp())
    floats, integers = meter.report().assumptions
    assert re.fullmatch(rf"{FLOAT} at \S+test_stand_ins.py:\d+ \(3x\), \S+test_stand_ins.py:\d+ \(1x\)", floats)
    assert re.fullmatch(rf"{INTEGER} at \S+:\d+ \(1x\)", integers)


def test_known_numbers_need_no_stand_in():
    assert read(lambda x: torch.arange(5, device="meta").sum().item()) == (10, [])


@pytest.mark.parametrize(("turns", "is_said"), [(99, False), (120, True)])
def test_the_answer_says_that_a_guess_decides_how_long_a_loop_runs(turns, is_said):
    """Not in the small print alone: the time is of the longest run that the loop allows."""
    with FlopMeter("h100-sxm5-80gb", unknown="stand-in") as meter:
        x = torch.empty(3, device="meta").exp()
        for _ in range(turns):
            if x.sum() > 2:
                break
    report = meter.report()
    answer, _ = str(report).split("\n\n")[1:3]
    for shown in (answer, report._repr_html_()):
        assert (f"asked {turns} times whether an unknown condition holds, and was told no" in shown) == is_said


def test_what_is_asked_while_a_program_is_set_up_decides_nothing_of_a_step():
    """torch's truncated normal values are drawn again until all are in range; one answer for each of many weights."""
    with FlopMeter("h100-sxm5-80gb", unknown="stand-in") as meter:
        x = torch.empty(3, device="meta").exp()
        for _ in range(150):
            if x.sum() > 2:
                break
        setup = len(meter.trace.ops)
        for _ in range(40):
            if x.sum() > 2:
                break
    step = range(setup, len(meter.trace.ops))
    assert "asked 150 times" in str(meter.report(ops=range(setup)))
    report = meter.report(ops=step)
    assert "a guess decides" not in str(report)
    assert any("(150x)" in line for line in report.assumptions)  # it is told all the same


@pytest.mark.parametrize(
    "read", [lambda x: x.sum().item() < 2, lambda x: bool(x.sum() < 0), lambda x: bool(x.argmax() < 1)]
)
def test_a_loop_that_waits_for_another_answer_for_ever_ends_in_an_error_that_names_its_line(read, monkeypatch):
    monkeypatch.setattr("flopmeter.known_values.assumptions.MOST_TURNS", 50)
    turns = []

    def loop():
        x = torch.empty(3, device="meta").exp()
        while read(x) is not None:
            turns.append(x)

    with FlopMeter(unknown="stand-in"), pytest.raises(EndlessLoopError, match=rf"{__file__}:\d+ asked 50 times"):
        loop()
    assert len(turns) == 49
