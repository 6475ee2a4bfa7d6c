"""scaled_dot_product_attention: which backend CUDA chooses, and the ops around it.

The first backend of the order whose every rule holds is chosen, as `select_sdp_backend` in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp does. The rules are those of the torch 2.13.0 CUDA build.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from flopmeter.as_cuda import torch_private as private
from flopmeter.as_cuda.scope import Scope
from flopmeter.as_cuda.target import CudaTarget

aten = torch.ops.aten

MATH, FLASH, EFFICIENT, CUDNN = (
    SDPBackend.MATH,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)


Qkv = tuple[Tensor, Tensor, Tensor]


class Operand(NamedTuple):
    """What the rules ask of a tensor, [batch, heads, sequence, head size] where it has rank 4."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # elements into its storage
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Operand:
        offset = int(tensor.storage_offset())
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, offset, tensor.requires_grad)

    def size(self, dim: int) -> int:
        return self.shape[dim]

    def stride(self, dim: int) -> int:
        return self.strides[dim]

    def dim(self) -> int:
        return len(self.shape)


class Settings(NamedTuple):
    """What the user set: `sdpa_kernel`, gradient mode, determinism."""

    enabled: frozenset[SDPBackend]
    order: tuple[int, ...]
    grad: bool
    deterministic: bool

    @classmethod
    def now(cls) -> Settings:
        enabled = frozenset(backend for backend, is_on in private.enabled_sdp_backends().items() if is_on)
        strict = torch.are_deterministic_algorithms_enabled()
        strict = strict and not torch.is_deterministic_algorithms_warn_only_enabled()
        return cls(enabled, tuple(private.sdp_priority_order()), torch.is_grad_enabled(), strict)


@dataclass(frozen=True)
class Call:
    """All that the choice depends on, so that it can be made again for another target."""

    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    settings: Settings
    target: CudaTarget

    @classmethod
    def of(cls, qkv: Qkv, mask: Tensor | None, p: float, is_causal: bool, gqa: bool, target: CudaTarget) -> Call:
        query, key, value = map(Operand.of, qkv)
        mask_facts = None if mask is None else Operand.of(mask)
        return cls(query, key, value, mask_facts, p, is_causal, gqa, Settings.now(), target)

    @property
    def qkv(self) -> tuple[Operand, Operand, Operand]:
        return self.query, self.key, self.value

    @property
    def sm(self) -> int:
        return self.target.sm

    @property
    def heads(self) -> tuple[int, int, int]:
        return self.query.size(1), self.key.size(1), self.value.size(1)

    @property
    def head_size(self) -> int:
        return self.query.size(-1)

    @property
    def needs_grad(self) -> bool:
        return self.settings.grad and any(operand.requires_grad for operand in self.qkv)


Rule = Callable[[Call], bool]

# --- what all fused backends ask -----------------------------------------------------------------------------------


def same_dtype(call: Call) -> bool:
    return call.query.dtype == call.key.dtype == call.value.dtype


def rank_4(call: Call) -> bool:
    return all(tensor.dim() == 4 for tensor in call.qkv)


def same_batch(call: Call) -> bool:
    return call.query.size(0) == call.key.size(0) == call.value.size(0)


def sequences_not_empty(call: Call) -> bool:
    return call.query.size(2) > 0 and call.key.size(2) > 0


def dense_last_dimension(call: Call) -> bool:
    mask_is_dense = call.mask is None or call.mask.stride(-1) == 1
    return mask_is_dense and all(tensor.stride(-1) == 1 for tensor in call.qkv)


def dense_last_dimension_unless_single(call: Call) -> bool:
    mask_is_dense = call.mask is None or call.mask.stride(-1) == 1
    return mask_is_dense and (call.head_size == 1 or all(tensor.stride(-1) == 1 for tensor in call.qkv))


def equal_heads(call: Call) -> bool:
    query, key, value = call.heads
    return query == key == value


def half_precision(call: Call) -> bool:
    return call.query.dtype in (torch.float16, torch.bfloat16)


def sm_80_to_121(call: Call) -> bool:
    return 80 <= call.sm <= 121


COMMON = (same_dtype, rank_4, same_batch, sequences_not_empty)

# --- flash ---------------------------------------------------------------------------------------------------------


def no_mask(call: Call) -> bool:
    return call.mask is None


def causal_only_if_square(call: Call) -> bool:
    return not call.is_causal or call.query.size(2) == call.key.size(2)


def equal_heads_or_grouped(call: Call) -> bool:
    query, key, value = call.heads
    return key == value and query % key == 0 if call.enable_gqa else query == key == value


def one_head_size_to_256(call: Call) -> bool:
    return call.head_size == call.key.size(-1) == call.value.size(-1) <= 256


def backward_fits_shared_memory(call: Call) -> bool:
    """Capabilities with less than 163 KiB of shared memory a block have no backward for the largest heads."""
    if not (call.needs_grad and (86 <= call.sm <= 89 or call.sm in (120, 121))):
        return True
    return not (192 < call.head_size <= 224 or (call.head_size > 224 and call.dropout_p > 0))


