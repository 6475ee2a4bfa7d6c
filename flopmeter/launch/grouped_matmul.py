"""Grouped matmuls, such as those of each expert's tokens: one kernel if the device has such a kernel, else one matmul
per group.

torch's grouped kernel is for compute capability 9 and 10, and for bf16 (aten/src/ATen/native/cuda/GroupedBlas.cpp).
Elsewhere the op copies the offsets to the host, which waits for them, and launches one matmul after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from flopmeter.costs import costs_of, make_cost
from flopmeter.device.hardware import Hardware
from flopmeter.records import (
    CONTRACTION,
    MOVEMENT,
    Call,
    Cost,
    GroupedMatmulWork,
    HostCopy,
    Kernel,
    Matmul,
    MatmulWork,
    Region,
    VectorWork,
)
from flopmeter.records.dtypes import item_bytes_of
from flopmeter.torch_names.operators import aten

KERNEL_CAPABILITIES = (9, 10)  # majors
KERNEL_TYPES = ("bf16", "fp8", "fp4")  # scaled ones, in fp8 and fp4, exist only as a grouped kernel
ALIGNMENT_BYTES = 16  # of the rows of all operands: torch takes no others
_GROUPED = aten.present("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")
VIEWS_PER_GROUP = 3  # one of each operand's part and one of the output's


def on_device(kernels: list[Kernel], hardware: Hardware) -> list[Kernel]:
    """The kernels for this device: the same, or with one matmul per group for each grouped one."""
    if not any(isinstance(kernel.cost.work, GroupedMatmulWork) for kernel in kernels):
        return kernels
    apart: dict[Cost, tuple[Cost, ...]] = {}
    launched: list[Kernel] = []
    for kernel in kernels:
        work = kernel.cost.work
        if not isinstance(work, GroupedMatmulWork) or _has_kernel(kernel.cost, hardware):
            launched.append(kernel)
            continue
        if kernel.cost not in apart:
            on_host = () if hardware.is_cpu else (_copy_of_offsets(kernel),)  # a CPU has them
            apart[kernel.cost] = (*on_host, *_matmuls(kernel, work))
        for number, cost in enumerate(apart[kernel.cost]):
            launched.append(kernel._replace(cost=cost) if not number else Kernel(kernel.ops, cost, VIEWS_PER_GROUP, 0))
    return launched


def in_one_kernel(kernels: Iterable[Kernel]) -> list[Kernel]:
    """The kernels of a server of language models, which brings a grouped kernel for each device (Triton, CUTLASS)."""
    whole: list[Kernel] = []
    for kernel in kernels:
        if not is_grouped(kernel):
            whole.append(kernel)
        elif not whole or whole[-1].op is not kernel.op:
            whole.append(kernel._replace(cost=costs_of(kernel.op.call)[0]))
    return whole


def is_grouped(kernel: Kernel) -> bool:
    return kernel.op.packet in _GROUPED


def _has_kernel(cost: Cost, hardware: Hardware) -> bool:
    """Whether the device has a grouped kernel. Accelerators of other makers than NVIDIA are assumed to have one, as
    MI300 and TPUs do; CPUs have none."""
    if hardware.compute_capability is None:
        return not hardware.is_cpu
    return hardware.compute_capability[0] in KERNEL_CAPABILITIES and cost.dtype in KERNEL_TYPES


def _copy_of_offsets(kernel: Kernel) -> Cost:
    call = kernel.op.call
    ends = call.argument("offs")
    return make_cost(call, MOVEMENT, read=(ends,), written=(), work=HostCopy(ends.nbytes), blocks_host=True)


def _matmuls(kernel: Kernel, work: GroupedMatmulWork) -> Iterator[Cost]:
    """The matmul of each group, with its part of the bytes."""
    for group in work.matmuls:
        yield from [_matmul(kernel.op.call, kernel.cost, group._replace(batch=1))] * group.batch


def _matmul(call: Call, grouped: Cost, group: Matmul) -> Cost:
    """The matmul of one group. If its depth k is 0, it only fills its result with zeros."""
    _, m, n, k = group
    a, b = call.inputs[:2]
    item, macs = item_bytes_of(grouped.dtype), m * n * k
    op_class = CONTRACTION if macs else MOVEMENT
    return replace(
        grouped,
        op_class=op_class,
        flops_by_class=((op_class, 2 * macs),),
        reads=(Region(a, int(item * m * k)), Region(b, int(item * k * n))),
        writes=(Region(call.outputs[0], int(item * m * n)),),
        work=MatmulWork((group,), macs, ALIGNMENT_BYTES) if macs else VectorWork(),
    )
