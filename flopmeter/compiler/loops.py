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


# Instructions of an element for a function that libdevice writes out (a range reduction and polynomials), with what
# goes with it in the loop. From rotary embeddings with two and three of them (58.7 and 86.8 µs for 16.8 million
# elements on an H100, whose bytes alone take 22) and from GELUs (55 and 62.8 µs for 134 and 151 MB; validation/traces).
_OF_FUNCTIONS = {"sin": 57, "cos": 57, "erf": 44}


def instructions(node: Any, sizes: Sizes) -> int:
    """Of all threads of the kernel for such functions. It computes again for each element what is repeated over it: the
    cosine of a position, for each head."""
    total = 0
    for part in node.get_nodes():
        body = getattr(part, "_body", None)
        if body is not None:
            of_element = sum(body.op_counts[name] * count for name, count in _OF_FUNCTIONS.items())
            total += of_element * prod(sizes(size) for sizes_of_loop in part.get_ranges() for size in sizes_of_loop)
    return total


def _reads(node: Any, *, of_reductions: bool) -> Iterator[Any]:
    for part in node.get_nodes():
        if bool(part.is_reduction()) == of_reductions:
            yield from (dep for dep in part.read_writes.reads if isinstance(dep, names.MEMORY_DEP.value))


def _moves(dep: Any) -> bool:
    return bool(dep.index.free_symbols.intersection(dep.var_names[-1:]))
