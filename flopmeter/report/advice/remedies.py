"""What a program can change, each change priced by the model: a function under `@remedy` looks for one kind of fault.

It gives proposals: the changed run, and the kernels that the change is about. It prices what it proposes; whether that
is worth telling is decided in `flopmeter.report.advice`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from flopmeter.costs.data_movement.communication import message_peers
from flopmeter.costs.host_work import runs_on
from flopmeter.device.hardware import Hardware, HardwareError, Unit
from flopmeter.launch.fusion import whole_program
from flopmeter.launch.modes import Widened, modes_beyond
from flopmeter.records import Kernel, LaunchMode, Op, Storage, TensorSpec, Trace
from flopmeter.records.dtypes import name_of
from flopmeter.report.advice.autocast import FOURIER, autocast
from flopmeter.report.advice.chosen_kernels import with_chosen_kernels
from flopmeter.report.advice.passes import differentiates_gradients
from flopmeter.report.advice.rewrite import with_ops, with_tensors
from flopmeter.report.advice.sent import made_for_copies, values_read
from flopmeter.report.advice.spots import (
    alignment_of,
    matmuls_of,
    modules_and_lines,
    modules_and_lines_of,
    odd_width,
    timed,
)
from flopmeter.report.quantities import counted, percent_of, with_prefix
from flopmeter.report.report import Report
from flopmeter.report.wins import LEAST_GAIN
from flopmeter.timing import constants
from flopmeter.timing.peak_memory import usable_bytes_if_known
from flopmeter.torch_names.operators import aten


class Proposal(NamedTuple):
    """A change of the program, and the run with it."""

    what: str  # the kernels it is about; '' names them by their ops
    concerns: Callable[[Kernel], bool]  # of the report's kernels
    why: str
    remedy: str
    then: Report
    times: int = 1  # `then` does this many times the work
    is_fault: bool = True
    where: str = ""  # '' names the places of the kernels that it is about


Remedy = Callable[[Report], Iterator[Proposal]]
REMEDIES: list[Remedy] = []


def remedy(function: Remedy) -> Remedy:
    """Enter a function that looks for one kind of fault."""
    REMEDIES.append(function)
    return function


def priced(
    report: Report, trace: Trace | None = None, mode: str | None = None, *, widened: Widened = "as marked"
) -> Report:
    assert report.in_mode is not None  # else nobody asks for advice
    return report.in_mode(mode or report.mode, trace=trace, widened=widened)


def trace_of(report: Report) -> Trace:
    """The trace that the report is about; the meter's trace may have grown since."""
    trace, steps = report.memory.trace, report.memory.steps
    return trace if len(trace.ops) == steps else dataclasses.replace(trace, ops=trace.ops[:steps])


def has_backward(trace: Trace) -> bool:
    return any(op.phase == "backward" for op in trace.ops)


def all_kernels(report: Report) -> str:
    count = len(report.kernels)
    return "the only kernel" if count == 1 else f"all {count} kernels"


def of_ops(trace: Trace, indices: Iterable[int]) -> Callable[[Kernel], bool]:
    """Selects the kernels that run one of these ops."""
    ids = {id(trace.ops[index]) for index in indices}
    return lambda kernel: any(id(op) in ids for op in kernel.ops)


def everything(_: Kernel) -> bool:
    return True


def with_other_ops(
    report: Report,
    why: str,
    remedy: str,
    dropped: Collection[int],
    put_in: Mapping[int, Op] | None = None,
    *,
    put_before: Mapping[int, Sequence[Op]] | None = None,
    what: str = "",
    about: Collection[int] | None = None,
) -> Proposal:
    """The run without some ops, and with others in their places or before them. It is about the kernels of all ops that
    go or take a place, or of those that `about` names."""
    trace = trace_of(report)
    concerns = of_ops(trace, {*dropped, *(put_in or {})} if about is None else about)
    return Proposal(what, concerns, why, remedy, priced(report, with_ops(trace, dropped, put_in, put_before)))


# What is compiled has one backward pass: going through it again is an error (torch/_functorch/_aot_autograd/
# runtime_wrappers.py), while transforms of torch.func are traced into the forward graph.
_IN_ONE_PASS = (
    "with the inner gradients by torch.func.grad in what it compiles: through those of autograd.grad it raises"
)

_WORTH_MORE_TROUBLE = 1.03  # a less simple way has to be faster by this factor


