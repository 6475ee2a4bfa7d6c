"""Kernels that move data or draw numbers, against what an H100 took (torch 2.11, 2026-11, validation/traces)."""

from __future__ import annotations

import pytest
import torch
from costs_support import meta

from flopmeter import FlopMeter

BF16, FP32 = torch.bfloat16, torch.float32
BIG = 2**26
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
    "addition, bf16": (131.4, lambda: meta(BIG, dtype=BF16).add(meta(BIG, dtype=BF16))),
}


def seconds(program, hardware="h100-sxm5-80gb"):
    with torch.inference_mode(), FlopMeter(hardware) as meter:
        program()
    return meter.report().kernel_seconds


@pytest.mark.parametrize("name", MEASURED)
def test_a_kernel_takes_about_as_long_as_on_an_h100(name):
    microseconds, program = MEASURED[name]
    assert seconds(program) * 1e6 == pytest.approx(microseconds, rel=0.2)


def test_a_roll_moves_its_tensor_once_for_each_dimension():
    """`roll_common` in aten/src/ATen/native/TensorTransformations.h."""
    x = meta(8, 8, 8)
    with FlopMeter("h100-sxm5-80gb") as meter:
        x.roll((1, 2, 3), (0, 1, 2))
    report = meter.report()
    assert report.bytes_read == report.bytes_written == 3 * x.nbytes


def test_a_stack_takes_as_long_as_the_cat_that_it_is():
    q, k = meta(64, 32, 49, 32, dtype=BF16), meta(64, 32, 32, 49, dtype=BF16).mT
    views = [each.unsqueeze(0) for each in (q, k, q)]
    assert seconds(lambda: torch.stack((q, k, q))) == pytest.approx(seconds(lambda: torch.cat(views)))


def test_uniform_numbers_take_less_time_than_normal_ones():
    x = meta(BIG, dtype=BF16)
    assert seconds(lambda: torch.rand_like(x)) < 0.7 * seconds(lambda: torch.randn_like(x))
