"""Families of GEMM kernels: what holds for one way of writing them, on any device that runs them.

A kernel has three parts. Its first loads and last stores wait for memory, while nothing else is busy (`latency`). Its
main loop multiplies tile by tile, wave after wave. Its epilogue writes a tile; the next tile of the SM waits for that,
or not. The rates of a device, its clock and its memory stand in its profile.

Set on [aiconfigurator]: 12 thousand bf16 GEMMs from 2 µs to 10 ms on A100, H100, H200 and L40S
(github.com/ai-dynamo/aiconfigurator@095f58a), on half of the shapes. The error on the other half is the same; with any
GPU left out, that GPU's is 8 to 11 %. Those of vector units are set on [NeuSight].
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from flopmeter.device.hardware import Hardware, Peak
from flopmeter.records import Matmul
from flopmeter.timing import constants


class GemmKernels(NamedTuple):
    """One family. Cycles are those of the boost clock, which a kernel keeps while it waits."""

    tiles: tuple[tuple[int, int], ...]  # rows x columns of the output that one thread block computes
    tile_exponent: float  # a tile runs at (its elements / those of the largest)^exponent of the largest one's rate
    overlap_exponent: float  # p of (compute^p + memory^p)^(1/p): 1 is no overlap, infinity perfect overlap
    reaches_peak: bool  # main loops run at the unit's peak where power allows; else never above the sustained rate
    depth_step_bytes: int  # bytes of a row of an operand that the main loop takes at a time
    latency_cycles: float  # once a kernel: its arguments, the first loads, the last stores
    wave_cycles: float  # once a wave: tiles start, and fill their pipeline of loads
    memory_share: float  # the loads of operands reach this share of the bandwidth of a copy
    stores_each_tile: bool  # an SM writes a tile before it begins the next one; else only the last write is not hidden
    least_batched_side: int = 64  # of the tiles of batched and grouped matmuls, which fits [NeuSight] best
    only_tiles: bool = True  # False: there are kernels without tiles too, which matrix units lack
    operand_bytes_per_cycle: float = constants.OPERAND_BYTES_PER_CYCLE  # that an SM loads at most
    loads_inside: bool = False  # only what is inside of the matrix; else whole tiles, with zeros
    cluster: int = 0  # thread blocks that share what they load; 0: what a tile's loads cost it is in the exponent
    shared_memory_passes: int = 0  # of what is loaded, before instructions read it there; 0: shared memory is no bound
    narrowest: int | None = None  # side that instructions multiply of a tile that is mostly outside of the matrix
    splits_batches: bool = False  # the depth of batched products may be split too
    ran: tuple[int, int] | None = None  # the tile of the kernel that ran, if that is known


_POWERS_OF_TWO = ((128, 256), (256, 128), (128, 128), (128, 64), (64, 128), (64, 64))
# Hopper's and Blackwell's multiply 64 or 128 rows with any multiple of 16 columns up to 256 (PTX ISA, `wgmma`, where 8
# will do, and `tcgen05.mma`), and cuBLAS has kernels for many (`nvjet_hsh_192x192_64x3`, `nvjet_hsh_256x128_64x4`;
# NVIDIA/Fuser#3137, #3279). The sums of the largest fill the registers of two warpgroups.
_TILES_BY_16 = tuple(
    sorted(
        {
            tile
            for rows in range(64, 257, 64)
            for columns in range(64, 257, 16)
            for tile in ((rows, columns), (columns, rows))
            if rows * columns <= 128 * 256
        }
    )
)

# Of vector units. Set on [NeuSight], where .2 to .3 for tiles and 1.5 to 3 for the overlap are equally good. Latency
# was not measured: rows of less than 100 µs there measure the host.
SIMT = GemmKernels(
    tiles=((128, 128), (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (32, 32), (64, 16), (16, 64)),
    tile_exponent=0.2,
    overlap_exponent=2.0,
    reaches_peak=False,
    depth_step_bytes=4,
    latency_cycles=0.0,
    wave_cycles=0.0,
    memory_share=1.0,
    stores_each_tile=False,
    only_tiles=False,
)
# `mma` instructions from Ampere on: `cp.async` loads the next tiles during the multiply-adds.
MMA = GemmKernels(
    tiles=_POWERS_OF_TWO,
    tile_exponent=0.2,
    overlap_exponent=2.7,
    reaches_peak=True,
    depth_step_bytes=64,
    latency_cycles=2200.0,
    wave_cycles=0.0,
    memory_share=0.93,  # GEMMs of few rows: .82 of spec on an L40S, .85 on H100 and H200, copies .88 and .91
    stores_each_tile=True,
)
# Volta and Turing: a thread loads to registers, in turns with the multiply-adds, which wait for it.
SYNCHRONOUS_MMA = MMA._replace(overlap_exponent=2.0, reaches_peak=False)
# Hopper's `wgmma` and Blackwell's `tcgen05`: persistent thread blocks, of which some warps load, some multiply and some
# store (CUTLASS, "Efficient GEMM in CUDA", warp specialization). So a tile takes hardly longer than the longer of its
# multiply-adds and its loads, and the latter make small tiles slow: 64 x 64 has half the multiply-adds for a byte that
# 128 x 128 has.
# For fewer than 64 rows there are kernels with narrower instructions (`nvjet_tst_64x16_...`). On H100 and H200 their
# loads take as long as those of 64 x 64: with those of the narrow tile alone, rows under 10 µs come out 10 % too fast.
# Two blocks on Hopper load a part each and send it to both (`cluster`), and four on Blackwell, whose matrix
# instructions work on two SMs at once.
WARP_SPECIALIZED = MMA._replace(
    tiles=_TILES_BY_16, tile_exponent=0.0, depth_step_bytes=128, stores_each_tile=False, cluster=2, narrowest=16
)
ON_TWO_SMS = WARP_SPECIALIZED._replace(cluster=4, memory_share=1.0)  # copies were not measured on Blackwell
# cuDNN's on Hopper (`sm90_xmma_fprop_implicit_gemm_bf16..._tilesize256x64x32_...`) come in powers of two, without
# clusters, and with one block on an SM. `wgmma` reads operands from shared memory, where they arrive too. A tile of
# 64 x 64 passes 512 bytes of 16-bit operands in 4 cycles for multiply-adds of 2, one of 256 x 128 2,304 in 18 for 16.
WARP_SPECIALIZED_CONVOLUTIONS = WARP_SPECIALIZED._replace(
    tiles=tuple((m, n) for m in (64, 128, 256) for n in (64, 128, 256) if m * n <= 128 * 256),
    cluster=1,
    shared_memory_passes=1,
    splits_batches=True,
    narrowest=None,
)
# GeForce adds in fp32 at half rate: one thread block keeps the matrix units of an SM busy while another one stores.
HALF_RATE_MMA = MMA._replace(stores_each_tile=False)
# cuDNN's implicit GEMMs on matrix units: narrow tiles for few filters, and several thread blocks on an SM, of which one
# computes while another waits. Set on [timm].
CONVOLUTIONS = SIMT._replace(overlap_exponent=4.0, wave_cycles=500.0, only_tiles=True)

# Rows and columns that kernels for weights of few bits have in addition to the tiles above, since they are for few
# rows: an `mma` has 16 (Marlin, github.com/IST-DASLab/marlin; Triton's kernels for experts, BLOCK_SIZE_M from 16 on).
# Weights of 16 bits take longer to read than a tile of 64 rows to multiply.
_FEW_ROWS = ((16, 256), (16, 128), (32, 256), (32, 128))

# A tile reads a short piece of each of its columns of weights, which lie in as many pages of memory. GDDR has few banks
# to keep pages open (12 chips 384, the stacks of an A100 1,280), which is the likely reason. Up to 16 rows a library
# has kernels that read whole columns. Of the bandwidth of those tiles reach .93 on an L40S, on half of the shapes
# ([aiconfigurator], weights of 60 MB and more, 17 to 256 rows). An A40 (microsoft/vidur) would have .945 up to 64
# rows and .97 up to 128; the few calls of 16 rows there are no faster than those of 64.
GDDR_TILE_SHARE = 0.94
MOST_ROWS_READ_WHOLE = 16

_ASYNCHRONOUS_COPIES = (8, 0)  # the compute capability that brought `cp.async`
_WARP_SPECIALIZED_MAJORS = (9, 10)  # data-centre Hopper and Blackwell; 12.0 has Ampere's `mma`
_LEGACY_MMA_MAJORS = (9, 10, 12)  # whose full rate needs newer code than Ampere's


def legacy_mma_share(hardware: Hardware) -> float:
    """The share of the matrix peak that Ampere's `mma` instructions reach on the device."""
    capability, peak = hardware.compute_capability, hardware.matrix_tflop_per_s.get("fp16")
    if capability is None or capability[0] not in _LEGACY_MMA_MAJORS:
        return 1.0
    if capability[0] not in _WARP_SPECIALIZED_MAJORS or peak is None or hardware.boost_clock_mhz is None:
        return constants.LEGACY_MMA_SHARE
    flop_per_cycle = peak * 1e12 / (hardware.sm_count * hardware.boost_clock_mhz * 1e6)
    return min(1.0, constants.LEGACY_MMA_FLOP_PER_CYCLE / flop_per_cycle)


