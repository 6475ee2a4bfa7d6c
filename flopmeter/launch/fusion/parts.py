"""What the stages of fusion hand to one another: the program's kernels, cut into the parts that inductor schedules.

A statistical normalization is two parts or three: the statistics of its rows or channels (a reduction), what is done
with them to each element (element-wise), and in backward the gradients of the weights (sums over the rows). They may
end up in one kernel or in several. A part may also be a copy: what inductor computes again where it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import replace
from itertools import count, groupby
from typing import NamedTuple

import torch

from flopmeter.costs.fused import flops_of
from flopmeter.launch.fusion.roles import OPAQUE, Loops, Role, is_pointwise, role_of, splits_of
from flopmeter.records import ELEMENTWISE, NORMALIZATION, REDUCTION, Cost, Kernel, Op, Region, TensorSpec, VectorWork
from flopmeter.torch_names.operators import aten

MOST_SCRATCH = 16  # tensors that the kernels of one op hand to one another
_PRIVATE = 1 + MOST_SCRATCH + 8  # statistics, scratch, and partial results
PUT_TOGETHER = frozenset(aten.present("cat", "stack"))
_FRESH = count(-(10**9), -1)  # numbers of storages that no trace has, below those of its calls


Picks = tuple[tuple[int, int, "Picks"], ...]
"""Where the bytes of a value lie that its readers want, and which elements these readers compute themselves."""


class Part(NamedTuple):
    """A kernel of the program, a part of one, or a copy."""

    op: Op  # its storages renamed where a copy hands something on
    cost: Cost
    role: Role
    source: int  # the place of its kernel among the program's
    graph: int | None
    place: int  # in the trace, of the op where it runs
    is_inlined: bool = False  # computed in the loops of the next part that is not
    picks: Picks = ()  # of a copy that computes some of the elements: which


def fresh_storage() -> int:
    """A storage for a value that is in memory only if a kernel of the graph reads it there."""
    return next(_FRESH)


def parts_of(kernels: list[Kernel], graphs: list[int | None], places: list[int]) -> list[Part]:
    """The parts of the kernels, in the program's order."""
    made: dict[tuple[Cost, bool], tuple[tuple[Cost, Role], ...]] = {}
    own: dict[int, Op] = {}  # by op: with the storages that its parts hand to one another
    parts: list[Part] = []
    for source, (kernel, graph, place) in enumerate(zip(kernels, graphs, places, strict=True)):
        op, cost, is_eager = kernel.op, kernel.cost, graph is None
        if id(op) not in own:
            own[id(op)] = op._replace(storages=(*op.storages, *(fresh_storage() for _ in range(_PRIVATE))))
        if (cost, is_eager) not in made:
            whole = cost if is_eager else _into_whole(op, cost)
            role, numbered = role_of(op.call, whole), _numbered(whole, len(op.storages))
            into_zeros = role.scatters and len(numbered.writes) > 1
            apart = _into_zeros if into_zeros else _apart
            cut = [(numbered, role)] if is_eager else apart(op, numbered, role)
            made[cost, is_eager] = tuple(stage for part in cut for stage in _stages(op, *part, is_eager))
        parts += [Part(own[id(op)], *part, source, graph, place) for part in made[cost, is_eager]]
    return list(_composed(parts))


def _composed(parts: list[Part]) -> Iterator[Part]:
    """Element-wise kernels that eager PyTorch composes an op of are one part: inductor computes the op at once."""
    made: dict[tuple[Cost, ...], Cost] = {}
    for _, group in groupby(parts, key=lambda part: (part.place, part.graph is None)):
        of_op = list(group)
        of_op = [part for place, part in enumerate(of_op) if not _is_filled_in_vain(part, of_op[place + 1 :])]
        while of_op:
            first, *rest = of_op
            number = 1 + next((at for at, part in enumerate(rest) if not _is_continued(first, part)), len(rest))
            members, of_op = of_op[:number], of_op[number:]
            if number > 1:
                read_later = {region.spec for part in of_op for region in part.cost.reads}
                costs = tuple(part.cost for part in members)
                if costs not in made:
                    made[costs] = _as_one(members, read_later)
                first = members[-1]._replace(cost=made[costs])
            yield first


