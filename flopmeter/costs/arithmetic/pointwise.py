"""Element-wise work: how many arithmetic operations an output element takes, op by op.

The default for an op that torch tags as pointwise is one; the table below holds the others, each
counted on the formula in its comment. The second number says how many of them are transcendental.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverloadPacket

from flopmeter.costs.index_arithmetic import CAST_OPERATIONS, SINGLE_CAST_OPERATIONS, index_operations
from flopmeter.costs.instructions import OF_KERNELS
from flopmeter.costs.rules import (
    COMPLEX_ADD,
    COMPLEX_DIVIDE,
    COMPLEX_MULTIPLY,
    COMPLEX_OTHER,
    FREE,
    is_complex,
    make_cost,
    rule,
    scratch,
)
from flopmeter.records import ELEMENTWISE, MOVEMENT, Call, Cost, TensorSpec, ThreadGrid, VectorWork
from flopmeter.torch_names.operators import aten


class PerElement(NamedTuple):
    flops: int
    transcendentals: int = 0


ONE = PerElement(1)
NONE = PerElement(0)
FUNCTION = PerElement(1, 1)  # one call of a library function


def _words(text: str) -> list[str]:
    return text.split()


_COMPARISONS_AND_SELECTIONS = _words("""
    eq ne lt le gt ge isnan isposinf isneginf signbit sign sgn logical_and logical_or logical_not
    logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor bitwise_left_shift bitwise_right_shift __lshift__
    __rshift__ __ilshift__ __irshift__ where masked_fill_ clamp clamp_min clamp_max max min maximum minimum fmax
    fmin relu hardtanh hardtanh_backward threshold threshold_backward heaviside copysign nextafter nan_to_num
    hardshrink softshrink hardshrink_backward softshrink_backward frexp angle complex _conj_physical
""")

_FUNCTIONS = _words("""
    exp exp2 expm1 log log2 log10 log1p sqrt rsqrt sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh
    erf erfc erfinv atan2 hypot lgamma digamma polygamma igamma igammac i0 special_i0e special_i1 special_i1e
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
    special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
    special_erfcx special_log_ndtr special_ndtri special_zeta special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_shifted_chebyshev_polynomial_t special_shifted_chebyshev_polynomial_u
    special_shifted_chebyshev_polynomial_v special_shifted_chebyshev_polynomial_w special_hermite_polynomial_h
    special_hermite_polynomial_he special_laguerre_polynomial_l special_legendre_polynomial_p
