"""The predicted timeline in the Chrome trace event format: one track for the device, times in µs."""

from __future__ import annotations

import json
import os
from pathlib import Path

from flopmeter.report import Report


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Write one complete event ('X') for each kernel."""
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": report.hardware.title}},
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": 0, "args": {"name": "device (predicted)"}},
    ]
    for kernel, timing in zip(report.kernels, report.timings, strict=True):
        cost, op = kernel.cost, kernel.ops[0]
        events.append(
            {
                "ph": "X",
                "name": cost.name,
                "cat": cost.op_class,
                "pid": 0,
                "tid": 0,
                "ts": timing.start_seconds * 1e6,
                "dur": timing.seconds * 1e6,
                "args": {
                    "module": op.module,
                    "phase": op.phase,
                    "flops": cost.flops,
                    "bytes": cost.bytes,
                    "bound by": timing.regime,
                },
            }
        )
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")
