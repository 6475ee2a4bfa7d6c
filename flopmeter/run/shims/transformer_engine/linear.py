"""Linear layers (transformer_engine/pytorch/module/linear.py, layernorm_linear.py): a norm or none before it, casts of
input and weight, one product; backward the gradient's cast and two products. Split layers have collectives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flopmeter.run.shims.transformer_engine import norms, products
from flopmeter.run.shims.transformer_engine.base import EngineLayer, WeightUse, refuse
from flopmeter.run.shims.transformer_engine.casts import MatmulOperand, activation_dtype, flat, operands_of, there
from flopmeter.run.shims.transformer_engine.parallel import WeightSplit, gathered, summed, wait
from flopmeter.run.shims.transformer_engine.quantizing import Caster, caster_of, check_shapes


class LayerCall(NamedTuple):
    """One call of a layer, beside its tensors."""

    layer: EngineLayer
    weight: WeightUse
    caster: Caster | None
    split: WeightSplit
    dtype: torch.dtype
    is_training: bool  # the backward pass will come
    returns_normed: bool


def prepared(
    call: LayerCall, x: Tensor, norm: tuple[Tensor, Tensor | None] | None
) -> tuple[MatmulOperand, Tensor | None, list[Tensor]]:
    """The input as this rank has it, the normed one if the layer returns it, and the statistics of the norm."""
    columns = call.is_training and call.weight.parameter.requires_grad
    if call.caster is not None:
        columns = columns and not (call.split.gathers_input and call.caster.has_one_scale)
    if norm is None:
        return (MatmulOperand(x) if call.caster is None else call.caster(x, "input", columns)[0]), None, []
    if call.caster is not None and not call.returns_normed:
        operand, statistics = norms.normed_and_cast(x, *norm, call.caster, columns)
        return operand, None, statistics
    out, statistics = norms.normed(x, *norm)
    operand = MatmulOperand(out) if call.caster is None else call.caster(out, "input", columns)[0]
    return operand, out if call.returns_normed else None, statistics


def whole_input(
    call: LayerCall, part: MatmulOperand, columns: bool, is_async: bool = False
) -> tuple[MatmulOperand, list[Any]]:
    """The rows of all ranks where the layer needs them."""
    if not call.split.gathers_input:
        return part, []
    if call.caster is not None:
        return call.caster.gathered(part, columns, is_async)
    rows, work = gathered(there(part.rows), call.split, is_async)
    return MatmulOperand(rows), [work]


def kept_for_gradient(call: LayerCall, part: MatmulOperand) -> MatmulOperand:
    """What of the input the weight's gradient needs: its columns, or rows that are gathered again."""
    if not call.weight.parameter.requires_grad:
        return MatmulOperand(None)
    if call.caster is not None and call.split.gathers_input and call.caster.has_one_scale:
        return part._replace(columns=None)
    return part.for_gradients()


def whole_gradient(call: LayerCall, gradient: Tensor, has_bias: bool) -> tuple[MatmulOperand, Tensor | None]:
    """The gradient of the output as products read it, of all ranks' rows where they are gathered, and the bias' if the
    cast or a sum of its own makes it."""
    gathers = call.split.gathers_gradient
    if call.caster is None:
        return MatmulOperand(gathered(gradient, call.split)[0] if gathers else gradient), None
    columns = call.weight.parameter.requires_grad
    if not gathers:
        return call.caster(gradient, "gradient", columns, has_bias)
    of_bias = gradient.sum(0) if has_bias else None
    part = call.caster(gradient, "gradient", columns and not call.caster.has_one_scale)[0]
    whole, _ = call.caster.gathered(part, columns=False)
    if call.caster.has_one_scale:
        return call.caster.with_columns(whole), of_bias
    other, _ = call.caster.gathered(part, columns=True)
    return whole._replace(columns=other.columns, column_scales=other.column_scales), of_bias


def output_of(call: LayerCall, x: MatmulOperand, weight: MatmulOperand, bias: Tensor | None) -> Tensor:
    out = products.output(x, weight, bias, call.dtype)
    return summed(out, call.split)[0] if call.split.mode == "row" and call.split.size > 1 else out


def input_gradient_of(call: LayerCall, gradient: MatmulOperand, weight: MatmulOperand) -> tuple[Tensor, Any]:
    """The gradient of the input, and the collective to wait for: the sum over ranks runs beside the weight's
    gradient."""
    of_x = products.input_gradient(gradient, weight, call.dtype)
    is_split = call.split.mode == "column" and call.split.size > 1
    return summed(of_x, call.split, is_async=True) if is_split else (of_x, None)


