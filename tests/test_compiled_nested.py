"""A meter inside of another one, or of the device named cuda: what it compiles is its own."""

from __future__ import annotations

import torch

import flopmeter
from flopmeter import FlopMeter


def test_what_is_compiled_first_inside_of_the_inner_meter_is_recorded_there() -> None:
    with FlopMeter("h100-sxm5-80gb"), FlopMeter("h100-sxm5-80gb") as inner:
        torch.compile(lambda x: (x[1:] * 2 + 1).sum())(torch.empty(3, 4, device="meta"))
    (kernel,) = inner.report().kernels
    assert kernel.cost.name == "fused(mul, add, sum)"


def test_subscripts_and_constants_compile_in_a_meter_on_the_device_named_cuda() -> None:
    """Both put functions around torch.tensor."""

    def compute(x: torch.Tensor) -> torch.Tensor:
        return x[1:] * 2 + x[[0, 1]].sum() + torch.tensor(1.0, device=x.device)

    with flopmeter.cuda("h100-sxm5-80gb"), FlopMeter("h100-sxm5-80gb") as meter:
        torch.compile(compute)(torch.randn(3, 4, device="cuda"))
    assert len(meter.report().graphs) == 1
