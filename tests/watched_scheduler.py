"""What inductor's Scheduler launches, read off the Scheduler itself while a program compiles."""

from __future__ import annotations

from typing import Any

import pytest
from torch._inductor import scheduler

Launch = tuple[str, int]  # kind of kernel, bytes by the scheduler's own estimate


def watched_scheduler(monkeypatch: pytest.MonkeyPatch) -> list[list[Launch]]:
    """A list that gets, for each graph that is scheduled from now on, what its kernels are."""
    graphs: list[list[Launch]] = []
    plain = scheduler.Scheduler.__init__

    def watched(self: Any, *args: Any) -> None:
        plain(self, *args)
        graphs.append([launch for node in self.nodes for launch in _launched(node)])

    monkeypatch.setattr(scheduler.Scheduler, "__init__", watched)
    return graphs


def _launched(node: Any) -> list[Launch]:
    if isinstance(node, scheduler.NopKernelSchedulerNode) or type(node.node).__name__ == "MultiOutput":
        return []
    device = node.get_device()
    if device is not None and device.type == "cpu":
        return []
    kind = "library" if isinstance(node, scheduler.ExternKernelSchedulerNode) else "triton"
    return [("template" if node.is_template() else kind, node.get_read_write_buffers_sizes())]
