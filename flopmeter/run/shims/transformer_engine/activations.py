"""Activation functions between two products (transformer_engine/common/activation, common/util/cast_gated_kernels.cuh):
one kernel each way, which casts too where the scale is known or belongs to a block."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flopmeter.costs import make_cost
from flopmeter.records import ELEMENTWISE, Call, Cost
from flopmeter.run.shims.kernel import kernel
from flopmeter.run.shims.transformer_engine import casts
from flopmeter.run.shims.transformer_engine.casts import MatmulOperand
from flopmeter.run.shims.transformer_engine.quantizing import Caster


class _Operations(NamedTuple):
    """An element, forward and backward, as in costs/arithmetic/pointwise.py, and how many of them are exp or tanh."""

    forward: int
    backward: int
    functions: int


_OPERATIONS = {
    "gelu": _Operations(9, 18, 1),
    "qgelu": _Operations(5, 10, 1),  # x·sigmoid(1.702·x)
    "relu": _Operations(1, 1, 0),
    "srelu": _Operations(2, 2, 0),  # the square of relu
    "silu": _Operations(4, 9, 1),
}
_GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
NAMES = (*_OPERATIONS, *_GATED)


def is_gated(name: str) -> bool:
    """Whether half of the elements are multiplied with the activations of the other half."""
    return name in _GATED


def _operations(name: str) -> _Operations:
    plain = _OPERATIONS[_GATED.get(name, name)]
    return plain._replace(forward=plain.forward + 1, backward=plain.backward + 2) if is_gated(name) else plain


def _forward_cost(call: Call) -> Cost:
    operations, n = _operations(call.argument("name")), call.inputs[0].numel // (1 + is_gated(call.argument("name")))
    each = operations.forward + (casts.SCALED if call.argument("scheme") else 0)
    return make_cost(call, ELEMENTWISE, each * n, transcendentals=operations.functions * n)


@kernel("te_activation", _forward_cost)
def _activation(
    x: Tensor, name: str, scale: Tensor | None, scheme: str, dtype: torch.dtype, columns: bool, finds_largest: bool
) -> list[Tensor]:
    """The activation of [M, N], or of a gated [M, 2N]. `scheme` of the cast: "" for none, "one" scale, or "mx" for
    blocks in both directions."""
    out = x[:, : x.shape[1] // 2] if is_gated(name) else x
    made = casts.rows_and_columns(x, out.shape, scheme, dtype, columns)
    return [*made, x.new_empty(1, dtype=torch.float32)] if finds_largest else made


def _backward_cost(call: Call) -> Cost | tuple[Cost, ...]:
    gradient, adds = call.inputs[0], call.argument("scheme") != ""
    operations, n = _operations(call.argument("name")), gradient.numel
    each = operations.backward + (casts.SCALED + 1 if adds else 0)
    written = call.outputs[:-1] if adds else call.outputs
    cost = make_cost(call, ELEMENTWISE, each * n, transcendentals=operations.functions * n, written=written)
    return (cost, casts.bias_sum(call, gradient.shape[-1], gradient.shape[0])) if adds else cost


@kernel("te_activation_gradient", _backward_cost)
def _activation_gradient(
    gradient: Tensor, x: Tensor, name: str, scale: Tensor | None, scheme: str, dtype: torch.dtype, columns: bool
) -> list[Tensor]:
    """The gradient of x. If it is cast, also its sum over rows, which is the gradient of a bias."""
    made = casts.rows_and_columns(x, x.shape, scheme, dtype, columns)
    return [*made, x.new_empty(x.shape[-1:])] if scheme else made


def activated(x: Tensor, name: str, caster: Caster | None, columns: bool) -> MatmulOperand:
    """The activations as the operand of the next product."""
    if caster is None:
        return MatmulOperand(_activation(x, name, None, "", x.dtype, False, False)[0])
    if caster.recipe.mxfp8():
        return MatmulOperand(*_activation(x, name, None, "mx", caster.dtype("input"), columns, False))
    if caster.has_known_scale:
        return _with_known_scale(x, name, caster, columns and not casts.reads_both_ways())
    out, *rest = _activation(x, name, None, "", x.dtype, False, caster.has_one_scale)
    return caster(out, "input", columns, largest=rest[0] if rest else None)[0]


def _with_known_scale(x: Tensor, name: str, caster: Caster, copies: bool) -> MatmulOperand:
    """The kernel of a gated one writes no columns: they have a kernel of their own."""
    scale, fuses = caster.scale("input", x), copies and not is_gated(name)
    rows, *made = _activation(x, name, scale, "one", caster.dtype("input"), fuses, False)
    columns = made[0] if fuses else casts.transpose(rows) if copies else None
    return caster.with_one_scale(rows, columns, scale)


def activation_gradient(
    gradient: Tensor, x: Tensor, name: str, caster: Caster | None, columns: bool
) -> tuple[MatmulOperand, Tensor | None]:
    """The gradient of x as the operand of the products that follow, and the gradient of the bias before the activation.
    Low precision always makes the latter."""
    recipe = None if caster is None else caster.recipe
    if caster is not None and recipe is not None and (recipe.delayed() or recipe.mxfp8()) and not is_gated(name):
        return _gradient_and_cast(gradient, x, name, caster, columns)
    (of_x,) = _activation_gradient(gradient, x, name, None, "", x.dtype, False)
    return (MatmulOperand(of_x), None) if caster is None else caster(of_x, "gradient", columns, True)


def _gradient_and_cast(
    gradient: Tensor, x: Tensor, name: str, caster: Caster, columns: bool
) -> tuple[MatmulOperand, Tensor | None]:
    dtype = caster.dtype("gradient")
    if caster.recipe.mxfp8():
        *made, of_bias = _activation_gradient(gradient, x, name, None, "mx", dtype, columns)
        return MatmulOperand(*made), of_bias
    scale, copies = caster.scale("gradient", x), columns and not casts.reads_both_ways()
    rows, *rest, of_bias = _activation_gradient(gradient, x, name, scale, "one", dtype, copies)
    return caster.with_one_scale(rows, rest[0] if copies else None, scale), of_bias
