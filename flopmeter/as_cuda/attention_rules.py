"""Which backend CUDA chooses for scaled_dot_product_attention, by release of torch.

torch goes through the backends in an order and takes the first one whose rules all hold: `select_sdp_backend` in
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp. `RULES`, below, has the rules of each release, as its CUDA build
applied them under simulated device properties. A release that changes a rule gets a new row there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from flopmeter.records.memory_format import torch_strides
from flopmeter.torch_names import dispatcher
from flopmeter.torch_names.operators import traced_size
from flopmeter.torch_names.private import SDP_PRIORITY_ORDER

MATH, FLASH, EFFICIENT, CUDNN = (
    SDPBackend.MATH,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)


Qkv = tuple[Tensor, Tensor, Tensor]


class Operand(NamedTuple):
    """What the rules need to know of a tensor; one of rank 4 is [batch, heads, sequence, head size]."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # elements into its storage
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Operand:
        """A symbolic size of the compiler counts as the number that it was traced with."""
        shape, strides = tuple(map(traced_size, tensor.shape)), tuple(map(traced_size, torch_strides(tensor)))
        return cls(shape, strides, tensor.dtype, traced_size(tensor.storage_offset()), tensor.requires_grad)


class Device(Protocol):
    """What the rules ask of the device; a `CudaTarget` answers."""

    @property
    def compute_capability(self) -> tuple[int, int]: ...

    @property
    def cudnn_version(self) -> int: ...

    @property
    def sm(self) -> int: ...


class Settings(NamedTuple):
    """Settings of the user: `sdpa_kernel`, gradient mode, determinism."""

    enabled: frozenset[SDPBackend]
    order: tuple[int, ...]
    grad: bool
    deterministic: bool

    @classmethod
    def now(cls) -> Settings:
        enabled = frozenset(backend for backend, is_on in dispatcher.enabled_sdp_backends().items() if is_on)
        strict = torch.are_deterministic_algorithms_enabled()
        strict = strict and not torch.is_deterministic_algorithms_warn_only_enabled()
        return cls(enabled, tuple(SDP_PRIORITY_ORDER.value()), torch.is_grad_enabled(), strict)


@dataclass(frozen=True)
class SdpaCall:
    """A call of scaled_dot_product_attention: all that the choice depends on, so that another target can repeat it."""

    query: Operand
    key: Operand
    value: Operand
    mask: Operand | None
    dropout_p: float
    is_causal: bool
    enable_gqa: bool
    settings: Settings
    target: Device

    @classmethod
    def of(cls, qkv: Qkv, mask: Tensor | None, p: float, is_causal: bool, gqa: bool, target: Device) -> SdpaCall:
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
        return self.query.shape[1], self.key.shape[1], self.value.shape[1]

    @property
    def head_size(self) -> int:
        return self.query.shape[-1]

    @property
    def needs_grad(self) -> bool:
        return self.settings.grad and any(operand.requires_grad for operand in self.qkv)


BackendRule = Callable[[SdpaCall], bool]

# --- what all fused backends ask -----------------------------------------------------------------------------------


def _is_well_formed(call: SdpaCall) -> bool:
    """One type, [batch, heads, sequence, size] each, one batch, and something in the sequences."""
    q, k, v = call.qkv
    has_rank_4 = q.dtype == k.dtype == v.dtype and len(q.shape) == len(k.shape) == len(v.shape) == 4
    return has_rank_4 and q.shape[0] == k.shape[0] == v.shape[0] and q.shape[2] > 0 and k.shape[2] > 0


def _has_dense_rows(call: SdpaCall, *, unless_single: bool) -> bool:
    """In the last dimension, which `unless_single` may be anything if it has one element."""
    mask_is_dense = call.mask is None or call.mask.strides[-1] == 1
    is_single = unless_single and call.head_size == 1
    return mask_is_dense and (is_single or all(tensor.strides[-1] == 1 for tensor in call.qkv))


