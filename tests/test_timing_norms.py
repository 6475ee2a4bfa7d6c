"""Times of norms against recorded measurements and hand arithmetic.

Measured: microseconds of all kernels of a call, H100 SXM, torch 2.11, 2026-11 (validation/traces/h100_kernels_norm).
"""

import pytest
import torch
from costs_support import meta

from flopmeter import FlopMeter, load_hardware
from flopmeter.records import NORMALIZATION, Cost, Region, Reread, Switches, VectorWork
from flopmeter.timing.kernels import price

aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32
H100, H200 = "h100-sxm5-80gb", "h200-sxm-141gb"


def last(program, device=H100):
    """The timing of the last kernel."""
    with torch.inference_mode(), FlopMeter(device) as meter:
        program()
    return meter.report().timings[-1]


def layer_norm_backward(rows, columns, dtype):
    x, statistics = torch.empty(rows, columns, dtype=dtype, device="meta"), torch.empty(rows, 1, device="meta")
    weight = torch.empty(columns, dtype=dtype, device="meta")
    arguments = (torch.empty_like(x), x, [columns], statistics, statistics, weight, weight, [True] * 3)
    return aten.native_layer_norm_backward(*arguments)


@pytest.mark.parametrize(
    ("device", "rows", "columns", "dtype", "microseconds"),
    [
        (H100, 16384, 768, BF16, 112.3),
        (H100, 16384, 768, FP32, 136.2),
        (H100, 32768, 128, BF16, 124.1),  # 4 blocks sum over the rows
        (H100, 65536, 320, BF16, 345.4),  # 10 blocks
        (H100, 1_000_000, 32, BF16, 877.1),  # the rows are split among blocks
        (H100, 8192, 1024, BF16, 64.1),
        (H100, 4096, 4096, BF16, 86.3),
        (H100, 4096, 4096, FP32, 168.3),
        (H200, 50_000, 192, BF16, 222.1),  # rows that fill no last block: each warp takes 16 at a time
        (H200, 6000, 2560, BF16, 64.4),
        (H200, 3000, 5120, BF16, 71.6),  # two blocks on some SMs
    ],
)
def test_the_gradients_of_a_layer_norm_take_about_what_a_hopper_takes(device, rows, columns, dtype, microseconds):
    timing = last(lambda: layer_norm_backward(rows, columns, dtype), device)
    assert timing.seconds * 1e6 == pytest.approx(microseconds, rel=0.15)


@pytest.mark.parametrize(
    ("device", "rows", "columns", "dtype", "microseconds"),
    [
        (H100, 1_000_000, 32, BF16, 1134),
        (H100, 1_000_000, 32, FP32, 1519),
        (H100, 32768, 128, BF16, 38.0),
        (H100, 65536, 320, BF16, 102.3),
        (H100, 65536, 320, FP32, 132.9),
        (H100, 16384, 768, FP32, 49.3),
        (H200, 20_000, 511, BF16, 139.1),  # loaded one by one: 512 threads a row for its mean
        (H100, 1, 4096, FP32, 8.9),
        (H200, 300_000, 64, BF16, 339.4),
        (H200, 12288, 1280, BF16, 35.0),
        (H200, 12288, 1280, FP32, 47.4),
        (H200, 6000, 2560, BF16, 28.3),
        (H200, 500, 1024, BF16, 3.8),
    ],
)
def test_a_layer_norm_takes_what_a_hopper_takes(device, rows, columns, dtype, microseconds):
    """h100_kernels_norm and h200_kernels_norm."""
    x, weight = meta(rows, columns, dtype=dtype), meta(columns, dtype=dtype)
    timing = last(lambda: torch.nn.functional.layer_norm(x, [columns], weight, weight), device)
    assert timing.seconds * 1e6 == pytest.approx(microseconds, rel=0.12)


