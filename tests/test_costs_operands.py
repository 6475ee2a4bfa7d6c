"""Which operand is read, which is written and how often: bytes by hand, in sizes that no two operands share."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from costs_support import call_by_hand, calls_of, costs_in, flops, meta
from torch import nn
from torch.utils.flop_counter import flop_registry, register_flop_formula

from flopmeter import FlopMeter
from flopmeter.costs import costs_of
from flopmeter.costs.contractions.quantized import equal_groups
from flopmeter.costs.rules import make_cost
from flopmeter.records import UNCOUNTED, Call, HostCopy, RecurrentWork, VectorWork

aten = torch.ops.aten
T = meta
I64, I32 = torch.int64, torch.int32


def last(program):
    return costs_of(calls_of(program)[-1])


def moved(costs):
    return [(cost.bytes_read, cost.bytes_written) for cost in costs]


# --- copies


def test_a_convolution_copies_an_image_with_gaps_in_whole_numbers_of_four_bytes():
    """Every other of six channels: 2 · 3 · 8 · 10 numbers are read and written before the product."""
    copy, product = last(lambda: F.conv2d(T(2, 6, 8, 10)[:, ::2], T(5, 3, 3, 3)))
    assert (copy.bytes_read, copy.bytes_written, copy.access) == (1920, 1920, "strided")
    assert product.macs == 2 * 5 * 6 * 8 * 27


@pytest.mark.parametrize("copy", [aten.copy_.default, aten.copy.default], ids=["copy_", "copy"])
def test_a_copy_is_strided_where_source_and_target_lie_differently(copy):
    straight, across = T(7, 5), T(5, 7).t()
    assert last(lambda: copy(straight, across))[0].access == "strided"
    assert last(lambda: copy(across, straight))[0].access == "strided"
    assert last(lambda: copy(straight, T(7, 5)))[0].access is None
    assert last(lambda: copy(across, T(5, 7).t()))[0].access is None


def test_a_clone_or_a_cast_is_strided_where_it_changes_the_order():
    """Two runs of 7 x 5 numbers: each is looked up in both, once the dimensions do not fall into one."""
    across = T(5, 7).t()
    for changed in (across.contiguous, lambda: across.to(torch.float64, memory_format=torch.contiguous_format)):
        (cost,) = last(changed)
        assert cost.access == "strided"
        assert cost.work.index_operations >= 2 * 35
    for kept in (across.clone, lambda: across.to(torch.bfloat16)):
        (cost,) = last(kept)
        assert (cost.access, cost.work.index_operations) == (None, 0)


def test_a_copy_of_a_number_sends_a_tensor_of_it_over_the_link_and_waits():
    """copy_kernel_cuda expands it on the host, in memory that is not page-locked. On the host nothing is sent."""
    (cost,) = last(lambda: T(7, 5).copy_(1))
    assert (cost.bytes_read, cost.bytes_written) == (0, 140)
    assert (cost.work, cost.blocks_host) == (HostCopy(140, is_staged=True), True)
    assert not last(lambda: T(7, 5).copy_(1, non_blocking=True))[0].blocks_host
    (on_host,) = last(lambda: torch.zeros(()).copy_(1))
    assert not isinstance(on_host.work, HostCopy)


def test_a_copy_onto_another_type_reads_the_source_and_writes_the_target():
    assert moved(last(lambda: T(7, 5, dtype=torch.bfloat16).copy_(T(7, 5)))) == [(140, 70)]
    assert moved(last(lambda: T(7, 5).copy_(T(5, dtype=torch.bfloat16)))) == [(10, 140)]


def test_the_gradient_of_a_slice_is_zeros_and_the_part():
    x, gradient = T(9, 4).requires_grad_(), T(3, 4)
    zeros, part = [cost for cost in costs_in(lambda: x[2:5].backward(gradient)) if cost.name == "slice_backward"]
    assert (zeros.bytes_read, zeros.bytes_written) == (0, 9 * 4 * 4)
    assert (part.bytes_read, part.bytes_written) == (3 * 4 * 4, 3 * 4 * 4)


def test_errors_of_a_batch_of_matrices_are_one_number_each_that_the_host_waits_for():
    info = T(7, dtype=I32)
    (check,) = last(lambda: aten._linalg_check_errors(info, "linalg.inv", is_matrix=False))
    assert (check.bytes_read, check.bytes_written) == (7 * 4, 7 * 4)


# --- what runs on the device


def test_a_device_runs_what_writes_into_it_and_what_reads_from_it():
    """A factory has no input there; reading a number has no output there. Numbers of Python are sent there."""
    with FlopMeter() as meter:
        steps = torch.tensor([3.0], device="meta")
        made = torch.zeros(5, device="meta")
        steps.item()
    assert [kernel.cost.name for kernel in meter.report().kernels] == [
        "_to_copy", "zeros", "_local_scalar_dense"
    ]  # fmt: skip
    del made


# --- rows of tables


def bag(op, mode):
    """The backward of a bag: gradient [3, 5], 13 indices, 3 offsets and what forward kept, for a table [101, 5]."""
    kept = (T(13, dtype=I64), T(3, dtype=I64), T(3, 5, dtype=I64) if mode == 2 else T(0, dtype=I64))
    offsets = (T(3, dtype=I64),) if op is aten._embedding_bag_backward.default else ()
    options = (101, False, mode, False, None) if offsets else (101, False, mode, None)
    return call_by_hand(op, (T(3, 5), T(13, dtype=I64), *offsets, *kept, *options), (T(101, 5),))


BAGS = (aten._embedding_bag_backward.default, aten._embedding_bag_dense_backward.default)


@pytest.mark.parametrize("op", BAGS, ids=str)
@pytest.mark.parametrize(("mode", "rows"), [(0, 13), (1, 13), (2, 3)], ids=["sum", "mean", "maximum"])
def test_the_gradient_of_a_bag_adds_one_row_for_each_index_or_for_each_maximum(op, mode, rows):
    """Zeros for the table; each row that went in, or of a maximum each row that came out, is added to."""
    zeros, *others = costs_of(bag(op, mode))
    assert (zeros.flops, *moved([zeros])) == (0, (0, 4 * 101 * 5))
    assert sum(cost.flops for cost in others) == rows * 5 * (2 if mode == 1 else 1)
    assert others[-1].bytes_written == 4 * rows * 5


@pytest.mark.parametrize("op", BAGS, ids=str)
def test_the_gradient_of_a_maximum_reads_all_that_forward_kept(op):
    _, added = costs_of(bag(op, 2))
    numbers = 13 + 13 + 3 + 15 + 3 * (op is aten._embedding_bag_backward.default)
    assert added.bytes_read == 4 * (3 * 5 + 3 * 5) + 8 * numbers


def test_in_place_scatters_read_the_old_elements_only_where_they_add():
    x, i = T(9, 3), T(2, dtype=I64)
    assert moved(last(lambda: x.index_fill_(0, i, 1.0))) == [(16, 2 * 3 * 4)]
    assert moved(last(lambda: x.index_copy_(0, i, T(2, 3)))) == [(16 + 24, 24)]
    assert moved(last(lambda: x.index_copy(0, i, T(2, 3)))) == [(9 * 3 * 4, 9 * 3 * 4), (16 + 24, 24)]


# --- work for each element


def test_rounding_a_quotient_is_one_operation_more():
    x, y = T(3, 4), T(3, 4)
    assert flops(lambda: torch.div(x, y)) == 12
    assert flops(lambda: torch.div(x, y, rounding_mode=None)) == 12
    assert (
        flops(lambda: torch.div(x, y, rounding_mode="floor")) == flops(lambda: x.div_(y, rounding_mode="trunc")) == 24
    )


@pytest.mark.parametrize(("mode", "taps"), [("bilinear", 8), ("bicubic", 16)])
def test_an_antialiased_filter_has_as_many_taps_as_inputs_that_it_weighs(mode, taps):
    """Counted on the CPU: inputs whose change moves an output in the middle. The height is reduced four times."""
    x = torch.zeros(1, 1, 64, 64, requires_grad=True)
    F.interpolate(x, size=(16, 64), mode=mode, antialias=True)[0, 0, 8, 32].backward()
    rows = int(x.grad[0, 0].abs().sum(1).count_nonzero())
    assert rows == taps
    columns = taps // 4  # of an axis that keeps its size: the filter's own width, some of its weights are zero
    reduced = flops(lambda: F.interpolate(T(1, 2, 64, 64), size=(16, 64), mode=mode, antialias=True))
    assert reduced == 2 * rows * columns * 2 * 16 * 64
    enlarged = flops(lambda: F.interpolate(T(1, 2, 16, 16), size=(32, 64), mode=mode, antialias=True))
    assert enlarged == 2 * columns * columns * 2 * 32 * 64


def test_a_drawn_mask_alone_makes_the_next_division_part_of_a_dropout():
    """bernoulli_, div_ and mul are a dropout of 1 FLOP an element; the division of another tensor is its own."""

    def program(other):
        mask, x = T(6), T(6)
        mask.bernoulli_(0.5)
        aten.div_.Scalar(x if other else mask, 0.5)  # as dropout calls it
        x.mul_(mask)

    def metered(other):
        with FlopMeter(as_cuda=False) as meter:
            program(other)
        return meter.report().flops

    assert metered(other=False) == 6
    assert metered(other=True) == 12


# --- normalizations


def rereads(program):
    return last(program)[0].work.rereads


def test_a_row_has_as_many_threads_as_the_kernel_gives_it():
    """Layer norm: 4 warps (cuComputeLayerNorm, vectorized, 128 threads). A row of softmax: a warp up to 2,048 elements,
    else a block of 1,024 threads. Backward all beyond a warp's 1,024: a power of two of 16-byte loads, from half of the
    row's, at most 1024, up to less than all (SoftMax.cu)."""
    assert rereads(lambda: F.layer_norm(T(6, 5000), (5000,)))[0].threads == 128
    for columns, threads in [(8, 8), (1000, 32), (2048, 32), (2049, 1024), (9216, 1024), (9217, 1024)]:
        assert rereads(lambda n=columns: T(3, n).softmax(-1))[0].threads == threads, columns
    for columns, threads in [(1024, 32), (1028, 256), (2048, 256), (2052, 512), (4096, 512), (9000, 512)]:
        rows = rereads(lambda n=columns: aten._softmax_backward_data(T(3, n), T(3, n), -1, torch.float32))
        assert rows[0].threads == threads, columns


