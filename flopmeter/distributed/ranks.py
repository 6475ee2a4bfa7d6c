"""Several ranks of one world, which send each other messages, run one after another in this process.

Tensors on meta hold nothing, so a rank can nearly always run alone: what it receives has the shape of its buffer. But
stages of a pipeline also send each other shapes, as Python objects or as small integer tensors. A rank that needs one
that was not sent yet stops there, and runs again from its start once the sender has come so far. So a program must do
the same each time that it runs; a pipeline of torch.distributed.pipelining runs three or four times until the shapes
are known everywhere, and once with its step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from flopmeter.distributed.errors import WorldError
from flopmeter.known_values.messages import Mailbox, NotSentYet, Ticket, exchanged_through

T = TypeVar("T")


def run_ranks(
    ranks: Iterable[int],
    run: Callable[[int], T],
    *,
    grows: bool = False,
    peers: Callable[[T], Iterable[int]] = lambda result: (),
    most: int = sys.maxsize,
    is_failed: Callable[[T], bool] = lambda result: False,
) -> dict[int, T]:
    """What `run(rank)` returns, for each rank in order. It opens the world of its rank itself.

    grows: ranks that the given ones wait for run, too.
    peers: from what a rank returned, others that run, too, until there are `most` ranks.
    is_failed: whether what a rank returned ends them all; those that have ended until then are in the result.

    Raises WorldError where each rank waits for a message that no other one will send.
    """
    waits: dict[int, Ticket | None] = dict.fromkeys(ranks)  # what each rank that has not ended waits for
    results = dict[int, T]()
    mailbox = Mailbox(tuple(waits), grows=grows)
    while waits:
        ready = [rank for rank, ticket in waits.items() if ticket is None or mailbox.holds(ticket)]
        if not ready:
            raise WorldError(_stuck([ticket for ticket in waits.values() if ticket is not None], results))
        for rank in ready:
            mailbox.begin(rank)
            try:
                with exchanged_through(mailbox):
                    results[rank] = run(rank)
            except NotSentYet as missing:
                waits[rank] = missing.ticket
                if missing.ticket.route.sender not in results:
                    waits.setdefault(missing.ticket.route.sender, None)
                continue
            del waits[rank]
            if is_failed(results[rank]):  # others may wait for what it would have sent
                return dict(sorted(results.items()))
            unknown = sorted(set(peers(results[rank])) - results.keys() - waits.keys())
            waits |= dict.fromkeys(unknown[: max(0, most - len(results) - len(waits))])
    return dict(sorted(results.items()))


def _stuck(tickets: list[Ticket], ended: Iterable[int]) -> str:
    waits = "; ".join(f"rank {ticket.route.receiver} waits for {ticket}" for ticket in tickets)
    done = ", ".join(map(str, ended)) or "none"
    return f"the program would hang: {waits}. It is never sent (ranks that ended: {done})"
