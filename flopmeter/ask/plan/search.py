"""The search for the fastest splits: which are worth metering, what each takes, and which are metered whole."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from flopmeter.ask.plan.compose import Composed, SplitWork, compose, least_seconds
from flopmeter.ask.plan.layers import LayerCosts, try_layers
from flopmeter.ask.plan.memory import MemoryUse, least_bytes, memory_of, state_bytes
from flopmeter.ask.plan.notes import nothing_divides, shared_unevenly
from flopmeter.ask.plan.optimizer_costs import OptimizerCosts
from flopmeter.ask.plan.program import Where
from flopmeter.ask.plan.rows import SplitRow
from flopmeter.ask.plan.splits import Bounds, PlanError, Shape, Split, splits
from flopmeter.ask.plan.subject import Subject
from flopmeter.ask.plan.whole import Whole, meter_whole
from flopmeter.report.quantities import figure
from flopmeter.timing.allocator import OutOfMemoryError

ONE_RANK = Shape(tp=1, cp=1, ep=1, microbatch=1, recompute="none")
Runner = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]  # runs a function on each job


class _Found(NamedTuple):
    split: Split
    step: Composed
    memory: MemoryUse


class Search:
    """The splits of one model on one cluster."""

    def __init__(self, subject: Subject, bounds: Bounds, where: Where, usable: int | None, async_tp: bool) -> None:
        self._subject, self._bounds, self._where = subject, bounds, where
        self._usable, self._async_tp = usable, async_tp
        self.costs: dict[Shape, LayerCosts] = {}
        self._failed: dict[Shape, str] = {}  # shapes in which the model does not run, and why
        self.considered = self.may_fit = 0

    @property
    def title(self) -> str:
        subject, bounds = self._subject, self._bounds
        return (
            f"{subject.name}, {figure(subject.parameters / 1e9)} B parameters · {bounds.world:,} × "
            f"{self._where.hardware.title} · {bounds.work} a step"
        )

    def rows(
        self, wishes: Mapping[str, tuple[object, ...]], most: int, whole: int, dollars: float | None, run: Runner
    ) -> list[SplitRow]:
        """At most `most` splits, by rising time. The first `whole` of those without a pipeline, of which FSDP2 shards
        the parameters, are metered whole."""
        composed = [self._row(each, dollars) for each in self._best(wishes, most, run)]
        chosen = [row for row in composed if row.split.pp == 1 and row.split.shards > 1][:whole]
        metered = partial(meter_whole, self._subject, self._where, usable_bytes=self._usable)
        found = run(metered, [(row.split, row.microbatches) for row in chosen])
        of_split = dict(zip((row.split for row in chosen), found, strict=True))
        shown = [_as_whole(row, of_split[row.split]) if row.split in of_split else row for row in composed]
        return sorted(shown, key=lambda row: row.seconds)

    def _best(self, wishes: Mapping[str, tuple[object, ...]], rows: int, run: Runner) -> list[_Found]:
        """The fastest splits that fit, else those that need the least memory."""
        candidates = list(splits(self._bounds, wishes))
        self.considered = len(candidates)
        if not candidates:
            raise PlanError(nothing_divides(self._subject, self._bounds, wishes))
        worth = [each for each in candidates if self._may_fit(each)] or candidates
        shapes = list(dict.fromkeys([*(each.shape for each in worth), ONE_RANK]))
        metered = run(partial(try_layers, self._subject, OptimizerCosts(self._where), async_tp=self._async_tp), shapes)
        for shape, found in zip(shapes, metered, strict=True):
            if isinstance(found, str):
                self._failed[shape] = found
            else:
                self.costs[shape] = found
        works = [self._work(each) for each in worth if each.shape in self.costs]
        if not works:
            raise PlanError(f"none of these splits runs: {'; '.join(self._left_out())}")
        sizes = [least_bytes(work) for work in works]
        may_fit = [
            work for work, size in zip(works, sizes, strict=True) if self._usable is None or size <= self._usable
        ]
        fastest = _fastest(may_fit, rows, self._usable)
        if not fastest:
            smallest = heapq.nsmallest(rows, range(len(works)), key=sizes.__getitem__)
            return [_Found(work.split, compose(work), memory_of(work)) for work in map(works.__getitem__, smallest)]
        self.may_fit = len(may_fit)
        return fastest

    def _may_fit(self, split: Split) -> bool:
        """Whether parameters, gradients and optimizer state alone fit."""
        share = split.tp * split.pp * split.shards
        trained, every = self._subject.trained, self._subject.parameters
        return self._usable is None or state_bytes(split, trained, every - trained) / share <= self._usable

    def _work(self, split: Split) -> SplitWork:
        costs, where = self.costs[split.shape], self._where
        costs = costs.in_stages if split.pp > 1 else costs
        return SplitWork(split, self._subject.kinds, costs, self._bounds.batch, where.hardware, where.cluster)

    @cached_property
    def _model_flops(self) -> int:
        """FLOPs of one sequence. They are the same for every split, whatever is computed again."""
        costs = self.costs[ONE_RANK]
        parts = [costs.before, *(costs.layers[kind] for kind in self._subject.kinds), costs.after]
        return sum(part.model_flops for part in parts)

    def _row(self, found: _Found, dollars: float | None) -> SplitRow:
        split, step, memory = found
        peak = self._where.hardware.contraction_peak("bf16").flop_per_s * self._bounds.world
        return SplitRow(
            split=split,
            how="composed",
            microbatches=step.microbatches,
            tokens=self._bounds.batch * self._bounds.length,
            seconds=step.seconds,
            composed_seconds=step.seconds,
            seconds_by_bound=step.seconds_by_bound,
            mfu=self._model_flops * self._bounds.batch / step.seconds / peak,
            peak_memory_bytes=memory.peak_bytes,
            reserved_memory_bytes=memory.reserved_bytes,
            usable_memory_bytes=self._usable,
            fits=None if self._usable is None else self.may_fit > 0,
            dollars_per_gpu_hour=dollars,
        )

    def notes(self) -> list[str]:
        found = [note for costs in self.costs.values() for note in costs.notes]
        if self._subject.is_compiled and self._where.mode == "eager":
            found.append("layers run eagerly, though the model compiles them: mode='compiled' prices them as compiled")
        found.extend(shared_unevenly(self._subject, self.costs))
        assumed = [f"assumed: {each}" for costs in self.costs.values() for each in costs.assumptions]
        return [*found, *(f"left out: {each}" for each in self._left_out()), *assumed]

    def _left_out(self) -> list[str]:
        shapes: dict[str, dict[str, None]] = {}  # by what the error was; one for all microbatches
        for shape, why in reversed(self._failed.items()):
            shapes.setdefault(why, {})[str(shape)] = None
        return [
            f"{'; '.join(each)}, since {self._subject.name} does not run so ({why})" for why, each in shapes.items()
        ]


def _fastest(works: list[SplitWork], rows: int, usable_bytes: int | None) -> list[_Found]:
    """The fastest splits that fit. They are composed in the order of their lower bounds, until no other one can be
    faster. Of splits that differ only in how replicas are divided between dp and fsdp, only the fastest is kept."""
    best: dict[object, _Found] = {}
    for least, work in sorted(((least_seconds(work), work) for work in works), key=lambda pair: pair[0]):
        found = sorted(best.values(), key=lambda each: each.step.seconds)[:rows]
        if len(found) == rows and least >= found[-1].step.seconds:
            break
        try:
            use = memory_of(work, usable_bytes)
        except OutOfMemoryError:
            continue
        this, alike = _Found(work.split, compose(work), use), replace(work.split, dp=1, fsdp=work.split.replicas)
        if alike not in best or this.step.seconds < best[alike].step.seconds:
            best[alike] = this
    return sorted(best.values(), key=lambda each: each.step.seconds)[:rows]


def _as_whole(row: SplitRow, found: Whole) -> SplitRow:
    return replace(
        row,
        how="whole",
        seconds=found.seconds,
        seconds_by_bound=found.seconds_by_bound,
        mfu=row.mfu * row.seconds / found.seconds,
        peak_memory_bytes=found.memory.peak_bytes,
        reserved_memory_bytes=found.memory.reserved_bytes,
        fits=found.fits,
    )
