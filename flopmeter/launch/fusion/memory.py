"""Which values of a program are in memory once its kernels are fused, and from when to when.

What one kernel makes for itself alone is in none. Inductor frees a buffer, and an activation that autograd kept for it,
behind the last kernel that reads it: so does forward what backward computes again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from flopmeter.launch.fusion.dataflow import Flow, Value
from flopmeter.launch.fusion.parts import Part
from flopmeter.launch.fusion.traffic import Traffic
from flopmeter.records import BEFORE, Kernel, Life, Trace


def lives_of(
    parts: list[Part], flow: Flow, traffic: Traffic, order: list[list[int]], trace: Trace, made: set[int]
) -> Mapping[int, Life | None]:
    """The life of each storage that compiled graphs make; None if it is never in memory.

    made: these storages, as far as the program has them. order: the members of each kernel, in the order of a run.
    """
    ran_at = _places(parts, order)
    kept: defaultdict[int, list[Value]] = defaultdict(list)
    for place, part in enumerate(parts):
        for value in flow.writes[place]:
            storage = value.touch.storage
            if part.graph is not None and (storage < 0 or storage in made) and traffic.is_kept(value):
                kept[storage].append(value)
    lives: dict[int, Life | None] = dict.fromkeys(made)
    for storage, values in kept.items():
        lives[storage] = _life(values, parts, traffic, ran_at, trace)
    return {storage: life for storage, life in lives.items() if not any(each.is_pinned for each in kept[storage])}


def made_in_graphs(kernels: list[Kernel], graphs: list[int | None], trace: Trace) -> set[int]:
    """The storages of the program that a compiled graph writes before anything else does."""
    first: dict[int, int | None] = {}
    for kernel, graph in zip(kernels, graphs, strict=True):
        for region in kernel.cost.writes:
            if region.spec is not None and region.spec.storage >= 0:
                first.setdefault(kernel.op.storages[region.spec.storage], graph)
    resized = {resize.storage for resize in trace.resizes}
    return {
        storage
        for storage, graph in first.items()
        if graph is not None and trace.storages[storage].born != BEFORE and storage not in resized
    }


def _places(parts: list[Part], order: list[list[int]]) -> dict[int, int]:
    """Where among the ops of the trace the kernel of each part runs: the kernels of a graph take the places of their
    first ops, in the order of a run."""
    places = sorted(parts[min(members)].place for members in order)
    return {member: place for place, members in zip(places, order, strict=True) for member in members}


def _life(values: list[Value], parts: list[Part], traffic: Traffic, ran_at: Mapping[int, int], trace: Trace) -> Life:
    """The life of the storage of these values: until its last reader has run and nothing else holds it."""
    storage, lifetimes = values[0].touch.storage, traffic.lifetimes
    used = {place for value in values for place in (value.kernel, *value.readers)}
    born, died = min(ran_at[value.kernel] for value in values), 1 + max(map(ran_at.__getitem__, used))
    if storage < 0:
        return Life(max(value.touch.stop for value in values), born, died)
    known = trace.storages[storage]
    end = 1 + max(lifetimes.last_of(parts[place]) for place in used)  # autograd holds it no longer
    is_held = any(map(lifetimes.outlives_graph, values)) and (known.died is None or known.died > end)
    return Life(known.nbytes, born, known.died if is_held else died)