""")

_FORMULAS = {
    **dict.fromkeys(("abs_", "gcd_", "lcm_"), ONE),  # torch tags only their functional forms
    "sigmoid": PerElement(4, 1),  # 1 / (1 + exp(-x))
    "sigmoid_backward": PerElement(3),  # dy * (1 - y) * y
    "tanh_backward": PerElement(3),  # dy * (1 - y*y)
    "silu": PerElement(4, 1),  # x / (1 + exp(-x))
    "silu_backward": PerElement(9, 1),  # s = sigmoid(x); dy * s * (1 + x * (1 - s))
    "mish": PerElement(4, 3),  # x * tanh(log1p(exp(x)))
    "mish_backward": PerElement(13, 4),  # t = tanh(softplus(x)) 3, s = sigmoid(x) 4; dy * (t + x*s*(1 - t*t)) 6
    "softplus": PerElement(4, 2),  # log1p(exp(x * beta)) / beta
    "softplus_backward": PerElement(5, 1),  # z = exp(x * beta); dy * z / (z + 1)
    "elu": PerElement(3, 1),  # expm1(x * a) * b
    "elu_backward": PerElement(5, 1),  # dy * a * b * exp(x * a)
    "celu": PerElement(3, 1),
    "leaky_relu": ONE,  # x * slope
    "leaky_relu_backward": ONE,
    "hardsigmoid": PerElement(2),  # (x + 3) / 6
    "hardsigmoid_backward": ONE,  # dy / 6
    "hardswish": PerElement(3),  # x * (x + 3) / 6
    "hardswish_backward": PerElement(3),  # dy * (x/3 + 1/2)
    "log_sigmoid_forward": PerElement(3, 2),  # -log1p(exp(-|x|))
    "log_sigmoid_backward": PerElement(6, 1),  # z = exp(-|x|); dy * (c - s * z / (1 + z))
    "logit": PerElement(3, 1),  # log(x / (1 - x))
    "logit_backward": PerElement(3),  # dy / (x * (1 - x))
    "logaddexp": PerElement(4, 2),  # max + log1p(exp(-|a - b|)), the sign set
    "logaddexp2": PerElement(5, 2),  # max + log2(1 + exp2(-|a - b|))
    "xlogy": PerElement(2, 1),  # x * log(y)
    "special_xlog1py": PerElement(2, 1),
    "special_entr": PerElement(3, 1),  # -x * log(x)
    "sinc": PerElement(3, 1),  # sin(pi x) / (pi x)
    "floor_divide": PerElement(2),  # floor(a / b)
    "rrelu_with_noise": ONE,  # x * noise
    "rrelu_with_noise_backward": ONE,
    "linalg_cross": PerElement(3),  # a * b - c * d
    "frac": PerElement(2),  # x - trunc(x)
    "fmod": PerElement(4),  # a - trunc(a / b) * b
    "remainder": PerElement(4),  # a - floor(a / b) * b
    "native_dropout_backward": ONE,  # dy * mask, the scale folded into the mask
    "_prelu_kernel": ONE,  # x * weight
    "_prelu_kernel_backward": PerElement(2),  # dy * weight, dy * x
    "glu": PerElement(5, 1),  # a * sigmoid(b)
    "binary_cross_entropy_backward": PerElement(6),  # dy * (x - y) / ((1 - x) * x) / n
}

OF_COMPLEX = {  # real operations of complex ops, by name, where they are not four times those of the real op
    "neg": PerElement(COMPLEX_ADD),
    **dict.fromkeys(("mul", "square"), PerElement(COMPLEX_MULTIPLY)),
    **dict.fromkeys(("div", "reciprocal"), PerElement(COMPLEX_DIVIDE)),
    "lerp": PerElement(2 * COMPLEX_ADD + COMPLEX_MULTIPLY),
    "abs": PerElement(4, 1),  # sqrt(a*a + b*b)
    "sgn": PerElement(6, 1),  # z / |z|
    "angle": FUNCTION,  # atan2(b, a)
    **dict.fromkeys(("_conj_physical", "conj_physical"), ONE),  # -b
}

BY_NAME = dict.fromkeys(_COMPARISONS_AND_SELECTIONS, NONE) | dict.fromkeys(_FUNCTIONS, FUNCTION) | _FORMULAS
PER_ELEMENT: dict[OpOverloadPacket, PerElement] = {  # each functional op together with its in-place form
    packet: per_element for name, per_element in BY_NAME.items() for packet in aten.present(name, f"{name}_")
}


def pointwise(call: Call) -> Cost:
    """The default for every op that torch tags as pointwise, and for the table above."""
    packet = call.func.overloadpacket
    name = packet.__name__.removesuffix("_")
    return elementwise(call, PER_ELEMENT.get(packet, ONE), OF_COMPLEX.get(name))


def elementwise(
    call: Call, per_element: PerElement, of_complex: PerElement | None = None, *, fused_multiply_add: bool = False
) -> Cost:
    """The given operations for each element of the (first) output, broadcast operands included. Complex numbers take
    `of_complex` or, without it, four times as many."""
    operands = (*call.outputs, *call.inputs)
    n = operands[0].numel
    flops, transcendentals = of_numbers(call, per_element, of_complex)
    cost = make_cost(
        call,
        ELEMENTWISE,
        flops * n,
        transcendentals=transcendentals * n,
        fused_multiply_add=fused_multiply_add,
        complex_factor=1,
        walks=operands,
        index_operations=_looked_up_and_cast(operands),
    )
    way = ", tanh" if call.get("approximate") == "tanh" else ""
    instructions = n * OF_KERNELS.get(call.func.overloadpacket.__name__.removesuffix("_") + way, 0)
    if not transcendentals or not instructions or not isinstance(cost.work, VectorWork) or is_complex(call):
        return cost
    return replace(cost, work=cost.work._replace(instructions=instructions))


def _looked_up_and_cast(operands: Sequence[TensorSpec]) -> int | None:
    """Integer operations of a kernel whose operands have several types: it asks for that of each at run time and casts
    it (`needs_dynamic_casting`, FunctionTraits.h and CUDALoops.cuh); a mask has one of its own. None where it casts
    nothing."""
    device = operands[0].device
    types = {spec.dtype for spec in operands if spec.device == device and spec.dtype is not torch.bool}
    if len(types) < 2:
        return None
    operations = index_operations(operands)
    return operations + operands[0].numel * (SINGLE_CAST_OPERATIONS if operations else CAST_OPERATIONS)


def of_numbers(call: Call, per_element: PerElement, of_complex: PerElement | None) -> PerElement:
    """Real operations for each element, by whether the call's numbers are complex."""
    if not is_complex(call):
        return per_element
    return of_complex or PerElement(*(COMPLEX_OTHER * count for count in per_element))