def test_a_kernel_whose_registers_leave_room_for_fewer_blocks_takes_as_many_more_turns():
    """Short rows wait for their blocks alone. An SM has 65,536 registers: on an H100 the 39 of a thread of layer norm
    in fp32, of which it gets 40, leave room for 12 blocks of 128 threads, and 32 for 16; on an A100 they are 32 too."""

    def seconds(device, dtype):
        x, weight = meta(1_000_000, 32, dtype=dtype), meta(32, dtype=dtype)
        return last(lambda: torch.nn.functional.layer_norm(x, [32], weight, weight), device).seconds

    assert seconds(H100, FP32) / seconds(H100, BF16) == pytest.approx(16 / 12, rel=0.05)
    assert seconds("a100-sxm4-80gb", FP32) / seconds("a100-sxm4-80gb", BF16) == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(
    ("device", "rows", "columns", "dtype", "microseconds"),
    [
        (H100, 4096, 4096, BF16, 55.7),
        (H100, 3137, 3137, FP32, 41.7),
        (H100, 2048, 8192, BF16, 69.0),
        (H100, 2048, 8192, FP32, 75.9),
        (H200, 6000, 2560, BF16, 61.9),
        (H200, 3000, 5120, FP32, 51.1),
    ],
)
def test_a_softmax_of_rows_in_registers_takes_what_a_hopper_takes(device, rows, columns, dtype, microseconds):
    """A block of 1,024 threads for each row, two on an SM, or one where a thread keeps eight elements in 37 registers:
    1,024 times 40 is more than half of 65,536."""
    timing = last(lambda: meta(rows, columns, dtype=dtype).softmax(-1), device)
    assert timing.seconds * 1e6 == pytest.approx(microseconds, rel=0.12)


BATCH_NORMS = [  # shape, whether in channels-last, dtype, microseconds of the forward and of the backward pass
    ((256, 64, 112, 112), False, BF16, 3104, 5775),
    ((256, 64, 112, 112), True, BF16, 1223, 1004),
    ((256, 2048, 7, 7), False, BF16, 239, 176),
    ((256, 2048, 7, 7), True, BF16, 137, 129),
    ((32, 64, 56, 56), True, BF16, 36.1, 30.0),
    ((128, 1152, 7, 7), False, BF16, 119.5, 49.9),
    ((256, 64, 112, 112), False, FP32, 1909, 4876),  # cuDNN's
    ((256, 64, 112, 112), True, FP32, 842, 1371),
]


@pytest.mark.parametrize(("shape", "is_last", "dtype", "forward", "backward"), BATCH_NORMS)
def test_a_batch_norm_in_training_takes_about_what_an_h100_takes(shape, is_last, dtype, forward, backward):
    """Torch's kernels for bf16, cuDNN's for fp32: few blocks in NCHW, one a channel, and many in channels-last."""
    x = torch.empty(shape, dtype=dtype, device="meta")
    x = x.to(memory_format=torch.channels_last) if is_last else x
    channels, reserve = torch.empty(shape[1], device="meta"), torch.empty(0, dtype=torch.uint8, device="meta")
    if dtype == BF16:
        given = (x, torch.empty_like(x), channels, channels, channels, channels, channels, True, 1e-5, [True] * 3)
        timings = [
            last(lambda: aten.native_batch_norm(x, channels, channels, channels, channels, True, 0.1, 1e-5)),
            last(lambda: aten.native_batch_norm_backward(*given)),
        ]
    else:
        given = (x, torch.empty_like(x), channels, channels, channels, channels, channels, 1e-5, reserve)
        timings = [
            last(lambda: aten.cudnn_batch_norm(x, channels, channels, channels, channels, True, 0.1, 1e-5)),
            last(lambda: aten.cudnn_batch_norm_backward(*given)),
        ]
    assert [timing.seconds * 1e6 for timing in timings] == pytest.approx([forward, backward], rel=0.25)


