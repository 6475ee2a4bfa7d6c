"""The arithmetic of 'Making Deep Learning Go Brrrr From First Principles' (Horace He, 2022), claim by claim."""

import pytest
import torch

from flopmeter import FlopMeter, load_hardware

A100 = "a100-sxm4-40gb"


def meter(program, hardware=A100):
    with FlopMeter(hardware) as metered:
        program()
    return metered.report()


def fp32(*shape):
    return torch.empty(*shape, device="meta")


def test_an_a100_does_19_5_teraflops_without_tensor_cores_and_16_times_that_with():
    device = load_hardware(A100)
    assert device.vector_peak("fp32").flop_per_s == 19.5e12
    assert device.contraction_peak("fp16").flop_per_s / 19.5e12 == pytest.approx(16)


def test_the_ridge_point_of_an_a100_lies_at_about_200_flop_per_byte():
    assert load_hardware(A100).ridge_point("fp16") == pytest.approx(312 / 1.555, rel=1e-6)


def test_a_unary_fp32_op_does_an_eighth_of_a_flop_per_byte():
    report = meter(lambda: fp32(1 << 20).cos())
    assert report.flops / (report.bytes_read + report.bytes_written) == 0.125


def test_two_unary_ops_move_four_times_their_tensor():
    n = 1 << 20
    report = meter(lambda: fp32(n).cos().cos())
    assert report.bytes_read + report.bytes_written == 4 * 4 * n


def test_a_multiply_alone_reaches_half_of_the_multiply_add_rate():
    """9.75 of 19.5 TFLOP/s: so 2^30 multiplies take at least 2^30 / 9.75e12 seconds to compute."""
    report = meter(lambda: fp32(1 << 30).mul_(2.0))
    (timing,) = report.timings
    assert timing.compute_seconds >= 2**30 / 9.75e12


def test_a_big_product_is_compute_bound_and_a_big_activation_memory_bound():
    half = torch.empty(8192, 8192, dtype=torch.float16, device="meta")
    assert meter(lambda: half @ half).regime == "compute"
    assert meter(lambda: half.relu()).regime == "memory"


def test_many_small_ops_are_overhead_bound():
    def small_ops():
        x = fp32(16)
        for _ in range(100):
            x = x + 1

    assert meter(small_ops).regime == "overhead"


def test_doubling_the_batch_of_an_overhead_bound_program_takes_no_longer():
    def program(batch):
        x = torch.empty(batch, 256, dtype=torch.float16, device="meta")
        for _ in range(50):
            x = x.relu()

    once, twice = (meter(lambda size=size: program(size)).seconds for size in (4, 8))
    assert twice < 1.1 * once


def test_a_thousand_fold_lower_rate_of_flops_is_what_memory_bound_ops_run_at():
    """Normalization and point-wise ops ran at 250x and 700x fewer FLOP/s than contractions."""
    x = torch.empty(4096, 1024, dtype=torch.float16, device="meta")
    weight = torch.empty(1024, 4096, dtype=torch.float16, device="meta")
    product, activation = meter(lambda: x @ weight), meter(lambda: torch.add(x, x))
    assert (product.flops / product.seconds) / (activation.flops / activation.seconds) > 200
