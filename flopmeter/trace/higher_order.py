"""Higher-order ops: control flow and templates that take functions as arguments. Their bodies run here op by op, so
that the active dispatch modes see each op. torch's own eager kernels for control flow refuse to run under a mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload

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
    """carried, y = combine(carried, x) for each x along the first dimension. Returns the last `carried`, then all y,
    stacked."""
    ys = []
    for x in zip(*(each.unbind() for each in xs), strict=True):
        result = combine(*carried, *x, *additional)
        carried = result[: len(carried)]
        ys.append(result[len(carried) :])
    return [*carried, *(torch.stack(column) for column in zip(*ys, strict=True))]


def _out_dtype(op: OpOverload, dtype: torch.dtype, *args: Any) -> Any:
    """Like torch's kernel: CUDA (for which meta stands) multiplies int8 matrices as int8, other devices as int32."""
    bytes_on_meta = all(isinstance(arg, Tensor) and arg.is_meta and arg.dtype is torch.int8 for arg in args)
    if op is torch.ops.aten.mm.default and dtype is torch.int32 and bytes_on_meta:
        return torch._int_mm(*args)
    everywhere = torch.ops.higher_order.out_dtype.py_kernels[DispatchKey.CompositeExplicitAutograd]
    return everywhere(op, dtype, *args)


_KERNELS: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "invoke_subgraph": lambda body, _name, *operands: body(*operands),
    "out_dtype": _out_dtype,
    "strict_mode": lambda body, operands: body(*operands),
}
