"""One device that serves a model: how many requests fit, how long a step takes, and which batch is best."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

from flopmeter.ask.compare import SECONDS_PER_HOUR
from flopmeter.ask.serve.asked import ServingPlan, links_of
from flopmeter.ask.serve.published import KV_BYTES, WEIGHTS
from flopmeter.ask.serve.queue import PREFILL_LOAD, Load, RequestWork, expected_tokens, load
from flopmeter.ask.serve.rows import ServingPoint, ServingRow
from flopmeter.ask.serve.steps import StepCost, StepModel
from flopmeter.device.hardware import Hardware, HardwareError
from flopmeter.records.powers_of_two import power_of_two_up_to
from flopmeter.report.quantities import counted, duration
from flopmeter.report.report import JOULES_PER_KWH
from flopmeter.timing.peak_memory import usable_bytes

MOST_REQUESTS = 512  # at a time: more are not metered


class Server:
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
                f" {self._weight_bytes / 1e9:.1f} GB of weights on {_each_of(plan.gpus)} of"
                f" {usable_bytes(self._device) / 1e9:.1f} GB: take {', or '.join(self._what_takes_less())}"
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
            prefill_bound_by=self._prefill_chunk.bound_by,
            decoding_bound_by=self._decode(best.at_work if best else 1).bound_by,
            prefill_servers=servers,
            dollars_per_hour=None if self._price is None else self._price * plan.gpus * (1 + servers),
        )

    def _what_takes_less(self) -> Iterator[str]:
        """What would take less memory of each GPU."""
        yield "more of them (gpus=, --gpus)"
        own = WEIGHTS[self._steps.weights].bits
        if narrower := next((name for name in ("fp8", "int4") if WEIGHTS[name].bits < own), None):
            yield f"narrower weights (weights={narrower!r}, --weights {narrower})"
        if self._weight_bytes < usable_bytes(self._device) and self._steps.kv != "fp8":
            yield "a narrower cache (kv='fp8', --kv fp8)"

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
        """What keeps the batch from being larger."""
        if best is None:
            return self._too_slow(loads[0])
        if best.batch == min(most, MOST_REQUESTS):
            return self._full(best, most)
        requests, more = counted(best.batch * self._plan.copies, "request"), loads[best.batch]
        if over := " and ".join(self._over(more)):
            return f"{over} with more than {requests} at a time"
        if more.at_work < more.batch:
            return f"with {requests} at a time each step has a full chunk of prompts: more would only wait"
        return f"more than {requests} at a time make no more tokens"

    def _too_slow(self, first: Load) -> str:
        others = "" if first.tpot_seconds is None else f" and the others every {duration(first.tpot_seconds)}"
        apart = f"at a time, with GPUs of prefill at work {PREFILL_LOAD:.0%} of the time,"
        return (
            f"one request {apart if self._plan.is_disaggregated else 'alone'} has its first token after"
            f" {duration(first.ttft_seconds)}{others}: no batch keeps to the latencies"
        )

    def _full(self, best: Load, most: int) -> str:
        if most <= MOST_REQUESTS:
            full = f"{counted(most * self._plan.copies, 'request fills', 'requests fill')} the memory"
        else:
            full = f"{MOST_REQUESTS}{' on each GPU' if self._plan.spreads_experts else ''} are the most metered"
        others = "" if best.tpot_seconds is None else f", TPOT {duration(best.tpot_seconds)}"
        return f"{full} (TTFT {duration(best.ttft_seconds)}{others})"

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


def _each_of(gpus: int) -> str:
    return "one GPU" if gpus == 1 else f"each of {gpus} GPUs"
