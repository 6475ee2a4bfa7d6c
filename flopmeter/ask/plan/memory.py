"""The memory of a rank: what its passes ask of torch's allocator in a step, one after another.

Layers take and give back the blocks that they were metered with (blocks.py). Around them are the buffers of FSDP2, each
on the stream that it is made on (torch/distributed/fsdp/_fully_shard, _fsdp_collectives.py and _fsdp_param_group.py),
and the messages of torch's pipeline stages (torch/distributed/pipelining/stage.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from flopmeter.ask.plan.compose import GATHER, GATHERED_BYTES, REDUCED_BYTES, ROUNDS, SCATTER, SplitWork
from flopmeter.ask.plan.layers import PartCost
from flopmeter.ask.plan.schedules import Pass, most_in_flight
from flopmeter.ask.plan.splits import Split
from flopmeter.records import DEFAULT_STREAM
from flopmeter.timing.allocator import CachingAllocator, OutOfMemoryError, Piece
from flopmeter.timing.scratch import workspace_bytes

AVERAGES_BYTES = 12  # of a parameter in the shard: itself and Adam's two averages, in fp32
# Where nothing is sharded, the gradient in fp32 too, and the parameter in the type in which products run.
UNSHARDED_BYTES = AVERAGES_BYTES + REDUCED_BYTES + GATHERED_BYTES
FROZEN_BYTES = GATHERED_BYTES  # of a parameter that is not trained: in the type in which products run


class MemoryUse(NamedTuple):
    """The memory of the fullest rank."""

    peak_bytes: int  # the most that is in use
    reserved_bytes: int  # what torch's allocator takes from a device that has room for it


def memory_of(work: SplitWork, usable_bytes: int | None = None) -> MemoryUse:
    """The memory that the split takes. Raises OutOfMemoryError if it exceeds `usable_bytes` even after the allocator
    has given unused segments back."""
    uses = {rank: RankMemory(work, rank, most_bytes=usable_bytes).step() for rank in _fullest(work.split)}
    for rank, use in uses.items():
        if usable_bytes is not None and use.reserved_bytes > usable_bytes:
            RankMemory(work, rank, capacity_bytes=usable_bytes).step()
    return MemoryUse(*map(max, zip(*uses.values(), strict=True)))


def least_bytes(work: SplitWork) -> float:
    """A lower bound for the fullest rank: its state, the activations that are in flight, and what is whole then."""
    return max(_least_bytes(work, rank) for rank in range(work.split.pp))


def _least_bytes(work: SplitWork, rank: int) -> float:
    chunks = work.chunks(rank)
    made = [float(sum(part.activation_bytes for part in parts)) for parts in chunks]
    split, microbatches = work.split, min(work.microbatches, ROUNDS * work.split.pp)
    whole = 0
    if split.gather == "step" and split.shards > 1:
        parts = [part for parts in chunks for part in parts]
        whole = sum(part.gathered_bytes for part in parts)
        if split.chunks == 1 and microbatches > split.pp:  # as many microbatches are in flight after a backward pass
            whole += REDUCED_BYTES * sum(part.trained_parameters for part in parts)
    in_flight = most_in_flight(work.order(rank, microbatches), made)
    kept, trained = (_numel(chunks, numel_of) for numel_of in (work.shard_numel, work.trained_numel))
    return state_bytes(split, trained, kept - trained) + in_flight + whole


def state_bytes(split: Split, trained: float, frozen: float) -> float:
    """Bytes of a rank's parameters, their gradients and optimizer state."""
    return (AVERAGES_BYTES if split.shards > 1 else UNSHARDED_BYTES) * trained + FROZEN_BYTES * frozen


def _numel(chunks: list[list[PartCost]], numel_of: Callable[[PartCost], float]) -> float:
    return sum(numel_of(part) for parts in chunks for part in parts)


def _fullest(split: Split) -> list[int]:
    """The ranks that may be the fullest: ranks after the second one have no more layers and fewer microbatches in
    flight; the last one has the head."""
    return sorted({0, min(1, split.pp - 1), split.pp - 1})


class _Taken(NamedTuple):
    piece: Piece
    nbytes: int


_Group = tuple[tuple[int, int], ...]  # parts that FSDP2 gathers together: the chunk and the place in it of each


