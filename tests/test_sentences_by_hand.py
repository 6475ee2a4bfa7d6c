"""Sentences and small tables of a report, of records that are given: what they say is computed by hand."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter
from flopmeter.cli.explain import explain
from flopmeter.cli.progress import Progress
from flopmeter.records import CompiledGraph, CompiledKernel, GraphBreak, Origin, Region
from flopmeter.report.compilation import explained, in_short
from flopmeter.report.ran import Ran, _started_as, _steps
from flopmeter.report.winning import cautions, in_lines, where_to_win
from flopmeter.report.wins import WAITS, WHOLE, Advice, HotSpot


def kernel(name: str, kind: Any, read: int, written: int, *origins: Origin) -> CompiledKernel:
    return CompiledKernel(name, kind, (Region(None, read),), (Region(None, written),), origins, read + written)


def origin(op: str, source: str | None, nbytes: int, flops: int = 0, *, again: bool = False) -> Origin:
    by_class = (("element-wise", flops),) if flops else ()
    return Origin(op, "element-wise", by_class, 0, "", source, nbytes, again)


BREAKS = (
    GraphBreak("print called Explanation: Dynamo does not know it. Hint: move it", "a.py", 3),
    GraphBreak("print called Explanation: Dynamo does not know it. Hint: move it", "a.py", 3),
    GraphBreak("a branch on data Hint: none", "a.py", 9),
)
KERNELS = (
    kernel("triton_a", "triton", 4000, 2000, origin("exp", "a.py:1", 3000, 30), origin("mul", None, 2000, 20)),
    kernel("mm", "library", 9000, 1000, origin("mm", "a.py:4", 1500)),
    kernel(
        "triton_b", "triton", 100, 500, origin("sin", "a.py:6", 600, 70, again=True), origin("cos", "a.py:7", 400, 9)
    ),
    *(kernel(f"small_{number}", "triton", 10 - number, 0) for number in range(3)),
)
GRAPHS = (
    CompiledGraph(0, "f (a.py:1)", "forward", KERNELS, BREAKS[:1], saved_bytes=2500, calls=3),
    CompiledGraph(1, "g (b.py:1)", "inference", KERNELS[1:2], BREAKS[1:], "L['x'] is 4 User stack trace: a", calls=2),
    CompiledGraph(2, "f (a.py:1)", "backward", KERNELS[:1], (), "its forward was compiled again", calls=1),
    CompiledGraph(3, "h (c.py:1)", "inference", KERNELS, BREAKS[2:], "never ran"),
)  # fmt: skip


def test_a_summary_counts_graphs_that_ran_their_calls_and_kernels_and_names_each_break_once():
    """3 x 5 kernels of inductor's in the first graph, 1 in the third; one of a library 3 and 2 times."""
    assert list(in_short(GRAPHS)) == [
        "compiled graphs: 3 in 6 calls · kernels: 16 triton, 5 library · graph breaks: 4 · recompiled: 1",
        "graph break at a.py:3 (2 times): print called",
        "graph break at a.py:9 (2 times): a branch on data",
        "recompiled g (b.py:1): L['x'] is 4",
    ]
    assert list(in_short(GRAPHS[3:])) == []
    assert len(list(in_short((GRAPHS[1], GRAPHS[1])))) == 1 + 2 + 2
    _, long = in_short((CompiledGraph(0, "f", "forward", (), (), "word " * 99, calls=1),))
    assert long.endswith(" ...")
    assert len(long.removeprefix("recompiled f: ")) <= 200


