"""Seconds that a kernel's memory traffic takes."""

from __future__ import annotations

from math import ceil

from flopmeter.costs.index_arithmetic import ELEMENT_THREADS
from flopmeter.costs.scatter import LINE_BYTES, SECTOR_BYTES
from flopmeter.device.hardware import Hardware
from flopmeter.device.sm_limits import SM_REGISTERS, SmLimits, sm_limits
from flopmeter.records import (
    INDEXING,
    NORMALIZATION,
    REDUCTION,
    SORTING,
    Access,
    Atomics,
    Cost,
    FormulaWork,
    HostCopy,
    Registers,
    Reread,
    Scatter,
    VectorWork,
)
from flopmeter.records.dtypes import DTYPES
from flopmeter.timing import constants
from flopmeter.timing.matmul import overlap
from flopmeter.timing.sectors import unused_bytes

_ACCESS_OF_CLASS: dict[str, Access] = {
    NORMALIZATION: "normalize",
    REDUCTION: "reduce",
    INDEXING: "gather",
    SORTING: "sort",
}
_BY_VECTOR_LOADS: tuple[Access, ...] = ("stream", "normalize", "chunks")
_NARROW = {name for name, dtype in DTYPES.items() if dtype.units and dtype.item_bytes <= 2}


def memory_seconds(cost: Cost, work: VectorWork, hardware: Hardware, cached_bytes: float = 0.0) -> float:
    """The time of first reads and all writes, at the bandwidth of the kernel's access pattern, and of second reads that
    miss the L2 cache. `cached_bytes`: those of the reads and writes that earlier kernels have left in that cache."""
    if isinstance(cost.work, HostCopy):
        return link_seconds(cost.work, hardware)
    bandwidth = hardware.sustained_bandwidth_bytes_per_s * share_of_stream(cost, hardware)
    missed = sum(reread.nbytes * miss_share(reread, hardware) for reread in work.rereads)
    missed += unused_bytes(cost, hardware) * (1.0 - cached_bytes / max(cost.bytes, 1))
    return (cost.bytes - cached_bytes + missed) / bandwidth + cached_bytes / cache_bytes_per_s(hardware)


def scattered_seconds(scatter: Scatter, hardware: Hardware) -> float:
    """The time in which the caches serve threads whose neighbours' elements lie elsewhere: an SM's first level looks up
    one line after another, and the L2 cache delivers a sector for each that the first has not kept."""
    if hardware.vendor == "amd":
        return scatter.requests * constants.AMD_LINE_BYTES / cache_bytes_per_s(hardware)
    blocks = resident_threads(hardware) // ELEMENT_THREADS
    holds = 1024 * constants.L1_KB.get(hardware.compute_capability or (0, 0), constants.OTHER_L1_KB)
    kept = min(1.0, holds / max(1, blocks * scatter.block_lines * LINE_BYTES))
    requests = kept * scatter.requests + (1.0 - kept) * scatter.lookups
    looking = cycles_to_seconds(scatter.lookups * constants.LOOKUP_CYCLES / hardware.sm_count, hardware)
    return overlap(looking, requests * SECTOR_BYTES / cache_bytes_per_s(hardware), constants.VECTOR_OVERLAP)


def atomic_seconds(atomics: Atomics, hardware: Hardware) -> float:
    """The time in which the L2 cache reads and writes the sectors that threads add to, and in which SMs take back what
    was there before."""
    adding = atomics.rounds * 2 * SECTOR_BYTES / cache_bytes_per_s(hardware)
    returning = atomics.returned * constants.RETURN_CYCLES / hardware.sm_count
    return adding + cycles_to_seconds(returning, hardware)


def link_seconds(copy: HostCopy, hardware: Hardware) -> float:
    """The time of a copy between host and device: the link is slower than either memory."""
    rate = hardware.host_link_bytes_per_s or constants.DEFAULT_LINK_BYTES_PER_S
    return copy.link_bytes / (rate * constants.LINK_SHARE)


def share_of_stream(cost: Cost, hardware: Hardware) -> float:
    """The share of the streaming bandwidth that the kernel's access pattern reaches."""
    access = cost.access or _ACCESS_OF_CLASS.get(cost.op_class, "stream")
    share, is_gddr = constants.ACCESS_SHARE[access], hardware.memory_type.startswith("GDDR")
    if is_gddr and access == "statistics":
        return constants.STATISTICS_SHARE_GDDR
    is_slowed = is_gddr and access in _BY_VECTOR_LOADS and _is_narrow(cost)
    return share * constants.NARROW_SHARE if is_slowed else share


def _is_narrow(cost: Cost) -> bool:
    return cost.dtype in _NARROW and isinstance(cost.work, VectorWork | HostCopy | FormulaWork)


def access_seconds(cached_share: float, hardware: Hardware) -> float:
    """From the request of a thread until its data is there, if nothing else asks for memory. `cached_share`: the share
    of the kernel's bytes that the L2 cache holds."""
    cycles = (1.0 - cached_share) * constants.MEMORY_LATENCY_CYCLES + cached_share * constants.CACHE_LATENCY_CYCLES
    return cycles_to_seconds(cycles, hardware)


def cache_bytes_per_s(hardware: Hardware) -> float:
    """What kernels reach on the L2 cache; no less than on memory."""
    is_amd = hardware.vendor == "amd"
    per_cycle = constants.AMD_CACHE_BYTES_PER_CYCLE if is_amd else constants.CACHE_BYTES_PER_CYCLE
    of_all_sms = per_cycle * hardware.sm_count * clock_hz(hardware)
    return max(hardware.bandwidth_bytes_per_s, of_all_sms)


