"""Memory of a trace: how much was alive at each op, as what, and whether that fits a device.

A storage counts from the op that makes it until the last tensor on it is freed; what was there before the
trace counts from its start. Seen are the storages that any op touched, and those of modules and optimizers
that ran. Not seen are workspaces inside kernels (cuBLAS, cuDNN, sorts) and what other libraries hold.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple, get_args

from flopmeter.allocator import BLOCK_BYTES, OutOfMemoryError, round_up, serve
from flopmeter.hardware import Hardware, HardwareError
from flopmeter.records import Op, Phase
from flopmeter.trace import BEFORE, Storage, Trace

Category = Literal["parameters", "gradients", "optimizer state", "activations", "temporaries", "inputs"]
CATEGORIES: tuple[Category, ...] = get_args(Category)

# What a process takes of a GPU before it allocates anything: driver context, loaded kernels, cuBLAS handles.
# 0.3 to 0.6 GB by nvidia-smi, growing with the number of SMs, as long as CUDA loads kernels lazily (its
# default since 12.2, CUDA_MODULE_LOADING). The upper end: a verdict should err towards too little room.
CONTEXT_BYTES = 600_000_000


class Block(NamedTuple):
    """Memory of the program from op `born` until before op `died`; BEFORE and None: from the start, to the end."""

    nbytes: int
    born: int
    died: int | None
    category: Category


@dataclass(frozen=True, eq=False)
class Memory:
    """What the program holds on its device. `at_peak` names every category and adds up to `peak_bytes`."""

    blocks: tuple[Block, ...]
    steps: int  # ops
    peak_bytes: int
    peak_op: Op | None  # the first that ran with so much alive, with its module and phase; None without ops
    at_peak: Mapping[Category, int]

    @cached_property
    def timeline(self) -> Mapping[Category, Sequence[int]]:
        """Bytes alive while op i ran, its outputs included; one entry more for what was left in the end."""
        return {category: array("q", _alive(self.blocks, self.steps, category)) for category in CATEGORIES}

    @cached_property
    def steady_peak_bytes(self) -> int:
        """The peak of the next repetition, which finds the optimizer's state from this one."""
        return max(_alive(_in_steady_state(self.blocks, self.steps), self.steps))

    @cached_property
    def allocated_bytes(self) -> int:
        """The peak in the allocator's blocks, whole multiples of 512 B: torch.cuda.max_memory_allocated()."""
        rounded = (block._replace(nbytes=round_up(block.nbytes, BLOCK_BYTES)) for block in self.blocks)
        return max(_alive(rounded, self.steps))

    @cached_property
    def reserved_bytes(self) -> int:
        """What PyTorch's caching allocator takes from the device in all, with room to spare: its segments
        of 2 and 20 MiB and larger, and the gaps in them. torch.cuda.max_memory_reserved()."""
        return serve(self.blocks, self.steps)

    def fits(self, hardware: Hardware, *, allocator: bool = False) -> bool:
        """Whether the program, repeated, stays within `usable_bytes` of the device.

        allocator: serve it from PyTorch's caching allocator, which rounds, leaves gaps, and gives back its
        unused segments before it gives up; else count the bytes that tensors ask for.
        Raises HardwareError where the device's memory is unknown.
        """
        usable = usable_bytes(hardware)
        if not allocator or max(self.peak_bytes, self.steady_peak_bytes) > usable:
            return max(self.peak_bytes, self.steady_peak_bytes) <= usable
        try:
            for blocks in (self.blocks, _in_steady_state(self.blocks, self.steps)):
                serve(blocks, self.steps, usable)
        except OutOfMemoryError:
            return False
        return True


def usable_bytes(hardware: Hardware) -> int:
    """Memory of the device that tensors can have: its capacity less the context of the process.

    Raises HardwareError where the capacity is unknown.
    """
    if hardware.memory_bytes is None:
        raise HardwareError(
            f"{hardware.name} has no memory size, since its owner chose it; set it: hardware.replace(memory_gb=...)"
        )
    return hardware.memory_bytes - CONTEXT_BYTES


