"""Cross entropy of logits that are split over ranks (transformer_engine/pytorch/cross_entropy.py): a kernel for the
sums of each row, whose sums the ranks gather, and one that writes the loss, and the gradient over the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopmeter.costs import make_cost
from flopmeter.records import ELEMENTWISE, REDUCTION
from flopmeter.run.shims.kernel import kernel
from flopmeter.run.shims.transformer_engine.parallel import WeightSplit, gathered, size_of

_SUMS = 3  # of a row: the largest logit, the sum of exponentials, the logit of the target


@kernel(
    "te_softmax_sums",
    lambda call: make_cost(call, REDUCTION, 4 * call.inputs[0].numel, transcendentals=call.inputs[0].numel),
)
def _sums(logits: Tensor, target: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0] * _SUMS, dtype=torch.float32)


@kernel(
    "te_cross_entropy",
    lambda call: make_cost(call, ELEMENTWISE, 4 * call.inputs[0].numel, transcendentals=call.inputs[0].numel),
    mutates=("logits",),
)
def _loss_and_gradient(logits: Tensor, target: Tensor, sums: Tensor) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.float32)


@kernel("te_scale_rows", lambda call: make_cost(call, ELEMENTWISE, call.inputs[0].numel), mutates=("rows",))
def _scale(rows: Tensor, factors: Tensor) -> None: ...


class CrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inp: Tensor, target: Tensor, label_smoothing: float = 0.0, reduce_loss: bool = False,
        dist_process_group: Any = None, ignore_idx: int = -100, is_cg_capturable: bool = False,
    ) -> Tensor:  # fmt: skip
        rows = inp.detach().flatten(0, -2)
        sums = _sums(rows, target)
        if size_of(dist_process_group) > 1:
            sums, _ = gathered(sums, WeightSplit(group=dist_process_group, size=size_of(dist_process_group)))
        loss = _loss_and_gradient(rows, target, sums)
        ctx.save_for_backward(rows)
        ctx.shape = inp.shape
        return loss.mean() if reduce_loss else loss.view(target.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        _scale(rows, gradient)
        return rows.view(ctx.shape), None, None, None, None, None, None


def parallel_cross_entropy(*args: Any) -> Tensor:
    return CrossEntropyFunction.apply(*args)
