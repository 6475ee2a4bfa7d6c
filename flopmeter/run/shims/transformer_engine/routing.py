"""Tokens in the order of their experts and back (transformer_engine/pytorch/permutation.py, common/triton/
permutation.py): kernels that make the map, and one that moves rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopmeter.costs import make_cost
from flopmeter.records import INDEXING, Call, Cost
from flopmeter.run.shims.kernel import kernel


@kernel("te_row_map", lambda call: make_cost(call, INDEXING, kernels=3))
def _row_map(routing: Tensor) -> Tensor:
    """The row to which each token goes, by expert and token. Three kernels: sums within blocks, sums over blocks,
    rows."""
    return routing.new_empty(routing.shape, dtype=torch.int32)


@kernel("te_permute", lambda call: make_cost(call, INDEXING))
def _permute(x: Tensor, row_map: Tensor, probabilities: Tensor | None, rows: int) -> list[Tensor]:
    made = [x.new_empty((rows, *x.shape[1:]))]
    return made if probabilities is None else [*made, probabilities.new_empty(rows)]


def _unpermute_cost(call: Call) -> Cost:
    """Rows of the same token are added up, times their weights."""
    each = 1 if call.argument("weights") is None else 2
    return make_cost(call, INDEXING, each * call.inputs[0].numel)


@kernel("te_unpermute", _unpermute_cost)
def _unpermute(x: Tensor, row_map: Tensor, weights: Tensor | None, of_rows: Tensor | None, tokens: int) -> list[Tensor]:
    made = [x.new_empty((tokens, *x.shape[1:]))]
    return made if of_rows is None else [*made, of_rows.new_empty(row_map.shape)]


def _weights_cost(call: Call) -> Cost:
    return make_cost(call, INDEXING, 3 * call.inputs[1].numel)


@kernel("te_unpermute_backward", _weights_cost)
def _unpermute_backward(gradient: Tensor, x: Tensor, row_map: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the rows, and of the weights."""
    return torch.empty_like(x), torch.empty_like(weights)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probabilities: Tensor | None, row_map: Tensor, rows: int) -> Any:
        ctx.save_for_backward(row_map)
        ctx.tokens = x.shape[0]
        made = _permute(x, row_map, probabilities, rows)
        return made[0] if probabilities is None else tuple(made)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_rows: Tensor | None = None) -> Any:
        (row_map,) = ctx.saved_tensors
        of_x, *rest = _unpermute(gradient, row_map, None, of_rows, ctx.tokens)
        return of_x, rest[0] if rest else None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, row_map: Tensor, tokens: int) -> Tensor:
        ctx.save_for_backward(row_map, weights, x if weights is not None else None)
        ctx.rows = x.shape[0]
        return _unpermute(x, row_map, weights, None, tokens)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        row_map, weights, x = ctx.saved_tensors
        if weights is None:
            return _permute(gradient, row_map, None, ctx.rows)[0], None, None, None
        return *_unpermute_backward(gradient, x, row_map, weights), None, None


def moe_permute(
    inp: Tensor, routing_map: Tensor, num_out_tokens: int = -1, max_token_num: int = -1, map_type: str = "mask"
) -> tuple[Tensor, Tensor]:
    """`routing_map`: a mask of [tokens, experts], or the experts of each token."""
    if map_type == "mask" and num_out_tokens <= 0:
        raise ValueError("a routing map that is a mask needs num_out_tokens")
    rows = num_out_tokens if num_out_tokens > 0 else routing_map.numel()
    row_map = _row_map(routing_map)
    return _Permute.apply(inp, None, row_map, rows), row_map


def moe_permute_with_probs(
    inp: Tensor, probs: Tensor, routing_map: Tensor, num_out_tokens: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    row_map = _row_map(routing_map)
    return *_Permute.apply(inp, probs, row_map, num_out_tokens), row_map


def moe_unpermute(
    inp: Tensor,
    row_id_map: Tensor,
    merging_probs: Tensor | None = None,
    restore_shape: Any = None,
    map_type: str = "mask",
    probs: Tensor | None = None,
) -> Tensor:
    weights = merging_probs if merging_probs is not None else probs
    tokens = row_id_map.shape[0] if restore_shape is None else restore_shape[0]
    return _Unpermute.apply(inp, weights, row_id_map, tokens)


def moe_sort_chunks_by_index(inp: Tensor, split_sizes: Tensor, sorted_index: Tensor) -> Tensor:
    """Rows of one rank's experts in another order of chunks."""
    return _Permute.apply(inp, None, _row_map(sorted_index), inp.shape[0])


def moe_sort_chunks_by_index_with_probs(
    inp: Tensor, probs: Tensor, split_sizes: Tensor, sorted_index: Tensor
) -> tuple[Tensor, Tensor]:
    row_map = _row_map(sorted_index)
    rows, sorted_probs = _SortChunks.apply(inp, probs, row_map)
    return rows, sorted_probs


class _SortChunks(torch.autograd.Function):
    """A permutation of rows and of a number for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, numbers: Tensor, row_map: Tensor) -> Any:
        ctx.save_for_backward(row_map)
        return tuple(_permute(x, row_map, numbers, x.shape[0]))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, of_numbers: Tensor) -> Any:
        (row_map,) = ctx.saved_tensors
        return *_permute(gradient, row_map, of_numbers, gradient.shape[0]), None
