"""Convolutions and poolings beside what an H100 took (torch 2.11, cuDNN 9.19, 2026-11, validation/traces), and laws
that hold whatever it took."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter, load_hardware
from flopmeter.records import CONTRACTION, Convolution, ConvolutionWork, Cost, Matmul, Planes
from flopmeter.timing.convolution import channel_share, depthwise_share, grouped_share, suits_winograd, with_conversions
from flopmeter.timing.kernels import price
from flopmeter.timing.matmul import Busy

BF16 = torch.bfloat16
# Microseconds of one call, images, filters, stride, whether in channels-last.
FORWARD = {
    "filters over three channels, NHWC": (1820, (256, 3, 224, 224), (64, 3, 7, 7), 2, True),
    "filters over three channels, NCHW": (2554, (256, 3, 224, 224), (64, 3, 7, 7), 2, False),
    "patches, NHWC": (1633, (256, 3, 224, 224), (768, 3, 16, 16), 16, True),
    "patches, NCHW": (2063, (256, 3, 224, 224), (768, 3, 16, 16), 16, False),
    "3 x 3, NCHW": (344, (256, 64, 56, 56), (64, 64, 3, 3), 1, False),
    "strided 1 x 1, NCHW": (675, (256, 256, 56, 56), (512, 256, 1, 1), 2, False),
    "depthwise 3 x 3, NCHW": (1504, (128, 96, 112, 112), (96, 1, 3, 3), 1, False),
    "depthwise 5 x 5, NCHW": (292, (128, 672, 14, 14), (672, 1, 5, 5), 1, False),
    "depthwise 7 x 7, NCHW": (886, (64, 128, 56, 56), (128, 1, 7, 7), 1, False),
}


def tensor(shape, dtype=BF16, *, channels_last=False, requires_grad=False):
    made = torch.empty(shape, dtype=dtype, device="meta")
    made = made.to(memory_format=torch.channels_last) if channels_last else made
    return made.requires_grad_(requires_grad)


def convolved(images, filters, stride, channels_last, *, dtype=BF16, hardware="h100-sxm5-80gb"):
    """Seconds of the kernels."""
    x, weight = tensor(images, dtype, channels_last=channels_last), tensor(filters, dtype)
    with FlopMeter(hardware) as meter:
        groups = images[1] // filters[1]
        nn.functional.conv2d(x, weight, stride=stride, padding=filters[-1] // 2 * (stride < 16), groups=groups)
    return meter.report().kernel_seconds


@pytest.mark.parametrize("name", FORWARD)
def test_a_convolution_takes_about_as_long_as_on_an_h100(name):
    microseconds, *case = FORWARD[name]
    assert convolved(*case) * 1e6 == pytest.approx(microseconds, rel=0.3)


def test_hopper_turns_tensors_in_nchw_but_those_of_a_plain_product():
    """1 x 1 without a stride is a product over images in either layout (`nvjet` kernels in the profile)."""
    wide, narrow = ((64, 128, 56, 56), (128, 128, 3, 3), 1), ((64, 128, 56, 56), (128, 128, 1, 1), 1)
    assert convolved(*wide, False) > 1.3 * convolved(*wide, True)
    assert convolved(*narrow, False) == pytest.approx(convolved(*narrow, True), rel=0.15)


# Of ResNet-50 and EfficientNet-B0 in training, NCHW: microseconds of 1 x 1, forward or both gradients.
OVER_SMALL_IMAGES = {
    # 7 x 7 positions are a multiple of no load: images are turned, and back.
    "7 x 7": (41, False, (128, 1152, 7, 7), 320, BF16),
    "7 x 7, gradients": (67, True, (128, 192, 7, 7), 1152, BF16),
    # Parts of the filters' gradient, 2 x 4 bytes x 1024 x 256 for each of 256 images, are more than both images.
    "14 x 14, many channels, gradients": (326, True, (256, 256, 14, 14), 1024, BF16),
    # 2 x 4 x 672 x 112 for each of 128 are less than these: they are written, and added up.
    "14 x 14, few channels, gradients": (96, True, (128, 112, 14, 14), 672, BF16),
    "28 x 28, gradients, tf32": (371, True, (128, 512, 28, 28), 256, torch.float32),
}


@pytest.mark.parametrize("name", OVER_SMALL_IMAGES)
def test_a_plain_product_over_small_images_takes_about_as_long_as_on_an_h100(name):
    microseconds, is_backward, images, filters, dtype = OVER_SMALL_IMAGES[name]
    x, weight = (tensor(shape, dtype, requires_grad=is_backward) for shape in (images, (filters, images[1], 1, 1)))
    with FlopMeter("h100-sxm5-80gb", clocks="burst") as forward:
        out = nn.functional.conv2d(x, weight)
    with FlopMeter("h100-sxm5-80gb", clocks="burst") as both:
        if is_backward:
            out.backward(torch.empty_like(out))
    assert (both if is_backward else forward).report().kernel_seconds * 1e6 == pytest.approx(microseconds, rel=0.35)


def test_an_image_of_one_position_lies_alike_in_either_layout():
    case = ((128, 1152, 1, 1), (48, 1152, 1, 1), 1)
    assert convolved(*case, False) == pytest.approx(convolved(*case, True), rel=0.05)


def test_from_ampere_on_images_in_nchw_are_turned_under_filters_of_nine_elements_and_not_of_one():
    """Milliseconds for 1,024 images that pytorch-image-models publishes for an RTX 4090 (torch 2.4, AMP), in NCHW and
    in channels-last: 93.0 and 67.2 of ResNet-18-D, whose filters have nine elements."""
    nine, one = (((64, 64, 56, 56), (64, 64, side, side), 1) for side in (3, 1))
    for device in ("rtx-4090", "a100-sxm4-80gb"):
        assert convolved(*nine, False, hardware=device) > 1.38 * convolved(*nine, True, hardware=device)
        assert convolved(*one, False, hardware=device) == pytest.approx(
            convolved(*one, True, hardware=device), rel=0.05
        )


def test_each_tensor_is_turned_by_a_kernel_that_reads_and_writes_it():
    """Volta's and Turing's kernels in 16 bits write NCHW themselves (`..._nhwc2nchw` in their names)."""
    case, images = ((64, 64, 56, 56), (64, 64, 3, 3), 1), 64 * 64 * 56 * 56
    ada = load_hardware("rtx-4090")
    turned = convolved(*case, False, hardware=ada) - convolved(*case, True, hardware=ada)
    bytes_seconds = 2 * 2 * (2 * images + 64 * 64 * 9) / ada.bandwidth_bytes_per_s
    assert 0.7 * bytes_seconds < turned < 1.2 * bytes_seconds + 3 * ada.kernel_floor_seconds  # it overlaps arithmetic
    on_t4 = [convolved(*case, order, dtype=torch.float16, hardware="t4") for order in (False, True)]
    assert on_t4[0] - on_t4[1] < bytes_seconds  # at three times the bandwidth of a T4


# Of MobileNets and EfficientNets: microseconds of both gradients, images, side of the filters, stride, channels-last,
# and the type if it is not bf16.
DEPTHWISE_GRADIENTS = {
    "3 x 3": (4968, (128, 96, 112, 112), 3, 1, False),
    "3 x 3, fp32": (5048, (128, 96, 112, 112), 3, 1, False, torch.float32),
    "3 x 3 with a stride": (3119, (128, 96, 112, 112), 3, 2, False),
    "3 x 3 with a stride, of small images": (528, (128, 240, 28, 28), 3, 2, False),
    "5 x 5, of the smallest images": (831, (128, 1152, 7, 7), 5, 1, False),
    "5 x 5 with a stride": (1846, (128, 144, 56, 56), 5, 2, False),
    "7 x 7": (2897, (64, 128, 56, 56), 7, 1, False),
    "3 x 3 with a stride, NHWC": (732, (128, 96, 112, 112), 3, 2, True),
    "5 x 5 with a stride, NHWC": (561, (128, 144, 56, 56), 5, 2, True),
}


@pytest.mark.parametrize("name", DEPTHWISE_GRADIENTS)
def test_depthwise_gradients_take_about_as_long_as_on_an_h100(name):
    """A thread of the input's gradient goes over all taps for each element of the input, whatever the stride; warps of
    a weight's gradient take 32 positions of an image at a time."""
    microseconds, images, side, stride, channels_last, *dtype = DEPTHWISE_GRADIENTS[name]
    x = tensor(images, *dtype, channels_last=channels_last, requires_grad=True)
    weight = tensor((images[1], 1, side, side), *dtype, requires_grad=True)
    out = nn.functional.conv2d(x, weight, stride=stride, padding=side // 2, groups=images[1])
    with FlopMeter("h100-sxm5-80gb") as meter:
        out.backward(torch.empty_like(out))
    assert meter.report().kernel_seconds * 1e6 == pytest.approx(microseconds, rel=0.25)


DEPTHWISE_FP32 = {
    "3 x 3": ("h100-sxm5-80gb", 472.4, (128, 96, 112, 112), 3),
    "5 x 5": ("h100-sxm5-80gb", 120.8, (128, 672, 14, 14), 5),
    "7 x 7": ("h100-sxm5-80gb", 476.3, (64, 128, 56, 56), 7),
    "3 x 3, on an H200": ("h200-sxm-141gb", 161.2, (128, 144, 56, 56), 3),
    "5 x 5, on an H200": ("h200-sxm-141gb", 23.9, (32, 480, 14, 14), 5),
    "7 x 7, on an H200": ("h200-sxm-141gb", 97.4, (64, 384, 14, 14), 7),
}


@pytest.mark.parametrize("name", DEPTHWISE_FP32)
def test_depthwise_filters_in_fp32_and_channels_last_run_by_a_kernel_that_is_not_specialized(name):
    """`conv2d_c1_k1_nhwc`, which takes 1.4 to 2.5 times as long as the one in 16 bits."""
    device, microseconds, images, side = DEPTHWISE_FP32[name]
    x = tensor(images, torch.float32, channels_last=True)
    weight = tensor((images[1], 1, side, side), torch.float32)
    with torch.no_grad(), FlopMeter(device) as meter:
        nn.functional.conv2d(x, weight, padding=side // 2, groups=images[1])
    assert meter.report().kernel_seconds * 1e6 == pytest.approx(microseconds, rel=0.2)


# Microseconds of both gradients and of their kernels' sums, in channels-last (h100_kernels_conv): `sm90_xmma_dgrad` and
# `sm90_xmma_wgrad_indexed` with tiles of 64 x 64 to 256 x 128.
DENSE_GRADIENTS = {
    "64 channels, tf32": (874, (256, 64, 56, 56), 64, 3, torch.float32),
    "128 channels, tf32": (494, (256, 128, 28, 28), 128, 3, torch.float32),
    "512 channels, tf32": (450, (256, 512, 7, 7), 512, 3, torch.float32),
    "64 channels": (280, (256, 64, 56, 56), 64, 3, BF16),
    "64 channels under 128 filters": (98, (8, 64, 128, 128), 128, 3, BF16),
    "1 x 1": (374, (256, 256, 56, 56), 64, 1, BF16),
}


def gradients(images, filters, side, dtype):
    """Seconds of both."""
    x = tensor(images, dtype, channels_last=True, requires_grad=True)
    weight = tensor((filters, images[1], side, side), dtype, requires_grad=True)
    with FlopMeter("h100-sxm5-80gb"):
        out = nn.functional.conv2d(x, weight, padding=side // 2)
    with FlopMeter("h100-sxm5-80gb", clocks="burst") as meter:
        out.backward(torch.empty_like(out))
    return meter.report().kernel_seconds


@pytest.mark.parametrize("name", DENSE_GRADIENTS)
def test_dense_gradients_take_about_as_long_as_on_an_h100(name):
    microseconds, *case = DENSE_GRADIENTS[name]
    assert gradients(*case) * 1e6 == pytest.approx(microseconds, rel=0.15)


def test_filters_over_few_channels_pass_more_bytes_through_shared_memory_than_matrix_units_take_meanwhile():
    """As many FLOPs over a quarter of the channels, at sixteen times the positions. Of a tile of 64 x 64 an SM
    multiplies 16 steps of the depth in 32 cycles, and 8 KiB of operands arrive and are read, which takes 64. Of 256 x
    128 it has 256 cycles for 36 KiB, 288. No tile is wider than the channels, since none takes two positions."""
    narrow, wide = (gradients(*case, 3, BF16) for case in (((256, 64, 56, 56), 64), ((256, 256, 14, 14), 256)))
    assert 1.4 * wide < narrow < (64 / 32) / (288 / 256) * wide


def test_the_first_layer_of_a_resnet_has_a_kernel_of_its_own_in_fp16():
    """287 us on an H100 (validation/traces, resnet50_infer_compiled), with the copy that pads the image."""
    case = ((128, 3, 224, 224), (64, 3, 7, 7), 2, True)
    assert convolved(*case, dtype=torch.float16) * 1e6 == pytest.approx(287, rel=0.1)
    assert convolved(*case) > 3 * convolved(*case, dtype=torch.float16)


@pytest.mark.parametrize(
    ("channels", "filters", "side", "stride", "has_own"),
    [(4, 64, 7, 2, True), (5, 64, 7, 2, False), (3, 65, 7, 2, False), (3, 64, 5, 2, False), (3, 64, 7, 1, False)],
)
def test_any_other_convolution_over_few_channels_takes_as_long_in_fp16_as_in_bf16(
    channels, filters, side, stride, has_own
):
    case = (128, channels, 224, 224), (filters, channels, side, side), stride, True
    in_bf16, in_fp16 = convolved(*case), convolved(*case, dtype=torch.float16)
    assert in_fp16 < 0.9 * in_bf16 if has_own else in_fp16 == in_bf16


@pytest.mark.parametrize(
    ("shape", "kernel", "padding", "forward", "backward"),
    [((256, 64, 112, 112), 3, 1, 827, 2380), ((8, 64, 256, 256), 2, 0, 103, 342), ((8, 512, 32, 32), 2, 0, 14.4, 45)],
)
def test_poolings_take_as_long_as_on_an_h100(shape, kernel, padding, forward, backward):
    """Microseconds; in 16 bits and NCHW, with the zeros before a gradient."""
    x = tensor(shape, requires_grad=True)
    with FlopMeter("h100-sxm5-80gb") as meter:
        out = nn.functional.max_pool2d(x, kernel, 2, padding)
    assert meter.report().kernel_seconds * 1e6 == pytest.approx(forward, rel=0.2)
    with FlopMeter("h100-sxm5-80gb") as meter:
        out.backward(torch.empty_like(out))
    assert meter.report().kernel_seconds * 1e6 == pytest.approx(backward, rel=0.2)


H100 = load_hardware("h100-sxm5-80gb")
PLAIN, PRODUCT = Convolution(64, (3, 3), (56, 56), is_dense=True), Matmul(1, 4096, 256, 576)


def extra(*tensors, implicit=PRODUCT, **changes):
    """Seconds that the library adds to a kernel of bf16 that takes no time itself."""
    work = ConvolutionWork(implicit, implicit.macs, PLAIN._replace(tensors=tensors, **changes))
    cost = Cost("convolution", CONTRACTION, ((CONTRACTION, 0),), (), (), "bf16", work)
    return with_conversions(Busy(0.0, 0.0, 0.0), cost, work, H100, flop_per_s=math.inf).work_seconds


@pytest.mark.parametrize("channels_last", [False, True])
def test_what_a_library_does_to_several_tensors_adds_up(channels_last):
    several = Planes(64, 3, 3136), Planes(8, 35, 9), Planes(32, 5, 784)
    alone = [extra(each, channels_last=channels_last) for each in several]
    assert extra(*several, channels_last=channels_last) == pytest.approx(sum(alone))
    assert min(alone) > 0


def test_channels_that_are_multiples_of_16_bytes_need_nothing_in_nhwc_and_others_are_padded_to_the_next():
    """By two kernels: one sets 16 channels to zero, one copies 9 into them. A kernel that turns NCHW sets them too."""
    images, positions = 640, 3136
    assert extra(Planes(images, 16, positions), channels_last=True) == 0
    zeros = 2 * images * positions * 16 / H100.sustained_bandwidth_bytes_per_s
    floors = 2 * H100.kernel_floor_seconds
    for channels_last in (False, True):
        assert extra(Planes(images, 9, positions), channels_last=channels_last) > floors + zeros
    nine, ten = (extra(Planes(images, channels, positions), channels_last=True) for channels in (9, 10))
    assert ten > nine
    assert nine - 9 * (ten - nine) == pytest.approx(floors + zeros)  # what is left does not depend on the channels


def test_tensors_in_nchw_are_turned_in_tiles_of_32_by_32_and_each_is_read_and_written():
    """A tile at the edge takes as long as a full one."""
    planes = Planes(64, 128, 3136)
    moved = 2 * 2 * planes.numel / H100.sustained_bandwidth_bytes_per_s
    assert moved < extra(planes) - H100.kernel_floor_seconds < 2 * moved
    floor = H100.kernel_floor_seconds
    full, wide, long = (extra(Planes(9999, *sides)) - floor for sides in ((32, 32), (40, 32), (32, 33)))
    assert wide > 1.5 * full
    assert long > 1.5 * full
    assert extra(Planes(9999, 32, 64)) - floor == pytest.approx(2 * full)


def test_pixels_of_few_channels_are_loaded_once_for_each_tile_of_filters_in_a_gradient_of_filters():
    """Tiles of 128 x 128; of two filters as well as of 128, but the filters themselves are loaded too. They are the
    rows, and the depth are pixels."""

    def loading(filters, channels=3):
        implicit = Matmul(1, filters, 147, 10**6)
        return extra(implicit=implicit, channels=channels, channels_last=True, computes="filter gradient")

    one, two, full, twice = (loading(filters) for filters in (1, 2, 128, 256))
    assert one < two < full < 2.1 * one
    assert twice == pytest.approx(2 * full, rel=1e-3)
    assert loading(128, channels=8) == full  # 16 bytes of a pixel are one load
    assert loading(128, channels=9) == 0


def test_over_pixels_of_few_channels_a_step_of_a_tile_is_one_position_of_the_filters():
    """196 places an image and 768 filters of 16 x 16: 12 tiles for one image, 78 for 8, both at once on 132 SMs, and
    588 for 64 images, one on each SM five times. The tiles are as wide for 1 channel as for 8."""

    def steps(images, channels=3, side=16):
        implicit = Matmul(1, 196 * images, 768, channels * side * side)
        return extra(implicit=implicit, channels=channels, channels_last=True, kernel=(side, side))

    assert steps(1) == steps(8) == steps(8, channels=1) == steps(8, channels=8) > 0
    assert steps(64) == pytest.approx(5 * steps(1))
    assert steps(8, side=32) == pytest.approx(4 * steps(8))
    assert steps(8, channels=9) == 0


@pytest.mark.parametrize(
    ("device", "images", "filters", "side", "stride", "channels_last", "measured"),
    [
        ("h100-sxm5-80gb", 1, 768, 16, 16, False, 99),
        ("h100-sxm5-80gb", 8, 768, 16, 16, True, 96),
        ("h100-sxm5-80gb", 64, 768, 16, 16, False, 567),
        ("h200-sxm-141gb", 8, 1024, 14, 14, True, 76),
        ("h200-sxm-141gb", 64, 96, 4, 4, False, 101),
        ("h200-sxm-141gb", 128, 32, 3, 2, False, 208),
    ],
)
def test_the_first_layers_of_vision_models_take_the_measured_time(
    device, images, filters, side, stride, channels_last, measured
):
    """bf16, images of 224 x 224 and 3 channels; us of all kernels (validation/traces). The last two run on vector
    units, which take fewer bytes than converted copies would."""
    with torch.device("meta"):
        layer = nn.Conv2d(3, filters, side, stride, padding=1 if side == 3 else 0, bias=False, dtype=torch.bfloat16)
        image = torch.empty(images, 3, 224, 224, dtype=torch.bfloat16)
    form = torch.channels_last if channels_last else torch.contiguous_format
    layer, image = layer.to(memory_format=form), image.to(memory_format=form)
    with torch.no_grad(), FlopMeter(device) as meter:
        layer(image)
    assert meter.report().kernel_seconds * 1e6 == pytest.approx(measured, rel=0.2)


def test_a_filter_that_is_wide_one_way_alone_is_no_product_over_images_as_they_lie():
    alone, wide, high = (extra(Planes(64, 64, 3136), kernel=kernel) for kernel in ((1, 1), (1, 3), (3, 1)))
    assert alone == 0
    assert wide == high > 0


def test_the_parts_of_a_gradient_of_filters_are_added_up_in_fp32_where_there_is_more_than_one_position():
    """64 images have a product each, of 256 x 256 filters; as one position each they are rows of a single product."""
    parts, moved = 64 * 256 * 256, (Planes(64, 256, 784), Planes(64, 256, 784), Planes(256, 256, 1))
    options = {"kernel": (1, 1), "computes": "filter gradient"}
    added_up = H100.kernel_floor_seconds + 2 * 4 * parts / H100.sustained_bandwidth_bytes_per_s
    assert extra(*moved, **options) == pytest.approx(added_up)
    assert extra(*(planes._replace(positions=1) for planes in moved), **options) == 0


def test_only_winograd_asks_whether_taps_and_steps_are_dense():
    for channels_last in (False, True):
        shape = PLAIN._replace(channels=24, channels_last=channels_last)
        strided = shape._replace(is_dense=False)
        assert channel_share(shape) == channel_share(strided)
        assert depthwise_share(shape) == depthwise_share(strided)
        for on_matrix_units in (False, True):
            for channels in (16, 24):
                alike = (each._replace(channels=channels) for each in (shape, strided))
                assert len({grouped_share(each, on_matrix_units) for each in alike}) == 1
        implicit = Matmul(1, 64, 64, 64)
        assert (suits_winograd(shape, implicit), suits_winograd(strided, implicit)) == (True, False)


def test_one_side_of_a_filter_decides_whether_threads_still_share_what_they_read():
    """Depthwise in channels-last, by the longer side."""
    square, long = (depthwise_share(PLAIN._replace(channels_last=True, kernel=kernel)) for kernel in ((7, 7), (9, 9)))
    assert square != long
    for kernel, share in (((1, 7), square), ((7, 1), square), ((1, 9), long), ((9, 1), long)):
        assert depthwise_share(PLAIN._replace(channels_last=True, kernel=kernel)) == share


@pytest.mark.parametrize("channels", [1, 2, 3, 6, 48])
def test_groups_on_vector_units_run_alike_in_either_layout(channels):
    shapes = (PLAIN._replace(channels=channels, channels_last=layout) for layout in (False, True))
    assert len({grouped_share(shape, on_matrix_units=False) for shape in shapes}) == 1


def test_groups_of_filters_take_their_bytes_from_memory_at_its_bandwidth():
    """Four groups of 16 channels on an A100, whose images and result are 2 x 64 x 64 x 56 x 56 numbers of two bytes."""
    a100 = load_hardware("a100-sxm4-80gb")
    with FlopMeter(a100) as meter:
        x, weight = tensor((64, 64, 56, 56), channels_last=True), tensor((64, 16, 3, 3), channels_last=True)
        nn.functional.conv2d(x, weight, padding=1, groups=4)
    (kernel,) = (each for each in meter.report().kernels if isinstance(each.cost.work, ConvolutionWork))
    nbytes = 2 * (2 * 64 * 64 * 56 * 56 + 64 * 16 * 9)
    taken = price(kernel.cost, a100, meter.trace.switches).busy.memory_seconds
    assert taken == pytest.approx(nbytes / a100.sustained_bandwidth_bytes_per_s, rel=0.05)
