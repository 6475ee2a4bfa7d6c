"""Calls of scaled_dot_product_attention without a fused kernel: what they cost, since the scores go through memory, and
what a program can change so that a fused kernel takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopmeter.as_cuda import CudaTarget, Emulation, emulate_cuda
from flopmeter.as_cuda.attention_rules import (
    CUDNN,
    EFFICIENT,
    FLASH,
    MATH,
    TORCH_DEFAULT_ORDER,
    Operand,
    SdpaCall,
    choose,
    is_half,
    rules_for,
)
from flopmeter.costs import kernels_of
from flopmeter.known_values.values import no_modes
from flopmeter.records.memory_format import dense_strides
from flopmeter.torch_names.dispatcher import running_version
from flopmeter.trace.recorder import Recorder

BACKENDS = {FLASH: "flash", CUDNN: "cudnn", EFFICIENT: "efficient"}
"""The fused kernels, as torch's operators call them."""
_PADDED_TO = 8  # elements of a head: 16 bytes in 16 bits, the most that a kernel asks for (gemm_alignment)


class Unfused(NamedTuple):
    """A call that runs op by op, why that is, and the call of a fused kernel that could take its place."""

    heads: int
    lengths: tuple[int, int]  # queries, keys
    is_half: bool  # in 16 bits: the math path casts what it is given to fp32
    why: str
    remedy: str
    backend: str
    qkv: tuple[Operand, Operand, Operand]  # that the fused kernel is given
    mask: Operand | None
    dropout_p: float
    is_causal: bool


class _Repair(NamedTuple):
    """What keeps a call from all fused kernels, and what changes that."""

    why: str
    remedy: str
    of: Callable[[SdpaCall], SdpaCall]


def _dense(operand: Operand, shape: tuple[int, ...]) -> Operand:
    return operand._replace(shape=shape, strides=dense_strides(shape, channels_last=False), offset=0)


def _each(call: SdpaCall, change: Callable[[Operand], Operand]) -> SdpaCall:
    query, key, value = map(change, call.qkv)
    return replace(call, query=query, key=key, value=value)


def _with_backends(call: SdpaCall) -> SdpaCall:
    """The settings that torch has before a program changes them."""
    settings = call.settings._replace(
        enabled=frozenset(TORCH_DEFAULT_ORDER), order=tuple(backend.value for backend in TORCH_DEFAULT_ORDER)
    )
    return replace(call, settings=settings)


def _in_one_batch(call: SdpaCall) -> SdpaCall:
    batch = max(operand.shape[0] for operand in call.qkv)

    def expanded(operand: Operand) -> Operand:
        if len(operand.shape) < 4 or operand.shape[0] != 1:
            return operand
        return operand._replace(shape=(batch, *operand.shape[1:]), strides=(0, *operand.strides[1:]))

    return _each(call, expanded)


def _in_four_dimensions(call: SdpaCall) -> SdpaCall:
    def four(operand: Operand) -> Operand:
        sizes = (1,) * (4 - len(operand.shape)) + operand.shape
        batch = int(torch.Size(sizes[:-3]).numel())
        return operand if len(operand.shape) == 4 else _dense(operand, (batch, *sizes[-3:]))

    return _each(replace(call, mask=call.mask and four(call.mask)), four)


def _with_dense_rows(call: SdpaCall) -> SdpaCall:
    def dense(operand: Operand) -> Operand:
        return operand if operand.strides[-1] == 1 else _dense(operand, operand.shape)

    return _each(replace(call, mask=call.mask and dense(call.mask)), dense)


