"""What each command hands over of its options to the function that does the work, which is made up here, what it prints
and with which exit code it ends."""

from __future__ import annotations

import argparse
import json
import os
from types import SimpleNamespace as Made

import pytest
import torch

from flopmeter import load_hardware
from flopmeter.cli import file_commands, main, measure_command, model_commands, plan_command, run_command, serve_command
from flopmeter.cli.command import percentage
from flopmeter.cli.targets import Target
from flopmeter.cli.training import checkpoint_blocks, optimizer_choice
from flopmeter.run.launchers import CommandLine
from flopmeter.run.report import NothingRanError
from flopmeter.run.script import Ending
from flopmeter.run.session import Wishes

H100 = load_hardware("h100-sxm5-80gb")


class Answer:
    """An answer as a command shows it."""

    def __init__(self, **facts):
        self.__dict__.update(facts)
        self.notes = []

    def with_note(self, note):
        self.notes.append(note)
        return self

    def render(self, format):
        return f"{format}: {self.notes}\n\n"


@pytest.fixture
def called(monkeypatch, capsys):
    """x"""

    def call(module, name, answer, command):
        seen = []
        monkeypatch.setattr(module, name, lambda *args, **kwargs: seen.append((args, kwargs)) or answer)
        code = main(command.split())
        out, error = capsys.readouterr()
        ((args, kwargs),) = seen or [(None, error)]
        return args, kwargs, code, out

    return call


def without(mapping, *names):
    return {name: value for name, value in mapping.items() if name not in names}


SERVED = Answer(rows=[Made(best=None), Made(best=1)])
SERVE = "serve llama-3-8b --prompt 100 --output 20"
SERVE_DEFAULTS = {
    "output": 20, "chunk": "usual", "prefix": 0.0, "prices": {}, "prompt": 100, "slo": None, "gpus": 1,
    "mode": "cudagraph", "weights": None, "kv": None, "draft": None, "draft_tokens": None, "acceptance": None,
    "expert_parallel": False, "disaggregated": False, "cache": "paged", "cluster": None, "dollars_per_kwh": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ("", {}),
        ("--no-chunks --prefix 0.5 --gpus 4", {"chunk": None, "prefix": 0.5, "gpus": 4}),
        (
            "--chunk 512 --slo ttft=500ms,tpot=30ms --mode eager --weights fp8 --kv fp8 --kwh 0.3 --cache transformers",
            {"chunk": 512, "slo": {"ttft": 0.5, "tpot": 0.03}, "mode": "eager", "weights": "fp8", "kv": "fp8",
             "dollars_per_kwh": 0.3, "cache": "transformers"},
        ),
        (
            "--draft llama-2-7b --draft-tokens 3 --acceptance 0.6 --expert-parallel --disaggregated",
            {"draft": "llama-2-7b", "draft_tokens": 3, "acceptance": 0.6, "expert_parallel": True,
             "disaggregated": True},
        ),
    ],
)  # fmt: skip
def test_serve_hands_over_each_of_its_options(called, options, changes):
    (target, devices), given, code, out = called(serve_command, "serving", SERVED, f"{SERVE} {options}".strip())
    assert (target, devices, code) == ("llama-3-8b", ["h100-sxm5-80gb"], 0)
    assert without(given, "progress") == SERVE_DEFAULTS | changes
    assert out == f"text: ['', 'ran: flopmeter {f'{SERVE} {options}'.strip()}']\n"
    SERVED.notes.clear()


def test_serve_takes_devices_prices_and_a_file_and_says_no_where_none_keeps_up(called, tmp_path):
    command = f"{SERVE} --hardware l4,t4 --price l4=0.5 t4=0.25 -o {tmp_path}/a.json --format json"
    (_, devices), given, code, out = called(serve_command, "serving", Answer(rows=[Made(best=None)]), command)
    assert (devices, given["prices"], code, out) == (["l4", "t4"], {"l4": 0.5, "t4": 0.25}, 1, "")
    assert (
        (tmp_path / "a.json").read_text().startswith("json: ['prices: l4 $0.5/h as given, t4 $0.25/h as given', 'ran: ")
    )
    *_, error, code, _ = called(serve_command, "serving", SERVED, f"{SERVE} --acceptance 0.5")
    assert (code, "give its model with --draft" in error) == (2, True)


