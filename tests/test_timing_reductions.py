"""Sums, scans, extrema and losses against profiles of an H100 (torch 2.11, 2026-11: validation/traces)."""

import pytest
import torch
import torch.nn.functional as F
from costs_support import meta

from flopmeter import FlopMeter, load_hardware
from flopmeter.records import ThreadGrid
from flopmeter.timing.grids import blocks_of_result, steps_of

BF16, FP32, I64 = torch.bfloat16, torch.float32, torch.int64
H100 = "h100-sxm5-80gb"


def last(program, device=H100):
    """The last kernel, and its timing."""
    with FlopMeter(device) as meter:
        program()
    report = meter.report()
    return report.kernels[-1], report.timings[-1]


# Rows, columns, what is added up, and how many blocks shared a result.
SHARED = [
    (8192, 8192, 0, 33), (8192, 8192, 1, 1), (8192, 8192, None, 528), (1024, 4096, 0, 16), (16384, 768, 0, 256),
    (16384, 3072, 0, 88), (4096, 14336, 0, 19), (512, 512, 0, 1), (2048, 512, 0, 32), (4, 1_000_000, 1, 123),
    (100_000, 256, 0, 1056), (200_704, 128, 0, 2112), (1_000_000, 4, 1, 1), (4096, 128_256, None, 4008),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "columns", "dim", "blocks"), SHARED)
def test_as_many_blocks_share_a_sum_as_in_a_profile(rows, columns, dim, blocks):
    x = meta(rows, columns)
    kernel, _ = last(lambda: x.sum() if dim is None else x.sum(dim))
    assert blocks_of_result(kernel.cost.work.grid, load_hardware(H100)) == blocks


# Microseconds. Sums and extrema with the L2 cache emptied before.
MEASURED = {
    "sum of columns": (lambda: meta(16384, 768, dtype=BF16).sum(0), 32.5),
    "sum of columns in fp32": (lambda: meta(16384, 768).sum(0), 36.5),
    "sum of many columns": (lambda: meta(4096, 14336, dtype=BF16).sum(0), 48.6),
    "sum that many blocks share": (lambda: meta(200_704, 128, dtype=BF16).sum(0), 142),
    "sum of few rows by few blocks": (lambda: meta(512, 512).sum(0), 18.7),
    "mean of 49": (lambda: meta(256, 2048, 49, dtype=BF16).mean(2), 122.6),
    "sum of four": (lambda: meta(1_000_000, 4).sum(1), 27.7),
    "maxima of rows": (lambda: meta(8192, 8192, dtype=BF16).amax(1), 78.7),
    "maxima of few columns": (lambda: meta(512, 512, dtype=BF16).amax(0), 36.3),
    "maxima of few columns, fp32": (lambda: meta(512, 512).amax(0), 14.9),
    "maxima of columns": (lambda: meta(4096, 14336, dtype=BF16).amax(0), 70.4),
    "maxima of columns of images": (lambda: meta(64, 197, 768, dtype=BF16).amax(1), 17.9),
    "maximum of all": (lambda: meta(100_000_000, dtype=BF16).amax(), 89.0),
    "maxima of 49": (lambda: meta(256, 2048, 49, dtype=BF16).amax(2), 167.3),
    "argmax": (lambda: meta(8192, 8192, dtype=BF16).argmax(1), 122.1),
    "argmax of a vocabulary": (lambda: meta(4096, 128_256, dtype=BF16).argmax(1), 526),
    "max with indices": (lambda: meta(8192, 8192, dtype=BF16).max(1), 107.7),
    "variance": (lambda: meta(8192, 8192).var(1), 136),
    "scan of rows": (lambda: meta(8192, 8192).cumsum(1), 413.6),
    "scan of columns": (lambda: meta(8192, 8192).cumsum(0), 3112),
    "scan of few columns": (lambda: meta(64, 1024).cumsum(0), 25.6),
    "loss of GPT-2": (lambda: _loss(16384, 50304), 20.4),
    "loss of a graph": (lambda: _loss(100_000, 40), 78.1),
    "loss of a language model of words": (lambda: _loss(700, 33278), 22.2),
    "loss of images": (lambda: _loss(128, 1000), 4.3),
    "gradient of the loss of a graph": (lambda: _loss_gradient(100_000, 40), 100.2),
    "gradient of the loss of GPT-2": (lambda: _loss_gradient(16384, 50304), 18.9),
}


def _loss(rows, classes):
    return F.nll_loss(meta(rows, classes), meta(rows, dtype=I64))


def _loss_gradient(rows, classes):
    x, target, one = meta(rows, classes), meta(rows, dtype=I64), meta()
    torch.ops.aten.nll_loss_backward(one, x, target, None, 1, -100, one)


@pytest.mark.parametrize("name", MEASURED)
def test_reductions_take_as_long_as_on_an_h100(name):
    """Within 30 % (a random access to a table of gigabytes also misses the cache of page addresses: 40 %)."""
    program, microseconds = MEASURED[name]
    ratio = 1e6 * last(program)[1].seconds / microseconds
    assert 0.62 < ratio < 1.3, ratio


@pytest.mark.parametrize("device", [H100, "a100-sxm4-40gb", "rtx-4090", "mi300x", "v100-sxm2-16gb", "tpu-v4"])
@pytest.mark.parametrize("program", [_loss, _loss_gradient, lambda rows, width: meta(rows, width).cumsum(0)])
def test_more_rows_never_make_a_loss_or_a_scan_faster(device, program):
    sizes = (32, 64, 128, 256, 4096, 16384, 65536)
    times = [last(lambda rows=rows: program(rows, 512), device)[1].seconds for rows in sizes]
    assert times == sorted(times)


