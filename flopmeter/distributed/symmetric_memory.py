"""Asynchronous tensor parallelism: a collective in as many parts as there are products that wait for them or make them.

Works around: torch's kernels for CUDA copy through symmetric memory, which no tensor on meta has.
Until: never; one process meters one rank.

They multiply rank by rank, and send each other's parts meanwhile. Here the parts are collectives of NCCL's, on the
stream of the group. Copy engines need no SM, so that what runs beside them is slower here than on a GPU.
"""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor

from flopmeter.known_values.entry_points import note_assumption
from flopmeter.torch_names.operators import Packets
from flopmeter.torch_names.private import resolve_group

_functional = Packets("_c10d_functional")
_IN_PARTS = "each remote part of symmetric memory is sent by a collective of NCCL"


def _all_gather_matmul(
    shard: Tensor,
    weights: list[Tensor],
    dim: int,
    group: Any,
    *,
    return_A: bool = True,  # noqa: N803  (torch's name)
) -> tuple[Tensor | None, list[Tensor]]:
    """The product of this rank's part comes first, then that of each other rank's once it is there."""
    size, name = _size_and_name(group, "fused_all_gather_matmul")
    splits_depth = dim % shard.dim() == shard.dim() - 1  # then the products of all parts are added up
    rows = shard if splits_depth else shard.movedim(dim, 0)
    own = rows.flatten(0, -2).clone()  # into the buffer that the others read
    gathered = [_functional.all_gather_into_tensor(_share(own, size), size, name) for _ in range(size - 1)]
    shards = (own, *(_functional.wait_tensor(each)[: own.numel()].view(own.shape) for each in gathered))
    leading = rows.shape[:-1] if splits_depth else (size * rows.shape[0], *rows.shape[1:-1])
    outs = [own.new_empty(*leading, weight.shape[1]) for weight in weights]
    for number, each in enumerate(shards):
        for weight, out in zip(weights, outs, strict=True):
            if splits_depth:
                out.flatten(0, -2).addmm_(each, weight.chunk(size)[number])
            else:
                torch.mm(each, weight, out=out.flatten(0, -2).chunk(size)[number])
    del shards, gathered
    whole = None
    if return_A:
        shape = list(shard.shape)
        shape[dim] *= size
        whole = shard.new_empty(shape)
        whole.narrow(dim, 0, shard.shape[dim]).copy_(shard)
    return whole, [out if splits_depth else out.movedim(0, dim) for out in outs]


def _matmul_reduce_scatter(x: Tensor, weight: Tensor, reduce_op: str, dim: int, group: Any) -> Tensor:
    """The parts of the other ranks are made and sent first, that of this rank last; then what came is added up."""
    size, name = _size_and_name(group, "fused_matmul_reduce_scatter")
    splits_width = dim % x.dim() == x.dim() - 1
    rows = (x if splits_width else x.movedim(dim, 0)).flatten(0, -2)
    shape = [*x.shape[:-1], weight.shape[1]]
    shape[dim] //= size
    parts = x.new_empty(size, *shape)
    sent = []
    for number in reversed(range(size)):
        factors = (rows, weight.chunk(size, 1)[number]) if splits_width else (rows.chunk(size)[number], weight)
        numel = parts[0].numel()
        # The other ranks get all of a part, of an exchange all but the share that a rank keeps.
        buffer = x.new_empty(size * ceil(numel / (size - 1))) if number else parts[0].flatten()
        torch.mm(*factors, out=buffer[:numel].view(factors[0].shape[0], factors[1].shape[1]))
        if number:
            equal = [len(buffer) // size] * size
            sent.append(_functional.all_to_all_single(buffer, equal, equal, name))
    for exchanged in sent:
        _functional.wait_tensor(exchanged)
    return parts.mean(0) if reduce_op == "avg" else parts.sum(0)


def _share(own: Tensor, size: int) -> Tensor:
    """Gathered from all ranks, this is as much as one rank has got from one other."""
    return own.flatten()[: ceil(own.numel() / max(size - 1, 1))]


def _size_and_name(group: Any, op: str) -> tuple[int, str]:
    found = resolve_group(group) if isinstance(group, str) else group
    note_assumption(_IN_PARTS, op)
    return found.size(), found.group_name


KERNELS: dict[str, Any] = {
    "symm_mem::fused_all_gather_matmul": _all_gather_matmul,
    "symm_mem::fused_matmul_reduce_scatter": _matmul_reduce_scatter,
}
