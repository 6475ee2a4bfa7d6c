"""Laws of a check of a profile: two runs in one profile, one written in another order, and a slower device."""

from __future__ import annotations

import copy
import json
import random

import pytest
from test_measured import cuda_trace

import flopmeter

COUNTS = ("calls", "measured_seconds", "predicted_seconds", "floor_seconds", "flops", "bytes")
SUMS = ("busy_seconds", "host_seconds", "measured_seconds", "alone_measured_seconds", "alone_predicted_seconds")


def checked(folder, trace):
    path = folder / "t.json"
    path.write_text(json.dumps(trace))
    return flopmeter.check(path)


def moved(events, microseconds):
    """The same events later, with numbers of their own."""
    later = copy.deepcopy(events)
    for one in later:
        one["ts"] += microseconds
        for name in {"External id", "correlation"} & one["args"].keys():
            one["args"][name] += 1000
    return later


def test_two_runs_in_a_profile_take_twice_the_time_of_one_and_do_twice_the_work(tmp_path):
    trace = cuda_trace()
    one = checked(tmp_path, trace)
    events = trace["traceEvents"]
    two = checked(tmp_path, trace | {"traceEvents": [*events, *moved(events, 500)]})
    assert two.span_seconds == pytest.approx(2 * one.span_seconds)
    for name in SUMS:
        assert getattr(two, name) == pytest.approx(2 * getattr(one, name)), name
    assert (two.mfu, two.weighted_error) == pytest.approx((one.mfu, one.weighted_error))
    for once, twice in zip(one.rows, two.rows, strict=True):
        assert once.name == twice.name
        assert [getattr(twice, name) for name in COUNTS] == pytest.approx([2 * getattr(once, name) for name in COUNTS])
    assert [row.calls for row in two.unpriced] == [2 * row.calls for row in one.unpriced]


def test_the_order_in_which_a_profile_is_written_says_nothing(tmp_path):
    trace = cuda_trace()
    one = checked(tmp_path, trace)
    for seed in range(3):
        random.Random(seed).shuffle(trace["traceEvents"])
        other = checked(tmp_path, trace)
        assert (other.rows, other.unpriced, other.notes) == (one.rows, one.unpriced, one.notes)


def test_a_device_that_takes_three_times_as_long_is_measured_so_and_predicted_alike(tmp_path):
    trace = cuda_trace()
    one = checked(tmp_path, trace)
    for event in trace["traceEvents"]:
        event["ts"], event["dur"] = 3 * event["ts"], 3 * event["dur"]
    slow = checked(tmp_path, trace)
    assert (slow.span_seconds, slow.busy_seconds) == pytest.approx((3 * one.span_seconds, 3 * one.busy_seconds))
    assert slow.predicted_seconds == pytest.approx(one.predicted_seconds)
    assert slow.mfu == pytest.approx(one.mfu / 3)
    assert slow.idle_share == pytest.approx(one.idle_share)
    for before, after in zip(one.rows, slow.rows, strict=True):
        assert after.measured_seconds == pytest.approx(3 * before.measured_seconds)


def test_launches_that_are_not_a_products_leave_its_error_as_it_is(tmp_path):
    """The error at each clock is that of products alone: a copy that takes ten times as long changes none."""
    trace = cuda_trace()
    one = checked(tmp_path, trace)
    transfer = next(each for each in trace["traceEvents"] if each["cat"] == "gpu_memcpy")
    transfer["dur"] = 290
    other = checked(tmp_path, trace)
    assert [note for note in other.notes if "clock" in note] == [note for note in one.notes if "clock" in note]
    assert other.clocks == one.clocks
