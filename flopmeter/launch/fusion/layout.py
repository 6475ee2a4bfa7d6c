"""Which compiled regions inductor runs in channels-last: its own heuristic, on the convolutions of a region.

`GraphLowering.decide_layout_opt` of torch/_inductor/graph.py, whose speed-ups (below 1) were measured there.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import NamedTuple

from flopmeter.launch.fusion.graphs import CompiledRegion
from flopmeter.records import (
    MOVEMENT,
    NORMALIZATION,
    REDUCTION,
    ConvolutionWork,
    Cost,
    Kernel,
    Region,
    TensorSpec,
    VectorWork,
)
from flopmeter.records.memory_format import dense_strides, is_channels_last, is_dense
from flopmeter.torch_names.operators import aten

# Time of a convolution in channels-last over that in NCHW, as inductor has it. Nobody measured these here.
GROUPED, DEFAULT, NARROWING, SMALL = 1.358, 0.823, 0.725, 0.783
SMALL_CHANNELS = 64
SWITCH = "TORCHINDUCTOR_LAYOUT_OPTIMIZATION"  # the environment variable with which torch turns it on (1) and off
MOST_NODES_PER_CONVOLUTION = 300  # of the graph: with fewer convolutions the conversion is not worth it
# Nodes of a normalization in the decomposed graph (var_mean and its two results, sub, add, rsqrt, two mul, add); of
# most other ops there is one. Views have one each.
NORMALIZATION_NODES = 9
IMAGE_DIMENSIONS = 4  # of what is converted: `convolution` of _inductor/kernel/conv.py converts only images
_CONVERTED = -8  # the number of an op's first storage in the other layout; eager PyTorch's copies have those before


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
    """The kernels, with the convolutions of every region that inductor converts in channels-last.

    What such a region is given otherwise is copied where it is read: the image, and filters larger than one pixel. A
    backward graph takes what is kept as the forward graph left it (AOTAutograd hands the strides on), and goes on in
    channels-last without these copies. The gradients of the filters are copied: the program gets them in its layout.
    """
    if os.environ.get(SWITCH, "1") != "1":
        return kernels
    by_region: defaultdict[Hashable, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        name = region(kernel.op)
        if name is not None and kernel.op.phase != "optimizer":
            by_region[name].append(kernel)
    converted = {name for name, members in by_region.items() if _chooses_channels_last(members)}
    if not converted:
        return kernels
    costs: dict[tuple[Cost, tuple[bool, ...]], tuple[Cost, ...]] = {}
    made: list[Kernel] = []
    written: set[int] = set()
    for kernel in kernels:
        if region(kernel.op) not in converted:
            made.append(kernel)
            continue
        given = tuple(kernel.op.storages[spec.storage] not in written for spec in kernel.op.call.inputs)
        key = kernel.cost, given
        if key not in costs:
            costs[key] = tuple(_converted(kernel, given))
        made += [kernel._replace(cost=cost) for cost in costs[key]]
        written.update(kernel.op.makes)
    return made


def _converted(kernel: Kernel, given: tuple[bool, ...]) -> Iterator[Cost]:
    """What the kernel becomes. `given`: which inputs the region did not make itself."""
    cost, work, op = kernel.cost, kernel.cost.work, kernel.op
    is_backward = op.phase == "backward"
    if cost.access == "statistics" and len(op.call.inputs[0].shape) == IMAGE_DIMENSIONS:
        yield replace(cost, access="normalize")  # of channels that lie next to one another
        return
    if cost.op_class == REDUCTION:
        yield replace(cost, reads=tuple(map(_in_channels_last, cost.reads)))
        return
    inputs = op.call.inputs
    if not isinstance(work, ConvolutionWork) or work.shape.channels_last or len(inputs[0].shape) != IMAGE_DIMENSIONS:
        yield cost
        return
    foreign = {spec.storage: spec for spec, is_given in zip(inputs, given, strict=True) if is_given and not is_backward}
    filters = op.call.argument("weight").shape if op.packet is aten.convolution_backward else None
    reads, writes, after = list(cost.reads), list(cost.writes), []
    for place, region in enumerate(cost.reads):
        spec = foreign.get(region.spec.storage) if region.spec else None
        if spec is not None and _changes_order(spec):
            converted = spec._replace(storage=_CONVERTED - place)
            reads[place] = Region(converted, region.nbytes)
            yield _copy(cost, spec, converted)
    for place, region in enumerate(cost.writes):
        spec = region.spec
        if spec is not None and spec.shape == filters and _changes_order(spec):
            converted = spec._replace(storage=_CONVERTED - len(reads) - place)
            writes[place] = Region(converted, region.nbytes)
            after.append(_copy(cost, converted, spec))
    shape = work.shape._replace(channels_last=True)
    yield replace(cost, reads=tuple(reads), writes=tuple(writes), work=work._replace(shape=shape))
    yield from after


def _copy(cost: Cost, read: TensorSpec, written: TensorSpec) -> Cost:
    return replace(
        cost,
        name="clone",
        op_class=MOVEMENT,
        flops_by_class=((MOVEMENT, 0),),
        reads=(Region(read, read.nbytes),),
        writes=(Region(written, written.nbytes),),
        work=VectorWork(()),
    )


def _in_channels_last(region: Region) -> Region:
    spec = region.spec
    if spec is None or not is_dense(spec.shape, spec.stride, channels_last=False) or not _changes_order(spec):
        return region
    return region._replace(spec=spec._replace(stride=dense_strides(spec.shape, channels_last=True)))


def _changes_order(spec: TensorSpec) -> bool:
    """Whether its elements lie elsewhere in channels-last."""
    if len(spec.shape) != IMAGE_DIMENSIONS:
        return False
    has_one = spec.shape[1] == 1 or spec.numel == spec.shape[0] * spec.shape[1]  # channel, or pixel
    return not has_one and not is_channels_last(spec.shape, spec.stride)


def _chooses_channels_last(kernels: list[Kernel]) -> bool:
    forward = [kernel for kernel in kernels if kernel.op.phase == "forward"]
    convolutions = [
        (_filters(kernel, kernel.cost.work), kernel.cost.flops)
        for kernel in forward
        if isinstance(kernel.cost.work, ConvolutionWork)
    ]
    nodes = sum(
        kernel.views + (NORMALIZATION_NODES if kernel.cost.op_class == NORMALIZATION else 1) for kernel in forward
    )
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
    weight = kernel.op.call.argument("weight")
    return _Filters(work.implicit.batch, weight.shape[0], weight.shape[1], weight.shape[2] == 1)
