"""Recurrent networks: the fused cuDNN and oneDNN layers, and the kernels of a single cell's gates.

Every weight matrix [rows, columns] meets every token once, 2·tokens·rows·columns, whatever the kind of network. Each
step has to wait for the one before, which the time model has to know (`Recurrence`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import torch

from flopmeter.costs.rules import alignment_bytes, macs_of, make_contraction, make_cost, make_product, rule
from flopmeter.device.hardware import Hardware, Host
from flopmeter.records import ELEMENTWISE, Call, Cost, Kernel, KernelWork, Matmul, Recurrence, RecurrentWork, TensorSpec
from flopmeter.torch_names.operators import aten


class Cell(NamedTuple):
    """What one step of a network does for each hidden unit, besides the matmuls and the biases."""

    gates: int
    flops: int
    transcendentals: int
    backward_flops: int


# A sigmoid is 4 with one exp. LSTM: 3 sigmoids, 2 tanh, c' = f·c + i·g (3), h = o·tanh(c') (1), and 4 sums of
# the two matmuls. GRU: 2 sigmoids, tanh(n + r·m) (3), n + z·(h - n) (3), 2 sums. Plain: one sum, tanh or relu.
# Backward is counted on CUDA's cell kernels (aten/src/ATen/native/cuda/RNN.cu).
LSTM = Cell(4, 4 + 3 * 4 + 2 + 3 + 1, 5, 23)
GRU = Cell(3, 2 + 2 * 4 + 3 + 3, 3, 16)
TANH = Cell(1, 2, 1, 3)
RELU = Cell(1, 1, 0, 0)
_BY_CUDNN_MODE = (RELU, TANH, LSTM, GRU)


@rule(aten._cudnn_rnn)
def cudnn_rnn(call: Call) -> Cost:
    """All layers, directions and steps. `weight_buf` holds the same weights once more and is not read.
    In training one of the outputs is the reserve, which the backward pass reads."""
    cell, weights = _BY_CUDNN_MODE[call.argument("mode")], call.argument("weight")
    tokens = _tokens(call)
    units = tokens * call.argument("hidden_size") * _stacks(call)
    x, hx, cx = call.argument("input"), call.argument("hx"), call.argument("cx")
    return make_product(
        call,
        _work(call, weights, _products(weights, tokens), is_backward=False),
        extra=((ELEMENTWISE, _gate_flops(cell, weights, tokens, units)),),
        read=[spec for spec in (x, *weights, hx, cx) if spec is not None],
        written=call.outputs[:4],
        transcendentals=cell.transcendentals * units,
    )


@rule(aten._cudnn_rnn_backward)
def cudnn_rnn_backward(call: Call) -> Cost:
    """One matmul for the gradient of the inputs and states, which the recurrence always needs, and one for
    that of the weights where the output mask asks for it. Reads the reserve that forward wrote."""
    cell, weights = _BY_CUDNN_MODE[call.argument("mode")], call.argument("weight")
    tokens = _tokens(call)
    units = tokens * call.argument("hidden_size") * _stacks(call)
    products = _products(weights, tokens)
    wants_weights = call.argument("output_mask")[3]
    biases = tokens * sum(spec.numel for spec in weights if len(spec.shape) == 1) * wants_weights
    inputs = [spec for spec in call.inputs if spec != call.argument("weight_buf")]
    return make_product(
        call,
        _work(call, weights, products + _transposed(products) * wants_weights, is_backward=True),
        extra=((ELEMENTWISE, cell.backward_flops * units + biases),),
        read=inputs,
    )


@rule(aten.mkldnn_rnn_layer)
def mkldnn_rnn_layer(call: Call) -> Cost:
    """One layer of an LSTM in one direction: the op of the CPU, where CUDA has cuDNN's."""
    x, *weights = call.inputs[:5]
    tokens = x.shape[0] * x.shape[1]
    units = tokens * call.argument("hidden_size")
    return make_contraction(
        call,
        _products(weights, tokens),
        extra=((ELEMENTWISE, _gate_flops(LSTM, weights, tokens, units)),),
        transcendentals=LSTM.transcendentals * units,
    )


@rule(aten.mkldnn_rnn_layer_backward)
def mkldnn_rnn_layer_backward(call: Call) -> Cost:
    """The gradients of inputs and weights: a matmul each."""
    x, *weights = call.inputs[:5]
    tokens = x.shape[0] * x.shape[1]
    products = _products(weights, tokens)
    biases = tokens * sum(spec.numel for spec in weights if len(spec.shape) == 1)
    flops = LSTM.backward_flops * tokens * call.argument("hidden_size") + biases
    return make_contraction(call, products + _transposed(products), extra=((ELEMENTWISE, flops),))


@rule(aten._thnn_fused_lstm_cell, aten._thnn_fused_gru_cell)
def fused_cell(call: Call) -> Cost:
    """The gates of one step, and both biases where there are any."""
    cell = LSTM if call.func.overloadpacket is aten._thnn_fused_lstm_cell else GRU
    units, biases = call.inputs[2].numel, len(call.inputs) - 3
    flops = (cell.flops + biases * cell.gates) * units
    return make_cost(call, ELEMENTWISE, flops, transcendentals=cell.transcendentals * units)


@rule(aten._thnn_fused_lstm_cell_backward_impl)
def lstm_cell_backward(call: Call) -> Cost:
    """The gates' gradients (tanh(c') again), and their sum over the batch for the biases."""
    units, gates = call.argument("cx").numel, call.argument("workspace").numel
    flops = LSTM.backward_flops * units + call.argument("has_bias") * gates
    return make_cost(call, ELEMENTWISE, flops, transcendentals=units)


