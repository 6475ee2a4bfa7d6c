"""A metered run on one device, and its reports in each mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from flopmeter.costs import CallCosts
from flopmeter.device.cluster import Cluster
from flopmeter.device.hardware import Hardware
from flopmeter.launch.fusion import NOTE, whole_program
from flopmeter.launch.modes import MODES, Widened, compiled_region, launches, mode_called
from flopmeter.launch.templates import with_templates
from flopmeter.records import Clocks, Kernel, Launches, LaunchMode, Trace
from flopmeter.report.ran import Ran
from flopmeter.report.report import Report
from flopmeter.report.unfused_attention import Unfused
from flopmeter.timing import Host, PowerLaws, RankRun, TimedRun, time_run
from flopmeter.timing.peak_memory import memory_of

Causal = Literal["full", "exact"]
COMPILED = (
    "compiled: graphs, kernels and recomputation are those of torch's own compiler, which ran up to its Scheduler; "
    "products are padded, and kernels timed, by rules"
)
TOLD_IDLE_SHARE = 0.05  # of the wall-clock, from which on a report says what the host was taken to cost


@dataclass
class Memo:
    """What was worked out for a program on one device, for other modes and changed programs. Pickling drops it."""

    costs: CallCosts = field(default_factory=dict)
    laws: PowerLaws = field(default_factory=PowerLaws)
    reports: dict[str, Report] = field(default_factory=dict)  # by mode
    launched: dict[tuple[bool, bool], tuple[Launches, Trace]] = field(default_factory=dict)  # by has_graphs and fuses

    def __reduce__(self) -> tuple[type[Memo], tuple[()]]:
        return Memo, ()


class PricedInstead(NamedTuple):
    """What is to be priced in place of what was metered."""

    trace: Trace | None = None  # a changed one, as advice makes
    kernels: list[Kernel] | None = None  # in place of those of the eager run, one for one
    widened: Widened = "as marked"  # what is compiled
    is_captured: bool = False  # by torch.cuda.graph: a replay is a launch, without the guards of a compiler

    @property
    def is_none(self) -> bool:
        return self == PricedInstead()


@dataclass(frozen=True)
class MeteredRun:
    """What was metered, on one device. A report keeps it to make reports of other modes, so it must not keep the
    meter, nor what cannot be pickled."""

    trace: Trace
    kernels: list[Kernel]  # of the eager run
    kernels_of: Callable[[Trace, CallCosts], list[Kernel]]  # on this device
    hardware: Hardware
    cluster: Cluster | None
    host: Host
    causal: Causal
    clocks: Clocks
    assumptions: tuple[str, ...]
    caution: str
    notes: tuple[str, ...]
    ran: Ran
    known: Memo
    dollars_per_kwh: float | None
    unfused: tuple[Unfused, ...]
    repeats: bool = False  # one turn of a loop

    def in_mode(self, name: str, **changed: Any) -> Report:
        """The report of a mode; `changed`: fields of PricedInstead. Raises ValueError for an unknown mode."""
        change = PricedInstead(**changed)
        known = self.known.reports.get(mode_called(name).name)
        if change.is_none and known is not None:
            return known
        run, trace = self.launched(name, change)
        rank = RankRun(run, self.hardware, trace.switches, self.host, self.cluster)
        timed = time_run(rank, self.clocks, self.known.laws)
        report = self.report(run, trace, timed, self.in_mode)
        if change.is_none:
            self.known.reports[name] = report
        return report

    def launched(self, name: str, change: PricedInstead) -> tuple[Launches, Trace]:
        """What the device runs in that mode, and the trace of it. Raises ValueError for an unknown mode."""
        mode = mode_called(name)
        if change.is_none and (mode.has_graphs, mode.fuses) in self.known.launched:
            run, trace = self.known.launched[mode.has_graphs, mode.fuses]
            return run._replace(mode=mode), trace
        trace = change.trace or self.trace
        kernels = self.kernels if change.kernels is None else change.kernels
        region = compiled_region(trace.ops, change.widened)
        has_templates = mode.fuses and region is whole_program and bool(trace.templates)
        if has_templates:
            trace = with_templates(trace)
        if has_templates or change.trace is not None:
            kernels = self.kernels_of(trace, self.known.costs)
        run = launches(kernels, trace, mode, region, widened=change.widened)
        run = run._replace(repeats=self.repeats and not trace.stream_use.host_waits)
        if change.is_captured and mode.replays_graph:
            graphs = {number for number in run.graphs if number is not None}
            run = run._replace(captured=dict.fromkeys(graphs, MODES["eager-cudagraph"]))
        if change.is_none:
            self.known.launched[mode.has_graphs, mode.fuses] = run, trace
        return run, trace

    def report(self, run: Launches, trace: Trace, timed: TimedRun, in_mode: Callable[..., Report] | None) -> Report:
        """`in_mode` makes the report of another mode."""
        mode, switches = run.mode, trace.switches
        report = Report(
            launches=run,
            timings=timed.timings,
            hardware=self.hardware,
            switches=switches,
            host_seconds=timed.host_seconds,
            memory=memory_of(trace, self.hardware, run.lives),
            causal=self.causal,
            assumptions=self.assumptions,
            caution=self.caution,
            notes=(*self.notes, *self._notes_of(mode)),
            in_mode=in_mode,
            cluster=self.cluster,
            clock=timed.clock,
            ran=self.ran,
            dollars_per_kwh=self.dollars_per_kwh,
            graphs=tuple(self.trace.compilation.graphs),
            unfused=self.unfused,
        )
        if report.idle_seconds < TOLD_IDLE_SHARE * report.seconds:
            return report
        return replace(report, notes=(*report.notes, self.host.summary))

    def _notes_of(self, mode: LaunchMode) -> Iterator[str]:
        if mode.fuses and not self.trace.compilation.graphs:
            yield NOTE
        if self.trace.compilation.graphs:
            yield COMPILED
        if mode.has_graphs and self.cluster is not None:
            yield f"{mode.name}: collectives are issued where the eager program does it; inductor may move them"
