"""What runs at the same time: the streams of a device, and the ranks that send each other messages.

A stream runs what it is given in order. A kernel starts once the host has sent it, its stream is free, what it waits
for has ended, and kernels of other streams leave it some SMs. A message starts when both sides are there, as NCCL's do,
and ends on both at once, and so does a collective on all of its ranks that run here; the messages of a batch are one
kernel, which starts and ends as a whole on its rank. All ranks share one clock, which begins with the step. Kernels
and transfers that run at the same time slow each other down (contention.py).

Approximation: a small message, too, waits for its receiver. (NCCL's send returns once its buffers of a few MB hold the
    message.)
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from flopmeter.timing.contention import Demand, Transfer, finds_place, granted_sms, transfer_rate


class Party(NamedTuple):
    """Who takes part in a collective."""

    group: tuple[int, ...]  # global ranks
    ends: tuple[int, int] | None = None  # of a message: sender and receiver


class HangError(RuntimeError):
    """Ranks that wait for each other for ever."""


class Activity(NamedTuple):
    """A kernel in time."""

    host_seconds: float  # of the host, before it sends it
    seconds: float  # on the device
    blocks_host: bool
    stream: int
    after: tuple[int, ...] = ()  # numbers of works of this rank that have to end before
    batch: int | None = None  # neighbours with the same number are one kernel
    party: Party | None = None  # of a collective or a message
    demand: Demand | Transfer = Demand(0.0, 0.0)


class Stretch(NamedTuple):
    """When an activity ran."""

    sent_seconds: float  # by the host
    free_seconds: float  # its stream had done what came before
    start_seconds: float
    end_seconds: float


class _Queued:
    """What a stream runs as one: a kernel, or a batch of messages."""

    __slots__ = ("free", "is_first", "left", "missing", "rank", "ready", "stream", "works")

    def __init__(self, rank: _Rank, stream: int, works: list[int]):
        self.rank, self.stream, self.works = rank, stream, works
        self.missing = 1  # what it waits for: that the host sends it, and works of other streams
        self.ready = 0.0  # the end of the last of these so far
        self.is_first = False  # of its stream
        self.free = 0.0  # when the stream was free for it
        self.left = len(works)


class _Task:
    """What runs: a kernel, or a collective or message with all of its sides."""

    __slots__ = ("expected", "is_moving", "is_transfer", "left", "moves", "rate", "sides", "since", "version")

    def __init__(self, expected: int = 1) -> None:
        self.expected = expected  # sides that have to be there before it begins
        self.sides: list[tuple[_Queued, int]] = []
        self.left = 0.0  # seconds, were it alone
        self.rate = 1.0
        self.since = 0.0  # the time at which that was left
        self.version = 0  # of its end among the events, which moves with the rate
        self.moves = 0.0  # of a transfer: how long its bytes move, after its latency, were it alone
        self.is_moving = self.is_transfer = False

    def demands(self) -> Iterator[tuple[_Rank, Demand | Transfer]]:
        for entry, number in self.sides:
            yield entry.rank, entry.rank.works[number].demand


class _Rank:
    """The program of one rank, and how far it has come."""

    def __init__(self, number: int, works: Sequence[Activity], lead: float):
        self.number, self.works = number, works
        self.shared: dict[int, _Task] = {}  # with other ranks, by the number of this side's work
        self.kernels: dict[_Task, Demand] = {}  # that run now, in the order of their starts
        self.transfers: set[_Task] = set()
        self.crowd: deque[_Queued] = deque()  # kernels that wait for SMs, in the order of their turns
        self.sent = [0.0] * len(works)
        self.starts: list[float | None] = [None] * len(works)
        self.ends = [0.0] * len(works)
        self.entries: list[_Queued] = []  # of each work
        self.queues: defaultdict[int, deque[_Queued]] = defaultdict(deque)
        self.waiting: defaultdict[int, list[_Queued]] = defaultdict(list)  # for the end of a work
        self.next = 0  # that the host sends
        self.host = -lead  # how far the host is
        entry: _Queued | None = None
        for number, work in enumerate(works):
            if entry is None or work.batch is None or work.batch != works[number - 1].batch:
                entry = _Queued(self, work.stream, [])
                self.queues[work.stream].append(entry)
            entry.works.append(number)
            self.entries.append(entry)
            for other in work.after:
                if self.entries[other] is not entry:
                    self.waiting[other].append(entry)
                    entry.missing += 1
        for entry in self.entries:
            entry.left = len(entry.works)


class _Simulation:
    """Goes from event to event: work that could start, and work that ends."""

    def __init__(self, ranks: Mapping[int, Sequence[Activity]], lead: float, earlier: Mapping[int, Counter[Party]]):
        self._ranks = {number: _Rank(number, works, lead) for number, works in ranks.items()}
        self._earlier = {number: earlier.get(number, Counter()) for number in ranks}
        # When, in which order, what, of which version: an entry may start; a task ends, or its bytes begin to move.
        self._events: list[tuple[float, int, _Queued | _Task, int]] = []
        self._count = 0
        self._pair()

    def _pair(self) -> None:
        """The n-th send between two ranks meets the n-th receive, and the n-th collective of a group is one for all its
        ranks. Those that do not run here are always ready, and so are those whose steps are cut elsewhere: that have
        another number of the group's collectives, or whose side of a message comes before their step or after it."""
        if len(self._ranks) == 1:
            return
        counts = {number: Counter(work.party for work in rank.works) for number, rank in self._ranks.items()}
        expected = {party: self._sides(party, counts) for count in counts.values() for party in count if party}
        tasks: dict[tuple[Party, int], _Task] = {}
        for number, rank in self._ranks.items():
            places = Counter(self._earlier[number])
            for index, work in enumerate(rank.works):
                party = work.party
                if party is not None and expected[party] > 1:
                    place = (party, places[party])
                    places[party] += 1
                    if self._is_in_both_steps(*place, counts):
                        rank.shared[index] = tasks.setdefault(place, _Task(expected[party]))

    def _sides(self, party: Party, counts: Mapping[int, Counter[Party | None]]) -> int:
        """How many ranks that run here take part."""
        if party.ends is not None:
            return 2 if self._ranks.keys() >= {*party.ends} else 1
        here = self._ranks.keys() & {*party.group}
        return len(here) if len({counts[number][party] for number in here}) == 1 else 1

    def _is_in_both_steps(self, party: Party, place: int, counts: Mapping[int, Counter[Party | None]]) -> bool:
        """Whether both ranks have the message in their steps. If as many messages came before either step, a missing
        side is an error."""
        steps = [range(start := self._earlier[end][party], start + counts[end][party]) for end in party.ends or ()]
        return len({step.start for step in steps}) < 2 or all(place in step for step in steps)

    def run(self) -> dict[int, list[Stretch]]:
        for rank in self._ranks.values():
            for queue in rank.queues.values():
                queue[0].is_first = True
            self._send(rank)
        events = self._events
        while events:
            now, _, subject, version = heapq.heappop(events)
            if isinstance(subject, _Queued):
                self._start(subject, now)
            elif version == subject.version:
                self._advance(subject, now)
        self._check()
        return {number: self._spans(rank) for number, rank in self._ranks.items()}

    def _push(self, when: float, subject: _Queued | _Task, version: int = 0) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, subject, version))

    def _send(self, rank: _Rank) -> None:
        """Let the host send activities until it has to wait."""
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

    def _met(self, entry: _Queued, now: float) -> None:
        """One of the things that the entry waits for has happened."""
        entry.missing -= 1
        entry.ready = max(entry.ready, now)
        if not entry.missing and entry.is_first:
            self._push(entry.ready, entry)

    def _start(self, entry: _Queued, now: float) -> None:
        rank, demand = entry.rank, entry.rank.works[entry.works[0]].demand
        if isinstance(demand, Demand) and demand.sms and not finds_place(rank.kernels.values()):
            rank.crowd.append(entry)
            return
        for number in entry.works:
            task = entry.rank.shared.get(number) or _Task()
            task.sides.append((entry, number))
            if len(task.sides) == task.expected:
                self._begin(task, now)

    def _begin(self, task: _Task, now: float) -> None:
        entry, number = task.sides[0]
        work = entry.rank.works[number]
        task.left, task.since = work.seconds, now
        if isinstance(work.demand, Transfer):
            task.is_transfer = True
            task.left, task.moves = work.demand.latency_seconds, work.seconds - work.demand.latency_seconds
            for entry, number in task.sides:
                entry.rank.starts[number] = now
                entry.rank.transfers.add(task)
        else:
            entry.rank.starts[number] = now
            entry.rank.kernels[task] = work.demand
            if entry.rank.transfers or len(entry.rank.kernels) > 1:
                task.rate = self._rate(task)
        self._push(now + task.left / task.rate, task)
        self._share(task, now)

    def _advance(self, task: _Task, now: float) -> None:
        """The task ends; or the latency of a transfer does, and its bytes begin to move."""
        if task.moves and not task.is_moving:
            entry, number = task.sides[0]
            alone = task.since + entry.rank.works[number].seconds  # without the rounding of two steps
            task.is_moving, task.left, task.since = True, task.moves, now
            task.rate = self._rate(task)
            task.version += 1
            self._push(alone if task.rate == 1.0 else now + task.left / task.rate, task, task.version)
            self._share(task, now)
            return
        for entry, _ in task.sides:
            entry.rank.kernels.pop(task, None)
            entry.rank.transfers.discard(task)
        self._share(task, now)
        self._seat(task.sides[0][0].rank, now)
        for entry, number in task.sides:
            self._end(entry, number, now)

    def _seat(self, rank: _Rank, now: float) -> None:
        """Start the kernels that wait for SMs, as far as there are some."""
        while rank.crowd and finds_place(rank.kernels.values()):
            self._start(rank.crowd.popleft(), now)

    def _share(self, changed: _Task, now: float) -> None:
        """Update the rates of all that runs when a task begins, begins to move its bytes, or ends."""
        beside: dict[_Task, None] = {}
        for entry, _ in changed.sides:
            beside.update(dict.fromkeys((*entry.rank.kernels, *entry.rank.transfers)))
        beside.pop(changed, None)
        for task in beside:
            if task.is_transfer and not task.is_moving:
                continue  # a latency does not stretch
            rate = self._rate(task)
            if rate != task.rate:
                task.left = max(0.0, task.left - (now - task.since) * task.rate)
                task.rate, task.since, task.version = rate, now, task.version + 1
                self._push(now + task.left / rate, task, task.version)

    def _rate(self, task: _Task) -> float:
        """The rate of a task: that of its slowest side."""
        return min(_rate_on(rank, task, demand) for rank, demand in task.demands())

    def _end(self, entry: _Queued, number: int, now: float) -> None:
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
                    self._push(max(queue[0].ready, now), queue[0])
        if rank.works[number].blocks_host:
            rank.host = now
            self._send(rank)

    def _spans(self, rank: _Rank) -> list[Stretch]:
        found = []
        for number, entry in enumerate(rank.entries):
            start = rank.starts[number]
            assert start is not None
            found.append(Stretch(rank.sent[number], entry.free, start, rank.ends[number]))
        return found

    def _check(self) -> None:
        """Raises HangError where some work never ran."""
        stuck = []
        for number, rank in self._ranks.items():
            for queue in rank.queues.values():
                for index in queue[0].works if queue else ():
                    party = rank.works[index].party
                    if party is not None and rank.starts[index] is None:
                        stuck.append(f"rank {number} in its {_described(party, number)}")
        if stuck:
            raise HangError(f"the program would hang on GPUs; these wait for ever: {'; '.join(stuck)}")


