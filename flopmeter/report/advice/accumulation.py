"""Gradients of several batches that add up, and that all ranks sum for each batch, where once for all is enough."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from flopmeter.records import Trace
from flopmeter.report.advice.remedies import Proposal, remedy, with_other_ops
from flopmeter.report.advice.rewrite import is_view
from flopmeter.report.report import Report
from flopmeter.torch_names.operators import aten

_ALL_REDUCE = "c10d::allreduce_"
_MOVES = (aten.mul, aten.mul_, aten.div, aten.div_, aten.copy_, aten.as_strided)  # into a bucket and out of it


@remedy
def sums_of_each_batch(report: Report, trace: Trace) -> Iterator[Proposal]:
    """DistributedDataParallel's buckets, which go over the links after each backward pass."""
    if report.cluster is None:
        return
    dropped = {index for bucket, sums in _summed(trace) for index in _early(trace, bucket, sums)}
    if dropped:
        yield with_other_ops(
            report, trace, "all ranks sum the gradients after each batch, though an optimizer steps after several",
            "DistributedDataParallel's no_sync() for all batches but the last before a step of the optimizer",
            dropped,
        )  # fmt: skip


def _summed(trace: Trace) -> Iterator[tuple[int, list[int]]]:
    """Buckets that are summed several times before a step of the optimizer, while gradients add up, with these ops."""
    sums: defaultdict[int, list[int]] = defaultdict(list)
    adds = [each.op for each in trace.accumulations if trace.ops[each.op].packet is aten.add_]
    for index, op in enumerate(trace.ops):
        if op.phase == "optimizer":
            yield from (pair for pair in sums.items() if any(pair[1][0] < add < pair[1][-1] for add in adds))
            sums.clear()
        elif op.call.name == _ALL_REDUCE and op.phase == "backward":
            for spec in op.inputs[:1]:
                sums[spec.storage].append(index)


def _early(trace: Trace, bucket: int, sums: list[int]) -> Iterator[int]:
    """All sums but the last, with what brings gradients into the bucket for them and back."""
    *early, _ = sums
    yield from early
    for index in range(_first_write(trace, bucket, sums[0]), sums[-1]):
        op = trace.ops[index]
        if op.packet not in _MOVES or bucket not in op.storages:
            continue
        is_into = op.outputs[0].storage == bucket and not is_view(op)
        if not is_into or index < early[-1]:
            yield index


def _first_write(trace: Trace, bucket: int, before: int) -> int:
    """Where the bucket begins to be filled for the op there."""
    start = before
    for index in range(before - 1, -1, -1):
        op = trace.ops[index]
        if op.phase != "backward":
            break
        if bucket in op.storages:
            start = index
    return start
