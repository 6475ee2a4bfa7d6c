"""What is asked of a server: its options, checked, and what the answer says of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from flopmeter.ask.checks import check_share, check_whole, is_positive
from flopmeter.ask.serve.cache import ServingError
from flopmeter.ask.serve.decoder import Decoder
from flopmeter.ask.serve.formats import has_product
from flopmeter.ask.serve.published import KV_BYTES, WEIGHTS, quantised
from flopmeter.ask.serve.queue import expected_tokens
from flopmeter.ask.serve.steps import StepCost, StepModel
from flopmeter.device.cluster import Cluster, cluster_of
from flopmeter.device.hardware import Hardware
from flopmeter.launch.modes import mode_called
from flopmeter.meter import Mode
from flopmeter.report.quantities import counted, duration, figure, percent, with_prefix
from flopmeter.report.rows import as_one_layer

SLOS = ("ttft", "tpot")


def read_slo(given: str | Mapping[str, float] | None) -> dict[str, float]:
    """Seconds by 'ttft' and 'tpot', from 'ttft=500ms,tpot=0.03s' or a mapping. Raises ServingError for others."""
    if given is None:
        return {}
    if not isinstance(given, str | Mapping):
        raise ServingError(f"slo must be latencies such as 'ttft=500ms,tpot=30ms', not {given!r}")
    pairs = given.items() if isinstance(given, Mapping) else (part.partition("=")[::2] for part in given.split(","))
    found: dict[str, float] = {}
    for name, value in pairs:
        name = name.strip()
        if name not in SLOS:
            raise ServingError(f"unknown latency {name!r}; known: {', '.join(SLOS)} (as in ttft=500ms,tpot=30ms)")
        if name in found:
            raise ServingError(f"the latency {name} is given twice: give it once")
        found[name] = _from_text(value) if isinstance(value, str) else value
        if not is_positive(found[name]):
            raise ServingError(f"a latency is a time such as 500ms or 0.5s, not {value!r}")
    return found


def _from_text(value: str) -> float:
    """Seconds; NaN without a unit, since 500 may be s or ms."""
    number, scale = (value[:-2], 1e-3) if value.endswith("ms") else (value[:-1], 1.0)
    try:
        return float(number) * scale if value.endswith("s") else math.nan
    except ValueError:
        return math.nan


@dataclass(frozen=True, kw_only=True)
class ServingPlan:
    """What is served, and how."""

    prompt: int
    output: int
    slo: Mapping[str, float]
    gpus: int
    spreads_experts: bool  # over the GPUs, each of which has requests of its own; else they are tensor parallel
    mode: Mode
    weights: str | None  # None: as the model was published
    kv: str | None  # None: as the config of the model says
    chunk: int | None
    prefix: float
    draft_tokens: int
    acceptance: float
    is_disaggregated: bool
    dollars_per_kwh: float | None = None
    cluster: Cluster | None = None  # None: the default one of each device

    def links(self, device: Hardware) -> Cluster:
        return cluster_of(device, self.cluster)

    @property
    def ranks(self) -> int:
        """GPUs that work on a request together, as tensor parallel ranks."""
        return 1 if self.spreads_experts else self.gpus

    @property
    def copies(self) -> int:
        """GPUs, or groups of them, that work on requests of their own."""
        return self.gpus // self.ranks

    @property
    def cached(self) -> int:
        """Tokens of a prompt that are in the cache already, the same for all requests."""
        return min(round(self.prefix * self.prompt), self.prompt - 1)

    def check(self) -> None:
        """Raises ServingError for what makes no sense."""
        whole = ("prompt", "output", "gpus", "draft_tokens", "chunk")
        check_whole(ServingError, **{name: getattr(self, name) for name in whole})
        if self.spreads_experts and self.gpus == 1:
            raise ServingError("expert_parallel spreads experts over GPUs: say how many (gpus=8, --gpus 8)")
        if self.output == 1 and "tpot" in self.slo:
            raise ServingError("with one token wanted there is no time per token after the first: leave tpot out")
        if self.is_disaggregated and self.output == 1:
            raise ServingError("prefill gives the one token that is wanted: GPUs of their own have nothing to decode")
        check_share(ServingError, prefix=self.prefix, acceptance=self.acceptance)
        mode_called(self.mode, ServingError)
        for name, given, known in (("weights", self.weights or "bf16", WEIGHTS), ("kv", self.kv or "bf16", KV_BYTES)):
            if given not in tuple(known):
                raise ServingError(f"unknown {name} {given!r}; known: {', '.join(known)}")


MOST_PADDING = 0.01  # by which vocabularies of the same tokens differ, since some are padded


def check_draft(own: Decoder, draft: Decoder) -> None:
    """Raises ServingError for a draft with other tokens than the model's."""
    sizes = [model.config.vocab_size * model.ranks for model in (own, draft)]
    if max(sizes) > (1 + MOST_PADDING) * min(sizes):
        raise ServingError(
            f"the draft has a vocabulary of {sizes[1]}, the model one of {sizes[0]}: a draft proposes the model's own"
            " tokens, so give one of the same tokenizer"
        )