# --- memory-efficient ----------------------------------------------------------------------------------------------


def sm_50_to_121(call: Call) -> bool:
    return 50 <= call.sm <= 121


def efficient_dtype(call: Call) -> bool:
    return call.query.dtype in (torch.float16, torch.float32) or (call.query.dtype == torch.bfloat16 and call.sm >= 80)


def same_query_and_key_size(call: Call) -> bool:
    return call.head_size == call.key.size(-1)


def gemm_alignment(call: Call) -> int:
    """Elements that a row of the product must be a multiple of: 16 bytes where tensor cores run it."""
    on_tensor_cores = call.sm >= 80 or (call.sm >= 70 and half_precision(call))
    return 128 // (8 * call.query.dtype.itemsize) if on_tensor_cores else 1


def aligned_head_sizes(call: Call) -> bool:
    sizes = call.head_size, call.value.size(-1)
    return all(size > 0 and size % gemm_alignment(call) == 0 for size in sizes)


def aligned_offsets(call: Call) -> bool:
    return call.sm < 80 or all(operand.offset % gemm_alignment(call) == 0 for operand in call.qkv)


# --- cuDNN ---------------------------------------------------------------------------------------------------------


def heads_equal_or_dividing(call: Call) -> bool:
    query, key, value = call.heads
    return query % key == 0 and query % value == 0 if call.enable_gqa else query == key == value


def mask_broadcasts_and_needs_no_grad(call: Call) -> bool:
    mask = call.mask
    if mask is None:
        return True
    batch, heads, query_length = call.query.shape[:3]
    limits = (batch, heads, query_length, call.key.size(2))[4 - mask.dim() :] if mask.dim() in (2, 4) else ()
    fits = bool(limits) and all(size in (1, limit) for size, limit in zip(mask.shape, limits, strict=True))
    return fits and not mask.requires_grad


def cudnn_dropout(call: Call) -> bool:
    """cuDNN holds the rate in sixteenths; 9.11 to 9.13 had none that was right."""
    if call.dropout_p == 0:
        return True
    broken = 91100 < call.target.cudnn_version < 91400
    return (call.dropout_p * 16) % 1 == 0 and not broken and call.query.size(2) > 1


def several_keys(call: Call) -> bool:
    return call.key.size(2) > 1


def grid_of_at_most_65535(call: Call) -> bool:
    return call.query.size(0) <= 65535 and call.query.size(1) <= 65535


def nondeterminism_allowed(call: Call) -> bool:
    return not call.settings.deterministic


def cudnn_head_sizes(call: Call) -> bool:
    sizes = call.head_size, call.value.size(-1)
    version = call.target.cudnn_version
    if call.sm == 90 and version >= 91000:
        limit = 256
    elif call.sm // 10 == 10 and version >= 91100 and sizes == (192, 128):
        limit = 192
    else:
        limit = 128
    return all(size % 8 == 0 and size <= limit for size in sizes)


# --- the table -----------------------------------------------------------------------------------------------------

TORCH_2_13: Mapping[SDPBackend, tuple[Rule, ...]] = {
    FLASH: (
        sm_80_to_121,
        half_precision,
        *COMMON,
        dense_last_dimension_unless_single,
        no_mask,
        causal_only_if_square,
        equal_heads_or_grouped,
        one_head_size_to_256,
        backward_fits_shared_memory,
    ),
    EFFICIENT: (
        sm_50_to_121,
        efficient_dtype,
        *COMMON,
        dense_last_dimension,
        equal_heads,
        same_query_and_key_size,
        aligned_head_sizes,
        aligned_offsets,
    ),
    CUDNN: (
        sm_80_to_121,
        half_precision,
        *COMMON,
        dense_last_dimension_unless_single,
        mask_broadcasts_and_needs_no_grad,
        heads_equal_or_dividing,
        cudnn_head_sizes,
        cudnn_dropout,
        several_keys,
        grid_of_at_most_65535,
        nondeterminism_allowed,
    ),
    MATH: (),
}

RULES: Mapping[tuple[int, int], Mapping[SDPBackend, tuple[Rule, ...]]] = {(2, 13): TORCH_2_13}
"""By torch version. A version that has no row here takes the nearest one, and a note says so."""

TORCH_DEFAULT_ORDER = (FLASH, EFFICIENT, MATH, CUDNN, SDPBackend.OVERRIDEABLE)
"""Torch's order where the user set none. CUDA devices that prefer cuDNN put it first."""


def rules_for(version: tuple[int, int]) -> Mapping[SDPBackend, tuple[Rule, ...]]:
    """The rules of the newest torch not newer than `version`, or the oldest known ones."""
    known = [row for row in RULES if row <= version] or [min(RULES)]
    return RULES[max(known)]


