"""Fused attention: blocks of queries that pass over the keys, on the SMs of the device.

A block keeps one tile of queries on the chip and loads tiles of keys and values, one after another. A tile takes the
time of its two matmuls and that of the softmax, as far as the kernel does not hide one behind the other. The blocks of
all heads and sequences share the SMs. With few queries they would be too few, so the keys are split among more blocks,
and a second kernel combines the results.
"""

from __future__ import annotations

import functools
from math import ceil, prod, sqrt
from typing import NamedTuple

from flopmeter.device.hardware import Hardware, Peak
from flopmeter.device.sm_limits import sm_limits
from flopmeter.records import AttentionBackend, AttentionShape, AttentionWork, Cost, Mask
from flopmeter.records.dtypes import item_bytes_of
from flopmeter.timing import attention_kernels, constants
from flopmeter.timing.attention_kernels import AttentionKernel
from flopmeter.timing.bandwidth import access_seconds, cache_bytes_per_s, sm_seconds
from flopmeter.timing.gemm_kernels import legacy_mma_share
from flopmeter.timing.matmul import Busy, fastest, overlap
from flopmeter.torch_names.dispatcher import running_version

_AMPERE, _BLACKWELL_ULTRA, _HOPPER_MAJOR, _BLACKWELL_MAJOR = (8, 0), (10, 3), 9, 10
_WARPGROUP_MAJORS = (_HOPPER_MAJOR, _BLACKWELL_MAJOR)  # with matmuls of several warps, which run beside a softmax
# Vendors whose kernels for few queries fill a tile with nothing. Metal's take each query alone, and split the keys too
# (`sdpa_vector_2pass` in aten/src/ATen/native/mps); others are taken to be like these.
_FILLING_TILES = ("nvidia", "amd")
_ITEM_BYTES = 2  # of what flash attention works on
_DQ_BYTES = 4  # of a gradient while it is added up
_SPLITTING: tuple[AttentionBackend, ...] = ("flash", "flash_3", "cudnn", "flex_decoding", "paged")  # they split keys
_NEWEST: tuple[AttentionBackend, ...] = ("cudnn", "flash_3")  # by their device's own instructions


class Grid(NamedTuple):
    """The tiles of one square of queries x keys, or of those of all sequences."""

    blocks: int
    tiles: int  # of all blocks
    longest: int  # of one block, in tiles
    masked: int  # tiles with scores that are not visible


class _Launch(NamedTuple):
    """How one kernel covers the work."""

    kernel: AttentionKernel
    heads: int  # those that share keys may be one
    grid: Grid  # of one head, all sequences
    slices: int
    rows: int  # of a tile: queries
    columns: int  # keys
    resident: int  # blocks of an SM at a time


def attention(cost: Cost, work: AttentionWork, hardware: Hardware, peak: Peak, cached_bytes: float = 0.0) -> Busy:
    """The time of the kernel, or of both kernels where the keys are split.

    `peak` is that of the type that the matmuls run in. `cached_bytes`: the part of what it reads and writes that the L2
    cache holds.
    """
    bandwidth = hardware.sustained_bandwidth_bytes_per_s
    memory = (cost.bytes - cached_bytes) / bandwidth + cached_bytes / cache_bytes_per_s(hardware)
    in_16_bits = peak.unit == "matrix" and item_bytes_of(cost.dtype) == 2
    launches = _launches(work.shape, work.backend, hardware, in_16_bits=in_16_bits)
    return fastest(_busy(launch, cost, work, hardware, peak, memory) for launch in launches)


