"""Higher-order ops: control flow and templates that take functions as arguments. Their bodies run here op by op, so
that the active dispatch modes see each op. torch's own eager kernels for control flow refuse to run under a mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from flopmeter.torch_names.private import DispatchKey

Body = Callable[..., Any]


def run(func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of the op. Its bodies run under the active dispatch modes.

    Raises NotImplementedError if they cannot, and DataDependentError if a branch or a loop depends on values of meta
    tensors that are not known.
    """
    kernel = _KERNELS.get(func.name()) or func.py_kernels.get(DispatchKey.CompositeExplicitAutograd)
    try:
        if kernel is not None:
            return kernel(*args, **kwargs)
    except AssertionError as error:
        if "Mode should never be enabled" not in str(error):
            raise
    raise NotImplementedError(
        f"{func.name()} cannot be metered: its body is hidden from dispatch modes. Meter the program as it is before "
        "torch.compile, or with the body written out"
    )


def _cond(predicate: Any, if_true: Body, if_false: Body, operands: Sequence[Any] = ()) -> Any:
    return (if_true if predicate else if_false)(*operands)


def _while_loop(goes_on: Body, body: Body, carried: Sequence[Any], additional: Sequence[Any] = ()) -> Any:
    while goes_on(*carried, *additional):
        carried = body(*carried, *additional)
    return carried


def _scan(combine: Body, carried: Sequence[Any], xs: Sequence[Tensor], additional: Sequence[Any] = ()) -> list[Any]:
    """carried, y = combine(carried, x) along the first dimension. Returns the last `carried`, then all y, stacked."""
    ys = []
    for x in zip(*(each.unbind() for each in xs), strict=True):
        result = combine(*carried, *x, *additional)
        carried = result[: len(carried)]
        ys.append(result[len(carried) :])
    return [*carried, *(torch.stack(column) for column in zip(*ys, strict=True))]


_KERNELS: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "invoke_subgraph": lambda body, _name, *operands: body(*operands),
    "strict_mode": lambda body, operands: body(*operands),
}
