"""What cuDNN keeps of a recurrent network for its backward pass: an output like others, in bytes and in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter, largest_batch

STEPS, SEQUENCES, WIDTH, HIDDEN, FLOAT = 7, 5, 20, 12, 4
UNITS = STEPS * SEQUENCES * HIDDEN  # of one layer and direction

# What the backward pass needs of each unit, in values. An LSTM: i, f, g, o and c. A GRU: r, z, n and what r multiplies.
# A plain network: its output, which is there anyway. Of all layers but the last the outputs are needed as well.
KEPT = {
    "lstm": (lambda: nn.LSTM(WIDTH, HIDDEN), 5 * UNITS),
    "gru": (lambda: nn.GRU(WIDTH, HIDDEN), 4 * UNITS),
    "rnn": (lambda: nn.RNN(WIDTH, HIDDEN), 0),
    "two layers": (lambda: nn.LSTM(WIDTH, HIDDEN, 2), 2 * 5 * UNITS + UNITS),
    "both ways": (lambda: nn.GRU(WIDTH, HIDDEN, bidirectional=True), 2 * 4 * UNITS),
    "two layers both ways": (lambda: nn.RNN(WIDTH, HIDDEN, 2, bidirectional=True), 2 * UNITS),
    "three layers, projected": (
        lambda: nn.LSTM(WIDTH, HIDDEN, 3, proj_size=4), 3 * 5 * UNITS + 2 * STEPS * SEQUENCES * 4
    ),
    "half precision": (lambda: nn.LSTM(WIDTH, HIDDEN, dtype=torch.float16), 5 * UNITS / 2),
}  # fmt: skip


def forward(network: nn.RNNBase, *, train: bool = True) -> FlopMeter:
    dtype = next(network.parameters()).dtype
    x = torch.empty(STEPS, SEQUENCES, WIDTH, device="meta", dtype=dtype)
    with FlopMeter("h100-sxm5-80gb") as meter:
        network.train(train)(x)[0].sum().backward() if train else network.eval()(x)
    return meter


def on_meta(name: str) -> nn.RNNBase:
    with torch.device("meta"):
        return KEPT[name][0]()


@pytest.mark.parametrize("name", KEPT)
def test_a_recurrent_network_keeps_for_backward_what_that_needs(name):
    reports = [forward(on_meta(name), train=train).report() for train in (True, False)]
    trained, applied = ([k.cost for k in r.kernels if k.cost.name == "_cudnn_rnn"] for r in reports)
    assert trained[0].bytes_written - applied[0].bytes_written == KEPT[name][1] * FLOAT


@pytest.mark.parametrize("name", KEPT)
def test_what_a_recurrent_network_writes_is_in_memory(name):
    """The kernel's outputs are alive when it has run, so the peak is no less than what it writes."""
    meter = forward(on_meta(name))
    report = meter.report()
    (written,) = [kernel.cost.bytes_written for kernel in report.kernels if kernel.cost.name == "_cudnn_rnn"]
    assert report.peak_memory_bytes >= written
    assert report.memory.at_peak["activations"] >= KEPT[name][1] * FLOAT


def test_the_backward_pass_reads_what_the_forward_pass_kept():
    kernels = {kernel.cost.name: kernel.cost for kernel in forward(on_meta("lstm")).report().kernels}
    weights, inputs, states = 4 * HIDDEN * (WIDTH + HIDDEN + 2), STEPS * SEQUENCES * WIDTH, 2 * SEQUENCES * HIDDEN
    output_and_gradient = UNITS + 1  # the gradient is one number, expanded
    read = weights + inputs + states + output_and_gradient + 5 * UNITS
    assert kernels["_cudnn_rnn_backward"].bytes_read == read * FLOAT


def test_a_packed_sequence_keeps_only_the_tokens_that_it_has():
    lengths = torch.tensor([7, 4, 4, 2, 1])
    packed = nn.utils.rnn.pack_padded_sequence(torch.empty(STEPS, SEQUENCES, WIDTH, device="meta"), lengths)
    network = on_meta("lstm")
    with FlopMeter("h100-sxm5-80gb") as meter:
        network(packed)
    op = next(op for op in meter.trace.ops if op.call.name == "_cudnn_rnn")
    assert op.outputs[3].nbytes == 5 * 18 * HIDDEN * FLOAT


def test_an_lstm_keeps_so_much_that_it_decides_the_largest_batch():
    """Four layers of 1,024 units, 512 steps: 5 values a unit and layer, three inner outputs, the input, the last
    output and its gradient, of 4 bytes each: 54 MB a sequence."""
    with torch.device("meta"):
        network = nn.LSTM(1024, 1024, 4, batch_first=True)

    def step(batch: int) -> None:
        network(torch.empty(batch, 512, 1024, device="meta"))[0].sum().backward()

    of_a_sequence = 512 * 1024 * FLOAT * (4 * 5 + 3 + 1 + 1)
    room = 85e9 - 0.6e9 - sum(p.nbytes for p in network.parameters())
    assert largest_batch(step, "h100-sxm5-80gb", limit=4096) == pytest.approx(room / of_a_sequence, rel=0.05)


def test_the_report_says_that_the_reserve_is_what_backward_needs():
    assert any("reserve" in note for note in forward(on_meta("lstm")).report().notes)
    assert not any("reserve" in note for note in forward(on_meta("lstm"), train=False).report().notes)
