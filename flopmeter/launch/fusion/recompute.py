"""What the backward graph computes again from what the forward graph keeps: the min-cut partitioner.

As `solve_min_cut` in torch/_functorch/partitioners.py, on the program's own ops. There the graph is that of decomposed
ops; a few choices come out differently where one op is many there.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator

from flopmeter.launch.fusion.dataflow import Flow, flow_of
from flopmeter.launch.fusion.inlining import Copies
from flopmeter.launch.fusion.parts import Part, fresh_storage
from flopmeter.launch.fusion.roles import is_pointwise
from flopmeter.launch.fusion.traffic import Lifetimes
from flopmeter.records import Trace
from flopmeter.torch_names.operators import aten

NEARER_TO_BACKWARD, MOST_STEPS = 1.1, 100  # what is made a step earlier costs so much more to keep
NOT_MATERIALIZED = 2  # times the bytes: what is kept has to be written as well as read
SMALLER = 4  # times smaller than its inputs: a reduction, which is kept
_KEPT = aten.present("cat", "stack", "embedding", "constant_pad_nd", "index_select")


def with_recomputation(parts: list[Part], trace: Trace) -> list[Part]:
    """The parts, with copies in each backward graph of those that it computes again."""
    if not any(map(_is_backward, parts)):
        return parts
    flow = flow_of(parts)
    again = _computed_again(parts, flow)
    return _Copying(parts, flow, again, trace).made() if again else parts


def _computed_again(parts: list[Part], flow: Flow) -> set[int]:
    forward: defaultdict[int, list[int]] = defaultdict(list)
    for place, part in enumerate(parts):
        if part.graph is not None and part.op.phase == "forward":
            forward[part.graph].append(place)
    return {place for members in forward.values() for place in _Partition(parts, flow, members).again()}


class _Copying:
    """Puts copies of the parts that backward computes again before the parts that read them there."""

    def __init__(self, parts: list[Part], flow: Flow, again: set[int], trace: Trace):
        self._parts, self._flow, self._again = parts, flow, again
        dropped, self._unread = _held_for_backward(parts, flow, again, trace)
        self._private = {place: fresh_storage() for place in dropped}
        self._copied: dict[tuple[int, int | None], int] = {}  # by part and graph: the storage that its copy writes
        self._copies, self._made = Copies(), list[Part]()

    def made(self) -> list[Part]:
        for place, part in enumerate(self._parts):
            if place not in self._unread:
                self._emit(place, part)
        return self._made

    def _emit(self, place: int, reader: Part) -> None:
        """The part for a reader in another graph, after those that it needs there itself."""
        renamed = {}
        for touch, values in self._flow.reads[place]:
            for value in values:
                if value.kernel in self._again and _is_backward(reader):
                    key = (value.kernel, reader.graph)
                    if key not in self._copied:
                        self._copied[key] = fresh_storage()
                        self._emit(value.kernel, reader)
                    renamed[touch.storage] = self._copied[key]
                elif value.kernel in self._private:
                    renamed[touch.storage] = self._private[value.kernel]
        own = self._copied.get((place, reader.graph), self._private.get(place))
        if own is not None:
            (made_here,) = self._flow.writes[place]
            renamed[made_here.touch.storage] = own
        part = self._parts[place]
        self._made.append(self._copies.of(part, reader, renamed) if renamed else part)


def _is_backward(part: Part) -> bool:
    return part.graph is not None and part.op.phase in ("backward", "recompute")


def _held_for_backward(parts: list[Part], flow: Flow, again: set[int], trace: Trace) -> tuple[list[int], set[int]]:
    """The parts that made what only autograd held for the backward graph: it is no longer in memory. And those of them
    whose value their own graph does not read either."""
    last_of = Lifetimes(parts, trace).last_of
    dropped, unread = list[int](), set[int]()
    for place in sorted(again, reverse=True):
        (value,) = flow.writes[place]
        own = [reader for reader in value.readers if parts[reader].graph == parts[place].graph]
        end = max(last_of(parts[reader]) for reader in (place, *value.readers))
        storage = value.touch.storage
        died = trace.storages[storage].died if storage >= 0 else 0
        if died is not None and died <= end + bool(own):
            dropped.append(place)
            if unread.issuperset(own):
                unread.add(place)
    return dropped, unread


Source = tuple[int, int]
"""What a part reads: the part that made it (-1: an input of the graph), and its storage."""


class _Partition:
    """The partition of one forward graph: what is kept for backward and what is computed again."""

    def __init__(self, parts: list[Part], flow: Flow, members: list[int]):
        self._parts, self._flow, self._members = parts, flow, members
        self._inside = set(members)
        self._inputs: dict[int, list[Source]] = {}
        self._users: defaultdict[Source, list[int]] = defaultdict(list)  # in the graph, in order
        self._nbytes: dict[Source, int] = {}
        self._wanted: set[Source] = set()  # by a backward graph
        self._in_memory: set[Source] = set()  # since a library makes or reads it, or it is an input
        last_write = {value.touch.storage: place for place, made in enumerate(flow.writes) for value in made}
        for place in members:
            self._note(place)
        self._candidates = {place for place in members if self._may_run_again(place, last_write)}
        self._candidates -= set(self._far_from_other_uses())

    def again(self) -> Iterator[int]:
        """The parts that backward computes again."""
        import networkx  # torch's partitioner needs it too

        steps = self._steps_to_backward()
        for component in self._components():
            network = networkx.DiGraph()
            network.add_nodes_from(("source", "sink"))
            for source in component:
                maker = source[0]
                nbytes = self._nbytes[source] * (1 if source in self._in_memory else NOT_MATERIALIZED)
                price = nbytes * NEARER_TO_BACKWARD ** min(steps.get(source, MOST_STEPS), MOST_STEPS)
                network.add_edge(maker if maker in self._candidates else "source", source, capacity=price)
                for user in self._users[source]:
                    if user in self._candidates:
                        network.add_edge(source, user)  # without a capacity: infinite
                if source in self._wanted:
                    network.add_edge(source, "sink")
            _, (_, after) = networkx.minimum_cut(network, "source", "sink")
            yield from (place for place in after if isinstance(place, int))

    def _note(self, place: int) -> None:
        for value in self._flow.writes[place]:
            made = (place, value.touch.storage)
            self._nbytes[made] = self._nbytes.get(made, 0) + value.touch.nbytes
            for reader in value.readers:
                if _is_backward(self._parts[reader]):
                    self._wanted.add(made)
                if not (self._may_fuse(place) and self._parts[reader].role.joins_producers):
                    self._in_memory.add(made)
        self._inputs[place] = []
        for touch, values in self._flow.reads[place]:
            makers = [value.kernel for value in values if value.kernel in self._inside] or [-1]
            for source in dict.fromkeys((maker, touch.storage) for maker in makers):
                self._inputs[place].append(source)
                self._users[source].append(place)
                if source[0] < 0:
                    self._nbytes[source] = max(self._nbytes.get(source, 0), touch.nbytes)
                    self._in_memory.add(source)

    def _may_run_again(self, place: int, last_write: dict[int, int]) -> bool:
        part, made, reads = self._parts[place], self._flow.writes[place], self._flow.reads[place]
        if not is_pointwise(part.role) or part.op.packet in _KEPT or len(made) != 1:
            return False
        (value,) = made
        touched = [touch.storage for touch, _ in reads]
        if last_write[value.touch.storage] != place:
            return False
        if any(last_write.get(storage, -1) >= place for storage in touched):  # it is overwritten later
            return False
        for reader in value.readers:
            outside = reader not in self._inside
            if outside and not (_is_backward(self._parts[reader]) and self._parts[reader].role.joins_producers):
                return False
        return SMALLER * value.touch.nbytes >= sum(touch.charged for touch, _ in reads)

    def _far_from_other_uses(self) -> Iterator[int]:
        """Parts that read the same as others do, but before a library's kernel that lies in between, above all in a
        residual stream: they will not share a kernel with these."""
        for source, users in self._users.items():
            if len(users) > 1 and source[0] >= 0 and self._parts[source[0]].role.joins_consumers:
                first = self._first_not_fusible(users)
                yield from (user for user in users if user > first)

    def _may_fuse(self, place: int) -> bool:
        """Whether it may fuse with its readers, as the partitioner sees it, which does not know of split loops."""
        role = self._parts[place].role
        return role.joins_consumers or role.loops is not None

    def _first_not_fusible(self, users: list[int]) -> int:
        last, waiting = users[-1], [(user, True) for user in users]
        seen = {*waiting}
        heapq.heapify(waiting)
        while waiting:
            place, fuses = heapq.heappop(waiting)
            if not fuses:
                return place
            may_fuse = self._may_fuse(place)
            for reader in {reader for value in self._flow.writes[place] for reader in value.readers} & self._inside:
                use = reader, may_fuse and self._parts[reader].role.joins_producers
                if reader <= last and use not in seen:
                    seen.add(use)
                    heapq.heappush(waiting, use)
        return last

    def _steps_to_backward(self) -> dict[Source, int]:
        steps: dict[Source, int] = {}
        for place in reversed(self._members):
            for value in self._flow.writes[place]:
                source = (place, value.touch.storage)
                self._count(steps, source)
        for source in self._users:
            self._count(steps, source)
        return steps

    def _count(self, steps: dict[Source, int], source: Source) -> None:
        after = (
            steps[user, value.touch.storage] + 1
            for user in self._users.get(source, ())
            for value in self._flow.writes[user]
            if (user, value.touch.storage) in steps
        )
        steps[source] = 1 if source in self._wanted else min(after, default=MOST_STEPS)

    def _components(self) -> Iterator[list[Source]]:
        """The connected components of what backward wants and what it can be recomputed from."""
        seen: set[Source] = set()
        for start in self._wanted:
            if start in seen or start[0] not in self._candidates:
                continue
            seen.add(start)
            component, waiting = [], [start]
            while waiting:
                source = waiting.pop()
                component.append(source)
                found = [other for other in self._neighbours(source) if other not in seen]
                seen.update(found)
                waiting += dict.fromkeys(found)
            yield component

    def _neighbours(self, source: Source) -> Iterator[Source]:
        """What its candidate parts read and write: those that use the source, and the one that makes it."""
        near = [user for user in (*self._users[source], source[0]) if user in self._candidates]
        for place in near:
            (value,) = self._flow.writes[place]
            yield from (*self._inputs[place], (place, value.touch.storage))
