"""Which compiled regions inductor runs in channels-last: its own heuristic, on the convolutions of a region.

`GraphLowering.decide_layout_opt` of torch/_inductor/graph.py, whose speed-ups (below 1) were measured there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import replace
from typing import NamedTuple

from flopmeter.launch.fusion.graphs import CompiledRegion
from flopmeter.records import NORMALIZATION, ConvolutionWork, Cost, Kernel

# Time of a convolution in channels-last over that in NCHW, as inductor has it. Nobody measured these here.
GROUPED, DEFAULT, NARROWING, SMALL = 1.358, 0.823, 0.725, 0.783
SMALL_CHANNELS = 64
MOST_NODES_PER_CONVOLUTION = 300  # of the graph: with fewer convolutions the conversion is not worth it
# Nodes of a normalization in the decomposed graph (var_mean and its two results, sub, add, rsqrt, two mul, add); of
# most other ops there is one. Views have one each.
NORMALIZATION_NODES = 9


class _Filters(NamedTuple):
    """A convolution's filters as inductor looks at them."""

    groups: int
    out_channels: int
    in_channels: int  # per group
    is_pointwise: bool

    @property
    def is_grouped(self) -> bool:
        return self.groups > 1 and self.in_channels > 1

    @property
    def is_small(self) -> bool:
        return self.out_channels <= SMALL_CHANNELS and self.in_channels <= SMALL_CHANNELS

    @property
    def narrows(self) -> bool:
        return 2 * self.out_channels <= self.in_channels and not self.is_pointwise

    @property
    def relative_time(self) -> float:
        if self.is_grouped:
            return GROUPED
        return SMALL if self.is_small else NARROWING if self.narrows else DEFAULT


def in_chosen_layout(kernels: list[Kernel], region: CompiledRegion) -> list[Kernel]:
    """The kernels; in every region that inductor converts, the convolutions are in channels-last."""
    by_region: defaultdict[Hashable, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        name = region(kernel.op)
        if name is not None and kernel.op.phase != "optimizer":
            by_region[name].append(kernel)
    converted = {name for name, members in by_region.items() if _chooses_channels_last(members)}
    if not converted:
        return kernels
    costs: dict[Cost, Cost] = {}
    return [_converted(kernel, costs) if region(kernel.op) in converted else kernel for kernel in kernels]


def _converted(kernel: Kernel, costs: dict[Cost, Cost]) -> Kernel:
    cost, work = kernel.cost, kernel.cost.work
    if not isinstance(work, ConvolutionWork) or work.shape.channels_last:
        return kernel
    if cost not in costs:
        costs[cost] = replace(cost, work=work._replace(shape=work.shape._replace(channels_last=True)))
    return kernel._replace(cost=costs[cost])


def _chooses_channels_last(kernels: list[Kernel]) -> bool:
    forward = [kernel for kernel in kernels if kernel.op.phase == "forward"]
    convolutions = [
        (_filters(kernel, kernel.cost.work), kernel.cost.flops)
        for kernel in forward
        if isinstance(kernel.cost.work, ConvolutionWork)
    ]
    nodes = sum(_nodes(kernel) for kernel in forward)
    if not convolutions or nodes >= MOST_NODES_PER_CONVOLUTION * len(convolutions):
        return False
    if len(forward) == len(kernels):  # inference
        weighted = sum(flops * filters.relative_time for filters, flops in convolutions)
        return weighted <= sum(flops for _, flops in convolutions)
    shapes = [filters for filters, _ in convolutions]
    return not (
        any(filters.is_grouped or filters.narrows for filters in shapes) or all(filters.is_small for filters in shapes)
    )


def _filters(kernel: Kernel, work: ConvolutionWork) -> _Filters:
    weight = kernel.op.call.inputs[1]
    return _Filters(work.implicit.batch, weight.shape[0], weight.shape[1], weight.shape[2] == 1)


def _nodes(kernel: Kernel) -> int:
    return kernel.views + (NORMALIZATION_NODES if kernel.cost.op_class == NORMALIZATION else 1)
