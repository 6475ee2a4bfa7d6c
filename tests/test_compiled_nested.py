"""A meter inside of another one, or of the device named cuda: what it compiles is its own."""

from __future__ import annotations

import subprocess
import sys

import pytest
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


BOUND_EARLIER = """
import torch
from torch import compile, nn
{before}
from flopmeter import FlopMeter

class Net(nn.Linear):
    def forward(self, x):
        return super().forward(x) + torch.tensor(1.0, device=x.device)

with FlopMeter("h100-sxm5-80gb") as meter:
    compile(Net(4, 4, device="meta"))(torch.empty(4, 4, device="meta"))
print(len(meter.report().graphs))
"""


@pytest.mark.parametrize(
    "before",
    ["", "import torch._dynamo", "import torch._dynamo; torch._dynamo.trace_rules.clear_lru_cache()"],
    ids=["Dynamo not imported", "imported", "tables cleared, as by init_process_group"],
)
def test_a_program_may_know_torch_compile_by_another_name(before: str) -> None:
    """Dynamo then is imported, and makes its tables of torch's functions, while functions stand in for some of them."""
    code = BOUND_EARLIER.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "1\n", done.stderr
