"""Blocks and threads of kernels that walk over rows, channels or columns: those in profiles of an H100 and an H200
(torch 2.11, 2026-11: validation/traces, kernels_norm, kernels_reduce, kernels_index and kernels_moves)."""

from __future__ import annotations

from itertools import product
from math import ceil
from operator import mul

import pytest
import torch
import torch.nn.functional as F
from costs_support import calls_of, costs_in, meta
from hypothesis import given
from hypothesis import strategies as st

from flopmeter import FlopMeter, load_hardware
from flopmeter.costs import costs_of
from flopmeter.timing.grids import blocks_of_result
from flopmeter.timing.sectors import sectors_of

aten = torch.ops.aten
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def layer_norm_backward(rows, columns, mask=(True, True, True)):
    x, column, row = meta(rows, columns), meta(rows, 1), meta(columns)
    return aten.native_layer_norm_backward(x, x.clone(), [columns], column, column, row, row, list(mask))


def rms_norm_backward(rows, columns):
    x = meta(rows, columns)
    return aten._fused_rms_norm_backward(x, x.clone(), [columns], meta(rows, 1), meta(columns), [True, True])


def image(*shape, is_last, dtype=BF16):
    return meta(*shape, dtype=dtype).to(memory_format=torch.channels_last if is_last else torch.contiguous_format)


def batch_norm(*shape, is_last):
    channel = meta(shape[1])
    return aten.native_batch_norm(image(*shape, is_last=is_last), *[channel] * 4, True, 0.1, 1e-5)


def batch_norm_backward(*shape, is_last):
    x, channel = image(*shape, is_last=is_last), meta(shape[1])
    return aten.native_batch_norm_backward(x, torch.empty_like(x), *[channel] * 5, True, 1e-5, [True] * 3)


def group_norm(*shape):
    x, weight = meta(*shape, dtype=FP16), meta(shape[1], dtype=FP16)
    return aten.native_group_norm(x, weight, weight, shape[0], shape[1], shape[2] * shape[3], 32, 1e-5)


def group_norm_backward(*shape):
    x, weight, of_group = meta(*shape, dtype=FP16), meta(shape[1], dtype=FP16), meta(shape[0], 32)
    sizes = shape[0], shape[1], shape[2] * shape[3], 32
    return aten.native_group_norm_backward(x, x.clone(), of_group, of_group, weight, *sizes, [True] * 3)


def softmax_backward(rows, columns, dtype):
    x = meta(rows, columns, dtype=dtype)
    return aten._softmax_backward_data(x, x.clone(), -1, dtype)


