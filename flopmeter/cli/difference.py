"""Two reports of one program, before and after a change: what grew, for a reader or as a gate in CI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flopmeter.report.formats import JSON_SCHEMA_VERSION
from flopmeter.report.tables import ColumnOf, Document, Shown, Table, table_of

# The totals of which less is better, each with the unit that a reader sees and its size in our unit.
COSTS = {
    "seconds": ("ms", 1e-3), "kernel_seconds": ("ms", 1e-3), "launch_seconds": ("ms", 1e-3),
    "peak_memory_bytes": ("GB", 1e9), "bytes_read": ("GB", 1e9), "bytes_written": ("GB", 1e9),
    "flops": ("GFLOP", 1e9), "model_flops": ("GFLOP", 1e9), "executed_flops": ("GFLOP", 1e9),
}  # fmt: skip


class ReportFileError(ValueError):
    """A file that is no report written by `flopmeter table --format json`."""


class Change(NamedTuple):
    """One total, or the device time of one op class, before and after."""

    name: str
    unit: str
    before: float
    after: float

    @property
    def growth(self) -> float:
        """Growth as a fraction of the old value; infinite if that was 0."""
        if self.before:
            return self.after / self.before - 1
        return float("inf") if self.after else 0.0


@dataclass(frozen=True, repr=False)
class Difference(Shown):
    """`totals` decide whether a change passes; `classes` explain where the time went."""

    title: str
    totals: tuple[Change, ...]
    classes: tuple[Change, ...]
    notes: tuple[str, ...]

    def grown(self, beyond: float) -> list[Change]:
        """The totals that grew by more than this fraction."""
        return [change for change in self.totals if change.growth > beyond]

    def _document(self) -> Document:
        rows = [*self.totals, *self.classes]
        records = [{**change._asdict(), "growth": change.growth if change.before else None} for change in rows]
        tables = [_table("total", self.totals), _table("device time", self.classes)]
        return Document("difference", self.title, tables, self.notes, {"changes": records}, records)


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> Difference:
    """Compare two reports as `read_report` gives them."""
    totals = tuple(
        Change(name, unit, before["totals"][name] / scale, after["totals"][name] / scale)
        for name, (unit, scale) in COSTS.items()
    )
    was, now = ({row["name"]: row["seconds"] for row in report["rows"]["class"]} for report in (before, after))
    classes = tuple(
        Change(name, "ms", was.get(name, 0.0) * 1e3, now.get(name, 0.0) * 1e3) for name in dict.fromkeys((*was, *now))
    )
    notes = [
        f"not the same {what}: {before[what]} before, {after[what]} after"
        for what in ("hardware", "mode", "conventions")
        if before[what] != after[what]
    ]
    notes += [
        f"{what}: {was} before, {now} after"
        for what in ("program", "inputs", "versions", "date")
        if (was := before.get("ran", {}).get(what)) != (now := after.get("ran", {}).get(what))
    ]
    title = after["title"] if before["title"] == after["title"] else f"{before['title']}  →  {after['title']}"
    return Difference(title, totals, classes, tuple(notes))


def read_report(path: str) -> dict[str, Any]:
    """A report from a file that `flopmeter table --format json` wrote.

    Raises ReportFileError for another file and for one of another schema version.
    """
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ReportFileError(f"{path} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ReportFileError(
            f"{path} is no JSON ({error}): write a report with `flopmeter table TARGET --format json`"
        ) from None
    version = report.get("schema_version") if isinstance(report, dict) else None
    if not isinstance(report, dict) or not {"totals", "rows", "hardware", "mode", "title"} <= report.keys():
        raise ReportFileError(f"{path} is no report: write one with `flopmeter table TARGET --format json`")
    if version != JSON_SCHEMA_VERSION:
        raise ReportFileError(f"{path} has schema version {version}, not {JSON_SCHEMA_VERSION}: write it again")
    missing = [name for name in COSTS if not isinstance(report["totals"].get(name), (int, float))]
    if missing:
        raise ReportFileError(f"{path} lacks the totals {', '.join(missing)}")
    return report


def _table(name: str, changes: tuple[Change, ...]) -> Table:
    columns: list[ColumnOf[Change]] = [
        ColumnOf(name, lambda change: change.name, str, "<"),
        ColumnOf("before", lambda change: change.before),
        ColumnOf("after", lambda change: change.after),
        ColumnOf("unit", lambda change: change.unit, str, "<"),
        ColumnOf("change %", lambda change: 100 * change.growth, "{:+.1f}".format),
    ]
    return table_of(columns, changes)
