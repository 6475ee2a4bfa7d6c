"""How a layer casts its tensors, by the recipe of the region that it runs in (transformer_engine/pytorch/csrc/
quantizer.cpp, pytorch/tensor)."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flopmeter.run.shims.transformer_engine import casts
from flopmeter.run.shims.transformer_engine.casts import MatmulOperand, there
from flopmeter.run.shims.transformer_engine.parallel import WeightSplit, gathered
from flopmeter.run.shims.transformer_engine.recipes import DelayedScaling, NVFP4BlockScaling, Recipe
from flopmeter.run.shims.transformer_engine.state import REGION, History

TensorRole = Literal["input", "weight", "gradient"]
SHORT = (8, 16)  # what rows and columns of fp8 matmuls are multiples of


class Caster:
    """Casts for one layer."""

    def __init__(self, recipe: Recipe, split: WeightSplit, histories: tuple[History, History] | None = None) -> None:
        self.recipe, self.split, self.group = recipe, split, REGION.group
        self.histories = histories
        if recipe.float8_block_scaling() and casts.reads_both_ways():
            raise NotImplementedError(
                "flopmeter's shim of transformer_engine has Float8BlockScaling on Hopper alone: take MXFP8BlockScaling"
            )

    @property
    def has_one_scale(self) -> bool:
        return self.recipe.float8_per_tensor_scaling()

    @property
    def has_known_scale(self) -> bool:
        """Whether kernels can write fp8 at once, since the scale is that of steps before."""
        return self.recipe.delayed()

    def dtype(self, role: TensorRole) -> torch.dtype:
        return self.recipe.backward_type if role == "gradient" else self.recipe.forward_type

    def scale(self, role: TensorRole, x: Tensor, largest: Tensor | None = None) -> Tensor:
        """The scale of a tensor that has one: delayed scaling keeps it, other recipes compute it. Where ranks gather a
        tensor's parts, it is the same for all ranks."""
        if self.histories is not None:
            return self.histories[role == "gradient"].scales[:1]
        largest = casts.largest(x) if largest is None else largest
        gathers = {"input": self.split.gathers_input, "gradient": self.split.gathers_gradient, "weight": False}
        if gathers[role]:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.split.group)
        return casts.scale_from(largest)

    def __call__(
        self,
        x: Tensor,
        role: TensorRole,
        columns: bool = True,
        bias_gradient: bool = False,
        largest: Tensor | None = None,
    ) -> tuple[MatmulOperand, Tensor | None]:
        """A matrix, and the sum over its rows. `largest` is its largest value if a kernel before has found it."""
        if not self.has_one_scale:
            return self._in_blocks(x, role, columns, bias_gradient)
        scale, copies = self.scale(role, x, largest), columns and not casts.reads_both_ways()
        fuses = bias_gradient and self.recipe.delayed() and (copies or casts.reads_both_ways())
        added = x.sum(0) if bias_gradient and not fuses else None
        made = casts.cast(x, scale, self.dtype(role), copies, fuses)
        added = made.pop() if fuses else added
        return self.with_one_scale(made[0], made[1] if copies else None, scale), added

    def with_one_scale(self, rows: Tensor, columns: Tensor | None, scale: Tensor) -> MatmulOperand:
        scale = torch.empty_like(scale)  # its inverse, which the kernel that casts writes; the scale itself will change
        if casts.reads_both_ways():
            columns = rows.view(rows.shape[::-1])  # the same bytes; only shapes matter here
        return MatmulOperand(rows, scale, columns, None if columns is None else scale)

    def _in_blocks(
        self, x: Tensor, role: TensorRole, columns: bool, bias_gradient: bool
    ) -> tuple[MatmulOperand, Tensor | None]:
        fuses = bias_gradient and self.recipe.mxfp8()
        added = x.sum(0) if bias_gradient and not fuses else None
        if isinstance(self.recipe, NVFP4BlockScaling):
            return self._in_fp4(x, role, columns, self.recipe), added
        made = casts.cast_blocks(x, self.scheme(role), self.dtype(role), True, columns, fuses)
        added = made.pop() if fuses else added
        return MatmulOperand(*made), added

    def scheme(self, role: TensorRole) -> str:
        if self.recipe.nvfp4() or self.recipe.mxfp8():
            return "fp4" if self.recipe.nvfp4() else "mx"
        return "squares" if role == "weight" else "rows"

    def _in_fp4(self, x: Tensor, role: TensorRole, columns: bool, recipe: NVFP4BlockScaling) -> MatmulOperand:
        casts.largest(x)  # of rows, and of columns after the transform
        dtype, is_mixed = self.dtype(role), role != "weight" and not recipe.disable_rht
        if not (is_mixed and columns):
            return MatmulOperand(*casts.cast_blocks(x, "fp4", dtype, True, columns, False))
        rows = casts.cast_blocks(x, "fp4", dtype, True, False, False)
        return MatmulOperand(*rows, *casts.cast_blocks(x, "fp4", dtype, False, True, False))

    def gathered(self, part: MatmulOperand, columns: bool, is_async: bool = False) -> tuple[MatmulOperand, list[Any]]:
        """The rows of all ranks of a matrix, or its columns for the gradient of the weight, and what to wait for. With
        one scale rows travel, and columns are made of them; finer scales travel too."""
        if self.has_one_scale:
            whole, work = gathered(there(part.rows), self.split, is_async)
            return self.with_one_scale(whole, None, there(part.row_scales)), [work]
        sent = there(part.columns if columns else part.rows)
        scales = there(part.column_scales if columns else part.row_scales)
        at, sizes = (1 if columns else 0), list(sent.shape)  # tokens are the columns' depth
        sizes[at] *= self.split.size
        rows, depth = sizes
        data, work = gathered(sent.flatten(), self.split, is_async)
        _, other = gathered(scales.flatten(), self.split, is_async)
        table = casts.scales_of(sent, rows, depth * casts.packing(sent.dtype), self.scheme("input"))
        data = data.view(rows, depth)
        return (MatmulOperand(None, None, data, table) if columns else MatmulOperand(data, table)), [work, other]

    def with_columns(self, whole: MatmulOperand) -> MatmulOperand:
        """After a gather: with one scale, columns are made of the rows by a kernel of their own."""
        if whole.columns is not None:
            return whole
        return whole._replace(columns=casts.transpose(there(whole.rows)), column_scales=whole.row_scales)


def check_shapes(x: Tensor, weight: Tensor) -> None:
    """What the package asserts: fp8 matmuls have a multiple of 8 rows and of 16 columns."""
    rows, columns = SHORT
    for each in (x, weight):
        if each.numel() // each.shape[-1] % rows or each.shape[-1] % columns:
            raise AssertionError(
                f"FP8 execution needs a multiple of {rows} rows and of {columns} columns, not {tuple(each.shape)}"
            )


def caster_of(module: Any, split: WeightSplit) -> Caster | None:
    """The caster of a layer in the region that runs now; None outside of regions, in 16 and 32 bits."""
    recipe = REGION.recipe
    if recipe is None:
        return None
    histories = module.histories(recipe) if isinstance(recipe, DelayedScaling) else None
    return Caster(recipe, split, histories)
