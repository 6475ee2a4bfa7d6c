"""Scaled matmuls are refused on devices for which torch has no kernel (ScaledBlas.cpp, GroupedBlas.cpp)."""

from __future__ import annotations

import pytest
import torch

from flopmeter import FlopMeter, HardwareError, load_hardware, on_meta

FP8 = {"dtype": torch.float8_e4m3fn, "device": "meta"}


def scaled(scale_a, scale_b):
    return lambda: torch._scaled_mm(
        torch.empty(256, 512, **FP8), torch.empty(384, 512, **FP8).t(), scale_a, scale_b, out_dtype=torch.bfloat16
    )


def scale(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


MX = scaled(*(scale(rows * 512 // 32, dtype=torch.float8_e8m0fnu) for rows in (256, 384)))
BLOCKS = scaled(scale(4, 256).t(), scale(3, 4).t())
ROWS = scaled(scale(256, 1), scale(1, 384))


@pytest.mark.parametrize(
    ("program", "runs", "refused"),
    [
        (MX, ("b200-sxm-180gb", "rtx-5090"), ("h100-sxm5-80gb", "l40s")),
        (BLOCKS, ("h100-sxm5-80gb",), ("b200-sxm-180gb", "l40s")),
        (ROWS, ("b200-sxm-180gb", "h100-sxm5-80gb", "l40s"), ("a100-sxm4-80gb",)),
    ],
    ids=["MX", "blocks of 128", "rows"],
)
def test_a_scaled_product_is_refused_where_torch_has_no_kernel_for_its_scales(program, runs, refused):
    for name in (*runs, *refused):
        with FlopMeter(name) as meter:
            program()
        if name in runs:
            assert meter.report().macs == 256 * 384 * 512
        else:
            with pytest.raises(HardwareError, match=name):
                meter.report()


def test_scaled_grouped_products_are_refused_beside_hopper_and_data_centre_blackwell():
    offsets = on_meta(torch.tensor([64, 256], dtype=torch.int32))
    for name in ("h100-sxm5-80gb", "b200-sxm-180gb", "l40s", "rtx-5090"):
        with FlopMeter(name) as meter:
            torch._scaled_grouped_mm(
                torch.empty(256, 512, **FP8), torch.empty(2, 384, 512, **FP8).transpose(-2, -1), scale(256),
                scale(2, 384), offs=offsets, out_dtype=torch.bfloat16,
            )  # fmt: skip
        if load_hardware(name).compute_capability[0] in (9, 10):
            assert meter.report().macs == 256 * 384 * 512
        else:
            with pytest.raises(HardwareError, match=r"9\.0 and 10\.0"):
                meter.report()