rule(*PER_ELEMENT)(pointwise)


@rule(aten.conj_physical_)
def conjugate_in_place(call: Call) -> Cost | tuple[Cost, ...]:
    """Real numbers are left alone (`conj_physical_` in UnaryOps.cpp)."""
    return pointwise(call) if is_complex(call) else FREE


@rule(aten.add, aten.add_, aten.sub, aten.sub_, aten.rsub)
def add(call: Call) -> Cost:
    """a + alpha·b: one more where alpha is not 1, a multiply-add then."""
    scaled = call.argument("alpha") != 1
    return elementwise(call, *sum_of_scaled(scaled), fused_multiply_add=scaled)


def sum_of_scaled(scaled: bool) -> tuple[PerElement, PerElement]:
    """a + b or a + alpha·b: operations on real and on complex numbers."""
    return PerElement(1 + scaled), PerElement(COMPLEX_ADD + COMPLEX_MULTIPLY * scaled)


@rule(aten.addcmul, aten.addcmul_, aten.addcdiv, aten.addcdiv_)
def addcmul(call: Call) -> Cost:
    """a + value·b·c (or b / c)."""
    return elementwise(call, *sum_of_product(call, call.argument("value") != 1), fused_multiply_add=True)


def sum_of_product(call: Call, scaled: bool) -> tuple[PerElement, PerElement]:
    """a + b·c or a + value·b·c, or with b / c: operations on real and on complex numbers."""
    joined = COMPLEX_DIVIDE if "addcdiv" in call.func.overloadpacket.__name__ else COMPLEX_MULTIPLY
    return PerElement(2 + scaled), PerElement(COMPLEX_ADD + joined + COMPLEX_MULTIPLY * scaled)


@rule(aten.lerp, aten.lerp_)
def lerp(call: Call) -> Cost:
    """a + weight · (b - a)."""
    return elementwise(call, PerElement(3), OF_COMPLEX["lerp"], fused_multiply_add=True)


@rule(aten.pow, aten.pow_)
def power(call: Call) -> Cost:
    """x·x for exponent 2, x·x·x for 3, a square root for 1/2, a reciprocal for -1; else a function."""
    return elementwise(call, *power_of(call.argument("exponent")))


def power_of(exponent: Any) -> tuple[PerElement, PerElement | None]:
    """Operations on real and on complex numbers; an exponent that is no number is a tensor."""
    known: dict[float, int] = {0: 0, 1: 0, 2: 1, 3: 2, -1: 0, -2: 1}
    multiplies = known.get(exponent) if isinstance(exponent, (int, float)) else None
    if multiplies is None:
        return FUNCTION, None
    divides = int(exponent < 0)
    return PerElement(multiplies + divides), PerElement(COMPLEX_MULTIPLY * multiplies + COMPLEX_DIVIDE * divides)


@rule(aten.gelu, aten.gelu_)
def gelu(call: Call) -> Cost:
    """0.5·x·(1 + erf(x/√2)); or 0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x·x·x)))."""
    is_tanh = call.argument("approximate") == "tanh"
    return elementwise(call, PerElement(9, 1) if is_tanh else PerElement(5, 1))


@rule(aten.gelu_backward)
def gelu_backward(call: Call) -> Cost:
    """dy·(Φ(x) + x·φ(x)): Φ 4 with erf, φ 4 with exp, and 3 to join them; with tanh 18, as in
    torch's own kernel (ActivationGeluKernel.cu)."""
    is_tanh = call.argument("approximate") == "tanh"
    return elementwise(call, PerElement(18, 1) if is_tanh else PerElement(11, 2))


@rule(aten.native_dropout)
def dropout(call: Call) -> Cost:
    """The multiply; random numbers are no FLOPs, and the mask that is kept is one byte an element."""
    n = call.outputs[0].numel
    if call.argument("train") is False:
        return elementwise(call, NONE)
    return make_cost(call, ELEMENTWISE, n, complex_factor=1, index_operations=0, random_numbers=n)


