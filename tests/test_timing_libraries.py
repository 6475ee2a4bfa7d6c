"""Kernels of libraries by name, and switches of torch, by what the device's own rates and other kernels say."""

from __future__ import annotations

import pytest
import torch

from flopmeter import FlopMeter, load_hardware
from flopmeter.records import VectorWork
from flopmeter.timing.gemm_kernels import NamedKernel, gemm_kernels, legacy_mma_share
from flopmeter.timing.kernels import price

HALF, BF16 = torch.float16, torch.bfloat16
MMA_ONLY = ("a100-sxm4-80gb", "rtx-4090", "rtx-5090")
AMPERE = NamedKernel(has_ampere_instructions=True)


def metered(program, device):
    with torch.inference_mode(), FlopMeter(device) as meter:
        program()
    report = meter.report()
    (cost,) = [kernel.cost for kernel in report.kernels if not isinstance(kernel.cost.work, VectorWork)]
    return cost, meter.trace.switches


def product(m, n, k, dtype=HALF, device="a100-sxm4-80gb"):
    a, b = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((m, k), (k, n)))
    return metered(lambda: a @ b, device)


@pytest.fixture
def switch():
    """`torch.backends.cuda.matmul.allow_fp16_accumulation`, as it was."""
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    yield
    torch.backends.cuda.matmul.allow_fp16_accumulation = before


@pytest.mark.usefixtures("switch")
@pytest.mark.parametrize(("device", "factor"), [("rtx-4090", 2), ("rtx-3090", 2), ("a100-sxm4-80gb", 1)])
@pytest.mark.parametrize("kind", ["product", "convolution"])
def test_sums_in_fp16_halve_the_time_on_geforce_and_nowhere_else(device, factor, kind):
    """At their peaks: 330 TFLOP/s beside 165 on an RTX 4090."""
    hardware, seconds = load_hardware(device), []
    x = torch.empty(64, 512, 56, 56, dtype=HALF, device="meta").to(memory_format=torch.channels_last)
    filters = torch.empty(512, 512, 3, 3, dtype=HALF, device="meta").to(memory_format=torch.channels_last)
    for allowed in (False, True):
        torch.backends.cuda.matmul.allow_fp16_accumulation = allowed
        if kind == "product":
            cost, switches = product(8192, 8192, 8192, device=device)
        else:
            cost, switches = metered(lambda: torch.nn.functional.conv2d(x, filters, padding=1), device)
        seconds.append(price(cost, hardware, switches).busy.compute_seconds)
    wide, narrow = seconds
    assert wide / narrow == pytest.approx(factor, rel=0.25)
    assert wide >= narrow


@pytest.mark.parametrize("device", MMA_ONLY)
@pytest.mark.parametrize("sizes", [(4096, 4096, 4096), (17, 4096, 8192), (777, 333, 4096)])
def test_a_kernel_of_unknown_name_is_the_fastest_of_those_that_the_library_has(device, sizes):
    hardware = load_hardware(device)
    cost, switches = product(*sizes, dtype=BF16, device=device)
    tiles = gemm_kernels(hardware, hardware.contraction_peak("bf16")).tiles
    by_tile = {tile: price(cost, hardware, switches, ran=NamedKernel(tile=tile)).busy.seconds for tile in tiles}
    assert min(by_tile.values()) == pytest.approx(price(cost, hardware, switches).busy.seconds)
    assert max(by_tile.values()) > min(by_tile.values())


def test_a_tile_below_all_that_were_measured_tells_nothing():
    hardware = load_hardware("a100-sxm4-80gb")
    cost, switches = product(777, 333, 4096, dtype=BF16)
    unnamed, tiny, least = (
        price(cost, hardware, switches, ran=ran).busy
        for ran in (NamedKernel(), NamedKernel(tile=(32, 64)), NamedKernel(tile=(64, 64)))
    )
    assert tiny == unnamed != least


@pytest.mark.parametrize("device", ["h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm-180gb"])
def test_a_kernel_with_amperes_instructions_reaches_their_share_of_a_newer_device(device):
    """A product that fills the device, whose time is its arithmetic."""
    hardware = load_hardware(device)
    cost, switches = product(16384, 16384, 16384, dtype=BF16, device=device)
    share, peak = legacy_mma_share(hardware), hardware.contraction_peak("bf16")
    own, old = (price(cost, hardware, switches, ran=ran).busy.compute_seconds for ran in (NamedKernel(), AMPERE))
    assert old > own
    assert 2 * 16384**3 / old == pytest.approx(share * peak.sustained_flop_per_s, rel=0.1)


@pytest.mark.parametrize("device", MMA_ONLY)
def test_amperes_instructions_are_the_only_ones_elsewhere(device):
    hardware = load_hardware(device)
    cost, switches = product(777, 333, 4096, dtype=BF16, device=device)
    assert price(cost, hardware, switches, ran=AMPERE) == price(cost, hardware, switches)


def test_a_convolution_with_amperes_instructions_is_turned_and_padded_as_the_device_does():
    """What a library does around it is none of the kernel's: on a Hopper GPU tensors in NCHW are turned by its own."""
    hardware = load_hardware("h100-sxm5-80gb")
    x, filters = (torch.empty(s, dtype=BF16, device="meta") for s in ((64, 64, 56, 56), (64, 64, 3, 3)))
    cost, switches = metered(lambda: torch.nn.functional.conv2d(x, filters, padding=1), hardware)
    x, filters = (each.to(memory_format=torch.channels_last) for each in (x, filters))
    dense, _ = metered(lambda: torch.nn.functional.conv2d(x, filters, padding=1), hardware)
    own, old = (
        price(cost, hardware, switches, ran=ran).busy.memory_seconds
        - price(dense, hardware, switches, ran=ran).busy.memory_seconds
        for ran in (NamedKernel(), AMPERE)
    )
    assert own == pytest.approx(old)
    assert own > 0
