"""How many requests a language model serves on a device, at what latency, for how much money and power."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from flopmeter.ask.checks import check_flags
from flopmeter.ask.compare import SECONDS_PER_HOUR, checked_devices, checked_prices
from flopmeter.ask.serve.asked import ServingPlan, check_draft, links_of, notes_of, title_of
from flopmeter.ask.serve.cache import CacheKind, ServingError
from flopmeter.ask.serve.decoder import decoder
from flopmeter.ask.serve.published import KV_BYTES
from flopmeter.ask.serve.queue import PREFILL_LOAD, Load, RequestWork, expected_tokens, load
from flopmeter.ask.serve.slo import read_slo
from flopmeter.ask.serve.steps import StepCost, StepModel
from flopmeter.device.cluster import Cluster, load_cluster
from flopmeter.device.hardware import AnyHardware, Hardware, HardwareError
from flopmeter.meter import Mode, checked_energy_price
from flopmeter.records.powers_of_two import power_of_two_up_to
from flopmeter.report.quantities import counted, duration, figure, in_gb, in_ms
from flopmeter.report.report import JOULES_PER_KWH
from flopmeter.report.tables import ColumnOf, Document, Shown, table_of
from flopmeter.timing.peak_memory import usable_bytes

MOST_REQUESTS = 512  # at a time: more are not metered
USUAL_CHUNK = 2048  # tokens of a prompt in a step


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
    dollars_per_hour: float | None  # of all its GPUs

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
        lines = [f"{row.hardware}: {row.limited_by}" for row in self.rows]
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
        draft_tokens=4 if draft_tokens is None else draft_tokens,
        acceptance=0.7 if acceptance is None else acceptance, is_disaggregated=disaggregated,
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
            server = _Server(plan, own, other, device, dollars.get(device.name))
            rows.append(server.row())
            links.append(server.links())
        except HardwareError as error:
            unable[device.name] = str(error)
    rows.sort(key=lambda row: -row.best.tokens_per_s_per_gpu if row.best else 0.0)
    notes = notes_of(plan, own, other, devices, [each for each in links if each])
    return Serving(title_of(plan, own), tuple(rows), unable, plan.slo, notes)


class _Server:
    """One device that serves the model."""

    def __init__(
        self, plan: ServingPlan, steps: StepModel, draft: StepModel | None, device: Hardware, price: float | None
    ):
        self._plan, self._steps, self._draft, self._device, self._price = plan, steps, draft, device, price
        self._tokens = expected_tokens(plan.draft_tokens, plan.acceptance) if draft else 1.0

    def row(self) -> ServingRow:
        plan, most = self._plan, self._most
        if most < 1:
            raise HardwareError(
                f"{self._device.name}: not even one request of {plan.prompt} + {plan.output} tokens fits beside"
                f" {self._weight_bytes / 1e9:.1f} GB of weights on each of {plan.gpus} GPUs of"
                f" {usable_bytes(self._device) / 1e9:.1f} GB: take more of them (gpus), or narrower"
                " weights (weights='fp8')"
            )
        loads = [load(self._work, batch) for batch in range(1, min(most, MOST_REQUESTS) + 1)]
        kept = [each for each in loads if not self._over(each)]
        best = max(kept, key=lambda each: each.requests_per_s, default=None)
        shown = [each for each in loads if each.batch in _doublings(most)]
        servers = best.prefill_servers if best else 0.0
        return ServingRow(
            hardware=self._device.name,
            gpus=plan.gpus,
            weight_bytes=self._weight_bytes,
            kv_bytes_per_request=self._own_kv_bytes,
            most_requests=most * plan.copies,
            prefill_seconds=self._work.prefill,
            alone_ttft_seconds=self._work.prefill + self._work.transfer,
            step_seconds=self._work.decode(1),
            points=tuple(self._point(each) for each in shown),
            best=None if best is None else self._point(best),
            limited_by=self._limit(best, most, loads),
            dollars_per_hour=None if self._price is None else self._price * plan.gpus * (1 + servers),
        )

    def links(self) -> str:
        return links_of(self._plan, self._device, self._prefill_chunk, self._step(1))

    @property
    def _weight_bytes(self) -> int:
        return self._steps.weight_bytes(self._device) + (self._draft.weight_bytes(self._device) if self._draft else 0)

    def _kv_bytes(self, tokens: int) -> float:
        """The caches of one request, that of the draft too."""
        models = (self._steps, self._draft) if self._draft else (self._steps,)
        return sum(model.decoder.kv_bytes(tokens, KV_BYTES[model.kv]) for model in models)

    @functools.cached_property
    def _most(self) -> int:
        """How many requests fit beside the weights and the memory of a step, each with all of its tokens. A step works
        on a chunk and on a token of each request, whose logits alone may be a megabyte. 0 or less: none."""
        held = self._weight_bytes + self._prefill_chunk.working_bytes + self._kv_bytes(self._shared)
        room = usable_bytes(self._device) - held
        beside = min(MOST_REQUESTS, max(1, int(room / self._own_kv_bytes)))
        metered = power_of_two_up_to(beside)
        room -= self._step(metered).working_bytes * beside / metered
        return int(room / self._own_kv_bytes)

    @property
    def _shared(self) -> int:
        """Tokens whose blocks a paged cache holds once for all requests."""
        return self._plan.cached if self._steps.decoder.cache == "paged" else 0

    @property
    def _own_kv_bytes(self) -> float:
        """The cache of a request when its last token is made, without what all share."""
        return self._kv_bytes(self._plan.prompt + self._plan.output - self._shared)

    @property
    def _chunk(self) -> int:
        return min(self._plan.prompt - self._plan.cached, self._plan.chunk or self._plan.prompt)

    @property
    def _chunks(self) -> float:
        return (self._plan.prompt - self._plan.cached) / self._chunk

    @property
    def _prefill_chunk(self) -> StepCost:
        """A chunk in the middle of the prompt, which stands for all: attention grows evenly from chunk to chunk. A
        draft reads the prompt as well, after the model."""
        before = self._plan.cached + (self._plan.prompt - self._plan.cached - self._chunk) // 2
        own = self._steps.cost(self._device, 1, self._chunk, before)
        if self._draft is None:
            return own
        draft = self._draft.cost(self._device, 1, self._chunk, before)
        return own.after(draft)._replace(working_bytes=max(own.working_bytes, draft.working_bytes))

    def _decode(self, batch: float) -> StepCost:
        """A decoding step in the middle of a request's output, interpolated between metered batches. A server may pad a
        batch, so a smaller one never takes longer."""
        lower = 1 << int(math.log2(batch))
        share, low = (batch - lower) / lower, self._padded_step(lower)
        return low.towards(self._padded_step(2 * lower), share) if share else low

    def _longer(self, batch: float) -> float:
        """By how many seconds a chunk takes longer when it runs in a decoding step. The device reads the weights once,
        and waits for the host as long as in whichever of the two waits less."""
        chunk, step = self._prefill_chunk, self._decode(batch)
        busy = chunk.busy_seconds + step.busy_seconds - self._alone.busy_seconds
        together = busy + min(chunk.idle_seconds, step.idle_seconds)
        return max(chunk.seconds, step.seconds, together) - chunk.seconds

    def _padded_step(self, batch: int) -> StepCost:
        step = self._step(batch)
        if batch >= min(self._most, MOST_REQUESTS):
            return step
        return min(step, self._padded_step(2 * batch), key=lambda cost: cost.seconds)

    def _step(self, batch: int) -> StepCost:
        """One cycle of decoding, with the draft's steps if there is one."""
        cached, plan = self._plan.prompt + self._plan.output // 2, self._plan
        if self._draft is None:
            return self._steps.cost(self._device, batch, 1, cached)
        draft = self._draft.cost(self._device, batch, 1, cached)
        verify = self._steps.cost(self._device, batch, plan.draft_tokens + 1, cached, logits=plan.draft_tokens + 1)
        return verify.after(draft, plan.draft_tokens)

    @property
    def _work(self) -> RequestWork:
        plan = self._plan
        transfer = 0.0
        if plan.is_disaggregated:
            links = plan.links(self._device)
            rate = links.inter.sustained_bytes_per_s if links.inter else links.intra.sustained_among({0, 1})
            transfer = self._kv_bytes(plan.prompt - self._shared) / rate
        return RequestWork(
            output=plan.output,
            decode=lambda batch: self._decode(batch).seconds,
            tokens_per_step=self._tokens,
            prefill=self._chunks * self._prefill_chunk.seconds,
            chunks=self._chunks if plan.chunk else 0,
            longer=self._longer,
            is_apart=plan.is_disaggregated,
            by_power=self._seconds_by_power,
            at_once=plan.chunk / self._chunk if plan.chunk else 1.0,
            transfer=transfer,
        )

    def _seconds_by_power(self, batch: float) -> float:
        joules, watts = self._joules(batch), self._device.limit_watts
        if joules is None or watts is None or self._plan.is_disaggregated:
            return 0.0
        return joules * batch / (self._plan.ranks * watts)

    @property
    def _alone(self) -> StepCost:
        return self._steps.cost(self._device, 1, 1, self._plan.prompt + self._plan.output // 2)

    def _over(self, each: Load) -> list[str]:
        """The latencies asked for that this load exceeds."""
        found = {"ttft": each.ttft_seconds, "tpot": each.tpot_seconds or 0.0}
        return [name.upper() for name, most in self._plan.slo.items() if found[name] > most]

    def _limit(self, best: Load | None, most: int, loads: list[Load]) -> str:
        if best is None:
            first = loads[0]
            others = "" if first.tpot_seconds is None else f" and the others every {duration(first.tpot_seconds)}"
            alone = (
                f"at a time, with GPUs of prefill at work {PREFILL_LOAD:.0%} of the time,"
                if self._plan.is_disaggregated
                else "alone"
            )
            return (
                f"one request {alone} has its first token after {duration(first.ttft_seconds)}{others}:"
                " no batch keeps to the latencies"
            )
        if best.batch == min(most, MOST_REQUESTS):
            copies, each = self._plan.copies, " on each GPU" if self._plan.spreads_experts else ""
            full = (
                f"{counted(most * copies, 'request fills', 'requests fill')} the memory"
                if most <= MOST_REQUESTS
                else f"{MOST_REQUESTS}{each} are the most metered"
            )
            others = "" if best.tpot_seconds is None else f", TPOT {duration(best.tpot_seconds)}"
            return f"{full} (TTFT {duration(best.ttft_seconds)}{others})"
        requests, more = counted(best.batch * self._plan.copies, "request"), loads[best.batch]
        if over := " and ".join(self._over(more)):
            return f"{over} with more than {requests} at a time"
        if more.at_work < more.batch:
            return f"with {requests} at a time each step has a full chunk of prompts: more would only wait"
        return f"more than {requests} at a time make no more tokens"

    def _point(self, each: Load) -> ServingPoint:
        plan, joules = self._plan, self._joules(each.at_work)
        requests_per_s = each.requests_per_s * plan.copies
        tokens_per_s = requests_per_s * plan.output
        gpus = plan.gpus * (1 + each.prefill_servers)
        hourly = None if self._price is None else self._price * gpus
        joules_per_token = None if joules is None else joules / plan.output
        return ServingPoint(
            batch=each.batch * plan.copies,
            ttft_seconds=each.ttft_seconds,
            tpot_seconds=each.tpot_seconds,
            requests_per_s=requests_per_s,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_gpu=tokens_per_s / gpus,
            watts_per_gpu=None if joules is None else joules * requests_per_s / gpus,
            joules_per_token=joules_per_token,
            dollars_per_million_tokens=None if hourly is None else 1e6 * hourly / SECONDS_PER_HOUR / tokens_per_s,
            energy_dollars_per_million_tokens=None
            if joules_per_token is None or plan.dollars_per_kwh is None
            else 1e6 * joules_per_token / JOULES_PER_KWH * plan.dollars_per_kwh,
        )

    def _joules(self, batch: float) -> float | None:
        """Joules of one request, on all GPUs: its prefill, and its share of the steps of decoding. GPUs of prefill
        alone also draw their idle power while they wait."""
        plan, chunk, alone, decode = self._plan, self._prefill_chunk, self._alone, self._decode(batch).joules
        if decode is None or chunk.joules is None or alone.joules is None:
            return None
        prefill = self._chunks * chunk.joules
        if plan.is_disaggregated:
            prefill += self._device.idle_watts * self._work.prefill * (1 / PREFILL_LOAD - 1)
        elif plan.chunk is not None:
            prefill = max(0.0, prefill + self._chunks * (decode / batch - alone.joules))
        return plan.ranks * (prefill + (plan.output - 1) / self._tokens * decode / batch)


def _doublings(most: int) -> set[int]:
    largest = min(most, MOST_REQUESTS)
    return {1 << power for power in range(largest.bit_length())} | {largest}


def _tokens_in_step(chunk: int | Literal["usual"] | None, is_apart: bool) -> int | None:
    """Tokens of a prompt in one step; None: all. Raises ServingError for a chunk where GPUs only prefill."""
    if is_apart and chunk != "usual":
        raise ServingError(
            "chunk and disaggregated exclude each other: GPUs of its own run a prompt whole, and it stops no step"
        )
    return None if is_apart else USUAL_CHUNK if chunk == "usual" else chunk
