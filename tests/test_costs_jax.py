"""FLOPs and bytes of single ops against XLA's cost analysis, where JAX is installed (pip install "jax[cpu]").

XLA counts a transcendental apart from the FLOPs, a comparison or maximum as a FLOP, and the full formula after its own
simplification, so the ops here are those where both conventions say the same thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from costs_support import costs_in, meta

jax = pytest.importorskip("jax", reason='JAX is not installed: pip install "jax[cpu]" to compare with XLA')
jnp = jax.numpy


def analysis(function: Callable[..., Any], *shapes: tuple[int, ...]) -> dict[str, float]:
    """XLA's cost of the function: 'flops', 'transcendentals', 'bytes accessed'."""
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = jax.jit(function).lower(*arguments).compile().cost_analysis()
    return found[0] if isinstance(found, list) else found


SQUARE, VECTOR = (96, 160), (1280,)
# op: (in torch, in JAX, shapes of the operands)
SAME_FLOPS_AND_BYTES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "add": (torch.add, jnp.add, [SQUARE, SQUARE]),
    "sub": (torch.sub, jnp.subtract, [SQUARE, SQUARE]),
    "mul": (torch.mul, jnp.multiply, [SQUARE, SQUARE]),
    "div": (torch.div, jnp.divide, [SQUARE, SQUARE]),
    "neg": (torch.neg, jnp.negative, [SQUARE]),
    "abs": (torch.abs, jnp.abs, [SQUARE]),
    "floor": (torch.floor, jnp.floor, [SQUARE]),
    "ceil": (torch.ceil, jnp.ceil, [SQUARE]),
    "square": (torch.square, jnp.square, [SQUARE]),
    "add broadcast": (torch.add, jnp.add, [SQUARE, (160,)]),
    "addcmul": (torch.addcmul, lambda a, b, c: a + b * c, [SQUARE, SQUARE, SQUARE]),
    "mm": (torch.mm, jnp.matmul, [(96, 160), (160, 64)]),
    "bmm": (torch.bmm, jnp.matmul, [(8, 96, 32), (8, 32, 64)]),
    "mv": (torch.mv, jnp.matmul, [(96, 160), (160,)]),
}
SAME_BYTES: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "relu": (torch.relu, jax.nn.relu, [SQUARE]),
    "exp": (torch.exp, jnp.exp, [SQUARE]),
    "tanh": (torch.tanh, jnp.tanh, [SQUARE]),
    "maximum": (torch.maximum, jnp.maximum, [SQUARE, SQUARE]),
    "flip": (lambda x: x.flip(0), lambda x: jnp.flip(x, 0), [SQUARE]),
    "cat": (lambda x, y: torch.cat([x, y]), lambda x, y: jnp.concatenate([x, y]), [SQUARE, SQUARE]),
    "transpose, copied": (lambda x: x.t().contiguous(), lambda x: x.T, [SQUARE]),
}
TRANSCENDENTALS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "exp": (torch.exp, jnp.exp),
    "log": (torch.log, jnp.log),
    "sin": (torch.sin, jnp.sin),
    "cos": (torch.cos, jnp.cos),
    "tanh": (torch.tanh, jnp.tanh),
    "sqrt": (torch.sqrt, jnp.sqrt),
    "rsqrt": (torch.rsqrt, jax.lax.rsqrt),
    "log1p": (torch.log1p, jnp.log1p),
    "expm1": (torch.expm1, jnp.expm1),
}


def total(program: Callable[..., Any], shapes: list[tuple[int, ...]], field: str) -> int:
    tensors = [meta(*shape) for shape in shapes]
    return sum(getattr(cost, field) for cost in costs_in(lambda: program(*tensors)))


@pytest.mark.parametrize("name", SAME_FLOPS_AND_BYTES)
def test_flops_are_those_of_xla(name):
    ours, theirs, shapes = SAME_FLOPS_AND_BYTES[name]
    assert total(ours, shapes, "flops") == analysis(theirs, *shapes)["flops"]


@pytest.mark.parametrize("name", SAME_FLOPS_AND_BYTES | SAME_BYTES)
def test_bytes_are_those_of_xla(name):
    ours, theirs, shapes = (SAME_FLOPS_AND_BYTES | SAME_BYTES)[name]
    assert total(ours, shapes, "bytes") == analysis(theirs, *shapes)["bytes accessed"]


@pytest.mark.parametrize("name", TRANSCENDENTALS)
def test_transcendentals_are_those_of_xla(name):
    ours, theirs = TRANSCENDENTALS[name]
    assert total(ours, [SQUARE], "transcendentals") == analysis(theirs, SQUARE)["transcendentals"]


def test_a_sum_is_one_add_an_element_but_the_first():
    assert total(torch.sum, [SQUARE], "flops") - 1 == analysis(jnp.sum, SQUARE)["flops"]


def test_a_convolution_without_border_is_that_of_xla():
    def convolve(x: Any, weight: Any) -> Any:
        return jax.lax.conv_general_dilated(x, weight, (1, 1), "VALID")

    shapes = [(2, 8, 12, 12), (16, 8, 3, 3)]
    assert total(torch.nn.functional.conv2d, shapes, "flops") == analysis(convolve, *shapes)["flops"]
