"""Compiled sums over the edges of a graph: each row is looked up and added to many times."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flopmeter import FlopMeter
from flopmeter.report.report import Report

H100 = "h100-sxm5-80gb"
NODES, WIDTH, FP32 = 100_000, 256, 4
# L2 gives at most so much to an SM in a cycle: on the A100 5,120 bytes to 80 of them (NVIDIA's whitepaper of it).
MOST_BYTES_PER_CYCLE, SMS, BOOST_HZ = 64, 132, 1.98e9


def summed(table: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    return torch.zeros_like(table).index_add_(0, targets, table[sources])


def run(edges: int, *, by_rules: bool) -> Report:
    with FlopMeter(H100) as meter, torch.no_grad():
        table = torch.empty(NODES, WIDTH, device="meta")
        sources, targets = (torch.empty(edges, dtype=torch.int64, device="meta") for _ in range(2))
        torch._dynamo.reset()
        (summed if by_rules else torch.compile(summed))(table, sources, targets)
    return meter.report(mode="compiled") if by_rules else meter.report()


def adding_seconds(edges: int, *, by_rules: bool) -> float:
    report = run(edges, by_rules=by_rules)
    pairs = zip(report.kernels, report.timings, strict=True)
    return max(timing.work_seconds for kernel, timing in pairs if "index_add" in kernel.cost.name)


@pytest.mark.parametrize("by_rules", [True, False], ids=["rules", "compiler"])
def test_rows_that_are_named_ten_times_pass_the_cache_ten_times(by_rules: bool):
    """The cache gives each row that is looked up, and reads and writes each that is added to."""
    edges = 10 * NODES
    through_cache = 3 * edges * WIDTH * FP32
    assert adding_seconds(edges, by_rules=by_rules) > through_cache / (MOST_BYTES_PER_CYCLE * SMS * BOOST_HZ)
    assert adding_seconds(2 * edges, by_rules=by_rules) == pytest.approx(
        2 * adding_seconds(edges, by_rules=by_rules), rel=0.15
    )


def test_the_rules_price_a_compiled_sum_as_the_compilers_kernel():
    for edges in (NODES, 10 * NODES):
        assert adding_seconds(edges, by_rules=True) == pytest.approx(adding_seconds(edges, by_rules=False), rel=0.15)
