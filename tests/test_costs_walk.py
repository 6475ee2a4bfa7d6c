"""What the time model is told beside counts: how a kernel walks its memory, what it reads again, what the host waits
for. Expected is what torch's CUDA kernels do, by their sources."""

from __future__ import annotations

import pytest
import torch
from costs_support import call_by_hand, costs_in, meta
from torch import Tensor

from flopmeter.costs import costs_of
from flopmeter.records import Cost, Switches, ThreadGrid

aten = torch.ops.aten
BF16, I64, C64 = torch.bfloat16, torch.int64, torch.complex64
T = meta
F32_BYTES = 4


def cost_of(program) -> Cost:
    return costs_in(program)[-1]


def channels_last(*shape: int) -> Tensor:
    return T(*shape).to(memory_format=torch.channels_last)


WALKS = {
    "a copy in order": (lambda: T(4, 6).clone(), None),
    "a copy to another order": (lambda: T(4, 6).t().contiguous(), "strided"),
    "a copy of a column": (lambda: T(4, 1).t().contiguous().clone(), None),
    "a cast": (lambda: aten._to_copy(T(4, 6), dtype=BF16), None),
    "a copy onto another order": (lambda: aten.copy_(T(6, 4).t(), T(4, 6)), "strided"),
    "a copy of one number": (lambda: aten.copy_(T(1, 1), T(1, 1).t()), None),
    "of two rows": (lambda: T(4, 6) + T(4, 6), None),
    "of a row and a matrix": (lambda: T(4, 6) + T(6), None),
    "a pooled window": (lambda: aten.max_pool2d_with_indices(T(1, 3, 4, 4), [2, 2]), "window"),
    "an addition at indices": (lambda: aten.index_add_(T(50, 6), 0, T(3, dtype=I64), T(3, 6)), "scatter"),
    "a batch norm in training": (
        lambda: aten._native_batch_norm_legit(T(2, 3, 4, 4), T(3), T(3), T(3), T(3), True, 0.1, 1e-5), "statistics"
    ),
    "a batch norm in evaluation, channels first": (
        lambda: aten._native_batch_norm_legit_no_training(T(2, 3, 4, 4), T(3), T(3), T(3), T(3), 0.1, 1e-5), "stream"
    ),
    "a batch norm in evaluation, channels last": (
        lambda: aten._native_batch_norm_legit_no_training(
            channels_last(2, 3, 4, 4), T(3), T(3), T(3), T(3), 0.1, 1e-5
        ),
        "stream",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WALKS)
def test_a_kernel_walks_its_memory_as_its_operands_lie(name):
    program, access = WALKS[name]
    assert cost_of(program).access == access


def test_interpolation_loops_over_planes_where_channels_are_first():
    up = lambda x: aten.upsample_bilinear2d(x, [60, 60], False)  # noqa: E731
    assert cost_of(lambda: up(T(2, 5, 3, 3))).work.grid == ThreadGrid(4, 1024, 2 * 5)
    assert cost_of(lambda: up(channels_last(2, 5, 3, 3))).work.grid is None
    assert cost_of(lambda: T(4) + 1).work.grid is None


# Blocks, threads of a block, inputs of a thread, and threads that join the parts if several blocks share a result, by
# hand after `setReduceConfig` (Reduce.cuh).
REDUCTIONS = {
    # Four columns a thread, 16 threads of 24 side by side, 8 above one another: 1024 rows / 8, below 256.
    "columns of a narrow matrix": (lambda: T(1024, 96).sum(0), (2, 128, 128, 0)),
    # 32 threads of 128, 4 above: 256 rows a thread may be split over blocks; the 4 above one another join them.
    "columns of a wider one": (lambda: T(1024, 512).sum(0), (4, 128, 256, 4)),
    # Odd rows: a column a thread, 32 side by side, 16 above: 1024 / 16.
    "columns of odd rows": (lambda: T(1024, 95).sum(0), (3, 512, 64, 0)),
    # A warp for each row, 16 of them in a block: 1024 / 32.
    "rows": (lambda: T(8944, 1024).mean(-1), (559, 512, 32, 0)),
    # Four rows of 128 threads: 65536 / 128 = 512 a thread, shared by the four of a block, 128 each.
    "few long rows": (lambda: T(4, 65536).amax(-1), (4, 512, 128, 0)),
    "all of a small tensor": (lambda: T(141).sum(), (1, 32, 5, 0)),
    "all of a middling one": (lambda: T(8944).sum(), (1, 512, 18, 0)),
    "all of a large one": (lambda: T(2**20).sum(), (1, 512, 2048, 512)),
    "one row": (lambda: T(1, 96).sum(0), None),
    "nothing": (lambda: T(0, 96).sum(0), None),
    "the larger of two": (lambda: torch.maximum(T(1024, 96), T(1024, 96)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_thread_of_a_reduction_loads_one_after_another_what_the_grid_leaves_it(name):
    program, expected = REDUCTIONS[name]
    grid = cost_of(program).work.grid
    assert (grid and (grid.blocks, grid.threads, grid.steps, grid.joiners)) == expected


# Blocks and threads in profiles of an H100 (validation/traces, kernels_reduce).
SCANS = {
    "rows": (lambda: T(8192, 8192).cumsum(-1), (256, 512, 8192 / 32)),
    "few rows": (lambda: T(64, 1024).cumsum(-1), (8, 512, 1024 / 128)),
    "long rows": (lambda: T(4096, 128256).cumsum(-1), (1024, 512, 128256 / 256)),
    "columns": (lambda: T(4096, 128256).cumsum(0), (251, 512, 4096)),
    "few columns": (lambda: T(64, 1024).cumsum(0), (2, 512, 64)),
    "a vector": (lambda: T(10**6).cumsum(0), None),
}


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_has_the_thread_blocks_of_a_profile(name):
    program, expected = SCANS[name]
    grid = cost_of(program).work.grid
    assert (grid and (grid.blocks, grid.threads, grid.steps)) == expected


# Rows, and the threads of the one block in profiles of an H100.
LOSSES = {64: 32, 700: 32, 4096: 256, 8192: 512, 16384: 1024, 100_000: 1024}


@pytest.mark.parametrize("rows", LOSSES)
def test_one_block_takes_all_rows_of_a_loss_and_loads_the_target_before_what_it_names(rows):
    def program():
        torch.nn.functional.nll_loss(T(rows, 40), T(rows, dtype=I64))

    assert cost_of(program).work.grid == ThreadGrid(1, LOSSES[rows], 2 * -(-rows // LOSSES[rows]))


def test_a_copy_between_host_and_device_goes_over_their_link_and_blocks_unless_asked_not_to():
    on_cpu = torch.ones(4, 6)
    cost = cost_of(lambda: aten.copy_(T(4, 6), on_cpu))
    assert (cost.link_bytes, cost.blocks_host) == (4 * 6 * F32_BYTES, True)
    assert not cost_of(lambda: aten.copy_(T(4, 6), on_cpu, True)).blocks_host
    assert cost_of(lambda: T(4, 6).clone()).link_bytes == 0


def test_the_host_waits_for_what_it_must_know():
    def blocks(func, *args, outputs):
        return any(cost.blocks_host for cost in costs_of(call_by_hand(func, args, outputs)))

    mask, places = T(4, dtype=torch.bool), T(2, dtype=I64)
    assert blocks(aten.nonzero.default, T(4), outputs=(T(4, 1, dtype=I64),))
    assert blocks(aten.index.Tensor, T(4), [mask], outputs=(T(2),))
    assert not blocks(aten.index.Tensor, T(4), [places], outputs=(T(2),))
    assert not blocks(aten.add.Tensor, T(4), T(4), outputs=(T(4),))


# --- what is read again


def test_a_softmax_reads_rows_again_that_do_not_fit_in_registers():
    """SoftMax.cu keeps rows up to 2,048 in the registers of a warp, and up to 9,216 in those of a block; longer ones it
    reads three times, in loads of 16 B. Backward a block doubles while it is below half of the loads of a row, of which
    it takes at most 1,024."""
    (held,) = cost_of(lambda: aten._softmax(T(6, 1024), -1, False)).work.rereads
    assert held[:4] == (0, 6, 1024 * F32_BYTES, 32)  # by one warp (PersistentSoftmax.cuh)
    (held,) = cost_of(lambda: aten._softmax(T(6, 9216), -1, False)).work.rereads
    assert held[:4] == (0, 6, 9216 * F32_BYTES, 1024)
    (again,) = cost_of(lambda: aten._softmax(T(6, 9217), -1, False)).work.rereads
    assert again[:4] == (2 * 6 * 9217 * F32_BYTES, 6, 9217 * F32_BYTES, 1024)
    again, _ = cost_of(lambda: aten._softmax_backward_data(T(6, 2**20), T(6, 2**20), -1, torch.float32)).work.rereads
    assert again.threads == 512
    backward = cost_of(lambda: aten._softmax_backward_data(T(6, 2048), T(6, 2048), -1, torch.float32))
    again, product = backward.work.rereads
    assert again.nbytes == 6 * 2048 * F32_BYTES  # the product, whose sum it has taken
    assert (product.nbytes, product.is_kernel) == (3 * 6 * 2048 * F32_BYTES, True)  # of gradient and output
    (again,) = cost_of(lambda: aten._log_softmax_backward_data(T(6, 2048), T(6, 2048), -1, torch.float32)).work.rereads
    assert again.nbytes == 6 * 2048 * F32_BYTES  # the gradient
    (held,) = cost_of(lambda: aten._softmax(T(2048, 6), 1, False)).work.rereads
    assert (held.nbytes, held.rows) == (0, 2048)
    assert cost_of(lambda: aten._softmax(T(), 0, False)).work.rereads[0][:4] == (0, 1, F32_BYTES, 1)
    (few,) = cost_of(lambda: aten._softmax(T(6, 5), 1, False)).work.rereads
    assert few.threads == 8  # lanes of a power of two
    assert few.operations == pytest.approx(held.operations)  # of six elements: three steps, too
    assert costs_in(lambda: aten._softmax(T(6, 0), 1, False)) == []


def test_a_layer_norm_reads_each_row_again():
    (again,) = cost_of(lambda: aten.native_layer_norm(T(5, 4, 8), [8], None, None, 1e-5)).work.rereads
    assert again[:4] == (5 * 4 * 8 * F32_BYTES, 5 * 4, 8 * F32_BYTES, 128)
    (again,) = cost_of(lambda: aten.native_layer_norm(T(5, 4, 6), [4, 6], None, None, 1e-5)).work.rereads
    assert (again.rows, again.row_bytes) == (5, 4 * 6 * F32_BYTES)


def test_a_layer_norm_of_rows_that_four_does_not_divide_takes_their_statistics_in_another_kernel():
    """RowwiseMomentsCUDAKernel and LayerNormForwardCUDAKernel in a trace on an H100: [3137] x [512], [3137] x [256]."""
    statistics, applied = cost_of(lambda: aten.native_layer_norm(T(3137, 3137), [3137], None, None, 1e-5)).work.rereads
    assert (statistics.rows, statistics.threads, statistics.is_kernel) == (3137, 512, True)
    assert (applied.rows, applied.threads, applied.is_kernel) == (3137, 256, False)


def launched(work) -> int:
    return work.kernels + sum(each.is_kernel for each in work.rereads)


def test_a_group_norm_takes_the_statistics_of_its_groups_and_reads_all_again():
    """By hand from group_norm_kernel.cu: a warp for a group of fewer than 512 elements, a block of 512 for others."""
    work = cost_of(lambda: aten.native_group_norm(T(5, 4, 6), None, None, 5, 4, 6, 2, 1e-5)).work
    (groups,) = work.rereads
    assert groups[:4] == (5 * 4 * 6 * F32_BYTES, 5 * 2, 2 * 6 * F32_BYTES, 32)
    assert launched(work) == 2
    assert work.index_operations  # statistics are repeated over the pixels of a channel
    weight, bias = T(4), T(4)
    work = cost_of(lambda: aten.native_group_norm(T(5, 4, 600), weight, bias, 5, 4, 600, 2, 1e-5)).work
    assert (work.rereads[0].threads, launched(work)) == (512, 3)


@pytest.mark.parametrize(
    ("mask", "has_weight", "kernels", "again"),
    [([True] * 3, True, 5, 2), ([True, False, False], True, 4, 2), ([True, False, False], False, 3, 2)]
    + [([False, True, True], True, 2, 0)],
)
def test_the_backward_of_a_group_norm_sums_over_channels_and_reads_all_again_for_its_input(
    mask: list[bool], has_weight: bool, kernels: int, again: int
):
    """Kernels and what they read, by hand from group_norm_kernel.cu; five and three of them in AMD's trace, too."""
    x, statistics = T(5, 4, 600), T(5, 2)
    weight = T(4) if has_weight else None
    work = cost_of(
        lambda: aten.native_group_norm_backward(x, x, statistics, statistics, weight, 5, 4, 600, 2, mask)
    ).work
    channels = work.rereads[0]
    assert (channels.rows, channels.row_bytes, channels.threads) == (5 * 4, 600 * F32_BYTES, 512)
    assert sum(each.nbytes for each in work.rereads) == again * 5 * 4 * 600 * F32_BYTES
    assert launched(work) == kernels


@pytest.mark.parametrize(("samples", "blocks", "threads", "rounds"), [(128, 1, 256, 128), (129, 2, 512, 5)])
def test_many_samples_are_added_up_in_tiles_for_the_weights_of_a_group_norm(samples, blocks, threads, rounds):
    """By hand from group_norm_kernel.cu: up to 128 a thread for each of 40 channels takes them one by one, then tiles
    of 32 channels and 32 samples."""
    x, statistics = T(samples, 40, 9), T(samples, 2)
    given = (x, x, statistics, statistics, T(40), samples, 40, 9, 2, [True] * 3)
    over_samples = cost_of(lambda: aten.native_group_norm_backward(*given)).work.rereads[-1]
    assert (over_samples.rows, over_samples.threads, over_samples.accesses) == (blocks, threads, rounds)


@pytest.mark.parametrize(
    ("mask", "kernels", "again"), [([True] * 3, 3, 4), ([True, False, False], 2, 2), ([False, True, True], 1, 0)]
)
def test_the_backward_of_a_group_norm_of_vectors_takes_sums_over_groups(mask: list[bool], kernels: int, again: int):
    """GroupNorm1dBackward in group_norm_kernel.cu, by hand: a warp for each of 300 x 4 groups of 10 numbers."""
    x, statistics = T(300, 40), T(300, 4)
    given = (x, x, statistics, statistics, T(40), 300, 40, 1, 4, mask)
    work = cost_of(lambda: aten.native_group_norm_backward(*given)).work
    if mask[0]:
        assert work.rereads[0][1:4] == (300 * 4, 10 * F32_BYTES, 32)
    assert sum(each.nbytes for each in work.rereads) == again * 300 * 40 * F32_BYTES
    assert launched(work) == kernels


def backward_of_layer_norm(mask: list[bool]) -> Cost:
    return cost_of(lambda: aten.native_layer_norm_backward(T(4, 6), T(4, 6), [6], T(4, 1), T(4, 1), T(6), T(6), mask))


@pytest.mark.parametrize(
    ("mask", "flops", "again"),
    [([True, False, False], 10, 1), ([False, True, False], 2, 2), ([True, False, True], 11, 2), ([True] * 3, 13, 2)],
)
def test_the_gradients_of_weights_go_over_all_rows_once_more(mask, flops, again):
    """A row kernel for the input's gradient reads gradient and x twice; a kernel over columns reads both again."""
    cost = backward_of_layer_norm(mask)
    assert cost.flops == flops * 24
    assert len(cost.work.rereads) == again
    assert [each.nbytes for each in cost.work.rereads] == again * [2 * 24 * F32_BYTES]
    assert [each.is_kernel for each in cost.work.rereads] == [False, True][:again]


OVER_ROWS = {  # shape: (blocks, threads, loops of a thread)
    (20, 64): (2, 32, 2),  # blocks of one warp, that takes 8 rows at a time, and 16 where it does not end with 8
    (100, 64): (2, 32 * 8, 1),
    (200, 65): (3, 32 * 16, 1),
    (256, 65): (3, 1024, 1),
    (768, 64): (2, 1024, 3),
    (800, 64): (2, 1024, 2),
    (4096, 4096): (128, 1024, 16),  # 32 x 8 rows at a time
    (64 * 1024, 320): (10, 1024, 256),
    (10**6, 32): (10**6 // 32, 32, 4),  # split: a block has 32 rows
}


@pytest.mark.parametrize("shape", OVER_ROWS)
def test_the_kernel_of_a_norms_weights_has_a_block_for_32_columns(shape):
    """The grids and loops are those of traces on an H100 with torch 2.11 where they show them."""
    x, columns, statistics = T(*shape), T(shape[1]), T(shape[0], 1)
    cost = cost_of(
        lambda: aten.native_layer_norm_backward(
            x, x.clone(), [shape[1]], statistics, statistics, columns, columns, [True] * 3
        )
    )
    _, over_rows = cost.work.rereads
    assert (over_rows.rows, over_rows.threads, over_rows.accesses) == OVER_ROWS[shape]


def test_a_batch_norm_in_training_reads_all_of_it_twice():
    train = cost_of(lambda: aten._native_batch_norm_legit(T(2, 3, 4, 4), T(3), T(3), T(3), T(3), True, 0.1, 1e-5))
    evaluate = cost_of(
        lambda: aten._native_batch_norm_legit_no_training(T(2, 3, 4, 4), T(3), T(3), T(3), T(3), 0.1, 1e-5)
    )
    statistics, elements = train.work.rereads
    assert (statistics.nbytes, statistics.rows, statistics.is_kernel) == (96 * F32_BYTES, 3, True)
    assert statistics.row_bytes == 32 * F32_BYTES  # 2 planes of 4 x 4
    assert [rows.nbytes for rows in (elements, *evaluate.work.rereads)] == [0, 0]
    assert (train.flops, evaluate.flops) == (96 * 7, 96 * 4)


GRIDS = {  # of a training batch norm in bf16: (blocks, threads) of the statistics, and of what applies them
    "NCHW": {
        (256, 64, 112, 112): ((64, 512), (64 * 256, 512)),
        (256, 512, 28, 28): ((512, 512), (512 * 256, 256)),
        (256, 1024, 14, 14): ((1024, 512), (1024 * 256, 64)),
        (256, 2048, 7, 7): ((2048, 512), (2048 * 128, 64)),
        (32, 64, 56, 56): ((64, 512), (64 * 32, 512)),
    },
    "NHWC": {
        (256, 64, 112, 112): ((2 * 128, 512), (2 * 128, 512)),
        (256, 2048, 7, 7): ((64 * 49, 512), (64 * 49, 512)),
        (128, 1152, 7, 7): ((36 * 25, 512), (36 * 25, 512)),
    },
}


@pytest.mark.parametrize(("layout", "shape"), [(layout, shape) for layout in GRIDS for shape in GRIDS[layout]])
def test_batch_norms_have_the_blocks_that_a_trace_on_an_h100_shows(layout, shape):
    x, channels = T(*shape, dtype=BF16), T(shape[1])
    x = x.to(memory_format=torch.channels_last) if layout == "NHWC" else x
    arguments = (x, channels, channels, channels, channels, True, 0.1, 1e-5)
    statistics, elements = cost_of(lambda: aten.native_batch_norm(*arguments)).work.rereads
    assert ((statistics.rows, statistics.threads), (elements.rows, elements.threads)) == GRIDS[layout][shape]


def backward_of_batch_norm(*, train: bool, mask: list[bool]) -> Cost:
    return cost_of(
        lambda: aten.native_batch_norm_backward(
            T(2, 3, 4, 4), T(2, 3, 4, 4), T(3), T(3), T(3), T(3), T(3), train, 1e-5, mask
        )
    )


@pytest.mark.parametrize(
    ("train", "mask", "flops"),
    [(True, [True] * 3, 13), (True, [True, False, False], 10), (False, [True] * 3, 5), (False, [False, True, True], 3)],
)
def test_the_backward_of_a_batch_norm_costs_what_is_asked_of_it(train, mask, flops):
    cost = backward_of_batch_norm(train=train, mask=mask)
    assert cost.flops == flops * 96
    assert sum(reread.nbytes for reread in cost.work.rereads) == 2 * train * 96 * F32_BYTES


def test_a_batch_norm_without_weights_scales_by_none():
    cost = cost_of(lambda: aten._native_batch_norm_legit(T(2, 3, 4, 4), None, None, T(3), T(3), True, 0.1, 1e-5))
    assert cost.flops == 96 * 5


# --- products


def test_a_plain_product_is_products_alone():
    cost = cost_of(lambda: T(2, 3) @ T(3, 5))
    assert (cost.transcendentals, cost.recomputed_flops, cost.masked_flops) == (0, 0, 0)
    assert cost.work.matmuls == ((1, 2, 5, 3),)


@pytest.mark.parametrize(
    ("depth", "columns", "alignment"), [(64, 128, 16), (64, 100, 8), (64, 66, 4), (64, 65, 2), (65, 64, 2), (68, 64, 8)]
)
def test_the_alignment_of_a_product_is_that_of_its_worst_row(depth, columns, alignment):
    """Rows start at multiples of their pitch: 100 numbers of 2 B are 200 B, a multiple of 8 and not of 16."""
    cost = cost_of(lambda: T(32, depth, dtype=BF16) @ T(depth, columns, dtype=BF16))
    assert cost.work.alignment_bytes == alignment


def test_products_and_convolutions_ask_their_own_switch_for_tf32():
    product = cost_of(lambda: T(2, 3) @ T(3, 5))
    convolution = cost_of(lambda: torch.nn.functional.conv1d(T(1, 3, 8), T(5, 3, 3)))
    for matmul, cudnn in ((True, False), (False, True)):
        switches = Switches(matmul_tf32=matmul, cudnn_tf32=cudnn, fp16_accumulate=False)
        assert (switches.matmul_dtype(product) == "tf32", switches.matmul_dtype(convolution) == "tf32") == (
            matmul,
            cudnn,
        )


def test_an_op_computes_in_the_type_that_it_is_given():
    fp8 = torch.float8_e4m3fn
    scaled = cost_of(lambda: aten._scaled_mm(T(16, 32, dtype=fp8), T(64, 32, dtype=fp8).t(), T(), T(), out_dtype=BF16))
    assert scaled.dtype == "fp8"
    assert cost_of(lambda: aten._to_copy(T(4, dtype=I64), dtype=BF16)).dtype == "bf16"
    assert cost_of(lambda: T(4, dtype=I64) + 1).dtype == "int64"
    assert cost_of(lambda: T(4, dtype=C64) * 2).dtype == "fp32"


def test_multiply_adds_are_told_from_work_that_cannot_use_the_fused_rate():
    assert cost_of(lambda: aten.addcmul(T(6), T(6), T(6))).fused_multiply_add
    assert cost_of(lambda: aten.add(T(6), T(6), alpha=2)).fused_multiply_add
    assert cost_of(lambda: aten.lerp(T(6), T(6), 0.5)).fused_multiply_add
    assert cost_of(lambda: aten.linalg_vector_norm(T(6))).fused_multiply_add
    assert not cost_of(lambda: aten.linalg_vector_norm(T(6), 3)).fused_multiply_add
    assert cost_of(lambda: aten._foreach_lerp_([T(6)], [T(6)], 0.5)).fused_multiply_add
    assert not cost_of(lambda: aten._foreach_mul_([T(6)], [T(6)])).fused_multiply_add
    assert not cost_of(lambda: aten.mul(T(6), T(6))).fused_multiply_add
    assert not cost_of(lambda: aten.add(T(6), T(6))).fused_multiply_add
    assert not cost_of(lambda: aten.sum(T(6))).fused_multiply_add