def test_an_account_of_a_compiled_graph_has_its_five_largest_kernels_and_what_stays_inside():
    """The kernels move 6,000, 10,000, 600, 10, 9 and 8 bytes. Of results of 5,000 and 1,000 bytes inductor's kernels
    write 2,000 and 500; the rest would be written and read once more. A product's results are its own."""
    first, *others = explained(SimpleNamespace(graphs=GRAPHS)).split("\n\n")[1:]  # type: ignore[arg-type]
    lines = [" ".join(line.split()) for line in first.splitlines()]
    assert lines[:3] == [
        "graph 0, forward of f (a.py:1): 6 kernels, called 3 times",
        "moves 16.6 kB a call; as kernels of their own its 5 ops would move about 23.6 kB"
        " · recomputed for the backward pass: 70 FLOP",
        "keeps 2.50 kB for the backward pass",
    ]
    assert lines[5:] == [
        "mm library 1 9.00 kB 1.00 kB a.py:4",
        "triton_a triton 2 4.00 kB 2.00 kB a.py:1",
        "triton_b triton 2 100 B 500 B a.py:7",
        "small_0 triton 0 10 B 0 B",
        "small_1 triton 0 9 B 0 B",
    ]
    assert [each.partition(" of ")[0] for each in others] == ["graph 1, inference", "graph 2, backward"]
    assert not any("keeps" in each for each in others)
    with pytest.raises(ValueError, match="nothing was compiled"):
        explained(SimpleNamespace(graphs=GRAPHS[3:]))  # type: ignore[arg-type]


def test_what_ran_names_six_inputs_and_counts_those_alike_and_the_rest():
    inputs = ("a", "b", "a", "c", "d", "e", "f", "g", "g", "h")
    ran = Ran("train.py", inputs, 1, "t4", {"torch": "2", "profile": "abc"}, "today")
    assert ran.line == "ran: train.py · inputs: a ×2, b, c, d, e, f, 3 more · torch 2, profile abc · today"
    assert "inputs: a ×2, b, c, d, e, f · torch" in ran._replace(inputs=inputs[:7]).line
    few = ran._replace(inputs=(), steps=2)
    assert "inputs: none · 2 steps of an optimizer · torch 2" in few.line
    assert (ran.flat()["inputs"], ran.flat()["versions"]) == ("; ".join(inputs), "torch 2; profile abc")
    assert ran.as_dict()["inputs"] == list(inputs)


def test_inputs_are_the_tensors_of_data_in_order_and_no_weights():
    layer = nn.Linear(4, 4, device="meta")
    x, y = torch.empty(8, 4, device="meta"), torch.empty(8, 4, dtype=torch.float64, device="meta")
    with FlopMeter("t4") as meter:
        layer(x) + y + x
    assert meter.report().ran.inputs == ("float32 [8, 4]", "float64 [8, 4]")


def test_a_step_is_what_an_optimizer_does_after_a_backward_pass_in_however_many_ops():
    phases = [
        "forward",
        "backward",
        "backward",
        "optimizer",
        "optimizer",
        "forward",
        "optimizer",
        "backward",
        "optimizer",
    ]
    assert _steps(SimpleNamespace(ops=[SimpleNamespace(phase=each) for each in phases])) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["/home/me/train.py", "--name", "two words"], "train.py --name 'two words'"),
        (["/lib/mine/__main__.py", "-x"], "python -m mine -x"),
        (["-c", "secret"], "python"),
        (["-"], "python"),
        ([""], "python"),
        ([], "python"),
    ],
)
def test_a_program_is_named_as_it_was_started(argv, said, monkeypatch):
    monkeypatch.setattr("sys.argv", argv)
    assert _started_as() == said


def advice(where: str, now: float, then: float, places: tuple[str, ...] = ()) -> Advice:
    return Advice("mm", where, now, 0.5 * then, "too wide", "narrow it", then, 10 - now + then, False, places)


def spot(where: str, over: float, *places: str, why: str = "few tiles") -> HotSpot:
    return HotSpot("sum", where, over + 1, 1.0, why, places)


def report(spots: list[HotSpot], found: list[Advice], **facts: Any) -> Any:
    said = {
        "timings": [1], "seconds": 10.0, "advice": found, "hot_spots": spots, "in_mode": print, "regime": "memory",
        "caution": "", "later_step_seconds": None, "uncounted": [],
    }  # fmt: skip
    return SimpleNamespace(**said | facts)