def _busy(launch: _Launch, cost: Cost, attends: AttentionWork, hardware: Hardware, peak: Peak, memory: float) -> Busy:
    shape, memory = attends.shape, memory / launch.kernel.read_share
    masked_share = _masked_tiles(launch, shape) / max(launch.grid.tiles, 1)
    filled = _filled_share(launch, shape)
    of_score = score_seconds(attends, cost.dtype, launch, masked_share, filled, hardware, peak)
    of_tile = launch.rows * launch.columns * of_score
    if attends.backend == "paged":
        of_tile += _page_seconds(launch, hardware)
    compute = _grid_seconds(launch, of_tile, hardware)
    bandwidth = hardware.sustained_bandwidth_bytes_per_s
    cold_start = sm_seconds(launch.kernel.block_cycles, hardware)  # the first blocks have to fetch their instructions
    work = overlap(compute, memory, launch.kernel.overlap_exponent) + cold_start
    elements = shape.heads * shape.all_queries
    extra = 0.0
    is_combined = launch.slices > 1 and attends.backend != "flex_decoding"  # of that one, by kernels of the graph
    if is_combined:  # each slice writes partial results in fp32; those that the cache cannot hold go to memory
        partial_bytes = 4 * launch.slices * elements * shape.value_dim
        extra = 2 * max(partial_bytes - (hardware.l2_cache_bytes or 0), 0) / bandwidth
        trips = launch.slices / launch.kernel.combines_at_a_time
        work += attention_kernels.COMBINE_SECONDS + trips * access_seconds(1.0, hardware)
    if attends.backend == "paged" and launch.heads < shape.heads and hardware.vendor == "nvidia":
        extra += _group_copies(shape, _ITEM_BYTES * elements * shape.head_dim, hardware)
    if shape.is_backward and attends.backend != "flex":
        extra = _gradient_bytes(shape, launch.kernel) / bandwidth
    blocks = launch.heads * launch.grid.blocks * launch.slices
    return Busy(compute, memory + extra, work + extra, sms=min(1.0, blocks / hardware.sm_count))


def _gradient_bytes(shape: AttentionShape, kernel: AttentionKernel) -> int:
    """Bytes that the kernels before and after the main one of a backward pass move, and it adds to memory."""
    copied = plain = shape.all_queries * shape.head_dim
    if kernel.dq_cycles_per_byte:
        multiple = attention_kernels.DQ_COPY_QUERIES
        queries = sum(count * ceil(size / multiple) * multiple for count, size, _ in shape.sizes)
        copied = queries * _padded(shape.head_dim)
    of_keys = 0
    if kernel.sums_heads and shape.key_heads < shape.heads:
        of_keys = _ITEM_BYTES * shape.all_keys * (shape.head_dim + shape.value_dim)
    return shape.heads * (attention_kernels.DQ_COPY_BYTES * copied + attention_kernels.ROW_SUM_BYTES * plain + of_keys)


def kernel_of(
    backend: AttentionBackend, hardware: Hardware, *, in_16_bits: bool, splits: bool = False, is_backward: bool = False
) -> AttentionKernel:
    """The family of kernels that runs for the backend on the device. `in_16_bits`: on its matrix units."""
    if hardware.vendor == "amd":  # AOTriton has the kernels that take a mask, too
        return attention_kernels.AMD_SPLIT if splits else attention_kernels.AOTRITON
    if backend == "efficient":
        if not in_16_bits:
            return attention_kernels.EFFICIENT
        is_old = hardware.compute_capability is not None and hardware.compute_capability < _AMPERE
        return attention_kernels.EFFICIENT_BEFORE_AMPERE if is_old else attention_kernels.EFFICIENT_IN_16_BITS
    if backend == "flex":
        return attention_kernels.FLEX
    major = (hardware.compute_capability or (_HOPPER_MAJOR,))[0]
    if backend in _NEWEST and major == _BLACKWELL_MAJOR:
        if splits:
            return attention_kernels.FLASH_4_SPLIT
        is_ultra = hardware.compute_capability == _BLACKWELL_ULTRA
        return attention_kernels.FLASH_4_ULTRA if is_ultra else attention_kernels.FLASH_4
    if backend in _NEWEST and major == _HOPPER_MAJOR:
        if splits:
            return attention_kernels.FLASH_3_SPLIT
        if backend == "flash_3":
            return attention_kernels.FLASH_3
        return attention_kernels.CUDNN_HOPPER_BACKWARD if is_backward else attention_kernels.CUDNN_HOPPER
    if splits:
        return attention_kernels.FLASH_2_SPLIT
    if is_backward:
        return attention_kernels.FLASH_2_BACKWARD
    return attention_kernels.FLASH_2_PAGED if backend == "paged" else attention_kernels.FLASH_2