def is_half(call: SdpaCall) -> bool:
    return call.query.dtype in (torch.float16, torch.bfloat16)


def half_on_ampere_or_later(call: SdpaCall) -> bool:
    """A rule that flash and cuDNN share."""
    can_run = 80 <= call.sm <= 121 and is_half(call)
    return can_run and _is_well_formed(call) and _has_dense_rows(call, unless_single=True)


def equal_heads(call: SdpaCall) -> bool:
    query, key, value = call.heads
    return query == key == value


def equal_heads_or_grouped(call: SdpaCall) -> bool:
    query, key, value = call.heads
    return key == value and query % key == 0 if call.enable_gqa else query == key == value


def equal_heads_or_grouped_or_one(call: SdpaCall) -> bool:
    """Whether heads match. One head of keys and values serves all queries, even without enable_gqa."""
    query, key, value = call.heads
    return equal_heads_or_grouped(call) or (query > 0 and key == value == 1)


def grid_of_at_most_65535(call: SdpaCall) -> bool:
    return call.query.shape[0] <= 65535 and call.query.shape[1] <= 65535


# --- flash ---------------------------------------------------------------------------------------------------------


def flash_takes(call: SdpaCall) -> bool:
    """No mask, causal only if square, heads of one size up to 256. Capabilities with less than 163 KiB of shared memory
    a block have no backward for the largest heads."""
    size = call.head_size
    is_plain = call.mask is None and (not call.is_causal or call.query.shape[2] == call.key.shape[2])
    if not is_plain or not size == call.key.shape[-1] == call.value.shape[-1] <= 256:
        return False
    is_short = call.needs_grad and (86 <= call.sm <= 89 or call.sm in (120, 121))
    return not is_short or not (192 < size <= 224 or (size > 224 and call.dropout_p > 0))


# --- memory-efficient ----------------------------------------------------------------------------------------------


def gemm_alignment(call: SdpaCall) -> int:
    """Rows of the matmul must be a multiple of this number of elements: 16 bytes if tensor cores run it."""
    on_tensor_cores = call.sm >= 80 or (call.sm >= 70 and is_half(call))
    return 128 // (8 * call.query.dtype.itemsize) if on_tensor_cores else 1


def efficient_takes(call: SdpaCall) -> bool:
    """fp16, fp32 and, from Ampere on, bf16; queries as wide as keys; rows that are aligned."""
    types = (torch.float16, torch.float32, *((torch.bfloat16,) if call.sm >= 80 else ()))
    if call.sm > 121 or call.query.dtype not in types or not _is_well_formed(call):
        return False
    sizes = call.head_size, call.value.shape[-1]
    is_aligned = all(size > 0 and size % gemm_alignment(call) == 0 for size in sizes)
    return is_aligned and call.head_size == call.key.shape[-1] and _has_dense_rows(call, unless_single=False)


def aligned_offsets(call: SdpaCall) -> bool:
    return call.sm < 80 or all(operand.offset % gemm_alignment(call) == 0 for operand in call.qkv)


# --- cuDNN ---------------------------------------------------------------------------------------------------------


def cudnn_takes(call: SdpaCall) -> bool:
    """A mask that needs no gradient and broadcasts; several keys; nothing that has to be deterministic. cuDNN 9.11 to
    9.13 had no correct kernel with dropout."""
    if call.key.shape[2] <= 1 or call.settings.deterministic or not _broadcasts(call.mask, call):
        return False
    is_broken = 91100 < call.target.cudnn_version < 91400
    return call.dropout_p == 0 or (not is_broken and call.query.shape[2] > 1)


def _broadcasts(mask: Operand | None, call: SdpaCall) -> bool:
    if mask is None:
        return True
    batch, heads, query_length = call.query.shape[:3]
    limits = (batch, heads, query_length, call.key.shape[2])[4 - len(mask.shape) :] if len(mask.shape) in (2, 4) else ()
    fits = bool(limits) and all(size in (1, limit) for size, limit in zip(mask.shape, limits, strict=True))
    return fits and not mask.requires_grad


