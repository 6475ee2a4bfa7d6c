"""Ops of several kernels that no dispatch mode sees, and torch's reference implementations."""

from __future__ import annotations

from math import prod

import pytest
import torch
from costs_support import costs_in, meta
from torch import nn
from torch.profiler import profile

from flopmeter import FlopMeter
from flopmeter.records import MOVEMENT, UNCOUNTED

WINDOWS = [torch.hann_window, torch.hamming_window, torch.blackman_window, torch.bartlett_window, torch.kaiser_window]
MAKES_NO_KERNEL = {
    "empty", "resize_", "narrow", "slice", "as_strided", "to", "_to_copy", "empty_strided", "copy_", "empty_like",
    "fill_", "mT",
}  # fmt: skip
"""On a CPU a Python number becomes a tensor and is cast, and what a reduction starts from is written: on a GPU both are
arguments of the kernel."""


def kernels_by_torchs_profiler(program):
    """The ops that a composed op makes on a CPU, without those that only prepare them."""
    with profile() as profiler:
        program()
    first, *parts = profiler.events()
    names = [event.name.removeprefix("aten::") for event in parts if event.cpu_parent is first]
    return [name for name in names if name not in MAKES_NO_KERNEL]


@pytest.mark.parametrize("window", WINDOWS[:-1], ids=lambda window: window.__name__)
def test_a_window_launches_what_torch_runs_for_it(window):
    costs = costs_in(lambda: window(400, device="meta"))
    assert len(costs) == len(kernels_by_torchs_profiler(lambda: window(400)))
    assert all(cost.op_class != UNCOUNTED for cost in costs)


def test_a_hann_window_counts_two_multiplies_a_cosine_and_an_add():
    costs = costs_in(lambda: torch.hann_window(400, device="meta"))
    assert sum(cost.flops for cost in costs) == 4 * 400
    assert sum(cost.transcendentals for cost in costs) == 400
    assert [cost.bytes_read for cost in costs] == [0, 1600, 1600, 1600, 1600]
    assert all(cost.bytes_written == 1600 for cost in costs)


def test_a_bartlett_window_counts_a_multiply_and_two_operations_on_its_half_and_no_function():
    costs = costs_in(lambda: torch.bartlett_window(400, device="meta"))
    assert [cost.flops for cost in costs] == [0, 400, 200, 200]
    assert sum(cost.transcendentals for cost in costs) == 0


def test_a_spectrogram_with_its_window_leaves_nothing_uncounted():
    with FlopMeter("a100-sxm4-80gb", strict=True) as meter:
        window = torch.hann_window(400, device="meta")
        torch.stft(meta(2, 16000), 400, 160, window=window, return_complex=True).abs()
    assert meter.report().uncounted == []


@pytest.mark.parametrize(
    ("op", "shape", "options"),
    [
        (torch.multinomial, (4, 8), (1,)),
        (torch.multinomial, (8,), (1, True)),
        (torch.multinomial, (4, 8), (3,)),
        (torch.count_nonzero, (4, 8), (1,)),
        (lambda x: torch.ops.aten.dist(x, x), (4, 8), ()),
        (lambda x: torch.ops.aten._euclidean_dist(x, x), (30, 8), ()),
        (lambda x: torch.ops.aten.mse_loss_backward(x, x, x, 0), (4, 8), ()),
        (lambda x: torch.ops.aten.smooth_l1_loss_backward(x, x, x, 0, 1.0), (4, 8), ()),
        (lambda x: torch.ops.aten.huber_loss_backward(x, x, x, 0, 1.0), (4, 8), ()),
        (lambda x: torch.ops.aten.soft_margin_loss_backward.grad_input(x, x, x, 0, grad_input=x), (4, 8), ()),
        (lambda x: torch.ops.aten.ldexp(x, x), (4, 8), ()),
    ],
)
def test_samples_counts_distances_and_gradients_launch_what_torch_runs_for_them(op, shape, options):
    costs = costs_in(lambda: op(meta(*shape), *options))
    x = torch.rand(shape)
    assert len(costs) == len(kernels_by_torchs_profiler(lambda: op(x, *options)))


def test_a_sample_reads_its_probabilities_three_times_and_draws_as_many_numbers():
    """Their least and largest, their sum, and their quotient by random numbers, of which the largest is looked for.
    Torch 2.11 looks for the least and for the largest one after the other."""
    costs = costs_in(lambda: torch.multinomial(meta(64, 1000), 1))
    matrix = 4 * 64 * 1000
    on_cpu = torch.rand(4, 8)
    apart = "max" in kernels_by_torchs_profiler(lambda: torch.multinomial(on_cpu, 1))
    assert sum(cost.bytes_read for cost in costs) == pytest.approx((3 + apart + 1 + 1) * matrix, rel=0.01)
    assert sum(cost.bytes_written for cost in costs) == pytest.approx((1 + 1) * matrix, rel=0.01)


def test_samples_with_replacement_are_looked_for_in_running_sums_of_normalized_copies():
    """Two copies, the division by the sums of rows, the running sums, and 11 of them for each of 128 samples."""
    costs = costs_in(lambda: torch.multinomial(meta(64, 1000), 2, replacement=True))
    n = 64 * 1000
    assert [(cost.flops, cost.bytes_read, cost.bytes_written) for cost in costs] == [
        (0, 4 * n, 4 * n), (0, 4 * n, 4 * n), (2 * n, 4 * n, 4 * n), (n, 4 * n, 4 * n), (0, 4 * 128 * 11, 8 * 128)
    ]  # fmt: skip


