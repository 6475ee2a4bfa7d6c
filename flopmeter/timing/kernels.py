"""One kernel on one device: which units it uses, how its parts overlap, and what class of kernel it is."""

from __future__ import annotations

from typing import NamedTuple

from flopmeter.device.hardware import Hardware, Peak
from flopmeter.records import ATTENTION, Cost, Recurrence, Switches
from flopmeter.records.dtypes import item_bytes_of
from flopmeter.timing import constants
from flopmeter.timing.attention import attention
from flopmeter.timing.bandwidth import cycles_to_seconds, last_wave_stretch, memory_seconds, share_of_stream
from flopmeter.timing.convolution import convolution, depthwise, is_depthwise
from flopmeter.timing.matmul import Busy, Rates, overlap, price_matmul, side_by_side, tile_count

ASYNCHRONOUS_COPIES = (8, 0)  # the compute capability that `cp.async` came with


class Price(NamedTuple):
    """How long a kernel keeps arithmetic and memory busy, and its class, which has an error band."""

    busy: Busy
    kernel_class: str


def price(cost: Cost, hardware: Hardware, switches: Switches) -> Price:
    """Raises HardwareError where the device lacks the kernel's dtype.

    No kernel is faster than its executed FLOPs at the larger of spec and sustained peak, nor than its bytes
    at the spec bandwidth.
    """
    other = _vector_seconds(cost, hardware)
    if not cost.macs:
        return Price(_vector_work(cost, hardware, other), _vector_class(cost))
    dtype = switches.matmul_dtype(cost)
    peak = hardware.contraction_peak(dtype, fp16_accumulate=switches.fp16_accumulate)
    busy, kind = _matmuls(cost, hardware, peak)
    floor = (2 * cost.macs - cost.masked_flops) / max(peak.flop_per_s, peak.sustained_flop_per_s)
    return Price(
        Busy(max(busy.compute_seconds, floor) + other, busy.memory_seconds, max(busy.work_seconds, floor) + other),
        f"{kind}, {_unit(dtype, peak)}",
    )


def _exponent(hardware: Hardware, peak: Peak) -> float:
    """How well loads and multiply-adds overlap. A device without a compute capability counts as a recent one."""
    loads_asynchronously = (hardware.compute_capability or ASYNCHRONOUS_COPIES) >= ASYNCHRONOUS_COPIES
    if peak.unit == "matrix" and loads_asynchronously:
        return constants.ASYNCHRONOUS_MATMUL_OVERLAP
    return constants.MATMUL_OVERLAP


def _unit(dtype: str, peak: Peak) -> str:
    """The dtype and the unit that run a matmul. tf32 exists on matrix units only."""
    return dtype if peak.unit == "matrix" else f"{'fp32' if dtype == 'tf32' else dtype} on {peak.unit} units"


def _matmuls(cost: Cost, hardware: Hardware, peak: Peak) -> tuple[Busy, str]:
    """The time of a kernel's matmuls, and the kind of kernel that runs them."""
    if not cost.matmuls:  # from a formula without shapes: taken as a matmul that fills the device
        compute = 2 * cost.macs / peak.sustained_flop_per_s
        memory = cost.bytes / hardware.sustained_bandwidth_bytes_per_s
        return Busy(compute, memory, overlap(compute, memory, _exponent(hardware, peak))), "product"
    if cost.op_class == ATTENTION:
        return attention(cost, hardware, peak), "attention"
    bandwidth = hardware.sustained_bandwidth_bytes_per_s * share_of_stream(cost)
    item_bytes = item_bytes_of(cost.dtype)
    on_matrix_units = peak.unit == "matrix"
    tile_seconds = cycles_to_seconds(constants.TILE_CYCLES, hardware)
    rates = Rates(
        peak.sustained_flop_per_s,
        bandwidth,
        hardware.sm_count,
        tile_seconds,
        on_matrix_units,
        _exponent(hardware, peak),
    )
    if cost.convolution is not None:
        (implicit,) = cost.matmuls
        if is_depthwise(cost.convolution, implicit):
            fp32 = hardware.vector_peak("fp32").flop_per_s
            return depthwise(cost.convolution, implicit, cost.bytes, fp32, bandwidth), "depthwise convolution"
        busy = convolution(cost.convolution, implicit, cost.bytes, item_bytes, rates, on_matrix_units=on_matrix_units)
        return busy, "convolution" if implicit.batch == 1 else "grouped convolution"
    return (_aligned if on_matrix_units else _sum_of_matmuls)(cost, item_bytes, rates)