@remedy
def another_mode(report: Report) -> Iterator[Proposal]:
    """torch.compile and CUDA graphs. A graph cannot wait for values, nor hold the collectives of torch's wrappers.
    Compiled, these stay where the program has them, as inductor leaves them by default."""
    among_ranks = report.cluster is not None
    is_replayed = report.launches.mode.replays_graph
    waits = report.hardware.is_cpu or among_ranks or any(kernel.cost.blocks_host for kernel in report.kernels)
    best: tuple[LaunchMode, Report] | None = None
    compiled = report
    for mode in modes_beyond(report.mode):
        before = compiled if mode.fuses else report
        if mode.replays_graph > is_replayed and (waits or before.idle_seconds < LEAST_GAIN * before.seconds):
            continue  # a graph wins only the time that the device waits for the host
        run = priced(report, mode=mode.name)
        compiled = run if mode.fuses else compiled
        if best is None or run.seconds * _WORTH_MORE_TROUBLE < best[1].seconds:
            best = mode, run
    if best is None:
        return
    mode, run = best
    idle = percent_of(report.idle_seconds, report.seconds)
    why = "each op's result goes to memory and back"
    if idle > 50 or not mode.fuses:
        why = f"the device waits for the host for {idle:.0f} % of the wall-clock"
    elif mode.replays_graph > is_replayed:
        why += ", and the host takes too long for what compiling leaves"
    if among_ranks:
        why += " (collectives stay where they are)"
    if mode.fuses and _multiplies_int8_weights(trace_of(report)):
        why += (
            "; for weights cast from int8 inductor may take _weight_int8pack_mm, which gives each output to one thread"
            " and is many times slower than the product now: a run with torch.compile tells which"
        )
    how = mode.asked_by
    if mode.fuses and not among_ranks and differentiates_gradients(trace_of(report)):
        how += f", {_IN_ONE_PASS}"
    yield Proposal(all_kernels(report), everything, why, how, run, is_fault=False)


def _multiplies_int8_weights(trace: Trace) -> bool:
    """Whether products in bf16 take weights that were int8 (torch/_inductor/fx_passes/quantization.py has the patterns
    of `_register_woq_lowerings`, which depend on views that no rule follows)."""
    cast = set[int]()
    for op in trace.ops:
        types = [spec.dtype for spec in (*op.inputs[:1], *op.outputs[:1])]
        if op.packet is aten._to_copy and types == [torch.int8, torch.bfloat16]:
            cast.add(op.outputs[0].storage)
        elif op.packet in (aten.mm, aten.bmm) and op.inputs[1].storage in cast:
            return True
    return False


@remedy
def one_graph(report: Report) -> Iterator[Proposal]:
    """The program marks several regions with torch.compile, or breaks its graph between them."""
    regions = {kernel.op.region for kernel in report.kernels}
    graphs = {graph for graph in report.launches.graphs if graph is not None}
    is_marked = bool(report.graphs) or regions != {None}
    if not report.launches.mode.fuses or not is_marked or report.cluster is not None:
        return
    then = priced(report, widened="one graph")
    if len({graph for graph in then.launches.graphs if graph is not None}) >= len(graphs):
        return
    why = f"{len(graphs)} calls of compiled graphs, each with its checks, and nothing fuses across their ends"
    is_whole = bool(report.graphs) and not any(graph.breaks for graph in report.graphs)
    how = (
        "torch.compile on what makes these calls"
        if is_whole
        else "torch.compile(model, fullgraph=True) names what breaks it"
    )
    yield Proposal(all_kernels(report), everything, why, f"compile it as one: {how}", then)


@remedy
def the_rest_eagerly(report: Report) -> Iterator[Proposal]:
    """The program compiles parts of its model, as code with flex_attention does, and runs the others eagerly, or as it
    captured them in a CUDA graph."""
    eager = {
        id(kernel.op)
        for kernel, graph in zip(report.kernels, report.launches.graphs, strict=True)
        if (graph is None or (kernel.op.is_replayed and kernel.op.graph is None))
        and whole_program(kernel.op) is not None
    }
    if not report.launches.mode.fuses or not eager or all(kernel.op.graph is None for kernel in report.kernels):
        return
    then = priced(report, widened="the rest too")
    why = "they run eagerly beside what is compiled, and each op's result goes to memory and back"
    what = counted(len(eager), "kernel")
    yield Proposal(what, lambda kernel: id(kernel.op) in eager, why, "torch.compile on these, too", then)