def _launches(
    shape: AttentionShape, backend: AttentionBackend, hardware: Hardware, *, in_16_bits: bool
) -> list[_Launch]:
    """The kernels that the library may take. The one that can split the keys is for few queries, which would leave the
    tiles of the other nearly empty, and for few blocks, which would leave SMs idle."""
    kernel = kernel_of(backend, hardware, in_16_bits=in_16_bits, is_backward=shape.is_backward)
    whole = _covered(shape, kernel, hardware) if backend != "flex" else _covered_by_template(shape, kernel, hardware)
    is_split = backend in _SPLITTING and shape.queries <= kernel.split_queries
    if not is_split or shape.is_backward:
        return [whole]
    kernel = kernel_of(backend, hardware, in_16_bits=in_16_bits, splits=True)
    split = _covered(shape, kernel, hardware)
    blocks = split.heads * split.grid.blocks
    slices = _slices(blocks, split.grid.longest, hardware.sm_count * kernel.blocks_per_sm)
    if backend == "paged" and hardware.vendor == "nvidia" and split.heads == shape.heads:
        slices = 1  # FlashAttention-2 splits those of a paged cache only where heads share a block (`mha_varlen_fwd`)
    tile_rows, _ = tile_of(kernel, shape, hardware)
    return [split if shape.queries <= tile_rows else whole, split._replace(slices=slices)][: 2 if slices > 1 else 1]


def _covered(shape: AttentionShape, kernel: AttentionKernel, hardware: Hardware) -> _Launch:
    """Heads that share keys share a block, if the kernel can do that and one head's queries do not fill it."""
    rows, columns = tile_of(kernel, shape, hardware)
    if hardware.vendor not in _FILLING_TILES and not shape.is_backward:
        rows = min(rows, shape.queries)
    resident = blocks_at_a_time(kernel, rows, columns, shape.head_dim, hardware)
    if shape.is_backward:  # a block keeps keys and passes over the queries
        blocks = sum(count * ceil(keys / rows) for count, _, keys in shape.sizes)
        grid = _grid(shape, columns, rows)._replace(blocks=blocks, longest=ceil(shape.queries / columns))
        return _Launch(kernel, shape.heads, grid, 1, rows, columns, resident)
    shares = shape.queries <= kernel.shared_queries and (shape.mask.left is None or kernel.shares_in_window)
    group = ceil(shape.heads / shape.key_heads) if shares else 1
    grid = _grid(shape, rows, columns, group, from_window=kernel.starts_at_window)
    return _Launch(kernel, ceil(shape.heads / group), grid, 1, rows, columns, resident)


def _grid(shape: AttentionShape, rows: int, columns: int, group: int = 1, *, from_window: bool = False) -> Grid:
    """The tiles of one head, or of a group of heads that share blocks: of all sequences, of which each has a grid of
    its own."""
    grids = [(tile_grid(*size, rows, columns, shape.mask, group, from_window), count) for count, *size in shape.sizes]
    blocks, tiles, masked = (
        sum(count * getattr(grid, name) for grid, count in grids) for name in ("blocks", "tiles", "masked")
    )
    return Grid(blocks, tiles, max(grid.longest for grid, _ in grids), masked)


