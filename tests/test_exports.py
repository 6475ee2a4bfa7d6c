"""torch.export and packages of AOTInductor inside a meter."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flopmeter import FlopMeter
from flopmeter.run.session import ScriptSession, Wishes

ROWS, WIDTH = 8, 64
PRODUCT = 2 * ROWS * WIDTH * WIDTH  # FLOPs of the model's one product


def model_and_input(device: str) -> tuple[nn.Module, Tensor]:
    with torch.device(device):
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), torch.ones(ROWS, WIDTH)


@pytest.mark.parametrize("strict", [False, True])
def test_exporting_a_program_runs_nothing_and_calling_what_was_exported_does(strict: bool) -> None:
    model, x = model_and_input("meta")
    with FlopMeter() as meter:
        program = torch.export.export(model, (x,), strict=strict)
        program = program.run_decompositions()
        assert not meter.trace.ops
        program.module()(x)
    assert 2 * meter.report().macs == PRODUCT


@torch.no_grad()
def package(model: nn.Module, x: Tensor, path: str | None = None) -> Callable[..., Any]:
    inductor = torch._inductor
    made = inductor.aoti_compile_and_package(torch.export.export(model, (x,)), package_path=path)
    loaded: Callable[..., Any] = inductor.aoti_load_package(made)
    return loaded


def test_a_call_of_a_package_launches_the_kernels_of_torch_compile(tmp_path: Path) -> None:
    """AOTInductor and torch.compile share inductor's Scheduler: a product, and the bias with the activation."""
    path = str(tmp_path / "model.pt2")
    with FlopMeter() as meter:
        model, x = model_and_input("meta")
        start = len(meter.trace.ops)
        loaded = package(model, x, path)
        assert len(meter.trace.ops) == start
        assert [loaded(x).device.type for _ in range(3)] == ["meta"] * 3
        assert not loaded(x).requires_grad
    report = meter.report(ops=range(start, len(meter.trace.ops)))
    assert [(graph.part, graph.calls) for graph in report.graphs] == [("inference", 4)]
    assert 2 * report.macs == 4 * PRODUCT
    assert len(report.kernels) == 4 * 2
    assert not os.path.exists(path)
    assert any("model.pt2" in note and "no file was written" in note for note in report.notes)


def test_a_package_of_a_script_is_counted_too() -> None:
    def program() -> None:
        loaded = package(*model_and_input("cuda"))
        for _ in range(3):
            assert loaded(torch.ones(ROWS, WIDTH, device="cuda")).is_cuda

    session = ScriptSession("h100-sxm5-80gb", Wishes())
    with session.open():
        program()
    assert 2 * session.meter.report().macs == 3 * PRODUCT


def test_code_of_which_no_package_is_made_is_refused() -> None:
    model, x = model_and_input("meta")
    with FlopMeter(), pytest.raises(RuntimeError, match=r"use torch\._inductor.aoti_compile_and_package"):
        torch._inductor.aot_compile(torch.export.export(model, (x,)).module(), (x,))


def test_what_stood_in_for_torch_s_functions_is_gone_afterwards() -> None:
    inductor = torch._inductor

    def functions() -> list[Any]:
        names = ("aoti_compile_and_package", "aoti_load_package", "aot_compile")
        return [
            torch.export.export,
            torch.export.ExportedProgram.__init__,
            *(getattr(inductor, name) for name in names),
        ]

    before = functions()
    with FlopMeter():
        torch.export.export(*model_and_input("meta")[:1], (model_and_input("meta")[1],))
        assert not set(before) & set(functions())
    assert functions() == before
