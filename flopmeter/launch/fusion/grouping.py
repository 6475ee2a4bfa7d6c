"""Which kernels of a graph become one.

Every kernel gets a level: the number of crossings from one fused kernel to the next, or into and out of
a library's kernel, on the longest way to it. Kernels of one level that depend on one another, or that
read the very same values, form a group. Levels never fall along a dependency, and a dependency within a level
stays within a group, so groups cannot wait for each other in a circle.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from flopmeter.launch.fusion.dataflow import Flow
from flopmeter.launch.fusion.parts import Part
from flopmeter.launch.fusion.roles import Loops, Role


class _Edge(NamedTuple):
    """Kernel `after` must run after kernel `before`, or be fused with it."""

    before: int
    after: int
    joins: bool


class Groups:
    """A partition of the kernels, by union-find; a group is named by one of its members."""

    def __init__(self, parts: list[Part], flow: Flow):
        self._parts, self._graphs, self._flow = parts, [part.graph for part in parts], flow
        self._parent = list(range(len(parts)))
        self._level = [0] * len(parts)
        self._loops: list[Loops | None] = [role.loops for role in flow.roles]
        self._updated = [math.inf] * len(parts)  # elements of the smallest input of the graph that is changed
        self._edges: list[_Edge] = []
        self._own = [[place] for place in range(len(parts))]  # with the parts inlined into it
        self._into = list(range(len(parts)))  # the part that one is inlined into
        waiting: list[int] = []
        for kernel, part in enumerate(parts):
            waiting.append(kernel)
            if part.is_inlined:
                continue
            self._own[kernel], waiting = waiting, []
            for inner in self._own[kernel]:
                self._into[inner] = kernel
            if part.graph is not None:
                self._place(kernel)
        self._delay()

    def of(self, kernel: int) -> int:
        """The group that the kernel belongs to."""
        while self._parent[kernel] != kernel:
            self._parent[kernel] = kernel = self._parent[self._parent[kernel]]
        return kernel

    def loops_of(self, kernel: int) -> Loops | None:
        """The loops of the reductions in its group."""
        return self._loops[self.of(kernel)]

    def in_order(self) -> list[list[int]]:
        """The members of each group; groups in an order that respects every dependency, close to the
        program's. Graphs stay as they are, one after another."""
        members: defaultdict[int, list[int]] = defaultdict(list)
        for kernel in range(len(self._parts)):
            members[self.of(kernel)].append(kernel)
        waits = dict.fromkeys(members, 0)
        followers: defaultdict[int, list[int]] = defaultdict(list)
        for before, after, _ in self._edges:
            first, second = self.of(before), self.of(after)
            if first != second:
                followers[first].append(second)
                waits[second] += 1
        last = _last_of_graph(self._graphs)
        ready = [(last[members[group][0]], members[group][0], group) for group, count in waits.items() if not count]
        heapq.heapify(ready)
        ordered = []
        while ready:
            *_, group = heapq.heappop(ready)
            ordered.append(members[group])
            for follower in followers[group]:
                waits[follower] -= 1
                if not waits[follower]:
                    first = members[follower][0]
                    heapq.heappush(ready, (last[first], first, follower))
        return ordered

    def _place(self, kernel: int) -> None:
        """Put a kernel on its level, into one group with the producers that it can join there."""
        edges = self._edges_into(kernel)
        self._edges += edges
        if self._updates_input(kernel):
            self._updated[kernel] = self._flow.roles[kernel].elements
        level = max((self._level[self.of(edge.before)] + (not edge.joins) for edge in edges), default=0)
        partners = {self.of(edge.before) for edge in edges if self._level[self.of(edge.before)] == level}
        if not self._fits(self._flow.roles[kernel], partners):
            level, partners = level + 1, set()
        self._level[kernel] = level
        for peer in {self._into[peer] for own in self._own[kernel] for peer in self._flow.peers[own]} - {kernel}:
            beside = {*partners, self.of(peer)}
            if self._are_alike(kernel, peer) and self._fits(self._flow.roles[kernel], beside):
                partners = beside
        self._unite({*self._own[kernel], *partners}, level)

    def _edges_into(self, kernel: int) -> list[_Edge]:
        role = self._flow.roles[kernel]
        joins: dict[int, bool] = {}
        for own in self._own[kernel]:
            for before in self._flow.befores[own]:
                joins.setdefault(self._into[before], not role.scatters)
            for _, values in self._flow.reads[own]:
                for value in values:
                    can = not role.wants_inlined or value.readers == [own]
                    joins[self._into[value.kernel]] = joins.get(self._into[value.kernel], True) and can
        graph = self._graphs[kernel]
        return [
            _Edge(before, kernel, can and self._can_join(before, kernel))
            for before, can in joins.items()
            if before != kernel and self._graphs[before] == graph
        ]

    def _can_join(self, before: int, after: int) -> bool:
        """Element-wise loops fuse if they are as long as one another; what a longer one reads was inlined before, or is
        in memory (`can_fuse` of SIMDScheduling in torch/_inductor/codegen/simd.py). Reductions have `_fits`."""
        first, second = self._flow.roles[before], self._flow.roles[after]
        return (
            first.joins_consumers
            and second.joins_producers
            and first.lists == second.lists
            and (first.elements == second.elements or {self._loops[self.of(before)], second.loops} != {None})
            and self._parts[before].op.phase == self._parts[after].op.phase
            and self._updated[self.of(before)] >= second.elements
        )

    def _updates_input(self, kernel: int) -> bool:
        """Whether it changes in place what the graph was given, such as an optimizer's step counter. An input is
        written by a loop of its own size, while a value of the graph may be computed again in the larger loop of a
        reader."""
        written = {value.touch.storage for value in self._flow.writes[kernel]}
        return any(
            touch.storage in written and all(self._graphs[value.kernel] != self._graphs[kernel] for value in values)
            for touch, values in self._flow.reads[kernel]
        )

    def _are_alike(self, kernel: int, peer: int) -> bool:
        """Whether two readers of one value can run in the same loops at the same time."""
        role, other = self._flow.roles[kernel], self._flow.roles[peer]
        loops = {role.loops, other.loops, self._loops[self.of(peer)]} - {None}
        return (
            self._graphs[kernel] == self._graphs[peer]
            and self._parts[kernel].op.phase == self._parts[peer].op.phase
            and self._level[kernel] == self._level[self.of(peer)]
            and role.joins_producers
            and other.joins_producers
            and role.lists == other.lists
            and len(loops) <= 1
            and _run_together(role, other)
        )

    def _fits(self, role: Role, groups: Iterable[int]) -> bool:
        """Whether one kernel can run the role's loops and those of the groups."""
        loops = {self._loops[group] for group in groups} - {None}
        if role.loops is None:
            return len(loops) == 0 or (len(loops) == 1 and _iterates(role, loops.pop()))
        return loops <= {role.loops} or (len(loops) == 1 and _adopts(role.loops, loops.pop()))

    def _unite(self, groups: set[int], level: int) -> None:
        roots = {self.of(group) for group in groups}
        root = min(roots)
        self._loops[root] = max((loops for other in roots if (loops := self._loops[other])), default=None)
        self._level[root] = level
        self._updated[root] = min(self._updated[other] for other in roots)
        for other in roots:
            self._parent[other] = root

    def _delay(self) -> None:
        """Move a group that nobody needs before a later level to that level, where it can join its first reader (a mask
        drawn early, the other branch of a residual block): what it wrote stays in registers."""
        edges_of: defaultdict[int, list[_Edge]] = defaultdict(list)
        for edge in self._edges:
            if self.of(edge.before) != self.of(edge.after):
                edges_of[self.of(edge.before)].append(edge)
        for group in sorted(edges_of, key=lambda group: -self._level[group]):
            targets = {edge.after: self.of(edge.after) for edge in edges_of[group]}
            level = min(self._level[target] for target in targets.values())
            first = [edge for edge in edges_of[group] if self._level[targets[edge.after]] == level]
            fits = all(
                edge.joins and self._fits(self._flow.roles[edge.after], {group, targets[edge.after]}) for edge in first
            )
            hosts = {targets[edge.after] for edge in first}
            if fits and len({self._loops[member] for member in (group, *hosts)} - {None}) <= 1:
                self._unite({group, *hosts}, level)


def _adopts(own: Loops, loops: Loops | None) -> bool:
    """Whether the sum of all elements takes partial results of the rows that a producer goes through."""
    return loops is not None and own.kept == 1 and own.reduced == loops.kept * loops.reduced and loops.is_inner


def _run_together(role: Role, other: Role) -> bool:
    """Whether two ops, of which loops of one kind at most are asked, go through the same elements in the same order."""
    loops = role.loops or other.loops
    if loops is None or role.loops == other.loops:
        return loops is not None or role.elements == other.elements
    elements = other.elements if role.loops else role.elements
    return loops.is_inner and elements == loops.kept * loops.reduced


def _iterates(role: Role, loops: Loops | None) -> bool:
    """Whether an element-wise op runs over the rows of the loops, or over all of their elements."""
    return loops is None or role.elements in (loops.kept, loops.kept * loops.reduced)


def _last_of_graph(graphs: list[int | None]) -> list[int]:
    """For each kernel, the last kernel of its run: an eager kernel is a run by itself."""
    last = list(range(len(graphs)))
    for kernel in reversed(range(len(graphs) - 1)):
        if graphs[kernel] is not None and graphs[kernel] == graphs[kernel + 1]:
            last[kernel] = last[kernel + 1]
    return last
