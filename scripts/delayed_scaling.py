"""Linear layers as Transformer Engine runs them in fp8 with delayed scaling (te.Linear, DelayedScaling with
Format.HYBRID, as Composer's `amp_fp8` asks for it; github.com/NVIDIA/TransformerEngine).

Scales come from earlier steps. One kernel reads a tensor, casts it and writes it twice, as it lies and transposed:
the input and the parameter in each forward pass, the gradient in the backward pass, with the sums of a bias's gradient
beside. Products are three in fp8; results are bf16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flopmeter import register_cost
from flopmeter.costs import make_cost
from flopmeter.records import ELEMENTWISE, Call, Cost


@torch.library.custom_op("transformer_engine::cast_transpose", mutates_args=())
def cast_transpose(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [rows, columns] in fp8, [rows, columns] and [columns, rows]."""
    raise NotImplementedError("it runs on meta only")


@cast_transpose.register_fake
def _(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    return x.new_empty(rows, columns, dtype=dtype), x.new_empty(columns, rows, dtype=dtype)


@register_cost(cast_transpose)
def _cost(call: Call) -> Cost:
    """The product with the scale, and the largest value."""
    return make_cost(call, ELEMENTWISE, 2 * call.inputs[0].numel)


def in_fp8(layers: nn.Module) -> None:
    """The linear layers inside, in place."""
    for module in layers.modules():
        if type(module) is nn.Linear:
            module.__class__ = TransformerEngineLinear


class TransformerEngineLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        product: Any = _Product.apply
        made: Tensor = product(x.flatten(0, -2).bfloat16(), self.weight.bfloat16(), self.bias.bfloat16())
        out: Tensor = made.unflatten(0, x.shape[:-1])
        return out


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        by_rows, by_columns = cast_transpose(x, torch.float8_e4m3fn)
        narrow, turned = cast_transpose(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(by_columns, turned)
        return _scaled(by_rows, narrow, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        by_rows, by_columns = cast_transpose(gradient, torch.float8_e5m2)
        return _scaled(by_rows, weight), _scaled(by_columns, x), gradient.sum(0)


def _scaled(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [m, k] times b [n, k]."""
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), one, one, bias=bias, out_dtype=torch.bfloat16)
