"""Scripts whose ranks wait for each other: every rank of the pipeline runs, and rank 0 is on the clock of all."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from flopmeter.cli import main
from flopmeter.run import ranks

PROGRAM = str(Path(__file__).parent / "programs" / "pipeline_train.py")
RANKS, MICROBATCHES = 3, 8


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_script_of_a_pipeline_has_the_bubble_and_the_microbatches_in_flight_of_the_papers(schedule, capsys):
    """Equal stages wait (p - 1) of m + p - 1 times. GPipe keeps all microbatches, 1F1B as many as stages follow.

    Stages are equal but for the first one, which makes no gradient of its input (a twelfth less), and the last."""
    before = sys.excepthook
    arguments = ["run", "--hardware", "h100-sxm5-80gb", "--gpus", str(RANKS), "--format", "json", PROGRAM, schedule]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    report = json.loads(err[err.index("\n{") + 1 if "\n{" in err else 0 :])  # after what torch warns of
    pipeline = report["run"]["pipeline"]
    assert pipeline["bubble_share"] == pytest.approx((RANKS - 1) / (MICROBATCHES + RANKS - 1), abs=0.03)
    # In outputs of one layer: the batch is eight, a forward pass of four layers leaves four. The last stage of 1F1B
    # also keeps the seven outputs whose backward pass is over, and the eight losses, each in the memory of its terms,
    # which are as many as an output has (mse_loss in aten/src/ATen/native/Loss.cpp).
    # torch 2.15 frees an output once it is sent, and the sums differ.
    held = [8 + 8 * 4] * RANKS if schedule == "GPipe" else [8 + 3 * 4, 8 + 2 * 4, 8 + 4 + 7]
    if torch.__version__ < "2.15":
        in_flight = [row["in_flight"] for row in pipeline["rows"]]
        expected = [held[0] / (8 + 4), held[1] / (8 + 4), (held[2] + MICROBATCHES) / (8 + 4 + 1)]
        assert in_flight == pytest.approx(expected, rel=0.01)
    assert pipeline["seconds"] == pytest.approx(report["totals"]["seconds"], rel=0.05)
    assert out.splitlines() == [f"rank 0 of {RANKS}", "a step", "a step"]  # once, though rank 0 ran several times
    assert sys.excepthook is before
    assert not [note for note in report["notes"] if note.startswith("messages with rank")]  # all of them ran


BY_HAND = str(Path(__file__).parent / "programs" / "pipeline_by_hand.py")


def reported(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["run", "--hardware", "h100-sxm5-80gb", "--format", "json", *arguments]) == 0
    err = capsys.readouterr().err
    report: dict[str, Any] = json.loads(err[err.index("\n{") + 1 if "\n{" in err else 0 :])
    return report


@pytest.mark.parametrize(("schedule", "in_flight"), [("GPipe", [8, 8, 8]), ("1F1B", [3, 2, 1])])
def test_a_pipeline_written_out_by_send_and_recv_has_the_bubble_of_the_papers(schedule, in_flight, capsys):
    report = reported(["--gpus", str(RANKS), BY_HAND, schedule], capsys)
    pipeline = report["run"]["pipeline"]
    assert [row["rank"] for row in pipeline["rows"]] == [0, 1, 2]
    assert any("first step are those of rank 0 alone" in note for note in report["notes"])
    assert pipeline["bubble_share"] == pytest.approx((RANKS - 1) / (MICROBATCHES + RANKS - 1), abs=0.03)
    # Of its five tensors a microbatch that was received keeps what the first layer read, and the sum of gradients.
    assert [row["in_flight"] for row in pipeline["rows"]] == pytest.approx(in_flight, abs=0.8)
    assert not [note for note in report["notes"] if note.startswith("messages with rank")]


def test_a_report_tells_waits_for_other_ranks_from_waits_for_the_host(capsys):
    """GPipe of three stages and eight microbatches waits for two tenths; its messages take far less."""
    assert main(["run", "--hardware", "h100-sxm5-80gb", "--gpus", str(RANKS), BY_HAND, "GPipe"]) == 0
    text = capsys.readouterr().err
    assert "communication includes the bubble, in which rank 0 waits for other ranks: 2" in text
    assert "waits for other ranks included" in text
    assert "waits for the host before it" not in text
    heading = next(line for line in text.splitlines() if "bubble ms" in line)
    assert heading.split()[0] == "rank"  # the ranks of a script need not be stages


ENDS_FIRST = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
x = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.empty(1, device="cuda"))])
for _ in range(2):
    if dist.get_rank() == 0:
        dist.send(x @ x, 1)
    else:
        dist.recv(x, 0)
        x @ x @ x @ x
    optimizer.step()
"""


