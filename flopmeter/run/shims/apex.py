"""apex (github.com/NVIDIA/apex): optimizers and norms for which torch now has kernels of its own.

FusedAdam and FusedSGD update all parameters with multi-tensor kernels, as torch's optimizers do with fused=True; the
fused norms are one kernel each way, as torch's. LARC is Python of its own (apex/parallel/LARC.py): norms, and a rate
for each parameter by them. amp_C (csrc/amp_C_frontend.cpp) is the compiled module that apex installs: of it there are
the kernels that scale a list of tensors and add up their squares, by which Megatron-LM clips gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from flopmeter.torch_names.operators import aten


class FusedAdam(torch.optim.Adam):
    """apex.optimizers.FusedAdam. Raises NotImplementedError for AMSGrad, as apex does, and for master weights."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad or master_weights:
            raise NotImplementedError("flopmeter's shim of apex has no FusedAdam with amsgrad or master_weights")
        super().__init__(params, lr, betas, eps, weight_decay, fused=True, decoupled_weight_decay=adam_w_mode)
        self._step_supports_amp_scaling = capturable  # else a GradScaler asks whether to step, and the host waits
        self._set_to_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(self._set_to_none if set_to_none is None else set_to_none)


class FusedSGD(torch.optim.SGD):
    """apex.optimizers.FusedSGD."""

    def __init__(self, params: Iterable[Any], lr: float, *args: Any, **kwargs: Any) -> None:
        for name in ("wd_after_momentum", "materialize_master_grads", "set_grad_none"):
            kwargs.pop(name, None)
        super().__init__(params, lr, *args, **kwargs, fused=True)
        self._step_supports_amp_scaling = False


class _NormArguments:
    """The arguments of apex's norms. (With `memory_efficient` the result is kept instead of the input.)"""

    def __init__(
        self, normalized_shape: Any, eps: float = 1e-5, elementwise_affine: bool = True, memory_efficient: bool = False
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)  # type: ignore[call-arg]


class FusedLayerNorm(_NormArguments, nn.LayerNorm):
    """apex.normalization.FusedLayerNorm."""


class FusedRMSNorm(_NormArguments, nn.RMSNorm):
    """apex.normalization.FusedRMSNorm."""


class FusedLayerNormAffineFunction:
    """apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction, which Megatron-LM's norms apply."""

    @staticmethod
    def forward(
        ctx: Any, input: Any, weight: Any, bias: Any, normalized_shape: Any, eps: float, memory_efficient: bool = False
    ) -> Any:
        """Programs ask for the names of these arguments."""
        return nn.functional.layer_norm(input, tuple(normalized_shape), weight, bias, eps)

    @classmethod
    def apply(cls, *args: Any) -> Any:
        return cls.forward(None, *args)


_TensorLists = Sequence[Sequence[torch.Tensor]]


def multi_tensor_applier(op: Callable[..., Any], skipped: torch.Tensor, lists: _TensorLists, *args: Any) -> Any:
    """apex.multi_tensor_apply.multi_tensor_applier: the op on all tensors at once, in chunks of its kernel's."""
    return op(2048 * 32, skipped, lists, *args)


@torch.no_grad()
def multi_tensor_scale(chunk: int, skipped: torch.Tensor, lists: _TensorLists, scale: float) -> None:
    """amp_C.multi_tensor_scale: each number is read and written once. Into other tensors than it reads, torch has a
    kernel of the same bytes that only copies."""
    sources, targets = map(list, lists)
    if all(source is target for source, target in zip(sources, targets, strict=True)):
        aten._foreach_mul_(targets, scale)
    else:
        aten._foreach_copy_(targets, sources)


@torch.no_grad()
def multi_tensor_l2norm(
    chunk: int, skipped: torch.Tensor, lists: _TensorLists, per_tensor: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """amp_C.multi_tensor_l2norm: the norm of all of them together, and of each if asked for."""
    norms = torch.stack(aten._foreach_norm(list(lists[0]), 2, dtype=torch.float32))
    return torch.linalg.vector_norm(norms, keepdim=True), norms if per_tensor else norms.new_empty(0)


@torch.no_grad()
def _weight_gradient(x: torch.Tensor, gradient: torch.Tensor, into: torch.Tensor) -> None:
    """csrc/megatron/fused_weight_gradient_dense_cuda.cu: gradient^T @ x is added to what is there."""
    from flopmeter.run.shims.transformer_engine.products import gemm_into  # which imports this file

    gemm_into(into, gradient.flatten(0, -2).t(), x.flatten(0, -2), None, None, True, False)


class LARC:
    """apex.parallel.LARC: an optimizer around another, which scales each gradient by the norms of parameter and
    gradient. What it does not have itself is the other one's."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        self.optim, self.trust_coefficient, self.clip, self.eps = optimizer, trust_coefficient, clip, eps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optim, name)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        decays = []
        for group in self.optim.param_groups:
            decays.append(group.get("weight_decay", 0))
            group["weight_decay"] = 0  # it is in the scaled gradient
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._scale(parameter, group["lr"], decays[-1])
        result = self.optim.step(closure)
        for group, decay in zip(self.optim.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        return result

    def _scale(self, parameter: torch.Tensor, rate: float, decay: float) -> None:
        norm, gradient_norm = torch.norm(parameter), torch.norm(parameter.grad)
        _ = bool(norm != 0), bool(gradient_norm != 0)  # the host waits for both; where one is 0, apex leaves all out
        adaptive: Any = self.trust_coefficient * norm / (gradient_norm + norm * decay + self.eps)
        if self.clip:
            adaptive = min(adaptive / rate, 1)
        assert parameter.grad is not None
        parameter.grad.add_(decay * parameter).mul_(adaptive)


def _no_amp(*_: Any, **__: Any) -> None:
    """Stands in for apex.amp, which programs look at even if they do not use it."""
    raise NotImplementedError(
        "flopmeter's shim of apex has no amp: use torch.autocast, or fp32, by the script's arguments"
    )


_NORMS = {
    "FusedLayerNorm": FusedLayerNorm,
    "MixedFusedLayerNorm": FusedLayerNorm,
    "FusedRMSNorm": FusedRMSNorm,
    "MixedFusedRMSNorm": FusedRMSNorm,
}
_PARALLEL: dict[str, Any] = {
    "DistributedDataParallel": lambda module, *args, **kwargs: nn.parallel.DistributedDataParallel(module),
    "SyncBatchNorm": nn.SyncBatchNorm,
    "convert_syncbn_model": nn.SyncBatchNorm.convert_sync_batchnorm,
}
MODULES: dict[str, Any] = {
    "apex": {},
    "apex.amp": dict.fromkeys(("initialize", "master_params", "scale_loss"), _no_amp),
    "apex.optimizers": {"FusedAdam": FusedAdam, "FusedSGD": FusedSGD},
    "apex.normalization": _NORMS,
    "apex.normalization.fused_layer_norm": {**_NORMS, "FusedLayerNormAffineFunction": FusedLayerNormAffineFunction},
    "apex.multi_tensor_apply": {"multi_tensor_applier": multi_tensor_applier},
    "fused_weight_gradient_mlp_cuda": {
        "wgrad_gemm_accum_fp32": _weight_gradient,
        "wgrad_gemm_accum_fp16": _weight_gradient,
    },
    "amp_C": {"multi_tensor_scale": multi_tensor_scale, "multi_tensor_l2norm": multi_tensor_l2norm},
    "apex.parallel": _PARALLEL,
    "apex.parallel.LARC": {"LARC": LARC},
}
