"""causal_conv1d (github.com/Dao-AILab/causal-conv1d): a depthwise convolution over time, one kernel each way.

`x` is [batch, channels, length], `weight` [channels, width]. Each output element is a sum of `width` products; SiLU,
where it is asked for, runs in the same kernel, and the backward kernel computes the convolution again for it
(csrc/causal_conv1d_fwd.cu, causal_conv1d_bwd.cu). The products run on the vector units. `seq_idx`, [batch, length],
says which of several sequences in a row a position belongs to; the kernels do no less for it.
`cpp_functions` has what mamba_ssm's own autograd functions call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopmeter.costs import make_cost
from flopmeter.costs.traffic import regions
from flopmeter.records import Call, Cost
from flopmeter.run.shims.kernel import kernel, named

SILU, SILU_BACKWARD = 4, 8  # x / (1 + exp(-x)); s (1 + x (1 - s)) with s = 1 / (1 + exp(-x)), times the gradient
_SILU_EXPS = 1


def _forward_cost(call: Call) -> Cost:
    x, width = call.argument("x"), call.argument("weight").shape[-1]
    has_bias, silu = call.argument("bias") is not None, bool(call.argument("silu_activation"))
    each = 2 * width - 1 + has_bias + SILU * silu
    return make_cost(call, "element-wise", each * x.numel, transcendentals=silu * _SILU_EXPS * x.numel)


def _backward_cost(call: Call) -> Cost:
    x, width = call.argument("x"), call.argument("weight").shape[-1]
    silu = bool(call.argument("silu_activation"))
    again = (2 * width + SILU_BACKWARD) * silu
    gradients = (2 * width - 1) + 2 * width  # of x: the same sum; of the weight: a product and a sum each
    of_x = call.argument("of_x")  # written, and not read
    read = [spec for spec in regions(call)[0] if spec is not of_x]
    return make_cost(call, "element-wise", (again + gradients) * x.numel, transcendentals=silu * x.numel, read=read)


@kernel("causal_conv1d", _forward_cost, mutates=("final_states_out",))
def causal_conv1d_fwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    final_states_out: Tensor | None,
    silu_activation: bool,
) -> Tensor:
    return torch.empty_like(x)


@kernel("causal_conv1d_backward", _backward_cost, mutates=("of_x", "of_weight", "of_bias", "of_states"))
def _backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    gradient_of_final_states: Tensor | None,
    of_x: Tensor,
    of_weight: Tensor,
    of_bias: Tensor | None,
    of_states: Tensor | None,
    silu_activation: bool,
) -> None: ...


@kernel("causal_conv1d_update", _forward_cost, mutates=("conv_state",))
def causal_conv1d_update_function(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    silu_activation: bool,
    cache_seqlens: Tensor | None,
    conv_state_indices: Tensor | None,
) -> Tensor:
    """One step, or a few, of sequences whose last inputs are in `conv_state`."""
    return torch.empty_like(x)


def causal_conv1d_bwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    dout: Tensor,
    seq_idx: Tensor | None,
    initial_states: Tensor | None,
    dfinal_states: Tensor | None,
    dx: Tensor | None,
    return_dinitial_states: bool,
    silu_activation: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, into `dx` where it is given, weight, bias and initial states; those of weight and bias are sums,
    which are kept in fp32."""
    of_x = torch.empty_like(x) if dx is None else dx
    of_weight = torch.zeros_like(weight, dtype=torch.float32)
    of_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    of_states = _states_like(x, weight) if return_dinitial_states else None
    _backward(
        dout, x, weight, bias, seq_idx, initial_states, dfinal_states, of_x, of_weight, of_bias, of_states,
        silu_activation,
    )  # fmt: skip
    return of_x, of_weight.to(weight.dtype), None if of_bias is None else of_bias.to(weight.dtype), of_states


def _states_like(x: Tensor, weight: Tensor) -> Tensor:
    """Memory for the last inputs of each sequence, [batch, channels, width - 1], channels last."""
    return x.new_empty(x.shape[0], weight.shape[1] - 1, x.shape[1]).transpose(1, 2)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Any:
        *saved, final_states, ctx.silu = inputs
        ctx.save_for_backward(*saved)
        out = causal_conv1d_fwd_function(*inputs)
        return out if final_states is None else (out, final_states)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_final_states: Tensor | None = None) -> Any:
        x, weight, bias, seq_idx, states = ctx.saved_tensors
        of_x, of_weight, of_bias, of_states = causal_conv1d_bwd_function(
            x, weight, bias, gradient, seq_idx, states, of_final_states, None, ctx.needs_input_grad[4], ctx.silu
        )
        return of_x, of_weight, of_bias, None, of_states, None, None


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
) -> Any:
    """Returns the output or, with `return_final_states`, a pair of the output and the last inputs of each sequence."""
    final_states = None
    if return_final_states:
        final_states = _states_like(x, weight) if final_states_out is None else final_states_out
    silu = activation in ("silu", "swish")
    return _CausalConv.apply(x, weight, bias, seq_idx, initial_states, final_states, silu)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
) -> Tensor:
    """One step of `x`, [batch, channels], or several, [batch, channels, steps]."""
    silu = activation in ("silu", "swish")
    return causal_conv1d_update_function(x, conv_state, weight, bias, silu, cache_seqlens, conv_state_indices)


_PUBLIC = named(causal_conv1d_fn, causal_conv1d_update)
MODULES = {
    "causal_conv1d": _PUBLIC,
    "causal_conv1d.causal_conv1d_interface": _PUBLIC,
    "causal_conv1d.cpp_functions": {
        "causal_conv1d_fwd_function": causal_conv1d_fwd_function,
        "causal_conv1d_bwd_function": causal_conv1d_bwd_function,
        "causal_conv1d_update_function": causal_conv1d_update_function,
    },
}
