"""Eager and compiled side by side: what torch.compile would save, region by region."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from flopmeter.launch.fusion import graphs_of
from flopmeter.launch.modes import compiled_region
from flopmeter.records import Kernel
from flopmeter.report.drawers import VIEWS, draws
from flopmeter.report.quantities import in_gb, in_ms, percent
from flopmeter.report.report import Report
from flopmeter.report.tables import ColumnOf, Document, Shown, table_of

EAGER = "(eager in both)"


class Share(NamedTuple):
    """What one way to run a region costs."""

    kernels: int = 0
    bytes_moved: int = 0
    seconds: float = 0.0  # of the wall-clock: its kernels on the computing stream, and the waits before each


class RegionSpeedUp(NamedTuple):
    """A compiled region in one direction, all its calls together."""

    name: str
    eager: Share
    compiled: Share

    @property
    def factor(self) -> float:
        return self.eager.seconds / self.compiled.seconds if self.compiled.seconds else 1.0

    @property
    def saved_share(self) -> float:
        """The share of the eager run's bytes that compiling saves."""
        return 1 - self.compiled.bytes_moved / self.eager.bytes_moved if self.eager.bytes_moved else 0.0


@dataclass(frozen=True, repr=False)
class SpeedUp(Shown):
    title: str
    regions: tuple[RegionSpeedUp, ...]
    total: RegionSpeedUp

    def _document(self) -> Document:
        rows = (*self.regions, self.total)
        records = [_record(row) for row in rows]
        return Document("speed-up", self.title, [table_of(_COLUMNS, rows)], [], {"regions": records}, records)


@draws(VIEWS, "speed-up")
def speed_up(report: Report) -> SpeedUp:
    """What compiling would bring to an eager run. Regions are those that torch.compile marks, by the module that each
    is called in; a program that marks none is one region.

    Raises ValueError for a report of another mode, or of nothing.
    """
    compiled = report.compiled
    if compiled is None:
        raise ValueError(
            f"eager and compiled are compared from an eager report with kernels; this one is {report.mode}"
        )
    graphs = graphs_of(report.kernels, compiled_region(op for kernel in report.kernels for op in kernel.ops))
    names = _names(report.kernels, graphs)
    before = _shares(report, names, graphs)
    after = _shares(compiled, names, compiled.launches.graphs)
    regions = tuple(RegionSpeedUp(name, before[name], after.get(name, Share())) for name in before)
    total = RegionSpeedUp("total", _sum(before.values(), report.seconds), _sum(after.values(), compiled.seconds))
    return SpeedUp(f"{report.headline} and compiled", regions, total)


def _names(kernels: list[Kernel], graphs: list[int | None]) -> dict[int | None, str]:
    """The name of each graph: the module and the direction of its first kernel. Fusing keeps the graphs' numbers."""
    names: dict[int | None, str] = {None: EAGER}
    for kernel, graph in zip(kernels, graphs, strict=True):
        op = kernel.op
        if graph not in names:
            direction = "forward" if op.phase == "forward" else "backward"
            names[graph] = f"{'program' if op.region is None else op.module}, {direction}"
    return names


def _shares(report: Report, names: dict[int | None, str], graphs: list[int | None]) -> dict[str, Share]:
    shares: dict[str, Share] = {}
    for kernel, timing, graph in zip(report.kernels, report.timings, graphs, strict=True):
        count, moved, seconds = shares.get(names[graph], Share())
        if timing.stream == report.compute_stream:
            seconds += timing.seconds + timing.wait_seconds + timing.link_wait_seconds
        shares[names[graph]] = Share(count + 1, moved + kernel.cost.bytes, seconds)
    return shares


def _sum(shares: Iterable[Share], seconds: float) -> Share:
    shares = list(shares)
    return Share(sum(share.kernels for share in shares), sum(share.bytes_moved for share in shares), seconds)


_COLUMNS: list[ColumnOf[RegionSpeedUp]] = [
    ColumnOf("region", lambda row: row.name, str, "<"),
    ColumnOf("kernels", lambda row: row.eager.kernels, "{:,}".format),
    ColumnOf("compiled", lambda row: row.compiled.kernels, "{:,}".format),
    ColumnOf("GB moved", lambda row: row.eager.bytes_moved, in_gb),
    ColumnOf("compiled", lambda row: row.compiled.bytes_moved, in_gb),
    ColumnOf("saved %", lambda row: row.saved_share, percent),
    ColumnOf("ms", lambda row: row.eager.seconds, in_ms),
    ColumnOf("compiled", lambda row: row.compiled.seconds, in_ms),
    ColumnOf("speed-up", lambda row: row.factor, "{:.2f}x".format),
]


def _record(row: RegionSpeedUp) -> dict[str, object]:
    record: dict[str, object] = {"region": row.name}
    for way, share in (("eager", row.eager), ("compiled", row.compiled)):
        record |= {f"{way}_{name}": value for name, value in share._asdict().items()}
    return record | {"speed_up": row.factor}
