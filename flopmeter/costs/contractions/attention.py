"""Fused attention: q, k, v in, output and log-sum-exp out; the scores never leave the chip.

FLOPs are 2·B·H·Sq·Sk·(D + Dv) by *query* heads over the full square (the softmax between the matmuls is
left out, as torch's counter does). Under a causal mask or a window the invisible part is `masked_flops`.
Keys and values are read at their own, grouped, head count: the touched-bytes law sees to that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from math import ceil, prod
from typing import NamedTuple

from torch._ops import OpOverloadPacket

from flopmeter.costs.rules import make_attention, rule
from flopmeter.costs.traffic import regions
from flopmeter.records import AttentionBackend, AttentionShape, Call, Cost, Mask, Matmul, Region, TensorSpec
from flopmeter.torch_names.operators import aten

FULL = Mask()
CAUSAL = Mask(right=0)  # torch's `is_causal`: aligned at the top left


def visible_pairs(queries: int, keys: int, mask: Mask = CAUSAL) -> int:
    """The (query, key) pairs that the mask leaves visible: for each query the keys up to the last one that it sees,
    less those before the first one."""
    shift = keys - queries if mask.bottom_right else 0
    up_to_last = queries * keys if mask.right is None else _pairs_up_to(queries, keys, shift + mask.right)
    before_first = 0 if mask.left is None else _pairs_up_to(queries, keys, shift - mask.left - 1)
    return up_to_last - before_first


def _pairs_up_to(queries: int, keys: int, offset: int) -> int:
    """Pairs with key <= query + offset: rows of none, then a ramp 1, 2, 3, ..., then rows of all keys."""
    rows = queries - min(max(-offset, 0), queries)
    start = max(offset, 0) + 1
    ramp = min(max(keys - start + 1, 0), rows)
    return ramp * start + ramp * (ramp - 1) // 2 + (rows - ramp) * keys


def _of_sdpa(call: Call) -> AttentionShape:
    """q [B, H, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv]."""
    q, k, v = (call.argument(name) for name in ("query", "key", "value"))
    batch, heads, queries, depth = q.shape
    return AttentionShape(batch, heads, k.shape[1], queries, k.shape[2], depth, v.shape[-1])


def _of_library(call: Call) -> AttentionShape:
    """q [B, Sq, H, D], or packed: sequences of several lengths end to end, [tokens, H, D] (or [1, tokens, H, D]). The
    lengths are data: if they are not known, all count as long as the longest, and each token meets the longest row of
    keys."""
    q, k, v = (call.argument(name) for name in ("query", "key", "value"))
    heads, depth = q.shape[-2:]
    of_head = heads, k.shape[-2]
    sizes = depth, v.shape[-1]
    if call.get("cum_seq_q", call.get("cu_seqlens_q")) is None:
        return AttentionShape(q.shape[0], *of_head, q.shape[1], k.shape[1], *sizes)
    if call.groups:
        count = len(call.groups) // 2
        rows, columns = call.groups[:count], call.groups[count:]
        counted = Counter(zip(rows, columns, strict=True))
        lengths = tuple((number, *size) for size, number in counted.items()) if len(counted) > 1 else ()
        return AttentionShape(count, *of_head, max(rows), max(columns), *sizes, is_packed=True, lengths=lengths)
    longest, keys = call.get("max_q", call.get("max_seqlen_q")), call.get("max_k", call.get("max_seqlen_k"))
    tokens, queries = q.numel // max(heads * depth, 1), max(longest, 1)
    return AttentionShape(max(ceil(tokens / queries), 1), *of_head, queries, keys, *sizes, is_packed=True)


def _of_cudnn(call: Call) -> AttentionShape:
    """q [B, H, Sq, D], or packed: [tokens, H, D]."""
    return _of_sdpa(call) if call.argument("cum_seq_q") is None else _of_library(call)


def _causal_mask(call: Call) -> Mask:
    return CAUSAL if call.argument("is_causal") else FULL


def _flash_mask(call: Call) -> Mask:
    """The mask of a call: the flash-attention library aligns at the bottom right, and a window of -1 is open on that
    side."""
    left, right = (call.argument(f"window_size_{side}") for side in ("left", "right"))
    left, right = (None if size in (None, -1) else size for size in (left, right))
    return Mask(left, 0 if call.argument("is_causal") else right, bottom_right=True)


def _efficient_mask(call: Call) -> Mask:
    """Custom mask type 1 is causal from the top left, 2 from the bottom right. A window is a number of keys, of which
    the query's own is the last."""
    kind, window = call.argument("custom_mask_type"), call.argument("window_size")
    left = None if not window else window - 1
    return Mask(left, 0, bottom_right=kind == 2) if kind else FULL


