"""One entry makes a format, a view, a picture, a column, a grouping or a subcommand. What goes with it, its line in the
docs and its sample here, is asked for by name.

Each sample says what the entry gives; an entry without one fails `test_every_entry_has_a_sample`."""

from pathlib import Path
from typing import get_args

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter, compare
from flopmeter.cli import COMMANDS, model_commands
from flopmeter.cli.command import parser_of
from flopmeter.costs.rules import RULES
from flopmeter.costs.traffic import argument_roles
from flopmeter.device.cluster import load_cluster, price_collective
from flopmeter.known_values.collectives import HANDLERS, LAWS, exchange, handler_of
from flopmeter.models import backward
from flopmeter.records import Collective
from flopmeter.records.collectives import COLLECTIVE_OPS, COLLECTIVES
from flopmeter.report import tables
from flopmeter.report.columns import COLUMNS
from flopmeter.report.drawers import FORMATS, VIEWS
from flopmeter.report.plots import PICTURES
from flopmeter.report.report import Report
from flopmeter.report.rows import GROUPINGS, By, Row

DOCS = {page.name: page.read_text() for page in (Path(__file__).parents[1] / "docs").glob("*.md")}
REPORT = DOCS["report.md"]

# How what each format writes begins.
REPORT_STARTS = {"text": "Linear, ", "markdown": "**Linear", "csv": "name,", "json": "{\n", "html": "<!doctype html>"}
DOCUMENT_STARTS = {"text": "Linear, ", "markdown": "**Linear", "csv": "hardware,", "json": "{\n"}
# What of a report shows the view, and the words of the docs for it.
VIEW_SAMPLES = {
    "notebook": ("_repr_html_", "A notebook shows a report"),
    "timeline": ("save_trace", "`report.save_trace("),
    "speed-up": ("speed_up", "`report.speed_up()`"),
    "advice": ("advice", "`report.advice`"),
    "spots": ("hot_spots", "`report.hot_spots`"),
    "later step": ("later_step_seconds", "`report.later_step_seconds`"),
    "compilation": ("explain_compile", "`report.explain_compile()`"),
}
PICTURE_AXES = {"roofline": 2, "classes": 1, "modules": 1, "ops": 1, "memory": 2}
# What a column has for ROW, an op of 1e9 FLOP/s and 5e9 bytes/s.
ROW = Row("mm", calls=3, flops=8, bytes_read=24, bytes_written=16, seconds=8e-9, regime="memory", joules=2e-6)
COLUMN_VALUES = {
    "calls": 3, "% FLOPs": 8, "% time": 8e-9, "GFLOP": 8, "read GB": 24, "written GB": 16, "time": 8e-9,
    "energy": 2e-6, "FLOP/B": 0.2, "TFLOP/s": 1e9, "bound by": "memory",
}  # fmt: skip
GROUPING_ROWS = {
    "class": {"tensor contraction"},
    "op": {"addmm", "mm"},
    "module": {"Linear"},
    "phase": {"forward", "backward"},
    "kernel": {"addmm"},
}
ARGUMENTS = {
    "run": ["train.py", "--batch_size", "64"],
    "table": ["encoder-layer"], "compare": ["encoder-layer"], "sweep": ["encoder-layer"], "fit": ["encoder-layer"],
    "diff": ["a.json", "b.json"], "check": ["trace.json"], "calibrate": [], "hardware": [], "explain": ["mm"],
    "serve": ["hf:llama", "--prompt", "8", "--output", "8"], "models": [], "count": ["encoder-layer"],
    "completion": ["bash"], "measure": ["-o", "run.json"], "plan": ["llama-3-8b", "--gpus", "8"],
}  # fmt: skip
# Of four ranks that each hold parts of 100 bytes: what this one gives and gets (of a gather, another than the root),
# the collective's size, and the bytes that the busiest rank sends by the first algorithm.
SIZES_AND_SENT = {
    "all_reduce": (400, 400, 400, 600),
    "all_gather": (100, 400, 400, 300),
    "reduce_scatter": (400, 100, 400, 300),
    "all_to_all": (400, 300, 400, 300),
    "broadcast": (400, 400, 400, 400),
    "reduce": (400, 400, 400, 400),
    "gather": (100, 0, 400, 300),
    "scatter": (0, 100, 400, 300),
    "send": (100, 0, 100, 100),
    "recv": (0, 100, 100, 100),
    "barrier": (0, 0, 0, 0),
}


def linear():
    with torch.device("meta"):
        return nn.Linear(64, 64), (torch.empty(64, 64, requires_grad=True),)


@pytest.fixture(scope="module")
def report():
    with FlopMeter() as meter:
        backward(*linear())
    return meter.report()


@pytest.mark.parametrize(
    ("registry", "samples"),
    [
        (FORMATS, REPORT_STARTS),
        (tables.FORMATS, DOCUMENT_STARTS),
        (VIEWS, VIEW_SAMPLES),
        (PICTURES, PICTURE_AXES),
        (GROUPINGS, GROUPING_ROWS),
        (COMMANDS, ARGUMENTS),
        (COLLECTIVES, SIZES_AND_SENT),
    ],
    ids=["FORMATS", "tables.FORMATS", "VIEWS", "PICTURES", "GROUPINGS", "COMMANDS", "COLLECTIVES"],
)
def test_every_entry_has_a_sample(registry, samples):
    assert registry.keys() - samples.keys() == set(), "without a sample"
    assert samples.keys() - registry.keys() == set(), "no longer there"