def heads_equal_or_dividing(call: SdpaCall) -> bool:
    query, key, value = call.heads
    return query % key == 0 and query % value == 0 if call.enable_gqa else query == key == value


def heads_equal_or_dividing_or_one(call: SdpaCall) -> bool:
    return heads_equal_or_dividing(call) or equal_heads_or_grouped_or_one(call)


def dropout_in_sixteenths(call: SdpaCall) -> bool:
    """The dropout rate as cuDNN rounds it."""
    return (call.dropout_p * 16) % 1 == 0


def cudnn_head_sizes(call: SdpaCall) -> bool:
    version = call.target.cudnn_version
    return _head_sizes_to(256 if call.sm == 90 and version >= 91000 else 128, call, call.sm // 10 == 10)


def hopper_or_datacenter_blackwell(target: Device) -> bool:
    return target.compute_capability == (9, 0) or target.compute_capability[0] == 10


def has_kernels_of_256(target: Device) -> bool:
    """cuDNN after 9.22 supports heads of up to 256 on Hopper and Blackwell; on sm 10.7 after 9.25."""
    late = 92500 if target.sm == 107 else 92200
    return hopper_or_datacenter_blackwell(target) and target.cudnn_version > late


def cudnn_head_sizes_to_256(call: SdpaCall) -> bool:
    limit = 256 if has_kernels_of_256(call.target) else 128
    return _head_sizes_to(limit, call, hopper_or_datacenter_blackwell(call.target))


def _head_sizes_to(limit: int, call: SdpaCall, knows_192: bool) -> bool:
    """Multiples of 8. cuDNN from 9.11 on also has 192 for queries and keys with 128 for values, on some devices."""
    sizes = call.head_size, call.value.shape[-1]
    if knows_192 and call.target.cudnn_version >= 91100 and sizes == (192, 128):
        return True
    return all(size % 8 == 0 and size <= limit for size in sizes)


def cudnn_backward_has_head_sizes(call: SdpaCall) -> bool:
    """The backward kernel for heads wider than 128 has two sizes only."""
    sizes = call.head_size, call.value.shape[-1]
    if not (call.needs_grad and has_kernels_of_256(call.target)):
        return True
    return max(sizes) <= 128 or sizes in ((192, 128), (256, 256))


def cudnn_decodes(call: SdpaCall) -> bool:
    """cuDNN 9.19 to 9.25.0, except 9.24.1, fails for a single query on Blackwell with sm 10.x or 11.x."""
    version = call.target.cudnn_version
    fails = 91900 <= version <= 92500 and version != 92401 and call.target.compute_capability[0] in (10, 11)
    return not fails or call.query.shape[2] > 1


# --- the releases --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rules:
    """How one release of torch chooses."""

    cudnn_version: int  # the one that its wheels on PyPI bring, as torch.backends.cudnn.version() returns it
    flash: tuple[BackendRule, ...]
    efficient: tuple[BackendRule, ...]
    cudnn: tuple[BackendRule, ...]
    prefers_cudnn: Callable[[Device], bool]
    fuses_unbatched: bool  # [heads, sequence, size] is given a batch of one before the choice

    def of(self, backend: SDPBackend) -> tuple[BackendRule, ...]:
        return {FLASH: self.flash, EFFICIENT: self.efficient, CUDNN: self.cudnn}.get(backend, ())


def prefers_cudnn_of_minor_0_or_3(target: Device) -> bool:
    major, minor = target.compute_capability
    return major in (9, 10) and minor in (0, 3) and target.cudnn_version > 91500


def prefers_cudnn(target: Device) -> bool:
    return target.compute_capability[0] in (9, 10) and target.cudnn_version > 91500


TORCH_2_11 = Rules(
    cudnn_version=91900,
    flash=(half_on_ampere_or_later, flash_takes, equal_heads_or_grouped),
    efficient=(efficient_takes, equal_heads),
    cudnn=(half_on_ampere_or_later, cudnn_takes, heads_equal_or_dividing, cudnn_head_sizes),
    prefers_cudnn=prefers_cudnn_of_minor_0_or_3,
    fuses_unbatched=False,
)

TORCH_2_12 = replace(TORCH_2_11, cudnn_version=92000, cudnn=(*TORCH_2_11.cudnn, dropout_in_sixteenths))

TORCH_2_13 = replace(
    TORCH_2_12, efficient=(*TORCH_2_12.efficient, aligned_offsets), cudnn=(*TORCH_2_12.cudnn, grid_of_at_most_65535)
)


def _but(rules: tuple[BackendRule, ...], instead: Mapping[BackendRule, BackendRule]) -> tuple[BackendRule, ...]:
    return tuple(instead.get(rule, rule) for rule in rules)


TORCH_2_14 = Rules(
    cudnn_version=92400,
    flash=_but(TORCH_2_13.flash, {equal_heads_or_grouped: equal_heads_or_grouped_or_one}),
    efficient=_but(TORCH_2_13.efficient, {equal_heads: equal_heads_or_grouped_or_one}),
    cudnn=(
        *_but(
            TORCH_2_13.cudnn,
            {heads_equal_or_dividing: heads_equal_or_dividing_or_one, cudnn_head_sizes: cudnn_head_sizes_to_256},
        ),
        cudnn_backward_has_head_sizes,
        cudnn_decodes,
    ),
    prefers_cudnn=prefers_cudnn,
    fuses_unbatched=True,
)

TORCH_2_15 = replace(TORCH_2_14, cudnn_version=92600, flash=(*TORCH_2_14.flash, grid_of_at_most_65535))

RULES: Mapping[tuple[int, int], Rules] = {
    (2, 11): TORCH_2_11,
    (2, 12): TORCH_2_12,
    (2, 13): TORCH_2_13,
    (2, 14): TORCH_2_14,
    (2, 15): TORCH_2_15,
}
"""By the first release that has them; a newer torch takes the last row."""

TORCH_DEFAULT_ORDER = (FLASH, EFFICIENT, MATH, CUDNN, SDPBackend.OVERRIDEABLE)
"""Torch's order if the user set none. Devices that prefer cuDNN put it first."""


def rules_version(running: tuple[int, int]) -> tuple[int, int]:
    """The newest release with rules that is not newer than the running torch, or the oldest known one."""
    return max((known for known in RULES if known <= running), default=min(RULES))


def rules_for(running: tuple[int, int]) -> Rules:
    """The rules that hold for the running torch."""
    return RULES[rules_version(running)]


def choose(call: SdpaCall, rules: Rules) -> SDPBackend:
    """The backend that CUDA would run.

    Raises:
        RuntimeError: the user disabled every backend that could run (torch's own message).
    """
    enabled = call.settings.enabled
    if not enabled:
        raise RuntimeError("No viable backend for scaled_dot_product_attention was found.")
    for backend in _order(call, rules):
        if backend in enabled and all(rule(call) for rule in rules.of(backend)):
            return backend
    raise RuntimeError("No available kernel. Aborting execution.")


def _order(call: SdpaCall, rules: Rules) -> tuple[SDPBackend, ...]:
    """The user's order if one was set, else torch's, in which cuDNN comes first or, after math, last."""
    default = tuple(backend.value for backend in TORCH_DEFAULT_ORDER)
    if call.settings.order != default:
        return tuple(SDPBackend(value) for value in call.settings.order)
    deprioritized = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1"
    cudnn_first = rules.prefers_cudnn(call.target) and not deprioritized
    return (CUDNN, FLASH, EFFICIENT, MATH) if cudnn_first else (FLASH, EFFICIENT, MATH, CUDNN)