class RankMemory:
    """What one rank of the pipeline asks of the allocator."""

    def __init__(
        self, work: SplitWork, rank: int, most_bytes: int | None = None, capacity_bytes: int | None = None
    ) -> None:
        """At most `most_bytes` can be in use, and at most `capacity_bytes` reserved."""
        self._work, self._rank, self._split = work, rank, work.split
        self._chunks = work.chunks(rank)
        self._microbatches = min(work.microbatches, ROUNDS * self._split.pp)  # more do not fill it further
        self._keeps_whole, self._is_sharded = self._split.gather == "step", self._split.shards > 1
        self._allocator = CachingAllocator(capacity_bytes)
        for _ in ("forward", "backward"):  # passes run in threads of their own
            self._allocator.allocate(workspace_bytes(work.hardware))
        self._in_use, self._peak, self._most_bytes = 0, 0, most_bytes
        self._blocks: dict[tuple[int, int, int], dict[int, _Taken]] = defaultdict(dict)  # by chunk, place, microbatch
        self._whole: dict[tuple[int, int], list[_Taken]] = {}  # parameters, by chunk and place
        self._new: dict[tuple[int, int], list[_Taken]] = defaultdict(list)  # gradients of this pass
        self._sums: dict[tuple[int, int], list[_Taken]] = {}  # gradients of all passes until now
        self._shards: dict[_Group, _Taken] = {}  # gradients after their scatter
        self._gathered: list[_Taken] = []  # the buffer of the last gather
        self._prefetched: list[_Taken] = []  # that of the next one
        self._scattered: list[_Taken] = []  # that of the last scatter

    def step(self) -> MemoryUse:
        self._take_state()
        for each in self._work.order(self._rank, self._microbatches):
            if each.kind == "forward":
                self._forward(each)
            else:
                self._backward(each)
        numel = _numel(self._chunks, self._work.trained_numel)
        self._take(self._work.costs.optimizer.bytes_per_parameter * numel)
        return MemoryUse(self._peak, self._allocator.peak_reserved_bytes)

    def _take_state(self) -> None:
        """Takes parameters and state, and a stage's inputs: torch keeps a buffer for each microbatch and direction."""
        for part in (part for parts in self._chunks for part in parts):
            numel = self._work.trained_numel(part)
            if part.frozen_parameters:
                self._take(FROZEN_BYTES * (self._work.shard_numel(part) - numel))
            for _ in range(3):
                self._take(AVERAGES_BYTES / 3 * numel)
            if not self._is_sharded:
                self._take((UNSHARDED_BYTES - AVERAGES_BYTES) * numel)
        for chunk in range(len(self._chunks)):
            for _ in range(self._work.microbatches * (self._receives(chunk) + self._sends(chunk))):
                self._take(self._work.costs.boundary_bytes)

    # --- passes ---

    def _forward(self, each: Pass) -> None:
        parts, layers, outside = self._parted(each.chunk)
        self._gather(outside)
        for place, part in enumerate(parts):
            group = ((each.chunk, place),)
            if group in layers:
                self._gather(group)
            received = part.blocks.received if place == 0 and self._receives(each.chunk) else frozenset[int]()
            self._play(part, (each.chunk, place, each.microbatch), part.blocks.forward, received)
            if group in layers and not self._keeps_whole:
                self._reshard(group)
        self._give(self._gathered)
        if self._sends(each.chunk):  # until the backward pass
            self._blocks[each.chunk, len(parts), each.microbatch][0] = self._take(self._work.costs.boundary_bytes)

    def _backward(self, each: Pass) -> None:
        parts, layers, outside = self._parted(each.chunk)
        makes_gradients = (each.kind == "weights") == self._split.defers_weights
        scatters = not self._keeps_whole or each.microbatch == self._microbatches - 1
        ahead = iter([*layers[-2::-1], ()])
        for place in reversed(range(len(parts))):
            group = ((each.chunk, place),)
            if group in layers:
                self._gather(group)
                self._give(self._gathered)
                self._prefetch(next(ahead))
            self._play_backward(each, place)
            if makes_gradients and group in layers:
                self._reduce(group, scatters)
        self._give([*self._blocks.pop((each.chunk, len(parts), each.microbatch), {}).values()])
        if makes_gradients:
            self._reduce(outside, scatters)
        self._give(self._scattered)  # by FSDP2's callback at the end of a backward pass

    def _play_backward(self, each: Pass, place: int) -> None:
        """In a zero-bubble schedule, activations and `held_bytes` of gradients stay until the pass for weights."""
        part, key = self._chunks[each.chunk][place], (each.chunk, place, each.microbatch)
        blocks, held = part.blocks, len(part.blocks.nbytes)
        if each.kind == "weights":
            self._play(part, key, sorted(blocks.gradients))
        elif self._split.defers_weights:
            later = blocks.gradients | {~number for number in blocks.kept}
            self._play(part, key, [number for number in blocks.backward if number not in later])
            self._blocks[key][held] = self._take(part.held_bytes)
            return
        else:
            self._play(part, key, blocks.backward)
        self._give([*self._blocks.pop(key, {}).values()])

    def _play(
        self, part: PartCost, key: tuple[int, int, int], numbers: Iterable[int], skipped: frozenset[int] = frozenset()
    ) -> None:
        """Takes and gives back the part's blocks, except those that came as a message."""
        held, blocks = self._blocks[key], part.blocks
        for number in numbers:
            if number < 0:
                if ~number in held:
                    self._give([held.pop(~number)])
            elif number in blocks.gradients:
                self._new[key[:2]].append(self._take(blocks.nbytes[number]))
            elif number not in skipped:
                held[number] = self._take(blocks.nbytes[number])

    # --- FSDP2 ---

    def _prefetch(self, group: _Group) -> None:
        """Takes the rank's shard in the type of products, and room for all of the parameters."""
        if not self._is_sharded or not group or group[0] in self._whole or self._prefetched:
            return
        nbytes = sum(self._chunks[chunk][place].gathered_bytes for chunk, place in group)
        # Schedules of several stages call unshard(async_op=True), which stays on the computing stream.
        stream = GATHER if len(self._chunks) == 1 else DEFAULT_STREAM
        shard = [self._take(nbytes / self._split.shards, stream)]
        self._prefetched = [self._take(nbytes, stream)]
        self._give(shard)

    def _gather(self, group: _Group) -> None:
        """Gathers into a buffer and copies into parameters. The buffer before is given back once this one is full."""
        if not self._is_sharded or not group or group[0] in self._whole:
            return
        self._prefetch(group)
        self._give(self._gathered)
        for chunk, place in group:
            part = self._chunks[chunk][place]
            sizes = part.blocks.gradient_bytes
            if sum(sizes) != part.gathered_bytes:
                sizes = (part.gathered_bytes,)
            self._whole[chunk, place] = [self._take(nbytes) for nbytes in sizes]
        self._gathered, self._prefetched = self._prefetched, []

    def _reshard(self, group: _Group) -> None:
        for each in group:
            self._give(self._whole.pop(each, []))

    def _reduce(self, group: _Group, scatters: bool) -> None:
        """Adds gradients of a pass to those before, in fp32 if they are scattered later; or scatters them."""
        for each in group:
            new = self._new[each]
            if not self._is_sharded and each not in self._sums:
                self._sums[each] = [*new]
                new.clear()
            elif self._keeps_whole and self._microbatches > 1:
                sizes = [taken.nbytes * REDUCED_BYTES // GATHERED_BYTES for taken in new]
                self._sums[each] = self._sums.get(each) or [*map(self._take, sizes)]
                self._give(new)
        if self._is_sharded and scatters and group:
            self._scatter(group)

    def _scatter(self, group: _Group) -> None:
        """Scatters from a buffer, which is given back at the next scatter or the end of the pass, into shards. The
        shards of later passes are added to these."""
        self._reshard(group)
        self._give(self._scattered)
        nbytes = REDUCED_BYTES * sum(self._chunks[chunk][place].trained_parameters for chunk, place in group)
        self._scattered = [self._take(nbytes)]
        for each in group:
            self._give(self._new[each])
            self._give(self._sums.pop(each, []))
        numel = sum(self._work.trained_numel(self._chunks[chunk][place]) for chunk, place in group)
        shard = self._take(REDUCED_BYTES * numel, SCATTER)
        if group in self._shards:
            self._give([shard])
        else:
            self._shards[group] = shard

    # --- the stage, the allocator ---

    def _parted(self, chunk: int) -> tuple[list[PartCost], list[_Group], _Group]:
        """The groups of a chunk's parts: each layer is one, and what is outside of layers together is one."""
        parts, costs = self._chunks[chunk], self._work.costs
        outside = tuple((chunk, place) for place, part in enumerate(parts) if costs.is_outside(part))
        layers: list[_Group] = [((chunk, place),) for place in range(len(parts)) if (chunk, place) not in outside]
        return parts, layers, outside

    def _receives(self, chunk: int) -> bool:
        return self._work.neighbour(self._rank, chunk, -1) is not None

    def _sends(self, chunk: int) -> bool:
        return self._work.neighbour(self._rank, chunk, 1) is not None

    def _take(self, nbytes: float, stream: int = DEFAULT_STREAM) -> _Taken:
        size = round(nbytes)
        self._in_use += size
        if self._in_use > self._peak:
            self._peak = self._in_use
            if self._most_bytes is not None and self._peak > self._most_bytes:
                raise OutOfMemoryError(f"rank {self._rank} needs more than {self._most_bytes} bytes")
        return _Taken(self._allocator.allocate(size, stream), size)

    def _give(self, blocks: list[_Taken]) -> None:
        for taken in blocks:
            self._in_use -= taken.nbytes
            self._allocator.free(taken.piece)
        blocks.clear()
