"""Memory of a trace: how much was alive at each op, in which category, and whether that fits a device.

A storage counts from the op that makes it until its last tensor is freed; one that existed before the trace counts from
the start. Storages are seen if an op touched them, or if they belong to a module or an optimizer that ran. What the
allocator gives to ops for themselves (scratch.py) is no storage of the program.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, get_args

from flopmeter.device.hardware import Hardware, HardwareError
from flopmeter.records import BEFORE, DEFAULT_STREAM, Life, Op, Resize, Trace
from flopmeter.timing.allocator import BLOCK_BYTES, Lifetime, OutOfMemoryError, round_up, serve
from flopmeter.timing.scratch import scratch_of

Category = Literal[
    "parameters", "gradients", "optimizer state", "copies of weights", "activations", "temporaries", "inputs"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

# Memory that a process takes before it allocates any tensor: driver context, loaded kernels, cuBLAS handles. This is an
# assumption, which the report prints. nvidia-smi shows 0.3 to 0.6 GB on T4 to H100, more with more SMs, if CUDA loads
# kernels lazily (CUDA_MODULE_LOADING, the default since 12.2). This is the upper end, so that "fits" is a safe answer.
CONTEXT_BYTES = 600_000_000


class MemoryBlock(NamedTuple):
    """Memory of the program from op `born` until before op `died`; BEFORE and None: from the start, to the end."""

    nbytes: int
    born: int
    died: int | None
    category: Category
    storage: int  # its number in the trace
    stream: int = DEFAULT_STREAM  # that was current when it was asked for


@dataclass(frozen=True, eq=False)
class Memory:
    """What the program held on its device in the first `steps` ops of the trace. Each property is computed when it is
    first used; ops that the trace got since do not count."""

    trace: Trace = field(repr=False)
    steps: int
    device: Hardware | None = field(default=None, repr=False)  # whose libraries ask for scratch; None: for none
    lives: Mapping[int, Life | None] | None = field(default=None, repr=False)  # that are others than the trace's

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that were alive at the same time, without the allocator's rounding."""
        return self._totals[self._peak]

    @property
    def peak_op(self) -> Op | None:
        """The first op at which the peak was reached; None for a program without ops."""
        return self.trace.ops[self._peak] if self.steps else None

    @property
    def peak_place(self) -> str:
        """That op in words, such as 'gelu in GPT2.blocks.0.mlp (forward)'; '' for a program without ops."""
        op = self.peak_op
        return f"{op.call.name}{op.module and f' in {op.module}'} ({op.phase})" if op else ""

    @cached_property
    def at_peak(self) -> Mapping[Category, int]:
        """The bytes of each category at the peak; their sum is `peak_bytes`."""
        sizes: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        for nbytes, born, died, category, *_ in self.blocks:
            if born <= self._peak and (died is None or died > self._peak):
                sizes[category] += nbytes
        return sizes

    @cached_property
    def timeline(self) -> Mapping[Category, Sequence[int]]:
        """Bytes alive while op i ran, its outputs included; one more entry for the end of the trace."""
        return {
            category: _compact(alive_bytes((block for block in self.blocks if block.category == category), self.steps))
            for category in CATEGORIES
        }

    @cached_property
    def steady_peak_bytes(self) -> int:
        """The peak if the program ran again, with the optimizer's state of this run in memory from the start."""
        return max(alive_bytes(self.steady_blocks, self.steps))

    @cached_property
    def allocated_bytes(self) -> int:
        """The peak in blocks of the allocator, multiples of 512 B, with the scratch memory of ops:
        torch.cuda.max_memory_allocated()."""
        asked = ((each, round_up(each.nbytes, BLOCK_BYTES)) for each in self._asked_for(self.blocks))
        return max(alive_bytes(((nbytes, each.born, each.died) for each, nbytes in asked), self.steps))

    @cached_property
    def reserved_bytes(self) -> int:
        """The memory that PyTorch's caching allocator takes from a device with enough room: all of its segments,
        with the gaps in them. torch.cuda.max_memory_reserved()."""
        return serve(self._asked_for(self.blocks), self.steps)

    @cached_property
    def steady_reserved_bytes(self) -> int:
        """The same if the program ran again, as `steady_peak_bytes`."""
        return serve(self._asked_for(self.steady_blocks, repeats=True), self.steps)

    def fits(self, hardware: Hardware, *, allocator: bool = False) -> bool:
        """Whether the program, repeated, stays within `usable_bytes` of the device.

        allocator: True plays PyTorch's caching allocator, which rounds sizes, leaves gaps, and gives back unused
            segments before it fails; False counts only the bytes that tensors ask for.
        Raises HardwareError where the device's memory is unknown.
        """
        return self.fits_in(usable_bytes(hardware), allocator=allocator)

    def fits_in(self, usable_bytes: int, *, allocator: bool = False) -> bool:
        """The same for that many usable bytes."""
        if not allocator:
            return self.steady_peak_bytes <= usable_bytes
        try:
            serve(self._asked_for(self.steady_blocks, repeats=True), self.steps, usable_bytes)
        except OutOfMemoryError:
            return False
        return True

    @cached_property
    def blocks(self) -> tuple[MemoryBlock, ...]:
        category, streams = _Categories(self.trace, self.steps), self.trace.stream_use.streams
        return tuple(
            MemoryBlock(*life, category(number, life), number, streams.get(life.born, DEFAULT_STREAM))
            for number, life in self._lives()
        )

    @cached_property
    def steady_blocks(self) -> tuple[MemoryBlock, ...]:
        """The blocks of a second run: the optimizer state that is alive at the end is there from the start."""
        return tuple(
            block._replace(born=BEFORE)
            if block.category == "optimizer state" and (block.died is None or block.died >= self.steps)
            else block
            for block in self.blocks
        )

    def _asked_for(self, blocks: tuple[MemoryBlock, ...], *, repeats: bool = False) -> tuple[Lifetime, ...]:
        """All blocks that the allocator serves: these tensors, and the scratch memory of ops."""
        if self.device is None:
            return blocks
        return *blocks, *scratch_of(self.trace, self.steps, self.device, repeats=repeats)

    @cached_property
    def _totals(self) -> list[int]:
        return alive_bytes((life for _, life in self._lives()), self.steps)

    @cached_property
    def _peak(self) -> int:
        return self._totals.index(max(self._totals))

    def _lives(self) -> Iterator[tuple[int, Life]]:
        """The life of each storage on the program's device, in the first `steps` ops. A storage that is resized counts
        as a new one; the old memory is freed after its contents were copied."""
        changed, device = self.lives or {}, self.trace.device
        resizes: dict[int, list[Resize]] = {}
        for resize in self.trace.resizes:
            if resize.op < self.steps:
                resizes.setdefault(resize.storage, []).append(resize)
        for number, storage in enumerate(self.trace.storages):
            life = changed.get(number, Life(storage.nbytes, storage.born, storage.died))
            if life is None or life.born >= self.steps or storage.device != device or life.died == life.born:
                continue  # no op saw it
            for resize in resizes.get(number, ()):
                yield number, life._replace(died=resize.op + 1)
                life = life._replace(nbytes=resize.nbytes, born=resize.op)
            yield number, life if life.died is None or life.died <= self.steps else life._replace(died=None)
        yield from ((number, life) for number, life in changed.items() if number < 0 and life is not None)


