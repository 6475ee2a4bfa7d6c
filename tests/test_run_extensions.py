"""CUDA kernels that a package compiles when it runs: DeepSpeed's Adam, and its launcher, which starts such programs."""

from __future__ import annotations

import json

import pytest
from torch.utils.cpp_extension import CUDA_HOME

from flopmeter.cli import main

COMPILES = """
import sys
import torch
from torch.utils.cpp_extension import load

kernels = load(name=sys.argv[1], sources=["nowhere.cu"], with_cuda=True)
parameters = [torch.nn.Parameter(torch.zeros(size, device="cuda")) for size in (3_000, 5_000)]
moments = [[torch.zeros_like(each) for each in parameters] for _ in range(2)]
skipped = torch.zeros(1, dtype=torch.int32, device="cuda")
for step in range(3):
    sum((each * each).sum() for each in parameters).backward()
    gradients = [each.grad for each in parameters]
    lists = [gradients, [each.data for each in parameters], *moments]
    kernels.multi_tensor_adam(2048 * 32, skipped, lists, 1e-3, 0.9, 0.999, 1e-8, step + 1, 1, 1, 0.01)
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> str:
        (tmp_path / "train.py").write_text(text)
        return "train.py"

    return write


def test_deepspeeds_adam_is_one_kernel_that_reads_four_numbers_a_parameter_and_writes_three(script, tmp_path, capsys):
    """DeepSpeed's default optimizer, which it compiles as `fused_adam` (csrc/adam/multi_tensor_adam.cu)."""
    assert main(["run", "--format", "json", "-o", "out.json", script(COMPILES), "fused_adam"]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    (adam,) = [row for row in report["rows"]["op"] if "adam" in row["name"]]
    assert adam["calls"] == 1
    assert adam["bytes_written"] == 3 * 4 * 8_000
    assert 4 * 4 * 8_000 <= adam["bytes_read"] <= 4 * 4 * 8_000 + 16  # and a number of steps
    assert any("fused_adam" in note for note in report["notes"])


def test_other_kernels_are_not_compiled(script, capsys):
    assert main(["run", script(COMPILES), "fused_nothing"]) == 1
    assert "it compiles kernels for CUDA" in capsys.readouterr().err.splitlines()[-1]


ASKS_THE_COMPILER = """
import subprocess
import torch
from torch.utils.cpp_extension import CUDA_HOME

answer = subprocess.check_output([CUDA_HOME + "/bin/nvcc", "-V"], universal_newlines=True).split()
assert answer[answer.index("release") + 1].rstrip(",") == torch.version.cuda, answer
assert subprocess.run([CUDA_HOME + "/bin/nvcc", "kernel.cu"]).returncode == 1
torch.ones(3, device="cuda").exp()
"""


@pytest.mark.skipif(CUDA_HOME is not None, reason="CUDA's own compiler is installed here, and answers for itself")
def test_a_program_that_asks_cudas_compiler_for_its_version_is_told_that_of_torch(script, capfd):
    """Megatron-LM asks before it starts, and compiles nothing."""
    assert main(["run", script(ASKS_THE_COMPILER)]) == 0
    assert "nvcc: flopmeter compiles nothing for CUDA" in capfd.readouterr().err


TELLS_ITS_RANK = """
import os, sys
import torch
import torch.distributed as dist
print(sys.argv[1:], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"])
dist.init_process_group("nccl")
layer = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(3):
    layer(torch.zeros(8, 64, device="cuda")).sum().backward()
    for each in layer.parameters():
        dist.all_reduce(each.grad)
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("launcher", "told"),
    [
        ("deepspeed", "['--local_rank=0', '--x', '1'] 0 1"),
        ("deepspeed --num_gpus 4", "['--local_rank=0', '--x', '1'] 0 4"),
        ("deepspeed --num_gpus=4 --num_nodes=2 --master_port 29501", "['--local_rank=0', '--x', '1'] 0 8"),
        ("deepspeed --include localhost:0,1", "['--local_rank=0', '--x', '1'] 0 2"),
        ("deepspeed --no_local_rank --num_gpus 2", "['--x', '1'] 0 2"),
    ],
)
def test_deepspeeds_launcher_starts_a_script_with_its_local_rank(launcher, told, script, capsys):
    """DeepSpeed puts --local_rank before the script's own arguments (launcher/launch.py)."""
    assert main(["run", "--", *launcher.split(), script(TELLS_ITS_RANK), "--x", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == told


def test_deepspeeds_launcher_starts_as_many_as_gpus_says(script, capsys):
    assert main(["run", "--gpus", "8", "--", "deepspeed", script(TELLS_ITS_RANK)]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "['--local_rank=0'] 0 8"


def test_each_rank_of_a_pipeline_gets_its_own_local_rank(script, capsys):
    """Where rank 0 waits for a message, the rank that sends it runs too."""
    pipeline = """
import sys
import torch
import torch.distributed as dist
rank = int(sys.argv[1].partition("=")[2])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
assert rank == dist.get_rank(), (rank, dist.get_rank())
layer = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(3):
    x = torch.zeros(8, 64, device="cuda")
    if rank:
        dist.recv(x, 0)
    y = layer(x)
    if not rank:
        dist.send(y.detach(), 1)
    y.sum().backward()
    optimizer.step()
"""
    assert main(["run", "--", "deepspeed", "--num_gpus", "2", script(pipeline)]) == 0
    assert "AssertionError" not in capsys.readouterr().err


IN_CUDA_CPP = """
import torch

SOURCE = '''
template <int BLOCK>  // add(float* x) is another
__global__ void scale(const float* __restrict__ x, float const *by, float* out, int n /* , */) {
    out[threadIdx.x] = x[threadIdx.x] * by[0];
}
'''
scale = torch.cuda._compile_kernel(SOURCE, "scale<256>", nvcc_options=["--use_fast_math"])
scale.set_shared_memory_config(64 * 1024)
weight = torch.nn.Parameter(torch.zeros(1000, device="cuda"))
optimizer = torch.optim.SGD([weight], lr=0.1)
by, out = torch.ones(1, device="cuda"), torch.zeros(1000, device="cuda")
for step in range(3):
    scale((4, 1, 1), (256, 1, 1), (weight.detach(), by, out, 1000), shared_mem=64 * 1024)
    (weight * out).sum().backward()
    optimizer.step()
print("out is", out[0].item())
"""


def test_a_kernel_in_cuda_cpp_is_uncounted_with_the_bytes_of_its_tensors(script, tmp_path, capsys):
    """It reads 1,000 numbers and one; what is not const, 1,000 numbers, may be read and written."""
    assert main(["run", "--format", "json", "-o", "out.json", script(IN_CUDA_CPP)]) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    (kernel,) = report["uncounted"]
    assert (kernel["name"], kernel["calls"]) == ("cuda_kernels::scale_256_", 1)
    assert (kernel["bytes_read"], kernel["bytes_written"]) == (8_004, 4_000)
    assert any("scale_256_" in note and "CUDA C++" in note for note in report["notes"])
