"""What would make a training step fit into memory that does not: a smaller batch, checkpoints, shards on more GPUs.

Each is estimated from the blocks of the run that there is. What belongs to weights (these, their gradients, what the
optimizer keeps and makes) stays with a smaller batch, and is shared by the GPUs of FSDP; all else shrinks with the
batch. Checkpoints around the layers of a list keep each layer's input, and one layer's activations at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from flopmeter.records import OF_WEIGHTS, Op
from flopmeter.report.quantities import with_prefix
from flopmeter.report.report import Report
from flopmeter.timing.peak_memory import MemoryBlock, alive_bytes, usable_bytes_if_known

LEAST_LAYERS = 4
MOST_PARTS = 4096  # of a batch, and GPUs


def ways_to_fit(report: Report) -> str:
    """A line on what would make the step fit; '' if it fits, or is no training on one GPU."""
    usable = usable_bytes_if_known(report.hardware)
    if usable is None or report.cluster is not None or report.memory.fits(report.hardware):
        return ""
    if not any(kernel.op.phase == "backward" for kernel in report.kernels):
        return ""
    ways = list(_ways(report, usable))
    return "to make it fit (estimated from this run): " + "; ".join(ways) if ways else ""


def _ways(report: Report, usable: int) -> Iterator[str]:
    now = _Need.of(report, report.memory.steady_blocks)
    batch = _power_of_two(lambda parts: now.peak_bytes(parts=parts) <= usable)
    gpus = _power_of_two(lambda gpus: now.peak_bytes(gpus=gpus) <= usable)
    if batch:
        yield f"1/{batch} of the batch ({with_prefix(now.peak_bytes(parts=batch), 'B')})"
    if (kept := _with_checkpoints(report)) is not None:
        parts = _power_of_two(lambda parts: kept.need.peak_bytes(parts=parts) <= usable)
        smaller = f", and 1/{parts} of the batch" if parts > 1 else ""
        if parts and parts != batch:
            peak = with_prefix(kept.need.peak_bytes(parts=parts), "B")
            yield f"a checkpoint around each of {kept.layers}.*{smaller}, {kept.times:.2f} times as long ({peak})"
    if gpus:
        yield f"FSDP over {gpus} GPUs ({with_prefix(now.peak_bytes(gpus=gpus), 'B')} each)"


def _power_of_two(fits: Callable[[int], bool]) -> int:
    """The least one that fits; 0 if none does."""
    return next((1 << power for power in range(MOST_PARTS.bit_length()) if fits(1 << power)), 0)


class _Need(NamedTuple):
    """The bytes that are alive while each op runs."""

    of_weights: list[int]
    others: list[int]

    @staticmethod
    def of(report: Report, blocks: Iterable[MemoryBlock]) -> _Need:
        ops, parts = report.memory.trace.ops, defaultdict[bool, list[MemoryBlock]](list)
        for block in blocks:
            is_of_optimizer = block.born >= 0 and ops[block.born].phase == "optimizer"
            parts[block.category in OF_WEIGHTS or is_of_optimizer].append(block)
        return _Need(*(alive_bytes(parts[kind], report.memory.steps) for kind in (True, False)))

    def peak_bytes(self, *, parts: int = 1, gpus: int = 1) -> int:
        """With one of so many parts of the batch, and weights shared by so many GPUs."""
        return max(own // gpus + other // parts for own, other in zip(self.of_weights, self.others, strict=True))


class _Checkpoints(NamedTuple):
    layers: str  # the path of the list
    need: _Need
    times: float  # as long as without them


def _with_checkpoints(report: Report) -> _Checkpoints | None:
    """Around the layers of the list that has most activations; None without such a list."""
    ops, blocks = report.memory.trace.ops, report.memory.steady_blocks
    of_layer = defaultdict[str, dict[str, list[MemoryBlock]]](lambda: defaultdict(list))
    for block in blocks:
        where = _layer(ops[block.born]) if block.born >= 0 and block.category == "activations" else None
        if where is not None:
            of_layer[where[0]][where[1]].append(block)
    layers, found = max(of_layer.items(), key=lambda item: _total(chain(*item[1].values())), default=("", {}))
    if len(found) < LEAST_LAYERS:
        return None
    dropped = {block.storage for own in found.values() for block in own}
    kept = [block for block in blocks if block.storage not in dropped]
    for name, own in found.items():
        kept += _of_checkpoint(report, (layers, name), own)
    again = _again(report, layers, found)
    pairs = zip(report.kernels, report.timings, strict=True)
    seconds = sum(timing.seconds for kernel, timing in pairs if id(kernel.op) in again)
    return _Checkpoints(layers, _Need.of(report, kept), 1 + seconds / report.seconds)


def _again(report: Report, layers: str, found: Mapping[str, list[MemoryBlock]]) -> set[int]:
    """The identities of the ops that run again: those of each layer up to the last whose result its backward pass
    reads, since a checkpoint stops there (`early_stop` of torch.utils.checkpoint)."""
    ops, read = report.memory.trace.ops, defaultdict[str, set[int]](set)
    for op in ops:
        where = _layer(op) if op.phase == "backward" else None
        if where is not None and where[0] == layers:
            read[where[1]] |= op.reads
    last = {
        name: max((block.born for block in own if block.storage in read[name]), default=-1)
        for name, own in found.items()
    }
    return {
        id(op)
        for index, op in enumerate(ops)
        if op.phase == "forward" and (where := _layer(op)) and where[0] == layers and index <= last.get(where[1], -1)
    }


def _layer(op: Op) -> tuple[str, str] | None:
    """The list of layers that the op's module stands in, and which of them it is."""
    parts = op.module.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), None)
    return None if number is None else (".".join(parts[:number]), parts[number])


def _of_checkpoint(report: Report, layer: tuple[str, str], blocks: list[MemoryBlock]) -> Iterator[MemoryBlock]:
    """The input of a layer, the largest tensor that its first op reads other than weights, and its activations from
    when they are computed again."""
    trace = report.memory.trace
    first = next(op for op in trace.ops if op.phase == "forward" and _layer(op) == layer)
    read = [spec.nbytes for spec in first.inputs if trace.storages[spec.storage].role is None]
    ends = [len(trace.ops) if block.died is None else block.died for block in blocks]
    yield blocks[0]._replace(nbytes=max(read, default=0), born=min(block.born for block in blocks), died=max(ends))
    of_backward = (index for index, op in enumerate(trace.ops) if op.phase == "backward" and _layer(op) == layer)
    again = next(of_backward, len(trace.ops))
    yield from (block._replace(born=again) for block, end in zip(blocks, ends, strict=True) if end > again)


def _total(blocks: Iterable[MemoryBlock]) -> int:
    return sum(block.nbytes for block in blocks)
