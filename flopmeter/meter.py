"""FlopMeter: the context manager that ties the stages together."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from flopmeter.as_cuda import CudaTarget, Emulation, emulate_cuda
from flopmeter.costs import costs_of, kernels_of
from flopmeter.costs.varlen import packed_notes
from flopmeter.device.cluster import Cluster, cluster_of, load_cluster
from flopmeter.device.hardware import Hardware, load_hardware
from flopmeter.known_values import KnownValues
from flopmeter.known_values.generation import sequences_go_on
from flopmeter.launch import grouped_matmul as grouped
from flopmeter.launch.fusion import NOTE
from flopmeter.launch.modes import MODES, Mode, compiled_region, launches
from flopmeter.records import Call, Clocks, Kernel, LaunchMode, Trace
from flopmeter.records.traces import part_of
from flopmeter.report.report import Report
from flopmeter.report.unfused_attention import unfused_notes
from flopmeter.timing import Host, host_seconds, time_run
from flopmeter.timing.peak_memory import memory_of
from flopmeter.torch_names.private import BUFFERS, DOUBLE_BACKWARD, PROPAGATION, lost
from flopmeter.trace import overlap
from flopmeter.trace.dtensor import unseen_propagation
from flopmeter.trace.other_threads import OtherThreads
from flopmeter.trace.recorder import Recorder
from flopmeter.trace.storages import StorageListener

__all__ = ["DEFAULT_HARDWARE", "Causal", "FlopMeter", "Mode", "StreamError"]

Causal = Literal["full", "exact"]
WORKAROUNDS: tuple[Callable[[KnownValues], AbstractContextManager[None]], ...] = (sequences_go_on, unseen_propagation)
"""Patches of other libraries, where a program has imported these. The file of each says what it works around and until
when."""
DEFAULT_HARDWARE = "a100-sxm4-80gb"


TOLD_IDLE_SHARE = 0.05  # of the wall-clock, from which on a report says what the host was taken to cost


class StreamError(ValueError):
    """The trace cannot be priced on this device, because it would run other ops there."""


@dataclass(frozen=True)
class _Run:
    """What was metered, on one device. A report keeps it to make reports of other modes, so it must not keep the
    meter."""

    trace: Trace
    kernels: list[Kernel]  # of the eager run
    hardware: Hardware
    cluster: Cluster | None
    host: Host
    causal: Causal
    clocks: Clocks
    assumptions: tuple[str, ...]
    notes: tuple[str, ...]

    def in_mode(self, name: str) -> Report:
        """Raises ValueError for an unknown mode."""
        if name not in tuple(MODES):
            raise ValueError(f"unknown mode {name!r}; known: {', '.join(MODES)}")
        mode, switches = MODES[name], self.trace.switches
        run = launches(self.kernels, self.trace, mode, compiled_region(self.trace.ops))
        timings, clock = time_run(run, self.hardware, switches, self.host, self.cluster, self.clocks)
        report = Report(
            launches=run,
            timings=timings,
            hardware=self.hardware,
            switches=switches,
            host_seconds=host_seconds(run, self.host),
            memory=memory_of(self.trace),
            causal=self.causal,
            assumptions=self.assumptions,
            notes=(*self.notes, *self._notes_of(mode)),
            in_mode=self.in_mode,
            cluster=self.cluster,
            clock=clock,
        )
        if report.idle_seconds < TOLD_IDLE_SHARE * report.seconds:
            return report
        return replace(report, notes=(*report.notes, f"the host: {self.host.summary}"))

    def _notes_of(self, mode: LaunchMode) -> Iterator[str]:
        if mode.fuses:
            yield NOTE
        if mode.has_graphs and self.cluster is not None:
            yield f"{mode.name}: collectives are issued where the eager program does it; inductor may move them"


class FlopMeter:
    """Meters the PyTorch program that runs inside it.

    hardware: a name of `available_hardware()`, a path to a YAML profile, or a Hardware.
    as_cuda: dispatch what CUDA would on that device, for tensors on meta; False records the raw stream.
    strict: raise UncountedError at the first op that no rule covers, instead of listing it.
    causal: 'full' counts the whole attention square, as torch's counter does; 'exact' what a mask leaves.
    routing: 'balanced' lets experts picked by unknown scores take turns (see known_values).
    checks: 'hold' takes unknown values to be finite, and an `all()` of them to be true.
    mask_fraction: so large a share of an unknown bool mask that selects elements is true.
    unknown: 'stand-in' gives a program that reads an unknown value (`loss.item()`) a stated number, not an error.
    cluster: over whose links collectives go: a name of `available_clusters()`, a path or a Cluster; without it, the
        one that the hardware comes in (see flopmeter.device.cluster).
    source: note the caller's file and line with every op (slower).
    host: what the program costs the CPU; by default as the hardware's profile has it.
    clocks: 'sustained' prices a run that goes on for seconds, at the clock that the power limit leaves on average over
        the run; 'burst' one of less than about 20 ms on a cool device, at the boost clock.

    The same meter can be entered again: it starts afresh. Entering it inside itself changes nothing.
    """

    def __init__(
        self,
        hardware: str | os.PathLike[str] | Hardware = DEFAULT_HARDWARE,
        *,
        as_cuda: bool = True,
        strict: bool = False,
        causal: Causal = "full",
        routing: str | None = None,
        checks: str | None = None,
        mask_fraction: float | None = None,
        unknown: str | None = None,
        source: bool = False,
        host: Host | None = None,
        cluster: str | os.PathLike[str] | Cluster | None = None,
        clocks: Clocks = "sustained",
    ):
        if clocks not in get_args(Clocks):
            raise ValueError(f"unknown clocks {clocks!r}; known: {', '.join(get_args(Clocks))}")
        if causal not in get_args(Causal):
            raise ValueError(f"unknown causal convention {causal!r}; known: {', '.join(get_args(Causal))}")
        if not isinstance(host, Host | None):
            raise TypeError(f"host must be a flopmeter.timing.Host or None, not {host!r}")
        self.hardware = load_hardware(hardware)
        self._strict = strict
        self._causal: Causal = causal
        self._clocks: Clocks = clocks
        self._source = source
        self._host = host
        self._cluster = None if cluster is None else load_cluster(cluster)
        self._as_cuda = as_cuda
        self._new_values = functools.partial(
            KnownValues, routing=routing, checks=checks, mask_fraction=mask_fraction, unknown=unknown
        )
        self._new_values()  # raises an error for unknown options now, not on entry
        self.storage_listener: StorageListener | None = None  # hears of storages while the meter is open
        self._recorder: Recorder | None = None
        self._values: KnownValues | None = None
        self._emulation: Emulation | None = None
        self._other_threads = OtherThreads()
        self._depth = 0
        self._undo = ExitStack()

    def __enter__(self) -> FlopMeter:
        if self._depth == 0:
            overlap.check_task()
            with ExitStack() as undo:
                self._emulation = undo.enter_context(emulate_cuda(target_of(self.hardware))) if self._as_cuda else None
                self._values = undo.enter_context(self._new_values())
                for workaround in WORKAROUNDS:
                    undo.enter_context(workaround(self._values))
                self._recorder = Recorder(
                    source=self._source,
                    overrides=self._emulation.overrides if self._emulation else None,
                    values=self._values,
                    compiled_region=self._compiled_region if self._as_cuda else None,
                    on_new_call=_check if self._strict else None,
                    storage_listener=self.storage_listener,
                )
                undo.enter_context(self._recorder)
                self._other_threads = undo.enter_context(OtherThreads())
                overlap.push(self, self._close)
                self._undo = undo.pop_all()
        elif not overlap.is_open(self):
            raise RuntimeError(
                "this FlopMeter is open in another thread, and sees that thread's ops: take one for each"
            )
        self._depth += 1
        return self

    def __exit__(self, *exception: Any) -> None:
        if not overlap.is_open(self):
            raise RuntimeError(
                "this FlopMeter is not open in this thread: leave it where it was entered, and before any that was "
                "entered earlier"
            )
        self._depth -= 1
        if self._depth == 0:
            overlap.pop(self)

    def _close(self) -> None:
        self._depth = 0
        self._undo.close()

    def _compiled_region(self) -> int | None:
        return self._emulation.compiled_region if self._emulation else None

    @property
    def trace(self) -> Trace:
        """What ran so far. Raises RuntimeError before the meter was entered."""
        if self._recorder is None:
            raise RuntimeError("nothing was metered yet: run the program inside `with meter:` first")
        return self._recorder.trace

    def report(
        self,
        *,
        hardware: str | os.PathLike[str] | Hardware | None = None,
        mode: Mode = "eager",
        cluster: str | os.PathLike[str] | Cluster | None = None,
        ops: range | None = None,
    ) -> Report:
        """Price what was metered so far, on the meter's device and cluster or on others.

        ops: only these of `trace.ops`, in a row, such as one step of many.
        Raises StreamError if the other device would have run other ops, and HardwareError if it lacks a dtype that the
        program computes in, or if the cluster is too small for the program's collectives.
        """
        device = self.hardware if hardware is None else load_hardware(hardware)
        self._check_stream(device)
        trace = self.trace if ops is None else part_of(self.trace, ops)
        return self._price(trace, device, self._cluster if cluster is None else load_cluster(cluster), mode)

    def _price(self, trace: Trace, device: Hardware, cluster: Cluster | None, mode: str) -> Report:
        kernels = grouped.on_device(kernels_of(trace, strict=self._strict), device)
        if not any(kernel.cost.collective for kernel in kernels):
            cluster = None
        elif cluster is None:
            cluster = cluster_of(device)
        notes = (*self._notes(device), *packed_notes(kernels))
        host = self._host or device.host
        run = _Run(trace, kernels, device, cluster, host, self._causal, self._clocks, self._assumptions(), notes)
        return run.in_mode(mode)

    def _notes(self, device: Hardware) -> tuple[str, ...]:
        notes = []
        if self._emulation:
            notes += [*self._emulation.notes, *target_of(device).notes, *unfused_notes(self._emulation)]
        modules = self._recorder.modules.missed if self._recorder else 0
        if self._other_threads.ops or modules:
            notes.append(
                f"not metered: {self._other_threads.ops:,} ops on meta tensors and {modules:,} module calls in other "
                "threads; a meter sees the ops of the thread that entered it"
            )
        notes += lost(PROPAGATION, BUFFERS, DOUBLE_BACKWARD)
        return tuple(dict.fromkeys(notes))

    def _check_stream(self, device: Hardware) -> None:
        difference = self._emulation.difference(target_of(device)) if self._emulation else None
        if difference is not None:
            raise StreamError(
                f"{device.name} would run other ops than {self.hardware.name}, for which the program was metered: "
                f"{difference}. Meter it again with FlopMeter({device.name!r})"
            )

    def _assumptions(self) -> tuple[str, ...]:
        uses = self._values.assumptions if self._values else ()
        return tuple(f"{use.rule} for {use.op} at {use.where} ({use.count}x)" for use in uses)


def target_of(hardware: Hardware) -> CudaTarget:
    """The device as torch's dispatch sees it."""
    if hardware.compute_capability is None:
        return CudaTarget.stand_in(hardware.title)
    return CudaTarget(hardware.compute_capability)


def _check(call: Call) -> None:
    costs_of(call, strict=True)
