"""Activations that wait on the host for the backward pass: what the report says of the way there and back."""

from __future__ import annotations

import dataclasses
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import flopmeter
from flopmeter import Report
from flopmeter.run.report import RunReport

A100 = flopmeter.load_hardware("a100-sxm4-80gb")
KEPT = "what the backward pass needs stays on the device"


def trained(saving: AbstractContextManager, memory_gb: float = 80.0) -> RunReport:
    """16 layers, each of which keeps 16.8 MB; its weights are 4.2 MB."""
    with flopmeter.cuda(dataclasses.replace(A100, memory_gb=memory_gb)) as device:
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(4096, 1024, device="cuda")
        for _ in range(2):
            with saving:
                loss = model(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return device.report()


def test_activations_on_the_host_are_advised_to_stay_where_memory_has_room():
    """Without the copies the step takes what it takes without save_on_cpu."""
    for saving in (save_on_cpu(pin_memory=True), save_on_cpu()):
        step = trained(saving).step
        (advice,) = (each for each in step.advice if each.remedy.startswith(KEPT))
        plain = trained(nullcontext()).step
        assert abs(advice.run_seconds_then / plain.seconds - 1) < 0.05
        assert plain.seconds < 0.7 * step.seconds


def test_where_memory_is_too_small_they_are_not():
    """Weights and gradients take 134 MB, which fit into a quarter of a GB; 268 MB of activations do not."""
    step = trained(save_on_cpu(pin_memory=True), memory_gb=0.85).step  # 0.6 GB of it are the process's
    assert not [each for each in step.advice if each.remedy.startswith(KEPT)]


def test_what_waits_on_the_host_and_comes_back_was_not_read():
    assert trained(save_on_cpu(pin_memory=True)).step.assumptions == ()


def test_what_comes_back_from_the_host_is_as_unknown_as_it_was():
    with flopmeter.cuda(A100) as device:
        x = torch.randn(4, device="cuda")
        back = x.cpu().cuda()
        assert back.sum().item() == 1.0  # the stand-in of one unknown number, not the sum of four
        filled = torch.zeros(4, device="cuda").copy_(x.cpu())
        assert filled.sum().item() == 1.0
    assert all("(1x)" in use for use in device.report().step.assumptions[0].split(", "))


def test_what_the_program_reads_on_the_host_is_listed():
    with flopmeter.cuda(A100) as device:
        host = torch.randn(4, device="cuda").cpu()
        assert host.tolist() == [1.0] * 4
    assert len(device.report().step.assumptions) == 1


def offloaded(move_back: Callable[[nn.Linear], object]) -> RunReport:
    """Steps of a layer that is on the device only while it runs, as enable_model_cpu_offload has it."""
    with flopmeter.cuda(A100) as device, torch.no_grad():
        layer, x = nn.Linear(4096, 4096, bias=False), torch.randn(64, 4096, device="cuda")
        for _ in range(3):
            layer.cuda()
            result = layer(x)
            move_back(layer)
            layer.cuda()
            assert layer(result).sum().item() == 1.0  # as unknown as it was, so the stand-in of one number
    return device.report()


def _weight_by_weight(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.to("cpu")


@pytest.mark.parametrize("move_back", [nn.Module.cpu, lambda layer: layer.to("cpu"), _weight_by_weight])
def test_weights_that_go_to_the_host_with_their_module_or_come_back_were_not_read(move_back):
    (told,) = offloaded(move_back).step.assumptions
    assert told.count("test_offload.py") == 1  # the sum alone


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="asks Linux how much memory the process has")
def test_a_model_that_is_offloaded_takes_no_memory_of_this_machine():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    with flopmeter.cuda(A100), torch.no_grad():
        layer = nn.Linear(16384, 16384, bias=False, device="cuda")  # 1.07 GB
        before = resident()
        layer.cpu()
        assert layer.weight.device.type == "cpu"
        assert resident() - before < 100e6


def inferred(offload: Callable[[nn.Linear], object] | None, memory_gb: float = 80.0) -> Report:
    """8 layers of 134 MB, each of which is on the device only while it runs, if they are offloaded."""
    with flopmeter.cuda(dataclasses.replace(A100, memory_gb=memory_gb)) as device, torch.no_grad():
        model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16) for _ in range(8)))
        if offload is None:
            model.cuda()
        else:
            for layer in model:
                offload(layer)
        for _ in range(3):
            model(torch.randn(1024, 8192, device="cuda", dtype=torch.bfloat16))
    return device.report().step


def _there_and_back(layer: nn.Linear) -> None:
    layer.register_forward_pre_hook(lambda module, args: _move(module, "cuda"))
    layer.register_forward_hook(lambda module, args, result: _move(module, "cpu"))


def _one_way(layer: nn.Linear) -> None:
    layer.waiting = layer.weight.data
    layer.register_forward_pre_hook(lambda module, args: _give(module, module.waiting.to("cuda")))
    layer.register_forward_hook(lambda module, args, result: _give(module, module.waiting))


def _move(module: nn.Linear, device: str) -> None:
    module.to(device)


def _give(module: nn.Linear, weight: torch.Tensor) -> None:
    module.weight.data = weight


WAITING, PINNED = "moved to the device once", "their memory pinned, and .to(device, non_blocking=True)"


@pytest.mark.parametrize("offload", [_there_and_back, _one_way])
def test_weights_that_wait_on_the_host_are_advised_to_stay_on_the_device_first(offload):
    """Where it has room, to the time of the program without their offload. Of memory that is pinned they are told next,
    and not that results should be smaller."""
    step = inferred(offload)
    first, *others = step.advice
    assert first.remedy.startswith(WAITING)
    assert first.run_seconds_then == pytest.approx(inferred(None).seconds, rel=0.05)
    remedies = [each.remedy for each in others]
    assert PINNED in remedies
    assert not [each for each in remedies if each.startswith(("make it smaller", "the tensor made on the device"))]


def test_where_the_device_has_no_room_for_the_weights_they_are_told_to_be_pinned():
    """0.6 GB are the process's; of 1.07 GB of weights 0.3 fit."""
    remedies = [each.remedy for each in inferred(_one_way, memory_gb=0.95).advice]
    assert PINNED in remedies
    assert not [each for each in remedies if each.startswith(WAITING)]


def test_a_frame_of_a_video_that_waits_on_the_host_is_another_one_in_each_step():
    class Net(nn.Conv2d):
        def forward(self, frame):
            return super().forward(frame.cuda())

    with flopmeter.cuda(A100) as device, torch.no_grad():
        net, video = Net(3, 8, 3).cuda(), torch.zeros(4, 3, 1024, 1024)
        for frame in video:
            net(frame)
    remedies = [each.remedy for each in device.report().step.advice]
    assert "the tensor made on the device, or moved there once, outside of forward" in remedies
    assert not [each for each in remedies if each.startswith(WAITING)]
