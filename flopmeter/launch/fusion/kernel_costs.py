"""What a fused kernel costs, from the parts in it and the bytes that it moves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil

from flopmeter.costs.fused import bytes_added, flops_of, grid_of, is_held, name_of, slowest_class, vector_work, walk_of
from flopmeter.costs.instructions import OF_REDUCTIONS, of_eager_op
from flopmeter.launch.fusion.parts import Part
from flopmeter.launch.fusion.roles import Loops, splits_of
from flopmeter.records import INDEXING, Cost, Kernel, MatmulWork, Region, Reread, ThreadGrid, VectorWork
from flopmeter.records.dtypes import item_bytes_of
from flopmeter.torch_names.operators import aten

_SOFTMAXES = {"_softmax", "_log_softmax", "_safe_softmax"}


class FusedCosts:
    """The costs of a program's fused kernels; equal kernels have one."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[Cost, ...], int, bool, int, int, Loops | None], Cost] = {}

    def of(self, parts: Sequence[Part], moved: tuple[int, int], loops: Loops | None) -> Cost:
        """The cost of one kernel of these parts. `moved`: bytes read and bytes written."""
        key = (tuple(part.cost for part in parts), _random_numbers(parts), _is_softmax(parts), *moved, loops)
        if key not in self._known:
            self._known[key] = _fused_cost(*key)
        return self._known[key]


def _random_numbers(parts: Iterable[Part]) -> int:
    """How many the kernel draws: an op's numbers stay in registers for all parts that need them."""
    drawn = {part.source: part.cost.work.random_numbers for part in parts if isinstance(part.cost.work, VectorWork)}
    return sum(drawn.values())


def _is_softmax(parts: Iterable[Part]) -> bool:
    """Whether the kernel takes a softmax's maximum and sum; that of a backward pass may only apply them again."""
    return any(part.role.loops is not None and part.cost.name in _SOFTMAXES for part in parts)


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
        work=vector_work(
            walk,
            grid,
            random_numbers,
            _instructions(parts, loops, is_softmax=is_softmax) + accesses,
            sum(map(_cached_bytes, parts)),
            reduces=loops is not None,
        ),
    )


def _cached_bytes(part: Cost) -> int:
    """What the L2 cache gives and takes for it besides: elements that are looked up again, and atomic additions."""
    looked_up = part.bytes_written - part.reads[0].nbytes if part.access in ("gather", "rows") and part.reads else 0
    return max(0, looked_up) + bytes_added(dict(part.flops_by_class).get(INDEXING, 0))


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
