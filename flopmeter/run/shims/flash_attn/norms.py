"""Its norms, losses, activations and layers, as torch's operators of the same work (flash_attn/ops, flash_attn/losses):
what flash-attn does in one kernel may be two or three here."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopmeter.run.shims.kernel import refuse


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    *,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
    **options: Any,
) -> Any:
    """The residual is added by a kernel of its own, where flash-attn's does both."""
    refuse("flash_attn", options, ("x1", "weight1", "bias1", "rowscale"))
    x = F.dropout(x, dropout_p) if dropout_p else x
    total = x if residual is None else x + residual
    total = total.float() if residual_in_fp32 else total
    normed = total.to(x.dtype)
    if is_rms_norm:
        out = F.rms_norm(normed, x.shape[-1:], weight, eps)
        out = out if bias is None else out + bias
    else:
        out = F.layer_norm(normed, x.shape[-1:], weight, bias, eps)
    return (out, total) if prenorm else out


def rms_norm_fn(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None = None, **options: Any) -> Any:
    return layer_norm_fn(x, weight, bias, residual, **{**options, "is_rms_norm": True})


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return layer_norm_fn(x, weight, None, eps=epsilon, is_rms_norm=True)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    return layer_norm_fn(x, weight, bias, eps=epsilon)


def dropout_add_layer_norm(
    x0: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: Tensor | None = None,
    layerscale: Tensor | None = None,
    **options: Any,
) -> Any:
    refuse("flash_attn", {"rowscale": rowscale, "layerscale": layerscale})
    refuse("flash_attn", options, ("return_dropout_mask",))
    return layer_norm_fn(x0, weight, bias, residual, eps=epsilon, dropout_p=dropout_p, **options)


def dropout_add_rms_norm(*args: Any, **options: Any) -> Any:
    return dropout_add_layer_norm(*args, **options, is_rms_norm=True)


class RMSNorm(nn.Module):
    def __init__(
        self, hidden_size: int, eps: float = 1e-5, dropout_p: float = 0.0, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.eps, self.dropout_p = eps, dropout_p
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, residual: Tensor | None = None, **options: Any) -> Any:
        dropout = self.dropout_p if self.training else 0.0
        return rms_norm_fn(x, self.weight, None, residual, eps=self.eps, dropout_p=dropout, **options)


def cross_entropy_loss(
    logits: Tensor, labels: Tensor, precomputed_lse: Tensor | None = None, label_smoothing: float = 0.0,
    logit_scale: float = 1.0, lse_square_scale: float = 0.0, ignore_index: int = -100, inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The losses of the rows, and the parts of them that keep the sums small."""
    refuse("flash_attn", {"process_group": process_group})
    scaled = logits * logit_scale if logit_scale != 1.0 else logits
    losses = F.cross_entropy(
        scaled.float(), labels, reduction="none", ignore_index=ignore_index, label_smoothing=label_smoothing
    )
    if not lse_square_scale:
        return losses, torch.zeros_like(losses)
    z_losses = lse_square_scale * scaled.float().logsumexp(-1).square()
    return losses + z_losses, z_losses


class CrossEntropyLoss(nn.Module):
    def __init__(
        self, ignore_index: int = -100, reduction: str = "mean", return_z_loss: bool = False, **options: Any
    ) -> None:
        super().__init__()
        self.ignore_index, self.reduction, self.return_z_loss = ignore_index, reduction, return_z_loss
        self.options = options

    def forward(self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None) -> Any:
        found = cross_entropy_loss(input, target, precomputed_lse, ignore_index=self.ignore_index, **self.options)
        loss, z_loss = (self._reduced(each, target) for each in found)
        return (loss, z_loss) if self.return_z_loss else loss

    def _reduced(self, losses: Tensor, target: Tensor) -> Tensor:
        if self.reduction == "mean":
            return losses.sum() / (target != self.ignore_index).sum()
        return losses.sum() if self.reduction == "sum" else losses


def swiglu(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def bias_gelu_impl(y: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(y + bias, approximate="tanh")


def fast_gelu_impl(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def fused_dense_func(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, return_residual: bool = False, process_group: Any = None,
    sequence_parallel: bool = True,
) -> Any:  # fmt: skip
    refuse("flash_attn", {"process_group": process_group})
    out = F.linear(x, weight, bias)
    return (out, x) if return_residual else out


class FusedDense(nn.Linear):
    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, return_residual: bool = False, **options: Any
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, **options)
        self.return_residual = return_residual

    def forward(self, x: Tensor, process_group: Any = None) -> Any:
        return fused_dense_func(x, self.weight, self.bias, self.return_residual, process_group)
