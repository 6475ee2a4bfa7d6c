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

from flopmeter.run.shims.transformer_engine.casts import cast


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
        by_rows, by_columns = _cast(x, torch.float8_e4m3fn)
        narrow, turned = _cast(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(by_columns, turned)
        return _scaled(by_rows, narrow, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        by_rows, by_columns = _cast(gradient, torch.float8_e5m2)
        return _scaled(by_rows, weight), _scaled(by_columns, x), gradient.sum(0)


def _cast(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """x [rows, columns] in fp8, and its transpose, by one kernel of the shim. The scale is there already."""
    scale = x.new_empty(1, dtype=torch.float32)
    made: list[Tensor] = cast(x, scale, dtype, columns=True, bias_gradient=False)
    return made


def _scaled(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a [m, k] times b [n, k]."""
    one = torch.ones((), device=a.device)
    return torch._scaled_mm(a, b.t(), one, one, bias=bias, out_dtype=torch.bfloat16)
