"""Linear layers of experts (transformer_engine/pytorch/module/grouped_linear.py): one product an expert, which cuBLAS
runs on four streams; here one after another. Rows of experts can be padded to what fp8 products need."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flopmeter.costs import make_contraction, make_cost
from flopmeter.records import ELEMENTWISE, MOVEMENT, Call, Cost, Matmul, Region, TensorSpec
from flopmeter.run.shims.kernel import kernel
from flopmeter.run.shims.transformer_engine import products
from flopmeter.run.shims.transformer_engine.base import EngineLayer, WeightUse
from flopmeter.run.shims.transformer_engine.casts import MatmulOperand, activation_dtype, flat, operands_of, packing
from flopmeter.run.shims.transformer_engine.parallel import WeightSplit
from flopmeter.run.shims.transformer_engine.quantizing import Caster, caster_of
from flopmeter.run.shims.transformer_engine.state import REGION

_MULTIPLE = {"one": 16, "mx": 32}  # rows of an expert (pytorch/module/fp8_padding.py)


def _grouped_cost(call: Call) -> tuple[Cost, ...]:
    """A product for each expert that has rows. Each reads its operands, and writes its part of the result."""
    out, scales = call.outputs[0], call.argument("scales")
    biases = call.argument("biases")
    costs = []
    for at, (left, right) in enumerate(zip(call.argument("lefts"), call.argument("rights"), strict=True)):
        rows, columns = left.shape[0], right.shape[1]
        if rows:
            read: list[TensorSpec] = [left, right, *biases[at : at + 1], *scales[2 * at : 2 * at + 2]]
            part = Region(out, rows * columns * out.dtype.itemsize)
            added = ((ELEMENTWISE, rows * columns),) if biases else ()
            product = Matmul(1, rows, columns, left.shape[1] * packing(left.dtype))
            costs.append(make_contraction(call, [product], extra=added, read=tuple(read), written=(part,)))
    return tuple(costs)


@kernel("te_grouped_gemm", _grouped_cost)
def _grouped(
    lefts: list[Tensor], rights: list[Tensor], biases: list[Tensor], scales: list[Tensor], dtype: torch.dtype
) -> Tensor:
    """left [M, K] @ right [K, N] + bias of each, one below the other."""
    return lefts[0].new_empty((sum(left.shape[0] for left in lefts), rights[0].shape[1]), dtype=dtype)


class _Experts(NamedTuple):
    layer: EngineLayer
    weights: list[WeightUse]
    caster: Caster | None
    rows: list[int]
    dtype: torch.dtype
    is_training: bool

    def operands(self, x: Tensor, role: Any, columns: bool, bias_gradient: bool = False) -> Any:
        """The operand of each expert, and the gradients of their biases."""
        parts = x.split(self.rows)
        if self.caster is None:
            return [MatmulOperand(part) for part in parts], [None] * len(parts)
        cast = self.caster
        made = [cast(part, role, columns, bias_gradient) if len(part) else (_empty(part, cast), None) for part in parts]
        return [each for each, _ in made], [added for _, added in made]


def _empty(part: Tensor, caster: Caster) -> MatmulOperand:
    rows = part.new_empty(part.shape, dtype=torch.float8_e4m3fn)
    one = part.new_empty(1, dtype=torch.float32)
    return MatmulOperand(rows, one, rows.t(), one)


def _multiplied(
    lefts: list[MatmulOperand], rights: list[MatmulOperand], call: _Experts, biases: Any, transposes: bool
) -> Tensor:
    """x @ weight^T, or gradient @ weight."""
    if call.caster is None:
        second = [each.rows.t() if transposes else each.rows for each in rights]  # type: ignore[union-attr]
    else:
        second = [(each.rows if transposes else each.columns).t() for each in rights]  # type: ignore[union-attr]
    tables = [
        scale
        for left, right in zip(lefts, rights, strict=True)
        for scale in (left.row_scales, right.row_scales if transposes else right.column_scales)
        if scale is not None
    ]
    return _grouped([each.rows for each in lefts], second, biases, tables, call.dtype)


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: _Experts, *parameters: Tensor) -> Tensor:
        count = len(call.weights)
        weights, biases = parameters[:count], [bias.to(call.dtype) for bias in parameters[count:]]
        inputs, _ = call.operands(flat(x).to(call.dtype), "input", call.is_training and weights[0].requires_grad)
        casts = [
            each.operand(weight, call.caster, call.dtype, call.is_training and x.requires_grad)
            for each, weight in zip(call.weights, weights, strict=True)
        ]
        out = _multiplied(inputs, casts, call, biases, transposes=True)
        if call.is_training:
            kept = [each for operand in (*inputs, *casts) for each in operand.for_gradients()]
            ctx.save_for_backward(*kept)
        ctx.call, ctx.has_bias, ctx.shape = call, bool(biases), x.shape
        call.layer.will_run_backward(ctx)
        return out.view(*x.shape[:-1], out.shape[-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        call, saved, count = ctx.call, ctx.saved_tensors, len(ctx.call.weights)
        operands = operands_of(saved)
        inputs, casts = operands[:count], operands[count:]
        needs_weights = ctx.needs_input_grad[2]
        gradients, added = call.operands(flat(gradient), "gradient", needs_weights, ctx.has_bias)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = _multiplied(gradients, casts, call, [], transposes=False).view(ctx.shape)
        made = [_weight_gradient(call, at, gradients[at], inputs[at], ctx.has_bias) for at in range(count)]
        of_biases = [found if found is not None else each[1] for found, each in zip(added, made, strict=True)]
        call.layer.ran_backward(ctx)
        return of_x, None, *(each[0] for each in made), *(of_biases if ctx.has_bias else [])


def _weight_gradient(call: _Experts, at: int, gradient: MatmulOperand, x: MatmulOperand, has_bias: bool) -> Any:
    weight = call.weights[at]
    into, accumulates = weight.into()
    if not call.rows[at]:
        empty = torch.zeros_like(weight.parameter) if into is None else weight.stand_in()
        return empty, weight.parameter.new_zeros(weight.parameter.shape[0]) if has_bias else None
    fuses = has_bias and call.caster is None
    made, of_bias = products.weight_gradient(gradient, x, call.dtype, into, accumulates, fuses)
    return (weight.stand_in() if into is not None else made), of_bias


class GroupedLinear(EngineLayer):
    """transformer_engine.pytorch.GroupedLinear."""

    def __init__(
        self, num_gemms: int, in_features: int, out_features: int, bias: bool = True, return_bias: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(**options)
        if self.parallel_mode is not None and self.tp_size > 1:
            raise NotImplementedError(
                "flopmeter's shim of transformer_engine has no GroupedLinear with a parallel_mode"
            )
        self.products = self.num_gemms = num_gemms
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.return_bias, self.apply_bias = bias, return_bias, bias and not return_bias
        for at in range(num_gemms):
            self.make_weight(f"weight{at}", torch.empty(out_features, in_features, **self._new), self.parallel_mode)
            values = torch.zeros(out_features, **self._new) if bias else None
            self.make_bias(f"bias{at}", values, self.parallel_mode)

    def forward(self, x: Tensor, m_splits: list[int], is_first_microbatch: bool | None = None) -> Any:
        names = [f"weight{at}" for at in range(self.num_gemms)]
        parameters = [getattr(self, name) for name in names]
        biases = [getattr(self, f"bias{at}") for at in range(self.num_gemms)] if self.use_bias else []
        given = [WeightUse(self, name, each, is_first_microbatch) for name, each in zip(names, parameters, strict=True)]
        rows, dtype = [int(each) for each in m_splits], activation_dtype(x)
        call = _Experts(self, given, caster_of(self, WeightSplit()), rows, dtype, torch.is_grad_enabled())
        added = biases if self.apply_bias else []
        out = _Grouped.apply(x, call, *parameters, *added)
        return (out, [bias.to(dtype) for bias in biases]) if self.return_bias else out


@kernel("te_pad_rows", lambda call: make_cost(call, MOVEMENT))
def _pad(x: Tensor, rows: int) -> Tensor:
    """One kernel for all experts, each way."""
    return x.new_empty((rows, *x.shape[1:]))


class _Padded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.rows = x.shape[0]
        return _pad(x, rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _pad(gradient, ctx.rows), None


class Fp8Padding(nn.Module):
    """Rows of each expert up to a multiple."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.num_gemms, self.align_size = num_gemms, align_size

    def forward(self, inp: Tensor, m_splits: list[int]) -> tuple[Tensor, list[int]]:
        padded = padded_rows(m_splits, self.align_size)
        if padded == list(m_splits):
            return inp, padded
        return _Padded.apply(inp, sum(padded)), padded


class Fp8Unpadding(Fp8Padding):
    """The rows that were there before."""

    def forward(self, inp: Tensor, m_splits: list[int]) -> Tensor:  # type: ignore[override]
        if padded_rows(m_splits, self.align_size) == list(m_splits):
            return inp
        return _Padded.apply(inp, sum(m_splits))


def padded_rows(rows: list[int], multiple: int | None) -> list[int]:
    recipe = REGION.recipe
    multiple = multiple or _MULTIPLE["mx" if recipe is not None and (recipe.mxfp8() or recipe.nvfp4()) else "one"]
    return [-(-each // multiple) * multiple for each in rows]
