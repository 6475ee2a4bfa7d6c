"""The answer of `plan`: a row for each split, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flopmeter.ask.compare import step_dollars
from flopmeter.ask.plan.compose import Bound
from flopmeter.ask.plan.splits import Split
from flopmeter.report.quantities import UNKNOWN, in_gb, percent
from flopmeter.report.tables import ColumnOf, Document, Shown, table_of

How = Literal["composed", "whole"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRow:
    """A training step in one split. Memory and watts are of one GPU, the rest of all."""

    KEYS = (
        "name", "dp", "fsdp", "tp", "cp", "pp", "ep", "microbatch", "microbatches", "recompute", "schedule", "chunks",
        "gather", "how", "seconds", "composed_seconds", "tokens_per_s", "tokens_per_s_per_gpu", "mfu", "bound_by",
        "peak_memory_bytes", "reserved_memory_bytes", "usable_memory_bytes", "fits", "dollars_per_step",
        "dollars_per_million_tokens",
    )  # fmt: skip

    split: Split
    how: How  # 'composed' of layers, or metered whole
    microbatches: int  # of a rank in a step
    tokens: int  # of a step
    seconds: float
    composed_seconds: float
    seconds_by_bound: Mapping[Bound, float]  # of the rank that has the most to do
    mfu: float
    peak_memory_bytes: int  # in use, on the fullest rank
    reserved_memory_bytes: int  # that torch's allocator takes for it, where there is room
    usable_memory_bytes: int | None
    fits: bool | None  # whether the allocator gets by; None: it is not known with how much
    dollars_per_gpu_hour: float | None

    @property
    def gpus(self) -> int:
        return self.split.replicas * self.split.tp * self.split.cp * self.split.pp

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.gpus

    @property
    def bound_by(self) -> Bound:
        """What takes the largest share of the step."""
        return max(self.seconds_by_bound, key=self.seconds_by_bound.__getitem__)

    @property
    def dollars_per_step(self) -> float | None:
        return step_dollars(self.dollars_per_gpu_hour, self.gpus, self.seconds)

    @property
    def dollars_per_million_tokens(self) -> float | None:
        return None if self.dollars_per_step is None else 1e6 * self.dollars_per_step / self.tokens

    @property
    def passes(self) -> str:
        """What the mesh does not say: '8 x 1 sequences a rank, nothing recomputed, 1F1B'."""
        split = self.split
        kept = {"none": "nothing recomputed", "selective": "selective recomputation", "full": "full recomputation"}
        schedule = {"none": "", "1f1b": ", 1F1B", "interleaved": ", interleaved 1F1B", "zero-bubble": ", zero bubble"}
        stages = f" of {split.chunks} stages a rank" if split.chunks > 1 else ""
        sequences = f"{self.microbatches} x {split.microbatch} sequences a rank"
        is_whole = split.gather == "step" and split.shards > 1 and split.pp == 1  # a pipeline has no other way
        gathers = ", gathers each step" if is_whole else ""
        return f"{sequences}, {kept[split.recompute]}{schedule[split.schedule]}{stages}{gathers}"

    def share(self, bound: Bound) -> float:
        """The share of the step."""
        return self.seconds_by_bound[bound] / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Flat, in plain types and SI units."""
        flat = {name: getattr(self if hasattr(self, name) else self.split, name) for name in self.KEYS}
        return {**flat, **{f"{bound}_seconds": seconds for bound, seconds in self.seconds_by_bound.items()}}


@dataclass(frozen=True, repr=False)
class ParallelPlan(Shown):
    """The fastest splits of those that fit, by rising time; where none fits, those that need the least memory."""

    title: str
    rows: tuple[SplitRow, ...]
    considered: int  # splits that divide the work evenly
    may_fit: int  # of these, whose parameters, optimizer state and activations do; the rows are of those that fit
    metered: int  # shapes of layers
    notes: tuple[str, ...]

    @property
    def best(self) -> SplitRow | None:
        """The fastest split that fits; None if none does."""
        return next((row for row in self.rows if row.fits is not False), None)

    def _document(self) -> Document:
        records = [row.as_dict() for row in self.rows]
        found = (
            f"{self.considered:,} splits divide the work evenly, {self.may_fit:,} of them may fit; "
            f"put together from layers of {self.metered:,} shapes"
        )
        best = "none of the splits fits in memory; these need the least"
        if self.best is not None:
            best = f"fastest of what fits: {self.best.split.name}, {self.best.passes}"
        return Document(
            kind="plan",
            title=self.title,
            tables=[table_of(_COLUMNS, self.rows, hides_unknown=True)],
            notes=[best, found, *self.notes],
            data={"considered": self.considered, "may_fit": self.may_fit, "rows": records},
            records=records,
        )


def _schedule(row: SplitRow) -> str:
    split = row.split
    name = {"none": UNKNOWN, "zero-bubble": "ZB-H1"}.get(split.schedule, "1F1B")
    return f"{name} ×{split.chunks}" if split.chunks > 1 else name


_COLUMNS: list[ColumnOf[SplitRow]] = [
    ColumnOf("split", lambda row: row.split.name, str, "<"),
    ColumnOf("batches", lambda row: f"{row.microbatches} x {row.split.microbatch}", str),
    ColumnOf("recompute", lambda row: row.split.recompute, str, "<"),
    ColumnOf("schedule", _schedule, str, "<"),
    ColumnOf("gathers", lambda row: f"each {row.split.gather}" if row.split.shards > 1 else UNKNOWN, str, "<"),
    ColumnOf("s", lambda row: row.seconds),
    ColumnOf("tokens/s/GPU", lambda row: row.tokens_per_s_per_gpu),
    ColumnOf("MFU %", lambda row: percent(row.mfu, 1), str),
    ColumnOf("bound by", lambda row: row.bound_by, str, "<"),
    ColumnOf("comm. %", lambda row: percent(row.share("communication")), str),
    ColumnOf("bubble %", lambda row: percent(row.share("bubble")), str),
    ColumnOf("delays %", lambda row: row.share("delays"), lambda share: percent(share) if share else UNKNOWN),
    ColumnOf("peak GB", lambda row: row.peak_memory_bytes, in_gb),
    ColumnOf("reserved GB", lambda row: row.reserved_memory_bytes, in_gb),
    ColumnOf("of GB", lambda row: row.usable_memory_bytes, in_gb),
    ColumnOf("$/step", lambda row: row.dollars_per_step),
    ColumnOf("$/M tokens", lambda row: row.dollars_per_million_tokens),
    ColumnOf("figures", lambda row: row.how, str, "<"),
]