# What runs; of each kernel in turn blocks, threads, how many elements of a tensor a thread takes in one turn, and how
# often it goes over them.
NORMS = {
    "layer norm": (lambda: torch.layer_norm(meta(12288, 1280), [1280]), [(12288, 128, 4, 2)]),
    "layer norm, few rows": (lambda: torch.layer_norm(meta(500, 1024), [1024]), [(500, 128, 4, 2)]),
    "layer norm's gradients": (lambda: layer_norm_backward(16384, 768), [(16384, 128, 4, 2), (24, 1024, 8, 1)]),
    "of few rows": (lambda: layer_norm_backward(64, 4096), [(64, 128, 4, 2), (128, 256, 8, 1)]),
    "of one row": (lambda: layer_norm_backward(1, 4096), [(1, 128, 4, 2), (128, 32, 8, 1)]),
    "of odd rows": (lambda: layer_norm_backward(3137, 3137), [(3137, 128, 4, 2), (99, 1024, 16, 1)]),
    "of rows for one block": (lambda: layer_norm_backward(65536, 320), [(65536, 128, 4, 2), (10, 1024, 8, 1)]),
    "of a million rows": (lambda: layer_norm_backward(10**6, 32), [(10**6, 128, 4, 2), (31250, 32, 8, 1)]),
    "RMS norm's gradients": (lambda: rms_norm_backward(12288, 1280), [(12288, 128, 4, 2), (40, 1024, 8, 1)]),
    "softmax's gradient": (lambda: softmax_backward(12288, 1280, BF16), [(12288, 128, 8, 2)]),
    "in fp32": (lambda: softmax_backward(12288, 1280, FP32), [(12288, 256, 4, 2)]),
    "of odd rows in fp32": (lambda: softmax_backward(3137, 3137, FP32), [(3137, 512, 4, 2)]),
    "of long rows": (lambda: softmax_backward(64, 4096, BF16), [(64, 256, 8, 2)]),
    "of longer rows": (lambda: softmax_backward(2048, 8192, FP32), [(2048, 512, 4, 2)]),
    "batch norm": (lambda: batch_norm(256, 64, 112, 112, is_last=False), [(64, 512, 1, 1), (16384, 512, 1, 1)]),
    "28 x 28": (lambda: batch_norm(256, 512, 28, 28, is_last=False), [(512, 512, 1, 1), (131072, 256, 1, 1)]),
    "14 x 14": (lambda: batch_norm(256, 1024, 14, 14, is_last=False), [(1024, 512, 1, 1), (262144, 64, 1, 1)]),
    "7 x 7": (lambda: batch_norm(256, 2048, 7, 7, is_last=False), [(2048, 512, 1, 1), (262144, 64, 1, 1)]),
    "few images": (lambda: batch_norm(128, 1152, 7, 7, is_last=False), [(1152, 512, 1, 1), (147456, 64, 1, 1)]),
    "NHWC": (lambda: batch_norm(256, 64, 112, 112, is_last=True), [(256, 512, 4, 1)] * 2),
    "7 x 7, NHWC": (lambda: batch_norm(256, 2048, 7, 7, is_last=True), [(3136, 512, 4, 1)] * 2),
    "few images, NHWC": (lambda: batch_norm(128, 1152, 7, 7, is_last=True), [(900, 512, 4, 1)] * 2),
    "batch norm's gradients": (lambda: batch_norm_backward(256, 64, 112, 112, is_last=False), [(64, 512, 1, 2)]),
    "of 7 x 7": (lambda: batch_norm_backward(128, 1152, 7, 7, is_last=False), [(1152, 512, 1, 2)]),
    "of 7 x 7, NHWC": (lambda: batch_norm_backward(128, 1152, 7, 7, is_last=True), [(900, 512, 4, 1)] * 2),
    "group norm": (lambda: group_norm(2, 320, 64, 64), [(64, 512, 1, 1)]),
    "group norm's gradients": (lambda: group_norm_backward(8, 640, 32, 32), [(5120, 512, 1, 1), (3, 256, 1024, 1)]),
    "of small planes": (lambda: group_norm_backward(2, 1280, 16, 16), [(2560, 32, 1, 1), (5, 256, 256, 1)]),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_has_the_blocks_and_threads_of_a_profile_whose_turns_cover_its_elements(name):
    """One turn fewer in each pass would not, but for planes of 49, which take 64 threads (a kernel that applies given
    statistics has one more, in which it loads them)."""
    program, kernels = NORMS[name]
    *_, call = calls_of(program)
    work, elements = costs_of(call)[-1].work, call.inputs[0].numel
    rereads = [*work.rereads][: len(kernels)]
    if work.grid is not None:  # of a kernel that applies given statistics, whose threads load several at a time
        steps = ceil(work.grid.steps / work.grid.at_a_time)
        rereads[-1] = rereads[-1]._replace(rows=work.grid.blocks, threads=work.grid.threads, accesses=steps)
    assert [(rows.rows, rows.threads) for rows in rereads] == [kernel[:2] for kernel in kernels]
    for rows, (blocks, threads, together, passes) in zip(rereads, kernels, strict=True):
        of_turn = blocks * threads * together
        assert passes * elements <= of_turn * rows.accesses
        assert of_turn * (rows.accesses - passes - 1) < passes * elements * 64 / 49


def test_rows_that_four_loads_do_not_divide_are_read_element_by_element():
    """By 512 threads for the statistics and 256 to apply them (layer_norm_kernel.cu)."""
    moments, applied = costs_in(lambda: torch.layer_norm(meta(64, 1030), [1030]))[-1].work.rereads
    assert (moments.rows, moments.threads, moments.accesses) == (64, 512, 3)  # 2 x 512 < 1030
    assert (applied.rows, applied.threads, applied.accesses) == (64, 256, 5)
    assert moments.row_bytes == applied.row_bytes == 4 * 1030
    assert (moments.is_kernel, applied.is_kernel) == (True, False)


EMPTY = {
    "softmax": lambda: torch.softmax(meta(0, 8), 1),
    "layer norm": lambda: torch.layer_norm(meta(0, 8), [8]),
    "of no columns": lambda: torch.layer_norm(meta(8, 0), [0]),
    "layer norm's gradients": lambda: layer_norm_backward(0, 8),
    "RMS norm's gradients": lambda: rms_norm_backward(0, 8),
    "gradients of no columns": lambda: layer_norm_backward(8, 0),
    "batch norm": lambda: batch_norm(0, 4, 3, 3, is_last=False),
    "batch norm, NHWC": lambda: batch_norm(0, 4, 3, 3, is_last=True),
    "batch norm in evaluation": lambda: aten.native_batch_norm(meta(0, 4, 3, 3), *[meta(4)] * 4, False, 0.1, 1e-5),
    "of one dimension": lambda: aten.native_batch_norm(meta(0, 4), *[meta(4)] * 4, False, 0.1, 1e-5),
    "sort": lambda: meta(0, 8).sort(),
    "gradient of a table": lambda: aten.embedding_dense_backward(
        meta(5000, 0), meta(5000, dtype=torch.int64), 100, -1, False
    ),
    "group norm": lambda: group_norm(0, 64, 3, 3),
    "group norm's gradients": lambda: group_norm_backward(0, 64, 3, 3),
}


@pytest.mark.parametrize("name", EMPTY)
def test_a_norm_of_nothing_computes_nothing(name):
    """And takes the time of a kernel that does nothing."""
    assert sum(cost.flops for cost in costs_in(EMPTY[name])) == 0
    with FlopMeter("h100-sxm5-80gb") as meter:
        EMPTY[name]()
    assert meter.report().kernel_seconds < 1e-4


# Shapes in fp32, what is reduced, all blocks of the kernel, and threads of each.
SUMS = [
    ((8192, 8192), (1,), 8192, 512), ((8192, 8192), (0,), 2112, 128), ((8192, 8192), (0, 1), 528, 512),
    ((1024, 4096), (0,), 512, 128), ((16384, 768), (0,), 1536, 128), ((4096, 14336), (0,), 2128, 128),
    ((256, 2048, 49), (2,), 32768, 512), ((64, 197, 768), (1,), 384, 128), ((128, 1280, 7, 7), (2, 3), 10240, 512),
    ((512, 512), (0,), 4, 128), ((2048, 512), (0,), 128, 128), ((100_000_000,), (0,), 763, 512),
    ((32, 1024, 1024), (0, 1), 2112, 128), ((4096,), (0,), 1, 512), ((1_000_000, 4), (1,), 7813, 512),
    ((4, 1_000_000), (1,), 492, 512), ((32, 128, 4096), (1,), 1024, 128), ((64, 1024), (1,), 4, 512),
]  # fmt: skip
SCANS = [
    ((8192, 8192), 1, 256, 512), ((8192, 8192), 0, 16, 512), ((4096, 128_256), 1, 1024, 512),
    ((4096, 128_256), 0, 251, 512), ((64, 1024), 1, 8, 512), ((64, 1024), 0, 2, 512),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "dims", "blocks", "threads"), SUMS)
