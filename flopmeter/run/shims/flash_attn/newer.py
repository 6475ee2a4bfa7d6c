"""The kernels of FlashAttention-3 (hopper/) and -4 (flash_attn/cute/ of github.com/Dao-AILab/flash-attention): one each
way, priced by what the device's own instructions let such a kernel reach (timing/attention_kernels.py).

Tensors are [batch, length, heads, head size]; sequences that lie end to end are [tokens, heads, head size].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flopmeter.as_cuda.attention_rules import Qkv
from flopmeter.costs.access import HALVES
from flopmeter.records import AttentionBackend, Call, Cost
from flopmeter.run.shims.flash_attn.attention import backward_cost, forward_cost, into, row_sums
from flopmeter.run.shims.kernel import kernel
from flopmeter.torch_names.private import FLASH_IMPLEMENTATIONS, FLASH_KERNELS, FLASH_REGISTRY, lost

BACKEND: AttentionBackend = "flash_3"  # by the instructions of the device, not of Ampere
_GRADIENTS = ("query_gradient", "key_gradient", "value_gradient")


class LibraryKernels(NamedTuple):
    """Operators of one of the libraries, which differ by name. Sums are the logarithms of the sums of each row:
    [batch, heads, length], or [heads, tokens]."""

    attend: Any  # (query, key, value, *how) -> out, sums; `how` is what `how_of` returns
    attend_into: Any  # the same after `out`, which it writes -> sums
    backward_into: Any  # (three gradients to write, gradient, query, key, value, out, sums, *how)

    def forward(self, qkv: Qkv, how: tuple[Any, ...], out: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output, `out` if it is given, and the sums."""
        if out is None:
            made, sums = self.attend(*qkv, *how)
            return made, sums
        return out, self.attend_into(out, *qkv, *how)


def how_of(
    qkv: Qkv,
    starts: Tensor | None,
    key_starts: Tensor | None,
    longest: int | None,
    longest_keys: int | None,
    causal: bool,
    window: Sequence[int],
) -> tuple[Any, ...]:
    """The operators' arguments after the tensors. A length that is not given is that of all tokens."""
    query, key, _ = qkv
    return starts, key_starts, longest or query.shape[-3], longest_keys or key.shape[-3], causal, *window


def kernels_of(library: str, backend: AttentionBackend = BACKEND) -> LibraryKernels:
    def cost(call: Call) -> Cost:
        made = forward_cost(call, backend)
        return replace(made, name=made.name.removesuffix("_into"))

    def backward_price(call: Call) -> Cost:
        return backward_cost(call, backend)

    forward = kernel(library, cost)(_forward)
    forward_into = kernel(f"{library}_into", into(cost, "out"), mutates=("out",))(_forward_into)
    backward = kernel(f"{library}_backward", into(backward_price, *_GRADIENTS), mutates=_GRADIENTS)(_backward_into)

    def gradients(ctx: Any, gradient: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        query, key, value, starts, key_starts, out, sums = ctx.saved_tensors
        none: tuple[None, ...] = (None,) * (2 + len(ctx.rest))
        if gradient is None:
            return (None, None, None, *none)
        found = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in (query, key, value)]
        backward(*found, gradient, query, key, value, out, sums, starts, key_starts, *ctx.rest)
        return (*found, *none)

    forward.register_autograd(gradients, setup_context=_keep)
    return LibraryKernels(forward, forward_into, backward)


def check_dtype(query: Tensor) -> None:
    """Raises what the package raises for a type that it does not take, and for fp8 NotImplementedError."""
    if query.dtype in HALVES:
        return
    if query.dtype.itemsize == 1:
        raise NotImplementedError(f"flopmeter's shim of FlashAttention-3 and -4 takes fp16 and bf16, not {query.dtype}")
    raise RuntimeError(f"FlashAttention only supports fp16 and bf16 data type, not {query.dtype}")


def restore_torchs_attention() -> None:
    """torch's own flash kernels, where the program has activated a library's in their place. What torch keeps of the
    library and of the device's capability is forgotten: the next program may run on another device."""
    if lost(FLASH_KERNELS):  # this torch keeps no registry that a program could have changed
        return
    FLASH_REGISTRY.value.restore_flash_attention_impl(_raise_warn=False)
    for module in FLASH_IMPLEMENTATIONS:
        for kept in vars(module.value).values():
            if hasattr(kept, "cache_clear"):
                kept.cache_clear()


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
