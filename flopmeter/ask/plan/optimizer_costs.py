"""What the step of an optimizer takes of a layer's shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from flopmeter.ask.plan.program import Where, give_gradients, optimizer_step
from flopmeter.distributed import world
from flopmeter.meter import FlopMeter
from flopmeter.report.report import Report


class OptimizerCost(NamedTuple):
    """Of a step on the trained parameters of one layer, in fp32; a smaller shard is assumed to take its share."""

    seconds_per_parameter: float
    bytes_per_parameter: float  # that the step takes for itself
    host_seconds: float  # of a step
    host_seconds_per_tensor: float  # besides


@dataclass(frozen=True)
class OptimizerCosts:
    """The costs by the shapes of a layer's tensors on one rank, each metered once: splits that differ in microbatches,
    recomputation or context alone have the same."""

    where: Where
    _known: dict[tuple[torch.Size, ...], OptimizerCost] = field(default_factory=dict)

    def cost(self, shapes: Sequence[torch.Size]) -> OptimizerCost:
        """The host's seconds come of steps on one and on two such layers, whose parameters are DTensors, as FSDP2 makes
        them."""
        key = tuple(shapes)
        if key not in self._known:
            with world(1) as mesh:
                one, two = (self._report(key * layers, mesh) for layers in (1, 2))
            numel = sum(shape.numel() for shape in key)
            each = (two.launch_seconds - one.launch_seconds) / len(key)
            self._known[key] = OptimizerCost(
                (one.seconds - one.idle_seconds) / numel,
                max(one.memory.timeline["temporaries"]) / numel,
                one.launch_seconds - each * len(key),
                each,
            )
        return self._known[key]

    def _report(self, shapes: Sequence[torch.Size], mesh: DeviceMesh) -> Report:
        """The second step of an optimizer; the first one makes its state."""
        shards = [DTensor.from_local(torch.empty(shape, device="meta"), mesh, [Shard(0)]) for shape in shapes]
        step = optimizer_step([each.requires_grad_() for each in shards])
        give_gradients(shards)
        step()
        give_gradients(shards)
        with FlopMeter(self.where.hardware, **self.where.meter_options) as meter:
            step()
        return meter.report(mode=self.where.mode)
