"""Kernels that move data or draw numbers, against what an H100 or an H200 took (torch 2.11, 2026-11,
validation/traces)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from costs_support import meta

from flopmeter import FlopMeter

BF16, FP32 = torch.bfloat16, torch.float32
BIG = 2**26
LAST = torch.channels_last
JOINED = not torch.__version__.startswith("2.11.")


def in_channels_last(*shape, dtype=FP32):
    return meta(*shape, dtype=dtype).to(memory_format=LAST)


def enlarged(*shape, dtype=FP32, memory_format=torch.contiguous_format):
    return F.interpolate(meta(*shape, dtype=dtype).to(memory_format=memory_format), scale_factor=2, mode="nearest")


MEASURED = {
    "roll of bf16, one dimension": (235.1, lambda: meta(16384, 3072, dtype=BF16).roll(5, 1)),
    "roll of bf16, two dimensions (Swin)": (
        2 * 122.6,
        lambda: meta(64, 56, 56, 128, dtype=BF16).roll((-3, -3), (1, 2)),
    ),
    "roll of fp32, two dimensions (Swin)": (2 * 130.9, lambda: meta(64, 56, 56, 128).roll((3, 3), (1, 2))),
    "normal numbers, bf16": (154.7, lambda: torch.randn_like(meta(BIG, dtype=BF16))),
    "normal numbers, fp32": (152.0, lambda: torch.randn_like(meta(BIG))),
    "dropout, bf16": (132.7, lambda: torch.native_dropout(meta(BIG, dtype=BF16), 0.1, True)),
    "dropout, fp32": (232.5, lambda: torch.native_dropout(meta(BIG), 0.1, True)),
    "addition, fp32": (264.7, lambda: meta(BIG).add(meta(BIG))),
    "twice as large by nearest neighbours, bf16": (273.5, lambda: enlarged(64, 128, 56, 56, dtype=BF16)),
    "twice as large by nearest neighbours, fp32": (329.4, lambda: enlarged(64, 128, 56, 56)),
    "the same in channels-last, bf16": (648.9, lambda: enlarged(64, 128, 56, 56, dtype=BF16, memory_format=LAST)),
    "the same in channels-last, fp32": (164.8, lambda: enlarged(64, 512, 14, 14, memory_format=LAST)),
    "a border of zeros, bf16": (99.3, lambda: F.pad(meta(64, 128, 56, 56, dtype=BF16), (1, 1, 1, 1))),
    "a border of zeros, fp32": (134.9, lambda: F.pad(meta(32, 64, 112, 112), (1, 1, 1, 1))),
    "averages of 2 x 2": (80.2, lambda: F.avg_pool2d(meta(64, 128, 56, 56), 2)),
    "the same in channels-last": (164.7, lambda: F.avg_pool2d(in_channels_last(64, 128, 56, 56), 2)),
    "averages of 3 x 3 in channels-last": (183.4, lambda: F.avg_pool2d(in_channels_last(32, 64, 112, 112), 3, 2)),
    "log softmax over 150 channels": (271.6, lambda: meta(4, 150, 256, 256).log_softmax(1)),
    "log softmax over 21 channels": (58.5, lambda: meta(8, 21, 256, 256).log_softmax(1)),
    "log softmax over two channels, fp16": (6.1, lambda: meta(8, 2, 256, 256, dtype=torch.float16).log_softmax(1)),
    "lower triangle, bf16": (124.9, lambda: meta(16384, 3072, dtype=BF16).tril()),
    "from right to left, bf16": (128.7, lambda: meta(16384, 3072, dtype=BF16).flip(1)),
    "integers of a wide range": (68.1, lambda: torch.randint(2**30, (10_000_000,), device="meta")),
    "a tenth of these": (9.6, lambda: torch.randint(2**30, (1_000_000,), device="meta")),
    # From torch 2.12 on without the maximum's kernel, which is joined to the minimum's.
    "one of a vocabulary for each of 64 rows": (150.0 - JOINED * 11.2, lambda: meta(64, 128_256).multinomial(1)),
    "one of 1024": (43.4 - JOINED * 7.8, lambda: meta(64, 1024).multinomial(1)),
    "addition, bf16": (131.4, lambda: meta(BIG, dtype=BF16).add(meta(BIG, dtype=BF16))),
}


MEASURED_ON_AN_H200 = {
    "lower triangle, bf16": (63.6, lambda: meta(6000, 5120, dtype=BF16).tril()),
    "from bottom to top, bf16": (73.8, lambda: meta(6000, 5120, dtype=BF16).flip(0)),
    "integers of a wide range": (23.0, lambda: torch.randint(2**30, (3_000_000,), device="meta")),
}


def seconds(program, hardware="h100-sxm5-80gb"):
    """Seconds of its kernels, but those that bring what it makes into channels-last."""
    with torch.inference_mode(), FlopMeter(hardware) as meter:
        program()
    report = meter.report()
    timed = zip(report.kernels, report.timings, strict=True)
    return sum(timing.seconds for kernel, timing in timed if "_to_copy" not in kernel.cost.name)


@pytest.mark.parametrize("name", MEASURED)
def test_a_kernel_takes_about_as_long_as_on_an_h100(name):
    microseconds, program = MEASURED[name]
    assert seconds(program) * 1e6 == pytest.approx(microseconds, rel=0.2)


@pytest.mark.parametrize("name", MEASURED_ON_AN_H200)
def test_a_kernel_takes_about_as_long_as_on_an_h200(name):
    microseconds, program = MEASURED_ON_AN_H200[name]
    assert seconds(program, "h200-sxm-141gb") * 1e6 == pytest.approx(microseconds, rel=0.2)


@pytest.mark.parametrize("bounds", [(0, 2**28), (-(2**27), 2**27)])
def test_a_range_of_2_to_the_28_takes_random_numbers_of_64_bits(bounds):
    """`random_from_to` in DistributionTemplates.h: half as many numbers of each draw, and remainders of 64 bits."""
    low, high = bounds

    def drawn(first):
        return seconds(lambda: torch.randint(first, high, (10_000_000,), device="meta"))

    assert drawn(low) > 1.5 * drawn(low + 1)


def test_a_triangle_in_place_writes_only_the_zeros():
    """And stores no neighbours one by one, as far as is known: 8·7/2 zeros of four bytes."""
    with FlopMeter("h100-sxm5-80gb") as meter:
        meta(8, 8).tril_()
    assert (meter.report().bytes_read, meter.report().bytes_written) == (0, 28 * 4)


def test_a_roll_moves_its_tensor_once_for_each_dimension():
    """`roll_common` in aten/src/ATen/native/TensorTransformations.h."""
    x = meta(8, 8, 8)
    with FlopMeter("h100-sxm5-80gb") as meter:
        x.roll((1, 2, 3), (0, 1, 2))
    report = meter.report()
    assert report.bytes_read == report.bytes_written == 3 * x.nbytes


def test_a_stack_takes_as_long_as_the_cat_that_it_is_a_view_of():
    """`stack` in TensorShape.cpp. One along a new last dimension is no view: there it is a `cat` of columns."""
    q, k = meta(64, 32, 49, 32, dtype=BF16), meta(64, 32, 32, 49, dtype=BF16).mT
    assert seconds(lambda: torch.stack((q, k, q))) == pytest.approx(seconds(lambda: torch.cat((q, k, q))))
    rows = meta(4096, 1024, dtype=BF16)
    columns = [rows.unsqueeze(-1)] * 2
    assert seconds(lambda: torch.stack((rows, rows), -1)) == pytest.approx(seconds(lambda: torch.cat(columns, -1)))


def test_uniform_numbers_take_less_time_than_normal_ones():
    x = meta(BIG, dtype=BF16)
    assert seconds(lambda: torch.rand_like(x)) < 0.7 * seconds(lambda: torch.randn_like(x))
