"""Values that the host reads from the device, and ops on tensors of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from flopmeter.costs.host_work import runs_on
from flopmeter.records import Kernel, Op, Trace
from flopmeter.report.advice.number_types import narrow_type
from flopmeter.report.advice.remedies import Proposal, priced, remedy
from flopmeter.report.advice.rewrite import with_ops
from flopmeter.report.advice.sent import made_for_copies, made_of_results, values_read
from flopmeter.report.advice.spots import modules_and_lines, modules_and_lines_of
from flopmeter.report.quantities import counted
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten


@remedy
def waits_for_values(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Calls such as `.item()`, which stop the host until the device is done."""
    asks = {id(trace.ops[index]) for index in values_read(trace)}
    reads = [kernel for kernel in report.kernels if id(kernel.op) in asks and kernel.cost.blocks_host]
    flags, anomalies = _flags_of_scalers(trace), _results_of_checks(trace)
    by_scaler = [kernel for kernel in reads if not flags.isdisjoint(kernel.op.storages)]
    by_program = [kernel for kernel in reads if (flags | anomalies).isdisjoint(kernel.op.storages)]
    is_bf16 = narrow_type(report.hardware) is torch.bfloat16
    yield from _without(
        report, trace, by_program, "keep the values on the device, or read them once in many steps",
        "until the device is done (.item(), float(), .cpu(), print, if)",
    )  # fmt: skip
    yield from _without(
        report, trace, by_scaler, "bfloat16, which needs no GradScaler" if is_bf16 else "the optimizer's fused=True",
        "until GradScaler knows whether a gradient overflowed",
    )  # fmt: skip


def _without(report: Report, trace: Trace, reads: list[Kernel], remedy: str, why: str) -> Iterator[Proposal]:
    of_device = {id(kernel.op) for kernel in reads}  # to read a tensor of the host stops nobody
    asks = {index for index, op in enumerate(trace.ops) if id(op) in of_device}
    if asks:
        yield Proposal(
            f"the host stops {counted(len(asks), 'time')} {why}", remedy, priced(report, with_ops(trace, asks)),
            what=f"all that the host sends after {counted(len(reads), 'read')} of a value",
            where=modules_and_lines(reads),
        )  # fmt: skip


def _flags_of_scalers(trace: Trace) -> set[int]:
    """The storages in which torch.amp.GradScaler finds whether a gradient overflowed."""
    check = aten._amp_foreach_non_finite_check_and_unscale_
    ops = (op for op in trace.ops if op.packet is check)
    return {op.storages[op.call.inputs[-2].storage] for op in ops}  # the last of its tensors is the scale


@remedy
def waits_for_places(report: Report, trace: Trace) -> Iterator[Proposal]:
    """`x[mask]`, `nonzero` and `where`, whose results are as large as the mask has places. nonzero_static is given that
    number, and is priced here."""
    finds = [kernel for kernel in report.kernels if kernel.op.packet is aten.nonzero and kernel.cost.blocks_host]
    waits = {id(kernel.op) for kernel in finds}
    put_in = {index: _of_known_size(op) for index, op in enumerate(trace.ops) if id(op) in waits}
    if put_in:
        yield Proposal(
            f"the host stops {counted(len(put_in), 'time')} until the device knows how many places a mask holds",
            "torch.where or a product with the mask in place of x[mask], or torch.nonzero_static(mask, size=...)",
            priced(report, with_ops(trace, (), put_in)),
            what=f"all that the host sends after {counted(len(put_in), 'search', 'searches')} for what a mask holds",
            where=modules_and_lines(finds),
        )  # fmt: skip


def _of_known_size(op: Op) -> Op:
    (found,) = op.call.outputs
    static = dataclasses.replace(op.call, func=aten.nonzero_static.default, kwargs={"size": found.shape[0]})
    return op._replace(call=static)


@remedy
def waits_for_the_device(report: Report, trace: Trace) -> Iterator[Proposal]:
    """torch.cuda.synchronize() and its kin, as they stand around a program's own clock."""
    waits = len(trace.stream_use.host_waits)
    if waits:
        use = dataclasses.replace(trace.stream_use, host_waits=[])
        yield Proposal(
            f"the host stops {counted(waits, 'time')} until the device is done",
            "no torch.cuda.synchronize() in the loop, but to measure",
            priced(report, dataclasses.replace(trace, stream_use=use)),
            what=f"all that the host sends after {counted(waits, 'call')} of synchronize()",
        )  # fmt: skip


@remedy
def checks_for_anomalies(report: Report, trace: Trace) -> Iterator[Proposal]:
    """torch.autograd.set_detect_anomaly(True), under which the backward pass looks for NaN in each gradient and reads
    whether there is one (torch/csrc/autograd/engine.cpp)."""
    found = _results_of_checks(trace)
    reads = [index for index in values_read(trace) if not found.isdisjoint(trace.ops[index].storages)]
    looks = {index for index, op in enumerate(trace.ops) if not found.isdisjoint(op.makes)}
    looked_at = {number for index in looks for number in trace.ops[index].reads}
    looks |= {index for index, op in enumerate(trace.ops) if op.packet is aten.isnan and op.makes <= looked_at}
    if reads:
        yield Proposal(
            "the host stops after each until the device is done",
            "torch.autograd.set_detect_anomaly(False), but to find a fault",
            priced(report, with_ops(trace, looks.union(reads))),
            what=f"all that the host sends after {counted(len(reads), 'look')} for NaN in a gradient",
            where=modules_and_lines_of(trace.ops[index] for index in reads),
        )  # fmt: skip


def _results_of_checks(trace: Trace) -> set[int]:
    """The storages in which torch's engine finds whether a gradient has a NaN. Nothing else calls this op."""
    return {number for op in trace.ops if op.packet is aten._is_any_true for number in op.makes}


@remedy
def ops_between_on_the_host(report: Report, trace: Trace) -> Iterator[Proposal]:
    """Ops on tensors of the host, outside of modules: each takes the time of a call from the device. A batch goes to
    the device afterwards, or results have come from there; other programs work out figures of their own, as schedulers
    of diffusion do."""
    own = {
        index
        for index, op in enumerate(trace.ops)
        if op.phase == "forward" and not op.module and op.call.outputs and not runs_on(trace.device, op.call)
    }
    of_batches = made_for_copies(trace, own)
    of_results = made_of_results(trace, own - of_batches)
    for ops, how in (
        (of_batches, "DataLoader(num_workers=...), whose processes make the next batch meanwhile"),
        (of_results, "done on the device, before the results come to the host, or in another process"),
        (
            own - of_batches - of_results,
            "made once, on the device, or as numbers of Python (math.log): no batch comes of them",
        ),
    ):
        if ops:
            yield Proposal(
                "the host runs them one after the other", how, priced(report, with_ops(trace, ops)),
                what=f"all that the host sends after {counted(len(ops), 'op')} on tensors of its own",
                where=modules_and_lines_of(trace.ops[index] for index in ops),
            )  # fmt: skip