def title_of(plan: ServingPlan, own: StepModel) -> str:
    kind = "expert" if plan.spreads_experts else "tensor"
    how = f", {plan.gpus} {kind} parallel GPUs" if plan.gpus > 1 else ""
    slo = ", ".join(f"{name.upper()} up to {duration(seconds)}" for name, seconds in plan.slo.items())
    return (
        f"{own.decoder.title} · {plan.prompt} tokens in, {plan.output} out{how} · weights {own.weights}, KV {own.kv},"
        f" {own.decoder.cache} cache · {plan.mode}" + (f" · {slo}" if slo else "")
    )


def links_of(plan: ServingPlan, device: Hardware, prefill: StepCost, decode: StepCost) -> str:
    """The links that a server's GPUs share, and how much of its steps they take; '' where there are none."""
    gpus = plan.gpus
    if gpus == 1 and not plan.is_disaggregated:
        return ""
    cluster = plan.links(device)
    said = f"links: {device.name} as in {cluster.title}"
    if gpus == 1:
        return said
    in_node = min(gpus, cluster.gpus_per_node)
    sizes = [*(block.gpus for block in cluster.intra.blocks if block.gpus < in_node), in_node]
    rates = [f"{figure(cluster.intra.sustained_among(set(range(size))) / 1e9)} GB/s among {size}" for size in sizes]
    rates[-1] += " GPUs"
    if gpus > in_node and cluster.inter is not None:
        rates.append(f"{figure(cluster.inter.sustained_bytes_per_s / 1e9)} GB/s a GPU between nodes")
    shares = [percent(cost.link_seconds / cost.seconds) for cost in (prefill, decode)]
    return (
        f"{said}: {', '.join(rates)}; collectives take {shares[0]} % of a step of prefill, {shares[1]} % of one of"
        " decoding for one request" + (" on each GPU" if plan.spreads_experts else "")
    )


def notes_of(
    plan: ServingPlan, own: StepModel, draft: StepModel | None, devices: Sequence[Hardware], links: Sequence[str]
) -> tuple[str, ...]:
    chunks = "prefill stops decoding" if plan.chunk is None else f"prompts in chunks of {plan.chunk} tokens"
    return (
        "steps are metered, the queue on top is arithmetic; left out: the framework's scheduler, tokenisation, network,"
        " and sampling beyond the most likely token",
        "GPUs of their own for prefill" if plan.is_disaggregated else chunks,
        *links,
        *_of_model(own),
        *_of_spread_experts(own),
        *_of_requests(plan, own.decoder, draft),
        *_of_weights(own, devices),
        *_of_cache(own),
    )


def _of_model(own: StepModel) -> Iterator[str]:
    if own.decoder.part_of:
        yield f"the language model of {own.decoder.part_of} alone: what it has for images or sound is left out"
    for path, nbytes in own.decoder.idle_parts.items():
        yield f"{path} is among the weights ({figure(nbytes / 1e9)} GB), and no step here runs it: prompts are of text"
    if picks := own.decoder.picks:
        few = "".join(f"{each} or " for each in picks[:-1])
        yield f"each token picks {few}{counted(picks[-1], 'expert')} of a layer; assumed: routing={own.routing!r}"
    if states := own.decoder.state_bytes:
        yield (
            f"{with_prefix(states, 'B')} of a request's cache are states of linear attention, in"
            f" {' and '.join(own.decoder.state_dtypes)}; none of their kernels was measured"
        )


