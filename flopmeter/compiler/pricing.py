"""What a kernel that inductor wrote costs: its regions are memory traffic, its ops the arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import ceil

import torch

from flopmeter.compiler.plan import compiled_kernel
from flopmeter.costs import make_cost
from flopmeter.costs.fused import HELD_ROW_ELEMENTS, flops_of, slowest_class
from flopmeter.costs.rules import rule
from flopmeter.records import (
    MOVEMENT,
    UNCOUNTED,
    Call,
    CompiledKernel,
    Cost,
    Reread,
    VectorWork,
)


@rule(compiled_kernel)
def fused(call: Call) -> Cost:
    """The cost of a kernel. FLOPs keep the classes of the ops, with those of the kernel's own class first."""
    kernel: CompiledKernel = call.kwargs["kernel"]
    classes = [origin.op_class for origin in kernel.origins if origin.op_class != UNCOUNTED]
    unknown = UNCOUNTED if kernel.origins else MOVEMENT
    op_class = slowest_class(classes) or next(iter(classes), unknown)
    counted = [[item for item in origin.flops_by_class if item[0] != UNCOUNTED] for origin in kernel.origins]
    flops = flops_of(op_class, counted)
    cost = make_cost(call, op_class, 0, read=kernel.reads, written=kernel.writes, access="fused")
    return replace(
        cost,
        name=kernel.name,
        flops_by_class=flops,
        transcendentals=sum(origin.transcendentals for origin in kernel.origins),
        conversions=_conversions(kernel) if any(count for _, count in flops) else 0,
        work=VectorWork(_rereads(kernel)),  # no index arithmetic: sizes are constants of a compiled kernel
    )


def _conversions(kernel: CompiledKernel) -> int:
    """Elements of one byte that it computes with: numbers, not truth values."""
    return sum(
        region.nbytes
        for region in kernel.reads
        if region.spec and region.spec.dtype.itemsize == 1 and region.spec.dtype is not torch.bool
    )


def _rereads(kernel: CompiledKernel) -> tuple[Reread, ...]:
    """How a kernel that reduces walks its rows. If they are too long for registers and it writes as much as it reads,
    it reads again for the result what it read for the reduction."""
    if kernel.reduced == 1 or not kernel.reads:
        return ()
    main = max(kernel.reads, key=lambda region: region.nbytes)
    is_held = kernel.reduced <= HELD_ROW_ELEMENTS or kernel.bytes_written < main.nbytes // 2 or main.spec is None
    if is_held and not kernel.is_inner:
        return ()  # what bounds other walks than along rows is not known here
    block = min(1 << (kernel.reduced - 1).bit_length(), _ROW_BLOCK)
    passes = 1 if is_held else 2
    accesses = passes * ceil(kernel.reduced / block) if kernel.is_inner else 0
    threads = max(1, block // _ELEMENTS_OF_THREAD)
    row_bytes = main.nbytes // kernel.rows
    return (Reread((passes - 1) * main.nbytes, kernel.rows, row_bytes, threads, _COMBINING, accesses),)


# Elements of a row that a block takes at a time, and those of a thread (_reduction_configs and triton_config_reduction
# in runtime/triton_heuristics.py: 16 warps for 2,048 elements). The threads of a warp combine their results in five
# steps of a shuffle and an addition, and the warps in four more.
_ROW_BLOCK = 2048
_ELEMENTS_OF_THREAD = 4
_COMBINING = 18


def uncounted_in(kernels: Iterable[CompiledKernel]) -> tuple[str, ...]:
    """The names of the ops in these kernels that no rule covers."""
    names = (origin.op for kernel in kernels for origin in kernel.origins if origin.op_class == UNCOUNTED)
    return tuple(dict.fromkeys(names))
