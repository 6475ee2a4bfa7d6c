"""A pipeline: a program whose ranks each run some layers of a model, and send each other activations and gradients.

One rank of every stage is metered. Their timelines are put on one clock: a stage waits for what another one sends.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from flopmeter.ask.checks import check_callable, check_mapping
from flopmeter.ask.steps import FITS, PEAK, USABLE, Step, step_figures
from flopmeter.costs.data_movement.communication import is_message
from flopmeter.device.cluster import AnyCluster, Cluster, cluster_of
from flopmeter.device.hardware import AnyHardware, load_hardware
from flopmeter.distributed import WorldError, world
from flopmeter.distributed.ranks import run_ranks
from flopmeter.launch.modes import mode_called
from flopmeter.meter import DEFAULT_HARDWARE, FlopMeter, Mode, reports_together
from flopmeter.report.chrome_trace import save_together
from flopmeter.report.page import document
from flopmeter.report.page.first_screen import section
from flopmeter.report.page.gantt import gantt
from flopmeter.report.page.markup import tag
from flopmeter.report.page.tables import plain_table
from flopmeter.report.quantities import figure, in_ms, percent
from flopmeter.report.report import Report
from flopmeter.report.tables import ColumnOf, Document, Shown, Table, table_of

STEPS = 2  # the last one is metered; in the first one stages tell each other shapes, and optimizers make state


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow(Step):
    """What one rank of the pipeline does in a step. Times in seconds; `seconds` is when it has ended."""

    KEYS = (
        "place", "rank", "seconds", "computing_seconds", "bubble_seconds", "exposed_seconds", "warm_up_seconds",
        "steady_seconds", "cool_down_seconds", "in_flight", "mfu", "regime", "peak_memory_bytes",
        "usable_memory_bytes", "fits",
    )  # fmt: skip

    place: int | None  # along the pipeline, from 0; None: the ranks of a script are not known to be stages
    rank: int  # in the world
    computing_seconds: float  # of kernels on the computing stream
    bubble_seconds: float  # in which it waits for messages and other ranks of the pipeline, also at the end
    exposed_seconds: float  # in which it waits for other collectives, or runs them itself
    warm_up_seconds: float  # until its first backward pass
    steady_seconds: float  # from there until its last forward pass has ended
    cool_down_seconds: float  # from there until its last backward pass has ended
    in_flight: float  # most activations at one time, as a multiple of those of its first forward pass


@dataclass(frozen=True)
class Pipeline(Shown):
    """A step of all stages. `reports` has the report of each rank, by global rank, all on the clock of the step."""

    title: str
    rows: tuple[StageRow, ...]
    reports: Mapping[int, Report]
    notes: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """Until the last rank has ended."""
        return max(row.seconds for row in self.rows)

    @property
    def bubble_share(self) -> float:
        """The share of the step in which a rank waits for others, on average over the ranks."""
        return sum(row.bubble_seconds for row in self.rows) / len(self.rows) / self.seconds if self.seconds else 0.0

    @property
    def slowest(self) -> StageRow:
        """The rank that has the most to do: the others wait for it."""
        return max(self.rows, key=_own_seconds)

    @property
    def mfu(self) -> float:
        """The MFU of all ranks together."""
        shares = [report.mfu * report.seconds for report in self.reports.values()]
        return sum(shares) / len(shares) / self.seconds if self.seconds else 0.0

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted timelines of all ranks as one Chrome trace (ui.perfetto.dev), a track for each stream."""
        save_together({f"rank {rank}": report for rank, report in self.reports.items()}, path)

    def render(self, format: str = "text") -> str:
        """Text, markdown, csv, json, or html with the stages as a Gantt chart. Raises ValueError for another format."""
        if format != "html":
            return super().render(format)
        shown = self._document()
        return document(
            shown.title,
            tag("header", tag("h1", shown.title), tag("p", shown.notes[0])),
            section("Stages", gantt({f"rank {rank}": report for rank, report in self.reports.items()})),
            section("Times", *(plain_table(table, "stage") for table in shown.tables)),
            section("Notes", tag("ul", *(tag("li", note) for note in shown.notes), class_="notes")),
        )

    def as_dict(self) -> dict[str, Any]:
        """The figures in plain types and SI units."""
        rows = [row.as_dict() for row in self.rows]
        return {"seconds": self.seconds, "bubble_share": self.bubble_share, "mfu": self.mfu, "rows": rows}

    @property
    def table(self) -> Table:
        """A row for each rank."""
        return table_of(_COLUMNS, self.rows, hides_unknown=True)

    @property
    def lines(self) -> list[str]:
        """The step, and who is the slowest."""
        slowest, mean = self.slowest, sum(map(_own_seconds, self.rows)) / len(self.rows)
        return [
            f"step {in_ms(self.seconds)} ms · bubble {percent(self.bubble_share, 1)} % · MFU {percent(self.mfu, 1)} %",
            f"slowest: rank {slowest.rank}, which has {in_ms(_own_seconds(slowest))} ms to do; "
            f"the average is {in_ms(mean)} ms",
        ]

    def _document(self) -> Document:
        return Document(
            kind="pipeline",
            title=self.title,
            tables=[self.table],
            notes=[*self.lines, *self.notes],
            data=self.as_dict(),
            records=[row.as_dict() for row in self.rows],
        )


