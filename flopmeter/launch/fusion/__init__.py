"""What torch.compile with inductor's defaults would make of a list of kernels.

Element-wise ops, casts, copies, random numbers, normalizations and reductions that feed one another become one
kernel; matmuls, convolutions and fused attention stay the libraries' (inductor writes no epilogue into cuBLAS
or cuDNN by default). In order: layout.py says which convolutions run channels-last, atomics.py what is added without a
sort, graphs.py where a compiled graph ends, roles.py what may fuse; parts.py and upcasts.py cut kernels as inductor
schedules them, recompute.py says what backward computes again, inlining.py what each reader computes for itself;
dataflow.py follows who reads what, grouping.py makes the kernels, traffic.py counts their bytes, and memory.py says
what is in memory when.

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
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil
from typing import NamedTuple

import torch

from flopmeter.costs import make_cost
from flopmeter.costs.fused import flops_of, grid_of, is_held, name_of, slowest_class, vector_work, walk_of
from flopmeter.costs.instructions import OF_REDUCTIONS, of_eager_op
from flopmeter.launch.fusion.atomics import with_atomic_additions
from flopmeter.launch.fusion.dataflow import flow_of
from flopmeter.launch.fusion.graphs import CompiledRegion, graphs_of, numbered, pass_of, tensors_of, whole_program
from flopmeter.launch.fusion.grouping import Groups
from flopmeter.launch.fusion.inlining import inlined
from flopmeter.launch.fusion.layout import in_chosen_layout
from flopmeter.launch.fusion.memory import lives_of, made_in_graphs
from flopmeter.launch.fusion.parts import Part, parts_of
from flopmeter.launch.fusion.recompute import with_recomputation
from flopmeter.launch.fusion.roles import OPAQUE, Loops, splits_of
from flopmeter.launch.fusion.traffic import Traffic
from flopmeter.launch.fusion.upcasts import with_upcasts
from flopmeter.launch.fusion.zero_gradients import with_zero_gradients
from flopmeter.records import RANDOM, Cost, Kernel, Life, MatmulWork, Op, Region, Reread, ThreadGrid, Trace, VectorWork
from flopmeter.records.dtypes import item_bytes_of
from flopmeter.torch_names.operators import aten

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
    costs: dict[tuple[tuple[Cost, ...], int, bool, int, int, Loops | None], Cost] = {}
    libraries: dict[Cost, Cost] = {}
    draws = _draws_of(parts)
    fused, order = [], groups.in_order()
    for group in order:
        members = sorted(group, key=lambda member: parts[member].source)
        first = parts[members[0]]
        ops = tuple({id(op): op for op in (_op(parts[member], kernels) for member in members)}.values())
        if first.graph is None:
            fused.append(kernels[first.source])
            continue
        if first.role is OPAQUE:
            cost = padded(kernels[first.source], libraries)
            fused.append(Kernel(ops, cost, 0, 0))
            continue
        drawing = [parts[member].op for member in members if _draws(parts[member])]
        if drawing and first.graph in draws:
            fused.append(_seeds(drawing[0], draws.pop(first.graph)))
        own = [parts[member] for member in members]
        moved, loops = traffic.of_group(members), groups.loops_of(members[0])
        key = (tuple(part.cost for part in own), _random_numbers(own), _is_softmax(own), *moved, loops)
        if key not in costs:
            costs[key] = _fused_cost(*key)
        fused.append(Kernel(ops, costs[key], 0, 0))
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


def _random_numbers(parts: Iterable[Part]) -> int:
    """How many the kernel draws: an op's numbers stay in registers for all parts that need them."""
    drawn = {part.source: part.cost.work.random_numbers for part in parts if isinstance(part.cost.work, VectorWork)}
    return sum(drawn.values())


def _is_softmax(parts: Iterable[Part]) -> bool:
    """Whether the kernel takes a softmax's maximum and sum; that of a backward pass may only apply them again."""
    return any(part.role.loops is not None and part.cost.name in _SOFTMAXES for part in parts)


_SOFTMAXES = {"_softmax", "_log_softmax", "_safe_softmax"}


def _fused_cost(
    parts: tuple[Cost, ...],
    random_numbers: int,
    is_softmax: bool,
    bytes_read: int,
    bytes_written: int,
    loops: Loops | None,
) -> Cost:
    """One kernel of inductor's for all parts. FLOPs keep their classes, those of the kernel's own class first.

    Traits of eager kernels are dropped: how they walk memory, serial loops, index arithmetic (in a compiled kernel
    sizes are constants).
    """
    main = max(parts, key=lambda part: part.bytes)
    largest = max((region.nbytes for part in parts for region in part.reads), default=0)
    op_class = slowest_class([part.op_class for part in parts]) or main.op_class
    walk, grid = _walk_of(loops, min(largest, bytes_read), bytes_written) if loops else ((), None)
    dtype = max(parts, key=lambda part: (part.flops, part.bytes)).dtype
    accesses = int((bytes_read + bytes_written) / item_bytes_of(dtype))  # each a load or a store
    return replace(
        main,
        name=name_of(part.name for part in parts),
        op_class=op_class,
        flops_by_class=flops_of(op_class, (part.flops_by_class for part in parts)),
        reads=(Region(None, bytes_read),),
        writes=(Region(None, bytes_written),),
        dtype=dtype,
        transcendentals=sum(part.transcendentals for part in parts),
        fused_multiply_add=all(part.fused_multiply_add for part in parts if part.flops),
        access="fused",
        work=vector_work(walk, grid, random_numbers, _instructions(parts, loops, is_softmax=is_softmax) + accesses),
    )


def _instructions(parts: tuple[Cost, ...], loops: Loops | None, *, is_softmax: bool) -> int:
    """The instructions of all threads. A softmax over rows that registers do not hold takes its maximum and sum in one
    pass."""
    of_softmax = 0
    if is_softmax and loops is not None and not is_held(loops.reduced, is_inner=loops.is_inner):
        with_cast = OF_REDUCTIONS["online_softmax_reduce"][1] + 1
        of_softmax = with_cast * loops.kept * loops.reduced
    return of_softmax + sum(of_eager_op(part) for part in parts if not (of_softmax and part.name in _SOFTMAXES))


def _walk_of(loops: Loops, read_bytes: int, bytes_written: int) -> tuple[tuple[Reread, ...], ThreadGrid | None]:
    splits = splits_of(loops)
    rows, reduced = loops.kept * splits, ceil(loops.reduced / splits)
    walk = walk_of(rows, reduced, read_bytes, bytes_written, is_inner=loops.is_inner)
    return walk, grid_of(rows, reduced, is_inner=loops.is_inner)


def padded(kernel: Kernel, known: dict[Cost, Cost]) -> Cost:
    """The kernel stays as it is, but torch/_inductor/fx_passes/pad_mm.py pads matmuls where its benchmark says so."""
    cost, work = kernel.cost, kernel.cost.work
    if kernel.op.packet not in (aten.mm, aten.addmm, aten.bmm) or not isinstance(work, MatmulWork):
        return cost
    if cost not in known:
        known[cost] = replace(cost, work=work._replace(may_pad=True))
    return known[cost]
