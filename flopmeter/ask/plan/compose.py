"""A step of the whole world, put together from the costs of its layers.

Each rank of the pipeline is a list of activities, which timing/concurrency.py simulates: passes of layers, FSDP's
gathers and scatters beside them, sums over replicas, and messages between stages. Approximations in addition to those
of that simulation: a layer is one activity, whose demands are the sums of its kernels', and which does not end before
the host has launched the last of them; ranks of one stage are alike; Adam's time is proportional to the shard.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from flopmeter.ask.plan.layers import LayerCosts, PartCost, PassCost
from flopmeter.ask.plan.schedules import Pass, PassKind, order_of
from flopmeter.ask.plan.splits import Split
from flopmeter.device.cluster import Cluster, price_collective
from flopmeter.device.hardware import Hardware
from flopmeter.records import DEFAULT_STREAM, Collective
from flopmeter.timing.concurrency import Activity, Party, Stretch, run_concurrently
from flopmeter.timing.contention import Demand, Transfer, transfer_of

Bound = Literal["compute", "memory", "communication", "overhead", "bubble", "delays"]
GATHERED_BYTES, REDUCED_BYTES = 2, 4  # of a parameter in bf16, of a gradient in fp32
# Streams of FSDP2, in addition to the one that computes.
GATHER, SCATTER, SUM = 1, 2, 3
FIRST_MESSAGE = 4
# What FSDP2 sends for a group of parameters, counted in its traces with torch 2.13: ops, and views of each.
GATHER_OPS, GATHER_VIEWS = 4, 2
SCATTER_OPS, SCATTER_VIEWS = 3, 1
ROUNDS = 2  # multiples of the pipeline's length: from this number of microbatches on, each adds the same time to a step


@dataclass(frozen=True)
class Composed:
    """A step of one split: the figures of the rank of the pipeline that has the most to do."""

    seconds: float
    seconds_by_bound: Mapping[Bound, float]
    microbatches: int


class SplitWork(NamedTuple):
    """One split of the work, the costs of its layers, and the machine."""

    split: Split
    kinds: Sequence[int]  # of each layer
    costs: LayerCosts
    batch: int  # sequences of a step, of all ranks
    hardware: Hardware
    cluster: Cluster

    @property
    def microbatches(self) -> int:
        return self.batch // self.split.replicas // self.split.microbatch

    def parts(self, stage: int) -> list[PartCost]:
        """The parts of that stage of the pipeline, in order."""
        counts = layers_by_stage(len(self.kinds), self.split.stages)
        start = sum(counts[:stage])
        parts = [self.costs.layers[kind] for kind in self.kinds[start : start + counts[stage]]]
        if stage == 0:
            parts = [self.costs.before, *parts]
        return [*parts, self.costs.after] if stage == self.split.stages - 1 else parts

    def chunks(self, rank: int) -> list[list[PartCost]]:
        """The parts of each of the rank's stages."""
        return [self.parts(chunk * self.split.pp + rank) for chunk in range(self.split.chunks)]

    def neighbour(self, rank: int, chunk: int, step: Literal[-1, 1]) -> int | None:
        """The stage before (-1) that one or after it (1); None where the pipeline ends."""
        stage = chunk * self.split.pp + rank + step
        return stage if 0 <= stage < self.split.stages else None

    def order(self, rank: int, microbatches: int) -> list[Pass]:
        """The rank's passes, with that many microbatches in a step."""
        return order_of(rank, self.split.pp, microbatches, self.split.chunks, self.split.defers_weights)

    def shard_numel(self, part: PartCost) -> float:
        """Parameters of the part that this rank keeps."""
        split = self.split
        return (part.parameters - part.expert_parameters + part.expert_parameters * split.ep) / split.shards

    def trained_numel(self, part: PartCost) -> float:
        """Those of these parameters that are trained."""
        return self.shard_numel(part) * part.trained_share


def layers_by_stage(layers: int, stages: int) -> list[int]:
    """The layers of each stage, as evenly as possible. The last and the first stage have other work too, so they get
    fewer if it does not come out even."""
    least, more = divmod(layers, stages)
    order = [*range(1, stages - 1), 0, stages - 1] if stages > 1 else [0]
    counts = [least] * stages
    for stage in order[:more]:
        counts[stage] += 1
    return counts


def compose(work: SplitWork) -> Composed:
    """The step of that split."""
    pp, microbatches = work.split.pp, work.microbatches
    fewer, more = ROUNDS * pp, (ROUNDS + 1) * pp
    if microbatches <= more:
        step = _simulated(work, microbatches)
    else:
        step = _longer(_simulated(work, fewer), _simulated(work, more), (microbatches - fewer) / (more - fewer))
    return Composed(sum(step.values()), step, microbatches)


