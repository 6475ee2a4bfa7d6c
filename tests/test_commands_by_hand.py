"""Tables of commands whose input is given: what they print, by hand."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from flopmeter import load_hardware
from flopmeter.cli import command, main
from flopmeter.cli.difference import COSTS, ReportFileError, difference, read_report
from flopmeter.cli.hardware_table import in_full, overview, ridge_dtype
from flopmeter.cli.prices import load_prices
from flopmeter.cli.training import optimizer_choice
from flopmeter.device.hardware import HardwareError

TOTALS = dict.fromkeys(COSTS, 0) | {"seconds": 0.002, "flops": 4_000_000_000, "peak_memory_bytes": 10**9}
BEFORE = {
    "schema_version": 1, "title": "mine", "hardware": "t4", "mode": "eager", "conventions": {"causal": "full"},
    "ran": {"program": "a.py", "inputs": "x"}, "totals": TOTALS,
    "rows": {"class": [{"name": "sorting", "seconds": 0.001}, {"name": "random", "seconds": 0.0005}]},
}  # fmt: skip
AFTER = BEFORE | {
    "title": "yours", "mode": "compiled", "ran": {"program": "b.py", "inputs": "x"},
    "totals": TOTALS | {"seconds": 0.0025, "peak_memory_bytes": 5 * 10**8, "bytes_read": 3 * 10**9},
    "rows": {"class": [{"name": "sorting", "seconds": 0.0011}, {"name": "indexing", "seconds": 0.0007}]},
}  # fmt: skip


def test_a_difference_has_each_total_in_its_unit_and_its_growth() -> None:
    found = difference(BEFORE, AFTER)
    totals = {change.name: change for change in found.totals}
    assert (totals["seconds"].before, totals["seconds"].after) == pytest.approx((2.0, 2.5))
    assert totals["seconds"].growth == pytest.approx(0.25)
    assert (totals["flops"].unit, totals["flops"].before, totals["flops"].growth) == ("GFLOP", 4.0, 0.0)
    assert totals["peak_memory_bytes"].growth == -0.5
    assert totals.keys() == TOTALS.keys() >= {"flops", "model_flops", "executed_flops", "kernel_seconds"}
    assert {change.unit for name, change in totals.items() if "flops" in name} == {"GFLOP"}
    assert {change.unit for name, change in totals.items() if "bytes" in name} == {"GB"}
    assert {change.unit for name, change in totals.items() if "seconds" in name} == {"ms"}
    assert totals["bytes_read"].growth == float("inf")
    assert totals["bytes_written"].growth == 0.0
    assert [change.name for change in found.grown(0.25)] == ["bytes_read"]
    assert {change.name for change in found.grown(0.24)} == {"seconds", "bytes_read"}


def test_a_difference_has_classes_of_either_report_and_says_what_is_not_the_same() -> None:
    found = difference(BEFORE, AFTER)
    assert [(change.name, change.before, change.after) for change in found.classes] == [
        ("sorting", 1.0, pytest.approx(1.1)), ("random", 0.5, 0.0), ("indexing", 0.0, pytest.approx(0.7))
    ]  # fmt: skip
    assert found.title == "mine  →  yours"
    assert difference(BEFORE, BEFORE).title == "mine"
    assert found.notes == ("not the same mode: eager before, compiled after", "program: a.py before, b.py after")
    lines = {" ".join(line.split()) for line in found.render().splitlines()}
    assert {"seconds 2 2.5 ms +25.0", "random 0.5 0 ms -100.0", "flops 4 4 GFLOP +0.0"} <= lines
    records = {each["name"]: each["growth"] for each in json.loads(found.render("json"))["changes"]}
    assert (records["bytes_read"], records["peak_memory_bytes"]) == (None, -0.5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 2}, "has schema version 2, not 1: write it again"),
        ({"totals": {"seconds": 1.0}}, "lacks the totals kernel_seconds, launch_seconds"),
        ({"totals": TOTALS | {"flops": "many"}}, "lacks the totals flops"),
        *(({name: None}, "is no report: write one with") for name in ("rows", "totals", "hardware", "mode", "title")),
    ],
)
def test_a_file_that_is_no_report_is_one_error(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({name: value for name, value in {**BEFORE, **changes}.items() if value is not None}))
    with pytest.raises(ReportFileError, match=message):
        read_report(str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "is no report"),
        ('"totals"', "is no report"),
        ("{", "is no JSON .*: write a report with"),
        (None, "No such"),
    ],
)
def test_a_file_that_holds_something_else_or_is_not_there_is_one_error(
    text: str | None, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "report.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ReportFileError, match=message):
        read_report(str(path))


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps(AFTER, ensure_ascii=False), encoding="utf-8")
    assert read_report(str(path)) == AFTER


def test_a_report_that_does_not_say_what_ran_is_compared_too() -> None:
    before = {name: value for name, value in BEFORE.items() if name != "ran"}
    assert difference(before, BEFORE).notes == ("program: None before, a.py after", "inputs: None before, x after")
    assert difference(before, before).notes == ()


def test_a_line_of_the_hardware_table_has_the_datasheets_figures() -> None:
    """A T4 has no bf16 of its own, no tf32 and no fp8; its ridge point is 65 TFLOP/s in fp16 over 320 GB/s."""
    t4 = dataclasses.replace(load_hardware("t4"), unverified=("tdp_w", "l2_cache_mb"))
    header, _, row, *_ = overview([t4, load_hardware("h100-sxm5-80gb")]).splitlines()
    ends = {name: header.index(name) + len(name) for name in header.split()[1:]}
    cells = {name: row[:end].split()[-1] if row[end - 1].strip() else "" for name, end in ends.items()}
    expected = {
        "year": "2018", "fp64": "0.254", "fp32": "8.1", "tf32": "", "bf16": "~2.2", "fp16": "65", "fp8": "",
        "int8": "130", "GB": "15.9", "GB/s": "320", "W": "70", "ridge": "203", "?": "2",
    }  # fmt: skip
    assert {name: cells[name] for name in expected} == expected


def test_a_device_in_full_marks_what_is_unverified_and_what_lies_below() -> None:
    t4 = dataclasses.replace(load_hardware("t4"), unverified=("tdp_w", "matrix_tflop_per_s.int8", "check"))
    lines = [line.split() for line in in_full(t4).splitlines()]
    marked = {line[0] for line in lines if line[-1] == "unverified"}
    assert {"tdp_w", "matrix_tflop_per_s.int8", "check.memory.bus_bits"} <= marked
    assert not marked & {"tdp", "matrix_tflop_per_s.fp16", "memory_gb"}
    assert ["memory_bandwidth_gb_per_s", "320"] in lines
    assert ["compute_capability", "7,", "5"] in lines


def test_stated_prices_go_before_those_of_files_and_each_is_named(tmp_path: Path) -> None:
    listed = tmp_path / "prices.yaml"
    listed.write_text("date: 2026-11-21\ndollars_per_hour: {t4: 0.35, l4: 0.7, Tesla V100-SXM2-16GB: 1.5}\n")
    found = load_prices([f"{listed}", "l4=0.8,h100-sxm5-80gb=0"], ["l4", "t4", "h100-sxm5-80gb"])
    assert found.dollars_per_hour == {"t4": 0.35, "l4": 0.8, "h100-sxm5-80gb": 0.0}
    assert found.source == f"prices: {listed} (2026-11-21), l4 $0.8/h as given, h100-sxm5-80gb $0/h as given"
    assert load_prices([], ["l4"]).source == ""
    for entry, message in (("l4=-1", "dollars per hour for l4"), ("l4=nan", "dollars per hour"), ("l4=x", "got 'x'")):
        with pytest.raises(HardwareError, match=message):
            load_prices([entry], ["l4"])
    with pytest.raises(ValueError, match="l4 has a price already"):
        load_prices(["l4=1", "l4=2"], ["l4"])
    with pytest.raises(ValueError, match="name t4 there or leave it out"):
        load_prices(["t4=1"], ["l4"])


def test_the_prices_of_two_files_are_known_together_and_the_later_one_goes_before(tmp_path: Path) -> None:
    for name, listed in (("a", "{t4: 0.35, l4: 0.7}"), ("b", "{l4: 0.6, l40s: 0.9}")):
        (tmp_path / name).write_text(f"date: 2026-11-21\ndollars_per_hour: {listed}\n")
    found = load_prices([str(tmp_path / "a"), str(tmp_path / "b")], ["l4", "t4", "l40s"])
    assert found.dollars_per_hour == {"t4": 0.35, "l4": 0.6, "l40s": 0.9}


@pytest.mark.parametrize(
    ("read", "taken", "refused"),
    [
        (command.positive, (1e-9, 1.0, 1e9), ("0", "-1", "inf", "nan", "x")),
        (command.seconds, (0.0, 1e-9, 1e9), ("-1", "inf", "nan", "x")),
        (command.dollars, (0.0, 1e-9, 1e9), ("-1", "inf", "nan", "x")),
        (command.share, (0.0, 0.5, 1.0), ("-0.1", "1.1", "inf", "nan", "x")),
    ],
)
def test_a_figure_of_an_option_lies_in_its_range_and_is_finite(
    read: Any, taken: tuple[float, ...], refused: tuple[str, ...]
) -> None:
    assert tuple(read(str(value)) for value in taken) == taken
    for text in refused:
        with pytest.raises(argparse.ArgumentTypeError, match=f"not '{text}'"):
            read(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("adamw,lr=-1", "AdamW does not take lr=-1: Invalid learning rate"),
        ("adamw,lr=fast", "AdamW does not take lr=fast: "),
        ("sgd,nesterov=true", "SGD does not take nesterov=true: Nesterov momentum requires"),
        ("adamw,fused=true,foreach=true", "AdamW does not take fused=true,foreach=true: "),
        ("sgd,momentun=0.9", "SGD has no setting 'momentun=0.9'; write KEY=VALUE, with KEY momentum"),
    ],
)
def test_what_an_optimizer_refuses_is_told_in_torchs_words(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimizer_choice(text)


@pytest.mark.parametrize(
    ("name", "dtype"), [("h100-sxm5-80gb", "bf16"), ("v100-sxm2-16gb", "fp16"), ("p100-pcie-16gb", "fp32")]
)
def test_the_ridge_point_is_that_of_bf16_else_of_fp16_where_there_are_matrix_units(name: str, dtype: str) -> None:
    assert ridge_dtype(load_hardware(name)) == dtype


TARGET = """
import torch
from torch import nn

