"""One program whose report is compared, cell by cell, with arithmetic by hand."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter
from flopmeter.report.figures import modules_to_depth
from flopmeter.report.formats import answer, small_print
from flopmeter.report.quantities import (
    counted,
    decimal,
    duration,
    figure,
    in_gb,
    in_ms,
    percent,
    percent_of,
    scale,
    tick,
    with_prefix,
)
from flopmeter.report.report import Report
from flopmeter.report.winning import where_to_win

H100 = "h100-sxm5-80gb"
N = 4096
MATRIX = 2 * N**2  # bytes in bf16

# Of each op: its class, FLOPs, bytes read and written. One number is taken off a sum for the one that it begins with.
BY_HAND = {
    "mul": ("element-wise", N**2, MATRIX, MATRIX),
    "mm": ("tensor contraction", 2 * N**3, 2 * MATRIX, MATRIX),
    "sum": ("reduction", N**2 - 1, MATRIX, 2),
    "cat": ("data movement", 0, 5 * MATRIX, 5 * MATRIX),
}


@pytest.fixture(scope="module")
def report() -> Report:
    with torch.device("meta"):
        layer = nn.Linear(N, N, bias=False, dtype=torch.bfloat16)
        x, *others = (torch.empty(N, N, dtype=torch.bfloat16) for _ in range(5))
    with FlopMeter(H100, dollars_per_kwh=0.2) as meter, torch.no_grad():
        y = layer(x * 2.0)
        y.sum()
        torch.cat([y, *others])
    return meter.report()


def test_each_op_has_its_figures_and_the_longest_comes_first(report: Report) -> None:
    found = {row.name: (row.calls, row.flops, row.bytes_read, row.bytes_written) for row in report.rows("op")}
    expected = {name: (1, *figures) for name, (_, *figures) in BY_HAND.items()}
    assert found == {**expected, "sum": (1, pytest.approx(N**2, abs=1), *expected["sum"][2:])}
    seconds = [row.seconds for row in report.rows("op")]
    assert seconds == sorted(seconds, reverse=True)
    assert [row.name for row in report.rows("op")][:2] == ["mm", "cat"]  # which do not begin


def test_a_kernel_is_told_by_its_class_and_the_first_four_shapes_that_it_reads(report: Report) -> None:
    names = [row.name for row in report.rows("kernel")]
    assert names[:2] == [
        "mm (tensor contraction) [4096,4096] [4096,4096] bf16",
        "cat (data movement) [4096,4096] [4096,4096] [4096,4096] [4096,4096] … bf16",
    ]


def test_the_printed_table_has_the_figures_by_hand_in_its_units(report: Report) -> None:
    """Rounded to as many digits as are printed."""
    lines = str(report).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("class "))
    heads = ["% FLOPs", "% time", "GFLOP", "read GB", "written GB", "FLOP/B", "TFLOP/s", "bound by"]
    assert [head for head in heads if head in lines[first]] == heads
    flops = 2 * N**3 + 2 * N**2
    shares = 0.0
    for op_class, work, read, written in BY_HAND.values():
        (line,) = [line for line in lines[first + 2 : first + 6] if op_class in line]
        calls, of_flops, of_time, gflop, read_gb, written_gb, intensity, rate = map(float, line.split()[-9:-1])
        assert calls == 1
        assert of_flops == pytest.approx(100 * work / flops, abs=0.0051)
        assert (gflop, read_gb, written_gb) == pytest.approx((work / 1e9, read / 1e9, written / 1e9), abs=0.0051)
        assert intensity == pytest.approx(work / (read + written), abs=0.051)
        shares += of_time
        seconds = of_time / 100 * report.kernel_seconds
        assert rate == pytest.approx(work / seconds / 1e12, rel=0.01, abs=0.051)
    assert shares == pytest.approx(100, abs=0.21)


def test_the_answer_above_the_table_follows_from_the_totals(report: Report) -> None:
    flops, answer = 2 * N**3 + 2 * N**2, str(report)
    assert report.kernel_seconds == pytest.approx(sum(row.seconds for row in report.rows("op")))
    assert f"{flops / report.seconds / 1e12:.1f} TFLOP/s, MFU {100 * flops / 989.4e12 / report.seconds:.1f} %" in answer
    # x, its double, the weight and the result of the product, the other four, and all five joined
    assert "at the peak: parameters 33.6 MB" in answer
    assert report.peak_memory_bytes == pytest.approx((2 + 1 + 1 + 4 + 5) * MATRIX, rel=0.16)
    dollars = 1e6 * 0.2 * report.joules / 3.6e6
    assert f"{report.joules / report.seconds:.0f} of 700 W on average" in answer
    assert f"${dollars:.3g} of energy for a million runs at $0.2 a kWh" in answer
    low, high = report.seconds_low, report.seconds_high
    assert low < report.seconds < high


def test_json_has_the_same_rows_and_totals(report: Report) -> None:
    said = json.loads(report.render("json"))
    assert said["totals"]["flops"] == pytest.approx(2 * N**3 + 2 * N**2, abs=1)
    assert said["totals"]["bytes_read"] == (1 + 2 + 1 + 5) * MATRIX
    assert said["totals"]["bytes_written"] == (1 + 1 + 5) * MATRIX + 2
    switches = {"matmul_tf32": False, "cudnn_tf32": True}
    conventions = said["conventions"]
    assert {"flops_per_multiply_add": 2, "causal": "full", **switches}.items() <= conventions.items()
    assert (said["schema_version"], said["hardware"], said["mode"], said["uncounted"]) == (1, H100, "eager", [])
    assert said["memory"].keys() == {"steady_peak_bytes", "allocated_bytes", "bytes_at_peak"}
    ops = {row["name"]: row for row in said["rows"]["op"]}
    assert {name: row["bytes_written"] for name, row in ops.items()} == {
        name: written for name, (*_, written) in BY_HAND.items()
    }


def test_the_page_has_each_line_of_the_answer_and_of_the_small_print(report: Report) -> None:
    page = html.unescape(report.render("html"))
    for line in (*answer(report), *small_print(report)):
        assert line in page


def test_depths_are_those_of_modules(report: Report) -> None:
    with pytest.raises(ValueError, match="depth is how deep rows"):
        report.rows("op", depth=1)


def test_attention_that_counts_where_it_is_visible_is_told_so() -> None:
    q = torch.empty(1, 4, 512, 64, dtype=torch.bfloat16, device="meta")
    with FlopMeter(H100, causal="exact") as meter:
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    found = meter.report()
    assert "attention counted where visible" in str(found)
    assert found.visible_mfu == found.mfu > 0
    whole = replace(found, causal="full")
    assert whole.visible_mfu == pytest.approx(found.mfu)
    # Of 512 x 512 scores the lower triangle, as far as the kernel's tiles hide the rest.
    assert 0.5 < whole.visible_mfu / whole.mfu < 0.8
    assert "with masked blocks" not in str(meter.report())


@pytest.mark.parametrize("is_causal", [True, False])
def test_masked_blocks_are_said_to_be_counted_where_there_are_some(is_causal: bool) -> None:
    q = torch.empty(1, 4, 512, 64, dtype=torch.bfloat16, device="meta")
    with FlopMeter(H100) as meter:
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=is_causal)
    assert "attention counted in full" in str(meter.report())
    assert ("with masked blocks, which do not run" in str(meter.report())) == is_causal


def test_what_other_streams_do_counts_where_the_computing_one_has_a_gap(report: Report) -> None:
    """The computing stream runs from 0 to 4 s and from 10 to 14 s. Of what a second one does from 2 to 8 s the
    wall-clock shows 4 s, of a third one's 6 to 9 s the last; from 9 to 10 s the device waits."""
    runs = [(0, 0.0, 4.0, "compute"), (1, 2.0, 6.0, "memory"), (2, 6.0, 3.0, "memory"), (0, 10.0, 4.0, "compute")]
    timings = [
        timing._replace(
            stream=stream, start_seconds=start, work_seconds=seconds, floor_seconds=0.0, few_flops=False,
            compute_seconds=seconds * (bound == "compute"), memory_seconds=seconds * (bound == "memory"),
        )
        for timing, (stream, start, seconds, bound) in zip(report.timings, runs, strict=True)
    ]  # fmt: skip
    found = replace(report, timings=timings, host_seconds=0.0)
    assert found.seconds_by_regime == pytest.approx({"compute": 8.0, "memory": 5.0, "overhead": 1.0})
    assert found.idle_seconds == pytest.approx(1.0)


