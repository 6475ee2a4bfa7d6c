"""What goes between the device and the host."""

from __future__ import annotations

from flopmeter.records import Op, Storage, Trace
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


def brought_again(trace: Trace) -> tuple[set[int], set[int]]:
    """The ops of modules that copy to the device what was on the host before the step, such as offloaded weights, and
    those that send it back. A part of a storage, such as a frame of a video, may be another one in each step."""
    brought, returned, on_device = set[int](), set[int](), set[int]()
    for index, op in enumerate(trace.ops):
        source, target = ends_of(op)
        if source is None or target is None:
            continue
        if target[0] == trace.device and _waited_whole(trace.storages[source[1]], op) and op.module:
            brought.add(index)
            on_device.add(target[1])
        elif target[0] == "cpu" and source[1] in on_device:
            returned.add(index)
    return brought, returned


def _waited_whole(storage: Storage, op: Op) -> bool:
    copied = max((spec.nbytes for spec in op.inputs if spec.device == "cpu"), default=0)
    return storage.device == "cpu" and storage.born < 0 and copied >= storage.nbytes


def ends_of(op: Op) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """Device and storage of what a copy between devices reads, and of what it writes."""
    ends = [*op.inputs, *op.outputs]
    if len({spec.device for spec in ends}) < 2:
        return None, None
    target = op.outputs[0] if op.outputs else op.inputs[0]
    source = next((spec for spec in reversed(op.inputs) if spec.device != target.device), None)
    return source and (source.device, source.storage), (target.device, target.storage)


def made_of_results(trace: Trace, ops: set[int]) -> set[int]:
    """Those of the ops that work on what came from the device."""
    came, makers = set[int](), set[int]()
    for index, op in enumerate(trace.ops):
        source, target = ends_of(op)
        if source is not None and target is not None and source[0] == trace.device and target[0] == "cpu":
            came.add(target[1])
        elif index in ops and not came.isdisjoint(op.storages):
            makers.add(index)
            came |= op.makes
    return makers


def made_for_copies(trace: Trace, ops: set[int]) -> set[int]:
    """Those of the ops that make what a later copy brings to the device, and the reads of numbers before them, as of a
    place to cut at: `data[i : i + 8]`. A copy of one number is none of a batch."""
    wanted, makers = set[int](), set[int]()
    goes_on = False  # whether the op of the host that comes next is one of them
    for index in range(len(trace.ops) - 1, -1, -1):
        op = trace.ops[index]
        is_cut = op.packet is aten._local_scalar_dense and all(spec.device == "cpu" for spec in op.inputs)
        if index in ops or is_cut:
            goes_on = goes_on if is_cut else not wanted.isdisjoint(op.storages)
            if goes_on:
                makers.add(index)
                wanted |= set(op.storages)
            continue
        source, target = ends_of(op)
        if source is not None and target is not None and source[0] == "cpu" and target[0] == trace.device:
            wanted |= {spec.storage for spec in op.inputs if spec.device == "cpu" and spec.numel > 1}
    return makers
