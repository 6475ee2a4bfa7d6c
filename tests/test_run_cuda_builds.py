"""What scripts ask that only a CUDA build of torch, or a GPU, could answer: they go on, the report says so."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.optim.rprop import _single_tensor_rprop

import flopmeter

A100 = "a100-sxm4-80gb"


def test_a_profiler_that_is_left_in_a_script_tells_of_the_host_without_a_warning(capfd, recwarn):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with flopmeter.cuda(A100) as device, torch.profiler.profile(activities=activities, acc_events=True) as profile:
        torch.zeros(8, 8, device="cuda") @ torch.zeros(8, 8, device="cuda")
    assert "aten::mm" in {event.key for event in profile.key_averages()}
    assert device.report().step.macs == 8**3
    assert "torch.profiler records only the host: no GPU runs" in device.report().step.notes
    assert "CUDA" not in capfd.readouterr().err
    assert not [warning for warning in recwarn if "CUDA" in str(warning.message)]


def test_the_history_of_memory_is_left_out_and_no_file_is_written(tmp_path):
    with flopmeter.cuda(A100) as device:
        torch.cuda.memory._record_memory_history(max_entries=100)
        torch.zeros(8, device="cuda").sin()
        torch.cuda.memory._dump_snapshot(tmp_path / "memory.pickle")
    assert list(tmp_path.iterdir()) == []
    assert any("_dump_snapshot was left out" in note for note in device.report().step.notes)


def test_each_step_of_a_compiled_inference_may_be_marked():
    with flopmeter.cuda(A100):
        torch.compiler.cudagraph_mark_step_begin()


def test_nccl_is_there_to_be_asked_for():
    before = getattr(dist, "ProcessGroupNCCL", None)  # a CUDA build has it
    with flopmeter.cuda(A100, gpus=2):
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        dist.init_process_group("nccl", pg_options=options)
        group = dist.group.WORLD
        distributed_c10d._set_pg_timeout(timedelta(seconds=100), group)
        assert not isinstance(group, dist.ProcessGroupNCCL)
        assert torch.cuda.nccl.version() > (2, 10)
    assert getattr(dist, "ProcessGroupNCCL", None) is before


def test_modules_of_the_compiler_import_what_a_build_without_cuda_has(monkeypatch):
    """torch imports this one for compiled autograd, where it sees a GPU."""
    monkeypatch.delitem(sys.modules, "torch._inductor.cudagraph_trees", raising=False)
    with flopmeter.cuda(A100):
        assert torch.backends.cuda.is_built()
        importlib.import_module("torch._inductor.cudagraph_trees")


def scripted(x: torch.Tensor) -> torch.Tensor:
    half = torch.tensor(0.5)
    return torch.tanh(x) * half.to(x.device) + torch.zeros(x.shape[-1], device=x.device)


def test_torchscript_is_compiled_of_torchs_own_functions():
    """torch.distributed.optim compiles its optimizers when it is imported."""
    with flopmeter.cuda(A100) as device:
        eager = scripted(torch.ones(4, 8, device="cuda"))
        torch.jit.script(_single_tensor_rprop)  # asks for torch's list of devices, which a meter replaces
        assert torch.jit.script(scripted)(torch.ones(4, 8, device="cuda")).shape == eager.shape
    calls = {row.name: row.calls for row in device.report().step.rows("op")}
    assert calls["tanh"] == calls["zeros"] == 2
    with flopmeter.FlopMeter(A100) as meter:
        torch.jit.script(scripted)(torch.ones(4, 8, device="meta"))
    assert {row.name: row.calls for row in meter.report().rows("op")}["tanh"] == 1


def test_a_program_may_keep_and_set_the_states_of_the_devices_generators():
    """As Megatron-Core forks the random numbers of its tensor parallel ranks."""
    before = torch.cuda.default_generators
    with flopmeter.cuda(A100):
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        kept = torch.cuda.get_rng_state()
        torch.cuda.manual_seed(1)
        generator.set_state(kept)
        assert torch.equal(generator.get_state(), kept)
        generator.graphsafe_set_state(generator.graphsafe_get_state())
    assert torch.cuda.default_generators is before


def test_each_gpu_of_a_node_has_a_generator():
    with flopmeter.cuda(A100, gpus=4):
        assert len(torch.cuda.default_generators) == 4
        assert torch.cuda.default_generators[3].get_state().shape == (16,)
        with pytest.raises(IndexError):
            _ = torch.cuda.default_generators[4]


def test_a_script_reads_which_gpus_were_chosen_and_the_driver_finds_none(monkeypatch):
    """As under Slurm, or after `CUDA_VISIBLE_DEVICES=0 python train.py`; a script that counts them failed."""
    seen = ctypes.CDLL(None).getenv  # what the driver asks
    seen.restype = ctypes.c_char_p
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with flopmeter.cuda(A100):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
        assert seen(b"CUDA_VISIBLE_DEVICES") == b""
    assert seen(b"CUDA_VISIBLE_DEVICES") == b"0"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with flopmeter.cuda(A100):
        assert "CUDA_VISIBLE_DEVICES" not in os.environ
        assert seen(b"CUDA_VISIBLE_DEVICES") == b""
    assert seen(b"CUDA_VISIBLE_DEVICES") is None
