"""How many instructions a GPU runs for the loops of a kernel that inductor writes."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from flopmeter.compiler.regions import Sizes
from flopmeter.costs.fused import is_held
from flopmeter.costs.instructions import OF_OPS, OF_REDUCTIONS, WITHOUT
from flopmeter.records.powers_of_two import power_of_two_from


def instructions(node: Any, reduced: int, sizes: Sizes, *, is_inner: bool) -> int:
    """The instructions of all threads of the kernel. `reduced`: the elements of a row, which a reduction combines.

    A value that is the same for a whole row, or for all rows, is computed once. One that repeats over other dimensions,
    such as the cosine of a position in each head, is computed again for each of them.

    Rows that registers hold are filled up to a power of two. If their elements are not neighbours in memory, a thread
    has one element of each of its rows. It then shares nothing between elements, and combines each row with other
    threads: a shuffle and an addition for each doubling.
    """
    held = is_held(reduced, is_inner=is_inner)
    shares = is_inner or not held
    filled = power_of_two_from(reduced) if held and reduced > 1 else reduced
    combining = 0 if shares else 2 * (filled.bit_length() - 1)
    total = 0
    written: set[str] = set()
    seen: set[str] = set()
    for part in node.get_nodes():
        body = getattr(part, "_body", None)
        if body is None:
            continue
        rows = _row_variables(body, reduced, sizes) if shares else set()
        loop = _CountedLoop(body, rows, written, combining, is_held=held)
        if body.reduce_vars and loop.text in seen:
            continue  # a mean and a variance are two results of one loop
        seen.add(loop.text)
        elements = prod(sizes(size) for sizes_of_loop in part.get_ranges() for size in sizes_of_loop)
        total += elements * loop.instructions()
        written |= set(part.get_buffer_names())
    return total * filled // max(reduced, 1)


def _row_variables(body: Any, reduced: int, sizes: Sizes) -> set[Any]:
    """The loop variables that stay the same along a row; none in a kernel without reductions, which has no rows."""
    if body.reduce_vars:
        return set(body.iter_vars)
    inner, variables = 1, list(body.iter_vars)
    while variables and inner < reduced:
        inner *= sizes(body.var_ranges[variables.pop()])
    return set(variables) if reduced > 1 else set()


class _CountedLoop:
    """One loop of a kernel. `rows`: the variables that stay the same along a row. `written`: the buffers that earlier
    loops wrote, whose elements are still in registers. `combining`: instructions of a reduction to combine threads."""

    def __init__(self, body: Any, rows: set[Any], written: set[str], combining: int, *, is_held: bool):
        self._body, self._rows, self._written, self._is_held = body, rows, written, is_held
        self._combining = combining
        self._columns = {*body.iter_vars, *body.reduce_vars} - rows
        self._symbols: dict[Any, set[Any]] = {}  # what the value of a node depends on

    @property
    def text(self) -> str:
        """The same for loops that compute the same."""
        ops = [(str(node.target), *map(str, node.args[1:])) for node in self._body.root_block.graph.nodes]
        return str([op for op in ops if not op[0].startswith(("store", "getitem"))] + [self._body.indexing_exprs])

    def instructions(self) -> int:
        """The instructions for one element."""
        return sum(self._counts(self._body.root_block.graph, set()))

    def _counts(self, graph: Any, mask: set[Any]) -> Iterator[int]:
        """The instructions of each op of the graph. `mask`: the symbols that decide which elements take part."""
        for node in graph.nodes:
            target = str(node.target)
            of_inputs = (self._symbols.get(each, set()) for each in node.all_input_nodes)
            symbols = mask.union(*of_inputs)
            if target == "get_index":
                symbols |= self._body.indexing_exprs[node.args[0]].free_symbols
            self._symbols[node] = symbols
            if target in self._body.subblocks:
                yield from self._counts(self._body.subblocks[target].graph, symbols)
                self._symbols[node] = symbols | self._rows | self._columns
            elif node.op == "call_method" and self._is_of_element(symbols):
                yield self._of_op(target, node)

    def _is_of_element(self, symbols: set[Any]) -> bool:
        """Whether a value differs along a row and from row to row. A place that was looked up does both."""
        looked_up = symbols - self._rows - self._columns
        return not self._rows or bool(looked_up or (symbols & self._rows and symbols & self._columns))

    def _of_op(self, op: str, node: Any) -> int:
        if op in WITHOUT or (op == "load" and node.args[1] in self._written):
            return 0
        if op == "reduction":
            held, looped = next((OF_REDUCTIONS[each] for each in node.args if each in OF_REDUCTIONS), (1, 1))
            return self._combining + (held if self._is_held else looped)
        return OF_OPS.get(op, 1)
