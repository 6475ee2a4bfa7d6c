"""Copies between the device and the host: of results, of batches, of activations that wait there for the backward pass
(`torch.autograd.graph.save_on_cpu`) and of weights that wait for their module, over a link that may be the slowest part
of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from flopmeter.records import Kernel, Op, Trace
from flopmeter.report.advice.remedies import Proposal, priced, remedy, room_for, with_other_ops
from flopmeter.report.advice.rewrite import with_ops
from flopmeter.report.advice.sent import brought_again, ends_of, results_sent, values_read
from flopmeter.report.advice.spots import modules_and_lines
from flopmeter.report.quantities import counted, with_prefix
from flopmeter.report.report import Report


@remedy
def copies_to_host(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Whole tensors that go to the host, which most programs read for a few figures."""
    sends = results_sent(trace) - values_read(trace) - brought_again(trace)[1]
    by_op = {id(trace.ops[index]) for index in sends}
    copies = [kernel for kernel in report.kernels if kernel.cost.link_bytes and id(kernel.op) in by_op]
    if copies:
        sent = with_prefix(sum(kernel.cost.link_bytes for kernel in copies), "B")
        yield with_other_ops(
            report, trace, f"{sent} go to the host, over a link that is slower than the device's memory",
            "make it smaller on the device first (argmax, a mean), or send it less often",
            sends,
        )  # fmt: skip


