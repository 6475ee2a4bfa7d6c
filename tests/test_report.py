"""Rows, totals and formats of a report."""

import csv
import io
import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from flopmeter import EmptyProgramError, FlopMeter, UncountedError, available_hardware
from flopmeter.records import OP_CLASSES
from flopmeter.report.drawers import FORMATS
from flopmeter.report.rows import OUTSIDE


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    def forward(self, x):
        return x + self.layers(self.norm(x))


@pytest.fixture(scope="module")
def report():
    with torch.device("meta"):
        model, x = Mlp(), torch.empty(512, 64)
    with FlopMeter("a100-sxm4-80gb") as meter:
        F.mse_loss(model(x), x).backward()
    return meter.report()


def report_of(program, hardware="a100-sxm4-80gb", **kwargs):
    with FlopMeter(hardware, **kwargs) as meter:
        program()
    return meter.report()


def test_a_linear_layer_costs_its_product_and_its_bias():
    with torch.device("meta"):
        layer, x = nn.Linear(30, 40), torch.empty(20, 30)
    report = report_of(lambda: layer(x))
    assert report.macs == 20 * 30 * 40
    assert report.flops == 2 * 20 * 30 * 40 + 20 * 40
    assert report.bytes_read == 4 * (20 * 30 + 30 * 40 + 40)
    assert report.bytes_written == 4 * 20 * 40
    assert {row.name: row.flops for row in report.rows()} == {
        "tensor contraction": 2 * 20 * 30 * 40,
        "element-wise": 20 * 40,
    }
    assert [(row.name, row.calls) for row in report.rows()] == [("tensor contraction", 1), ("element-wise", 0)]


@pytest.mark.parametrize("by", ["class", "op", "phase", "kernel"])
def test_rows_add_up_to_the_totals(report, by):
    rows = report.rows(by)
    assert sum(row.flops for row in rows) == report.flops
    assert sum(row.bytes_read for row in rows) == report.bytes_read
    assert sum(row.bytes_written for row in rows) == report.bytes_written
    assert sum(row.seconds for row in rows) == pytest.approx(report.kernel_seconds)
    assert sum(row.calls for row in rows) == len(report.kernels)


def test_outermost_modules_add_up_to_the_totals_and_parents_hold_their_children(report):
    outermost = report.rows("module", depth=1)
    assert [row.name for row in outermost] == ["Mlp", OUTSIDE]
    assert sum(row.flops for row in outermost) == report.flops
    flops = {row.name: row.flops for row in report.rows("module")}
    own = flops["Mlp"] - flops["Mlp.norm"] - flops["Mlp.layers"]
    residual = 512 * 64  # the input needs no gradient, so nothing is added in backward
    assert own == residual
    assert flops["Mlp.layers"] == sum(flops[f"Mlp.layers.{i}"] for i in range(3))


def test_classes_come_in_the_order_of_the_table(report):
    names = [row.name for row in report.rows("class")]
    assert names == sorted(names, key=OP_CLASSES.index)


def test_module_rows_list_parents_before_children(report):
    names = [row.name for row in report.rows("module")]
    assert names.index("Mlp") < names.index("Mlp.layers") < names.index("Mlp.layers.2")


def test_recomputation_counts_as_executed_but_not_as_model_flops():
    with torch.device("meta"):
        model, x = Mlp(), torch.empty(512, 64, requires_grad=True)
    plain = report_of(lambda: model(x).backward(torch.empty_like(x)))
    model.zero_grad()
    x.grad = None
    again = report_of(lambda: checkpoint(model, x, use_reentrant=False).backward(torch.empty_like(x)))
    forward = next(row.flops for row in plain.rows("phase") if row.name == "forward")
    recomputed = next(row.flops for row in again.rows("phase") if row.name == "recompute")
    assert again.model_flops == plain.flops
    assert again.flops == plain.flops + recomputed
    # torch's checkpoint stops once it has all that backward reads: the input of the last product.
    last_product, its_bias, residual = 2 * 512 * 256 * 64, 512 * 64, 512 * 64
    assert forward - recomputed == last_product + its_bias + residual


