"""What costs tell the time model beside FLOPs and bytes, and options that count for nothing, by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from costs_support import call_by_hand, calls_of, meta
from torch import nn

from flopmeter import FlopMeter
from flopmeter.costs import costs_of
from flopmeter.records import ConvolutionWork, Matmul, RecurrentWork
from flopmeter.timing.bandwidth import miss_share

aten = torch.ops.aten


def metered(program, hardware="a100-sxm4-80gb"):
    with FlopMeter(hardware) as meter:
        program()
    return meter.report()


@pytest.mark.parametrize(
    ("stride", "dilation", "is_dense"), [(1, 1, True), (2, 1, False), (1, 2, False), (2, 2, False)]
)
def test_a_convolution_with_steps_is_none_for_winograd(stride, dilation, is_dense):
    """F(4x4, 3x3) computes neighbouring outputs from neighbouring inputs (Lavin and Gray, arXiv 1509.09308)."""
    x, weight = meta(1, 8, 16, 16), meta(8, 8, 3, 3)
    (cost,) = costs_of(calls_of(lambda: F.conv2d(x, weight, stride=stride, dilation=dilation))[-1])
    assert isinstance(cost.work, ConvolutionWork)
    assert cost.work.shape.is_dense is is_dense


def test_winograd_moves_its_transformed_patches_through_memory():
    """64 images of 64 channels and 56² positions: 14² patches each, 36 numbers of 4 bytes for each channel in and out,
    written and read once more, and the tensors themselves; no faster than 900 GB/s."""
    x, weight = meta(64, 64, 56, 56), meta(64, 64, 3, 3)
    report = metered(lambda: F.conv2d(x, weight, padding=1), "v100-sxm2-32gb")
    transformed = 36 * 4 * (2 * 64 * 14**2 * 64)
    tensors = 4 * 2 * 64 * 64 * 56**2
    assert report.kernel_seconds > (transformed + tensors) / 900e9


def test_groups_of_few_channels_run_far_below_the_matrix_units_rate():
    """Groups of 8 channels fill an eighth of a 64-wide tile at best (fp16, 312 TFLOP/s)."""
    x, weight = meta(64, 256, 28, 28, dtype=torch.float16), meta(256, 8, 3, 3, dtype=torch.float16)
    report = metered(lambda: F.conv2d(x, weight, padding=1, groups=32))
    flops = 2 * 64 * 256 * 28 * 28 * 8 * 9
    assert flops / report.kernel_seconds < 312e12 / 4


def test_the_state_of_a_recurrent_layer_meets_the_second_matrix_of_each_stack():
    """Two layers, both directions: [4·12, 12] each, 5 sequences, 7 steps; inputs of 20 and 24 features meet others."""
    with torch.device("meta"):
        layer, tokens = nn.LSTM(20, 12, num_layers=2, bidirectional=True), torch.empty(7, 5, 20)
    (cost,) = [
        kernel.cost for kernel in metered(lambda: layer(tokens)).kernels if isinstance(kernel.cost.work, RecurrentWork)
    ]
    assert cost.work.recurrence[:2] == (7, (Matmul(1, 5, 48, 12),) * 4)


@pytest.mark.parametrize(("kind", "functions"), [(nn.LSTMCell, 5), (nn.GRUCell, 3)])
def test_a_recurrent_cell_calls_five_functions_of_an_lstm_and_three_of_a_gru(kind, functions):
    """Sigmoid for the gates (three, two) and tanh for the candidate (and an LSTM's state): for 6 · 12 units."""
    with torch.device("meta"):
        cell, x = kind(20, 12), torch.empty(6, 20)
    gates = [kernel.cost for kernel in metered(lambda: cell(x)).kernels if "fused" in kernel.cost.name]
    assert [cost.transcendentals for cost in gates] == [functions * 6 * 12]


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_a_recurrent_cell_without_biases_trains_with_as_many_products_as_one_with_them(kind):
    """Two, each with two gradients; but the input wants none."""

    def products(bias):
        with torch.device("meta"):
            cell, x = kind(20, 12, bias=bias), torch.empty(6, 20)
        with FlopMeter("a100-sxm4-80gb") as meter:
            torch.cat([*torch.atleast_1d(cell(x))]).sum().backward()
        return [kernel.cost.work.matmuls for kernel in meter.report().kernels if hasattr(kernel.cost.work, "matmuls")]

    assert products(bias=False) == products(bias=True) != []


def test_the_hidden_state_of_an_lstm_cell_comes_before_the_state_of_its_cell():
    """Its gradient is the first one of the fused kernel; the other is not given."""
    with torch.device("meta"):
        cell, x = nn.LSTMCell(20, 12), torch.empty(6, 20)
    with FlopMeter("a100-sxm4-80gb") as meter:
        cell(x)[0].sum().backward()
    (call,) = [op.call for op in meter.trace.ops if "lstm_cell_backward" in op.call.name]
    assert (call.argument("grad_hy") is None, call.argument("grad_cy") is None) == (False, True)


def test_the_gradient_of_an_rms_norms_weight_alone_is_two_operations_an_element():
    x, weight, root = meta(4, 6), meta(6), meta(4, 1)
    args = (x, x, [6], root, weight, [False, True])
    (cost,) = costs_of(call_by_hand(aten._fused_rms_norm_backward.default, args, (meta(6),)))
    assert cost.flops == 2 * 4 * 6


def test_a_device_without_a_known_cache_reads_everything_again():
    x = meta(4096, 65536)
    (reread,) = metered(lambda: x.softmax(-1)).kernels[0].cost.work.rereads
    assert miss_share(reread, SimpleNamespace(l2_cache_bytes=None)) == 1.0


def test_the_gelu_in_a_products_epilogue_calls_one_function_an_output():
    bias, a, b = meta(5), meta(2, 3), meta(3, 5)
    (cost,) = costs_of(calls_of(lambda: aten._addmm_activation(bias, a, b, use_gelu=True))[-1])
    assert cost.transcendentals == 2 * 5


def test_a_convolution_over_time_follows_the_tf32_switch_of_products_and_not_cudnns():
    """It is one `addmm_` for each tap (aten/src/ATen/native/ConvolutionTBC.cpp). torch allows TF32 in convolutions and
    forbids it in products, where nobody says otherwise."""
    x, filters, bias = meta(64, 32, 256), meta(3, 256, 256), meta(256)
    report = metered(lambda: torch.conv_tbc(x, filters, bias))
    classes = [timing.kernel_class.split(", ")[-1] for timing in report.timings]
    assert classes == ["data movement", *["fp32 on vector units"] * 3]


def test_a_convolution_over_time_of_one_step_takes_as_long_as_a_product():
    """[64, 8192] @ [8192, 48]: few outputs of great depth, where m, n and k cannot stand for each other."""
    x, filters, bias = (each.bfloat16() for each in (meta(64, 1, 8192), meta(1, 8192, 48), meta(48)))
    convolved, product = (
        metered(run).timings[-1].seconds
        for run in (lambda: torch.conv_tbc(x, filters, bias), lambda: torch.addmm(bias, x[:, 0], filters[0]))
    )
    assert convolved == pytest.approx(product, rel=0.02)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_images_that_lie_alike_are_joined_in_fewer_operations_than_others(layout):
    first, alike = (meta(2, 8, 6, 6).to(memory_format=layout) for _ in range(2))
    other = meta(2, 8, 6, 6).to(
        memory_format=torch.channels_last if layout is torch.contiguous_format else torch.contiguous_format
    )
    joined, mixed = (
        metered(lambda second=second: torch.cat([first, second])).kernels[-1].cost.work.index_operations
        for second in (alike, other)
    )
    assert joined < mixed


def test_rows_of_whole_vectors_are_looked_up_as_vectors_and_others_number_by_number():
    """A load takes 16 bytes: rows of 8 fp32 are two, rows of 6 are none."""
    ids = meta(17, dtype=torch.int64)
    for width, is_looked_up in ((8, False), (6, True)):
        (cost,) = costs_of(calls_of(lambda width=width: F.embedding(ids, meta(100, width)))[-1])
        assert (cost.work.index_operations > 0) is is_looked_up


@pytest.mark.parametrize(("mask", "kernels"), [([True, False], 1), ([True, True], 2)])
def test_the_gradient_of_an_rms_norms_weight_goes_over_gradient_and_numbers_once_more(mask, kernels):
    """A row kernel reads both twice; for the weight a kernel over columns reads both again."""
    x, root, weight = meta(4, 6), meta(4, 1), meta(6)
    args = (x, x, [6], root, weight, mask)
    (cost,) = costs_of(call_by_hand(aten._fused_rms_norm_backward.default, args, (x.clone(), weight.clone())))
    assert [each.nbytes for each in cost.work.rereads] == kernels * [2 * x.nbytes]


def test_each_row_of_a_table_is_searched_by_itself():
    """7 values in each of 2 rows of 1,024: 11 probes each, 4 bytes a probe."""
    (cost,) = costs_of(calls_of(lambda: torch.searchsorted(meta(2, 1024), meta(2, 7)))[-1])
    assert cost.bytes_read == 2 * 7 * (11 * 4 + 4)


def test_products_of_a_batch_that_are_added_read_each_matrix_of_it_once():
    a, b = meta(3, 4, 5), meta(3, 5, 6)
    costs = [cost for cost in costs_of(calls_of(lambda: torch.addbmm(meta(4, 6), a, b))[-1]) if cost.macs]
    read = [region.spec for cost in costs for region in cost.reads]
    for whole in (a, b):
        starts = [spec.offset for spec in read if spec.shape == whole.shape[1:]]
        assert starts == [number * whole[0].numel() for number in range(3)]


def test_filling_under_a_mask_that_is_repeated_looks_each_element_up():
    """One row of the mask for all rows: the operands do not lie alike, so that every element's place is computed."""
    x, row, whole = meta(64, 64), meta(64, dtype=torch.bool), meta(64, 64, dtype=torch.bool)
    alike, repeated = (
        metered(lambda mask=mask: x.masked_fill(mask, 0.0)).kernels[-1].cost.work.index_operations
        for mask in (whole, row)
    )
    assert alike == 0 < 64 * 64 <= repeated


def test_filling_a_repeated_tensor_reads_the_copy_that_was_made_of_it():
    x, mask = meta(64).expand(32, 64), meta(32, 64, dtype=torch.bool)
    clone, fill = (kernel.cost for kernel in metered(lambda: x.masked_fill(mask, 0.0)).kernels)
    assert clone.bytes_read == 4 * 64
    assert fill.bytes_read == (4 + 1) * 32 * 64


def test_joining_tensors_with_gaps_looks_each_element_up():
    whole, part = meta(64, 64), meta(64, 128)[:, ::2]
    dense, gaps = (
        metered(lambda other=other: torch.cat([whole, other])).kernels[-1].cost.work.index_operations
        for other in (whole, part)
    )
    assert gaps > dense
