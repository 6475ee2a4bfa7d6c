"""Optimizers and lists of tensors (transformer_engine/pytorch/optimizers, common/multi_tensor): one kernel a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from flopmeter.costs import make_cost
from flopmeter.costs.arithmetic.optimizer import ADAM, ADAM_FUNCTIONS, ADAM_INSTRUCTIONS, DECAY
from flopmeter.costs.multi_tensor import in_launches
from flopmeter.records import ELEMENTWISE, Call, Cost
from flopmeter.run.shims.apex import FusedSGD, multi_tensor_applier, multi_tensor_l2norm, multi_tensor_scale
from flopmeter.run.shims.kernel import kernel
from flopmeter.run.shims.transformer_engine.base import refuse


def _adam_cost(call: Call) -> Cost:
    """Gradients and states are read, all but the gradients are written; with masters, parameters are only written. Its
    chunks and formulas, with a decay, are those of torch's kernel."""
    gradients, parameters, masters = (call.argument(name) for name in ("gradients", "parameters", "masters"))
    n = sum(spec.numel for spec in parameters)
    states = [*call.argument("first"), *call.argument("second"), *masters]
    read = (*gradients, *states, *(() if masters else parameters))
    cost = make_cost(
        call, ELEMENTWISE, (ADAM + DECAY["adamw"]) * n, transcendentals=n, read=read, written=(*states, *parameters)
    )
    sizes, lists = [spec.numel for spec in parameters], 5 if masters else 4
    return in_launches(cost, sizes, lists, functions=ADAM_FUNCTIONS, instructions=ADAM_INSTRUCTIONS * n)


@kernel("te_adam", _adam_cost, mutates=("parameters", "first", "second", "masters"))
def _adam(
    gradients: list[Tensor], parameters: list[Tensor], first: list[Tensor], second: list[Tensor], masters: list[Tensor]
) -> None: ...


class EngineFusedAdam(torch.optim.Optimizer):
    """transformer_engine.pytorch.optimizers.FusedAdam: a kernel for the parameters of each type of a group."""

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
        *,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
    ) -> None:
        refuse(
            {
                "amsgrad": amsgrad,
                "store_param_remainders": store_param_remainders,
                "exp_avg_dtype": exp_avg_dtype is not torch.float32,
                "exp_avg_sq_dtype": exp_avg_sq_dtype is not torch.float32,
                "master_weight_dtype": master_weight_dtype is not torch.float32,
            }
        )
        options = {"bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {"lr": lr, **options})
        self.master_weights, self.use_decoupled_grad = master_weights, use_decoupled_grad
        self.capturable = self._step_supports_amp_scaling = capturable

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grad_scaler: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for dtype in dict.fromkeys(each.dtype for each in group["params"]):
                self._step([each for each in group["params"] if each.dtype is dtype])
        return loss

    def _step(self, parameters: list[Any]) -> None:
        name = "decoupled_grad" if self.use_decoupled_grad else "grad"
        moved = [each for each in parameters if getattr(each, name, None) is not None]
        if not moved:
            return
        states = [self._state(each) for each in moved]
        masters = [state["master_param"] for state in states if "master_param" in state]
        lists = [[state[moment] for state in states] for moment in ("exp_avg", "exp_avg_sq")]
        _adam([getattr(each, name) for each in moved], moved, *lists, masters)

    def _state(self, parameter: Tensor) -> Any:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            if self.master_weights and parameter.dtype is not torch.float32:
                state["master_param"] = parameter.detach().float()
        return state

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        super().zero_grad(set_to_none is not False)
        for group in self.param_groups if self.use_decoupled_grad else ():
            for parameter in group["params"]:
                parameter.decoupled_grad = None


NAMES = {
    "FusedAdam": EngineFusedAdam,
    "FusedSGD": FusedSGD,
    "multi_tensor_applier": multi_tensor_applier,
    "multi_tensor_l2norm": multi_tensor_l2norm,
    "multi_tensor_scale": multi_tensor_scale,
}
