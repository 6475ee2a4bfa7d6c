"""How the loops of a kernel that inductor writes walk over its inputs."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from flopmeter.compiler.regions import Sizes
from flopmeter.torch_names import compiler as names


def is_inner(node: Any) -> bool:
    """Whether the kernel's reductions combine neighbours in memory: the innermost loop moves each read by one."""
    along = [dep for dep in _reads(node, of_reductions=True) if _moves(dep)]
    return bool(along) and all(dep.stride1_for_last_dim() for dep in along)


def reads_again(node: Any, elements: int, sizes: Sizes) -> bool:
    """Whether what follows the reductions reads a tensor of so many elements, all of the rows, that these have read. A
    loss's gradient does not: it adds up ones and zeros, and reads the logits once."""
    first, then = (
        {dep.name for dep in _reads(node, of_reductions=reduces) if sizes(dep.get_numel()) >= elements}
        for reduces in (True, False)
    )
    return not first.isdisjoint(then)


# Instructions of an element beyond one for each op of a loop's body, of functions that libdevice writes out: a range
# reduction and polynomials. From rotary embeddings with two and three of them (58.7 and 86.8 µs for 16.8 million
# elements on an H100, whose bytes alone take 22) and from GELUs (55 and 62.8 µs for 134 and 151 MB; validation/traces).
_OF_FUNCTIONS = {"sin": 36, "cos": 36, "erf": 30}


def instructions(node: Any, sizes: Sizes) -> int:
    """Of all threads of the kernel, which computes again for each element what is repeated over it: the cosine of a
    position, for each head."""
    total = 0
    for part in node.get_nodes():
        body = getattr(part, "_body", None)
        if body is not None and not _is_online_softmax(part):
            of_element = sum(count * (1 + _OF_FUNCTIONS.get(op, 0)) for op, count in body.op_counts.items())
            elements = prod(sizes(size) for sizes_of_loop in part.get_ranges() for size in sizes_of_loop)
            total += round(of_element * elements * _share_of_elements(body))
    return total


def _share_of_elements(body: Any) -> float:
    """Which share of a loop's loads the innermost loop moves. What only others read is computed once for the row, and
    is taken to be as much of the ops."""
    loads = [body.indexing_exprs[entry.index_name] for entry in body.memory_usage[names.LOADS.value]]
    innermost = list(body.var_ranges)[-1:]
    moved = [index for index in loads if index.free_symbols.intersection(innermost) or _is_looked_up(index)]
    return len(moved) / len(loads) if loads else 1.0


def _is_looked_up(index: Any) -> bool:
    """Whether the place is a number that the loop has read."""
    return any(symbol.name.startswith("indirect") for symbol in index.free_symbols)


def _is_online_softmax(part: Any) -> bool:
    """Whether it is a reduction whose instructions `flopmeter.costs.fused` counts as a whole."""
    return getattr(part.node.data, "reduction_type", None) == "online_softmax_reduce"


def _reads(node: Any, *, of_reductions: bool) -> Iterator[Any]:
    for part in node.get_nodes():
        if bool(part.is_reduction()) == of_reductions:
            yield from (dep for dep in part.read_writes.reads if isinstance(dep, names.MEMORY_DEP.value))


def _moves(dep: Any) -> bool:
    return bool(dep.index.free_symbols.intersection(dep.var_names[-1:]))
