"""Advice against the program that follows it, and what it says of types against the vendors' tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter, load_hardware
from flopmeter.report.advice.remedies import _narrow_type, type_of_others

H100 = "h100-sxm5-80gb"
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


# --- optimizers ------------------------------------------------------------------------------------------------------


def updated(kind: str, **options: Any) -> Any:
    """The report of a step that updates 12 weights of two sizes, the optimizer's states being there."""
    with FlopMeter(H100):
        weights = [nn.Parameter(torch.empty(2048, 64 * (1 + place % 2), device="meta")) for place in range(12)]
        optimizer = getattr(torch.optim, kind)(weights, lr=1e-3, **options)
    for _ in range(2):
        with FlopMeter(H100) as meter:
            for weight in weights:
                weight.grad = torch.empty_like(weight)
            optimizer.step()
    return meter.report()


@pytest.mark.parametrize(
    ("kind", "options"),
    [("SGD", {"foreach": False}), ("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {"foreach": False})],
    ids=["SGD in a loop", "momentum", "Adam", "AdamW in a loop"],
)
def test_a_fused_optimizer_is_priced_as_the_step_that_has_it(kind, options):
    """But for a kernel that counts Adam's steps on the device."""
    plain, fused = updated(kind, **options), updated(kind, **{**options, "foreach": None}, fused=True)
    (told,) = (each for each in plain.advice if "fused=True" in each.remedy)
    assert 0 <= told.gain_seconds - (plain.seconds - fused.seconds) < (6e-6 if "Adam" in kind else 1e-9)
    assert told.why.startswith(f"{len(plain.kernels)} kernels read")
    assert not any("fused=True" in each.remedy for each in fused.advice)


@pytest.mark.parametrize(("kind", "options"), [("Rprop", {}), ("Adagrad", {}), ("Adam", {"amsgrad": True})])
def test_states_that_are_not_those_of_a_fused_kernel_here_are_not_priced_as_if_they_were(kind, options):
    """Rprop takes signs, Adagrad has one state and a root, amsgrad three states."""
    assert not any("fused=True" in each.remedy for each in updated(kind, **options).advice)


# --- types -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        (H100, BF16), ("a100-sxm4-80gb", BF16), ("mi300x", BF16), ("rtx-3090", BF16),
        ("v100-sxm2-32gb", FP16), ("t4", FP16),  # matrix units in fp16 alone
        ("p100-pcie-16gb", FP16),  # none at all
    ],
)  # fmt: skip
def test_the_narrow_type_is_one_for_which_the_device_has_matrix_units(device, dtype):
    assert _narrow_type(load_hardware(device)) is dtype


def products(**columns: int) -> Any:
    """The report of products of as many columns in each type."""
    types = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
    with FlopMeter(H100) as meter:
        for name, wide in columns.items():
            make = {"dtype": types[name], "device": "meta"}
            torch.empty(64, 64, **make) @ torch.empty(64, wide, **make)
    return meter.report()


@pytest.mark.parametrize(
    ("columns", "others"),
    [
        ({"bf16": 9, "fp32": 91}, None),
        ({"bf16": 10, "fp32": 90}, BF16),  # a tenth of all
        ({"fp16": 60, "fp32": 40}, FP16),
        ({"bf16": 30, "fp16": 40, "fp32": 30}, FP16),
        ({"bf16": 40, "fp16": 30, "fp32": 30}, BF16),
        ({"fp32": 100}, None),
    ],
)
def test_a_program_is_narrow_if_a_tenth_of_its_products_are(columns, others):
    assert type_of_others(products(**columns)) is others