def test_where_rank_0_ends_first_a_note_says_how_long_all_take(tmp_path: Path, capsys):
    script = tmp_path / "train.py"
    script.write_text(ENDS_FIRST)
    report = reported(["--gpus", "2", str(script)], capsys)
    later = report["run"]["pipeline"]["seconds"]
    assert later > 1.3 * report["totals"]["seconds"]
    (note,) = [note for note in report["notes"] if note.startswith("rank 0 ends first")]
    assert f"until all ranks have ended a step takes {1e3 * later:.2f}" in note


KEEPS = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
weight = torch.nn.Parameter(torch.empty(1, device="cuda"))
optimizer = torch.optim.SGD([weight])
results = []
for _ in range(6):
    x = weight * torch.zeros(2**28, device="cuda")
    if dist.get_rank() == 0:
        results.append(x.detach().relu())
        dist.send(results[-1][:8], 1)
    else:
        dist.recv(torch.zeros(8, device="cuda"), 0)
    x.sum().backward()
    optimizer.step()
"""


def test_memory_that_grows_is_told_of_a_script_whose_ranks_run_together_too(tmp_path: Path, capsys):
    script = tmp_path / "train.py"
    script.write_text(KEEPS)
    assert main(["run", "--hardware", "h100-sxm5-80gb", "--gpus", "2", str(script)]) == 0
    first_lines = capsys.readouterr().err.split("where to win")[0]
    assert "each step leaves 1.07 GB in memory that no later one frees" in first_lines


def test_ranks_beyond_the_most_that_run_are_named_as_ready(monkeypatch, capsys):
    monkeypatch.setattr(ranks, "MOST_RANKS", 2)
    report = reported(["--gpus", str(RANKS), BY_HAND, "GPipe"], capsys)
    assert [row["rank"] for row in report["run"]["pipeline"]["rows"]] == [0, 1]
    (note,) = [note for note in report["notes"] if note.startswith("messages with rank")]
    assert note.startswith("messages with rank 2:")


FAILS = """
import sys, torch, torch.distributed as dist
dist.init_process_group("nccl")
if not hasattr(sys, "_warned"):
    sys._warned = True
    print("a library warns once in a process " * 100, file=sys.stderr)
if dist.get_rank():
    dist.send_object_list(["ready"], 0)
else:
    dist.recv_object_list([None], 1)
try:
    torch.ones(1 << 40, device="cuda")
except torch.OutOfMemoryError as error:
    raise RuntimeError("a stage failed") from error
"""


def test_a_rank_that_started_again_shows_its_traceback_and_what_was_behind_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "_warned", False, raising=False)
    monkeypatch.delattr(sys, "_warned")
    (tmp_path / "fails.py").write_text(FAILS)
    assert main(["run", "--hardware", "h100-sxm5-80gb", "--gpus", "2", str(tmp_path / "fails.py")]) == 1
    err = capsys.readouterr().err
    assert "RuntimeError: a stage failed\n" in err
    assert "fails.py ended with RuntimeError: by the model of the device's memory it does not fit" in err


MESH = """
made = []


def make():
    assert not made, "a mesh is made once"
    made.append(1)
"""
STAGES = """
import torch, torch.distributed as dist
from stages import mesh
dist.init_process_group("nccl")
mesh.make()
if dist.get_rank():
    dist.send_object_list(["ready"], 0)
else:
    dist.recv_object_list([None], 1)
torch.ones(4, device="cuda").add_(1)
"""


def test_a_rank_begins_with_modules_of_its_own_as_a_process_does(tmp_path, capsys):
    before = set(sys.modules)
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "mesh.py").write_text(MESH)
    (tmp_path / "train.py").write_text(STAGES)
    assert main(["run", "--hardware", "h100-sxm5-80gb", "--gpus", "2", str(tmp_path / "train.py")]) == 0, (
        capsys.readouterr().err
    )
    assert not [name for name in set(sys.modules) - before if name.partition(".")[0] == "stages"]


REGISTERS = {
    "a library of operators": """
library = torch.library.Library("of_a_stage", "DEF")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
""",
    "an operator": """
torch.library.define("of_a_stage::twice", "(Tensor x) -> Tensor")
torch.library.impl("of_a_stage::twice", "CompositeExplicitAutograd", lambda x: x * 2)
""",
    "a custom operator": """
