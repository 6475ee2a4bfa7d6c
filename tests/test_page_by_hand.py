"""Pictures of the page and the timeline's file, piece by piece, of figures that are given: where each mark lies."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace as Made

import pytest
import torch
from torch import nn

import flopmeter
from flopmeter import FlopMeter
from flopmeter.report.chrome_trace import Track, _kernel, events, save_together
from flopmeter.report.figures import Dot, Roof, _phase_starts, _step_starts
from flopmeter.report.page.axes import Axis, horizontal, vertical
from flopmeter.report.page.gantt import Bar, Lane, _drawn, _exposed_and_hidden, gantt, lanes_of
from flopmeter.report.page.memory import _Across, _areas, _limit, _over_time, _peak, _phases
from flopmeter.report.page.memory import _drawn as drawn_memory
from flopmeter.report.page.roofline import Axes, _labels, _radius, _roofs, _slope_label
from flopmeter.report.page.roofline import _drawn as drawn_dot

HIDDEN, EXPOSED = "communication, hidden", "communication, exposed"


def test_an_axis_has_round_ticks_and_places_between_its_ends():
    axis = Axis(0, 23, 100, 330)
    assert axis.ticks == [0, 5, 10, 15, 20]
    assert [axis.at(value) for value in (0, 11.5, 23, -5, 99)] == pytest.approx([100, 215, 330, 100, 330])
    assert Axis(0, 1, 0, 1).ticks == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])
    assert Axis(10, 11, 0, 1).ticks == pytest.approx([10, 10.2, 10.4, 10.6, 10.8, 11])
    logarithmic = Axis(1, 1000, 300, 0, is_log=True)
    assert [logarithmic.at(value) for value in (1, 10, 1000, 0.1)] == pytest.approx([300, 200, 0, 300])
    assert logarithmic.ticks == [1, 10, 100, 1000]
    assert Axis(3, 60, 0, 1, is_log=True).ticks == [5, 10, 20, 50]


def test_grid_lines_and_labels_lie_at_the_ticks():
    axis = Axis(0, 2, 100, 300)
    assert axis.ticks == [0, 0.5, 1, 1.5, 2]
    across = str(horizontal(axis, 10, 60, ["a", "b", "c", "d", "e"], "time"))
    assert '<path class="grid" d="M150.0 10.0V60.0"/>' in across.replace("></path>", "/>")
    assert '<text x="200" y="78" text-anchor="middle">c</text>' in across
    assert '<text class="title" x="200" y="98" text-anchor="middle">time</text>' in across
    up = str(vertical(axis, 72, 480, ["a", "b", "c", "d", "e"], "alive"))
    assert '<path class="grid" d="M72.0 250.0H480.0"/>' in up.replace("></path>", "/>")
    assert '<text x="64" y="204" text-anchor="end">c</text>' in up
    assert 'transform="translate(12 200.0) rotate(-90)"' in up


SIZE = Axis(0, 100, 300, 0)  # 3 pixels a byte, upwards
OPS = Axis(0, 4, 0, 400)
ACROSS = _Across(OPS, [f"{tick:g}" for tick in OPS.ticks], "op", OPS.at)


def paths(markup):
    return [piece.partition('"')[0] for piece in str(markup).split(' d="')[1:]]


def test_areas_are_stacked_and_a_step_holds_until_the_next():
    shown = Made(
        steps=4, totals=[10, 30, 20, 20], areas={"parameters": [10, 10, 10, 10], "activations": [0, 20, 10, 10]}
    )
    lower, upper, whole = paths(_areas(shown, ACROSS, SIZE))
    assert lower == "M0.0 270.0L400.0 270.0L400.0 300.0L0.0 300.0Z"
    stairs = "0.0 270.0L100.0 270.0L100.0 210.0L200.0 210.0L200.0 240.0L400.0 240.0"
    assert upper == f"M{stairs}L400.0 270.0L0.0 270.0Z"
    assert whole == f"M{stairs}"


def test_of_steps_that_share_a_column_the_one_with_the_most_is_drawn():
    near = _Across(OPS, [], "op", lambda step: 0.2 * step if step < 3 else 300.0)
    shown = Made(steps=4, totals=[10, 30, 20, 20], areas={"parameters": [10, 30, 20, 20]})
    *_, whole = paths(_areas(shown, near, SIZE))
    assert whole == "M0.0 210.0L300.0 210.0L300.0 240.0L400.0 240.0"


def test_phases_begin_with_a_line_and_are_named_where_there_is_room():
    found = str(_phases([("forward", 0), ("backward", 3), ("x", 4)], ACROSS))
    assert paths(found) == ["M0.0 8.0V270.0", "M300.0 8.0V270.0", "M400.0 8.0V270.0"]
    assert found.count("<text") == 2
    assert '<text x="304" y="16">backward</text>' in found


@pytest.mark.parametrize(("limit", "dy"), [(None, -5), (100, -5), (90, 16)])
def test_the_peak_is_labelled_beside_its_point_below_a_limit_that_is_near(limit, dy):
    shown = Made(peak_bytes=80, limit_bytes=limit)
    left, right = (str(_peak(shown, x, SIZE)) for x in (100.0, 400.0))
    assert 'cx="100" cy="60" r="4"' in left
    assert f'x="108" y="{60 + dy}" text-anchor="start">peak 80 B</text>' in left
    assert f'x="392" y="{60 + dy}" text-anchor="end">peak 80 B</text>' in right
    assert ("memory of the device 100 B" in str(_limit(100, SIZE)), str(_limit(None, SIZE))) == (True, "")
    assert paths(_limit(100, SIZE)) == ["M72.0 0.0H468.0"]


def test_time_is_an_axis_on_which_a_step_lies_where_it_starts():
    across = _over_time([0.0, 0.001, 0.0015], 0.002)
    assert (across.title, across.labels) == ("time (ms)", ["0", "0.5", "1", "1.5", "2"])
    assert [across.place(step) for step in (0, 1, 2)] == pytest.approx([72, 270, 369])
    shown = Made(
        steps=3, totals=[10, 30, 20], areas={"parameters": [10, 30, 20]}, peak_bytes=30, peak_step=1, limit_bytes=None,
        phases=[("forward", 0)],
    )  # fmt: skip
    svg = str(drawn_memory(shown, across))
    assert 'aria-label="Memory alive over time (ms), peak 30 B"' in svg
    assert 'cx="270"' in svg
    assert "alive (B)" in svg


def test_phases_begin_where_they_change_and_steps_with_their_first_kernel():
    """An op without a kernel, a view, has the time of the one before it; a kernel may hold several ops."""
    ops = [Made(phase=phase) for phase in ("forward", "forward", "forward", "backward", "optimizer", "optimizer")]
    kernels = [Made(ops=[ops[0], ops[2]]), Made(ops=[ops[2]]), Made(ops=[ops[3]]), Made(ops=[ops[5]])]
    timings = [Made(start_seconds=start) for start in (1.0, 1.5, 2.0, 4.0)]
    memory = Made(trace=Made(ops=ops), steps=5)
    shown = Made(memory=memory, kernels=kernels, timings=timings, seconds=9.0)
    assert _phase_starts(shown) == [("forward", 0), ("backward", 3), ("optimizer", 4)]
    assert _step_starts(shown) == [1.0, 1.0, 1.0, 2.0, 2.0, 9.0]
    alternating = [Made(phase=phase) for phase in ("forward", "recompute") * 4]
    assert _phase_starts(Made(memory=Made(trace=Made(ops=alternating), steps=6))) == [
        (("forward", "recompute")[place % 2], place) for place in range(6)
    ]
    assert _phase_starts(Made(memory=Made(trace=Made(ops=alternating), steps=7))) == []
    assert _phase_starts(Made(memory=Made(trace=Made(ops=[]), steps=0))) == []


def test_roofs_rise_with_the_bandwidth_to_the_peak_and_are_labelled_above_and_below():
    """From 0.1 to 1000 FLOP/B on 400 pixels, from 1 GFLOP/s to 100 TFLOP/s on 500: 100 pixels each decade."""
    axes = Axes(Axis(0.1, 1000, 0, 400, is_log=True), Axis(1e9, 1e14, 500, 0, is_log=True))
    products = Roof("products", "bf16", 1e14, 1e12, 1e13, 1e12)
    vector = Roof("vector", "fp32", 1e13, 1e12, 1e12, 1e11)
    roofline = Made(products=products, vector=vector)
    assert paths(_roofs(roofline, axes)) == [
        "M0.0 300.0L300.0 0.0L400.0 0.0", "M0.0 300.0L200.0 100.0L400.0 100.0",
        "M0.0 300.0L200.0 100.0L400.0 100.0", "M0.0 400.0L200.0 200.0L400.0 200.0",
    ]  # fmt: skip
    assert _labels(roofline, axes) == [("bf16 products 100 TFLOP/s", -6), ("fp32 vector 10.0 TFLOP/s", 200 + 17 - 3)]
    alike = Made(products=products._replace(dtype="fp32", flop_per_s=1e13), vector=vector)
    assert _labels(alike, axes) == [("fp32 products and vector 10.0 TFLOP/s", 94)]
    assert 'transform="translate(0.0 300.0) rotate(-45.0)"' in str(_slope_label(1e12, axes))
    assert "memory 1.00 TB/s" in str(_slope_label(1e12, axes))
    dot = Dot("mm", "net", "tensor contraction", 3, 10.0, 1e12, 0.25)
    assert axes.at(dot) == pytest.approx((200, 200))
    assert "mm (tensor contraction)\n3 kernels, 250 ms, 25.0 % of the time\n10 FLOP/B, 1.00 TFLOP/s" in str(
        drawn_dot(dot, 1.0, axes)
    )
    assert _radius(dot, 1.0) ** 2 == pytest.approx(3**2 + 22**2 / 4)


# --- ranks


def test_a_collective_is_hidden_where_the_computing_stream_is_busy():
    busy = [(0.0, 2.0), (3.0, 4.0), (6.0, 7.0)]
    assert list(_exposed_and_hidden(1.0, 6.5, busy)) == [
        Bar(HIDDEN, 1.0, 2.0), Bar(EXPOSED, 2.0, 3.0), Bar(HIDDEN, 3.0, 4.0), Bar(EXPOSED, 4.0, 6.0),
        Bar(HIDDEN, 6.0, 6.5),
    ]  # fmt: skip
    assert list(_exposed_and_hidden(8.0, 9.0, busy)) == [Bar(EXPOSED, 8.0, 9.0)]
    assert list(_exposed_and_hidden(2.0, 2.0, busy)) == []


def ran(stream, start, end, phase="forward", is_collective=False):
    return Made(op=Made(phase=phase)), Made(
        stream=stream, start_seconds=start, end_seconds=end, is_collective=is_collective
    )


def ranks():
    pairs = [ran(0, 0, 1), ran(0, 1, 2), ran(0, 3, 4, "backward"), ran(5, 1, 3, is_collective=True), ran(7, 0, 2)]
    kernels, timings = zip(*pairs, strict=True)
    return {"rank 0": Made(compute_stream=0, kernels=kernels, timings=timings, seconds=4.0)}


def test_a_rank_has_a_lane_for_each_stream_in_which_equal_neighbours_are_one_bar():
    assert lanes_of("rank 0", ranks()["rank 0"]) == [
        Lane("rank 0", True, [Bar("forward", 0, 2), Bar("backward", 3, 4)]),
        Lane("communication 1", False, [Bar(HIDDEN, 1, 2), Bar(EXPOSED, 2, 3)]),
        Lane("stream 2", False, [Bar("forward", 0, 2)]),
    ]
    lane = Lane("x", False, [Bar("backward", 1.0, 1.5)])
    drawn = str(_drawn(lane, 30.0, Axis(0, 4, 152, 944)))
    assert '<rect x="350" y="36" width="99" height="10" fill="#0072B2">' in drawn
    assert "<title>backward, 500 ms</title>" in drawn
    assert '<text x="144" y="45" text-anchor="end" class="title">x</text>' in drawn
    strong = str(_drawn(lane._replace(is_computing=True), 30.0, Axis(0, 4, 152, 944)))
    assert 'y="32" width="99" height="18"' in strong
    assert 'class="strong"' in strong
    chart = str(gantt(ranks()))
    assert 'viewBox="0 0 960 126"' in chart  # 8 above three lanes of 22, 52 below
    assert 'aria-label="Time of 1 ranks: what each stream does until 4.00 s"' in chart
    assert [each in chart for each in (HIDDEN, EXPOSED, "recompute", "optimizer")] == [True, True, False, False]


# --- the timeline's file


@pytest.fixture(scope="module")
def report():
    """Of a ReLU in a module, 2 to 5 us, and of a number that the host waits for, 6 to 9 us."""
    x = flopmeter.on_meta(torch.ones(8))
    with FlopMeter("h100-sxm5-80gb") as meter, torch.no_grad():
        nn.Sequential(nn.ReLU())(x).sum().item()
    found = meter.report()
    moments = [(1e-6, 2e-6, 3e-6), (2e-6, 6e-6, 1e-6), (3e-6, 7e-6, 2e-6)]
    timings = [
        timing._replace(enqueued_seconds=sent, start_seconds=start, work_seconds=lasts, floor_seconds=0.0)
        for timing, (sent, start, lasts) in zip(found.timings, moments, strict=True)
    ]
    return replace(found, timings=timings)


def test_the_timeline_has_the_host_above_the_device_with_each_launch_its_kernel_and_the_wait(report):
    found = list(events(report))
    names = [(event["name"], event["pid"], event["args"]) for event in found if event["name"].startswith("process")]
    assert names == [
        ("process_name", 1, {"name": "host (predicted)"}), ("process_labels", 1, {"labels": "CPU"}),
        ("process_sort_index", 1, {"sort_index": 0}),
        ("process_name", 0, {"name": "NVIDIA H100 80GB HBM3 (predicted)"}), ("process_labels", 0, {"labels": "GPU 0"}),
        ("process_sort_index", 0, {"sort_index": 1}),
    ]  # fmt: skip
    threads = [(each["pid"], each["tid"], each["args"]["name"]) for each in found if each["name"] == "thread_name"]
    assert threads == [(1, 1, "the program: phases, modules, launches"), (0, 7, "kernels")]
    slices = [(e["name"], e["cat"], e["pid"], e["tid"], e["ts"], e["dur"]) for e in found if e["ph"] == "X"]
    assert slices == [
        ("forward", "user_annotation", 1, 1, 0.0, 3.0), ("Sequential", "user_annotation", 1, 1, 0.0, 1.0),
        ("0", "user_annotation", 1, 1, 0.0, 1.0), ("launch relu", "cpu_op", 1, 1, 0.0, 1.0),
        ("launch sum", "cpu_op", 1, 1, 1.0, 1.0), ("launch _local_scalar_dense", "cpu_op", 1, 1, 2.0, 1.0),
        ("wait for _local_scalar_dense", "cuda_runtime", 1, 1, 3.0, 6.0),
        ("relu", "kernel", 0, 7, 2.0, 3.0), ("sum", "kernel", 0, 7, 6.0, 1.0),
        ("_local_scalar_dense", "kernel", 0, 7, 7.0, 2.0),
    ]  # fmt: skip
    arrows = [(e["ph"], e["id"], e["pid"], e["tid"], e["ts"]) for e in found if e["ph"] in "sf"]
    assert arrows == [
        ("s", 0, 1, 1, 0.0), ("f", 0, 0, 7, 2.0), ("s", 1, 1, 1, 1.0), ("f", 1, 0, 7, 6.0), ("s", 2, 1, 1, 2.0),
        ("f", 2, 0, 7, 7.0),
    ]  # fmt: skip
    (relu,) = (e["args"] for e in found if e["name"] == "relu")
    assert relu == {
        "External id": 0, "device": 0, "stream": 7, "module": "Sequential.0", "phase": "forward",
        "class": "element-wise", "dtype": "fp32", "flops": 0, "bytes read": 32,
        "bytes written": 32, "bound by": "memory",
    }  # fmt: skip
    inside = [e["args"] for e in found if e["ph"] == "X" and e["cat"] == "user_annotation"]
    assert inside == [{}, {"module": "Sequential"}, {"module": "Sequential.0"}]


def test_a_collective_tells_its_kind_bytes_and_ranks_and_an_op_its_line_where_they_are_known():
    collective = Made(_asdict=lambda: {"kind": "all_reduce", "nbytes": 8})
    cost = Made(
        op_class="communication",
        dtype="fp32",
        flops=0,
        bytes_read=8,
        bytes_written=8,
        collective=collective,
        name="s",
    )
    op = Made(module="", phase="backward", source="mine.py:3")
    timing = Made(regime="communication", start_seconds=1e-6, end_seconds=3e-6)
    slice_ = _kernel(Made(cost=cost, op=op), timing, 4, Track(0, 9, "communication"))
    assert slice_[:2] == (1000, 3000)
    assert slice_[3:5] == ("s", "kernel")
    assert slice_.args == {
        "External id": 4, "device": 0, "stream": 9, "module": "", "phase": "backward", "class": "communication",
        "dtype": "fp32", "flops": 0, "bytes read": 8, "bytes written": 8, "bound by": "communication",
        "kind": "all_reduce", "nbytes": 8, "source": "mine.py:3",
    }  # fmt: skip


def test_runs_in_one_file_have_processes_and_arrows_of_their_own(report, tmp_path):
    path = tmp_path / "both.json"
    save_together({"a": report, "b": report}, path)
    document = json.loads(path.read_text())
    assert document["deviceProperties"] == [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]
    assert document["otherData"] == {
        "mode": "eager",
        "notes": list(report.notes),
        "assumptions": list(report.assumptions),
    }
    found = document["traceEvents"]
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        assert other["pid"] == one["pid"] + 2
        assert other.get("id", 3) == one.get("id", 0) + 3
    assert found[half]["args"]["name"] == "b: host (predicted)"
    orders = [each["args"]["sort_index"] for each in found if each["name"] == "process_sort_index"]
    assert orders == [0, 1, 2, 3]