class _AttentionOp(NamedTuple):
    """Which library's kernel an op runs, and how to read the work from a call of it."""

    backend: AttentionBackend
    shape: Callable[[Call], AttentionShape]
    mask: Callable[[Call], Mask]


_OPS = {  # by what the names of forward and backward have in common
    "_scaled_dot_product_flash_attention": _AttentionOp("flash", _of_sdpa, _causal_mask),
    "_scaled_dot_product_efficient_attention": _AttentionOp("efficient", _of_sdpa, _causal_mask),
    "_scaled_dot_product_cudnn_attention": _AttentionOp("cudnn", _of_sdpa, _causal_mask),
    "_scaled_dot_product_flash_attention_for_cpu": _AttentionOp("other", _of_sdpa, _causal_mask),
    "_scaled_dot_product_fused_attention_overrideable": _AttentionOp("other", _of_sdpa, _causal_mask),
    "_flash_attention": _AttentionOp("flash", _of_library, _flash_mask),
    "_cudnn_attention": _AttentionOp("cudnn", _of_cudnn, _causal_mask),
    "_efficient_attention": _AttentionOp("efficient", _of_library, _efficient_mask),
}


def _by_packet(*endings: str) -> dict[OpOverloadPacket, _AttentionOp]:
    return {packet: op for name, op in _OPS.items() for packet in aten.present(*(name + end for end in endings))}


_FORWARD = _by_packet("", "_forward", "_forward_no_dropout_inplace")  # the last since torch 2.13
_BACKWARD = _by_packet("_backward")


@rule(*_FORWARD)
def attention(call: Call) -> Cost:
    """softmax(q @ k^T) @ v."""
    backend, shape_of, mask_of = _FORWARD[call.func.overloadpacket]
    shape = shape_of(call)._replace(mask=mask_of(call))
    return _fused(call, backend, [*_scores(shape), *_values(shape)], shape)


@rule(*_BACKWARD)
def attention_backward(call: Call) -> Cost:
    """Five matmuls: the scores again (recomputed, since they were not kept), then dv = p^T @ do,
    dp = do @ v^T, dq = ds @ k, dk = ds^T @ q. That is 2.5x the forward pass where D = Dv."""
    backend, shape_of, mask_of = _BACKWARD[call.func.overloadpacket]
    shape = shape_of(call)._replace(mask=mask_of(call), is_backward=True)
    again = _scores(shape)
    products = list(again)
    for count, queries, keys in shape.sizes:
        squares = count * shape.heads
        products += (
            Matmul(squares, keys, shape.value_dim, queries),
            Matmul(squares, queries, keys, shape.value_dim),
            Matmul(squares, queries, shape.head_dim, keys),
            Matmul(squares, keys, shape.head_dim, queries),
        )
    return _fused(call, backend, products, shape, recomputed_flops=2 * _macs(again))


def _fused(
    call: Call, backend: AttentionBackend, products: list[Matmul], shape: AttentionShape, *, recomputed_flops: int = 0
) -> Cost:
    pairs = sum(map(prod, shape.sizes))
    visible = sum(count * visible_pairs(queries, keys, shape.mask) for count, queries, keys in shape.sizes)
    masked_flops = 2 * _macs(products) * (pairs - visible) // max(pairs, 1)
    return make_attention(
        call, products, backend, shape,
        masked_flops=masked_flops, recomputed_flops=recomputed_flops, read=_seen(call, shape),
    )  # fmt: skip


def _seen(call: Call, shape: AttentionShape) -> list[TensorSpec | Region] | None:
    """The tensors without the keys and values that lie before the window of the first query; None if there is none."""
    mask, keys = shape.mask, shape.all_keys
    if mask.left is None or not mask.bottom_right:
        return None
    seen = keys - sum(count * keys_before(mask, q, k) for count, q, k in shape.sizes)
    sources = (call.argument("key"), call.argument("value"))
    read, _ = regions(call)
    return [Region(spec, spec.nbytes * seen // keys) if spec in sources else spec for spec in read]


def keys_before(mask: Mask, queries: int, keys: int) -> int:
    """How many keys lie before the window of the first query, aligned at the bottom right."""
    return 0 if mask.left is None else max(keys - queries - mask.left, 0)


def _scores(shape: AttentionShape) -> list[Matmul]:
    return [Matmul(count * shape.heads, queries, keys, shape.head_dim) for count, queries, keys in shape.sizes]


def _values(shape: AttentionShape) -> list[Matmul]:
    return [Matmul(count * shape.heads, queries, shape.value_dim, keys) for count, queries, keys in shape.sizes]


def _macs(products: list[Matmul]) -> int:
    return sum(product.macs for product in products)
