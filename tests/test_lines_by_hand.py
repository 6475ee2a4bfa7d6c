"""Lines, tables and documents of a report, whole, of figures that are given."""

from __future__ import annotations

import json
from types import SimpleNamespace as Made

import pytest

from flopmeter import load_hardware
from flopmeter.records import CompiledGraph, Switches
from flopmeter.records.compiled import CompiledKernel, GraphBreak, Origin
from flopmeter.report.columns import IN_TEXT, raw
from flopmeter.report.formats import _graph_as_dict, _in_fitting_unit, _label, _laid_out, answer, small_print, table
from flopmeter.report.ran import Ran
from flopmeter.report.rows import Row, RowTotals
from flopmeter.report.speed_up import RegionSpeedUp, Share, SpeedUp
from flopmeter.report.tables import Column, ColumnOf, Document, Table, for_notebook, table_of

H100 = load_hardware("h100-sxm5-80gb")
RAN = Ran("mine.py --fast", ("float32 [8]", "float32 [8]", "int64 [2]"), 3, "h100", {"torch": "2", "x": "1"}, "today")
UNSURE = Made(validated=("a",), transferred=("b", "c"), extrapolated=("d",))
DEFAULTS = {
    "headline": "Net, forward · H100 · bf16 · eager", "hardware": H100, "seconds": 0.5, "seconds_low": 0.4,
    "seconds_high": 0.75, "kernel_seconds": 0.4, "launch_seconds": 0.1, "idle_seconds": 0.1, "flops": 10**14,
    "mfu_in_words": "20.0 %", "peak_memory_bytes": 2 * 10**9, "regime": "memory", "later_step_seconds": None,
    "seconds_by_regime": {"compute": 0.1, "memory": 0.3, "overhead": 0.1}, "caution": "", "main_dtype": "bf16",
    "memory": Made(
        fits=lambda device: True, at_peak={"parameters": 1.5 * 10**9, "activations": 0.5 * 10**9, "tiny": 10**6},
        peak_bytes=2 * 10**9, steady_peak_bytes=2 * 10**9, allocated_bytes=3 * 10**9,
        peak_place="mm in Net.layer (backward)",
    ),
    "kernels": (), "timings": [], "uncounted": [], "switches": Switches(True, False, False), "assumptions": (),
    "causal": "full", "graphs": (), "notes": ("a note",), "ran": RAN, "cluster": None, "uncertainty": UNSURE,
    "clock": Made(ratio=0.85, limit_watts=700.0, clocks="sustained"), "watts": 512.4, "joules": 256.2,
    "energy_dollars": None, "dollars_per_kwh": None, "advice": (), "hot_spots": [], "in_mode": None,
}  # fmt: skip


def report(**changes):
    return Made(**{**DEFAULTS, **changes})


def memory(**changes):
    return Made(**{**vars(DEFAULTS["memory"]), **changes})


def test_the_answer_is_these_lines():
    assert answer(report()) == [
        "predicted 500 ms (400 ms to 750 ms) · device busy 400 ms, host 100 ms, idle 20 % · 200.0 TFLOP/s, MFU 20.0 %"
        " · peak memory 2.00 GB",
        "memory-bound · of the wall-clock: compute 20 %, memory 60 %, overhead 20 %",
        "fits NVIDIA H100 80GB HBM3: 84.4 of 85.0 GB usable (0.6 assumed for the process) · at the peak: parameters "
        "1.50 GB, activations 500 MB · at mm in Net.layer (backward)",
    ]


@pytest.mark.parametrize(
    ("changes", "line", "said"),
    [
        ({"kernel_seconds": 0.505}, 0, "busy 505 ms, host"),
        ({"kernel_seconds": 0.506}, 0, "busy 506 ms on all streams, host"),
        ({"seconds": 0.0}, 0, "idle 0 % · 0.0 TFLOP/s"),
        ({"caution": "unsure of it"}, 2, "unsure of it"),
        ({"memory": memory(fits=lambda device: False)}, -1, "does NOT fit NVIDIA H100"),
        (
            {"memory": memory(steady_peak_bytes=3 * 10**9)},
            -1,
            "process), 3.00 GB from the second step on · at the peak",
        ),
        ({"memory": memory(at_peak={}, peak_place="")}, -1, "process) · at the peak: nothing"),
        ({"kernels": [1]}, -1, "(backward) · 3.00 GB by torch.cuda.max_memory_allocated()"),
        ({"hardware": H100.replace(memory_gb=None)}, -1, "memory of the device unknown · at the peak: parameters"),
    ],
)
def test_the_answer_says_what_is_otherwise(changes, line, said):
    assert said in answer(report(**changes))[line]


