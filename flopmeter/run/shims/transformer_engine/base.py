"""What the layers share (transformer_engine/pytorch/module/base.py): arguments, weights and their casts, histories of
largest values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flopmeter.run.shims import kernel
from flopmeter.run.shims.transformer_engine.casts import MatmulOperand
from flopmeter.run.shims.transformer_engine.parallel import WeightSplit, size_of
from flopmeter.run.shims.transformer_engine.quantizing import Caster
from flopmeter.run.shims.transformer_engine.recipes import DelayedScaling
from flopmeter.run.shims.transformer_engine.state import REGION, History

SPREAD = 0.023  # of weights, where no init_method is given (pytorch/utils.py, get_default_init_method)
INPUTS, GRADIENTS = 3, 2  # tensors of a product that delayed scaling keeps histories of: input, weight, output


refuse = partial(kernel.refuse, "transformer_engine")


class SavesNoScales(nn.Module):
    """A module whose checkpoints hold no scales of fp8: those of a metered run do not matter."""

    def get_extra_state(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: Any) -> None: ...


class EngineLayer(SavesNoScales):
    """transformer_engine.pytorch.module.base.TransformerEngineBaseModule."""

    products = 1  # matmuls forward
    return_bias = return_layernorm_output = False

    def __init__(
        self,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        rng_tracker_name: str | None = None,
        init_method: Any = None,
        params_dtype: torch.dtype | None = None,
        parallel_mode: str | None = None,
        device: Any = "cuda",
        ub_name: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        overlaps = [name for name in options if name.startswith("ub_")]
        refuse(options, [*overlaps, "delay_wgrad_compute", "symmetric_ar_type", "save_original_input"])
        self.tp_group, self.tp_size = tp_group, tp_size if tp_group is None else size_of(tp_group)
        self.parallel_mode, self.ub_name = parallel_mode, ub_name
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation, self.save_original_input = fuse_wgrad_accumulation, False
        self.init_method, self._tracker, self._tracker_name = init_method, get_rng_state_tracker, rng_tracker_name
        self._new: dict[str, Any] = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        self.fp8 = self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self._histories: tuple[History, History] | None = None
        self.kept_casts: dict[str, MatmulOperand] = {}  # of weights, for the microbatches after the first

    @property
    def split(self) -> WeightSplit:
        mode = self.parallel_mode if self.tp_size > 1 else None
        return WeightSplit(mode, self.tp_group, self.tp_size, self.sequence_parallel)

    @property
    def adds_bias_later(self) -> bool:
        """Whether the bias is added in a kernel of its own, after the sum over ranks."""
        return self.parallel_mode == "row"

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        self.tp_group = tp_group

    def share(self, features: int, is_split: bool = True) -> int:
        """How many of the features this rank has."""
        if not is_split:
            return features
        if features % self.tp_size:
            raise AssertionError(f"{features} is not divisible by {self.tp_size}")
        return features // self.tp_size

    # --- weights ------------------------------------------------------------------------------------------------------

    def make_norm(self, features: int, prefix: str, zero_centered: bool, normalization: str) -> None:
        weight = nn.Parameter((torch.zeros if zero_centered else torch.ones)(features, **self._new))
        bias = nn.Parameter(torch.zeros(features, **self._new)) if normalization == "LayerNorm" else None
        for name, parameter in ((f"{prefix}_weight", weight), (f"{prefix}_bias", bias)):
            self.register_parameter(name, parameter)
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def make_weights(self, rows: int, columns: int, parts: Any, bias: bool) -> None:
        """One weight, or several that lie behind each other and are multiplied as one."""
        sizes = self._sizes(rows, parts)
        whole = torch.empty(rows, columns, **self._new)
        biases = torch.zeros(rows, **self._new) if bias else None
        self._prefixes, begin = list(sizes), 0
        for prefix, size in sizes.items():
            part = slice(begin, begin + size) if parts else ...
            self.make_weight(f"{prefix}weight", whole[part], self.parallel_mode)
            self.make_bias(f"{prefix}bias", None if biases is None else biases[part], self.parallel_mode)
            begin += size

    def _sizes(self, rows: int, parts: Any) -> dict[str, int]:
        if not parts:
            return {"": rows}
        shares = self.tp_size if self.parallel_mode == "column" else 1
        sizes = {name: size // shares for name, size in parts.items()} if isinstance(parts, dict) else None
        sizes = sizes or {name: rows // len(parts) for name in parts}
        return {f"{name.rstrip('_')}_": size for name, size in sizes.items()}

    def make_weight(self, name: str, values: Tensor, mode: str | None) -> None:
        weight = nn.Parameter(values)
        with self._random_numbers():
            self._initialise(weight)
        _split_along(weight, 1 if mode == "row" else 0)
        self.register_parameter(name, weight)

    def make_bias(self, name: str, values: Tensor | None, mode: str | None) -> None:
        if values is None:
            self.register_parameter(name, None)
            return
        bias = nn.Parameter(values)
        if mode == "row":
            bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        elif mode == "column":
            _split_along(bias, 0)
        self.register_parameter(name, bias)

    def _initialise(self, weight: Tensor) -> None:
        if weight.device.type == "meta":
            return
        if self.init_method is None:
            nn.init.normal_(weight, 0.0, SPREAD)
        else:
            with torch.no_grad():
                self.init_method(weight)

    def _random_numbers(self) -> Any:
        if self._tracker is None:
            return nullcontext()
        return self._tracker().fork(*([self._tracker_name] if self._tracker_name else []))

    def reset_parameters(self, defer_init: bool = False) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif not name.startswith("layer_norm"):
                self._initialise(parameter)

    def whole_weight(self) -> tuple[Tensor, Tensor | None]:
        weights = [getattr(self, f"{prefix}weight") for prefix in self._prefixes]
        biases = [getattr(self, f"{prefix}bias") for prefix in self._prefixes]
        if len(weights) == 1:
            return weights[0], biases[0]
        return _Join.apply(*weights), None if biases[0] is None else _Join.apply(*biases)

    def norm(self, dtype: torch.dtype, prefix: str = "layer_norm") -> tuple[Tensor | None, Tensor | None]:
        weight, bias = (getattr(self, f"{prefix}_{name}", None) for name in ("weight", "bias"))
        return None if weight is None else weight.to(dtype), None if bias is None else bias.to(dtype)

    # --- calls --------------------------------------------------------------------------------------------------------

    def result(self, out: Tensor, bias: Tensor | None, normed: Tensor | None) -> Any:
        """The output alone, or a tuple with the bias and the normed input if the program asks for these."""
        returned = [out]
        if self.return_bias and bias is not None:
            returned.append(bias.to(out.dtype))
        if self.return_layernorm_output and normed is not None:
            returned.append(normed)
        return out if len(returned) == 1 else tuple(returned)

    def histories(self, recipe: DelayedScaling) -> tuple[History, History]:
        if self._histories is None:
            device = next(self.parameters()).device
            counts = INPUTS * self.products, GRADIENTS * self.products
            forward, backward = (History(count, recipe, device) for count in counts)
            self._histories = forward, backward
        REGION.forward.append(self._histories[0])
        return self._histories

    def will_run_backward(self, ctx: Any) -> None:
        """Notes for the backward pass whether this layer is the first of its region, and so the last one to get its
        gradients."""
        ctx.recipe, ctx.group = REGION.recipe, REGION.group
        ctx.is_last = ctx.call.is_training and isinstance(ctx.recipe, DelayedScaling) and REGION.begins()

    def ran_backward(self, ctx: Any) -> None:
        if self._histories is not None and isinstance(ctx.recipe, DelayedScaling):
            REGION.backward.append(self._histories[1])
            if ctx.is_last:
                REGION.update(False, ctx.recipe, ctx.group)

    # --- what programs ask for ----------------------------------------------------------------------------------------

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Histories are made when a region of delayed scaling first needs them."""

    reset_fp8_meta_tensors = init_fp8_metadata

    def backward_dw(self) -> None:
        """There is nothing left to compute."""

    def need_backward_dw(self) -> bool:
        return False

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        """Called where weight gradients are delayed, which they are not."""


