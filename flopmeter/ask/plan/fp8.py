"""Linear layers whose products run in fp8, as torchao's dynamic scaling has them (the tensorwise recipe of torchtitan).

Activations and gradients are cast with the largest value of the tensor, activations to e4m3 and gradients to e5m2.
Parameters are cast as shards and gathered by FSDP2 in fp8 (`enable_fsdp_float8_all_gather`). What tensor parallelism
gathers is in bf16 here, where torchao casts before. Casts are kernels of their own where layers run eagerly, and fuse
with their neighbours where they are compiled.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MULTIPLE = 16  # of rows and columns, which torch's product in fp8 needs


def in_fp8(layers: list[nn.Module]) -> None:
    """Linear layers inside, in place."""
    casts = _Casts()
    for layer in layers:
        for module in list(layer.modules()):
            if type(module) is nn.Linear and not (module.in_features % MULTIPLE or module.out_features % MULTIPLE):
                module.__class__ = Fp8Linear
                module.casts = casts  # type: ignore[assignment]
        layer.register_forward_hook(casts.forget)


def fp8_numel(layer: nn.Module) -> int:
    """Parameters of this rank that are gathered in fp8."""
    weights: list[Any] = [module.weight for module in layer.modules() if isinstance(module, Fp8Linear)]
    return sum((each.to_local() if hasattr(each, "to_local") else each).numel() for each in weights)


class _Casts:
    """The last casts: a tensor that several products read is cast once, as in compiled code."""

    MOST = 4

    def __init__(self) -> None:
        self._made: dict[Any, tuple[Tensor, tuple[Tensor, Tensor]]] = {}

    def __call__(self, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """In that type, and the scale that undoes it."""
        key = x.untyped_storage()._cdata, x.shape, x.stride(), dtype
        if key not in self._made:
            scale = torch.finfo(dtype).max / x.abs().amax().float()
            cast = (x.float() * scale).to(dtype).contiguous(), scale.reciprocal()
            self._made[key] = x, cast  # with x, so that no other tensor gets its storage's address
            while len(self._made) > self.MOST:
                del self._made[next(iter(self._made))]
        return self._made[key][1]

    def forget(self, *_: Any) -> None:
        """As a hook after the layer: compiled code keeps none for later."""
        self._made.clear()


class Fp8Linear(nn.Linear):
    casts: _Casts

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
        return made if self.bias is None else made + self.bias

    def _product(self, x: Tensor, weight: Tensor) -> Tensor:
        product: Any = _Product.apply
        return product(x.flatten(0, -2), weight, self.casts).unflatten(0, x.shape[:-1])


class _Product(torch.autograd.Function):
    """Scales and casts, and products whose second factor lies by columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, casts: _Casts) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.casts = casts
        a, scale = casts(x, torch.float8_e4m3fn)
        return _scaled(a, _as_gathered(weight), scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        by_rows, scale = ctx.casts(gradient, torch.float8_e5m2)
        of_x = _scaled(by_rows, _as_gathered(weight).t().contiguous(), scale)
        return of_x, _scaled(by_rows.t().contiguous(), ctx.casts(x.t(), torch.float8_e4m3fn)[0], scale), None


def _scaled(a: Tensor, transposed: Tensor, scale: Tensor) -> Tensor:
    return torch._scaled_mm(a, transposed.t(), scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def _as_gathered(weight: Tensor) -> Tensor:
    """In fp8: its first half, since values do not matter here."""
    return weight.detach().flatten().view(torch.float8_e4m3fn)[: weight.numel()].view(weight.shape)