def timing(kernel_class, seconds):
    return Made(kernel_class=kernel_class, seconds=seconds, is_compute=False)


def test_the_small_print_is_these_lines():
    timings = [timing("a", 0.1), timing("b", 0.1), timing("c", 0.06), timing("d", 0.04), timing("a", 0.1)]
    assert small_print(report(timings=timings, kernels=[kernel(cost())] * 5)) == [
        "power 512 of 700 W on average, 256 J · sustained clocks: 85 % of boost",
        "device time in kernel classes validated on this device 50 %, on other devices 40 %, on none 10 % (d)",
        "ridge point 295 FLOP/B (989.4 TFLOP/s bf16 matrix, 3350 GB/s) · uncounted: none · assumed: nothing",
        "multiply-add = 2 FLOP · attention counted in full · TF32 is on for fp32 matmuls, off for fp32 convolutions"
        " and RNNs",
        "bound by: most of the row's device time; overhead is launch and drain of kernels too small for the device",
        "a note",
        "ran: mine.py --fast · inputs: float32 [8] ×2, int64 [2] · 3 steps of an optimizer · torch 2, x 1 · today",
    ]


def kernel(cost):
    return (None, cost)


def cost(**changes):
    zeros = {"masked_flops": 0, "transcendentals": 0, "macs": 0, "flops": 100, "bytes": 100, "dtype": "bf16"}
    return Made(**{**zeros, **changes})


@pytest.mark.parametrize(
    ("changes", "line", "said"),
    [
        ({"watts": None}, 0, "power unknown (the profile has no limit) · sustained clocks: 85 % of boost"),
        ({"clock": Made(ratio=1, limit_watts=700.0, clocks="burst")}, 0, "256 J · burst clocks: boost"),
        (
            {"energy_dollars": 2.5e-5, "dollars_per_kwh": 0.35}, 0,
            "256 J, $25 of energy for a million runs at $0.35 a kWh · sustained",
        ),
        (
            {"cluster": Made(title="8 × H100"), "communication_seconds": 0.2, "exposed_seconds": 0.05}, 1,
            "communication 200 ms in 0 collectives over 8 × H100, 50 ms of it exposed",
        ),
        (
            {"cluster": Made(title="8 × H100"), "communication_seconds": 0.2, "exposed_seconds": 0.25}, 1,
            "250 ms in which nothing computes, waits for other ranks included",
        ),
        ({"uncertainty": Made(validated=(), transferred=(), extrapolated=())}, 1, "on none 0 %"),
        ({"uncounted": [Made(name="mine", calls=2), Made(name="x", calls=1)]}, 2, "uncounted: mine (2), x (1) ·"),
        ({"assumptions": ("one", "two")}, 2, "uncounted: none"),
        ({"assumptions": ("one", "two")}, 4, "assumed: two"),
        ({"causal": "exact"}, 3, "attention counted where visible · TF32"),
        ({"kernels": [kernel(cost(masked_flops=1))]}, 3, "in full, with masked blocks, which do not run · TF32"),
        ({"switches": Switches(False, True, False)}, 3, "TF32 is off for fp32 matmuls, on for fp32 convolutions"),
    ],
)  # fmt: skip
def test_the_small_print_says_what_is_otherwise(changes, line, said):
    timings = [timing("a", 0.0) for _ in changes.get("kernels", ())]
    found = small_print(report(timings=timings, **changes))[line]
    assert said in found
    assert ("assumed: nothing" in found) == (line == 2 and "assumptions" not in changes)