@pytest.mark.parametrize(
    ("shape", "forward", "backward"),
    [((32, 256, 56, 56), 126.4, 196.3), ((2, 320, 64, 64), 38.5, 22.9), ((8, 640, 32, 32), 33.6, 45.9)],
)
def test_a_group_norm_takes_about_what_an_h100_takes(shape, forward, backward):
    """Of 32 groups in fp16: the shapes of an image model and of Stable Diffusion."""
    x, weight = (torch.empty(size, dtype=torch.float16, device="meta") for size in (shape, shape[1:2]))
    statistics = torch.empty(shape[0], 32, device="meta")
    sizes = (shape[0], shape[1], shape[2] * shape[3], 32)
    given = (x, torch.empty_like(x), statistics, statistics, weight, *sizes, [True] * 3)
    timings = [
        last(lambda: aten.native_group_norm(x, weight, weight, *sizes, 1e-5)),
        last(lambda: aten.native_group_norm_backward(*given)),
    ]
    assert [timing.seconds * 1e6 for timing in timings] == pytest.approx([forward, backward], rel=0.25)


@pytest.mark.parametrize(
    ("op", "shape", "dtype", "microseconds"),
    [
        (aten._softmax_backward_data, (16384, 768), BF16, 59.0),  # of which a product takes 25
        (aten._softmax_backward_data, (4096, 4096), FP32, 137.6),
        (aten._log_softmax_backward_data, (16384, 50304), FP32, 4479.2),  # goes over the gradient twice
    ],
)
def test_the_gradient_of_a_softmax_takes_about_what_an_h100_takes(op, shape, dtype, microseconds):
    x = torch.empty(shape, dtype=dtype, device="meta")
    assert last(lambda: op(x, torch.empty_like(x), -1, dtype)).seconds * 1e6 == pytest.approx(microseconds, rel=0.1)


# Rows of `validation/traces`: h100_kernels_norm, on whose rows the operations are set; h200_kernels_norm and two
# models, whose rows set nothing.
SOFTMAX = [
    (H100, (1_000_000, 32), BF16, 102.4),
    (H100, (65536, 320), FP32, 54.4),
    (H100, (256, 768), BF16, 4.8),  # too few to hide what one row takes
    (H100, (4096, 4096), BF16, 55.7),
    (H100, (3137, 3137), FP32, 41.7),
    (H100, (4096, 4, 49, 49), FP32, 133.4),  # Swin
    (H100, (4096, 3, 64, 64), FP32, 139.3),  # Swin V2
    (H200, (300_000, 64), FP32, 43.9),
    (H200, (50_000, 192), BF16, 19.1),
    (H200, (500, 1024), FP32, 4.3),
    (H200, (12288, 1280), FP32, 34.1),
    (H200, (6000, 2560), BF16, 61.9),
    (H200, (3000, 5120), FP32, 51.1),
]


def microseconds_over_rows(softmax, device, shape, dtype):
    x = torch.empty(shape, dtype=dtype, device="meta")
    return last(lambda: softmax(x, -1, False), device).seconds * 1e6


@pytest.mark.parametrize(("device", "shape", "dtype", "microseconds"), SOFTMAX)
def test_a_softmax_takes_about_what_was_measured(device, shape, dtype, microseconds):
    """A warp for rows of 32 to 2,048 elements, a block for longer ones, each with its own operations."""
    assert microseconds_over_rows(aten._softmax, device, shape, dtype) == pytest.approx(microseconds, rel=0.2)


LOG_SOFTMAX = [
    (H100, (16384, 50304), BF16, 1498.8),  # rows in flight fill half of the L2 cache
    (H100, (16384, 50304), FP32, 4291.0),
    (H100, (16384, 50257), BF16, 1412.3),
    (H100, (8192, 32000), FP32, 1301.6),
    (H100, (4096, 128256), BF16, 1378.6),  # each pass from memory
    (H200, (8192, 50265), BF16, 541.7),
    (H200, (8192, 50265), FP32, 1480.3),
    (H200, (2048, 151936), BF16, 607.2),
]


