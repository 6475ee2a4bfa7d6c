"""flex_attention as inductor's templates: fused attention with a function on each score, on the blocks of a mask.

FLOPs are those of SDPA on the full square, plus those of score_mod on each score. FLOPs in blocks that the mask skips
are `masked_flops`, as under SDPA's causal mask. A partial block is computed whole, with mask_mod.
The backward template goes over the scores twice, once for the gradients of keys and values and once for that of the
queries (torch/_inductor/kernel/flex/templates/flex_backwards.py.jinja): seven products, of which three are repeated.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace
from math import ceil

from flopmeter.costs.fused import flops_of
from flopmeter.costs.lookup import costs_of
from flopmeter.costs.rules import make_attention, make_cost, rule, scratch
from flopmeter.costs.traffic import regions
from flopmeter.records import (
    ELEMENTWISE,
    REDUCTION,
    AttentionBackend,
    AttentionShape,
    BlockCount,
    BodyOp,
    Call,
    Cost,
    FlexBody,
    Mask,
    Matmul,
    Origin,
    Region,
    TensorSpec,
)
from flopmeter.torch_names.own_operators import own


@rule(own.flex_attention)
def flex_attention(call: Call) -> Cost:
    """softmax(score_mod(q @ k^T)) @ v, with q [B, H, Sq, D], k [B, Hk, Sk, D], v [B, Hk, Sk, Dv]."""
    body, square = _body(call), _shape(call)
    shape = square._replace(mask=band(body.blocks, square.queries, square.keys))
    out, *statistics = call.outputs
    keeps = call.argument("keeps_lse"), call.argument("keeps_max")
    kept = (out, *itertools.compress(statistics, keeps))
    return _template(call, "flex_attention", [*_products(shape, scores=1, values=1)], shape, written=kept)


@rule(own.flex_attention_backward)
def flex_attention_backward(call: Call) -> tuple[Cost, Cost]:
    """The sum over each row of out * grad_out, a kernel of inductor's own; then the template."""
    out, lse, grad_out, grad_lse = (call.argument(name) for name in ("out", "logsumexp", "grad_out", "grad_logsumexp"))
    row_sums = scratch(lse)
    inputs = [spec for spec in (out, grad_out, grad_lse) if spec is not None]
    prepared = make_cost(
        call, REDUCTION, 2 * out.numel + (0 if grad_lse is None else 2 * lse.numel), read=inputs, written=(row_sums,)
    )
    read = [spec for spec in regions(call)[0] if spec not in (out, grad_lse)]
    return replace(prepared, name="flex_attention_backward: row sums"), _gradients(call, [*read, row_sums])


@rule(own.flex_attention_gradients)
def flex_attention_gradients(call: Call) -> Cost:
    """The template alone, in a compiled graph: the graph has a kernel that sums up the rows."""
    return _gradients(call, None)


def _gradients(call: Call, read: Iterable[TensorSpec] | None) -> Cost:
    body, square = _body(call), _shape(call)
    shape = square._replace(mask=band(body.blocks, square.queries, square.keys), is_backward=True)
    products = _products(shape, scores=4, values=3)
    repeated = 2 * sum(product.macs for product in _products(shape, scores=2, values=1))
    return _template(call, "flex_attention_backward", products, shape, read=read, passes=2, repeated=repeated)


