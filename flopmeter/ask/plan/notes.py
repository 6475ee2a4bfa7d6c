"""What a reader of a plan must know: what was assumed, what was left out, and how sure the figures are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from flopmeter.ask.delays import Delays, delay_notes
from flopmeter.ask.plan.layers import LayerCosts
from flopmeter.ask.plan.rows import SplitRow
from flopmeter.ask.plan.splits import WITHOUT_NUMPY, Bounds, Shape, has_context_parallelism
from flopmeter.ask.plan.subject import Subject
from flopmeter.meter import Causal
from flopmeter.report.quantities import HOW_ATTENTION_COUNTS, figure, percent

MOST_UNEVEN = 0.05  # of a rank's share of a layer: norms and the like are whole in every plan
MEMORY_ERROR = 0.05  # the largest error of the reserved memory of five published runs (docs/plan.md)
_FP8 = (
    "fp8 in the linear layers of each layer (scales of whole tensors; FSDP gathers them in fp8, tensor parallelism in "
    "bf16; MFU is of the bf16 peak), elsewhere in bf16"
)


def compared(row: SplitRow) -> str:
    """The two figures of a split that was metered whole."""
    if row.how == "composed":
        return ""
    off = percent(row.composed_seconds / row.seconds - 1, 1)
    return f"{row.split.name}, {row.passes}: {figure(row.seconds)} s whole; composed it was {off} % off"


def notes_of(
    subject: Subject, cluster: str, batch: int | None, length: int | None, bounds: Bounds, causal: Causal
) -> list[str]:
    notes = [
        f"cluster: {cluster}",
        f"products run in {_FP8 if subject.fp8 else 'bf16'}, gradients are summed in fp32; parameters, gradients and "
        "AdamW's state in fp32, sharded over fsdp x cp" + _frozen(subject),
        "composed: layers metered one by one, steps put together; whole: all layers of the program metered, and "
        "microbatches alike",
        f"MFU: of what a sequence takes on one GPU, attention counted {HOW_ATTENTION_COUNTS[causal]}"
        + (" (causal='exact', --causal exact: where visible)" if causal == "full" else ""),
    ]
    if batch is None:
        notes.append(f"assumed: {bounds.batch:,} sequences a step, one for each GPU (batch=, --batch)")
    if length is None:
        notes.append(f"assumed: {bounds.length:,} tokens a sequence (length=, --seq)")
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


def eager_cautions(fp8: bool, has_tp: bool) -> Iterator[str]:
    if fp8:
        yield "casts to fp8 are kernels of their own in eager layers: mode='compiled' (--mode compiled) fuses them"
    if has_tp:
        yield (
            "tensor parallelism in eager layers is that of DTensors, whose Python may keep GPUs waiting:"
            " mode='compiled' (--mode compiled) leaves it out, as Megatron-LM's layers do"
        )


def cautions(rows: Iterable[SplitRow], async_tp: bool, delays: Delays) -> Iterator[str]:
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


def shared_unevenly(subject: Subject, costs: Mapping[Shape, LayerCosts]) -> Iterator[str]:
    """Layers of which each tensor parallel rank runs more than its part, as where a plan leaves some of them whole."""
    one = next((found for shape, found in costs.items() if shape.runs_as_written and shape.microbatch == 1), None)
    known: dict[int, str] = {}
    for shape, found in costs.items():
        if one is None or shape.tp in (1, *known) or (shape.cp, shape.ep, shape.recompute) != (1, 1, "none"):
            continue
        shares = {
            kind: found.layers[kind].model_flops / (layer.model_flops * shape.microbatch)
            for kind, layer in one.layers.items()
        }
        whole = [kind for kind, share in shares.items() if share > (1 + MOST_UNEVEN) / shape.tp]
        if whole:
            kind = max(whole, key=shares.__getitem__)
            known[shape.tp] = (
                f"tp {shape.tp}: each rank runs {figure(shares[kind])} of the FLOPs of layers such as"
                f" {subject.layers}.{kind} ({sum(map(subject.kinds.count, whole))} of {len(subject.kinds)}), not"
                f" {figure(1 / shape.tp)}: the plan for tensor parallelism leaves parts of them whole"
            )
    yield from known.values()


def nothing_divides(subject: Subject, bounds: Bounds, wishes: Mapping[str, tuple[object, ...]]) -> str:
    asked = f" with only={dict(wishes)}" if wishes else ""
    for name, why in (("tp", _no_tensor_parallelism(subject)), ("ep", _no_experts(subject))):
        if why and 1 not in wishes.get(name, (1,)):
            return f"{name} is 1 here{asked}: {why}"
    return (
        f"no split of {bounds.world:,} GPUs divides {bounds.work}, {bounds.layers} layers and"
        f" {bounds.heads or 'no'} heads evenly{asked}: another batch= (--batch), length= (--seq) or world= (--gpus) may"
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
