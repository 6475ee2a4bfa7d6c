"""The result of a check: rows of measured and predicted time, and how they are shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flopmeter.device.hardware import Hardware
from flopmeter.records import OP_CLASSES, Clocks
from flopmeter.report.quantities import in_gb, in_ms, percent
from flopmeter.report.tables import ColumnOf, Document, Shown, Table, table_of

NO_KERNEL = "views, allocation"  # class of the ops that launch nothing
SHOWN_ROWS = 20  # of each table in text and markdown


class CheckRow(NamedTuple):
    """Equal calls of an op, or all ops of a class. Seconds, FLOPs and bytes are sums over the calls."""

    name: str
    shapes: str  # of the tensors that a call reads; '' for a class
    op_class: str
    dtype: str
    calls: int = 1
    measured_seconds: float = 0.0
    predicted_seconds: float = 0.0
    floor_seconds: float = 0.0  # by the spec: FLOPs at the peak or bytes at the bandwidth, whichever is longer
    flops: int = 0  # executed
    bytes: int = 0
    kernel_class: str = ""  # of the longest kernel: its band tells how sure the prediction is (timing/bands.py)

    @property
    def to_win_seconds(self) -> float:
        """The time above the floor; 0 if a cache made the op faster than the floor."""
        return max(0.0, self.measured_seconds - self.floor_seconds)

    @property
    def flop_per_s(self) -> float:
        return self.flops / self.measured_seconds if self.measured_seconds else 0.0

    @property
    def bytes_per_s(self) -> float:
        return self.bytes / self.measured_seconds if self.measured_seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Flat, in plain types and SI units."""
        derived = ("to_win_seconds", "flop_per_s", "bytes_per_s")
        return {**self._asdict(), **{name: getattr(self, name) for name in derived}}


class UnpricedRow(NamedTuple):
    """Measured time without a prediction, and why."""

    name: str
    calls: int
    measured_seconds: float
    reason: str
    is_aten: bool  # an op of PyTorch's own; else of a library, a collective, or a kernel that no op launched


