"""Which way to split a training step over the GPUs of a cluster fits and is fastest."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

from flopmeter.ask.checks import check_callable, check_flags, check_mapping, check_positive, check_whole
from flopmeter.ask.delays import NO_DELAYS, Delays, checked_delays, delay_notes
from flopmeter.ask.plan.compose import Composed, SplitWork, compose, least_seconds
from flopmeter.ask.plan.layers import LayerCosts, meter_layers
from flopmeter.ask.plan.memory import MemoryUse, least_bytes, memory_of, state_bytes
from flopmeter.ask.plan.program import Where
from flopmeter.ask.plan.rows import ParallelPlan, SplitRow
from flopmeter.ask.plan.splits import (
    WITHOUT_NUMPY,
    Bounds,
    PlanError,
    Shape,
    Split,
    checked_wishes,
    has_context_parallelism,
    splits,
)
from flopmeter.ask.plan.subject import Loss, Styles, Subject, subject_of
from flopmeter.ask.plan.whole import Whole, meter_whole
from flopmeter.ask.workers import results_of
from flopmeter.device.cluster import AnyCluster, Cluster, cluster_of
from flopmeter.device.hardware import AnyHardware, load_hardware
from flopmeter.launch.modes import mode_called
from flopmeter.meter import DEFAULT_HARDWARE, Causal, Mode
from flopmeter.report.quantities import HOW_ATTENTION_COUNTS, figure, percent
from flopmeter.timing.allocator import OutOfMemoryError
from flopmeter.timing.peak_memory import usable_bytes_if_known

ONE_RANK = Shape(tp=1, cp=1, ep=1, microbatch=1, recompute="none")
USUAL_LENGTH = 8192  # tokens of a sequence, if nobody says it and the model takes as many


def plan(
    build: Any,
    world: int,
    hardware: AnyHardware = DEFAULT_HARDWARE,
    memory: float | None = None,
    *,
    batch: int | None = None,
    length: int | None = None,
    cluster: AnyCluster | None = None,
    mode: Mode = "eager",
    only: Mapping[str, object] | None = None,
    tensor_parallel: Styles | None = None,
    async_tp: bool = False,
    fp8: bool = False,
    delays: Delays = NO_DELAYS,
    loss: Loss | None = None,
    rows: int = 10,
    whole: int = 0,
    dollars_per_gpu_hour: float | None = None,
    workers: int = 1,
    executor: Executor | None = None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    **meter_options: Any,
) -> ParallelPlan:
    """The fastest ways to split a training step of a language model over `world` GPUs.

    One layer of each kind is metered for each shape that a split gives it, with torch's own tensor and context
    parallelism and recomputation; steps are put together from these, with FSDP2's collectives, messages between stages
    and the bubble of the schedule, on the links of the cluster.

    build: a built-in model ('llama-3-70b'), 'hf:TYPE' or 'hf:CONFIG.json', a config of transformers or of
        flopmeter.models, or a function without arguments (or a module on meta) that makes the model: its layers are the
        ModuleList with the most parameters, its inputs token ids.
    world: GPUs.
    memory: bytes of each that tensors may take; by default what the device has, less the context of the process.
    batch: sequences of a step, of all GPUs; by default one for each GPU.
    length: tokens of a sequence; by default what the model's config allows, up to 8,192.
    cluster: a name, the path of a YAML file or a Cluster; by default the one that the device comes in.
    only: limits what is tried, such as {"tp": 8, "pp": [1, 2], "recompute": "full"}; names are those of `Split`.
    tensor_parallel: torch's styles by module names, as `parallelize_module` takes them; by default the model's own
        (`tensor_parallel()` or transformers' plan). A model without any is not split so.
    async_tp: collectives of tensor parallelism are hidden behind the products next to them, as parts; see overlap.py.
    fp8: products of linear layers in fp8, but for the head's and those of experts; see fp8.py.
    delays: batches, checkpoints and slow ranks that steps wait for (flopmeter.Delays); by default none.
    loss: the scalar that is trained, of the model and token ids; by default the model's own, else that of the next
        token.
    rows: how many splits the answer has. whole: how many of them are then metered with all of their layers.
    workers, executor: processes that meter side by side, or any concurrent.futures.Executor (see ask/workers.py).
    meter_options: of FlopMeter.

    Raises PlanError for options that make no sense and where no split divides the work, HardwareError for an unknown
    device or a cluster that is too small, and TargetError for a model that cannot be built.
    """
    device = load_hardware(hardware)
    links = cluster_of(device, cluster)
    _check(whole, rows, mode, loss, tensor_parallel)
    check_whole(PlanError, world=world, batch=batch, length=length, workers=workers)
    check_positive(PlanError, memory=memory, dollars_per_gpu_hour=dollars_per_gpu_hour)
    check_flags(async_tp=async_tp, fp8=fp8)
    if fp8 and "fp8" not in device.matrix_tflop_per_s:
        raise PlanError(f"fp8: {device.title} has no matrix units for it")
    checked_delays(delays)
    wishes = checked_wishes(only or {})
    if meter_options.get("compile") is True and mode == "eager":
        mode = "compiled"  # what the compiler made has no eager run
    links.check_size(world)
    subject = subject_of(build, tensor_parallel, loss, fp8)
    sequences, tokens = batch or world, length or min(USUAL_LENGTH, subject.longest or USUAL_LENGTH)
    usable = usable_bytes_if_known(device) if memory is None else round(memory)
    bounds = Bounds(
        world, sequences, tokens, len(subject.kinds), subject.heads, links.gpus_per_node, subject.experts,
        can_defer=mode == "eager",  # torch's schedules do not split backward passes of compiled stages
    )  # fmt: skip
    where = Where(tokens, device, links, mode, meter_options)
    search = _Search(subject, bounds, where, usable, async_tp)
    run = partial(results_of, workers=workers, executor=executor, progress=progress)
    shown = search.rows(wishes, rows, whole, dollars_per_gpu_hour, run)
    notes = [
        *_notes(subject, links, batch, length, bounds, meter_options.get("causal", "full")), *map(_compared, shown),
        *search.notes(), *_cautions(shown, async_tp, fp8 and mode == "eager", delays),
    ]  # fmt: skip
    return ParallelPlan(
        title=search.title,
        rows=tuple(_delayed(row, delays) for row in shown),
        considered=search.considered,
        may_fit=search.may_fit,
        metered=len(search.costs),
        notes=tuple(dict.fromkeys(filter(None, notes))),
    )


_Runner = Callable[[Callable[[Any], Any], Sequence[Any]], list[Any]]  # runs a function on each job


class _Found(NamedTuple):
    split: Split
    step: Composed
    memory: MemoryUse


class _Search:
    """The splits of one model on one cluster."""

    def __init__(self, subject: Subject, bounds: Bounds, where: Where, usable: int | None, async_tp: bool) -> None:
        self._subject, self._bounds, self._where = subject, bounds, where
        self._usable, self._async_tp = usable, async_tp
        self.costs: dict[Shape, LayerCosts] = {}
        self.considered = self.may_fit = 0

    @property
    def title(self) -> str:
        subject, bounds = self._subject, self._bounds
        return (
            f"{subject.name}, {figure(subject.parameters / 1e9)} B parameters · {bounds.world:,} × "
            f"{self._where.hardware.title} · {bounds.batch:,} sequences of {bounds.length:,} tokens a step"
        )

    def rows(
        self, wishes: Mapping[str, tuple[object, ...]], most: int, whole: int, dollars: float | None, run: _Runner
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

    def _best(self, wishes: Mapping[str, tuple[object, ...]], rows: int, run: _Runner) -> list[_Found]:
        """The fastest splits that fit, else those that need the least memory."""
        candidates = list(splits(self._bounds, wishes))
        self.considered = len(candidates)
        if not candidates:
            raise PlanError(_nothing(self._subject, self._bounds, wishes))
        worth = [each for each in candidates if self._may_fit(each)] or candidates
        shapes = list(dict.fromkeys([*(each.shape for each in worth), ONE_RANK]))
        metered = run(partial(meter_layers, self._subject, self._where, async_tp=self._async_tp), shapes)
        self.costs = dict(zip(shapes, metered, strict=True))
        works = [self._work(each) for each in worth]
        sizes = [least_bytes(work) for work in works]
        may_fit = [
            work for work, size in zip(works, sizes, strict=True) if self._usable is None or size <= self._usable
        ]
        found = _fastest(may_fit, rows, self._usable)
        if not found:
            smallest = heapq.nsmallest(rows, range(len(works)), key=sizes.__getitem__)
            return [_Found(work.split, compose(work), memory_of(work)) for work in map(works.__getitem__, smallest)]
        self.may_fit = len(may_fit)
        return found

    def _may_fit(self, split: Split) -> bool:
        """Whether parameters, gradients and optimizer state alone fit."""
        share = split.tp * split.pp * split.shards
        trained, every = self._subject.trained, self._subject.parameters
        return self._usable is None or state_bytes(split, trained, every - trained) / share <= self._usable

    def _work(self, split: Split) -> SplitWork:
        costs, where = self.costs[split.shape], self._where
        return SplitWork(split, self._subject.kinds, costs, self._bounds.batch, where.hardware, where.cluster)

    @cached_property
    def _model_flops(self) -> int:
        """FLOPs of one sequence. They are the same for every split, whatever is computed again."""
        costs = self.costs[ONE_RANK]
        parts = [costs.before, *(costs.layers[kind] for kind in self._subject.kinds), costs.after]
        return sum(part.forward.model_flops + part.backward.model_flops for part in parts)

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
        return found + [f"assumed: {each}" for costs in self.costs.values() for each in costs.assumptions]


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


def _delayed(row: SplitRow, delays: Delays) -> SplitRow:
    seconds = delays.step_seconds(row.seconds, row.gpus)
    by_bound = {**row.seconds_by_bound, "delays": seconds - row.seconds}
    return replace(row, seconds=seconds, seconds_by_bound=by_bound, mfu=row.mfu * row.seconds / seconds)


def _compared(row: SplitRow) -> str:
    """The two figures of a split that was metered whole."""
    if row.how == "composed":
        return ""
    off = percent(row.composed_seconds / row.seconds - 1, 1)
    return f"{row.split.name}, {row.passes}: {figure(row.seconds)} s whole; composed it was {off} % off"


# Of the memory that five published runs reserve, the largest (docs/plan.md).
MEMORY_ERROR = 0.05

_FP8 = (
    "fp8 in the linear layers of each layer (scales of whole tensors; FSDP gathers them in fp8, tensor parallelism in "
    "bf16; MFU is of the bf16 peak), elsewhere in bf16"
)


def _notes(
    subject: Subject, cluster: Cluster, batch: int | None, length: int | None, bounds: Bounds, causal: Causal
) -> list[str]:
    notes = [
        f"cluster: {cluster.title}",
        f"products run in {_FP8 if subject.fp8 else 'bf16'}, gradients are summed in fp32; parameters, gradients and "
        "AdamW's state in fp32, sharded over fsdp x cp" + _frozen(subject),
        "composed: layers metered one by one, steps put together; whole: all layers of the program metered, and "
        "microbatches alike",
        f"MFU: of what a sequence takes on one GPU, attention counted {HOW_ATTENTION_COUNTS[causal]}"
        + (" (causal='exact', --causal exact: where visible)" if causal == "full" else ""),
    ]
    if batch is None:
        notes.append(f"assumed: {bounds.batch:,} sequences a step, one for each GPU (batch=)")
    if length is None:
        notes.append(f"assumed: {bounds.length:,} tokens a sequence (length=)")
    notes.append(_no_tensor_parallelism(subject))
    if not has_context_parallelism():
        notes.append(f"splits of the sequence are left out: {WITHOUT_NUMPY}")
    if subject.has_experts:
        notes.append(_no_experts(subject))
    if subject.has_experts and subject.heads:
        notes.append(
            "tensor parallelism of layers of experts: each rank routes its part of the tokens, experts are whole there"
        )
    return notes


def _frozen(subject: Subject) -> str:
    if subject.trained == subject.parameters:
        return ""
    return f"; trained: {figure(subject.trained / 1e9)} B parameters, the others are kept in bf16"


def _cautions(rows: Iterable[SplitRow], async_tp: bool, casts_alone: bool, delays: Delays) -> Iterator[str]:
    if casts_alone:
        yield "casts to fp8 are kernels of their own in eager layers: mode='compiled' (--mode compiled) fuses them"
    if async_tp:
        yield "async tensor parallelism: products hide the collectives next to them, where steps are composed"
    filled = [
        row.reserved_memory_bytes / row.usable_memory_bytes for row in rows if row.fits and row.usable_memory_bytes
    ]
    if any(share > 1 for share in filled):
        yield (
            "where more would be reserved than there is, torch's allocator gives unused segments back first, in a time "
            "that is not counted: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True reserves less (here too)"
        )
    tight = sum(share > 1 - MEMORY_ERROR for share in filled)
    if tight:
        yield (
            f"the memory of published runs is up to {percent(MEMORY_ERROR)} % off; so much room is not left in "
            f"{tight} of these splits: memory= (--memory GB) plans with a reserve"
        )
    yield from delay_notes(delays)


def _nothing(subject: Subject, bounds: Bounds, wishes: Mapping[str, tuple[object, ...]]) -> str:
    asked = f" with only={dict(wishes)}" if wishes else ""
    for name, why in (("tp", _no_tensor_parallelism(subject)), ("ep", _no_experts(subject))):
        if why and 1 not in wishes.get(name, (1,)):
            return f"{name} is 1 here{asked}: {why}"
    return (
        f"no split of {bounds.world:,} GPUs divides {bounds.batch:,} sequences of {bounds.length:,} tokens, "
        f"{bounds.layers} layers and {bounds.heads or 'no'} heads evenly{asked}: another batch=, length= or world= may"
    )


def _no_tensor_parallelism(subject: Subject) -> str:
    """Why the model cannot be split so; empty if it can."""
    return "" if subject.heads else "no tensor parallelism: the model has no plan for it (tensor_parallel=)"


def _no_experts(subject: Subject) -> str:
    """Why its experts cannot be split over ranks; empty if they can."""
    if subject.experts is not None:
        return ""
    if not subject.has_experts:
        return "the model has no experts"
    return (
        "experts are not split over ranks (ep 1): their module is not one of transformers', with `num_experts`, "
        "parameters [experts, ...] and tokens, picks and weights as inputs"
    )


def _check(whole: int, rows: int, mode: Mode, loss: Loss | None, styles: Styles | None) -> None:
    """Raises PlanError for what makes no sense, before the model is built."""
    check_whole(PlanError, rows=rows)
    check_whole(PlanError, least=0, whole=whole)
    if whole > rows:
        raise PlanError(f"whole={whole} of {rows} rows cannot be metered: give rows={whole} too")
    mode_called(mode, PlanError)
    if loss is not None:
        check_callable("loss must be a function of the model and token ids", loss)
    if styles is not None:
        check_mapping("{'layers.*.up': ColwiseParallel()}", tensor_parallel=styles)
