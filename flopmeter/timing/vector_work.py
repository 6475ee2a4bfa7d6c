"""Kernels without products: arithmetic, addresses, rows that are read again, and memory traffic."""

from __future__ import annotations

import functools
from math import ceil

from flopmeter.device.hardware import Hardware
from flopmeter.records import ELEMENTWISE, BlockTime, Cost, HostCopy, Reread, VectorWork
from flopmeter.timing import constants
from flopmeter.timing.bandwidth import (
    access_seconds,
    arithmetic_latency_cycles,
    atomic_seconds,
    cache_bytes_per_s,
    clock_hz,
    cycles_to_seconds,
    has_few_lanes,
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
from flopmeter.timing.grids import steps_of
from flopmeter.timing.matmul import Busy, overlap


def arithmetic_seconds(cost: Cost, hardware: Hardware) -> float:
    """Seconds of all work but matmuls and what comes between those of attention, on the vector units; another unit
    converts at the same time."""
    flops, started = cost.other_flops - cost.flops_on_scores, 0.0
    if cost.op_class == ELEMENTWISE and cost.access != "fused":
        if isinstance(cost.work, VectorWork) and cost.work.instructions:
            filled = constants.ISSUED_SHARE_OF_FUNCTIONS if has_few_lanes(hardware) else 1.0
            started = issuing_seconds(cost.work.instructions, hardware, filled)
        if not started:
            flops += (constants.FUNCTION_OPERATIONS - 1) * cost.transcendentals
    arithmetic = max(started, vector_seconds(flops, cost, hardware))
    is_slow = hardware.vendor == "nvidia"
    lanes = constants.CONVERSIONS_PER_CYCLE if is_slow else constants.AMD_LANES_PER_COMPUTE_UNIT
    return overlap(arithmetic, narrow_unit_seconds(cost.conversions, lanes, hardware), constants.VECTOR_OVERLAP)


def vector_seconds(flops: float, cost: Cost, hardware: Hardware) -> float:
    """Seconds of so many FLOPs of a kernel on the vector units."""
    if not flops:
        return 0.0
    share = 1.0 if cost.fused_multiply_add else constants.PLAIN_ARITHMETIC_SHARE
    return flops / (hardware.vector_peak(cost.dtype).sustained_flop_per_s * share)


def price_vector_work(cost: Cost, hardware: Hardware, arithmetic: float, cached_bytes: float) -> Busy:
    """How long a kernel without products keeps the device busy. `arithmetic`: seconds of its FLOPs.

    A thread computes the address of an element, loads it, and computes with it. Computing addresses and combining the
    results of a row's threads count as memory traffic, because the same remedy helps: fusion, not more FLOP/s.
    """
    work = cost.work if isinstance(cost.work, VectorWork) else VectorWork()
    further = [_further_kernel(rows, cost, hardware) for rows in work.rereads if rows.is_kernel]
    work = work._replace(rereads=tuple(rows for rows in work.rereads if not rows.is_kernel))
    cached_share = cached_bytes / cost.bytes if cached_bytes else 0.0
    steps = steps_of(work.grid, cached_share, hardware)
    idle = max(_idle_stretch(work, hardware), 1.0 / steps.busy)
    combining = _row_seconds(work, hardware) * idle
    share = constants.ISSUED_SHARE_OF_REDUCTIONS if work.reduces else 1.0  # of a compiled kernel
    compute = max(arithmetic, issuing_seconds(work.instructions, hardware, share)) * idle + combining
    traffic = memory_seconds(cost, work, hardware, cached_bytes)
    traffic = overlap(traffic, scattered_seconds(work.scatter, hardware) / steps.busy_sms, constants.VECTOR_OVERLAP)
    traffic = overlap(traffic, atomic_seconds(work.atomics, hardware), constants.VECTOR_OVERLAP)
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
    bandwidth = hardware.sustained_bandwidth_bytes_per_s * share_of_stream(cost, hardware)
    traffic = rows.nbytes * (missed / bandwidth + (1 - missed) / cache_bytes_per_s(hardware))
    if rows.in_turns:
        computing = _computing_seconds(rows, hardware)
        waves = ceil(rows.rows / rows_in_flight(rows, hardware))
        waiting = waves * rows.accesses * access_seconds(1 - missed, hardware)
        seconds = hardware.kernel_floor_seconds + waiting + computing + traffic
        return Busy(0.0, computing + traffic, seconds, sms=_sms_of_threads(cost, work, hardware))
    combining = _row_seconds(work, hardware) * _idle_stretch(work, hardware)
    first, others = _latencies(work, hardware, 1 - missed)
    together = overlap(combining, traffic, constants.VECTOR_OVERLAP)
    seconds = hardware.kernel_floor_seconds + first + overlap(together, others, constants.VECTOR_OVERLAP)
    return Busy(0.0, max(combining, traffic), seconds, sms=_sms_of_threads(cost, work, hardware))


def _computing_seconds(rows: Reread, hardware: Hardware) -> float:
    """The time in which the SM with most blocks starts the instructions of their threads."""
    blocks = ceil(rows.rows / hardware.sm_count)
    cycles = blocks * threads_of(rows, hardware) * rows.element_operations / issued_lanes(hardware)
    return cycles_to_seconds(cycles, hardware)


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


def vector_class(cost: Cost) -> str:
    if isinstance(cost.work, HostCopy):
        return "host copy"
    if cost.access in ("strided", "window", "fused"):
        return {"strided": "strided copy", "window": "pooling", "fused": "fused"}[cost.access]
    return cost.op_class
