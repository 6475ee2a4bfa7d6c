"""Collectives along the first dimension (flash_attn/utils/distributed.py, those of torch): plain ones, which may be
asynchronous, and ones through which gradients go."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def all_gather_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    whole = input_.new_empty(input_.shape[0] * dist.get_world_size(process_group), *input_.shape[1:])
    return whole, dist.all_gather_into_tensor(whole, input_.contiguous(), group=process_group, async_op=async_op)


def reduce_scatter_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    part = input_.new_empty(input_.shape[0] // dist.get_world_size(process_group), *input_.shape[1:])
    return part, dist.reduce_scatter_tensor(part, input_.contiguous(), group=process_group, async_op=async_op)


def all_reduce_raw(input_: Tensor, process_group: Any, async_op: bool = False) -> tuple[Tensor, Any]:
    total = input_.contiguous()
    return total, dist.all_reduce(total, group=process_group, async_op=async_op)


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return all_gather_raw(part, group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return reduce_scatter_raw(gradient, ctx.group)[0], None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return reduce_scatter_raw(whole, group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return all_gather_raw(gradient, ctx.group)[0], None


class _Summed(torch.autograd.Function):
    """Each rank goes on with the sum, so the gradient is that of the part as it is."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any) -> Tensor:
        return all_reduce_raw(part, group)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


def all_gather(input_: Tensor, process_group: Any) -> Any:
    return _Gathered.apply(input_, process_group)  # type: ignore[no-untyped-call]


def reduce_scatter(input_: Tensor, process_group: Any) -> Any:
    return _Scattered.apply(input_, process_group)  # type: ignore[no-untyped-call]


def all_reduce(input_: Tensor, process_group: Any) -> Any:
    return _Summed.apply(input_, process_group)  # type: ignore[no-untyped-call]