def _aligned(cost: Cost, item_bytes: float, rates: Rates) -> tuple[Busy, str]:
    """With the operands as they are; or, if it is faster and compiled code may, on copies with aligned rows."""
    slowed = rates._replace(flop_per_s=rates.flop_per_s * alignment_share(cost.alignment_bytes))
    as_they_are, kind = _sum_of_matmuls(cost, item_bytes, slowed)
    if not cost.may_pad or slowed == rates:
        return as_they_are, kind
    copies = 2 * cost.bytes_read / rates.bytes_per_s  # read, and written
    padded, _ = _sum_of_matmuls(cost, item_bytes, rates)
    padded = Busy(padded.compute_seconds, padded.memory_seconds + copies, padded.work_seconds + copies)
    return min(as_they_are, padded, key=lambda busy: busy.work_seconds), kind


def _sum_of_matmuls(cost: Cost, item_bytes: float, rates: Rates) -> tuple[Busy, str]:
    """Several matmuls in one kernel (as in a cell of an LSTM) run one after another and share its bytes."""
    plain_macs = sum(shape.batch * shape.m * shape.n * shape.k for shape in cost.matmuls)
    rates = rates._replace(flop_per_s=rates.flop_per_s * plain_macs / cost.macs)  # complex ones take four
    if cost.is_grouped:
        return side_by_side(cost.matmuls, cost.bytes, rates), "grouped product"
    share = cost.bytes / len(cost.matmuls)
    parts = [price_matmul(shape, share, item_bytes, rates) for shape in cost.matmuls]
    busy = Busy(*(sum(column) for column in zip(*parts, strict=True)))
    if cost.recurrence is not None:
        return _in_steps(cost.recurrence, busy, rates), "recurrent product"
    if min(tile_count(shape) for shape in cost.matmuls) < rates.sm_count:
        return busy, "small product"
    return busy, "batched product" if cost.matmuls[0].batch > 1 else "product"


def _in_steps(recurrence: Recurrence, together: Busy, rates: Rates) -> Busy:
    """No faster than one step after the other, with the weights kept on the chip."""
    of_step = [price_matmul(shape, 0.0, 0, rates).compute_seconds for shape in recurrence.matmuls]
    compute = recurrence.steps * sum(of_step)
    barriers = recurrence.steps * len(of_step) * constants.RECURRENT_STEP_SECONDS
    return Busy(
        max(together.compute_seconds, compute), together.memory_seconds, max(together.work_seconds, compute, barriers)
    )


def alignment_share(alignment_bytes: int) -> float:
    """The share of a matrix unit's rate that a matmul reaches if its rows have this alignment."""
    return float((alignment_bytes / constants.FULL_ALIGNMENT_BYTES) ** constants.ALIGNMENT_EXPONENT)


def _vector_seconds(cost: Cost, hardware: Hardware) -> float:
    """All other work than matmuls, at the rate of the vector units."""
    flops = cost.flops - 2 * cost.macs
    if not flops:
        return 0.0
    share = 1.0 if cost.fused_multiply_add else constants.PLAIN_ARITHMETIC_SHARE
    return flops / (hardware.vector_peak(cost.dtype).sustained_flop_per_s * share)


def _vector_work(cost: Cost, hardware: Hardware, arithmetic: float) -> Busy:
    """A thread computes the address of an element, loads it, and computes with it. Computing addresses counts as memory
    traffic, because the same remedy helps: fusion, not more FLOP/s."""
    stretch = last_wave_stretch(cost, hardware)
    compute = (arithmetic + _row_seconds(cost, hardware)) * stretch
    traffic = memory_seconds(cost, hardware) * stretch
    memory = overlap(index_seconds(cost, hardware), traffic, constants.INDEX_OVERLAP)
    return Busy(compute, memory, overlap(compute, memory, constants.VECTOR_OVERLAP))


def _row_seconds(cost: Cost, hardware: Hardware) -> float:
    """Time in which the threads of each row combine their partial results."""
    operations = sum(reread.rows * reread.threads * reread.operations for reread in cost.rereads)
    if not operations:
        return 0.0
    return operations / (hardware.vector_peak("fp32").flop_per_s * constants.PLAIN_ARITHMETIC_SHARE)


def index_seconds(cost: Cost, hardware: Hardware) -> float:
    """Time to compute addresses, on the integer units. A device without SMs (a TPU) is taken to have half as many lanes
    for integers as for fp32, like most GPUs."""
    if not cost.index_operations:
        return 0.0
    cycles = cost.index_operations / (constants.INTEGER_LANES_PER_SM * hardware.sm_count)
    half_of_lanes = hardware.vector_peak("fp32").flop_per_s / 4
    return min(cycles_to_seconds(cycles, hardware), cost.index_operations / half_of_lanes)


def _vector_class(cost: Cost) -> str:
    if cost.link_bytes:
        return "host copy"
    if cost.access in ("strided", "window", "fused"):
        return {"strided": "strided copy", "window": "pooling", "fused": "fused"}[cost.access]
    return cost.op_class
