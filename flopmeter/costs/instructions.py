"""How many instructions a thread of a kernel that inductor writes runs for an element.

They are those of the machine code that Triton 3.9 and its ptxas make of an op as inductor writes it, in fp32, for
compute capability 9.0 and eight elements a thread, without the slow paths of special values, and less those of a copy.
8.0, 10.0 and 12.0 are within a twentieth. tests/test_machine_code.py makes them again. Any other op takes one.
"""

from __future__ import annotations

from flopmeter.records import Cost

# Numbers that are known when the kernel is compiled, addresses, which a thread computes once for its eight elements,
# what is stored once for a row, and random numbers, which are priced by themselves.
WITHOUT = {
    "constant", "index_expr", "value_expr", "check_bounds", "output", "load_seed", "rand", "randn", "randint64",
    "store_reduction",
}  # fmt: skip

# A sine or cosine has 26 and 28. Between its range reduction and its polynomial lies the slow path for large arguments,
# 90 instructions long; to read on behind it takes as long as 20 more. Set on rotary embeddings of two and three of them
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

# Of a reduction whose rows registers hold, and of one that goes through them in a loop (four elements a thread). A mean
# and a variance: two sums; in one pass (Welford) a division and eight others, and what keeps the sums where an element
# is missing. A maximum and a sum of exponentials; in one pass (online_softmax_combine in runtime/triton_helpers.py) two
# exponentials and what infinite and missing elements need.
OF_REDUCTIONS = {"welford_reduce": (4, 18), "online_softmax_reduce": (12, 32)}

_FUNCTIONS_OF_ATEN = {"gelu": "erf", "silu": "sigmoid", "silu_backward": "sigmoid", "gelu_backward": "erf"}


def of_eager_op(cost: Cost) -> int:
    """What an op of the program comes to in such a kernel, by its FLOPs and functions."""
    name = cost.name.rstrip("_")
    of_function = OF_OPS.get(_FUNCTIONS_OF_ATEN.get(name, name), OF_OPS["exp"])
    return cost.flops + of_function * cost.transcendentals
