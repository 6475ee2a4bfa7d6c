"""Peak memory of a trace, from when storages appear and when they are freed."""

from __future__ import annotations

from flopmeter.trace import Trace


def peak_memory_bytes(trace: Trace) -> int:
    """The most bytes that were alive at once on the program's device, in storages that the trace touched.

    What was there before the trace counts from its start. Workspaces inside kernels and the rounding of
    the caching allocator are not included.
    """
    changes: dict[int, int] = {}
    for storage in trace.storages:
        if storage.device == trace.device:
            changes[storage.born] = changes.get(storage.born, 0) + storage.nbytes
            if storage.died is not None:
                changes[storage.died] = changes.get(storage.died, 0) - storage.nbytes
    alive = peak = 0
    for moment in sorted(changes):
        alive += changes[moment]
        peak = max(peak, alive)
    return peak