class WeightUse:
    """A weight in one call of its layer."""

    def __init__(self, layer: EngineLayer, name: str, parameter: Tensor, is_first_microbatch: bool | None) -> None:
        self.layer, self.name, self.parameter, self._is_first = layer, name, parameter, is_first_microbatch

    def operand(self, weight: Tensor, caster: Caster | None, dtype: torch.dtype, columns: bool) -> MatmulOperand:
        """The weight as an operand: cast in each call or, with several microbatches, in the first one and kept. Columns
        are kept as well if the forward pass runs again."""
        if caster is None:
            return MatmulOperand(weight.to(dtype))
        columns = columns or REGION.runs_again
        kept = self.layer.kept_casts.get(self.name)
        if self._is_first is None or self._is_first or kept is None:
            kept = caster(weight, "weight", columns)[0]
        elif columns and kept.columns is None:
            kept = caster.with_columns(kept) if caster.has_one_scale else caster(weight, "weight")[0]
        if self._is_first is not None:
            self.layer.kept_casts[self.name] = kept
        return kept

    def into(self) -> tuple[Tensor | None, bool]:
        """The gradient that the product writes to, and whether it adds to it."""
        if not self.layer.fuse_wgrad_accumulation:
            return None, False
        parameter: Any = self.parameter
        main = parameter.get_main_grad() if hasattr(parameter, "__fsdp_param__") else parameter.main_grad
        overwrites = getattr(parameter, "overwrite_main_grad", False)
        return main, not overwrites and not self._is_first

    def stand_in(self) -> Tensor | None:
        """What autograd gets in place of a gradient that lies elsewhere. (Megatron-LM waits for one.)"""
        parameter: Any = self.parameter
        if not hasattr(parameter, "grad_added_to_main_grad"):
            return None
        parameter.grad_added_to_main_grad = True
        return torch.empty_like(parameter)


def share_storage(tensors: Sequence[Tensor]) -> bool:
    return len({each.untyped_storage()._cdata for each in tensors}) == 1


class _Join(torch.autograd.Function):
    """Joins parameters that lie behind each other to one matrix without running a kernel, and splits its gradient."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.sizes = [part.shape[0] for part in parts]
        first, rows = parts[0], sum(part.shape[0] for part in parts)
        if not share_storage(parts):
            return torch.cat(parts)  # each was moved by itself since
        return first.as_strided((rows, *first.shape[1:]), first.stride())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.split(ctx.sizes)


def _split_along(parameter: Any, dimension: int) -> None:
    """Marks a parameter of which each rank has a part, with Megatron-LM's attributes."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dimension, 1


def set_in_children(module: nn.Module, tp_group: Any) -> None:
    for child in module.children():
        layer: Any = child
        if hasattr(layer, "set_tensor_parallel_group"):
            layer.set_tensor_parallel_group(tp_group)
