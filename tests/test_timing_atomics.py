"""Gradients that threads add to images: against what an H100 took (torch 2.11, 2026-11: validation/traces,
kernels_pointwise), and the additions of a warp counted by hand."""

from __future__ import annotations

import pytest
import torch
from costs_support import meta

from flopmeter import FlopMeter
from flopmeter.records import Atomics

aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32


def enlarged_backward(*shape, dtype=FP32, nearest=False, channels_last=False):
    """The gradient of an image that was made twice as large."""
    grad = meta(*shape, dtype=dtype)
    if channels_last:
        grad = grad.to(memory_format=torch.channels_last)
    small = [*shape[:2], *(max(1, size // 2) for size in shape[2:])]
    if nearest:
        return aten.upsample_nearest2d_backward(grad, shape[2:], small)
    return aten.upsample_bilinear2d_backward(grad, shape[2:], small, False)


# Microseconds, the zeros before included. None of them set a constant.
MEASURED = [
    ((32, 256, 56, 56), BF16, 698.3), ((32, 256, 56, 56), FP32, 338.0), ((32, 1024, 14, 14), BF16, 253.0),
    ((32, 1024, 14, 14), FP32, 137.8), ((32, 3, 224, 224), BF16, 100.7), ((32, 3, 224, 224), FP32, 49.0),
]  # fmt: skip

# A thread adds up the gradients of one element of an image after another, and few threads there are.
NEAREST = [
    ((32, 1024, 14, 14), BF16, 23.8), ((32, 1024, 14, 14), FP32, 24.9), ((32, 3, 224, 224), BF16, 25.4),
    ((32, 3, 224, 224), FP32, 25.6),
]  # fmt: skip


def report_of(program):
    with torch.inference_mode(), FlopMeter("h100-sxm5-80gb") as meter:
        program()
    return meter.report()


@pytest.mark.parametrize(("shape", "dtype", "microseconds"), MEASURED)
def test_the_gradient_of_a_bilinear_interpolation_takes_about_as_long_as_it_did(shape, dtype, microseconds):
    report = report_of(lambda: enlarged_backward(*shape, dtype=dtype))
    assert report.kernel_seconds * 1e6 == pytest.approx(microseconds, rel=0.2)


@pytest.mark.parametrize(("shape", "dtype", "microseconds"), NEAREST)
def test_the_gradient_of_nearest_neighbours_takes_about_as_long_as_it_did(shape, dtype, microseconds):
    report = report_of(lambda: enlarged_backward(*shape, dtype=dtype, nearest=True))
    assert report.kernel_seconds * 1e6 == pytest.approx(microseconds, rel=0.2)


def atomics_of(*shape, **options):
    """What the last kernel adds atomically."""
    return report_of(lambda: enlarged_backward(*shape, **options)).kernels[-1].cost.work.atomics


def test_threads_that_add_to_one_word_do_so_one_after_another():
    """32 places in a row of 16 elements, at (place + .5) / 2 - .5: three at the first, one at the last, two at all
    others. Of two sectors the first is added to three times, the second twice, for each of four taps."""
    assert atomics_of(1, 1, 1, 32) == Atomics(rounds=4 * (3 + 2))


def test_halves_of_a_word_are_added_by_instructions_of_their_own():
    """All 16 elements lie in a sector. Three threads add to the first of the even ones, two to each of the odd ones."""
    assert atomics_of(1, 1, 1, 32, dtype=BF16) == Atomics(rounds=4 * (3 + 2), returned=4 * 2)


def test_channels_side_by_side_are_added_at_once():
    """A warp adds to 32 channels of one place, which are four sectors: 16 places, four taps."""
    assert atomics_of(1, 32, 4, 4, channels_last=True) == Atomics(rounds=16 * 4 * 4)


def test_twice_as_many_images_are_twice_as_many_additions():
    one, two = (atomics_of(images, 64, 28, 28, dtype=BF16) for images in (32, 64))
    assert two.rounds == pytest.approx(2 * one.rounds, rel=1e-3)
    assert two.returned == pytest.approx(2 * one.returned, rel=1e-3)


def test_corners_that_are_aligned_spread_the_places_over_the_whole_row():
    """32 places in a row of two elements, at place · 1 / 31: all but the last at the first element."""
    grad = meta(1, 1, 1, 32)
    report = report_of(lambda: aten.upsample_bilinear2d_backward(grad, [1, 32], [1, 1, 1, 2], True))
    assert report.kernels[-1].cost.work.atomics == Atomics(rounds=4 * 31)
