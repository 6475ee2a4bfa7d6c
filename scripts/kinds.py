"""The kinds of small faults, in the groups that `scripts/mutate.py --kinds` takes."""

from collections.abc import Callable, Iterator

from mutations import (
    clause,
    comparison,
    condition,
    entry,
    exchange,
    keyword,
    logic,
    loop,
    number,
    operand,
    operator,
    result,
    sibling,
    statement,
    string,
    subscript,
    truth,
    variable,
)
from neighbours import accumulation, aggregate, field, member, wrapper
from substitutes import callee, constant, default, dtype, first, handler, link, once
from syntax import Edit, Module

Kind = Callable[[Module], Iterator[Edit]]
_GROUPS: dict[str, tuple[Kind, ...]] = {
    "arithmetic": (number, operator, comparison, logic),
    "structure": (
        keyword, exchange, sibling, variable, subscript, statement, condition, result, entry, string, truth,
    ),
    "portions": (operand, clause, loop),
    "neighbours": (wrapper, field, aggregate, member, accumulation),
    "substitutes": (constant, callee, once, default, first, link, handler, dtype),
}  # fmt: skip
KINDS: dict[str, Kind] = {kind.__name__: kind for kinds in _GROUPS.values() for kind in kinds}
GROUPS = {name: [kind.__name__ for kind in kinds] for name, kinds in _GROUPS.items()}
