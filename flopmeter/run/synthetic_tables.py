"""Tables of the hub of Hugging Face that are missing (`load_dataset` of its package `datasets`), of synthetic rows.

A table has fewer rows than the one that it stands for, since programs map row by row. Where a program asks for rows by
number, as one does that knows how many there are, it gets those that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from flopmeter.run.patches import Patch
from flopmeter.torch_names.around import around

ROWS = 2**12  # length of a table
MARK = "synthetic rows of flopmeter run"  # what `datasets` hands on from a table to those that are made of it


class SyntheticTables:
    """`row`: makes the values of one row by the names of columns; None: they have no names. `classes`: of the columns
    of integers that name a class, how many there are. `tell`: what the table stands in for, and why."""

    def __init__(
        self,
        row: Callable[[], dict[str, Any]] | None,
        classes: dict[str, int],
        absent: tuple[type[Exception], ...],
        tell: Callable[[str, BaseException], None],
    ) -> None:
        self._row, self._classes, self._absent, self._tell = row, classes, absent, tell

    def patches(self, hub: Any) -> Iterator[Patch]:
        """Patches of the package once it is imported; a folder of the same name has none of these functions."""
        if not hasattr(hub, "load_dataset"):
            return
        yield Patch(hub, "load_dataset", self._load_dataset(hub, hub.load_dataset), "data sets of the hub")
        kinds = {"Dataset": {"select": _select, "train_test_split": _split}, "IterableDataset": {"skip": _skip}}
        for kind, methods in kinds.items():
            for name, standing_in in methods.items():
                if original := getattr(getattr(hub, kind, None), name, None):
                    yield Patch(getattr(hub, kind), name, standing_in(original), "rows that a program knows of")

    @around
    def _load_dataset(
        self,
        hub: Any,
        original: Callable[..., Any],
        path: str,
        *args: Any,
        split: Any = None,
        streaming: bool = False,
        **kwargs: Any,
    ) -> Any:
        try:
            return original(path, *args, split=split, streaming=streaming, **kwargs)
        except self._absent as error:
            if self._row is None:
                raise ValueError(
                    f"the data set {path} is not here: give its columns, as --synthetic text=100:text"
                ) from error
            self._tell(path, error)
            table = self._table(hub, self._row())
            if streaming:
                table = table.to_iterable_dataset()
                table.info.description = MARK
            if isinstance(split, (list, tuple)):
                return type(split)(table for _ in split)
            if split is not None:
                return table
            splits = hub.IterableDatasetDict if streaming else hub.DatasetDict
            return splits(dict.fromkeys(("train", "validation", "test"), table))

    def _table(self, hub: Any, row: dict[str, Any]) -> Any:
        row = tree_map_only(torch.Tensor, torch.Tensor.tolist, row)
        table = hub.Dataset.from_dict({name: [value] for name, value in row.items()})
        table.info.description = MARK
        for name, count in self._classes.items():
            table = table.cast_column(name, hub.ClassLabel(num_classes=count))
        return table.select([0] * ROWS)  # the same row: images are large


def _is_synthetic(table: Any) -> bool:
    return bool(table.info.description == MARK)


@around
def _select(original: Callable[..., Any], table: Any, indices: Iterable[int], *args: Any, **options: Any) -> Any:
    if _is_synthetic(table) and len(table) > 1:  # of one row all rows are made
        indices = _within(indices if isinstance(indices, range) else list(indices), len(table))
    return original(table, indices, *args, **options)


def _within(indices: Sequence[int], rows: int) -> Sequence[int]:
    """At most as many of these as there are rows."""
    if isinstance(indices, range) and not indices and indices.start >= rows:
        return range(rows)  # all that follow a number, which are more in the table that this one stands for
    if all(-rows <= index < rows for index in indices):
        return indices
    return [index % rows for index in islice(indices, rows)]


@around
def _split(
    original: Callable[..., Any], table: Any, test_size: Any = None, train_size: Any = None, *args: Any, **options: Any
) -> Any:
    if _is_synthetic(table):
        half = len(table) // 2
        sizes = (min(size, half) if type(size) is int else size for size in (test_size, train_size))
        test_size, train_size = sizes
    return original(table, test_size, train_size, *args, **options)


@around
def _skip(original: Callable[..., Any], table: Any, n: int) -> Any:
    return table if _is_synthetic(table) else original(table, n)
