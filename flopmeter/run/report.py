"""The report of a run: one steady step, next to setup and first step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flopmeter.ask.pipeline import Pipeline
from flopmeter.report.formats import as_dict, grouped
from flopmeter.report.quantities import figure, in_gb, in_ms
from flopmeter.report.report import Report
from flopmeter.report.rows import By
from flopmeter.report.tables import Column, Table
from flopmeter.run.step_parts import Parts

TOLD_SPREAD = 1.05  # steps that differ by less are told as one


class NothingRanError(ValueError):
    """No op ran on the device named cuda."""


@dataclass(frozen=True)
class RunReport:
    """`step` is the report of one steady step, or of the part that ran instead; `headline` says which."""

    program: str
    step: Report
    parts: Parts
    by_part: Mapping[str, Report]  # 'setup', 'first step', 'steady step', 'in eval mode', as far as they ran
    ranges: Mapping[str, tuple[int, float]]  # nvtx: calls and seconds in the step
    step_seconds: tuple[float, ...] = ()  # of the last steps that are like the steady one
    step_flops: tuple[int, ...] = ()  # of the same
    pipeline: Pipeline | None = None  # where ranks wait for each other: all that ran, the step's rank among them

    @property
    def headline(self) -> str:
        return f"{self.program}: {self._what}"

    @property
    def _what(self) -> str:
        parts = self.parts
        if parts.steady is not None:
            is_last = parts.steady_number == parts.count
            which = f"the last of {parts.count}" if is_last else f"number {parts.steady_number} of {parts.count}"
            also = ", with calls in eval mode" if parts.evaluation else "" if is_last else self._later
            also += "".join(_left_out(*each) for each in parts.without)
            return f"one steady step, {which} (marked by {parts.marked_by}){also}{self._spread}{self._stopped}"
        if parts.first is not None:
            return f"the first step, the only one that ran (marked by {parts.marked_by})"
        return "all that ran (no step was marked; --step-marker module:function marks one)"

    @property
    def _later(self) -> str:
        """Why the steady step is not the last one."""
        is_other = self.parts.later[-1][0] > self.parts.steady_number
        return "; most have its shapes, and a later one has not" if is_other else "; later ones evaluate too"

    @property
    def _stopped(self) -> str:
        if not self.parts.stopped_untrained:
            return ""
        return "; ended there, as nothing had trained (--step-marker optimizer waits for it; --steps for so many calls)"

    @property
    def _spread(self) -> str:
        """How the steps differ, if they do: one of them does not stand for all. Where the host is what takes time, they
        may take the same for other work."""
        told = (
            _range_of("take", [1e3 * seconds for seconds in self.step_seconds], "ms"),
            _range_of("compute", [flops / 1e9 for flops in self.step_flops], "GFLOP"),
        )
        differing = " and ".join(filter(None, told))
        return f"; {len(self.step_seconds)} such steps {differing}" if differing else ""

    def render(self, format: str = "text", by: By = "class") -> str:
        """text, markdown, csv, json or html, the first three with a row for each op class, or what else `by` is (see
        `Report.rows`). Raises ValueError for another format or grouping."""
        if format == "json":
            return json.dumps(self.as_dict(), indent=2, ensure_ascii=False)
        stages = [] if self.pipeline is None else [f"pipeline: {line}" for line in self.pipeline.lines]
        return grouped(self.step, format, by, self._tables(), title=self.headline, first=stages)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the kernels themselves, in plain types and SI units."""
        run = {
            "program": self.program,
            "steps": self.parts.count,
            "steady_number": self.parts.steady_number,
            "marked_by": self.parts.marked_by,
            "is_steady": self.parts.steady is not None,
            "step_seconds": list(self.step_seconds),
            "step_flops": list(self.step_flops),
            "parts": {
                name: {"seconds": part.seconds, "flops": part.flops, "peak_memory_bytes": part.peak_memory_bytes}
                for name, part in self.by_part.items()
            },
            "nvtx": {name: {"calls": calls, "seconds": seconds} for name, (calls, seconds) in self.ranges.items()},
        }
        if self.pipeline is not None:
            run["pipeline"] = self.pipeline.as_dict()
        return {**as_dict(self.step), "run": run}

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        return self.step._repr_html_()

    def _tables(self) -> list[Table]:
        columns = [Column("part of the run", "<"), Column("ms"), Column("GFLOP"), Column("peak GB")]
        rows = [
            (name, in_ms(part.seconds), figure(part.flops / 1e9), in_gb(part.peak_memory_bytes))
            for name, part in self.by_part.items()
        ]
        tables = [Table(columns, rows)]
        if self.pipeline is not None:
            tables.append(self.pipeline.table)
        if self.ranges:
            heads = [Column("nvtx range", "<"), Column("calls"), Column("ms")]
            tables.append(Table(heads, [(name, str(calls), in_ms(s)) for name, (calls, s) in self.ranges.items()]))
        return tables


def _range_of(verb: str, values: Sequence[float], unit: str) -> str:
    """Empty where the values are told as one."""
    least, most = min(values, default=0.0), max(values, default=0.0)
    if not most or most < TOLD_SPREAD * least:
        return ""
    return f"{verb} {figure(least)} to {figure(most)} {unit}, {figure(sum(values) / len(values))} on average"


def _left_out(optimizer: str, steps: int) -> str:
    return (
        f", without {optimizer}, which steps in {steps or 'none'} of them (--steps of a whole period has the average)"
    )
