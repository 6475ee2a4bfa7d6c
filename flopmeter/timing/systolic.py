"""One kernel on a device whose products run in a systolic array (TPU, NeuronCore, Gaudi).

Such a device has no SMs that take tiles in waves, and no cache: a compiler plans what lies in its memory on the chip.
So a kernel takes its arithmetic or its bytes, whichever is longer, and only the array's own shape is known to cost
more. None of it was measured.
"""

from __future__ import annotations

from math import ceil

from flopmeter.device.hardware import Hardware
from flopmeter.records import (
    AttentionShape,
    AttentionWork,
    Cost,
    HostCopy,
    KernelWork,
    Matmul,
    Switches,
    matmuls_of,
)
from flopmeter.timing import constants
from flopmeter.timing.bandwidth import link_seconds
from flopmeter.timing.kernels import Price, has_few_flops
from flopmeter.timing.matmul import Busy, overlap
from flopmeter.timing.vector_work import vector_seconds

# Of one score: its scale, the row's maximum, the difference to it, exp, and the row's sum. (Backward: scale, difference
# and exp, and the difference and product that give the score's gradient.)
SOFTMAX_OPERATIONS = 5


def price(cost: Cost, hardware: Hardware, switches: Switches, side: int) -> Price:
    """The price of a kernel on a device with arrays of `side` rows and columns.

    Raises HardwareError if the device lacks its dtype.
    """
    # All that is no product, a function such as exp as one operation: there is a unit for these.
    others = cost.other_flops + SOFTMAX_OPERATIONS * _scores(cost)
    arithmetic = _product_seconds(cost, hardware, switches, side) + vector_seconds(others, cost, hardware)
    if isinstance(cost.work, HostCopy):
        memory = link_seconds(cost.work, hardware)
    else:
        memory = cost.bytes / hardware.sustained_bandwidth_bytes_per_s
    busy = Busy(arithmetic, memory, overlap(arithmetic, memory, constants.VECTOR_OVERLAP))
    return Price(busy, f"{cost.op_class}, systolic array", has_few_flops(cost, arithmetic, hardware))


def filled_share(work: KernelWork, side: int) -> float:
    """The share of its multiply-adds that the array spends on the matrices, and not on their padding.

    One matrix stays in the array while the rows of the other pass through it, so that its two sides are padded to the
    array's; to put it there takes as long as `side` rows take to pass (Jouppi et al., 'In-Datacenter Performance
    Analysis of a Tensor Processing Unit', arXiv 1704.04760, section 2), so fewer rows take as long as these. The
    compiler is taken to choose which of the two stays.
    """
    matmuls = _squares(work.shape) if isinstance(work, AttentionWork) else matmuls_of(work)
    padded = sum(_padded_macs(shape, side) for shape in matmuls)
    return sum(shape.macs for shape in matmuls) / padded if padded else 1.0


def _squares(shape: AttentionShape) -> list[Matmul]:
    """Products of fused attention: queries with keys, and scores with values, for each size of sequence."""
    return [
        product
        for count, queries, keys in shape.sizes
        for product in (
            Matmul(count * shape.heads, queries, keys, shape.head_dim),
            Matmul(count * shape.heads, queries, shape.value_dim, keys),
        )
    ]


def _padded_macs(shape: Matmul, side: int) -> int:
    rows, columns, depth = (ceil(size / side) * side for size in shape[1:])
    right_stays, left_stays = max(shape.m, side) * columns, rows * max(shape.n, side)
    return shape.batch * depth * min(right_stays, left_stays)


def _product_seconds(cost: Cost, hardware: Hardware, switches: Switches, side: int) -> float:
    """On the array, or at the vector units' rate for fp32 where that is faster, as of a depthwise convolution."""
    if not cost.macs:
        return 0.0
    on_array = hardware.contraction_peak(switches.matmul_dtype(cost)).sustained_flop_per_s
    rate = max(on_array * filled_share(cost.work, side), hardware.vector_peak("fp32").sustained_flop_per_s)
    return cost.product_flops / rate


def _scores(cost: Cost) -> float:
    """Scores of fused attention that no mask hides."""
    if not isinstance(cost.work, AttentionWork):
        return 0.0
    return cost.work.shape.scores * cost.product_flops / (2 * cost.macs)