def ampere_kernel_share(hardware: Hardware) -> float:
    """The same for products and convolutions: `mma` is all that RTX Blackwell has, and reaches its peak there."""
    return legacy_mma_share(hardware) if _has_newer_instructions(hardware) else 1.0


def _has_newer_instructions(hardware: Hardware) -> bool:
    capability = hardware.compute_capability
    return capability is not None and capability[0] in _WARP_SPECIALIZED_MAJORS


class NamedKernel(NamedTuple):
    """What the name of a library's kernel tells: a trace knows which one ran, where a prediction takes the fastest."""

    has_ampere_instructions: bool = False  # cuBLAS takes those on Hopper too, for small products until its version 12.8
    tile: tuple[int, int] | None = None
    cluster: int = 1


UNNAMED = NamedKernel()


# Names of Ampere's instructions (`mma`, m16n8k16, and `wmma`) by CUTLASS and cuDNN, and of kernels with them by xmma.
_AMPERE_INSTRUCTIONS = ("16816", "161616", "sm80_xmma")
# A tile in the names of cuBLAS: nvjet with its depth, stages and cluster (`nvjet_hsh_192x192_64x3_1x2_h_bz_coopA_NNT`),
# xmma (`..._tilesize128x64x64_...`), CUTLASS with depth and stages (`..._128x64_64x6_tn_align8`) and older ones
# (`ampere_sgemm_128x64_tn`, `..._128x128_ldg8_f2f_stages_64x3_tn`); and of AMD's Tensile (`Cijk_..._MT256x128x64_...`).
_TILES_IN_NAMES = tuple(
    re.compile(pattern)
    for pattern in (
        r"nvjet_\w+?_(\d+)x(\d+)_\d+x\d+_(\d+)x(\d+)_",
        r"_tilesize(\d+)x(\d+)x\d+",
        r"_(\d+)x(\d+)_\d+x\d+_(?:[nt][nt]|nhwc)_align",
        r"gemm\w*?_(\d+)x(\d+)_(?:ldg|sliced|[nt][nt](?:_align|\b))",
        r"Cijk_\w+?_MT(\d+)x(\d+)x\d+",
    )
)


