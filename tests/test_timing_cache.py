"""What matmuls find in the L2 cache: the memory that was read before, and no other part of the same tensor."""

from __future__ import annotations

import torch

from flopmeter import FlopMeter, load_hardware, on_meta

BF16 = {"dtype": torch.bfloat16, "device": "meta"}


def test_experts_one_after_another_are_not_found_in_the_cache_of_the_one_before():
    """Each reads its own part of the stacked weights: 32 MB, of a cache of 96."""
    x, weights = torch.empty(16, 2048, **BF16), torch.empty(64, 2048, 8192, **BF16)
    device = load_hardware("l40s")
    with FlopMeter(device) as loop:
        for expert in range(64):
            x @ weights[expert]
    assert loop.report().kernel_seconds > weights.nbytes / device.bandwidth_bytes_per_s
    offsets = on_meta(torch.arange(16, 1025, 16, dtype=torch.int32))
    with FlopMeter(device) as grouped:
        torch._grouped_mm(torch.empty(1024, 2048, **BF16), weights, offs=offsets)
    assert grouped.report().kernel_seconds > weights.nbytes / device.bandwidth_bytes_per_s


def test_the_same_weights_twice_are_found_in_the_cache():
    x, weights = torch.empty(16, 2048, **BF16), torch.empty(64, 2048, 8192, **BF16)
    device = load_hardware("l40s")
    with FlopMeter(device) as meter:
        for _ in range(64):
            x @ weights[0]
    assert meter.report().kernel_seconds < weights.nbytes / device.bandwidth_bytes_per_s
