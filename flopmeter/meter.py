"""FlopMeter: the context manager that ties the stages together."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from numbers import Real
from typing import Any, Literal, get_args

from torch.optim import Optimizer

from flopmeter.as_cuda import CudaTarget, Emulation, dynamo, emulate_cuda
from flopmeter.compiler import AroundTracing, Exports, OnCompiledCall, PosedDevice, Session, nothing_around
from flopmeter.costs import CallCosts, costs_of, kernels_of
from flopmeter.costs.contractions.linalg import chain_notes
from flopmeter.costs.contractions.quantized import group_assumptions
from flopmeter.costs.contractions.rnn import step_notes
from flopmeter.costs.contractions.varlen import packed_assumptions
from flopmeter.costs.data_movement.communication import dtensor_notes, message_notes
from flopmeter.costs.host_work import host_work_notes, staging_notes
from flopmeter.costs.lookup import implementation_assumptions, uncounted_implementations
from flopmeter.costs.triton_kernels import triton_assumptions, uncounted_notes
from flopmeter.device.cluster import Cluster, cluster_of, load_cluster
from flopmeter.device.hardware import Hardware, load_hardware
from flopmeter.known_values import Assumption, KnownValues
from flopmeter.known_values.assumptions import guess_of_length, in_words
from flopmeter.known_values.generation import sequences_go_on
from flopmeter.known_values.routing import Routing
from flopmeter.launch import grouped_matmul as grouped
from flopmeter.launch.modes import Mode, mode_of
from flopmeter.launch.scaled_matmul import check_scales
from flopmeter.metered_run import Causal, Memo, MeteredRun, PricedInstead
from flopmeter.records import Call, Clocks, Kernel, Trace
from flopmeter.records.traces import part_of
from flopmeter.report.other_threads import missed_copies
from flopmeter.report.ran import ran_of
from flopmeter.report.report import Report
from flopmeter.report.unfused_attention import unfused_calls, unfused_notes
from flopmeter.timing import Host, RankRun, time_runs
from flopmeter.timing.timeline import messages_of
from flopmeter.torch_names.private import AOT_INDUCTOR, BUFFERS, DOUBLE_BACKWARD, PROPAGATION, PYTHON_OPS, lost
from flopmeter.trace import other_threads, overlap
from flopmeter.trace.copies_of_weights import note_copies_of_weights
from flopmeter.trace.dtensor import unseen_propagation
from flopmeter.trace.recorder import Recorder
from flopmeter.trace.shapes_only import ShapesOnly
from flopmeter.trace.storages import StorageListener

__all__ = ["DEFAULT_HARDWARE", "Causal", "FlopMeter", "Mode", "StreamError"]

Compile = Literal[False, True, "rules"]
WORKAROUNDS: tuple[Callable[[KnownValues], AbstractContextManager[None]], ...] = (sequences_go_on, unseen_propagation)
"""Patches of other libraries, where a program has imported these. The file of each says what it works around and until
when."""
DEFAULT_HARDWARE = "a100-sxm4-80gb"


class EmptyProgramError(ValueError):
    """Nothing ran under the meter."""


class StreamError(ValueError):
    """The trace cannot be priced on this device, because it would run other ops there."""


class FlopMeter:
    """Meters the PyTorch program that runs inside it.

    hardware: a name of `available_hardware()`, a path to a YAML profile, or a Hardware.
    as_cuda: dispatch what CUDA would on that device, for tensors on meta; False records the raw stream.
    strict: raise UncountedError at the first op that no rule covers, instead of listing it.
    causal: 'full' counts the whole attention square, as torch's counter does; 'exact' what a mask leaves.
    routing: 'balanced' lets experts picked by unknown scores take turns, {'imbalance': 1.3} loads the first one 1.3
        times the mean and the last one 0.7 times (see known_values.routing).
    checks: 'hold' takes unknown values to be finite, and an `all()` of them to be true.
    mask_fraction: the share of an unknown bool mask that is true, where the mask selects elements, and of unknown
        numbers that are not zero, where the program asks which.
    unknown: 'stand-in' gives a program that reads an unknown value (`loss.item()`) a stated number, not an error.
    cluster: the links that collectives use: a name of `available_clusters()`, a path or a Cluster; by default the
        cluster that the hardware comes in (see flopmeter.device.cluster).
    source: note the caller's file and line with every op (slower).
    host: what the program costs the CPU; by default as the hardware's profile has it.
    compile: True compiles, by torch's compiler, each module that the program calls and each optimizer's step, as if
        the program did; False what the program compiles itself; 'rules' runs that eagerly, fused by rules, so that
        every mode can be asked for.
    clocks: 'sustained' prices a run that goes on for seconds, each kernel at the clock that the power limit leaves
        it; 'burst' one of less than about 20 ms on a cool device, at the boost clock.
    dollars_per_kwh: the price of energy, so that reports say what the energy of a run costs; no price is assumed.

    The same meter can be entered again: it starts afresh. Entering it inside itself changes nothing.
    """

    def __init__(
        self,
        hardware: str | os.PathLike[str] | Hardware = DEFAULT_HARDWARE,
        *,
        as_cuda: bool = True,
        strict: bool = False,
        causal: Causal = "full",
        routing: Routing = None,
        checks: str | None = None,
        mask_fraction: float | None = None,
        unknown: str | None = None,
        source: bool = False,
        host: Host | None = None,
        cluster: str | os.PathLike[str] | Cluster | None = None,
        clocks: Clocks = "sustained",
        compile: Compile = False,
        dollars_per_kwh: float | None = None,
    ):
        _check_compile(compile, as_cuda)
        _check_known("clocks", clocks, get_args(Clocks))
        _check_known("causal convention", causal, get_args(Causal))
        _check_types(host, as_cuda=as_cuda, strict=strict, source=source)
        self._dollars_per_kwh = checked_energy_price(dollars_per_kwh)
        self.hardware = load_hardware(hardware)
        self._cluster = None if cluster is None else load_cluster(cluster)
        self._as_cuda, self._strict, self._source, self._host = as_cuda, strict, source, host
        self._causal, self._clocks, self._compile = causal, clocks, compile
        self._new_values = functools.partial(
            KnownValues, routing=routing, checks=checks, mask_fraction=mask_fraction, unknown=unknown,
            now=lambda: len(self.trace.ops),
        )  # fmt: skip
        self._new_values()  # raises an error for unknown options now, not on entry
        self.storage_listener: StorageListener | None = None  # hears of storages while the meter is open
        self.shapes_only: ShapesOnly | None = None  # what is on meta without being on the GPU that meta stands for
        self.around_tracing: AroundTracing = nothing_around  # where the compiler traces the program
        self.on_compiled_call: OnCompiledCall | None = None
        self.on_op: Callable[[], None] | None = None  # called when an op has been recorded
        # What is open while the program runs, and stays for reports.
        self._recorder: Recorder | None = None
        self._values: KnownValues | None = None
        self._emulation: Emulation | None = None
        self._session: Session | None = None
        self._exports: Exports | None = None
        self._other_threads = other_threads.OtherThreads()
        self._depth = 0
        self._undo = ExitStack()

    def __enter__(self) -> FlopMeter:
        if self._depth == 0:
            overlap.check_task()
            with ExitStack() as undo:
                self._open(undo)
                overlap.push(self, self._close)
                self._undo = undo.pop_all()
        elif not overlap.is_open(self):
            raise RuntimeError(
                "this FlopMeter is open in another thread, and sees that thread's ops: take one for each"
            )
        self._depth += 1
        return self

    def _open(self, undo: ExitStack) -> None:
        """Open all that watches the program, or answers it; `undo` closes it."""
        by_rules, emulation = self._compile == "rules", None
        if self._as_cuda:
            emulation = undo.enter_context(emulate_cuda(CudaTarget.of(self.hardware), compiled_run_eagerly=by_rules))
        values = undo.enter_context(self._new_values())
        for workaround in WORKAROUNDS:
            undo.enter_context(workaround(values))
        recorder = Recorder(
            source=self._source, overrides=emulation.overrides if emulation else None, values=values,
            on_new_call=_check if self._strict else None, on_op=self.on_op,
            storage_listener=self.storage_listener, shapes_only=self.shapes_only,
        )  # fmt: skip
        if emulation and by_rules:
            recorder.watch_regions(dynamo.compiled_region)
        self._emulation, self._values, self._recorder = emulation, values, recorder
        undo.enter_context(recorder)
        self._exports = undo.enter_context(Exports()) if emulation else None
        self._session = None
        if emulation and not by_rules:
            self._session = undo.enter_context(self._new_session(emulation, recorder, values))
        self._other_threads = undo.enter_context(other_threads.OtherThreads(values, lambda: len(recorder.trace.ops)))

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

    def _new_session(self, emulation: Emulation, recorder: Recorder, values: KnownValues) -> Session:
        target = CudaTarget.of(self.hardware)

        def run_eagerly() -> None:
            dynamo.install(emulation)
            recorder.watch_regions(dynamo.compiled_region)

        return Session(
            recorder, PosedDevice(self.hardware.title, target.compute_capability, self.hardware.sm_count),
            values.values.forget, run_eagerly, compiles_all=self._compile not in (False, "rules"),
            around_tracing=self.around_tracing, on_compiled_call=self.on_compiled_call,
        )  # fmt: skip

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
        mode: Mode | None = None,
        cluster: str | os.PathLike[str] | Cluster | None = None,
        ops: range | None = None,
        repeats: bool = False,
    ) -> Report:
        """Price what was metered so far, on the meter's device and cluster or on others.

        mode: as the program ran, which is eagerly unless it called torch.compile; or one of `Mode`.
        ops: only these of `trace.ops`, in a row, such as one step of many.
        repeats: they are one turn of a loop. If the program does not wait for the device there, the host begins a turn
            while the device is still at work on the one before. Without it the device is idle at first.
        Raises EmptyProgramError where nothing ran, StreamError if the other device would have run other ops, and
        HardwareError if it lacks a dtype that the program computes in, or if the cluster is too small for the
        program's collectives.
        """
        device = self.hardware if hardware is None else load_hardware(hardware)
        self.check_ran()
        if ops is not None and not _is_part(ops, len(self.trace.ops)):
            raise ValueError(
                f"ops must be a range of trace.ops in a row that is not empty, such as range(10, 20), not {ops!r} of "
                f"{len(self.trace.ops)} ops"
            )
        self._check_stream(device)
        run = self._run(ops, device, self._cluster if cluster is None else load_cluster(cluster))
        return replace(run, repeats=repeats).in_mode(mode or mode_of(run.trace))

    def times_of(self, ops: range) -> Report:
        """A report of these ops for its times alone, as often as a program asks. The roles of storages, which no time
        depends on, are left out: they follow from all that ran before."""
        run = self._run(ops, self.hardware, self._cluster, has_roles=False)
        return run.in_mode(mode_of(run.trace))

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """The program has this optimizer, which may step later. (Of those that step, torch's hook tells.)"""
        if self._recorder is not None:
            self._recorder.roles.note_optimizer(optimizer)

    def check_ran(self) -> None:
        """Raises EmptyProgramError where the meter was left and nothing ran in it."""
        if not self.trace.ops and self._depth == 0:
            nothing = "the program ran no op of torch inside `with meter:`, so there is nothing to report: run it there"
            raise EmptyProgramError("; ".join((nothing, *self._not_metered())))

    def _run(
        self,
        ops: range | None,
        device: Hardware,
        cluster: Cluster | None,
        running: Collection[int] = (),
        has_roles: bool = True,
    ) -> MeteredRun:
        """`running`: the ranks that are metered together with this one."""
        trace = self.trace if ops is None else part_of(self.trace, ops)
        if has_roles:
            note_copies_of_weights(trace, self.trace)
        known, on_device = Memo(), functools.partial(_kernels_on, device, self._strict)
        kernels = on_device(trace, known.costs)
        is_spread = any(kernel.cost.collective and len(kernel.cost.collective.ranks) > 1 for kernel in kernels)
        cluster = cluster_of(device, cluster) if is_spread else None
        host = self._host or device.host
        notes = (
            *self._notes(device), *uncounted_notes(kernels), *uncounted_implementations(kernels),
            *message_notes(kernels, running), *dtensor_notes(kernels, host), *host_work_notes(trace),
            *staging_notes(kernels, host), *chain_notes(kernels), *step_notes(kernels, device, host),
        )  # fmt: skip
        assumed = (
            *in_words(self.assumed), *packed_assumptions(kernels), *group_assumptions(kernels),
            *triton_assumptions(kernels), *implementation_assumptions(kernels),
        )  # fmt: skip
        return MeteredRun(
            trace=trace, kernels=kernels, kernels_of=on_device, hardware=device, cluster=cluster, host=host,
            causal=self._causal, clocks=self._clocks, assumptions=assumed, caution=self._caution(ops, device),
            notes=notes, ran=ran_of(trace, device), known=known, dollars_per_kwh=self._dollars_per_kwh,
            unfused=unfused_calls(self._emulation, CudaTarget.of(device)),
        )  # fmt: skip

    def _notes(self, device: Hardware) -> tuple[str, ...]:
        notes = []
        if self._emulation:
            notes += [*self._emulation.notes, *CudaTarget.of(device).notes, *unfused_notes(self._emulation)]
        if self._session:
            notes += self._session.notes
        if self._exports:
            notes += self._exports.notes
        notes += [*self._not_metered(), *lost(AOT_INDUCTOR, PROPAGATION, BUFFERS, DOUBLE_BACKWARD, PYTHON_OPS)]
        return tuple(dict.fromkeys(notes))

    def _caution(self, ops: range | None, device: Hardware) -> str:
        """What the reader must know before believing the time of these ops."""
        if self._recorder and self._recorder.modules.missed:
            return other_threads.caution(self._recorder.modules)
        copies = [copy for copy in self._other_threads.copies if ops is None or ops.start <= copy.after < ops.stop]
        return guess_of_length(self._assumed_in(ops)) or missed_copies(copies, device)

    def _not_metered(self) -> Iterator[str]:
        modules = self._recorder.modules.missed if self._recorder else 0
        if self._other_threads.ops or modules:
            yield (
                f"not metered: {self._other_threads.ops:,} ops on meta tensors and {modules:,} module calls in other "
                "threads; a meter sees the ops of the thread that entered it"
            )

    def _check_stream(self, device: Hardware) -> None:
        difference = self._emulation.difference(CudaTarget.of(device)) if self._emulation else None
        if difference is not None:
            raise StreamError(
                f"{device.name} would run other ops than {self.hardware.name}, for which the program was metered: "
                f"{difference}. Meter it again with FlopMeter({device.name!r})"
            )

    @property
    def assumed(self) -> tuple[Assumption, ...]:
        """What was assumed of unknown values so far, in the order of first use."""
        return tuple(self._assumed_in(None))

    def _assumed_in(self, ops: range | None) -> Iterable[Assumption]:
        return self._values.assume.uses_in(ops) if self._values else ()


def reports_together(
    meters: Mapping[int, FlopMeter], mode: Mode | None, ops: Mapping[int, range] | None = None
) -> dict[int, Report]:
    """The reports of ranks that send each other messages, by global rank, on one clock. `mode` and `ops`, by rank, are
    those of FlopMeter.report.

    Raises ValueError for an unknown mode, HangError where ranks would wait for each other for ever, and HardwareError
    where the cluster is too small.
    """
    runs = {
        rank: meter._run(None if ops is None else ops[rank], meter.hardware, meter._cluster, meters)
        for rank, meter in meters.items()
    }
    launched = {rank: run.launched(mode or mode_of(run.trace), PricedInstead()) for rank, run in runs.items()}
    ranks = {
        rank: RankRun(launched[rank][0], run.hardware, run.trace.switches, run.host, run.cluster)
        for rank, run in runs.items()
    }
    earlier = {rank: messages_of(meters[rank].trace.ops[: part.start]) for rank, part in (ops or {}).items()}
    timed = time_runs(ranks, next(iter(runs.values())).clocks, earlier)
    return {rank: run.report(*launched[rank], timed[rank], None) for rank, run in runs.items()}


def _is_part(ops: object, count: int) -> bool:
    """Whether these are some of that many ops, in a row."""
    return isinstance(ops, range) and ops.step == 1 and 0 <= ops.start < ops.stop <= count


def _check_known(what: str, given: object, known: tuple[str, ...]) -> None:
    if given not in known:
        raise ValueError(f"unknown {what} {given!r}; known: {', '.join(known)}")


def _check_types(host: object, **flags: object) -> None:
    for name, given in flags.items():
        if not isinstance(given, bool):
            raise TypeError(f"{name} must be True or False, not {given!r}")
    if not isinstance(host, Host | None):
        raise TypeError(f"host must be a flopmeter.timing.Host or None, not {host!r}")


def _check_compile(compile: object, as_cuda: object) -> None:
    if compile not in get_args(Compile):
        raise ValueError(f"compile={compile!r}: one of {', '.join(map(repr, get_args(Compile)))}")
    if compile not in (False, "rules") and not as_cuda:
        raise ValueError("compile=True compiles for the CUDA device: leave as_cuda at True")


def checked_energy_price(dollars_per_kwh: float | None) -> float | None:
    """Raises ValueError for anything but a price."""
    is_number = type(dollars_per_kwh) is not bool and isinstance(dollars_per_kwh, Real)
    if dollars_per_kwh is None or (is_number and 0 <= dollars_per_kwh < math.inf):
        return dollars_per_kwh
    raise ValueError(f"the price of energy must be dollars per kWh, such as 0.3, not {dollars_per_kwh!r}")


def _kernels_on(device: Hardware, strict: bool, trace: Trace, known: CallCosts) -> list[Kernel]:
    kernels = kernels_of(trace, strict=strict, known=known)
    check_scales(kernels, device)
    return grouped.on_device(kernels, device)


def _check(call: Call) -> None:
    costs_of(call, strict=True)