def named(kernel_name: str) -> NamedKernel:
    """What the name of a kernel tells about it."""
    is_ampere = any(shape in kernel_name for shape in _AMPERE_INSTRUCTIONS)
    for pattern in _TILES_IN_NAMES:
        if found := pattern.search(kernel_name):
            rows, columns, *cluster = map(int, found.groups())
            return NamedKernel(is_ampere, (rows, columns), prod(cluster))
    return NamedKernel(is_ampere)


def as_found_by(kernel: NamedKernel, hardware: Hardware) -> Hardware:
    """The device as that kernel sees it."""
    if not (kernel.has_ampere_instructions and _has_newer_instructions(hardware)):
        return hardware
    share = legacy_mma_share(hardware)
    rates = {dtype: share * rate for dtype, rate in hardware.matrix_tflop_per_s.items()}
    return hardware.replace(compute_capability=_ASYNCHRONOUS_COPIES, matrix_tflop_per_s=rates)


def as_ran(kernel: NamedKernel, library: GemmKernels) -> GemmKernels:
    """The family with the tile of that kernel alone, unless it is smaller than all for which the family's law was set
    (`wmma` with 32 x 32)."""
    if kernel.tile is None or prod(kernel.tile) < min(map(prod, library.tiles)):
        return library
    return library._replace(ran=kernel.tile, cluster=kernel.cluster if library.cluster else 0)


