"""One kernel on one device: which units it uses, how its parts overlap, and what class of kernel it is."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from flopmeter.device.hardware import Hardware, Peak
from flopmeter.records import (
    ELEMENTWISE,
    AttentionWork,
    BlockTime,
    ConvolutionWork,
    Cost,
    FormulaWork,
    GroupedMatmulWork,
    HostCopy,
    Matmul,
    MatmulWork,
    MatrixWork,
    Recurrence,
    RecurrentWork,
    Reread,
    Switches,
    UnpackingMatmulWork,
    VectorWork,
)
from flopmeter.records.dtypes import item_bytes_of
from flopmeter.timing import constants
from flopmeter.timing.attention import attention
from flopmeter.timing.bandwidth import (
    access_seconds,
    arithmetic_latency_cycles,
    cache_bytes_per_s,
    clock_hz,
    cycles_to_seconds,
    integer_seconds,
    issued_lanes,
    issuing_seconds,
    memory_seconds,
    miss_share,
    narrow_unit_seconds,
    over_boost,
    resident_threads,
    rows_in_flight,
    scattered_seconds,
    share_of_stream,
    threads_of,
)
from flopmeter.timing.convolution import (
    converts_layout,
    convolution,
    depthwise,
    image_alignment_bytes,
    is_depthwise,
    is_hopper,
    with_conversions,
)
from flopmeter.timing.gemm_kernels import (
    UNNAMED,
    GemmKernels,
    NamedKernel,
    ampere_kernel_share,
    as_found_by,
    as_ran,
    for_unaligned_rows,
    gemm_kernels,
    tiled_read_share,
)
from flopmeter.timing.grids import steps_of
from flopmeter.timing.matmul import (
    Busy,
    MatmulBytes,
    Rates,
    fastest,
    overlap,
    price_matmul,
    side_by_side,
    tile_count,
    unpacking,
)


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
    other, work = _vector_seconds(cost, hardware), cost.work
    if not isinstance(work, MatrixWork) or not work.macs:
        busy = _vector_work(cost, hardware, other, cached_bytes)
        return Price(busy, _vector_class(cost), _has_few_flops(cost, other, hardware))
    dtype = switches.matmul_dtype(cost)
    peak = hardware.contraction_peak(dtype, fp16_accumulate=switches.fp16_accumulate)
    busy, kind = _matmuls(cost, work, hardware, peak, cached_bytes, ran)
    if isinstance(work, ConvolutionWork) and peak.unit == "matrix":
        found = device.contraction_peak(dtype, fp16_accumulate=switches.fp16_accumulate)
        busy = with_conversions(busy, cost, work, device, found.sustained_flop_per_s)
    floor = (2 * work.macs - cost.masked_flops) / max(peak.flop_per_s, peak.sustained_flop_per_s)
    compute = max(busy.compute_seconds, floor) + other  # other warps load meanwhile
    together = overlap(compute, busy.memory_seconds, constants.VECTOR_OVERLAP)
    busy = busy._replace(compute_seconds=compute, work_seconds=max(busy.work_seconds, together))
    return Price(busy, f"{kind}, {_unit(dtype, peak)}", _has_few_flops(cost, floor + other, hardware))


def _has_few_flops(cost: Cost, arithmetic: float, hardware: Hardware) -> bool:
    """Whether arithmetic takes less than half as long as memory traffic. `arithmetic`: seconds of all instructions of
    functions such as exp, and of multiply-adds as if no tile were padded."""
    return 2 * arithmetic < cost.bytes / hardware.bandwidth_bytes_per_s


def _unit(dtype: str, peak: Peak) -> str:
    """The dtype and the unit that run a matmul. tf32 exists on matrix units only."""
    return dtype if peak.unit == "matrix" else f"{'fp32' if dtype == 'tf32' else dtype} on {peak.unit} units"


def _matmuls(
    cost: Cost, work: MatrixWork, hardware: Hardware, peak: Peak, cached_bytes: float, ran: NamedKernel
) -> tuple[Busy, str]:
    """The time of a kernel's matmuls, and the kind of kernel that runs them."""
    library = gemm_kernels(
        hardware,
        peak,
        convolves=isinstance(work, ConvolutionWork),
        unpacks_weights=isinstance(work, MatmulWork | GroupedMatmulWork) and work.unpacks_weights,
        groups=isinstance(work, GroupedMatmulWork),
    )
    if isinstance(work, FormulaWork):  # timed like a matmul that fills the device
        compute = 2 * work.macs / peak.sustained_flop_per_s
        memory = cost.bytes / hardware.sustained_bandwidth_bytes_per_s
        return Busy(compute, memory, overlap(compute, memory, library.overlap_exponent)), "product"
    if isinstance(work, AttentionWork):
        was_compared = not work.shape.is_backward or work.backend == "flash"
        kind = "attention" if was_compared else "attention backward"
        return attention(cost, work, hardware, peak, cached_bytes), kind
    rates = _rates(cost, work, as_ran(ran, library), hardware, peak)
    saved = cached_bytes * max(0.0, 1 - rates.bytes_per_s / rates.cache_bytes_per_s)
    moved = MatmulBytes(cost.bytes - saved, cost.bytes_written, item_bytes_of(cost.dtype))
    if isinstance(work, ConvolutionWork):
        return _convolution(cost, work, moved, rates, hardware, peak)
    if isinstance(work, UnpackingMatmulWork):
        if peak.unit != "matrix":
            return price_matmul(work.matmul, moved, rates), "small product"
        return unpacking(work.matmul, constants.UNPACKING[work.bits], moved, rates), "small product"
    if isinstance(work, GroupedMatmulWork):
        return side_by_side(work.matmuls, moved, rates), "grouped product"
    if isinstance(work, RecurrentWork):
        slow = _for_rows(work.alignment_bytes, rates, hardware, peak)
        return _recurrent(work, moved, slow, hardware), "recurrent product"
    if work.across_depth and peak.unit == "matrix" and moved.item_bytes == constants.TF32_BYTES and is_hopper(hardware):
        # `wgmma` only transposes operands of 16 bits (PTX ISA, "Strides" of its matrices in shared memory).
        aligned = rates.slowed(ampere_kernel_share(hardware))
    else:
        aligned = rates
    slow = _for_rows(work.alignment_bytes, rates, hardware, peak)
    as_they_are, kind = _sum_of_matmuls(work, moved, aligned if slow is rates else slow)
    if slow is rates or not work.may_pad:
        return as_they_are, kind
    return fastest((as_they_are, _padded(cost, work, moved, aligned))), kind


