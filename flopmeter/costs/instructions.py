"""How many instructions a kernel that inductor writes runs for each op on one element.

They were counted in the machine code that Triton 3.9 and its ptxas make of an op as inductor writes it: in fp32, for
compute capability 9.0, with eight elements a thread, without the slow paths of special values, and without the
instructions of a copy. 8.0, 10.0 and 12.0 are within a twentieth. tests/test_machine_code.py counts them again. An op
that is not listed takes one.
"""

from __future__ import annotations

from flopmeter.records import Cost

# Ops that take none: constants, addresses (a thread computes them once for its eight elements), what is stored once for
# a row, and random numbers (priced by themselves).
WITHOUT = {
    "constant", "index_expr", "value_expr", "check_bounds", "output", "load_seed", "rand", "randn", "randint64",
    "store_reduction",
}  # fmt: skip

# Between the range reduction of a sine and its polynomial lies the slow path for large arguments, 90 instructions long.
# To jump over it takes as long as 20 more instructions. Set on rotary embeddings with two and three sines or cosines
# (58.7 and 86.8 µs for 16.8 million elements on an H100, validation/traces).
_FAR_JUMP = 20

OF_OPS = {
    "acos": 23,
    "asin": 22,
    "atan": 17,
    "atanh": 40,
    "cos": 28 + _FAR_JUMP,
    "cosh": 19,
    "erf": 28,
    "erfc": 47,
    "exp": 9,
    "expm1": 25,
    "lgamma": 84,
    "log": 25,
    "log10": 26,
    "log1p": 30,
    "log2": 27,
    "pow": 88,  # of two tensors; whole numbers are powers by multiplications
    "reciprocal": 8,
    "sigmoid": 11,
    "sin": 26 + _FAR_JUMP,
    "sinh": 32,
    "sqrt": 10,
    "tan": 24 + _FAR_JUMP,
    "tanh": 17,
    "truediv": 9,
}

# The first number is of a reduction whose rows registers hold, the second of one that goes through its rows in a loop
# (four elements a thread). Mean and variance: in registers two sums; in a loop (Welford) a division and eight others,
# and what keeps the sums where an element is missing. Maximum and sum of exponentials: in a loop two exponentials, and
# what infinite and missing elements need (online_softmax_combine in runtime/triton_helpers.py).
OF_REDUCTIONS = {"welford_reduce": (4, 18), "online_softmax_reduce": (12, 32)}

# Instructions of an element in torch's own kernels in bf16, loads and stores included: the machine code of torch 2.15
# for compute capability 9.0; in fp16 and fp32 there are one or two fewer.
OF_KERNELS = {
    "exp": 12,
    "gelu": 29,
    "gelu, tanh": 26,
    "gelu_backward": 43,
    "gelu_backward, tanh": 34,
    "log": 29,
    "pow": 95,
    "sigmoid": 25,
    "silu": 25,
    "silu_backward": 31,
    "tanh": 19,
}

_FUNCTIONS_OF_ATEN = {"gelu": "erf", "silu": "sigmoid", "silu_backward": "sigmoid", "gelu_backward": "erf"}


def of_eager_op(cost: Cost) -> int:
    """The instructions of an op of an eager run if it were in such a kernel, from its FLOPs and functions."""
    name = cost.name.rstrip("_")
    of_function = OF_OPS.get(_FUNCTIONS_OF_ATEN.get(name, name), OF_OPS["exp"])
    return cost.flops + of_function * cost.transcendentals
