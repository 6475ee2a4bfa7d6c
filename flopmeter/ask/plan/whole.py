"""A split metered whole: all layers of the real program, with torch's FSDP2, DTensor and optimizer around them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from flopmeter.ask.plan.compose import Bound
from flopmeter.ask.plan.experts import with_routing
from flopmeter.ask.plan.memory import MemoryUse
from flopmeter.ask.plan.program import PARAMETERS, backward, optimizer_step, shard, split_layers
from flopmeter.ask.plan.splits import Split
from flopmeter.ask.plan.subject import Subject
from flopmeter.device.cluster import Cluster
from flopmeter.device.hardware import Hardware
from flopmeter.distributed import world
from flopmeter.meter import FlopMeter, Mode


class WholeJob(NamedTuple):
    """What a worker needs to meter a split."""

    subject: Subject
    split: Split
    microbatches: int
    length: int
    hardware: Hardware
    cluster: Cluster
    mode: Mode
    meter_options: Mapping[str, Any]
    usable_bytes: int | None = None


class Whole(NamedTuple):
    """A step of one split, of which all layers ran."""

    seconds: float
    seconds_by_bound: Mapping[Bound, float]
    memory: MemoryUse
    fits: bool | None  # None: the job does not say in how many bytes


def meter_whole(job: WholeJob) -> Whole:
    """A split without a pipeline: the optimizer's step and two microbatches, or, where parameters stay gathered between
    microbatches, the first, one between and the last; and the second one so often again as a step has more."""
    subject, split = job.subject, job.split
    with world(math.prod(split.mesh.values()), split.mesh, gpus_per_node=job.cluster.gpus_per_node) as mesh:
        model = subject.model()
        for frozen in (each for each in model.parameters() if not each.requires_grad):
            frozen.data = frozen.data.to(PARAMETERS)
        split_layers(subject, model, mesh, split.recompute, split.expert_ranks)
        shard(subject, model, mesh, split)
        step = optimizer_step(model.parameters())
        tokens = torch.empty(split.microbatch, job.length, dtype=torch.long, device="meta")
        with FlopMeter(job.hardware, cluster=job.cluster, **with_routing(split.ep, job.meter_options)) as meter:
            count = min(job.microbatches, 3 if split.gather == "step" else 2)
            passes: list[range] = []
            for number in range(count):
                is_last = number == count - 1
                if split.gather == "step":
                    model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
                    model.set_reshard_after_backward(is_last)  # type: ignore[operator]
                start = len(meter.trace.ops)
                backward(subject, model, mesh, tokens)
                passes.append(range(start, len(meter.trace.ops)))
            step()
        report = meter.report(mode=job.mode)
        again = job.microbatches - count
        more = meter.report(mode=job.mode, ops=passes[1]).seconds_by_regime if again else {}
    by_bound: dict[Bound, float] = {
        bound: seconds + again * more.get(bound, 0.0) for bound, seconds in report.seconds_by_regime.items()
    }
    memory, usable = report.memory, job.usable_bytes
    use = MemoryUse(memory.steady_peak_bytes, memory.steady_reserved_bytes)
    fits = None if usable is None else memory.fits_in(usable, allocator=True)
    return Whole(sum(by_bound.values()), by_bound | {"bubble": 0.0}, use, fits)
