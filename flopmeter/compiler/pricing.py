"""What a kernel that inductor wrote costs: its regions are memory traffic, its ops the arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from flopmeter.compiler.plan import compiled_kernel
from flopmeter.costs import make_cost
from flopmeter.costs.rules import rule
from flopmeter.records import (
    ELEMENTWISE,
    MOVEMENT,
    NORMALIZATION,
    REDUCTION,
    UNCOUNTED,
    Call,
    CompiledKernel,
    Cost,
    Origin,
    Reread,
    VectorWork,
)

# Inductor holds rows of up to so many elements in registers (should_use_persistent_reduction in
# torch/_inductor/choices.py); longer ones are read again by what follows their reduction in the kernel.
HELD_ROW_ELEMENTS = 1024


@rule(compiled_kernel)
def fused(call: Call) -> Cost:
    """The cost of a kernel. FLOPs keep the classes of the ops, with those of the kernel's own class first."""
    kernel: CompiledKernel = call.kwargs["kernel"]
    op_class = _class_of(kernel.origins)
    flops = {op_class: 0}
    for origin in kernel.origins:
        for name, count in origin.flops_by_class:
            if name != UNCOUNTED:
                flops[name] = flops.get(name, 0) + count
    cost = make_cost(call, op_class, 0, read=kernel.reads, written=kernel.writes, access="fused")
    return replace(
        cost,
        name=kernel.name,
        flops_by_class=tuple((name, count) for name, count in flops.items() if count or name == op_class),
        transcendentals=sum(origin.transcendentals for origin in kernel.origins),
        conversions=_conversions(kernel) if any(flops.values()) else 0,
        work=VectorWork(_rereads(kernel)),  # no index arithmetic: sizes are constants of a compiled kernel
    )


def _conversions(kernel: CompiledKernel) -> int:
    """Elements of one byte that it computes with: numbers, not truth values."""
    return sum(
        region.nbytes
        for region in kernel.reads
        if region.spec and region.spec.dtype.itemsize == 1 and region.spec.dtype is not torch.bool
    )


def _class_of(origins: Iterable[Origin]) -> str:
    """The class of the kernel: that of the op which slows it most."""
    classes = [origin.op_class for origin in origins if origin.op_class != UNCOUNTED]
    first = next((name for name in (NORMALIZATION, REDUCTION, ELEMENTWISE) if name in classes), None)
    return first or next(iter(classes), MOVEMENT)


def _rereads(kernel: CompiledKernel) -> tuple[Reread, ...]:
    """The second reads of a kernel that reduces rows too long for registers, and writes as much as it reads: what it
    read for the reduction it reads again for the result."""
    if kernel.reduced <= HELD_ROW_ELEMENTS or not kernel.reads:
        return ()
    main = max(kernel.reads, key=lambda region: region.nbytes)
    if main.spec is None or kernel.bytes_written < main.nbytes // 2:
        return ()
    row_bytes = kernel.reduced * main.spec.dtype.itemsize
    return (Reread(main.nbytes, max(1, main.nbytes // row_bytes), row_bytes, threads=_BLOCK_THREADS),)


_BLOCK_THREADS = 256  # of a block that reduces a row: 8 warps (triton_config_reduction in runtime/triton_heuristics.py)


def uncounted_in(kernels: Iterable[CompiledKernel]) -> tuple[str, ...]:
    """The names of the ops in these kernels that no rule covers."""
    names = (origin.op for kernel in kernels for origin in kernel.origins if origin.op_class == UNCOUNTED)
    return tuple(dict.fromkeys(names))
