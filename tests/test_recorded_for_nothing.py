"""What autograd records costs the host time, whether or not a backward pass comes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter, load_hardware

H100 = "h100-sxm5-80gb"


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256)) for _ in range(8)]).to(
        "meta"
    )


def ran(model: nn.Module, records: bool, calls: int = 1) -> Any:
    with FlopMeter(H100) as meter, torch.set_grad_enabled(records):
        for _ in range(calls):
            y = model(torch.empty(64, 256, device="meta"))
    return meter.report(), y


def nodes_of(y: torch.Tensor) -> int:
    """In the graph behind a tensor, without the leaves."""
    seen, left = set(), [y.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen and "Accumulate" not in type(node).__name__:
            seen.add(node)
            left += [before for before, _ in node.next_functions]
    return len(seen)


@pytest.mark.parametrize("calls", [1, 3])
def test_the_host_records_each_node_of_the_graph_in_inference_too(calls):
    model = layers()
    (records, y), (plain, _) = ran(model, True, calls), ran(model, False, calls)
    more = calls * nodes_of(y) * load_hardware(H100).host.record_seconds
    assert records.host_seconds - plain.host_seconds == pytest.approx(more, rel=1e-6)


def told(report: Any) -> list[Any]:
    return [each for each in report.advice if "inference_mode" in each.remedy]


def test_inference_that_records_is_told_what_it_wins_without():
    model = layers()
    records, plain = ran(model, True)[0], ran(model, False)[0]
    (advice,) = told(records)
    assert advice.run_seconds_then == pytest.approx(plain.seconds, rel=1e-6)
    assert "32 nodes" in advice.why  # of each linear layer one for the transposed weight, too
    assert not told(plain)


def test_a_forward_pass_of_training_is_not_told_to_record_nothing():
    model = layers()
    with FlopMeter(H100) as meter:
        for _ in range(2):
            start = len(meter.trace.ops)
            y = model(torch.empty(64, 256, device="meta"))
            stop = len(meter.trace.ops)
            y.sum().backward()
    assert not told(meter.report())
    assert not told(meter.report(ops=range(start, stop)))
