"""Element-wise ops and losses against their formulas, which are run: on numbers that count what is done to them.

A formula must compute what torch computes, and the rule must count its operations. One each for +, -, ×, ÷, rounding
and negation, one (and one transcendental) for a library function; none for a comparison, a maximum or a sign that is
set. What is made of numbers alone is a constant of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from costs_support import call_by_hand, costs_in
from torch._ops import OpOverload

from flopmeter.costs import costs_of

aten = torch.ops.aten
N = 7  # elements of each operand


class Counted:
    """A float that adds each operation to its tally of (operations, functions)."""

    def __init__(self, value: float, tally: list[int]):
        self.value, self.tally = value, tally

    def _after(self, value: float, *, function: bool = False) -> Counted:
        self.tally[0] += 1
        self.tally[1] += function
        return Counted(value, self.tally)

    def __add__(self, other: Any) -> Counted:
        return self._after(self.value + plain(other))

    def __sub__(self, other: Any) -> Counted:
        return self._after(self.value - plain(other))

    def __rsub__(self, other: Any) -> Counted:
        return self._after(plain(other) - self.value)

    def __mul__(self, other: Any) -> Counted:
        return self._after(self.value * plain(other))

    def __truediv__(self, other: Any) -> Counted:
        return self._after(self.value / plain(other))

    def __rtruediv__(self, other: Any) -> Counted:
        return self._after(plain(other) / self.value)

    def __neg__(self) -> Counted:
        return self._after(-self.value)

    __radd__, __rmul__ = __add__, __mul__


def plain(x: Any) -> float:
    return x.value if isinstance(x, Counted) else x


def function(of: Callable[[float], float]) -> Callable[[Counted], Counted]:
    return lambda x: x._after(of(x.value), function=True)


exp, log, log1p, tanh, erf, sin = map(function, (math.exp, math.log, math.log1p, math.tanh, math.erf, math.sin))
expm1, sqrt, exp2, log2 = function(math.expm1), function(math.sqrt), function(lambda x: 2.0**x), function(math.log2)


def floor(x: Counted) -> Counted:
    return x._after(float(math.floor(x.value)))


def trunc(x: Counted) -> Counted:
    return x._after(float(math.trunc(x.value)))


def maximum(x: Any, y: Any) -> Counted:
    return x if plain(x) >= plain(y) else y


def minus_abs(x: Counted) -> Counted:
    return Counted(-abs(x.value), x.tally)


def sigmoid(x: Counted) -> Counted:
    return 1 / (1 + exp(-x))


def silu_backward(dy: Any, x: Any) -> Any:
    s = sigmoid(x)
    return dy * s * (1 + x * (1 - s))


def mish_backward(dy: Any, x: Any) -> Any:
    t, s = tanh(log1p(exp(x))), sigmoid(x)
    return dy * (t + x * s * (1 - t * t))


def softplus_backward(dy: Any, x: Any) -> Any:
    z = exp(x * 2.0)
    return dy * z / (z + 1)


def log_sigmoid_backward(dy: Any, x: Any) -> Any:
    z = exp(minus_abs(x))
    sign = 1 if x.value < 0 else -1
    return dy * ((1 if x.value < 0 else 0) - sign * z / (1 + z))


def soft_margin_backward(dy: Any, x: Any, y: Any) -> Any:
    z = exp(-x * y)
    return -y * z / (z + 1) * dy


def gelu_backward(dy: Any, x: Any) -> Any:
    cdf = 0.5 * (1 + erf(x * math.sqrt(0.5)))
    pdf = exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return dy * (cdf + x * pdf)


BETA, KAPPA = math.sqrt(2 / math.pi), 0.044715


def gelu_tanh_backward(dy: Any, x: Any) -> Any:
    """Line by line as in ATen/native/cuda/ActivationGeluKernel.cu."""
    square = x * x
    t = tanh(BETA * (x + KAPPA * (square * x)))
    left, right = 0.5 * x, 1 + t
    inner = BETA * (1 + 3 * KAPPA * square)
    return dy * (0.5 * right + left * (1 - t * t) * inner)


LOW, HIGH = (-0.9, -0.1), (0.1, 0.9)  # ranges of the operands that the branches of the formulas are for
FORMULAS: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[tuple[float, float], ...]]] = {
    "sigmoid": (aten.sigmoid, sigmoid, (LOW,)),
    "sigmoid_backward": (aten.sigmoid_backward, lambda dy, y: dy * (1 - y) * y, (LOW, HIGH)),
    "tanh_backward": (aten.tanh_backward, lambda dy, y: dy * (1 - y * y), (LOW, HIGH)),
    "silu": (aten.silu, lambda x: x / (1 + exp(-x)), (LOW,)),
    "silu_backward": (aten.silu_backward, silu_backward, (LOW, HIGH)),
    "mish": (aten.mish, lambda x: x * tanh(log1p(exp(x))), (LOW,)),
    "mish_backward": (aten.mish_backward.default, mish_backward, (LOW, HIGH)),
    "softplus": (lambda x: aten.softplus(x, 2.0), lambda x: log1p(exp(x * 2.0)) / 2.0, (LOW,)),
    "softplus_backward": (lambda dy, x: aten.softplus_backward(dy, x, 2.0, 20.0), softplus_backward, (LOW, HIGH)),
    "elu": (lambda x: aten.elu(x, 2.0, 3.0, 0.5), lambda x: expm1(x * 0.5) * 6.0, (LOW,)),
    "elu_backward": (
        lambda dy, x: aten.elu_backward(dy, 2.0, 3.0, 0.5, False, x),
        lambda dy, x: dy * 0.5 * 6.0 * exp(x * 0.5),
        (HIGH, LOW),
    ),
    "celu": (lambda x: aten.celu(x, 2.0), lambda x: expm1(x / 2.0) * 2.0, (LOW,)),
    "leaky_relu": (lambda x: aten.leaky_relu(x, 0.1), lambda x: x * 0.1, (LOW,)),
    "leaky_relu_backward": (
        lambda dy, x: aten.leaky_relu_backward(dy, x, 0.1, False), lambda dy, x: dy * 0.1, (HIGH, LOW)
    ),
    "hardsigmoid": (aten.hardsigmoid, lambda x: (x + 3) / 6, (LOW,)),
    "hardsigmoid_backward": (aten.hardsigmoid_backward, lambda dy, x: dy / 6, (LOW, HIGH)),
    "hardswish": (aten.hardswish, lambda x: x * (x + 3) / 6, (LOW,)),
    "hardswish_backward": (aten.hardswish_backward, lambda dy, x: dy * (x / 3 + 0.5), (LOW, HIGH)),
    "log_sigmoid": (
        lambda x: aten.log_sigmoid_forward(x)[0], lambda x: -log1p(exp(minus_abs(x))), (HIGH,)
    ),
    "log_sigmoid_backward": (
        lambda dy, x: aten.log_sigmoid_backward(dy, x, torch.exp(-x.abs()).to(x.device)), log_sigmoid_backward,
        (HIGH, LOW),
    ),
    "logit": (aten.logit, lambda x: log(x / (1 - x)), (HIGH,)),
    "logit_backward": (aten.logit_backward, lambda dy, x: dy / (x * (1 - x)), (LOW, HIGH)),
    "logaddexp": (aten.logaddexp, lambda a, b: maximum(a, b) + log1p(exp(minus_abs(a - b))), (LOW, HIGH)),
    "logaddexp2": (aten.logaddexp2, lambda a, b: maximum(a, b) + log2(1 + exp2(minus_abs(a - b))), (LOW, HIGH)),
    "xlogy": (aten.xlogy, lambda x, y: x * log(y), (LOW, HIGH)),
    "special_xlog1py": (aten.special_xlog1py, lambda x, y: x * log1p(y), (LOW, HIGH)),
    "special_entr": (aten.special_entr, lambda x: -x * log(x), (HIGH,)),
    "sinc": (aten.sinc, lambda x: (lambda y: sin(y) / y)(math.pi * x), (HIGH,)),
    "floor_divide": (aten.floor_divide, lambda a, b: floor(a / b), (LOW, HIGH)),
    "div floor": (lambda a, b: aten.div(a, b, rounding_mode="floor"), lambda a, b: floor(a / b), (LOW, HIGH)),
    "frac": (aten.frac, lambda x: x - trunc(x), (LOW,)),
    "fmod": (aten.fmod, lambda a, b: a - trunc(a / b) * b, (LOW, HIGH)),
    "remainder": (aten.remainder, lambda a, b: a - floor(a / b) * b, (LOW, HIGH)),
    "_prelu_kernel": (aten._prelu_kernel, lambda x, w: x * w, (LOW, HIGH)),
    "glu": (lambda a, b: aten.glu(torch.cat([a, b])), lambda a, b: a * sigmoid(b), (LOW, HIGH)),
    "gelu": (aten.gelu, lambda x: 0.5 * x * (1 + erf(x * math.sqrt(0.5))), (LOW,)),
    "gelu tanh": (
        lambda x: aten.gelu(x, approximate="tanh"),
        lambda x: 0.5 * x * (1 + tanh(BETA * (x + KAPPA * x * x * x))),
        (LOW,),
    ),
    "gelu_backward": (aten.gelu_backward, gelu_backward, (LOW, HIGH)),
    "gelu_backward tanh": (
        lambda dy, x: aten.gelu_backward(dy, x, approximate="tanh"), gelu_tanh_backward, (LOW, HIGH)
    ),
    "pow 0": (lambda x: aten.pow(x, 0), lambda x: Counted(1.0, x.tally), (LOW,)),
    "pow 1": (lambda x: aten.pow(x, 1), lambda x: x, (LOW,)),
    "pow 2": (lambda x: aten.pow(x, 2), lambda x: x * x, (LOW,)),
    "pow 3": (lambda x: aten.pow(x, 3), lambda x: x * x * x, (LOW,)),
    "pow -1": (lambda x: aten.pow(x, -1), lambda x: 1 / x, (LOW,)),
    "pow -2": (lambda x: aten.pow(x, -2), lambda x: 1 / (x * x), (LOW,)),
    "pow half": (lambda x: aten.pow(x, 0.5), sqrt, (HIGH,)),
    "add": (aten.add, lambda a, b: a + b, (LOW, HIGH)),
    "add alpha": (lambda a, b: aten.add(a, b, alpha=3), lambda a, b: a + 3 * b, (LOW, HIGH)),
    "rsub": (aten.rsub, lambda a, b: b - a, (LOW, HIGH)),
    "lerp": (lambda a, b: aten.lerp(a, b, 0.3), lambda a, b: a + 0.3 * (b - a), (LOW, HIGH)),
    "addcmul": (aten.addcmul, lambda a, b, c: a + b * c, (LOW, HIGH, LOW)),
    "addcdiv": (lambda a, b, c: aten.addcdiv(a, b, c, value=2), lambda a, b, c: a + 2 * b / c, (LOW, HIGH, LOW)),
    # losses, element by element; x - y is small: the quadratic branch of the robust ones
    "mse_loss": (lambda x, y: aten.mse_loss(x, y, 0), lambda x, y: (lambda d: d * d)(x - y), (HIGH, HIGH)),
    "smooth_l1_loss": (
        lambda x, y: aten.smooth_l1_loss(x, y, 0, 2.0), lambda x, y: (lambda d: 0.5 * d * d / 2.0)(x - y), (HIGH, HIGH)
    ),
    "huber_loss": (
        lambda x, y: aten.huber_loss(x, y, 0, 2.0), lambda x, y: (lambda d: 0.5 * d * d)(x - y), (HIGH, HIGH)
    ),
    "binary_cross_entropy": (
        lambda x, y: aten.binary_cross_entropy(x, y, None, 0),
        lambda x, y: -(y * log(x) + (1 - y) * log(1 - x)),
        (HIGH, HIGH),
    ),
    "soft_margin_loss": (
        lambda x, y: aten.soft_margin_loss(x, y, 0), lambda x, y: log1p(exp(-x * y)), (LOW, HIGH)
    ),
    "soft_margin_loss_backward": (
        lambda dy, x, y: aten.soft_margin_loss_backward(dy, x, y, 0), soft_margin_backward, (LOW, HIGH, LOW)
    ),
    "mse_loss_backward": (
        lambda dy, x, y: aten.mse_loss_backward(dy, x, y, 1), lambda dy, x, y: 2 / N * (x - y) * dy, (LOW, HIGH, LOW)
    ),
    "smooth_l1_loss_backward": (
        lambda dy, x, y: aten.smooth_l1_loss_backward(dy, x, y, 1, 2.0),
        lambda dy, x, y: (x - y) / 2.0 * (1 / N) * dy,
        (LOW, HIGH, HIGH),
    ),
    "huber_loss_backward": (
        lambda dy, x, y: aten.huber_loss_backward(dy, x, y, 1, 2.0),
        lambda dy, x, y: (x - y) * (1 / N) * dy,
        (LOW, HIGH, HIGH),
    ),
    "binary_cross_entropy_backward": (
        lambda dy, x, y: aten.binary_cross_entropy_backward(dy, x, y, None, 1),
        lambda dy, x, y: dy * (x - y) / ((1 - x) * x) / N,
        (LOW, HIGH, HIGH),
    ),
}  # fmt: skip


def operands(ranges: tuple[tuple[float, float], ...]) -> list[torch.Tensor]:
    return [torch.rand(N, generator=torch.Generator().manual_seed(i)) * (b - a) + a for i, (a, b) in enumerate(ranges)]


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_computes_what_torch_does_and_its_operations_are_counted(name):
    op, formula, ranges = FORMULAS[name]
    given = operands(ranges)
    tally = [0, 0]
    rows = zip(*(x.tolist() for x in given), strict=True)
    by_formula = [formula(*(Counted(x, tally) for x in row)).value for row in rows]
    torch.testing.assert_close(op(*given), torch.tensor(by_formula), rtol=1e-4, atol=1e-6)
    if isinstance(op, OpOverload):  # a composite where there is no GPU
        costs = costs_of(call_by_hand(op, tuple(given), (given[0],)))
    else:
        *before, last = costs_in(lambda: op(*(x.to("meta") for x in given)))
        costs = [*(cost for cost in before if cost.name == last.name), last]
    assert (sum(cost.flops for cost in costs), sum(cost.transcendentals for cost in costs)) == tuple(tally)


FUNCTIONS = [
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "sin", "cos", "tan", "asin", "acos",
    "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "erf", "erfc", "erfinv", "lgamma", "digamma", "i0",
]  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("variant", ["", "_"])
def test_a_function_is_one_operation_and_one_transcendental(name, variant):
    (cost,) = costs_in(lambda: getattr(aten, name + variant)(torch.empty(N, device="meta")))
    assert (cost.flops, cost.transcendentals) == (N, N)


@pytest.mark.parametrize("op", [aten.relu, aten.abs_, aten.sign, aten.isnan, aten.trunc, aten.hardtanh])
def test_a_comparison_or_selection_is_none_and_rounding_and_absolute_value_one(op):
    (cost,) = costs_in(lambda: op(torch.empty(N, device="meta")))
    assert cost.flops == (N if op in (aten.abs_, aten.trunc) else 0)
    assert cost.transcendentals == 0


# Operations on real numbers that one on complex numbers takes, by hand: a + b i.
COMPLEX = {
    "add": (lambda x, y: aten.add(x, y), 2, 0),
    "add alpha": (lambda x, y: aten.add(x, y, alpha=2), 8, 0),  # as a multiply-add
    "mul": (lambda x, y: aten.mul(x, y), 4 + 2, 0),
    "div": (lambda x, y: aten.div(x, y), (4 + 2) + 3 + 2, 0),  # times the conjugate; |y|²; two divisions
    "neg": (lambda x, y: aten.neg(x), 2, 0),
    "reciprocal": (lambda x, y: aten.reciprocal(x), 11, 0),
    "abs": (lambda x, y: aten.abs(x), 4, 1),  # sqrt(a·a + b·b)
    "angle": (lambda x, y: aten.angle(x), 1, 1),  # atan2(b, a)
    "sgn": (lambda x, y: aten.sgn(x), 4 + 2, 1),  # z / |z|
    "conj_physical": (lambda x, y: aten._conj_physical(x), 1, 0),
    "exp": (lambda x, y: aten.exp(x), 4, 4),  # four times a real function
    "polar": (lambda x, y: aten.polar(x.real, y.real), 4, 2),
}


@pytest.mark.parametrize("name", COMPLEX)
def test_an_operation_on_complex_numbers_counts_its_real_ones(name):
    op, flops, functions = COMPLEX[name]
    x, y = (torch.empty(N, dtype=torch.complex64, device="meta") for _ in range(2))
    cost = costs_in(lambda: op(x, y))[-1]
    assert (cost.flops, cost.transcendentals) == (flops * N, functions * N)