@remedy
def waits_for_values(report: Report) -> Iterator[Proposal]:
    """Calls such as `.item()`, which stop the host until the device is done."""
    trace = trace_of(report)
    asks = {id(trace.ops[index]) for index in values_read(trace)}
    reads = [kernel for kernel in report.kernels if id(kernel.op) in asks and kernel.cost.blocks_host]
    flags = _flags_of_scalers(trace)
    by_scaler = [kernel for kernel in reads if not flags.isdisjoint(kernel.op.storages)]
    by_program = [kernel for kernel in reads if flags.isdisjoint(kernel.op.storages)]
    is_bf16 = _narrow_type(report.hardware) is torch.bfloat16
    yield from _without(
        report, by_program, "keep the values on the device, or read them once in many steps",
        "until the device is done (.item(), float(), .cpu(), print, if)",
    )  # fmt: skip
    yield from _without(
        report, by_scaler, "bfloat16, which needs no GradScaler" if is_bf16 else "the optimizer's fused=True",
        "until GradScaler knows whether a gradient overflowed",
    )  # fmt: skip


def _without(report: Report, reads: list[Kernel], remedy: str, why: str) -> Iterator[Proposal]:
    of_device = {id(kernel.op) for kernel in reads}  # to read a tensor of the host stops nobody
    trace = trace_of(report)
    asks = {index for index, op in enumerate(trace.ops) if id(op) in of_device}
    if asks:
        yield Proposal(
            f"all that the host sends after {counted(len(reads), 'read')} of a value", everything,
            f"the host stops {counted(len(asks), 'time')} {why}", remedy, priced(report, with_ops(trace, asks)),
            where=modules_and_lines(reads),
        )  # fmt: skip


def _flags_of_scalers(trace: Trace) -> set[int]:
    """The storages in which torch.amp.GradScaler finds whether a gradient overflowed."""
    check = aten._amp_foreach_non_finite_check_and_unscale_
    ops = (op for op in trace.ops if op.packet is check)
    return {op.storages[op.call.inputs[-2].storage] for op in ops}  # the last of its tensors is the scale


@remedy
def ops_between_on_the_host(report: Report) -> Iterator[Proposal]:
    """Ops on tensors of the host, outside of modules: each takes the time of a call from the device. A batch goes to
    the device afterwards; other programs work out figures of their own there, as schedulers of diffusion do."""
    trace = trace_of(report)
    own = {
        index
        for index, op in enumerate(trace.ops)
        if op.phase == "forward" and not op.module and op.call.outputs and not runs_on(trace.device, op.call)
    }
    of_batches = made_for_copies(trace, own)
    for ops, how in (
        (of_batches, "DataLoader(num_workers=...), whose processes make the next batch meanwhile"),
        (own - of_batches, "made once, on the device, or as numbers of Python (math.log): no batch comes of them"),
    ):
        if ops:
            yield Proposal(
                f"all that the host sends after {counted(len(ops), 'op')} on tensors of its own", everything,
                "the host runs them one after the other", how,
                priced(report, with_ops(trace, ops)), where=modules_and_lines_of(trace.ops[index] for index in ops),
            )  # fmt: skip


@remedy
def tf32(report: Report) -> Iterator[Proposal]:
    """fp32 products that matrix units could run."""
    device, switches = report.hardware, report.switches
    if report.main_dtype not in ("fp32", "tf32") or "tf32" not in device.matrix_tflop_per_s:
        return
    asked = ["torch.set_float32_matmul_precision('high')"] * (not switches.matmul_tf32)
    asked += ["torch.backends.cudnn.allow_tf32 = True"] * (not switches.cudnn_tf32)
    trace = dataclasses.replace(trace_of(report), switches=switches._replace(matmul_tf32=True, cudnn_tf32=True))
    yield Proposal(
        "fp32 products", lambda kernel: kernel.cost.macs > 0 and switches.matmul_dtype(kernel.cost) == "fp32",
        "fp32 products run on vector units", f"TF32: {' and '.join(asked)}", priced(report, trace),
    )  # fmt: skip