def _covered_by_template(shape: AttentionShape, kernel: AttentionKernel, hardware: Hardware) -> _Launch:
    """flex_attention's templates. Backward, some blocks keep keys, for all heads that share them, others queries."""
    rows, columns = template_tile_of(shape, hardware)
    if not shape.is_backward:
        return _Launch(kernel, shape.heads, _grid(shape, rows, columns), 1, rows, columns, kernel.blocks_per_sm)
    group = ceil(shape.heads / shape.key_heads)
    blocks = shape.sequences * (ceil(shape.queries / rows) + ceil(shape.keys / rows / group))
    longest = ceil(attention_kernels.FLEX_KEY_SHARE * group * ceil(shape.queries / columns))
    grid = _grid(shape, columns, rows)._replace(blocks=blocks, longest=longest)
    return _Launch(kernel, shape.heads, grid, 1, rows, columns, kernel.blocks_per_sm)


def template_tile_of(shape: AttentionShape, hardware: Hardware) -> tuple[int, int]:
    """What a block of flex_attention's template keeps, and what it takes at a time, in the torch that runs."""
    major = min(max((hardware.compute_capability or _AMPERE)[0], 8), 11)
    forward_tiles, backward_tiles = attention_kernels.FLEX_TILES, attention_kernels.FLEX_BACKWARD_TILES
    if running_version() < (2, 13):
        forward_tiles = attention_kernels.FLEX_TILES_BEFORE_2_13
    elif running_version() >= (2, 15):
        forward_tiles = attention_kernels.FLEX_TILES_OF_2_15
        backward_tiles = attention_kernels.FLEX_BACKWARD_TILES_OF_2_15
    if shape.is_backward:
        tiles = backward_tiles[major]
        fitting = ((kept, taken) for most, kept, taken in tiles if shape.head_dim <= most)
        return next(fitting, attention_kernels.FLEX_LONG_BACKWARD_TILE)
    other = attention_kernels.FLEX_OTHER_TILE if shape.head_dim <= 256 else attention_kernels.FLEX_LONG_TILE
    return forward_tiles[major].get(shape.head_dim, other)


def _has_window(shape: AttentionShape) -> bool:
    """Whether the kernel runs with a window: not where that would hold all keys (`window_size_left` in
    FlashAttention-3's flash_api.cpp; -2 wants one key less, and decides earlier whether heads share a block)."""
    return shape.mask.left is not None and shape.mask.left < shape.keys - 1


def tile_of(kernel: AttentionKernel, shape: AttentionShape, hardware: Hardware) -> tuple[int, int]:
    """Queries and keys of a tile: smaller ones where the head is long or the shared memory small."""
    capability, has_window = hardware.compute_capability or _AMPERE, _has_window(shape)
    tiles = kernel.tiles_on.get(capability, kernel.tiles)
    if has_window and kernel.window_tiles and not shape.is_backward:
        tiles = kernel.window_tiles
    elif shape.is_backward or (shape.mask.right == 0 and not has_window):
        tiles = kernel.causal_tiles_on.get(capability, tiles)
    return next(((rows, columns) for most, rows, columns in tiles if shape.head_dim <= most), tiles[-1][1:])