@pytest.mark.parametrize(
    ("has", "is_compute", "is_said"),
    [
        ({"transcendentals": 1}, True, True),
        ({"transcendentals": 1}, False, False),
        ({"transcendentals": 1, "macs": 1}, True, False),
        ({}, True, False),
        ({"transcendentals": 1, "flops": 14_700}, True, True),  # the ridge is at 295 FLOP/B, half of it at 147.7
        ({"transcendentals": 1, "flops": 14_800}, True, False),
    ],
)
def test_functions_are_said_to_be_compute_where_flops_alone_would_not_make_it_so(has, is_compute, is_said):
    timings = [Made(kernel_class="a", seconds=0.1, is_compute=is_compute)]
    lines = small_print(report(kernels=[kernel(cost(**has))], timings=timings))
    assert any("functions such as exp" in line for line in lines) == is_said


def test_a_report_is_its_head_the_answer_tables_and_the_small_print():
    plain = _laid_out(report(), ["A TABLE"], title="Mine", first=("before",))
    head, above, shown, below = plain.split("\n\n")
    assert head == "Mine\nNet, forward · H100 · bf16 · eager"
    assert above.splitlines() == ["before", *answer(report())]
    assert (shown, below.splitlines()) == ("A TABLE", small_print(report()))
    marked = _laid_out(report(), [], title="Mine", first=("before", "  more"), markdown=True)
    assert marked.startswith("**Mine**\n**Net, forward · H100 · bf16 · eager**\n\n- before\n  more\n- predicted 500 ms")
    assert marked.endswith("- " + small_print(report())[-1])
    assert _laid_out(report(), []).startswith("Net, forward")


# --- tables

ROWS = [Row("element-wise", 2, 4 * 10**9, 3 * 10**9, 10**9, 0.003, "memory", 1.5),
        Row("A.b", 1, 0, 0, 0, 0.0, "overhead")]  # fmt: skip


def test_a_table_has_the_figures_of_each_row_in_units_that_fit():
    text = table(report(flops=8 * 10**9, kernel_seconds=0.004), ROWS, "class")
    _, _, first, second = text.splitlines()
    assert first.split() == ["○", "element-wise", "2", "50.00", "75.0", "4.00", "3.00", "1.00", "1.0", "1.3", "memory"]
    assert second.split() == ["A.b", "1", "0.00", "0.0", "0.00", "0.00", "0.00", "0.0", "0.0", "–"]
    assert [_label(row, indent=True) for row in ROWS] == ["element-wise", "  b"]
    assert "GFLOP" in text.splitlines()[0]
    assert text.splitlines()[0].split()[-2:] == ["bound", "by"]
    assert raw(ROWS[0]) == {
        "name": "element-wise", "calls": 2, "flops": 4 * 10**9, "bytes_read": 3 * 10**9, "bytes_written": 10**9,
        "seconds": 0.003, "joules": 1.5, "regime": "memory",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("read", "written", "unit", "scale"),
    [
        (10**8, 0, "GB", 1e9),
        (10**8 - 1, 0, "MB", 1e6),
        (0, 10**5, "MB", 1e6),
        (99_999, 5, "kB", 1e3),
        (0, 0, "kB", 1e3),
    ],
)
def test_what_is_read_and_written_has_one_unit_by_the_larger_of_both(read, written, unit, scale):
    row = ROWS[0]._replace(bytes_read=read, bytes_written=written)
    fitting = {column.key: _in_fitting_unit(column, [row]) for column in IN_TEXT}
    for key, name in (("bytes_read", "read"), ("bytes_written", "written")):
        assert (fitting[key].heading, fitting[key].scale) == (f"{name} {unit}", scale)
    assert fitting["flops"].heading == "GFLOP"  # of its own unit
    assert fitting["calls"].heading == "calls"


def test_a_row_adds_up_its_kernels_and_is_bound_by_what_takes_most_of_its_time():
    totals = RowTotals()
    for regime, seconds, joules in (("memory", 0.2, 3.0), ("compute", 0.3, 4.0), ("memory", 0.2, 5.0)):
        totals.add(Made(bytes_read=10, bytes_written=1), Made(joules=joules, regime=regime, seconds=seconds))
    totals.flops = 7
    assert totals.row("x", 100.0) == Row("x", 3, 7, 30, 3, pytest.approx(0.7), "memory", pytest.approx(12 + 70))
    assert totals.row("x", None).joules is None
    assert (ROWS[0].intensity, ROWS[0].flop_per_s) == (1.0, pytest.approx(4e12 / 3))
    assert (ROWS[1].intensity, ROWS[1].flop_per_s) == (0.0, 0.0)


