"""Which elements of each buffer a kernel of inductor's reads and writes, from the indices of its loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch

from flopmeter.known_values import DataDependentError
from flopmeter.torch_names import compiler as names

Bytes = list[tuple[str, int]]
"""By the name of a buffer."""


class Sizes:
    """Turns inductor's expressions into numbers."""

    def __init__(self, symbols: Mapping[Any, int]):
        self._symbols = dict(symbols)

    def __call__(self, expression: Any) -> int:
        """Raises DataDependentError for a size that depends on data."""
        if isinstance(expression, int):
            return expression
        if isinstance(expression, torch.SymInt):
            expression = expression.node.expr
        if self._symbols:
            expression = expression.subs(self._symbols)
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
        accesses = [(part, self._indices(part)) for part in (node.get_nodes() if parts is None else parts)]
        reads = [(dep, count) for part, count in accesses for dep in self._read(part) if dep.name not in inside]
        writes = [(dep, count) for part, count in accesses for dep in part.read_writes.writes if dep.name in kept]
        return self._bytes(reads), self._bytes(writes)

    def _read(self, node: Any) -> Iterator[Any]:
        """What the node reads. The scheduler also lists whole what loops write into, such as a cache, to put them after
        earlier writes: only an atomic addition reads it, where it adds."""
        writes, is_loops = node.read_writes.writes, isinstance(node, names.LOOPS_NODE.value)
        into = {self._base(dep.name) for dep in writes} if is_loops else set()
        for dep in node.read_writes.reads:
            if isinstance(dep, names.STAR_DEP.value) and self._base(dep.name) in into:
                yield from (each.rename({each.name: dep.name}) for each in writes if each.mode == "atomic_add")
            else:
                yield dep

    def _indices(self, node: Any) -> int | None:
        """At most how many indices the node loads: one for each of the integers that it reads, or pair of them. None if
        it reads none, or makes indices of its loops too."""
        deps = [dep for dep in node.read_writes.reads if isinstance(dep, names.MEMORY_DEP.value)]
        counts = [self._elements(dep, None) for dep in deps if self._holds_indices(dep.name)]
        return prod(counts) if counts and not node.read_writes.index_exprs else None

    def _bytes(self, deps: Iterable[tuple[Any, int | None]]) -> Bytes:
        elements: dict[str, dict[Any, int]] = {}
        for dep, indices in deps:
            if isinstance(dep, names.WEAK_DEP.value):
                continue
            parts = elements.setdefault(dep.name, {})
            if isinstance(dep, names.MEMORY_DEP.value):
                index = dep.normalize().index
                parts[index] = max(parts.get(index, 0), self._elements(dep, indices))
            else:
                parts[None] = self._whole(dep.name)
        found: dict[str, int] = {}
        for name, parts in elements.items():
            place = self._base(name)
            nbytes = min(sum(parts.values()), self._whole(name)) * self._item_bytes(name)
            found[place] = min(found.get(place, 0) + nbytes, self._whole(place) * self._item_bytes(place))
        return [(name, nbytes) for name, nbytes in found.items() if nbytes]

    def _elements(self, dep: Any, indices: int | None) -> int:
        """Elements that the loops of one access touch: those over which the index moves, for each index that it looks
        up; all if these are not known."""
        sizes = {var: self._sizes(size) for var, size in dep.ranges.items()}
        moves = dep.index.free_symbols
        if not any(str(symbol).startswith(("tmp", "indirect")) for symbol in moves):
            indices = 1
        every = prod(sizes.values())
        return every if indices is None else min(every, indices * prod(sizes[var] for var in sizes if var in moves))

    def _buffer(self, name: str) -> Any:
        found = self._graph.name_to_buffer.get(name)
        found = self._graph.graph_inputs.get(name) if found is None else found
        if isinstance(found, names.IR.owner.MutationOutput):  # a name for what a launch has written to
            real = self._base(name)
            return None if real == name else self._buffer(real)
        return found if hasattr(found, "get_size") else None

    def _whole(self, name: str) -> int:
        if name in self._graph.constants:
            return int(self._graph.constants[name].numel())
        try:
            buffer = self._buffer(name)
            return 0 if buffer is None else prod(map(self._sizes, buffer.get_size()))
        except NotImplementedError:  # several results, or none
            return 0

    def _holds_indices(self, name: str) -> bool:
        return getattr(self._buffer(name), "dtype", None) in (torch.int32, torch.int64)

    def _item_bytes(self, name: str) -> int:
        held = self._graph.constants.get(name) if name in self._graph.constants else self._buffer(name)
        try:
            return 0 if held is None else int(held.dtype.itemsize)
        except NotImplementedError:  # several results: each is a buffer of its own
            return 0


def is_needed(buffer: Any, node: Any) -> bool:
    """Whether anyone but the kernel itself reads the buffer."""
    own = {id(part) for part in (node, *node.get_nodes())}
    return any(id(user.node) not in own for user in buffer.users) or bool(buffer.get_mutations())
