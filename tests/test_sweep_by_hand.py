"""What a sweep says of points that are given: verdicts, the knee and the table by hand."""

from __future__ import annotations

import pytest
import torch

from flopmeter.ask.sweep import Point, Sweep, sweep
from flopmeter.records import Regime


def swept(*points: tuple[int, float, Regime, int], dollars: float | None = None) -> Sweep:
    """Of each point its size, seconds, what binds it, and gigabytes."""
    made = [
        Point(
            size=size, seconds=seconds, regime=regime, items_per_s=size / seconds, flops=0, bytes=nbytes * 10**9,
            busy_seconds=seconds, host_seconds=0.0, idle_share=0.0, mfu=0.0, peak_memory_bytes=0,
            usable_memory_bytes=0, watts=None, joules=None, energy_dollars=dollars if place else None,
        )
        for place, (size, seconds, regime, nbytes) in enumerate(points)
    ]  # fmt: skip
    return Sweep("by hand", "batch", "samples", tuple(made), ())


def test_each_stretch_of_sizes_has_its_verdict_and_a_size_in_between_ends_none() -> None:
    """From 1 to 2 time grows by 5 %; from 2 to 8, two doublings, by 15 % and bytes by 15 %; from 8 to 16 bytes by a
    half; then time doubles, and doubles again."""
    told = swept(
        (1, 1.0, "overhead", 8), (2, 1.05, "memory", 8), (8, 1.05 * 1.15, "memory", 8), (16, 1.3, "memory", 12),
        (32, 2.6, "compute", 24), (64, 5.2, "compute", 48), (128, 10.4, "compute", 96),
    ).diagnosis()  # fmt: skip
    flat = "time grows by less than 10 % per doubling"
    assert told == [
        f"batch 1 to 2: overhead-bound, {flat}: the device waits for the host",
        f"batch 2 to 8: memory-bound, {flat} and so do the bytes: the same weights serve more items, not overhead",
        f"batch 8 to 16: memory-bound, {flat}: kernels too small to fill the device",
        "batch 16 to 32: memory- to compute-bound, time grows with the size",
        "batch 32 to 128: compute-bound, time grows with the size",
    ]


@pytest.mark.parametrize(("seconds", "knee"), [(4 / 1.2, 1), (4 / 1.25, None)])
def test_the_knee_is_where_a_doubling_brings_less_than_a_tenth(seconds: float, knee: int | None) -> None:
    """1.2 times as much in two doublings is 1.095 times in each, 1.25 times is 1.118."""
    assert swept((1, 1.0, "memory", 1), (4, seconds, "memory", 4)).knee == knee


def test_bytes_of_more_than_a_doubling_are_judged_per_doubling() -> None:
    (line,) = swept((1, 1.0, "memory", 1000), (16, 1.1, "memory", 1400)).diagnosis()
    assert "so do the bytes" in line  # 1.4 times in four doublings are 1.09 in each
    (line,) = swept((1, 1.0, "memory", 1000), (16, 1.1, "memory", 1500)).diagnosis()
    assert "so do the bytes" not in line


def test_a_price_of_energy_that_one_point_has_has_a_column() -> None:
    points = (1, 1.0, "compute", 1), (2, 2.0, "compute", 2)
    assert "energy $" in swept(*points, dollars=0.5).render()
    assert "energy $" not in swept(*points).render()


def test_a_point_counts_what_the_program_asks_for_and_not_what_is_masked_or_computed_again() -> None:
    """Attention counted in full, though with a causal mask about half is executed."""

    def attention(batch: int) -> None:
        q = torch.empty(batch, 1, 1024, 64, dtype=torch.bfloat16, device="meta")
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    (point,) = sweep(attention, [2], "h100-sxm5-80gb").points
    assert point.flops == 2 * 2 * (2 * 1024 * 1024 * 64)
