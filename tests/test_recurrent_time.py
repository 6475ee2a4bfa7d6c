"""What the steps of cuDNN's recurrent layers take the host and the device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter, load_hardware

H200 = load_hardware("h200-sxm-141gb")

# Steps, sequences, units, layers, type; then of `_cudnn_rnn` and its gradient µs of the host and calls of the driver:
# validation/traces/h200_kernels_conv.json.gz and h100_lstm_train.json.gz.
PROFILES = [
    (100, 32, 512, 1, torch.float32, 2824 + 3300, 202 + 311),
    (64, 16, 1024, 2, torch.float32, 4135 + 4590, 264 + 428),
    (50, 64, 300, 2, torch.float16, 2118 + 4225, 214 + 344),
    (35, 20, 650, 2, torch.float32, 2821 + 3459, 158 + 271),
]
PROFILER_MICROSECONDS = 2.2  # that each call takes longer under it
SLOWER = 1.45  # these hosts: a launch takes 5.6 to 6.5 µs under the profiler, on other hosts of an H100 3.2 to 4.5
# The same, of kernels that keep the weights: µs of the device.
KEPT = [(100, 32, 512, 1, torch.float16, 265, 488), (200, 8, 128, 1, torch.float16, 352, 410)]


def report_of(steps, sequences, units, layers, dtype, *, mode="eager", kind=nn.LSTM):
    with torch.device("meta"):
        layer = kind(units, units, layers, dtype=dtype)
        x = torch.empty(steps, sequences, units, dtype=dtype, requires_grad=True)
    with FlopMeter(H200, clocks="burst") as meter:
        layer(x)[0].sum().backward()
    return meter.report(mode=mode)


def seconds_of(report):
    names = [kernel.cost.name for kernel in report.kernels]
    timings = [report.timings[names.index(name)] for name in ("_cudnn_rnn", "_cudnn_rnn_backward")]
    return [timing.work_seconds + timing.floor_seconds for timing in timings]


@pytest.mark.parametrize("case", PROFILES, ids=str)
def test_cudnn_launches_steps_one_by_one_within_a_quarter_of_the_time_that_profiles_have(case):
    *layer, microseconds, calls = case
    without_profiler = (microseconds - PROFILER_MICROSECONDS * calls) * 1e-6 / SLOWER
    assert report_of(*layer).seconds == pytest.approx(without_profiler, rel=0.25)


@pytest.mark.parametrize("case", KEPT, ids=str)
def test_a_kernel_that_keeps_its_weights_runs_all_steps_without_the_host(case):
    *layer, forward, backward = case
    report = report_of(*layer)
    assert seconds_of(report) == pytest.approx([forward * 1e-6, backward * 1e-6], rel=0.2)
    assert report.launch_seconds == pytest.approx(report_of(2 * layer[0], *layer[1:]).launch_seconds)


def test_the_device_idles_while_the_host_launches_steps_and_does_not_in_a_graph():
    eager, replayed = (report_of(100, 32, 512, 1, torch.float32, mode=mode) for mode in ("eager", "eager-cudagraph"))
    assert seconds_of(eager) == pytest.approx(seconds_of(replayed), rel=0.01)
    assert eager.regime == "overhead"
    assert replayed.idle_seconds < 0.1 * replayed.seconds < 0.1 * eager.idle_seconds


def test_twice_the_steps_take_the_host_twice_as_long_and_a_note_says_so():
    once, twice = (report_of(steps, 32, 512, 1, torch.float32) for steps in (100, 200))
    thrice = report_of(300, 32, 512, 1, torch.float32)
    assert thrice.launch_seconds - twice.launch_seconds == pytest.approx(twice.launch_seconds - once.launch_seconds)
    assert any("cuDNN launches 200 steps one by one" in note for note in once.notes)  # forward and backward
    kept = report_of(100, 32, 512, 1, torch.float16)
    assert not any("one by one" in note for note in kept.notes)


def test_a_report_says_that_the_steps_are_what_takes_long():
    spots = {spot.why for spot in report_of(100, 32, 512, 1, torch.float32).hot_spots}
    assert "the host launches its kernels one by one, more slowly than the device runs them" in spots