def test_a_hot_spot_is_told_if_no_advice_is_about_it_and_it_takes_enough():
    spots = [
        spot("a", 2.0, "sum a"),  # the module of an advice
        spot("b", 2.0, "sum b", "mm c"),  # one of its kernels is in no advice
        spot("c", 2.0, "mm c"),
        spot("d", 2.0, "sum d", why=WAITS),
        spot("e", 0.001, "sum e"),
    ]
    found = [advice("a", 4.0, 2.0, ("mm c", "mm d")), advice(WHOLE, 2.0, 1.0)]
    shown = where_to_win(report(spots, found))
    assert shown is not None
    assert [line.partition(",")[0] for line in shown.rest] == ["sum in b"]
    assert shown.rest == ["sum in b, 3 s over a floor of 1 s: few tiles"]
    assert shown.advice[0].gain == "10 s to 8 s, 1.25x (wins 2 s)"
    assert shown.advice[0].about == "mm in a, 4 s over a floor of 1 s: too wide"
    assert shown.rest_heading.endswith("with no remedy of its own:")
    alone = where_to_win(report(spots, found[:1]))
    assert alone is not None
    assert [line.partition(",")[0] for line in alone.rest] == ["sum in b", "sum in d"]


def test_five_lines_are_shown_and_advice_comes_before_hot_spots():
    found = [advice(f"m{number}", 4.0, 2.0) for number in range(7)]
    spots = [spot(f"s{number}", 2.0, f"sum s{number}") for number in range(7)]
    for count in (0, 2, 7):
        shown = where_to_win(report(spots, found[:count]))
        assert shown is not None
        assert (len(shown.advice), len(shown.rest)) == (min(count, 5), 5 - min(count, 5))
    lines = in_lines(where_to_win(report(spots[:1], found[:2])))
    assert [line.strip().partition(" ")[0] for line in lines] == ["where", "1.", "mm", "2.", "mm", "furthest", "-"]
    assert in_lines(None) == []


@pytest.mark.parametrize(
    ("floors", "facts", "said"),
    [
        (3, {}, "memory-bound but above that of the device: no change"),
        (3, {"regime": "compute"}, "compute-bound but above that of the device: no change"),
        (7, {}, "near its floor, its bytes at the datasheet's bandwidth: no change"),
        (7, {"regime": "compute"}, "near its floor, its FLOPs at the datasheet's peak: no change"),
        (3, {"regime": "overhead"}, "near its floor, the launches of its kernels: no change"),
        (3, {"in_mode": None}, "where time is lost (no change is priced for one rank of several): its FLOPs"),
    ],
)
def test_a_run_without_advice_is_near_the_floor_that_its_kernels_reach(floors, facts, said):
    """Each spot has a floor of a second, of 10."""
    shown = where_to_win(report([spot("a", 0.0, "sum a")] * floors, [], **facts))
    assert shown is not None
    assert said in shown.heading
    assert f"take {floors} s, {floors * 10} % of the wall-clock" in shown.heading
    assert (shown.rest, shown.rest_heading) == ([], "furthest above it:")
    assert where_to_win(report([], [], timings=[])) is None
    assert where_to_win(report([], [], seconds=0.0)) is None


def test_a_first_step_is_told_apart_from_a_later_one_that_is_faster_by_what_counts():
    assert cautions(report([], [])) == []
    assert cautions(report([], [], later_step_seconds=9.999)) == []
    both = cautions(report([], [], later_step_seconds=5.0, caution="unsure"))
    assert both[0] == "unsure"
    assert "a later one takes 5 s" in both[1]


EXAMPLES = {  # FLOPs and bytes by hand: of halves; places are int64
    "aten.mm": (2 * 256**3, 2 * 2 * 256**2, 2 * 256**2),
    "aten.add.Tensor": (256**2, 2 * 2 * 256**2, 2 * 256**2),
    "cat": (0, 2 * 2 * 256**2, 2 * 2 * 256**2),
    "aten::bmm": (2 * 8 * 256**3, 2 * 2 * 8 * 256**2, 2 * 8 * 256**2),
    "embedding": (0, 8 * 128 * (8 + 2 * 1024), 2 * 8 * 128 * 1024),
    "index_select": (0, 128 * (8 + 2 * 1024), 2 * 128 * 1024),
    "convolution": (2 * 8 * 64 * 56**2 * 64 * 9, 2 * (8 * 64 * 56**2 + 64 * 64 * 9), 2 * 8 * 64 * 56**2),
}


