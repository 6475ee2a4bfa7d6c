"""xformers (github.com/facebookresearch/xformers): its attention, as the kernels that torch has too; and its SwiGLU, as
torch's operators (its kernel also takes the activation into the first product, where the types allow it).

Its layers run operators of torch, and its profiler profiles nothing.

Tensors are [batch, length, heads, head size], or [batch, length, head size]. xformers takes FlashAttention where the
types and the mask allow it, else CUTLASS' kernel, which is torch's memory-efficient attention (xformers/ops/fmha/
dispatch.py). A mask LowerTriangularMask is aligned to the first key, as torch's is_causal. Under a block-diagonal mask
sequences lie end to end in a batch of one: FlashAttention's call for sequences of several lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopmeter.run.shims.flash_attn.attention import NO_WINDOW, flash_attn_func, flash_attn_varlen_func
from flopmeter.run.shims.kernel import named


class AttentionBias:
    """xformers.ops.AttentionBias: what a mask that is no tensor derives from."""


class LowerTriangularMask(AttentionBias):
    """A query sees the keys up to its own place."""


class LocalAttentionFromBottomRightMask(AttentionBias):
    """A query sees so many keys to each side of its own place. The last query's place is that of the last key."""

    is_causal = False

    def __init__(self, window_left: int, window_right: int) -> None:
        self.window: Sequence[int] = (window_left, window_right)


class LowerTriangularFromBottomRightMask(LocalAttentionFromBottomRightMask):
    """A query sees the keys up to its own place, or the last `window_size` of them."""

    is_causal = True

    def __init__(self) -> None:
        self.window = NO_WINDOW

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    def __init__(self, _window_size: int) -> None:
        self.window = _last(_window_size)


class BlockDiagonalMask(AttentionBias):
    """Sequences that lie end to end, each of which sees only itself."""

    is_causal = False
    window: Sequence[int] = NO_WINDOW

    def __init__(self, lengths: Sequence[int], key_lengths: Sequence[int] | None = None) -> None:
        self.lengths, self.key_lengths = list(lengths), list(lengths if key_lengths is None else key_lengths)
        self._batch_sizes: Sequence[int] | None = None  # how many sequences of one length each tensor holds

    @classmethod
    def from_seqlens(cls, q_seqlen: Sequence[int], kv_seqlen: Sequence[int] | None = None) -> BlockDiagonalMask:
        return cls(q_seqlen, kv_seqlen)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[Tensor]) -> tuple[BlockDiagonalMask, Tensor]:
        """A mask for the tensors, each [batch, length, ...], and the tensors end to end."""
        mask = cls([each.shape[1] for each in tensors for _ in range(each.shape[0])])
        mask._batch_sizes = [each.shape[0] for each in tensors]
        return mask, torch.cat([each.reshape(1, -1, *each.shape[2:]) for each in tensors], dim=1)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """The parts of what lies end to end, as `from_tensor_list` had them."""
        sizes, first, parts = self._batch_sizes or [1] * len(self.lengths), 0, []
        for size in sizes:
            parts.append((size, self.lengths[first]))
            first += size
        pieces = tensor.split([size * length for size, length in parts], dim=1)
        return [piece.reshape(*part, *tensor.shape[2:]) for piece, part in zip(pieces, parts, strict=True)]

    def make_causal(self) -> BlockDiagonalCausalMask:
        return self._with_blocks_of(BlockDiagonalCausalMask)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalMask:
        return self._with_blocks_of(BlockDiagonalCausalFromBottomRightMask)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalMask:
        return self._with_blocks_of(BlockDiagonalCausalLocalAttentionMask, window_size)

    def make_local_attention_from_bottomright(self, window_size: int) -> BlockDiagonalCausalMask:
        return self._with_blocks_of(BlockDiagonalCausalLocalAttentionFromBottomRightMask, window_size)

    def _with_blocks_of(self, kind: type[BlockDiagonalCausalMask], window_size: int = 0) -> BlockDiagonalCausalMask:
        causal = kind(self.lengths, self.key_lengths)
        causal._batch_sizes = self._batch_sizes
        causal.window = _last(window_size) if window_size else NO_WINDOW
        return causal


