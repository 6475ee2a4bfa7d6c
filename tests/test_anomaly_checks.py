"""torch.autograd.set_detect_anomaly(True): what it costs, and what the report says of it."""

from __future__ import annotations

import torch
from torch import nn

from flopmeter import FlopMeter
from flopmeter.report.report import Report

REMEDY = "torch.autograd.set_detect_anomaly(False), but to find a fault"


def _report(detects: bool) -> Report:
    with torch.device("meta"):
        model, x = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))), torch.empty(64, 256)
    with FlopMeter("h100-sxm5-80gb", checks="hold") as meter, torch.autograd.set_detect_anomaly(detects):
        model(x).sum().backward()
    return meter.report()


def test_the_report_names_the_switch_that_stops_the_host_in_the_backward_pass() -> None:
    report, without = _report(detects=True), _report(detects=False)
    (told,) = (each for each in report.advice if each.remedy == REMEDY)
    assert told.run_seconds_then == without.seconds < report.seconds
    assert not any("keep the values on the device" in each.remedy for each in report.advice)


def test_a_program_without_the_switch_is_told_nothing_of_it() -> None:
    assert not any(each.remedy == REMEDY for each in _report(detects=False).advice)