def test_a_document_is_the_same_in_each_format():
    columns = [ColumnOf("name", lambda row: row[0], str, "<"), ColumnOf("figure", lambda row: row[1])]
    unknown = ColumnOf("unknown", lambda row: None)
    made = table_of([*columns, unknown], [("a", 1.5), ("bb", None)], hides_unknown=True)
    assert made == Table([Column("name", "<"), Column("figure")], [("a", "1.5"), ("bb", "–")])
    assert len(table_of([unknown], [(1,)]).columns) == 1
    document = Document(
        "mine", "Title", [made], ["one", "two"], {"x": 1}, [{"n": "a", "f": 1.5}, {"n": "b", "f": None}]
    )
    assert document.render() == (
        "Title\n\nname      figure\n------  --------\na            1.5\nbb             –\n\none\ntwo"
    )
    assert document.render("markdown").startswith("**Title**\n\n| name   |   figure |\n")
    assert document.render("markdown").endswith("|\n\n- one\n- two")
    assert document.render("csv") == "n,f\na,1.5\nb,\n"
    assert json.loads(document.render("json")) == {
        "schema_version": 1, "kind": "mine", "title": "Title", "x": 1, "notes": ["one", "two"]
    }  # fmt: skip
    assert for_notebook("a<b", "<table>", ["x&y", "z"]) == (
        "<div><p><b>a&lt;b</b></p><table><p><small>x&amp;y<br>z</small></p></div>"
    )
    assert document._repr_html_().count("<td") == 4
    assert Document("mine", "T", [Table([Column("name")], [])], [], {}, []).render("csv").strip() == ""


# --- what was compiled


def origin(op, result):
    return Origin(op, "element-wise", (("element-wise", 100),), 0, "", None, result)


def compiled(name, kind, read, written, *origins):
    return CompiledKernel(name, kind, (Made(nbytes=read),), (Made(nbytes=written),), origins, 0)


def test_a_graph_is_a_record_of_its_kernels_and_breaks():
    kernels = (
        compiled("fused", "triton", 3000, 1000, origin("exp", 1000), origin("mul", 1000)),
        compiled("mm", "library", 9000, 500, origin("mm", 500)),
    )
    graph = CompiledGraph(0, "f (mine.py:1)", "forward", kernels, (GraphBreak("a call", "mine.py", 7),) * 2, calls=2)
    assert _graph_as_dict(graph) == {
        "function": "f (mine.py:1)", "part": "forward", "calls": 2, "recompiled_because": None,
        "kernels": [
            {"name": "fused", "kind": "triton", "bytes_read": 3000, "bytes_written": 1000, "flops": 200},
            {"name": "mm", "kind": "library", "bytes_read": 9000, "bytes_written": 500, "flops": 100},
        ],
        "breaks": [{"reason": "a call", "file": "mine.py", "line": 7}] * 2,
    }  # fmt: skip


def test_a_speed_up_has_both_ways_in_each_row():
    half = RegionSpeedUp("net, forward", Share(4, 8 * 10**9, 0.2), Share(1, 2 * 10**9, 0.05))
    none = RegionSpeedUp("total", Share(0, 0, 0.1), Share())
    assert (half.factor, half.saved_share, none.factor, none.saved_share) == (pytest.approx(4), 0.75, 1.0, 0.0)
    shown = SpeedUp("mine", (half,), none)
    lines = [line.split() for line in str(shown).splitlines()]
    assert lines[-2] == ["net,", "forward", "4", "1", "8", "2", "75", "200", "50", "4.00x"]
    first, _ = json.loads(shown.render("json"))["regions"]
    assert first == {
        "region": "net, forward", "eager_kernels": 4, "eager_bytes_moved": 8 * 10**9, "eager_seconds": 0.2,
        "compiled_kernels": 1, "compiled_bytes_moved": 2 * 10**9, "compiled_seconds": 0.05,
        "speed_up": pytest.approx(4),
    }  # fmt: skip
