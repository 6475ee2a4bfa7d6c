"""torchvision's ops on boxes, with which detectors train: which boxes are kept, and what it costs."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from flopmeter import DataDependentError, FlopMeter

SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width,"
    " int sampling_ratio, bool aligned) -> Tensor",
    "_roi_align_backward": "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height,"
    " SymInt pooled_width, SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio,"
    " bool aligned) -> Tensor",
}


@pytest.fixture
def ops():
    """torchvision's ops as it declares them, and the shapes that its own meta kernels give."""
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision itself declares them")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in SCHEMAS.values():
        library.define(schema)
    library.impl(
        "roi_align",
        lambda image, boxes, scale, height, width, *_: image.new_empty(len(boxes), 16, height, width),
        "Meta",
    )
    library.impl(
        "_roi_align_backward",
        lambda grad, boxes, *sizes: grad.new_empty(*sizes[3:7]),
        "Meta",
    )
    yield torch.ops.torchvision
    library._destroy()


def boxes(n: int) -> torch.Tensor:
    return torch.empty(n, 4, device="meta")


def test_a_stated_share_of_the_boxes_is_kept(ops):
    with FlopMeter(mask_fraction=0.1) as meter:
        kept = ops.nms(boxes(1000), torch.empty(1000, device="meta"), 0.5)
        assert kept.tolist() == list(range(0, 1000, 10))
    assert "mask_fraction=0.1 (of the boxes is kept) for torchvision.nms.default" in meter.report().assumptions[0]


def test_without_a_share_the_error_says_to_state_one(ops):
    with FlopMeter() as _, pytest.raises(DataDependentError, match="what share of the boxes is kept"):
        ops.nms(boxes(8), torch.empty(8, device="meta"), 0.5)


def test_each_pair_of_boxes_is_compared_once(ops):
    """100 boxes are 4,950 pairs of 12 FLOPs: three areas of 3; the largest and least of two numbers are none. A row of
    the mask is two words of 8 bytes, written and read."""
    with FlopMeter(mask_fraction=0.5) as meter:
        ops.nms(boxes(100), torch.empty(100, device="meta"), 0.5)
    report = meter.report()
    assert report.flops == 4950 * 12
    assert report.bytes_read == 100 * 5 * 4 + 100 * 16
    assert report.bytes_written == 50 * 8 + 100 * 16


def test_an_aligned_region_is_four_neighbours_of_each_place(ops):
    """10 boxes of 7 x 7 bins of 2 x 2 places: 1,960 places, of 4 multiply-adds for each of 16 channels."""
    with FlopMeter() as meter:
        ops.roi_align(torch.empty(1, 16, 50, 50, device="meta"), torch.empty(10, 5, device="meta"), 1.0, 7, 7, 2, False)
    report = meter.report()
    assert report.flops == 1960 * 16 * 8 + 1960 * 10
    assert report.bytes_read == 16 * 50 * 50 * 4 + 10 * 5 * 4
    assert report.uncounted == []


def test_a_gradient_of_an_aligned_region_goes_to_four_neighbours_of_each_place(ops):
    with FlopMeter() as meter:
        ops._roi_align_backward(torch.empty(10, 16, 7, 7, device="meta"), boxes(10), 1.0, 7, 7, 1, 16, 50, 50, 2, False)
    report = meter.report()
    assert report.flops == 1960 * 16 * 8 + 1960 * 10
    assert report.uncounted == []


@pytest.mark.parametrize(("ratio", "places"), [(3, 9), (1, 1), (2, 4), (0, 4), (-1, 4)])
def test_the_square_of_the_sampling_ratio_is_how_many_places_a_bin_has(ops, ratio, places):
    """0 and less depend on the boxes, whose values nobody knows: two by two are counted."""
    image, box = torch.empty(1, 16, 50, 50, device="meta"), torch.empty(10, 5, device="meta")
    with FlopMeter() as meter:
        ops.roi_align(image, box, 1.0, 7, 7, ratio, False)
    with FlopMeter() as backward:
        ops._roi_align_backward(torch.empty(10, 16, 7, 7, device="meta"), box, 1.0, 7, 7, 1, 16, 50, 50, ratio, False)
    assert meter.report().flops == backward.report().flops == 490 * places * (16 * 8 + 10)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_mask_as_large_as_a_detectors_anchors_selects_the_share(dtype):
    with FlopMeter(mask_fraction=0.01):
        mask = (torch.randn(200_000, device="meta") > 0).to(dtype)
        assert len(mask.nonzero()) == 2000


def test_the_host_waits_for_how_many_boxes_are_left(ops):
    """As torchvision's nms does on CUDA, which copies the mask to the host to walk it."""
    with FlopMeter(mask_fraction=0.5) as meter:
        ops.nms(boxes(100), torch.empty(100, device="meta"), 0.5)
    assert any(kernel.cost.blocks_host for kernel in meter.report().kernels)


def test_a_small_box_of_a_large_image_reads_the_neighbours_of_its_places_alone(ops):
    """7 x 7 bins of 4 places, each with 4 neighbours, in 16 channels; and the box itself."""
    with FlopMeter("h100-sxm5-80gb") as meter:
        ops.roi_align(
            torch.empty(1, 16, 500, 500, device="meta"), torch.empty(1, 5, device="meta"), 1.0, 7, 7, 2, False
        )
    (kernel,) = meter.report().kernels
    assert kernel.cost.bytes_read == 4 * (16 * 7 * 7 * 4 * 4 + 5)
