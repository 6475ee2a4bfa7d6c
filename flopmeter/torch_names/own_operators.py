"""Operators that stand in a trace for generated kernels, for which torch has no operator.

Each has a schema, which says what it reads and writes, and a kernel that only makes its results.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flopmeter.torch_names.operators import Overloads, Packets

own = Packets("flopmeter")
own_overloads = Overloads(own)

_SCHEMAS = (
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor[] blocks, Tensor[] captured, bool keeps_lse, "
    "bool keeps_max, *, str? kernel=None) -> (Tensor, Tensor, Tensor)",
    "flex_attention_backward(Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, Tensor grad_out, "
    "Tensor? grad_logsumexp, Tensor[] blocks, Tensor[] captured, Tensor[] learned) -> "
    "(Tensor, Tensor, Tensor, Tensor[])",
    "flex_attention_gradients(Tensor query, Tensor key, Tensor value, Tensor logsumexp, Tensor row_sums, "
    "Tensor grad_out, Tensor[] blocks, Tensor[] captured, Tensor[] learned, *, str? kernel=None) -> "
    "(Tensor, Tensor, Tensor, Tensor[])",
    "triton_kernel(Tensor[] read, Tensor(a!)[] written, Tensor(b!)[] updated) -> ()",
    "compiled_kernel(Tensor[] read, Tensor(a!)[] written, *, str kernel) -> ()",
)


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Sequence[Tensor],
    captured: Sequence[Tensor],
    *_keeps: bool,
    **_kernel: object,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output with the strides of the query, and two statistics of each row."""
    out = _in_order_of(query, (*query.shape[:-1], value.shape[-1]))
    lse, most = (query.new_empty(query.shape[:-1], dtype=torch.float32) for _ in range(2))
    return out, lse, most


def _flex_attention_backward(
    query: Tensor, key: Tensor, value: Tensor, *others: object, **_kernel: object
) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    learned = others[-1]
    assert isinstance(learned, (list, tuple))
    gradients = tuple(_in_order_of(tensor, tensor.shape) for tensor in (query, key, value))
    return *gradients, [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in learned]  # type: ignore[return-value]


def _in_place(*_tensors: Sequence[Tensor], **_kernel: object) -> None:
    """It only writes into its arguments."""


def _in_order_of(like: Tensor, shape: Sequence[int]) -> Tensor:
    """A dense tensor whose dimensions lie in the order of another tensor's, the last one contiguous."""
    last, steps = len(shape) - 1, like.stride()
    order = sorted(range(last), key=lambda dim: -steps[dim])
    strides, step = [1] * len(shape), shape[last]
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return like.new_empty_strided(tuple(shape), tuple(strides))


if not hasattr(torch.ops.flopmeter, "library"):  # a process may import this file afresh, and define operators once
    _library = torch.library.Library("flopmeter", "FRAGMENT")
    setattr(torch.ops.flopmeter, "library", _library)  # noqa: B010  (or they would go with this file)
    _kernels = (_flex_attention, _flex_attention_backward, _flex_attention_backward, _in_place, _in_place)
    for _schema, _kernel in zip(_SCHEMAS, _kernels, strict=True):
        _library.impl(_library.define(_schema), _kernel, "CompositeExplicitAutograd")