@torch.library.custom_op("of_a_stage::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

twice.register_fake(torch.empty_like)
""",
}
RUNS_TWICE = """
import torch, torch.distributed as dist
from stages import registers
dist.init_process_group("nccl")
if dist.get_rank():
    dist.send_object_list(["ready"], 0)
else:
    dist.recv_object_list([None], 1)
for _ in range(3):
    torch.ops.of_a_stage.twice(torch.ones(4, device="cuda"))
"""


@pytest.mark.parametrize("text", REGISTERS.values(), ids=REGISTERS)
@pytest.mark.parametrize("in_main", [False, True], ids=["in a module", "in the script"])
def test_what_a_script_registers_with_torch_once_a_process_each_rank_registers(tmp_path, capsys, text, in_main):
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "registers.py").write_text("" if in_main else "import torch\n" + text)
    (tmp_path / "train.py").write_text(("import torch\n" + text if in_main else "") + RUNS_TWICE)
    report = reported(["--gpus", "2", str(tmp_path / "train.py")], capsys)
    assert report["totals"]["flops"] == 3 * 4  # one for each element
    assert not hasattr(torch.ops.of_a_stage, "twice")


IMPORTS_LATE = """
import torch, torch.distributed as dist
import torch.imported_late
dist.init_process_group("nccl")
if dist.get_rank():
    dist.send_object_list(["ready"], 0)
else:
    dist.recv_object_list([None], 1)
torch.ops.of_torch.twice(torch.ones(4, device="cuda"))
"""


def test_what_torch_registers_when_a_program_makes_it_import_a_module_stays(tmp_path, monkeypatch, capsys):
    """As inductor registers its prims once a process: the second rank's functions were not compiled without them."""
    (tmp_path / "site-packages").mkdir()
    text = REGISTERS["a library of operators"].replace("of_a_stage", "of_torch")
    (tmp_path / "site-packages" / "imported_late.py").write_text("import torch\n" + text)
    monkeypatch.setattr(torch, "__path__", [*torch.__path__, str(tmp_path / "site-packages")])
    (tmp_path / "train.py").write_text(IMPORTS_LATE)
    try:
        assert reported(["--gpus", "2", str(tmp_path / "train.py")], capsys)["totals"]["flops"] == 4
    finally:
        sys.modules.pop("torch.imported_late").library._destroy()
        del torch.imported_late


COMPILED = "import stages._bisect\nassert stages._bisect.bisect_left([1, 3], 2) == 1\n" + STAGES


def test_a_package_with_a_compiled_module_begins_anew_for_each_rank_but_for_that_module(tmp_path, capsys):
    """Megatron-LM has one that reads its data, and a module that holds the arguments, which are set once."""
    file = find_spec("_bisect").origin
    if not str(file).endswith(tuple(EXTENSION_SUFFIXES)):
        pytest.skip("this Python has no compiled modules of its own")
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "mesh.py").write_text(MESH)
    shutil.copy(file, tmp_path / "stages")
    (tmp_path / "train.py").write_text(COMPILED)
    reported(["--gpus", "2", str(tmp_path / "train.py")], capsys)


def test_a_resolver_of_omegaconf_each_rank_registers(tmp_path, capsys):
    omegaconf = pytest.importorskip("omegaconf")
    text = "from omegaconf import OmegaConf\nOmegaConf.register_new_resolver('of_a_stage', lambda x: 2 * x)\n"
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "mesh.py").write_text(MESH + text)
    (tmp_path / "train.py").write_text(text.replace("of_a_stage", "of_the_script") + STAGES)
    reported(["--gpus", "2", str(tmp_path / "train.py")], capsys)
    assert not omegaconf.OmegaConf.has_resolver("of_a_stage")
    assert not omegaconf.OmegaConf.has_resolver("of_the_script")


def test_a_package_that_pip_installed_into_a_folder_is_imported_once(tmp_path, monkeypatch, capsys):
    """`pip install --target`: it may hold what is made only once."""
    folder = tmp_path / "target"
    (folder / "packaged_thing-1.0.dist-info").mkdir(parents=True)
    (folder / "packaged_thing.py").write_text("import sys\nassert not hasattr(sys, 'packaged')\nsys.packaged = True\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "packaged", True, raising=False)
    monkeypatch.delattr(sys, "packaged")
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "mesh.py").write_text(MESH)
    (tmp_path / "train.py").write_text("import packaged_thing\n" + STAGES)
    reported(["--gpus", "2", str(tmp_path / "train.py")], capsys)
    del sys.modules["packaged_thing"]


FAILS_FIRST = """
import torch, torch.distributed as dist
dist.init_process_group("nccl")
if dist.get_rank():
    raise RuntimeError("a stage failed")
dist.recv_object_list([None], 1)
"""


def test_the_error_of_a_rank_is_told_and_not_that_others_wait_for_it(tmp_path, capsys):
    (tmp_path / "fails.py").write_text(FAILS_FIRST)
    assert main(["run", "--hardware", "h100-sxm5-80gb", "--gpus", "2", str(tmp_path / "fails.py")]) == 1
    err = capsys.readouterr().err
    assert "RuntimeError: a stage failed\n" in err
    assert "fails.py ended with RuntimeError" in err
    assert "would hang" not in err
