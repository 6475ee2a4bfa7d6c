"""Linear layers whose products run in fp8, as torchao's dynamic scaling has them (the tensorwise recipe of torchtitan).

Activations and gradients are cast with the largest value of the tensor, activations to e4m3 and gradients to e5m2.
Parameters are cast as shards and gathered by FSDP2 in fp8 (`enable_fsdp_float8_all_gather`). What tensor parallelism
gathers is in bf16 here, where torchao casts before. Casts are kernels of
their own where layers run eagerly, and fuse with their neighbours where they are compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MULTIPLE = 16  # of rows and columns, which torch's product in fp8 needs


def in_fp8(layers: list[nn.Module]) -> None:
    """Linear layers inside, in place."""
    for layer in layers:
        for module in layer.modules():
            if type(module) is nn.Linear and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE):
                module.__class__ = Fp8Linear
        layer.register_forward_hook(lambda *args: _last_casts.clear())  # compiled code keeps nothing beyond its layer


def fp8_numel(layer: nn.Module) -> int:
    """Parameters of this rank that are gathered in fp8."""
    weights: list[Any] = [module.weight for module in layer.modules() if isinstance(module, Fp8Linear)]
    return sum((each.to_local() if hasattr(each, "to_local") else each).numel() for each in weights)


class Fp8Linear(nn.Linear):
    def forward(self, x: Any) -> Tensor:
        from torch.distributed.tensor import DTensor, Partial, Shard

        weight: Any = self.weight
        if isinstance(weight, DTensor):
            by_columns = weight.placements[0].is_shard(0)
            local = x.to_local(grad_placements=[Partial()]) if by_columns else x.to_local()
            made: Any = self._product(local, weight.to_local())
            made = DTensor.from_local(made, weight.device_mesh, [Shard(-1) if by_columns else Partial()])
        else:
            made = self._product(x, weight)
        return made if self.bias is None else made + self.bias  # type: ignore[no-any-return]

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        product: Any = _Product.apply
        out: Tensor = product(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
        return out


class _Product(torch.autograd.Function):
    """Scales and casts, and products whose second factor lies by columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        a, scale = _cast(x, torch.float8_e4m3fn)
        return _scaled(a, _as_gathered(weight), scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        by_rows, scale = _cast(gradient, torch.float8_e5m2)
        of_x = _scaled(by_rows, _as_gathered(weight).t().contiguous(), scale)
        return of_x, _scaled(by_rows.t().contiguous(), _cast(x.t(), torch.float8_e4m3fn)[0], scale)


def _scaled(a: Tensor, transposed: Tensor, scale: Tensor) -> Tensor:
    return torch._scaled_mm(a, transposed.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def _as_gathered(weight: Tensor) -> Tensor:
    """In fp8: its first half, since values do not matter here."""
    return weight.detach().flatten().view(torch.float8_e4m3fn)[: weight.numel()].view(weight.shape)


def _cast(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One tensor that several products read is cast once, as in compiled code."""
    key = x.untyped_storage()._cdata, x.shape, x.stride(), dtype
    if key not in _last_casts:
        scale = torch.finfo(dtype).max / x.abs().amax().float()
        made = (x.float() * scale).to(dtype).contiguous(), scale.reciprocal()
        _last_casts[key] = x, made
        while len(_last_casts) > MOST_CASTS:  # what is kept is alive: no other tensor has its storage's address
            del _last_casts[next(iter(_last_casts))]
    return _last_casts[key][1]


MOST_CASTS = 4
_last_casts: dict[Any, tuple[Tensor, tuple[Tensor, Tensor]]] = {}
