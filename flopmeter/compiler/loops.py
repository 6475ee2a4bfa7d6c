"""How the loops of a kernel that inductor writes walk over its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flopmeter.compiler.regions import Sizes
from flopmeter.torch_names import compiler as names


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
