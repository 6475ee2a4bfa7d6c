"""What a program reads in place of an unknown value with `unknown="stand-in"`, and what the report says of it."""

import operator
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


@pytest.mark.parametrize("number", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge", "eq", "ne"])
def test_an_unknown_float_compares_with_a_number_as_its_stand_in_does(name, number):
    """It is 1.0, or less by so little that only `< 1` and `>= 1` tell: a solver waits for an error below 1."""
    compare = getattr(operator, name)
    got, assumed = read(lambda x: bool(compare(x.sum(), number)))
    assert got is compare(1.0 - 1e-9 if name in ("lt", "ge") else 1.0, number)
    assert len(assumed) == 1


def test_a_copy_to_the_host_is_full_of_stand_ins_in_the_type_asked_for():
    got, assumed = read(lambda x: x.half().to("cpu", torch.float64))
    assert (got.dtype, got.device.type) == (torch.float64, "cpu")
    assert got.tolist() == [1.0] * 3
    assert assumed == [f"{FLOAT} (1x)"]


def test_a_list_of_tensors_of_the_gpu_is_read_one_by_one_into_a_tensor_of_their_type():
    """As Megatron-LM adds up the norms of its gradients. torch makes a tensor of the host of such a list."""
    got, assumed = read(lambda x: torch.tensor([[x.sum(), x.max()], [torch.tensor(7.0), x[:1]]]))
    assert (got.dtype, got.device.type) == (torch.float32, "cpu")
    assert got.tolist() == [[1.0, 1.0], [7.0, 1.0]]
    assert assumed == [f"{FLOAT} (3x)"]
    half, _ = read(lambda x: torch.tensor((x.half().sum(), x.half().max())))
    assert half.dtype is torch.float16


def test_a_list_of_tensors_of_the_gpu_that_becomes_one_there_is_read_too():
    with FlopMeter("h100-sxm5-80gb", unknown="stand-in") as meter:
        x = torch.empty(3, device="meta").exp()
        made = torch.as_tensor([x.sum(), x.max()], device="meta")
    assert made.is_meta
    assert [kernel.cost.name for kernel in meter.report().kernels].count("_local_scalar_dense") == 2


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


COUNTS = {
    "one more": lambda n: [(n + 1).item(), n.item(), (n + 1).item()],
    "in place": lambda n: [n.add_(3).item(), n.mul_(2).item(), n.item()],
    "written into a list": lambda n: written(torch.tensor([4, 5, 6], device=n.device), n),
    "a place in a table": lambda n: torch.tensor([7, 8, 9], device=n.device)[n + 1].item(),
    "behind known ones": lambda n: torch.cat([torch.tensor([4, 5], device=n.device), n[None] + 2]).tolist(),
    "a slice up to it": lambda n: torch.zeros(5, device=n.device)[: n + 2].shape,
    "in another type on the host": lambda n: (n + 1).to("cpu", torch.float64).tolist(),
}


def written(numbers, n):
    numbers[1] = n + 1
    return numbers.tolist()


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_computed_from_an_unknown_count_is_computed_from_its_stand_in(name):
    got, _ = read(lambda x: COUNTS[name]((x > 2).sum()))
    assert got == COUNTS[name](torch.tensor(0))  # on the CPU, with what stands in


def test_unknown_numbers_that_flow_into_a_count_make_it_another_unknown():
    def run(x):
        n = (x > 2).sum()
        n += 5
        got = []
        for change in (lambda n: n, lambda n: n.copy_(x[0])):
            got.append(change(n).item())
        return got

    assert read(run) == ([5, 0], [f"{INTEGER} (2x)"])


def test_a_loop_that_makes_one_token_more_than_were_accepted_comes_to_its_end():
    """Speculative decoding: how many of a draft's tokens are accepted is unknown, and one more follows."""

    def run(x):
        tokens = torch.zeros(4, dtype=torch.long, device="meta")
        while len(tokens) < 8:
            accepted = (x.log() > x).long().cumprod(0).sum()
            tokens = torch.cat([tokens, torch.zeros_like(tokens)])[: len(tokens) + accepted + 1]
        return len(tokens)

    assert read(run) == (8, [f"{INTEGER} (4x)"])
