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
    for kernel, seconds in script.as_in_2020(report):
        total[script.paper_class(kernel)] += of(kernel, seconds)
    return {name: 100 * value / sum(total.values()) for name, value in total.items()}


def test_the_shares_of_flops_are_the_papers_to_two_hundredths_of_a_point(script, report):
    by_class = shares(script, report, lambda kernel, _: kernel.cost.flops)
    for name, printed in zip(by_class, (99.80, 0.17, 0.03), strict=True):
        assert by_class[name] == pytest.approx(printed, abs=0.02)


def test_the_shares_of_time_are_the_papers_to_five_points(script, report):
    by_class = shares(script, report, lambda _, seconds: seconds)
    for name, printed in zip(by_class, (61.0, 25.5, 13.5), strict=True):
        assert by_class[name] == pytest.approx(printed, abs=5)


def test_the_whole_layer_takes_what_the_paper_measured_to_a_fifth(script, report):
    assert sum(seconds for _, seconds in script.as_in_2020(report)) == pytest.approx(9.14e-3, rel=0.2)


def test_element_wise_and_normalization_rows_take_what_the_paper_measured_to_a_third(script, report):
    for paper, kernels in script.forward_rows(report):
        if kernels[0][0].cost.op_class != "tensor contraction":
            predicted = sum(seconds for _, seconds in kernels) * 1e6
            assert 1 / 1.35 <= predicted / paper.microseconds <= 1.35, paper.name


def test_todays_layer_norm_is_faster_than_that_of_2020(script, report):
    """One kernel that reads a row twice, where there were two that went through all rows."""
    pairs = zip(script.as_in_2020(report), report.timings, strict=True)
    norms = [(then, now.seconds) for (kernel, then), now in pairs if "layer_norm" in kernel.cost.name]
    assert len(norms) == 4
    assert all(1.15 * now < then for then, now in norms)


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
