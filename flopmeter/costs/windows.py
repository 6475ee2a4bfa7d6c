"""The part of a tensor that sliding windows read: not all of it, if they step further than they are wide."""

from __future__ import annotations

from collections.abc import Sequence

from flopmeter.records import TensorSpec
from flopmeter.records.extents import Extent, count_union


def covered(
    x: TensorSpec,
    windows: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> TensorSpec:
    """A part of x as large as what windows along its last axes read. One number stands for all axes."""
    axes = len(windows)
    per_axis = (of if len(of) == axes else tuple(of) * axes for of in (kernel, stride, padding, dilation))
    options = zip(windows, *per_axis, strict=True)
    sizes = [_covered(size, *of_axis) for size, of_axis in zip(x.shape[-axes:], options, strict=True)]
    return x._replace(shape=(*x.shape[:-axes], *sizes))


def _covered(size: int, windows: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """How many places of one axis are read: those of each tap in all windows, in steps of the stride."""
    regions = []
    for tap in range(kernel):
        offset = tap * dilation - padding
        first, last = max(0, -(offset // stride)), min(windows - 1, (size - 1 - offset) // stride)
        if first <= last:
            steps = ((stride, last - first + 1),) if last > first else ()
            regions.append(Extent(offset + first * stride, steps))
    return count_union(regions)
