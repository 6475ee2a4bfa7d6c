"""Foreach and fused optimizer kernels, which take lists: every tensor of every list is touched.

A call counts as one kernel, with the time of all launches into which torch splits it (multi_tensor.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from torch._ops import OpOverloadPacket

from flopmeter.costs.arithmetic.pointwise import (
    BY_NAME,
    NONE,
    OF_COMPLEX,
    ONE,
    PerElement,
    of_numbers,
    power_of,
    sum_of_product,
    sum_of_scaled,
)
from flopmeter.costs.multi_tensor import in_launches
from flopmeter.costs.rules import make_contraction, make_cost, rule
from flopmeter.costs.traffic import regions
from flopmeter.records import ELEMENTWISE, Call, Cost, Matmul, TensorSpec
from flopmeter.torch_names.operators import aten

_ARITHMETIC = {"mul": ONE, "div": ONE, "neg": ONE, "abs": ONE, "reciprocal": ONE, "round": ONE, "floor": ONE,
               "ceil": ONE, "trunc": ONE, "zero": NONE, "lerp": PerElement(3)}  # fmt: skip
_MULTIPLY_ADDS = ("lerp",)


def _foreach_table() -> dict[OpOverloadPacket, tuple[PerElement, bool]]:
    """Each `_foreach_X` costs what X costs per element: (per element, is multiply-adds throughout)."""
    costs = _ARITHMETIC | BY_NAME
    table = {}
    for name, per_element in costs.items():
        variants = aten.present(f"_foreach_{name}", f"_foreach_{name}_")
        table.update(dict.fromkeys(variants, (per_element, name in _MULTIPLY_ADDS)))
    return table


FOREACH = _foreach_table()


@rule(*FOREACH)
def foreach(call: Call) -> Cost:
    """The given operations for each element of the first list."""
    per_element, is_multiply_add = FOREACH[call.func.overloadpacket]
    name = call.func.overloadpacket.__name__.removeprefix("_foreach_").removesuffix("_")
    counts = of_numbers(call, per_element, OF_COMPLEX.get(name))
    return _of_list(call, counts, fused_multiply_add=is_multiply_add, read=() if name == "zero" else None)


@rule(aten._foreach_add, aten._foreach_add_, aten._foreach_sub, aten._foreach_sub_)
def foreach_add(call: Call) -> Cost:
    """a + alpha·b over a list."""
    scaled = call.get("alpha", 1) != 1
    return _of_list(call, of_numbers(call, *sum_of_scaled(scaled)), fused_multiply_add=scaled)


@rule(aten._foreach_pow, aten._foreach_pow_)
def foreach_pow(call: Call) -> Cost:
    """Each x to one power, or each to a power of its own: as `pow` with that exponent."""
    tensors, exponent = _first_list(call), call.argument("exponent")
    exponents = exponent if isinstance(exponent, tuple) else (exponent,) * len(tensors)
    flops = transcendentals = 0
    for tensor, own in zip(tensors, exponents, strict=True):
        of_one = of_numbers(call, *power_of(own))
        flops += of_one.flops * tensor.numel
        transcendentals += of_one.transcendentals * tensor.numel
    return _launched(call, make_cost(call, ELEMENTWISE, flops, transcendentals=transcendentals, complex_factor=1))


# Operations per parameter of the update formulas in torch/optim (adam.py, sgd.py, adagrad.py).
ADAM = 3 + 4 + 3 + 3  # m += (g - m)·(1 - b1); v = b2·v + (1 - b2)·g·g; sqrt(v)/c + eps; p -= lr·m/d
DECAY = {"adam": 2, "adamw": 1, "sgd": 2, "adagrad": 2}  # g += wd·p; decoupled: p *= 1 - lr·wd

# Roots and quotients of an element, each of which its thread waits for (fused_adam_utils.cuh: sqrt(v)/c, m/d;
# FusedAdagradKernel.cu: g/d), and instructions of Adam for an element: 55 in fp32 and 59 in bf16 in the machine code of
# torch 2.15 for compute capability 9.0, less the slow paths of special values.
ADAM_FUNCTIONS, _ADAGRAD_FUNCTIONS = 3, 2
ADAM_INSTRUCTIONS = 57


@rule(aten._fused_adam_, aten._fused_adamw_)
def fused_adam(call: Call) -> Cost:
    """One kernel reads parameters, gradients and both moments, writes all but the gradients.
    AMSGrad keeps the larger second moment (a comparison)."""
    name = "adam" if call.func.overloadpacket is aten._fused_adam_ else "adamw"
    flops = ADAM + (DECAY[name] if call.argument("weight_decay") else 0)
    n = _elements(call)
    cost = _fused(call, flops * n, transcendentals=n)
    return _launched(call, cost, functions=ADAM_FUNCTIONS, instructions=ADAM_INSTRUCTIONS * n)


@rule(aten._fused_sgd_)
def fused_sgd(call: Call) -> Cost:
    """p -= lr·g; with momentum b = mu·b + (1 - dampening)·g first, and Nesterov's g + mu·b."""
    momentum = call.argument("momentum")
    flops = 2 + (3 if momentum else 0) + (2 if call.argument("nesterov") else 0)
    flops += DECAY["sgd"] if call.argument("weight_decay") else 0
    return _launched(call, _fused(call, flops * _elements(call)))


