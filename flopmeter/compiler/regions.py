"""Which elements of each buffer a kernel of inductor's reads and writes, from the indices of its loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from sympy import Integer

from flopmeter.costs.fused import bytes_added
from flopmeter.known_values import DataDependentError
from flopmeter.torch_names import compiler as names

Bytes = list[tuple[str, int]]
"""By the name of the buffer that holds them."""


class Sizes:
    """Turns inductor's expressions into numbers."""

    def __init__(self, symbols: Mapping[Any, int]):
        self.symbols = {symbol: Integer(size) for symbol, size in symbols.items()}

    def __call__(self, expression: Any) -> int:
        """Raises DataDependentError for a size that depends on data."""
        if isinstance(expression, int):
            return expression
        if isinstance(expression, torch.SymInt):
            expression = expression.node.expr
        if self.symbols:
            expression = expression.subs(self.symbols)
        try:
            return int(expression)
        except TypeError:
            raise DataDependentError(f"a size of a compiled graph, {expression}") from None


class Regions:
    """The regions of one scheduled graph. `base` names the buffer that owns the memory of a buffer."""

    def __init__(self, graph: Any, sizes: Sizes, base: Callable[[str], str]):
        self._graph, self._sizes, self._base = graph, sizes, base

    def of(self, node: Any, parts: Iterable[Any] | None = None) -> tuple[Bytes, Bytes]:
        """Bytes read and bytes written by a node of the scheduler, or by these parts of it, by the buffer that holds
        them.

        Values that stay inside a fused kernel are not touched. An element that several loops read counts once where
        their indices agree; a lookup counts as many elements as it has indices; no buffer counts more than it holds.
        """
        inside = {buffer.get_name() for buffer in node.get_outputs()}
        kept = {buffer.get_name() for buffer in node.get_outputs() if is_needed(buffer, node)}
        reads, writes = [], []
        for part in node.get_nodes() if parts is None else parts:
            steps, indices = self._steps(part), self._indices(part)
            reads += [(dep, steps, indices) for dep in self._read(part) if dep.name not in inside]
            writes += [(dep, steps, indices) for dep in part.read_writes.writes if dep.name in kept]
        return self._bytes(reads), self._bytes(writes)

    def cached_bytes(self, node: Any) -> int:
        """What the L2 cache gives and takes beyond those bytes: where lookups name elements again, and where threads
        add to elements atomically."""
        found = 0
        for part in node.get_nodes():
            steps = self._steps(part)
            found += sum(
                max(0, steps - self._whole(dep.name)) * self._item_bytes(dep.name)
                for dep in part.read_writes.reads
                if isinstance(dep, names.MEMORY_DEP.value) and looks_up(dep)
            )
            found += sum(bytes_added(steps) for dep in part.read_writes.writes if dep.mode == "atomic_add")
        return found

    def _steps(self, node: Any) -> int:
        """The number of iterations of all loops of the node; 1 where it has none."""
        return prod(self._sizes(size) for loops in node.get_ranges() for size in loops) if _is_loops(node) else 1

    def _read(self, node: Any) -> Iterator[Any]:
        """What the node reads. The scheduler also lists whole what loops write into, such as a cache, to put them after
        earlier writes: only an atomic addition reads it, where it adds."""
        writes = node.read_writes.writes
        into = {self._base(dep.name) for dep in writes} if _is_loops(node) else set()
        for dep in node.read_writes.reads:
            if isinstance(dep, names.STAR_DEP.value) and self._base(dep.name) in into:
                yield from (each.rename({each.name: dep.name}) for each in writes if each.mode == "atomic_add")
            else:
                yield dep

    def _indices(self, node: Any) -> int | None:
        """How many indices the node loads at most: one for each of the integers that it reads, or for each pair. None
        if it reads no integers, or if the counters of its loops are indices too."""
        deps = [dep for dep in node.read_writes.reads if isinstance(dep, names.MEMORY_DEP.value)]
        counts = [self._elements(dep, self._steps(node), None) for dep in deps if self._holds_indices(dep.name)]
        return prod(counts) if counts and not node.read_writes.index_exprs else None

    def _bytes(self, deps: Iterable[tuple[Any, int, int | None]]) -> Bytes:
        elements: dict[str, dict[Any, int]] = {}
        for dep, steps, indices in deps:
            if isinstance(dep, names.WEAK_DEP.value):
                continue
            parts = elements.setdefault(dep.name, {})
            if isinstance(dep, names.MEMORY_DEP.value):
                index = dep.normalize().index
                parts[index] = max(parts.get(index, 0), self._elements(dep, steps, indices))
            else:
                parts[None] = self._whole(dep.name)
        found: dict[str, int] = {}
        for name, parts in elements.items():
            place = self._base(name)
            nbytes = min(sum(parts.values()), self._whole(name)) * self._item_bytes(name)
            found[place] = min(found.get(place, 0) + nbytes, self._whole(place) * self._item_bytes(place))
        return [(name, nbytes) for name, nbytes in found.items() if nbytes]

    def _elements(self, dep: Any, steps: int, indices: int | None) -> int:
        """Elements that the loops of one access touch: those over which its index moves. A lookup touches as many for
        each index; where the number of indices is not known, one for each of the `steps` of all loops."""
        moved = prod(self._sizes(size) for var, size in dep.ranges.items() if var in dep.index.free_symbols)
        if not looks_up(dep):
            return moved
        return steps if indices is None else min(steps, indices * moved)

    def _buffer(self, name: str) -> Any:
        found = self._graph.name_to_buffer.get(name)
        found = self._graph.graph_inputs.get(name) if found is None else found
        if isinstance(found, names.IR.owner.MutationOutput):  # a name for what a launch has written to
            real = self._base(name)
            return None if real == name else self._buffer(real)
        return found if hasattr(found, "get_size") else None

    def _whole(self, name: str) -> int:
        """Elements of a buffer. Where a kernel has written a part of one, others read all of it by the part's name."""
        layout = getattr(self._graph.name_to_buffer.get(name), "layout", None)
        if isinstance(layout, names.IR.owner.MutationLayoutSHOULDREMOVE):
            name = self._base(name)
        if name in self._graph.constants:
            return int(self._graph.constants[name].numel())
        try:
            buffer = self._buffer(name)
            return 0 if buffer is None else prod(map(self._sizes, buffer.get_size()))
        except NotImplementedError:  # several results, or none
            return 0

    def _holds_indices(self, name: str) -> bool:
        return self._dtype(name) in (torch.int32, torch.int64)

    def _item_bytes(self, name: str) -> int:
        dtype = self._dtype(name)
        return 0 if dtype is None else dtype.itemsize

    def _dtype(self, name: str) -> torch.dtype | None:
        held = self._graph.constants.get(name) if name in self._graph.constants else self._buffer(name)
        try:
            found: torch.dtype | None = getattr(held, "dtype", None)
        except NotImplementedError:  # several results, each of which is a buffer of its own, or none
            return None
        return found


def looks_up(dep: Any) -> bool:
    """Whether the place of an access is a value that the kernel has read or computed."""
    return any(str(symbol).startswith(("tmp", "indirect")) for symbol in dep.index.free_symbols)


def _is_loops(node: Any) -> bool:
    return isinstance(node, names.LOOPS_NODE.value)


def is_needed(buffer: Any, node: Any) -> bool:
    """Whether anyone but the kernel itself reads the buffer."""
    own = {id(part) for part in (node, *node.get_nodes())}
    return any(id(user.node) not in own for user in buffer.users) or bool(buffer.get_mutations())
