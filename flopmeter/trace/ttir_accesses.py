"""Which arguments of a Triton kernel are read and written, read off its TTIR: those that the addresses of loads and
stores come from.

torch's own analysis has another name in 2.11, and does not end where many values reach an address in many ways.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flopmeter.records.bodies import ATOMICS
from flopmeter.trace.ttir import Function, Statement, values_in, values_of_jump

_LOADS = ("tt.load", "tt.descriptor_load", "tt.descriptor_gather", "tt.experimental_descriptor_load")
_STORES = ("tt.store", "tt.descriptor_store", "tt.descriptor_scatter", "tt.experimental_descriptor_store")
_UPDATES = (*ATOMICS, "tt.descriptor_reduce")
_INITIAL = re.compile(r"(%[\w$.-]+) = (%[\w$.#-]+)")
_CALLEE = re.compile(r'\s*@"?([^"(]+)')

NamedValue = tuple[str, str]
"""A function and a name in it."""


class Accesses(NamedTuple):
    """The places of arguments that are read and written, and of numbers that addresses are computed with. What an
    atomic operation updates is both."""

    read: frozenset[int]
    written: frozenset[int]


def accesses_of(functions: Mapping[str, Function]) -> Accesses:
    """The arguments that the kernel, which is the first function, and the functions that it calls read and write."""
    origins = _Origins(functions)
    kernel = next(iter(functions))
    places = {(kernel, name): place for place, name in enumerate(functions[kernel].arguments)}
    read, written = (
        frozenset(places[value] for value in origins.of(addresses) if value in places)
        for addresses in (origins.read, origins.written)
    )
    return Accesses(read, written)


class _Origins:
    """Which values each value is computed from, whatever the order: addresses do not depend on what memory holds."""

    def __init__(self, functions: Mapping[str, Function]):
        self.read: list[NamedValue] = []
        self.written: list[NamedValue] = []
        self._functions = functions
        self._sources: defaultdict[NamedValue, set[NamedValue]] = defaultdict(set)
        for name, function in functions.items():
            for statements in function.blocks.values():
                self._follow(name, function, statements)

    def of(self, values: Iterable[NamedValue]) -> set[NamedValue]:
        """All values that these are computed from, themselves included."""
        found, waiting = set[NamedValue](), [*values]
        while waiting:
            value = waiting.pop()
            if value not in found:
                found.add(value)
                function, name = value
                waiting += (*self._sources[value], (function, name.partition("#")[0]))  # %1#0 is a part of %1
        return found

    def _follow(self, name: str, function: Function, statements: Sequence[Statement]) -> None:
        for statement in statements:
            given = values_in(statement.text)
            if statement.name in (*_LOADS, *_STORES, *_UPDATES):
                if statement.name not in _STORES:
                    self.read.append((name, given[0]))
                if statement.name not in _LOADS:
                    self.written.append((name, given[0]))
            elif statement.name == "tt.call":
                self._call(name, statement, given)
            elif statement.name.startswith("cf."):
                handed_on = values_of_jump(statement.text)
                for arguments in function.given.values():
                    self._join(name, arguments, [handed_on] * len(arguments))
            elif statement.regions:
                self._regions(name, function, statement)
            else:
                self._join(name, statement.results, [given] * len(statement.results))

    def _call(self, name: str, statement: Statement, given: Sequence[str]) -> None:
        callee = _CALLEE.match(statement.text)
        assert callee is not None
        called = self._functions[callee[1]]
        for argument, value in zip(called.arguments, given, strict=False):
            self._sources[callee[1], argument].add((name, value))
        for statements in called.blocks.values():
            if statements and statements[-1].name == "tt.return":
                returned = values_in(statements[-1].text)
                for result, value in zip(_results(statement, len(returned)), returned, strict=False):
                    self._sources[name, result].add((callee[1], value))

    def _regions(self, name: str, function: Function, statement: Statement) -> None:
        """A loop carries values from turn to turn, each from its own; of other regions any value may come from any."""
        ends = [values_in(body[-1].text) for _, body in statement.regions if body]
        results = _results(statement, max(map(len, ends), default=0))
        if statement.name == "scf.for":
            (yielded, *_), carried = ends, _INITIAL.findall(statement.text.partition("iter_args")[2])
            for (argument, initial), result, next_value in zip(carried, results, yielded, strict=False):
                self._join(name, [argument, result], [[initial, next_value]] * 2)
        elif statement.name == "scf.if":
            for yielded in ends:
                self._join(name, results, [[value] for value in yielded])
        else:
            every = [*values_in(statement.text), *(value for end in ends for value in end)]
            inner = [argument for arguments, _ in statement.regions for argument in arguments]
            self._join(name, [*results, *inner], [every] * (len(results) + len(inner)))
        for _, body in statement.regions:
            self._follow(name, function, body)

    def _join(self, name: str, made: Sequence[str], given: Sequence[Sequence[str]]) -> None:
        for result, values in zip(made, given, strict=False):
            self._sources[name, result].update((name, value) for value in values)


def _results(statement: Statement, count: int) -> list[str]:
    """The names of its results, one by one: of `%1:2 = ...` they are %1#0 and %1#1."""
    if count > 1 and len(statement.results) == 1:
        return [f"{statement.results[0]}#{number}" for number in range(count)]
    return statement.results
