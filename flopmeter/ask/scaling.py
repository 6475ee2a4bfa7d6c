"""One distributed program in many layouts: how many of which GPUs, and how to cut the work among them.

Each layout is metered on one rank of a world of its own; nothing but a CPU is needed. Layouts do not depend on each
other, so they can run in processes side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from flopmeter.ask.checks import check_callable, check_mapping, check_positive
from flopmeter.ask.compare import step_dollars
from flopmeter.ask.delays import NO_DELAYS, Delays, checked_delays, delay_notes
from flopmeter.ask.steps import BOUND_BY, FITS, MFU, PEAK, TIME, USABLE, Step, step_figures
from flopmeter.ask.workers import results_of
from flopmeter.device.cluster import AnyCluster, Cluster, cluster_of
from flopmeter.device.hardware import AnyHardware, Hardware, load_hardware
from flopmeter.distributed import world
from flopmeter.launch.modes import mode_called
from flopmeter.meter import DEFAULT_HARDWARE, FlopMeter, Mode
from flopmeter.report.quantities import in_ms, percent
from flopmeter.report.report import Report
from flopmeter.report.tables import ColumnOf, Document, Shown, Table, table_of

Layout = Mapping[str, int]  # the mesh: name of a dimension -> how many ranks it has
Program = Callable[[DeviceMesh], Callable[[], object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRow(Step):
    """The program in one layout. A step is one run of it on every rank, its memory that of one rank."""

    KEYS = (
        "gpus", "seconds", "seconds_low", "seconds_high", "items_per_s", "items_per_s_per_gpu", "mfu", "regime",
        "communication_seconds", "exposed_seconds", "peak_memory_bytes", "usable_memory_bytes", "fits",
        "dollars_per_step", "dollars_per_million_items", "watts", "joules", "energy_dollars",
    )  # fmt: skip

    layout: Layout
    seconds_low: float
    seconds_high: float
    items_per_s: float | None  # of all GPUs together
    communication_seconds: float
    exposed_seconds: float  # of communication, that nothing else hides
    dollars_per_gpu_hour: float | None

    @property
    def gpus(self) -> int:
        return math.prod(self.layout.values())

    @property
    def name(self) -> str:
        return _name(self.layout)

    @property
    def items_per_s_per_gpu(self) -> float | None:
        return None if self.items_per_s is None else self.items_per_s / self.gpus

    @property
    def dollars_per_step(self) -> float | None:
        return step_dollars(self.dollars_per_gpu_hour, self.gpus, self.seconds)

    @property
    def dollars_per_million_items(self) -> float | None:
        if self.dollars_per_step is None or self.items_per_s is None:
            return None
        return 1e6 * self.dollars_per_step / (self.items_per_s * self.seconds)

    def as_dict(self) -> dict[str, Any]:
        return {"layout": self.name, **Step.as_dict(self)}


@dataclass(frozen=True, repr=False)
class Scaling(Shown):
    """Rows in the order asked for, and why some layouts have none."""

    title: str
    rows: tuple[LayoutRow, ...]
    unable: Mapping[str, str]  # layout -> why it cannot run
    unit: str  # of items
    notes: tuple[str, ...]

    @property
    def best(self) -> LayoutRow | None:
        """The layout with the most items per second and GPU (else the least GPU time a step), among those that fit."""
        fitting = [row for row in self.rows if row.fits is not False]
        return min(fitting, key=_gpu_seconds_per_item, default=None)

    def _document(self) -> Document:
        records = [row.as_dict() for row in self.rows]
        best = "none of these layouts fits in memory"
        if self.best is not None:
            best = f"least GPU time for the work, of what fits: {self.best.name} on {self.best.gpus} GPUs"
        return Document(
            kind="scaling",
            title=self.title,
            tables=[self._table()] if self.rows else [],
            notes=[best, *(f"left out: {name}: {why}" for name, why in self.unable.items()), *self.notes],
            data={"unit": self.unit, "rows": records, "unable": dict(self.unable)},
            records=records,
        )

    def _table(self) -> Table:
        """The table; columns without any figure (throughput, prices that nobody gave) are left out."""
        columns: list[ColumnOf[LayoutRow]] = [
            ColumnOf("layout", lambda row: row.name, str, "<"),
            ColumnOf("GPUs", lambda row: row.gpus, str),
            TIME,
            ColumnOf(f"{self.unit}/s", lambda row: row.items_per_s),
            ColumnOf(f"{self.unit}/s/GPU", lambda row: row.items_per_s_per_gpu),
            MFU,
            BOUND_BY,
            ColumnOf("comm. ms", lambda row: row.communication_seconds, in_ms),
            ColumnOf("exposed %", lambda row: percent(row.exposed_seconds / row.seconds, 1), str),
            PEAK,
            USABLE,
            FITS,
            ColumnOf("$/step", lambda row: row.dollars_per_step),
            ColumnOf(f"$/M {self.unit}", lambda row: row.dollars_per_million_items),
        ]
        return table_of(columns, self.rows, hides_unknown=True)


def _gpu_seconds_per_item(row: LayoutRow) -> float:
    return row.gpus * row.seconds if row.items_per_s_per_gpu is None else 1 / row.items_per_s_per_gpu


class _Job(NamedTuple):
    """What a worker needs to know besides the layout."""

    program: Program
    hardware: Hardware
    cluster: Cluster
    mode: Mode
    items: float | Callable[[Layout], float] | None
    dollars_per_gpu_hour: float | None
    delays: Delays
    meter_options: Mapping[str, Any]


class _LayoutResult(NamedTuple):
    """The result of one layout: a row, or why there is none."""

    row: LayoutRow | None
    title: str
    notes: tuple[str, ...]


def scale(
    program: Program,
    layouts: Iterable[Layout],
    hardware: AnyHardware = DEFAULT_HARDWARE,
    cluster: AnyCluster | None = None,
    mode: Mode = "eager",
    *,
    items: float | Callable[[Layout], float] | None = None,
    unit: str = "items",
    dollars_per_gpu_hour: float | None = None,
    delays: Delays = NO_DELAYS,
    workers: int = 1,
    executor: Executor | None = None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    **meter_options: Any,
) -> Scaling:
    """What a step of `program` takes in each layout, metered on rank 0.

    program: called with the DeviceMesh of a layout; it builds and shards the model on meta and returns the step to
        meter, a function without arguments.
    layouts: meshes such as {"dp": 8, "tp": 4}; the ranks of the last dimension are neighbours.
    cluster: a name, the path of a YAML file or a Cluster; by default the one that the device comes in.
    items: how many items (tokens, images) a step of all ranks works on, or a function that says it for a layout.
    delays: batches, checkpoints and slow ranks that steps wait for (flopmeter.Delays); by default none. Watts and
        joules are those of the work.
    workers, executor: processes that run layouts side by side, or any concurrent.futures.Executor (see ask/workers.py).
    progress: wraps the list of layouts, as `tqdm` does.
    meter_options: of FlopMeter.

    A layout that torch refuses or that the cluster has no room for is listed in `unable`. Raises HardwareError for an
    unknown device or cluster, and ValueError for options that make no sense and where no layout can run.
    """
    check_callable("scale calls a function of the mesh, which returns the step", program)
    meshes = _checked(layouts)
    check_positive(items=None if callable(items) else items, dollars_per_gpu_hour=dollars_per_gpu_hour)
    mode_called(mode)
    device = load_hardware(hardware)
    links = cluster_of(device, cluster)
    job = _Job(program, device, links, mode, items, dollars_per_gpu_hour, checked_delays(delays), meter_options)
    outcomes = results_of(partial(_outcome, job), meshes, workers, executor, progress)
    rows = tuple(outcome.row for outcome in outcomes if outcome.row is not None)
    unable = {_name(mesh): outcome.title for mesh, outcome in zip(meshes, outcomes, strict=True) if outcome.row is None}
    if not rows:
        raise ValueError(f"no layout can run: {'; '.join(f'{name}: {why}' for name, why in unable.items())}")
    title = next(outcome.title for outcome in outcomes if outcome.row is not None)
    of_outcomes = (note for outcome in outcomes for note in outcome.notes)
    notes = [f"cluster: {links.title_around(device)}", *delay_notes(delays), *of_outcomes]
    return Scaling(title, rows, unable, unit, tuple(dict.fromkeys(notes)))


def _checked(layouts: Iterable[Layout]) -> list[dict[str, int]]:
    """Raises ValueError or TypeError for what is no list of meshes."""
    if isinstance(layouts, Mapping):
        raise TypeError(f"layouts must be a list of meshes, such as [{layouts!r}]")
    meshes = list(layouts)
    if not meshes:
        raise ValueError('scale needs at least one layout, such as {"dp": 8}')
    for layout in meshes:
        check_mapping('{"dp": 8}', layout=layout)
    return [dict(layout) for layout in meshes]


def _outcome(job: _Job, layout: dict[str, int]) -> _LayoutResult:
    """The result of one layout. torch refuses impossible meshes and shapes with one of these errors."""
    try:
        report = _metered(job, layout)
    except (ValueError, RuntimeError, AssertionError) as error:
        return _LayoutResult(None, " ".join(f"{type(error).__name__}: {error}".split()), ())
    items = job.items(layout) if callable(job.items) else job.items
    ranks, figures = math.prod(layout.values()), step_figures(report)
    seconds, low, high = (
        job.delays.step_seconds(each, ranks) for each in (report.seconds, report.seconds_low, report.seconds_high)
    )
    figures |= {"seconds": seconds, "mfu": report.mfu * report.seconds / seconds}
    row = LayoutRow(
        layout=layout,
        seconds_low=low,
        seconds_high=high,
        items_per_s=None if items is None else items / seconds,
        communication_seconds=report.communication_seconds,
        exposed_seconds=report.exposed_seconds,
        dollars_per_gpu_hour=job.dollars_per_gpu_hour,
        **figures,
    )
    return _LayoutResult(row, report.headline, report.notes)


def _metered(job: _Job, layout: dict[str, int]) -> Report:
    size = math.prod(layout.values())
    job.cluster.check_size(size)
    with world(size, layout, gpus_per_node=job.cluster.gpus_per_node) as mesh:
        step = job.program(mesh)
        check_callable("the function of the mesh has to return the step, a function without arguments", step)
        with FlopMeter(job.hardware, cluster=job.cluster, **job.meter_options) as meter:
            step()
        return meter.report(mode=job.mode)


def _name(layout: Layout) -> str:
    return " x ".join(f"{dimension} {ranks}" for dimension, ranks in layout.items())
