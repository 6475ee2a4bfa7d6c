"""Element-wise values that inductor computes in each loop that reads them, rather than once in memory.

As GraphLowering.run_node of torch/_inductor/graph.py decides it: a value goes to memory if a library reads it, if it is
a result of the graph, if several loops read it and it takes more than four reads to compute, or if it takes more than
eight. The loops of one kernel compute it once.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from flopmeter.launch.fusion.dataflow import Flow, Touch, Value, flow_of
from flopmeter.launch.fusion.parts import PUT_TOGETHER, Part, Picks, fresh_storage, operands_of
from flopmeter.launch.fusion.roles import OPAQUE, is_pointwise
from flopmeter.launch.fusion.traffic import Lifetimes
from flopmeter.records import Cost, Op, Trace

MOST_READS_SHARED = 4  # realize_reads_threshold in torch/_inductor/config.py
MOST_READS = 8  # realize_acc_reads_threshold
MOST_PICKED = 8  # operands of `cat` among which a reader picks: max_complex_pointwise_cat_inputs


def _is_shared(parts: list[Part], flow: Flow, place: int, touch: Touch, values: list[Value], inline: set[int]) -> bool:
    """Whether other kernels read the same operand and compute with it, or would recompute it as this one would."""
    others = {reader for value in values for reader in value.readers} - {place}
    others = {other for other in others if any(read == touch for read, _ in flow.reads[other])}
    return any(is_pointwise(parts[other].role) and not _puts_together(parts[other]) for other in others) or (
        bool(others) and any(value.kernel in inline for value in values)
    )


class _Needs:
    """The parts that a reader computes for itself, and which of their elements it needs."""

    def __init__(self, reader: int):
        self.share = {reader: 1.0}  # of the elements of each part
        self.picks: dict[int, Picks] = {}  # which elements, of a part of which only some are needed
        self.fresh: dict[int, int] = {}  # the storages of the copies, by those of the parts
        self._shares: defaultdict[int, dict[tuple[int, int], float]] = defaultdict(dict)  # by the bytes that are read
        self._wants: defaultdict[int, set[tuple[int, int, Picks]]] = defaultdict(set)
        self._waiting = [-reader]

    def latest_first(self) -> Iterator[int]:
        """The parts, from the last one on, with those that are added meanwhile."""
        while self._waiting:
            place = -heapq.heappop(self._waiting)
            self.picks[place] = tuple(sorted(self._wants[place])) if self.share[place] < 1 else ()
            yield place

    def add(self, place: int, touch: Touch, value: Value) -> None:
        """The part at that place reads the value there."""
        if value.kernel not in self.share:
            heapq.heappush(self._waiting, -value.kernel)
            self.fresh[touch.storage] = fresh_storage()
        wanted, extent = self.share[place] * touch.charged / value.touch.nbytes, (touch.start, touch.stop)
        self._wants[value.kernel].add((*extent, self.picks[place]))
        shares = self._shares[value.kernel]
        shares[extent] = max(shares.get(extent, 0.0), wanted)
        self.share[value.kernel] = min(1.0, sum(shares.values()))


def inlined(parts: list[Part], trace: Trace) -> list[Part]:
    """The parts, with a copy of such a value before each that reads it; what is put together in memory is a part for
    each operand."""
    flow = flow_of(parts)
    lifetimes = Lifetimes(parts, trace)
    inline, dead = _Inlining(parts, flow, lifetimes).places(), _dead(parts, flow, lifetimes, trace)
    copies, made = Copies(), []

    def emit(reader: int, own: Part, reads: list[tuple[Touch, list[Value]]]) -> None:
        """Adds a part, or one for an operand of it, after the copies of what it computes for itself."""
        needs = _Needs(reader)
        for place in needs.latest_first():
            for touch, values in reads if place == reader else flow.reads[place]:
                for value in values:
                    if value.kernel in inline:
                        needs.add(place, touch, value)
        for place in sorted(needs.share):
            copy = copies.of(own if place == reader else parts[place], parts[reader], needs.fresh, needs.share[place])
            made.append(copy._replace(is_inlined=place != reader, picks=needs.picks[place]))

    for place, part in enumerate(parts):
        if place in inline or place in dead:
            continue
        operands = flow.reads[place]
        if _puts_together(part) and _is_stored(parts, flow, place, inline):
            if any(parts[value.kernel].role is OPAQUE for _, values in operands for value in values):
                for operand, read in zip(operands_of(part), operands, strict=True):
                    emit(place, operand, [read])
            else:
                emit(place, part._replace(role=part.role._replace(joins_consumers=False)), operands)
        else:
            emit(place, part, operands)
    return made


def _puts_together(part: Part) -> bool:
    return part.op.packet in PUT_TOGETHER and len(part.cost.reads) > 1


def _is_stored(parts: list[Part], flow: Flow, place: int, inline: set[int]) -> bool:
    """Whether each operand is written to its place in memory, and not picked where the result is read (`cat` in
    torch/_inductor/lowering.py)."""
    part, operands = parts[place], flow.reads[place]
    if part.graph is None or len(operands) != len(part.cost.reads) or part.role is OPAQUE:
        return False
    makers = [[value.kernel for value in values if parts[value.kernel].graph == part.graph] for _, values in operands]
    readers = {reader for value in flow.writes[place] for reader in value.readers}
    is_copied = [all(maker in inline or parts[maker].role is OPAQUE for maker in own) for own in makers]
    picks_pointwise = any(is_copied) and bool(readers) and all(is_pointwise(parts[reader].role) for reader in readers)
    sums = any(parts[maker].role.loops is not None for own in makers for maker in own)
    is_shared = any(_is_shared(parts, flow, place, touch, values, inline) for touch, values in operands)
    few = len(operands) <= MOST_PICKED
    return not (few and not is_shared and (picks_pointwise or (all(is_copied) and not sums)))


class Copies:
    """Copies of parts. The FLOPs of a part count only in the first one."""

    def __init__(self) -> None:
        self._costs: dict[tuple[Cost, bool, float], Cost] = {}
        self._seen: set[tuple[int, Cost]] = set()

    def of(self, part: Part, reader: Part, renamed: Mapping[int, int], share: float = 1.0) -> Part:
        """A part as it runs for the reader, on renamed storages."""
        key = (part.source, part.cost)
        cost, is_again = part.cost, key in self._seen
        self._seen.add(key)
        if is_again or share < 1:
            cost = self._costs.setdefault((cost, is_again, share), _copy(cost, is_again=is_again, share=share))
        role = part.role if share == 1 else part.role._replace(elements=round(part.role.elements * share))
        op = renamed_op(part.op, renamed)._replace(phase=reader.op.phase)
        return Part(op, cost, role, part.source, reader.graph, reader.place)


def renamed_op(op: Op, storages: Mapping[int, int]) -> Op:
    if not any(storage in storages for storage in op.storages):
        return op
    return op._replace(storages=tuple(storages.get(storage, storage) for storage in op.storages))


def _copy(cost: Cost, *, is_again: bool, share: float) -> Cost:
    if share < 1:
        reads, writes = (
            tuple(region._replace(nbytes=round(region.nbytes * share)) for region in regions)
            for regions in (cost.reads, cost.writes)
        )
        cost = replace(cost, reads=reads, writes=writes)
    if is_again:
        silent = tuple((name, 0) for name, _ in cost.flops_by_class)
        cost = replace(cost, flops_by_class=silent, transcendentals=0)
    return cost


def _dead(parts: list[Part], flow: Flow, lifetimes: Lifetimes, trace: Trace) -> set[int]:
    """The places of the parts whose values nobody wants, which torch.compile leaves out (GraphModule's
    eliminate_dead_code). Random numbers are drawn, and data leave the device, whoever wants them. What an op without a
    kernel reads (a wait for a collective) goes on in its result."""
    seen = {part.place for part in parts}
    goes_on = set[int]().union(*(op.reads for place, op in enumerate(trace.ops) if place not in seen))

    def is_dead(value: Value) -> bool:
        is_read = value.touch.storage in goes_on or not dead.issuperset(value.readers)
        return not is_read and not lifetimes.outlives_graph(value)

    dead: set[int] = set()
    for place in reversed(range(len(parts))):
        part, cost = parts[place], parts[place].cost
        may_go = part.graph is not None and part.role.repeats and not cost.link_bytes and cost.collective is None
        if may_go and flow.writes[place] and all(map(is_dead, flow.writes[place])):
            dead.add(place)
    return dead


class _Inlining:
    """Finds the parts that get no loop of their own."""

    def __init__(self, parts: list[Part], flow: Flow, lifetimes: Lifetimes):
        self._parts, self._flow, self._lifetimes = parts, flow, lifetimes
        self._last_write: dict[tuple[int, int | None], int] = {}  # by storage and graph
        self._writers: defaultdict[int, set[int]] = defaultdict(set)
        for place, values in enumerate(flow.writes):
            for value in values:
                self._last_write[value.touch.storage, parts[place].graph] = place
                self._writers[value.touch.storage].add(place)
        self._leaves: dict[int, set[tuple[int, ...]]] = {}  # what a part reads from memory, inlined parts included
        self._found: set[int] = set()

    def places(self) -> set[int]:
        for place in range(len(self._parts)):
            readers = {reader for value in self._flow.writes[place] for reader in value.readers}
            if not self._makes_one_value(place) or not self._only_loops_read(place, readers):
                continue
            self._leaves[place] = leaves = self._read_from_memory(place)
            is_shared = len(readers) > 1 or any(self._parts[reader].role.rereads for reader in readers)
            if len(leaves) <= (MOST_READS_SHARED if is_shared else MOST_READS):
                self._found.add(place)
        return self._found

    def _makes_one_value(self, place: int) -> bool:
        """Whether it makes a value element by element, of inputs that stay as they are, alone in its storage. Further
        values that nobody wants do not count: they are not made."""
        part, made = self._parts[place], self._flow.writes[place]
        if part.graph is None or not is_pointwise(part.role):
            return False
        if _puts_together(part) and _is_stored(self._parts, self._flow, place, self._found):
            return False
        storages = {each.touch.storage for each in made if each.readers or self._lifetimes.outlives_graph(each)}
        return [self._writers[storage] for storage in storages] == [{place}] and all(
            self._last_write.get((touch.storage, part.graph), -1) < place for touch, _ in self._flow.reads[place]
        )

    def _only_loops_read(self, place: int, readers: set[int]) -> bool:
        parts = self._parts
        roles = [parts[reader].role for reader in readers if parts[reader].graph == parts[place].graph]
        join = len(roles) == len(readers) and all(role.joins_producers and role.lists == 0 for role in roles)
        return join and bool(readers) and not any(map(self._lifetimes.outlives_graph, self._flow.writes[place]))

    def _read_from_memory(self, place: int) -> set[tuple[int, ...]]:
        leaves: set[tuple[int, ...]] = set()
        for touch, made in self._flow.reads[place]:
            inner = [value for value in made if value.kernel in self._found]
            if inner:  # of another part of a value, other elements are read
                part = () if touch.nbytes == inner[0].touch.nbytes else (touch.start, touch.stop)
                leaves |= {(*leaf, *part) for leaf in self._leaves[inner[0].kernel]}
            else:
                leaves.add(touch)
        return leaves
