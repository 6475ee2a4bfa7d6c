"""flash_attn/flash_attn_interface.py: what its own autograd functions call, one way each. Ring attention calls them
block by block, and merges what it gets by the logarithms of the sums of each row.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flopmeter.run.shims.flash_attn.newer import check_dtype, how_of, kernels_of
from flopmeter.run.shims.kernel import named, refuse

_KERNELS = kernels_of("flash_attn_2", "flash")
_Lengths = tuple[Tensor | None, Tensor | None, int | None, int | None]  # where sequences begin, and the longest
_OF_ONE_LENGTH: _Lengths = (None, None, None, None)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    """The output and the row sums' logarithms; no weights, and no state of a generator of random numbers."""
    return _forward((q, k, v), _OF_ONE_LENGTH, causal, (window_size_left, window_size_right), _refused(locals()))


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, None, None]:
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    return _forward((q, k, v), lengths, causal, (window_size_left, window_size_right), _refused(locals()))


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes the three gradients. It returns sums of each row, which have the shape of `softmax_lse`."""
    given, window = (dout, q, k, v, out, softmax_lse), (window_size_left, window_size_right)
    return _backward((dq, dk, dv), given, _OF_ONE_LENGTH, causal, window, _refused(locals()))


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    lengths = (cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    given, window = (dout, q, k, v, out, softmax_lse), (window_size_left, window_size_right)
    return _backward((dq, dk, dv), given, lengths, causal, window, _refused(locals()))


def _forward(
    qkv: tuple[Tensor, Tensor, Tensor],
    lengths: _Lengths,
    causal: bool,
    window: tuple[int, int],
    refused: dict[str, Any],
) -> tuple[Tensor, Tensor, None, None]:
    refuse("flash_attn", refused)
    check_dtype(qkv[0])
    out, sums = _KERNELS.attend(*qkv, *how_of(qkv, *lengths, causal, window))
    return out, sums, None, None


def _backward(
    gradients: tuple[Tensor, Tensor, Tensor],
    given: tuple[Tensor, ...],
    lengths: _Lengths,
    causal: bool,
    window: tuple[int, int],
    refused: dict[str, Any],
) -> Tensor:
    """`given`: the gradient of the output, q, k, v, the output, and the row sums' logarithms, which come back."""
    refuse("flash_attn", refused)
    dout, q, k, v, out, sums = given
    how = how_of((q, k, v), *lengths, causal, window)
    _KERNELS.backward_into(*gradients, dout, q, k, v, out, sums, *how)
    return sums


def _refused(given: dict[str, Any]) -> dict[str, Any]:
    """Of the arguments of a call those that the shim does not have."""
    names = ("dropout_p", "softcap", "alibi_slopes", "block_table", "leftpad_k", "seqused_k")
    return {name: given[name] for name in names if name in given}


FUNCTIONS = named(_flash_attn_forward, _flash_attn_varlen_forward, _flash_attn_backward, _flash_attn_varlen_backward)
