"""scaled_dot_product_attention: the backend that CUDA chooses, and the ops around it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend

from flopmeter.as_cuda.attention_rules import CUDNN, EFFICIENT, FLASH, Qkv, Rules, SdpaCall, choose, rules_for
from flopmeter.as_cuda.emulation import Emulation
from flopmeter.as_cuda.target import CudaTarget
from flopmeter.records.memory_format import torch_strides
from flopmeter.torch_names import dispatcher
from flopmeter.torch_names.compiler import TRACING_CONTEXT

aten = torch.ops.aten

MASK_ALIGNMENT = 8
"""The memory-efficient kernel reads the mask in rows of a multiple of this number of elements."""
FLASH_HEAD_ALIGNMENT = 8
"""The composite pads heads to a multiple of this number of elements for the flash kernel."""


def install(scope: Emulation) -> None:
    """Dispatch scaled_dot_product_attention on meta tensors as CUDA would."""
    rules = rules_for(dispatcher.running_version())
    chosen = scope.attention
    scope.differences.append(lambda target: _difference(chosen, rules, target))
    composite = aten.scaled_dot_product_attention.default

    def attend(qkv: Qkv, mask: Tensor | None, p: float, is_causal: bool, scale: float | None, gqa: bool) -> Tensor:
        call = SdpaCall.of(qkv, mask, p, is_causal, gqa, scope.target)
        if call not in chosen:
            chosen[call] = choose(call, rules)
        if chosen[call] in RUN:
            return RUN[chosen[call]](call, qkv, mask, scale)
        return dispatcher.decompose(composite, *qkv, mask, p, is_causal, scale=scale, enable_gqa=gqa)

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
        if not (rules.fuses_unbatched and query.dim() == key.dim() == value.dim() == 3):
            return attend((query, key, value), attn_mask, dropout_p, is_causal, scale, enable_gqa)
        qkv = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        while attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask.unsqueeze(0)
        return attend(qkv, attn_mask, dropout_p, is_causal, scale, enable_gqa).squeeze(0)

    # vmap decomposes this composite at a higher level than others, where it also checks for random ops.
    scope.override(composite, scaled_dot_product_attention, vmap_key="FuncTorchVmapMode", where=_is_dispatched)


def _is_dispatched(tensor: object) -> bool:
    """Whether attention on the tensor is dispatched as on CUDA: it is emulated; or it stands for such a tensor while
    Dynamo traces, where the program may ask for the layout of the result; or it poses as one on the device, since
    inductor's patterns put this composite in the place of attention that is written out."""
    poses = isinstance(tensor, FakeTensor) and tensor.device.type == "cuda"
    stands_for_one = dispatcher.is_traced(tensor) and TRACING_CONTEXT.value() is not None
    return dispatcher.is_emulated(tensor) or stands_for_one or poses


def _difference(chosen: Mapping[SdpaCall, SDPBackend], rules: Rules, target: CudaTarget) -> str | None:
    """The first attention call for which another target would choose another backend, in words."""
    for call, backend in chosen.items():
        try:
            there = choose(replace(call, target=target), rules).name
        except RuntimeError:
            there = "none"
        if there != backend.name:
            shape, dtype = list(call.query.shape), str(call.query.dtype).removeprefix("torch.")
            return f"scaled_dot_product_attention of {dtype} {shape}: {backend.name} here, {there} there"
    return None


def _flash(call: SdpaCall, qkv: Qkv, mask: Tensor | None, scale: float | None) -> Tensor:
    """The flash kernel. Head sizes are padded to a multiple of 8; the scale is that of the size before padding."""
    size = call.head_size
    padding = -size % FLASH_HEAD_ALIGNMENT
    query, key, value = (F.pad(tensor, (0, padding)) if padding else tensor for tensor in qkv)
    scale = 1 / math.sqrt(size) if scale is None else scale
    output: Tensor = aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return output[..., :size] if padding else output


def _efficient(call: SdpaCall, qkv: Qkv, mask: Tensor | None, scale: float | None) -> Tensor:
    mask = _additive(mask, call.query.dtype)
    if mask is not None:
        if any(stride % MASK_ALIGNMENT for stride in torch_strides(mask)[:-1]):
            length = mask.size(-1)
            mask = F.pad(mask, (0, MASK_ALIGNMENT - length % MASK_ALIGNMENT))[..., :length]
        mask = mask.expand(*call.query.shape[:3], call.key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        *qkv, mask, call.needs_grad, call.dropout_p, call.is_causal, scale=scale
    )[0]


def _cudnn(call: SdpaCall, qkv: Qkv, mask: Tensor | None, scale: float | None) -> Tensor:
    mask = _additive(mask, call.query.dtype)
    return aten._scaled_dot_product_cudnn_attention(
        *qkv, mask, call.needs_grad, call.dropout_p, call.is_causal, False, scale=scale
    )[0]


def _additive(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask to add: a bool mask becomes 0 where it is True and -inf where it is False."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, minus_infinity = (torch.scalar_tensor(fill, dtype=dtype, device=mask.device) for fill in (0.0, -math.inf))
    return torch.where(mask, zero, minus_infinity)


RUN: Mapping[SDPBackend, Callable[[SdpaCall, Qkv, Tensor | None, float | None], Tensor]] = {
    FLASH: _flash,
    EFFICIENT: _efficient,
    CUDNN: _cudnn,
}
"""How each fused backend is called. (The math backend is the composite's own decomposition.)"""
