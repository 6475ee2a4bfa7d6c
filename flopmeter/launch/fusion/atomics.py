"""Additions at places that several indices may name: eager PyTorch sorts these first, inductor adds atomically."""

from __future__ import annotations

from itertools import groupby

from flopmeter.costs.data_movement.indexing import atomic_additions
from flopmeter.launch.fusion.graphs import CompiledRegion
from flopmeter.records import Kernel


def with_atomic_additions(kernels: list[Kernel], region: CompiledRegion) -> list[Kernel]:
    """The kernels of compiled ops without those that sort (`index_put_` and the decomposition of
    `embedding_dense_backward` in torch/_inductor)."""
    made = []
    for _, each in groupby(kernels, key=lambda kernel: id(kernel.op)):
        own = list(each)
        costs = None if region(own[0].op) is None else atomic_additions(own[0].op.call)
        if costs is not None:
            own = [own[0]._replace(cost=costs[0]), *(Kernel(own[0].ops, cost, 0, 0) for cost in costs[1:])]
        made += own
    return made
