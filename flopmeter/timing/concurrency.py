"""What runs at the same time: the streams of a device, and the ranks that send each other messages.

A stream runs its work in order. Work starts once the host has sent it, its stream is free, and what it waits for has
ended. A message starts when both sides are there, as NCCL's do, and ends on both at once; the messages of a batch are
one kernel, which starts and ends as a whole on its rank. All ranks share one clock, which begins with the step.

Approximation: a small message, too, waits for its receiver. (NCCL's send returns once its few MB of buffers hold it.)
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

Route = tuple[tuple[int, ...], int, int]  # the ranks of the group, sender, receiver


class HangError(RuntimeError):
    """Ranks that wait for each other for ever."""


class Work(NamedTuple):
    """A kernel in time."""

    host_seconds: float  # of the host, before it sends it
    seconds: float  # on the device
    blocks_host: bool
    stream: int
    after: tuple[int, ...] = ()  # numbers of works of this rank that have to end before
    batch: int | None = None  # neighbours with the same number are one kernel
    route: Route | None = None  # of a message


class Span(NamedTuple):
    """When the work ran."""

    sent_seconds: float  # by the host
    free_seconds: float  # its stream had done what came before
    start_seconds: float
    end_seconds: float


class _Entry:
    """What a stream runs as one: a kernel, or a batch of messages."""

    __slots__ = ("free", "is_first", "left", "missing", "rank", "ready", "stream", "works")

    def __init__(self, rank: _Rank, stream: int, works: list[int]):
        self.rank, self.stream, self.works = rank, stream, works
        self.missing = 1  # what it waits for: that the host sends it, and works of other streams
        self.ready = 0.0  # the end of the last of these so far
        self.is_first = False  # of its stream
        self.free = 0.0  # when the stream was free for it
        self.left = len(works)


class _Message:
    """One message: the sides that are there."""

    __slots__ = ("sides",)

    def __init__(self) -> None:
        self.sides: list[tuple[_Entry, int]] = []


class _Rank:
    """The program of one rank, and how far it has come."""

    def __init__(self, number: int, works: Sequence[Work]):
        self.number, self.works = number, works
        self.messages: dict[int, _Message] = {}  # by the number of this side's work
        self.sent = [0.0] * len(works)
        self.starts: list[float | None] = [None] * len(works)
        self.ends = [0.0] * len(works)
        self.entries: list[_Entry] = []  # of each work
        self.queues: defaultdict[int, deque[_Entry]] = defaultdict(deque)
        self.waiting: defaultdict[int, list[_Entry]] = defaultdict(list)  # for the end of a work
        self.next = 0  # that the host sends
        self.host = 0.0  # how far the host is
        entry: _Entry | None = None
        for number, work in enumerate(works):
            joins = entry is not None and work.batch is not None and work.batch == works[number - 1].batch
            if entry is None or not joins:
                entry = _Entry(self, work.stream, [])
                self.queues[work.stream].append(entry)
            entry.works.append(number)
            self.entries.append(entry)
            for other in work.after:
                if self.entries[other] is not entry:
                    self.waiting[other].append(entry)
                    entry.missing += 1
        for entry in self.entries:
            entry.left = len(entry.works)


class _Clock:
    """Goes from event to event: work that could start, and work that ends."""

    def __init__(self, ranks: Mapping[int, Sequence[Work]]):
        self._ranks = {number: _Rank(number, works) for number, works in ranks.items()}
        self._events: list[tuple[float, int, _Entry, int]] = []  # when, in which order, what; -1: it could start
        self._count = 0
        self._pair()

    def _pair(self) -> None:
        """The n-th send of a route meets its n-th receive. Of messages with a rank that does not run here there is
        one side only, for which the other one is always ready."""
        messages: dict[tuple[Route, int], _Message] = {}
        for rank in self._ranks.values():
            places: Counter[Route] = Counter()
            for index, work in enumerate(rank.works):
                if work.route is not None and self._ranks.keys() >= {*work.route[1:]}:
                    place = (work.route, places[work.route])
                    places[work.route] += 1
                    rank.messages[index] = messages.setdefault(place, _Message())

    def run(self) -> dict[int, list[Span]]:
        for rank in self._ranks.values():
            for queue in rank.queues.values():
                queue[0].is_first = True
            self._send(rank)
        events = self._events
        while events:
            now, _, entry, work = heapq.heappop(events)
            if work < 0:
                self._start(entry, now)
            else:
                self._end(entry, work, now)
        self._check()
        return {number: self._spans(rank) for number, rank in self._ranks.items()}

    def _push(self, when: float, entry: _Entry, work: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, entry, work))

    def _send(self, rank: _Rank) -> None:
        """The host goes on until it has to wait."""
        works, number = rank.works, rank.next
        while number < len(works):
            work, entry = works[number], rank.entries[number]
            rank.host += work.host_seconds
            rank.sent[number] = rank.host
            number += 1
            if entry.works[-1] == number - 1:
                self._met(entry, rank.host)
            if work.blocks_host:
                break
        rank.next = number

    def _met(self, entry: _Entry, now: float) -> None:
        """One of the things that it waits for has happened."""
        entry.missing -= 1
        entry.ready = max(entry.ready, now)
        if not entry.missing and entry.is_first:
            self._push(max(entry.ready, entry.free), entry, -1)

    def _start(self, entry: _Entry, now: float) -> None:
        for number in entry.works:
            message = entry.rank.messages.get(number)
            if message is None:
                self._run(((entry, number),), now)
            else:
                message.sides.append((entry, number))
                if len(message.sides) == 2:
                    self._run(message.sides, now)

    def _run(self, sides: Sequence[tuple[_Entry, int]], now: float) -> None:
        for entry, number in sides:
            entry.rank.starts[number] = now
            self._push(now + entry.rank.works[number].seconds, entry, number)

    def _end(self, entry: _Entry, number: int, now: float) -> None:
        rank = entry.rank
        rank.ends[number] = now
        for other in rank.waiting.pop(number, ()):
            self._met(other, now)
        entry.left -= 1
        if not entry.left:
            queue = rank.queues[entry.stream]
            queue.popleft()
            if queue:
                queue[0].is_first, queue[0].free = True, now
                if not queue[0].missing:
                    self._push(max(queue[0].ready, now), queue[0], -1)
        if rank.works[number].blocks_host:
            rank.host = now
            self._send(rank)

    def _spans(self, rank: _Rank) -> list[Span]:
        found = []
        for number, entry in enumerate(rank.entries):
            start = rank.starts[number]
            assert start is not None
            found.append(Span(rank.sent[number], entry.free, start, rank.ends[number]))
        return found

    def _check(self) -> None:
        """Raises HangError where some work never ran."""
        stuck = []
        for number, rank in self._ranks.items():
            for queue in rank.queues.values():
                for index in queue[0].works if queue else ():
                    route = rank.works[index].route
                    if route is not None and rank.starts[index] is None:
                        way = f"to rank {route[2]}" if route[1] == number else f"from rank {route[1]}"
                        stuck.append(f"rank {number} in its message {way}")
        if stuck or any(None in rank.starts for rank in self._ranks.values()):
            raise HangError(f"the program would hang on GPUs; these wait for ever: {'; '.join(stuck)}")


def run_concurrently(ranks: Mapping[int, Sequence[Work]]) -> dict[int, list[Span]]:
    """When the works of each rank run, by global rank.

    Messages to and from a rank that is not among them start when this side is ready.
    Raises HangError where ranks wait for each other for ever.
    """
    return _Clock(ranks).run()
