"""Operators of torch 2.13 to 2.15, by hand. One that this torch lacks is skipped."""

from __future__ import annotations

import pytest
import torch

from flopmeter import FlopMeter
from flopmeter.costs import kernels_of
from flopmeter.records import Cost

aten = torch.ops.aten


def cost(program) -> Cost:
    """Of the last kernel."""
    with FlopMeter("h100-sxm5-80gb", strict=True) as meter:
        program()
    return kernels_of(meter.trace)[-1].cost


def needs(name: str):
    return pytest.mark.skipif(not hasattr(aten, name), reason=f"this torch has no {name}")


def fp8(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.float8_e4m3fn, device="meta")


def one_scale() -> torch.Tensor:
    return torch.empty((), device="meta")


def test_a_scaled_product_into_a_given_tensor_costs_what_one_into_a_new_tensor_does():
    out = torch.empty(64, 32, dtype=torch.bfloat16, device="meta")
    args = fp8(64, 128), fp8(32, 128).t()

    def into() -> None:
        assert torch._scaled_mm(*args, one_scale(), one_scale(), out_dtype=torch.bfloat16, out=out) is out

    given = cost(into)
    new = cost(lambda: torch._scaled_mm(*args, one_scale(), one_scale(), out_dtype=torch.bfloat16))
    assert given.flops == new.flops == 2 * 64 * 128 * 32 + 64 * 32
    assert (given.bytes_read, given.bytes_written) == (new.bytes_read, new.bytes_written)


@needs("_scaled_addmm")
@pytest.mark.parametrize(
    ("alpha", "beta", "per_output"), [(1, 2, 1 + 2), (3, 2, 1 + 1 + 2), (3, 1, 1 + 1 + 1), (3, 0, 2)]
)
def test_a_scaled_addmm_multiplies_scales_and_adds(alpha: int, beta: int, per_output: int):
    """The scale, alpha, and beta times c, added: factors of 1 are none."""
    c = torch.empty(64, 32, dtype=torch.bfloat16, device="meta")
    scales = [one_scale()], [0], [0], [one_scale()], [0], [0]
    made = cost(lambda: aten._scaled_addmm(c, fp8(64, 128), fp8(32, 128).t(), *scales, beta=beta, alpha=alpha))
    assert made.flops == 2 * 64 * 128 * 32 + per_output * 64 * 32
    assert made.bytes_read == 64 * 128 + 32 * 128 + 2 * 4 + (2 * 64 * 32 if beta else 0)
    assert made.dtype == "fp8"


@needs("_philox_normal_")
def test_random_numbers_from_a_key_read_the_key_alone():
    key, out = torch.empty(2, dtype=torch.uint64, device="meta"), torch.empty(1000, device="meta")
    made = cost(lambda: aten._philox_normal_(out, key))
    assert (made.op_class, made.flops, made.bytes_read, made.bytes_written) == ("random", 0, 16, 4000)


@needs("_philox_key_split")
def test_splitting_a_key_writes_keys():
    made = cost(lambda: aten._philox_key_split(torch.empty(2, dtype=torch.uint64, device="meta"), 4))
    assert (made.op_class, made.bytes_read, made.bytes_written) == ("random", 16, 64)


@needs("_philox_key_fold_in")
def test_folding_a_number_into_a_key_writes_a_key():
    made = cost(lambda: aten._philox_key_fold_in(torch.empty(2, dtype=torch.uint64, device="meta"), 4))
    assert (made.op_class, made.bytes_read, made.bytes_written) == ("random", 16, 16)


@needs("_upsample_lanczos2d_aa_backward")
def test_its_gradient_takes_as_many():
    gradient = torch.empty(1, 3, 32, 32, device="meta")
    made = cost(lambda: aten._upsample_lanczos2d_aa_backward(gradient, [32, 32], [1, 3, 64, 64], False))
    assert made.flops == 3 * 32 * 32 * 2 * (2 * 3 * 2) ** 2


@needs("_upsample_lanczos2d_aa")
def test_lanczos_takes_three_inputs_on_either_side_stretched_by_the_reduction():
    x = torch.empty(1, 3, 64, 64, device="meta")
    assert cost(lambda: aten._upsample_lanczos2d_aa(x, [32, 32], False)).flops == 3 * 32 * 32 * 2 * (2 * 3 * 2) ** 2