def _rates(cost: Cost, work: MatrixWork, library: GemmKernels, hardware: Hardware, peak: Peak) -> Rates:
    """What these kernels sustain on the unit."""
    bandwidth = hardware.sustained_bandwidth_bytes_per_s * share_of_stream(cost, hardware) * library.memory_share
    if isinstance(work, MatmulWork | GroupedMatmulWork):
        bandwidth *= tiled_read_share(work.matmuls, hardware, peak)
    return Rates(
        peak.sustained_flop_per_s,
        max(peak.sustained_flop_per_s, peak.flop_per_s if library.reaches_peak else 0.0),
        bandwidth,
        hardware.sm_count,
        clock_hz(hardware),
        library,
        hardware.l2_cache_bytes or 0,
    )


def _for_rows(alignment_bytes: int, rates: Rates, hardware: Hardware, peak: Peak) -> Rates:
    """The rates of kernels for rows that begin at multiples of that many bytes. Under the power limit these kernels
    reach as many FLOP/s as others do, unless the boost clock bounds them before."""
    if alignment_bytes >= constants.FULL_ALIGNMENT_BYTES or peak.unit != "matrix":
        return rates
    share = ampere_kernel_share(hardware)
    sustained = min(rates.flop_per_s, share * peak.burst * peak.flop_per_s)
    kernels = for_unaligned_rows(rates.kernels, alignment_bytes)
    return rates.slowed(share)._replace(flop_per_s=sustained, kernels=kernels)