import flopmeter

class Attends(nn.Module):
    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

class Picks(nn.Module):
    def forward(self, x):
        return x[x > 0] * 2

class Fails(nn.Module):
    def forward(self, x):
        raise ValueError

class Asks(nn.Module):
    def forward(self, x):
        return x * int(x.sum())

class Doubts(nn.Module):
    def forward(self, x):
        raise flopmeter.HardwareError("no such device")

def asks():
    return Asks(), (torch.empty(1, device="meta"),)

def doubts():
    return Doubts(), (torch.empty(1),)

def idle():
    return nn.Identity(), (torch.empty(1),)

def attends():
    return Attends(), (torch.empty(1, 1, 4, 16, dtype=torch.bfloat16),)

def picks():
    return Picks(), (torch.empty(1000, device="meta"),)

def fails():
    return Fails(), (torch.empty(1),)
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(TARGET)
    return path


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["table", *arguments, "--hardware", "h100-sxm5-80gb", "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_the_command_counts_attention_in_full_or_where_it_is_visible(target: Path, capsys: Any) -> None:
    """Four tokens see ten of sixteen pairs, each of which takes two products of depth 16."""
    found = {how: printed(capsys, f"{target}:attends", "--causal", how) for how in ("full", "exact")}
    assert {how: each["totals"]["flops"] for how, each in found.items()} == {"full": 4 * 16 * 16, "exact": 4 * 16 * 10}


def test_the_command_takes_a_share_of_a_mask_that_nobody_knows(target: Path, capsys: Any) -> None:
    """A quarter of 1,000 numbers is multiplied."""
    found = printed(capsys, f"{target}:picks", "--mask-fraction", "0.25")
    (product,) = [row for row in found["rows"]["op"] if row["name"] == "mul"]
    assert (product["flops"], product["bytes_written"]) == (250, 1000)
    assert any("0.25" in assumed for assumed in found["assumptions"])


def test_an_error_without_a_message_is_told_with_its_place(target: Path, capsys: Any) -> None:
    assert main(["table", f"{target}:fails"]) != 0
    assert "raised ValueError: without a message (mine.py:17)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "said"),
    [("asks", "mine.py:21 is data-dependent"), ("doubts", "no such device"), ("idle", "no op")],
)
def test_an_error_that_says_itself_what_to_do_is_told_in_its_own_words(
    name: str, said: str, target: Path, capsys: Any
) -> None:
    assert main(["table", f"{target}:{name}"]) != 0
    told = capsys.readouterr().err
    assert said in told
    assert "raised" not in told