def choose(call: Call, rules: Mapping[SDPBackend, Sequence[Rule]]) -> SDPBackend:
    """The backend that CUDA would run.

    Raises:
        RuntimeError: the user disabled every backend that could (torch's own message).
    """
    enabled = call.settings.enabled
    if not enabled:
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")
    for backend in _order(call):
        if backend in enabled and all(rule(call) for rule in rules[backend]):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(call: Call) -> tuple[SDPBackend, ...]:
    """The user's order if one was set, else torch's, in which cuDNN comes first or, after math, last."""
    default = tuple(backend.value for backend in TORCH_DEFAULT_ORDER)
    if call.settings.order != default:
        return tuple(SDPBackend(value) for value in call.settings.order)
    return (CUDNN, FLASH, EFFICIENT, MATH) if _prefers_cudnn(call.target) else (FLASH, EFFICIENT, MATH, CUDNN)


def _prefers_cudnn(target: CudaTarget) -> bool:
    major, minor = target.compute_capability
    deprioritized = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    return major in (9, 10) and minor in (0, 3) and target.cudnn_version > 91500 and not deprioritized


# --- the ops around the chosen kernel ------------------------------------------------------------------------------

MASK_ALIGNMENT = 8
"""Elements: the memory-efficient kernel reads the mask in rows of a multiple of these."""
FLASH_HEAD_ALIGNMENT = 8
"""Elements: the composite pads heads of other sizes for the flash kernel."""


def install(scope: Scope) -> None:
    """Dispatch scaled_dot_product_attention on meta tensors as CUDA would."""
    rules = rules_for(private.running_version())
    chosen = scope.attention
    scope.differences.append(lambda target: _difference(chosen, rules, target))
    composite = aten.scaled_dot_product_attention.default

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        call = Call.of((query, key, value), attn_mask, dropout_p, is_causal, enable_gqa, scope.target)
        if call not in chosen:
            chosen[call] = choose(call, rules)
        if chosen[call] in RUN:
            return RUN[chosen[call]](call, (query, key, value), attn_mask, scale)
        math: Tensor = private.decompose(
            composite, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return math

    # vmap decomposes this composite a level higher than others, where it also looks for randomness.
    scope.override(composite, scaled_dot_product_attention, vmap_key="FuncTorchVmapMode")


def _difference(
    chosen: Mapping[Call, SDPBackend], rules: Mapping[SDPBackend, Sequence[Rule]], target: CudaTarget
) -> str | None:
    """The first attention that another target would run through another backend, in words."""
    for call, backend in chosen.items():
        try:
            there = choose(replace(call, target=target), rules).name
        except RuntimeError:
            there = "none"
        if there != backend.name:
            shape, dtype = list(call.query.shape), str(call.query.dtype).removeprefix("torch.")
            return f"scaled_dot_product_attention of {dtype} {shape}: {backend.name} here, {there} there"
    return None


def _flash(call: Call, qkv: Qkv, mask: Tensor | None, scale: float | None) -> Tensor:
    """Pads the head size to a multiple of 8; the scale is that of the size before padding."""
    size = call.head_size
    padding = -size % FLASH_HEAD_ALIGNMENT
    query, key, value = (F.pad(tensor, (0, padding)) if padding else tensor for tensor in qkv)
    scale = 1 / math.sqrt(size) if scale is None else scale
    output: Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return output[..., :size] if padding else output


def _efficient(call: Call, qkv: Qkv, mask: Tensor | None, scale: float | None) -> Tensor:
    mask = _additive(mask, qkv[0])
    if mask is not None:
        if any(stride % MASK_ALIGNMENT for stride in mask.stride()[:-1]):
            length = mask.size(-1)
            mask = F.pad(mask, (0, MASK_ALIGNMENT - length % MASK_ALIGNMENT))[..., :length]
        mask = mask.expand(*call.query.shape[:3], call.key.size(2))
    output: Tensor = aten._scaled_dot_product_efficient_attention(
        *qkv, mask, call.needs_grad, call.dropout_p, call.is_causal, scale=scale
    )[0]
    return output


def _cudnn(call: Call, qkv: Qkv, mask: Tensor | None, scale: float | None) -> Tensor:
    mask = _additive(mask, qkv[0])
    output: Tensor = aten._scaled_dot_product_cudnn_attention(
        *qkv, mask, call.needs_grad, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return output


def _additive(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A bool mask becomes 0 where it lets through and -inf where not."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, minus_infinity = (
        torch.scalar_tensor(fill, dtype=query.dtype, device=query.device) for fill in (0.0, -math.inf)
    )
    return torch.where(mask, zero, minus_infinity)


RUN: Mapping[SDPBackend, Callable[[Call, Qkv, Tensor | None, float | None], Tensor]] = {
    FLASH: _flash,
    EFFICIENT: _efficient,
    CUDNN: _cudnn,
}
"""How each fused backend is called; math is what the composite does by itself."""
