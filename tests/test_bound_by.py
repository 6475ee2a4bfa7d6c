"""What "bound by" may say: no product or attention of few FLOPs for its bytes is bound by compute."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from flopmeter import FlopMeter, load_hardware
from flopmeter.models import BUILTINS, training_step

BF16 = {"dtype": torch.bfloat16, "device": "meta"}
DEVICES = ("a100-sxm4-80gb", "h100-sxm5-80gb", "l40s", "b200-sxm-180gb", "mi300x")


def decoding(batch=8, tokens=4096, heads=32):
    q = torch.empty(batch, heads, 1, 128, **BF16)
    k, v = (torch.empty(batch, 8, tokens, 128, **BF16) for _ in range(2))
    functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def thin_products():
    for rows in (1, 4, 16, 33, 64, 128):
        functional.linear(torch.empty(rows, 1024, **BF16), torch.empty(256, 1024, **BF16))
        functional.linear(torch.empty(rows, 8192, **BF16), torch.empty(8192, 8192, **BF16))
    torch.empty(512, 64, 64, **BF16) @ torch.empty(512, 64, 8, **BF16)


def convolutions():
    image = torch.empty(16, 64, 56, 56, **BF16)
    functional.conv2d(image, torch.empty(64, 1, 3, 3, **BF16), groups=64, padding=1)
    functional.conv2d(image, torch.empty(64, 2, 3, 3, **BF16), groups=32, padding=1)
    functional.conv2d(torch.empty(16, 3, 224, 224, **BF16), torch.empty(64, 3, 7, 7, **BF16), stride=2)


def training():
    model, inputs = BUILTINS["gpt2-124m"](batch=1, seq=128)
    training_step(model, inputs, torch.optim.AdamW(model.parameters()))


@pytest.mark.parametrize("tokens", [256, 4096])
@pytest.mark.parametrize("device", DEVICES)
def test_decoding_attention_is_bound_by_the_memory_that_holds_its_cache(device, tokens):
    with FlopMeter(device) as meter:
        decoding(tokens=tokens)
    (row,) = (row for row in meter.report().rows() if row.name == "attention (fused)")
    assert row.regime == "memory"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("program", [decoding, thin_products, convolutions, training], ids=lambda run: run.__name__)
def test_no_product_of_few_flops_for_its_bytes_is_bound_by_compute(program, device):
    hardware = load_hardware(device)
    with FlopMeter(device) as meter:
        program()
    report = meter.report()
    bytes_per_s = hardware.bandwidth_bytes_per_s
    for kernel, timing in zip(report.kernels, report.timings, strict=True):
        cost = kernel.cost
        if not cost.macs or timing.regime != "compute":
            continue
        peak = hardware.contraction_peak(report.switches.matmul_dtype(cost)).flop_per_s
        is_below = cost.flops / cost.bytes < peak / bytes_per_s / 2 and cost.bytes / bytes_per_s > cost.flops / peak
        assert not is_below, cost.name


def test_large_products_and_prefill_are_still_bound_by_compute():
    q = torch.empty(4, 32, 4096, 128, **BF16)
    for device in DEVICES:
        with FlopMeter(device) as meter:
            functional.linear(torch.empty(8192, 8192, **BF16), torch.empty(8192, 8192, **BF16))
            functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        assert {timing.regime for timing in meter.report().timings} == {"compute"}


def test_a_function_that_takes_longer_than_its_bytes_is_compute_and_the_report_says_why():
    """GELU in fp16 on an A100: measured 122 µs for 41 million elements, of which the bytes take 92 (vidur)."""
    x, said = torch.empty(41_000_000, dtype=torch.float16, device="meta"), "functions such as exp and erf are compute"
    for function, regime in ((functional.gelu, "compute"), (functional.relu, "memory")):
        with FlopMeter("a100-sxm4-80gb") as meter:
            function(x)
        report = meter.report()
        assert report.timings[0].regime == regime
        assert (said in str(report)) is (regime == "compute")


def test_a_row_of_flops_inside_other_kernels_is_bound_by_nothing_and_one_kernel_is_called_so():
    """The bias of a linear layer is element-wise work, inside the kernel of the product."""
    with FlopMeter("l4") as meter:
        functional.linear(*(torch.empty(size, device="meta") for size in ((2, 8), (8, 8), (8,))))
    report = meter.report()
    assert [row[0] for row in report.rows() if not row.calls] == ["element-wise"]
    line = next(line for line in str(report).splitlines() if "element-wise" in line)
    assert line.split()[-1] == "–"
    assert "the only kernel in the whole program" in str(report)
