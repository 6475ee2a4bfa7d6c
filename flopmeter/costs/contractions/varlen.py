"""`torch.nn.attention.varlen`: flash attention over sequences of several lengths that lie end to end.

Its ops exist once a program has imported that module, which takes seconds, so their rules are found by name.
Each is a call of the flash-attention library and is priced as that call.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil, prod

from torch._ops import OpOverload

from flopmeter.costs.contractions.attention import attention, attention_backward, keys_before
from flopmeter.costs.rules import Rule, make_cost
from flopmeter.costs.traffic import as_regions, regions
from flopmeter.records import ATTENTION, MOVEMENT, AttentionWork, Call, Cost, Kernel, Mask, Region, TensorSpec
from flopmeter.torch_names.operators import aten

_STARTS = ("cu_seq_q", "cum_seq_q", "cu_seqlens_q")  # what the ops call the places where sequences begin


def varlen_attention(call: Call) -> tuple[Cost, ...]:
    """The kernel of the library, and a fill of the random state, which dropout would need."""
    return varlen_attention_out(call), make_cost(call, MOVEMENT, read=(), written=call.outputs[2:])


def varlen_attention_out(call: Call) -> Cost:
    """The kernel alone, into a tensor that is there."""
    return _priced_as(call, attention, aten._flash_attention_forward.default)


def varlen_attention_backward(call: Call) -> Cost:
    """The gradients of `varlen_attention`."""
    return _priced_as(call, attention_backward, aten._flash_attention_backward.default)


VARLEN: dict[str, Rule] = {
    "torch_attn::_varlen_attn": varlen_attention,
    "torch_attn::_varlen_attn_out": varlen_attention_out,
    "torch_attn::_varlen_attn_backward": varlen_attention_backward,
}


def packed_assumptions(kernels: Iterable[Kernel]) -> list[str]:
    """What is assumed about the lengths of packed sequences, which are data, where they are not known."""
    calls = {kernel.op.call for kernel in kernels if kernel.cost.op_class == ATTENTION}
    guessed = (call for call in calls if call.groups is None)
    names = sorted({call.name for call in guessed if any(call.get(name) is not None for name in _STARTS)})
    return [f"sequences packed for {', '.join(names)} are all as long as the longest"] if names else []


def _of_flash(call: Call, func: OpOverload) -> Call:
    """The library call that the op makes, with the arguments on which its price depends."""
    left, right = call.argument("window_size") or (-1, -1)
    kwargs = {name: call.argument(name) for name in ("query", "key", "value", "max_q", "max_k", "is_causal")}
    kwargs |= {"cum_seq_q": call.argument("cu_seq_q"), "window_size_left": left, "window_size_right": right}
    return replace(call, func=func, args=(), kwargs=kwargs)


def _priced_as(call: Call, library_rule: Rule, func: OpOverload) -> Cost:
    """The library's price, with the op's own traffic by the law, but for keys and values that lie before a window. A
    paged cache is a pool that many sequences share: only the pages of these sequences are read."""
    cost = library_rule(_of_flash(call, func))
    assert isinstance(cost, Cost)
    assert isinstance(cost.work, AttentionWork)
    mask = cost.work.shape.mask
    pages = call.get("block_table")
    pools = () if pages is None else (call.argument("key"), call.argument("value"))
    seen, (read, written) = {region.spec: region for region in cost.reads}, regions(call)
    touched = [_used(call, spec, pages, mask) if spec in pools else seen.get(spec, spec) for spec in read]
    return replace(cost, name=call.name, reads=as_regions(touched), writes=as_regions(written))


def _used(call: Call, pool: TensorSpec, pages: TensorSpec, mask: Mask) -> Region:
    """The part of the pool that the pages of these sequences hold, from that of the first key in a window on."""
    _, page_tokens, *token = pool.shape
    sequences = pages.shape[0]
    if call.groups:
        lengths = tuple(zip(call.groups[:sequences], call.groups[sequences:], strict=True))
    else:
        lengths = ((call.argument("max_q"), call.argument("max_k")),) * sequences
    used = sum(ceil(keys / page_tokens) - keys_before(mask, queries, keys) // page_tokens for queries, keys in lengths)
    return Region(pool, min(pool.nbytes, used * page_tokens * prod(token) * pool.dtype.itemsize))
