"""Zeros for results of a compiled function that get no gradient, such as logits returned with the loss.

Its backward graph takes a gradient for each result that needs one, and adds it to what flows back inside of the
function. For those that the program gives none, autograd makes zeros (`VariableInfo::zeros` in
torch/csrc/autograd/custom_function.cpp).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from flopmeter.launch.fusion.parts import Part, fresh_storage
from flopmeter.launch.fusion.roles import Role, is_pointwise
from flopmeter.launch.fusion.traffic import Lifetimes
from flopmeter.records import ELEMENTWISE, Op, Region, TensorSpec, Trace


class _Result(NamedTuple):
    maker: int
    spec: TensorSpec
    readers: list[Part]


def with_zero_gradients(parts: list[Part], trace: Trace) -> list[Part]:
    """The parts, with these zeros before a backward graph, read where it makes what flows back inside."""
    start: dict[int | None, int] = {}  # of each backward graph
    for place, part in enumerate(parts):
        if part.graph is not None and part.op.phase == "backward":
            start.setdefault(part.graph, place)
    if not start:
        return parts
    changed, before = list(parts), defaultdict[int, list[Part]](list)
    for result in _read_inside_alone(parts, trace):
        modules = {reader.op.module for reader in result.readers}
        for place in range(result.maker + 1, len(parts)):
            part = changed[place]
            if part.graph in start and part.op.module in modules and _makes_gradient(part, result.spec):
                first = start[part.graph]
                zeros, changed[place] = _with_zeros(part, result.spec, parts[first].place)
                before[first].append(zeros)
                break
    return [each for place, part in enumerate(changed) for each in (*before[place], part)]


def _read_inside_alone(parts: list[Part], trace: Trace) -> Iterator[_Result]:
    """The floats that a compiled function returned and that only the function itself has read so far."""
    lifetimes, results = Lifetimes(parts, trace), dict[int, _Result]()
    for place, part in enumerate(parts):
        if part.graph is not None and part.op.phase == "forward" and _function(part.op) is not None:
            for region in part.cost.writes:
                storage = part.op.storages[region.spec.storage] if region.spec else -1
                if region.spec and region.spec.dtype.is_floating_point and lifetimes.is_returned(part, storage):
                    results[storage] = _Result(place, region.spec, [])
    for part in parts if results else ():
        for region in part.cost.reads:
            result = results.get(part.op.storages[region.spec.storage]) if region.spec else None
            if result is not None:
                result.readers.append(part)
    for result in results.values():
        made = parts[result.maker]
        inside = (each.graph == made.graph and _function(each.op) == _function(made.op) for each in result.readers)
        if result.readers and all(inside):
            yield result


def _function(op: Op) -> tuple[int | None, str] | None:
    """The compiled function: the call of one that asks for it, or else the outermost module."""
    outermost = op.module.partition(".")[0]
    return (op.region, outermost) if op.region is not None or outermost else None


def _makes_gradient(part: Part, spec: TensorSpec) -> bool:
    written = (region.spec for region in part.cost.writes if region.spec)
    return is_pointwise(part.role) and any((each.numel, each.dtype) == (spec.numel, spec.dtype) for each in written)


def _with_zeros(reader: Part, spec: TensorSpec, place: int) -> tuple[Part, Part]:
    """The zeros, made before that op of the trace, and the part that adds them."""
    op = reader.op._replace(storages=(*reader.op.storages, fresh_storage()))
    zeros = Region(spec._replace(storage=len(reader.op.storages), offset=0), spec.nbytes)
    cost = replace(
        reader.cost, op_class=ELEMENTWISE, flops_by_class=((ELEMENTWISE, 0),), transcendentals=0, reads=(),
        writes=(zeros,),
    )  # fmt: skip
    made = reader._replace(op=op, cost=cost, role=Role(False, False, elements=spec.numel), place=place)
    return made, reader._replace(op=op, cost=replace(reader.cost, reads=(*reader.cost.reads, zeros)))
