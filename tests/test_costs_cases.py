"""Costs against arithmetic done by hand, op by op. Sizes are small primes, so that no two products coincide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from costs_support import calls_of, meta
from torch import Tensor

from flopmeter.costs import costs_of
from flopmeter.records import Call

aten = torch.ops.aten
F32, BF16, I8, I64, BOOL, C64 = torch.float32, torch.bfloat16, torch.int8, torch.int64, torch.bool, torch.complex64
FP8 = torch.float8_e4m3fn
T = meta


def i64(*shape: int) -> Tensor:
    return meta(*shape, dtype=I64)


def mask(*shape: int) -> Tensor:
    return meta(*shape, dtype=BOOL)


def c64(*shape: int) -> Tensor:
    return meta(*shape, dtype=C64)


# (call, FLOPs, bytes read, bytes written): with fp32, 4 bytes an element.
Case = tuple[Callable[[], Any], int, int, int]
CONTRACTIONS: dict[str, Case] = {
    "mm": (lambda: aten.mm(T(2, 3), T(3, 5)), 2 * 2 * 5 * 3, 4 * (6 + 15), 4 * 10),
    "bmm": (lambda: aten.bmm(T(7, 2, 3), T(7, 3, 5)), 7 * 2 * 2 * 5 * 3, 4 * 7 * (6 + 15), 4 * 70),
    "addmm": (lambda: aten.addmm(T(5), T(2, 3), T(3, 5)), 60 + 10, 4 * (5 + 6 + 15), 4 * 10),
    # the bias is copied into the result, to which the product adds
    "addmm scaled": (lambda: aten.addmm(T(5), T(2, 3), T(3, 5), beta=2, alpha=3), 60 + 3 * 10, 4 * 36, 80),
    "addmm beta 0": (lambda: aten.addmm(T(5), T(2, 3), T(3, 5), beta=0), 60, 4 * 21, 40),
    "addmm_": (lambda: aten.addmm_(T(2, 5), T(2, 3), T(3, 5)), 70, 4 * 31, 40),
    "baddbmm": (lambda: aten.baddbmm(T(7, 2, 5), T(7, 2, 3), T(7, 3, 5)), 7 * 70, 7 * 4 * 41, 7 * 80),
    "baddbmm_": (lambda: aten.baddbmm_(T(7, 2, 5), T(7, 2, 3), T(7, 3, 5)), 7 * 70, 7 * 4 * 31, 7 * 40),
    # a copy, then seven products that add to it
    "addbmm": (lambda: aten.addbmm(T(2, 5), T(7, 2, 3), T(7, 3, 5)), 430, 40 + 7 * 124, 40 + 7 * 40),
    "addbmm_": (lambda: aten.addbmm_(T(2, 5), T(7, 2, 3), T(7, 3, 5)), 2 * 2 * 5 * 21 + 10, 7 * 124, 7 * 40),
    "mv": (lambda: aten.mv(T(2, 3), T(3)), 12, 4 * 9, 8),
    "addmv": (lambda: aten.addmv(T(2), T(2, 3), T(3)), 12 + 2, 4 * 13, 16),
    "addmv_": (lambda: aten.addmv_(T(2), T(2, 3), T(3)), 14, 44, 8),
    "dot": (lambda: aten.dot(T(7), T(7)), 14, 56, 4),
    "vdot complex": (lambda: aten.vdot(c64(7), c64(7)), 7 * 8, 2 * 56, 8),
    "addr": (lambda: aten.addr(T(2, 5), T(2), T(5)), 2 * 10 + 10, 4 * 17, 40),
    "addr_": (lambda: aten.addr_(T(2, 5), T(2), T(5)), 30, 68, 40),
    "mm complex": (lambda: aten.mm(c64(2, 3), c64(3, 5)), 8 * 30, 8 * 21, 80),
    "addmm complex": (lambda: aten.addmm(c64(5), c64(2, 3), c64(3, 5)), 8 * 30 + 2 * 10, 8 * 36, 160),
    "mm int64": (lambda: aten.mm(i64(2, 3), i64(3, 5)), 0, 8 * 21, 80),
    "_int_mm": (lambda: aten._int_mm(T(32, 8, dtype=I8), T(8, 16, dtype=I8)), 2 * 32 * 8 * 16, 256 + 128, 4 * 512),
    "_addmm_activation relu": (lambda: aten._addmm_activation(T(5), T(2, 3), T(3, 5)), 70, 104, 40),
    "_addmm_activation gelu": (
        lambda: aten._addmm_activation(T(5), T(2, 3), T(3, 5), use_gelu=True), 70 + 9 * 10, 104, 40
    ),
    "_grouped_mm tokens": (
        lambda: aten._grouped_mm(T(32, 16, dtype=BF16), T(4, 16, 8, dtype=BF16), T(4, dtype=torch.int32)),
        2 * 32 * 16 * 8, 2 * (512 + 512) + 16, 2 * 256,
    ),
    "_grouped_mm batched": (
        lambda: aten._grouped_mm(T(4, 8, 16, dtype=BF16), T(4, 16, 8, dtype=BF16)),
        4 * 2 * 8 * 16 * 8, 2 * (512 + 512), 2 * 256,
    ),
    "_scaled_mm": (
        lambda: aten._scaled_mm(T(16, 32, dtype=FP8), T(64, 32, dtype=FP8).t(), T(), T(), out_dtype=BF16),
        2 * 16 * 64 * 32 + 16 * 64, 16 * 32 + 64 * 32 + 8, 2 * 16 * 64,
    ),
    "_weight_int8pack_mm": (
        lambda: aten._weight_int8pack_mm(T(4, 32, dtype=BF16), T(16, 32, dtype=I8), T(16, dtype=BF16)),
        2 * 4 * 16 * 32 + 64, 2 * 128 + 512 + 32, 2 * 64,
    ),
    "convolution": (
        lambda: aten.convolution(T(2, 3, 8, 8), T(5, 3, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        2 * (2 * 5 * 64) * 27, 4 * (384 + 135), 4 * 640,
    ),
    "convolution bias": (
        lambda: aten.convolution(T(2, 3, 8, 8), T(5, 3, 3, 3), T(5), [1, 1], [1, 1], [1, 1], False, [0, 0], 1),
        2 * 640 * 27 + 640, 4 * (384 + 135) + 4 * (640 + 5), 2 * 4 * 640,
    ),
    "convolution groups": (
        lambda: aten.convolution(T(1, 4, 6), T(6, 2, 3), None, [1], [0], [1], False, [0], 2),
        2 * (6 * 4) * (2 * 3), 4 * (24 + 36), 4 * 24,
    ),
    "convolution depthwise": (
        lambda: aten.convolution(T(1, 4, 6), T(4, 1, 3), None, [1], [1], [1], False, [0], 4),
        2 * (4 * 6) * 3, 4 * (24 + 12), 4 * 24,
    ),
    "convolution transposed, stride 2": (  # 6 positions, each spread over 3 taps of 5 channels
        lambda: aten.convolution(T(1, 4, 6), T(4, 5, 3), None, [2], [0], [1], True, [0], 1),
        2 * 6 * 4 * 5 * 3, 4 * (24 + 60), 4 * 5 * 13,
    ),
    "convolution_backward depthwise": (
        lambda: aten.convolution_backward(
            T(1, 4, 6), T(1, 4, 6), T(4, 1, 3), [4], [1], [1], [1], False, [0], 4, [True, True, True]
        ),
        2 * (2 * 24 * 3) + 24, 4 * (24 + 12) + 4 * (24 + 24) + 4 * 24, 4 * (24 + 12 + 4),
    ),
    "conv_tbc": (  # the bias in 5·2·7 places, to which each of 5 taps adds [10, 3] @ [3, 7]
        lambda: aten.conv_tbc(T(9, 2, 3), T(5, 3, 7), T(7)),
        5 * (2 * 10 * 3 * 7 + 70), 4 * 7 + 5 * 4 * (30 + 21 + 70), 6 * 280,
    ),
    "conv_tbc padded": (  # 4 steps: the middle tap meets all of them, those beside it three
        lambda: aten.conv_tbc(T(4, 1, 2), T(3, 2, 5), T(5), 1),
        (4 + 3 + 3) * (2 * 2 * 5 + 5), 4 * 5 + 4 * (10 * 2 + 3 * 10 + 10 * 5), 4 * (20 + 10 * 5),
    ),
    "_trilinear": (  # bilinear layer, 7 rows: x1 [7, 2], weight [5, 2, 3], x2 [7, 3]
        # Zeros; for each of 5 results x1 @ weight, [7, 3], then the sums of its products with x2, added to the zeros.
        lambda: aten._trilinear(T(7, 2), T(5, 2, 3), T(7, 3), [1, 3], [0], [1, 2], [2, 3]),
        5 * (2 * 7 * 2 * 3 + 2 * 7 * 3 + 7), 5 * 4 * (14 + 6 + 21 + 21 + 7 + 7), 4 * 35 + 5 * 4 * (21 + 7 + 7),
    ),
}  # fmt: skip

ELEMENTWISE: dict[str, Case] = {
    "add": (lambda: aten.add(T(2, 3), T(2, 3)), 6, 48, 24),
    "add alpha": (lambda: aten.add(T(2, 3), T(2, 3), alpha=2), 12, 48, 24),
    "add broadcast": (lambda: aten.add(T(2, 3), T(3)), 6, 24 + 12, 24),
    "add complex": (lambda: aten.add(c64(6), c64(6)), 12, 96, 48),
    "add complex alpha": (lambda: aten.add(c64(6), c64(6), alpha=2), 6 * 8, 96, 48),
    "mul complex": (lambda: aten.mul(c64(6), c64(6)), 36, 96, 48),
    "div complex": (lambda: aten.div(c64(6), c64(6)), 66, 96, 48),
    "exp complex": (lambda: aten.exp(c64(6)), 24, 48, 48),
    "abs complex": (lambda: aten.abs(c64(6)), 24, 48, 24),
    "conj_physical": (lambda: aten.conj_physical(c64(6)), 6, 48, 48),
    "conj_physical_": (lambda: aten.conj_physical_(c64(6)), 6, 48, 48),
    "angle complex": (lambda: aten.angle(c64(6)), 6, 48, 24),
    "sgn complex": (lambda: aten.sgn(c64(6)), 36, 48, 48),
    "polar": (lambda: aten.polar(T(6), T(6)), 24, 48, 48),
    "complex": (lambda: aten.complex(T(6), T(6)), 0, 48, 48),
    "add int": (lambda: aten.add(i64(6), 1), 0, 48, 48),
    "mul of itself": (lambda: (lambda x: aten.mul(x, x))(T(6)), 6, 24, 24),
    "mul expanded": (lambda: aten.mul.Tensor(T(6), T(1).as_strided((6,), (0,))), 6, 24 + 4, 24),
    "mul_": (lambda: aten.mul_(T(6), 2.0), 6, 24, 24),
    "relu": (lambda: aten.relu(T(6)), 0, 24, 24),
    "threshold_backward": (lambda: aten.threshold_backward(T(6), T(6), 0), 0, 48, 24),
    "gelu": (lambda: aten.gelu(T(6)), 6 * 5, 24, 24),
    "gelu tanh": (lambda: aten.gelu(T(6), approximate="tanh"), 6 * 9, 24, 24),
    "gelu_backward": (lambda: aten.gelu_backward(T(6), T(6)), 6 * 11, 48, 24),
    "sigmoid": (lambda: aten.sigmoid(T(6)), 6 * 4, 24, 24),
    "sigmoid_backward": (lambda: aten.sigmoid_backward(T(6), T(6)), 6 * 3, 48, 24),
    "silu": (lambda: aten.silu(T(6)), 24, 24, 24),
    "silu_backward": (lambda: aten.silu_backward(T(6), T(6)), 6 * (4 + 5), 48, 24),
    "softplus": (lambda: aten.softplus(T(6)), 6 * 4, 24, 24),
    "elu": (lambda: aten.elu(T(6)), 18, 24, 24),
    "glu": (lambda: aten.glu(T(4, 6)), 12 * 5, 96, 48),
    "glu_backward": (lambda: aten.glu_backward(T(4, 3), T(4, 6), -1), 12 * (4 + 1 + 3), 48 + 96, 96),
    "pow 2": (lambda: aten.pow(T(6), 2), 6, 24, 24),
    "pow 3": (lambda: aten.pow(T(6), 3), 12, 24, 24),
    "pow 2.5": (lambda: aten.pow(T(6), 2.5), 6, 24, 24),
    "addcmul": (lambda: aten.addcmul(T(6), T(6), T(6)), 12, 72, 24),
    "addcdiv scaled": (lambda: aten.addcdiv(T(6), T(6), T(6), value=2), 18, 72, 24),
    "lerp": (lambda: aten.lerp(T(6), T(6), 0.5), 18, 48, 24),
    "where": (lambda: aten.where(mask(6), T(6), T(6)), 0, 6 + 48, 24),
    "masked_fill_": (lambda: aten.masked_fill_(T(6), mask(6), 0.0), 0, 24 + 6, 24),
    "eq": (lambda: aten.eq(T(6), T(6)), 0, 48, 6),
    "div floor": (lambda: aten.div(T(6), T(6), rounding_mode="floor"), 12, 48, 24),
    "floor_divide": (lambda: aten.floor_divide(T(6), T(6)), 12, 48, 24),
    "linalg_cross": (lambda: aten.linalg_cross(T(4, 3), T(4, 3)), 12 * 3, 96, 48),
    "native_dropout": (lambda: aten.native_dropout(T(6), 0.5, True), 6, 24, 24 + 6),
    "native_dropout_backward": (lambda: aten.native_dropout_backward(T(6), mask(6), 2.0), 6, 24 + 6, 24),
    "_to_copy": (lambda: aten._to_copy(T(6), dtype=BF16), 0, 24, 12),
    "copy_ broadcast": (lambda: aten.copy_(T(4, 6), T(6)), 0, 24, 96),
    "clone expanded": (lambda: aten.clone.default(T(6).as_strided((4, 6), (0, 1))), 0, 24, 96),
    "renorm": (lambda: aten.renorm(T(4, 6), 2, 0, 1.0), 52 + 8 + 24, 96 + 16 + 112, 16 + 16 + 96),
    "mvlgamma": (lambda: aten.mvlgamma(T(5), 3), 3 * 15 + 5, 32 + 60 + 60 + 20, 12 + 60 + 60 + 20 + 20),
    "_weight_norm_interface": (lambda: aten._weight_norm_interface(T(4, 6), T(4, 1)), 24 * 3, 96 + 16, 96 + 16),
    "_foreach_add": (lambda: aten._foreach_add([T(6), T(5)], [T(6), T(5)]), 11, 88, 44),
    "_foreach_add alpha": (lambda: aten._foreach_add([T(6), T(5)], [T(6), T(5)], alpha=2), 22, 88, 44),
    "_foreach_addcmul_": (
        lambda: aten._foreach_addcmul_([T(6), T(5)], [T(6), T(5)], [T(6), T(5)], 0.5), 33, 3 * 44, 44
    ),
    "_foreach_sqrt": (lambda: aten._foreach_sqrt([T(6), T(5)]), 11, 44, 44),
    "_foreach_zero_": (lambda: aten._foreach_zero_([T(6), T(5)]), 0, 0, 44),
    "_foreach_copy_": (lambda: aten._foreach_copy_([T(6), T(5)], [T(6), T(5)]), 0, 44, 44),
    "_foreach_norm": (lambda: aten._foreach_norm([T(6), T(5)], 2), 2 * 11 + 2, 44, 8),
    "_amp_foreach_non_finite_check_and_unscale_": (
        lambda: aten._amp_foreach_non_finite_check_and_unscale_([T(6), T(5)], T(), T()), 11, 44 + 8, 44 + 4
    ),
    "_amp_update_scale_": (
        lambda: aten._amp_update_scale_(T(), T(dtype=torch.int32), T(), 2.0, 0.5, 100), 1, 12, 8
    ),
}  # fmt: skip

NORMS_AND_REDUCTIONS: dict[str, Case] = {
    "_softmax": (lambda: aten._softmax(T(4, 6), -1, False), 24 * 4, 96, 96),
    "_log_softmax": (lambda: aten._log_softmax(T(4, 6), -1, False), 24 * 4, 96, 96),
    "_softmax_backward_data": (lambda: aten._softmax_backward_data(T(4, 6), T(4, 6), -1, F32), 24 * 4, 192, 96),
    "native_layer_norm": (lambda: aten.native_layer_norm(T(4, 6), [6], T(6), T(6), 1e-5), 24 * 7, 96 + 48, 96 + 32),
    "native_layer_norm bare": (lambda: aten.native_layer_norm(T(4, 6), [6], None, None, 1e-5), 24 * 5, 96, 96 + 32),
    "native_layer_norm_backward": (
        lambda: aten.native_layer_norm_backward(
            T(4, 6), T(4, 6), [6], T(4, 1), T(4, 1), T(6), T(6), [True, True, True]
        ),
        24 * 13, 192 + 32 + 48, 96 + 48,
    ),
    "sum": (lambda: aten.sum(T(4, 6)), 24, 96, 4),
    "sum complex": (lambda: aten.sum(c64(4, 6)), 48, 192, 8),
    "sum expanded": (lambda: aten.sum.default(T(6).as_strided((4, 6), (0, 1))), 24, 24, 4),
    "sum int": (lambda: aten.sum(i64(4, 6)), 0, 192, 8),
    "mean dim": (lambda: aten.mean.dim(T(4, 6), [1]), 24 + 4, 96, 16),
    "var": (lambda: aten.var.correction(T(4, 6), [1]), 24 * 3 + 4 * 4, 96, 16),
    # The maxima and their |x|, == inf and masked_fill_; x less the maxima, exp_, sum; log_ and add_: in bytes, x 96, a
    # number for each row 16, a flag 4.
    "logsumexp": (
        lambda: aten.logsumexp(T(4, 6), [1]),
        24 * 3 + 4 * 3,
        (96 + 16 + 16 + 20) + (112 + 96 + 96) + (16 + 32),
        (16 + 16 + 4 + 16) + (96 + 96 + 16) + (16 + 16),
    ),
    "amax": (lambda: aten.amax(T(4, 6), [1]), 0, 96, 16),
    "max dim": (lambda: aten.max(T(4, 6), 1), 0, 96, 16 + 32),
    "argmax": (lambda: aten.argmax(T(4, 6), 1), 0, 96, 32),
    "cumsum": (lambda: aten.cumsum(T(4, 6), 1), 24, 96, 96),
    "linalg_vector_norm": (lambda: aten.linalg_vector_norm(T(4, 6)), 48 + 1, 96, 4),
    "trace": (lambda: aten.trace(T(4, 6)), 4, 16, 4),
    "max_pool2d": (lambda: aten.max_pool2d_with_indices(T(1, 3, 4, 4), [2, 2]), 0, 192, 48 + 96),
    "max_pool2d backward": (  # reads gradient and indices, not the input
        lambda: aten.max_pool2d_with_indices_backward(
            T(1, 3, 2, 2), T(1, 3, 4, 4), [2, 2], [2, 2], [0, 0], [1, 1], False, i64(1, 3, 2, 2)
        ),
        12, 48 + 96, 192 + 192,  # into zeros
    ),
    "avg_pool2d": (lambda: aten.avg_pool2d(T(1, 3, 4, 4), [2, 2], [2, 2]), 12 * (4 + 1), 192, 48),
    "avg_pool2d_backward": (
        lambda: aten.avg_pool2d_backward(
            T(1, 3, 2, 2), T(1, 3, 4, 4), [2, 2], [2, 2], [0, 0], False, True, None
        ),
        12 * 5, 48, 192,
    ),
    "_adaptive_avg_pool2d": (lambda: aten._adaptive_avg_pool2d(T(1, 3, 4, 4), [1, 1]), 48 + 3, 192, 12),
    "_adaptive_avg_pool2d_backward": (
        lambda: aten._adaptive_avg_pool2d_backward(T(1, 3, 1, 1), T(1, 3, 4, 4)), 3 + 48, 12, 192
    ),
    "reflection_pad1d_backward": (lambda: aten.reflection_pad1d_backward(T(2, 7), T(2, 5), [1, 1]), 14, 56, 40 + 40),
    "dist": (lambda: aten.dist(T(6), T(6)), 18 + 1, 48 + 24, 24 + 4),
    "dist of all pairs": (lambda: aten.dist(T(4, 1), T(6)), 24 * 3 + 1, 16 + 24 + 96, 96 + 4),  # 24 differences
    "cdist 1": (lambda: aten._cdist_forward(T(4, 6), T(5, 6), 1.0, None), 4 * 5 * 6 * 3, 4 * 54, 80),
    "cdist 2 of few rows": (lambda: aten._cdist_forward(T(4, 6), T(5, 6), 2.0, None), 360 + 20, 4 * 54, 80),
    # x² and y², their sums, and ones; -2x; all of it side by side, of depth 8; a product; clamped; a root.
    "cdist 2 of many rows": (
        lambda: aten._cdist_forward(T(30, 6), T(5, 6), 2.0, None), 3 * 180 + 2 * 30 + 2 * 30 * 5 * 8 + 150,
        4 * (180 * 2 + 30 * 2 + 180 + 240 + 40 + 280 + 2 * 150), 4 * (180 + 60 + 30 + 10 + 180 + 280 + 3 * 150),
    ),
    "_euclidean_dist": (
        lambda: aten._euclidean_dist(T(4, 6), T(5, 6)), 3 * 24 + 2 * 30 + 2 * 4 * 5 * 8 + 20,
        4 * (24 * 2 + 30 * 2 + 24 + 32 + 40 + 72 + 2 * 20), 4 * (24 + 8 + 30 + 10 + 24 + 72 + 3 * 20),
    ),
    "_pdist_forward": (lambda: aten._pdist_forward(T(4, 6)), 6 * (6 * 3 + 1), 96, 24),
    "mse_loss": (lambda: aten.mse_loss(T(6), T(6)), 18 + 1, 48 + 24, 24 + 4),  # the terms, then their mean
    "mse_loss none": (lambda: aten.mse_loss(T(6), T(6), 0), 12, 48, 24),
    # neg, mul_, exp_, log1p_, then the mean
    "soft_margin_loss": (lambda: aten.soft_margin_loss(T(6), T(6)), 30 + 1, 24 + 48 + 24 + 24 + 24, 4 * 24 + 4),
    "binary_cross_entropy_with_logits": (
        lambda: aten.binary_cross_entropy_with_logits(T(6), T(6)), 6 * (1 + 1 + 3 + 1 + 1) + 1, 24 * 7, 24 * 4 + 4
    ),
    "nll_loss_forward": (  # reads one number of each row
        lambda: aten.nll_loss_forward(T(4, 6), i64(4), None, 1, -100), 8 + 1, 16 + 32, 8
    ),
    "nll_loss_backward": (
        lambda: aten.nll_loss_backward(T(), T(4, 6), i64(4), None, 1, -100, T()), 4, 4 + 32 + 4, 96 + 16
    ),
    "upsample_bilinear2d": (lambda: aten.upsample_bilinear2d(T(1, 2, 3, 3), [6, 6], False), 72 * 9, 72, 288),
    "upsample_bicubic2d": (lambda: aten.upsample_bicubic2d(T(1, 2, 3, 3), [6, 6], False), 72 * 35, 72, 288),
    "upsample_linear1d_backward": (
        lambda: aten.upsample_linear1d_backward(T(1, 2, 6), [6], [1, 2, 3], False), 12 * 4, 48, 24
    ),
    "_upsample_bilinear2d_aa": (  # halved: four taps an axis
        lambda: aten._upsample_bilinear2d_aa(T(1, 2, 8, 8), [4, 4], False), 32 * 2 * 16, 512, 128
    ),
    "grid_sampler_2d": (  # 9 places: 2 coordinates of 4, 4 distances, 4 products; then 4 multiply-adds a channel
        lambda: aten.grid_sampler_2d(T(1, 2, 5, 5), T(1, 3, 3, 2), 0, 0, False),
        9 * (8 + 4 + 4) + 18 * 8, 200 + 72, 72,
    ),
    "grid_sampler_2d nearest": (
        lambda: aten.grid_sampler_2d(T(1, 2, 5, 5), T(1, 3, 3, 2), 1, 0, False), 9 * 8, 72 + 72, 72
    ),
    "_ctc_loss": (  # 7 steps, 3 labels: 7 states
        lambda: aten._ctc_loss(T(7, 2, 5), i64(2, 3), [7, 7], [3, 3]), 2 * 7 * 7 * 11, 280 + 48, 8 + 392
    ),
}  # fmt: skip

MOVEMENT: dict[str, Case] = {
    "zeros": (lambda: aten.zeros([4, 6], device="meta"), 0, 0, 96),
    "empty": (lambda: aten.empty([4, 6], device="meta"), 0, 0, 0),
    "zeros_like": (lambda: aten.zeros_like(T(4, 6)), 0, 0, 96),
    "fill_": (lambda: aten.fill_(T(6), 1.0), 0, 0, 24),
    "cat": (lambda: aten.cat([T(4, 6), T(5, 6)]), 0, 216, 216),
    "slice": (lambda: aten.slice(T(4, 6), 0, 1, 3), 0, 0, 0),
    "clone of a slice": (lambda: aten.clone.default(T(4, 6).narrow(0, 1, 2)), 0, 48, 48),
    "embedding": (lambda: aten.embedding(T(50, 6), i64(4)), 0, 32 + 96, 96),
    "embedding of few rows": (lambda: aten.embedding(T(2, 6), i64(7)), 0, 56 + 48, 168),
    "embedding_dense_backward": (
        lambda: aten.embedding_dense_backward(T(4, 6), i64(4), 50, -1, False), 24, 96 + 32 + 96, 1200 + 96
    ),
    "embedding_renorm_": (lambda: aten.embedding_renorm_(T(50, 6), i64(4), 1.0, 2.0), 72, 96 + 32, 96),
    "_embedding_bag": (  # 7 rows of 6 into 3 bags; also returns the bag of each row and sizes
        lambda: aten._embedding_bag(T(50, 6), i64(7), i64(3)), 42, 168 + 56 + 24, 72 + 8 * (7 + 3)
    ),
    "_embedding_bag mean": (
        lambda: aten._embedding_bag(T(50, 6), i64(7), i64(3), False, 1), 42 + 18, 248, 72 + 8 * (7 + 3)
    ),
    "gather": (lambda: aten.gather(T(4, 6), 1, i64(4, 2)), 0, 64 + 32, 32),
    "index_select": (lambda: aten.index_select(T(50, 6), 0, i64(3)), 0, 24 + 72, 72),
    "index": (lambda: aten.index(T(50, 6), [i64(3)]), 0, 24 + 72, 72),
    "index_put_ one position of a cache": (
        lambda: aten.index_put_(T(2, 64, 6), [None, i64(1)], T(2, 1, 6)), 0, 8 + 48, 48
    ),
    "index_put_ accumulate": (  # 3 places with their numbers are made and sorted; then 3 rows are added
        lambda: aten._index_put_impl_(T(50, 6), [i64(3)], T(3, 6), True, True),
        18, 24 + 48 + 48 + 72 + 72, 48 + 48 + 72
    ),
    "index_put_ accumulate, checked": (  # before that, whether the largest and the smallest place are allowed
        lambda: aten.index_put_(T(50, 6), [i64(3)], T(3, 6), True),
        18, 24 + 48 + 48 + 72 + 72 + 2 * (24 + 8), 48 + 48 + 72 + 2 * (8 + 8)
    ),
    "index_put": (lambda: aten.index_put(T(50, 6), [i64(3)], T(3, 6)), 0, 1200 + 24 + 72, 1200 + 72),
    "index_copy_": (lambda: aten.index_copy_(T(50, 6), 0, i64(3), T(3, 6)), 0, 24 + 72, 72),
    "index_add_": (lambda: aten.index_add_(T(50, 6), 0, i64(3), T(3, 6)), 18, 24 + 144, 72),
    "index_fill_": (lambda: aten.index_fill_(T(50, 6), 0, i64(3), 1.0), 0, 24, 72),
    "scatter_add_": (lambda: aten.scatter_add_(T(50, 6), 0, i64(3, 6), T(3, 6)), 18, 144 + 144, 72),
    "scatter_ value": (lambda: aten.scatter_(T(50, 6), 0, i64(3, 6), 1.0), 0, 144, 72),
    "scatter_reduce amax": (
        lambda: aten.scatter_reduce(T(50, 6), 0, i64(3, 6), T(3, 6), "amax"), 0, 1200 + 144 + 72 + 72, 1272
    ),
    "slice_backward": (lambda: aten.slice_backward(T(2, 6), [4, 6], 0, 1, 3, 1), 0, 48, 96 + 48),
    "slice_scatter": (lambda: aten.slice_scatter(T(4, 6), T(2, 6), 0, 1, 3), 0, 96 + 48, 96 + 48),
    "expand_copy": (lambda: aten.expand_copy(T(6), [4, 6]), 0, 24, 96),
    "slice_copy": (lambda: aten.slice_copy(T(4, 6), 0, 1, 3), 0, 48, 48),
    "im2col": (lambda: aten.im2col(T(1, 2, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]), 0, 128, 4 * 8 * 9),
    "col2im": (lambda: aten.col2im(T(1, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]), 72, 288, 128),
    "sort": (  # copied twice, numbered, and both sorted where they are
        lambda: aten.sort(T(4, 6)), 0, 96 + 96 + 288, 96 + 96 + 192 + 288
    ),
    "topk": (lambda: aten.topk(T(4, 6), 2), 0, 96 + 96, 96 + 96),  # chosen, then sorted where they are
    "searchsorted": (  # 3 values, ceil(log2 1000) + 1 = 11 numbers each
        lambda: aten.searchsorted(T(1000), T(3)), 0, 3 * 11 * 4 + 12, 24
    ),
    "bernoulli_": (lambda: aten.bernoulli_(T(6), 0.5), 0, 0, 24),
    "randn_like": (lambda: aten.randn_like(T(6)), 0, 0, 24),
    "unsafe_split": (lambda: aten.unsafe_split(T(6), 2), 0, 0, 0),
}  # fmt: skip

LIBRARY: dict[str, Case] = {
    "linalg_cholesky_ex": (lambda: aten.linalg_cholesky_ex(T(5, 6, 6)), 5 * 72, 720, 720 + 20),
    "linalg_lu_factor_ex": (lambda: aten.linalg_lu_factor_ex(T(6, 6)), 216 - 72, 144, 144 + 24 + 4),
    "linalg_lu_factor_ex tall": (lambda: aten.linalg_lu_factor_ex(T(9, 6)), 9 * 36 - 72, 216, 216 + 24 + 4),
    "linalg_inv_ex": (lambda: aten.linalg_inv_ex(T(6, 6)), 2 * 216, 144, 144 + 4),
    "linalg_qr": (  # R: 2·9·36 - 144 = 504; six columns of Q: 4·9·36 - 2·15·36 + 288 = 504
        lambda: aten.linalg_qr(T(9, 6)), 504 + 504, 216, 216 + 144
    ),
    "linalg_qr r": (lambda: aten.linalg_qr(T(9, 6), "r"), 504, 216, 144),
    "_linalg_eigh values": (lambda: aten._linalg_eigh(T(6, 6), "L", False), 288, 144, 24),
    "_linalg_eigh": (lambda: aten._linalg_eigh(T(6, 6)), 9 * 216, 144, 24 + 144),
    "_linalg_svd values": (lambda: aten._linalg_svd(T(9, 6), False, False), 4 * 9 * 36 - 288, 216, 24),
    "_linalg_svd": (lambda: aten._linalg_svd(T(9, 6)), 14 * 9 * 36 + 8 * 216, 216, 216 + 24 + 144),
    "linalg_eig": (lambda: aten.linalg_eig(T(6, 6)), 4 * 25 * 216, 144, 48 + 288),
    "_linalg_solve_ex": (lambda: aten._linalg_solve_ex(T(6, 6), T(6, 2)), 144 + 2 * 36 * 2, 192, 48 + 144 + 24 + 4),
    "linalg_solve_triangular": (
        lambda: aten.linalg_solve_triangular(T(6, 6), T(6, 2), upper=True), 36 * 2, 192, 48
    ),
    "cholesky_solve": (lambda: aten.cholesky_solve(T(6, 2), T(6, 6)), 2 * 36 * 2, 192, 48),
    "_linalg_det": (lambda: aten._linalg_det(T(6, 6)), 144 + 6, 144, 4 + 144 + 24),
    "_fft_c2c": (lambda: aten._fft_c2c(c64(3, 8), [1], 0, True), 5 * 24 * 3, 192, 192),
    "_fft_c2c normalized": (lambda: aten._fft_c2c(c64(3, 8), [1], 1, True), 360 + 48, 192, 192),
    "_fft_r2c": (lambda: aten._fft_r2c(T(3, 8), [1], 0, True), 180, 96, 8 * 3 * 5),
    "_fft_c2r": (lambda: aten._fft_c2r(c64(3, 5), [1], 0, 8), 180, 120, 96),
    # two sums of the gates (4), 3 sigmoids (12), 2 tanh, c' (3), h (1), and 8 biases
    "_thnn_fused_lstm_cell": (
        lambda: aten._thnn_fused_lstm_cell(T(5, 12), T(5, 12), T(5, 3), T(12), T(12)),
        15 * (4 + 12 + 2 + 3 + 1 + 8), 4 * (60 + 60 + 15 + 24), 4 * (15 + 15 + 60),
    ),
}  # fmt: skip

# More of the same rules: a frame around 3x3, twice the size of 3x3, copies of views, draws.
RELATIVES: dict[str, Case] = {
    "upsample_nearest2d": (lambda: aten.upsample_nearest2d(T(1, 2, 3, 3), [6, 6]), 0, 72, 288),
    "upsample_nearest2d_backward": (
        lambda: aten.upsample_nearest2d_backward(T(1, 2, 6, 6), [6, 6], [1, 2, 3, 3]), 72, 288, 72
    ),
    "upsample_nearest3d": (lambda: aten.upsample_nearest3d(T(1, 1, 2, 2, 2), [4, 4, 4]), 0, 32, 256),
    "upsample_nearest3d_backward": (
        lambda: aten.upsample_nearest3d_backward(T(1, 1, 4, 4, 4), [4, 4, 4], [1, 1, 2, 2, 2]), 64, 256, 32
    ),
    "_upsample_nearest_exact2d": (lambda: aten._upsample_nearest_exact2d(T(1, 2, 3, 3), [6, 6]), 0, 72, 288),
    "_upsample_nearest_exact2d_backward": (
        lambda: aten._upsample_nearest_exact2d_backward(T(1, 2, 6, 6), [6, 6], [1, 2, 3, 3]), 72, 288, 72
    ),
    "_upsample_nearest_exact3d": (lambda: aten._upsample_nearest_exact3d(T(1, 1, 2, 2, 2), [4, 4, 4]), 0, 32, 256),
    "_upsample_nearest_exact3d_backward": (
        lambda: aten._upsample_nearest_exact3d_backward(T(1, 1, 4, 4, 4), [4, 4, 4], [1, 1, 2, 2, 2]), 64, 256, 32
    ),
    "_upsample_bicubic2d_aa": (  # halved: eight taps an axis
        lambda: aten._upsample_bicubic2d_aa(T(1, 2, 8, 8), [4, 4], False), 32 * 2 * 64, 512, 128
    ),
    "reflection_pad2d": (lambda: aten.reflection_pad2d(T(1, 2, 3, 3), [1, 1, 1, 1]), 0, 72, 200),
    "reflection_pad2d_backward": (
        lambda: aten.reflection_pad2d_backward(T(1, 2, 5, 5), T(1, 2, 3, 3), [1, 1, 1, 1]), 50, 200, 72 + 72
    ),
    "reflection_pad3d": (lambda: aten.reflection_pad3d(T(1, 1, 3, 3, 3), [1] * 6), 0, 108, 500),
    "reflection_pad3d_backward": (
        lambda: aten.reflection_pad3d_backward(T(1, 1, 5, 5, 5), T(1, 1, 3, 3, 3), [1] * 6), 125, 500, 108 * 2
    ),
    "replication_pad3d": (lambda: aten.replication_pad3d(T(1, 1, 3, 3, 3), [1] * 6), 0, 108, 500),
    "replication_pad3d_backward": (
        lambda: aten.replication_pad3d_backward(T(1, 1, 5, 5, 5), T(1, 1, 3, 3, 3), [1] * 6), 125, 500, 108 * 2
    ),
    "_assert_async": (lambda: aten._assert_async(T(1) > 0), 0, 1, 0),
    "select_copy": (lambda: aten.select_copy(T(4, 6), 0, 1), 0, 24, 24),
    "split_copy": (lambda: aten.split_copy(T(4, 6), 2), 0, 96, 96),
    "detach_copy": (lambda: aten.detach_copy(T(4, 6)), 0, 96, 96),
    "view_as_real_copy": (lambda: aten.view_as_real_copy(c64(6)), 0, 48, 48),
    "view_as_complex_copy": (lambda: aten.view_as_complex_copy(T(6, 2)), 0, 48, 48),
    "copy": (lambda: aten.copy(T(4, 6), T(6)), 0, 24, 96),
    "zero": (lambda: aten.zero(T(6)), 0, 0, 24),
    "unsafe_split_with_sizes": (lambda: aten.unsafe_split_with_sizes(T(6), [2, 4]), 0, 0, 0),
    "_foreach_copy": (lambda: aten._foreach_copy([T(6), T(5)], [T(6), T(5)]), 0, 44, 44),
    "rand_like": (lambda: aten.rand_like(T(6)), 0, 0, 24),
    "random_": (lambda: aten.random_(i64(6)), 0, 0, 48),
    # Six keys of four bytes and six numbers of eight are made, sorted in one go, and the keys compared.
    "randperm": (lambda: aten.randperm(6, device="meta"), 0, 72 + 24, 24 + 48 + 72),
    "repeat_interleave": (lambda: aten.repeat_interleave(i64(4), output_size=10), 0, 32, 80),
    "__lshift__": (lambda: aten.__lshift__(i64(6), 1), 0, 48, 48),
    "__rshift__": (lambda: aten.__rshift__(i64(6), 1), 0, 48, 48),
    "__ilshift__": (lambda: aten.__ilshift__(i64(6), 1), 0, 48, 48),
    "__irshift__": (lambda: aten.__irshift__(i64(6), 1), 0, 48, 48),
    "_embedding_bag_forward_only": (
        lambda: aten._embedding_bag_forward_only(T(50, 6), i64(7), i64(3)), 42, 248, 72 + 8 * (7 + 3)
    ),
    "_unsafe_index": (lambda: aten._unsafe_index(T(50, 6), [i64(3)]), 0, 24 + 72, 72),
    "_unsafe_index_put": (
        lambda: aten._unsafe_index_put(T(50, 6), [i64(3)], T(3, 6)), 0, 1200 + 24 + 72, 1200 + 72
    ),
    "_native_batch_norm_legit_no_training": (  # centre, divide, weight, bias
        lambda: aten._native_batch_norm_legit_no_training(T(2, 3, 4, 4), T(3), T(3), T(3), T(3), 0.1, 1e-5),
        96 * 4, 384 + 48, 384 + 24,
    ),
}  # fmt: skip

COMPOSED: dict[str, Case] = {  # of 7 fp32: an arange, then passes in place
    "hann_window": (lambda: aten.hann_window(7, device="meta"), 4 * 7, 4 * 28, 5 * 28),
    "hamming_window": (lambda: aten.hamming_window(7, device="meta"), 4 * 7, 4 * 28, 5 * 28),
    "blackman_window": (lambda: aten.blackman_window(7, device="meta"), 9 * 7, 9 * 28, 10 * 28),
    "bartlett_window": (lambda: aten.bartlett_window(7, device="meta"), 7 + 3 + 3, 3 * 28, 4 * 28),  # 2 of the half
    "kaiser_window": (lambda: aten.kaiser_window(7, device="meta"), 9 * 7, 28, 2 * 28),
    "_is_all_true": (lambda: aten._is_all_true(mask(7)), 0, 7, 1),
    "_is_any_true": (lambda: aten._is_any_true(mask(7)), 0, 7, 1),
    "_pack_padded_sequence": (  # 3 + 1 steps of 5
        lambda: aten._pack_padded_sequence(T(3, 2, 5), torch.tensor([3, 1]), False), 0, 2 * 80, 2 * 80
    ),
}  # fmt: skip

ALL = CONTRACTIONS | ELEMENTWISE | NORMS_AND_REDUCTIONS | MOVEMENT | LIBRARY | RELATIVES | COMPOSED


@pytest.mark.parametrize("name", ALL)
def test_an_op_costs_what_arithmetic_by_hand_says(name):
    program, flops, read, written = ALL[name]
    call = calls_of(program)[-1]
    costs = costs_of(call, strict=name != "mm int64")  # which no unit multiplies: listed as uncounted
    found = (
        sum(cost.flops for cost in costs),
        sum(cost.bytes_read for cost in costs),
        sum(cost.bytes_written for cost in costs),
    )
    assert found == (flops, read, written)


def call_of_case(name: str) -> Call:
    return calls_of(ALL[name][0])[-1]