def test_no_more_than_five_lines_say_where_to_win() -> None:
    """Of a layer that one change makes faster and whose six kinds of kernels are above their floors."""
    with torch.device("meta"):
        model = nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, dtype=torch.bfloat16)
        x = torch.empty(8, 512, 1024, dtype=torch.bfloat16)
    with FlopMeter(H100) as meter:
        model(x).sum().backward()
    shown = where_to_win(meter.report())
    assert shown is not None
    assert len(shown.advice) >= 1
    assert len(shown.rest) >= 1
    assert len(shown.advice) + len(shown.rest) == 5


def test_the_table_of_a_speed_up_has_both_ways_side_by_side() -> None:
    """Three passes over a gigabyte, each of which reads and writes it, or one."""
    x = torch.empty(2**28, device="meta")
    with FlopMeter(H100) as meter:
        x.exp().exp().exp()
    report = meter.report()
    (line,) = [line for line in str(report.speed_up()).splitlines() if line.startswith("total")]
    kernels, fused, moved, then, saved, before, after = map(float, line.split()[1:8])
    assert (kernels, fused, saved) == (3, 1, 67)
    assert (moved, then) == pytest.approx((6 * 4 * 2**28 / 1e9, 2 * 4 * 2**28 / 1e9), rel=0.005)
    assert before == pytest.approx(1e3 * report.seconds, rel=0.02)
    assert float(line.split()[8].removesuffix("x")) == pytest.approx(before / after, rel=0.01)
    *_, total = json.loads(report.speed_up().render("json"))["regions"]
    names = ("kernels", "bytes_moved", "seconds")
    eager, compiled = ([total[f"{way}_{name}"] for name in names] for way in ("eager", "compiled"))
    assert eager == [3, 6 * 4 * 2**28, pytest.approx(1e-3 * before, rel=0.005)]
    assert compiled == [1, 2 * 4 * 2**28, pytest.approx(1e-3 * after, rel=0.005)]
    assert total["speed_up"] == pytest.approx(eager[2] / compiled[2])


