"""causal_conv1d (github.com/Dao-AILab/causal-conv1d): a depthwise convolution over time, one kernel each way.

`x` is [batch, channels, length], `weight` [channels, width]. Each output element is a sum of `width` products; SiLU,
where it is asked for, runs in the same kernel, and the backward kernel computes the convolution again for it
(csrc/causal_conv1d_fwd.cu, causal_conv1d_bwd.cu). The products run on the vector units.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopmeter.costs import make_cost
from flopmeter.records import Call, Cost
from flopmeter.run.shims.kernel import kernel

SILU, SILU_BACKWARD = 4, 8  # x / (1 + exp(-x)); s (1 + x (1 - s)) with s = 1 / (1 + exp(-x)), times the gradient
_SILU_EXPS = 1


def _forward_cost(call: Call) -> Cost:
    x, width = call.inputs[0], call.inputs[1].shape[-1]
    has_bias, silu = call.argument("bias") is not None, bool(call.argument("silu"))
    each = 2 * width - 1 + has_bias + SILU * silu
    return make_cost(call, "element-wise", each * x.numel, transcendentals=silu * _SILU_EXPS * x.numel)


def _backward_cost(call: Call) -> Cost:
    x, width = call.inputs[1], call.inputs[2].shape[-1]
    silu = bool(call.argument("silu"))
    again = (2 * width + SILU_BACKWARD) * silu
    gradients = (2 * width - 1) + 2 * width  # of x: the same sum; of the weight: a product and a sum each
    return make_cost(call, "element-wise", (again + gradients) * x.numel, transcendentals=silu * x.numel)


@kernel("causal_conv1d", _forward_cost)
def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    return torch.empty_like(x)


@kernel("causal_conv1d_backward", _backward_cost)
def _backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of weights and bias are sums, which are kept in fp32."""
    as_float = weight.new_empty(weight.shape, dtype=torch.float32)
    return torch.empty_like(x), as_float, as_float.new_empty(weight.shape[0])


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.silu = silu
        return _forward(x, weight, bias, silu)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        of_x, of_weight, of_bias = _backward(gradient, x, weight, bias, ctx.silu)
        return of_x, of_weight.to(weight.dtype), None if bias is None else of_bias.to(bias.dtype), None


def causal_conv1d_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **options: Any
) -> Tensor:
    """Raises NotImplementedError for states and for several sequences in a row."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    if given:
        raise NotImplementedError(f"flopmeter's shim of causal_conv1d has no {given[0]}: leave it out")
    return _CausalConv.apply(x, weight, bias, activation in ("silu", "swish"))  # type: ignore[no-untyped-call]


MODULES = {"causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn}}