def test_every_format_begins_as_it_should(report):
    assert {name: report.render(name).startswith(start) for name, start in REPORT_STARTS.items()} == dict.fromkeys(
        FORMATS, True
    )
    comparison = compare(lambda: backward(*linear()), ["l4"])
    for name, start in DOCUMENT_STARTS.items():
        assert comparison.render(name).startswith(start), name


def test_every_picture_has_its_panels(report):
    pytest.importorskip("matplotlib")
    assert {name: len(draw(report).axes) for name, draw in PICTURES.items()} == PICTURE_AXES


def test_every_column_has_its_value():
    assert {column.heading or column.page_heading: column.value(ROW) for column in COLUMNS} == pytest.approx(
        COLUMN_VALUES
    )


def test_every_view_is_part_of_the_report():
    assert [name for name, (part, _) in VIEW_SAMPLES.items() if not hasattr(Report, part)] == []


def test_every_grouping_has_rows(report):
    for by, names in GROUPING_ROWS.items():
        assert names <= {row.name.split(" ")[0] if by == "kernel" else row.name for row in report.rows(by)}, by
    assert get_args(By) == tuple(GROUPINGS)


def test_every_command_is_parsed():
    parser = parser_of(COMMANDS)
    for name, arguments in ARGUMENTS.items():
        assert parser.parse_args([name, *arguments]).run is COMMANDS[name].run


# --- collectives: one entry is read by the costs, the prices and the known values ------------------------------------


def test_every_collective_has_its_size_and_its_bytes_on_the_wire():
    for kind, (sent, received, size, wire) in SIZES_AND_SENT.items():
        spec = COLLECTIVES[kind]
        assert spec.size(sent, received, 4) == size, kind
        assert next(iter(spec.wire.values()))(4) * size == wire, kind


def test_every_collective_has_a_price():
    for kind in COLLECTIVES:
        for ranks in ((0, 1), (0, 8), *((tuple(range(16)),) if kind not in ("send", "recv") else ())):
            assert price_collective(Collective(kind, 2**20, ranks), load_cluster("dgx-a100")).seconds > 0, kind


def test_every_op_of_a_collective_has_a_rule_and_arguments_of_the_names_in_the_table():
    schemas = {schema.name: schema for schema in torch._C._jit_get_all_schemas()}
    present = {name: schemas[name] for name in COLLECTIVE_OPS if name in schemas}
    assert len(present) > 25
    for name, schema in present.items():
        op, namespace = COLLECTIVE_OPS[name].op, getattr(torch.ops, name.partition("::")[0])
        named = {op.sent, op.received, op.peer, op.ways, op.group} - {None}
        assert named <= {argument.name for argument in schema.arguments}, name
        assert getattr(namespace, name.partition("::")[2]) in RULES, name


def test_every_op_that_receives_into_an_argument_writes_there():
    for name, (_, _, op) in COLLECTIVE_OPS.items():
        packet = getattr(getattr(torch.ops, name.partition("::")[0]), name.partition("::")[2], None)
        if packet is not None and op.received is not None and op.ways is None:
            is_read, is_written = argument_roles(packet.default)[op.received]
            assert is_written, name
            assert is_read == (op.sent == op.received), name


def test_every_law_of_a_collective_is_a_function_and_every_op_with_a_law_has_a_handler():
    assert {spec.law for spec in COLLECTIVES.values()} - {None} == LAWS.keys()
    for name, (_, spec, op) in COLLECTIVE_OPS.items():
        packet = getattr(getattr(torch.ops, name.partition("::")[0]), name.partition("::")[2], None)
        if packet is not None:
            if name in HANDLERS:  # those of one peer have handlers of their own
                assert handler_of(packet.default) is HANDLERS[name]
            else:
                assert (handler_of(packet.default) is exchange) == (spec.law is not None and op.has_law), name


# --- the docs ----------------------------------------------------------------------------------------------------


def test_docs_name_every_format_and_grouping():
    formats = REPORT[REPORT.index("`report.render(format)`") :].split("\n\n")[0]
    assert [name for name in FORMATS if f"`{name}`" not in formats] == []
    assert [by for by in GROUPINGS if f"\n| `{by}` |" not in REPORT] == []
    assert [words for _, words in VIEW_SAMPLES.values() if words not in REPORT] == []


def test_docs_explain_every_column():
    table = REPORT[REPORT.index("| column | field of") :].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.split("|")] for line in table.splitlines()]
    headings = {heading for _, cell, *_ in rows for heading in cell.split(", ")}
    keys = {key.strip("`") for _, _, cell, *_ in rows for key in cell.split(", ")}
    assert [column.heading for column in COLUMNS if column.heading and column.heading not in headings] == []
    assert [column.key for column in COLUMNS if column.key and column.key not in keys] == []


def test_docs_show_every_command_and_the_help_every_picture():
    pages = " ".join(DOCS.values())
    assert [name for name in COMMANDS if f"flopmeter {name}" not in pages] == []
    assert [name for name in PICTURES if name not in model_commands.PICTURE_HELP] == []
