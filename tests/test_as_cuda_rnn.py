"""What CUDA's recurrent layers are told, and what autocast copies for them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter
from flopmeter.records import RecurrentWork


def metered(program):
    with FlopMeter("a100-sxm4-80gb") as meter:
        program()
    return meter


@pytest.mark.parametrize(("bias", "projection", "matrices"), [(True, 0, 4), (False, 0, 2), (True, 4, 5), (False, 4, 3)])
def test_a_layer_has_two_matrices_two_biases_and_perhaps_a_projection(bias, projection, matrices):
    with torch.device("meta"):
        layer, x = nn.LSTM(8, 16, num_layers=3, bias=bias, proj_size=projection), torch.empty(5, 2, 8)
    (call,) = [op.call for op in metered(lambda: layer(x)).trace.ops if op.call.name == "_cudnn_rnn"]
    assert call.argument("weight_stride0") == matrices
    assert len(call.argument("weight")) == 3 * matrices
    assert call.argument("proj_size") == projection
    assert call.argument("hidden_size") == 16


def test_autocast_copies_the_weights_of_a_recurrent_layer_into_one_buffer_of_half_precision():
    """A buffer of zeros for all numbers at 2 bytes; then each weight is read at 4 bytes and written at 2."""
    with torch.device("meta"):
        layer, x = nn.GRU(8, 16), torch.empty(5, 2, 8)

    def program():
        with torch.autocast("cuda"):
            layer(x)

    kernels = metered(program).report().kernels
    weights = [3 * 16 * 8, 3 * 16 * 16, 3 * 16, 3 * 16]
    buffer = [cost for kernel in kernels if (cost := kernel.cost).bytes_written == 2 * sum(weights)]
    assert [(cost.name, cost.bytes_read, cost.dtype) for cost in buffer] == [("zeros", 0, "fp16")]
    copies = [(cost.bytes_read, cost.bytes_written) for kernel in kernels if (cost := kernel.cost).name == "copy_"]
    assert copies == [(4 * size, 2 * size) for size in weights]
    (product,) = [kernel.cost for kernel in kernels if isinstance(kernel.cost.work, RecurrentWork)]
    assert product.dtype == "fp16"
    assert product.macs == 10 * 3 * 16 * (8 + 16)


@pytest.mark.parametrize(("activation", "forward", "functions", "backward"), [("tanh", 2, 1, 3), ("relu", 1, 0, 0)])
def test_a_plain_cell_adds_both_products_and_calls_its_function(activation, forward, functions, backward):
    """The gradient of tanh is g·(1 - h·h); relu and its gradient compare and compute nothing. 10 tokens, 16 units."""
    with torch.device("meta"):
        layer, x = nn.RNN(8, 16, nonlinearity=activation), torch.empty(5, 2, 8, requires_grad=True)
    costs = [kernel.cost for kernel in metered(lambda: layer(x)[0].sum().backward()).report().kernels]
    ahead, back = (cost for cost in costs if isinstance(cost.work, RecurrentWork))
    products, biases = 2 * 10 * 16 * (8 + 16), 10 * 2 * 16
    assert (ahead.flops, ahead.transcendentals) == (products + biases + 160 * forward, 160 * functions)
    assert back.flops == 2 * products + biases + 160 * backward
