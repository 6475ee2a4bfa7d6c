"""One run of a script: the device named cuda, a meter around the program, and the report of its steps."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch.optim import Optimizer

from flopmeter.as_cuda import CudaTarget
from flopmeter.device.cluster import cluster_of
from flopmeter.device.hardware import Hardware, load_hardware
from flopmeter.meter import FlopMeter, Mode
from flopmeter.records import DEFAULT_STREAM
from flopmeter.records.collectives import COLLECTIVE_OPS
from flopmeter.report.quantities import with_prefix
from flopmeter.report.report import Report
from flopmeter.run import child_processes, driver_tool, extensions, shims, text_kernels, values, world
from flopmeter.run.clocks import HostClock
from flopmeter.run.compiled import Tracing, jit
from flopmeter.run.cuda_module import CudaModule
from flopmeter.run.device import NamedCuda
from flopmeter.run.device_memory import DeviceMemory, OnOutOfMemory, grown_bytes
from flopmeter.run.graph_pools import GraphPool
from flopmeter.run.host_work import HostWork
from flopmeter.run.initial_values import InitialValues
from flopmeter.run.loading import DataLoaders
from flopmeter.run.own_code import imported_by_name
from flopmeter.run.patches import Patch, applied
from flopmeter.run.report import NothingRanError, RunReport
from flopmeter.run.step_parts import Parts, with_usual_step
from flopmeter.run.steps import AUTO, Steps
from flopmeter.run.synthetic import SyntheticData
from flopmeter.run.weights import KEEPS_ITS_OWN, WeightFiles
from flopmeter.timing.scratch import kept_bytes
from flopmeter.torch_names.imported import no_folder_instead_of
from flopmeter.torch_names.private import DYNAMO
from flopmeter.trace import streams
from flopmeter.trace.recorder import switches_now


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user asked of a run.

    gpus: ranks in the world, of which this process is rank 0; gpus_per_node: of them on each node, as a launcher
        starts them; None: there is no launcher, and nodes are those of the device's default cluster.
    steps: stop after that many; None: run to the end. marker: what marks the end of a step (see steps.py).
    on_out_of_memory: 'raise' as the device would, or 'report' and go on.
    strict_values: an unknown value that the program reads is an error, not a stand-in.
    mask_fraction: as for FlopMeter. mode: how to price; None: compiled where the program compiles, else eager.
    shims: packages of CUDA kernels that flopmeter stands in for (see shims).
    synthetic: what stands in for data that is not there: 'first', or a sample (see synthetic.py).
    without_weights: a file of weights that is not there leaves its model as it was made.
    dollars_per_kwh: what energy costs.
    """

    gpus: int = 1
    gpus_per_node: int | None = None
    steps: int | None = None
    marker: str = AUTO
    on_out_of_memory: OnOutOfMemory = "raise"
    strict_values: bool = False
    mask_fraction: float | None = None
    mode: Mode | None = None
    shims: tuple[str, ...] = ()
    synthetic: str | None = None
    without_weights: bool = False
    dollars_per_kwh: float | None = None


