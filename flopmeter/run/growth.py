"""What the steps of a program leave in memory: results in a list, a loss with its graph that is added up."""

from __future__ import annotations

from flopmeter.records import Trace


def grown_bytes(trace: Trace, step: range) -> int:
    """What each step leaves behind, in bytes: made in it, alive when the step after the next one has ended. Of the two
    steps before this one that which leaves less, since what is made once grows no more. Weights, their gradients and
    what optimizers keep do not count."""
    size = len(step)
    return min(
        _left(trace, range(step.start - back * size, step.start - (back - 1) * size), step.stop) for back in (1, 2)
    )


def _left(trace: Trace, made_in: range, end: int) -> int:
    """What these ops made and is alive after op `end` - 1."""
    return sum(
        storage.nbytes
        for storage in trace.storages
        if storage.born in made_in
        and storage.role is None
        and storage.device == trace.device
        and (storage.died is None or storage.died >= end)
    )
