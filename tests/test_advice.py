"""Where to win: the first advice names a program's fault, and wins what the mended program does."""

from __future__ import annotations

import json

import pytest
import torch
from faults import FAULTS, H100
from torch import nn

from flopmeter import FlopMeter, HardwareError, available_hardware
from flopmeter.models import BUILTINS, training_step
from flopmeter.report.wins import LEAST_GAIN


@pytest.fixture(scope="module", params=FAULTS, ids=str)
def fault(request):
    fault = FAULTS[request.param]
    return fault, fault.report(is_mended=False)


def test_the_first_advice_names_the_fault_and_wins_what_the_mended_program_does(fault):
    fault, report = fault
    first = report.advice[0]
    assert first.remedy.startswith(fault.remedy)
    assert first.is_fault
    mended = fault.report(is_mended=True).seconds / fault.times
    assert first.gain_seconds == pytest.approx(report.seconds - mended, rel=0.05)
    assert first.run_seconds_then == pytest.approx(report.seconds - first.gain_seconds)


def test_each_advice_is_above_its_floor_and_worth_its_trouble(fault):
    _, report = fault
    for each in report.advice:
        assert 0 <= each.floor_seconds <= each.seconds_then < each.seconds_now <= report.seconds * (1 + 1e-9)
        assert each.gain_seconds >= LEAST_GAIN * report.seconds
        assert each.what
        assert each.where
        assert each.why


def test_the_mended_program_is_not_told_the_same_again(fault):
    fault, _ = fault
    assert not any(each.remedy.startswith(fault.remedy) for each in fault.report(is_mended=True).advice)


def test_the_hot_spots_share_the_wall_clock_among_them(fault):
    _, report = fault
    assert sum(spot.seconds_now for spot in report.hot_spots) == pytest.approx(report.seconds, rel=0.01)
    assert all(0 <= spot.floor_seconds <= spot.seconds_now for spot in report.hot_spots)


def test_text_page_and_json_show_the_same_advice_and_text_shows_it_after_the_time(fault):
    _, report = fault
    lines = report.render("text").splitlines()
    time = next(number for number, line in enumerate(lines) if line.startswith("predicted"))
    assert lines[time + 1].startswith("where to win")
    assert lines[time + 2].startswith(f"  1. {report.advice[0].remedy}: ")
    assert [each["remedy"] for each in json.loads(report.render("json"))["advice"]] == [
        each.remedy for each in report.advice
    ]
    assert "Where to win" in report.render("html")


def linear_layers():
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)), (torch.empty(256, 512),)


PROGRAMS = {
    "BERT, forward": lambda: forward(*BUILTINS["bert-base"](batch=1, seq=64)),
    "BERT, training": lambda: trained(*BUILTINS["bert-base"](batch=1, seq=64)),
    "GPT-2, training": lambda: trained(*BUILTINS["gpt2-124m"](batch=1, seq=128)),
    "ResNet": lambda: forward(*BUILTINS["resnet-50"](batch=2, image_size=64)),
    "ResNet in fp32": lambda: forward(*BUILTINS["resnet-50"](batch=2, image_size=64, dtype=torch.float32)),
    "a small MLP in fp32": lambda: trained(*linear_layers()),
    "one element-wise op": lambda: lambda: torch.ones(2**24, device="meta").sin(),
    "one product": lambda: lambda: torch.ones(4096, 4096, device="meta") @ torch.ones(4096, 4096, device="meta"),
    "a recurrent net": lambda: recurrent(),
    "attention by hand": lambda: FAULTS["eager attention"].program(False),
}


def forward(model, inputs):
    return torch.no_grad()(lambda: model.eval()(*inputs))


def trained(model, inputs):
    optimizer = torch.optim.AdamW(model.parameters())
    return lambda: training_step(model, inputs, optimizer)


def recurrent():
    with torch.device("meta"):
        net, x = nn.LSTM(64, 128, 2), torch.empty(16, 4, 64)
    return lambda: net(x)


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_advice_loses_on_any_device(name):
    run = PROGRAMS[name]()
    priced = 0
    for device in available_hardware()[:: 1 if name == "a small MLP in fp32" else 9]:
        try:
            with FlopMeter(device) as meter:
                run()
            report = meter.report()
        except HardwareError:  # it lacks a type of the program
            continue
        priced += 1
        for each in report.advice:
            assert each.gain_seconds >= LEAST_GAIN * report.seconds, (device, each)
            assert each.run_seconds_then < report.seconds, (device, each)
    assert priced > 3


def test_a_program_near_its_floor_is_told_so_with_the_floor():
    x = torch.empty(2**28, dtype=torch.bfloat16, device="meta")
    with FlopMeter(H100) as meter:
        x.sin_()
    report = meter.report()
    assert report.advice == ()
    assert "near its floor: no change that flopmeter can price wins 3%" in str(report)
    floor = 2 * 2 * 2**28 / 3.35e12  # read and written once, at the datasheet's bandwidth
    assert report.hot_spots[0].floor_seconds == pytest.approx(floor)


def test_a_source_line_is_told_where_the_trace_has_it():
    with FlopMeter(H100, source=True) as meter:
        FAULTS["eager attention"].program(False)()
    assert "faults.py:" in meter.report().advice[0].where