PLAN_DEFAULTS = {
    "length": None, "only": {}, "dollars_per_gpu_hour": None, "batch": None, "cluster": None, "mode": "eager",
    "async_tp": False, "fp8": False, "rows": 10, "whole": 0, "workers": os.cpu_count(), "causal": "full",
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "memory", "changes", "delays"),
    [
        ("", None, {}, (0.0, 0.0, 0.0, 1)),
        (
            "--memory 40 --seq 512 --batch 64 --mode compiled --only tp=4,8 recompute=full --fp8 --async-tp", 40e9,
            {"length": 512, "batch": 64, "mode": "compiled", "only": {"tp": [4, 8], "recompute": ["full"]}, "fp8": True,
             "async_tp": True}, (0.0, 0.0, 0.0, 1),
        ),
        (
            "--data 0.5 --checkpoint 30/500 --straggling 0.1 --rows 3 --whole 2 --workers 1 --causal exact "
            "--price h100-sxm5-80gb=2.5", None,
            {"rows": 3, "whole": 2, "workers": 1, "causal": "exact", "dollars_per_gpu_hour": 2.5},
            (0.5, 0.1, 30.0, 500),
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("best", [None, 1])
def test_plan_hands_over_each_of_its_options(called, options, memory, changes, delays, best):
    command = f"plan llama-3-8b --gpus 16 --hardware h100-sxm5-80gb {options}".strip()
    args, given, code, out = called(plan_command, "plan", Answer(best=best), command)
    assert args == ("llama-3-8b", 16, H100, memory)
    own = given["delays"]
    assert (own.data_seconds, own.straggling, own.checkpoint_seconds, own.checkpoint_every) == delays
    assert without(given, "progress", "delays") == PLAN_DEFAULTS | changes
    assert code == (0 if best else 1)
    assert out.endswith(f"'ran: flopmeter {command}']\n")


def test_plan_takes_a_function_as_one_that_makes_the_model_and_refuses_wishes_that_are_none(called, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\ndef build(): return torch.nn.Linear(2, 3), None\ndef alone(): return torch.nn.ReLU()\n"
    )
    for name, kind in (("build", torch.nn.Linear), ("alone", torch.nn.ReLU)):
        (subject, *_), *_ = called(plan_command, "plan", Answer(best=1), f"plan {file}:{name} --gpus 2")
        assert isinstance(subject(), kind)
    for wish, told in (
        ("tp=4 tp=8", "--only names tp twice"),
        ("tp=", "write NAME=VALUE"),
        ("xp=4", "write NAME=VALUE"),
    ):
        _, error, code, _ = called(plan_command, "plan", None, f"plan llama-3-8b --gpus 2 --only {wish}")
        assert (code, told in error) == (2, True)
    _, error, code, _ = called(plan_command, "plan", None, "plan llama-3-8b --gpus 2 --checkpoint 30")
    assert (code, "expected SECONDS/STEPS, such as 30/500, not '30'" in error) == (2, True)


METERED = {
    "strict": False, "causal": "full", "routing": None, "checks": None, "mask_fraction": None, "clocks": "sustained",
    "dollars_per_kwh": None,
}  # fmt: skip
METERING = "--strict --causal exact --routing 1.3 --checks hold --mask-fraction 0.5"
ASKED = {"strict": True, "causal": "exact", "routing": {"imbalance": 1.3}, "checks": "hold", "mask_fraction": 0.5}


def test_compare_hands_over_each_of_its_options(called):
    (run, devices, mode), given, code, out = called(
        model_commands, "compare", Answer(), "compare encoder-layer --batch 2"
    )
    assert (devices, mode, code) == (["a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm-180gb"], "eager", 0)
    expected = {"items": 2 * 512, "unit": "tokens", "prices": {}, "sort": "seconds"}
    assert without(given, "progress") == METERED | expected
    assert callable(run)
    assert out == "text: ['']\n"
    options = f"--price t4=0.4 --sort cost --mode compiled --kwh 0.2 --clocks burst {METERING}"
    command = f"compare encoder-layer --hardware t4 {options}"
    (_, devices, mode), given, *_ = called(model_commands, "compare", Answer(), command)
    assert (devices, mode) == (["t4"], "compiled")
    expected = {"items": 8 * 512, "unit": "tokens", "prices": {"t4": 0.4}, "sort": "cost", "dollars_per_kwh": 0.2}
    assert without(given, "progress") == ASKED | expected | {"clocks": "burst"}


def test_sweep_goes_over_the_list_in_order_with_the_other_size_fixed(called):
    (programs, sizes, device, mode), given, *_ = called(
        model_commands, "sweep", Answer(), "sweep resnet-50 --hardware t4"
    )
    assert (sizes, device, mode) == ([1, 2, 4, 8, 16, 32, 64], "t4", "eager")
    assert without(given, "progress") == METERED | {"over": "batch", "items": 1, "unit": "images"}
    assert programs.of(4).items == 4
    command = f"sweep encoder-layer --seq 64,32 --batch 3 --mode cudagraph {METERING}"
    (programs, sizes, _, mode), given, *_ = called(model_commands, "sweep", Answer(), command)
    assert (sizes, mode) == ([32, 64], "cudagraph")
    expected = {"over": "seq", "items": 3, "unit": "tokens", "clocks": "sustained", "dollars_per_kwh": None}
    assert without(given, "progress") == ASKED | expected
    assert programs.of(64).items == 3 * 64


@pytest.mark.parametrize(
    ("largest", "code", "note"),
    [
        (0, 1, "not even a batch of 1 fits"), (7, 0, "the largest batch that fits is 7"),
        (model_commands.MOST_TRIED, 0, f"a batch of {model_commands.MOST_TRIED:,} fits; larger ones were not tried"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("train", ["", " --train"])
def test_fit_tells_the_largest_batch(called, largest, code, note, train):
    command = f"fit encoder-layer --hardware t4 --seq 64{train}"
    (programs, device), given, found, out = called(model_commands, "largest_batch", largest, command)
    assert given == without(METERED, "clocks", "dollars_per_kwh") | {"mode": None}
    assert (device.name, programs.of(2).items, found) == ("t4", 2 * 64, code)
    what = "a training step" if train else "inference"
    assert out == f"encoder-layer, {what} · {device.title}\n\n{note}\n"


def test_a_program_is_made_with_each_option_of_training(monkeypatch):
    asked = []
    target = Made(
        program=lambda **options: asked.append(options) or Made(run=lambda: torch.zeros(1, device="meta").add_(1))
    )
    monkeypatch.setattr("flopmeter.cli.target_options.load_target", lambda name: target)
    assert (
        main(
            ["table", "mine", "--batch", "3", "--seq", "5", "--image-size", "7", "--dtype", "fp16", "--hardware", "t4"]
        )
        == 0
    )
    plain = {
        "batch": 3, "seq": 5, "image_size": 7, "dtype": torch.float16, "train": False, "autocast": None,
        "optimizer": None, "checkpointing": False, "compiled": False,
    }  # fmt: skip
    assert asked.pop() == plain
    options = "table mine --train --autocast fp16 --optimizer sgd,momentum=0.9 --checkpointing --compiler --hardware t4"
    assert main(options.split()) == 0
    given = asked.pop()
    assert given.pop("optimizer").keywords == optimizer_choice("sgd,momentum=0.9").keywords == {"momentum": 0.9}
    changed = {"train": True, "autocast": torch.float16, "checkpointing": True, "compiled": True}
    nothing = dict.fromkeys(("batch", "seq", "image_size", "dtype"))
    assert given == without(plain, "optimizer") | changed | nothing


def test_measure_and_check_hand_over_each_of_their_options(called, tmp_path, monkeypatch):
    run = Made(hardware=lambda: H100, device={"name": "mine"}, started="today", results=[1, 2], versions={"torch": "2"})
    others = [Made(name="another", why="no memory"), Made(name="a case", why="no time")]
    monkeypatch.setattr(measure_command, "pairs", lambda run, device: ([], others))
    (path, device), given, code, out = called(measure_command, "measure", run, f"measure -o {tmp_path}/a.json")
    assert (path, device, code) == (f"{tmp_path}/a.json", "cpu", 0)
    plain = {"quick": False, "kinds": [], "clock": "wall", "resume": False}
    assert without(given, "progress") == plain
    first, second, third, *_, other, last = out.splitlines()
    assert (first, second) == (f"wrote {tmp_path}/a.json", "measured on mine, today: 2 cases (torch 2)")
    assert third == f"predicted for {H100.title} (h100-sxm5-80gb)"
    assert (other, last) == ("another: no memory", "a case: no time")
    options = "--device cpu --quick --cases bmm,rows --clock cpu --resume --hardware t4"
    _, given, _, out = called(measure_command, "measure", run, f"measure -o a.json {options}")
    assert without(given, "progress") == {"quick": True, "kinds": ["bmm", "rows"], "clock": "cpu", "resume": True}
    assert "(t4)" in out
    for command, told in (
        ("measure -o a.txt", "a.txt must end in .json: that is what the file holds"),
        ("measure --show a.json --cases bmm", "--show measures nothing: leave --cases out"),
        ("measure --show a.json -o b.json", "--show measures nothing: leave --output out"),
    ):
        _, error, code, _ = called(measure_command, "measure", run, command)
        assert (code, told in error) == (2, True)
    args, given, *_ = called(file_commands, "check", Answer(), "check a.json")
    assert (args, given) == (("a.json", None), {"clocks": None})
    args, given, *_ = called(file_commands, "check", Answer(), "check a.json --hardware t4 --clocks burst")
    assert (args, given) == (("a.json", "t4"), {"clocks": "burst"})


def test_a_table_is_set_beside_its_compiled_run_where_that_is_asked_for(capsys):
    command = "table encoder-layer --batch 2 --seq 128 --hardware t4 --format json"
    assert main([*command.split(), "--speed-up"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "speed-up"
    assert main(command.split()) == 0
    assert "totals" in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("command", ["hardware", "hardware t4", "models", "explain mm"])
def test_what_only_tells_something_ends_with_zero(command, capsys):
    assert main(command.split()) == 0
    assert capsys.readouterr().out


@pytest.mark.parametrize("text", ["5", "-5%", "nan%", "x%", "%"])
def test_a_percentage_has_its_sign_and_is_not_negative(text):
    assert (percentage("5%"), percentage("0%"), percentage("12.5%")) == (0.05, 0.0, 0.125)
    with pytest.raises(argparse.ArgumentTypeError, match="expected a percentage such as 5%, not"):
        percentage(text)


@pytest.mark.parametrize(
    ("inputs", "items", "unit"),
    [
        ({"input_features": (3, 80, 100)}, 3, "recordings"), ({"input_values": (3, 16000)}, 3, "recordings"),
        ({"other": (3, 80, 100)}, 3 * 80, "tokens"), ({"x": (3, 16000)}, 3, "samples"),
        ({"pixel_values": (3, 3, 32, 32)}, 3, "images"), ({"scale": (), "x": (5, 3, 32, 32)}, 5, "images"),
        ({}, None, "samples"),
    ],
)  # fmt: skip
def test_items_are_told_by_the_name_and_the_shape_of_the_first_input(inputs, items, unit):
    given = {name: torch.zeros(shape, device="meta") for name, shape in inputs.items()}
    target = Target("mine", lambda: (lambda **inputs: None, given), ())
    program = target.program()
    assert (program.items, program.unit) == (items, unit)


def test_models_that_checkpoint_themselves_are_asked_to_without_reentering():
    asked = []
    for name in ("activation_checkpointing_enable", "gradient_checkpointing_enable"):
        checkpoint_blocks("mine", Made(**{name: asked.append}))
    checkpoint_blocks("mine", Made(set_grad_checkpointing=lambda: asked.append("timm")))
    assert asked == [{"use_reentrant": False}] * 2 + ["timm"]


# --- flopmeter run


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def test_run_hands_over_each_of_its_options(called, script, monkeypatch):
    report = Made(render=lambda format, by: f"{format} by {by}\n", step=None)
    monkeypatch.setattr(run_command, "_report", lambda runs, script, ending: report)
    ran = {0: Made(ending=Ending(3))}
    monkeypatch.setattr(run_command, "first_failed", lambda runs: None)

    def wishes(options, words=""):
        args, *_, code, _ = called(run_command, "run_as_ranks", ran, f"run {options} {script} {words}".strip())
        assert code == 3
        return args

    own, device, plain, variables = wishes("")
    assert (own.target, list(own.arguments), device, dict(variables)) == (str(script), [], "a100-sxm4-80gb", {})
    assert plain == Wishes(steps=3, marker="auto", on_out_of_memory="raise")
    own, device, asked, _ = wishes(
        "--hardware t4 --steps 5 --step-marker forward --gpus 4 --mode compiled --oom report --strict-values --kwh 0.3 "
        "--mask-fraction 0.25 --shim flash_attn --synthetic first --without-weights", "--lr 1 --mode x"
    )  # fmt: skip
    assert (list(own.arguments), device) == (["--lr", "1", "--mode", "x"], "t4")
    assert asked == Wishes(
        gpus=4, steps=5, marker="forward", mode="compiled", on_out_of_memory="report", strict_values=True,
        mask_fraction=0.25, shims=("flash_attn",), synthetic="first", without_weights=True, dollars_per_kwh=0.3,
    )  # fmt: skip


def test_run_prints_beside_the_scripts_output_by_what_is_asked_for(script, monkeypatch, capsys, tmp_path):
    report = Made(render=lambda format, by: f"{format} by {by}\n\n", step=None)
    monkeypatch.setattr(run_command, "_report", lambda runs, script, ending: report)
    monkeypatch.setattr(run_command, "run_as_ranks", lambda *_: {0: Made(ending=Made(code=0, error=None))})
    monkeypatch.setattr(run_command, "first_failed", lambda runs: None)
    assert main(["run", "--by", "op", str(script)]) == 0
    assert capsys.readouterr() == ("", "text by op\n")
    assert main(["run", "-o", f"{tmp_path}/out.md", str(script)]) == 0
    assert (capsys.readouterr(), (tmp_path / "out.md").read_text()) == (("", ""), "markdown by class\n")
    for wrong, told in (
        (["--format", "json", "--by", "op", str(script)], "json holds every grouping: leave --by out"),
        (["--price", "t4=1", str(script)], "--price is for comparing devices"),
        (["--hardware", "t4,l4", "--by", "op", str(script)], "--trace and --by are of one device"),
        (["--hardware", "t4,l4", "--format", "html", str(script)], "a comparison of devices has no html; it has text"),
        ([str(script), "--hardware", "t4"], "so the script would get it: put it before the script's name"),
        ([], "name a script: flopmeter run train.py"),
        (["--", "torchrun", str(tmp_path)], "is a folder without __main__.py: name a script"),
    ):
        assert main(["run", *wrong]) == 2
        assert told in capsys.readouterr().err


def test_run_compares_several_devices_which_go_on_where_memory_does_not_do(called, script):
    found = Answer(rows=[1])
    args, given, code, _ = called(
        run_command, "compare_devices", found, f"run --hardware t4,l4 --price l4=0.8 --gpus 2 {script} --x"
    )
    own, devices, wishes, _, prices, _ = args
    assert (list(own.arguments), devices, prices, given, code) == (["--x"], ["t4", "l4"], {"l4": 0.8}, {}, 0)
    assert wishes == Wishes(gpus=2, steps=3, on_out_of_memory="report")
    assert found.notes == ["prices: l4 $0.8/h as given", run_command.ONE]
    *_, code, _ = called(run_command, "compare_devices", Answer(rows=[]), f"run --hardware t4,l4 {script}")
    assert code == 1


def test_a_script_that_only_tells_its_options_has_no_report(script, monkeypatch):
    def nothing(runs, name):
        raise NothingRanError("nothing ran")

    monkeypatch.setattr(run_command, "report_of", nothing)
    for argument in ("-h", "--help"):
        own = Made(name="train.py", arguments=(argument,))
        assert run_command._report({}, own, Ending(0)) is None
    with pytest.raises(NothingRanError):
        run_command._report({}, Made(name="train.py", arguments=()), Ending(0))
    monkeypatch.setattr(run_command, "report_of", lambda runs, name: f"report of {name}")
    own = Made(name="train.py", arguments=())
    found = [run_command._report({}, own, Ending(1, error)) for error in (None, KeyboardInterrupt(), ValueError())]
    assert found == ["report of train.py", "report of train.py", None]


def test_run_asks_the_launcher_for_the_world(called, script, monkeypatch):
    words = []
    launch = CommandLine(run_command.launch_of([str(script)], 1).script, 2, 4, {"A": "b"})
    monkeypatch.setattr(run_command, "launch_of", lambda given, gpus: words.append((given, gpus)) or launch)
    monkeypatch.setattr(run_command, "first_failed", lambda runs: None)
    monkeypatch.setattr(run_command, "_report", lambda *_: None)
    ran = {0: Made(ending=Made(code=0, error=None))}
    (_, _, wishes, variables), *_ = called(run_command, "run_as_ranks", ran, "run --gpus 8 -- torchrun x.py")
    assert (wishes.gpus, wishes.gpus_per_node, variables) == (8, 4, {"A": "b"})
    called(run_command, "run_as_ranks", ran, "run -m package.train --a")
    assert words == [(["torchrun", "x.py"], 8), (["-m", "package.train", "--a"], 1)]
    _, error, code, _ = called(run_command, "run_as_ranks", ran, "run --gpus 4 -- torchrun x.py")
    assert (code, "--gpus 4, but the launcher starts 8 processes: leave --gpus out" in error) == (2, True)