def usable_bytes(hardware: Hardware) -> int:
    """Memory of the device that is left for tensors: its capacity less the context of the process.

    Raises HardwareError where the capacity is unknown.
    """
    if hardware.memory_bytes is None:
        raise HardwareError(
            f"{hardware.name} has no memory size, since its owner chose it; set it: hardware.replace(memory_gb=...), or"
            f" memory_gb in a YAML file that extends {hardware.name}"
        )
    return hardware.memory_bytes - CONTEXT_BYTES


def usable_bytes_if_known(hardware: Hardware) -> int | None:
    """The same; None where the capacity is unknown."""
    return None if hardware.memory_bytes is None else usable_bytes(hardware)


def memory_of(trace: Trace, device: Hardware | None = None, lives: Mapping[int, Life | None] | None = None) -> Memory:
    """The memory of what the trace holds so far on the program's device; with `device`, that of its libraries too;
    with `lives`, that of kernels for which storages live otherwise (see Launches).

    Each storage is in one category for all of its life:

    parameters: of modules, with their buffers, and what optimizers update.
    gradients: of those and of inputs, from the op that computes them.
    optimizer state: what optimizers keep from step to step.
    copies of weights: of what was there before, what follows from weights alone, as their average does.
    activations: made in a forward pass, or in its recomputation, and alive when a backward pass goes on. Of what was
        there before a part of a program: made so by a module, and freed in the part.
    inputs: what else was there before.
    temporaries: the rest, such as the gradients of activations.
    """
    return Memory(trace, len(trace.ops), device, lives)