def _template(
    call: Call,
    name: str,
    products: list[Matmul],
    shape: AttentionShape,
    *,
    read: Iterable[TensorSpec | Region] | None = None,
    written: Iterable[TensorSpec | Region] | None = None,
    passes: int = 1,
    repeated: int = 0,
) -> Cost:
    """The template, which goes `passes` times over the scores, with score_mod in each; in a compiled graph also with
    what fuses into it."""
    body, kernel = _body(call), call.kwargs.get("kernel")
    after: tuple[Origin, ...] = ()
    backend: AttentionBackend = "flash" if body.splits_keys else "flex"
    if kernel is not None:
        name, read, written, after = kernel.name, kernel.reads, kernel.writes, kernel.origins[1:]
        backend = "flex_decoding" if body.splits_keys else "flex"
    squares, pairs = shape.sequences * shape.heads, shape.queries * shape.keys
    score, transcendentals = _flops_of(body.score)
    on_pair, _ = _flops_of(body.mask)
    computed = body.blocks.pairs * squares // body.blocks.squares
    on_scores = passes * score * squares * pairs
    on_masks = passes * on_pair * body.blocks.masked_pairs * squares // body.blocks.squares
    hidden = squares * pairs - computed
    of_one = 2 * sum(product.macs for product in products) // max(squares * pairs, 1) + passes * score
    cost = make_attention(
        call,
        products,
        backend,
        shape,
        extra=flops_of(ELEMENTWISE, [[(ELEMENTWISE, on_scores + on_masks)], *(op.flops_by_class for op in after)]),
        read=_seen(call, body.blocks, regions(call)[0] if read is None else read),
        written=written,
        transcendentals=passes * transcendentals * computed + sum(op.transcendentals for op in after),
        recomputed_flops=repeated + on_scores // 2 if repeated else 0,
        masked_flops=of_one * hidden,
        on_score=(passes * score, passes * transcendentals),
    )
    return replace(cost, name=name)


def _products(shape: AttentionShape, *, scores: int, values: int) -> list[Matmul]:
    """The matmuls of these passes: with depth D, such as q @ k^T, and with depth Dv, such as dv = p^T @ do."""
    squares = shape.sequences * shape.heads
    by_head = Matmul(squares, shape.queries, shape.keys, shape.head_dim)
    by_value = Matmul(squares, shape.queries, shape.keys, shape.value_dim)
    return [by_head] * scores + [by_value] * values


def _body(call: Call) -> FlexBody:
    assert isinstance(call.body, FlexBody)
    return call.body


def _shape(call: Call) -> AttentionShape:
    q, k, v = call.inputs[:3]
    batch, heads, queries, depth = q.shape
    return AttentionShape(batch, heads, k.shape[1], queries, k.shape[2], depth, v.shape[-1])


def _seen(call: Call, blocks: BlockCount, read: Iterable[TensorSpec | Region]) -> list[TensorSpec | Region]:
    """The tensors that are read, without keys and values in columns where no block is computed."""
    key, value = call.argument("key"), call.argument("value")
    share = blocks.seen_keys, blocks.squares * key.shape[2]
    seen = (Region(spec, spec.nbytes * share[0] // share[1]) for spec in (key, value))
    of_spec = dict(zip((key, value), seen, strict=True)) if share[0] < share[1] else {}
    return [of_spec.get(each.spec if isinstance(each, Region) else each, each) for each in read]


def _flops_of(ops: Iterable[BodyOp]) -> tuple[int, int]:
    """FLOPs of the ops on one score, and how many of them are transcendental."""
    costs = [cost for op in ops for cost in costs_of(Call(op.func, op.args, dict(op.kwargs), op.inputs, op.outputs))]
    return sum(cost.flops for cost in costs), sum(cost.transcendentals for cost in costs)


@functools.cache
def band(blocks: BlockCount, queries: int, keys: int) -> Mask:
    """A band along the diagonal with the same number of blocks, for the time model. The causal mask and windows are
    such bands. For masks of documents and other shapes the amount of work is right, its spread over the rows is not."""
    if blocks.pairs == blocks.squares * queries * keys:
        return Mask()
    wanted = blocks.computed / blocks.squares
    if not blocks.passes_diagonal and _blocks_of(Mask(right=0), blocks.block, queries, keys) <= wanted:
        return Mask(right=0)

    def with_width(width: int) -> Mask:
        return Mask(width, width if blocks.passes_diagonal else 0)

    widths = range(max(queries, keys))
    width = bisect_left(widths, wanted, key=lambda width: _blocks_of(with_width(width), blocks.block, queries, keys))
    return with_width(width)


def _blocks_of(mask: Mask, block: tuple[int, int], queries: int, keys: int) -> int:
    """The blocks in which a mask, aligned at the top left, leaves a pair."""
    rows, columns = block
    number = 0
    for first in range(0, queries, rows):
        last = min(first + rows, queries) - 1
        begin = 0 if mask.left is None else max(first - mask.left, 0)
        end = keys if mask.right is None else min(last + mask.right + 1, keys)
        number += ceil(end / columns) - begin // columns if begin < end else 0
    return number
