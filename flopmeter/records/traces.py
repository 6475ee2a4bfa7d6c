"""The record of a program: its ops in order, the storages they touched, and what its streams waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeVar

from flopmeter.records.compiled import Compilation
from flopmeter.records.costs import Switches
from flopmeter.records.ops import Op

StorageRole = Literal["parameters", "gradients", "optimizer state", "copies of weights", "temporaries"]
OF_WEIGHTS: tuple[StorageRole, ...] = ("parameters", "gradients", "optimizer state", "copies of weights")
BEFORE = -1  # the birth of a storage that existed before the trace
DEFAULT_STREAM = 0


@dataclass(slots=True)
class Storage:
    """A block of memory of the program. `born` is the index of the op that made it, or BEFORE; it was freed before op
    `died`. A storage that no op made, such as that of torch.tensor([1, 2]), counts as made by the next op."""

    nbytes: int  # when it was first seen
    device: str
    born: int
    died: int | None = None  # None: alive when the context ended
    role: StorageRole | None = None  # None: data, and what is computed from data
    died_inside: bool = False  # of a call of a module or of a compiled function, which so did not return it
    is_of_forward_pass: bool = False  # in a part of a trace: a module made it in a forward pass before the part
    is_trained: bool = False  # an optimizer has it among its parameters
    is_of_numbers: bool = False  # on the host, made of numbers of Python


_GONE = Storage(nbytes=0, device="", born=BEFORE, died=BEFORE)  # in a part of a trace: freed before the part


class Resize(NamedTuple):
    """The op of that index resized a storage."""

    op: int
    storage: int
    nbytes: int


class BackwardPass(NamedTuple):
    """The backward pass that begins with the op of that index. `nodes`: how many ops autograd had recorded since the
    backward pass or the optimizer's step before it."""

    op: int
    nodes: int
    creates_graph: bool = False  # of itself, so that a later one can go through it


class ForwardEnd(NamedTuple):
    """The call of an outermost module ended before the op of that index. `nodes`: how many ops autograd had recorded
    since the call before it ended."""

    op: int
    nodes: int


class Sync(NamedTuple):
    """Before the op of index `op` the stream recorded an event, or began to wait for an event or for a collective.

    `subject` is the number of the event, or the index of the collective's op.
    """

    op: int
    stream: int
    action: Literal["record", "wait for event", "wait for op"]
    subject: int


@dataclass(slots=True)
class StreamUse:
    """Which streams the ops of a trace ran on, and what the streams waited for. Ops are given by index."""

    streams: dict[int, int] = field(default_factory=dict)  # op -> stream, if it is not the default one
    syncs: list[Sync] = field(default_factory=list)  # in the order in which they happened
    host_waits: list[int] = field(default_factory=list)  # ops before which the host waited for the device
    batches: dict[int, int] = field(default_factory=dict)  # op -> how many messages, from this op on, run as one kernel


class Accumulation(NamedTuple):
    """The op of that index made, or added to, the gradient of a leaf of the autograd graph."""

    op: int
    leaf: int  # its storage


class Padding(NamedTuple):
    """The op of that index looks up texts of `length` tokens, of which the longest has `longest`: the rest is padding
    in all of them."""

    op: int
    length: int
    longest: int


class OptimizerStep(NamedTuple):
    """An optimizer made a step."""

    end: int  # how many ops had run by then
    takes_fused: bool  # torch has a kernel for all of a group, behind the optimizer's option `fused`
    groups: tuple[int, ...]  # how many parameters of each of its groups had a gradient


class TemplateRun(NamedTuple):
    """A kernel that exists only under torch.compile. Eager torch runs the ops from `start` to before `stop` for it;
    torch.compile would launch `op` in their place."""

    start: int
    stop: int
    op: Op


@dataclass(slots=True, repr=False)
class Trace:
    """What ran, in order. `module_calls[i]` is the number of module calls made before op i, `dtensor_ops[i]` that of
    ops on DTensors between op i - 1 and op i, if any."""

    ops: list[Op] = field(default_factory=list)
    module_calls: list[int] = field(default_factory=list)
    dtensor_ops: dict[int, float] = field(default_factory=dict)
    storages: list[Storage] = field(default_factory=list)
    resizes: list[Resize] = field(default_factory=list)
    accumulations: list[Accumulation] = field(default_factory=list)
    backward_passes: list[BackwardPass] = field(default_factory=list)
    switches: Switches = field(default=Switches(False, True, False))
    stream_use: StreamUse = field(default_factory=StreamUse)
    templates: list[TemplateRun] = field(default_factory=list)
    compilation: Compilation = field(default_factory=Compilation)

    forward_ends: list[ForwardEnd] = field(default_factory=list)
    optimizer_steps: list[OptimizerStep] = field(default_factory=list)
    padding: list[Padding] = field(default_factory=list)
    devices: dict[str, None] = field(default_factory=dict)  # the devices that ops touched, in order of appearance
    earlier: list[Op] = field(default_factory=list)  # in a part of a trace: as many ops before it, of the step before

    def __repr__(self) -> str:
        return f"<Trace: {len(self.ops)} ops on {self.device}>"

    @property
    def device(self) -> str:
        """The device of the program: 'meta' if any op runs there, else the first device that is not the CPU. Ops that
        touch nothing on it are the host's own work (Adam's step counters are on the CPU)."""
        return "meta" if "meta" in self.devices else next((kind for kind in self.devices if kind != "cpu"), "cpu")


