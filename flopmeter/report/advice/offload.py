"""Activations that wait on the host for the backward pass (`torch.autograd.graph.save_on_cpu`), which the link to it
may make the slowest part of a step."""

from __future__ import annotations

from collections.abc import Iterator

from flopmeter.records import Op, Trace
from flopmeter.report.advice.remedies import Proposal, remedy, trace_of, with_other_ops
from flopmeter.report.quantities import with_prefix
from flopmeter.report.report import Report
from flopmeter.timing.peak_memory import usable_bytes_if_known


@remedy
def needless_offload(report: Report) -> Iterator[Proposal]:
    """Although memory has room for what is sent."""
    trace, usable = trace_of(report), usable_bytes_if_known(report.hardware)
    sent, returned = _there_and_back(trace)
    if usable is None or not sent:
        return
    needed = report.memory.steady_peak_bytes + _most_on_host(trace, sent, returned)
    if needed > usable:
        return
    both = with_prefix(sum(map(_bytes, (trace.ops[index] for index in {*sent, *returned}))), "B")
    yield with_other_ops(
        report, f"{both} go to the host and back, and memory has room: at most {with_prefix(needed, 'B')} of "
        f"{with_prefix(usable, 'B')} without", "what the backward pass needs stays on the device (no save_on_cpu)",
        {*sent, *returned},
    )  # fmt: skip


def _there_and_back(trace: Trace) -> tuple[dict[int, int], dict[int, int]]:
    """The ops that send a tensor to the host and those that bring it back in a backward pass, each with the number of
    the storage there."""
    sent: dict[int, int] = {}
    returned: dict[int, int] = {}
    sender: dict[int, int] = {}
    for index, op in enumerate(trace.ops):
        source, target = _ends(op)
        if source is None or target is None:
            continue
        if source[0] == trace.device and target[0] == "cpu" and op.phase != "backward":
            sender[target[1]] = index
        elif source[0] == "cpu" and target[0] == trace.device and op.phase == "backward" and source[1] in sender:
            returned[index] = source[1]
            sent[sender[source[1]]] = source[1]
    return sent, returned


def _ends(op: Op) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """Device and storage of what a copy between devices reads, and of what it writes."""
    ends = [*op.inputs, *op.outputs]
    if len({spec.device for spec in ends}) < 2:
        return None, None
    target = op.outputs[0] if op.outputs else op.inputs[0]
    source = next((spec for spec in reversed(op.inputs) if spec.device != target.device), None)
    return source and (source.device, source.storage), (target.device, target.storage)


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
