"""Numbers in 8 and 4 bits, and the kernels that make them (transformer_engine/common/util/cast*.cuh, common/transpose,
common/recipe, common/hadamard_transform).

A matmul reads both operands along its depth. The forward pass reads rows of inputs and weights, the gradients read
their columns. On Hopper and Ada columns are a copy of their own, which the kernel that casts writes too; Blackwell
reads a tensor with one scale both ways. Finer scales belong to a direction, so columns are always a copy there.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from flopmeter.costs import make_cost
from flopmeter.records import ELEMENTWISE, MOVEMENT, REDUCTION, Call, Cost
from flopmeter.run.shims.kernel import kernel

SCALED = 2  # operations an element: a product with the scale, a comparison for the largest value
PARTIAL_ROWS = 256  # rows that one block adds up for a bias (cast_transpose_fusion.cu: 8 stored bytes x 32 threads)
MX_BLOCK, FP4_BLOCK, FP8_BLOCK = 32, 16, 128  # elements along the depth with one scale
MX_TILE = (128, 4)  # rows and scales a row to which tables of scales are padded, as matmuls want them


class MatmulOperand(NamedTuple):
    """A matrix as matmuls read it: rows [M, K] for a product over K, columns [K, M] for a product over M. In 16 or 32
    bits there are no scales, and no columns."""

    rows: Tensor | None
    row_scales: Tensor | None = None
    columns: Tensor | None = None
    column_scales: Tensor | None = None

    @property
    def is_scaled(self) -> bool:
        return self.row_scales is not None or self.column_scales is not None

    def for_gradients(self) -> MatmulOperand:
        """The operand without rows, which only the forward pass reads. (Where one tensor serves as rows and columns, it
        stays as the columns.)"""
        return MatmulOperand(None, None, self.columns, self.column_scales) if self.is_scaled else self


def operands_of(saved: Sequence[Tensor | None]) -> list[MatmulOperand]:
    """The operands whose fields lie one after another in what a forward pass has saved."""
    fields = len(MatmulOperand._fields)
    return [MatmulOperand(*saved[at : at + fields]) for at in range(0, len(saved), fields)]


def there(tensor: Tensor | None) -> Tensor:
    """A part of an operand that its layer has kept."""
    assert tensor is not None
    return tensor


def reads_both_ways() -> bool:
    """Whether fp8 matmuls of the device take operands in any layout (common/transformer_engine.cpp)."""
    major, _ = torch.cuda.get_device_capability()
    return 10 <= major < 12 or major >= 13


def bias_sum(call: Call, columns: int, rows: int) -> Cost:
    """The second kernel of a bias' gradient, over what the blocks of the first have added up in fp32."""
    return make_cost(call, REDUCTION, ceil(rows / PARTIAL_ROWS) * columns, read=(), written=(call.outputs[-1],))


def _cast_cost(call: Call) -> Cost | tuple[Cost, ...]:
    """The products with a scale; in blocks, of each block's largest value, which the same kernel finds."""
    x, adds = call.inputs[0], call.argument("bias_gradient")
    written = call.outputs[:-1] if adds else call.outputs
    cast = make_cost(call, ELEMENTWISE, (SCALED + adds) * x.numel, written=written)
    return (cast, bias_sum(call, x.shape[-1], x.shape[0])) if adds else cast


@kernel("te_cast", _cast_cost)
def cast(x: Tensor, scale: Tensor, dtype: torch.dtype, columns: bool, bias_gradient: bool) -> list[Tensor]:
    """[M, N] with one scale: rows, columns if asked for, the sum over rows if asked for."""
    made = rows_and_columns(x, x.shape, "one", dtype, columns)
    return [*made, x.new_empty(x.shape[-1:])] if bias_gradient else made


def packing(dtype: torch.dtype) -> int:
    """How many numbers an element holds."""
    return 2 if dtype is torch.float4_e2m1fn_x2 else 1