def test_causal_attention_is_counted_in_full_unless_asked_for_exactly():
    q = torch.empty(1, 8, 1024, 64, dtype=torch.float16, device="meta")
    square = 4 * 8 * 1024 * 1024 * 64
    visible = 4 * 8 * (1024 * 1025 // 2) * 64
    full = report_of(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    exact = report_of(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), causal="exact")
    assert (full.flops, exact.flops) == (square, visible)
    assert full.executed_flops == exact.executed_flops == visible


def test_flash_backward_recomputes_one_product_of_five():
    q = torch.empty(1, 8, 256, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    report = report_of(lambda: F.scaled_dot_product_attention(q, q, q).backward(q.detach()))
    product = 2 * 8 * 256 * 256 * 64
    attention = next(row for row in report.rows() if row.name == "attention (fused)")
    assert attention.flops == (2 + 5) * product
    assert report.flops - report.model_flops == product


def test_a_causal_mask_hides_as_much_of_what_flash_backward_recomputes_as_of_the_rest():
    q = torch.empty(1, 8, 256, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    report = report_of(
        lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True).backward(q.detach()), causal="exact"
    )
    product = 2 * 8 * (256 * 257 // 2) * 64
    attention = next(row for row in report.rows() if row.name == "attention (fused)")
    assert attention.flops == (2 + 5) * product
    assert report.flops - report.model_flops == product


def test_an_op_without_a_rule_is_a_row_with_its_bytes_and_never_silently_zero():
    library = torch.library.Library("flopmeter_test", "FRAGMENT")
    library.define("mystery(Tensor x) -> Tensor")
    library.impl("mystery", lambda x: torch.empty_like(x), "Meta")
    x = torch.empty(100, device="meta")
    report = report_of(lambda: torch.ops.flopmeter_test.mystery(x))
    (row,) = report.uncounted
    assert (row.name, row.calls, row.flops) == ("flopmeter_test::mystery", 1, 0)
    assert (row.bytes_read, row.bytes_written) == (400, 400)
    assert "uncounted: flopmeter_test::mystery (1)" in report.render("text")
    with pytest.raises(UncountedError, match=r"flopmeter_test\.mystery.*register_cost"):
        report_of(lambda: torch.ops.flopmeter_test.mystery(x), strict=True)


def test_the_run_is_as_long_as_the_longer_of_host_and_device(report):
    assert report.seconds >= report.kernel_seconds
    assert report.seconds >= report.launch_seconds
    assert report.seconds <= report.kernel_seconds + report.launch_seconds
    assert report.seconds_low < report.seconds < report.seconds_high


def test_the_shares_of_the_regimes_add_up_to_the_wall_clock(report):
    assert sum(report.seconds_by_regime.values()) == pytest.approx(report.seconds)
    assert report.seconds_by_regime[report.regime] == max(report.seconds_by_regime.values())


def test_mfu_is_the_share_of_the_peak_that_the_models_flops_use():
    half = torch.empty(4096, 4096, dtype=torch.float16, device="meta")
    report = report_of(lambda: half @ half)
    assert report.mfu == pytest.approx(2 * 4096**3 / 312e12 / report.seconds)
    assert report.mfu == report.hfu


def test_an_empty_program_is_an_error_that_says_what_to_do():
    with pytest.raises(EmptyProgramError, match=r"ran no op of torch inside `with meter:`.*run it there"):
        report_of(lambda: None)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_names_each_class(report, name):
    text = report.render(name)
    for row in report.rows():
        assert row.name in text


def test_json_holds_the_totals_unrounded(report):
    values = json.loads(report.render("json"))
    assert values["totals"]["flops"] == report.flops
    assert values["totals"]["seconds"] == report.seconds
    assert values["schema_version"] == 1
    assert [row["name"] for row in values["rows"]["class"]] == [row.name for row in report.rows()]


def test_csv_holds_one_line_a_class_in_si_units(report):
    rows = list(csv.DictReader(io.StringIO(report.render("csv"))))
    assert [int(row["flops"]) for row in rows] == [row.flops for row in report.rows()]
    assert [float(row["seconds"]) for row in rows] == [row.seconds for row in report.rows()]


def test_text_prints_the_answer_then_the_table_then_what_they_rest_on(report):
    text = report.render("text")
    head, answer, table, small_print = text.split("\n\n")
    assert head == "Mlp, forward + backward · NVIDIA A100-SXM4-80GB · fp32 · eager"
    time, regime, memory, where_to_win, *_ = answer.splitlines()
    assert time.startswith("predicted ")
    assert "-bound · of the wall-clock: " in regime
    assert memory.startswith("fits NVIDIA A100-SXM4-80GB: ")
    assert where_to_win.startswith("where to win (wall-clock;")
    assert table.startswith("class ")
    assert "ridge point 10 FLOP/B (19.5 TFLOP/s fp32 vector, 2039 GB/s)" in small_print
    assert "multiply-add = 2 FLOP" in small_print
    assert str(report) == text


def test_markdown_nests_where_to_win_in_one_list(report):
    answer = report.render("markdown").split("\n\n")[1].splitlines()
    assert [line[:2] for line in answer[:4]] == ["- "] * 4
    assert answer[4].startswith(("  1. ", "  furthest above"))


def test_the_headline_counts_modules_of_one_class():
    with FlopMeter("a100-sxm4-80gb") as meter:
        for _ in range(3):
            torch.nn.Linear(8, 8, device="meta")(torch.empty(4, 8, device="meta"))
        torch.nn.ReLU()(torch.empty(4, 8, device="meta"))
    assert meter.report().headline.startswith("Linear ×3, ReLU, forward · ")


def test_a_module_that_hardly_takes_time_is_not_in_the_headline_and_inputs_that_are_alike_are_counted():
    model, loss = torch.nn.Linear(4096, 4096, device="meta"), torch.nn.MSELoss()
    x, *targets = (torch.empty(4096, 4096, device="meta") for _ in range(3))
    few = torch.empty(8, device="meta")
    with FlopMeter("a100-sxm4-80gb") as meter:
        y = model(x)
        loss(few, few)
        for target in targets:
            y = y + target
    report = meter.report()
    assert report.headline.startswith("Linear, forward · ")
    assert "inputs: float32 [4096, 4096] ×3, float32 [8] · " in report.ran.line
    assert len(report.ran.inputs) == 4


def test_a_note_says_how_many_bytes_the_program_moves_on_the_cpu():
    x = torch.empty(1024, 1024, device="meta")
    with FlopMeter("a100-sxm4-80gb") as meter:
        y = torch.zeros(1024, 1024)  # written: 4 MiB
        y.mul_(2.0)  # read and written
        x + y.sum()  # read, and 4 bytes written
    (note,) = (note for note in meter.report().notes if "computes on the CPU too" in note)
    assert note.endswith("reads and writes 0.0168 GB, most of it in mul_: that takes no time in the prediction")


def test_the_switches_decide_the_unit_and_are_printed():
    x = torch.empty(4096, 4096, device="meta")
    fp32 = report_of(lambda: x @ x)
    assert "TF32 is off for fp32 matmuls" in fp32.render()
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        tf32 = report_of(lambda: x @ x)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert (fp32.main_dtype, tf32.main_dtype) == ("fp32", "tf32")
    assert tf32.seconds < fp32.seconds / 4
    assert "TF32 is on for fp32 matmuls" in tf32.render()


def test_a_report_can_be_read_while_the_program_runs():
    x = torch.empty(8, 8, device="meta")
    with FlopMeter() as meter:
        _ = x @ x
        during = meter.report().flops
        _ = x @ x
    assert (during, meter.report().flops) == (2 * 8**3, 4 * 8**3)


def test_unknown_formats_groupings_modes_and_conventions_are_named_with_the_known_ones(report):
    with pytest.raises(ValueError, match="unknown format 'pdf'; known: text, markdown, csv, json, html"):
        report.render("pdf")
    with pytest.raises(ValueError, match="unknown grouping 'layer'; known: class, op, module, phase, kernel"):
        report.rows("layer")
    with pytest.raises(ValueError, match="unknown causal convention 'half'; known: full, exact"):
        FlopMeter(causal="half")
    meter = FlopMeter()
    with pytest.raises(RuntimeError, match="inside `with meter:` first"):
        meter.report()
    with meter:
        _ = torch.ones(2, device="meta") + 1
    with pytest.raises(ValueError, match="unknown mode 'fast'; known: eager, compiled, cudagraph, eager-cudagraph"):
        meter.report(mode="fast")


@pytest.mark.parametrize("name", available_hardware())
def test_every_profile_prices_an_encoder_layer_in_a_type_that_it_has(name):
    with torch.device("meta"):
        model, x = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), torch.empty(2, 16, 64)
    report = report_of(lambda: model(x).backward(x), name)
    assert report.seconds > 0
    assert report.regime == "overhead"


def test_sparse_operands_are_uncounted_with_the_bytes_that_they_hold():
    """Of two sparse matrices: how many values meet depends on where they are."""
    sparse = torch.eye(4).to_sparse()
    report = report_of(lambda: torch.mm(sparse, sparse))
    (row,) = report.uncounted
    values, indices = 4 * 4, 8 * 2 * 4
    assert (row.name, row.flops) == ("mm", 0)
    assert (row.bytes_read, row.bytes_written) == (values + indices, values + indices)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["/x/bin/flopmeter", "run", "a b.py"], "flopmeter run 'a b.py'"),
        (["/x/flopmeter/__main__.py", "run"], "python -m flopmeter run"),
        (["-c"], "python"),
    ],
)
def test_a_report_says_how_the_process_was_started(argv, told, monkeypatch):
    monkeypatch.setattr("sys.argv", argv)
    with FlopMeter() as meter:
        torch.empty(4, device="meta").sin()
    assert f"ran: {told} · " in meter.report().ran.line
