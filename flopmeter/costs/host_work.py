"""What a program does on the CPU besides its device, in notes: what it computes takes no time in a prediction; what it
copies takes the time of a guess."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from flopmeter.costs.lookup import costs_of
from flopmeter.device.hardware import Host
from flopmeter.records import Call, Kernel, Trace
from flopmeter.records.collectives import COLLECTIVES
from flopmeter.torch_names.operators import of_tensors

LEAST_BYTES = 1_000_000  # less than a core moves in .1 ms
_BARRIERS = {op.name for op in COLLECTIVES["barrier"].ops}  # on the device, though their only tensor is a dummy


def runs_on(device: str, call: Call) -> bool:
    if call.func._schema.name in _BARRIERS:
        return True
    return any(spec.device == device for spec in (*call.inputs, *call.outputs))


def host_work_notes(trace: Trace) -> list[str]:
    bytes_by_op = Counter[str]()
    for call, times in Counter(op.call for op in trace.ops).items():
        if not _is_of_numbers(call) and not runs_on(trace.device, call):
            bytes_by_op[call.name] += times * sum(cost.bytes for cost in costs_of(call))
    nbytes = bytes_by_op.total()
    if nbytes < LEAST_BYTES:
        return []
    return [
        f"the program computes on the CPU too, where it reads and writes {nbytes / 1e9:.3g} GB, most of it in "
        f"{max(bytes_by_op, key=bytes_by_op.__getitem__)}: that takes no time in the prediction"
    ]


def staging_notes(kernels: Iterable[Kernel], host: Host) -> list[str]:
    """A note on copies between the device and memory that is not page-locked, which the host has to copy first."""
    nbytes = sum(kernel.cost.staged_bytes for kernel in kernels)
    if nbytes < LEAST_BYTES:
        return []
    return [
        f"{nbytes / 1e9:.3g} GB of the host's memory that is not pinned go to the device or come from it: a thread of"
        f" the host copies them, at {host.copy_gb_per_s:.3g} GB/s ({host.source or 'assumed'})"
    ]


def _is_of_numbers(call: Call) -> bool:
    """Whether all tensors of the op are given as numbers, as TorchScript and casts do."""
    return not call.inputs and bool(of_tensors(call.func._schema.arguments))
