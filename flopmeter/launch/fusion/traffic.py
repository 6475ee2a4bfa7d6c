"""Bytes that a group of kernels moves between the device and its memory, once it is one kernel."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from functools import cached_property

from flopmeter.launch.fusion.dataflow import Flow, Touch, Value
from flopmeter.launch.fusion.grouping import Groups
from flopmeter.launch.fusion.parts import Part, Picks
from flopmeter.records import Storage, Trace


class Lifetimes:
    """Which values of a trace have to be in memory when their graph has ended."""

    def __init__(self, parts: list[Part], trace: Trace):
        self._parts, self._storages = parts, trace.storages
        self._last = {part.graph: part.place for part in parts}
        ends = [*(part.place for part in parts), len(trace.ops)][1:]
        backward = [part for part in parts if part.graph is not None and part.op.phase == "backward"]
        starts = {part.graph: part.place for part in reversed(backward)}
        self._backward = sorted((start, self._last[graph]) for graph, start in starts.items())
        self._end = {part.graph: end for part, end in zip(parts, ends, strict=True)}  # and of the next one after it

    def last_of(self, part: Part) -> int:
        """The last op of the part's graph; for an eager kernel its own."""
        return part.place if part.graph is None else self._last[part.graph]

    def outlives_graph(self, value: Value) -> bool:
        """Whether the value has to be in memory when its graph has ended.

        What a Python object holds at that time is a result of the graph. A local variable of the forward function dies
        with the function, before the next graph runs its first op. So does an output that the caller drops; but nobody
        has read that one, and it dies outside of the function. What a benchmark's loop makes is such an output.
        """
        graph = self._parts[value.kernel].graph
        if value.is_pinned:
            return True
        if value.touch.storage < 0:  # handed from part to part
            return False
        if value.overwritten_by is not None and self._parts[value.overwritten_by].graph == graph:
            return False
        died = self._storages[value.touch.storage].died
        if died is not None and self._is_in_backward(died):  # it was held by autograd
            return any(self._parts[reader].graph != graph for reader in value.readers)
        if died is None or died > self._end[graph]:
            return True
        if value.readers or self._storages[value.touch.storage].died_inside:
            return False
        return died > self._last[graph] or self._is_dropped(self._parts[value.kernel])

    @cached_property
    def _read(self) -> set[int]:
        """The storages that some part reads. Most graphs never ask."""
        return {part.op.storages[read.spec.storage] for part in self._parts for read in part.cost.reads if read.spec}

    def _is_dropped(self, maker: Part) -> bool:
        """Whether the program let go of all that the part made, and read none of it."""
        return self._read.isdisjoint(
            maker.op.storages[written.spec.storage] for written in maker.cost.writes if written.spec
        )

    def is_returned(self, maker: Part, storage: int) -> bool:
        """Whether the function that made the storage gave it to the program, and autograd is not all that held it."""
        if storage < 0:  # handed from part to part
            return False
        died = self._storages[storage].died
        is_held = died is None or (died > self.last_of(maker) and not self._is_in_backward(died))
        return is_held and not self._storages[storage].died_inside

    def _is_in_backward(self, place: int) -> bool:
        """Whether a backward graph had begun and had not ended before this op."""
        number = bisect_left(self._backward, (place, -1)) - 1
        return number >= 0 and place <= self._backward[number][1]


class Traffic:
    """The bytes that each fused group reads and writes."""

    def __init__(self, parts: list[Part], trace: Trace, flow: Flow, groups: Groups):
        self._parts, self._storages, self._flow, self._groups = parts, trace.storages, flow, groups
        self.lifetimes = Lifetimes(parts, trace)

    def of_group(self, members: list[int]) -> tuple[int, int]:
        """Bytes read and bytes written by the kernels as one."""
        return self._read(members), self._written(members)

    def _read(self, members: list[int]) -> int:
        """Bytes read: each region once, without what the group itself computed before."""
        inside, seen = self._groups.of(members[0]), set[tuple[Touch, Picks]]()
        charges = _Charges()
        for member in members:
            picks = self._parts[member].picks
            for touch, values in self._flow.reads[member]:
                own = sum(_common(v.touch, touch) for v in values if self._groups.of(v.kernel) == inside)
                if touch.charged == touch.nbytes or picks:  # else two reads of a region may read different parts
                    if (touch, picks) in seen:
                        continue
                    seen.add((touch, picks))
                charges.add(touch, max(0, touch.charged - own))
        return charges.total(self._storages)

    def _written(self, members: list[int]) -> int:
        """Bytes written: values that are needed outside of the group."""
        charges = _Charges()
        for member in members:
            for value in self._flow.writes[member]:
                if self.is_kept(value):
                    charges.add(value.touch, value.touch.charged)
        return charges.total(self._storages)

    def is_kept(self, value: Value) -> bool:
        """Whether someone reads the value from memory, or holds it when its graph has ended."""
        inside = self._groups.of(value.kernel)
        return any(self._groups.of(reader) != inside for reader in value.readers) or self.lifetimes.outlives_graph(
            value
        )


class _Charges:
    """Bytes by storage: a kernel need not move more of one than there is."""

    def __init__(self) -> None:
        self._nbytes: defaultdict[int, int] = defaultdict(int)
        self._extent: defaultdict[int, int] = defaultdict(int)  # for storages that were resized

    def add(self, touch: Touch, nbytes: int) -> None:
        self._nbytes[touch.storage] += nbytes
        self._extent[touch.storage] = max(self._extent[touch.storage], touch.stop)

    def total(self, storages: list[Storage]) -> int:
        extents = {key: end if key < 0 else max(storages[key].nbytes, end) for key, end in self._extent.items()}
        return sum(min(nbytes, extents[key]) for key, nbytes in self._nbytes.items())


def _common(a: Touch, b: Touch) -> int:
    """Bytes that two regions of one storage are sure to share: none if both have gaps and they differ."""
    if (a.start, a.stop, a.nbytes) == (b.start, b.stop, b.nbytes):
        return a.nbytes
    a_is_dense, b_is_dense = a.nbytes == a.stop - a.start, b.nbytes == b.stop - b.start
    if a_is_dense and a.start <= b.start and b.stop <= a.stop:
        return b.nbytes
    if b_is_dense and b.start <= a.start and a.stop <= b.stop:
        return a.nbytes
    return max(0, min(a.stop, b.stop) - max(a.start, b.start)) if a_is_dense and b_is_dense else 0
