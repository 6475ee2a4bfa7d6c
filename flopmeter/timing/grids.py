"""How long the threads of a kernel walk over their inputs, if they do so step by step."""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

from flopmeter.costs.scatter import WARP
from flopmeter.device.hardware import Hardware
from flopmeter.records import GridLoop, ThreadGrid
from flopmeter.timing import constants
from flopmeter.timing.bandwidth import cycles_to_seconds, issued_lanes, resident_threads, threads_by_registers


class GridTime(NamedTuple):
    """What a grid of threads adds to a kernel's traffic and arithmetic."""

    seconds: float = 0.0  # of all steps of all waves of blocks, or of starting these
    operations: int = 0  # integer instructions of all threads
    busy: float = 1.0  # the share of the device's lanes that have a thread at any time
    busy_sms: float = 1.0  # the share of its SMs that have a block
    last_seconds: float = 0.0  # of the blocks that add up the parts of others, after these


def steps_of(grid: ThreadGrid | None, cached_share: float, hardware: Hardware) -> GridTime:
    """What a grid's steps add. `cached_share`: the share of the kernel's bytes that the L2 cache holds."""
    if grid is None or not grid.blocks * grid.threads or not _waits(grid, hardware):
        return GridTime()
    shared = blocks_of_result(grid, hardware)
    blocks, steps = grid.blocks * shared, ceil(ceil(grid.steps / shared) / grid.at_a_time)
    at_a_time = _blocks_of_sm(grid, hardware) * hardware.sm_count
    of_memory, of_cache = _step_cycles(grid)
    access = (1.0 - cached_share) * of_memory + cached_share * of_cache
    started, rounds = blocks_of_loop(grid.loop, hardware) if grid.loop else (blocks, 1)
    waves = max(rounds, blocks / at_a_time)
    if grid.in_turns:
        waves = ceil(waves)
    joining = 0.0
    if shared > 1:
        waves = ceil(waves)
        joining = waves * constants.LAST_BLOCK_CYCLES + ceil(shared / grid.joiners) * constants.JOINING_STEP_CYCLES
    filling = constants.LANES_OF_SM * constants.ARITHMETIC_LATENCY_CYCLES
    of_schedulers = ceil(grid.threads / WARP) * WARP / issued_lanes(hardware)  # a warp stays on one of them
    share_of_sm = min(1.0, of_schedulers, grid.threads * grid.chains / filling)
    walking = waves * steps * (access + grid.cycles)
    if grid.by_element:
        walking -= access
    return GridTime(
        grid.launches * cycles_to_seconds(max(started * constants.BLOCK_START_CYCLES, walking), hardware),
        blocks * grid.threads * grid.operations,
        min(1.0, blocks * share_of_sm / hardware.sm_count),
        min(1.0, blocks / hardware.sm_count),
        cycles_to_seconds(joining, hardware),
    )


def _blocks_of_sm(grid: ThreadGrid, hardware: Hardware) -> int:
    """As many as its threads and, on NVIDIA's, its registers allow."""
    most = min(resident_threads(hardware) // grid.threads, constants.MOST_BLOCKS_PER_SM)
    if not grid.registers or hardware.vendor != "nvidia":
        return most
    return min(most, threads_by_registers(grid.registers) // grid.threads)


def _step_cycles(grid: ThreadGrid) -> tuple[float, float]:
    """Cycles of a step that reads from memory, and from the cache. Threads that take a few elements in turn share pages
    with others."""
    if grid.by_element and not grid.loop:
        return constants.MEMORY_LATENCY_CYCLES, constants.CACHE_LATENCY_CYCLES
    return constants.STEP_CYCLES, constants.CACHED_STEP_CYCLES


def _waits(grid: ThreadGrid, hardware: Hardware) -> bool:
    """Whether threads wait for one access before they ask for the next. On AMD torch loads all elements of a thread
    before it stores one (elementwise_kernel_manual_unroll in CUDALoops.cuh)."""
    return hardware.vendor == "nvidia" or (hardware.vendor == "amd" and not grid.by_element)


def blocks_of_loop(loop: GridLoop, hardware: Hardware) -> tuple[int, int]:
    """How many blocks start, those without work included, and how many rounds one takes."""
    in_row = max(1, min(loop.longest, loop.blocks_per_sm * hardware.sm_count))
    return loop.rows * in_row, ceil(loop.longest / in_row)


def blocks_of_result(grid: ThreadGrid, hardware: Hardware) -> int:
    """How many blocks share the inputs of a result (`setReduceConfig` in Reduce.cuh): as many as the device holds, but
    each thread keeps 16 inputs, and at most 256."""
    holds = hardware.sm_count * (resident_threads(hardware) // grid.threads)
    if not grid.joiners or grid.blocks > holds:
        return 1
    most, least = (
        ceil(grid.steps / values) for values in (constants.LEAST_SHARED_VALUES, constants.MOST_SHARED_VALUES)
    )
    blocks = max(min(ceil(holds / grid.blocks), most), least)
    return min(blocks, hardware.sm_count) if hardware.vendor == "amd" else blocks
