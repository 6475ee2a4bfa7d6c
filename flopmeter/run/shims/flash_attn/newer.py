"""The kernels of FlashAttention-3 (hopper/) and -4 (flash_attn/cute/ of github.com/Dao-AILab/flash-attention): one each
way, priced by what the device's own instructions let such a kernel reach (timing/attention_kernels.py).

Tensors are [batch, length, heads, head size]; sequences that lie end to end are [tokens, heads, head size].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flopmeter.costs.access import HALVES
from flopmeter.records import AttentionBackend, Call, Cost
from flopmeter.run.shims.flash_attn.attention import backward_cost, forward_cost, row_sums
from flopmeter.run.shims.kernel import kernel
from flopmeter.torch_names.private import FLASH_IMPLEMENTATIONS, FLASH_KERNELS, FLASH_REGISTRY, lost

BACKEND: AttentionBackend = "flash_3"  # by the instructions of the device, not of Ampere
_GRADIENTS = ("query_gradient", "key_gradient", "value_gradient")


class LibraryKernels(NamedTuple):
    """Operators of one of the libraries, which differ by name. Sums are the logarithms of the sums of each row:
    [batch, heads, length], or [heads, tokens]."""

    attend: Any  # (query, key, value, starts, key starts, longest, longest keys, causal, left, right) -> out, sums
    attend_into: Any  # the same after `out`, which it writes -> sums
    backward_into: Any  # (three gradients to write, gradient, query, key, value, out, sums, starts, ...)


def kernels_of(library: str) -> LibraryKernels:
    forward = kernel(library, _cost)(_forward)
    into = kernel(f"{library}_into", _into(_cost, "out"), mutates=("out",))(_forward_into)
    backward = kernel(f"{library}_backward", _into(_backward_cost, *_GRADIENTS), mutates=_GRADIENTS)(_backward_into)

    def gradients(ctx: Any, gradient: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        query, key, value, starts, key_starts, out, sums = ctx.saved_tensors
        none: tuple[None, ...] = (None,) * (2 + len(ctx.rest))
        if gradient is None:
            return (None, None, None, *none)
        found = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (query, key, value)]
        backward(*found, gradient, query, key, value, out, sums, starts, key_starts, *ctx.rest)
        return (*found, *none)

    forward.register_autograd(gradients, setup_context=_keep)
    return LibraryKernels(forward, into, backward)


def check_dtype(query: Tensor) -> None:
    if query.dtype not in HALVES:
        raise NotImplementedError(f"flopmeter's shim of FlashAttention-3 and -4 takes fp16 and bf16, not {query.dtype}")


def window_of(sides: Sequence[int | None]) -> tuple[int, int]:
    """How many keys each side leaves visible; -1: all, for which FlashAttention-4 says None."""
    left, right = (-1 if side is None else side for side in sides)
    return left, right


def restore_torchs_attention() -> None:
    """torch's own flash kernels, where the program has activated a library's in their place. What torch keeps of the
    library and of the device's capability is forgotten: the next program may run on another device."""
    if lost(FLASH_KERNELS):  # torch 2.10 and older, which nobody can have told to take others
        return
    FLASH_REGISTRY.value.restore_flash_attention_impl(_raise_warn=False)
    for module in FLASH_IMPLEMENTATIONS:
        for kept in vars(module.value).values():
            if hasattr(kept, "cache_clear"):
                kept.cache_clear()


def _cost(call: Call) -> Cost:
    return forward_cost(call, BACKEND)


def _backward_cost(call: Call) -> Cost:
    return backward_cost(call, BACKEND)


def _into(cost: Callable[[Call], Cost], *written: str) -> Callable[[Call], Cost]:
    """The cost of an operator that writes results into tensors it is passed, from that of one that makes them."""

    def of_call(call: Call) -> Cost:
        results = tuple(call.argument(name) for name in written)
        read = tuple(spec for spec in call.inputs if spec not in results)
        made = cost(replace(call, inputs=read, outputs=(*results, *call.outputs)))
        return replace(made, name=made.name.removesuffix("_into"))

    return of_call


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor]:
    return query.new_empty((*query.shape[:-1], value.shape[-1])), row_sums(query)


def _forward_into(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
) -> Tensor:
    return row_sums(query)


def _backward_into(
    query_gradient: Tensor,
    key_gradient: Tensor,
    value_gradient: Tensor,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    is_causal: bool,
    window_size_left: int,
    window_size_right: int,
) -> None:
    return None


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, starts, key_starts, *rest = inputs
    ctx.save_for_backward(query, key, value, starts, key_starts, *output)
    ctx.rest = rest
    ctx.set_materialize_grads(False)
