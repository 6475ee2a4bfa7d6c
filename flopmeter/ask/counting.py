"""FLOPs of a model in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from flopmeter.known_values import on_meta
from flopmeter.meter import DEFAULT_HARDWARE, FlopMeter
from flopmeter.report.quantities import with_prefix


class FlopCount(NamedTuple):
    """What one forward pass does."""

    flops: int  # a multiply-add is 2
    macs: int  # of products and attention
    bytes: int  # read and written
    parameters: int

    def __str__(self) -> str:
        return (
            f"{with_prefix(self.flops, 'FLOP')}, {with_prefix(self.macs, 'MAC')}, {with_prefix(self.bytes, 'B')} moved,"
            f" {with_prefix(self.parameters, 'parameters')}"
        )


def count(model: Callable[..., Any], *inputs: Any, **options: Any) -> FlopCount:
    """FLOPs, multiply-adds, bytes and parameters of one forward pass.

    model: a module, or any function of tensors. It and its inputs may be on any device: a copy on meta runs.
    options: keyword arguments of the model.

    Raises EmptyProgramError where the model runs no op.
    """
    twin, inputs, options = on_meta((model, inputs, options))
    with FlopMeter(DEFAULT_HARDWARE) as meter, torch.no_grad():
        twin(*inputs, **options)
    report = meter.report()
    parameters = {id(each): each.numel() for each in model.parameters()} if isinstance(model, nn.Module) else {}
    return FlopCount(report.flops, report.macs, report.bytes_read + report.bytes_written, sum(parameters.values()))
