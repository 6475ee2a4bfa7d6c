"""What the device sends to the host."""

from __future__ import annotations

from flopmeter.records import Op, Trace
from flopmeter.torch_names.operators import aten


def results_sent(trace: Trace) -> set[int]:
    """The ops that copy tensors to the host; not what comes back later (offloaded activations), nor what the optimizer
    steps with there."""
    device = trace.device
    wanted = {
        number
        for op in trace.ops
        if op.phase == "optimizer" or any(spec.device == device for spec in op.call.outputs)
        for number in op.storages
    }
    return {
        index
        for index, op in enumerate(trace.ops)
        if any(spec.device == device for spec in op.call.inputs)
        and any(spec.device == "cpu" and op.storages[spec.storage] not in wanted for spec in op.call.outputs)
    }


def values_read(trace: Trace) -> set[int]:
    """The ops that bring one value to the host: calls such as `.item()`, and copies such as `loss.cpu()`."""
    asks = {index for index, op in enumerate(trace.ops) if op.packet is aten._local_scalar_dense}
    return asks | {index for index in results_sent(trace) if _is_of_one_value(trace.ops[index])}


def _is_of_one_value(op: Op) -> bool:
    return all(spec.numel == 1 for spec in op.call.outputs)
