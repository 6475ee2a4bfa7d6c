"""Tables and notes that render as text, markdown, csv or json: how a comparison, a sweep or a difference is shown."""

from __future__ import annotations

import csv
import html
import io
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, NamedTuple, TypeVar

from tabulate import tabulate

from flopmeter.report.drawers import rendered
from flopmeter.report.quantities import UNKNOWN, figure

DOCUMENT_SCHEMA_VERSION = 1
_ALIGN = {"<": "left", ">": "right"}

RowType = TypeVar("RowType", contravariant=True)
AnyShown = TypeVar("AnyShown", bound="Shown")


class Column(NamedTuple):
    """A heading and the side to which its cells are set."""

    heading: str
    side: str = ">"  # '<' or '>'


class Table(NamedTuple):
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class ColumnOf(Generic[RowType]):
    """A column of a table of records: `value` takes a figure from a row, in SI units, and `show` writes it."""

    heading: str
    value: Callable[[RowType], Any]
    show: Callable[[Any], str] = figure
    side: str = ">"

    def cell(self, row: RowType) -> str:
        return self.show(self.value(row))


def table_of(columns: Iterable[ColumnOf[RowType]], rows: Iterable[RowType], *, hides_unknown: bool = False) -> Table:
    """A table with a row for each record. `hides_unknown` leaves out the columns that have no figure in any row."""
    rows = list(rows)
    filled = [(Column(column.heading, column.side), [column.cell(row) for row in rows]) for column in columns]
    if hides_unknown:
        filled = [(column, cells) for column, cells in filled if any(cell != UNKNOWN for cell in cells)]
    return Table([column for column, _ in filled], list(zip(*(cells for _, cells in filled), strict=True)))


class Shown(ABC):
    """An answer that is shown as a Document: printed, in a notebook, or in one of the formats."""

    @abstractmethod
    def _document(self) -> Document: ...

    def with_note(self: AnyShown, note: str) -> AnyShown:
        """A copy with one more line under the tables; an empty note adds none."""
        known: Any = self
        return replace(known, notes=(*known.notes, note)) if note else self

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self._document().title}>"

    def render(self, format: str = "text") -> str:
        """As text, markdown, csv or json. Raises ValueError for another format."""
        return self._document().render(format)

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        return self._document()._repr_html_()


@dataclass(frozen=True)
class Document:
    """One thing to show. `data` is the whole of it in plain types and SI units; `records` its rows, flat, for csv."""

    kind: str  # what the JSON holds: 'comparison', 'sweep', ...
    title: str
    tables: Sequence[Table]
    notes: Sequence[str]
    data: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]

    def render(self, format: str = "text") -> str:
        """Raises ValueError for an unknown format."""
        return rendered(FORMATS, format, self)

    def _repr_html_(self) -> str:
        return for_notebook(self.title, "".join(grid(table, "html") for table in self.tables), self.notes)


def for_notebook(title: str, grids: str, notes: Iterable[str]) -> str:
    """A piece of HTML that needs neither script nor style; `grids` is HTML already."""
    lines = "<br>".join(html.escape(note) for note in notes)
    return f"<div><p><b>{html.escape(title)}</b></p>{grids}<p><small>{lines}</small></p></div>"


def grid(table: Table, tablefmt: str) -> str:
    return tabulate(
        table.rows,
        headers=[column.heading for column in table.columns],
        tablefmt=tablefmt,
        disable_numparse=True,
        colalign=[_ALIGN[column.side] for column in table.columns] if table.rows else None,
        preserve_whitespace=True,
    )


def _text(document: Document) -> str:
    parts = [document.title, *(grid(table, "simple") for table in document.tables), "\n".join(document.notes)]
    return "\n\n".join(part for part in parts if part)


def _markdown(document: Document) -> str:
    grids = [grid(table, "github") for table in document.tables]
    parts = [f"**{document.title}**", *grids, "\n".join(f"- {note}" for note in document.notes)]
    return "\n\n".join(part for part in parts if part)


def _csv(document: Document) -> str:
    return as_csv(list(document.records[0]) if document.records else [], document.records)


def as_csv(names: Sequence[str], records: Iterable[Mapping[str, Any]]) -> str:
    """Rows in SI units, nothing rounded."""
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def _json(document: Document) -> str:
    head = {"schema_version": DOCUMENT_SCHEMA_VERSION, "kind": document.kind, "title": document.title}
    return json.dumps({**head, **document.data, "notes": list(document.notes)}, indent=2, ensure_ascii=False)


FORMATS: dict[str, Callable[[Document], str]] = {"text": _text, "markdown": _markdown, "csv": _csv, "json": _json}
