"""The change that is told of loops over recurrent cells, kernel by kernel, beside the program that calls the layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter
from flopmeter.report.advice.recurrent import cells_in_loops
from flopmeter.report.advice.remedies import trace_of

WIDTH = 256


def by_cells(cells, x):
    """An LSTM's state is a pair."""
    made, zeros = [], [torch.zeros(len(x), WIDTH, device="meta") for _ in cells]
    states = [(each, torch.zeros_like(each)) if isinstance(cells[0], nn.LSTMCell) else each for each in zeros]
    for step in x.unbind(1):
        for place, cell in enumerate(cells):
            states[place] = cell(step, states[place])
            step = states[place][0] if isinstance(states[place], tuple) else states[place]
        made.append(step)
    return torch.stack(made, 1)


def by_layers(layers, x):
    for layer in layers:
        x = layer(x)[0]
    return x


def metered(kind, count, *, trained_input, is_mended):
    with torch.device("meta"):
        options = {"batch_first": True} if is_mended else {}
        layers = [getattr(nn, kind + "Cell" * (not is_mended))(WIDTH, WIDTH, **options) for _ in range(count)]
        x = torch.empty(64, 16, WIDTH, requires_grad=trained_input)
    with FlopMeter("h100-sxm5-80gb") as meter:
        out = (by_layers if is_mended else by_cells)(layers, x)
        out.backward(torch.empty_like(out))
    return meter.report()


def kernels_in(report):
    """A module call makes its zeros where the program made its own: how is not compared."""
    costs = [kernel.cost for kernel in report.kernels if not kernel.cost.name.startswith("zeros")]
    return sorted((cost.name, cost.flops, cost.bytes_read, cost.bytes_written) for cost in costs)


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("trained_input", [False, True])
def test_a_loop_over_cells_is_priced_as_the_layers_that_take_the_whole_sequence(kind, count, trained_input):
    options = {"kind": kind, "count": count, "trained_input": trained_input}
    report, mended = (metered(**options, is_mended=each) for each in (False, True))
    (told,) = cells_in_loops(report, trace_of(report))
    assert kernels_in(told.then) == kernels_in(mended)
    assert told.then.seconds == pytest.approx(mended.seconds, rel=0.025)  # views, which the host makes
