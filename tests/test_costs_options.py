"""Options, orders, sides and batches, by hand: what an op costs when it is not called in its plainest way."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from costs_support import call_by_hand, calls_of, meta
from torch import Tensor

from flopmeter.costs import costs_of
from flopmeter.records import Call, Cost, MatmulWork

aten = torch.ops.aten
I64, I32, U8, C64 = torch.int64, torch.int32, torch.uint8, torch.complex64
T = meta


def i64(*shape: int) -> Tensor:
    return meta(*shape, dtype=I64)


def c64(*shape: int) -> Tensor:
    return meta(*shape, dtype=C64)


def by_hand(func: Any, args: tuple[Any, ...], *outputs: Tensor, **kwargs: Any) -> Call:
    return call_by_hand(func, args, outputs, **kwargs)


def costs_of_case(case: Callable[[], Any] | Call) -> tuple[Cost, ...]:
    return costs_of(case if isinstance(case, Call) else calls_of(case)[-1])


# (call, FLOPs, of these library functions); 4 rows of 6, or the sizes that stand there
Case = tuple["Callable[[], Any] | Call", int, int]
NONE = (0, 0)
REDUCTIONS: dict[str, Case] = {
    "sum": (lambda: aten.sum(T(4, 6)), 24, 0),
    "nansum": (lambda: aten.nansum(T(4, 6)), 24, 0),
    "mean": (lambda: aten.mean(T(4, 6), [1]), 24 + 4, 0),
    "prod": (lambda: aten.prod(T(4, 6)), 24, 0),
    "prod complex": (lambda: aten.prod(c64(4, 6)), 24 * 6, 0),
    "cumsum complex": (lambda: aten.cumsum(c64(4, 6), 1), 24 * 2, 0),
    "cumprod complex": (lambda: aten.cumprod(c64(4, 6), 1), 24 * 6, 0),
    "cumprod": (lambda: aten.cumprod(T(4, 6), 1), 24, 0),
    "cumprod_": (lambda: aten.cumprod_(T(4, 6), 1), 24, 0),
    "cumsum_": (lambda: aten.cumsum_(T(4, 6), 1), 24, 0),
    "logcumsumexp": (lambda: aten.logcumsumexp(T(4, 6), 1), 24 * 4, 24 * 2),
    "logsumexp": (lambda: aten.logsumexp(T(4, 6), [1]), 24 * 3 + 4 * 3, 24 + 4),  # of a row |maximum|, log, add
    "var": (lambda: aten.var.correction(T(4, 6), [1]), 24 * 3 + 4 * 4, 0),
    "var_mean": (lambda: aten.var_mean.correction(T(4, 6), [1]), 24 * 3 + 4 * 4, 0),
    "std": (lambda: aten.std.correction(T(4, 6), [1]), 24 * 3 + 4 * 5, 4),
    "std_mean": (lambda: aten.std_mean.correction(T(4, 6), [1]), 24 * 3 + 4 * 5, 4),
    "_adaptive_avg_pool3d": (lambda: aten._adaptive_avg_pool3d(T(1, 3, 2, 2, 2), [1, 1, 1]), 24 + 3, 0),
    "_adaptive_avg_pool3d_backward": (
        lambda: aten._adaptive_avg_pool3d_backward(T(1, 3, 1, 1, 1), T(1, 3, 2, 2, 2)), 3 + 24, 0
    ),
    "avg_pool3d": (lambda: aten.avg_pool3d(T(1, 3, 4, 4, 4), [2], [2]), 24 * (8 + 1), 0),
    "avg_pool3d of a box": (lambda: aten.avg_pool3d(T(1, 3, 4, 4, 4), [1, 2, 4], [1, 2, 4]), 24 * (8 + 1), 0),
    "avg_pool2d of one number": (lambda: aten.avg_pool2d(T(1, 3, 6, 6), [3], [3]), 12 * (9 + 1), 0),
    "avg_pool3d_backward": (
        lambda: aten.avg_pool3d_backward(
            T(1, 3, 2, 2, 2), T(1, 3, 4, 4, 4), [2, 2, 2], [2, 2, 2], [0, 0, 0], False, True, None
        ),
        24 * 9, 0,
    ),
    "norm of order 0": (lambda: aten.linalg_vector_norm(T(4, 6), 0), 24, 0),
    "norm of order 1": (lambda: aten.linalg_vector_norm(T(4, 6), 1), 24 * 2, 0),
    "norm of order 2": (lambda: aten.linalg_vector_norm(T(4, 6), 2, [1]), 48 + 4, 4),
    "norm of no order that is named": (lambda: aten.norm.ScalarOpt_dim(T(4, 6), None, [1]), 48 + 4, 4),
    "norm of order 3": (lambda: aten.linalg_vector_norm(T(4, 6), 3, [1]), 24 * 3 + 4, 24 + 4),
    "norm of order inf": (lambda: aten.linalg_vector_norm(T(4, 6), inf), 24, 0),
    "norm of order -inf": (lambda: aten.linalg_vector_norm(T(4, 6), -inf), 24, 0),
    "dist 0": (lambda: aten.dist(T(6), T(6), 0), 6 * 2, 0),
    "dist 1": (lambda: aten.dist(T(6), T(6), 1), 6 * 3, 0),
    "dist 2": (lambda: aten.dist(T(6), T(6), 2), 6 * 3 + 1, 1),
    "dist 3": (lambda: aten.dist(T(6), T(6), 3), 6 * 4 + 1, 6 + 1),
    "dist from a point": (lambda: aten.dist(T(3), T(6, 3)), 18 * 3 + 1, 1),
    "dist inf": (lambda: aten.dist(T(6), T(6), inf), 6 * 2, 0),
    # 20 pairs of rows of 6: 120 differences
    "cdist 0": (lambda: aten._cdist_forward(T(4, 6), T(5, 6), 0.0, None), 120 * 2, 0),
    "cdist 2": (lambda: aten._cdist_forward(T(4, 6), T(5, 6), 2.0, None), 120 * 3 + 20, 20),
    "cdist 3": (lambda: aten._cdist_forward(T(4, 6), T(5, 6), 3.0, None), 120 * 4 + 20, 120 + 20),
    "cdist inf": (lambda: aten._cdist_forward(T(4, 6), T(5, 6), inf, None), 120 * 2, 0),
    "cdist of 25 rows": (lambda: aten._cdist_forward(T(4, 6), T(25, 6), 2.0, 0), 600 * 3 + 100, 100),
    "cdist of 26 rows, through a product": (
        lambda: aten._cdist_forward(T(4, 6), T(26, 6), 2.0, 0), 3 * 24 + 2 * 156 + 2 * 104 * 8 + 104, 104
    ),
    "cdist of 26 rows, told not to": (
        lambda: aten._cdist_forward(T(4, 6), T(26, 6), 2.0, 2), 104 * 6 * 3 + 104, 104
    ),
    "cdist of few rows, told to": (
        lambda: aten._cdist_forward(T(4, 6), T(5, 6), 2.0, 1), 3 * 24 + 2 * 30 + 2 * 20 * 8 + 20, 20
    ),
    "cdist of a batch, through a product": (
        lambda: aten._cdist_forward(T(3, 4, 6), T(3, 26, 6), 2.0, None),
        3 * (3 * 24 + 2 * 156 + 2 * 104 * 8 + 104), 3 * 104,
    ),
    **{
        f"cdist backward {p}": (
            by_hand(aten._cdist_backward.default, (T(4, 5), T(4, 6), T(5, 6), float(p), T(4, 5)), T(4, 6)),
            120 * each, 0,
        )
        for p, each in ((0, 0), (1, 3), (2, 4), (3, 6), (inf, 3))
    },
    "pdist 1": (lambda: aten._pdist_forward(T(4, 6), 1.0), 36 * 3, 0),  # 6 pairs
    "pdist 2": (lambda: aten._pdist_forward(T(4, 6), 2.0), 36 * 3 + 6, 6),
    "pdist backward 2": (lambda: aten._pdist_backward(T(6), T(4, 6), 2.0, T(6)), 36 * (4 + 1), 0),
    "pdist backward 1": (lambda: aten._pdist_backward(T(6), T(4, 6), 1.0, T(6)), 36 * (3 + 1), 0),
}  # fmt: skip

COMPARISONS: dict[str, Callable[[], Any]] = {
    "amax": lambda: aten.amax(T(4, 6), [1]),
    "amin": lambda: aten.amin(T(4, 6), [1]),
    "aminmax": lambda: aten.aminmax(T(4, 6), dim=1),
    "argmax": lambda: aten.argmax(T(4, 6), 1),
    "argmin": lambda: aten.argmin(T(4, 6), 1),
    "any": lambda: aten.any(T(4, 6), 1),
    "all": lambda: aten.all(T(4, 6), 1),
    "count_nonzero": lambda: aten.count_nonzero(T(4, 6), [1]),
    "max": lambda: aten.max(T(4, 6), 1),
    "min": lambda: aten.min(T(4, 6)),
    "cummax": lambda: aten.cummax(T(4, 6), 1),
    "cummin": lambda: aten.cummin(T(4, 6), 1),
    "median": lambda: aten.median(T(4, 6), 1),
    "nanmedian": lambda: aten.nanmedian(T(4, 6), 1),
    "mode": lambda: aten.mode(T(4, 6), 1),
    "equal": lambda: aten.equal(torch.ones(4), torch.ones(4)),
    "hash_tensor": lambda: aten.hash_tensor(T(4, 6)),
    "max_pool2d_with_indices": lambda: aten.max_pool2d_with_indices(T(1, 3, 4, 4), [2, 2]),
    "max_pool3d_with_indices": lambda: aten.max_pool3d_with_indices(T(1, 3, 4, 4, 4), [2, 2, 2]),
    "adaptive_max_pool2d": lambda: aten.adaptive_max_pool2d(T(1, 3, 4, 4), [2, 2]),
    "adaptive_max_pool3d": lambda: aten.adaptive_max_pool3d(T(1, 3, 4, 4, 4), [2, 2, 2]),
    "fractional_max_pool2d": lambda: aten.fractional_max_pool2d(T(1, 3, 4, 4), [2, 2], [2, 2], T(1, 3, 2)),
    "sort": lambda: aten.sort(T(4, 6)),
    "topk": lambda: aten.topk(T(4, 6), 2),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_what_only_compares_is_no_flops(name):
    costs = costs_of_case(COMPARISONS[name])
    assert {(cost.flops, cost.transcendentals) for cost in costs} == {(0, 0)}
    assert costs[0].op_class != "uncounted"


# n = 6 (216 = 6³), or 9 x 6
LIBRARY: dict[str, Case] = {
    "cholesky_inverse": (lambda: aten.cholesky_inverse(T(6, 6)), 144, 0),
    "linalg_ldl_factor_ex": (lambda: aten.linalg_ldl_factor_ex(T(6, 6)), 72, 0),
    "linalg_lu": (lambda: aten.linalg_lu(T(9, 6)), 9 * 36 - 72, 0),
    "linalg_lu of a wide one": (lambda: aten.linalg_lu(T(6, 9)), 9 * 36 - 72, 0),
    "_linalg_slogdet": (lambda: aten._linalg_slogdet(T(5, 6, 6)), 5 * (216 - 72 + 6), 0),
    "linalg_matrix_exp": (lambda: aten.linalg_matrix_exp(T(6, 6)), 10 * 216, 0),
    "_linalg_svd of a wide one": (lambda: aten._linalg_svd(T(6, 9)), 14 * 9 * 36 + 8 * 216, 0),
    "_linalg_svd full": (lambda: aten._linalg_svd(T(9, 6), True), 4 * 81 * 6 + 8 * 9 * 36 + 9 * 216, 0),
    "linalg_pinv": (
        by_hand(aten.linalg_pinv.atol_rtol_tensor, (T(9, 6),), T(6, 9)), 14 * 9 * 36 + 8 * 216 + 2 * 9 * 6 * 6, 0
    ),
    "linalg_pinv hermitian": (
        by_hand(aten.linalg_pinv.atol_rtol_tensor, (T(6, 6),), T(6, 6), hermitian=True), 9 * 216 + 2 * 216, 0
    ),
    # Q from 6 reflectors: 4·m·c·6 - 2·(m + c)·36 + 4·216/3
    "linalg_qr complete": (lambda: aten.linalg_qr(T(9, 6), "complete"), 504 + (1944 - 1296 + 288), 0),
    "linalg_qr of a wide one": (lambda: aten.linalg_qr(T(6, 9)), 504 + (864 - 864 + 288), 0),
    **{  # n of each right side's elements and pass: 60 elements, two right sides for each of five matrices
        name: (by_hand(op, operands, T(5, 6, 2)), passes * 6 * 60, 0)
        for name, op, passes, operands in (
            ("solve_triangular of a batch", aten.linalg_solve_triangular.default, 1, (T(5, 6, 6), T(5, 6, 2))),
            ("triangular_solve of a batch", aten.triangular_solve.default, 1, (T(5, 6, 2), T(5, 6, 6))),
            ("lu_solve of a batch", aten.linalg_lu_solve.default, 2,
             (T(5, 6, 6), meta(5, 6, dtype=I32), T(5, 6, 2))),
            ("ldl_solve of a batch", aten.linalg_ldl_solve.default, 2,
             (T(5, 6, 6), meta(5, 6, dtype=I32), T(5, 6, 2))),
            ("cholesky_solve of a batch", aten.cholesky_solve.default, 2, (T(5, 6, 2), T(5, 6, 6))),
        )
    },
    "linalg_householder_product": (
        lambda: aten.linalg_householder_product(T(9, 6), T(3)), 4 * 54 * 3 - 2 * 15 * 9 + 36, 0
    ),
    "linalg_householder_product of a batch": (
        lambda: aten.linalg_householder_product(T(5, 9, 6), T(5, 3)), 5 * (4 * 54 * 3 - 2 * 15 * 9 + 36), 0
    ),
    "ormqr on the left": (lambda: aten.ormqr(T(9, 3), T(3), T(9, 2)), 4 * 18 * 3 - 2 * 9 * 2, 0),
    "ormqr on the right": (lambda: aten.ormqr(T(9, 3), T(3), T(5, 9), False), 4 * 45 * 3 - 2 * 9 * 5, 0),
    "linalg_lstsq of a batch": (  # QR 504; each of two right sides 4·9·6 - 72 + 36
        by_hand(aten.linalg_lstsq.default, (T(5, 9, 6), T(5, 9, 2)), T(5, 6, 2), T(5, 2), T(5), T(0)),
        5 * (504 + 2 * 180), 0,
    ),
    "triangular_solve": (lambda: aten.triangular_solve(T(6, 2), T(6, 6)), 36 * 2, 0),
    "linalg_lu_solve": (
        lambda: aten.linalg_lu_solve(T(6, 6), meta(6, dtype=I32), T(6, 2)), 2 * 36 * 2, 0
    ),
    "linalg_ldl_solve": (
        lambda: aten.linalg_ldl_solve(T(6, 6), meta(6, dtype=I32), T(6, 2)), 2 * 36 * 2, 0
    ),
    "_linalg_solve_ex of a batch": (lambda: aten._linalg_solve_ex(T(5, 6, 6), T(5, 6, 2)), 5 * (144 + 144), 0),
    "cholesky complex": (lambda: aten.linalg_cholesky_ex(c64(6, 6)), 4 * 72, 0),
    "lu_unpack": (lambda: aten.lu_unpack(T(6, 6), meta(6, dtype=I32)), *NONE),
    # 5·N·log2 N; 2.5 for real ones; one more for each real number of a normalized output
    "_fft_c2c of two dimensions": (lambda: aten._fft_c2c(c64(3, 4, 8), [1, 2], 0, True), 3 * 5 * 32 * 5, 0),
    "_fft_c2c of one point": (lambda: aten._fft_c2c(c64(3, 1), [1], 0, True), *NONE),
    "_fft_c2c of nothing": (by_hand(aten._fft_c2c.default, (c64(0, 8), [1], 0, True), c64(0, 8)), *NONE),
    "_fft_r2c normalized": (lambda: aten._fft_r2c(T(3, 8), [1], 1, True), 180 + 2 * 15, 0),
    "_fft_c2r normalized": (lambda: aten._fft_c2r(c64(3, 5), [1], 1, 8), 180 + 24, 0),
}  # fmt: skip

if hasattr(aten, "cholesky"):  # until torch 2.13
    LIBRARY["cholesky"] = (lambda: aten.cholesky(T(6, 6)), 72, 0)
if hasattr(aten, "linalg_polar"):  # torch 2.14. The SVD, V S V^T and W V^T
    LIBRARY["linalg_polar"] = (lambda: aten.linalg_polar(T(9, 6)), 6264 + 2 * 6 * 6 * 6 + 2 * 9 * 6 * 6, 0)
if hasattr(aten, "linalg_matrix_sqrth"):  # torch 2.14. Symmetric eigenvectors and one product
    LIBRARY["linalg_matrix_sqrth"] = (lambda: aten.linalg_matrix_sqrth(T(5, 6, 6)), 5 * (9 * 216 + 432), 0)

LISTS = ([T(6), T(5)], [T(6), T(5)], [T(6), T(5)], [T(6), T(5)])  # parameters, gradients and two moments of 11
ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "maximize": False}
SGD = {"lr": 0.1, "dampening": 0.0, "maximize": False, "is_first_step": False}
ADAGRAD = {"lr": 0.1, "lr_decay": 0.0, "eps": 1e-8, "maximize": False}
OPTIMIZERS: dict[str, Case] = {
    "adam": (  # moments 3 and 4, root, correction and epsilon 3, step 3; decay: g += wd·p
        by_hand(aten._fused_adam_.default, (*LISTS, [], [T(), T()]), **ADAM, weight_decay=0.01, amsgrad=False),
        11 * (13 + 2), 11,
    ),
    "adamw": (  # p *= 1 - lr·wd
        by_hand(aten._fused_adamw_.default, (*LISTS, [], [T(), T()]), **ADAM, weight_decay=0.01, amsgrad=False),
        11 * (13 + 1), 11,
    ),
    "adamw with amsgrad": (  # a comparison more
        by_hand(
            aten._fused_adamw_.default, (*LISTS, [T(6), T(5)], [T(), T()]), **ADAM, weight_decay=0.0, amsgrad=True
        ),
        11 * 13, 11,
    ),
    "sgd": (  # p -= lr·g
        by_hand(aten._fused_sgd_.default, (*LISTS[:2], []), **SGD, weight_decay=0.0, momentum=0.0, nesterov=False),
        11 * 2, 0,
    ),
    "sgd with decay": (
        by_hand(aten._fused_sgd_.default, (*LISTS[:2], []), **SGD, weight_decay=0.1, momentum=0.0, nesterov=False),
        11 * (2 + 2), 0,
    ),
    "sgd with Nesterov's momentum": (  # b = mu·b + (1 - d)·g; g + mu·b
        by_hand(aten._fused_sgd_.default, LISTS[:3], **SGD, weight_decay=0.0, momentum=0.9, nesterov=True),
        11 * (2 + 3 + 2), 0,
    ),
    "adagrad with decay": (
        by_hand(aten._fused_adagrad_.default, (*LISTS[:3], [T(), T()]), **ADAGRAD, weight_decay=0.1),
        11 * (2 + 5 + 2), 11,
    ),
    "_foreach_lerp_": (lambda: aten._foreach_lerp_([T(6), T(5)], [T(6), T(5)], 0.1), 33, 0),
    "_foreach_mul_": (lambda: aten._foreach_mul_([T(6), T(5)], 2.0), 11, 0),
    "_foreach_div": (lambda: aten._foreach_div([T(6), T(5)], [T(6), T(5)]), 11, 0),
    "_foreach_neg": (lambda: aten._foreach_neg([T(6), T(5)]), 11, 0),
    "_foreach_abs": (lambda: aten._foreach_abs([T(6), T(5)]), 11, 0),
    "_foreach_reciprocal": (lambda: aten._foreach_reciprocal([T(6), T(5)]), 11, 0),
    "_foreach_round": (lambda: aten._foreach_round([T(6), T(5)]), 11, 0),
    "_foreach_pow": (lambda: aten._foreach_pow([T(6), T(5)], 2.5), 11, 11),
    "_foreach_sigmoid": (lambda: aten._foreach_sigmoid([T(6), T(5)]), 44, 11),
    "_foreach_maximum": (lambda: aten._foreach_maximum([T(6), T(5)], [T(6), T(5)]), *NONE),
    "_foreach_sub_ scaled": (lambda: aten._foreach_sub_([T(6), T(5)], [T(6), T(5)], alpha=2), 22, 0),
    "_foreach_add of a number": (lambda: aten._foreach_add([T(6), T(5)], 1.0), 11, 0),
    "_foreach_addcdiv_ by numbers": (
        lambda: aten._foreach_addcdiv_([T(6), T(5)], [T(6), T(5)], [T(6), T(5)], [2.0, 3.0]), 33, 0
    ),
    "_foreach_addcmul": (
        lambda: aten._foreach_addcmul([T(6), T(5)], [T(6), T(5)], [T(6), T(5)]), 22, 0
    ),
}  # fmt: skip

# Lines through t taps: 2t - 1 operations. 2 axes: t of them and one more. 3 axes: t² + t + 1.
RESAMPLING: dict[str, Case] = {
    "upsample_linear1d": (lambda: aten.upsample_linear1d(T(1, 2, 3), [6], False), 12 * 3, 0),
    "upsample_trilinear3d": (lambda: aten.upsample_trilinear3d(T(1, 1, 2, 2, 2), [4] * 3, False), 64 * 3 * 7, 0),
    "upsample_bilinear2d_backward": (
        lambda: aten.upsample_bilinear2d_backward(T(1, 2, 6, 6), [6, 6], [1, 2, 3, 3], False), 72 * 2 * 4, 0
    ),
    "upsample_trilinear3d_backward": (
        lambda: aten.upsample_trilinear3d_backward(T(1, 1, 4, 4, 4), [4] * 3, [1, 1, 2, 2, 2], False), 64 * 2 * 8, 0
    ),
    "upsample_bicubic2d_backward": (
        lambda: aten.upsample_bicubic2d_backward(T(1, 2, 6, 6), [6, 6], [1, 2, 3, 3], False), 72 * 2 * 16, 0
    ),
    "_upsample_bilinear2d_aa enlarged": (lambda: aten._upsample_bilinear2d_aa(T(1, 2, 3, 3), [6, 6], False), 72 * 8, 0),
    "_upsample_bilinear2d_aa by 4/9 and 3/8": (  # filters of 2·ceil(9/4) and 2·ceil(8/3)
        lambda: aten._upsample_bilinear2d_aa(T(1, 2, 9, 8), [4, 3], False), 24 * 2 * 6 * 6, 0
    ),
    "_upsample_bilinear2d_aa_backward": (
        lambda: aten._upsample_bilinear2d_aa_backward(T(1, 2, 4, 3), [4, 3], [1, 2, 9, 8], False), 24 * 2 * 6 * 6, 0
    ),
    # 9 places, 18 outputs: 2 coordinates of 4; weights; taps
    "grid_sampler_2d bicubic": (  # 4 weights of degree 3 (6) an axis, 16 products of them
        lambda: aten.grid_sampler_2d(T(1, 2, 5, 5), T(1, 3, 3, 2), 2, 0, False),
        9 * (8 + 2 * 4 * 6 + 16) + 18 * 2 * 16, 0,
    ),
    "grid_sampler_3d": (  # 8 places, 16 outputs: 3 coordinates, 6 distances, 2 products for each of 8 taps
        lambda: aten.grid_sampler_3d(T(1, 2, 5, 5, 5), T(1, 2, 2, 2, 3), 0, 0, False),
        8 * (12 + 6 + 16) + 16 * 2 * 8, 0,
    ),
    "grid_sampler_2d_backward": (  # each tap: 2 for the input's gradient, 3 for each of 2 coordinates
        lambda: aten.grid_sampler_2d_backward(
            T(1, 2, 3, 3), T(1, 2, 5, 5), T(1, 3, 3, 2), 0, 0, False, [True, True]
        ),
        9 * (8 + 4 + 4) + 18 * 4 * (2 + 6), 0,
    ),
    "cudnn_grid_sampler_backward": (  # 9 places of 3 channels
        by_hand(
            aten.cudnn_grid_sampler_backward.default, (T(1, 3, 5, 5), T(1, 3, 3, 2), T(1, 3, 3, 3)),
            T(1, 3, 5, 5), T(1, 3, 3, 2),
        ),
        9 * (8 + 4 + 4) + 27 * 4 * (2 + 6), 0,
    ),
    "grid_sampler_2d_backward of the grid alone": (
        lambda: aten.grid_sampler_2d_backward(
            T(1, 2, 3, 3), T(1, 2, 5, 5), T(1, 3, 3, 2), 0, 0, False, [False, True]
        ),
        9 * (8 + 4 + 4) + 18 * 4 * 6, 0,
    ),
    "grid_sampler_2d_backward nearest": (
        lambda: aten.grid_sampler_2d_backward(
            T(1, 2, 3, 3), T(1, 2, 5, 5), T(1, 3, 3, 2), 1, 0, False, [True, True]
        ),
        9 * 8 + 18 * 2, 0,
    ),
}  # fmt: skip


def cudnn_rnn(mode: int, gates: int, *, layers: int = 1, both_ways: bool = False, packed: bool = False) -> Call:
    """7 steps of 2 sequences, width 5, hidden 3."""
    ways = 1 + both_ways
    weights = []
    for layer in range(layers):
        width = 5 if layer == 0 else 3 * ways
        weights += [T(gates * 3, width), T(gates * 3, 3), T(gates * 3), T(gates * 3)] * ways
    state = T(layers * ways, 2, 3)
    x, out = (T(14, 5), T(14, 3 * ways)) if packed else (T(7, 2, 5), T(7, 2, 3 * ways))
    sizes = [2] * 7 if packed else []
    cell = state if mode == 2 else None
    return by_hand(
        aten._cudnn_rnn.default,
        (x, weights, 4, None, state, cell, mode, 3, 0, layers, False, 0.0, False, both_ways, sizes, None),
        out, state, T(0), T(0), meta(0, dtype=U8),
    )  # fmt: skip


# 14 tokens, 42 units. Each gate of a unit: two products of depth 5 and 3, two biases; and their sum.
RNNS: dict[str, Case] = {
    # a sigmoid is 4 with one exp; tanh 1
    "relu": (cudnn_rnn(0, 1), 42 * (2 * 8 + 2 + 1), 0),
    "tanh": (cudnn_rnn(1, 1), 42 * (2 * 8 + 2 + 2), 42),
    "lstm": (cudnn_rnn(2, 4), 42 * (4 * (2 * 8 + 2 + 1) + 3 * 4 + 2 + 3 + 1), 42 * 5),
    "lstm, packed": (cudnn_rnn(2, 4, packed=True), 42 * (4 * (2 * 8 + 2 + 1) + 3 * 4 + 2 + 3 + 1), 42 * 5),
    "gru": (cudnn_rnn(3, 3), 42 * (3 * (2 * 8 + 2) + 2 + 2 * 4 + 3 + 3), 42 * 3),
    "gru, two layers both ways": (  # the second layer reads both directions: depth 6 and 3
        cudnn_rnn(3, 3, layers=2, both_ways=True),
        2 * 42 * (3 * (2 * 8 + 2) + 16) + 2 * 42 * (3 * (2 * 9 + 2) + 16), 4 * 42 * 3,
    ),
}  # fmt: skip

FP8, BF16, F16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16
BYTES_A, BYTES_B, RESULT = meta(16, 32, dtype=FP8), meta(32, 64, dtype=FP8), meta(16, 64, dtype=BF16)
LOSSES: dict[str, Case] = {
    # 1 - y, times x; log_sigmoid (3); the difference; then the sum
    "binary_cross_entropy_with_logits": (
        lambda: aten.binary_cross_entropy_with_logits(T(6), T(6)), 6 * (2 + 3 + 1 + 1) + 1, 12
    ),
    "the same, not summed": (
        lambda: aten.binary_cross_entropy_with_logits(T(6), T(6), None, None, 0), 6 * (2 + 3 + 1), 12
    ),
    "the same, weighted": (lambda: aten.binary_cross_entropy_with_logits(T(6), T(6), T(6)), 6 * (7 + 1) + 1, 12),
    "the same, weighted by class": (  # (w - 1)·y + 1, times log_sigmoid
        lambda: aten.binary_cross_entropy_with_logits(T(6), T(6), None, T(6)), 6 * (7 + 3) + 1, 12
    ),
    "multi_margin_loss": (  # max(0, margin - x[y] + x)**p, and the mean
        lambda: aten.multi_margin_loss(torch.ones(4, 6), torch.zeros(4, dtype=I64)), 24 * (4 + 1) + 1, 0
    ),
    "multilabel_margin_loss": (
        lambda: aten.multilabel_margin_loss_forward(torch.ones(4, 6), torch.zeros(4, 6, dtype=I64), 1),
        24 * (4 + 1) + 1, 0,
    ),
    "multilabel_margin_loss_backward": (
        by_hand(
            aten.multilabel_margin_loss_backward.default, (T(), T(4, 6), i64(4, 6), 1, T(4, 6)), T(4, 6)
        ),
        24 * 4, 0,
    ),
    "_safe_softmax": (by_hand(aten._safe_softmax.default, (T(4, 6), -1), T(4, 6)), 24 * 4, 24),
    "rrelu in evaluation": (lambda: aten.rrelu_with_noise(T(6), T(6)), 6, 0),
    "rrelu_with_noise_backward": (
        by_hand(aten.rrelu_with_noise_backward.default, (T(6), T(6), T(6), 0.1, 0.3, True, False), T(6)), 6, 0
    ),
    "ldexp": (by_hand(aten.ldexp.Tensor, (T(6), T(6)), T(6)), 6 * 2, 6),  # x·2^n
    "_prelu_kernel_backward": (  # dy·w for x, dy·x for w
        by_hand(aten._prelu_kernel_backward.default, (T(6), T(6), T(6)), T(6), T(6)), 6 * 2, 0
    ),
    "native_dropout_backward": (lambda: aten.native_dropout_backward(T(6), meta(6, dtype=torch.bool), 2.0), 6, 0),
    "the weights of a bag's backward": (
        by_hand(
            aten._embedding_bag_per_sample_weights_backward.default,
            (T(3, 6), T(50, 6), i64(7), i64(3), i64(7), 0), T(7),
        ),
        2 * 7 * 6, 0,
    ),
    "flash attention of packed queries, one of each sequence": (  # 5 of them, 4 heads of 8, 7 keys each
        by_hand(
            aten._flash_attention_forward.default,
            (
                meta(5, 4, 8, dtype=torch.bfloat16), meta(35, 4, 8, dtype=torch.bfloat16),
                meta(35, 4, 8, dtype=torch.bfloat16), meta(6, dtype=I32), meta(6, dtype=I32), 1, 7, 0.0, False, False,
            ),
            meta(5, 4, 8, dtype=torch.bfloat16), T(4, 5), meta(2, dtype=I64), T(0), T(0),
        ),
        2 * 2 * 5 * 4 * 7 * 8, 0,
    ),
    "nll_loss_forward": (lambda: aten.nll_loss_forward(T(4, 6), i64(4), None, 1, -100), 2 * 4 + 1, 0),
    "_ctc_loss": (lambda: aten._ctc_loss(T(7, 2, 5), i64(2, 3), [7, 7], [3, 3]), 98 * 11, 98 * 4),
    "_ctc_loss_backward": (
        by_hand(
            aten._ctc_loss_backward.default,
            (T(2), T(7, 2, 5), i64(2, 3), [7, 7], [3, 3], T(2), T(2, 7, 7), 0), T(7, 2, 5),
        ),
        17 * 98 + 7 * 70, 7 * 98 + 2 * 70,
    ),
}  # fmt: skip


def encoder_layer(*batch: int, norm_first: bool = False, gelu: bool = False, mask: Any = None) -> Call:
    """Length 5, width 16, 2 heads, hidden 32."""
    weights = (T(48, 16), T(48), T(16, 16), T(16), gelu, norm_first, 1e-5, T(16), T(16), T(16), T(16))
    feed_forward = (T(32, 16), T(32), T(16, 32), T(16))
    x = T(*batch, 5, 16)
    args = (x, 16, 2, *weights, *feed_forward, mask)
    return by_hand(aten._transformer_encoder_layer_fwd.default, args, T(*batch, 5, 16))


ENCODER_LAYER = 2 * 5 * 16 * 128 + 4 * 25 * 16 + 5 * (48 + 16 + 32 + 16) + 2 * 80 + 2 * 7 * 80
LAYERS: dict[str, Case] = {
    "an encoder layer of one sequence": (encoder_layer(1), ENCODER_LAYER, 0),
    "of a sequence alone": (encoder_layer(), ENCODER_LAYER, 0),
    "with the norms first": (encoder_layer(1, norm_first=True), ENCODER_LAYER, 0),
    "with GELU": (encoder_layer(1, gelu=True), ENCODER_LAYER + 9 * 5 * 32, 5 * 32),
    "of two sequences": (encoder_layer(2), 2 * ENCODER_LAYER, 0),
    "attention of 5 queries to 7 other keys": (  # 2 sequences, 2 heads of 8; the scores are kept: scale, softmax
        by_hand(
            aten._native_multi_head_attention.default,
            (T(2, 5, 16), T(2, 7, 16), T(2, 7, 16), 16, 2, T(48, 16), T(48), T(16, 16), T(16)),
            T(2, 5, 16),
            T(2, 5, 7),
        ),
        (2 * 256 + 16) * (10 + 14 + 14 + 10) + 160 + 2 * (2 * 4 * 5 * 7 * 8) + 4 * 140,
        140,
    ),
    "self-attention whose heads are no multiples of 8": (  # as wide, 4 heads of 4
        by_hand(
            aten._native_multi_head_attention.default,
            (*[T(2, 5, 16)] * 3, 16, 4, T(48, 16), T(48), T(16, 16), T(16), None, False),
            T(2, 5, 16),
            T(0),
        ),
        (2 * 256 + 16) * 40 + 160 + 2 * (2 * 8 * 5 * 5 * 4) + 4 * 200,
        200,
    ),
}

PRODUCTS: dict[str, Case] = {
    "the gradient of a bias alone": (
        lambda: aten.convolution_backward(
            T(2, 5, 6, 6), T(2, 3, 8, 8), T(5, 3, 3, 3), [5], [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
            [False, False, True],
        ),
        2 * 5 * 36, 0,
    ),
    "the gradient of the weights alone": (
        lambda: aten.convolution_backward(
            T(2, 5, 6, 6), T(2, 3, 8, 8), T(5, 3, 3, 3), [5], [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
            [False, True, False],
        ),
        2 * 2 * 5 * 36 * 27, 0,
    ),
    "both gradients of a transposed one": (  # 6 positions, each spread over 3 taps of 5 channels
        lambda: aten.convolution_backward(
            T(1, 5, 13), T(1, 4, 6), T(4, 5, 3), None, [2], [0], [1], True, [0], 1, [True, True, False]
        ),
        2 * (2 * 6 * 4 * 5 * 3), 0,
    ),
}  # fmt: skip

if hasattr(aten, "_foreach_mm"):  # torch 2.13
    PRODUCTS["products of a list"] = (
        by_hand(aten._foreach_mm.default, ([T(2, 3), T(4, 5)], [T(3, 7), T(5, 6)]), T(2, 7), T(4, 6)),
        2 * (2 * 7 * 3 + 4 * 6 * 5),
        0,
    )

QUANTIZED: dict[str, Case] = {
    "_scaled_mm with a scale for each": (
        by_hand(aten._scaled_mm.default, (BYTES_A, BYTES_B, T(), T(), None, None, BF16), RESULT),
        2 * 16 * 64 * 32 + 1024, 0,
    ),
    "_scaled_mm with a scale a row, and a bias": (
        by_hand(aten._scaled_mm.default, (BYTES_A, BYTES_B, T(16, 1), T(1, 64), T(64), None, BF16), RESULT),
        2 * 16 * 64 * 32 + (2 + 1) * 1024, 0,
    ),
    "_scaled_grouped_mm with a bias": (
        by_hand(
            aten._scaled_grouped_mm.default,
            (BYTES_A, meta(4, 32, 64, dtype=FP8), T(16), T(4, 64), meta(4, dtype=I32), T(64), None, BF16),
            RESULT,
        ),
        2 * 16 * 64 * 32 + (2 + 1) * 1024, 0,
    ),
    "_scaled_grouped_mm of a batch": (
        by_hand(
            aten._scaled_grouped_mm.default,
            (meta(4, 16, 32, dtype=FP8), meta(4, 32, 64, dtype=FP8), T(4, 16), T(4, 64), None, None, None, BF16),
            meta(4, 16, 64, dtype=BF16),
        ),
        2 * 4 * 16 * 64 * 32 + 2 * 4 * 1024, 0,
    ),
    "_scaled_grouped_mm of fp4": (  # two numbers an element
        by_hand(
            aten._scaled_grouped_mm.default,
            (
                meta(16, 32, dtype=torch.float4_e2m1fn_x2), meta(4, 32, 64, dtype=torch.float4_e2m1fn_x2), T(16),
                T(4, 64), meta(4, dtype=I32), None, None, BF16,
            ),
            RESULT,
        ),
        2 * 16 * 64 * 64 + 2 * 1024, 0,
    ),
    "_sparse_semi_structured_mm of bytes": (
        by_hand(
            aten._sparse_semi_structured_mm.default,
            (meta(16, 16, dtype=F16), meta(16, 2, dtype=torch.int16), meta(32, 8, dtype=F16)),
            meta(16, 8, dtype=F16),
        ),
        16 * 8 * 32, 0,
    ),
    "_cslt_sparse_mm with a bias": (
        by_hand(
            aten._cslt_sparse_mm.default, (meta(300, dtype=F16), meta(32, 8, dtype=F16), meta(16, dtype=F16)),
            meta(16, 8, dtype=F16),
        ),
        16 * 8 * 32 + 128, 0,
    ),
}  # fmt: skip

ALL = PRODUCTS | QUANTIZED | LOSSES | LAYERS | REDUCTIONS | LIBRARY | OPTIMIZERS | RESAMPLING | RNNS


@pytest.mark.parametrize("name", ALL)
def test_an_op_with_its_options_costs_what_arithmetic_by_hand_says(name):
    case, flops, functions = ALL[name]
    costs = costs_of_case(case)
    assert (sum(cost.flops for cost in costs), sum(cost.transcendentals for cost in costs)) == (flops, functions)


# --- bytes: (read, written)


WEIGHTS, INPUT, STATE, OUTPUT, GATES = 120, 70, 6, 42, 42 * 5  # elements; of each unit four gates and the cell are kept


def trained_lstm() -> Call:
    weights = [T(12, 5), T(12, 3), T(12), T(12)]
    return by_hand(
        aten._cudnn_rnn.default,
        (T(7, 2, 5), weights, 4, T(120), T(1, 2, 3), T(1, 2, 3), 2, 3, 0, 1, False, 0.0, True, False, [], None),
        T(7, 2, 3), T(1, 2, 3), T(1, 2, 3), meta(4 * GATES, dtype=U8), T(120),
    )  # fmt: skip


def backward_of_lstm(wants_weights: bool) -> Call:
    weights = [T(12, 5), T(12, 3), T(12), T(12)]
    gradients = [T(12, 5), T(12, 3), T(12), T(12)] if wants_weights else []
    outputs = (T(7, 2, 5), T(1, 2, 3), T(1, 2, 3), *gradients)
    return by_hand(
        aten._cudnn_rnn_backward.default,
        (
            T(7, 2, 5), weights, 4, T(120), T(1, 2, 3), T(1, 2, 3), T(7, 2, 3), T(7, 2, 3), None, None, 2, 3, 0, 1,
            False, 0.0, True, False, [], None, meta(4 * GATES, dtype=U8), [True, True, True, wants_weights],
        ),
        *outputs,
    )  # fmt: skip


MOVED: dict[str, tuple[Callable[[], Any] | Call, int, int]] = {
    "an LSTM in training": (trained_lstm(), 4 * (WEIGHTS + INPUT + 2 * STATE), 4 * (OUTPUT + 2 * STATE + GATES)),
    "its backward": (  # input, states, output and its gradient, weights, what was kept; not the weights' copy
        backward_of_lstm(True),
        4 * (INPUT + 2 * STATE + 2 * OUTPUT + WEIGHTS + GATES), 4 * (INPUT + 2 * STATE + WEIGHTS),
    ),
    # each kernel reads its operands, weights and biases: q, k and v 896; attention 240; 352; residual 160; norm 80;
    # 624; 688; residual and norm
    "an encoder layer": (encoder_layer(1), 4 * (896 + 240 + 352 + 240 + 624 + 688 + 240), 4 * (240 + 7 * 80 + 160)),
    "a softmax of masked rows": (  # x twice, the mask, the result, a flag of each row; the result is written twice
        by_hand(aten._safe_softmax.default, (T(4, 6), -1), T(4, 6)), 2 * 96 + 24 + 96 + 4, 2 * 96 + 24 + 4
    ),
    "rows of a table whose rows are all one": (
        lambda: aten.index_select(T(1, 6).expand(50, 6), 0, i64(10)), 24 + 80, 240
    ),
    "a gather that names few": (lambda: aten.take(T(50, 6), i64(4)), 32 + 16, 16),
    "a weighted bag": (  # 7 rows of 6 into 3 bags
        lambda: aten._embedding_bag(T(50, 6), i64(7), i64(3), False, 0, False, T(7)),
        168 + 56 + 24 + 28, 72 + 8 * (7 + 3),
    ),
    # Zeros; 7 indices of eight bytes, sorted with a number for each, and their 7 runs found. Then the runs are added up
    # (3 bags of 6, with the bag of each and 3 + 7 numbers beside it), and written where they belong.
    "a bag's backward": (
        by_hand(
            aten._embedding_bag_dense_backward.default,
            (T(3, 6), i64(7), i64(7), i64(3), i64(0), 50, False, 0, None), T(50, 6),
        ),
        112 + 56 + (72 + 56 + 24 + 112) + (168 + 56), 1200 + 112 + 56 + 168 + 168,
    ),
    "the weights of a bag's backward": (
        by_hand(
            aten._embedding_bag_per_sample_weights_backward.default,
            (T(3, 6), T(50, 6), i64(7), i64(3), i64(7), 0), T(7),
        ),
        72 + 168 + 56 + 24 + 56, 28,
    ),
    "a fill at a mask, as large as its target": (
        lambda: aten.index_put_(T(4, 6), [meta(4, 6, dtype=torch.bool)], T()), 24 + 4, 96
    ),
    "a copy at a mask of rows": (  # the mask twice, its numbers of 8 bytes, what is written
        lambda: aten.masked_scatter_(T(4, 6), meta(4, 6, dtype=torch.bool), T(24)), 24 + 24 + 192 + 96, 192 + 96
    ),
    "two positions of a cache": (lambda: aten.index_put_(T(2, 64, 6), [None, i64(2)], T(2, 2, 6)), 16 + 96, 96),
    "a number at two positions of a cache": (lambda: aten.index_put_(T(2, 64, 6), [None, i64(2)], T()), 16 + 4, 96),
    "a scatter of part of its source": (lambda: aten.scatter_(T(50, 6), 0, i64(2, 3), T(4, 6)), 48 + 24, 24),
    **{  # a clone, whose elements below the three rows of the index are added to
        f"{name} of part of its source": (call, 50 * 6 * 4 + 18 * (8 + 4 + 4), 50 * 6 * 4 + 18 * 4)
        for name, call in {
            "scatter_add": lambda: aten.scatter_add(T(50, 6), 0, i64(3, 6), T(9, 6)),
            "scatter_reduce": lambda: aten.scatter_reduce(T(50, 6), 0, i64(3, 6), T(9, 6), "sum"),
        }.items()
    },
    "a fill of columns": (lambda: aten.index_fill_(T(4, 6), 1, i64(2), 1.0), 16, 4 * 2 * 4),
    "a fill of a number": (lambda: aten.index_fill_(T(), 0, i64(1), 1.0), 8, 4),
    "a product of three, functional": (
        lambda: aten.scatter_reduce(T(4, 6), 0, i64(2, 6), T(2, 6), "prod"), 96 + 96 + 48 + 48, 96 + 48
    ),
    "an unpooling": (lambda: aten.max_unpool2d(T(1, 3, 2, 2), i64(1, 3, 2, 2), [4, 4]), 48 + 96, 192 + 48),
    "a search in one number": (lambda: aten.searchsorted(T(1), T(3)), 4 + 12, 24),
    "a bucket": (lambda: aten.bucketize(T(3), T(1000)), 3 * 11 * 4 + 12, 24),
    "a lower triangle in place: zeros above it": (lambda: aten.tril_(T(4, 4)), 0, 6 * 4),
    "an upper triangle in place, with the diagonal below": (lambda: aten.triu_(T(4, 4), -1), 0, 3 * 4),
    "a lower triangle in place that keeps all": (lambda: aten.tril_(T(4, 6), 5), 0, 0),
    "the gradient of filters of one, every third position": (  # of ten positions they meet four
        lambda: aten.convolution_backward(
            T(2, 4, 4), T(2, 3, 10), T(4, 3, 1), None, [3], [0], [1], False, [0], 1, [False, True, False]
        ),
        4 * (2 * 4 * 4 + 2 * 3 * 4), 4 * 12,
    ),
    "the same of transposed filters": (  # four positions, spread over ten of which they meet four
        lambda: aten.convolution_backward(
            T(2, 3, 10), T(2, 4, 4), T(4, 3, 1), None, [3], [0], [1], True, [0], 1, [False, True, False]
        ),
        4 * (2 * 4 * 4 + 2 * 3 * 4), 4 * 12,
    ),
    "the diagonal of a tall matrix": (lambda: aten.trace(T(9, 6)), 24, 4),
    "targets weighted by class": (
        lambda: aten.nll_loss_forward(T(4, 6), i64(4), T(6), 1, -100), 16 + 32 + 24, 8
    ),
    "a fused update with a scale writes the gradients back": (
        by_hand(
            aten._fused_sgd_.default, (*LISTS[:2], []), **SGD, weight_decay=0.0, momentum=0.0, nesterov=False,
            grad_scale=T(),
        ),
        88 + 4, 88,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVED)
def test_an_op_moves_what_arithmetic_by_hand_says(name):
    case, read, written = MOVED[name]
    costs = costs_of_case(case)
    assert (sum(cost.bytes_read for cost in costs), sum(cost.bytes_written for cost in costs)) == (read, written)


def test_the_gradient_of_a_recurrent_network_without_its_weights_is_one_product_each():
    """14 tokens: depth 5 and 3, 12 gates; 23 operations a unit; the biases' gradients are sums over tokens."""
    products = 2 * 14 * 12 * 8
    assert sum(cost.flops for cost in costs_of(backward_of_lstm(False))) == products + 42 * 23
    assert sum(cost.flops for cost in costs_of(backward_of_lstm(True))) == 2 * products + 42 * 23 + 14 * 24


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_reduction_costs_the_same_where_torch_has_no_tag_for_reductions(name, monkeypatch):
    """torch before 2.12."""
    monkeypatch.setattr("flopmeter.costs.lookup._REDUCTION_TAG", None)
    test_an_op_with_its_options_costs_what_arithmetic_by_hand_says(name)


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("is_whole_layer", [True, False])
def test_queries_keys_and_values_of_one_input_are_one_product_with_and_without_a_mask(is_masked, is_whole_layer):
    """`qkv` in aten/src/ATen/native/transformers/attention.cpp. With a mask the scores are kept: two more products."""
    x, mask = T(2, 5, 16), T(5, 5) if is_masked else None
    attention = (x, x, x, 16, 2, T(48, 16), T(48), T(16, 16), T(16), mask, False)
    alone = by_hand(aten._native_multi_head_attention.default, attention, T(2, 5, 16), T(0))
    costs = costs_of(encoder_layer(2, mask=mask) if is_whole_layer else alone)
    products = [product for cost in costs if isinstance(cost.work, MatmulWork) for product in cost.work.matmuls]
    assert products[0] == (1, 10, 48, 16)
    assert len(products) == 2 + 2 * is_whole_layer + 2 * is_masked