def gemm_kernels(
    hardware: Hardware, peak: Peak, *, convolves: bool = False, unpacks_weights: bool = False, groups: bool = False
) -> GemmKernels:
    """The family that the device's library has for this unit. One without a compute capability counts as Ampere.
    Kernels for groups or for weights of few bits are not cuBLAS's: their tiles are powers of two everywhere."""
    if (unpacks_weights or groups) and peak.unit == "matrix":
        family = gemm_kernels(hardware, peak)._replace(tiles=_POWERS_OF_TWO)
        if not unpacks_weights:
            return family
        return family._replace(tiles=_FEW_ROWS + family.tiles, least_batched_side=min(_FEW_ROWS)[0])
    if peak.unit != "matrix":
        return SIMT
    capability = hardware.compute_capability or _ASYNCHRONOUS_COPIES
    is_hopper = capability[0] == min(_WARP_SPECIALIZED_MAJORS)
    if convolves:
        return WARP_SPECIALIZED_CONVOLUTIONS if is_hopper else CONVOLUTIONS
    if capability[0] in _WARP_SPECIALIZED_MAJORS:
        return WARP_SPECIALIZED if is_hopper else ON_TWO_SMS
    if capability < _ASYNCHRONOUS_COPIES:
        return SYNCHRONOUS_MMA
    return HALF_RATE_MMA if hardware.matrix_fp16_accumulate_tflop_per_s else MMA


def for_unaligned_rows(library: GemmKernels, alignment_bytes: int) -> GemmKernels:
    """The family for rows that begin at multiples of so many bytes, fewer than the 16 that TMA asks for, which loads
    for `wgmma`. Threads load instead, by `cp.async` or, two bytes at a time, through registers, and the number of
    their loads bounds these kernels. cuBLAS has one alignment for both operands and the result, the least."""
    loaded = min(alignment_bytes, constants.UNALIGNED_LOAD_BYTES)
    return (MMA if library.cluster else library)._replace(
        tile_exponent=0.0,
        operand_bytes_per_cycle=loaded * constants.UNALIGNED_LOADS_PER_CYCLE,
        loads_inside=True,
        cluster=1,
        ran=library.ran,
    )


def tiled_read_share(shapes: Sequence[Matmul], hardware: Hardware, peak: Peak) -> float:
    """At which share of its bandwidth a kernel reads weights, which it may do tile by tile."""
    is_tiled = peak.unit == "matrix" and all(min(shape.m, shape.n) > MOST_ROWS_READ_WHOLE for shape in shapes)
    return GDDR_TILE_SHARE if is_tiled and hardware.memory_type.startswith("GDDR") else 1.0