class BlockDiagonalCausalMask(BlockDiagonalMask):
    """A block-diagonal mask under which a query sees the keys up to its own place."""

    is_causal = True


class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalCausalMask):
    """The place of a sequence's last query is that of its last key."""


class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """A query sees the last `window_size` keys up to its own place."""


class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalLocalAttentionMask):
    """Both."""


def _last(window_size: int) -> tuple[int, int]:
    """The window of a query's own key and those before it, as FlashAttention counts: to the left, to the right."""
    return window_size - 1, 0


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: Any = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """Raises NotImplementedError for a mask that is neither a tensor nor one of those above."""
    if query.ndim == 3:
        query, key, value = (each.unsqueeze(2) for each in (query, key, value))
        return memory_efficient_attention(query, key, value, attn_bias, p, scale, output_dtype=output_dtype).squeeze(2)
    if isinstance(attn_bias, BlockDiagonalMask):
        return _end_to_end(query, key, value, attn_bias, p, scale).to(output_dtype or query.dtype)
    if isinstance(attn_bias, LocalAttentionFromBottomRightMask):
        windowed = flash_attn_func(query, key, value, p, scale, attn_bias.is_causal, attn_bias.window)
        return windowed.to(output_dtype or query.dtype)
    if isinstance(attn_bias, AttentionBias) and type(attn_bias) is not LowerTriangularMask:
        raise NotImplementedError(f"flopmeter's shim of xformers has no {type(attn_bias).__name__}: give a tensor")
    mask = attn_bias if isinstance(attn_bias, Tensor) else None
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
        out: Tensor = torch.nn.functional.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            dropout_p=p,
            is_causal=isinstance(attn_bias, LowerTriangularMask),
            scale=scale,
        )
    return out.transpose(1, 2).to(output_dtype or query.dtype)


def _end_to_end(q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, p: float, scale: float | None) -> Tensor:
    starts, key_starts = (
        torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=q.device)
        for lengths in (mask.lengths, mask.key_lengths)
    )
    longest, longest_key = max(mask.lengths), max(mask.key_lengths)
    flat_q, flat_k, flat_v = (each.flatten(0, 1) for each in (q, k, v))
    out = flash_attn_varlen_func(
        flat_q, flat_k, flat_v, starts, key_starts, longest, longest_key, p, scale, mask.is_causal, mask.window
    )
    return out.unflatten(0, q.shape[:2])


class AttentionOpBase:
    """Names a kernel (`op=`). Types and masks decide which one runs all the same."""


_NAME_OF_KERNEL = (AttentionOpBase, AttentionOpBase)  # forward and backward


def unbind(x: Tensor, dim: int) -> tuple[Tensor, ...]:
    return x.unbind(dim)


def masked_matmul(a: Tensor, b: Tensor, mask: Tensor | None = None) -> Tensor:
    product = a @ b
    if mask is None:
        return product
    return product.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else product + mask


def index_select_cat(sources: Sequence[Tensor], indices: Sequence[Tensor]) -> Tensor:
    """Rows of each tensor, end to end."""
    return torch.cat([source[index].flatten() for source, index in zip(sources, indices, strict=True)])


def scaled_index_add(
    input: Tensor, index: Tensor, source: Tensor, scaling: Tensor | None = None, alpha: float = 1.0
) -> Tensor:
    """In place."""
    return input.index_add_(0, index, source if scaling is None else source * scaling, alpha=alpha)


def swiglu(
    x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None, w3: Tensor, b3: Tensor | None, *,
    op: Any = None,
) -> Tensor:  # fmt: skip
    return F.linear(F.silu(F.linear(x, w1, b1)) * F.linear(x, w2, b2), w3, b3)