def parameter_gradients(
    call: LayerCall, gradient: MatmulOperand, x: MatmulOperand, has_bias: bool, of_bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of the weight and of the bias; the product adds up the latter if no kernel before it has."""
    if call.caster is not None:
        x = call.caster.with_columns(x)
    into, accumulates = call.weight.into()
    fuses = has_bias and of_bias is None
    made, added = products.weight_gradient(gradient, x, call.dtype, into, accumulates, fuses)
    return (call.weight.stand_in() if into is not None else made), added if fuses else of_bias


def through_norm(
    of_x: Tensor, of_normed: Tensor | None, rows: Tensor, statistics: Sequence[Tensor], weight: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients of the norm's input, weight and bias. `of_normed` is there if the layer returned the normed input."""
    of_x = of_x if of_normed is None else of_x + of_normed.reshape(of_x.shape)
    return norms.norm_gradients(of_x, rows, list(statistics), weight)


class Linearly(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
        call: LayerCall,
    ) -> Any:  # fmt: skip
        rows = flat(x).to(call.dtype)
        if call.caster is not None:
            check_shapes(rows, weight)
        norm = None if norm_weight is None else (norm_weight, norm_bias)
        part, out_of_norm, statistics = prepared(call, rows, norm)
        whole, _ = whole_input(call, part, columns=False)
        reaches = call.is_training and (x.requires_grad or norm is not None)  # there is a gradient before this product
        of_weight = call.weight.operand(weight, call.caster, call.dtype, reaches)
        out = output_of(call, whole, of_weight, None if bias is None else bias.to(call.dtype))
        if call.is_training:
            kept = kept_for_gradient(call, part), of_weight.for_gradients()
            ctx.save_for_backward(*kept[0], *kept[1], rows if norm else None, norm_weight, *statistics)
        ctx.call, ctx.has_bias, ctx.shape = call, bias is not None, x.shape
        ctx.set_materialize_grads(False)
        call.layer.will_run_backward(ctx)
        out = out.view(-1, *x.shape[1:-1], out.shape[-1])
        return (out, out_of_norm.view(x.shape)) if out_of_norm is not None else out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_normed: Tensor | None = None) -> Any:
        call: LayerCall = ctx.call
        x, weight = operands_of(ctx.saved_tensors[:8])
        rows, norm_weight, *statistics = ctx.saved_tensors[8:]
        needs_weight = ctx.needs_input_grad[3]
        whole, of_bias = whole_gradient(call, flat(gradient), ctx.has_bias)
        whole_x, works = whole_input(call, x, columns=True, is_async=True) if needs_weight else (x, [])
        of_x, work = input_gradient_of(call, whole, weight) if any(ctx.needs_input_grad[:3]) else (None, None)
        for each in works:
            wait(each)
        of_weight = of_norm_weight = of_norm_bias = None
        if needs_weight:
            of_weight, of_bias = parameter_gradients(call, whole, whole_x, ctx.has_bias, of_bias)
        wait(work)
        if of_x is not None and norm_weight is not None:
            of_x, of_norm_weight, of_norm_bias = through_norm(of_x, of_normed, rows, statistics, norm_weight)
        call.layer.ran_backward(ctx)
        of_x = None if of_x is None else of_x.view(ctx.shape)
        of_bias = of_bias if ctx.needs_input_grad[4] else None
        return of_x, of_norm_weight, of_norm_bias, of_weight, of_bias, None


class Linear(EngineLayer):
    """transformer_engine.pytorch.Linear."""

    normalization: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        return_bias: bool = False,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        parameters_split: Any = None,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        refuse({"return_layernorm_output_gathered": return_layernorm_output_gathered})
        self.in_features = self.share(in_features, self.parallel_mode == "row")
        self.out_features = self.share(out_features, self.parallel_mode == "column")
        self.use_bias, self.return_bias = bias, return_bias
        self.apply_bias, self.gemm_bias_unfused_add = bias and not return_bias, False
        self.return_layernorm_output, self.eps = return_layernorm_output, eps
        self.zero_centered_gamma = zero_centered_gamma
        if self.normalization is not None:
            self.normalization = normalization
            self.make_norm(in_features, "layer_norm", zero_centered_gamma, normalization)
        self.make_weights(self.out_features, self.in_features, parameters_split, bias)

    def forward(self, x: Tensor, is_first_microbatch: bool | None = None, fp8_output: bool = False, **_: Any) -> Any:
        weight, bias = self.whole_weight()
        dtype, split = activation_dtype(x), self.split
        call = LayerCall(
            self, WeightUse(self, "weight", weight, is_first_microbatch), caster_of(self, split), split, dtype,
            torch.is_grad_enabled(), self.return_layernorm_output,
        )  # fmt: skip
        added = bias if self.apply_bias and not self.adds_bias_later else None
        out = Linearly.apply(x, *self.norm(dtype), weight, added, call)
        out, normed = out if self.return_layernorm_output else (out, None)
        if self.apply_bias and self.adds_bias_later and bias is not None:
            out = out + bias.to(dtype)
        return self.result(out, bias, normed)


class LayerNormLinear(Linear):
    """transformer_engine.pytorch.LayerNormLinear."""

    normalization = "LayerNorm"

    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(in_features, out_features, eps=eps, **options)
