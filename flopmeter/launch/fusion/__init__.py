"""What torch.compile with inductor's defaults would make of a list of kernels.

Element-wise ops, casts, copies, random numbers, normalizations and reductions that feed one another become one
kernel; matmuls, convolutions and fused attention stay the libraries' (inductor writes no epilogue into cuBLAS
or cuDNN by default). In order: layout.py says which convolutions run channels-last, atomics.py what is added without a
sort, graphs.py where a compiled graph ends, roles.py what may fuse; parts.py and upcasts.py cut kernels as inductor
schedules them, recompute.py says what backward computes again, inlining.py what each reader computes for itself;
dataflow.py follows who reads what, grouping.py makes the kernels, traffic.py counts their bytes, kernel_costs.py
puts their costs together, and memory.py says what is in memory when.

A fused kernel reads each region from memory once. It writes what another kernel reads (a saved activation in
backward) and what a Python object still holds after the graph has ended: a result of the graph. A value that nobody
reads counts as a result if it outlived the graph's last kernel and the call that made it, so that a program may drop
its output; else it is not computed. FLOPs are conserved but for that: what is computed again counts once, and adds only
the bytes that it reads.

Simplifications against inductor. The bias of an addmm stays with the matmul (inductor may move it into the element-wise
kernel that follows; its bytes are a vector's). Foreach ops on lists of one length become one kernel (inductor splits it
at 250 arguments, as eager PyTorch splits its own); they do not fuse with ops on single tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from flopmeter.costs import make_cost
from flopmeter.launch.fusion.atomics import with_atomic_additions
from flopmeter.launch.fusion.dataflow import flow_of
from flopmeter.launch.fusion.graphs import CompiledRegion, graphs_of, numbered, pass_of, tensors_of, whole_program
from flopmeter.launch.fusion.grouping import Groups
from flopmeter.launch.fusion.inlining import inlined
from flopmeter.launch.fusion.kernel_costs import FusedCosts, padded
from flopmeter.launch.fusion.layout import in_chosen_layout
from flopmeter.launch.fusion.memory import lives_of, made_in_graphs
from flopmeter.launch.fusion.parts import Part, parts_of
from flopmeter.launch.fusion.recompute import with_recomputation
from flopmeter.launch.fusion.roles import OPAQUE
from flopmeter.launch.fusion.traffic import Traffic
from flopmeter.launch.fusion.upcasts import with_upcasts
from flopmeter.launch.fusion.zero_gradients import with_zero_gradients
from flopmeter.records import RANDOM, Cost, Kernel, Life, Op, Region, Trace, VectorWork

__all__ = [
    "CompiledRegion", "NOTE", "fuse", "graphs_of", "numbered", "padded", "pass_of", "tensors_of", "whole_program",
]  # fmt: skip

NOTE = "compiled: fusion by inductor's default rules, and what backward computes again by those of its partitioner"


class Fused(NamedTuple):
    """What torch.compile would launch, and how long each storage lives then (see Launches)."""

    kernels: list[Kernel]
    lives: Mapping[int, Life | None]


def fuse(kernels: list[Kernel], trace: Trace, *, region: CompiledRegion = whole_program) -> Fused:
    """The kernels as torch.compile would launch them, in an order that respects every dependency.

    `kernels` are those of `kernels_of(trace)`; `region` says what is compiled. Kernels of compiled graphs
    carry no views and no module calls: the host runs none. Raises ValueError for kernels of another trace.
    """
    if all(region(kernel.op) is None for kernel in kernels):
        return Fused(kernels, {})  # as what follows would, in two fifths of the time of a report
    kernels = with_atomic_additions(in_chosen_layout(kernels, region), region)
    graphs = graphs_of(kernels, region)
    parts = with_upcasts(parts_of(kernels, graphs, _places(kernels, trace)))
    parts = inlined(with_recomputation(with_zero_gradients(parts, trace), trace), trace)
    flow = flow_of(parts)
    groups = Groups(parts, flow)
    traffic = Traffic(parts, trace, flow, groups)
    costs, draws = FusedCosts(), _draws_of(parts)
    libraries: dict[Cost, Cost] = {}
    fused, order = [], groups.in_order()
    for group in order:
        members = sorted(group, key=lambda member: parts[member].source)
        own = [parts[member] for member in members]
        first = own[0]
        if first.graph is None:
            fused.append(kernels[first.source])
            continue
        ops = tuple({id(op): op for op in (_op(part, kernels) for part in own)}.values())
        if first.role is OPAQUE:
            fused.append(Kernel(ops, padded(kernels[first.source], libraries), 0, 0))
            continue
        drawing = [part.op for part in own if _draws(part)]
        if drawing and first.graph in draws:
            fused.append(_seeds(drawing[0], draws.pop(first.graph)))
        fused.append(Kernel(ops, costs.of(own, traffic.of_group(members), groups.loops_of(members[0])), 0, 0))
    return Fused(fused, lives_of(parts, flow, traffic, order, trace, made_in_graphs(kernels, graphs, trace)))


def _draws(part: Part) -> bool:
    """Whether the part draws random numbers. Backward draws none: what it computes again takes the seed of forward."""
    is_seeded = torch.Tag.nondeterministic_seeded in part.op.call.func.tags
    return is_seeded and part.role is not OPAQUE and part.op.phase == "forward"


def _draws_of(parts: list[Part]) -> dict[int, int]:
    """How many ops of each graph draw random numbers."""
    sources = {(part.graph, part.source) for part in parts if part.graph is not None and _draws(part)}
    return Counter(graph for graph, _ in sources if graph is not None)


def _seeds(op: Op, draws: int) -> Kernel:
    """One kernel makes a graph's seeds, of 64 bits each (torch/_inductor/fx_passes/replace_random.py).

    It stands for the first op that draws, which runs in a later kernel."""
    cost = make_cost(op.call, RANDOM, read=(), written=(Region(None, 8 * draws),), work=VectorWork())
    return Kernel((op,), replace(cost, name="inductor_seeds"), 0, 0)


def _op(part: Part, kernels: list[Kernel]) -> Op:
    """The program's own op, of the pass that the part runs in."""
    op = kernels[part.source].op
    return op if op.phase == part.op.phase else op._replace(phase=part.op.phase)


def _places(kernels: list[Kernel], trace: Trace) -> list[int]:
    """The place in the trace of each kernel's op."""
    place = {id(op): index for index, op in enumerate(trace.ops)}
    try:
        return [place[id(kernel.op)] for kernel in kernels]
    except KeyError:
        raise ValueError("fuse() takes the kernels of the trace that is given with them: kernels_of(trace)") from None