def _of_spread_experts(own: StepModel) -> Iterator[str]:
    if layers := own.decoder.spread:
        yield (
            f"each GPU has {counted(layers[0].held, 'expert')} of a layer, all else of the model, and requests of its"
            " own; tokens go to their experts and back by two all-to-alls of NCCL a layer, and all GPUs wait for the"
            " one that gets the most"
        )


def _of_requests(plan: ServingPlan, own: Decoder, draft: StepModel | None) -> Iterator[str]:
    positions = getattr(own.config, "max_position_embeddings", None)
    if positions and plan.prompt + plan.output > positions:
        yield f"the config has {positions} positions: requests of {plan.prompt} + {plan.output} tokens need more"
    if plan.prefix:
        held = "held once for all requests" if own.cache == "paged" else "which each request holds for itself"
        yield f"{plan.cached} of {plan.prompt} tokens of each prompt are in the cache, {held}"
    if draft is not None:
        tokens = expected_tokens(plan.draft_tokens, plan.acceptance)
        yield (
            f"{draft.decoder.title} drafts {plan.draft_tokens} tokens, each accepted with {plan.acceptance:g}:"
            f" {figure(tokens)} tokens a step"
        )


MOST_NAMES = 6  # in a line


def _of_all_layers(modules: Iterable[str]) -> str:
    """The names of modules, each once for all layers."""
    names = list(dict.fromkeys(map(as_one_layer, modules)))
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {counted(more, 'other')}" if more > 0 else "")


def _else_by(option: str, published: str, served: str) -> str:
    """The format, and which option serves the model in it if another one is served."""
    return published if published == served else f"{published}: {option}={published!r} serves it so"


def _of_weights(own: StepModel, devices: Sequence[Hardware]) -> Iterator[str]:
    published = quantised(own.decoder.config)
    if published.weights:
        yield f"by its config the model was published in {_else_by('weights', published.weights, own.weights)}"
    elif published.unknown:
        yield (
            f"by its config the model was published as {published.unknown}, a format that is not known here: weights"
            f" are taken as {own.weights} (--weights says in which others)"
        )
    chosen = published.format_of(own.weights)
    if own.weights != "bf16":
        kept = _of_all_layers(name for name in published.kept if name != own.decoder.head)
        yield (
            f"weights in {own.weights}: {figure(chosen.bits)} bits; {chosen.what}; {own.decoder.head} as it is"
            + (f", and by the config {kept}" if kept else "")
        )
    if own.weights == published.weights and published.block:
        yield from _of_cut_blocks(own.decoder, published.block)
    lack = [device.name for device in devices if chosen.product and not has_product(device, chosen.product)]
    if lack:
        yield f"no products in {chosen.product} on {', '.join(lack)}: weights are unpacked in bf16 products"


def _of_cut_blocks(own: Decoder, block: int) -> Iterator[str]:
    """Widths of which a rank's part ends within a block of weights that share a scale, where the whole does not."""
    for name in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        width = getattr(own.config, name, None)
        if isinstance(width, int) and width % block and not width * own.ranks % block:
            yield (
                f"{name} {width * own.ranks} over {own.ranks} GPUs is {width} on each, no multiple of the {block}"
                " weights that share a scale by the config: engines refuse that (vLLM, SGLang), so take fewer GPUs"
                " (--gpus), or spread experts (--expert-parallel)"
            )


def _of_cache(own: StepModel) -> Iterator[str]:
    published = quantised(own.decoder.config)
    if published.kv:
        yield f"by its config the cache is kept in {_else_by('kv', published.kv, own.kv)}"
    elif published.unknown_kv:
        yield (
            f"by its config the cache is kept in {published.unknown_kv}, a format that is not known here: it is taken"
            f" as {own.kv}"
        )