@remedy
def blocking_copies(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Copies to the device from memory that is not pinned: the host copies it first, or waits until they are done.
    Outside of modules they are batches; in a module it is a tensor made on the host, or weights that wait there."""
    copies = [kernel for kernel in report.kernels if _is_blocking_copy(kernel, trace.device)]
    outside = [kernel for kernel in copies if not kernel.op.module]
    batches = [kernel for kernel in outside if not _is_of_numbers(kernel.op, trace)]
    numbers = [kernel for kernel in outside if _is_of_numbers(kernel.op, trace)]
    yield from _not_waiting(
        report, trace, batches, "DataLoader(pin_memory=True) or .pin_memory(), and .to(device, non_blocking=True)"
    )
    yield from _not_waiting(
        report, trace, numbers,
        "made on the device (torch.full, torch.where; for a list of indices a slice), or moved there once, outside of"
        " the loop",
    )  # fmt: skip
    again = {id(trace.ops[index]) for index in brought_again(trace)[0]}
    inside = [kernel for kernel in copies if kernel.op.module]
    made = [kernel for kernel in inside if id(kernel.op) not in again]
    yield from _not_waiting(
        report, trace, made, "the tensor made on the device, or moved there once, outside of forward"
    )
    waiting = [kernel for kernel in inside if id(kernel.op) in again]
    yield from _not_waiting(report, trace, waiting, "their memory pinned, and .to(device, non_blocking=True)")


@remedy
def weights_on_the_host(report: Report, trace: Trace) -> Iterator[Proposal]:
    """What comes from the host whenever its module runs, as by the CPU offload of accelerate and diffusers, although
    the device has room for it."""
    brought, returned = brought_again(trace)
    sources = {ends_of(trace.ops[index])[0]: _bytes(trace.ops[index]) for index in brought}
    nbytes = sum(sources.values())
    if brought and (room := room_for(report, nbytes)):
        back = " and go back" if returned else ""
        yield with_other_ops(
            report, trace, f"{with_prefix(nbytes, 'B')} come from the host again{back}, and memory has room: {room}",
            "moved to the device once, outside of forward (weights: no CPU offload)",
            {*brought, *returned},
        )  # fmt: skip


def _not_waiting(report: Report, trace: Trace, copies: list[Kernel], remedy: str) -> Iterator[Proposal]:
    blocking = {id(kernel.op) for kernel in copies}
    if not blocking:
        return
    put_in = {index: _without_waiting(op) for index, op in enumerate(trace.ops) if id(op) in blocking}
    waits = any(kernel.cost.blocks_host for kernel in copies)
    why = "the host waits for each copy to be done" if waits else "the host copies to pinned memory first"
    yield Proposal(
        why, remedy, priced(report, with_ops(trace, (), put_in)), where=modules_and_lines(copies),
        what=f"all that the host sends after {counted(len(copies), 'copy', 'copies')}",
    )  # fmt: skip


def _is_blocking_copy(kernel: Kernel, device: str) -> bool:
    cost, call = kernel.cost, kernel.op.call
    target = call.outputs[0] if call.outputs else call.inputs[0]
    can_go_on = call.get("non_blocking") is not None
    return bool(cost.link_bytes and (cost.blocks_host or cost.staged_bytes) and target.device == device and can_go_on)


def _is_of_numbers(op: Op, trace: Trace) -> bool:
    """Whether what is sent was made of numbers of Python, or by torch.zeros, torch.arange and their kin."""
    source, _ = ends_of(op)
    if source is None:
        return False
    storage = trace.storages[source[1]]
    maker = trace.ops[storage.born].call if 0 <= storage.born < len(trace.ops) else None
    is_random = maker is not None and torch.Tag.nondeterministic_seeded in maker.func.tags
    return storage.is_of_numbers or (maker is not None and not maker.inputs and not is_random)


def _without_waiting(op: Op) -> Op:
    names = [argument.name for argument in op.call.func._schema.arguments if not argument.kwarg_only]
    place = names.index("non_blocking") if "non_blocking" in names else len(op.call.args)
    args = tuple(True if number == place else value for number, value in enumerate(op.call.args))
    kwargs = dict(op.call.kwargs) if place < len(args) else {**op.call.kwargs, "non_blocking": True}
    inputs = tuple(spec._replace(is_pinned=True) if spec.device == "cpu" else spec for spec in op.call.inputs)
    return op._replace(call=dataclasses.replace(op.call, args=args, kwargs=kwargs, inputs=inputs))


@remedy
def needless_offload(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Activations that are sent to the host although the device has room for them."""
    sent, returned = _there_and_back(trace)
    if sent and (room := room_for(report, _most_on_host(trace, sent, returned))):
        both = with_prefix(sum(map(_bytes, (trace.ops[index] for index in {*sent, *returned}))), "B")
        yield with_other_ops(
            report, trace, f"{both} go to the host and back, and memory has room: {room} without",
            "what the backward pass needs stays on the device (no save_on_cpu)",
            {*sent, *returned},
        )  # fmt: skip


def _there_and_back(trace: Trace) -> tuple[dict[int, int], dict[int, int]]:
    """The ops that send a tensor to the host and those that bring it back in a backward pass, each with the number of
    the storage there."""
    sent: dict[int, int] = {}
    returned: dict[int, int] = {}
    sender: dict[int, int] = {}
    for index, op in enumerate(trace.ops):
        source, target = ends_of(op)
        if source is None or target is None:
            continue
        if source[0] == trace.device and target[0] == "cpu" and op.phase != "backward":
            sender[target[1]] = index
        elif source[0] == "cpu" and target[0] == trace.device and op.phase == "backward" and source[1] in sender:
            returned[index] = source[1]
            sent[sender[source[1]]] = source[1]
    return sent, returned


def _bytes(op: Op) -> int:
    return max(spec.nbytes for spec in (*op.inputs, *op.outputs))


def _most_on_host(trace: Trace, sent: dict[int, int], returned: dict[int, int]) -> int:
    """The most bytes that wait there at one time."""
    waiting: dict[int, int] = {}
    most = now = 0
    for index in sorted({*sent, *returned}):
        if index in sent:
            waiting[sent[index]] = _bytes(trace.ops[index])
            now += waiting[sent[index]]
            most = max(most, now)
        else:
            now -= waiting.pop(returned[index], 0)
    return most
