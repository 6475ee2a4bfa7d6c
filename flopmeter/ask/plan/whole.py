"""A split metered whole: all layers of the real program, with torch's FSDP2, DTensor and optimizer around them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from flopmeter.ask.plan.compose import Bound
from flopmeter.ask.plan.experts import with_routing
from flopmeter.ask.plan.memory import MemoryUse
from flopmeter.ask.plan.program import PARAMETERS, Where, backward, give_gradients, optimizer_step, shard, split_layers
from flopmeter.ask.plan.splits import Split
from flopmeter.ask.plan.subject import Subject, tokens_of
from flopmeter.distributed import world
from flopmeter.meter import FlopMeter


class Whole(NamedTuple):
    """A step of one split, of which all layers ran."""

    seconds: float
    seconds_by_bound: Mapping[Bound, float]
    memory: MemoryUse
    fits: bool | None  # None: nobody says in how many bytes


def meter_whole(subject: Subject, where: Where, job: tuple[Split, int], *, usable_bytes: int | None = None) -> Whole:
    """A split without a pipeline, metered whole. `job`: the split, and the microbatches of a rank in a step. Metered
    are the optimizer's step and two microbatches (three where parameters stay gathered between them: the first, one
    between and the last); the second one counts as often as the step has more."""
    split, microbatches = job
    with world(math.prod(split.mesh.values()), split.mesh, gpus_per_node=where.cluster.gpus_per_node) as mesh:
        model = subject.model()
        for frozen in (each for each in model.parameters() if not each.requires_grad):
            frozen.data = frozen.data.to(PARAMETERS)
        split_layers(subject, model, mesh, split.recompute, split.expert_ranks)
        shard(subject, model, mesh, split)
        step = optimizer_step(model.parameters())
        give_gradients(model.parameters())
        step()  # the first one makes the optimizer's state
        tokens = tokens_of(model, split.microbatch, where.length)
        with FlopMeter(where.hardware, cluster=where.cluster, **with_routing(split.ep, where.meter_options)) as meter:
            count = min(microbatches, 3 if split.gather == "step" else 2)
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
        report = meter.report(mode=where.mode)
        again = microbatches - count
        more = meter.report(mode=where.mode, ops=passes[1]).seconds_by_regime if again else {}
    by_bound: dict[Bound, float] = {
        bound: seconds + again * more.get(bound, 0.0) for bound, seconds in report.seconds_by_regime.items()
    }
    memory = report.memory
    use = MemoryUse(memory.steady_peak_bytes, memory.steady_reserved_bytes)
    fits = None if usable_bytes is None else memory.fits_in(usable_bytes, allocator=True)
    return Whole(sum(by_bound.values()), by_bound | {"bubble": 0.0}, use, fits)
