"""What one step of a server takes on a device: metered, with the collectives of tensor parallelism after it."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from flopmeter.ask.meters import Meters
from flopmeter.ask.serve.decoder import Decoder
from flopmeter.ask.serve.formats import in_formats, narrow_bytes
from flopmeter.ask.serve.published import quantised
from flopmeter.ask.serve.shorter import is_one_turn_more
from flopmeter.device.cluster import Cluster, cluster_of, price_collective
from flopmeter.device.hardware import Hardware
from flopmeter.device.peer_memory import all_reduce_seconds
from flopmeter.meter import Mode
from flopmeter.records import Collective, Regime
from flopmeter.report.report import Report

LOGIT_BYTES = 2


class StepCost(NamedTuple):
    """One step on one rank."""

    seconds: float
    joules: float | None  # None where nobody knows what the device may draw
    working_bytes: int  # in addition to weights and cache
    link_seconds: float  # of `seconds`: collectives, which nothing hides
    busy_seconds: float  # of `seconds`: in which the device works, and does not wait for the host
    compute_seconds: float = 0.0  # of `seconds`: of kernels bound by it
    memory_seconds: float = 0.0  # likewise

    @property
    def idle_seconds(self) -> float:
        return self.seconds - self.busy_seconds

    @property
    def bound_by(self) -> Regime:
        """What takes the largest part of it."""
        shares: dict[Regime, float] = {
            "compute": self.compute_seconds, "memory": self.memory_seconds, "communication": self.link_seconds,
        }  # fmt: skip
        shares["overhead"] = self.seconds - sum(shares.values())
        return max(shares, key=shares.__getitem__)

    def after(self, other: StepCost, times: int = 1) -> StepCost:
        """This step with `times` of the other one before it. The memory is that of this step."""
        return self._each(other, lambda own, others: own + times * others)._replace(working_bytes=self.working_bytes)

    def towards(self, other: StepCost, share: float) -> StepCost:
        """The step on the line between this one (0) and the other one (1). The memory is that of the other one."""
        between = self._each(other, lambda own, others: own + share * (others - own))
        return between._replace(working_bytes=other.working_bytes)

    def _each(self, other: StepCost, combined: Callable[[float, float], float]) -> StepCost:
        """What is combined of each figure of the two; unknown where one is."""
        pairs: Iterator[tuple[Any, Any]] = zip(self, other, strict=True)
        figures: list[Any] = [None if None in (own, others) else combined(own, others) for own, others in pairs]
        return StepCost(*figures)

    def with_turns(self, turns: int, more: StepCost) -> StepCost:
        """The step with that many more turns of layers, of which `more` has one."""
        grown = max(0, more.working_bytes - self.working_bytes)
        return self.towards(more, turns)._replace(working_bytes=self.working_bytes + turns * grown)


class StepModel:
    """The steps of one decoder. A step is metered once for all devices that run the same ops."""

    def __init__(
        self,
        decoder: Decoder,
        mode: Mode,
        weights: str | None,
        kv: str | None,
        meter_options: dict[str, Any],
        cluster: Cluster | None = None,
    ):
        self.decoder, self.mode, self._cluster = decoder, mode, cluster
        self._published = quantised(decoder.config)._replace(head=decoder.head)
        self.weights = weights or self._published.weights or "bf16"
        self.kv = kv or self._published.kv or "bf16"
        self._options = {"routing": "independent", "checks": "hold", **meter_options}
        self._meters: dict[tuple[int, ...], Meters] = {}  # by batch, new and cached tokens, and logits
        self._known: dict[tuple[str, int, int, int, int], StepCost] = {}
        self._pairs = self._short_models(mode, weights, kv, meter_options, cluster)
        self._pair = next(self._pairs, None)  # of the short models that are known to tell the steps so far

    def _short_models(self, *same: Any) -> Iterator[tuple[StepModel, StepModel, int]]:
        """Steps of pairs of models with fewer layers, and how many more turns this one has than the first."""
        if self.decoder.shorter is not None:
            steps = functools.cache(lambda decoder: StepModel(decoder, *same))
            for fewer, more, turns in self.decoder.shorter.pairs():
                yield steps(fewer), steps(more), turns

    @property
    def routing(self) -> Any:
        """How tokens are assumed to pick experts, as FlopMeter takes it."""
        return self._options["routing"]

    def cost(self, device: Hardware, batch: int, new: int, cached: int, logits: int = 1) -> StepCost:
        """The cost of `new` tokens for each of `batch` sequences, after `cached` ones."""
        key = (device.name, batch, new, cached, logits)
        if key not in self._known:
            sizes = (batch, new, cached, logits)
            self._known[key] = self._continued(device, *sizes) or self._cost_of(self.report(device, *sizes), *sizes)
        return self._known[key]

    def _continued(self, device: Hardware, *sizes: int) -> StepCost | None:
        """By the short models; None where none tells the step."""
        while self._pair is not None:
            fewer, more, turns = self._pair
            reports = fewer.report(device, *sizes), more.report(device, *sizes)
            if is_one_turn_more(*reports):
                return fewer._cost_of(reports[0], *sizes).with_turns(turns, more._cost_of(reports[1], *sizes))
            self._pair = next(self._pairs, None)
        return None

    def _cost_of(self, report: Report, batch: int, new: int, cached: int, logits: int) -> StepCost:
        """With the collectives."""
        links = self._collective_seconds(report.hardware, batch * new, batch * logits)
        joules = None
        if report.joules is not None and report.clock.idle_watts is not None:
            joules = report.joules + report.clock.idle_watts * links
        held = self.decoder.parameter_bytes + round(batch * self.decoder.metered_kv_bytes(cached, new))
        working = max(0, report.memory.peak_bytes - held)
        busy = min(report.kernel_seconds, report.seconds) + links
        shares = report.seconds_by_regime
        return StepCost(report.seconds + links, joules, working, links, busy, shares["compute"], shares["memory"])

    def weight_bytes(self, device: Hardware) -> int:
        """Bytes of this rank's weights, in the format."""
        if self._pair is not None:
            fewer, more, turns = self._pair
            return fewer.weight_bytes(device) + turns * (more.weight_bytes(device) - fewer.weight_bytes(device))
        report = self._eager(device, 1, 1, 0, 1)
        return self.decoder.parameter_bytes - narrow_bytes(
            report.kernels, report.memory.trace, self.weights, self._published
        )

    def report(self, device: Hardware, batch: int, new: int, cached: int, logits: int = 1) -> Report:
        """The step's own report with each layer metered, without collectives."""
        report = self._eager(device, batch, new, cached, logits)
        assert report.in_mode is not None
        kernels = in_formats(report.kernels, report.memory.trace, device, self.weights, self.kv, self._published)
        return report.in_mode(self.mode, kernels=kernels, is_captured=self.decoder.cache == "paged")

    def _eager(self, device: Hardware, *sizes: int) -> Report:
        meters = self._meters.setdefault(sizes, Meters(self._options))
        return meters.known(device) or meters.metered(self.decoder.step(*sizes), device)

    def _collective_seconds(self, device: Hardware, tokens: int, scored: int) -> float:
        """All-reduces of the activations in each layer, and a gather of the logits; or tokens that go to spread experts
        and come back. Nothing hides them."""
        ranks = self.decoder.ranks
        if ranks == 1 and not self.decoder.spread:
            return 0.0  # a device alone may have no links
        cluster = cluster_of(device, self._cluster)
        if ranks == 1:
            sent = (Collective("all_to_all", each.bytes_arriving(tokens), each.group) for each in self.decoder.spread)
            return sum(2 * price_collective(each, cluster).seconds for each in sent)
        config, token_bytes = self.decoder.config, tokens * self.decoder.model.dtype.itemsize
        logits = Collective("all_gather", scored * config.vocab_size * ranks * LOGIT_BYTES, tuple(range(ranks)))
        in_layers = sum(
            times * all_reduce_seconds(size * token_bytes, ranks, device, cluster)
            for size, times in Counter(self.decoder.all_reduces).items()
        )
        return in_layers + price_collective(logits, cluster).seconds
