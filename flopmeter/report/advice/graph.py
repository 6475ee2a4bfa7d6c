"""A trace as a graph: which op made a storage, and which ops touch it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import cached_property

from flopmeter.records import Trace
from flopmeter.report.advice.rewrite import makes_no_storage


class Graph:
    """Ops are given by their indices in the trace, storages by their numbers there."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.ops = trace, trace.ops

    @cached_property
    def touching(self) -> Mapping[int, list[int]]:
        """By storage: the ops that read it, write to it or make a view of it, in order."""
        found: dict[int, list[int]] = defaultdict(list)
        for index, op in enumerate(self.ops):
            for number in set(op.storages):
                found[number].append(index)
        return found

    def maker(self, storage: int) -> int | None:
        """The op that made it; None: it was there before the trace."""
        born = self.trace.storages[storage].born
        return born if born >= 0 else None

    def readers(self, storage: int) -> list[int]:
        """The ops that make something else of it: neither its maker, nor views, nor ops in place."""
        maker = self.maker(storage)
        return [place for place in self.touching[storage] if place != maker and not makes_no_storage(self.ops[place])]

    def is_read_only_by(self, storage: int, ops: Collection[int]) -> bool:
        return all(place in ops for place in self.readers(storage))

    def made_only_for(self, gone: set[int], needed: set[int]) -> set[int]:
        """Other ops whose results only these read, or only one another. They make nothing that is needed, and read no
        weights."""
        known = set(gone)
        todo = list(gone)
        while todo:
            for number in self.ops[todo.pop()].reads - needed:
                maker = self.maker(number)
                if maker is None or maker in known or not self.is_read_only_by(number, known):
                    continue
                if not any(self.trace.storages[read].role for read in self.ops[maker].reads):
                    known.add(maker)
                    todo.append(maker)
        return known - gone

    def views_left_by(self, gone: set[int], needed: set[int]) -> set[int]:
        """Views of what these ops made, where nothing else reads that."""
        made = {number for index in gone for number in self.ops[index].storages if self.maker(number) in gone}
        left = {number for number in made - needed if self.is_read_only_by(number, gone)}
        return {place for number in left for place in self.touching[number]}
