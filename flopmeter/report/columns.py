"""The columns of a report's tables, one list for every format: text, markdown, csv, json and the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from flopmeter.report.quantities import UNKNOWN, percent_of
from flopmeter.report.report import Report
from flopmeter.report.rows import Row


class ReportColumn(NamedTuple):
    """One figure of a row. `value` is in SI units, with nothing rounded; csv and json write it under `key`.

    `heading` is that of text and markdown, which show `value / scale` with `digits`, and `page_heading` that of the
    page, which scales a column by its `unit` as a whole. An empty heading leaves the column out.
    """

    key: str
    heading: str
    value: Callable[[Row], Any]
    digits: str = ""  # a format specification, such as '.2f'
    scale: float = 1.0
    page_heading: str = ""
    unit: str = ""  # '' counts; '1' is a plain ratio, '%' a share of `whole`, 'text' a word
    whole: Callable[[Report], float] | None = None  # what a share is of


COLUMNS = (
    ReportColumn("calls", "calls", lambda row: row.calls, page_heading="calls"),
    ReportColumn(
        "", "% FLOPs", lambda row: row.flops, ".2f", page_heading="%\u00a0FLOPs", unit="%",
        whole=lambda report: report.flops,
    ),
    ReportColumn(
        "", "% time", lambda row: row.seconds, ".1f", page_heading="%\u00a0time", unit="%",
        whole=lambda report: report.kernel_seconds,
    ),
    ReportColumn("flops", "GFLOP", lambda row: row.flops, ".2f", 1e9, "work", "FLOP"),
    ReportColumn("bytes_read", "read GB", lambda row: row.bytes_read, ".2f", 1e9, "read", "B"),
    ReportColumn("bytes_written", "written GB", lambda row: row.bytes_written, ".2f", 1e9, "written", "B"),
    ReportColumn("seconds", "", lambda row: row.seconds, page_heading="time", unit="s"),
    ReportColumn("joules", "", lambda row: row.joules, page_heading="energy", unit="J"),
    ReportColumn("", "FLOP/B", lambda row: row.intensity, ".1f", page_heading="FLOP/B", unit="1"),
    ReportColumn("", "TFLOP/s", lambda row: row.flop_per_s, ".1f", 1e12, "reached", "FLOP/s"),
    ReportColumn(
        "regime", "bound by", lambda row: row.regime if row.seconds else UNKNOWN, page_heading="bound by", unit="text"
    ),
)  # fmt: skip
IN_TEXT = tuple(column for column in COLUMNS if column.heading)
_FIRST_ON_PAGE = ("time", "%\u00a0time", "bound by")  # what a phone shows without scrolling
ON_PAGE = tuple(
    sorted(
        (column for column in COLUMNS if column.page_heading),
        key=lambda column: (*_FIRST_ON_PAGE, column.page_heading).index(column.page_heading),
    )
)
RAW_NAMES = ("name", *(column.key for column in COLUMNS if column.key))


def share_of(column: ReportColumn, row: Row, report: Report) -> float:
    """The share of the column's whole, in percent; 0 if the whole is 0."""
    return percent_of(column.value(row), column.whole(report) if column.whole else 0.0)


def raw(row: Row) -> dict[str, Any]:
    """The row in SI units, nothing rounded, by the names of csv and json."""
    return {"name": row.name, **{column.key: column.value(row) for column in COLUMNS if column.key}}