def alive_bytes(blocks: Iterable[tuple[Any, ...]], steps: int) -> list[int]:
    """Bytes alive while each op ran, and at the end. The first three fields of a block are size, birth and death."""
    changes = [0] * (steps + 1)
    for nbytes, born, died, *_ in blocks:
        changes[born if born > 0 else 0] += nbytes
        if died is not None:
            changes[died] -= nbytes
    return list(accumulate(changes))


def _compact(sizes: list[int]) -> Sequence[int]:
    return array("q", sizes) if max(sizes) < 2**63 else sizes


class _Categories:
    """Gives the category of a storage, by its number."""

    def __init__(self, trace: Trace, steps: int):
        ops = trace.ops[:steps]
        self._trace = trace
        # Views do not count: between the ops of a recomputation, hooks detach the tensors that these ops save.
        self._backward = [i for i, op in enumerate(ops) if op.phase == "backward" and not op.call.func.is_view]
        self._not_optimizer = [i for i, op in enumerate(ops) if op.phase != "optimizer"]
        self._gradients = self._find_gradients(steps)

    def __call__(self, number: int, life: Life) -> Category:
        known = self._trace.storages[number] if number >= 0 else None
        if known is not None and known.role is not None:
            return known.role
        if number in self._gradients:
            return "gradients"
        if life.born == BEFORE:  # a part of a program may begin with a graph whose backward pass it runs
            is_kept = known is not None and known.is_of_forward_pass and life.died is not None
            return "activations" if is_kept and _is_alive_at_next(self._backward, life) else "inputs"
        phase = self._trace.ops[life.born].phase
        if phase == "optimizer" and _is_alive_at_next(self._not_optimizer, life):
            return "optimizer state"
        if phase in ("forward", "recompute") and _is_alive_at_next(self._backward, life):
            return "activations"
        return "temporaries"

    def _find_gradients(self, steps: int) -> set[int]:
        """Storages that became the gradient of a leaf that existed before the trace, came from the host, or that an op
        without inputs made, such as torch.empty. (Checkpointing makes leaves of its own; those are activations.)"""
        ops, gradients = self._trace.ops, set[int]()
        for place, leaf in self._trace.accumulations:
            variable = self._trace.storages[leaf]
            is_given = variable.born == BEFORE or not _computes(ops[variable.born], leaf, variable.device)
            if place < steps and (variable.role == "parameters" or is_given):
                gradients.update(ops[place].makes)
        return gradients


def _computes(op: Op, storage: int, device: str) -> bool:
    """Whether the op made the storage from other storages of its device."""
    return any(spec.device == device for spec in op.call.inputs) and storage in op.makes - op.reads


def _is_alive_at_next(places: list[int], life: Life) -> bool:
    """Whether the storage was still alive at the next of the (sorted) ops after the one that made it."""
    after = bisect_right(places, life.born)
    return after < len(places) and (life.died is None or life.died > places[after])
