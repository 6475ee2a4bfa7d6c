"""Norms (transformer_engine/common/normalization): one kernel forward, which writes fp8 where the scale is known and
finds the largest value where it is not; backward one kernel, and one that joins the gradients of weight and bias."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flopmeter.costs import make_cost
from flopmeter.records import NORMALIZATION, Call, Cost
from flopmeter.run.shims.kernel import kernel
from flopmeter.run.shims.transformer_engine import casts
from flopmeter.run.shims.transformer_engine.casts import MatmulOperand
from flopmeter.run.shims.transformer_engine.quantizing import Caster

# Operations an element, as of torch's layer norm (costs/arithmetic/normalization.py): mean, squares, centre, divide,
# weight and bias; an RMS norm has no mean and no bias. Gradients: of x 10 or 7, weight 2, bias 1.
LAYER, RMS = (7, 13), (4, 9)


def _forward_cost(call: Call) -> Cost:
    operations, _ = LAYER if call.argument("bias") is not None else RMS
    extra = casts.SCALED if call.outputs[0].dtype.itemsize == 1 else 0
    return make_cost(call, NORMALIZATION, (operations + extra) * call.inputs[0].numel)


@kernel("te_norm", _forward_cost)
def _norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, dtype: torch.dtype, finds_largest: bool
) -> list[Tensor]:
    """The result, the statistics of each row, and the largest value if it is asked for."""
    statistics = 1 if bias is None else 2  # reciprocal deviation, and mean
    made = [
        torch.empty_like(x, dtype=dtype),
        *(x.new_empty(x.shape[0], dtype=torch.float32) for _ in range(statistics)),
    ]
    return [*made, x.new_empty(1, dtype=torch.float32)] if finds_largest else made


def _backward_cost(call: Call) -> Cost:
    _, operations = LAYER if len(call.outputs) == 3 else RMS
    return make_cost(call, NORMALIZATION, operations * call.inputs[0].numel, kernels=2)


@kernel("te_norm_backward", _backward_cost)
def _norm_backward(gradient: Tensor, x: Tensor, statistics: list[Tensor], weight: Tensor) -> list[Tensor]:
    """Gradients of x, weight and, of a layer norm, bias."""
    return [torch.empty_like(x), *(torch.empty_like(weight) for _ in statistics)]


def normed(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    """In the type of x, and the statistics."""
    out, *statistics = _norm(x, weight, bias, None, x.dtype, False)
    return out, statistics


def normed_and_cast(
    x: Tensor, weight: Tensor, bias: Tensor | None, caster: Caster, columns: bool
) -> tuple[MatmulOperand, list[Tensor]]:
    """The normed input as the operand of a product in low precision, and the statistics."""
    if caster.has_known_scale:
        scale = caster.scale("input", x)
        rows, *statistics = _norm(x, weight, bias, scale, caster.dtype("input"), False)
        copied = casts.transpose(rows) if columns and not casts.reads_both_ways() else None
        return caster.with_one_scale(rows, copied, scale), statistics
    out, *statistics = _norm(x, weight, bias, None, x.dtype, caster.has_one_scale)
    largest = statistics.pop() if caster.has_one_scale else None
    return caster(out, "input", columns, largest=largest)[0], statistics


def norm_gradients(
    gradient: Tensor, x: Tensor, statistics: list[Tensor], weight: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the input, the weight and, for a layer norm, the bias."""
    of_x, of_weight, *of_bias = _norm_backward(gradient, x, statistics, weight)
    return of_x, of_weight, of_bias[0] if of_bias else None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = casts.flat(x)
        out, statistics = normed(rows, weight, bias)
        ctx.save_for_backward(rows, weight, *statistics)
        ctx.shape = x.shape
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight, *statistics = ctx.saved_tensors
        of_x, of_weight, of_bias = norm_gradients(casts.flat(gradient), rows, list(statistics), weight)
        return of_x.view(ctx.shape), of_weight, of_bias


class _NormModule(nn.Module):
    bias: nn.Parameter | None

    def __init__(
        self,
        normalized_shape: Any = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | None = None,
        device: Any = "cuda",
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        shape: Any = hidden_size if normalized_shape is None else normalized_shape
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        self.eps, self.zero_centered_gamma, self.sequence_parallel = eps, zero_centered_gamma, sequence_parallel
        new: Any = {"device": device, "dtype": params_dtype or dtype}
        self.weight = nn.Parameter((torch.zeros if zero_centered_gamma else torch.ones)(shape, **new))
        self.register_parameter("bias", nn.Parameter(torch.zeros(shape, **new)) if self.has_bias else None)
        for parameter in self.parameters():
            parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    has_bias = True

    def reset_parameters(self, defer_init: bool = False) -> None:
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        dtype = casts.activation_dtype(x)
        weight, bias = self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)
        return _Norm.apply(x.to(dtype), weight.flatten(), bias)


class LayerNorm(_NormModule):
    """transformer_engine.pytorch.LayerNorm."""


class EngineRMSNorm(_NormModule):
    """transformer_engine.pytorch.RMSNorm."""

    has_bias = False