def blocks_at_a_time(kernel: AttentionKernel, rows: int, columns: int, head_dim: int, hardware: Hardware) -> int:
    """The thread blocks that an SM holds: as many as find place for their tiles of queries, keys and values."""
    if not kernel.holds_tiles:
        return kernel.blocks_per_sm
    of_sm = sm_limits(hardware.compute_capability or _AMPERE).shared_kb
    kilobytes = of_sm or attention_kernels.OTHER_SHARED_MEMORY_KB
    of_block = _ITEM_BYTES * _padded(head_dim) * (rows + 2 * columns) + 1024 * attention_kernels.BLOCK_RESERVED_KB
    return max(1, min(kernel.blocks_per_sm, 1024 * kilobytes // of_block))


@functools.cache
def tile_grid(
    queries: int, keys: int, rows: int, columns: int, mask: Mask, group: int = 1, from_window: bool = False
) -> Grid:
    """A block works on the tiles from the first to the last key that any of its queries sees. `group`: heads that share
    a block, whose queries at one place lie side by side. `from_window`: the first tile begins with the first key, and
    not at a multiple of the columns."""
    shift = keys - queries if mask.bottom_right else 0
    counts, whole = [], 0
    for place in range(0, queries * group, rows):
        first, last = place // group, (min(place + rows, queries * group) - 1) // group
        begin = 0 if mask.left is None else max(first + shift - mask.left, 0)
        end = keys if mask.right is None else min(last + shift + mask.right + 1, keys)
        origin = begin if from_window else 0
        counts.append(ceil((end - origin) / columns) - (begin - origin) // columns if end > begin else 0)
        all_from = 0 if mask.left is None else max(last + shift - mask.left, 0)  # keys that all queries see
        all_to = keys if mask.right is None else min(first + shift + mask.right + 1, keys)
        whole += max((all_to - origin) // columns - ceil((all_from - origin) / columns), 0)
    return Grid(len(counts), sum(counts), max(counts, default=0), sum(counts) - whole)


def _masked_tiles(launch: _Launch, shape: AttentionShape) -> int:
    """The tiles of a square that a kernel masks: those at an edge, or, as in FlashAttention-2's forward pass, the last
    ones of each block by a count that is one more where tiles may not divide the lengths (`n_masking_steps` in
    flash_fwd_kernel.h), and under a window all."""
    grid = launch.grid
    if shape.is_backward or not launch.kernel.masks_by_count:
        return grid.masked
    if _has_window(shape):
        return grid.tiles
    is_even = not (shape.is_packed or shape.queries % launch.rows or shape.keys % launch.columns)
    is_even &= shape.head_dim <= attention_kernels.MOST_EVEN_HEAD_DIM
    of_block = 0 if is_even else 1
    if shape.mask.right is not None and shape.queries > 1:
        of_block += ceil(launch.rows / launch.columns)
    return min(grid.tiles, of_block * grid.blocks)


def _slices(blocks: int, tiles: int, places: int) -> int:
    """How many slices the keys of a block are split into."""
    if blocks >= attention_kernels.FEW_BLOCKS * places:
        return 1

    def fill(slices: int) -> float:
        waves = blocks * slices / places
        return waves / ceil(waves)

    candidates = range(1, max(1, min(attention_kernels.MOST_SLICES, places, tiles)) + 1)
    enough = attention_kernels.SLICE_FILL * max(map(fill, candidates))
    return next(slices for slices in candidates if fill(slices) >= enough)


def flop_energy(work: AttentionWork, hardware: Hardware) -> float:
    """Energy of a FLOP on matrix units, relative to that in a large product."""
    if (hardware.compute_capability or (0, 0))[0] != _HOPPER_MAJOR:
        return 1.0
    is_new = _is_new(work, hardware)
    of_pass = attention_kernels.HOPPER_ATTENTION_ENERGY if is_new else attention_kernels.HOPPER_MMA_ATTENTION_ENERGY
    return of_pass[work.shape.is_backward]


def _is_new(work: AttentionWork, hardware: Hardware) -> bool:
    """Whether the matmuls are those of the device's own generation, not Ampere's."""
    return work.backend in _NEWEST or (
        work.backend == "flex" and (hardware.compute_capability or _AMPERE)[0] in _WARPGROUP_MAJORS
    )


def score_seconds(
    work: AttentionWork,
    dtype: str,
    launch: _Launch,
    masked_share: float,
    filled_share: float,
    hardware: Hardware,
    peak: Peak,
) -> float:
    """Seconds of one SM for one score: its multiply-adds, and then the part of its softmax that is not hidden.

    `masked_share` is the share of tiles in which some scores are masked, `filled_share` that of scores that a query and
    a key stand behind. These take no less than the multiply-adds at the rate that is left by the power limit (padding
    takes time but little power), and by GeForce's half rate for sums in fp32, which hides the softmax.
    """
    shape, kernel, sms = work.shape, launch.kernel, hardware.sm_count
    legacy = 1.0 if _is_new(work, hardware) else legacy_mma_share(hardware)
    pipe = max(peak.flop_per_s, peak.sustained_flop_per_s) * legacy
    padded, plain = (_flops_per_score(work, pads=pads) for pads in (True, False))
    cycles = kernel.score_cycles
    if shape.is_backward:  # a row of gradients is added once for each block of keys
        added = _DQ_BYTES * _padded(shape.head_dim) / launch.rows
        cycles = kernel.backward_score_cycles + kernel.dq_cycles_per_byte * added
    cycles += masked_share * attention_kernels.MASKED_SCORE_CYCLES
    cycles += work.adds_bias * kernel.bias_cycles + work.drops * kernel.dropout_cycles
    issue = pipe * issue_ratio(dtype, hardware) * attention_kernels.ATTENTION_PIPE_SHARE
    multiplying, softmax = padded * sms / issue, sm_seconds(cycles, hardware) + _function_seconds(work, hardware)
    if kernel.flop_per_cycle:
        softmax *= filled_share
        most = kernel.flop_per_cycle[shape.is_backward] / sm_seconds(1.0, hardware)
        multiplying = padded / min(pipe * attention_kernels.ATTENTION_PIPE_SHARE / sms, most)
    if kernel.warps_read_all and not shape.is_backward:
        passed = _shared_memory_bytes(launch, _padded(shape.head_dim)) / constants.SHARED_MEMORY_BYTES_PER_CYCLE
        multiplying = max(multiplying, sm_seconds(passed, hardware))
    in_turns = multiplying + softmax
    if kernel.hides_softmax:
        in_turns = overlap(multiplying, softmax, constants.VECTOR_OVERLAP)
    with_power = plain * filled_share * sms / peak.sustained_flop_per_s
    speed = kernel.speed
    if shape.head_dim > attention_kernels.MOST_EVEN_HEAD_DIM:
        speed *= kernel.wide_speed[shape.is_backward]
    return max(in_turns, padded * sms / pipe, with_power) / speed


def _shared_memory_bytes(launch: _Launch, head_dim: int) -> float:
    """Bytes of 16-bit queries, keys and values that warps read from an SM's shared memory for a score: all keys and
    values by each, and queries once."""
    wide = launch.rows // attention_kernels.QUERIES_OF_A_WIDE_WARP
    warps = attention_kernels.WARPS if head_dim <= attention_kernels.MOST_EVEN_HEAD_DIM else wide
    return _ITEM_BYTES * head_dim * (1 / launch.columns + 2 * warps / launch.rows)


def _function_seconds(work: AttentionWork, hardware: Hardware) -> float:
    """Seconds of an SM for flex_attention's function on one score: its arithmetic on the vector units, for which the
    compiler fuses no multiply-adds."""
    operations = work.score_flops + (constants.SCORE_FUNCTION_OPERATIONS - 1) * work.score_functions
    return 2 * operations * hardware.sm_count / hardware.vector_peak("fp32").flop_per_s


def issue_ratio(dtype: str, hardware: Hardware) -> float:
    """How many times faster the matrix units take 16-bit instructions than they add in fp32 (2 on GeForce, else 1)."""
    rates = hardware.matrix_fp16_accumulate_tflop_per_s
    if dtype not in ("fp16", "bf16") or "fp16" not in rates:
        return 1.0
    return rates["fp16"] / hardware.matrix_tflop_per_s.get("fp16", rates["fp16"])


def _filled_share(launch: _Launch, shape: AttentionShape) -> float:
    """The share of the scores in all tiles that a query and a key stand behind, visible or not."""
    rows, columns = launch.rows, launch.columns
    if shape.is_backward:  # a block keeps keys
        scores = sum(map(prod, shape.sizes))
        tiles = sum(count * ceil(keys / rows) * ceil(queries / columns) for count, queries, keys in shape.sizes)
        return scores / (tiles * rows * columns)
    places = launch.heads * launch.grid.blocks * rows
    in_columns = sum(count * queries * min(1.0, keys / columns) for count, queries, keys in shape.sizes)
    return shape.heads * in_columns / places


def _flops_per_score(work: AttentionWork, *, pads: bool) -> int:
    shape = work.shape
    keys, values = (_padded(size) if pads else size for size in (shape.head_dim, shape.value_dim))
    if not shape.is_backward:
        return 2 * (keys + values)
    return 2 * (4 * keys + 3 * values if work.backend == "flex" else 3 * keys + 2 * values)


def _padded(head_dim: int) -> int:
    short, long = attention_kernels.HEAD_DIMENSION_MULTIPLES
    multiple = short if head_dim <= 128 else long
    return ceil(head_dim / multiple) * multiple


def _group_copies(shape: AttentionShape, nbytes: int, hardware: Hardware) -> float:
    """Seconds of the copies before and after a kernel whose heads share blocks. The queries of one sequence, or of one
    key head, already lie in the order of the blocks, and the result in that of the caller."""
    plain = _copy_seconds(nbytes, hardware)
    if shape.sequences == 1 or shape.key_heads == 1:
        return plain
    return 2 * (plain + sm_seconds(attention_kernels.PERMUTED_COPY_CYCLES, hardware))


def _copy_seconds(nbytes: int, hardware: Hardware) -> float:
    """Seconds of a copy that is a kernel of its own and whose input was just written."""
    is_cached = 2 * nbytes <= (hardware.l2_cache_bytes or 0)
    bandwidth = cache_bytes_per_s(hardware) if is_cached else hardware.sustained_bandwidth_bytes_per_s
    return hardware.kernel_floor_seconds + access_seconds(1.0, hardware) + 2 * nbytes / bandwidth


def _page_seconds(launch: _Launch, hardware: Hardware) -> float:
    """Seconds for which a tile waits until its threads know the pages of their keys, and of their values. Instructions
    go in order, so a block does nothing else meanwhile, but another one on the SM does."""
    blocks = launch.heads * launch.grid.blocks * launch.slices / hardware.sm_count
    at_a_time = min(launch.resident, max(1.0, blocks))
    return sm_seconds(attention_kernels.PAGE_LOOKUPS * constants.CACHE_LATENCY_CYCLES / at_a_time, hardware)


def _grid_seconds(launch: _Launch, tile_seconds: float, hardware: Hardware) -> float:
    """All tiles on all SMs. While a block begins or ends, its SM waits; a second block on it fills half of that time.

    Equal blocks run in waves, so SMs without a block in the last wave are idle. If blocks differ, SMs run out of work
    at different times, but hardly so if the longest start first.
    """
    kernel, grid, sms = launch.kernel, launch.grid, hardware.sm_count
    blocks, tiles = launch.heads * grid.blocks * launch.slices, launch.heads * grid.tiles
    waits = blocks * sm_seconds(kernel.block_cycles, hardware) / launch.resident
    busy = (tiles * tile_seconds + waits) / sms
    longest = ceil(grid.longest / launch.slices) * tile_seconds
    if grid.tiles == grid.blocks * grid.longest:
        return busy * ceil(blocks / sms) * sms / blocks
    return max(longest, busy + longest * _tail(kernel, grid, sms))


def _tail(kernel: AttentionKernel, grid: Grid, sms: int) -> float:
    """How much of the longest block the last one ends after the mean."""
    if kernel.longest_first:
        return 0.0
    if kernel.longest_of_head_first:
        return attention_kernels.OF_HEAD_TAIL * sqrt(max(0.0, 1 - grid.blocks / sms))
    return attention_kernels.ATTENTION_TAIL
