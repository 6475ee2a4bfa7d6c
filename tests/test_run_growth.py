"""Memory that the steps of a script leave behind."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import nn

import flopmeter

H100 = "h100-sxm5-80gb"
MIB = 2**20


def said_of(report: Any) -> list[str]:
    return [line for line in str(report).splitlines() if line.startswith("each step leaves")]


@pytest.mark.parametrize("keeps", ["results", "every result on the host", "the last", "the first two", "nothing"])
def test_results_that_every_step_leaves_in_memory_are_told_with_the_steps_until_it_is_full(keeps):
    """64 MiB each. Of 84.4 GB the weights, the input and the results so far are taken."""
    results: deque[Any] = deque(maxlen=1 if keeps == "the last" else None)
    with flopmeter.cuda(H100) as device, torch.no_grad():
        net, x = nn.Linear(4096, 4096, bias=False, device="cuda"), torch.zeros(4096, 4096, device="cuda")
        for step in range(6):
            y = net(x)
            if keeps == "every result on the host":
                y = y.cpu()
            if keeps != "nothing" and not (keeps == "the first two" and step > 1):
                results.append(y)
            del y
        report = device.report()
    said = said_of(report)
    assert len(said) == (keeps == "results")
    if said:
        left = (84_400_000_000 - (2 + 6) * 64 * MIB) // (64 * MIB)
        assert said[0].startswith("each step leaves 67.1 MB in memory")
        assert said[0].endswith(f"the device is full after {left:,} more steps")
    assert report.step.memory.fits(report.step.hardware)


@pytest.mark.parametrize("detaches", [True, False])
def test_a_figure_that_is_added_up_with_its_graph_is_told_and_one_without_is_not(detaches):
    """Of the graph that is never walked back stay the input of the layer and the result of exp(), 64 MiB each."""
    total: Any = 0
    with flopmeter.cuda(H100) as device:
        net, watched = (nn.Linear(4096, 4096, bias=False, device="cuda") for _ in range(2))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(5):
            x = torch.zeros(4096, 4096, device="cuda")
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            figure = watched(x).exp().mean()
            total = total + (figure.detach() if detaches else figure)
            del x, figure
        report = device.report()
    said = said_of(report)
    assert len(said) == (not detaches)
    assert not said or said[0].startswith("each step leaves 134 MB")
