"""Laws of any report: of its sums, of two programs one after the other, and of what each format says."""

from __future__ import annotations

import csv
import io
import json
from typing import get_args

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter
from flopmeter.report.formats import grouped
from flopmeter.report.rows import By

T4, H100 = "t4", "h100-sxm5-80gb"
GROUPINGS = get_args(By)


def mlp():
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)), torch.empty(4096, 256)
    return lambda: model(x).sum().backward()


def large_copies():
    x = torch.empty(2**24, device="meta")
    return lambda: [x.clone() for _ in range(3)]


def small_kernels():
    x = torch.empty(100, device="meta")
    return lambda: [x.neg() for _ in range(5)]


def report_of(*programs, device=H100, mode="eager"):
    with FlopMeter(device) as meter:
        for program in programs:
            program()
    return meter.report(mode=mode)


@pytest.mark.parametrize("mode", ["eager", "compiled", "cudagraph", "eager-cudagraph"])
@pytest.mark.parametrize("make", [mlp, large_copies, small_kernels])
def test_the_shares_of_the_wall_clock_and_the_rows_of_each_grouping_are_the_whole(make, mode):
    report = report_of(make(), mode=mode)
    assert sum(report.seconds_by_regime.values()) == pytest.approx(report.seconds)
    assert all(share >= 0 for share in report.seconds_by_regime.values())
    assert report.seconds_by_regime[report.regime] == max(report.seconds_by_regime.values())
    for by in {*GROUPINGS} - {"module"}:  # of which each is in those around it
        rows = report.rows(by)
        assert sum(row.calls for row in rows) == len(report.kernels)
        assert sum(row.flops for row in rows) == report.flops, by
        assert sum(row.bytes_read + row.bytes_written for row in rows) == report.bytes_read + report.bytes_written
        assert sum(row.seconds for row in rows) == pytest.approx(report.kernel_seconds)
        assert sum(row.joules for row in rows) == pytest.approx(report.joules)


def test_two_programs_one_after_the_other_do_the_work_of_both():
    one, other, both = report_of(mlp()), report_of(small_kernels()), report_of(mlp(), small_kernels())
    for name in ("flops", "bytes_read", "bytes_written", "macs", "executed_flops", "model_flops"):
        assert getattr(both, name) == getattr(one, name) + getattr(other, name), name


@pytest.mark.parametrize(
    ("products", "dtype"),
    [
        ([("bfloat16", 512), ("float32", 1024)], "fp32"), ([("bfloat16", 1024), ("float32", 512)], "bf16"),
        ([("float16", 512), ("bfloat16", 768), ("float16", 768)], "fp16"), ([], "fp32"),
    ],
)  # fmt: skip
def test_the_main_type_is_that_of_most_multiply_adds(products, dtype):
    """Squares of 512, 768 and 1,024: 0.13, 0.45 and 1.07 G."""

    def program():
        torch.empty(10, device="meta").neg()
        for name, side in products:
            square = torch.empty(side, side, dtype=getattr(torch, name), device="meta")
            square @ square

    assert report_of(program).main_dtype == dtype


def test_each_format_says_the_rows_of_the_grouping_with_the_same_figures():
    report = report_of(mlp(), device=T4)
    for by in GROUPINGS:
        rows = report.rows(by)
        text, markdown = grouped(report, "text", by), grouped(report, "markdown", by)
        listed = list(csv.DictReader(io.StringIO(grouped(report, "csv", by))))
        held = json.loads(grouped(report, "json"))["rows"].get(by, listed)
        assert (
            [int(each["flops"]) for each in listed]
            == [int(each["flops"]) for each in held]
            == [row.flops for row in rows]
        )
        assert [float(each["seconds"]) for each in listed] == pytest.approx([row.seconds for row in rows])
        for row in rows:
            name = row.name.rpartition(".")[2] if by == "module" else row.name
            assert name in text
            assert f"| {name}" in markdown or name in markdown


def test_a_title_and_first_lines_stand_above_the_tables_in_text_and_markdown():
    report = report_of(small_kernels(), device=T4)
    for format in ("text", "markdown"):
        said = grouped(report, format, title="A title", first=["the first line", "the second line"])
        assert said.index("A title") < said.index("the first line") < said.index("the second line")
        assert said.index("the second line") < said.index("element-wise")