def _convolution(
    cost: Cost, work: ConvolutionWork, moved: MatmulBytes, rates: Rates, hardware: Hardware, peak: Peak
) -> tuple[Busy, str]:
    implicit, shape = work.implicit, work.shape
    if is_depthwise(shape, implicit):
        busy = depthwise(shape, implicit, moved, hardware, rates.bytes_per_s, is_fp16=cost.dtype == "fp16")
        return busy, "depthwise convolution"
    if shape.channels * moved.item_bytes < constants.CONVOLUTION_DEPTH_BYTES and implicit.batch == 1:
        # Registers bound these at the boost clock; at half the FLOPs, the power limit leaves more of the clock.
        rates = rates.within(peak.flop_per_s * peak.burst * ampere_kernel_share(hardware))
    if is_hopper(hardware) and not shape.channels_last:
        rates = _for_rows(image_alignment_bytes(shape, moved.item_bytes), rates, hardware, peak)
    if peak.unit == "matrix" and converts_layout(shape, implicit, moved.item_bytes, hardware):
        shape = shape._replace(channels_last=True)
    busy = convolution(shape, implicit, moved, rates, on_matrix_units=peak.unit == "matrix")
    return busy, "convolution" if implicit.batch == 1 else "grouped convolution"


def _padded(cost: Cost, work: MatmulWork, moved: MatmulBytes, rates: Rates) -> Busy:
    """The time on copies with aligned rows, which compiled code may make."""
    padded, _ = _sum_of_matmuls(work, moved, rates)
    return padded.with_traffic(2 * cost.bytes_read / rates.bytes_per_s)  # read, and written


def _sum_of_matmuls(work: MatmulWork, moved: MatmulBytes, rates: Rates) -> tuple[Busy, str]:
    """Several matmuls in one kernel (as in a cell of an LSTM) run one after another and share its bytes."""
    plain_macs = sum(matmul.macs for matmul in work.matmuls)
    rates = rates.slowed(plain_macs / work.macs)  # complex ones take four
    busy = _one_after_another(work.matmuls, moved.share(len(work.matmuls)), rates)
    if min(tile_count(shape) for shape in work.matmuls) < rates.sm_count:
        return busy, "small product"
    return busy, "batched product" if work.matmuls[0].batch > 1 else "product"


def _one_after_another(shapes: Iterable[Matmul], each: MatmulBytes, rates: Rates) -> Busy:
    parts = (price_matmul(shape, each, rates) for shape in shapes)
    return functools.reduce(Busy.then, parts, Busy(0.0, 0.0, 0.0, sms=0.0))


def _recurrent(work: RecurrentWork, moved: MatmulBytes, rates: Rates, hardware: Hardware) -> Busy:
    """Seconds of all steps, one after another, whose weights stay on the chip or in the L2 cache; and of the products
    with the inputs and the gradients of weights, which are ready for all steps at once."""
    recurrence = work.recurrence
    in_cache = MatmulBytes(0.0, 0.0, moved.item_bytes)
    step = _one_after_another(recurrence.matmuls, in_cache, rates)
    if _keeps_weights(recurrence, hardware):
        together = _one_after_another(work.matmuls, moved.share(len(work.matmuls)), rates)
        compute = recurrence.steps * step.work_seconds
        barriers = recurrence.steps * len(recurrence.matmuls) * constants.RECURRENT_STEP_SECONDS
        return together._replace(
            compute_seconds=max(together.compute_seconds, compute),
            work_seconds=max(together.work_seconds, compute, barriers),
        )
    at_once = list(work.matmuls)
    for own in recurrence.matmuls:  # of which the products for all tokens hold one each
        at_once.remove(next(shape for shape in at_once if shape.n * shape.k == own.n * own.k))
    together = _one_after_another(at_once, moved.share(len(at_once)), rates)
    launches = 2 * hardware.kernel_floor_seconds + access_seconds(1.0, hardware)
    starts = recurrence.steps * len(recurrence.matmuls) * launches
    return Busy(
        together.compute_seconds + recurrence.steps * step.compute_seconds,
        together.memory_seconds,
        together.work_seconds + recurrence.steps * step.seconds + starts,
        together.latency_seconds,
        max(step.sms, together.sms),
    )


def _keeps_weights(recurrence: Recurrence, hardware: Hardware) -> bool:
    """Whether one kernel runs all steps: everywhere, or on devices that are large for torch
    (`use_persist_device_heuristics` in aten/src/ATen/native/cudnn/RNN.cpp)."""
    major, minor = hardware.compute_capability or (0, 0)
    is_large = (major, minor) == (7, 0) or (major >= 8 and minor != 6 and hardware.sm_count >= 98)
    return recurrence.keeps_weights == "everywhere" or (recurrence.keeps_weights == "on large devices" and is_large)


