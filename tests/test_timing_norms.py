"""Times of norms against recorded measurements and hand arithmetic.

Measured: microseconds of all kernels of a call, H100 SXM, torch 2.11, 2026-11 (validation/traces/h100_kernels_norm).
"""

import pytest
import torch

from flopmeter import FlopMeter, load_hardware
from flopmeter.records import NORMALIZATION, Cost, Region, Reread, Switches, VectorWork
from flopmeter.timing.kernels import price

aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32
H100 = "h100-sxm5-80gb"


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
    ("rows", "columns", "dtype", "microseconds"),
    [
        (16384, 768, BF16, 112.3),
        (16384, 768, FP32, 136.2),
        (32768, 128, BF16, 124.1),  # 4 blocks sum over the rows
        (65536, 320, BF16, 345.4),  # 10 blocks
        (1_000_000, 32, BF16, 877.1),  # the rows are split among blocks
        (8192, 1024, BF16, 64.1),
        (4096, 4096, BF16, 86.3),
        (4096, 4096, FP32, 168.3),
    ],
)
def test_the_gradients_of_a_layer_norm_take_about_what_an_h100_takes(rows, columns, dtype, microseconds):
    timing = last(lambda: layer_norm_backward(rows, columns, dtype))
    assert timing.seconds * 1e6 == pytest.approx(microseconds, rel=0.2)


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
