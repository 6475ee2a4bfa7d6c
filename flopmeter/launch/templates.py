"""The trace of a program as torch.compile would run it, where eager torch runs something else for a kernel that exists
only compiled: one op in place of those."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import count

from flopmeter.records import Storage, Trace
from flopmeter.records.traces import rearranged


def with_templates(trace: Trace) -> Trace:
    """The trace, which has templates, with these in place of the ops that ran for them."""
    runs = sorted(trace.templates)
    starts = [run.start for run in runs]
    places, ops, calls = [], [], []
    for index, (op, module_calls) in enumerate(zip(trace.ops, trace.module_calls, strict=True)):
        run = runs[max(bisect_right(starts, index) - 1, 0)]
        is_inside = run.start <= index < run.stop
        if not is_inside or index == run.start:
            ops.append(run.op if is_inside else op)
            calls.append(module_calls)
        places.append(len(ops) - 1)
    places.append(len(ops))  # the end of the trace

    def moved(index: int) -> int:
        """Of a storage's birth or death, which in a part of a longer trace may come after the end."""
        return places[min(index, len(trace.ops))] if index >= 0 else index

    def life(number: int, storage: Storage) -> Storage:
        """A storage that only ops within a run used is not made at all: it dies where it is born."""
        born, died = moved(storage.born), None if storage.died is None else moved(storage.died)
        run = runs[max(bisect_right(starts, storage.born) - 1, 0)]
        is_inside = run.start <= storage.born and storage.died is not None and storage.died <= run.stop
        return replace(storage, born=born, died=born if is_inside and number not in run.op.storages else died)

    storages = list(map(life, count(), trace.storages))
    return replace(rearranged(trace, ops, calls, places), storages=storages, templates=[])
