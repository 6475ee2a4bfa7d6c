"""Operators of flopmeter's own for kernels of packages that are not there: a schema, shapes and a cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from flopmeter.costs import register_cost
from flopmeter.records import Call, Cost

CostRule = Callable[[Call], "int | Cost | tuple[Cost, ...]"]


def kernel(name: str, cost: CostRule, mutates: Iterable[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Decorator: an operator `flopmeter_shims::name`. The function, which has type annotations, makes its result from
    shapes alone; it writes to the arguments in `mutates`."""

    def make(shapes: Callable[..., Any]) -> Any:
        operator = torch.library.custom_op(f"flopmeter_shims::{name}", shapes, mutates_args=tuple(mutates))
        operator.register_fake(shapes)
        register_cost(operator)(cost)
        return operator

    return make
