"""Whatever a report holds, every format shows it, and what machines read comes back as it was."""

import csv
import html.parser
import io
import json

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flopmeter import available_hardware, load_hardware
from flopmeter.launch.modes import ALL_MODES
from flopmeter.records import (
    OP_CLASSES,
    Call,
    Cost,
    FormulaWork,
    Kernel,
    Launches,
    Op,
    Region,
    Switches,
    TensorSpec,
    Timing,
    Trace,
    VectorWork,
)
from flopmeter.report.drawers import FORMATS
from flopmeter.report.report import Report
from flopmeter.timing.peak_memory import memory_of

COUNTS = st.one_of(st.just(0), st.integers(0, 2**20), st.integers(0, 2**100))
SECONDS = st.one_of(st.just(0.0), st.floats(1e-9, 1e6))
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SHAPES = st.lists(st.integers(0, 2**62), max_size=4).map(tuple)
FUNCS = st.sampled_from([torch.ops.aten.mm.default, torch.ops.aten.sin.default, torch.ops.prims.iota.default])
PHASES = st.sampled_from(["forward", "backward", "recompute", "optimizer"])
KERNEL_CLASSES = st.one_of(st.sampled_from([*OP_CLASSES, "product, bf16", "fused"]), TEXTS)


@st.composite
def kernels(draw):
    spec = TensorSpec(draw(SHAPES), (), torch.float32, 0, 0, "meta")
    op = Op(Call(draw(FUNCS), (), {}, (spec,), (spec,)), (0,), draw(TEXTS), draw(PHASES), draw(st.none() | TEXTS))
    parts = draw(st.lists(st.tuples(st.sampled_from(OP_CLASSES), COUNTS), min_size=1, max_size=3))
    macs = draw(COUNTS)
    cost = Cost(
        name=draw(TEXTS), op_class=parts[0][0], flops_by_class=tuple(parts), reads=(Region(None, draw(COUNTS)),),
        writes=(Region(None, draw(COUNTS)),), dtype=draw(st.sampled_from(["fp32", "bf16"])),
        work=FormulaWork(macs),
    )  # fmt: skip
    return Kernel((op,), cost, draw(st.integers(0, 9)), draw(st.integers(0, 9)))


@st.composite
def timelines(draw, length, is_cpu):
    """The host sends kernels one after another, and the device runs each when it is free; a CPU runs them itself."""
    timings, enqueued, free = [], 0.0, 0.0
    for _ in range(length):
        compute, memory, floor, step = (draw(SECONDS) for _ in range(4))
        enqueued += step
        start = max(enqueued, free)
        timing = Timing(
            compute, memory, max(compute, memory), floor, start - free, start, draw(KERNEL_CLASSES), enqueued
        )
        timings.append(timing)
        free = timing.end_seconds
        if is_cpu:
            enqueued = free
    return timings


@st.composite
def reports(draw):
    run = draw(st.lists(kernels(), max_size=6))
    hardware = load_hardware(draw(st.sampled_from(WITH_BF16)))
    return Report(
        launches=Launches(run, [None] * len(run), draw(st.sampled_from(ALL_MODES))),
        timings=draw(timelines(len(run), hardware.is_cpu)),
        hardware=hardware,
        switches=Switches(draw(st.booleans()), draw(st.booleans()), draw(st.booleans())),
        host_seconds=draw(SECONDS),
        memory=memory_of(Trace()),
        causal=draw(st.sampled_from(["full", "exact"])),
        assumptions=tuple(draw(st.lists(TEXTS, max_size=2))),
        notes=tuple(draw(st.lists(TEXTS, max_size=2))),
    )


WITH_BF16 = [name for name in available_hardware() if "bf16" in load_hardware(name).matrix_tflop_per_s]


DOCUMENT = {"html", "head", "meta", "title", "link", "style", "body", "main", "header", "section", "script"}
TEXT = {"h1", "h2", "h3", "p", "b", "dl", "dt", "dd", "div", "span", "figure", "figcaption", "ul", "ol", "li", "i"}
TABLE = {"table", "thead", "tbody", "tr", "th", "td"}
PICTURE = {"svg", "defs", "pattern", "rect", "path", "g", "use", "text", "title"}


class Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text, self.scripts = set(), [], 0

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.scripts += tag == "script"

    def handle_data(self, data):
        self.text.append(data)


@settings(max_examples=150)
@given(reports())
def test_every_format_shows_every_report(report):
    for format in FORMATS:
        assert report.render(format)


@settings(max_examples=100)
@given(reports())
def test_csv_comes_back_as_the_rows(report):
    rows = list(csv.DictReader(io.StringIO(report.render("csv"), newline="")))
    assert len(rows) == len(report.rows())
    for row, original in zip(rows, report.rows(), strict=True):
        assert row["name"] == original.name
        assert [int(row[key]) for key in ("calls", "flops", "bytes_read", "bytes_written")] == list(original[1:5])
        assert float(row["seconds"]) == original.seconds


@settings(max_examples=100)
@given(reports())
def test_json_comes_back_with_its_numbers_and_texts(report):
    document = json.loads(report.render("json"), parse_constant=lambda name: 1 / 0)  # no NaN, no Infinity
    assert document["totals"]["flops"] == report.flops
    assert document["totals"]["seconds"] == report.seconds
    assert document["assumptions"] == list(report.assumptions)
    for by in ("class", "op", "module", "phase"):
        assert [row["name"] for row in document["rows"][by]] == [row.name for row in report.rows(by)]
        assert [row["flops"] for row in document["rows"][by]] == [row.flops for row in report.rows(by)]


@settings(max_examples=100)
@given(reports())
def test_no_name_becomes_markup_in_html(report):
    page = Page()
    page.feed(report.render("html"))
    assert page.tags <= DOCUMENT | TEXT | TABLE | PICTURE


def test_a_name_that_is_markup_is_shown_as_it_is():
    op = Op(Call(torch.ops.aten.sin.default, (), {}, (), ()), (), "<script>.&amp;", "forward", None)
    cost = Cost(
        "<b>", "element-wise", (("element-wise", 1),), (Region(None, 1),), (Region(None, 1),), "fp32", VectorWork()
    )
    report = Report(
        launches=Launches([Kernel((op,), cost, 0, 1)], [None], ALL_MODES[0]),
        timings=[Timing(1.0, 1.0, 1.0, 0.0, 0.0, 0.0, "element-wise", 0.0)],
        hardware=load_hardware("a100-sxm4-80gb"),
        switches=Switches(False, False, False),
        host_seconds=0.0,
        memory=memory_of(Trace()),
    )
    page = Page()
    page.feed(report.render("html"))
    assert page.scripts == 1  # the page's own
    assert any("<b>" in text for text in page.text)
    assert any("<script>" in text for text in page.text)


@settings(max_examples=30)
@given(reports())
def test_a_chrome_trace_has_an_event_for_each_kernel(tmp_path_factory, report):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    report.save_trace(path)
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert [event["name"] for event in events if event.get("cat") == "kernel"] == [k.cost.name for k in report.kernels]
    assert all(event["dur"] >= 0 for event in events if event["ph"] == "X")