@pytest.mark.parametrize("op", EXAMPLES)
def test_an_op_is_explained_by_an_example_with_the_figures_by_hand(op):
    flops, read, written = EXAMPLES[op]
    _, _, example = explain(op).rpartition("\nexample\n")
    assert f"bytes  {read:,} read, {written:,} written; {flops / (read + written):.3g} FLOP/B" in example
    assert f"FLOP   {flops:,} " in example
    assert ("multiply-adds" in example) == (op in ("aten.mm", "aten::bmm", "convolution"))
    if "multiply-adds" in example:
        assert f"({flops // 2:,} multiply-adds)" in example


def test_products_of_new_types_are_explained_by_an_example():
    """[256, 512] x [512, 128] in fp8, with two scales; and tokens of eight experts, with where they end."""
    example = explain("aten._scaled_mm").rpartition("\nexample\n")[2]
    assert "tensor contraction + 32,768 element-wise (16,777,216 multiply-adds), in fp8" in example
    assert f"bytes  {(256 + 128) * 512 + 2 * 4:,} read, {2 * 256 * 128:,} written" in example
    example = explain("aten._grouped_mm").rpartition("\nexample\n")[2]
    assert "(16,777,216 multiply-adds), in bf16" in example
    assert f"bytes  {2 * (256 * 512 + 8 * 512 * 128) + 8 * 4:,} read, {2 * 256 * 128:,} written" in example


def test_kernels_of_an_op_that_launches_several_are_numbered():
    """baddbmm copies its addend first: a reader who saw the first figures alone would take it for all."""
    example = explain("baddbmm").rpartition("\nexample\n")[2]
    copy, product = example.split("kernel 1 of 2:")[1].split("kernel 2 of 2:")
    assert "FLOP   0 data movement" in copy
    assert f"FLOP   {8 * 2 * 256**3:,} tensor contraction" in product
    assert "kernel" not in explain("mm").rpartition("\nexample\n")[2]


def test_an_op_is_explained_with_its_types_shapes_and_what_it_is():
    assert "  mm([256, 256] float16, [256, 256] float16) -> [256, 256]\n" in explain("mm")
    assert "embedding([32000, 1024] float16, [8, 128] int64) -> [8, 128, 1024]" in explain("embedding")
    assert "native_layer_norm([512, 1024] float16, [1024]" in explain("native_layer_norm")
    assert "stack([256, 256] float16, [256, 256] float16) -> [2, 256, 256]" in explain("stack")
    sums = 4 * 8 * 16 * 512  # of each row, in fp32, for a backward pass
    seeds = 2 * 8  # of dropout: a seed and an offset
    assert f"{2 * 8 * 16 * 512 * 64 + sums + seeds:,} written" in explain("_scaled_dot_product_efficient_attention")
    assert "integer operations, for where each element lies" in explain("roll")
    assert "integer operations" not in explain("mm")
    assert "launches nothing" in explain("aten.t")
    assert "a view by its schema" in explain("aten.select.int")
    assert "a composite: PyTorch runs other ops" in explain("aten.linear")
    assert "add.Tensor(" in explain("add")
    assert "add.Scalar(" in explain("add.Scalar")
    # Five products in each of 8 x 16 heads, of 32 queries, 32 keys and 32 numbers: fewer dimensions fit no attention.
    backward = explain("_scaled_dot_product_flash_attention_backward")
    assert f"({5 * 8 * 16 * 32**3:,} multiply-adds)" in backward


def test_a_command_that_takes_long_says_which_step_it_is_at_and_clears_its_line(monkeypatch):
    written: list[str] = []
    terminal = SimpleNamespace(isatty=lambda: True, write=written.append, flush=lambda: None)
    monkeypatch.setattr("flopmeter.cli.progress.sys.stderr", terminal)
    monkeypatch.setattr("flopmeter.cli.progress.PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr("flopmeter.cli.progress.TICK_SECONDS", 0.05)
    with Progress("compare") as progress:
        for step in progress.over(["a", "b"]):
            wanted = f"compare: {1 if step == 'a' else 2} of 2 · 0 s"
            ends = time.monotonic() + 5
            while not any(wanted in line for line in written) and time.monotonic() < ends:
                time.sleep(0.01)
            assert any(wanted in line for line in written)
        written.clear()
        while not any("compare · 0 s" in line for line in written) and time.monotonic() < ends:
            time.sleep(0.01)
    assert "\r\x1b[Kcompare · 0 s" in written
    assert written[-1] == "\r\x1b[K"
