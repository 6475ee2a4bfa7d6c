"""Weights of 8 or 4 bits that compiled code casts inside of the matmul that reads them.

A weight-only quantised layer casts its weight, and may scale it, for each matmul:
`x @ (weight.to(x.dtype) * scale)`. For few rows, as in decoding, inductor makes one Triton kernel of that, which reads
the narrow weight; the cast weight is never in memory. torch 2.1 to 2.5 do so by default (`mixed_mm`, chosen up to 32
rows by the tree for A100 in torch/_inductor/autoheuristic), later ones with coordinate descent tuning for one row, as
gpt-fast sets it, or with mode='max-autotune' (prologue fusion). For many rows a library's matmul on the cast weight
is faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from flopmeter.launch.fusion.dataflow import Flow, Value
from flopmeter.launch.fusion.grouping import Groups
from flopmeter.launch.fusion.parts import Part
from flopmeter.launch.fusion.roles import OPAQUE
from flopmeter.launch.fusion.traffic import Traffic
from flopmeter.records import Cost, MatmulWork, Region
from flopmeter.torch_names.operators import aten

MOST_ROWS = 32
_PRODUCTS = (aten.mm, aten.addmm, aten.bmm)
_NARROW = (torch.int8, torch.uint8)  # two numbers of 4 bits share an element


def casts_inside(parts: list[Part], flow: Flow, groups: Groups, traffic: Traffic) -> dict[int, int]:
    """For each group that only casts a weight, the matmul that does the cast itself."""
    members: dict[int, list[int]] = {}
    for place in range(len(parts)):
        members.setdefault(groups.of(place), []).append(place)
    found: dict[int, int] = {}
    for product, part in enumerate(parts):
        if part.op.call.func.overloadpacket not in _PRODUCTS or not _has_few_rows(part.cost):
            continue
        for _, values in flow.reads[product]:
            for value in values:
                group = groups.of(value.kernel)
                if _is_cast(members[group], parts, flow) and _is_only_for(product, value, members[group], traffic):
                    found[group] = product
    return found


def with_cast(product: Cost, cast: Iterable[Cost], bytes_read: int, bytes_written: int) -> Cost:
    """The matmul's kernel when it does the cast: it reads the input of the cast instead of its output."""
    left = bytes_written
    reads = []
    for region in product.reads:
        saved = min(left, region.nbytes) if region.nbytes == bytes_written else 0
        left -= saved
        reads.append(region._replace(nbytes=region.nbytes - saved))
    flops = dict(product.flops_by_class)
    for name, count in (item for part in cast for item in part.flops_by_class if item[1]):
        flops[name] = flops.get(name, 0) + count
    reads.append(Region(None, bytes_read))
    return replace(product, reads=tuple(reads), flops_by_class=tuple(flops.items()), access="fused")


def _has_few_rows(cost: Cost) -> bool:
    return isinstance(cost.work, MatmulWork) and all(matmul.m <= MOST_ROWS for matmul in cost.work.matmuls)


def _is_cast(members: list[int], parts: list[Part], flow: Flow) -> bool:
    """Whether a group only casts a narrow tensor to a wide one: it is element-wise, and its largest input is narrow."""
    if any(flow.roles[member] is OPAQUE or flow.roles[member].loops for member in members):
        return False
    inputs = [spec for member in members for spec in parts[member].op.call.inputs]
    largest = max(inputs, key=lambda spec: spec.numel, default=None)
    return largest is not None and any(spec.dtype in _NARROW and 2 * spec.numel >= largest.numel for spec in inputs)


def _is_only_for(product: int, value: Value, members: list[int], traffic: Traffic) -> bool:
    if set(value.readers) - set(members) != {product} or traffic.outlives_graph(value):
        return False
    return traffic.of_group(members)[1] == value.touch.charged  # it writes nothing else
