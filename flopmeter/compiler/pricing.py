"""What a kernel that inductor wrote costs: its regions are memory traffic, its ops the arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from flopmeter.compiler.plan import compiled_kernel
from flopmeter.costs import make_cost
from flopmeter.costs.fused import flops_of, grid_of, slowest_class, vector_work, walk_of
from flopmeter.costs.rules import rule
from flopmeter.records import CONTRACTION, MOVEMENT, UNCOUNTED, Call, CompiledKernel, Cost, Reread

# In which inductor computes, as torch does by default, where no tensor of a kernel has floats.
BETWEEN_INTEGERS = "fp32"


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
    is_of_floats = any(spec.dtype.is_floating_point or spec.dtype.is_complex for spec in (*call.inputs, *call.outputs))
    computes = any(count for _, count in flops)
    return replace(
        cost,
        name=kernel.name,
        dtype=BETWEEN_INTEGERS if computes and not is_of_floats else cost.dtype,
        flops_by_class=flops,
        transcendentals=sum(origin.transcendentals for origin in kernel.origins),
        loop_macs=sum(count for name, count in flops if name == CONTRACTION) // 2,
        conversions=_conversions(kernel) if computes else 0,
        work=vector_work(
            _walk_of(kernel),
            grid_of(kernel.rows, kernel.reduced, is_inner=kernel.is_inner, loads=len(kernel.reads)),
            sum(origin.random_numbers for origin in kernel.origins),
            kernel.instructions,
            kernel.cached_bytes,
            reduces=kernel.reduced > 1,
        ),
    )


def _conversions(kernel: CompiledKernel) -> int:
    """How many elements of one byte the kernel computes with, truth values left out."""
    return sum(
        region.nbytes
        for region in kernel.reads
        if region.spec and region.spec.dtype.itemsize == 1 and region.spec.dtype is not torch.bool
    )


def _walk_of(kernel: CompiledKernel) -> tuple[Reread, ...]:
    main = max(kernel.reads, key=lambda region: region.nbytes, default=None)
    if main is None:
        return ()
    written = kernel.bytes_written if main.spec is not None and kernel.reads_again else 0
    return walk_of(kernel.rows, kernel.reduced, main.nbytes, written, is_inner=kernel.is_inner)


def uncounted_in(kernels: Iterable[CompiledKernel]) -> tuple[str, ...]:
    """The names of the ops in these kernels that no rule covers."""
    names = (origin.op for kernel in kernels for origin in kernel.origins if origin.op_class == UNCOUNTED)
    return tuple(dict.fromkeys(names))
