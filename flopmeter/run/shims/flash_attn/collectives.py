"""Collectives along the first dimension (flash_attn/utils/distributed.py, those of torch): plain ones, which may be
asynchronous, and ones through which gradients go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_Raw = Callable[[Tensor, Any], tuple[Tensor, Any]]


def all_gather_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    whole = input_.new_empty(input_.shape[0] * dist.get_world_size(process_group), *input_.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, input_.contiguous(), group=process_group, async_op=async_op)


def reduce_scatter_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    part = input_.new_empty(input_.shape[0] // dist.get_world_size(process_group), *input_.shape[1:])
    return part, dist.reduce_scatter_tensor(part, input_.contiguous(), group=process_group, async_op=async_op)


def all_reduce_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    total = input_.contiguous()
    return total, dist.all_reduce(total, group=process_group, async_op=async_op)


class _Through(torch.autograd.Function):
    """A collective, and the one that its gradient goes through; None: the gradient is that of the result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, collective: _Raw, of_gradient: _Raw | None, group: Any) -> Tensor:
        ctx.of_gradient, ctx.group = of_gradient, group
        return collective(x, group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient if ctx.of_gradient is None else ctx.of_gradient(gradient, ctx.group)[0], None, None, None


def all_gather(input_: Tensor, process_group: Any) -> Any:
    return _Through.apply(input_, all_gather_raw, reduce_scatter_raw, process_group)


def reduce_scatter(input_: Tensor, process_group: Any) -> Any:
    return _Through.apply(input_, reduce_scatter_raw, all_gather_raw, process_group)


def all_reduce(input_: Tensor, process_group: Any) -> Any:
    """Each rank goes on with the sum, so the gradient of its part is the sum's gradient."""
    return _Through.apply(input_, all_reduce_raw, None, process_group)
