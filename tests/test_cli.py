"""The `flopmeter` command: each subcommand in process, exit codes, and errors as one line without a traceback."""

import csv
import io
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

import flopmeter
from flopmeter import FlopMeter
from flopmeter.cli import main
from flopmeter.meter import Mode
from flopmeter.models import BUILTINS

A100, H100, T4 = "a100-sxm4-80gb", "h100-sxm5-80gb", "t4"
LAYER = ("encoder-layer", "--batch", "2", "--seq", "128")  # small, so that each command takes a moment


@pytest.fixture
def run(capsys):
    """Runs the command; returns its exit code, output and errors."""

    def run(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


def ok(result):
    code, out, err = result
    assert (code, err) == (0, "")
    return out


def refusal(result):
    """The one line of an error, without the program's name."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("flopmeter: ")
    assert err.count("\n") == 1
    return err


@pytest.fixture(autouse=True)
def one_moment(monkeypatch):
    monkeypatch.setattr("flopmeter.report.ran._now", lambda: "2026-11-22 12:00 UTC")


def asked(report, *arguments):
    """The report as the command gives it, which says how it was called and when."""
    command = shlex.join(map(str, ("flopmeter", *arguments)))
    return replace(report, ran=report.ran._replace(program=command, date="2026-11-22 12:00 UTC"))


@pytest.fixture(scope="module")
def report():
    model, inputs = BUILTINS["encoder-layer"](batch=2, seq=128)
    with FlopMeter(H100) as meter, torch.no_grad():
        model.eval()(*inputs)
    return meter.report()


# --- table -------------------------------------------------------------------------------------------------------


def test_table_prints_the_report_of_the_library(run, report):
    arguments = ("table", *LAYER, "--hardware", H100)
    assert ok(run(*arguments)) == f"{asked(report, *arguments)}\n"


@pytest.mark.parametrize("format", ["markdown", "csv", "html"])
def test_table_prints_every_format_of_the_library(run, report, format):
    arguments = ("table", *LAYER, "--hardware", H100, "--format", format)
    assert ok(run(*arguments)).rstrip() == asked(report, *arguments).render(format).rstrip()


def test_table_writes_json_that_json_reads(run, report):
    document = json.loads(ok(run("table", *LAYER, "--hardware", H100, "--format", "json")))
    assert document["totals"]["flops"] == report.flops
    assert document["hardware"] == H100


@pytest.mark.parametrize("format", ["text", "csv", "html"])
def test_output_goes_to_a_file(run, report, tmp_path, format):
    path = tmp_path / "report"
    arguments = ("table", *LAYER, "--hardware", H100, "--format", format, "-o", path)
    assert ok(run(*arguments)) == ""
    assert path.read_text(encoding="utf-8") == asked(report, *arguments).render(format).rstrip("\n") + "\n"


def test_table_writes_the_predicted_timeline(run, report, tmp_path):
    path, expected = tmp_path / "trace.json.gz", tmp_path / "expected.json.gz"
    ok(run("table", *LAYER, "--hardware", H100, "--trace", path))
    report.save_trace(expected)
    assert path.read_bytes() == expected.read_bytes()


@pytest.mark.parametrize("option", ["--output", "--trace"])
def test_a_file_that_cannot_be_written_is_told_in_one_line(run, tmp_path, option):
    path = tmp_path / "missing" / "file"
    code, _, complaint = run("table", *LAYER, "--hardware", H100, option, path)
    assert (code, complaint) == (2, f"flopmeter: {path} cannot be written: there is no folder {path.parent}\n")


def test_whoever_interrupts_a_command_gets_no_traceback(run, monkeypatch):
    def interrupted(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr("flopmeter.cli.check_files", interrupted)
    code, out, err = run("table", "gpt2-124m")
    assert (code, out, err) == (130, "", "flopmeter: interrupted\n")


def test_whoever_interrupts_while_torch_is_imported_gets_no_traceback(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])}
    command = [sys.executable, "-m", "flopmeter", "models"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | paths)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "flopmeter: interrupted\n")


def test_a_table_on_the_terminal_ends_with_its_last_row(run):
    assert not ok(run("count", *LAYER, "--format", "csv")).endswith("\n\n")


@pytest.mark.parametrize("by", ["op", "module", "phase", "kernel"])
def test_table_groups_by_what_is_asked_for(run, report, by):
    rows = list(
        csv.DictReader(io.StringIO(ok(run("table", *LAYER, "--hardware", H100, "--by", by, "--format", "csv"))))
    )
    assert [row["name"] for row in rows] == [row.name for row in report.rows(by)]
    text = ok(run("table", *LAYER, "--hardware", H100, "--by", by)).splitlines()
    heads = next(number for number, line in enumerate(text) if line.startswith("---")) - 1
    assert text[heads].split()[0] == by
    assert text[heads + 2 :].index("") == len(rows)


def test_train_adds_backward_and_optimizer(run):
    document = json.loads(ok(run("table", *LAYER, "--train", "--format", "json")))
    assert {row["name"] for row in document["rows"]["phase"]} == {"forward", "backward", "optimizer"}


def test_dtype_and_autocast_decide_the_unit(run):
    assert "· fp32 ·" in ok(run("table", *LAYER, "--dtype", "fp32"))
    assert "· bf16 ·" in ok(run("table", *LAYER, "--autocast", "bf16"))


@pytest.mark.parametrize("mode", get_args(Mode))
def test_every_mode_of_the_meter_is_one_of_the_command(run, mode):
    assert f"· {mode}\n" in ok(run("table", *LAYER, "--mode", mode))


# --- compare, sweep, fit -----------------------------------------------------------------------------------------


def test_compare_has_a_row_for_each_device_and_says_what_would_help(run):
    out = ok(run("compare", *LAYER, "--hardware", f"{A100},{H100},{T4}"))
    for name in (A100, H100, T4):
        assert out.count(f"\n{name} ") == 2
    assert "tokens/s" in out
    assert "$" not in out


def test_compare_prices_devices_from_the_command_line_and_from_a_file(run, tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("date: 2026-11-21\ndollars_per_hour:\n  t4: 0.35\n  l4: 0.70\n")
    arguments = (
        "compare",
        *LAYER,
        "--hardware",
        f"{A100},{T4}",
        "--price",
        str(prices),
        f"{A100}=1.5",
        "--sort",
        "cost",
    )
    rows = json.loads(ok(run(*arguments, "--format", "json")))["rows"]
    assert {row["hardware"]: row["dollars_per_hour"] for row in rows} == {T4: 0.35, A100: 1.5}
    costs = [row["dollars_per_step"] for row in rows]
    assert costs == sorted(costs)
    assert rows[0]["dollars_per_million_items"] == pytest.approx(rows[0]["dollars_per_step"] / 256 * 1e6)
    assert "(2026-11-21)" in ok(run(*arguments))


def test_prices_are_listed_with_commas_as_devices_are(run):
    out = ok(run("compare", *LAYER, "--hardware", "t4,l4", "--price", "t4=0.35,l4=0.70"))
    assert "t4 $0.35/h as given, l4 $0.70/h as given" in out


@pytest.mark.parametrize(
    ("price", "says"),
    [
        ("t4=cheap", "dollars per hour for t4"),
        ("t4=-1", "dollars per hour for t4"),
        ("t5=1", "no hardware is named 't5'"),
        ("missing.yaml", "missing.yaml is neither"),
    ],
)
def test_prices_that_make_no_sense_are_refused(run, price, says):
    assert says in refusal(run("compare", *LAYER, "--hardware", T4, "--price", price))


def test_a_profile_of_ones_own_has_a_price_by_its_path_and_by_the_name_that_tables_give_it(run, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(f"extends: {T4}\ntitle: Mine\nmemory_gb: 32\nsources: {{memory_gb: made up}}\n")
    for name in (mine, "mine"):
        asked = ("compare", *LAYER, "--hardware", f"{mine},{T4}", "--price", f"{name}=2", "--format", "json")
        assert {row["hardware"]: row["dollars_per_hour"] for row in json.loads(ok(run(*asked)))["rows"]}["mine"] == 2


def test_a_price_file_without_a_date_is_refused(run, tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("dollars_per_hour: {t4: 0.35}\n")
    assert "expected `date`" in refusal(run("compare", *LAYER, "--price", str(prices)))


def test_sweep_has_a_line_for_each_batch_and_a_diagnosis(run):
    out = ok(run("sweep", "encoder-layer", "--seq", "128", "--batch", "4,1,2"))
    assert [line.split()[0] for line in out.splitlines()[4:7]] == ["1", "2", "4"]
    assert "batch 1 to" in out
    assert "tokens/s" in out


def test_sweep_over_the_length_keeps_the_batch(run):
    document = json.loads(ok(run("sweep", "encoder-layer", "--seq", "64,128", "--batch", "3", "--format", "json")))
    assert (document["over"], document["unit"]) == ("seq", "tokens")
    for point in document["points"]:
        assert point["items_per_s"] == pytest.approx(3 * point["size"] / point["seconds"])


def test_sweep_wants_one_list(run):
    assert "sweep one of --batch and --seq" in refusal(run("sweep", "bert-base", "--batch", "1,2", "--seq", "8,16"))


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_fit_finds_the_largest_batch(run, mode):
    arguments = ("encoder-layer", "--seq", "512", "--train", "--hardware", T4, "--mode", mode)
    largest = json.loads(ok(run("fit", *arguments, "--format", "json")))["largest_batch"]
    assert f"the largest batch that fits is {largest}\n" in ok(run("fit", *arguments))
    sweep = json.loads(ok(run("sweep", *arguments, "--batch", f"{largest},{largest + 1}", "--format", "json")))
    assert [point["fits"] for point in sweep["points"]] == [True, False]


def test_fit_does_not_call_the_largest_batch_that_was_tried_the_largest_that_fits(run, tmp_path):
    file = tmp_path / "small.py"
    file.write_text(
        "import torch\ndef build(batch=2):\n    return torch.nn.Linear(2, 2), torch.empty(batch, 2, device='meta')\n"
    )
    assert "a batch of 1,048,576 fits; larger ones were not tried" in ok(run("fit", f"{file}:build", "--hardware", T4))
    table = ok(run("count", f"{file}:build", "--batch", "1"))
    assert [line.split()[-1] for line in table.splitlines() if line.startswith(("module", "(the model)"))] == [
        "FLOP",
        "10",  # 4 multiply-adds, and 2 additions of the bias
    ]


def test_fit_exits_with_1_where_nothing_fits(run):
    code, out, _ = run("fit", "llama-3-8b", "--train", "--hardware", T4)
    assert code == 1
    assert "not even a batch of 1 fits" in out


# --- diff --------------------------------------------------------------------------------------------------------


@pytest.fixture
def reports(run, tmp_path):
    """JSON reports of batch 2 and batch 3."""
    paths = []
    for batch in ("2", "3"):
        path = tmp_path / f"{batch}.json"
        path.write_text(ok(run("table", "encoder-layer", "--seq", "128", "--batch", batch, "--format", "json")))
        paths.append(str(path))
    return paths


def test_diff_shows_what_grew(run, reports):
    out = ok(run("diff", *reports))
    (flops,) = [line.split() for line in out.splitlines() if line.startswith("flops ")]
    assert flops[-1] == "+50.0"


def test_diff_fails_where_a_total_grew_by_more_than_allowed(run, reports):
    code, _, err = run("diff", *reports, "--fail-above", "5%")
    assert code == 1
    assert "flopmeter: flops grew by 50.0%, more than 5.0%" in err
    assert run("diff", *reports, "--fail-above", "101%")[0] == 0


def test_diff_lets_what_shrank_or_stayed_pass(run, reports):
    assert run("diff", *reversed(reports), "--fail-above", "0%")[0] == 0
    assert run("diff", reports[0], reports[0], "--fail-above", "0%")[0] == 0


def test_diff_says_that_the_devices_differ(run, reports, tmp_path):
    other = tmp_path / "t4.json"
    other.write_text(ok(run("table", *LAYER, "--hardware", T4, "--format", "json")))
    assert f"not the same hardware: {A100} before, {T4} after" in ok(run("diff", reports[0], str(other)))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda report: report | {"schema_version": 0}, "schema version 0, not 1"),
        (lambda report: report | {"totals": {}}, "lacks the totals seconds"),
        (lambda report: [report], "is no report"),
        (lambda report: {"kind": "comparison", "schema_version": 1}, "is no report"),
    ],
)
def test_diff_refuses_other_files(run, reports, tmp_path, change, says):
    with open(reports[0]) as opened:
        changed = change(json.load(opened))
    path = tmp_path / "changed.json"
    path.write_text(json.dumps(changed))
    assert says in refusal(run("diff", reports[0], str(path)))


def test_diff_refuses_files_that_cannot_be_read(run, reports, tmp_path):
    assert "cannot be read" in refusal(run("diff", reports[0], str(tmp_path / "missing.json")))
    (tmp_path / "text.json").write_text("{")
    assert "is no JSON" in refusal(run("diff", reports[0], str(tmp_path / "text.json")))


# --- hardware, explain -------------------------------------------------------------------------------------------


def test_hardware_lists_devices_and_shows_one_in_full(run):
    assert f"\n{H100} " in ok(run("hardware"))
    assert ["title", "NVIDIA", "T4"] in [line.split() for line in ok(run("hardware", T4)).splitlines()]
    assert H100 in refusal(run("hardware", "h100"))


@pytest.mark.parametrize(
    ("op", "facts"),
    [
        ("addmm", ["rule flopmeter.costs.contractions.matmul.addmm", f"{2 * 256**3:,}", "65,536 element-wise"]),
        ("aten::relu", ["element-wise", "131,072 read, 131,072 written"]),
        ("aten.view.default", ["a view by its schema", "launches nothing"]),
        ("layer_norm", ["a composite"]),
        ("convolution", [f"{2 * 8 * 64 * 56 * 56 * 64 * 9:,}"]),
    ],
)
def test_explain_shows_the_rule_and_its_cost_on_an_example(run, op, facts):
    out = ok(run("explain", op))
    for fact in facts:
        assert fact in out


def test_explain_names_near_ops(run):
    assert "addmm" in refusal(run("explain", "admm"))
    assert "it has: default, " in refusal(run("explain", "addmm.nope"))


def test_compiled_kernels_are_of_the_compiler_if_asked_and_of_the_rules_if_not_and_the_report_says_which(run):
    by_compiler = ok(run("table", "encoder-layer", "--seq", 64, "--compiler", "--mode", "compiled"))
    by_rules = ok(run("table", "encoder-layer", "--seq", 64, "--mode", "compiled"))
    assert "those of torch's own compiler" in by_compiler
    assert "compiled graphs: 1 in 1 calls" in by_compiler
    assert "fusion by inductor's default rules" in by_rules
    assert "no eager run" in refusal(run("table", "encoder-layer", "--compiler", "--mode", "eager"))


# --- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["frobnicate"], "no command is named 'frobnicate'"),
        (["table"], "TARGET"),
        (["table", "bert-base", "--batch", "0"], "positive whole number"),
        (["table", "bert-base", "--batch", "two"], "positive whole number"),
        (["sweep", "bert-base", "--batch", "1,,2"], "positive whole number"),
        (["table", "bert-base", "--mode", "turbo"], "cudagraph"),
        (["table", "bert-base", "--hardware", "h100"], H100),
        (["table", "bert-bass"], "bert-base"),
        (["table", "resnet-50", "--seq", "128"], "takes no seq; it takes batch, image_size, dtype"),
        (["compare", "bert-base", "--hardware", ","], "has an empty name"),
        (["table", "hf:llama"], "transformers is not installed: pip install transformers"),
        (["diff", "a.json", "b.json", "--fail-above", "5"], "a percentage such as 5%"),
    ],
)
def test_mistakes_are_told_in_one_line_with_exit_code_2(run, monkeypatch, arguments, says):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert says in refusal(run(*arguments))


def test_a_target_that_raises_is_told_in_one_line(run, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def build():\n    raise RuntimeError('two\\nlines')\n")
    assert "raised RuntimeError: two lines (mine.py:2)" in refusal(run("table", f"{path}:build"))


def test_a_target_that_asks_for_unknown_values_is_told_the_ways_out(run, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("import torch\ndef build():\n    return (lambda x: x.sum().item()), torch.empty(2**21)\n")
    assert "data-dependent" in refusal(run("table", f"{path}:build"))


def test_a_device_that_lacks_the_type_is_told(run):
    assert "no rate for matrix products in bf16" in refusal(run("table", "bert-base", "--hardware", "cpu-i7-12700h"))


def test_the_traceback_is_shown_to_who_asks_for_it(capsys):
    assert main(["table", "bert-base", "--hardware", "h100", "--traceback"]) == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["table", "compare", "sweep", "fit", "diff", "hardware", "explain"])
def test_every_command_has_help_with_an_example(run, command):
    out = ok(run(command, "--help"))
    assert f"usage: flopmeter {command}" in out
    assert f"flopmeter {command} " in out.partition("Example")[2]


def test_python_dash_m_is_the_command():
    command = [sys.executable, "-m", "flopmeter", "hardware", T4]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert "NVIDIA T4" in done.stdout


def test_a_reader_that_has_seen_enough_is_no_error():
    command = f'"{sys.executable}" -m flopmeter hardware | head -1'
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("name")
    assert done.stderr == ""


def test_the_bare_command_says_what_one_can_do(run):
    assert all(name in ok(run()) for name in ("table", "compare", "serve", "models"))


def test_count_names_parameters_output_and_flops_of_each_module(run):
    model = BUILTINS["bert-base"]()[0]
    lines = ok(run("count", "bert-base", "--batch", 2, "--seq", 16, "--depth", 1)).splitlines()[4:]
    assert [line.split()[0] for line in lines[1:]] == [
        name for name, _ in model.named_children()
    ]  # no deeper than asked
    assert any("[2, 16, 768]" in line for line in lines)
    counted = json.loads(ok(run("count", "bert-base", "--batch", 2, "--seq", 16, "--format", "json")))
    whole = counted["modules"][0]
    assert whole["parameters"] == counted["parameters"] == sum(p.numel() for p in model.parameters())
    assert whole["flops"] == counted["flops"]


def test_the_file_of_output_says_the_format(run, tmp_path):
    ok(run("compare", *LAYER, "--hardware", T4, "-o", tmp_path / "t4.json"))
    assert json.loads((tmp_path / "t4.json").read_text())["rows"][0]["hardware"] == T4


def test_a_shell_completes_commands_options_and_devices(run, monkeypatch):
    pytest.importorskip("shtab")
    script = ok(run("completion", "bash"))
    assert all(word in script for word in ("compare", "--image-size", H100, "gpt2-124m"))
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert "pip install 'flopmeter[completion]'" in refusal(run("completion", "bash"))


def test_models_lists_what_is_built_in_with_its_published_size(run):
    lines = {line.split()[0]: line for line in ok(run("models")).splitlines() if line}
    assert lines.keys() >= BUILTINS.keys()
    for name, size in {"gpt2-124m": "124.4 M", "bert-large": "335.2 M", "llama-3-8b": "8,030.3 M"}.items():
        assert size in lines[name]


def test_a_report_says_how_it_was_asked_for_in_every_format(run):
    for format in ("text", "markdown", "csv", "json", "html"):
        shown = ok(run("table", *LAYER, "--hardware", H100, "--format", format))
        assert all(part in shown for part in ("--batch 2", "float16 [2, 128, 1024]", "2026-11-22 12:00 UTC")), format


def test_count_is_one_line():
    counted = flopmeter.count(torch.nn.Linear(8, 8), torch.empty(2, 8))
    assert (counted.flops, counted.macs, counted.parameters) == (2 * 2 * 8 * 8 + 16, 128, 72)
    assert str(counted).startswith("272 FLOP, 128 MAC, ")


def test_the_version_is_told_before_torch_is_imported():
    program = "import sys; from flopmeter.__main__ import main; code = main(); print(code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, "--version"], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"flopmeter {flopmeter.__version__}", "0 False"]


def test_every_public_name_is_found_where_it_is_said_to_be():
    for name in flopmeter.__all__:
        assert getattr(flopmeter, name).__module__.startswith("flopmeter."), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        flopmeter.nothing  # noqa: B018
