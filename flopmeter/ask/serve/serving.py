"""How many requests a language model serves on a device, at what latency, for how much money and power."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from flopmeter.ask.checks import check_flags
from flopmeter.ask.compare import checked_devices, checked_prices
from flopmeter.ask.serve.asked import ServingPlan, check_draft, notes_of, read_slo, title_of
from flopmeter.ask.serve.cache import CacheKind, ServingError
from flopmeter.ask.serve.decoder import decoder
from flopmeter.ask.serve.rows import Serving
from flopmeter.ask.serve.server import Server
from flopmeter.ask.serve.steps import StepModel
from flopmeter.device.cluster import Cluster, load_cluster
from flopmeter.device.hardware import AnyHardware, Hardware, HardwareError
from flopmeter.meter import Mode, checked_energy_price

USUAL_CHUNK = 2048  # tokens of a prompt in a step
USUAL_DRAFT_TOKENS, USUAL_ACCEPTANCE = 4, 0.7


def serving(
    target: Any,
    hardware: Iterable[AnyHardware],
    *,
    prompt: int,
    output: int,
    slo: str | Mapping[str, float] | None = None,
    gpus: int = 1,
    expert_parallel: bool = False,
    mode: Mode = "cudagraph",
    weights: str | None = None,
    kv: str | None = None,
    chunk: int | Literal["usual"] | None = "usual",
    prefix: float = 0.0,
    draft: Any = None,
    draft_tokens: int | None = None,
    acceptance: float | None = None,
    disaggregated: bool = False,
    cache: CacheKind = "paged",
    cluster: str | Cluster | None = None,
    prices: Mapping[str, float] | None = None,
    dollars_per_kwh: float | None = None,
    progress: Callable[[Sequence[Any]], Iterable[Any]] = iter,
    **meter_options: Any,
) -> Serving:
    """What serving a causal language model gives on each device: batch, latencies, tokens a second, power, money.

    target: a built-in Llama ('llama-3-8b'), 'hf:CONFIG.json', 'hf:TYPE', a config of transformers, or a model that has
        one.
    hardware: names, paths of YAML profiles or Hardware records.
    prompt, output: tokens of each request.
    slo: latencies to keep to, as 'ttft=500ms,tpot=30ms' or in seconds, {'ttft': 0.5, 'tpot': 0.03}.
    gpus: that share one copy of the model, as tensor parallel ranks.
    expert_parallel: the experts of each layer are spread over them instead; each has all else, and requests of its own.
    mode: how a step is launched; 'cudagraph' is what servers do.
    weights: 'bf16' (as the model has them), 'fp8', 'int8', 'int4', 'mxfp4' or 'nvfp4'; None: as its config says that it
        was published, else 'bf16'. kv: the cache, 'bf16' or 'fp8'; None: as its config says, else 'bf16'.
    chunk: tokens of a prompt that run in one step with decoding, as a rule 2048; None: prefill stops decoding.
    prefix: share of each prompt whose keys and values are in the cache already; a paged cache holds it once for all.
    draft: a smaller model (as `target`) that proposes `draft_tokens` tokens (4), each accepted with `acceptance` (0.7).
    disaggregated: GPUs of their own for prefill, which is not cut into chunks.
    cache: 'paged' as servers hold it, or 'transformers' as its generate() does.
    cluster: the links between GPUs, by name, as a YAML file or a Cluster; None: those that each device comes in.
    prices: dollars per GPU and hour, by device. dollars_per_kwh: what energy costs.
    meter_options: of FlopMeter.

    Raises ServingError for options that make no sense, TargetError for a model that cannot be built and HardwareError
    for an unknown device. Devices that are too small or lack a type are in `unable`.
    """
    if draft is None and (acceptance is not None or draft_tokens is not None):
        raise ServingError("acceptance and draft_tokens are of a draft: give its model as draft")
    check_flags(disaggregated=disaggregated, expert_parallel=expert_parallel)
    plan = ServingPlan(
        prompt=prompt, output=output, slo=read_slo(slo), gpus=gpus, spreads_experts=expert_parallel, mode=mode,
        weights=weights, kv=kv, chunk=_tokens_in_step(chunk, disaggregated), prefix=prefix,
        draft_tokens=USUAL_DRAFT_TOKENS if draft_tokens is None else draft_tokens,
        acceptance=USUAL_ACCEPTANCE if acceptance is None else acceptance, is_disaggregated=disaggregated,
        dollars_per_kwh=checked_energy_price(dollars_per_kwh),
        cluster=None if cluster is None else load_cluster(cluster),
    )  # fmt: skip
    plan.check()
    devices = checked_devices([hardware] if isinstance(hardware, str | Hardware) else hardware, ServingError)
    dollars = checked_prices(prices or {}, devices)

    def steps_of(model: Any, expert_ranks: int, kv: str | None) -> StepModel:
        share = decoder(model, plan.ranks, cache, expert_ranks)
        return StepModel(share, mode, weights, kv, dict(meter_options), plan.cluster)

    own = steps_of(target, plan.copies, kv)
    other = None if draft is None else steps_of(draft, expert_ranks=1, kv=own.kv)
    if other is not None:
        check_draft(own.decoder, other.decoder)
    rows, links, unable = [], [], {}
    for device in progress(devices):
        try:
            server = Server(plan, own, other, device, dollars.get(device.name))
            rows.append(server.row())
            links.append(server.links())
        except HardwareError as error:
            unable[device.name] = str(error)
    rows.sort(key=lambda row: -row.best.tokens_per_s_per_gpu if row.best else 0.0)
    notes = notes_of(plan, own, other, devices, [each for each in links if each])
    return Serving(title_of(plan, own), tuple(rows), unable, plan.slo, notes)


def _tokens_in_step(chunk: int | Literal["usual"] | None, is_apart: bool) -> int | None:
    """Tokens of a prompt in one step; None: all. Raises ServingError for a chunk where GPUs only prefill."""
    if is_apart and chunk != "usual":
        raise ServingError(
            "chunk and disaggregated exclude each other: GPUs of its own run a prompt whole, and it stops no step"
        )
    return None if is_apart else USUAL_CHUNK if chunk == "usual" else chunk