def test_modules_are_listed_below_their_parents_also_where_a_later_one_runs_in_between() -> None:
    """`a.second` runs after `b`, and stands below `a` all the same."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.ModuleDict({"first": nn.ReLU(), "second": nn.ReLU()})
            self.b = nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            second: torch.Tensor = self.a["second"](self.b(self.a["first"](x)))
            return second

    with FlopMeter(H100) as meter:
        Model()(torch.empty(8, device="meta"))
    found = meter.report()
    rows = found.rows("module")
    names = [row.name for row in rows]
    assert names == ["Model", "Model.a", "Model.a.first", "Model.a.second", "Model.b"]
    assert modules_to_depth(found, 5) == (rows, None)
    assert modules_to_depth(found, 4) == ([rows[0], rows[1], rows[4]], 2)
    assert modules_to_depth(found, 2) == ([rows[0]], 1)


def test_a_report_says_when_it_was_made(report: Report) -> None:
    made = datetime.strptime(report.ran.date, "%Y-%m-%d %H:%M UTC").replace(tzinfo=UTC)
    assert timedelta(0) <= datetime.now(UTC) - made < timedelta(hours=1)
    assert report.ran.line.endswith(report.ran.date)


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (duration(0.9996), "1 s"),
        (duration(0.9994), "999 ms"),
        (duration(9.996e-4), "1 ms"),
        (duration(12.34), "12.3 s"),
        (duration(123.4e-6), "123 µs"),
        (with_prefix(999, "B"), "999 B"),
        (with_prefix(1000, "B"), "1.00 kB"),
        (with_prefix(2e12, "B/s"), "2.00 TB/s"),
        (with_prefix(3e18, "FLOP"), "3.00 EFLOP"),
        (with_prefix(3.8e25, "FLOP"), "38.0 YFLOP"),
        (with_prefix(4e21, "FLOP"), "4.00 ZFLOP"),
        (with_prefix(3e-9, "J"), "3.00 nJ"),
        (with_prefix(4e-12, "J"), "0.00400 nJ"),
        (decimal(0.004), "<0.01"),
        (decimal(0), "0"),
        (decimal(-3), "-3.00"),
        (decimal(0.01), "0.01"),
        (decimal(2e6), "2.00e+06"),
        (figure(1234.5), "1234"),
        (figure(99.96), "100"),
        (figure(0.12345), "0.123"),
        (figure(None), "–"),
        (tick(10_000), "10 k"),
        (tick(0.1), "0.1"),
        (counted(1, "read"), "1 read"),
        (counted(2, "pass", "passes"), "2 passes"),
        (in_gb(2.5e9), "2.5"),
        (in_gb(None), "–"),
        (in_ms(0.00123), "1.23"),
        (percent_of(1, 0), 0),
        (percent(0.125, 1), "12.5"),
        (scale([1, 2e6], "B"), (1e6, "MB")),
        (scale([], "B"), (1.0, "B")),
    ],
)
def test_quantities_are_written_in_three_digits_of_a_unit_that_fits(written: object, expected: object) -> None:
    assert written == expected