def test_a_sum_has_the_blocks_and_threads_of_a_profile(shape, dims, blocks, threads):
    grid = costs_in(lambda: meta(*shape).sum(dims))[-1].work.grid
    assert (grid.blocks * blocks_of_result(grid, load_hardware("h100-sxm5-80gb")), grid.threads) == (blocks, threads)


@pytest.mark.parametrize(("shape", "dim", "blocks", "threads"), SCANS)
def test_a_scan_has_the_blocks_and_threads_of_a_profile(shape, dim, blocks, threads):
    grid = costs_in(lambda: meta(*shape).cumsum(dim))[-1].work.grid
    assert (grid.blocks, grid.threads) == (blocks, threads)


def bags(rows, width, indices, count, dtype=FP32):
    ids, starts = (meta(size, dtype=torch.int64) for size in (indices, count))
    return aten._embedding_bag(meta(rows, width, dtype=dtype), ids, starts)


def ids(count):
    return meta(count, dtype=torch.int64)


LOOKUPS = {
    "rows of 8 KiB": (lambda: F.embedding(ids(8192), meta(32000, 2048)), (8192 * 2, 256)),
    "rows of 4 KiB": (lambda: F.embedding(ids(8192), meta(32000, 2048, dtype=BF16)), (8192, 256)),
    "rows of 16 KiB": (lambda: meta(128256, 4096).index_select(0, ids(4096)), (4096 * 4, 256)),
    "rows of 3 KiB": (lambda: meta(50304, 768)[ids(16384)], (16384, 192)),
    "rows of 1.5 KiB": (lambda: meta(50304, 768, dtype=BF16)[ids(16384)], (16384, 96)),
    "rows of 128 bytes": (lambda: meta(10**6, 64, dtype=BF16).index_select(0, ids(32768)), (32768, 32)),
    "rows by a number for each column": (
        lambda: meta(1000, 512).gather(0, ids(50000)[:, None].expand(50000, 512)), (50000, 128)
    ),
    "bags of wide rows": (lambda: bags(32000, 2048, 8192, 2048), (1024, 256)),
    "bags of narrow rows": (lambda: bags(10**6, 64, 32768, 8192), (1024, 256)),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_lookup_of_rows_has_the_blocks_and_threads_of_a_profile(name):
    program, launched = LOOKUPS[name]
    (cost,) = costs_of(calls_of(program)[-1])
    assert (cost.work.grid.blocks, cost.work.grid.threads) == launched


@pytest.mark.parametrize("lookup", [
    lambda: F.embedding(ids(17), meta(100, 6)),  # 24 bytes
    lambda: meta(100, 8).index_select(1, ids(17)),
    lambda: meta(8, 100).t()[ids(17)],
    lambda: meta(100, 8)[ids(17), ids(17)],
    lambda: meta(100, 8).gather(1, meta(100, 8, dtype=torch.int64)),
    lambda: meta(100, 8).gather(0, meta(100, 8, dtype=torch.int64)),
])  # fmt: skip
def test_single_elements_that_are_looked_up_have_no_block_for_a_row(lookup):
    (cost,) = costs_of(calls_of(lookup)[-1])
    assert cost.work.grid is None


@pytest.mark.parametrize(("rows", "seconds"), [(16, 11.7e-6), (1, 2.5e-6)])
def test_up_to_sixteen_rows_of_a_table_are_walked_over_one_after_another(rows, seconds):
    """Those of a decoding step on an H100 (validation/traces, llama8b_decode16 and decode1)."""
    with FlopMeter("h100-sxm5-80gb") as meter:
        F.embedding(ids(rows), meta(128256, 4096, dtype=BF16))
    (timing,) = meter.report().timings
    assert timing.seconds == pytest.approx(seconds, rel=0.4)


def test_a_few_long_bags_take_a_step_for_each_row():
    """64 bags of 300 rows each: of 300 loads of which each waits for its index, at 480 cycles of a memory's latency at
    least (Luo et al., arXiv 2402.13499), and 1.98 GHz at most."""
    with FlopMeter("h100-sxm5-80gb") as meter:
        bags(10**6, 64, 64 * 300, 64)
    (timing,) = meter.report().timings
    assert timing.seconds > 300 * 480 / 1.98e9


@pytest.mark.parametrize(("add", "device", "microseconds"), [
    (lambda: meta(512, 768, dtype=BF16).index_add_(0, ids(8192), meta(8192, 768, dtype=BF16)), "h100-sxm5-80gb", 49.5),
    (lambda: meta(100000, 256).index_add_(0, ids(1099991), meta(1099991, 256)), "h100-sxm5-80gb", 2154),
    (lambda: meta(1000, 512).index_add_(0, ids(50000), meta(50000, 512)), "h200-sxm-141gb", 171),
    (lambda: meta(1000, 512).scatter_add_(0, ids(50000)[:, None].expand(-1, 512), meta(50000, 512)),
     "h200-sxm-141gb", 72),
    (lambda: meta(128256, 4096).scatter_add_(0, ids(4096)[:, None].expand(-1, 4096), meta(4096, 4096)),
     "h100-sxm5-80gb", 86.1),
])  # fmt: skip
def test_additions_at_places_take_the_time_of_profiles(add, device, microseconds):
    with FlopMeter(device) as meter:
        add()
    assert meter.report().timings[-1].seconds == pytest.approx(1e-6 * microseconds, rel=0.25)


def bf16(*shape):
    return meta(*shape, dtype=BF16)


def cache_and_token(*shape):
    """Keys of a cache with room for one more token, and those of a token."""
    batch, heads, tokens, width = shape
    return [bf16(batch, heads, tokens + 1, width)[:, :, :-1], bf16(batch, heads, 1, width)]


@pytest.mark.parametrize(("join", "dim", "inputs", "microseconds"), [
    (torch.cat, 2, cache_and_token(32, 8, 1500, 128), 292.5),
    (torch.cat, 2, [bf16(32, 8, 1500, 128), bf16(32, 8, 1, 128)], 65.6),
    (torch.cat, 2, cache_and_token(64, 32, 512, 64), 398.3),
    (torch.stack, -1, [bf16(32, 8, 1500, 128), bf16(32, 8, 1500, 128)], 350.7),
    (torch.cat, 1, [image(64, 64, 56, 56, is_last=True), image(64, 32, 56, 56, is_last=True)], 45.7),
    (torch.cat, 1, [image(64, 512, 7, 7, is_last=True), *(image(64, 32, 7, 7, is_last=True) for _ in range(16))], 35.5),
])  # fmt: skip
def test_joined_tensors_take_the_time_of_profiles(join, dim, inputs, microseconds):
    """Of an H100 (kernels_select, and a DenseNet's training step). The last one starts 53,312 blocks, most of which
    find nothing to do: a row of them for each input, as long as the longest needs."""
    with FlopMeter("h100-sxm5-80gb") as meter:
        join(inputs, dim)
    assert meter.report().kernel_seconds == pytest.approx(1e-6 * microseconds, rel=0.1)


def channels_of(channels, *shape):
    """The first channels of an image, channels last."""
    return image(*shape, is_last=True)[:, :channels]


@pytest.mark.parametrize(("op", "first", "second", "microseconds"), [
    (aten.add, channels_of(128, 64, 512, 28, 28), channels_of(128, 64, 480, 28, 28), 21.6),
    (aten.mul, bf16(64, 32, 1, 128), bf16(64, 1, 1, 128), 2.9),
    (aten.mul, bf16(4, 1024, 1024), bf16(1024), 11.1),
    (aten.add, meta(16, 1024, 768), bf16(16, 1024, 768), 54.2),
    (aten.add, bf16(32, 384, 768), meta(32, 384, 768), 44.4),
    (aten.mul, bf16(4096, 3, 64, 64), meta(3, 1, 1), 244.2),
    (aten.div, bf16(4096, 4096), meta(4096, 1), 78.8),
    (aten.mul, meta(64, 256, 28, 28), bf16(64, 256, 28, 28), 55.0),
])  # fmt: skip
def test_sums_and_products_of_tensors_that_do_not_lie_alike_or_have_two_types_take_the_time_of_profiles(
    op, first, second, microseconds
):
    """Of an H100: a DenseNet's training step, a Llama that decodes, residuals under autocast, a Swin V2, quantisation
    to fp8, a ConvNeXt."""
    with FlopMeter("h100-sxm5-80gb") as meter:
        op(first, second)
    assert meter.report().kernel_seconds == pytest.approx(1e-6 * microseconds, rel=0.15)


def test_on_amd_a_thread_loads_all_its_elements_before_it_waits():
    """A product of a table and a row, beside one of two tables: only index arithmetic is more."""
    table, row = bf16(4096, 40), bf16(40)
    seconds = {}
    for device in ("h100-sxm5-80gb", "mi300x"):
        with FlopMeter(device) as meter:
            table * row
            table * table
        seconds[device] = [timing.seconds for timing in meter.report().timings]
    by_row, alike = seconds["h100-sxm5-80gb"]
    assert by_row - alike > 0.4e-6  # three more steps of 320 cycles
    by_row, alike = seconds["mi300x"]
    assert by_row - alike < 0.3e-6


@pytest.mark.parametrize(("n", "bits", "microseconds"), [
    (10_000, 29, 46.1), (1_000_000, 43, 159.1), (10_000_000, 49, 1292.8),
])  # fmt: skip
def test_a_permutation_sorts_random_keys(n, bits, microseconds):
    """The passes of profiles: of eight bits each, over keys of four and of eight bytes. Their times are without those
    of the keys and of the numbers, which are ops of their own there."""
    costs = costs_of(calls_of(lambda: torch.randperm(n, device="meta"))[-1])
    passes = [cost for cost in costs if cost.bytes_read and cost.bytes_written]
    assert len(passes) == ceil(bits / 8)
    assert passes[-1].bytes_read == n * ((4 if bits < 32 else 8) + 8)
    with FlopMeter("h100-sxm5-80gb") as meter:
        torch.randperm(n, device="meta")
    assert meter.report().kernel_seconds == pytest.approx(1e-6 * microseconds, rel=0.25)


@pytest.mark.parametrize(("shape", "stride", "sectors"), [
    ((64,), (1,), 4), ((64,), (2,), 8), ((64,), (16,), 64), ((64,), (64,), 64), ((8, 16), (64, 1), 8),
    ((8, 24), (64, 1), 16), ((8, 4), (8, 1), 4), ((16, 16), (1, 16), 16), ((4, 16), (0, 1), 1),
])  # fmt: skip
def test_elements_that_lie_apart_bring_the_rest_of_their_sectors(shape, stride, sectors):
    """Sixteen elements of two bytes fill a sector."""
    assert sectors_of(shape, stride, 2, 32) == pytest.approx(32 * sectors, abs=31)


@st.composite
def nested(draw):
    """Bytes of an element, and sizes and strides of up to three dimensions that do not overlap; rows apart begin with
    a sector of 32 bytes."""
    item, shape, stride = draw(st.sampled_from((1, 2, 4, 8, 16))), [], []
    of_sector, step = 32 // item, draw(st.sampled_from((1, 2, 4, 32, 96)))
    for _ in range(draw(st.integers(1, 3))):
        size = draw(st.sampled_from((1, 2, 3, 4, 8, 16, 24)))
        shape.append(size)
        stride.append(step)
        step = step * size + draw(st.sampled_from((0, 8, 16, 100)))
        step = step if step < of_sector else ceil(step / of_sector) * of_sector
    return item, draw(st.permutations(list(zip(shape, stride, strict=True))))


@given(tensor=nested())
def test_the_sectors_of_elements_that_lie_apart_are_those_that_some_element_is_in(tensor):
    """Each element looked at."""
    item, dims = tensor
    shape, stride = zip(*dims, strict=True)
    places = (sum(map(mul, place, stride)) for place in product(*map(range, shape)))
    touched = len({item * place // 32 for place in places})
    assert sectors_of(shape, stride, item, 32) == pytest.approx(32 * touched, abs=31)


def test_columns_of_one_tensor_bring_its_sectors_once_however_many_are_read():
    """Rows of 16 bytes, two to a sector: all 67 MB are moved to read 16.8 MB of them, or twice or three times as much;
    beside 16.8 MB written that is 2.5 times what a column by itself moves."""
    x, alone = meta(2**22, 4), meta(2**22)
    seconds = []
    for program in (
        lambda: alone.exp(), lambda: x[:, 0].exp(), lambda: x[:, 0] + x[:, 1], lambda: torch.lerp(*x.unbind(1)[:3])
    ):  # fmt: skip
        with FlopMeter("h100-sxm5-80gb") as meter:
            program()
        seconds.append(meter.report().kernel_seconds)
    assert seconds[1:] == pytest.approx([2.5 * seconds[0]] * 3, rel=0.1)


@pytest.mark.parametrize(
    ("inner", "columns", "threads"),
    [(64, 64, 1024), (64, 63, 64), (65, 64, 65), (4, 64, 256), (4, 200, 512), (1025, 64, 1024), (16, 1000, 1024)],
)
def test_a_softmax_over_another_dimension_has_several_threads_a_row_where_few_rows_are_long(inner, columns, threads):
    """SpatialSoftMax_getBlockSize in SoftMax.cu: up to 64 neighbours whose rows have 64 elements or more; as many
    threads, a power of two, as fit into 1,024 and as a row has elements."""
    (cost,) = costs_of(calls_of(lambda: meta(8, columns, inner).softmax(1))[-1])
    assert cost.work.grid.threads == threads


def test_compiled_code_has_no_block_for_each_row_that_it_looks_up():
    """262,144 rows of 128 bytes are one kernel over 16.8 million elements."""
    table, numbers = meta(2**20, 64, dtype=BF16), ids(2**18)
    seconds = {}
    for compiled in (False, True):
        look_up = torch.compile(F.embedding) if compiled else F.embedding
        with FlopMeter("h100-sxm5-80gb", compile=compiled) as meter:
            look_up(numbers, table)
        seconds[compiled] = sum(timing.seconds for timing in meter.report().timings)
    with FlopMeter("h100-sxm5-80gb") as meter:
        F.embedding(numbers, table)
    by_the_rules = sum(timing.seconds for timing in meter.report(mode="compiled").timings)
    assert seconds[True] == pytest.approx(by_the_rules, rel=0.1)
    assert seconds[True] < 0.5 * seconds[False]
