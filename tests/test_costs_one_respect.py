"""Calls that differ in the one respect that a part of a condition asks for. Each of these parts decided for no other
call that the tests make."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from costs_support import calls_of, costs_in, flops, meta

from flopmeter import FlopMeter
from flopmeter.costs.windows import covered

aten = torch.ops.aten


def test_of_what_follows_a_random_mask_only_its_division_is_part_of_a_dropout():
    def of(op):
        with FlopMeter("a100-sxm4-80gb") as meter:
            op(meta(40, 50).bernoulli_(0.5))
        return meter.report().flops

    assert of(lambda mask: aten.div_.Scalar(mask, 0.5)) == 0
    assert of(lambda mask: aten.mul_.Scalar(mask, 2.0)) == 40 * 50
    assert of(lambda mask: aten.div_.Scalar(meta(40, 50), 0.5)) == 40 * 50


@pytest.mark.parametrize("wide", [torch.float64, torch.int32])
def test_casts_to_8_bits_have_kernels_of_their_own_from_floats_of_at_most_32(wide):
    """float8_copy_kernel_cuda in Copy.cu; other types are asked for element by element."""
    (of_wide,), (of_single,), (of_half,) = (
        costs_in(lambda dtype=dtype: meta(64, 64, dtype=dtype).to(torch.float8_e4m3fn))
        for dtype in (wide, torch.float32, torch.bfloat16)
    )
    assert of_wide.work.index_operations == 40 * 64 * 64
    assert of_single.work.index_operations == of_half.work.index_operations == 0


def test_a_copy_of_one_number_has_no_order():
    (copied,) = costs_in(lambda: meta(1, 1).as_strided((1, 1), (7, 3)).clone())
    assert copied.access is None


@pytest.mark.parametrize(
    ("shape", "affine", "kernels"), [((8, 32, 6), True, 3), ((8, 32), True, 2), ((8, 32, 6), False, 2)]
)
def test_weights_of_a_group_norm_are_joined_with_its_statistics_where_channels_have_several_elements(
    shape, affine, kernels
):
    """GroupNormKernelImplInternal in group_norm_kernel.cu: GroupNorm1dForward has one kernel after the statistics."""
    vectors = (meta(32), meta(32)) if affine else ()
    (cost,) = costs_in(lambda: F.group_norm(meta(*shape), 4, *vectors))
    assert cost.work.kernels + sum(rows.is_kernel for rows in cost.work.rereads) == kernels


def test_a_bool_is_counted_without_a_comparison_first():
    assert len(costs_in(lambda: torch.count_nonzero(meta(6, 4, dtype=torch.bool)))) == 1
    assert len(costs_in(lambda: torch.count_nonzero(meta(6, 4)))) == 2


@pytest.mark.parametrize(("train", "each"), [(None, 1), (True, 1), (False, 0)])
def test_a_dropout_outside_of_training_multiplies_nothing(train, each):
    assert flops(lambda: aten.native_dropout(meta(6, 4), 0.5, train)) == each * 24


@pytest.mark.parametrize("bias", [meta(16)[::2], meta(1), meta(6, 1)], ids=["gaps", "one number", "a column"])
def test_cublas_adds_a_dense_row_alone_and_other_addends_are_copied_first(bias):
    a, b = meta(6, 5), meta(5, 8)
    assert len(costs_in(lambda: torch.addmm(meta(8), a, b))) == 1
    assert len(costs_in(lambda: torch.addmm(bias, a, b))) == 2


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_a_convolution_cost_together_what_they_cost_one_by_one(transposed):
    x, grad, weight = meta(2, 8, 6, 6), meta(2, 8, 6, 6), meta(8, 8, 3, 3)

    def of(*mask):
        costs = costs_in(
            lambda: aten.convolution_backward(grad, x, weight, [8], [1, 1], [1, 1], [1, 1], transposed, [0, 0], 1, mask)
        )
        return [(cost.flops, cost.bytes_read, cost.bytes_written) for cost in costs]

    alone = [of(*(place == wanted for place in range(3))) for wanted in range(3)]
    assert [len(each) for each in alone] == [1, 1, 1]
    for mask in ((True, True, True), (True, False, True), (False, True, True), (True, True, False)):
        assert of(*mask) == [cost for wanted, each in zip(mask, alone, strict=True) if wanted for cost in each]
    assert of(False, False, False) == []
    x, weight = meta(2, 6, 6, 8).permute(0, 3, 1, 2)[:, :, ::2], meta(3, 3, 8, 8).permute(2, 3, 0, 1)
    assert len(of(True, True, True)) > 3, "no operand is copied"
    assert of(False, False, True) == alone[2]


def test_windows_read_the_places_that_their_taps_meet():
    """By going through them; a tap may meet only the padding."""
    draw = random.Random(1)
    for _ in range(400):
        size, kernel, stride, padding, dilation = (
            draw.randint(*ends) for ends in ((1, 9), (1, 4), (1, 5), (0, 3), (1, 3))
        )
        windows = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        met = {start * stride + tap * dilation - padding for start in range(windows) for tap in range(kernel)}
        spec = covered_spec(size, windows, kernel, stride, padding, dilation)
        assert spec.shape == (1, 1, len(met & set(range(size))))


def covered_spec(size, windows, *options):
    *_, call = calls_of(lambda: meta(1, 1, size).sin())
    return covered(call.inputs[0], [windows], *([each] for each in options))


@pytest.mark.parametrize("pool", [F.max_pool2d, F.avg_pool2d, F.max_pool3d, F.avg_pool3d])
def test_a_pooling_visits_as_many_elements_as_its_window_has_however_they_lie(pool):
    dims = 3 if pool in (F.max_pool3d, F.avg_pool3d) else 2

    def of(*kernel):
        x = meta(1, 4, *[12] * dims)
        return costs_in(lambda: pool(x, kernel[0] if len(kernel) == 1 else kernel, stride=6))[-1].work.index_operations

    wide, tall, line = ((2, 3), (3, 2), (6, 1)) if dims == 2 else ((1, 2, 3), (3, 2, 1), (1, 6, 1))
    assert of(*wide) == of(*tall) == of(*line)
    assert of(2) == of(*[2] * dims) != of(*wide)
