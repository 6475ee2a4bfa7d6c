"""The price of one kernel on one device: which units it uses, how its parts overlap, and its class."""

from __future__ import annotations

from typing import NamedTuple

from flopmeter.device.hardware import Hardware, Peak
from flopmeter.records import ConvolutionWork, Cost, MatrixWork, Switches
from flopmeter.timing import constants
from flopmeter.timing.convolution import with_conversions
from flopmeter.timing.gemm_kernels import UNNAMED, NamedKernel, as_found_by
from flopmeter.timing.matmul import Busy, overlap
from flopmeter.timing.products import price_product
from flopmeter.timing.vector_work import arithmetic_seconds, price_vector_work, vector_class


class Price(NamedTuple):
    """How long a kernel keeps arithmetic and memory busy, and its class, which has an error band."""

    busy: Busy
    kernel_class: str
    few_flops: bool = False  # at the datasheet's rates its arithmetic takes less than half as long as its bytes


def price(
    cost: Cost, hardware: Hardware, switches: Switches, cached_bytes: float = 0.0, ran: NamedKernel = UNNAMED
) -> Price:
    """The price of a kernel. `cached_bytes`: how many of its bytes the L2 cache holds from earlier kernels; `ran`:
    which of a library's kernels it is. Raises HardwareError if the device lacks its dtype.

    No kernel is faster than its executed FLOPs at the larger of spec and sustained peak, nor than its other bytes
    at the spec bandwidth.
    """
    device, hardware = hardware, as_found_by(ran, hardware)
    other, work = arithmetic_seconds(cost, hardware), cost.work
    if not isinstance(work, MatrixWork) or not work.macs:
        busy = price_vector_work(cost, hardware, other, cached_bytes)
        return Price(busy, vector_class(cost), has_few_flops(cost, other, hardware))
    dtype = switches.matmul_dtype(cost)
    peak = hardware.contraction_peak(dtype, fp16_accumulate=switches.fp16_accumulate)
    busy, kind = price_product(cost, work, hardware, peak, cached_bytes, ran)
    if isinstance(work, ConvolutionWork) and peak.unit == "matrix":
        found = device.contraction_peak(dtype, fp16_accumulate=switches.fp16_accumulate)
        busy = with_conversions(busy, cost, work, device, found.sustained_flop_per_s)
    floor = cost.product_flops / max(peak.flop_per_s, peak.sustained_flop_per_s)
    compute = max(busy.compute_seconds, floor) + other  # other warps load meanwhile
    together = overlap(compute, busy.memory_seconds, constants.VECTOR_OVERLAP)
    busy = busy._replace(compute_seconds=compute, work_seconds=max(busy.work_seconds, together))
    return Price(busy, f"{kind}, {_unit(dtype, peak)}", has_few_flops(cost, floor + other, hardware))


def has_few_flops(cost: Cost, arithmetic: float, hardware: Hardware) -> bool:
    """Whether arithmetic takes less than half as long as memory traffic. `arithmetic`: seconds of all instructions of
    functions such as exp, and of multiply-adds as if no tile were padded."""
    return 2 * arithmetic < cost.bytes / hardware.bandwidth_bytes_per_s


def _unit(dtype: str, peak: Peak) -> str:
    """The dtype and the unit that run a matmul. tf32 exists on matrix units only."""
    return dtype if peak.unit == "matrix" else f"{'fp32' if dtype == 'tf32' else dtype} on {peak.unit} units"