def _vector_seconds(cost: Cost, hardware: Hardware) -> float:
    """Seconds of all work but matmuls, on the vector units; another unit converts at the same time."""
    flops = cost.flops - 2 * cost.macs
    if cost.op_class == ELEMENTWISE and cost.access != "fused":
        flops += (constants.FUNCTION_OPERATIONS - 1) * cost.transcendentals
    share = 1.0 if cost.fused_multiply_add else constants.PLAIN_ARITHMETIC_SHARE
    arithmetic = flops / (hardware.vector_peak(cost.dtype).sustained_flop_per_s * share) if flops else 0.0
    is_slow = hardware.vendor == "nvidia"
    lanes = constants.CONVERSIONS_PER_CYCLE if is_slow else constants.AMD_LANES_PER_COMPUTE_UNIT
    return overlap(arithmetic, narrow_unit_seconds(cost.conversions, lanes, hardware), constants.VECTOR_OVERLAP)


def _vector_work(cost: Cost, hardware: Hardware, arithmetic: float, cached_bytes: float) -> Busy:
    """A thread computes the address of an element, loads it, and computes with it. Computing addresses and combining
    the results of a row's threads count as memory traffic, because the same remedy helps: fusion, not more FLOP/s."""
    work = cost.work if isinstance(cost.work, VectorWork) else VectorWork()
    further = [_further_kernel(rows, cost, hardware) for rows in work.rereads if rows.is_kernel]
    work = work._replace(rereads=tuple(rows for rows in work.rereads if not rows.is_kernel))
    cached_share = cached_bytes / cost.bytes if cached_bytes else 0.0
    steps = steps_of(work.grid, cached_share, hardware)
    idle = max(_idle_stretch(work, hardware), 1.0 / steps.busy)
    combining = _row_seconds(work, hardware) * idle
    share = constants.ISSUED_SHARE_OF_REDUCTIONS if work.reduces else 1.0
    compute = max(arithmetic, issuing_seconds(work.instructions, hardware, share)) * idle + combining
    traffic = memory_seconds(cost, work, hardware, cached_bytes)
    traffic = overlap(traffic, scattered_seconds(work.scatter, hardware) / steps.busy_sms, constants.VECTOR_OVERLAP)
    in_turns = work.grid is not None and work.grid.in_turns
    traffic = overlap(traffic, steps.seconds, constants.TURNS_OVERLAP if in_turns else constants.VECTOR_OVERLAP)
    indexing = integer_seconds(work.index_operations + steps.operations, hardware) * idle
    draws_by_row = work.random_numbers and work.rereads
    memory = overlap(indexing, traffic, constants.DRAWING_OVERLAP if draws_by_row else constants.TURNS_OVERLAP)
    first, others = _latencies(work, hardware, cached_share)
    together = overlap(compute, memory, constants.VECTOR_OVERLAP)
    starts = (work.kernels - 1) * (hardware.kernel_floor_seconds + access_seconds(0.0, hardware))
    seconds = first + overlap(together, others, constants.VECTOR_OVERLAP) + steps.last_seconds
    sms = _sms_of_threads(cost, work, hardware)
    own = Busy(compute - combining, max(memory, combining) + steps.last_seconds, seconds, starts, sms)
    return functools.reduce(Busy.then, further, own)


def _sms_of_threads(cost: Cost, work: VectorWork, hardware: Hardware) -> float:
    """The share of the device's thread slots that the kernel fills; a copy over the link has its own engine."""
    if isinstance(cost.work, HostCopy):
        return 0.0
    grid = work.grid
    threads = grid.blocks * grid.threads if grid else cost.bytes / (constants.THREAD_BYTES * work.kernels)
    rows = (rows.rows * threads_of(rows, hardware) for rows in work.rereads)
    return min(1.0, max((threads, *rows)) / (resident_threads(hardware) * hardware.sm_count))


def _further_kernel(rows: Reread, cost: Cost, hardware: Hardware) -> Busy:
    """The time, start included, of a kernel that an op launches next to the one that reads and writes everything."""
    work, missed = VectorWork((rows,)), miss_share(rows, hardware)
    combining = _row_seconds(work, hardware) * _idle_stretch(work, hardware)
    bandwidth = hardware.sustained_bandwidth_bytes_per_s * share_of_stream(cost, hardware)
    traffic = rows.nbytes * (missed / bandwidth + (1 - missed) / cache_bytes_per_s(hardware))
    first, others = _latencies(work, hardware, 1 - missed)
    together = overlap(combining, traffic, constants.VECTOR_OVERLAP)
    seconds = hardware.kernel_floor_seconds + first + overlap(together, others, constants.VECTOR_OVERLAP)
    return Busy(0.0, max(combining, traffic), seconds, sms=_sms_of_threads(cost, work, hardware))


