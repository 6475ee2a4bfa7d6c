"""How kernels are priced on a CPU: by hand, and by what must hold on any of them."""

import pytest
import torch
from torch.nn import functional as F

from flopmeter import FlopMeter, load_hardware

# 1 TFLOP/s, 100 GB/s from memory, 1000 GB/s from a cache of 1 MiB, nothing lost anywhere.
CPU = load_hardware("cpu-xeon-8480plus").replace(
    vector_tflop_per_s={"fp32": 1, "bf16": 2, "fp64": None},
    matrix_tflop_per_s={"bf16": None, "int8": None},
    achieved={"matrix": None, "vector": 1, "memory": 1},
    memory_bandwidth_gb_per_s=100,
    l2_cache_mb=1,
    l2_bandwidth_gb_per_s=1000,
    check=None,
    unverified=[],
)


def priced(program, hardware=CPU):
    """The one kernel that the program runs."""
    with torch.inference_mode(), FlopMeter(hardware, as_cuda=False) as meter:
        program()
    (timing,) = meter.report().timings
    return timing


def meta(*shape):
    return torch.empty(*shape, device="meta")


def test_a_product_takes_its_arithmetic_and_after_it_the_packing_of_its_operands():
    """At 1 TFLOP/s, and 4 bytes for each element of the three matrices at 100 GB/s."""
    timing = priced(lambda: meta(512, 1024) @ meta(1024, 2048))
    assert timing.compute_seconds == pytest.approx(2 * 512 * 1024 * 2048 / 1e12)
    assert timing.memory_seconds == pytest.approx((512 * 1024 + 1024 * 2048 + 512 * 2048) * 4 / 100e9)
    assert timing.work_seconds == pytest.approx(timing.compute_seconds + timing.memory_seconds)


def test_a_small_product_loses_nothing_to_tiles():
    """Five rows take a fifth of 25, whatever a GPU's tiles would make of them."""
    few, many = (priced(lambda rows=rows: meta(rows, 4096) @ meta(4096, 4096)) for rows in (5, 25))
    assert many.compute_seconds == pytest.approx(5 * few.compute_seconds)


def test_activations_that_fit_the_cache_are_read_from_there():
    """8 bytes an element: 1 MB comes from the cache at ten times the speed, 2 MB do not fit."""
    inside, outside = priced(lambda: meta(125_000) + 1), priced(lambda: meta(250_000) + 1)
    assert inside.memory_seconds == pytest.approx(1e6 / 1000e9)
    assert outside.memory_seconds == pytest.approx(2e6 / 100e9)


def test_weights_come_from_memory_even_where_they_would_fit():
    timing = priced(lambda: meta(16, 128) @ meta(128, 128))
    assert timing.memory_seconds == pytest.approx((16 * 128 + 128 * 128 + 16 * 128) * 4 / 100e9)


def test_an_exponential_is_twenty_operations_of_vector_units():
    """In the cache both are bound by arithmetic: 0.5 TFLOP/s without fused multiply-adds."""
    assert priced(lambda: meta(100_000).exp()).compute_seconds == pytest.approx(20 * 100_000 / 0.5e12)
    assert priced(lambda: meta(100_000) + 1).compute_seconds == pytest.approx(100_000 / 0.5e12)


def test_vector_units_that_reach_four_fifths_of_their_peak_take_five_fourths_of_the_time():
    slow = CPU.replace(achieved={"matrix": None, "vector": 0.8, "memory": 1})
    assert priced(lambda: meta(100_000) + 1, slow).compute_seconds == pytest.approx(100_000 / 0.4e12)


def test_a_convolution_reorders_its_tensors():
    """[1, 64, 56, 56] * [64, 64, 3, 3]: image, filters and result are moved three times."""
    timing = priced(lambda: F.conv2d(meta(1, 64, 56, 56), meta(64, 64, 3, 3), padding=1))
    assert timing.compute_seconds == pytest.approx(2 * 64 * 64 * 9 * 56 * 56 / 1e12)
    assert timing.memory_seconds == pytest.approx(3 * (2 * 64 * 56 * 56 + 64 * 64 * 9) * 4 / 100e9)


def test_what_just_fills_the_cache_is_read_from_there():
    timing = priced(lambda: meta(2**17) + 1)
    assert timing.memory_seconds == pytest.approx(2**20 / 1000e9)
