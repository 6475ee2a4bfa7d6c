"""Copies between the device and the host's memory: over the link as they are where that memory is pinned, else copied
by a thread of the host, too ('API synchronization behavior' in the reference of CUDA's runtime)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import flopmeter
from flopmeter.measured import check
from flopmeter.report import Report

H100 = "h100-sxm5-80gb"
MB_89 = 89_000_000 // 4  # fp32 elements: 10 ms of a thread that copies 8.9 GB/s
TRACES = Path(__file__).parent.parent / "validation" / "traces"


def report_of(program: Callable[[], object]) -> Report:
    with flopmeter.cuda(H100) as device:
        program()
    return device.report().step


def host_ms(program: Callable[[], object]) -> float:
    return report_of(program).host_seconds * 1e3


def sent(pins: bool, non_blocking: bool = False) -> Report:
    """89 MB to the device."""

    def send() -> None:
        batch = torch.zeros(MB_89)
        (batch.pin_memory() if pins else batch).to("cuda", non_blocking=non_blocking)

    return report_of(send)


def test_the_host_copies_memory_that_is_not_pinned_whether_it_waits_for_the_rest_or_not():
    for non_blocking in (False, True):
        slow, fast = (sent(pins, non_blocking).host_seconds for pins in (False, True))
        assert slow - fast == pytest.approx(10e-3, rel=0.01)


def test_the_link_takes_as_long_either_way():
    (pageable,), (pinned,) = (sent(pins).timings for pins in (False, True))
    assert pageable.seconds == pinned.seconds == pytest.approx(89e6 / (64e9 * 0.88), rel=0.05)


def test_a_new_result_on_the_host_is_pinned_where_nothing_waits_for_it_and_a_tensor_that_is_there_as_it_was_made():
    def back(copy: Callable[[torch.Tensor], object]) -> float:
        return host_ms(lambda: copy(torch.zeros(MB_89, device="cuda")))

    nothing = back(lambda x: None)
    there, pinned_there = torch.zeros(MB_89), lambda: torch.zeros(MB_89).pin_memory()
    assert back(lambda x: x.cpu()) - nothing > 10.0
    assert back(lambda x: x.to("cpu", non_blocking=True)) - nothing < 1.0
    assert back(lambda x: there.copy_(x, non_blocking=True)) - nothing > 10.0
    assert back(lambda x: pinned_there().copy_(x, non_blocking=True)) - nothing < 1.0


def test_a_report_says_how_much_the_host_copies_and_how_fast():
    (line,) = (note for note in sent(pins=False).notes if "pinned" in note)
    assert "0.089 GB" in line
    assert "8.9 GB/s (assumed)" in line
    assert not [note for note in sent(pins=True).notes if "pinned" in note]


def test_batches_that_are_copied_without_waiting_and_not_pinned_are_told_to_be_pinned():
    data = TensorDataset(torch.zeros(1024, 3, 224, 224))

    def train(pins: bool) -> None:
        model = torch.nn.Conv2d(3, 8, 3).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for (images,) in DataLoader(data, batch_size=256, pin_memory=pins):
            model(images.to("cuda", non_blocking=True)).sum().backward()
            optimizer.step()

    slow, fast = (report_of(lambda pins=pins: train(pins)) for pins in (False, True))
    advice = next(each for each in slow.advice if "pin_memory" in each.remedy)
    assert advice.run_seconds_then == pytest.approx(fast.seconds, rel=0.05)
    assert not [each for each in fast.advice if "pin_memory" in each.remedy]


def test_pageable_copies_of_a_profile_take_as_long_as_measured():
    """Of an H200: 16.8 MB, on which the rate is set, and 4.2 MB."""
    rows = check(TRACES / "h200_kernels_conv.json.gz").rows
    for shape, error in (("[4096,1024]", 0.05), ("[2048,512]", 0.4)):
        row = max(
            (row for row in rows if row.name == "_to_copy" and row.shapes == shape), key=lambda row: row.floor_seconds
        )
        assert row.predicted_seconds == pytest.approx(row.measured_seconds, rel=error)
