"""Parts as the compiler's graph has them: no op overwrites what the graph made, and 16 bits are cast before functions.

Functionalization gives the result of an in-place op memory of its own. A decomposed activation casts its input to fp32
and reads that more than once (`pw_cast_for_opmath` in torch/_decomp/decompositions.py), so that what two kernels share
may be the cast input, of twice the bytes, rather than the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch

from flopmeter.launch.fusion.dataflow import Flow, Value, flow_of
from flopmeter.launch.fusion.parts import Part, fresh_storage
from flopmeter.launch.fusion.roles import is_pointwise
from flopmeter.records import Cost, Region

_Costs = dict[tuple[object, ...], Cost]


def with_upcasts(parts: list[Part]) -> list[Part]:
    """The parts, in-place ones with results of their own, and activations in two: the cast and the function."""
    return list(_cast(_functional(parts)))


def _functional(parts: list[Part]) -> list[Part]:
    flow = flow_of(parts)
    read_as: dict[int, dict[int, int]] = {}  # by part and storage: a number of the value's own
    written_as: dict[int, dict[int, int]] = {}
    for place, part in enumerate(parts):
        old = _overwritten(flow, place) if part.graph is not None and is_pointwise(part.role) else None
        if old is not None and parts[old.kernel].graph == part.graph:
            own = {old.touch.storage: fresh_storage()}
            read_as[place], written_as[old.kernel] = own, own
    costs: _Costs = {}
    return [
        _renumbered(part, read_as.get(place, {}), written_as.get(place, {}), costs) for place, part in enumerate(parts)
    ]


def _overwritten(flow: Flow, place: int) -> Value | None:
    """The value that the part overwrites with its result, and that no other reads."""
    for touch, values in flow.reads[place]:
        if any(written.touch == touch for written in flow.writes[place]) and len(values) == 1:
            (old,) = values
            if old.touch == touch and old.readers == [place] and old.overwritten_by == place:
                return old
    return None


def _renumbered(part: Part, read_as: Mapping[int, int], written_as: Mapping[int, int], costs: _Costs) -> Part:
    """The part with storages numbered behind the others of the op."""
    storages = part.op.storages
    reads, writes = (
        {storages.index(storage): own for storage, own in names.items()} for names in (read_as, written_as)
    )
    if not reads and not writes:
        return part
    key = part.cost, len(storages), tuple(reads), tuple(writes)
    if key not in costs:
        costs[key] = replace(
            part.cost,
            reads=_moved(part.cost.reads, {slot: len(storages) + at for at, slot in enumerate(reads)}),
            writes=_moved(part.cost.writes, {slot: len(storages) + len(reads) + at for at, slot in enumerate(writes)}),
        )
    own = (*storages, *reads.values(), *writes.values())
    return part._replace(op=part.op._replace(storages=own), cost=costs[key])


def _moved(regions: Iterable[Region], slots: Mapping[int, int]) -> tuple[Region, ...]:
    """These regions, moved to other storages of the op."""
    return tuple(
        region._replace(spec=region.spec._replace(storage=slots.get(region.spec.storage, region.spec.storage)))
        if region.spec
        else region
        for region in regions
    )


def _cast(parts: Iterable[Part]) -> Iterator[Part]:
    known: dict[tuple[Cost, int], tuple[Cost, Cost]] = {}
    for part in parts:
        x = _activated(part)
        if x is None:
            yield part
            continue
        key = part.cost, len(part.op.storages)
        if key not in known:
            known[key] = _in_two(part.cost, x, len(part.op.storages))
        op = part.op._replace(storages=(*part.op.storages, fresh_storage()))
        cast, function = known[key]
        yield part._replace(op=op, cost=cast, role=part.role._replace(rereads=False))
        yield part._replace(op=op, cost=function)


def _activated(part: Part) -> Region | None:
    """The 16 bits that an activation, or its gradient, reads more than once: its last operand of full size."""
    if part.graph is None or not part.role.rereads:
        return None
    full = [read for read in part.cost.reads if read.spec and read.spec.numel == part.role.elements]
    is_narrow = full and full[-1].spec and full[-1].spec.dtype.itemsize < torch.float32.itemsize
    return full[-1] if is_narrow else None


def _in_two(cost: Cost, x: Region, storage: int) -> tuple[Cost, Cost]:
    """Two parts: the cast of an operand into another storage of the op, and what is computed from that."""
    assert x.spec is not None
    spec = x.spec._replace(dtype=torch.float32, storage=storage, offset=0)
    wide = Region(spec, spec.nbytes)
    silent = tuple((name, 0) for name, _ in cost.flops_by_class)
    cast = replace(cost, reads=(x,), writes=(wide,), flops_by_class=silent, transcendentals=0)
    return cast, replace(cost, reads=tuple(wide if each == x else each for each in cost.reads))
