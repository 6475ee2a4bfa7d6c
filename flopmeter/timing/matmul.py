"""Matmuls: tiles that cover the output, waves of tiles on the SMs, slices of the depth K (split-K).

A library chooses among tile shapes and numbers of slices; the functions here try them and take the fastest.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from math import ceil, inf, prod
from typing import NamedTuple

from flopmeter.records import Matmul
from flopmeter.timing import constants
from flopmeter.timing.constants import UnpackingKernel
from flopmeter.timing.gemm_kernels import SYNCHRONOUS_MMA, GemmKernels


class Rates(NamedTuple):
    """What a device sustains for one kind of matmul, and the kernels that run it."""

    flop_per_s: float  # of a large, well-shaped one
    issue_flop_per_s: float  # the rate of main loops when power does not limit the clock; at least `flop_per_s`
    bytes_per_s: float
    sm_count: int
    clock_hz: float
    kernels: GemmKernels
    cache: int = 0  # bytes of the L2 cache

    @property
    def cache_bytes_per_s(self) -> float:
        """Bandwidth from and to the L2 cache."""
        return constants.MATMUL_CACHE_BYTES_PER_CYCLE * self.sm_count * self.clock_hz

    def within(self, flop_per_s: float) -> Rates:
        """The same with arithmetic rates of at most `flop_per_s`."""
        flop_per_s, issue = min(self.flop_per_s, flop_per_s), min(self.issue_flop_per_s, flop_per_s)
        return self._replace(flop_per_s=flop_per_s, issue_flop_per_s=issue)

    def slowed(self, share: float) -> Rates:
        """The same with the arithmetic rates times `share`."""
        return self._replace(flop_per_s=self.flop_per_s * share, issue_flop_per_s=self.issue_flop_per_s * share)


class MatmulBytes(NamedTuple):
    """The bytes that a kernel moves from and to memory (a byte from the cache counts as the part of a byte from memory
    that takes as long), the bytes that it writes, and the bytes of an operand's element."""

    memory_bytes: float
    written_bytes: float
    item_bytes: float

    def share(self, parts: int) -> MatmulBytes:
        """The bytes of each of several matmuls in one kernel."""
        return self._replace(memory_bytes=self.memory_bytes / parts, written_bytes=self.written_bytes / parts)


class Busy(NamedTuple):
    """Seconds that the arithmetic and the memory traffic of a kernel take, both together, and those in which it waits
    for its first loads and last stores; and the SMs that it keeps."""

    compute_seconds: float
    memory_seconds: float
    work_seconds: float
    latency_seconds: float = 0.0
    sms: float = 1.0  # the share of the device's SMs that its blocks fill, on average

    @property
    def seconds(self) -> float:
        """All of it, without the device's kernel floor."""
        return self.work_seconds + self.latency_seconds

    def then(self, other: Busy) -> Busy:
        """Both kernels, one after the other."""
        return Busy(
            self.compute_seconds + other.compute_seconds,
            self.memory_seconds + other.memory_seconds,
            self.work_seconds + other.work_seconds,
            self.latency_seconds + other.latency_seconds,
            max(self.sms, other.sms),
        )

    def with_traffic(self, seconds: float, start_seconds: float = 0.0) -> Busy:
        """The same with that much memory traffic of other kernels before or after it, and the time of their starts."""
        compute, memory, work, *rest = self  # not by `_replace`, since products are tried in many ways
        return Busy(compute, memory + seconds, work + (seconds + start_seconds), *rest)


class _Tile(NamedTuple):
    """The size of a tile and what it reaches."""

    rows: int
    columns: int
    rate_share: float  # of the rate of a full tile


@functools.cache
def _tiles(kernels: GemmKernels, least_side: int) -> list[_Tile]:
    """The family's tiles with sides of at least `least_side`, small ones first, and of equal ones the squarest. Or the
    one that ran, in either direction."""
    largest = max(rows * columns for rows, columns in kernels.tiles)
    if kernels.ran is None:
        tiles = [tile for tile in kernels.tiles if min(tile) >= least_side]
    else:
        tiles = [kernels.ran, kernels.ran[::-1]]
    return [
        _Tile(rows, columns, (rows * columns / largest) ** kernels.tile_exponent)
        for rows, columns in sorted(tiles, key=lambda tile: (prod(tile), sum(tile)))
    ]


@functools.cache
def _loads(rows: int, columns: int, cluster: int) -> float:
    """Elements of both operands that an SM loads for each step of the depth. Blocks in a line share one operand, those
    in a square half of each."""
    lines = [side for side in range(1, cluster + 1) if cluster % side == 0]
    return min((rows / side + columns * side / cluster for side in lines), default=0.0)