def test_the_backward_of_a_batch_norm_in_training_reads_the_gradient_and_the_input_twice():
    x = (2, 3, 8, 8)
    arguments = (T(*x), T(*x), T(3), T(3), T(3), T(3), T(3))
    training, evaluation = (
        costs_of(calls_of(lambda t=t: aten.native_batch_norm_backward(*arguments, t, 1e-5, [True] * 3))[-1])[0]
        for t in (True, False)
    )
    assert [reread.nbytes for reread in training.work.rereads if reread.nbytes] == [2 * 2 * 3 * 64 * 4]
    assert evaluation.work.rereads == ()


# --- losses and layers


def test_a_loss_with_weights_for_the_positive_ones_takes_three_kernels_more():
    """w - 1 and times y, plus 1, and times log_sigmoid: each writes 24 bytes."""
    y, w = T(6), T(6)
    plain, weighted = (last(lambda p=p: aten.binary_cross_entropy_with_logits(T(6), y, None, p, 0)) for p in (None, w))
    assert len(weighted) == len(plain) + 3
    assert sum(cost.bytes_written for cost in weighted) == sum(cost.bytes_written for cost in plain) + 3 * 24
    assert sum(cost.flops for cost in weighted) == sum(cost.flops for cost in plain) + 3 * 6


