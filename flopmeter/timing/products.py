"""Kernels of products: matmuls, convolutions, attention and recurrent networks, and which kernels run them."""

from __future__ import annotations

import functools
from collections.abc import Iterable

from flopmeter.costs.contractions.rnn import runs_as_one_kernel
from flopmeter.device.hardware import Hardware, Peak
from flopmeter.records import (
    AttentionWork,
    ConvolutionWork,
    Cost,
    FormulaWork,
    GroupedMatmulWork,
    Matmul,
    MatmulWork,
    MatrixWork,
    RecurrentWork,
    UnpackingMatmulWork,
)
from flopmeter.records.dtypes import item_bytes_of
from flopmeter.timing import constants
from flopmeter.timing.attention import attention
from flopmeter.timing.bandwidth import access_seconds, clock_hz, share_of_stream
from flopmeter.timing.convolution import (
    converts_layout,
    convolution,
    depthwise,
    image_alignment_bytes,
    is_depthwise,
    is_hopper,
)
from flopmeter.timing.gemm_kernels import (
    GemmKernels,
    NamedKernel,
    ampere_kernel_share,
    as_ran,
    for_unaligned_rows,
    gemm_kernels,
    tiled_read_share,
)
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


def price_product(
    cost: Cost, work: MatrixWork, hardware: Hardware, peak: Peak, cached_bytes: float, ran: NamedKernel
) -> tuple[Busy, str]:
    """The time of a kernel's products, and the kind of kernel that runs them."""
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
    match work:
        case ConvolutionWork():
            return _convolution(cost, work, moved, rates, hardware, peak)
        case UnpackingMatmulWork():
            return _unpacking(work, moved, rates, peak), "small product"
        case GroupedMatmulWork():
            return side_by_side(work.matmuls, moved, rates), "grouped product"
        case RecurrentWork():
            slow = _for_rows(work.alignment_bytes, rates, hardware, peak)
            return _recurrent(work, moved, slow, hardware), "recurrent product"
        case MatmulWork():
            return _matmuls(cost, work, moved, rates, hardware, peak)


def _unpacking(work: UnpackingMatmulWork, moved: MatmulBytes, rates: Rates, peak: Peak) -> Busy:
    if peak.unit != "matrix":
        return price_matmul(work.matmul, moved, rates)
    return unpacking(work.matmul, constants.UNPACKING[work.bits], moved, rates)


def _matmuls(
    cost: Cost, work: MatmulWork, moved: MatmulBytes, rates: Rates, hardware: Hardware, peak: Peak
) -> tuple[Busy, str]:
    is_tf32 = peak.unit == "matrix" and moved.item_bytes == constants.TF32_BYTES
    aligned = rates
    if work.across_depth and is_tf32 and is_hopper(hardware):
        # `wgmma` only transposes operands of 16 bits (PTX ISA, "Strides" of its matrices in shared memory).
        aligned = rates.slowed(ampere_kernel_share(hardware))
    slow = _for_rows(work.alignment_bytes, rates, hardware, peak)
    if slow is rates:
        return _sum_of_matmuls(work, moved, aligned)
    as_they_are, kind = _sum_of_matmuls(work, moved, slow)
    return (fastest((as_they_are, _padded(cost, work, moved, aligned))) if work.may_pad else as_they_are), kind


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
        busy = depthwise(shape, implicit, moved, hardware, rates.bytes_per_s, cost.dtype)
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
    if runs_as_one_kernel(recurrence, hardware):
        together = _one_after_another(work.matmuls, moved.share(len(work.matmuls)), rates)
        compute = recurrence.steps * step.work_seconds
        least = constants.KEPT_STEP_SECONDS[recurrence.keeps_weights][recurrence.is_backward]
        waits = recurrence.layer_steps * least
        return together._replace(
            compute_seconds=max(together.compute_seconds, compute),
            work_seconds=max(together.work_seconds, compute, waits),
        )
    at_once = list(work.matmuls)
    for own in recurrence.matmuls:  # of which the products for all tokens hold one each
        at_once.remove(next(shape for shape in at_once if shape.n * shape.k == own.n * own.k))
    together = _one_after_another(at_once, moved.share(len(at_once)), rates)
    launches = 2 * hardware.kernel_floor_seconds + access_seconds(1.0, hardware)
    starts = recurrence.layer_steps * launches
    return Busy(
        together.compute_seconds + recurrence.steps * step.compute_seconds,
        together.memory_seconds,
        together.work_seconds + recurrence.steps * step.seconds + starts,
        together.latency_seconds,
        max(step.sms, together.sms),
    )