@remedy
def narrower_numbers(report: Report) -> Iterator[Proposal]:
    """The whole program in fp64, as data of NumPy are; in fp32; or in a 16-bit type without matrix units (bf16 before
    Ampere) where the device is faster in another."""
    device, fp32 = report.hardware, torch.float32
    types = {"fp64": torch.float64, "fp32": fp32, "tf32": fp32, "bf16": torch.bfloat16}
    wide = types.get(report.main_dtype)
    narrow = fp32 if wide is torch.float64 else _narrow_type(device)
    if narrow in (None, wide) or wide is None or not any(k.cost.macs for k in report.kernels):
        return
    if wide is fp32 and type_of_others(report) is not None:  # then the program is narrow, and some of it is not
        return
    units = [device.contraction_peak(name).unit for name in (report.main_dtype, name_of(narrow))]
    if wide is torch.bfloat16 and units[0] == "matrix":
        return

    def narrowed(spec: TensorSpec, _: object) -> TensorSpec:
        is_wide = spec.dtype == wide and spec.device != "cpu"
        return spec._replace(dtype=narrow) if is_wide else spec

    name, bytes_too = str(narrow).removeprefix("torch."), wide is not torch.bfloat16
    transforms = sorted({op.call.name for op in trace_of(report).ops} & FOURIER)
    if narrow is not fp32 and transforms:
        but = f"{transforms[0]} has no {name}, so its input stays {name_of(wide)}"
        yield from _autocast_alone(report, narrow, but)
        return
    reasons = [f"twice the bytes of {name}"] * bytes_too
    reasons += ["no matrix units for it"] * (units[0] != "matrix" == units[1])
    beside = ", and data made by NumPy too" if wide is torch.float64 else ""
    if wide is fp32:
        beside = _or_autocast(report, narrow)
    then = with_chosen_kernels(with_tensors(trace_of(report), narrowed, dtypes={wide: narrow}), device)
    yield Proposal(
        all_kernels(report), everything,
        f"weights and data are {name_of(wide)}: {', and '.join(reasons) or f'{name} is faster'}",
        f"{name}: model.to(torch.{name}){beside}", priced(report, then),
    )  # fmt: skip


def _autocast_alone(report: Report, dtype: torch.dtype, but: str) -> Iterator[Proposal]:
    """For a program whose weights can be narrowed and some of whose ops cannot."""
    then = autocast(trace_of(report), dtype)
    if then is not None:
        yield Proposal(
            all_kernels(report), everything, "products are in fp32, without matrix units",
            f"torch.autocast in {str(dtype).removeprefix('torch.')} around the products ({but})",
            priced(report, with_chosen_kernels(then, report.hardware)),
        )  # fmt: skip


def _or_autocast(report: Report, dtype: torch.dtype) -> str:
    """What a program in fp32 can do in place of narrowing its weights, and what the run then takes."""
    said, then = ", or torch.autocast where weights have to stay fp32", autocast(trace_of(report), dtype)
    if then is None:
        return said
    seconds = priced(report, with_chosen_kernels(then, report.hardware)).seconds
    return f"{said} (then {with_prefix(seconds, 's')})"


LEAST_OTHERS = 0.1  # of a program's multiply-adds in 16 bits make those in fp32 exceptions


def type_of_others(report: Report) -> torch.dtype | None:
    """The 16-bit type of a program in which some products are in fp32; None if it has none, or hardly any."""
    macs = Counter[str]()
    for kernel in report.kernels:
        macs[kernel.cost.dtype] += kernel.cost.macs
    name, most = max(((name, macs[name]) for name in ("bf16", "fp16")), key=lambda pair: pair[1])
    is_mixed = most >= LEAST_OTHERS * macs.total() and most > 0
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[name] if is_mixed else None


def _narrow_type(device: Hardware) -> torch.dtype | None:
    """The 16-bit type for which the device has matrix units; else fp16, but not on a CPU, for which torch has few
    kernels in it."""
    units: dict[torch.dtype, Unit] = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with contextlib.suppress(HardwareError):
            units[dtype] = device.contraction_peak(name).unit
    on_matrix_units = [dtype for dtype, unit in units.items() if unit == "matrix"]
    without = [] if device.is_cpu else [dtype for dtype in units if dtype is torch.float16]
    return next(iter(on_matrix_units + without), None)