def test_what_has_no_multiprocessors_walks_in_no_steps():
    """A TPU has one or two cores, with no threads that would wait."""
    _, timing = last(lambda: meta(65536, 512).sum(1), "tpu-v4")
    assert timing.seconds < 4 * 65536 * 512 / 1.2e12 / 0.7


def walked(blocks, threads, device=H100, **options):
    return steps_of(ThreadGrid(blocks, threads, options.pop("steps", 8), **options), 0.0, load_hardware(device))


@pytest.mark.parametrize(("threads", "held"), [(256, 8), (1024, 2), (32, 32)])
def test_blocks_that_a_device_holds_at_once_take_as_long_as_one_and_others_wait(threads, held):
    """An SM of an H100 holds 2048 threads and 32 blocks (CUDA C++ Programming Guide, table of compute capabilities)."""
    one, all_held, twice = (walked(blocks, threads).seconds for blocks in (1, 132 * held, 2 * 132 * held))
    assert one == all_held > 0
    assert twice == pytest.approx(2 * one)


def test_a_thread_that_asks_for_four_inputs_waits_once_for_up_to_four():
    nine, twelve, thirteen = (walked(1, 256, steps=steps, at_a_time=4).seconds for steps in (9, 12, 13))
    assert nine == twelve == pytest.approx(thirteen * 3 / 4)


def test_a_grid_fills_no_more_than_the_device():
    """132 SMs, each with 128 lanes that start an instruction in each cycle, which takes 4 of them."""
    quarter, half, many = (walked(blocks, 128) for blocks in (33, 66, 10**5))
    assert (quarter.busy_sms, half.busy_sms, many.busy_sms) == (0.25, 0.5, 1.0)
    assert half.busy == 2 * quarter.busy == 66 * 128 / (132 * 128 * 4)
    assert many.busy == 1.0


@pytest.mark.parametrize("device", [H100, "mi300x"])
def test_blocks_that_share_a_result_are_joined_by_one(device):
    """So many of its threads take one part each at a time. On AMD no more blocks share a result than there are compute
    units (`setReduceConfig` in Reduce.cuh, for ROCm)."""
    alone, few, many = (walked(1, 256, device, steps=10**7, joiners=joiners) for joiners in (0, 32, 256))
    assert alone.last_seconds == 0 < many.last_seconds < few.last_seconds
    assert many.seconds < alone.seconds / 100
    three, thirty_two = (walked(1, 256, device, steps=steps, joiners=32) for steps in (40, 32 * 16))
    assert three.last_seconds == thirty_two.last_seconds
    shared = blocks_of_result(ThreadGrid(1, 256, 10**7, joiners=32), load_hardware(device))
    assert shared > 10**4 if device == H100 else shared == 304
    assert blocks_of_result(ThreadGrid(1, 256, 40, joiners=32), load_hardware(device)) == 3  # 16 inputs for each


# Microseconds of bf16 sums of columns by devices, with as many blocks as the registers of all SMs hold, and more.
IN_WAVES = [
    (H100, 12288, 768, 23.0), (H100, 8192, 1024, 18.6), (H100, 3136, 3072, 14.3), (H100, 3992, 3072, 19.6),
    (H100, 12544, 2048, 35.1), (H100, 16384, 2304, 46.2), ("h200-sxm-141gb", 8000, 5120, 33.4),
    ("h200-sxm-141gb", 16384, 2304, 37.8),
]  # fmt: skip


@pytest.mark.parametrize(("device", "rows", "columns", "microseconds"), IN_WAVES)
def test_sums_of_columns_take_about_as_long_as_in_profiles_of_programs(device, rows, columns, microseconds):
    _, timing = last(lambda: meta(rows, columns, dtype=BF16).sum(0), device)
    assert timing.seconds * 1e6 == pytest.approx(microseconds, rel=0.15)


def test_blocks_of_many_registers_run_in_more_waves():
    """54 registers are given as 56: 65,536 of an SM are enough for nine blocks of 128 threads, where its 2,048 threads
    would be sixteen. Each wave of blocks that share a result ends with one more exchange."""
    nine = 132 * 9 // 4
    one, two = (walked(4, 128, steps=16 * blocks, joiners=4, registers=54) for blocks in (nine, nine + 1))
    assert two.seconds == 2 * one.seconds
    assert two.last_seconds > one.last_seconds + 2e-6
    few = [walked(4, 128, steps=16 * blocks, joiners=4, registers=32) for blocks in (nine, nine + 1)]
    assert few[0].seconds == few[1].seconds == one.seconds


def test_the_gradient_of_a_convolutions_bias_takes_as_long_as_the_sum_that_it_is():
    """Of 256 images of 672 channels an H100 takes 6.1 us for it (mobilenet_train), where reading them takes 0.1."""
    images, filters = meta(256, 168, 1, 1, dtype=BF16), meta(672, 168, 1, 1, dtype=BF16)
    bias = meta(672, dtype=BF16).requires_grad_()
    with FlopMeter(H100):
        out = F.conv2d(images, filters, bias)
    _, of_bias = last(lambda: out.backward(torch.empty_like(out)))
    _, of_sum = last(lambda: torch.empty_like(out).sum((0, 2, 3)))
    assert of_bias.seconds == of_sum.seconds == pytest.approx(6.1e-6, rel=0.35)


def test_a_warp_has_one_of_the_four_schedulers_of_an_sm():
    """However many of its instructions do not wait for each other ('NVIDIA H100 Tensor Core GPU Architecture')."""
    sms = load_hardware(H100).sm_count
    busy = [walked(sms, 32 * warps, chains=32, operations=100).busy for warps in (1, 2, 4, 8)]
    assert busy == [0.25, 0.5, 1.0, 1.0]
