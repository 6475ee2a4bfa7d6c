"""Recipes of low precision (transformer_engine/common/recipe): which types, and how many elements share a scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class _Largest(NamedTuple):
    """The largest numbers of the types that the forward and the backward pass take."""

    max_fwd: float
    max_bwd: float


class Format(Enum):
    E2M1 = _Largest(6, 6)
    E4M3 = _Largest(448, 448)
    E5M2 = _Largest(57344, 57344)
    HYBRID = _Largest(448, 57344)


class QParams(NamedTuple):
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


class MMParams(NamedTuple):
    use_split_accumulator: bool = True


_SCALES, _EXACT, _FAST = QParams(), MMParams(), MMParams(use_split_accumulator=False)


class Recipe:
    fp8_format: Format
    fp8_dpa: bool
    fp8_mha: bool

    def delayed(self) -> bool:
        return isinstance(self, DelayedScaling)

    def float8_current_scaling(self) -> bool:
        return isinstance(self, Float8CurrentScaling)

    def float8_per_tensor_scaling(self) -> bool:
        return isinstance(self, (DelayedScaling, Float8CurrentScaling))

    def mxfp8(self) -> bool:
        return isinstance(self, MXFP8BlockScaling)

    def float8_block_scaling(self) -> bool:
        return isinstance(self, Float8BlockScaling)

    def nvfp4(self) -> bool:
        return isinstance(self, NVFP4BlockScaling)

    def custom(self) -> bool:
        return False

    @property
    def forward_type(self) -> torch.dtype:
        return torch.float4_e2m1fn_x2 if self.nvfp4() else E4M3

    @property
    def backward_type(self) -> torch.dtype:
        return E5M2 if self.fp8_format is Format.HYBRID else self.forward_type


@dataclass
class DelayedScaling(Recipe):
    """The scale of a tensor follows from the largest values of the steps before. (Programs of older versions still hand
    over `interval`, `override_linear_precision` and what Megatron-LM adds.)"""

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    interval: int = 1
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    params_dtype: Any = None
    device: Any = None

    def __post_init__(self) -> None:
        if any(self.override_linear_precision):
            raise NotImplementedError(
                "flopmeter's shim of transformer_engine has no override_linear_precision: let all products of a layer"
                " be in fp8"
            )


@dataclass
class Float8CurrentScaling(Recipe):
    """One scale for a tensor, of its own largest value."""

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    fp8_quant_fwd_inp: QParams = _SCALES
    fp8_quant_fwd_weight: QParams = _SCALES
    fp8_quant_bwd_grad: QParams = _SCALES
    fp8_gemm_fprop: MMParams = _FAST
    fp8_gemm_dgrad: MMParams = _EXACT
    fp8_gemm_wgrad: MMParams = _EXACT


@dataclass
class MXFP8BlockScaling(Recipe):
    """A scale for each 32 elements along the depth."""

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False


@dataclass
class Float8BlockScaling(Recipe):
    """A scale for each 128 elements along the depth, of weights for squares of 128."""

    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_dpa: bool = field(default=False, init=False)
    fp8_mha: bool = field(default=False, init=False)


@dataclass
class NVFP4BlockScaling(Recipe):
    """fp4 with a scale for each 16 elements, of weights for squares of 16. Columns of inputs and gradients are mixed by
    Hadamard transforms."""

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
