"""What a part of a model asks of the allocator: its blocks of memory, in the order in which they come and go."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from flopmeter.timing.peak_memory import Memory, MemoryBlock

START, END = -1.0, math.inf  # places before and after all ops of a pass


class Blocks(NamedTuple):
    """Blocks of one microbatch. In the lists of the passes, `n` allocates block n and `~n` frees it."""

    nbytes: tuple[int, ...] = ()
    forward: tuple[int, ...] = ()
    backward: tuple[int, ...] = ()
    gradients: frozenset[int] = frozenset()  # of parameters, each a block; the pass does not give them back
    received: frozenset[int] = frozenset()  # that the part before made and this one keeps

    @property
    def kept(self) -> frozenset[int]:
        """Taken in the forward pass for the backward pass."""
        given = {~number for number in self.forward if number < 0}
        return frozenset(number for number in self.forward if number >= 0) - given

    @property
    def kept_bytes(self) -> int:
        return _kept_bytes(self)

    @property
    def gradient_bytes(self) -> tuple[int, ...]:
        return tuple(self.nbytes[number] for number in sorted(self.gradients))


@cache
def _kept_bytes(blocks: Blocks) -> int:
    """Asked for each of thousands of splits."""
    return sum(blocks.nbytes[number] for number in blocks.kept)


def blocks_of(memory: Memory, parts: Sequence[tuple[int, bool]], gradients: set[int]) -> dict[int, Blocks]:
    """The blocks of each part. `parts`: of each op, its part and whether it belongs to the backward pass. `gradients`:
    storages that became gradients of parameters."""
    found = _BlocksOfParts(memory, parts, gradients)
    for block in memory.blocks:
        if block.born >= 0 and block.nbytes:
            found.add(block)
    return {part: found.of(part) for part, _ in dict.fromkeys(parts)}


class _TakeOrGive(NamedTuple):
    place: float  # among the ops of the pass
    takes: bool  # what is given back goes first
    number: int


class _BlocksOfParts:
    def __init__(self, memory: Memory, parts: Sequence[tuple[int, bool]], gradients: set[int]) -> None:
        self._parts, self._gradients = parts, gradients
        self._end = next((number for number, (_, is_backward) in enumerate(parts) if is_backward), len(parts))
        self._places: list[int] = []
        ops_of: dict[tuple[int, bool], int] = defaultdict(int)
        for each in parts:
            self._places.append(ops_of[each])
            ops_of[each] += 1
        self._readers = self._find_readers(memory)
        self._nbytes: dict[int, list[int]] = defaultdict(list)
        self._events: dict[tuple[int, bool], list[_TakeOrGive]] = defaultdict(list)
        self._special: dict[tuple[int, str], set[int]] = defaultdict(set)

    def of(self, part: int) -> Blocks:
        forward, backward = (
            tuple(each.number if each.takes else ~each.number for each in sorted(self._events[part, is_backward]))
            for is_backward in (False, True)
        )
        gradients, received = (frozenset(self._special[part, name]) for name in ("gradients", "received"))
        return Blocks(tuple(self._nbytes[part]), forward, backward, gradients, received)

    def _find_readers(self, memory: Memory) -> dict[int, set[int]]:
        """The parts that read a storage in the forward pass."""
        readers: dict[int, set[int]] = defaultdict(set)
        for (part, _), op in zip(self._parts[: self._end], memory.trace.ops, strict=False):
            for spec in op.call.inputs:
                readers[op.storages[spec.storage]].add(part)
        return readers

    def add(self, block: MemoryBlock) -> None:
        maker, is_backward = self._parts[block.born]
        if block.storage in self._gradients:
            number = self._take(maker, True, self._places[block.born], block)
            self._special[maker, "gradients"].add(number)
        elif not is_backward and (block.died is None or block.died > self._end):
            self._keep(block, maker)
        else:
            self._pass_on(block, maker, is_backward)

    def _keep(self, block: MemoryBlock, maker: int) -> None:
        """What one part makes for one other, such as the input of the next layer, is kept by that one."""
        others = self._readers[block.storage] - {maker}
        keeper = others.pop() if len(others) == 1 else maker
        number = self._take(maker, False, self._places[block.born], block)
        if keeper != maker:
            self._give(maker, False, END, number)
            number = self._take(keeper, False, START, block)
            self._special[keeper, "received"].add(number)
        self._give(keeper, True, self._place_in(block.died, keeper, True), number)

    def _pass_on(self, block: MemoryBlock, maker: int, is_backward: bool) -> None:
        """Needed in this pass of its maker, and perhaps of the part that runs next."""
        number = self._take(maker, is_backward, self._places[block.born], block)
        self._give(maker, is_backward, self._place_in(block.died, maker, is_backward), number)
        last = block.died - 1 if block.died is not None else block.born
        taker, taken_backward = self._parts[last]
        if taker != maker and taken_backward == is_backward:
            number = self._take(taker, is_backward, START, block)
            self._give(taker, is_backward, self._place_in(block.died, taker, is_backward), number)

    def _place_in(self, op: int | None, part: int, is_backward: bool) -> float:
        """Where in a pass of the part something is given back that is needed until before this op."""
        if op is None or op >= len(self._parts):
            return END
        if self._parts[op] == (part, is_backward):
            return self._places[op]
        first = self._parts.index((part, is_backward)) if (part, is_backward) in self._parts else 0
        return END if op > first else START

    def _take(self, part: int, is_backward: bool, place: float, block: MemoryBlock) -> int:
        number = len(self._nbytes[part])
        self._nbytes[part].append(block.nbytes)
        self._events[part, is_backward].append(_TakeOrGive(place, True, number))
        return number

    def _give(self, part: int, is_backward: bool, place: float, number: int) -> None:
        self._events[part, is_backward].append(_TakeOrGive(place, False, number))