@pytest.mark.parametrize(("nonlinearity", "functions"), [("relu", 0), ("tanh", 1)])
def test_a_plain_recurrent_layer_adds_its_two_products_and_applies_one_function(nonlinearity, functions):
    """7 steps of 5 sequences, 12 units: a sum and a function each, and two biases. tanh is 1 operation, relu 0."""
    with torch.device("meta"), FlopMeter("a100-sxm4-80gb") as meter:
        layer, x = nn.RNN(20, 12, nonlinearity=nonlinearity), torch.empty(7, 5, 20)
        layer(x)
    (cost,) = [kernel.cost for kernel in meter.report().kernels if isinstance(kernel.cost.work, RecurrentWork)]
    assert cost.macs == 35 * 12 * (20 + 12)
    assert cost.flops == 2 * cost.macs + 35 * 12 * (1 + 2 + functions)
    assert cost.transcendentals == 35 * 12 * functions


def test_a_product_into_a_given_tensor_is_the_product():
    a, b, batch, many = T(3, 5), T(5, 7), T(2, 3, 5), T(2, 5, 7)
    for program, macs in [
        (lambda: torch.mm(a, b, out=T(3, 7)), 3 * 5 * 7),
        (lambda: torch.bmm(batch, many, out=T(2, 3, 7)), 2 * 3 * 5 * 7),
        (lambda: torch.addmm(T(7), a, b, out=T(3, 7)), 3 * 5 * 7),
    ]:
        (cost,) = last(program)
        assert cost.macs == macs
        assert cost.bytes_written == 4 * 7 * macs // 35


