"""Wrong uses of the command and of the interface: each is one error of one line that names the mend, before any work;
none is ignored in silence."""

import functools
import os
import shlex
import sys
import time

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import flopmeter
from flopmeter import (
    FlopMeter,
    compare,
    count,
    largest_batch,
    load_hardware,
    on_meta,
    plan,
    serving,
    sweep,
    time_generation,
    time_pipeline,
)
from flopmeter.ask.scaling import scale
from flopmeter.cli import main
from flopmeter.cli.progress import Progress
from flopmeter.distributed import world

FILES = {
    "mine.py": "import torch\ndef build(batch=2):\n    return torch.nn.Linear(8, 8), torch.zeros(batch, 8)\n",
    "train.py": "print('ran')\n",
    "empty.json": "{}",
}
COMMANDS = {
    # what is ignored, or contradicts another option
    "table encoder-layer --picture memory": "add --plot FILE.png",
    "table encoder-layer --dtype bf16 --autocast bf16": "give one of the two",
    "table encoder-layer --batch 2 --batch 4": "--batch is given twice",
    "table encoder-layer --by op --format json": "json holds every grouping: leave --by out",
    "table encoder-layer --speed-up --by op": "leave --by out",
    "table encoder-layer --speed-up --mode compiled": "leave --mode out",
    "table encoder-layer --explain-compile --format json": "leave --format json out",
    "table encoder-layer --compiler --mode eager": "give them alone",
    "table encoder-layer --format html -o x.json": "contradicts the ending of x.json",
    "compare encoder-layer -o x.html": "this command has no html; it has text, markdown, csv, json",
    "table encoder-layer --optimizer sgd": "add --train",
    "table encoder-layer --checkpointing": "add --train",
    "table encoder-layer --train --checkpointing": "call torch.utils.checkpoint in its code",
    "table encoder-layer --train --optimizer lamb": "known: adadelta",
    "table encoder-layer --train --optimizer sgd,momemtum=1": "with KEY momentum",
    "table encoder-layer --train --optimizer sgd,lr=-1": "Invalid learning rate",
    "table encoder-layer -o x.json --trace x.json": "name a file for each",
    "compare encoder-layer --hardware l4 --price l4=1 l4=2": "give it once",
    "compare encoder-layer --hardware l4 --price t4=1": "--hardware is l4; name t4 there or leave it out",
    "compare encoder-layer --hardware l4,t4 --sort cost": "to sort by cost, give prices",
    "compare encoder-layer --hardware l4,l4": "name each device once",
    "sweep encoder-layer --batch 4,4": "give each size once",
    "sweep encoder-layer --batch 1,2 --seq 32,64": "give one value for the other",
    "serve hf:llama --prompt 5 --output 5 --acceptance .5": "give its model with --draft",
    "serve hf:llama --prompt 5 --output 5 --disaggregated --no-chunks": "exclude each other",
    "serve hf:llama --prompt 5 --output 5 --slo ttft=1s,ttft=2s": "give it once",
    "serve hf:llama --prompt 5 --output 5 --disaggregated --chunk 4": "exclude each other",
    "serve hf:llama --prompt 5 --output 1 --slo tpot=10ms": "leave tpot out",
    "plan llama-3-8b --gpus 8 --only tp=2 tp=4": "give it once, with a comma between its values",
    "plan llama-3-8b --gpus 8 --whole 20": "give rows=20 too",
    "measure --show run.json --clock cpu": "leave --clock out",
    "measure --show run.json --device cpu": "leave --device out",
    "table encoder-layer --speed-up -o x.html": "--speed-up has no html; it has text, markdown, csv, json",
    "run train.py --hardware l4": "put it before the script's name",
    "run --gpus 8 torchrun --nproc-per-node 4 train.py": "leave --gpus out",
    # what has the wrong form
    "table encoder-layer --batch 10^12": "expected a positive whole number, at most 1,000,000,000",
    "table encoder-layer --batch 1000000000000": "at most 1,000,000,000",
    "table encoder-layer --batch 1000000000 --seq 1000000000": "take smaller ones",
    "table encoder-layer -o x.pdf": "--plot draws pictures",
    "run -o x.json.gz train.py": ".gz says no format: end it in .html, .json",
    "run --hardware l4,l4 train.py": "names l4 twice",
    "run --hardware l4,t4 --format html train.py": "it has text, markdown, csv, json",
    "run --hardware l4 --price l4=1 train.py": "name several",
    "run --hardware l4,t4 --trace t.json train.py": "name it alone in --hardware",
    "run --hardware l4 --by op --format json train.py": "json holds every grouping: leave --by out",
    "run --trac t.json train.py": "did you mean --trace?",
    "measure --show empty.json": "write one with its -o",
    "table encoder-layer --trace x.txt": "end its name in .json or .json.gz",
    "table encoder-layer --plot x.txt": "end its name in one of .png, .svg, .pdf",
    "table encoder-layer -o missing/x": "there is no folder missing",
    "table encoder-layer -o .": "name a file",
    "table encoder-layer --hardware l4,t4": "flopmeter compare",
    "compare encoder-layer --hardware l4,": "without a comma at either end",
    "table encoder-layer --routing some": "expected balanced, independent or a number from 1 to 2",
    "table encoder-layer --routing 3": "a number from 1 to 2",
    "table encoder-layer --mask-fraction 25%": "expected a share from 0 to 1",
    "diff a.json b.json --fail-above 5": "a percentage such as 5%",
    "calibrate -o x.txt": "must end in .yaml",
    "serve hf:llama --prompt 5 --output 5 --slo ttft": "such as 500ms",
    "serve hf:llama --prompt 5 --output 5 --slo ttft=500": "such as 500ms or 0.5s, not '500'",
    "plan llama-3-8b --gpus 8 --memory -5": "expected a positive number, not '-5'",
    "plan llama-3-8b --gpus 8 --whole -1": "whole must be a whole number from 0 on",
    "plan llama-3-8b --gpus 8 --only recompute=some": "none of none, selective, full",
    "measure -o x.txt": "must end in .json",
    "run --step-marker nvtx: train.py": "give optimizer, forward, nvtx:NAME or module:function",
    "run torchrun --nproc-per-node": "write torchrun [its options] train.py",
    "run --steps 0 train.py": "a positive whole number",
    "run --step-marker banana train.py": "give optimizer, forward, nvtx:NAME or module:function",
    # what is not there
    "-x": "unrecognized arguments: -x",
    "--hardware l4": "the command comes first",
    "tabel encoder-layer": "near to it: table",
    "train.py --batch_size 64": "train.py is a script: flopmeter run train.py",
    "table encoder-layer --bacth 2": "did you mean --batch?",
    "table encoder-layer --depth 2": "unrecognized arguments: --depth 2 (see flopmeter table --help)",
    "table hf:empty.json": 'it lacks "model_type", such as "llama"',
    "table encoder-layer extra": "unrecognized arguments: extra",
    "table": "TARGET",
    "table bert-bass": "near to it: bert-base",
    "table mine.py": "mine.py:build",
    "table mine.py:nope": "has no function nope",
    "table nothere.py:build": "there is no file nothere.py",
    "table mine.py:build --seq 5": "takes no seq; it takes batch",
    "count encoder-layer --image-size 224": "takes no image_size; it takes batch, seq, dtype",
    "table encoder-layer --hardware h100": "h100-sxm5-80gb",
    "table encoder-layer --hardware nope": "`flopmeter hardware` lists the names",
    "fit encoder-layer --batch 3": "unrecognized arguments: --batch 3",
    "check nothere.json": "cannot be read",
    "explain admm": "near to it: addmm",
    "explain ''": "name an op of torch's",
    "run": "name a script",
    "run nothere.py": "no such script",
    "run ''": "name a script",
    "run .": "name the script in it",
    "serve hf:bert --prompt 5 --output 5": "take a causal language model",
    "serve encoder-layer --prompt 5 --output 5": "give hf:CONFIG.json, hf:TYPE or one of",
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_command_is_one_line_that_names_the_mend(command, folder, capsys):
    assert main(shlex.split(command)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("flopmeter: ")
    assert err.count("\n") == 1
    assert COMMANDS[command] in err
    assert sorted(os.listdir(folder)) == sorted(FILES)  # nothing is left behind


def meta(*shape):
    return torch.empty(shape, device="meta")


@functools.cache
def metered():
    with FlopMeter() as meter:
        meta(4, 4) @ meta(4, 4)
    return meter


def small():
    return meta(4).sin()


def served(**options):
    return serving("hf:llama", hardware=["l4"], **{"prompt": 5, "output": 5, **options})


INTERFACE = {
    "FlopMeter('h100')": "h100-sxm5-80gb",
    "FlopMeter(['l4'])": "expected the name of a device",
    "FlopMeter(compile='yes')": "one of False, True, 'rules'",
    "FlopMeter(causal=True)": "known: full, exact",
    "FlopMeter(clocks='boost')": "known: sustained, burst",
    "FlopMeter(strict='yes')": "strict must be True or False",
    "FlopMeter(as_cuda=0)": "as_cuda must be True or False",
    "FlopMeter(routing=1.3)": "{'imbalance': a number from 1 to 2}",
    "FlopMeter(checks=True)": "checks must be None or 'hold'",
    "FlopMeter(mask_fraction=2)": "a number from 0 to 1",
    "FlopMeter(cluster='dgx')": "known: dgx-a100",
    "FlopMeter(moed='eager')": "unexpected keyword argument 'moed'",
    "FlopMeter(dollars_per_kwh='0.3')": "dollars per kWh, such as 0.3",
    "FlopMeter().report()": "run the program inside `with meter:` first",
    "metered().report(mode='fast')": "known: eager, compiled",
    "metered().report(ops=3)": "a range of trace.ops",
    "metered().report(ops=range(5, 9))": "range(5, 9) of 3 ops",
    "metered().report(ops=range(0, 1, 2))": "in a row",
    "metered().report().render('pdf')": "known: text, markdown, csv, json, html",
    "metered().report().rows('colour')": "known: class, op, module, phase, kernel",
    "metered().report().rows('op', depth=1)": "depth is how deep rows('module') goes",
    "metered().report().rows('module', depth=0)": "1 or more",
    "metered().report().rows('module', depth='2')": "1 or more",
    "metered().report().save_trace('x.txt')": ".json or .json.gz",
    "metered().report().explain_compile()": "model = torch.compile(model)",
    "metered().report(mode='compiled').speed_up()": "from an eager report",
    "compare(small, 'l4')": "such as ['l4']",
    "compare(small, [])": "see available_hardware()",
    "compare(small, ['l4', 'l4'])": "name each device once",
    "compare(small, {'l4': 1})": "a list of devices",
    "compare(small, ['l4'], 'fast')": "unknown mode 'fast'; known: eager",
    "compare(small, ['l4'], prices=1.0)": "prices must be a mapping such as {'l4': 0.8}",
    "compare(small, ['l4'], prices={'l4': True})": "dollars per hour, not True",
    "compare(small, ['l4'], sort='cost')": "give prices",
    "compare(small, ['l4'], prices={'t4': 1})": "not among the devices l4",
    "compare(small, ['l4'], prices={'l4': '1'})": "dollars per hour, not '1'",
    "compare(small, ['l4'], items='4')": "a positive number of items",
    "compare(3, ['l4'])": "a function without arguments",
    "sweep(small, 4)": "a list such as [1, 2, 4]",
    "sweep(small, '1,2')": "a list such as [1, 2, 4]",
    "sweep(small, [True])": "positive whole numbers",
    "sweep(3, [1])": "a function of the batch",
    "sweep(meta, [1], items=-1)": "more than 0",
    "sweep(meta, [1], items='one')": "more than 0",
    "sweep(meta, [1], mode='fast')": "unknown mode 'fast'",
    "largest_batch(3, 'l4')": "a function of the batch",
    "largest_batch(lambda batch: None, 'l4')": "ran no op of torch",
    "largest_batch(meta, 'cpu-i7-12700h')": "hardware.replace(memory_gb=...)",
    "largest_batch(meta, 'l4', limit='8')": "limit must be a positive whole number, not '8'",
    "count(nn.Linear, meta(2, 8))": "Linear is its class: make one, Linear(...)",
    "count(nn.Linear(8, 8), meta(2, 8)).down_to('2')": "depth must be a whole number from 0 on",
    "count('gpt2')": "count(model, x)",
    "count(nn.Linear(8, 8))": "missing 1 required positional argument",
    "count(lambda: None)": "ran no op of torch",
    "on_meta(torch.eye(4).to_sparse())": "meter the program on real CPU tensors",
    "on_meta('gpt2')": "on_meta takes tensors, a module or what holds them, not 'gpt2'",
    "on_meta(nn.Linear)": "on_meta takes tensors, a module",
    "flopmeter.plots.roofline(3)": "as meter.report() gives it, or a list of them, not 3",
    "load_hardware('nope.yaml')": "there is no such file",
    "load_hardware('l4').replace(tdp_w=-3)": "a number over 0",
    "load_hardware('l4').contraction_peak('fp3')": "it has: fp64",
    "flopmeter.register_cost(3)": "an op such as torch.ops.mine.op",
    "time_generation(lambda n: None, 1, 'l4')": "at least two new tokens",
    "time_generation(lambda n: None, 2.5, 'l4')": "at least two new tokens",
    "time_generation(3, 4, 'l4')": "a function of how many tokens to make, not 3",
    "time_generation(lambda n: None, 4, 'l4', sequences=0)": "sequences must be a positive whole number",
    "served(disaggregated=True, chunk=512)": "chunk and disaggregated exclude each other",
    "served(disaggregated=True, chunk=None)": "chunk and disaggregated exclude each other",
    "served(disaggregated='yes')": "disaggregated must be True or False",
    "served(chunk='512')": "chunk must be a positive whole number, not '512'",
    "served(chunk=1.5)": "chunk must be a positive whole number",
    "served(prompt=True)": "prompt must be a positive whole number",
    "served(prefix='half')": "prefix is a share from 0 to 1, not 'half'",
    "served(slo=0.5)": "such as 'ttft=500ms,tpot=30ms'",
    "served(prices=1.0)": "prices must be a mapping",
    "serving('hf:llama', hardware=['l4', 'l4'], prompt=5, output=5)": "name each device once",
    "serving('hf:llama', hardware=3, prompt=5, output=5)": "a list of devices",
    "serving('hf:llama', hardware=['l4'], prompt=0, output=5)": "prompt must be a positive whole number",
    "serving('hf:llama', hardware=['l4'], prompt=5, output=5, acceptance=.5)": "give its model as draft",
    "plan('llama-3-8b', '8')": "world must be a positive whole number",
    "plan('llama-3-8b', 8, mode='fast')": "unknown mode 'fast'",
    "plan('llama-3-8b', 8, memory='80')": "memory must be a positive number, not '80'",
    "plan('llama-3-8b', 8, whole=-1)": "whole must be a whole number from 0 on",
    "plan('llama-3-8b', 8, async_tp='yes')": "async_tp must be True or False",
    "plan('llama-3-8b', 8, workers=0)": "workers must be a positive whole number",
    "plan('llama-3-8b', 8, only=['tp'])": "only must be a mapping such as {'tp': [4, 8]}",
    "plan('llama-3-8b', 8, tensor_parallel=8)": "tensor_parallel must be a mapping such as {'layers.*.up'",
    "plan('llama-3-8b', 8, executor=2)": "executor must be one of concurrent.futures",
    "plan('llama-3-8b', 8, only={'tp': []})": "name a value, or leave it out",
    "plan('llama-3-8b', 8, loss='mean')": "a function of the model and token ids, not 'mean'",
    "scale(3, [{'dp': 2}])": "a function of the mesh, which returns the step, not 3",
    "scale(lambda mesh: small, {'dp': 2})": "such as [{'dp': 2}]",
    "scale(lambda mesh: small, ['dp'])": 'a mapping such as {"dp": 8}',
    "scale(lambda mesh: small, [{'dp': 2}], mode='fast')": "unknown mode 'fast'",
    "scale(lambda mesh: small, [{'dp': 2}], items='4')": "items must be a positive number",
    "scale(lambda mesh: 3, [{'dp': 2}])": "return the step, a function without arguments, not 3",
    "time_pipeline(3, {'pp': 2})": "a function of the mesh, which returns the step, not 3",
    "time_pipeline(lambda mesh: small, 2)": "mesh must be a mapping",
    "time_pipeline(lambda mesh: small, {'pp': 2}, mode='fast')": "unknown mode 'fast'",
    "world(8, ['dp']).__enter__()": "write names and sizes of its dimensions",
    "flopmeter.cuda('l4', gpus=0).__enter__()": "gpus must be a positive whole number",
    "flopmeter.cuda('l4', steps=0).__enter__()": "steps must be a positive whole number",
    "flopmeter.check('nothere.json')": "cannot be read",
}


@pytest.mark.parametrize("use", INTERFACE)
def test_a_wrong_use_of_the_interface_is_one_line_that_names_the_mend(use, folder):
    names = {**globals(), "flopmeter": flopmeter, "nn": nn}
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        eval(use, names)
    message = str(caught.value)
    assert INTERFACE[use] in message
    assert "\n" not in message
    assert sorted(os.listdir(folder)) == sorted(FILES)
    assert _get_current_dispatch_mode() is None  # no meter is left open


def test_both_tables_hold_forty_and_more_of_every_part_that_is_public():
    assert len(COMMANDS) >= 40
    assert len(INTERFACE) >= 40
    used = (compare, count, largest_batch, load_hardware, on_meta, plan, serving, sweep, time_generation)
    used += (scale, time_pipeline, world)
    assert all(any(each.__name__ in use for use in INTERFACE) for each in used)


class Terminal:
    def __init__(self):
        self.written = ""

    def isatty(self):
        return True

    def write(self, text):
        self.written += text

    def flush(self):
        pass


def test_progress_is_told_after_a_while_on_a_terminal_and_cleared_at_the_end(monkeypatch):
    monkeypatch.setattr("flopmeter.cli.progress.PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("flopmeter.cli.progress.TICK_SECONDS", 0.01)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Progress("sweep") as progress:
        for step in progress.over([1, 2, 4]):
            while f"sweep: {[1, 2, 4].index(step) + 1} of 3" not in terminal.written:
                time.sleep(0.001)
        progress.stop()  # as a command does before it prints
        assert terminal.written.endswith("\r\x1b[K")
        told = terminal.written
    assert terminal.written == told


def test_progress_says_nothing_in_a_moment_or_in_a_pipe(monkeypatch, capsys):
    with Progress("table"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with Progress("table"):
        pass
    assert terminal.written == ""