def _is_filled_in_vain(part: Part, later: list[Part]) -> bool:
    """Whether it only writes zeros that inductor does not need, since a later loop writes all of the result."""
    if part.graph is None or part.cost.reads or part.role is OPAQUE:
        return False
    written = _written(part)
    return any(
        other.role is not OPAQUE
        and not written & {region.spec for region in other.cost.reads}
        and written
        <= {region.spec for region in other.cost.writes if region.spec and region.nbytes == region.spec.nbytes}
        for other in later
    )


def _is_continued(first: Part, second: Part) -> bool:
    same = first.graph is not None and first.role.elements == second.role.elements
    fills = not first.cost.reads and _written(first) == _written(second)  # zeros, and what is copied into them
    both, puts_together = (first, second), first.op.packet in PUT_TOGETHER
    one_loop = fills or puts_together or all(part.cost.op_class == ELEMENTWISE for part in both)
    return same and one_loop and all(is_pointwise(part.role) for part in both)


def _written(part: Part) -> set[TensorSpec | None]:
    return {region.spec for region in part.cost.writes}


def _as_one(parts: list[Part], read_later: Set[TensorSpec | None]) -> Cost:
    """What the parts read from outside, and write of the op's results or for a later part of it."""
    call, last = parts[0].op.call, parts[-1].cost
    kept = {spec.storage for spec in (*call.inputs, *call.outputs)}
    reads: dict[Region, None] = {}
    written: dict[TensorSpec | None, Region] = {}
    for part in parts:
        reads |= {region: None for region in part.cost.reads if region.spec not in written}
        for region in part.cost.writes:
            before = written.get(region.spec, region)
            written[region.spec] = max(before, region, key=lambda each: each.nbytes)
    return replace(
        last,
        reads=tuple(reads),
        writes=tuple(w for spec, w in written.items() if spec is None or spec.storage in kept or spec in read_later),
        flops_by_class=flops_of(last.op_class, (part.cost.flops_by_class for part in parts)),
        transcendentals=sum(part.cost.transcendentals for part in parts),
    )


def _into_whole(op: Op, cost: Cost) -> Cost:
    """One loop over the whole result of a concatenation, where eager kernels write the part of one input each."""
    if op.packet not in PUT_TOGETHER:
        return cost
    return replace(cost, writes=tuple(Region(spec, spec.nbytes) for spec in op.call.outputs))


def _numbered(cost: Cost, storages: int) -> Cost:
    """The kernel with its scratch numbered as further storages of the op, after the one for statistics."""

    def region(each: Region) -> Region:
        if each.spec is None or each.spec.storage >= 0:
            return each
        return each._replace(spec=each.spec._replace(storage=storages - each.spec.storage))

    regions = (*cost.reads, *cost.writes)
    if all(each.spec is None or each.spec.storage >= 0 for each in regions):
        return cost
    return replace(cost, reads=tuple(map(region, cost.reads)), writes=tuple(map(region, cost.writes)))


