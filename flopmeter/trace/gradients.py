"""Gradients that torch's formulas add to zeros of their own, such as those of `x[ids]`, `gather`, `max` and `sort`.

They do it in place, except where a tensor might be a subclass (`areAnyTensorSubclassLike` in
aten/src/ATen/TensorSubclassLikeUtils.h): there the zeros are copied first, which is a pass over the whole gradient.
Under a dispatch mode, and on meta, every tensor might be one. Here the op in place runs, as it does without a meter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from flopmeter.records import Op
from flopmeter.torch_names.operators import aten_overloads
from flopmeter.torch_names.private import graph_task, peek_interpreter_stack, run_backward

_ZEROS = ("new_zeros", "zeros")
IN_PLACE: dict[OpOverload, tuple[OpOverload, tuple[Any, ...]]] = {  # and the arguments that it has besides
    aten_overloads.scatter.src: (aten_overloads.scatter_.src, ()),
    aten_overloads.scatter_add.default: (aten_overloads.scatter_add_.default, ()),
    aten_overloads.index_add.default: (aten_overloads.index_add_.default, ()),
    aten_overloads.index_put.default: (aten_overloads._index_put_impl_.default, (True,)),
}


def without_a_mode(
    func: OpOverload, args: tuple[Any, ...], recorded: Sequence[Op], number_of: Callable[[Tensor], int]
) -> tuple[OpOverload, tuple[Any, ...]]:
    """The op that a formula would run in place of `func` without a dispatch mode."""
    if not _is_formula() or not recorded:
        return func, args
    before = recorded[-1]
    is_zeros = before.call.name in _ZEROS and before.outputs[0].storage == number_of(args[0])
    in_place, more = IN_PLACE[func]
    return (in_place, (*args, *more)) if is_zeros else (func, args)


def _is_formula() -> bool:
    """Whether autograd's engine itself makes the call, not a function of the program. (Transforms wrap tensors.)"""
    is_backward = graph_task() != -1 and peek_interpreter_stack() is None
    return is_backward and sys._getframe(3).f_code is run_backward.__code__
