"""The kernels recorded for the programs of compiled_programs.py against inductor's Scheduler, and the rules of
launch/fusion against both. Slow: `make sweep` runs it; test_compiler.py has a few programs for every day."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_programs import Program, programs
from torch._inductor import scheduler

from flopmeter import FlopMeter, Report

KNOWN = {"checks": "hold", "routing": "balanced"}


def launched(node: Any) -> list[tuple[str, int]]:
    """What the scheduler's node launches on the device: its kind, and the bytes by the scheduler's own estimate."""
    if isinstance(node, scheduler.NopKernelSchedulerNode) or type(node.node).__name__ == "MultiOutput":
        return []
    device = node.get_device()
    if device is not None and device.type == "cpu":
        return []
    kind = "library" if isinstance(node, scheduler.ExternKernelSchedulerNode) else "triton"
    return [("template" if node.is_template() else kind, node.get_read_write_buffers_sizes())]


def metered(program: Program, **options: Any) -> tuple[FlopMeter, Callable[[], Report]]:
    run = program.make()
    with FlopMeter(program.device, **KNOWN, **options) as meter:
        run(torch.compile)
    return meter, meter.report


def moved(report: Report) -> int:
    return sum(kernel.cost.bytes_read + kernel.cost.bytes_written for kernel in report.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("program", programs(), ids=lambda program: program.name)
def test_kernels_are_those_of_the_scheduler(
    program: Program, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Count, kind, order and bytes. What the rules make of the same program is recorded, not asserted."""
    expected: list[list[tuple[str, int]]] = []
    plain = scheduler.Scheduler.__init__

    def watched(self: Any, *args: Any) -> None:
        plain(self, *args)
        expected.append([row for node in self.nodes for row in launched(node)])

    monkeypatch.setattr(scheduler.Scheduler, "__init__", watched)
    meter, report = metered(program)
    found = [[(kernel.kind, kernel.scheduler_bytes) for kernel in graph.kernels] for graph in report().graphs]
    assert not meter.trace.compilation.failures
    assert found
    assert found == expected
    _, by_rules = metered(program, compile="rules")
    compiled, ruled = report(), by_rules(mode="compiled")  # type: ignore[call-arg]
    for name, number in (
        ("kernels", len(compiled.kernels)),
        ("by rules", len(ruled.kernels)),
        ("MB", round(moved(compiled) / 1e6, 1)),
        ("MB by rules", round(moved(ruled) / 1e6, 1)),
    ):
        record_property(name, number)