def least_seconds(work: SplitWork) -> float:
    """A lower bound of the step: what the busiest rank computes, and the time in which the first and the last
    microbatch are on other ranks."""
    split = work.split
    ranks = [list(itertools.chain(*work.chunks(rank))) for rank in range(split.pp)]
    passes = [sum((part.forward + part.backward for part in parts), PassCost()) for parts in ranks]
    own = [each.seconds for each in passes]
    waited_for = own
    if split.defers_weights:
        waited_for = [own[rank] - sum(part.weights.seconds for part in parts) for rank, parts in enumerate(ranks)]
    busiest = own.index(max(own))
    others = (sum(waited_for) - waited_for[busiest]) / split.chunks
    host = max(each.host_seconds for each in passes) * work.microbatches
    return max(own[busiest] * work.microbatches + others, host)


Shares = dict[Bound, float]


def _longer(fewer: Shares, more: Shares, times: float) -> Shares:
    return {bound: max(0.0, fewer[bound] + times * (more[bound] - fewer[bound])) for bound in fewer}


def _simulated(work: SplitWork, microbatches: int) -> Shares:
    """The wall-clock of the rank that has the most to do, divided by cause."""
    ranks = {number: _RankOfSplit(work, number, microbatches) for number in range(work.split.pp)}
    stretches = run_concurrently({rank.world_rank: rank.activities for rank in ranks.values()})
    shares = [rank.shares(stretches[rank.world_rank]) for rank in ranks.values()]
    end = max(sum(each.values()) for each in shares)
    slowest = max(shares, key=lambda each: sum(each.values()) - each["bubble"])
    slowest["bubble"] += end - sum(slowest.values())
    return slowest


class _Sharded(NamedTuple):
    """A group of parameters that FSDP gathers together."""

    numel: int  # trained
    tensors: int  # trained
    gathered_bytes: int  # of all
    ranks: tuple[int, ...]  # that it is sharded over


