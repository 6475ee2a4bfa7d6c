"""Recurrent networks: one cuDNN op for all layers and steps, and one kernel for a cell's gates (RNN.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from flopmeter.as_cuda.emulation import DispatcherKernel, Emulation
from flopmeter.torch_names import dispatcher

aten = torch.ops.aten

CUDNN_DTYPES = (torch.float16, torch.float32, torch.float64)
"""What cuDNN takes on every device, as torch.backends.cudnn.CUDNN_TENSOR_DTYPES."""
BFLOAT16_CUDNN, BFLOAT16_MAJOR = 91300, 8
"""From which cuDNN, and on which compute capability, bfloat16 too (supportsBFloat16RNNWithCuDNN in
aten/src/ATen/cuda/detail/CUDAHooks.cpp, which `use_cudnn` in RNN.cpp asks)."""

RELU, TANH, LSTM, GRU = range(4)
"""cuDNN's numbers of the kinds, as the op's `mode` argument has them."""
GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}

KEPT = {RELU: 0, TANH: 0, LSTM: 5, GRU: 4}
"""Values per hidden unit and step that training keeps in the reserve, because the backward pass needs them: for an LSTM
the gates and the cell state, for a GRU the gates and the matmul result that the reset gate multiplies, as torch's own
cells keep them (cuda/RNN.cu). A plain cell needs only its output."""


def install(scope: Emulation) -> None:
    """Dispatch LSTM, GRU, RNN and their cells on meta tensors as CUDA would."""
    for name, mode in {"lstm": LSTM, "gru": GRU, "rnn_tanh": TANH, "rnn_relu": RELU}.items():
        packet = getattr(aten, name)
        for overload, made in ((packet.input, _padded), (packet.data, _packed)):
            scope.override(overload, made(scope, overload, mode), vmap_key=None)
    scope.meta_kernel("aten::_cudnn_rnn", cudnn_rnn)
    scope.meta_kernel("aten::_thnn_fused_lstm_cell", fused_lstm_cell)
    scope.override(aten.lstm_cell.default, lstm_cell, vmap_key=None)
    scope.override(aten.gru_cell.default, gru_cell, vmap_key=None)


class _RnnOptions(NamedTuple):
    """What the operators for padded and for packed sequences are both passed, in their order."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool


def _padded(scope: Emulation, composite: OpOverload, mode: int) -> DispatcherKernel:
    def rnn(tensor: Tensor, hx: Any, params: Sequence[Tensor], *options: Any) -> Any:
        *own, batch_first = options
        if _cudnn_takes(scope, tensor, _RnnOptions(*own).train):
            return _cudnn_rnn(mode, tensor, hx, params, _RnnOptions(*own), batch_first, ())
        return dispatcher.decompose(composite, tensor, hx, params, *options)

    return rnn


def _packed(scope: Emulation, composite: OpOverload, mode: int) -> DispatcherKernel:
    def rnn(tensor: Tensor, batch_sizes: Tensor, hx: Any, params: Sequence[Tensor], *options: Any) -> Any:
        own = _RnnOptions(*options)
        if _cudnn_takes(scope, tensor, own.train):  # batch_sizes are on the CPU, on every device
            return _cudnn_rnn(mode, tensor, hx, params, own, False, batch_sizes.tolist())
        return dispatcher.decompose(composite, tensor, batch_sizes, hx, params, *options)

    return rnn


def _cudnn_takes(scope: Emulation, tensor: Tensor, train: bool) -> bool:
    """`use_cudnn` in aten/src/ATen/native/RNN.cpp: enabled, a dtype it has, not empty."""
    target = scope.target
    has_bfloat16 = target.cudnn_version >= BFLOAT16_CUDNN and target.compute_capability[0] >= BFLOAT16_MAJOR
    if tensor.dtype in CUDNN_DTYPES or (tensor.dtype is torch.bfloat16 and has_bfloat16):
        takes = torch.backends.cudnn.enabled and tensor.numel() > 0
        if takes and train:
            scope.note("RNN in training: cuDNN's reserve space is taken to be what its backward pass needs")
        return takes
    scope.note(
        f"{tensor.dtype} RNN: not a cuDNN dtype on this device, so it runs step by step; CUDA's fused cell kernel is"
        " counted as several ops"
    )
    return False


def _cudnn_rnn(
    mode: int,
    tensor: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    options: _RnnOptions,
    batch_first: bool,
    batch_sizes: Sequence[int],
) -> tuple[Tensor, ...]:
    hidden, cell = hx if mode == LSTM else (hx, None)
    hidden_size = params[1].size(0) // GATES[mode]
    projection = hidden.size(-1) if hidden.size(-1) != hidden_size else 0
    weights_per_layer = (4 if options.has_biases else 2) + (1 if projection else 0)
    # On CUDA the weights are views of one buffer, which is an argument too. An empty buffer counts them once.
    buffer = tensor.new_empty(0)
    has_dropout = options.train and options.dropout > 0
    results = aten._cudnn_rnn(
        tensor, params, weights_per_layer, buffer, hidden, cell, mode, hidden_size, projection, options.num_layers,
        batch_first, options.dropout, options.train, options.bidirectional, batch_sizes,
        tensor.new_empty(0, dtype=torch.uint8) if has_dropout else None,
    )  # fmt: skip
    return tuple(results[: 3 if mode == LSTM else 2])


def cudnn_rnn(
    tensor: Tensor,
    weight: Sequence[Tensor],
    weight_stride0: int,
    weight_buf: Tensor | None,
    hx: Tensor,
    cx: Tensor | None,
    mode: int,
    hidden_size: int,
    proj_size: int,
    num_layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Sequence[int],
    dropout_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The Meta kernel. torch's own makes an empty reserve."""
    directions = 1 + bidirectional
    output = tensor.new_empty(*tensor.shape[:-1], (proj_size or hidden_size) * directions)
    kept = KEPT[mode] * hidden_size * directions * num_layers * (tensor.numel() // tensor.size(-1))
    # cuDNN gets the last layer's output as an argument (cudnnRNNBackwardData_v8, `y`); the others are in the reserve.
    kept += output.numel() * (num_layers - 1)
    reserve = tensor.new_empty(kept * tensor.itemsize if train else 0, dtype=torch.uint8)
    new_cell = tensor.new_empty(0 if cx is None else cx.shape)
    weights = tensor.new_empty(0) if weight_buf is None else weight_buf
    return output, tensor.new_empty(hx.shape), new_cell, reserve, weights


def lstm_cell(
    tensor: Tensor, hx: Sequence[Tensor], w_ih: Tensor, w_hh: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Two products without bias, then one kernel for the gates."""
    hidden, cell = hx
    new_hidden, new_cell, _ = aten._thnn_fused_lstm_cell(F.linear(tensor, w_ih), F.linear(hidden, w_hh), cell, *biases)
    return new_hidden, new_cell


def fused_lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The Meta kernel: the states, and the gates for the backward pass. torch's own fails without biases."""
    return torch.empty_like(cx), torch.empty_like(cx), torch.empty_like(input_gates)


def gru_cell(tensor: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, *biases: Tensor | None) -> Tensor:
    """Two products without bias, then one kernel for the gates."""
    return aten._thnn_fused_gru_cell(F.linear(tensor, w_ih), F.linear(hx, w_hh), hx, *biases)[0]
