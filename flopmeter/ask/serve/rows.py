"""The answer of `serving`: a row for each device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flopmeter.records import Regime
from flopmeter.report.quantities import figure, in_gb, in_ms
from flopmeter.report.tables import ColumnOf, Document, Shown, table_of


class ServingPoint(NamedTuple):
    """A server that works on `batch` requests at a time, on all its GPUs. Tokens are output tokens."""

    batch: int
    ttft_seconds: float
    tpot_seconds: float | None  # None of one token, which prefill gives
    requests_per_s: float
    tokens_per_s: float  # of all GPUs
    tokens_per_s_per_gpu: float
    watts_per_gpu: float | None  # None where nobody knows what the device may draw
    joules_per_token: float | None  # of all GPUs, prefill included
    dollars_per_million_tokens: float | None  # None without a price
    energy_dollars_per_million_tokens: float | None  # None without the price of energy


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingRow:
    """One device. `best` is the point with the most tokens a second that keeps to the latencies asked for."""

    hardware: str
    gpus: int  # that one copy of the model is split over, and those of prefill alone for each copy
    weight_bytes: int  # on one GPU
    kv_bytes_per_request: float  # on one GPU, when its last token is made, without a prefix that all share
    most_requests: int  # at a time, that memory holds, on all its GPUs
    prefill_seconds: float  # of one prompt alone
    alone_ttft_seconds: float  # of one request that waits for no other, with what its cache takes over the links
    step_seconds: float  # of decoding, of one request alone
    points: tuple[ServingPoint, ...]  # by rising batch
    best: ServingPoint | None  # None where no batch keeps to the latencies
    limited_by: str  # what keeps the batch from being larger
    prefill_bound_by: Regime  # of a chunk, or of a prompt in one step
    decoding_bound_by: Regime  # at the best batch, else of one request alone
    prefill_servers: float  # of prefill alone, for each that decodes; 0: the same do both
    dollars_per_hour: float | None  # of all its GPUs

    @property
    def bounds(self) -> str:
        """What bounds the steps, and how many GPUs run those of prefill."""
        apart = (
            f"; {figure(self.prefill_servers)} GPUs of prefill for each that decodes" if self.prefill_servers else ""
        )
        return f"prefill is bound by {self.prefill_bound_by}, decoding by {self.decoding_bound_by}{apart}"

    def as_dict(self) -> dict[str, Any]:
        """Flat, in plain types and SI units; without the other points."""
        facts = {name: getattr(self, name) for name in self.__slots__ if name not in ("points", "best")}
        best = dict.fromkeys(ServingPoint._fields) if self.best is None else self.best._asdict()
        return {**facts, **best}


@dataclass(frozen=True, repr=False)
class Serving(Shown):
    """Rows by falling tokens per second and GPU; `unable`: why some devices cannot serve the model."""

    title: str
    rows: tuple[ServingRow, ...]
    unable: Mapping[str, str]
    slo: Mapping[str, float]
    notes: tuple[str, ...]

    def _document(self) -> Document:
        records = [row.as_dict() for row in self.rows]
        points = {row.hardware: [point._asdict() for point in row.points] for row in self.rows}
        lines = [f"{row.hardware}: {row.limited_by}; {row.bounds}" for row in self.rows]
        return Document(
            kind="serving",
            title=self.title,
            tables=[table_of(_COLUMNS, self.rows, hides_unknown=True)] if self.rows else [],
            notes=[*lines, *(f"left out: {why}" for why in self.unable.values()), *self.notes],
            data={"slo": dict(self.slo), "rows": records, "points": points, "unable": dict(self.unable)},
            records=records,
        )


def _of_best(value: Callable[[ServingPoint], Any]) -> Callable[[ServingRow], Any]:
    return lambda row: None if row.best is None else value(row.best)


def _optional(show: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: figure(None) if value is None else show(value)


_COLUMNS: list[ColumnOf[ServingRow]] = [
    ColumnOf("device", lambda row: row.hardware if row.gpus == 1 else f"{row.hardware} ×{row.gpus}", str, "<"),
    ColumnOf("weights GB", lambda row: row.weight_bytes, in_gb),
    ColumnOf("KV MB/request", lambda row: row.kv_bytes_per_request / 1e6),
    ColumnOf("fit", lambda row: row.most_requests, str),
    ColumnOf("at a time", _of_best(lambda point: point.batch), _optional(str)),
    ColumnOf("TTFT ms", _of_best(lambda point: point.ttft_seconds), _optional(in_ms)),
    ColumnOf("TPOT ms", _of_best(lambda point: point.tpot_seconds), _optional(in_ms)),
    ColumnOf("requests/s", _of_best(lambda point: point.requests_per_s)),
    ColumnOf("tokens/s/GPU", _of_best(lambda point: point.tokens_per_s_per_gpu)),
    ColumnOf("W/GPU", _of_best(lambda point: point.watts_per_gpu)),
    ColumnOf("J/token", _of_best(lambda point: point.joules_per_token)),
    ColumnOf("$/M tokens", _of_best(lambda point: point.dollars_per_million_tokens)),
    ColumnOf("energy $/M", _of_best(lambda point: point.energy_dollars_per_million_tokens)),
    ColumnOf("alone: TTFT ms", lambda row: row.alone_ttft_seconds, in_ms),
    ColumnOf("alone: TPOT ms", lambda row: row.points[0].tpot_seconds, _optional(in_ms)),
]