def _latencies(work: VectorWork, hardware: Hardware, cached_share: float) -> tuple[float, float]:
    """Two times: how long the first rows (or elements) wait for memory and for each other's results, which no other
    work hides; and how long all later rows would, if each waited as long."""
    access = access_seconds(cached_share, hardware)
    first, others = access, 0.0
    for rows in _rereads_on(hardware, work):
        if rows.block:
            others = max(others, _blocks_seconds(rows, rows.block, hardware))
            continue
        step = cycles_to_seconds(arithmetic_latency_cycles(hardware), hardware)
        accesses = rows.accesses * rows.threads / threads_of(rows, hardware)
        of_row = accesses * access + (rows.operations + rows.element_operations) * step
        later = max(0.0, rows.rows / rows_in_flight(rows, hardware) - 1.0)
        own = 0.0
        if hardware.vendor == "nvidia":  # an SM that holds one row cannot go on with another meanwhile
            own = cycles_to_seconds(rows.threads * rows.element_operations / issued_lanes(hardware), hardware)
        first, others = max(first, of_row), max(others, later * (of_row + own))
    return first, others


def _rereads_on(hardware: Hardware, work: VectorWork) -> tuple[Reread, ...]:
    """What the device reads again. How long a block stays on an SM is known only for NVIDIA."""
    if hardware.vendor == "nvidia":
        return work.rereads
    return tuple(row._replace(block=None, element_operations=0) if row.block else row for row in work.rereads)


def _blocks_seconds(rows: Reread, block: BlockTime, hardware: Hardware) -> float:
    """The larger of two times: that of one block alone, which reads its weights from memory, and that of all blocks one
    after another on full SMs, with the work of their threads on elements. Cycles were counted on one device; blocks
    stay longer on devices whose instructions wait longer for each other."""
    waiting = arithmetic_latency_cycles(hardware) / constants.ARITHMETIC_LATENCY_CYCLES
    alone = block.alone * waiting + rows.accesses * constants.MEMORY_LATENCY_CYCLES
    waves = rows.rows / rows_in_flight(rows, hardware)
    elements = rows.rows * rows.threads * rows.element_operations / (issued_lanes(hardware) * hardware.sm_count)
    cycles = overlap(alone, waves * block.among_others * waiting + elements, constants.VECTOR_OVERLAP)
    return cycles_to_seconds(cycles, hardware)


def _idle_stretch(work: VectorWork, hardware: Hardware) -> float:
    """How many times longer arithmetic takes because there are fewer rows than SMs."""
    busy = [min(1.0, rows.rows / hardware.sm_count) for rows in work.rereads if rows.accesses and rows.rows]
    return 1.0 / min(busy, default=1.0)


def _row_seconds(work: VectorWork, hardware: Hardware) -> float:
    """Seconds in which the threads of each row combine their partial results and do other work than arithmetic on its
    elements. That takes no lanes for fp32 where an SM has fewer of these than it issues to."""
    untimed = [row for row in _rereads_on(hardware, work) if not row.block]
    threads = [row.rows * threads_of(row, hardware) for row in untimed]
    combining = sum(count * row.operations for count, row in zip(threads, untimed, strict=True))
    elements = sum(count * row.element_operations for count, row in zip(threads, untimed, strict=True))
    if not combining + elements:
        return 0.0
    rate = hardware.vector_peak("fp32").flop_per_s * over_boost(hardware) * constants.PLAIN_ARITHMETIC_SHARE
    lanes_per_s = hardware.sm_count * clock_hz(hardware)
    if hardware.vendor == "amd":
        rate = min(rate, constants.AMD_LANES_PER_COMPUTE_UNIT * lanes_per_s)
    issued = max(rate, issued_lanes(hardware) * lanes_per_s) if hardware.vendor == "nvidia" else rate
    return combining / rate + elements / issued


def _vector_class(cost: Cost) -> str:
    if isinstance(cost.work, HostCopy):
        return "host copy"
    if cost.access in ("strided", "window", "fused"):
        return {"strided": "strided copy", "window": "pooling", "fused": "fused"}[cost.access]
    return cost.op_class
