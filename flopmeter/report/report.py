"""The report: timed kernels, grouped into rows and totals. No earlier stage groups anything."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

from flopmeter.device.cluster import Cluster
from flopmeter.device.hardware import Hardware
from flopmeter.records import (
    COMMUNICATION,
    DEFAULT_STREAM,
    UNCOUNTED,
    UNKNOWN_POWER,
    Clocks,
    CompiledGraph,
    Cost,
    Kernel,
    Launches,
    Regime,
    RunClock,
    Switches,
    Timing,
)
from flopmeter.report.drawers import FORMATS, VIEWS, rendered
from flopmeter.report.quantities import in_ms, percent
from flopmeter.report.ran import NOT_SAID, Ran
from flopmeter.report.rows import GROUPINGS, By, Row, RowTotals
from flopmeter.report.unfused_attention import Unfused
from flopmeter.report.wins import Advice, HotSpot
from flopmeter.timing import Uncertainty, uncertainty
from flopmeter.timing.bands import BETWEEN_NODES
from flopmeter.timing.peak_memory import Memory

JOULES_PER_KWH = 3.6e6
LARGE_HIDDEN = 0.1  # of the MFU: where masks hide as much, as those of packed texts do, it is told without that too
NAMED_FROM = 0.01  # of the time of the module that takes longest: a shorter one is not in the headline


@dataclass(frozen=True, repr=False)
class Report:
    """What the program costs on one device. All times in seconds, all sizes in bytes."""

    launches: Launches
    timings: list[Timing]
    hardware: Hardware
    switches: Switches
    host_seconds: float
    memory: Memory
    causal: Literal["full", "exact"] = "full"
    assumptions: tuple[str, ...] = ()
    caution: str = ""  # why the real run may be another than the one that was timed
    notes: tuple[str, ...] = ()  # what else the reader must know about the trace
    in_mode: Callable[..., Report] | None = None  # the same run in another mode, or changed: see flopmeter.metered_run
    cluster: Cluster | None = None  # the links that collectives use; None: none has several ranks
    clock: RunClock = UNKNOWN_POWER
    ran: Ran = NOT_SAID
    dollars_per_kwh: float | None = None  # as the user stated it
    graphs: tuple[CompiledGraph, ...] = ()  # that torch.compile made, each with `.kernels` and `.breaks`
    unfused: tuple[Unfused, ...] = ()  # calls of scaled_dot_product_attention that run op by op

    @property
    def kernels(self) -> list[Kernel]:
        """What the device runs, in order."""
        return self.launches.kernels

    @property
    def mode(self) -> str:
        """'eager', 'compiled', 'cudagraph' or 'eager-cudagraph'."""
        return self.launches.mode.name

    @cached_property
    def headline(self) -> str:
        """What ran, where, in which type and mode. A module that takes hardly any time (a loss) is not named."""
        seconds: dict[str, float] = defaultdict(float)
        for kernel, timing in zip(self.kernels, self.timings, strict=True):
            for name in dict.fromkeys(op.module.split(".")[0] for op in kernel.ops):
                seconds[name] += timing.seconds
        least = NAMED_FROM * max((seconds[name] for name in seconds if name), default=0.0)
        modules = [name for name in seconds if seconds[name] >= least]
        phases = dict.fromkeys(op.phase for kernel in self.kernels for op in kernel.ops)
        classes = Counter(name.partition(" (")[0] for name in modules if name)  # the second Linear is `Linear (2)`
        what = ", ".join(f"{name} ×{count}" if count > 1 else name for name, count in classes.items()) or "program"
        return " · ".join((f"{what}, {' + '.join(phases)}", self.hardware.title, self.main_dtype, self.mode))

    @cached_property
    def compiled(self) -> Report | None:
        """An eager run as torch.compile would run it; None for other modes. Collectives stay where the program issues
        them, as inductor leaves them by default."""
        if self.mode != "eager" or self.in_mode is None or not self.timings:
            return None
        return self.in_mode("compiled")

    def speed_up(self) -> Any:
        """Eager and compiled side by side, region by region (a `SpeedUp`). Raises ValueError in another mode."""
        return VIEWS["speed-up"](self)

    def explain_compile(self) -> str:
        """What torch.compile made of the program: graphs, breaks, recompilations, and what the kernels hold. Raises
        ValueError where the program did not compile."""
        return VIEWS["compilation"](self)

    @cached_property
    def flops(self) -> int:
        """What the program runs, in the stated convention (full attention square unless causal='exact')."""
        return sum(self.counted_flops(kernel.cost) for kernel in self.kernels)

    @cached_property
    def model_flops(self) -> int:
        """Without recomputation: neither checkpointed forwards nor what fused kernels compute again."""
        return sum(map(self.counted_model_flops, self.kernels))

    @cached_property
    def executed_flops(self) -> int:
        """What the device really executes: recomputation included, and only the visible part of attention."""
        return sum(kernel.cost.executed_flops for kernel in self.kernels)

    @cached_property
    def macs(self) -> int:
        """Multiply-adds of contractions and attention."""
        return sum(kernel.cost.macs + kernel.cost.loop_macs for kernel in self.kernels)

    @property
    def peak_memory_bytes(self) -> int:
        return self.memory.peak_bytes

    @cached_property
    def bytes_read(self) -> int:
        return sum(kernel.cost.bytes_read for kernel in self.kernels)

    @cached_property
    def bytes_written(self) -> int:
        return sum(kernel.cost.bytes_written for kernel in self.kernels)

    @cached_property
    def seconds(self) -> float:
        """Predicted wall-clock: the end of the launch timeline."""
        if not self.timings:
            return self.host_seconds
        streams = {timing.stream: timing for timing in self.timings}  # the last of each
        return max(self.host_seconds, *(last.end_seconds for last in streams.values()))

    @cached_property
    def uncertainty(self) -> Uncertainty:
        """The band around `seconds`, from the validation of the kernel classes in the run."""
        if self.cluster is None:
            return uncertainty(self.timings, self.seconds, self.hardware)
        # Communication that compute hides makes no step longer. What is exposed has the wider band if some of it is
        # between nodes.
        classes = {timing.kernel_class for timing in self.timings if timing.is_collective}
        kernel_class = BETWEEN_NODES if BETWEEN_NODES in classes else COMMUNICATION
        exposed = Timing(0.0, 0.0, self.exposed_seconds, 0.0, 0.0, 0.0, kernel_class, 0.0, is_collective=True)
        hidden = [timing._replace(work_seconds=0.0, floor_seconds=0.0) for timing in self.timings]
        return uncertainty([*self._on_compute_stream, exposed, *hidden], self.seconds, self.hardware)

    @property
    def seconds_low(self) -> float:
        return self.uncertainty.low

    @property
    def seconds_high(self) -> float:
        return self.uncertainty.high

    @cached_property
    def kernel_seconds(self) -> float:
        """The device's busy time, on all streams."""
        return sum(timing.seconds for timing in self.timings)

    @property
    def launch_seconds(self) -> float:
        """The host's time to enqueue everything."""
        return self.host_seconds

    @property
    def idle_seconds(self) -> float:
        """How long the device waits for the host."""
        computing = sum(timing.seconds * share for timing, share in self._seen)
        return max(0.0, self.seconds - computing - self.exposed_seconds)

    @cached_property
    def communication_seconds(self) -> float:
        """Device time of collectives, hidden behind compute or not."""
        return sum(timing.seconds for timing in self.timings if timing.is_collective)

    @cached_property
    def exposed_seconds(self) -> float:
        """How long the computing stream waits for communication: before a kernel, in a collective that it runs
        itself, and in the end."""
        if self.cluster is None:
            return 0.0
        on_stream = [timing for timing in self.timings if timing.stream == self.compute_stream]
        waits = sum(timing.link_wait_seconds for timing in on_stream)
        own = sum(timing.seconds for timing in on_stream if timing.is_collective)
        done = on_stream[-1].end_seconds if on_stream else 0.0
        return waits + own + max(0.0, self.seconds - max(done, self.host_seconds))

    @cached_property
    def compute_stream(self) -> int:
        """The busiest stream: the default one, unless the program computes on one of its own."""
        seconds: dict[int, float] = defaultdict(float, {DEFAULT_STREAM: 0.0})
        for timing in self.timings:
            seconds[timing.stream] += 0.0 if timing.is_collective else timing.seconds
        return max(seconds, key=seconds.__getitem__)

    @cached_property
    def _on_compute_stream(self) -> list[Timing]:
        """Kernels of the computing stream, without collectives."""
        return [timing for timing in self.timings if timing.stream == self.compute_stream and not timing.is_collective]

    @cached_property
    def _seen(self) -> list[tuple[Timing, float]]:
        """Kernels other than collectives, each with the share of its time that counts towards the wall-clock: all of a
        kernel of the computing stream; of another stream's kernel the part in gaps of the computing stream. (Among
        ranks a gap is a wait for messages.)"""
        seen = [(timing, 1.0) for timing in self._on_compute_stream]
        starts = [timing.start_seconds for timing, _ in seen]
        busy = [0.0, *accumulate(timing.seconds for timing, _ in seen)]

        def busy_until(moment: float) -> float:
            place = bisect_right(starts, moment)
            return busy[place] - max(0.0, seen[place - 1][0].end_seconds - moment if place else 0.0)

        others = (t for t in self.timings if t.stream != self.compute_stream and not t.is_collective)
        until = 0.0
        for timing in sorted(others, key=lambda timing: timing.start_seconds) if self.cluster is None else ():
            start, until = max(timing.start_seconds, until), max(timing.end_seconds, until)
            alone = until - start - (busy_until(until) - busy_until(start))
            if alone > 0.0:
                seen.append((timing, min(1.0, alone / timing.seconds)))
        return seen

    @cached_property
    def joules(self) -> float | None:
        """What the device takes for the run, also while it waits; None where its power limit is unknown."""
        idle = self.clock.idle_watts
        return None if idle is None else idle * self.seconds + sum(timing.joules for timing in self.timings)

    @property
    def watts(self) -> float | None:
        """The average power of the device over the run; for a run that takes no time, its idle power."""
        if self.joules is None:
            return None
        return self.joules / self.seconds if self.seconds else self.clock.idle_watts

    @property
    def energy_dollars(self) -> float | None:
        """What the energy of the run costs; None without its price, or where the device's power is unknown."""
        if self.joules is None or self.dollars_per_kwh is None:
            return None
        return self.joules / JOULES_PER_KWH * self.dollars_per_kwh

    @property
    def clocks(self) -> Clocks:
        """'sustained' or 'burst': at which clocks the run is priced."""
        return self.clock.clocks

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: time that the model's FLOPs would take at spec peak, over `seconds`."""
        return self._share_of_peak(self.model_flops)

    @property
    def visible_mfu(self) -> float:
        """MFU without the part of attention that masks hide, however `causal` counts it."""
        costs = (kernel.cost for kernel in self.kernels if kernel.op.phase != "recompute" and self.causal == "full")
        hidden = sum(cost.masked_flops - cost.masked_recomputed_flops for cost in costs)
        return self._share_of_peak(self.model_flops - hidden)

    @property
    def mfu_in_words(self) -> str:
        """'51.0 % (37.2 % without what masks hide)'; most often without the second figure."""
        hides_much = self.visible_mfu < (1 - LARGE_HIDDEN) * self.mfu
        visible = f" ({percent(self.visible_mfu, 1)} % without what masks hide)" if hides_much else ""
        return f"{percent(self.mfu, 1)} %{visible}"

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilization: the same for the executed FLOPs."""
        return self._share_of_peak(self.executed_flops)

    def _share_of_peak(self, flops: int) -> float:
        peak = self.hardware.contraction_peak(self.main_dtype).flop_per_s
        return flops / (self.seconds * peak) if self.seconds else 0.0

    @cached_property
    def main_dtype(self) -> str:
        """The type in which most of the products' FLOPs are done; fp32 where there are none."""
        macs: dict[str, int] = {}
        for kernel in self.kernels:
            if kernel.cost.macs:
                dtype = self.switches.matmul_dtype(kernel.cost)
                macs[dtype] = macs.get(dtype, 0) + kernel.cost.macs
        return max(macs, key=macs.__getitem__) if macs else "fp32"

    @cached_property
    def seconds_by_regime(self) -> dict[Regime, float]:
        """The wall-clock in its shares: kernels bound by compute, kernels bound by memory, communication that nothing
        hides (in a run with collectives), and overhead (the device waiting for the host, and kernels too small to
        outlast their own launch)."""
        shares: dict[Regime, float] = {"compute": 0.0, "memory": 0.0}
        if self.cluster is not None:
            shares["communication"] = self.exposed_seconds
        shares["overhead"] = 0.0
        for timing, share in self._seen:
            shares["compute" if timing.is_compute else "memory"] += timing.work_seconds * share
            shares["overhead"] += timing.floor_seconds * share
        shares["overhead"] += self.idle_seconds
        return shares

    @property
    def regime(self) -> Regime:
        """The largest share of the wall-clock."""
        shares = self.seconds_by_regime
        return max(shares, key=shares.__getitem__)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """What the program could change, each change priced by the time model; only what wins at least 3 % of the
        wall-clock. Needless work that costs at least 5 % comes first, then all else, both by what they win."""
        return VIEWS["advice"](self)

    @cached_property
    def hot_spots(self) -> list[HotSpot]:
        """Kernels of one op in one place, those that hold the most wall-clock over their floor first."""
        return VIEWS["spots"](self)

    @cached_property
    def later_step_seconds(self) -> float | None:
        """What a step takes once the optimizer's states exist; None if this step does not make them."""
        return VIEWS["later step"](self)

    @cached_property
    def uncounted(self) -> list[Row]:
        """Ops that no rule covers, with their calls and bytes."""
        return self._rows(lambda kernel: (kernel.cost.name,) if kernel.cost.op_class == UNCOUNTED else ())

    def rows(self, by: By = "class", *, depth: int | None = None) -> list[Row]:
        """The kernels grouped by op class (in the order of the table), op, phase, kernel or module.

        A module's row includes its children's work; `depth` limits how deep the tree goes (1: outermost).
        Raises ValueError for an unknown grouping, and for a depth below 1 or of another grouping.
        """
        if by not in tuple(GROUPINGS):  # whatever type it has
            raise ValueError(f"unknown grouping {by!r}; known: {', '.join(GROUPINGS)}")
        if depth is not None and (by != "module" or type(depth) is not int or depth < 1):
            raise ValueError(f"depth is how deep rows('module') goes, 1 or more; not {depth!r} of rows({by!r})")
        names, order, splits_flops = GROUPINGS[by]
        kernel_names = (lambda kernel: names(kernel)[:depth]) if by == "module" else names
        return order(self._rows(kernel_names, self._class_flops if splits_flops else None))

    def render(self, format: str = "text") -> str:
        """The report as text, markdown, csv, json or html. Raises ValueError for another format."""
        return rendered(FORMATS, format, self)

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted timeline as a Chrome trace (chrome://tracing, ui.perfetto.dev).

        Raises ValueError for a path that ends neither in .json nor in .json.gz, by which the viewers know it.
        """
        if not os.fspath(path).endswith((".json", ".json.gz")):
            raise ValueError(f"{path}: end the name of a trace in .json or .json.gz, by which viewers know it")
        VIEWS["timeline"](self, path)

    def __repr__(self) -> str:
        return f"<Report: {self.headline} · {len(self.kernels)} kernels, {in_ms(self.seconds)} ms predicted>"

    def __str__(self) -> str:
        return self.render("text")

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return VIEWS["notebook"](self)

    def counted_flops(self, cost: Cost) -> int:
        """FLOPs of one kernel, in the stated convention."""
        return cost.flops - (cost.masked_flops if self.causal == "exact" else 0)

    def counted_model_flops(self, kernel: Kernel) -> int:
        """The kernel's FLOPs without recomputation."""
        if kernel.op.phase == "recompute":
            return 0
        cost = kernel.cost
        hidden = cost.masked_recomputed_flops if self.causal == "exact" else 0
        return self.counted_flops(cost) - (cost.recomputed_flops - hidden)

    def _class_flops(self, cost: Cost) -> Iterable[tuple[str, int]]:
        """FLOPs of each class in the kernel; masked FLOPs belong to its first class, that of the matmul."""
        (op_class, flops), *rest = cost.flops_by_class
        return [(op_class, flops - (cost.flops - self.counted_flops(cost))), *rest]

    def _rows(
        self,
        names: Callable[[Kernel], tuple[str, ...]],
        flops_by_name: Callable[[Cost], Iterable[tuple[str, int]]] | None = None,
    ) -> list[Row]:
        """One row for each name that `names` gives to a kernel, in order of appearance."""
        groups: dict[str, RowTotals] = {}
        for kernel, timing in zip(self.kernels, self.timings, strict=True):
            for name in names(kernel):
                group = groups.setdefault(name, RowTotals())
                group.add(kernel.cost, timing)
                if flops_by_name is None:
                    group.flops += self.counted_flops(kernel.cost)
            if flops_by_name is not None:
                for name, flops in flops_by_name(kernel.cost):
                    groups.setdefault(name, RowTotals()).flops += flops
        idle, busy = self.clock.idle_watts, self.kernel_seconds
        spread = None if idle is None else idle * self.seconds / busy if busy else 0.0
        return [group.row(name, spread) for name, group in groups.items()]