def _own_seconds(row: StageRow) -> float:
    return row.computing_seconds + row.exposed_seconds


_COLUMNS: list[ColumnOf[StageRow]] = [
    ColumnOf("stage", lambda row: row.place),
    ColumnOf("rank", lambda row: row.rank, str),
    ColumnOf("computes ms", lambda row: row.computing_seconds, in_ms),
    ColumnOf("bubble ms", lambda row: row.bubble_seconds, in_ms),
    ColumnOf("exposed ms", lambda row: row.exposed_seconds, in_ms),
    ColumnOf("warm-up ms", lambda row: row.warm_up_seconds, in_ms),
    ColumnOf("steady ms", lambda row: row.steady_seconds, in_ms),
    ColumnOf("cool-down ms", lambda row: row.cool_down_seconds, in_ms),
    ColumnOf("in flight", lambda row: row.in_flight, figure),
    PEAK,
    USABLE,
    FITS,
]


def time_pipeline(
    program: Callable[[DeviceMesh], Callable[[], object]],
    mesh: Mapping[str, int],
    hardware: AnyHardware = DEFAULT_HARDWARE,
    cluster: AnyCluster | None = None,
    mode: Mode = "eager",
    *,
    stages: str = "pp",
    **meter_options: Any,
) -> Pipeline:
    """What a step of a pipeline takes, and how much of it each stage waits.

    program: called with the DeviceMesh, once or more for each rank of the pipeline, as that rank. It builds the rank's
        layers on meta and returns the step to meter, a function without arguments. The step runs twice, and the second
        one is metered: in the first, stages tell each other shapes.
    mesh: names and sizes of the mesh's dimensions, such as {"pp": 4, "dp": 8}.
    stages: the dimension along which the pipeline lies. Of the others the first rank stands for all.
    cluster: a name, the path of a YAML file or a Cluster; by default the one that the device comes in.
    meter_options: of FlopMeter.

    Raises WorldError for a mesh that is impossible and for a program that would hang, HardwareError for an unknown
    device or a cluster that is too small, and ValueError for an unknown mode.
    """
    check_callable("time_pipeline calls a function of the mesh, which returns the step", program)
    check_mapping('{"pp": 4}', mesh=mesh)
    mode_called(mode)
    device = load_hardware(hardware)
    links = cluster_of(device, cluster)
    ranks = pipeline_ranks(mesh, stages)
    size = math.prod(mesh.values())
    links.check_size(size)

    def run(rank: int) -> FlopMeter:
        with world(size, mesh, rank, gpus_per_node=links.gpus_per_node) as device_mesh:
            step = program(device_mesh)
            check_callable("the function of the mesh has to return the step, a function without arguments", step)
            meter = FlopMeter(device, cluster=links, **meter_options)
            for _ in range(STEPS):
                with meter:
                    step()
        return meter

    return pipeline_of(reports_together(run_ranks(ranks, run), mode), links)


def pipeline_ranks(mesh: Mapping[str, int], stages: str) -> range:
    """The ranks of one pipeline: the first of each other dimension. Raises WorldError."""
    if stages not in mesh:
        raise WorldError(f"the mesh {dict(mesh)} has no dimension {stages!r}: name the one of the pipeline, stages=...")
    names = list(mesh)
    stride = math.prod(mesh[name] for name in names[names.index(stages) + 1 :])
    return range(0, stride * mesh[stages], stride)