@rule(aten._thnn_fused_gru_cell_backward)
def gru_cell_backward(call: Call) -> Cost:
    """The gates' gradients, and two sums over the batch for the biases."""
    units = call.argument("grad_hy").numel
    return make_cost(call, ELEMENTWISE, (GRU.backward_flops + call.argument("has_bias") * 2 * GRU.gates) * units)


def runs_as_one_kernel(recurrence: Recurrence, hardware: Hardware) -> bool:
    """Whether one kernel runs all steps of a layer: everywhere, or on devices that are large for torch
    (`use_persist_device_heuristics` in aten/src/ATen/native/cudnn/RNN.cpp)."""
    major, minor = hardware.compute_capability or (0, 0)
    is_large = (major, minor) == (7, 0) or (major >= 8 and minor != 6 and hardware.sm_count >= 98)
    return recurrence.keeps_weights == "everywhere" or (recurrence.keeps_weights == "on large devices" and is_large)


def launched_steps(work: KernelWork, hardware: Hardware) -> int:
    """How many steps the host launches, of all layers: none of a kernel that is no recurrent layer's, or runs all."""
    if not isinstance(work, RecurrentWork) or runs_as_one_kernel(work.recurrence, hardware):
        return 0
    return work.recurrence.layer_steps


def step_notes(kernels: Iterable[Kernel], hardware: Hardware, host: Host) -> list[str]:
    """A note on recurrent layers whose steps the host launches."""
    steps = sum(launched_steps(kernel.cost.work, hardware) for kernel in kernels)
    if not steps or hardware.is_cpu:
        return []
    return [
        f"recurrent layers: cuDNN launches {steps:,} steps one by one, since no kernel keeps their weights on the chip;"
        f" each takes {host.recurrent_step_seconds * 1e6:.3g} µs of the host"
    ]


def _tokens(call: Call) -> int:
    """Steps times sequences; packed input [tokens, features] has them in one dimension."""
    x = call.argument("input")
    return int(x.numel // max(x.shape[-1], 1))


def _work(call: Call, weights: Sequence[TensorSpec], matmuls: Sequence[Matmul], *, is_backward: bool) -> RecurrentWork:
    """The work of one layer. Its first matrix multiplies all inputs at once, its second the state of each step (and so
    does the third one of a projected LSTM). A packed input says how many sequences each step has. In the backward pass
    the gradient of a state is a product with the transposed matrix."""
    x, packed = call.argument("input"), call.argument("batch_sizes")
    steps = len(packed) if packed else x.shape[1 if call.argument("batch_first") else 0]
    matrices = [spec.shape for spec in weights if len(spec.shape) == 2]
    per_stack = len(matrices) // max(1, _stacks(call))
    sequences = -(-_tokens(call) // max(1, steps))
    inner = (shape for place, shape in enumerate(matrices) if place % per_stack == 1)
    of_step = (Matmul(1, sequences, *(shape[::-1] if is_backward else shape)) for shape in inner)
    recurrence = Recurrence(steps, tuple(of_step), _keeps_weights(call, sequences, is_backward), is_backward)
    return RecurrentWork(tuple(matmuls), macs_of(call, matmuls), alignment_bytes(call), recurrence)


def _keeps_weights(
    call: Call, sequences: int, is_backward: bool
) -> Literal["everywhere", "on large devices", "nowhere"]:
    """Where cuDNN's persistent kernels run, by what torch asks for (`get_algo` in aten/src/ATen/native/cudnn/RNN.cpp):
    not for sequences that differ in length nor for projections; for few hidden units; else in fp16, for one layer and
    direction of a convenient size."""
    x, hidden = call.argument("input"), call.argument("hidden_size")
    cell = _BY_CUDNN_MODE[call.argument("mode")]
    is_plain = cell in (RELU, TANH)
    most = (256 if is_plain else 128) if is_backward else (384 if is_plain else 192)
    if call.argument("batch_sizes") or call.argument("proj_size"):
        return "nowhere"
    is_double = all(spec.dtype is torch.float64 for spec in (x, *call.argument("weight")))
    if hidden <= most and not is_double:
        return "everywhere"
    is_convenient = _stacks(call) == 1 and hidden <= 1024 and hidden % 128 == 0 and x.shape[-1] % 128 == 0
    fits = sequences % 8 == 0 and sequences <= 128 and (cell is LSTM or sequences < 96 or hidden < 896)
    is_kept = x.dtype is torch.float16 and is_convenient and fits and cell is not GRU
    return "on large devices" if is_kept else "nowhere"


def _stacks(call: Call) -> int:
    return int(call.argument("num_layers") * (1 + call.argument("bidirectional")))


def _products(weights: Sequence[TensorSpec], tokens: int) -> list[Matmul]:
    return [Matmul(1, tokens, *weight.shape) for weight in weights if len(weight.shape) == 2]


def _transposed(products: list[Matmul]) -> list[Matmul]:
    """The gradients of the weights: the sum runs over the tokens."""
    return [Matmul(1, product.n, product.k, product.m) for product in products]


def _gate_flops(cell: Cell, weights: Sequence[TensorSpec], tokens: int, units: int) -> int:
    biases = sum(spec.numel for spec in weights if len(spec.shape) == 1)
    return cell.flops * units + tokens * biases