def scales_of(x: Tensor, rows: int, depth: int, scheme: str) -> Tensor:
    """The table of scales of [rows, depth], on the device of x."""
    if scheme in ("mx", "fp4"):
        block = MX_BLOCK if scheme == "mx" else FP4_BLOCK
        dtype = torch.float8_e8m0fnu if scheme == "mx" else torch.float8_e4m3fn
        padded = (ceil(size / unit) * unit for size, unit in zip((rows, ceil(depth / block)), MX_TILE, strict=True))
        return x.new_empty(tuple(padded), dtype=dtype)
    blocks = ceil(depth / FP8_BLOCK)
    if scheme == "squares":
        return x.new_empty((ceil(rows / FP8_BLOCK), blocks), dtype=torch.float32)
    return x.new_empty((blocks, rows), dtype=torch.float32).t()


def in_blocks(x: Tensor, shape: tuple[int, ...], scheme: str, dtype: torch.dtype) -> list[Tensor]:
    """A matrix of that shape and its scales."""
    rows, depth = shape
    return [x.new_empty((rows, depth // packing(dtype)), dtype=dtype), scales_of(x, rows, depth, scheme)]


def rows_and_columns(x: Tensor, shape: tuple[int, ...], scheme: str, dtype: torch.dtype, columns: bool) -> list[Tensor]:
    """The rows of a matrix of that shape, on the device of x, and its columns if asked for. Those of scheme "mx" have
    scales."""
    shapes = [shape, shape[::-1]] if columns else [shape]
    if scheme == "mx":
        return [part for each in shapes for part in in_blocks(x, each, scheme, dtype)]
    return [x.new_empty(each, dtype=dtype) for each in shapes]


@kernel("te_cast_blocks", _cast_cost)
def cast_blocks(
    x: Tensor, scheme: str, dtype: torch.dtype, rows: bool, columns: bool, bias_gradient: bool
) -> list[Tensor]:
    """[M, N] with a scale for each block: rows and columns, each with scales, as asked for, and the sum over rows.

    Columns of fp4 are mixed by a Hadamard transform on the way, as their largest value is: 16 x 16 matmuls on the
    matrix units, whose 32 FLOPs an element are not counted."""
    made = in_blocks(x, x.shape, scheme, dtype) if rows else []
    made += in_blocks(x, x.shape[::-1], scheme, dtype) if columns else []
    return [*made, x.new_empty(x.shape[-1:])] if bias_gradient else made


def _largest_cost(call: Call) -> Cost:
    """A kernel of one thread that begins with zero, and the one that reads all."""
    return make_cost(call, REDUCTION, call.inputs[0].numel, kernels=2)


@kernel("te_largest", _largest_cost)
def largest(x: Tensor) -> Tensor:
    """The largest absolute value."""
    return x.new_empty(1, dtype=torch.float32)


@kernel("te_scale", lambda call: make_cost(call, ELEMENTWISE, 1))
def scale_from(largest: Tensor) -> Tensor:
    return torch.empty_like(largest)


@kernel("te_transpose", lambda call: make_cost(call, MOVEMENT))
def transpose(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[::-1])


@kernel("te_swizzle", lambda call: make_cost(call, MOVEMENT))
def swizzle(scales: Tensor) -> Tensor:
    """A table of scales in the order in which cuBLASLt reads it (common/swizzle)."""
    return torch.empty_like(scales)


@kernel("te_update_scales", lambda call: make_cost(call, ELEMENTWISE, 1), mutates=("histories", "scales"))
def update_scales(largest: Tensor, histories: list[Tensor], scales: list[Tensor]) -> None:
    """One kernel for all layers: the histories of largest values move on by one, and give the next scales."""


def activation_dtype(x: Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


def flat(x: Tensor) -> Tensor:
    """The tensor as a matrix of contiguous rows."""
    return x.reshape(-1, x.shape[-1]).contiguous()