@rule(aten.glu_backward)
def glu_backward(call: Call) -> Cost:
    """For each pair a, b, with s = sigmoid(b) (4): dy·s for a, that times a·(1 - s) for b."""
    pairs = call.inputs[0].numel
    return make_cost(call, ELEMENTWISE, 8 * pairs, transcendentals=pairs)


@rule(aten.isinf)
def isinf(call: Call) -> tuple[Cost, ...]:
    """|x| == inf, the absolute value by a kernel of its own; of a complex number each part, and then whether one is.
    No integer is: zeros (aten/src/ATen/native/TensorCompare.cpp)."""
    (x,), (out,) = call.inputs, call.outputs
    if not x.is_floating:
        return (make_cost(call, MOVEMENT, read=()),)

    def of(part: TensorSpec, found: TensorSpec) -> tuple[Cost, Cost]:
        size = scratch(part)
        absolute = make_cost(call, ELEMENTWISE, part.numel, complex_factor=1, read=(part,), written=(size,))
        return absolute, make_cost(call, ELEMENTWISE, read=(size,), written=(found,))

    if not x.dtype.is_complex:
        return of(x, out)
    real = x._replace(dtype=x.dtype.to_real(), stride=tuple(2 * step for step in x.stride), offset=2 * x.offset)
    also = scratch(out, 2)
    either = make_cost(call, ELEMENTWISE, read=(out, also))
    return (*of(real, out), *of(real._replace(offset=real.offset + 1), also), either)


@rule(*aten.present("ldexp", "ldexp_"))
def ldexp(call: Call) -> tuple[Cost, Cost]:
    """x·2^n, the power by a kernel of its own (aten/src/ATen/native/BinaryOps.cpp)."""
    (x, n), (out,) = call.inputs[:2], call.outputs
    power = scratch(n, 1)._replace(dtype=out.dtype)
    return (
        make_cost(call, ELEMENTWISE, n.numel, transcendentals=n.numel, read=(n,), written=(power,)),
        make_cost(call, ELEMENTWISE, out.numel, read=(x, power)),
    )


@rule(aten.polar)
def polar(call: Call) -> Cost:
    """r·cos(φ) + i·r·sin(φ)."""
    return elementwise(call, PerElement(4, 2), PerElement(4, 2))


@rule(aten._weight_norm_interface)
def weight_norm(call: Call) -> Cost:
    """v·(g / |v|): square, add, multiply."""
    v = call.inputs[0]
    return make_cost(call, ELEMENTWISE, 3 * v.numel, fused_multiply_add=True, grid=_rows_or_columns(call, v))


@rule(aten._weight_norm_interface_backward)
def weight_norm_backward(call: Call) -> Cost:
    """The sum of dw·v (2), then g/|v|·(dw - v·sum/|v|²): three."""
    v = call.outputs[0]
    return make_cost(call, ELEMENTWISE, 5 * v.numel, fused_multiply_add=True, grid=_rows_or_columns(call, v))


def _rows_or_columns(call: Call, v: TensorSpec) -> ThreadGrid:
    """A block of 256 threads for each row, or for 16 columns one of 64 in each; threads walk over all of it for the
    norm, and again to write (aten/src/ATen/native/cuda/WeightNorm.cu)."""
    if call.argument("dim") == 0:
        return ThreadGrid(v.shape[0], 256, 2 * ceil(v.numel / max(1, v.shape[0]) / 256))
    columns = v.shape[-1]
    return ThreadGrid(ceil(columns / 16), 16 * 64, 2 * ceil(v.numel / max(1, columns) / 64))


@rule(aten._transform_bias_rescale_qkv)
def bias_rescale_qkv(call: Call) -> Cost:
    """Adds the bias to q, k and v and scales q, a third of them."""
    n = call.inputs[0].numel
    return make_cost(call, ELEMENTWISE, n + n // 3)


@rule(aten.div, aten.div_)
def div(call: Call) -> Cost:
    """One operation, and one more to round if a rounding mode is given."""
    rounds = call.get("rounding_mode") is not None
    return elementwise(call, PerElement(1 + rounds), OF_COMPLEX["div"])


@rule(aten.clone, aten._to_copy, aten.copy_, aten.copy)
def copy(call: Call) -> Cost:
    """Read the source, where it is a tensor and no number, write the destination; a cast is a copy."""
    # Of the first argument of these only the memory or the shape matters.
    is_onto = call.func.overloadpacket in (aten.copy_, aten.copy)
    return make_cost(call, MOVEMENT, read=call.inputs[is_onto : is_onto + 1])
