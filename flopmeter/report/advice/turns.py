"""Loops in Python, found in a trace: turns that run the same ops on tensors of the same shapes. None reads what an
earlier one made, but to add to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from flopmeter.records import Op, Trace
from flopmeter.report.advice.rewrite import is_view
from flopmeter.torch_names.operators import aten

LEAST_TURNS = 4  # with two or three, as with the views of a contrastive loss, one may want them apart
_SUMS = (aten.add, aten.add_, aten.index_add_, aten.cat, aten.copy_, aten.index_put_)  # may add to what a turn left
_READ_BY_THE_HOST = (aten._local_scalar_dense, aten.equal)


class LoopTurns(NamedTuple):
    """Turns of a loop in a forward pass: the ops of each, without views, in order."""

    turns: tuple[tuple[int, ...], ...]
    key: Callable[[Op], Hashable]  # alike for the same op of all turns


def loops_of(trace: Trace) -> list[LoopTurns]:
    """Loops around the same modules, and then those around modules that differ by their number."""
    found = list[LoopTurns]()
    for key in (_same_module, _same_but_for_numbers):
        taken = {index for loop in found for index in range(loop.turns[0][0], loop.turns[-1][-1] + 1)}
        for part in _forward_parts(trace, taken):
            found += _loops_in(trace, part, key)
    return found


def _same_module(op: Op) -> Hashable:
    """By shapes, but not by how many tensors there are: the first turn adds to a number, the others to a tensor."""
    read = frozenset((spec.shape, spec.dtype) for spec in op.call.inputs)
    return op.packet, op.module, read, tuple((spec.shape, spec.dtype) for spec in op.call.outputs)


def _same_but_for_numbers(op: Op) -> Hashable:
    return _same_module(op._replace(module=re.sub(r"\d+", "*", re.sub(r" \(\d+\)", "", op.module))))


def _forward_parts(trace: Trace, taken: set[int]) -> Iterator[list[int]]:
    """Ops of a forward pass that follow each other, without views."""
    part = list[int]()
    for index, op in enumerate(trace.ops):
        if op.phase != "forward" or op.region is not None or op.graph is not None or index in taken:
            yield part
            part = []
        elif not is_view(op):
            part.append(index)
    yield part


def _loops_in(trace: Trace, part: Sequence[int], key: Callable[[Op], Hashable]) -> Iterator[LoopTurns]:
    keys = [key(trace.ops[index]) for index in part]
    following = _next_alike(keys)
    tied = dict[int, int]()  # by the length of a turn: up to where turns of that length depend on each other
    start = done = 0  # `done`: where the loop before ended
    while start < len(part):
        length = following[start] - start
        if length <= 0 or tied.get(length, 0) > start:
            start += 1
            continue
        end, alike = start + length, start
        while end < len(part) and keys[end] == keys[end - length]:
            end += 1
        while alike > done and keys[alike - 1] == keys[alike - 1 + length]:  # a turn may begin with two equal ops
            alike -= 1
        is_long = (end - alike) // length + 1 >= LEAST_TURNS  # with a first turn that does more
        for begin in (alike, alike + _between_turns(trace, part[alike:end], length)) if is_long else ():
            turns = [tuple(part[place : place + length]) for place in range(begin, end - length + 1, length)]
            before = range(max(done, begin - 2 * length), begin)
            first = tuple(part[place] for place in _first_turn(keys, before, keys[begin : begin + length]))
            if first and _is_of_loop(trace, first, turns):
                turns.insert(0, first)
            if len(turns) >= LEAST_TURNS and _are_independent(trace, turns):
                yield LoopTurns(tuple(turns), key)
                start = done = begin + (end - begin) // length * length
                break
        else:
            tied[length] = end - length
            start += 1


def _between_turns(trace: Trace, part: Sequence[int], length: int) -> int:
    """How far it is to the first place that nothing crosses: no op after it reads what one before it made, other than
    to add to it. The search may have met the loop in the middle of a turn."""
    made = dict[int, int]()  # by storage: the place of the op that made it
    last_read = [0] * length  # of what the op at each place made
    for place, index in enumerate(part[: 2 * length]):
        op = trace.ops[index]
        for maker in (made[number] for number in op.reads if number in made):
            if op.packet not in _SUMS or trace.ops[part[maker]].packet not in _SUMS:
                last_read[maker] = place
        if place < length:
            made.update((number, place) for number in op.fills)
    reach = accumulate(last_read, max)
    return next((place for place, last in enumerate(reach, 1) if last < place), length)


def _first_turn(keys: Sequence[Hashable], before: range, turn: Sequence[Hashable]) -> list[int]:
    """The places of a turn before these that does more, if there is one: the first turn casts the weights, too."""
    found = list[int]()
    for place in reversed(before):
        if keys[place] == turn[-1 - len(found)]:
            found.append(place)
            if len(found) == len(turn):
                return found[::-1]
    return []


def _is_of_loop(trace: Trace, turn: Sequence[int], turns: Sequence[Sequence[int]]) -> bool:
    """Whether the turn's modules differ from the next turn's where that one's do from those after it: the last head of
    a layer is no turn of the loop over the next layer's heads."""
    if len(turns) < 2:
        return False
    paths = ([trace.ops[index].module.split(".") for index in each] for each in (turn, *turns[:2]))
    parts = (zip(*three, strict=True) for three in zip(*paths, strict=True))
    return all(before == one or one != two for three in parts for before, one, two in three)


def _next_alike(keys: Sequence[Hashable]) -> list[int]:
    """The place of the next equal key; -1 where there is none."""
    places = dict[Hashable, int]()
    following = [-1] * len(keys)
    for place in range(len(keys) - 1, -1, -1):
        following[place] = places.get(keys[place], -1)
        places[keys[place]] = place
    return following


def _are_independent(trace: Trace, turns: Sequence[Sequence[int]]) -> bool:
    """Whether no turn reads what an earlier one made, other than to add to it, and none waits for the host, which could
    decide by it what the next turn does. With weights of its own each turn runs in any case, as the experts of a layer
    do after the host has read which tokens are theirs."""
    has_own_weights = bool(own_weights(trace, turns))
    left = set[int]()  # what earlier turns made, and what follows from that
    for turn in turns:
        made = set[int]()
        for index in turn:
            op = trace.ops[index]
            if _reads_a_value(op) and not has_own_weights:
                return False
            if not left.isdisjoint(op.reads):
                if op.packet not in _SUMS:
                    return False
                left |= op.fills
            made |= op.fills
        left |= made
    return True


def _reads_a_value(op: Op) -> bool:
    """Whether the host waits for it, to read what the device has made."""
    to_the_host = any(spec.device == "cpu" for spec in op.call.outputs)
    return op.packet in _READ_BY_THE_HOST or (to_the_host and any(spec.device != "cpu" for spec in op.call.inputs))


def own_weights(trace: Trace, turns: Sequence[Sequence[int]]) -> set[int]:
    """The storages of weights of which the last two turns read different ones, or different parts."""
    pairs = zip(turns[-1], turns[-2], strict=True)
    others = (differing(trace.ops[one], trace.ops[two]) for one, two in pairs)
    return {number for found in others for number in found if trace.storages[number].role == "parameters"}


def differing(op: Op, other: Op) -> set[int]:
    """The storages of the op's tensors that are others in the other op, or other regions of the same."""
    pairs = zip((*op.inputs, *op.outputs), (*other.inputs, *other.outputs), strict=False)
    return {one.storage for one, two in pairs if (one.storage, one.offset) != (two.storage, two.offset)}