def pipeline_of(reports: Mapping[int, Report], links: Cluster, *, are_stages: bool = True) -> Pipeline:
    """The pipeline of ranks whose reports are on one clock, by global rank."""
    end = max(report.seconds for report in reports.values())
    places = range(len(reports)) if are_stages else itertools.repeat(None)
    rows = tuple(
        _row(place, rank, report, end, reports.keys())
        for place, (rank, report) in zip(places, reports.items(), strict=False)
    )
    first = next(iter(reports.values()))
    notes = dict.fromkeys(note for report in reports.values() for note in report.notes)
    assumed = dict.fromkeys(f"assumed: {each}" for report in reports.values() for each in report.assumptions)
    title = f"pipeline of {len(rows)} ranks · {first.headline}"
    return Pipeline(title, rows, reports, (f"cluster: {links.title}", *notes, *assumed))


def _row(place: int | None, rank: int, report: Report, end: float, ranks: Set[int]) -> StageRow:
    waits = _waits_for_others(report, ranks)
    ran = [
        (kernel.op, timing)
        for kernel, timing in zip(report.kernels, report.timings, strict=True)
        if timing.stream == report.compute_stream and not timing.is_collective
    ]
    backward = [timing for op, timing in ran if op.phase == "backward"]
    first_backward = backward[0].start_seconds if backward else report.seconds
    last_backward = backward[-1].end_seconds if backward else report.seconds
    forward = [(op, timing.end_seconds) for op, timing in ran if op.phase == "forward"]
    # Gradients are made and scaled between and after passes, outside of modules.
    forward = [(op, ended) for op, ended in forward if op.module] or forward
    cools = max((ended for _, ended in forward if ended <= last_backward), default=0.0)
    cools = max(cools, first_backward)
    return StageRow(
        place=place,
        rank=rank,
        computing_seconds=sum(timing.seconds for _, timing in ran),
        bubble_seconds=waits + end - report.seconds,
        exposed_seconds=max(0.0, report.exposed_seconds - waits),
        warm_up_seconds=first_backward,
        steady_seconds=max(0.0, cools - first_backward),
        cool_down_seconds=max(0.0, last_backward - cools),
        in_flight=_in_flight(report),
        **step_figures(report),
    )


def _waits_for_others(report: Report, ranks: Set[int]) -> float:
    """How long the computing stream waits for messages, before a kernel and at the end, and until `ranks` come to a
    collective."""
    timings = report.timings
    waits, last = 0.0, max(timings, key=lambda timing: timing.end_seconds, default=None)
    for number, timing in enumerate(timings):
        if timing.stream == report.compute_stream and timing.link_wait_seconds:
            behind = number if timing.is_collective else _latest(number, report)
            until = 0.0 if behind is None else _others_until(behind, report, ranks)
            waits += max(0.0, min(timing.link_wait_seconds, until - timing.start_seconds + timing.link_wait_seconds))
    if (
        last is not None
        and last.stream != report.compute_stream
        and is_message(report.kernels[timings.index(last)].cost)
    ):
        done = max((t.end_seconds for t in timings if t.stream == report.compute_stream), default=0.0)
        waits += last.end_seconds - max(done, report.host_seconds)
    return waits


def _others_until(number: int, report: Report, ranks: Set[int]) -> float:
    """When the others were ready that the collective waited for, itself or by collectives before it: what a stage
    receives, tensor parallelism gathers first. 0 where it waited for none."""
    while (collective := report.kernels[number].cost.collective) is not None:
        if is_message(report.kernels[number].cost):
            return report.timings[number].end_seconds
        if len(ranks & {*collective.ranks}) > 1:
            return report.timings[number].start_seconds
        latest = _latest(number, report)
        if latest is None:
            break
        number = latest
    return 0.0


def _latest(number: int, report: Report) -> int | None:
    """The kernel that ended last among those on other streams that this launch waited for."""
    placements = report.launches.placements or []
    return max(placements[number].after, key=lambda each: report.timings[each].end_seconds, default=None)


def _in_flight(report: Report) -> float:
    """The most activations that are alive, as a multiple of those that the first forward pass leaves."""
    trace, activations = report.memory.trace, report.memory.timeline["activations"]
    ends = [each.op for each in trace.forward_ends if each.op <= report.memory.steps]
    first = activations[ends[0]] if ends else 0
    return max(activations[end] for end in ends) / first if first else 0.0
