"""The kernels recorded for the programs of compiled_programs.py against inductor's Scheduler, and the rules of
launch/fusion against both. Slow: `make sweep` runs it; test_compiler.py has a few programs for every day."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled_programs import Program, programs
from watched_scheduler import watched_scheduler

from flopmeter import FlopMeter, Report

KNOWN: dict[str, Any] = {"checks": "hold", "routing": "balanced"}


def metered(program: Program, **options: Any) -> tuple[FlopMeter, range]:
    """Its last run: the meter, and which ops they are."""
    run, start = program.make(), 0
    with FlopMeter(program.device, **KNOWN, **options) as meter:
        if program.warms_up:
            run(torch.compile)
            start = len(meter.trace.ops)
        run(torch.compile)
    return meter, range(start, len(meter.trace.ops))


def moved(report: Report) -> int:
    return sum(kernel.cost.bytes_read + kernel.cost.bytes_written for kernel in report.kernels)


@pytest.mark.slow
@pytest.mark.parametrize("program", programs(), ids=lambda program: program.name)
def test_kernels_are_those_of_the_scheduler(
    program: Program, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """Count, kind, order and bytes. What the rules make of the same program is recorded, not asserted."""
    expected = watched_scheduler(monkeypatch)
    meter, ops = metered(program)
    graphs = meter.trace.compilation.graphs
    assert not meter.trace.compilation.failures
    assert graphs
    assert [[(kernel.kind, kernel.scheduler_bytes) for kernel in graph.kernels] for graph in graphs] == expected
    compiled = meter.report(ops=ops)
    meter, ops = metered(program, compile="rules")
    ruled = meter.report(mode="compiled", ops=ops)
    for name, number in (
        ("kernels", len(compiled.kernels)),
        ("by rules", len(ruled.kernels)),
        ("MB", round(moved(compiled) / 1e6, 1)),
        ("MB by rules", round(moved(ruled) / 1e6, 1)),
    ):
        record_property(name, number)