def rows_in_flight(reread: Reread, hardware: Hardware) -> int:
    """How many rows the device works on at a time, at full occupancy."""
    resident, threads = resident_threads(hardware), threads_of(reread, hardware)
    if reread.registers and hardware.vendor == "nvidia":
        resident = min(resident, _threads_by_registers(reread.registers, hardware))
    rows_of_block = max(1, constants.LEAST_BLOCK_THREADS // threads)
    return hardware.sm_count * min(max(1, resident // threads), constants.MOST_BLOCKS_PER_SM * rows_of_block)


def _threads_by_registers(of_thread: Registers, hardware: Hardware) -> int:
    """How many threads an SM has registers for, if the library's newest kernel that the device can run is taken."""
    major, minor = hardware.compute_capability or (0, 0)
    (_, registers), *_ = of_thread
    for capability, compiled in of_thread:
        registers = compiled if capability <= 10 * major + minor else registers
    return threads_by_registers(registers)


def threads_by_registers(registers: int) -> int:
    """How many threads with that many registers each fit on an SM of NVIDIA's."""
    granted = ceil(registers / constants.REGISTERS_AT_A_TIME) * constants.REGISTERS_AT_A_TIME
    return SM_REGISTERS // granted


def resident_threads(hardware: Hardware) -> int:
    """How many threads an SM holds; an SM of another vendor counts as the largest of NVIDIA's."""
    capability = hardware.compute_capability
    return sm_limits(capability).threads if capability else SmLimits().threads


def threads_of(reread: Reread, hardware: Hardware) -> int:
    """How many threads work on one row."""
    return reread.amd_threads if hardware.vendor == "amd" and reread.amd_threads else reread.threads


def arithmetic_latency_cycles(hardware: Hardware) -> int:
    """From an arithmetic instruction to one that needs its result."""
    is_pascal = (hardware.compute_capability or (0, 0))[0] == 6
    return constants.PASCAL_LATENCY_CYCLES if is_pascal else constants.ARITHMETIC_LATENCY_CYCLES


def issued_lanes(hardware: Hardware) -> int:
    """Threads of whose instructions an SM or compute unit starts one in a cycle."""
    if hardware.vendor == "amd":
        return constants.AMD_LANES_PER_COMPUTE_UNIT
    capability = hardware.compute_capability or (0, 0)
    return constants.ISSUED_LANES_BY_CAPABILITY.get(capability, constants.ISSUED_LANES_PER_SM)


def clock_hz(hardware: Hardware) -> float:
    """The clock of kernels that power does not hold back."""
    mhz = hardware.boost_clock_mhz
    return mhz * 1e6 * over_boost(hardware) if mhz else constants.DEFAULT_CLOCK_HZ


def over_boost(hardware: Hardware) -> float:
    """That clock over the boost clock. Where matrix units exceed their peak at the boost clock (GeForce: torch.matmul
    reaches 1.08 of it on an RTX 3090), the clock does so at least as much."""
    achieved = hardware.achieved
    if achieved is None:
        return 1.0
    return max(1.0, achieved.matrix or achieved.matrix_by_dtype.get("fp16", 1.0))


def cycles_to_seconds(cycles: float, hardware: Hardware) -> float:
    return cycles / clock_hz(hardware)


def sm_seconds(cycles: float, hardware: Hardware) -> float:
    """Clock cycles of an SM; one with more lanes for fp32 than those on which they were counted (a device with twice
    the FLOP/s, as `compare` tries it) takes as many fewer."""
    lanes_per_s = hardware.vector_peak("fp32").flop_per_s / 2 / hardware.sm_count
    return min(cycles_to_seconds(cycles, hardware), cycles * constants.LANES_OF_SM / lanes_per_s)


def miss_share(reread: Reread, hardware: Hardware) -> float:
    """The share of second reads that miss the L2 cache: it grows with the part that the rows in flight fill. Of a cache
    in two parts, which keep what the other part holds once more, half is as good as all."""
    cache = hardware.l2_cache_bytes
    if not cache:
        return 1.0
    in_flight = min(reread.rows, rows_in_flight(reread, hardware)) * reread.row_bytes
    if reread.is_kernel:
        in_flight = reread.nbytes
    if hardware.compute_capability in constants.CACHES_IN_TWO_PARTS:
        return float(in_flight > constants.HELD_SHARE_OF_TWO_PARTS * cache)
    return min(1.0, max(0.0, in_flight / cache - constants.CACHE_SHARE_WITHOUT_MISSES))


def integer_seconds(operations: int, hardware: Hardware) -> float:
    """Time of integer instructions, such as those that compute addresses."""
    return narrow_unit_seconds(operations, constants.INTEGER_LANES_PER_SM, hardware)


def has_few_lanes(hardware: Hardware) -> bool:
    """Whether an SM starts 128 threads' instructions in a cycle and has 64 lanes for fp32, each of which does a
    multiply-add in a cycle, and not 128 as newer parts."""
    started = issued_lanes(hardware) * hardware.sm_count * clock_hz(hardware) / over_boost(hardware)
    return hardware.vendor == "nvidia" and hardware.vector_peak("fp32").flop_per_s < 2 * 0.75 * started


def issuing_seconds(instructions: int, hardware: Hardware, share: float = 1.0) -> float:
    """Time in which the SMs of a GPU start that many instructions of single threads; not known elsewhere, so 0.
    `share`: of what they could start."""
    if not instructions or hardware.vendor not in ("nvidia", "amd"):
        return 0.0
    return cycles_to_seconds(instructions / (share * issued_lanes(hardware) * hardware.sm_count), hardware)


def narrow_unit_seconds(operations: int, lanes_per_sm: int, hardware: Hardware) -> float:
    """Time of operations on a unit with that many lanes in each SM."""
    return sm_seconds(operations / (lanes_per_sm * hardware.sm_count), hardware) if operations else 0.0