class _RankOfSplit:
    """What one rank of the pipeline is given to do."""

    def __init__(self, work: SplitWork, rank: int, microbatches: int) -> None:
        self._work, self._rank, self._split = work, rank, work.split
        self._stride = work.split.group("pp")[1] if work.split.pp > 1 else 1
        self._chunks = work.chunks(rank)
        self._microbatches = microbatches
        self.world_rank = rank * self._stride
        self.activities: list[Activity] = []
        self._costs: list[PassCost | None] = []  # of each activity that computes
        self._streams: dict[Party, int] = {}
        self._prices: dict[Collective, tuple[float, Transfer]] = {}
        self._scatters: list[int] = []
        self._last_scatter: tuple[int, ...] = ()
        self._done: tuple[int, ...] = ()  # the last activity of the pass that the program is at
        self._schedule()

    # --- the program ---

    def _schedule(self) -> None:
        split, work = self._split, self._work
        is_sharded = split.shards > 1
        keeps_whole = split.gather == "step"
        has_gradients: PassKind = "weights" if split.defers_weights else "backward"
        for each in work.order(self._rank, self._microbatches):
            parts, first = self._chunks[each.chunk], each.microbatch == 0
            last = each.microbatch == self._microbatches - 1
            is_forward = each.kind == "forward"
            arrived = self._receive(each)
            gathers = is_sharded and (first and is_forward if keeps_whole else True)
            scatters = each.kind == has_gradients and (last if keeps_whole else True)
            if gathers or scatters:
                self._layer_by_layer(parts if is_forward else parts[::-1], each.kind, gathers, scatters, arrived)
            else:
                total = sum((self._cost(part, each.kind) for part in parts), PassCost())
                self._done = self._compute(total, arrived)
            if each.kind == has_gradients and keeps_whole:
                self._accumulate(sum(part.trained_parameters for part in parts), first)
            self._send(each)
        self._compute(self._optimizer(), tuple(self._scatters))

    def _optimizer(self) -> PassCost:
        cost = self._work.costs.optimizer
        numel = sum(self._work.trained_numel(part) for parts in self._chunks for part in parts)
        tensors = sum(part.trained_tensors for parts in self._chunks for part in parts)
        groups = 1 + (self._split.ep > 1)  # torch's lists of DTensors are of one mesh, and experts have another
        return PassCost(
            memory_seconds=cost.seconds_per_parameter * numel,
            host_seconds=cost.host_seconds * groups + cost.host_seconds_per_tensor * tensors,
        )

    def _cost(self, part: PartCost, kind: PassKind) -> PassCost:
        if kind == "backward" and self._split.defers_weights:
            return part.backward - part.weights
        costs = {"forward": part.forward, "backward": part.backward, "weights": part.weights}
        return costs[kind]

    def _accumulate(self, numel: int, first: bool) -> None:
        """Gradients of a microbatch are added to those before: by FSDP2 in fp32, else in their own type."""
        if self._microbatches == 1:
            return
        if self._split.shards > 1:
            nbytes = GATHERED_BYTES + (REDUCED_BYTES if first else 2 * REDUCED_BYTES)
        else:
            nbytes = 0 if first else 3 * GATHERED_BYTES
        self._compute(PassCost(memory_seconds=self._moved(nbytes * numel)), ())

    def _layer_by_layer(
        self, parts: list[PartCost], kind: PassKind, gathers: bool, scatters: bool, arrived: tuple[int, ...]
    ) -> None:
        """As FSDP2 does it. While a layer runs, the next one's parameters are gathered. Its gradients are scattered
        while the next one runs, whose end waits for that. What is outside of layers is one group: gathered before all
        and kept, scattered after all."""
        costs = self._work.costs
        copied: tuple[int, ...] = ()
        outside = [part for part in parts if costs.is_outside(part)]
        if gathers and kind == "forward" and outside:
            copied = self._gather(outside, ())
        for part in parts:
            is_layer = part not in outside
            if gathers and is_layer:
                copied = self._gather([part], copied)
            self._done = self._compute(self._cost(part, kind), (*arrived, *copied))
            if scatters and is_layer:
                self._scatter([part])
        if scatters and outside:
            self._scatter(outside)

    def _sharded(self, parts: list[PartCost]) -> list[_Sharded]:
        """The groups of FSDP: experts are one of their own."""
        experts = sum(part.expert_parameters for part in parts) if self._split.ep > 1 else 0
        numel, nbytes = sum(part.trained_parameters for part in parts), sum(part.gathered_bytes for part in parts)
        trained = sum(round(part.expert_parameters * part.trained_share) for part in parts) if experts else 0
        of_experts = GATHERED_BYTES * experts
        tensors = sum(part.trained_tensors for part in parts)
        their_tensors = sum(part.expert_tensors for part in parts) if experts else 0
        ranks = self._split.group("fsdp", "cp")
        others = _Sharded(numel - trained, tensors - their_tensors, nbytes - of_experts, ranks)
        found = [others, _Sharded(trained, their_tensors, of_experts, self._split.expert_shards)]
        return [each for each in found if each.gathered_bytes] if experts else [others]

    def _gather(self, parts: list[PartCost], after: tuple[int, ...]) -> tuple[int, ...]:
        """Parameters are gathered, and copied out of the buffers. Experts are fetched with the rest of their layer, as
        torchtitan tells FSDP2 (`set_modules_to_forward_prefetch`)."""
        host, groups = self._work.hardware.host, self._sharded(parts)
        sent = [Collective("all_gather", group.gathered_bytes, group.ranks) for group in groups]
        arriving = [self._transfer(each, GATHER, after) for each in sent]
        for group, gathered in zip(groups, arriving, strict=True):
            moved = self._moved(2 * group.gathered_bytes)
            launched = self._sent(GATHER_OPS, GATHER_VIEWS * group.tensors) + host.fsdp_gather_seconds(group.tensors)
            after = self._compute(PassCost(memory_seconds=moved, host_seconds=launched), gathered)
        return after

    def _scatter(self, parts: list[PartCost]) -> None:
        """Gradients are copied into an fp32 buffer once the scatter before is done, scattered, and summed over
        replicas."""
        split, host, after = self._split, self._work.hardware.host, self._done
        for group in self._sharded(parts):
            if not group.numel:
                continue
            reduced = REDUCED_BYTES * group.numel
            if split.shards > 1:
                moved = self._moved(GATHERED_BYTES * group.numel + reduced)
                sent = self._sent(SCATTER_OPS, SCATTER_VIEWS * group.tensors) + host.fsdp_reduce_seconds(group.tensors)
                copy = PassCost(memory_seconds=moved, host_seconds=sent)
                after = self._compute(copy, (*self._done, *self._last_scatter))
                after = self._transfer(Collective("reduce_scatter", reduced, group.ranks), SCATTER, after)
                self._last_scatter = after
            if split.dp > 1:
                summed = Collective("all_reduce", reduced // len(group.ranks), split.group("dp"))
                after = self._transfer(summed, SUM, after)
            self._scatters = [*self._last_scatter, *after]

    def _receive(self, each: Pass) -> tuple[int, ...]:
        """The message from a neighbour that the pass needs."""
        source = self._neighbour(each, -1 if each.kind == "forward" else 1)
        return () if source is None else self._message("recv", source, self._rank, ())

    def _send(self, each: Pass) -> None:
        receiver = self._neighbour(each, 1 if each.kind == "forward" else -1)
        if receiver is not None:
            self._message("send", self._rank, receiver, self._done)

    def _neighbour(self, each: Pass, step: Literal[-1, 1]) -> int | None:
        """The rank of the pipeline with which the pass exchanges a message."""
        stage = self._work.neighbour(self._rank, each.chunk, step)
        return None if stage is None or each.kind == "weights" or self._split.pp == 1 else stage % self._split.pp

    # --- activities ---

    def _add(self, activity: Activity, cost: PassCost | None) -> tuple[int, ...]:
        self.activities.append(activity._replace(after=tuple(sorted(set(activity.after)))))
        self._costs.append(cost)
        return (len(self.activities) - 1,)

    def _compute(self, cost: PassCost, after: tuple[int, ...]) -> tuple[int, ...]:
        """The device begins with the first kernel, and ends once the host has launched the last one."""
        demand = Demand(cost.compute_seconds, cost.memory_seconds)
        done = self._add(Activity(0.0, cost.seconds, False, DEFAULT_STREAM, after, demand=demand), cost)
        if cost.host_seconds:
            done = self._add(Activity(cost.host_seconds, 0.0, False, DEFAULT_STREAM), PassCost())
        return done

    def _moved(self, nbytes: int) -> float:
        return nbytes / self._work.hardware.sustained_bandwidth_bytes_per_s

    def _sent(self, ops: int, views: int) -> float:
        """Seconds of the host for so many of FSDP's ops and views."""
        host = self._work.hardware.host
        return ops * host.op_seconds(is_library=False) + host.before_op_seconds(views, module_calls=0)

    def _message(
        self, kind: Literal["send", "recv"], sender: int, receiver: int, after: tuple[int, ...]
    ) -> tuple[int, ...]:
        ends = sender * self._stride, receiver * self._stride
        pair = tuple(sorted(ends))
        # Forward and backward messages between two ranks go in other directions, or (with two ranks and more chunks)
        # share one in the order of the schedule.
        party = Party(pair, ends)
        stream = self._streams.setdefault(party, FIRST_MESSAGE + len(self._streams))
        collective = Collective(kind, self._work.costs.boundary_bytes, pair)
        return self._transfer(collective, stream, after, party=party)

    def _transfer(
        self, collective: Collective, stream: int, after: tuple[int, ...], party: Party | None = None
    ) -> tuple[int, ...]:
        if collective not in self._prices:
            self._prices[collective] = self._price(collective)
        seconds, demand = self._prices[collective]
        return self._add(Activity(0.0, seconds, False, stream, after, party=party, demand=demand), None)

    def _price(self, collective: Collective) -> tuple[float, Transfer]:
        device, cluster = self._work.hardware, self._work.cluster
        price = price_collective(collective, cluster)
        bandwidth = device.sustained_bandwidth_bytes_per_s
        return price.seconds, transfer_of(collective, price, cluster.intra.transport, device.sm_count, bandwidth)

    # --- what came of it ---

    def shares(self, stretches: list[Stretch]) -> Shares:
        """The time until this rank has ended, divided by what the computing stream does or waits for."""
        shares: Shares = dict.fromkeys(("compute", "memory", "communication", "overhead", "bubble"), 0.0)
        end = 0.0
        for activity, cost, stretch in zip(self.activities, self._costs, stretches, strict=True):
            if cost is None:
                continue
            shares[self._waits_for(activity, stretch, stretches)] += stretch.start_seconds - end
            slowed = (stretch.end_seconds - stretch.start_seconds) / cost.seconds if cost.seconds else 1.0
            shares["compute"] += cost.compute_seconds * slowed
            shares["memory"] += cost.memory_seconds * slowed
            shares["communication"] += cost.communication_seconds * slowed
            shares["overhead"] += cost.overhead_seconds * slowed
            end = stretch.end_seconds
        return shares

    def _waits_for(self, activity: Activity, stretch: Stretch, stretches: list[Stretch]) -> Bound:
        """What the computing stream waits for before that activity, if it waits: the host, or the last of what has to
        be done before."""
        latest = max(activity.after, key=lambda other: stretches[other].end_seconds, default=None)
        if latest is None or stretches[latest].end_seconds < stretch.sent_seconds:
            return "overhead"
        return "bubble" if self.activities[latest].party is not None else "communication"