def memory_of(trace: Trace) -> Memory:
    """The memory of the trace on the program's device, each storage in one category for all of its life:

    parameters: of modules, with their buffers, and what optimizers update.
    gradients: of those and of inputs, from the op that computes them.
    optimizer state: what optimizers keep from step to step.
    activations: made in a forward pass, or in its recomputation, and alive when a backward pass goes on.
    inputs: what else was there before.
    temporaries: the rest, such as the gradients of activations.
    """
    blocks = tuple(_blocks(trace))
    steps = len(trace.ops)
    alive = _alive(blocks, steps)
    peak = max(alive)
    moment = alive.index(peak)
    at_peak: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    for nbytes, born, died, category in blocks:
        if born <= moment and (died is None or died > moment):
            at_peak[category] += nbytes
    return Memory(blocks, steps, peak, trace.ops[moment] if moment < steps else None, at_peak)


def _alive(blocks: Iterable[Block], steps: int, category: Category | None = None) -> list[int]:
    """Bytes alive while each op ran and in the end, of one category or of all."""
    changes = [0] * (steps + 1)
    for nbytes, born, died, of in blocks:
        if category is None or of == category:
            changes[max(born, 0)] += nbytes
            if died is not None:
                changes[died] -= nbytes
    return list(accumulate(changes))


def _in_steady_state(blocks: Iterable[Block], steps: int) -> list[Block]:
    """The blocks as a repetition of the program finds them: optimizer state outlives the last op, so it is
    there from the start."""
    return [
        block._replace(born=BEFORE)
        if block.category == "optimizer state" and (block.died is None or block.died >= steps)
        else block
        for block in blocks
    ]


def _blocks(trace: Trace) -> Iterable[Block]:
    """Storages of the program's device; one that is resized is another block from then on."""
    device, category = trace.device, _Categories(trace)
    resizes: dict[int, list[tuple[int, int]]] = {}
    for op, number, nbytes in trace.resizes:
        resizes.setdefault(number, []).append((op, nbytes))
    for number, storage in enumerate(trace.storages):
        if storage.device == device:
            nbytes, born, kind = storage.nbytes, storage.born, category(number, storage)
            for op, new_nbytes in resizes.get(number, ()):
                yield Block(nbytes, born, op + 1, kind)  # the old memory is freed once the new has its contents
                nbytes, born = new_nbytes, op
            yield Block(nbytes, born, storage.died, kind)


class _Categories:
    """Tells what a storage is from the trace that it is in."""

    def __init__(self, trace: Trace):
        self._phases: list[Phase] = [op.phase for op in trace.ops]
        self._backward = [place for place, phase in enumerate(self._phases) if phase == "backward"]
        self._not_optimizer = [place for place, phase in enumerate(self._phases) if phase != "optimizer"]
        self._gradients = self._find_gradients(trace)

    def __call__(self, number: int, storage: Storage) -> Category:
        if storage.role is not None:
            return storage.role
        if number in self._gradients:
            return "gradients"
        if storage.born == BEFORE:
            return "inputs"
        # An op that raised after making a storage is not in the trace.
        phase = self._phases[storage.born] if storage.born < len(self._phases) else "forward"
        if phase == "optimizer" and _is_alive_at_next(self._not_optimizer, storage):
            return "optimizer state"
        if phase in ("forward", "recompute") and _is_alive_at_next(self._backward, storage):
            return "activations"
        return "temporaries"

    def _find_gradients(self, trace: Trace) -> set[int]:
        """Storages that became the gradient of a leaf that was there before. (Checkpointing differentiates
        with respect to leaves of its own, which are activations.)"""
        gradients: set[int] = set()
        for place, leaf in trace.accumulations:
            if trace.storages[leaf].role == "parameters" or trace.storages[leaf].born == BEFORE:
                op = trace.ops[place]
                gradients.update(op.storages[spec.storage] for spec in op.call.outputs)
        return gradients


def _is_alive_at_next(places: list[int], storage: Storage) -> bool:
    """Whether the storage was still there at the first of the (sorted) ops after the one that made it."""
    after = bisect_right(places, storage.born)
    return after < len(places) and (storage.died is None or storage.died > places[after])