def rearranged(
    trace: Trace, ops: list[Op], module_calls: list[int], place: Sequence[int], gone: Set[int] = frozenset()
) -> Trace:
    """The trace with other ops. `place`: of each old op, and of the end, among the new ones, where the next one stands
    if it is `gone`. Storages and templates keep the numbers of the old ones."""
    return replace(
        trace,
        ops=ops,
        module_calls=module_calls,
        dtensor_ops={place[op]: number for op, number in trace.dtensor_ops.items() if op not in gone},
        resizes=[each._replace(op=place[each.op]) for each in trace.resizes],
        accumulations=[each._replace(op=place[each.op]) for each in trace.accumulations if each.op not in gone],
        backward_passes=_recorded(trace.backward_passes, trace, ops, place),
        stream_use=_renumbered(trace.stream_use, lambda op: None if op in gone else place[op], place.__getitem__),
        forward_ends=_recorded(trace.forward_ends, trace, ops, place),
        optimizer_steps=[step._replace(end=place[step.end]) for step in trace.optimizer_steps],
        padding=[each._replace(op=place[each.op]) for each in trace.padding if each.op not in gone],
    )


_Ends = TypeVar("_Ends", BackwardPass, ForwardEnd)


def _recorded(ends: list[_Ends], trace: Trace, ops: list[Op], place: Sequence[int]) -> list[_Ends]:
    """The ends of what autograd recorded, of a trace with other ops: it records in proportion to those of the forward
    pass."""
    found, start = [], 0
    for each in ends:
        before = _forward_ops(trace.ops[start : each.op])
        now = _forward_ops(ops[place[start] : place[each.op]])
        found.append(each._replace(op=place[each.op], nodes=round(each.nodes * now / before) if before else each.nodes))
        start = each.op
    return found


def _forward_ops(ops: list[Op]) -> int:
    return sum(op.phase == "forward" for op in ops)


def _renumbered(
    use: StreamUse, place: Callable[[int], int | None], before: Callable[[int], int | None] | None = None
) -> StreamUse:
    """The stream use with ops renumbered.

    place: the new number of an op; None leaves the op out, and waits for it too.
    before: the new number of an op for events just before it, which may stay where the op itself is left out.
    """
    before = before or place
    syncs = []
    for sync in use.syncs:
        op, subject = before(sync.op), place(sync.subject) if sync.action == "wait for op" else sync.subject
        if op is not None and subject is not None:
            syncs.append(sync._replace(op=op, subject=subject))
    streams, batches = (
        {new: value for op, value in of_op.items() if (new := place(op)) is not None}
        for of_op in (use.streams, use.batches)
    )
    host_waits = [new for op in use.host_waits if (new := before(op)) is not None]
    return StreamUse(streams, syncs, host_waits, batches)


def part_of(trace: Trace, ops: range) -> Trace:
    """What ran in these ops, as a trace of its own. Storages keep their numbers; one that was there before the part
    existed is marked BEFORE, with the size that it had then."""
    start, stop = ops.start, ops.stop
    before = trace.module_calls[start - 1] if start else 0
    sizes = {resize.storage: resize.nbytes for resize in trace.resizes if resize.op < start}
    return Trace(
        ops=trace.ops[start:stop],
        module_calls=[calls - before for calls in trace.module_calls[start:stop]],
        dtensor_ops={op - start: number for op, number in trace.dtensor_ops.items() if op in ops},
        storages=[
            _GONE  # most, of a long trace
            if each.died is not None and each.died <= start > each.born
            else _in_part(each, sizes.get(number), ops, trace.ops)
            for number, each in enumerate(trace.storages)
        ],
        resizes=[resize._replace(op=resize.op - start) for resize in trace.resizes if resize.op in ops],
        accumulations=[each._replace(op=each.op - start) for each in trace.accumulations if each.op in ops],
        backward_passes=[each._replace(op=each.op - start) for each in trace.backward_passes if each.op in ops],
        switches=trace.switches,
        stream_use=_renumbered(trace.stream_use, lambda op: op - start if op in ops else None),
        templates=[
            TemplateRun(run.start - start, run.stop - start, run.op)
            for run in trace.templates
            if start <= run.start and run.stop <= stop
        ],
        compilation=trace.compilation.of(op.graph for op in trace.ops[start:stop]),
        forward_ends=[each._replace(op=each.op - start) for each in trace.forward_ends if start < each.op <= stop],
        optimizer_steps=[
            step._replace(end=step.end - start) for step in trace.optimizer_steps if start < step.end <= stop
        ],
        padding=[each._replace(op=each.op - start) for each in trace.padding if each.op in ops],
        devices=trace.devices,
        earlier=trace.ops[max(0, start - len(ops)) : start],
    )


def _in_part(storage: Storage, nbytes_at_start: int | None, ops: range, all_ops: Sequence[Op]) -> Storage:
    born, died = storage.born - ops.start, storage.died
    is_of_forward_pass = False
    if storage.born < ops.start:
        born = BEFORE
        if storage.born != BEFORE:
            maker = all_ops[storage.born]
            is_of_forward_pass = bool(maker.module) and maker.phase in ("forward", "recompute")
    nbytes = storage.nbytes if born != BEFORE or nbytes_at_start is None else nbytes_at_start
    died = None if died is None else died - ops.start
    return replace(storage, nbytes=nbytes, born=born, died=died, is_of_forward_pass=is_of_forward_pass)
