"""Memory that CUDA graphs keep: what a capture frees goes back to a pool of its own, which serves nobody else."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, count

from flopmeter.records import Storage, Trace

_HANDLES = count(1)


def graph_pool_handle() -> tuple[int, int]:
    """torch.cuda.graph_pool_handle: it only tells pools apart."""
    return next(_HANDLES), 0


class GraphPool:
    """A pool and the captures that it serves. What is free in it appears in the trace as one storage of the program."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._captures: list[range] = []
        self._free: Storage | None = None

    def keep(self, ops: range) -> None:
        """Marks these ops as captured: they may be replayed."""
        self._captures.append(ops)
        self._measure()

    def give_back(self, ops: range) -> None:
        """Ends the replays of these ops."""
        self._captures.remove(ops)
        self._measure()

    def _measure(self) -> None:
        now, trace = len(self._trace.ops), self._trace
        if self._free is not None:
            self._free.died = now
        changes, alive = Counter[int](), 0
        for storage in trace.storages:
            if storage.device == trace.device and any(storage.born in ops for ops in self._captures):
                changes[storage.born] += storage.nbytes
                changes[now if storage.died is None else storage.died] -= storage.nbytes
                alive += storage.nbytes * (storage.died is None)
        most = max(accumulate(changes[time] for time in sorted(changes)), default=0)
        self._free = Storage(most - alive, trace.device, now, role="temporaries")
        trace.storages.append(self._free)