@pytest.mark.parametrize(("device", "shape", "dtype", "microseconds"), LOG_SOFTMAX)
def test_the_logarithms_of_a_loss_take_about_what_was_measured(device, shape, dtype, microseconds):
    """Blocks of 1,024 threads walk their rows three times."""
    assert microseconds_over_rows(aten._log_softmax, device, shape, dtype) == pytest.approx(microseconds, rel=0.15)


def test_a_logarithm_spares_the_division_of_each_element():
    x = torch.empty(1_000_000, 32, dtype=BF16, device="meta")
    plain, log = (last(lambda op=op: op(x, -1, False)).seconds for op in (aten._softmax, aten._log_softmax))
    assert log < 0.95 * plain


def priced(*rereads, nbytes=2**30):
    regions = (Region(None, nbytes // 2),)
    cost = Cost("norm", NORMALIZATION, ((NORMALIZATION, 0),), regions, regions, "fp32", VectorWork(rereads))
    return price(cost, load_hardware(H100), Switches(False, False, False)).busy.work_seconds


def test_a_kernel_of_few_blocks_takes_its_loops_after_the_one_that_fills_the_device():
    """64 loops of a block's 1024 threads, 265 cycles of the cache's latency each, at 1.98 GHz; then twice as many."""
    blocks = [Reread(2**20, 24, 2**20 // 24, 1024, 0, turns, is_kernel=True) for turns in (64, 128)]
    few, many = (priced(each) - priced() for each in blocks)
    assert many - few == pytest.approx(64 * 265 / 1.98e9, rel=0.01)  # the megabyte lies in the L2 cache
    assert few > 64 * 265 / 1.98e9


def test_a_kernel_of_its_own_reads_anew_what_the_cache_does_not_hold():
    """A gigabyte: no less than at the bandwidth of the datasheet, however many blocks share it."""
    for blocks in (10**4, 10**6):
        again = Reread(2**30, blocks, 2**30 // blocks, 128, is_kernel=True)
        assert priced(again) - priced() > 2**30 / load_hardware(H100).bandwidth_bytes_per_s


@pytest.mark.parametrize(
    ("shape", "dtype", "channels_last", "microseconds"),
    [
        ((128, 64, 112, 112), BF16, False, 237),
        ((128, 64, 112, 112), BF16, True, 255),
        ((128, 256, 56, 56), BF16, True, 188),
        ((128, 512, 28, 28), torch.float16, False, 134),
        ((128, 2048, 7, 7), BF16, False, 162),
        ((128, 2048, 7, 7), FP32, False, 159),
        ((256, 2048, 7, 7), FP32, False, 317),  # after the kernel of training, which is short
        ((128, 512, 28, 28), FP32, True, 174),
        ((8, 64, 56, 56), torch.float16, True, 15),
    ],
)
def test_batch_norm_in_evaluation_takes_about_as_long_as_on_an_h100(shape, dtype, channels_last, microseconds):
    """(h100_kernels_vision and h100_kernels_norm.)"""
    x = torch.empty(shape, dtype=dtype, device="meta")
    x = x.to(memory_format=torch.channels_last if channels_last else torch.contiguous_format)
    one = torch.empty(shape[1], device="meta")
    seconds = last(lambda: torch.nn.functional.batch_norm(x, one, one, one, one)).seconds
    assert seconds * 1e6 == pytest.approx(microseconds, rel=0.25)


def test_no_batch_norm_over_small_planes_is_faster_than_its_blocks_start():
    """1.2 cycles of 1980 MHz a block, of which each plane has one: 262,144 planes take 159 us or more, whatever their
    bytes."""
    one = torch.empty(2048, device="meta")
    for side in (6, 7):
        x = torch.empty(128, 2048, side, side, dtype=BF16, device="meta")
        assert last(lambda x=x: torch.nn.functional.batch_norm(x, one, one, one, one)).seconds > 158e-6