@pytest.mark.parametrize("sizes", [(2, 3, 5, 7), (2, 3, 4, 5, 7)])
@pytest.mark.parametrize("align_corners", [False, True])
def test_a_grid_of_an_affine_map_launches_what_torch_runs_for_it(sizes, align_corners):
    axes = len(sizes) - 2
    theta, on_cpu = meta(2, axes, axes + 1), torch.rand(2, axes, axes + 1)
    costs = costs_in(lambda: nn.functional.affine_grid(theta, sizes, align_corners))
    with profile() as profiler:
        nn.functional.affine_grid(on_cpu, sizes, align_corners)
    outer = next(event for event in profiler.events() if event.name == "aten::affine_grid_generator")
    names = [event.name.removeprefix("aten::") for event in profiler.events() if event.cpu_parent is outer]
    kernels = [name for name in names if name in ("linspace", "mul", "div", "copy_", "fill_", "bmm")]
    assert len(costs) == len(kernels)
    points = 2 * prod(sizes[2:])
    (product,) = (cost for cost in costs if cost.macs)
    assert product.macs == points * axes * (axes + 1)
    assert (product.bytes_read, product.bytes_written) == (4 * points * (axes + 1) + theta.nbytes, 4 * points * axes)
    scaled = 0 if align_corners else 2 * sum(sizes[2:])  # each axis times (n - 1), over n
    assert sum(cost.flops for cost in costs) == 2 * product.macs + scaled
    filled = [cost for cost in costs if cost.op_class == MOVEMENT and cost.bytes_written == 4 * points]
    assert len(filled) == axes + 1


def test_one_weight_for_all_is_one_more_number_to_read():
    x, y = meta(64, 32), meta(64, 32)
    plain, weighted = (
        sum(cost.bytes for cost in costs_in(lambda w=w: torch.ops.aten.binary_cross_entropy(x, y, w)))
        for w in (None, meta(1))
    )
    assert weighted - plain == 4


def test_whether_all_is_true_is_compared_and_not_computed():
    with FlopMeter("a100-sxm4-80gb", strict=True) as meter:
        mask = meta(64, 64, dtype=torch.bool)
        torch.ops.aten._is_all_true(mask), torch.ops.aten._is_any_true(mask)
    report = meter.report()
    assert (report.flops, report.bytes_read) == (0, 2 * 64 * 64)
    assert len(report.kernels) == 2


def test_sequences_that_are_packed_for_an_lstm_are_moved_twice():
    """10 + 7 + 5 + 2 steps of 8 fp32: cut out, and joined."""
    lstm = nn.LSTM(8, 16, device="meta")

    def packed():
        return nn.utils.rnn.pack_padded_sequence(meta(10, 4, 8), torch.tensor([10, 7, 5, 2]))

    costs = costs_in(packed)
    moved = (10 + 7 + 5 + 2) * 8 * 4
    assert [(cost.bytes_read, cost.bytes_written, cost.flops) for cost in costs] == [(moved, moved, 0)] * 2
    with FlopMeter("a100-sxm4-80gb", strict=True) as meter:
        lstm(packed())[0].data.sum().backward()
    assert meter.report().uncounted == []


@pytest.mark.parametrize(
    ("prim", "aten"),
    [
        (lambda x: torch.ops.prims.add(x, x), lambda x: x + x),
        (lambda x: torch.ops.prims.div(x, x), lambda x: x / x),
        (lambda x: torch.ops.prims.exp(x), lambda x: x.exp()),
        (lambda x: torch.ops.prims.maximum(x, x), lambda x: torch.maximum(x, x)),
        (lambda x: torch.ops.prims.erf_inv(x), lambda x: x.erfinv()),
        (lambda x: torch.ops.prims.convert_element_type(x, torch.float16), lambda x: x.half()),
        (lambda x: torch.ops.prims.sum(x, [0]), lambda x: x.sum(0)),
        (lambda x: torch.ops.prims.amax(x, [0]), lambda x: x.amax(0)),
        (lambda x: torch.ops.prims.where(x > 0, x, x), lambda x: torch.where(x > 0, x, x)),
        (lambda x: torch.ops.prims.copy_to(x, meta(4, 8)), lambda x: x.copy_(meta(4, 8))),
        (lambda x: torch.ops.prims.rev(x, [0]), lambda x: x.flip(0)),
        (lambda x: torch.ops.prims.broadcast_in_dim(x, [3, 4, 8], [1, 2]), lambda x: x.expand(3, 4, 8)),
    ],
)
def test_a_prim_costs_what_the_op_of_aten_costs(prim, aten):
    def facts(program):
        costs = costs_in(lambda: program(meta(4, 8)))
        return [(cost.op_class, cost.flops, cost.transcendentals, cost.bytes, cost.dtype) for cost in costs]

    assert facts(prim) == facts(aten)


def test_a_prim_keeps_its_name():
    (cost,) = costs_in(lambda: torch.ops.prims.exp(meta(4)))
    assert cost.name == "prims::exp"
