"""The stated conventions, op by op: a + bi counts its real operations, a mean divides, a norm takes absolute values."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
from costs_support import calls_of, meta

from flopmeter.costs import costs_of

aten = torch.ops.aten
T = meta


def c64(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.complex64)


def i64(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=torch.int64)


ADD, MULTIPLY, DIVIDE = 2, 6, 11  # real operations in one of complex numbers, as the convention has them
ROWS = 3 * 4  # elements of three rows of four that are added to a table of ten

# (call, FLOPs, of these library functions)
COMPLEX: dict[str, tuple[Callable[[], Any], int, int]] = {
    "index_add": (lambda: aten.index_add(c64(10, 4), 0, i64(3), c64(3, 4)), ROWS * ADD, 0),
    "index_add alpha": (lambda: aten.index_add(c64(10, 4), 0, i64(3), c64(3, 4), alpha=2), ROWS * (ADD + MULTIPLY), 0),
    "scatter_add": (lambda: aten.scatter_add(c64(10, 4), 0, i64(3, 4), c64(3, 4)), ROWS * ADD, 0),
    "scatter, adding": (lambda: aten.scatter(c64(10, 4), 0, i64(3, 4), c64(3, 4), reduce="add"), ROWS * ADD, 0),
    "scatter, multiplying": (
        lambda: aten.scatter(c64(10, 4), 0, i64(3, 4), c64(3, 4), reduce="multiply"), ROWS * MULTIPLY, 0
    ),
    "index_put, adding": (lambda: aten.index_put(c64(10, 4), [i64(3)], c64(3, 4), True), ROWS * ADD, 0),
    "_foreach_mul": (lambda: aten._foreach_mul([c64(6), c64(5)], [c64(6), c64(5)]), 11 * MULTIPLY, 0),
    "_foreach_add": (lambda: aten._foreach_add([c64(6), c64(5)], [c64(6), c64(5)]), 11 * ADD, 0),
    "_foreach_add alpha": (
        lambda: aten._foreach_add([c64(6), c64(5)], [c64(6), c64(5)], alpha=2), 11 * (ADD + MULTIPLY), 0
    ),
    "_foreach_div": (lambda: aten._foreach_div([c64(6), c64(5)], [c64(6), c64(5)]), 11 * DIVIDE, 0),
    "_foreach_neg": (lambda: aten._foreach_neg([c64(6), c64(5)]), 11 * ADD, 0),
    # a function: four times its real self
    "_foreach_exp": (lambda: aten._foreach_exp([c64(6), c64(5)]), 11 * 4, 11 * 4),
    "_foreach_lerp": (
        lambda: aten._foreach_lerp([c64(6)], [c64(6)], [c64(6)]), 6 * (2 * ADD + MULTIPLY), 0
    ),
    "_foreach_addcmul": (lambda: aten._foreach_addcmul([c64(6)], [c64(6)], [c64(6)]), 6 * (ADD + MULTIPLY), 0),
    "_foreach_pow 2": (lambda: aten._foreach_pow([c64(6), c64(5)], 2), 11 * MULTIPLY, 0),
    "_foreach_pow 3 and 2.5": (lambda: aten._foreach_pow([c64(6), c64(5)], [3, 2.5]), 6 * 2 * MULTIPLY + 5 * 4, 5 * 4),
    "add_ alpha": (lambda: aten.add_(c64(6), c64(6), alpha=2), 6 * (ADD + MULTIPLY), 0),
    "lerp": (lambda: aten.lerp(c64(6), c64(6), c64(6)), 6 * (2 * ADD + MULTIPLY), 0),  # a + w·(b - a)
    "addcmul": (lambda: aten.addcmul(c64(6), c64(6), c64(6)), 6 * (ADD + MULTIPLY), 0),
    "addcmul value": (lambda: aten.addcmul(c64(6), c64(6), c64(6), value=2), 6 * (ADD + 2 * MULTIPLY), 0),
    "addcdiv": (lambda: aten.addcdiv(c64(6), c64(6), c64(6)), 6 * (ADD + DIVIDE), 0),
    "pow 2": (lambda: aten.pow(c64(6), 2), 6 * MULTIPLY, 0),
    "pow 3": (lambda: aten.pow(c64(6), 3), 6 * 2 * MULTIPLY, 0),
    "pow -1": (lambda: aten.pow(c64(6), -1), 6 * DIVIDE, 0),
    "pow -2": (lambda: aten.pow(c64(6), -2), 6 * (MULTIPLY + DIVIDE), 0),
    "pow 2.5": (lambda: aten.pow(c64(6), 2.5), 6 * 4, 6 * 4),
    # |a + bi| is sqrt(a·a + b·b): three operations and a function
    "norm": (lambda: aten.linalg_vector_norm(c64(6)), 6 * (2 + 2) + 1, 1),  # a·a + b·b, added to two running sums
    "norm of order 1": (lambda: aten.linalg_vector_norm(c64(6), 1), 6 * (4 + 1), 6),
    "norm of order inf": (lambda: aten.linalg_vector_norm(c64(6), inf), 6 * 4, 6),
    "norm of order 3": (lambda: aten.linalg_vector_norm(c64(6), 3), 6 * (4 + 1 + 1) + 1, 6 * 2 + 1),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPLEX)
def test_an_op_on_complex_numbers_counts_the_real_operations_in_it(name):
    check(*COMPLEX[name])


def test_the_norm_of_complex_numbers_costs_what_that_of_their_real_and_imaginary_parts_does():
    (of_complex,), (of_parts,) = (costs_of(calls_of(lambda x=x: x.norm())[-1]) for x in (c64(6), T(6, 2)))
    assert (of_complex.flops, of_complex.transcendentals) == (of_parts.flops, of_parts.transcendentals)


REAL: dict[str, tuple[Callable[[], Any], int, int]] = {
    "index_add": (lambda: aten.index_add(T(10, 4), 0, i64(3), T(3, 4)), ROWS, 0),
    "index_add alpha": (lambda: aten.index_add(T(10, 4), 0, i64(3), T(3, 4), alpha=2), ROWS * 2, 0),
    "norm of order 1": (lambda: aten.norm(T(6), 1), 6 * 2, 0),  # |x|, add
    "norm of order 0": (lambda: aten.norm(T(6), 0), 6, 0),  # x != 0 is a comparison; add
    "norm of order inf": (lambda: aten.norm(T(6), inf), 6, 0),  # |x|; a maximum is none
    "norms of a list of order 1": (lambda: aten._foreach_norm([T(6), T(5)], 1), 11 * 2, 0),
    "_foreach_pow 2": (lambda: aten._foreach_pow([T(6), T(5)], 2), 11, 0),  # as pow: x·x
    "_foreach_pow 3": (lambda: aten._foreach_pow([T(6), T(5)], 3), 11 * 2, 0),
    "_foreach_pow -1": (lambda: aten._foreach_pow([T(6), T(5)], -1), 11, 0),
    "_foreach_pow 2.5": (lambda: aten._foreach_pow_([T(6), T(5)], 2.5), 11, 11),
    "_foreach_pow, each its own": (lambda: aten._foreach_pow([T(6), T(5)], [3, 0.5]), 6 * 2 + 5, 5),
    "_foreach_pow of tensors": (lambda: aten._foreach_pow([T(6), T(5)], [T(6), T(5)]), 11, 11),
    "_foreach_pow of a number": (lambda: aten._foreach_pow(2.0, [T(6), T(5)]), 11, 11),
    "scatter_reduce sum": (lambda: aten.scatter_reduce(T(10, 4), 0, i64(3, 4), T(3, 4), "sum"), ROWS, 0),
    "scatter_reduce mean": (lambda: aten.scatter_reduce(T(10, 4), 0, i64(3, 4), T(3, 4), "mean"), ROWS + 40, 0),
    "scatter_reduce maximum": (lambda: aten.scatter_reduce(T(10, 4), 0, i64(3, 4), T(3, 4), "amax"), 0, 0),
    "index_reduce mean": (lambda: aten.index_reduce(T(10, 4), 0, i64(3), T(3, 4), "mean"), ROWS + 40, 0),
    "mse_loss": (lambda: aten.mse_loss(T(6), T(6), 1), 6 * 3 + 1, 0),  # (x - y)², add; one division
    "mse_loss, summed": (lambda: aten.mse_loss(T(6), T(6), 2), 6 * 3, 0),
    "mse_loss, each": (lambda: aten.mse_loss(T(6), T(6), 0), 6 * 2, 0),
    "huber_loss": (lambda: aten.huber_loss(T(6), T(6), 1), 6 * (3 + 1) + 1, 0),  # 0.5·(x - y)², add
    "huber_loss, summed": (lambda: aten.huber_loss(T(6), T(6), 2), 6 * (3 + 1), 0),
    "nll_loss, each": (lambda: aten.nll_loss_forward(T(4, 6), i64(4), None, 0, -100), 4, 0),  # negate
    "nll_loss, summed": (lambda: aten.nll_loss_forward(T(4, 6), i64(4), None, 2, -100), 4 * 2, 0),
    "nll_loss, weighted": (  # negate, times the weight, add it up, add the weights up; divide
        lambda: aten.nll_loss_forward(T(4, 6), i64(4), T(6), 1, -100), 4 * 4 + 1, 0
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_means_divide_scales_multiply_and_norms_take_absolute_values(name):
    check(*REAL[name])


SEGMENTS = {  # 12 numbers in 3 segments, to: FLOPs, those of the gradient
    "sum": (12, 0),  # the gradient is copied
    "mean": (12 + 3, 3),  # a division each
    "prod": (12, 3 + 12),  # times the product, over each element
    "max": (0, 0),
}


@pytest.mark.parametrize("reduce", SEGMENTS)
def test_the_mean_of_a_segment_is_its_sum_and_a_division(reduce):
    data, lengths = torch.rand(12), torch.tensor([3, 4, 5])  # a CPU op: there is none for meta
    forward, backward = SEGMENTS[reduce]
    for numbers in (data, torch.rand(1).expand(12)):
        check(lambda x=numbers: aten.segment_reduce(x, reduce, lengths=lengths), forward, 0)
    out = aten.segment_reduce(data, reduce, lengths=lengths)
    for grad in (torch.ones(3), torch.ones(1).expand(3)):  # the second as a sum's own gradient is
        check(lambda g=grad: aten._segment_reduce_backward(g, out, data, reduce, lengths=lengths), backward, 0)


def check(program: Callable[[], Any], flops: int, functions: int) -> None:
    costs = costs_of(calls_of(program)[-1])
    assert (sum(cost.flops for cost in costs), sum(cost.transcendentals for cost in costs)) == (flops, functions)


@pytest.mark.parametrize(("side", "windows"), [(3, 1), (9, 2)])
def test_pooling_reads_what_its_windows_cover_also_where_there_is_one(side, windows):
    """Windows of 2 x 2, five apart: 4 numbers of 4 bytes each."""
    call = calls_of(lambda: torch.nn.functional.avg_pool2d(meta(1, 1, side, side), 2, stride=5))[-1]
    (cost,) = costs_of(call)
    assert (cost.bytes_read, cost.bytes_written) == (windows**2 * 4 * 4, windows**2 * 4)
