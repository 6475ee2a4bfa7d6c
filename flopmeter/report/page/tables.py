"""Rows of a report as HTML tables. A cell's `data-v` is what it sorts by: the figure itself, in SI units."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from flopmeter.report.columns import ON_PAGE, ReportColumn, share_of
from flopmeter.report.page.marks import class_mark
from flopmeter.report.page.markup import Markup, join, tag
from flopmeter.report.quantities import decimal, scale, with_prefix
from flopmeter.report.report import Report
from flopmeter.report.rows import Row
from flopmeter.report.tables import Table


def rows_table(report: Report, rows: Sequence[Row], name: str, *, is_tree: bool = False) -> Markup:
    """A table whose first column is headed `name`. A tree shows dotted paths by their last part, indented."""
    # Energy is unknown where the device's power is.
    columns = [each for each in ON_PAGE if each.unit == "text" or any(each.value(row) is not None for row in rows)]
    shown = [_column(column, rows, report) for column in columns]
    head = tag("tr", tag("th", name, scope="col"), *(heading for heading, _ in shown))
    body = [
        tag(
            "tr",
            _name_cell(row.name, is_tree),
            *(cells[place] for _, cells in shown),
            data_depth=row.name.count(".") if is_tree else None,
        )
        for place, row in enumerate(rows)
    ]
    grid = tag("table", tag("thead", head), tag("tbody", join(body, "\n")), class_="tree" if is_tree else None)
    return _scrolled(grid, name)


def plain_table(table: Table, name: str) -> Markup:
    """A table whose cells are texts; a column sorts by figures where all of its cells are such."""
    kinds = ["n" if all(map(_is_figure, cells)) else "t" for cells in zip(*table.rows, strict=True)]
    heads = (
        tag("th", column.heading, scope="col", class_=kind) for column, kind in zip(table.columns, kinds, strict=True)
    )
    rows = (
        tag(
            "tr",
            *(
                tag("td", cell, class_=kind, data_v=cell if kind == "n" else None)
                for cell, kind in zip(row, kinds, strict=True)
            ),
        )
        for row in table.rows
    )
    return _scrolled(tag("table", tag("thead", tag("tr", *heads)), tag("tbody", join(rows, "\n"))), name)


def _scrolled(table: Markup, name: str) -> Markup:
    return tag("div", table, class_="scroll", tabindex=0, role="region", aria_label=f"Table by {name}")


def _is_figure(text: str) -> bool:
    try:
        return isfinite(float(text))
    except ValueError:
        return False


def _name_cell(name: str, is_tree: bool) -> Markup:
    if not is_tree:
        return tag("th", class_mark(name), name, scope="row")
    *parents, own = name.split(".")
    return tag("th", own, scope="row", title=name, style=f"--depth:{len(parents)}")


def _column(column: ReportColumn, rows: Sequence[Row], report: Report) -> tuple[Markup, list[Markup]]:
    """The heading of a column, with the unit, and its cells."""
    if column.unit == "text":
        return tag("th", column.page_heading, scope="col", class_="t"), [
            tag("td", column.value(row), class_="t") for row in rows
        ]
    unit, cells = _figures(column, rows, report)
    heading = f"{column.page_heading} ({unit})" if unit else column.page_heading
    return tag("th", heading, scope="col", class_="n"), cells


def _figures(column: ReportColumn, rows: Sequence[Row], report: Report) -> tuple[str, list[Markup]]:
    """The unit that the whole column is in, and its cells."""
    values = [column.value(row) for row in rows]
    if column.unit == "":
        return "", [_cell(value, f"{value:.0f}") for value in values]
    if column.unit == "1":
        return "", [_cell(value, decimal(value, 1)) for value in values]
    if column.unit == "%":
        shares = [share_of(column, row, report) for row in rows]
        return "", [_cell(share, decimal(share, 1), f"--share:{share:.1f}%") for share in shares]
    alike = (other for other in ON_PAGE if other.unit == column.unit)  # what is read and what is written
    divisor, unit = scale((other.value(row) for other in alike for row in rows), column.unit)
    cells = []
    for value in values:
        text = decimal(value / divisor)
        cells.append(_cell(value, text, title=with_prefix(value, column.unit) if text.startswith("<") else None))
    return unit, cells


def _cell(value: float, text: str, style: str | None = None, title: str | None = None) -> Markup:
    return tag("td", text, data_v=f"{value:.6g}", style=style, title=title)
