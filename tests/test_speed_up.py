"""Eager and compiled side by side, by region."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from flopmeter import FlopMeter
from flopmeter.distributed import world

N = 2**28  # so large that what a compiled call costs the host does not matter


class Chain(nn.Module):
    """Three element-wise passes over a vector."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.cos().sin().exp()


def chains(*, marked: bool) -> FlopMeter:
    """Run eagerly also where it is marked: what torch.compile made itself has no eager side."""
    first, second = Chain(), Chain()
    if marked:
        first.compile()
    x = torch.empty(N, device="meta")
    with FlopMeter("a100-sxm4-80gb", compile="rules") as meter:
        out = second(first(x))
    assert out.shape == x.shape
    return meter


def test_fusing_a_chain_of_three_passes_saves_two_thirds_of_its_bytes():
    """Each pass reads and writes N floats; one kernel does so once for all six, whose sines and cosines then bound it:
    some 130 instructions an element, of which an A100 starts no more than those of 108 x 128 lanes in a cycle."""
    (region,) = chains(marked=False).report().speed_up().regions
    assert region.name == "program, forward"
    assert (region.eager.kernels, region.compiled.kernels) == (6, 1)
    assert (region.eager.bytes_moved, region.compiled.bytes_moved) == (6 * 8 * N, 8 * N)
    assert region.saved_share == pytest.approx(5 / 6)
    assert region.compiled.seconds > N * 130 / (108 * 128 * 1.41e9)
    assert 2 < region.factor < 6


def test_only_what_is_marked_is_saved():
    marked, rest = chains(marked=True).report().speed_up().regions
    assert marked.name == "Chain, forward"
    assert marked.saved_share == pytest.approx(2 / 3)
    assert rest.name == "(eager in both)"
    assert rest.eager.bytes_moved == rest.compiled.bytes_moved == 3 * 8 * N


def test_the_regions_add_up_to_the_reports():
    model = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True, device="meta")
    optimizer = torch.optim.AdamW(model.parameters())
    with FlopMeter("a100-sxm4-80gb") as meter:
        model(torch.empty(8, 32, 64, device="meta")).sum().backward()
        optimizer.step()
    eager, compiled = meter.report(), meter.report(mode="compiled")
    side_by_side = eager.speed_up()
    assert {region.name for region in side_by_side.regions} == {
        "program, forward",
        "program, backward",
        "(eager in both)",
    }
    assert side_by_side.total.eager.bytes_moved == eager.bytes_read + eager.bytes_written
    assert side_by_side.total.compiled.bytes_moved == compiled.bytes_read + compiled.bytes_written
    assert side_by_side.total.factor == pytest.approx(eager.seconds / compiled.seconds)
    for way, report in (("eager", eager), ("compiled", compiled)):
        in_regions = sum(getattr(region, way).seconds for region in side_by_side.regions)
        assert in_regions == pytest.approx(report.timings[-1].end_seconds)


def test_of_ranks_only_the_computing_stream_makes_the_wall_clock():
    """DDP's reductions run beside the backward pass: their time is not added to it."""
    with world(8):
        with torch.device("meta"):
            model = DistributedDataParallel(nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(4))))
            x = torch.empty(4096, 4096)
        model(x).sum().backward()  # the first step makes its buckets anew
        with FlopMeter("h100-sxm5-80gb") as meter:
            model(x).sum().backward()
    eager = meter.report()
    side_by_side = eager.speed_up()
    assert any(timing.stream for timing in eager.timings)
    assert side_by_side.total.compiled.seconds == meter.report(mode="compiled").seconds
    ends = max(timing.end_seconds for timing in eager.timings if not timing.stream)
    assert sum(region.eager.seconds for region in side_by_side.regions) == pytest.approx(ends)


def test_it_prints_and_round_trips():
    side_by_side = chains(marked=False).report().speed_up()
    assert "speed-up" in str(side_by_side)
    assert json.loads(side_by_side.render("json"))["regions"][0]["eager_kernels"] == 6
    assert side_by_side.render("csv").splitlines()[0].startswith("region,eager_kernels")


def test_another_mode_is_refused():
    with pytest.raises(ValueError, match="this one is compiled"):
        chains(marked=False).report(mode="compiled").speed_up()
