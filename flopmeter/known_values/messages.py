"""What ranks that run one after another send each other: Python objects, and the values of small integer tensors.

Only one rank runs at a time (distributed/ranks.py). A rank that waits for what another one has not sent yet cannot go
on: `NotSentYet` ends its run, and it starts again once that message is there. Values arrive when the program waits for
the message, not when it asks for it, so that two ranks may both ask before they send. Values of floats are not sent:
they decide nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

UNKNOWN = object()  # the content of a message if no rank knows it
ALL = -1  # the receiver of what a rank sends to its whole group


class Route(NamedTuple):
    """Messages of one route arrive in the order in which they are sent. Ranks are global."""

    group: tuple[int, ...]
    sender: int
    receiver: int
    has_objects: bool = False


class Ticket(NamedTuple):
    """One message: the number `place` of its route, from 0."""

    route: Route
    place: int

    def __str__(self) -> str:
        what = "objects" if self.route.has_objects else "tensor"
        receiver = "all" if self.route.receiver == ALL else f"rank {self.route.receiver}"
        return f"{what} {self.place + 1} from rank {self.route.sender} to {receiver}"


class NotSentYet(BaseException):
    """The rank that runs waits for this message. No program catches it by mistake: it is not an Exception."""

    def __init__(self, ticket: Ticket):
        super().__init__(str(ticket))
        self.ticket = ticket


class Mailbox:
    """The messages among `ranks`, while one of them runs after another. A rank that starts again sends the same.

    `grows`: any other rank joins once a message of it is waited for.
    """

    rank: int  # that runs

    def __init__(self, ranks: Collection[int], *, grows: bool) -> None:
        self._ranks, self._grows = frozenset(ranks), grows
        self._sent: dict[Route, list[Any]] = {}
        self._places: Counter[Route] = Counter()  # in this run of the rank

    def reaches(self, rank: int) -> bool:
        """Whether messages of that rank come through here."""
        return self._grows or rank in self._ranks

    def begin(self, rank: int) -> None:
        """The rank starts, or starts again."""
        self.rank = rank
        self._places.clear()

    def send(self, group: tuple[int, ...], receiver: int, content: Any, has_objects: bool = False) -> None:
        route, place = self._next(Route(group, self.rank, receiver, has_objects))
        self._sent.setdefault(route, [])[place : place + 1] = [content]

    def expect(self, group: tuple[int, ...], sender: int, has_objects: bool = False) -> Ticket:
        """The next message from that rank to this one."""
        return self._next(Route(group, sender, self.rank, has_objects))

    def expect_for_all(self, group: tuple[int, ...], sender: int) -> Ticket:
        """The next objects from that rank to all of the group."""
        return self._next(Route(group, sender, ALL, has_objects=True))

    def holds(self, ticket: Ticket) -> bool:
        return ticket.place < len(self._sent.get(ticket.route, ()))

    def open(self, ticket: Ticket) -> Any:
        """The content. Raises NotSentYet."""
        if not self.holds(ticket):
            raise NotSentYet(ticket)
        return self._sent[ticket.route][ticket.place]

    def _next(self, route: Route) -> Ticket:
        place = self._places[route]
        self._places[route] += 1
        return Ticket(route, place)


mailbox: Mailbox | None = None  # None: only one rank of its world runs
# What happens when a message is waited for, by the handle of its receive.
_deliveries: WeakKeyDictionary[Any, Callable[[], None]] = WeakKeyDictionary()
_last: list[Any] = []  # the handle of the op that runs, which the program does not hold yet


@contextmanager
def exchanged_through(box: Mailbox) -> Iterator[None]:
    """In this context the running rank reads from and writes to the mailbox."""
    global mailbox
    mailbox = box
    try:
        yield
    finally:
        mailbox = None
        _deliveries.clear()
        _last.clear()


def on_wait(handle: Any, deliver: Callable[[], None]) -> None:
    """When the program waits for the message with this handle, `deliver` runs, once."""
    _deliveries[handle] = deliver
    _last[:] = [handle]


def waited_for(handle: Any) -> None:
    """The program waits for that handle. Raises NotSentYet."""
    deliver = _deliveries.pop(handle, None)
    if deliver is not None:
        deliver()
