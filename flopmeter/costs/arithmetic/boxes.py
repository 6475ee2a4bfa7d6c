"""Ops of torchvision on boxes: what a detector does between its convolutional net and its heads.

Source of the algorithms: torchvision/csrc/ops/cuda/nms_kernel.cu and roi_align_kernel.cu.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from flopmeter.costs.rules import Rule, make_cost
from flopmeter.records import REDUCTION, Call, Cost, Region

_PAIR = 12  # FLOPs of an overlap: 2 sides and an area for each box and for the overlap, sum, difference, ratio
_PLACE = 10  # FLOPs of the weights of a place: 2 distances, 2 complements, 4 products, 2 for the coordinates
_TAPS = 4  # neighbours of a place
_BITS = 64  # boxes of which one word of the mask says whether they overlap


def nms(call: Call) -> Cost:
    """Each pair of boxes is compared once, and a bit of it is written and read again. The host waits for how many are
    left. Their order by score is left out."""
    boxes = call.inputs[0]
    n = boxes.shape[0]
    mask = Region(None, n * ceil(n / _BITS) * _BITS // 8)
    flops = _PAIR * n * (n - 1) // 2
    return make_cost(call, REDUCTION, flops, read=(*call.inputs, mask), written=(*call.outputs, mask), blocks_host=True)


def roi_align(call: Call) -> Cost:
    """Each output is the mean of places in its bin, each of them 4 neighbours with their weights."""
    image, boxes = call.inputs[:2]
    (out,) = call.outputs
    places = _places(call)
    flops = out.numel * places * 2 * _TAPS + out.numel // image.shape[1] * places * _PLACE
    tapped = Region(image, min(_TAPS * places * out.numel, image.distinct_elements) * image.dtype.itemsize)
    return make_cost(call, REDUCTION, flops, read=(tapped, boxes))


def roi_align_backward(call: Call) -> Cost:
    """Each gradient is added to 4 neighbours of each place, times their weights."""
    gradient = call.inputs[0]
    places = _places(call)
    flops = gradient.numel * places * 2 * _TAPS + gradient.numel // gradient.shape[1] * places * _PLACE
    return make_cost(call, REDUCTION, flops)


def _places(call: Call) -> int:
    """Places in a bin. A sampling ratio of 0 or less gives as many as the bin has pixels; 2 x 2 are counted."""
    ratio = call.argument("sampling_ratio")
    return ratio**2 if ratio > 0 else 4


BOXES: Mapping[str, Rule] = {
    "torchvision::nms": nms,
    "torchvision::roi_align": roi_align,
    "torchvision::_roi_align_backward": roi_align_backward,
}