def _described(party: Party, rank: int) -> str:
    """The error's text for that rank."""
    if party.ends is None:
        return f"collective of {len(party.group)} ranks"
    sender, receiver = party.ends
    return f"message to rank {receiver}" if sender == rank else f"message from rank {sender}"


def _rate_on(rank: _Rank, task: _Task, demand: Demand | Transfer) -> float:
    """How fast the task, which demands this of the rank, runs there among everything that runs now."""
    transfers = [
        (found, other.is_moving)
        for other in rank.transfers
        for owner, found in other.demands()
        if owner is rank and isinstance(found, Transfer)
    ]
    moving = [found for found, is_moving in transfers if is_moving]
    users = Counter(port for found in moving for port in found.ports)
    crowded = sum(found.memory / max(users[port] for port in found.ports) for found in moving)
    shares = granted_sms(rank.kernels.values(), (found for found, _ in transfers))
    granted = dict(zip(rank.kernels, shares, strict=True))
    for other, kernel in rank.kernels.items():
        crowded += kernel.memory * kernel.rate(granted[other], 1.0)
    if isinstance(demand, Transfer):
        return transfer_rate(max(users[port] for port in demand.ports), crowded)
    return demand.rate(granted[task], crowded)


def run_concurrently(
    ranks: Mapping[int, Sequence[Activity]], lead: float = 0.0, earlier: Mapping[int, Counter[Party]] | None = None
) -> dict[int, list[Stretch]]:
    """When the works of each rank run, by global rank. Its host began `lead` seconds before its device was free.
    `earlier`: how many messages each rank had before its works.

    Messages to and from a rank that is not among them start when this side is ready.
    Raises HangError where ranks wait for each other for ever.
    """
    return _Simulation(ranks, lead, earlier or {}).run()
