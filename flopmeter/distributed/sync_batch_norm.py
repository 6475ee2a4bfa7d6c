"""SyncBatchNorm on meta: the shapes of its kernels, which torch has for CUDA only, and its test for empty ranks.

Works around: a forward pass that takes tensors on GPUs only, and that leaves out ranks without rows.
Until: torch has Meta kernels for these ops.
"""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flopmeter.distributed.values import with_values
from flopmeter.known_values.collectives import EQUAL_RANKS
from flopmeter.known_values.entry_points import note_assumption
from flopmeter.torch_names import distributed as private


def _channels(x: Tensor) -> Tensor:
    """One number a channel, in the type that sums are made in."""
    return x.new_empty(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))


def _statistics(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return _channels(x), _channels(x)


def _like_input(x: Tensor, *args: Any) -> Tensor:
    return torch.empty_like(x)


def _sums(gradient: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, *args: Any) -> Any:
    of_weight = [_channels(x) if weight is None else torch.empty_like(weight) for _ in range(2)]
    return (*_statistics(x), *of_weight)


KERNELS: dict[str, Any] = {
    "aten::batch_norm_stats": _statistics,
    "aten::batch_norm_gather_stats_with_counts": _statistics,
    "aten::batch_norm_elemt": _like_input,
    "aten::batch_norm_backward_reduce": _sums,
    "aten::batch_norm_backward_elemt": _like_input,
}


def on_meta(forward: Any) -> Any:
    """The layer's forward pass. Each rank has rows, as this one has: that is what its comparison of counts says."""

    @functools.wraps(forward)
    def running(self: Any, x: Tensor) -> Tensor:
        with mock.patch.object(private.bindings, private.PRIVATEUSE1, return_value="meta"), _NoRankIsEmpty():
            out: Tensor = forward(self, x)
        return out

    return with_values(running)


class _NoRankIsEmpty(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__ge__ or func is Tensor.ge:
            note_assumption(EQUAL_RANKS, "SyncBatchNorm")
            return torch.ones_like(args[0], dtype=torch.bool)
        return func(*args, **(kwargs or {}))
