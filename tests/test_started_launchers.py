"""Scripts that start a launcher by themselves: what they start is metered in their place, as if it was typed."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import pytest
import torch

from flopmeter.run.launchers import launch_of
from flopmeter.run.started_launchers import StartsLauncher, _look_at

TRAINS = """
import os, sys, torch
model = torch.nn.Linear(64, 32).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print("of", os.environ.get("WORLD_SIZE"), "with", os.environ.get("SEED"), "given", sys.argv[1:])
for _ in range(10):
    model(torch.zeros(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
BY_POPEN = """
import os, subprocess, sys
words = [sys.executable, "-u", "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", "--lr", "1"]
subprocess.run(words, env={**os.environ, "SEED": "7"}, check=True)
"""
BY_EXEC = """
import os
os.environ["SEED"] = "7"
os.execvp("torchrun", ["torchrun", "--nproc-per-node=2", "train.py", "--lr", "1"])
"""
BY_ONE_LINE = """
import os, subprocess
subprocess.Popen("torchrun --nproc-per-node 2 train.py --lr 1", shell=True, env={**os.environ, "SEED": "7"}).wait()
"""


@pytest.mark.parametrize("starts", [BY_POPEN, BY_EXEC, BY_ONE_LINE])
def test_a_launcher_that_a_script_starts_is_metered_in_its_place(starts, tmp_path):
    """Of the layer two products of 8 x 64 x 32 multiply-adds run in a step: its input has no gradient."""
    (tmp_path / "train.py").write_text(TRAINS)
    (tmp_path / "starts.py").write_text(starts)
    command = ["-m", "flopmeter", "run", "--hardware", "l40s", "--format", "json", "-o", "report.json", "starts.py"]
    ran = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.stdout == "of 2 with 7 given ['--lr', '1']\n", ran.stderr
    assert "starts.py starts a launcher, which is metered in its place: flopmeter run --hardware l40s" in ran.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert sum(row["flops"] for row in report["rows"]["class"] if "contraction" in row["name"]) == 2 * 2 * 8 * 64 * 32


def test_what_deepspeed_starts_on_each_node_is_understood():
    """deepspeed writes the world in base64: the numbers of the GPUs of each host."""
    world = base64.urlsafe_b64encode(json.dumps({"a": [0, 1, 2, 3], "b": [0, 1, 2, 3]}).encode()).decode()
    launch = launch_of(["-m", "deepspeed.launcher.launch", f"--world_info={world}", "train.py", "--lr", "1"], gpus=1)
    assert (launch.script.target, launch.script.arguments) == ("train.py", ("--lr", "1"))
    assert (launch.nodes, launch.gpus_per_node, launch.script.is_told_its_rank) == (2, 4, True)


def test_the_python_of_a_rank_is_the_launchers_that_starts_it_and_any_other_python_is_the_scripts_own():
    """accelerate's launcher starts the script alone, torch's each of its ranks with the numbers of the world."""
    own = {"__name__": "own", "look": _look_at}
    exec("def start(*given): look(*given)", own)
    own["start"]([sys.executable, "prepare.py"], None, None)
    for name, environment, before in (
        ("accelerate.commands.launch", {}, []),
        (
            "torch.distributed.elastic.multiprocessing",
            {"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"},
            ["torchrun", "--nnodes=2", "--nproc-per-node=4"],
        ),
    ):
        module = {"__name__": name, "look": _look_at}
        exec("def start(*given): look(*given)", module)
        with pytest.raises(StartsLauncher) as start:
            module["start"]([sys.executable, "-u", "train.py", "--lr", "1"], environment, None)
        assert start.value.words == [*before, "python", "train.py", "--lr", "1"]


@pytest.mark.parametrize("command", ["", [], "torchrun train.py && rm -r out", "torchrun 'train.py", ["torchrunner"]])
def test_what_is_not_one_launcher_is_started_as_the_script_asks(command):
    assert _look_at(command, None, None) is None


def test_a_parameter_may_carry_a_number_named_as_the_method_of_its_strides(tmp_path):
    """As Megatron-LM's layers of 2020 have it, and gpt-neox'. 8 x 64 x 32 multiply-adds twice."""
    text = TRAINS.replace("optimizer = ", "model.bias.stride = model.weight.stride = 1\noptimizer = ")
    (tmp_path / "train.py").write_text(text)
    command = ["-m", "flopmeter", "run", "--format", "json", "-o", "report.json", "train.py"]
    ran = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert sum(row["flops"] for row in report["rows"]["class"] if "contraction" in row["name"]) == 2 * 2 * 8 * 64 * 32
    assert torch.nn.Parameter(torch.zeros(1)).stride() == (1,)