@remedy
def padded_widths(report: Report) -> Iterator[Proposal]:
    """Sizes of weights that break the alignment of rows, such as a vocabulary of 50257."""
    trace = trace_of(report)
    sizes = {
        size
        for kernel in report.kernels
        if kernel.cost.macs and alignment_of(kernel.cost) < constants.FULL_ALIGNMENT_BYTES
        if (size := odd_width(kernel.cost)) is not None
    }
    weights = {number for number, storage in enumerate(trace.storages) if storage.role == "parameters"}
    widths = {
        spec.shape[dim]
        for op in trace.ops
        for spec in op.inputs
        if spec.storage in weights
        for dim in range(len(spec.shape))
    }
    to = {size: -(-size // PADDED_TO) * PADDED_TO for size in sizes & widths if size > PADDED_TO}
    if not to:
        return

    def padded(spec: TensorSpec, _: object) -> TensorSpec:
        return _resized(spec, to) if to.keys() & set(spec.shape) else spec

    listed = ", ".join(f"{size} to {larger}" for size, larger in sorted(to.items()))
    yield Proposal(
        "", lambda kernel: any(to.keys() & set(shape[1:]) for shape in matmuls_of(kernel.cost)),
        f"odd width {', '.join(map(str, sorted(to)))}: rows of it are not aligned to 16 bytes",
        f"pad {listed} (a multiple of {PADDED_TO}) and ignore the rest", priced(report, with_tensors(trace, padded)),
    )  # fmt: skip


PADDED_TO = 64  # tiles of matmuls have multiples of this


def _resized(spec: TensorSpec, to: dict[int, int]) -> TensorSpec:
    """The tensor with other sizes; strides over a dimension that grew grow with it."""
    stride = list(spec.stride)
    for dim, size in enumerate(spec.shape):
        if size in to:
            outer = [other for other in range(len(stride)) if stride[other] >= max(spec.stride[dim], 1) * size]
            for other in outer:
                stride[other] = stride[other] // size * to[size] if stride[other] % size == 0 else stride[other]
    return spec._replace(shape=tuple(to.get(size, size) for size in spec.shape), stride=tuple(stride))


@remedy
def needless_recomputation(report: Report) -> Iterator[Proposal]:
    """Checkpointing, although memory has room for the activations that it drops. It detaches each tensor that it saves
    and each that it gives back, which costs the host time."""
    trace = trace_of(report)
    again = {index for index, op in enumerate(trace.ops) if op.phase == "recompute"}
    handed_over = {number for index in again for number in trace.ops[index].storages}
    detached = {
        index
        for index, op in enumerate(trace.ops)
        if op.phase == "backward" and op.packet is aten.detach and op.storages[0] in handed_over
    }
    usable = usable_bytes_if_known(report.hardware)
    recomputes = [kernel for kernel, _ in timed(report) if kernel.op.phase == "recompute"]
    if usable is None or not recomputes:  # views alone cost the device nothing
        return
    if 2 * sum(_of_the_backward_pass(report)) > len(recomputes):
        return
    gathers = any(kernel.cost.collective is not None for kernel in recomputes)  # for the backward pass too
    if gathers or message_peers(report.kernels):  # a pipeline has several microbatches under way
        return
    needed = report.memory.steady_peak_bytes + _most_kept_bytes(trace, again)
    if needed > usable:
        return
    room = f"at most {with_prefix(needed, 'B')} of {with_prefix(usable, 'B')} without"
    yield with_other_ops(
        report, f"the forward pass runs again, and memory has room: {room}",
        "no checkpointing",
        again | detached, about=again,
    )  # fmt: skip


def _of_the_backward_pass(report: Report) -> Iterator[bool]:
    """Whether each kernel that runs again works on what the backward pass computed. No checkpoint's does, whose
    forward pass begins with what was saved; a module at another place of its solver does (adjoint methods of
    differential equations, layers that are inverted), and no forward pass has run it before."""
    computed: set[int] = set()
    for kernel, _ in timed(report):
        op = kernel.op
        goes_on = bool(op.reads & computed)
        if goes_on or (op.phase == "backward" and kernel.cost.flops):
            computed |= op.makes
        if op.phase == "recompute":
            yield goes_on


def _most_kept_bytes(trace: Trace, again: set[int]) -> int:
    """What ops that run `again` leave for other ops, in the backward pass where that is most: a forward pass that runs
    once would have to keep that much. The next microbatch takes the same place."""
    made = defaultdict[int, list[Storage]](list)
    for storage in trace.storages:
        made[storage.born].append(storage)
    left, after = Counter[int](), len(trace.ops)
    for index in reversed(range(len(trace.ops))):
        if index not in again:
            after = index
            continue
        left[index] = sum(storage.nbytes for storage in made[index] if storage.died is None or storage.died > after)
    most = now = 0
    for index, op in enumerate(trace.ops):
        now = 0 if op.phase == "forward" else now + left[index]
        most = max(most, now)
    return most
