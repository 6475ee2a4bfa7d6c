"""How many instructions a GPU runs for the loops of a kernel that inductor writes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import Any

from sympy import Expr

from flopmeter.compiler.loops import LoopOrder
from flopmeter.compiler.regions import Sizes
from flopmeter.costs.instructions import OF_OPS, OF_REDUCTIONS, WITHOUT
from flopmeter.records.powers_of_two import power_of_two_from


def instructions(
    parts: Sequence[Any],
    reduced: int,
    sizes: Sizes,
    *,
    is_inner: bool,
    held: bool,
    column_sums: Collection[Any] = (),
) -> int:
    """The instructions of all threads of a kernel with these loops. `reduced`: the elements of a row, which a reduction
    combines. `held`: registers hold the rows. `column_sums`: the loops that add up columns.

    A value that is the same for a whole row, or for all rows, is computed once. One that repeats over other dimensions,
    such as the cosine of a position in each head, is computed again for each of them.

    Rows that registers hold are filled up to a power of two. If their elements are not neighbours in memory, a thread
    has one element of each of its rows. It then shares nothing between elements, and combines each row with other
    threads: a shuffle and an addition for each doubling.
    """
    shares = is_inner or not held
    filled = power_of_two_from(reduced) if held and reduced > 1 else reduced
    combining = 0 if shares else 2 * (filled.bit_length() - 1)
    total, values = 0, _ComputedValues()
    reduces = False
    loops = [part for part in parts if getattr(part, "_body", None) is not None]
    differ = len({part.get_ranges() for part in loops}) > 1
    for part in loops:
        body = part._body
        if not held and reduces != bool(body.reduce_vars):  # another loop over the rows, which computes all again
            values, reduces = _ComputedValues(values.stored), not reduces
        order = LoopOrder.of(body, reduced, sizes, sums_columns=part in column_sums)
        places = order.places() | sizes.symbols if differ else {}
        loop = _CountedLoop(body, order.rows if shares else set(), places, values, combining, is_held=held)
        elements = prod(sizes(size) for sizes_of_loop in part.get_ranges() for size in sizes_of_loop)
        total += elements * loop.instructions()
    return total * filled // max(reduced, 1)


class _ComputedValues:
    """What a kernel has computed: ops that occur again, as in a mean and a variance, are computed once. `stored`: the
    values of buffers that it has written, which are still in registers."""

    def __init__(self, stored: dict[str, object] | None = None):
        self.stored = {} if stored is None else stored
        self._numbers: dict[object, int] = {}
        self._computed: set[object] = set()

    def number_of(self, expression: object) -> int:
        """A number that is equal for equal ops on equal values, which are such numbers too."""
        return self._numbers.setdefault(expression, len(self._numbers))

    def is_new(self, value: object) -> bool:
        if value in self._computed:
            return False
        self._computed.add(value)
        return True


class _CountedLoop:
    """One loop of a kernel. `rows`: the variables that stay the same along a row. `places`: what stands for a variable
    in all loops of the kernel. `combining`: instructions of a reduction to combine threads."""

    def __init__(
        self,
        body: Any,
        rows: set[Any],
        places: dict[Any, Expr],
        values: _ComputedValues,
        combining: int,
        *,
        is_held: bool,
    ):
        self._body, self._rows, self._places, self._values, self._is_held = body, rows, places, values, is_held
        self._combining = combining
        self._columns = {*body.iter_vars, *body.reduce_vars} - rows
        self._symbols: dict[Any, set[Any]] = {}  # what the value of a node depends on
        self._numbers: dict[Any, object] = {}

    def instructions(self) -> int:
        """The instructions for one element."""
        return sum(self._counts(self._body.root_block.graph, set(), None))

    def _counts(self, graph: Any, mask: set[Any], where: object) -> Iterator[int]:
        """The instructions of each op of the graph. `mask`: the symbols that decide which elements take part; `where`:
        the value that decides it."""
        for node in graph.nodes:
            target = str(node.target)
            of_inputs = (self._symbols.get(each, set()) for each in node.all_input_nodes)
            symbols = mask.union(*of_inputs)
            if target == "get_index":
                symbols |= self._body.indexing_exprs[node.args[0]].free_symbols
            self._symbols[node] = symbols
            value = self._numbers[node] = self._value(target, node, where)
            if target in self._body.subblocks:
                yield from self._counts(self._body.subblocks[target].graph, symbols, self._numbers[node.args[0]])
                self._symbols[node] = symbols | self._rows | self._columns
            elif node.op == "call_method" and self._is_of_element(symbols) and self._values.is_new(value):
                yield self._of_op(target, node)

    def _value(self, target: str, node: Any, where: object) -> object:
        """A number that is equal for ops that compute the same value. A load that is masked gives another value."""
        if target == "get_index":
            index = self._body.indexing_exprs[node.args[0]]
            return str(index.xreplace(self._places).expand() if self._places else index)
        if target in self._body.subblocks:
            return node  # of this loop alone
        inputs = tuple(self._numbers.get(each, str(each)) for each in node.args[1:])
        if target.startswith("store"):
            self._values.stored[node.args[1]] = inputs[2]
        if target == "load" and node.args[1] in self._values.stored:
            return self._values.stored[node.args[1]]
        return self._values.number_of((target, *inputs, where if target == "load" else None))

    def _is_of_element(self, symbols: set[Any]) -> bool:
        """Whether a value differs along a row and from row to row. A place that was looked up does both."""
        looked_up = symbols - self._rows - self._columns
        return not self._rows or bool(looked_up or (symbols & self._rows and symbols & self._columns))

    def _of_op(self, op: str, node: Any) -> int:
        if op in WITHOUT or (op == "load" and node.args[1] in self._values.stored) or _is_multiply_add(op, node):
            return 0
        if op == "reduction":
            held, looped = next((OF_REDUCTIONS[each] for each in node.args if each in OF_REDUCTIONS), (1, 1))
            return self._combining + (held if self._is_held else looped)
        return OF_OPS.get(op, 1)


def _is_multiply_add(op: str, node: Any) -> bool:
    """Whether the sum shares the instruction of a product that nothing else needs."""
    is_product = (str(each.target) == "mul" and len(each.users) == 1 for each in node.all_input_nodes)
    return op in ("add", "sub") and any(is_product)