def _with_padded_heads(call: SdpaCall) -> SdpaCall:
    return _each(
        call, lambda operand: _dense(operand, (*operand.shape[:-1], -(-operand.shape[-1] // _PADDED_TO) * _PADDED_TO))
    )


def _with_equal_heads(call: SdpaCall) -> SdpaCall:
    heads = call.query.shape[-3]

    def repeated(operand: Operand) -> Operand:
        return _dense(operand, (*operand.shape[:-3], heads, *operand.shape[-2:]))

    return replace(call, key=repeated(call.key), value=repeated(call.value), enable_gqa=False)


_REPAIRS = (
    _Repair(
        "sdpa_kernel or torch.backends.cuda.enable_..._sdp leaves it no fused kernel",
        "SDPA outside of sdpa_kernel(SDPBackend.MATH), with the fused kernels enabled", _with_backends,
    ),
    _Repair(
        "q, k and v are not of one batch", "k and v with the batch of q (.expand takes no memory)", _in_one_batch,
    ),
    _Repair(
        "q, k and v have other dimensions than four",
        "q, k and v as [batch, heads, length, width] (.unsqueeze or .flatten)", _in_four_dimensions,
    ),
    _Repair("rows of q, k, v or the mask are not dense", ".contiguous() on them", _with_dense_rows),
    _Repair(
        f"heads are not a multiple of {_PADDED_TO} wide", f"heads padded to a multiple of {_PADDED_TO} (F.pad)",
        _with_padded_heads,
    ),
    _Repair(
        "kernels that take the mask take no grouped heads",
        "repeat_interleave on k and v in place of enable_gqa", _with_equal_heads,
    ),
)  # fmt: skip
_AT_ONCE = 2  # repairs


def unfused_calls(emulation: Emulation | None, target: CudaTarget) -> tuple[Unfused, ...]:
    """The attention geometries that run op by op but that a fused kernel of the target would take after one or two
    repairs."""
    calls = emulation.unfused_attention if emulation else []
    return tuple(found for call in calls if (found := _unfused(call, target)) is not None)


def _unfused(call: SdpaCall, target: CudaTarget) -> Unfused | None:
    if any(len(operand.shape) < 3 for operand in call.qkv):
        return None
    for count in range(1, _AT_ONCE + 1):
        for repairs in combinations(_REPAIRS, count):
            changed = replace(call, target=target)
            for repair in repairs:
                changed = repair.of(changed)
            try:
                chosen = choose(changed, rules_for(running_version()))
            except RuntimeError:
                continue
            if chosen is not MATH:
                return _found(call, repairs, changed, BACKENDS[chosen])
    return None


def _found(call: SdpaCall, repairs: tuple[_Repair, ...], changed: SdpaCall, backend: str) -> Unfused:
    return Unfused(
        heads=call.query.shape[-3],
        lengths=(call.query.shape[-2], call.key.shape[-2]),
        is_half=is_half(call),
        why=", and ".join(repair.why for repair in repairs),
        remedy=", and ".join(repair.remedy for repair in repairs),
        backend=backend,
        qkv=changed.qkv,
        mask=changed.mask,
        dropout_p=changed.dropout_p,
        is_causal=changed.is_causal,
    )


def unfused_notes(emulation: Emulation) -> list[str]:
    """A note for each attention geometry without a fused kernel on this device: how many times the bytes of a fused
    kernel (q, k, v and the output) it moves."""
    return [_note(call, emulation) for call in emulation.unfused_attention]


@no_modes()  # another meter may be open around this one
def _note(call: SdpaCall, emulation: Emulation) -> str:
    query, key, value = (_empty(operand) for operand in call.qkv)
    mask = None if call.mask is None else _empty(call.mask)
    with (
        sdpa_kernel(SDPBackend.MATH),
        emulate_cuda(emulation.target),
        Recorder(overrides=emulation.overrides) as recorder,
    ):
        out = F.scaled_dot_product_attention(
            query, key, value, mask, call.dropout_p, call.is_causal, enable_gqa=call.enable_gqa
        )
    moved = sum(kernel.cost.bytes for kernel in kernels_of(recorder.trace))
    fused = sum(tensor.nbytes for tensor in (query, key, value, out))
    shape, dtype = list(query.shape), str(query.dtype).removeprefix("torch.")
    factor = moved / max(fused, 1)
    return f"attention of {dtype} {shape} has no fused kernel here: it moves {factor:.0f}x the bytes of one"


def _empty(operand: Operand) -> torch.Tensor:
    return torch.empty_strided(operand.shape, operand.strides, dtype=operand.dtype, device="meta")