@dataclass(frozen=True, repr=False)
class Check(Shown):
    """A profile beside its prediction. `rows` are sorted by the time that could be won."""

    title: str
    hardware: Hardware
    is_cuda: bool
    clocks: Clocks  # that the predictions are of
    rows: tuple[CheckRow, ...]
    unpriced: tuple[UnpricedRow, ...]
    span_seconds: float  # from the first to the last event
    busy_seconds: float  # of the span, the device (a CPU: an op) running
    host_seconds: float  # of the span, the host inside of an op, on any thread
    mfu: float
    main_dtype: str
    notes: tuple[str, ...]
    alone_measured_seconds: float  # of the ops that are priced, calls during which no other stream ran anything
    alone_predicted_seconds: float

    @property
    def measured_seconds(self) -> float:
        """Measured time of all ops, priced or not."""
        return sum(row.measured_seconds for row in self.rows) + sum(row.measured_seconds for row in self.unpriced)

    @property
    def predicted_seconds(self) -> float:
        """Predicted time of the ops that are priced."""
        return sum(row.predicted_seconds for row in self.rows)

    @property
    def priced_share(self) -> float:
        """The share of the measured time of PyTorch's own (aten) ops that has a prediction."""
        priced = sum(row.measured_seconds for row in self.rows)
        missed = sum(row.measured_seconds for row in self.unpriced if row.is_aten)
        return priced / (priced + missed) if priced else 0.0

    @property
    def weighted_error(self) -> float:
        """Mean of |predicted / measured - 1| over the kinds of calls, weighted by their measured time."""
        priced = sum(row.measured_seconds for row in self.rows)
        return sum(abs(row.predicted_seconds - row.measured_seconds) for row in self.rows) / priced if priced else 0.0

    @property
    def idle_share(self) -> float:
        """The share of the span in which the device waits; on a CPU, outside of ops."""
        return 1 - self.busy_seconds / self.span_seconds if self.span_seconds else 0.0

    def by_class(self) -> list[CheckRow]:
        """One row for each op class, in the order of the reports' tables."""
        groups: dict[str, list[CheckRow]] = {}
        for row in self.rows:
            groups.setdefault(row.op_class, []).append(row)
        order = (*OP_CLASSES, NO_KERNEL)
        return [_sum(name, groups[name]) for name in sorted(groups, key=order.index)]

    def _document(self) -> Document:
        totals = {
            name: getattr(self, name)
            for name in (
                "span_seconds", "busy_seconds", "host_seconds", "idle_share", "measured_seconds", "predicted_seconds",
                "alone_measured_seconds", "alone_predicted_seconds", "priced_share", "weighted_error", "mfu",
                "main_dtype", "clocks",
            )
        }  # fmt: skip
        records = [row.as_dict() for row in self.rows]
        unpriced = [{key: value for key, value in row._asdict().items() if key != "is_aten"} for row in self.unpriced]
        classes = [row.as_dict() for row in self.by_class()]
        as_records: list[Mapping[str, Any]] = [{**record, "reason": ""} for record in records]
        if records:
            as_records += [{**dict.fromkeys(records[0]), **record} for record in unpriced]
        return Document(
            kind="check",
            title=self.title,
            tables=[table for table in self._tables() if table.rows],
            notes=[self._summary(), *self._beside(), *self._omitted(), *self.notes],
            data={"hardware": self.hardware.name, **totals, "classes": classes, "ops": records, "unpriced": unpriced},
            records=as_records or unpriced,
        )

    def _tables(self) -> Iterator[Table]:
        columns = _columns(self.hardware, self.main_dtype)
        total = [_sum("all", self.rows)] if self.rows else []
        yield table_of([_name("class"), *columns], [*self.by_class(), *total])
        shapes = ColumnOf[CheckRow]("inputs", lambda row: f"{row.shapes} {row.dtype}".strip(), str, "<")
        yield table_of([_name("op, by the time to win"), *columns, shapes], self.rows[:SHOWN_ROWS])
        yield table_of(_UNPRICED, self.unpriced[:SHOWN_ROWS])

    def _summary(self) -> str:
        where = "device busy" if self.is_cuda else "in ops"
        idle = "device idle" if self.is_cuda else "between ops (Python, autograd)"
        host = f" · host in ops {in_ms(self.host_seconds)} ms" if self.is_cuda else ""
        return (
            f"measured {in_ms(self.span_seconds)} ms from the first to the last event"
            f" · {where} {in_ms(self.busy_seconds)} ms, {idle} {percent(self.idle_share)} %{host}"
            f" · MFU {percent(self.mfu, 1)} % · predicted for the ops {in_ms(self.predicted_seconds)} ms"
            f" · of the time of aten ops {percent(self.priced_share)} % priced"
        )

    def _beside(self) -> Iterator[str]:
        measured = sum(row.measured_seconds for row in self.rows) - self.alone_measured_seconds
        if measured > 1e-9 * self.span_seconds:
            predicted = self.predicted_seconds - self.alone_predicted_seconds
            alone = f"{in_ms(self.alone_measured_seconds)} ms, predicted {in_ms(self.alone_predicted_seconds)}"
            yield (
                f"of these {in_ms(measured)} ms, predicted {in_ms(predicted)}, ran while another stream ran something: "
                f"each slows the other, which is not predicted here; {alone}, ran alone"
            )

    def _omitted(self) -> Iterator[str]:
        for rows, what in ((self.rows, "kinds of calls"), (self.unpriced, "ops without a prediction")):
            rest = rows[SHOWN_ROWS:]
            if rest:
                seconds = sum(row.measured_seconds for row in rest)
                yield f"{len(rest)} more {what}, {in_ms(seconds)} ms: the formats csv and json hold all"


_UNPRICED: list[ColumnOf[UnpricedRow]] = [
    ColumnOf("not predicted", lambda row: row.name, str, "<"),
    ColumnOf("calls", lambda row: row.calls, str),
    ColumnOf("measured ms", lambda row: row.measured_seconds, in_ms),
    ColumnOf("why", lambda row: row.reason, str, "<"),
]


def _name(heading: str) -> ColumnOf[CheckRow]:
    return ColumnOf(heading, lambda row: row.name, str, "<")


def _columns(hardware: Hardware, dtype: str) -> list[ColumnOf[CheckRow]]:
    peak = hardware.contraction_peak(dtype).flop_per_s
    return [
        ColumnOf("calls", lambda row: row.calls, str),
        ColumnOf("measured ms", lambda row: row.measured_seconds, in_ms),
        ColumnOf("predicted ms", lambda row: row.predicted_seconds, in_ms),
        ColumnOf("floor ms", lambda row: row.floor_seconds, in_ms),
        ColumnOf("to win ms", lambda row: row.to_win_seconds, in_ms),
        ColumnOf("GFLOP/s", lambda row: row.flop_per_s / 1e9),
        ColumnOf("% peak", lambda row: percent(row.flop_per_s / peak, 1), str),
        ColumnOf("GB/s", lambda row: row.bytes_per_s, in_gb),
        ColumnOf("% GB/s", lambda row: row.bytes_per_s / hardware.bandwidth_bytes_per_s, percent),
    ]


def _sum(name: str, rows: Iterable[CheckRow]) -> CheckRow:
    first, last = (CheckRow._fields.index(field) for field in ("calls", "bytes"))
    columns = list(zip(*rows, strict=True))[first : last + 1]
    sums: list[Any] = [sum(column) for column in columns]
    return CheckRow(name, "", name, "", *sums)
