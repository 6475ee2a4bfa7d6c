"""What a check of a profile says of rows that are given: its sums, shares and lines, by hand."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

import pytest

from flopmeter import load_hardware
from flopmeter.measured.result import NO_KERNEL, Check, CheckRow, UnpricedRow
from flopmeter.records import CONTRACTION, MOVEMENT

# On a T4 in fp16: 65 TFLOP/s and 320 GB/s.
ROWS = (
    CheckRow("mm", "[64,64] [64,64]", CONTRACTION, "fp16", 2, 0.004, 0.003, 0.001, 13 * 10**10, 128 * 10**6),
    CheckRow("bmm", "[2,64,64]", CONTRACTION, "fp16", 3, 0.002, 0.003, 0.0005, 13 * 10**9, 64 * 10**6),
    CheckRow("copy_", "[64]", MOVEMENT, "fp32", 1, 0.001, 0.0015, 0.002, 0, 32 * 10**7),
    CheckRow("view", "[64]", NO_KERNEL, "fp32", 9),
)
UNPRICED = (
    UnpricedRow("aten::mine", 4, 0.0005, "unknown shapes", True),
    UnpricedRow("nccl:all", 1, 0.002, "ranks are not told", False),
)
FACTS: dict[str, Any] = {
    "title": "a step", "hardware": load_hardware("t4"), "is_cuda": True, "clocks": "burst", "rows": ROWS,
    "unpriced": UNPRICED, "span_seconds": 0.016, "busy_seconds": 0.012, "host_seconds": 0.01, "mfu": 0.125,
    "main_dtype": "fp16", "notes": ("a note",), "alone_measured_seconds": 0.007, "alone_predicted_seconds": 0.0075,
}  # fmt: skip


def check(**changes: Any) -> Check:
    return Check(**{**FACTS, **changes})


def test_the_figures_of_a_check_are_sums_and_shares_of_its_rows() -> None:
    found = check()
    assert found.measured_seconds == pytest.approx(0.0095)
    assert found.predicted_seconds == pytest.approx(0.0075)
    assert found.priced_share == pytest.approx(7 / 7.5)  # a collective is none of PyTorch's own ops
    assert found.weighted_error == pytest.approx((1 + 1 + 0.5) / 7)
    assert found.idle_share == pytest.approx(0.25)
    assert [row.to_win_seconds for row in ROWS] == pytest.approx([0.003, 0.0015, 0, 0])
    assert (ROWS[0].flop_per_s, ROWS[0].bytes_per_s) == pytest.approx((32.5e12, 32e9))
    assert (ROWS[3].flop_per_s, ROWS[3].bytes_per_s) == (0, 0)
    empty = check(rows=(), unpriced=(), span_seconds=0.0)
    assert (empty.priced_share, empty.weighted_error, empty.idle_share, empty.measured_seconds) == (0, 0, 0, 0)
    assert check(rows=()).priced_share == 0


def test_a_class_has_the_sums_of_its_rows_and_classes_stand_in_one_order() -> None:
    first, *others = check(rows=ROWS[::-1]).by_class()
    assert first[:6] == (CONTRACTION, "", CONTRACTION, "", 5, pytest.approx(0.006))
    assert first[6:10] == (pytest.approx(0.006), pytest.approx(0.0015), 143 * 10**9, 192 * 10**6)
    assert [row.name for row in others] == [MOVEMENT, NO_KERNEL]


def cells(text: str, name: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return line.removeprefix(name).split()


def test_each_line_of_the_tables_has_its_figures_by_hand() -> None:
    text = str(check())
    # Half of the peak; 32 of 320 GB/s.
    assert cells(text, "mm ") == ["2", "4", "3", "1", "3", "32500", "50.0", "32", "10", "[64,64]", "[64,64]", "fp16"]
    assert cells(text, "copy_ ") == ["1", "1", "1.5", "2", "0", "0", "0.0", "320", "100", "[64]", "fp32"]
    assert cells(text, CONTRACTION)[:5] == ["5", "6", "6", "1.5", "4.5"]
    assert cells(text, "all ")[:4] == ["15", "7", "7.5", "3.5"]
    assert cells(text, "aten::mine") == ["4", "0.5", "unknown", "shapes"]
    assert cells(text, "nccl:all") == ["1", "2", "ranks", "are", "not", "told"]


def test_the_line_below_the_tables_says_where_the_time_went() -> None:
    on_gpu, on_cpu = str(check()), str(check(is_cuda=False))
    assert "measured 16 ms from the first to the last event · device busy 12 ms, device idle 25 %" in on_gpu
    assert "host in ops 10 ms · MFU 12.5 % · predicted for the ops 7.5 ms · of the time of aten ops 93 %" in on_gpu
    assert "in ops 12 ms, between ops (Python, autograd) 25 % · MFU" in on_cpu
    assert on_gpu.endswith("a note")


def test_what_ran_beside_another_stream_is_told_apart_from_the_rest() -> None:
    assert "another stream" not in str(check())
    beside = str(check(alone_measured_seconds=0.005, alone_predicted_seconds=0.004))
    assert "of these 2 ms, predicted 3.5, ran while another stream ran something" in beside
    assert "5 ms, predicted 4, ran alone" in beside


def test_twenty_rows_are_shown_and_the_rest_is_added_up() -> None:
    rows = tuple(ROWS[0]._replace(name=f"op{number:02}") for number in range(23))
    unpriced = tuple(UNPRICED[0]._replace(name=f"no{number:02}") for number in range(21))
    text = str(check(rows=rows, unpriced=unpriced))
    assert ("op19" in text, "op20" in text, "no19" in text, "no20" in text) == (True, False, True, False)
    assert "3 more kinds of calls, 12 ms: the formats csv and json hold all" in text
    assert "1 more ops without a prediction, 0.5 ms" in text
    shown = str(check(rows=rows[:20], unpriced=()))
    assert " more " not in shown
    assert "not predicted" not in shown.partition("measured 16 ms")[0]


def test_csv_and_json_have_each_row_and_the_reason_of_those_without_a_prediction() -> None:
    said = json.loads(check().render("json"))
    assert (said["kind"], said["hardware"], said["clocks"], said["main_dtype"]) == ("check", "t4", "burst", "fp16")
    assert [row["name"] for row in said["ops"]] == ["mm", "bmm", "copy_", "view"]
    assert said["ops"][0] == {
        "name": "mm", "shapes": "[64,64] [64,64]", "op_class": CONTRACTION, "dtype": "fp16", "calls": 2,
        "measured_seconds": 0.004, "predicted_seconds": 0.003, "floor_seconds": 0.001, "flops": 13 * 10**10,
        "bytes": 128 * 10**6, "kernel_class": "", "to_win_seconds": 0.003, "flop_per_s": 32.5e12, "bytes_per_s": 32e9,
    }  # fmt: skip
    assert said["unpriced"][1] == {
        "name": "nccl:all", "calls": 1, "measured_seconds": 0.002, "reason": "ranks are not told"
    }  # fmt: skip
    assert said["priced_share"] == pytest.approx(7 / 7.5)
    rows = list(csv.DictReader(io.StringIO(check().render("csv"))))
    assert [(row["name"], row["reason"]) for row in rows[2:]] == [
        ("copy_", ""), ("view", ""), ("aten::mine", "unknown shapes"), ("nccl:all", "ranks are not told")
    ]  # fmt: skip
    only = list(csv.DictReader(io.StringIO(check(rows=()).render("csv"))))
    assert [row["measured_seconds"] for row in only] == ["0.0005", "0.002"]
