"""Grouped convolutions beside what an H100 took (torch 2.11, cuDNN 9.19, 2026-11: h100_kernels_groups,
h100_kernels_conv and h100_regnet_train of validation/traces), and laws of their kernels."""

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter, load_hardware
from flopmeter.records import Convolution, Matmul, Planes
from flopmeter.timing.grouped_convolution import TRANSFORM_SECONDS, has_long_filters, layout_seconds, packed_seconds

# Microseconds of one call in bf16, images, filters, stride, whether in channels-last.
MEASURED = {
    "32 groups of 4, packed": (94, (64, 128, 56, 56), (128, 4, 3, 3), 1, True),
    "32 groups of 16, packed": (24, (64, 512, 14, 14), (512, 16, 3, 3), 1, True),
    "10 groups of 24, widened to 32": (325, (64, 240, 28, 28), (240, 24, 3, 3), 1, True),
    "10 groups of 24, turned": (147, (64, 240, 28, 28), (240, 24, 3, 3), 1, False),
    "4 groups of 56, one by one": (471, (64, 224, 56, 56), (224, 56, 3, 3), 1, True),
    "3 groups of 24, one by one": (405, (128, 72, 56, 56), (72, 24, 3, 3), 1, True),
    "24 groups of 24, strided": (770, (128, 576, 28, 28), (576, 24, 3, 3), 2, True),
}


def convolved(images, filters, stride, channels_last, *, dtype=torch.bfloat16, hardware="h100-sxm5-80gb"):
    """Seconds of the kernels forward, and of those of both gradients; fp32 runs in tf32."""
    x = torch.empty(images, dtype=dtype, device="meta")
    x = x.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format).requires_grad_()
    weight = torch.empty(filters, dtype=dtype, device="meta").requires_grad_()
    groups = images[1] // filters[1]
    with FlopMeter(hardware) as forward:
        out = nn.functional.conv2d(x, weight, stride=stride, padding=1, groups=groups)
    with FlopMeter(hardware) as backward:
        out.backward(torch.empty_like(out))
    return forward.report().kernel_seconds, backward.report().kernel_seconds


@pytest.mark.parametrize("name", MEASURED)
def test_a_grouped_convolution_takes_about_as_long_as_on_an_h100(name):
    microseconds, *case = MEASURED[name]
    assert convolved(*case)[0] * 1e6 == pytest.approx(microseconds, rel=0.25)


def test_both_gradients_of_groups_take_about_as_long_as_on_an_h100():
    for microseconds, images, filters, stride in (
        (1431, (128, 72, 56, 56), (72, 24, 3, 3), 1),
        (1812, (128, 576, 28, 28), (576, 24, 3, 3), 2),
    ):
        assert convolved(images, filters, stride, True)[1] * 1e6 == pytest.approx(microseconds, rel=0.25)


def test_groups_of_24_channels_take_longer_than_those_of_32_that_they_are_widened_to():
    """Nine more megabytes to multiply cost less than two copies of everything."""
    narrow, wide = (convolved((128, 12 * width, 28, 28), (12 * width, width, 3, 3), 1, True) for width in (24, 32))
    assert narrow[0] > 2 * wide[0]
    assert narrow[1] > 2 * wide[1]


@pytest.mark.parametrize(("channels", "dtype"), [(64, torch.bfloat16), (32, torch.float32)])
def test_groups_as_wide_as_a_tile_multiply_no_zeros(channels, dtype):
    """128 bytes of channels. Of half as many half a tile is zeros, and tiles of several groups are no faster."""

    def rate(width):
        forward, _ = convolved((64, 8 * width, 28, 28), (8 * width, width, 3, 3), 1, True, dtype=dtype)
        return width**2 / forward

    assert rate(channels) > 2.5 * rate(channels // 2)


def test_groups_in_tf32_take_about_as_long_as_on_an_h100():
    forward, backward = convolved((32, 256, 56, 56), (256, 8, 3, 3), 1, False, dtype=torch.float32)
    assert forward * 1e6 == pytest.approx(275, rel=0.15)
    assert backward * 1e6 == pytest.approx(718, rel=0.15)


def positions_convolved(batch, taps):
    """Seconds of wav2vec2's convolution over positions in bf16, 768 channels in 16 groups."""
    x = torch.empty(batch, 768, 499, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(768, 48, taps, dtype=torch.bfloat16, device="meta")
    with FlopMeter("h100-sxm5-80gb") as meter:
        nn.functional.conv1d(x, weight, padding=taps // 2, groups=16)
    return meter.report().kernel_seconds


def test_filters_of_128_places_run_on_vector_units_on_an_h100():
    """(h100_kernels_groups and h100_wav2vec2_train.)"""
    assert positions_convolved(8, 128) * 1e6 == pytest.approx(13000, rel=0.15)


def test_one_step_more_than_masks_have_bits_costs_ten_times_as_much():
    assert positions_convolved(8, 33) > 10 * positions_convolved(8, 32)


GROUP = Convolution(24, (3, 3), (28, 28), is_dense=True)


@pytest.mark.parametrize(
    ("groups", "kernel", "computes", "is_long"),
    [
        (16, (128,), "output", True),
        (16, (1, 128), "output", True),
        (16, (128, 1), "output", True),
        (2, (33,), "output", True),
        (16, (32, 32), "output", False),
        (1, (128,), "output", False),
        (16, (128,), "input gradient", False),
        (16, (128,), "filter gradient", False),
    ],
)
def test_only_groups_run_forward_on_vector_units_under_a_filter_that_is_long_either_way(
    groups, kernel, computes, is_long
):
    shape = GROUP._replace(channels=48, kernel=kernel, computes=computes)
    assert has_long_filters(shape, Matmul(groups, 999, 48, 48 * 128)) == is_long


@pytest.mark.parametrize(("groups", "kernels"), [(3, 6), (4, 8), (8, 16), (9, 3), (10, 3)])
def test_up_to_eight_groups_in_channels_last_are_copied_out_and_back_one_by_one(groups, kernels):
    """Two kernels a group; else three bring all groups to 32 channels, image, filters and result. Nothing to copy."""
    device = load_hardware("h100-sxm5-80gb")
    shape = GROUP._replace(channels_last=True, tensors=(Planes(0, 24, 1),) * 3)
    of_kernel = device.kernel_floor_seconds if groups <= 8 else TRANSFORM_SECONDS
    assert layout_seconds(shape, Matmul(groups, 1, 24, 216), 2, device) == pytest.approx(kernels * of_kernel)


@pytest.mark.parametrize(("groups", "is_widened"), [(3, False), (4, False), (5, True), (8, True)])
def test_up_to_four_groups_in_nchw_are_not_widened(groups, is_widened):
    device, shape = load_hardware("h100-sxm5-80gb"), GROUP._replace(tensors=(Planes(64, 24, 784),) * 3)
    added = layout_seconds(shape, Matmul(groups, 50176, 24, 216), 2, device)
    assert added == (TRANSFORM_SECONDS if is_widened else 0)


def test_groups_one_by_one_fill_tiles_of_64_filters():
    """65 take as long as 128, and twice as long as one or 64."""
    one, full, more, twice = (packed_seconds(GROUP, Matmul(4, 50176, n, 216), 2, 1e15) for n in (1, 64, 65, 128))
    assert one == full
    assert more == twice == pytest.approx(2 * full)
