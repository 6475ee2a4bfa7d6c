"""Programs of DeepSpeed, Megatron-Core and torchao, where these are installed: their collectives by closed forms."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from flopmeter import FlopMeter
from flopmeter.distributed import world

PROGRAMS = Path(__file__).parent / "programs"
PARAMETERS = 4 * (1024 * 1024 + 1024)


def collectives(ranks: int, program: str, *arguments: str, out: Path) -> dict[str, tuple[int, int, int]]:
    """Calls and bytes read and written of each kind, in a steady step of rank 0. In a process of its own: the libraries
    keep their groups in it."""
    options = ["--gpus", str(ranks), "--hardware", "h100-sxm5-80gb", "--format", "json", "-o", str(out)]
    command = [sys.executable, "-m", "flopmeter", "run", *options, str(PROGRAMS / program), *arguments]
    subprocess.run(command, check=True, timeout=600)
    rows = json.loads(out.read_text())["rows"]["op"]
    found = {row["name"]: (row["calls"], row["bytes_read"], row["bytes_written"]) for row in rows}
    return {name: row for name, row in found.items() if "reduce" in name or "gather" in name}


def test_zero_1_sums_gradients_and_gathers_the_parameters_that_each_rank_has_updated(tmp_path: Path):
    pytest.importorskip("deepspeed")
    found = collectives(8, "deepspeed_train.py", "1", out=tmp_path / "report.json")
    whole = 2 * PARAMETERS  # in bf16
    calls, read, written = found["c10d::allreduce_"]
    assert whole <= read == written < whole + 100 * calls  # and a few numbers
    assert found["c10d::_allgather_base_"] == (1, whole // 8, whole)


def test_zero_3_gathers_parameters_once_where_they_stay_for_the_backward_pass_and_scatters_gradients(tmp_path: Path):
    """DeepSpeed keeps up to 1e9 gathered parameters (stage3_max_live_parameters)."""
    pytest.importorskip("deepspeed")
    found = collectives(8, "deepspeed_train.py", "3", out=tmp_path / "report.json")
    _, read, written = found["c10d::_allgather_base_"]
    assert (read, written) == (2 * PARAMETERS // 8, 2 * PARAMETERS)
    assert found["c10d::_reduce_scatter_base_"][1:] == (2 * PARAMETERS, 2 * PARAMETERS // 8)


def test_a_layer_of_megatron_core_sums_twice_forward_and_twice_backward(tmp_path: Path):
    """Megatron-LM, arXiv 1909.08053: two all-reduces of the activations a layer and pass; one for the embedding, one
    for the gradient of the head's input; and three of a number for each token in the loss."""
    pytest.importorskip("megatron.core")
    found = collectives(2, "megatron_train.py", out=tmp_path / "report.json")
    tokens = 4 * 128
    nbytes = 4 * ((2 * 2 * 2 + 2) * tokens * 512 + 3 * tokens)
    assert found == {"c10d::allreduce_": (2 * 2 * 2 + 2 + 3, nbytes, nbytes)}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("gathers_fp8", "itemsize"), [(False, 2), (True, 1)])
def test_torchaos_layers_are_gathered_in_a_byte_a_parameter_if_asked_and_their_largest_values_are_agreed_on(
    gathers_fp8: bool, itemsize: int
):
    """Once, since each layer is a root of FSDP2. Each rank casts its shard, with the largest value of all shards."""
    float8 = pytest.importorskip("torchao.float8")
    with world(4):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.Linear(512, 256, bias=False))
            x = torch.empty(64, 256, dtype=torch.bfloat16, requires_grad=True)
        config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=gathers_fp8)
        float8.convert_to_float8_training(model, config=config)
        for layer in model:
            fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        with FlopMeter("h100-sxm5-80gb") as meter:
            model(x).sum().backward()
    rows = {row.name: row for row in meter.report().rows("op")}
    assert rows["c10d::_allgather_base_"].bytes_written == 2 * 256 * 512 * itemsize
    assert rows["c10d::_reduce_scatter_base_"].bytes_read == 2 * 256 * 512 * 4
    assert ("_c10d_functional::all_reduce" in rows) == gathers_fp8