def overlap(compute: float, memory: float, exponent: float) -> float:
    """The time of both together: (compute^p + memory^p)^(1/p)."""
    larger = max(compute, memory)
    if not larger:
        return 0.0
    ratio = min(compute, memory) / larger
    return float(larger * (1.0 + ratio**exponent) ** (1.0 / exponent))


def price_matmul(shape: Matmul, moved: MatmulBytes, rates: Rates) -> Busy:
    """The fastest way to run the matmul, of all tile shapes and split-K factors.

    A slice of the depth has a least size and writes partial sums in fp32, which are read again and added. On vector
    units a matrix times a vector has kernels without tiles, since each element of the matrix is used once.
    """
    batch, m, n, k = shape
    if (m == 1 or n == 1) and not rates.kernels.only_tiles:
        compute = 2 * batch * m * n * k / rates.flop_per_s
        memory = moved.memory_bytes / rates.bytes_per_s
        return Busy(compute, memory, overlap(compute, memory, rates.kernels.overlap_exponent))
    least_side = rates.kernels.least_batched_side if batch > 1 else 0
    splits = constants.SPLIT_K if batch == 1 or rates.kernels.splits_batches else (1,)
    ways = []
    for tile in _fitting(_tiles(rates.kernels, least_side), m, n):
        rows, columns, _ = tile
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        inside = min(rows, m), min(columns, n)
        stored = moved.written_bytes * prod(inside) / (batch * m * n)
        loads = _loads(*(inside if rates.kernels.loads_inside else (rows, columns)), rates.kernels.cluster)
        multiplied = _narrowed(tile, inside, rates.kernels)
        for slices in splits:
            depth = k if slices == 1 else max(ceil(k / slices), constants.LEAST_SLICE_DEPTH)
            way = _in_waves(tiles * slices, multiplied, loads, stored, depth, moved, rates)
            ways.append(way if slices == 1 else _adding_slices(way, slices * batch * m * n, rates))
            is_enough = tiles * slices >= constants.MOST_WAVES_SPLIT * rates.sm_count
            if is_enough or k <= slices * constants.LEAST_SLICE_DEPTH:
                break  # more slices would find no idle SM, or not be shallower
    return _with_power(fastest(ways), shape.macs, rates)


def _fitting(tiles: list[_Tile], m: int, n: int) -> Iterator[_Tile]:
    """The tiles without those that need no fewer blocks than a smaller one does, which can only be slower."""
    least = inf
    for tile in tiles:
        count = ceil(m / tile.rows) * ceil(n / tile.columns)
        if count < least:
            least = count
            yield tile


def _narrowed(tile: _Tile, inside: tuple[int, int], kernels: GemmKernels) -> _Tile:
    """The part of a tile that instructions multiply: its shorter side where the matrix has less than that."""
    if kernels.narrowest is None:
        return tile
    multiplied = ceil(min(inside) / kernels.narrowest) * kernels.narrowest
    if inside[0] < inside[1]:
        return tile._replace(rows=min(tile.rows, multiplied))
    return tile._replace(columns=min(tile.columns, multiplied))


def side_by_side(shapes: Sequence[Matmul], moved: MatmulBytes, rates: Rates) -> Busy:
    """Matmuls of groups in one kernel. The tiles of all groups share the waves; tiles of a deep group take longer. All
    groups have the same tile shape, one of those for batched matmuls. Each tile looks up its group before it begins."""
    start = rates.kernels.latency_cycles + constants.GROUP_LOOKUPS * constants.MEMORY_LATENCY_CYCLES
    rates = rates._replace(kernels=rates.kernels._replace(wave_cycles=start)).slowed(constants.GROUPED_RATE_SHARE)
    ways = []
    for tile in _tiles(rates.kernels, rates.kernels.least_batched_side):
        counts = [shape.batch * ceil(shape.m / tile.rows) * ceil(shape.n / tile.columns) for shape in shapes]
        tiles = sum(counts)
        depth = sum(count * shape.k for count, shape in zip(counts, shapes, strict=True)) / tiles
        loads = _loads(tile.rows, tile.columns, rates.kernels.cluster)
        ways.append(_in_waves(tiles, tile, loads, moved.written_bytes / tiles, depth, moved, rates))
    return _with_power(fastest(ways), sum(shape.macs for shape in shapes), rates)


