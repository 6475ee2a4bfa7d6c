"""Contractions against torch's own FlopCounterMode, forward and backward; by hand where it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from costs_support import meta, products
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flopmeter import FlopMeter

aten = torch.ops.aten


def leaf(*shape: int) -> Tensor:
    return meta(*shape).requires_grad_()


def both_ways(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[], Any]:
    """Forward and backward, seeded with a gradient."""

    def program() -> None:
        out = function(*inputs)
        out.backward(torch.empty_like(out))

    return program


def conv(dims: int, *, transposed: bool = False, **options: Any) -> Callable[[], Any]:
    kinds = (
        (nn.Conv1d, nn.Conv2d, nn.Conv3d)
        if not transposed
        else (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
    )
    module = kinds[dims - 1](4, 6, 3, **options, device="meta")
    return both_ways(module, leaf(2, 4, *[9] * dims))


RIGHT: dict[str, Callable[[], Any]] = {
    "mm": both_ways(torch.mm, leaf(5, 7), leaf(7, 3)),
    "bmm": both_ways(torch.bmm, leaf(2, 5, 7), leaf(2, 7, 3)),
    "addmm": both_ways(torch.addmm, leaf(3), leaf(5, 7), leaf(7, 3)),
    "baddbmm": both_ways(torch.baddbmm, leaf(2, 5, 3), leaf(2, 5, 7), leaf(2, 7, 3)),
    "linear": both_ways(nn.Linear(7, 3, device="meta"), leaf(2, 5, 7)),
    "matmul of a batch and a matrix": both_ways(torch.matmul, leaf(2, 5, 7), leaf(7, 3)),
    "matmul, broadcast": both_ways(torch.matmul, leaf(4, 1, 5, 7), leaf(2, 7, 3)),
    "einsum": both_ways(lambda a, b: torch.einsum("bik,bkj->bij", a, b), leaf(2, 5, 7), leaf(2, 7, 3)),
    "einsum of three": both_ways(
        lambda a, b, c: torch.einsum("ik,kj,jl->il", a, b, c), leaf(5, 7), leaf(7, 3), leaf(3, 2)
    ),
    "tensordot": both_ways(lambda a, b: torch.tensordot(a, b, 2), leaf(5, 7, 3), leaf(7, 3, 2)),
    "conv1d": conv(1),
    "conv2d": conv(2, padding=1),
    "conv2d strided and dilated": conv(2, stride=2, dilation=2),
    "conv3d": conv(3),
    "conv_transpose1d": conv(1, transposed=True),
    "conv_transpose2d strided": conv(2, transposed=True, stride=2),
    "conv_transpose3d": conv(3, transposed=True),
    "attention, materialized": both_ways(
        F.scaled_dot_product_attention, leaf(2, 4, 5, 8), leaf(2, 4, 5, 8), leaf(2, 4, 5, 8)
    ),
    "multi-head attention": both_ways(
        lambda x: nn.MultiheadAttention(16, 4, batch_first=True, device="meta")(x, x, x)[0], leaf(2, 5, 16)
    ),
    "encoder layer": both_ways(nn.TransformerEncoderLayer(16, 4, 32, device="meta"), leaf(5, 2, 16)),
    "LSTM, step by step": both_ways(lambda x: nn.LSTM(4, 3, device="meta")(x)[0], leaf(5, 2, 4)),
    "GRU, step by step": both_ways(lambda x: nn.GRU(4, 3, device="meta")(x)[0], leaf(5, 2, 4)),
    "second derivative": lambda: torch.autograd.grad(
        torch.autograd.grad(F.linear(torch.tanh(X), W).sum(), X, create_graph=True)[0].sum(), W
    ),
    "checkpointed": lambda: torch.utils.checkpoint.checkpoint(F.linear, X, W, use_reentrant=False).sum().backward(),
    "_scaled_mm": lambda: aten._scaled_mm(
        meta(16, 32, dtype=torch.float8_e4m3fn), meta(64, 32, dtype=torch.float8_e4m3fn).t(), meta(), meta()
    ),
}  # fmt: skip
X, W = leaf(5, 7), leaf(3, 7)


@pytest.mark.parametrize("name", RIGHT)
def test_contractions_are_those_that_torch_counts(name):
    with FlopCounterMode(display=False) as counter:
        RIGHT[name]()
    assert products(RIGHT[name]) == counter.get_total_flops() > 0


# What torch counts, and what it is: forward x, and the gradients of both operands.
WRONG: dict[str, tuple[Callable[[], Any], int, int]] = {
    "mv": (lambda: torch.mv(meta(5, 7), meta(7)), 0, 2 * 35),
    "dot": (lambda: torch.dot(meta(7), meta(7)), 0, 14),
    "addmv": (lambda: torch.addmv(meta(5), meta(5, 7), meta(7)), 0, 70),
    "addbmm": (lambda: torch.addbmm(meta(5, 3), meta(2, 5, 7), meta(2, 7, 3)), 0, 2 * 2 * 5 * 7 * 3),
    "addr": (lambda: torch.addr(meta(5, 7), meta(5), meta(7)), 0, 70),
    "bilinear": (
        lambda: F.bilinear(meta(4, 3), meta(4, 5), meta(2, 3, 5)), 0, 2 * 4 * 2 * 3 * 5 + 2 * 4 * 2 * 5
    ),
    "_int_mm": (
        lambda: aten._int_mm(meta(32, 8, dtype=torch.int8), meta(8, 16, dtype=torch.int8)), 0, 2 * 32 * 8 * 16
    ),
    "_grouped_mm": (
        lambda: aten._grouped_mm(meta(2, 8, 16, dtype=torch.bfloat16), meta(2, 16, 8, dtype=torch.bfloat16)),
        0, 2 * 2 * 8 * 16 * 8,
    ),
    "_weight_int8pack_mm": (
        lambda: aten._weight_int8pack_mm(
            meta(4, 32, dtype=torch.bfloat16), meta(16, 32, dtype=torch.int8), meta(16, dtype=torch.bfloat16)
        ),
        0, 2 * 4 * 16 * 32,
    ),
    # 8 channels each 9 taps at 81 places, three times. torch takes the gradient of the filters for a dense one: 8x.
    "depthwise convolution": (
        both_ways(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False, device="meta"), leaf(1, 8, 9, 9)),
        2 * 8 * 81 * 9 * (1 + 1 + 8), 3 * 2 * 8 * 81 * 9,
    ),
    "grouped convolution": (
        both_ways(nn.Conv2d(8, 8, 3, padding=1, groups=4, bias=False, device="meta"), leaf(1, 8, 9, 9)),
        2 * 8 * 81 * 18 * (1 + 1 + 4), 3 * 2 * 8 * 81 * 18,
    ),
    "grouped transposed convolution": (
        both_ways(nn.ConvTranspose2d(8, 8, 3, groups=4, bias=False, device="meta"), leaf(1, 8, 9, 9)),
        2 * 8 * 81 * 18 * (1 + 1 + 4), 3 * 2 * 8 * 81 * 18,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_where_torchs_counter_is_wrong_the_work_by_hand_is_right(name):
    program, torch_says, by_hand = WRONG[name]
    with FlopCounterMode(display=False) as counter:
        program()
    assert products(program) == by_hand
    assert counter.get_total_flops() == torch_says != by_hand


def test_half_precision_and_complex_products_count_the_same_and_four_times():
    single = products(lambda: torch.mm(meta(5, 7), meta(7, 3)))
    half = products(lambda: torch.mm(meta(5, 7, dtype=torch.bfloat16), meta(7, 3, dtype=torch.bfloat16)))
    complex_ = products(lambda: torch.mm(meta(5, 7, dtype=torch.complex64), meta(7, 3, dtype=torch.complex64)))
    assert (half, complex_) == (single, 4 * single)


def test_forward_mode_derivatives_are_counted_and_a_question_about_storages_is_no_uncounted_op() -> None:
    layer, x = nn.Linear(8, 4, device="meta"), meta(2, 8)
    with FlopCounterMode(display=False) as counter:
        torch.func.jvp(layer, (x,), (x,))
    with FlopMeter(strict=True) as meter:
        torch.func.jvp(layer, (x,), (x,))
    assert 2 * meter.report().macs == counter.get_total_flops() > 0
