"""scripts/bert_table.py against the digits that the paper prints."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "bert_table.py"
EQUAL_IN_WORDS = (1, 3, 5, 6, 7, 9, 10, 11, 12, 13, 15, 16, 18)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("bert_table", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bert_table"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def report(script):
    return script.meter_encoder_layer("v100-sxm2-16gb")


def shares(script, report, of):
    total = dict.fromkeys(script.PAPER_TABLE_1, 0.0)
    for kernel, timing in zip(report.kernels, report.timings, strict=True):
        total[script.paper_class(kernel)] += of(kernel, timing)
    return {name: 100 * value / sum(total.values()) for name, value in total.items()}


def test_the_shares_of_flops_are_the_papers_to_two_hundredths_of_a_point(script, report):
    by_class = shares(script, report, lambda kernel, _: kernel.cost.flops)
    for name, printed in zip(by_class, (99.80, 0.17, 0.03), strict=True):
        assert by_class[name] == pytest.approx(printed, abs=0.02)


def test_contraction_takes_more_than_half_of_the_time_but_far_less_than_its_share_of_the_flops(script, report):
    by_class = shares(script, report, lambda _, timing: timing.seconds)
    assert 50 <= by_class["tensor contraction"] <= 75
    assert 5e-3 <= report.kernel_seconds <= 15e-3


def test_each_forward_operator_has_the_gflop_that_the_paper_prints(script, report):
    for paper, kernels in script.forward_rows(report):
        gflop = sum(kernel.cost.flops for kernel, _ in kernels) / 1e9
        digits = len(paper.gflop.partition(".")[2])
        assert f"{gflop:.{digits}f}" == paper.gflop, paper.name


def test_words_in_and_out_are_as_printed_where_pytorch_moves_what_the_paper_counts(script, report):
    rows = list(script.forward_rows(report))
    assert len(rows) == 19
    for number in EQUAL_IN_WORDS:
        paper, kernels = rows[number - 1]
        read, written = script.moved_words(kernels)
        assert (f"{read / 1e6:.2f}", f"{written / 1e6:.2f}") == (paper.words_in, paper.words_out), paper.name


def test_every_row_that_differs_says_why(script, report):
    for paper, kernels in script.forward_rows(report):
        read, written = script.moved_words(kernels)
        same = (f"{read / 1e6:.2f}", f"{written / 1e6:.2f}") == (paper.words_in, paper.words_out)
        assert same != bool(paper.remark), paper.name


def test_both_tables_print(script, capsys):
    assert script.main([]) == 0
    assert "tensor contraction" in capsys.readouterr().out
    assert script.main(["--per-op"]) == 0
    assert "Scaled softmax" in capsys.readouterr().out


def test_an_unknown_device_is_one_line_and_exit_code_2(script, capsys):
    assert script.main(["--hardware", "a100"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("bert_table: ")
    assert "a100-sxm4-80gb" in captured.err
    assert captured.out == ""