class PackedSwiGLU(nn.Module):
    """Two products packed into one, as xformers packs them; what is between them and the third is op by op here."""

    def __init__(
        self, in_features: int, hidden_features: int, out_features: int | None = None, bias: bool = True, *,
        _pack_weights: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if not _pack_weights:
            raise NotImplementedError(
                "flopmeter's shim of xformers packs the weights of SwiGLU: leave _pack_weights out"
            )
        self.w12 = nn.Linear(in_features, 2 * hidden_features, bias=bias)
        self.w3 = nn.Linear(hidden_features, out_features or in_features, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, -1)
        return self.w3(F.silu(gate) * value)


class XformersRMSNorm(nn.Module):
    def __init__(self, dim: int, include_weight: bool = True, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.ones(dim)) if include_weight else None

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.dim,), self.weight, self.eps)

    def increment_and_forward_(self, x: Tensor, y: Tensor) -> Tensor:
        return self(x.add_(y))


class _NoProfiler:
    """xformers.profiler.profile: a context, or to be started and stopped. It writes no files."""

    def __init__(self, output_dir: str, module: nn.Module | None = None, schedule: Sequence[Any] = ()) -> None: ...

    def __enter__(self) -> _NoProfiler:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def step(self) -> None: ...


def step() -> None:
    """xformers.profiler.step"""


_BIASES = named(
    AttentionBias,
    LowerTriangularMask,
    LocalAttentionFromBottomRightMask,
    LowerTriangularFromBottomRightMask,
    LowerTriangularFromBottomRightLocalAttentionMask,
    BlockDiagonalMask,
    BlockDiagonalCausalMask,
    BlockDiagonalCausalFromBottomRightMask,
    BlockDiagonalCausalLocalAttentionMask,
    BlockDiagonalCausalLocalAttentionFromBottomRightMask,
)
_PROFILER: dict[str, Any] = {
    "profile": _NoProfiler,
    "step": step,
    **dict.fromkeys(("MemSnapshotsProfiler", "PyTorchProfiler", "NsightProfiler"), _NoProfiler),
}
_OPS: dict[str, Any] = {
    **_BIASES,
    **named(memory_efficient_attention, AttentionOpBase, unbind, masked_matmul, index_select_cat, scaled_index_add),
    **named(swiglu),
    "memory_efficient_attention_forward": memory_efficient_attention,
    "AttentionMask": AttentionBias,
    "AttentionOp": tuple,
    "MemoryEfficientAttentionCutlassOp": _NAME_OF_KERNEL,
    "MemoryEfficientAttentionFlashAttentionOp": _NAME_OF_KERNEL,
    "MemoryEfficientAttentionCutlassFwdFlashBwOp": _NAME_OF_KERNEL,
    "SwiGLU": PackedSwiGLU,
    "RMSNorm": XformersRMSNorm,
}

# A program may name the operators of xformers' attention among those whose results a checkpoint keeps, as lingua and
# blt do; nothing calls them here. Whoever has defined one before has done so for the same.
_NAMED = {"xformers_flash": "flash_fwd", "xformers": "efficient_attention_forward_cutlass"}
_LIBRARIES = {namespace: torch.library.Library(namespace, "FRAGMENT") for namespace in _NAMED}
for _namespace, _operator in _NAMED.items():
    with suppress(RuntimeError):
        _LIBRARIES[_namespace].define(f"{_operator}(Tensor query, Tensor key, Tensor value) -> Tensor")

DISTRIBUTION = "xformers"
MODULES: dict[str, dict[str, Any]] = {
    "xformers": {"__version__": "0.0.35"},
    "xformers.ops": _OPS,
    "xformers.ops.fmha": _OPS,
    "xformers.ops.fmha.attn_bias": _BIASES,
    "xformers.profiler": _PROFILER,
}