def unpacking(shape: Matmul, kernel: UnpackingKernel, moved: MatmulBytes, rates: Rates) -> Busy:
    """Seconds with weights of 4 or 8 bits, by the kernel that torch has for them. It loads weights to registers,
    converts and multiplies in turns, as kernels before `cp.async` do, and its instructions take longer than the
    arithmetic. Each tile of rows converts all weights again."""
    rows, columns = kernel.tile
    tiles = ceil(shape.m / rows) * ceil(shape.n / columns)
    waves = shape.batch * ceil(tiles / rates.sm_count)
    cycles = waves * ceil(shape.k / kernel.depth) * kernel.cycles
    compute = cycles / rates.clock_hz
    memory = moved.memory_bytes / rates.bytes_per_s
    work = overlap(compute, memory, SYNCHRONOUS_MMA.overlap_exponent)
    filled = shape.batch * tiles / (waves * rates.sm_count)
    return Busy(compute, memory, work, rates.kernels.latency_cycles / rates.clock_hz, filled)


def _in_waves(
    tiles: int, tile: _Tile, loads: float, stored_bytes: float, depth: float, moved: MatmulBytes, rates: Rates
) -> Busy:
    """Seconds of tiles with one on each SM at a time. A tile at the edge takes as long as a full one, and SMs without a
    tile in the last wave wait. `loads`: elements for each step of the depth. `stored_bytes`: of a tile that no edge
    cuts."""
    kernels = rates.kernels
    step = kernels.depth_step_bytes / moved.item_bytes
    depth = ceil(depth / step) * step
    waves = ceil(tiles / rates.sm_count)
    tile_flops = 2 * tile.rows * tile.columns * depth
    multiplied = rates.sm_count * tile_flops / (rates.issue_flop_per_s * tile.rate_share)
    loaded = loads * depth * moved.item_bytes / (kernels.operand_bytes_per_cycle * rates.clock_hz)
    if kernels.shared_memory_passes:
        passed = _shared_elements(tile, kernels) * depth * moved.item_bytes
        multiplied = max(multiplied, passed / (constants.SHARED_MEMORY_BYTES_PER_CYCLE * rates.clock_hz))
    main_loop = overlap(multiplied, loaded, constants.OPERAND_OVERLAP)
    store = stored_bytes * rates.sm_count / rates.cache_bytes_per_s
    compute = waves * (main_loop + kernels.wave_cycles / rates.clock_hz)
    compute += store * (waves if kernels.stores_each_tile else 1)
    memory = moved.memory_bytes / rates.bytes_per_s
    work = overlap(compute, memory, kernels.overlap_exponent)
    return Busy(compute, memory, work, kernels.latency_cycles / rates.clock_hz, tiles / (waves * rates.sm_count))


def _shared_elements(tile: _Tile, kernels: GemmKernels) -> int:
    """Elements that pass an SM's shared memory for each step of the depth: loads of both operands arrive there, and
    each instruction of `wgmma` reads 64 rows of one and all columns of the other."""
    instructions = ceil(tile.rows / constants.WGMMA_ROWS)
    read = instructions * (constants.WGMMA_ROWS + tile.columns)
    return read + kernels.shared_memory_passes * (tile.rows + tile.columns)


def _with_power(way: Busy, macs: int, rates: Rates) -> Busy:
    """The time under the power limit. Padding takes time but hardly any power: it multiplies zeros."""
    least = 2 * macs / rates.flop_per_s
    return way._replace(compute_seconds=max(way.compute_seconds, least), work_seconds=max(way.work_seconds, least))


def _adding_slices(way: Busy, partial_sums: int, rates: Rates) -> Busy:
    """Adds the time to write the partial sums of all slices, and to read and add them in another kernel, which finds
    them in the L2 cache if they fit."""
    nbytes = constants.PARTIAL_SUM_BYTES * partial_sums
    bytes_per_s = rates.bytes_per_s if nbytes > rates.cache else max(rates.bytes_per_s, rates.cache_bytes_per_s)
    return way.with_traffic(2 * nbytes / bytes_per_s, constants.SPLIT_K_CYCLES / rates.clock_hz)


def fastest(ways: Iterable[Busy]) -> Busy:
    """The fastest of several ways to do the same, which a library chooses."""
    return min(ways, key=lambda busy: busy.work_seconds)


def tile_count(shape: Matmul) -> int:
    """How many full tiles cover the output. If they are fewer than the SMs, some SMs are idle."""
    side = constants.FULL_TILE_SIDE
    return shape.batch * ceil(shape.m / side) * ceil(shape.n / side)
