"""Which way to split a training step over the GPUs of a cluster fits and is fastest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

from flopmeter.ask.checks import check_callable, check_flags, check_mapping, check_positive, check_whole
from flopmeter.ask.delays import NO_DELAYS, Delays, checked_delays
from flopmeter.ask.plan.notes import cautions, compared, eager_cautions, notes_of
from flopmeter.ask.plan.program import Where
from flopmeter.ask.plan.rows import ParallelPlan, SplitRow
from flopmeter.ask.plan.search import Search
from flopmeter.ask.plan.splits import Bounds, PlanError, checked_wishes
from flopmeter.ask.plan.subject import Loss, Styles, Subject, subject_of
from flopmeter.ask.workers import results_of
from flopmeter.device.cluster import AnyCluster, Cluster, cluster_of
from flopmeter.device.hardware import AnyHardware, Hardware, load_hardware
from flopmeter.launch.modes import mode_called
from flopmeter.meter import DEFAULT_HARDWARE, Mode
from flopmeter.timing.peak_memory import usable_bytes_if_known

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
    _check_rows(rows, whole)
    _check_program(mode, loss, tensor_parallel)
    check_whole(PlanError, world=world, batch=batch, length=length, workers=workers)
    check_positive(PlanError, memory=memory, dollars_per_gpu_hour=dollars_per_gpu_hour)
    check_flags(async_tp=async_tp, fp8=fp8)
    _check_fp8(fp8, device)
    checked_delays(delays)
    wishes = checked_wishes(only or {})
    links.check_size(world)

    if meter_options.get("compile") is True and mode == "eager":
        mode = "compiled"  # what the compiler made has no eager run
    subject = subject_of(build, tensor_parallel, loss, fp8)
    tokens = length or min(USUAL_LENGTH, subject.longest or USUAL_LENGTH)
    bounds = _bounds(subject, links, world, batch or world, tokens, mode)
    usable = usable_bytes_if_known(device) if memory is None else round(memory)
    search = Search(subject, bounds, Where(tokens, device, links, mode, meter_options), usable, async_tp)
    run = partial(results_of, workers=workers, executor=executor, progress=progress)
    shown = search.rows(wishes, rows, whole, dollars_per_gpu_hour, run)
    notes = (
        *notes_of(subject, links.title_around(device), batch, length, bounds, meter_options.get("causal", "full")),
        *map(compared, shown), *search.notes(), *cautions(shown, async_tp, delays),
    )  # fmt: skip
    if mode == "eager":
        notes += tuple(eager_cautions(fp8, any(shape.tp > 1 for shape in search.costs)))
    return ParallelPlan(
        title=search.title,
        rows=tuple(_delayed(row, delays) for row in shown),
        considered=search.considered,
        may_fit=search.may_fit,
        metered=len(search.costs),
        notes=tuple(dict.fromkeys(filter(None, notes))),
    )


def _delayed(row: SplitRow, delays: Delays) -> SplitRow:
    seconds = delays.step_seconds(row.seconds, row.gpus)
    by_bound = {**row.seconds_by_bound, "delays": seconds - row.seconds}
    return replace(row, seconds=seconds, seconds_by_bound=by_bound, mfu=row.mfu * row.seconds / seconds)


def _bounds(subject: Subject, links: Cluster, world: int, sequences: int, tokens: int, mode: Mode) -> Bounds:
    return Bounds(
        world, sequences, tokens, len(subject.kinds), subject.heads, links.gpus_per_node, subject.experts,
        can_defer=mode == "eager",  # torch's schedules do not split backward passes of compiled stages
    )  # fmt: skip


def _check_rows(rows: int, whole: int) -> None:
    check_whole(PlanError, rows=rows)
    check_whole(PlanError, least=0, whole=whole)
    if whole > rows:
        raise PlanError(f"whole={whole} of {rows} rows cannot be metered: give rows={whole} too")


def _check_program(mode: Mode, loss: Loss | None, styles: Styles | None) -> None:
    mode_called(mode, PlanError)
    if loss is not None:
        check_callable("loss must be a function of the model and token ids", loss)
    if styles is not None:
        check_mapping("{'layers.*.up': ColwiseParallel()}", tensor_parallel=styles)


def _check_fp8(fp8: bool, device: Hardware) -> None:
    if fp8 and "fp8" not in device.matrix_tflop_per_s:
        raise PlanError(f"fp8: {device.title} has no matrix units for it")