@pytest.mark.parametrize(("mode", "taps"), [("bilinear", 4), ("nearest", 1), ("bicubic", 16)])
def test_a_sampler_reads_the_neighbours_of_its_places_and_at_most_the_image(mode, taps):
    """Two channels of 5 x 7; a place has two coordinates."""
    for rows, columns in [(1, 1), (3, 4), (20, 30)]:
        places = rows * columns
        (cost,) = last(
            lambda r=rows, c=columns: F.grid_sample(T(1, 2, 5, 7), T(1, r, c, 2), mode=mode, align_corners=False)
        )
        assert cost.bytes_read == 4 * (2 * min(taps * places, 5 * 7) + 2 * places)
        assert cost.bytes_written == 4 * 2 * places


# Of each kernel what it reads and writes, in bytes. The size of a number, then the comparison; of complex numbers for
# each of two parts, and a bool for each is joined with the other.
INFINITE = {
    torch.float32: [(96, 96), (96, 24)],
    torch.complex64: [(96, 96), (96, 24), (96, 96), (96, 24), (48, 24)],
    torch.int64: [(0, 24)],  # none is, so zeros
}


@pytest.mark.parametrize("dtype", INFINITE, ids=str)
def test_whether_numbers_are_infinite_is_asked_of_each_part(dtype):
    costs = costs_in(lambda: torch.isinf(T(4, 6, dtype=dtype)))
    assert [(cost.bytes_read, cost.bytes_written) for cost in costs] == INFINITE[dtype]
    assert sum(cost.flops for cost in costs) == 24 * (len(costs) // 2)


def test_whether_sizes_are_the_same_is_known_on_the_host():
    assert calls_of(lambda: aten.is_same_size(T(2), T(3)))[-1].name == "is_same_size"
    assert costs_in(lambda: aten.is_same_size(T(2), T(3))) == []


def test_a_call_without_tensors_counts_as_fp32():
    assert make_cost(Call(aten.empty.memory_format, ((2,),), {}, (), ()), UNCOUNTED).dtype == "fp32"


FACTORIES = {
    "empty and filled": (lambda: torch.zeros(3, 5, device="meta"), 15 * 4),
    "ones": (lambda: torch.ones(3, 5, dtype=torch.float16, device="meta"), 15 * 2),
    "full": (lambda: torch.full((3, 5), 2.5, device="meta"), 15 * 4),
    "zeros like another": (lambda: torch.zeros_like(T(3, 5)), 15 * 4),
    "ones like another, of another type": (lambda: torch.ones_like(T(3, 5), dtype=torch.float64), 15 * 8),
    "full like another": (lambda: torch.full_like(T(3, 5), 2), 15 * 4),
    "new zeros": (lambda: T(2).new_zeros(3, 5), 15 * 4),
    "new ones": (lambda: T(2).new_ones(3, 5), 15 * 4),
    "new full": (lambda: T(2).new_full((3, 5), 2), 15 * 4),
    "a range": (lambda: torch.arange(7, device="meta"), 7 * 8),
    "a line": (lambda: torch.linspace(0, 1, 7, device="meta"), 7 * 4),
    "powers": (lambda: torch.logspace(0, 1, 7, device="meta"), 7 * 4),
    "an identity": (lambda: torch.eye(3, 5, device="meta"), 15 * 4),
    "a number": (lambda: torch.scalar_tensor(1.0, device="meta"), 4),
    "places of a triangle": (lambda: torch.tril_indices(3, 3, device="meta"), 2 * 6 * 8),
    "uniform numbers": (lambda: torch.rand(3, 5, device="meta"), 15 * 4),
    "normal numbers like another": (lambda: torch.randn_like(T(3, 5)), 15 * 4),
    "integers": (lambda: torch.randint(9, (3, 5), device="meta"), 15 * 8),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_what_is_made_is_written_once_and_nothing_is_read_or_computed(name):
    program, nbytes = FACTORIES[name]
    costs = [cost for cost in costs_in(program) if cost.bytes]
    assert [(cost.bytes_read, cost.bytes_written, cost.flops) for cost in costs] == [(0, nbytes, 0)]
    assert UNCOUNTED not in [cost.op_class for cost in costs]


@torch.library.custom_op("flopmeter_operands::powers", mutates_args=())
def powers(x: torch.Tensor, *, times: int) -> torch.Tensor:
    return x.clone()


@powers.register_fake
def _(x, *, times):
    return torch.empty_like(x)


def test_a_formula_registered_with_torch_is_given_the_keyword_arguments_too(monkeypatch):
    monkeypatch.delitem(flop_registry, torch.ops.flopmeter_operands.powers, raising=False)  # of a run before

    @register_flop_formula(torch.ops.flopmeter_operands.powers)
    def formula(shape, *, times, out_shape=None, **others):
        return 2 * times * shape[0] * shape[1]

    assert flops(lambda: torch.ops.flopmeter_operands.powers(T(3, 5), times=7)) == 2 * 7 * 15


def test_the_gradient_of_a_sum_over_a_slice_fills_the_slice():
    """One number, expanded to 2 x 6, is written 12 times into zeros of 5 x 6."""
    zeros, placed = last(lambda: aten.slice_backward(T(1, 1).expand(2, 6), [5, 6], 0, 1, 3, 1))
    assert (zeros.bytes_written, placed.bytes_read, placed.bytes_written) == (120, 4, 48)


# --- what few programs reach


def test_an_overwrite_of_fsdps_reads_the_new_and_writes_the_old():
    """[8, 4] in bf16 onto [8, 4] in fp32."""
    importlib.import_module("flopmeter.distributed.rules")
    new = T(8, 4, dtype=torch.bfloat16)
    assert moved(costs_of(call_by_hand(torch.ops.fsdp.copy_.default, (T(8, 4), new), ()))) == [(64, 128)]


def test_attention_of_cudnn_on_a_batch_has_the_rows_of_its_queries_and_the_keys_of_its_keys():
    """2 heads of 8 queries on 48 keys of one head, heads second."""
    op = aten._cudnn_attention_forward.default
    q, k, out = T(3, 2, 8, 16), T(3, 1, 48, 16), T(3, 2, 8, 16)
    arguments = (q, k, k, None, None, None, 8, 48, False)
    call = call_by_hand(op, arguments, (out, T(3, 2, 8, 1)))
    (cost,) = costs_of(call)
    assert (cost.work.shape.heads, cost.work.shape.queries, cost.work.shape.keys) == (2, 8, 48)
    assert cost.macs == 2 * 3 * 2 * 8 * 48 * 16


def test_a_mask_among_other_indices_makes_the_host_wait():
    """How many places a mask picks is data, whatever stands beside it."""
    mask, places = T(9, dtype=torch.bool), T(1, dtype=I64)
    for indices, waits in (((mask, places), True), ((places, mask), True), ((places, places), False)):
        (cost,) = costs_of(call_by_hand(aten.index.Tensor, (T(9, 5), indices), (T(1),)))[-1:]
        assert cost.blocks_host is waits


# (call, FLOPs, bytes read, bytes written), in fp32
DECIDED = {
    # the bias is copied into the result, which the product reads and adds to: isInputCompliesAddmmCudaLt in Blas.cpp
    "a bias with gaps": (lambda: aten.addmm(meta(10)[::2], meta(2, 3), meta(3, 5)), 70, 20 + 84 + 40, 40 + 40),
    "one number as a bias": (lambda: aten.addmm(meta(1), meta(2, 3), meta(3, 5)), 70, 4 + 84 + 40, 40 + 40),
    # the first of seven products overwrites what the others add to
    "a sum of products from nothing": (
        lambda: aten.addbmm(meta(2, 5), meta(7, 2, 3), meta(7, 3, 5), beta=0), 420, 7 * 84 + 6 * 40, 7 * 40
    ),
    # frozen filters: one product, of 16 places, 3 filters of 2 x 3 x 3
    "the gradient of an image alone": (
        lambda: aten.convolution_backward(
            meta(1, 3, 4, 4), meta(1, 2, 6, 6), meta(3, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1,
            [True, False, False],
        ),
        2 * 16 * 3 * 18, 4 * (48 + 54), 4 * 72,
    ),
    # windows of 2 x 2 at 0, 3 and 6
    "windows with gaps": (lambda: aten.avg_pool2d(meta(1, 1, 8, 8), [2, 2], [3, 3]), 9 * (4 + 1), 4 * 36, 4 * 9),
}  # fmt: skip


@pytest.mark.parametrize("name", DECIDED)
def test_where_one_operand_differs_from_the_plain_case(name):
    program, flops, read, written = DECIDED[name]
    costs = costs_of(calls_of(program)[-1])
    assert (
        sum(cost.flops for cost in costs), sum(cost.bytes_read for cost in costs),
        sum(cost.bytes_written for cost in costs),
    ) == (flops, read, written)  # fmt: skip


@pytest.mark.parametrize(("pixels", "kernels"), [(6, 3), (1, 2)])
def test_weight_and_statistics_of_a_group_norm_are_joined_where_channels_have_several_pixels(pixels, kernels):
    """group_norm_kernel.cu GroupNormKernelImplInternal."""
    call = calls_of(lambda: aten.native_group_norm(meta(5, 4, pixels), meta(4), meta(4), 5, 4, pixels, 2, 1e-5))[-1]
    (cost,) = costs_of(call)
    assert isinstance(cost.work, VectorWork)
    assert cost.work.kernels + 1 == kernels  # the statistics have a kernel of their own


def test_no_rows_are_no_groups():
    assert equal_groups(0, 0) == ()
    assert equal_groups(7, 3) == (3, 2, 2)
