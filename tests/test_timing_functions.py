"""Functions in torch's own kernels beside what an H100 took (torch 2.11, validation/traces)."""

import pytest
import torch
import torch.nn.functional as F

from flopmeter import FlopMeter

aten = torch.ops.aten
ROWS = 2**26  # elements of h100_kernels_pointwise


def microseconds(call, *shape, operands=1, dtype=torch.bfloat16, device="h100-sxm5-80gb"):
    inputs = [torch.empty(shape, dtype=dtype, device="meta") for _ in range(operands)]
    with FlopMeter(device, clocks="burst") as meter:
        call(*inputs)
    return 1e6 * meter.report().kernel_seconds


@pytest.mark.parametrize(
    ("call", "measured"),
    [
        (F.gelu, 96.7),
        (lambda x: F.gelu(x, approximate="tanh"), 89.7),
        (F.silu, 89.2),
        (torch.exp, 90.5),
        (lambda x: x * 2, 88.2),
    ],
    ids=["gelu", "gelu by tanh", "silu", "exp", "product"],
)
def test_a_function_takes_what_an_h100_took(call, measured):
    assert microseconds(call, ROWS) == pytest.approx(measured, rel=0.07)


def test_the_gradient_of_a_gelu_takes_what_an_h100_took():
    """37.7 million elements in 77.6 µs (h100_bert_train): 68 by its bytes alone."""
    took = microseconds(aten.gelu_backward, 32, 384, 3072, operands=2)
    assert took == pytest.approx(77.6, rel=0.07)


def test_sms_with_fewer_lanes_start_fewer_instructions_of_functions():
    """122 µs in fp16 on an A100, 92 by its bytes alone (phi-2's layer in github.com/microsoft/vidur)."""
    took = microseconds(F.gelu, 4096, 10240, dtype=torch.float16, device="a100-sxm4-80gb")
    assert took == pytest.approx(122, rel=0.07)
