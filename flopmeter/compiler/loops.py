"""How the loops of a kernel that inductor writes walk over its inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from sympy import Expr, Integer, Symbol

from flopmeter.compiler.regions import Sizes
from flopmeter.torch_names import compiler as names

_ROW, _COLUMN = Symbol("row"), Symbol("column")


class LoopOrder(NamedTuple):
    """The variables of a loop of a kernel, the outermost first, with their sizes: those that move from row to row, and
    those that move along a row."""

    of_rows: tuple[tuple[Any, int], ...]
    of_columns: tuple[tuple[Any, int], ...]
    reduced: int  # elements of a row

    @classmethod
    def of(cls, body: Any, reduced: int, sizes: Sizes, *, sums_columns: bool) -> LoopOrder:
        """`reduced`: the elements of a row of the kernel. `sums_columns`: what this loop reduces are rows."""
        outer, inner = (
            [(var, sizes(body.var_ranges[var])) for var in variables]
            for variables in (body.iter_vars, body.reduce_vars)
        )
        if inner and not sums_columns:
            return cls(tuple(outer), tuple(inner), reduced)
        along: list[tuple[Any, int]] = []
        while outer and prod(size for _, size in along) < reduced:
            along.insert(0, outer.pop())
        return cls((*outer, *inner), tuple(along), reduced)

    @property
    def rows(self) -> set[Any]:
        """The variables that stay the same along a row; none in a kernel without reductions, which has no rows."""
        return {var for var, _ in self.of_rows} if self.reduced > 1 else set()

    def places(self) -> dict[Any, Expr]:
        """What stands for the variables, so that loops over the same elements in other orders have equal indices."""
        elements = prod(size for _, size in self.of_columns)
        if elements == self.reduced:
            return _counted(self.of_rows, _ROW) | _counted(self.of_columns, _COLUMN)
        return _counted((*self.of_rows, *self.of_columns), self.reduced * _ROW + _COLUMN)


def _counted(variables: Sequence[tuple[Any, int]], count: Expr) -> dict[Any, Expr]:
    """The last variable, by how many steps all of them have made."""
    if not variables:
        return {}
    *outer, (last, size) = variables
    steps, stride = Integer(0), size
    for var, length in reversed(outer):
        steps, stride = steps + stride * var, stride * length
    return {last: count - steps}


def is_inner(node: Any) -> bool:
    """Whether the kernel's reductions combine neighbours in memory: the innermost loop moves each read by one."""
    along = [dep for dep in _reads(node, of_reductions=True) if _moves(dep)]
    return bool(along) and all(dep.stride1_for_last_dim() for dep in along)


def reads_again(node: Any, elements: int, sizes: Sizes) -> bool:
    """Whether the loops after the reductions read a large tensor again that the reductions have read: one with an
    element for each element of all rows. (The gradient of a loss does not: it adds up ones and zeros, and reads the
    logits once.)"""
    first, then = (
        {dep.name for dep in _reads(node, of_reductions=reduces) if sizes(dep.get_numel()) >= elements}
        for reduces in (True, False)
    )
    return not first.isdisjoint(then)


def _reads(node: Any, *, of_reductions: bool) -> Iterator[Any]:
    for part in node.get_nodes():
        if bool(part.is_reduction()) == of_reductions:
            yield from (dep for dep in part.read_writes.reads if isinstance(dep, names.MEMORY_DEP.value))


def _moves(dep: Any) -> bool:
    return bool(dep.index.free_symbols.intersection(dep.var_names[-1:]))