@rule(aten._fused_adagrad_)
def fused_adagrad(call: Call) -> Cost:
    """s += g·g; p -= lr·g / (sqrt(s) + eps)."""
    flops = 2 + 5 + (DECAY["adagrad"] if call.argument("weight_decay") else 0)
    n = _elements(call)
    return _launched(call, _fused(call, flops * n, transcendentals=n), functions=_ADAGRAD_FUNCTIONS)


@rule(aten._foreach_addcmul, aten._foreach_addcmul_, aten._foreach_addcdiv, aten._foreach_addcdiv_)
def foreach_addcmul(call: Call) -> Cost:
    """a + value·b·c (or b / c) over a list; a list of values scales each."""
    scaled = call.get("value") != 1
    return _of_list(call, of_numbers(call, *sum_of_product(call, scaled)), fused_multiply_add=True)


@rule(aten._foreach_mm)
def foreach_mm(call: Call) -> Cost:
    """The matmul of each pair."""
    pairs = zip(call.argument("self"), call.argument("mat2"), strict=True)
    return make_contraction(call, [Matmul(1, a.shape[0], b.shape[1], a.shape[1]) for a, b in pairs])


@rule(aten._amp_foreach_non_finite_check_and_unscale_)
def unscale(call: Call) -> Cost:
    """Gradients times the inverse scale; the check is a comparison."""
    return _launched(call, make_cost(call, ELEMENTWISE, _elements(call)))


@rule(aten._amp_update_scale_)
def update_scale(call: Call) -> Cost:
    """One multiply of one number."""
    return make_cost(call, ELEMENTWISE, 1)


def _fused(call: Call, flops: int, *, transcendentals: int = 0) -> Cost:
    """The schema marks gradients as mutable since the kernel could unscale them; without a scale it
    does not write them."""
    unscaled = set(call.argument("grads")) if call.argument("grad_scale") is None else set()
    written = [spec for spec in regions(call)[1] if spec not in unscaled]
    return make_cost(
        call, ELEMENTWISE, flops, transcendentals=transcendentals, written=written, fused_multiply_add=True
    )


def _of_list(
    call: Call, per_element: PerElement, *, fused_multiply_add: bool, read: Iterable[TensorSpec] | None = None
) -> Cost:
    """The given real operations for each element of the first list."""
    sizes = _sizes(call)
    n = sum(sizes)
    cost = make_cost(
        call,
        ELEMENTWISE,
        per_element.flops * n,
        transcendentals=per_element.transcendentals * n,
        read=read,
        fused_multiply_add=fused_multiply_add,
        complex_factor=1,
    )
    return _launched(call, cost, sizes)


def _launched(
    call: Call, cost: Cost, sizes: tuple[int, ...] | None = None, *, functions: int = 0, instructions: int = 0
) -> Cost:
    """The kernel in its launches, each of which takes the addresses of the lists that it reads or writes (a fused one
    counts its steps by another way)."""
    lists = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, tuple) and value]
    tensors = sum(isinstance(value[0], TensorSpec) for value in lists)
    tensors += not call.name.endswith("_")  # a list for the results
    tensors -= bool(call.get("state_steps"))
    sizes = _sizes(call) if sizes is None else sizes
    return in_launches(cost, sizes, tensors, functions=functions, instructions=instructions)


def _elements(call: Call) -> int:
    return sum(_sizes(call))


def _sizes(call: Call) -> tuple[int, ...]:
    return tuple([spec.numel for spec in _first_list(call)])


def _first_list(call: Call) -> tuple[TensorSpec, ...]:
    """The first list among the arguments; a scalar may come before it."""
    return next(argument for argument in call.args if isinstance(argument, tuple))