def _apart(op: Op, cost: Cost, role: Role) -> Iterable[tuple[Cost, Role]]:
    """The parts of a normalization that has results for each element; other kernels are one part."""
    x = op.call.inputs[0] if op.call.inputs else None
    large = tuple(region for region in cost.writes if x and region.spec and region.spec.numel >= x.numel)
    if x is None or role.loops is None or cost.op_class != NORMALIZATION or not large:
        yield cost, role
        return
    kept = role.loops.kept
    spec = TensorSpec((kept,), (1,), torch.float32, len(op.storages), 0, x.device)
    statistics = Region(spec, spec.nbytes)
    small = [region for region in cost.writes if region not in large]
    of_weights = [each for each in small if role.loops.is_inner and each.spec and each.spec.numel != kept]
    sums = tuple(region for region in small if region not in of_weights)
    main = replace(cost, writes=(statistics, *sums), work=VectorWork(()))
    yield main, Role(True, True, role.loops, kept)
    silent = replace(cost, op_class=ELEMENTWISE, flops_by_class=((ELEMENTWISE, 0),), transcendentals=0)
    if of_weights:
        columns = max(region.spec.numel for region in of_weights if region.spec)
        loops = Loops(columns, x.numel // max(columns, 1), False, False)
        sums_of_columns = replace(silent, op_class=REDUCTION, writes=tuple(of_weights), work=VectorWork(()))
        yield sums_of_columns, Role(True, False, loops, columns)
    yield (
        replace(silent, reads=(*cost.reads, statistics), writes=large),
        Role(True, True, None, max(region.spec.numel for region in large if region.spec)),
    )


def _into_zeros(op: Op, cost: Cost, role: Role) -> Iterable[tuple[Cost, Role]]:
    """A gradient of a table: zeros, what is added to them, and a cast if the table has 16 bits, since it is added up in
    fp32 (embedding_dense_backward in torch/_refs or torch/_decomp)."""
    whole, named = cost.writes
    assert whole.spec is not None
    narrow = whole.spec
    wide = narrow
    if narrow.dtype.itemsize < torch.float32.itemsize:
        wide = narrow._replace(dtype=torch.float32, storage=len(op.storages) + 1 + MOST_SCRATCH)
    rows = Region(wide, named.nbytes // narrow.dtype.itemsize * wide.dtype.itemsize)
    reads = tuple(rows if each.spec == narrow else each for each in cost.reads)
    pointwise = Role(True, True)
    silent = replace(cost, op_class=ELEMENTWISE, flops_by_class=((ELEMENTWISE, 0),), access=None)
    yield replace(silent, reads=(), writes=(Region(wide, wide.nbytes),)), pointwise
    yield replace(cost, reads=reads, writes=(rows,)), role
    if wide is not narrow:
        yield replace(silent, reads=(Region(wide, wide.nbytes),), writes=(whole,)), pointwise


def _stages(op: Op, cost: Cost, role: Role, is_eager: bool) -> Iterable[tuple[Cost, Role]]:
    """A reduction whose loops are split is two kernels or more: the first makes partial results, and one for each of
    its results adds them up, with what follows."""
    splits = splits_of(role.loops) if role.loops is not None else 1
    if is_eager or role.loops is None or splits == 1:
        yield cost, role
        return
    kept = role.loops.kept
    results = [cost.writes] if cost.op_class == NORMALIZATION else [(region,) for region in cost.writes]
    partials = []
    for number, result in enumerate(results):
        storage = len(op.storages) + 1 + MOST_SCRATCH + number
        shape = (kept, splits, len(result))
        assert result[0].spec is not None
        spec = TensorSpec(
            shape, (splits * len(result), len(result), 1), torch.float32, storage, 0, result[0].spec.device
        )
        partials.append(Region(spec, spec.nbytes))
    yield replace(cost, writes=tuple(partials)), role
    silent = replace(cost, flops_by_class=((cost.op_class, 0),), transcendentals=0, work=VectorWork(()))
    for partial, result in zip(partials, results, strict=True):
        yield replace(silent, reads=(partial,), writes=tuple(result)), Role(True, True, Loops(kept, splits, True), kept)


def operands_of(part: Part) -> Iterator[Part]:
    """The operands of a concatenation, each written to its place by a loop of its own."""
    (result,), dim, at = part.cost.writes, part.op.call.argument("dim"), 0
    assert result.spec is not None
    whole = result.spec
    is_stacked = part.op.packet in aten.present("stack")
    for read in part.cost.reads:
        assert read.spec is not None
        shape = list(whole.shape)
        shape[dim] = 1 if is_stacked else read.spec.shape[dim]
        place = whole._replace(shape=tuple(shape), offset=whole.offset + at * whole.stride[dim])
        at += shape[dim]
        cost = replace(part.cost, reads=(read,), writes=(Region(place, place.nbytes),))
        yield part._replace(cost=cost, role=part.role._replace(joins_consumers=False, elements=place.numel))