class ScriptSession:
    """An open run, as one rank. `report()` prices what ran so far."""

    def __init__(self, hardware: str | os.PathLike[str] | Hardware, wishes: Wishes, rank: int = 0) -> None:
        self.hardware, self.wishes, self.rank = load_hardware(hardware), wishes, rank
        if self.hardware.is_cpu:
            raise ValueError(f"{self.hardware.name} is a CPU: name a GPU for the device named cuda")
        self.meter = FlopMeter(
            self.hardware,
            routing="balanced",
            checks="hold",
            mask_fraction=wishes.mask_fraction,
            dollars_per_kwh=wishes.dollars_per_kwh,
            unknown=None if wishes.strict_values else "stand-in",
            source=True,  # the lines of a script that its reader knows; a twentieth of the time
        )
        self.memory = DeviceMemory(
            self.hardware, wishes.on_out_of_memory, lambda: kept_bytes(self.meter.trace, self.hardware), self.now
        )
        self.meter.storage_listener = self.memory
        on_node = cluster_of(self.hardware).gpus_per_node if wishes.gpus > 1 else 1
        self.gpus_per_node = min(wishes.gpus, wishes.gpus_per_node or on_node)
        self.named = NamedCuda(self.gpus_per_node, rank % self.gpus_per_node)
        self.meter.shapes_only = self.named.true_meta
        self.cuda = CudaModule(self.hardware, CudaTarget.of(self.hardware), self.named, self.memory, self)
        self.takes_times = False
        self.steps = Steps(self, wishes.marker, wishes.steps, _say)
        self.cuda.nvtx.on_end = self.steps.on_range_end
        self.notes: dict[str, None] = {}
        op_seconds = self.hardware.host.relative_time * self.hardware.host.view_seconds
        self._loaders = DataLoaders(self.now, self.is_on_device, op_seconds)
        self._host_work = HostWork(self.now)
        self._is_open = False
        self._replays = 0
        self._pools: defaultdict[object, GraphPool] = defaultdict(lambda: GraphPool(self.meter.trace))
        self._decisions: Counter[str] = Counter()  # lines of the program whose control flow depended on a stand-in

    def now(self) -> int:
        """The number of ops so far."""
        return len(self.meter.trace.ops)

    def has_backward(self, ops: range) -> bool:
        return any(self.meter.trace.ops[number].phase == "backward" for number in ops)

    def updates_weights(self, ops: range) -> bool:
        trace = self.meter.trace
        written = (op for op in trace.ops[ops.start : ops.stop] if not op.module and op.call.func._schema.is_mutable)
        return any(trace.storages[number].role == "parameters" for op in written for number in op.reads)

    def note_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            self.meter.note_optimizer(optimizer)

    def is_on_device(self, ops: range) -> bool:
        calls = (self.meter.trace.ops[number].call for number in ops)
        return any(spec.device != "cpu" for call in calls for spec in (*call.outputs, *call.inputs))

    def patience_s(self, only_infers: bool, may_take_times: bool) -> float:
        if self.wishes.gpus > 1:
            return 0.0  # ranks end at the same step
        return PATIENCE_TO_PRINT_S if self.takes_times or may_take_times else PATIENCE_S if only_infers else 0.0

    def report_of(self, ops: range) -> Report:
        return self.meter.times_of(ops)

    def host_waits_at(self, moment: int) -> bool:
        waits = self.meter.trace.stream_use.host_waits
        return bool(waits) and waits[-1] == moment

    def seconds_between(self, start: int, end: int) -> float:
        return self.report_of(range(start, end)).seconds if end > start else 0.0

    def replay(self, ops: range, stream: int) -> None:
        """The ops of a CUDA graph run again, as one region that the host launches at once. What was captured on
        `stream` runs on the current one."""
        self._replays += 1
        trace, use, shift = self.meter.trace, self.meter.trace.stream_use, self.now() - ops.start
        moved = {stream: streams.current()}
        for number in ops:
            trace.module_calls.append(trace.module_calls[-1])
            trace.ops.append(trace.ops[number]._replace(region=-self._replays))
            captured_on = use.streams.get(number, DEFAULT_STREAM)
            if (now_on := moved.get(captured_on, captured_on)) != DEFAULT_STREAM:
                use.streams[number + shift] = now_on
        use.syncs += [
            sync._replace(op=sync.op + shift, stream=moved.get(sync.stream, sync.stream))
            for sync in use.syncs
            if ops.start <= sync.op <= ops.stop and sync.action != "wait for op"
        ]
        self.steps.on_replay(ops)

    def pool(self, handle: object) -> GraphPool:
        """The memory that CUDA graphs with this handle share."""
        return self._pools[handle]

    def note(self, text: str) -> None:
        """State once, in the report, what was skipped or replaced."""
        self.notes[text] = None

    @contextmanager
    def open(self) -> Iterator[ScriptSession]:
        """In this context the program finds a device named cuda, and what it runs there is metered."""
        with ExitStack() as undo:
            self._settle_process(undo)
            undoing, answers = self._name_device(undo)
            self._stand_in_for_data(undo)
            self._open_world(undo)
            self.meter.around_tracing = tracing = Tracing(self.named, undoing)
            undo.enter_context(applied([*tracing.tables(answers), tracing.pinning(), *self._preparing()]))
            self.meter.on_compiled_call = self.steps.on_compiled_call
            self.meter.on_op = self._host_work.on_op
            undo.enter_context(self.meter)
            self._watch_program(undo, undoing, answers)
            undo.enter_context(self._host_work.watched())
            self._is_open = True
            try:
                yield self
            finally:
                self._is_open = False

    def _settle_process(self, undo: ExitStack) -> None:
        """Imports that need torch's own functions, warnings that are false here, and processes that are forked."""
        undo.enter_context(no_folder_instead_of("triton"))
        importlib.import_module(DYNAMO.module)  # optimizers import it; it has to see torch's own functions
        undo.enter_context(warnings.catch_warnings())
        for message in _FALSE_WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        undo.enter_context(child_processes.forks_unmetered())

    def _name_device(self, undo: ExitStack) -> tuple[list[Patch], list[Patch]]:
        """Tensors, torch.cuda and files of weights know the device. Returns what undoes the patches that the compiler
        must not see, and what undoes the answers of torch.cuda."""
        undoing = undo.enter_context(self.named.open())
        files = WeightFiles(self.named, self.note, self.wishes.without_weights)
        answers = undo.enter_context(applied(list(self.cuda.patches())))
        undo.enter_context(applied(list(files.patches())))
        undo.enter_context(applied(list(child_processes.patches())))
        undoing += undo.enter_context(applied(list(InitialValues(self.named, self.note).patches())))
        return undoing, answers

    def _stand_in_for_data(self, undo: ExitStack) -> None:
        if self.wishes.synthetic is not None:
            synthetic = SyntheticData(self.wishes.synthetic, self.note)
            undo.callback(synthetic.close)
            undo.enter_context(applied(list(synthetic.patches())))
            undo.enter_context(synthetic.once_imported())
        else:
            undo.enter_context(applied(list(self._loaders.patches())))

    def _open_world(self, undo: ExitStack) -> None:
        """The ranks of the run, and the variables by which a launcher tells of them."""
        undo.enter_context(world.no_gpu_for_the_driver())
        undo.enter_context(driver_tool.on_path(self.cuda.name, self.named.count))
        is_named = self.wishes.gpus > 1 or self.wishes.gpus_per_node is not None
        gpus, a_node = (self.wishes.gpus, self.gpus_per_node) if is_named else (None, None)
        undo.enter_context(world.opened(gpus, a_node, self.rank, self.named.holds, self.note))
        if is_named:
            variables = world.of_torchrun(self.wishes.gpus, self.gpus_per_node, self.rank)
            undo.enter_context(world.environment(variables))

    def _watch_program(self, undo: ExitStack, undoing: list[Patch], answers: list[Patch]) -> None:
        """Values that it reads, clocks, packages of kernels that it imports, and its steps."""
        undoing += undo.enter_context(applied(values.patches(self.named, self._decided, self.note)))
        undoing += undo.enter_context(applied(list(HostClock(self).patches())))
        undoing += undo.enter_context(applied(list(imported_by_name(undoing))))
        undo.enter_context(applied(list(imported_by_name(answers))))
        undo.enter_context(shims.importable(self.wishes.shims, self.note))
        undo.enter_context(child_processes.with_shims(self.wishes.shims))
        undo.enter_context(extensions.standing_in(self.note))
        undo.enter_context(applied(list(text_kernels.patches(self.note))))
        undo.enter_context(self.steps.watching())

    def _preparing(self) -> Iterator[Patch]:
        yield from jit(self.named, self.note, self.steps.aside)
        graphs = torch.cuda.make_graphed_callables
        yield Patch(torch.cuda, "make_graphed_callables", self.steps.aside(graphs), "it warms up, which is no step")

    def report(self, program: str, mode: Mode | None = None) -> RunReport:
        """Setup, first step and steady step. Raises NothingRanError if no op ran on the device."""
        if "meta" not in self.meter.trace.devices:
            raise NothingRanError(NOTHING_RAN)
        parts = self._parts()
        self.note_switches()
        ranges = {
            "setup": parts.setup,
            "first step": parts.first,
            "steady step": parts.steady,
            "in eval mode": parts.evaluation,
        }
        mode = mode or self.wishes.mode
        reports = {
            name: self._part(ops, mode, parts if ops is parts.steady else None) for name, ops in ranges.items() if ops
        }
        step = reports.get("steady step") or reports.get("first step") or reports["setup"]
        steps = list(self._reports_of_steps(parts, step, mode))
        seconds, flops = tuple(each.seconds for each in steps), tuple(each.flops for each in steps)
        return RunReport(program, step, parts, reports, self._nvtx(), step_seconds=seconds, step_flops=flops)

    def _reports_of_steps(self, parts: Parts, steady: Report, mode: Mode | None) -> Iterator[Report]:
        """The last steps that are like the steady one. Steps of the same calls are priced once."""
        ops = self.meter.trace.ops
        for _, step in parts.later[-MOST_STEPS_PRICED:]:
            pairs = zip(step, parts.steady or (), strict=False)
            is_same = parts.steady and len(step) == len(parts.steady)
            if is_same and all(ops[number].call is ops[other].call for number, other in pairs):
                yield steady
            else:
                yield self.meter.report(ops=step, mode=mode, repeats=True)

    def note_switches(self) -> None:
        """Notes torch's switches, which a script sets after the run has begun."""
        self.meter.trace.switches = switches_now()

    def step_ops(self) -> range:
        """The ops of one steady step, or of the part that ran instead."""
        parts = self._parts()
        return parts.steady or parts.first or parts.setup

    def _parts(self) -> Parts:
        return with_usual_step(self.steps.parts(self.now()), self._ops_and_shapes)

    def _ops_and_shapes(self, ops: range) -> tuple[Hashable, Hashable]:
        """What tells the work of one step from that of another: the calls in modules, forward. The rest differs in the
        first step, too, which begins after its batch was loaded, and in which an optimizer makes its state."""
        of_step = [op for number in ops if (op := self.meter.trace.ops[number]).module and op.phase == "forward"]
        return tuple((op.module, op.call.func) for op in of_step), tuple(id(op.call) for op in of_step)

    def _part(self, ops: range, mode: Mode | None, steady: Parts | None) -> Report:
        """`steady`: the parts of the run, of whose steady step these are the ops."""
        report = self.meter.report(ops=ops, mode=mode, repeats=steady is not None)
        caution = report.caution
        if self.memory.overflow and report.memory.fits(self.hardware):
            caution = caution or WENT_ON
        caution = caution or (self._growth(ops, report) if steady else "")
        holding_up, hidden = self._work_of_the_host(ops, steady, report.seconds) if steady else ([], [])
        caution = "; ".join(filter(None, (caution, *holding_up)))
        return replace(report, notes=(*report.notes, *self.own_notes(), *hidden), caution=caution)

    def _work_of_the_host(self, ops: range, parts: Parts, step_seconds: float) -> tuple[list[str], list[str]]:
        """What the host does besides, which was measured here: in words, where the device would wait for it, and where
        it would not."""
        if self._is_open:  # a batch can be loaded once the program has ended
            return [], []
        loads = self._loaders.of(ops)
        own = self._host_work.of([step for _, step in parts.later], step_seconds)
        holding_up = [each.told(step_seconds) for each in loads if each.holds_up(step_seconds)]
        hidden = [each.told(step_seconds) for each in loads if not each.holds_up(step_seconds)]
        return holding_up + ([own.told()] if own else []), hidden

    def _growth(self, ops: range, report: Report) -> str:
        """A caution where each step leaves memory behind that fills the device sooner or later; else ''."""
        grown = grown_bytes(self.meter.trace, ops)
        room = (self.memory.usable_bytes or 0) - report.memory.steady_peak_bytes
        if not grown or room > MOST_STEPS_TO_FILL * grown:
            return ""
        steps = max(0, room // grown)
        return (
            f"each step leaves {with_prefix(grown, 'B')} in memory that no later one frees (a list of results, a "
            f"loss with its graph that is added up, a cache of data?): the device is full after {steps:,} more steps"
        )

    def absent_weights(self) -> list[str]:
        """What was said of files of weights that are not here, without what became of their models."""
        return [note.removesuffix(KEEPS_ITS_OWN) for note in self.notes if note.endswith(KEEPS_ITS_OWN)]

    def lines_that_guess(self) -> list[str]:
        """The lines of the program that read unknown values. The line that began last comes last."""
        return list(dict.fromkeys(use.where for use in self.meter.assumed if not use.rule.startswith("checks")))

    def own_notes(self) -> Iterator[str]:
        yield from self.notes
        if self.named.is_adopted:
            yield f"the program names {self.named.name}, which is taken to be the one GPU that is metered"
        if self.memory.overflow:
            yield f"does not fit: {self.memory.overflow}"
        if given_back := self._given_back_bytes():
            yield (
                f"torch.cuda.empty_cache() gives {with_prefix(given_back, 'B')} back in each step, for which later "
                "tensors ask the driver again: the time that the driver takes for that is not priced"
            )
        if self.steps.idle_updates:
            yield f"{self.steps.idle_updates} calls of optimizer.step() ran no op, and do not count as steps"
        if before := self.steps.parts(self.now()).before:
            name, count = before
            yield (
                f"before the first step {name}, which is trained, was called without gradients{_times(count)}: if such"
                " calls recur every N steps (rollouts, evaluations), give --steps N"
            )
        if self.wishes.gpus > 1 and not self._exchanges():
            yield (
                f"the {self.wishes.gpus} ranks exchange nothing in this step: if they exchange data every N steps, "
                "give --steps N or more"
            )
        if self._decisions:
            lines = ", ".join(f"{where} ({count}x)" for where, count in self._decisions.items())
            yield f"control flow that depends on stand-ins for unknown values: {lines}"

    def _given_back_bytes(self) -> int:
        """What empty_cache() gives back in the step that is reported."""
        calls = self.memory.given_back
        step = self.step_ops() if calls else range(0)
        return sum(nbytes for op, nbytes in calls if op in step)

    def _exchanges(self) -> bool:
        step = self.step_ops()
        calls = (op.call for op in self.meter.trace.ops[step.start : step.stop])
        return any(call.func._schema.name in COLLECTIVE_OPS for call in calls)

    def _nvtx(self) -> dict[str, tuple[int, float]]:
        """The nvtx ranges in the step that is reported, by name: calls and predicted seconds."""
        step = self.step_ops()
        found: dict[str, tuple[int, float]] = {}
        for name, ops in self.cuda.nvtx.ranges:
            if ops and ops.start >= step.start and ops.stop <= step.stop:
                calls, seconds = found.get(name, (0, 0.0))
                found[name] = (calls + 1, seconds + self.seconds_between(ops.start, ops.stop))
        return found

    def _decided(self, where: str) -> None:
        self._decisions[where] += 1


def _say(line: str) -> None:
    print(f"flopmeter: {line}", file=sys.stderr)


def _times(count: int) -> str:
    return "" if count == 1 else f" {count:,} times"


PATIENCE_S = 10.0  # for a program that only infers to end by itself
PATIENCE_TO_PRINT_S = 60.0  # for one without an optimizer that times itself
WENT_ON = (
    "somewhere in the run the device had no room for a tensor, and the run went on, as a note below tells: that this "
    "fits is by the sum of its own tensors"
)
MOST_STEPS_TO_FILL = 10_000  # a program that takes longer to fill the device may end before
MOST_STEPS_PRICED = 8  # to tell whether steps differ; a step takes as long to price as to run
NOTHING_RAN = (
    "the program ran no op on the device named cuda: move its model and inputs there (model.to('cuda')), or tell it to "
    "use a GPU, by its own arguments"
)
_FALSE_WARNINGS = (
    r"(?s).*copying from a non-meta parameter in the checkpoint to a meta",  # load_state_dict, which records the copy
)
