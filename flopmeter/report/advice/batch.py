"""A larger batch: the same ops on several times as many items, compared by the time per item.

No trace says which dimension is the batch. First guess: tensors that depend on the inputs hold one item after another,
so their outermost dimension grows; weights, their gradients and tensors computed from weights alone do not. If the
shapes then do not fit together, as in layers that hold the first word of all texts before the second, the second guess
is the dimension whose size is the inputs' number of items. If the FLOPs do not grow in proportion either way, nothing
is proposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

import torch

from flopmeter.records import OF_WEIGHTS, CompiledKernel, Op, TensorSpec, Trace
from flopmeter.report.advice.remedies import Proposal, priced, remedy
from flopmeter.report.advice.rewrite import PRODUCTS, outermost, widened, with_tensors
from flopmeter.report.report import Report
from flopmeter.timing.peak_memory import usable_bytes_if_known
from flopmeter.trace.copies_of_weights import shapes_of_weights
from flopmeter.trace.handling import FRESH

MOST_TIMES = 64
PER_DOUBLING = 1.1  # a doubling is worth it if it brings this many times as much per second
FAULT = 3.0  # a small batch is a fault if the kernels of a larger one do over this many times the work per second
PROPORTIONAL = 0.02  # how far FLOPs may be from growing with the batch
# Raised by cost rules, torch's formulas and a user's own rules for shapes that do not match: a wrong size, a missing
# dimension, a division by zero. Any other error is a bug in a rule, and is not caught.
SHAPES_DO_NOT_FIT = (AssertionError, ArithmeticError, LookupError, RuntimeError, ValueError)


@remedy
def larger_batch(report: Report, trace: Trace) -> Iterator[Proposal]:
    """The batch is doubled until memory is full, or until twice the batch brings less than a tenth more per second."""
    usable = usable_bytes_if_known(report.hardware)
    if usable is None or report.cluster is not None:
        return
    if any(op.call.groups for op in trace.ops):  # lengths of sequences and experts' groups
        return
    if not any(op.module for op in trace.ops):  # a solver on one matrix has no batch
        return
    grows = depends_on_inputs(trace)
    if any(_is_parted_when_larger(op, grows) for op in trace.ops):
        return
    held = sum(size for name, size in report.memory.at_peak.items() if name in OF_WEIGHTS)
    fixed = max(held, held + report.memory.steady_peak_bytes - report.memory.peak_bytes)
    most = (usable - fixed) // max(report.memory.peak_bytes - held, 1)
    times, then = _most_per_second(report, trace, grows, min(most, MOST_TIMES))
    if times == 1:
        return
    why = "the work of one batch is too small for the device"
    if (passes := _passes_alike(trace)) > 1:
        why += f"; each step has {passes} backward passes, and with larger batches fewer"
    remedy = f"{times} times the batch (times are of what is now one batch)"
    is_fault = report.kernel_seconds > FAULT * then.kernel_seconds / times
    yield Proposal(why, remedy, then, times=times, is_fault=is_fault)


def _passes_alike(trace: Trace) -> int:
    """How many backward passes of the same ops the step has: of batches whose gradients add up, or of samples whose
    gradients are taken one by one. (The first one adds to nothing.)"""
    phases = groupby(trace.ops, lambda op: op.phase)
    passes = [[(op.packet, op.module) for op in ops] for phase, ops in phases if phase == "backward"]
    return len(passes) if len(passes) > 2 and all(each == passes[-1] for each in passes[1:]) else 1


def _is_parted_when_larger(op: Op, grows: set[int]) -> bool:
    """Whether it is a compiled kernel that sums over the items and also has a result for each item, as a batch norm
    does: for more items the compiler would split it into kernels that are not known here."""
    kernel = op.call.kwargs.get("kernel")
    if not isinstance(kernel, CompiledKernel) or kernel.reduced == 1:
        return False
    return len({spec.storage in grows for spec in op.outputs if spec.numel > 1}) == 2


def _most_per_second(report: Report, trace: Trace, grows: set[int], most: int) -> tuple[int, Report]:
    """How many times the batch has the highest throughput, and its report; 1 if no larger batch is better."""
    times, best, then = 1, report.seconds, report
    for is_outermost in (True, False):
        items = None if is_outermost else _items_of_batch(trace)
        while 2 * times <= most:
            run = priced_if_it_fits(report, scaled(trace, grows, 2 * times, items))
            if run is None or not is_proportional(report, run, 2 * times):
                break
            if run.seconds / (2 * times) * PER_DOUBLING > best:
                return times, then
            times *= 2
            best, then = run.seconds / times, run
        if times > 1:
            break
    return times, then


def priced_if_it_fits(report: Report, changed: Trace) -> Report | None:
    """The report of a trace with other sizes; None if a rule rejects its shapes, which are a guess."""
    try:
        return priced(report, changed)
    except SHAPES_DO_NOT_FIT:
        return None


def is_proportional(before: Report, after: Report, times: int) -> bool:
    """Whether the FLOPs of matmuls and attention grow in proportion. Optimizers, and what is made of weights alone,
    stay as they are."""
    is_now, becomes = _macs_of_passes(before), _macs_of_passes(after)
    return abs(becomes - times * is_now) <= PROPORTIONAL * times * is_now and is_now > 0


def _macs_of_passes(report: Report) -> int:
    """Without the optimizer's: some, such as Muon, multiply matrices of the weights' size."""
    kernels = (kernel for kernel in report.kernels if kernel.op.phase != "optimizer")
    return sum(kernel.cost.macs + kernel.cost.loop_macs for kernel in kernels)


def scaled(trace: Trace, grows: set[int], times: int, items: int | None = None) -> Trace:
    """The trace of `times` times the batch. Of the storages `grows` the outermost dimension grows or, if a tensor has a
    dimension of size `items`, the first such one."""

    def larger(spec: TensorSpec, is_growing: object) -> TensorSpec:
        dim = spec.shape.index(items) if items in spec.shape and spec.is_strided else outermost(spec)
        if not is_growing or dim is None:
            return spec
        return widened(spec, dim, times)

    return with_tensors(trace, larger, lambda number: number in grows)


def _items_of_batch(trace: Trace) -> int | None:
    """The number of items in the largest input; None if there is none."""
    data = _data(trace)
    found = [spec for op in trace.ops for spec in op.inputs if spec.storage in data]
    largest = max(found, key=lambda spec: spec.nbytes, default=None)
    return None if largest is None else _items(largest)


def depends_on_inputs(trace: Trace) -> set[int]:
    """The storages that hold something for each item: inputs, and what is computed from them."""
    roles = [storage.role for storage in trace.storages]
    grows, weights = _data(trace), shapes_of_weights(trace)
    for op in trace.ops:
        if op.phase != "optimizer" and any(number in grows for number in op.storages):
            made = (spec for spec in op.outputs or op.written if roles[spec.storage] is None)
            grows |= {spec.storage for spec in made if _holds_items(op, spec, grows, weights)}
    return grows


def _data(trace: Trace) -> set[int]:
    """Storages of data: those without a role that were on the device before the step, and those of as many items that
    the step creates from nothing (`torch.randn`, `torch.tensor`) or copies from the host. If the largest data is
    created in the step, at random or from Python, its size is the number of items, and storages from before with
    another size are taken for schedules and counters."""
    given = {number for number, storage in enumerate(trace.storages) if storage.born < 0 and storage.role is None}
    weights = shapes_of_weights(trace)
    bringing = [op for op in trace.ops if op.phase == "forward" and _brings_data(op, weights)]
    made = [(op, spec) for op in bringing for spec in op.outputs if trace.storages[spec.storage].role is None]
    found = [spec for op in trace.ops for spec in op.inputs if spec.storage in given]
    items = {_items(spec) for spec in found} - {None}
    told = [spec for op, spec in made if not given or op.packet in FRESH or _is_random(op) or op.call.inputs]
    largest = max(told, key=lambda spec: spec.nbytes, default=None)
    if largest is not None and largest.nbytes > max((spec.nbytes for spec in found), default=0):
        items = {_items(largest)} - {None}
        given = {spec.storage for spec in found if _items(spec) in items}
    return given | {spec.storage for _, spec in made if _items(spec) in items}


def _brings_data(op: Op, weights: set[tuple[int, ...]]) -> bool:
    """Whether its results come from nothing, or from the host and do not look like (offloaded) weights."""
    if not op.call.inputs or op.packet in FRESH:
        return True
    comes_from_host = all(spec.device == "cpu" for spec in op.inputs)
    return comes_from_host and all(spec.device != "cpu" and spec.shape not in weights for spec in op.outputs)


def _is_random(op: Op) -> bool:
    return torch.Tag.nondeterministic_seeded in op.call.func.tags


def _items(spec: TensorSpec) -> int | None:
    dim = outermost(spec)
    return None if dim is None else spec.shape[dim]


def _holds_items(op: Op, out: TensorSpec, grows: set[int], weights: set[tuple[int, ...]]) -> bool:
    """Whether the op's result has a part for each item. A matmul of two tensors of items sums over the items: its
    result is a gradient of weights. So is a result of another backward op that has the shape of weights."""
    if op.packet in PRODUCTS:
        return not all(spec.storage in grows for spec in op.inputs[-2:])
    if out.numel == 1:
        return False
    if op.phase != "backward":
        return True
    looks_like_weights = out.shape in weights or tuple(size for size in out.shape if size > 1) in weights
    return not looks_like_weights or any(spec.shape == out.shape for spec in op.inputs if spec.storage in grows)
