"""Sorting: `sort`, `topk`, `unique`, `randperm` and `nonzero`, kernel by kernel as torch launches them on CUDA. No
arithmetic: 0 FLOP.

Rows of at most 4096 elements are sorted by one thread block each (Sort.cu), longer ones by cub, digit by digit
(SortStable.cu); `topk` counts digits from the highest on until it knows the k-th value (TensorTopK.cu), gathers what is
above it, and sorts that; `nonzero` counts, then selects, both by cub (Nonzero.cu). All files are in
aten/src/ATen/native/cuda; they ask for no device but AMD's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log, log2

import torch

from flopmeter.costs.index_arithmetic import LONG_QUOTIENT_OPERATIONS, integer_operations
from flopmeter.costs.rules import in_one_piece, make_cost, rule, scratch
from flopmeter.records import MOVEMENT, RANDOM, SORTING, Call, Cost, HostCopy, TensorSpec, ThreadGrid
from flopmeter.records.powers_of_two import power_of_two_from
from flopmeter.torch_names.operators import aten

BITS_OF_BYTE = 8

# --- cub's radix sort (DeviceRadixSort and DeviceSegmentedRadixSort) -------------------------------------------------

# A block ranks this many elements by one digit at a time, then moves them to where its digits begin.
TILE_THREADS, TILE_ITEMS = 384, 12
DIGIT_BITS = 8
SEGMENT_DIGIT_BITS = 6  # where one block sorts a whole row, or all
SINGLE_TILE, SINGLE_TILE_THREADS = 2304, 256  # so few keys of eight bytes are sorted by one block, in one kernel
COUNTING_KERNELS = 4  # memory set to zero twice, counts, and their sums
# Integer instructions of an element: loaded, counted into the histogram of a digit, and ranked by a digit and moved.
# Digits that are alike in a warp, such as the leading zeros of integers, count at once: those of int64 take 3, of fp32
# 13. From the rows in bf16 and int64 of an H100 (validation/traces, kernels_select), as are all numbers of this file.
LOAD_OPERATIONS, COUNT_OPERATIONS, RANK_OPERATIONS = 20, 7, 140
# Until each has a number, by a division; and to look up its value by that.
NUMBER_OPERATIONS, LOOK_UP_OPERATIONS = 42, 57

# --- nonzero (cub's DeviceReduce and DeviceSelect) -------------------------------------------------------------------

COUNTED_TILE = 4096  # elements that a block counts; if there is more than one block, a last one adds their counts up
SELECT_THREADS, SELECT_ITEMS = 384, 11
# Integer instructions of an element: loaded, ranked among those of its block, and its place stored where it holds. From
# the four sizes on an H100 (validation/traces, kernels_index and kernels_reduce): 8.2 million bools take 19.5 us.
SELECT_OPERATIONS = 30

# --- permutations ----------------------------------------------------------------------------------------------------

LIKELY_APART, INT32_BITS = 0.9, 31  # bits of the longest keys that are int32

# --- rows that one block sorts ---------------------------------------------------------------------------------------

MOST_IN_BLOCK = 4096
# Up to 32 elements, a bitonic network in shared memory: two elements a thread, in steps that each end at a barrier.
NETWORK_ELEMENTS, NETWORK_THREADS, NETWORK_ROWS, NETWORK_STEPS = 32, 16, 5, 15
NETWORK_CYCLES, NETWORK_OPERATIONS = 560, 50  # of a step; the latter of a thread
# It is not taken for few rows: 256 rows of 8 elements are sorted as the longer ones are, 4096 by the network.
LEAST_NETWORK_ROWS = 1024
# Longer rows digit by digit: rows of 64 and 128 elements take four a thread, others 32.
BLOCK_DIGIT_BITS = 4
SHORT_ROW, SHORT_ITEMS, LEAST_LONG_ROW, LONG_ITEMS = 128, 4, 1024, 32
# Integer instructions of an element and digit, and of a thread and digit.
BLOCK_RANK_OPERATIONS, BLOCK_SCAN_OPERATIONS = 62, 110

# --- rows that cub sorts (do_launch_stable_sort_kernel) --------------------------------------------------------------

LEAST_ROW_ALONE, LEAST_SEGMENTS = 1_000_000, 128

# --- topk ------------------------------------------------------------------------------------------------------------

# Up to this many rows of at least this many elements are each shared by several blocks (`should_use_multiblock`).
SHARED_ROWS = (
    (20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800), (float("inf"), 400),
)  # fmt: skip
COUNT_THREADS, COUNT_ITEMS, MOST_COUNT_ITEMS = 256, 4, 64  # items of a thread: the more where few fill the device
SUMS_AT_A_TIME, FINDING_STEPS = 16, 4
# Integer instructions of an element that a block counts, or gathers; and cycles of the two sums over a block for it.
TOPK_COUNT_OPERATIONS, GATHER_OPERATIONS, GATHERING_CYCLES = 28, 57, 700
BESIDE_GATHERING = 10  # memory set to numbers, and two scans of what the blocks have
# One block takes a row: 16 bits, two a pass, tell the values of a row apart, in fp32 and bf16; then it gathers, twice.
WARP_THREADS, CHOOSING_THREADS, CHOOSING_PASSES, CHOOSING_CYCLES = 32, 1024, 10, 1900


def radix_sort(
    call: Call, keys: TensorSpec, values: TensorSpec | None, bits: int, results: Sequence[TensorSpec] = ()
) -> tuple[Cost, ...]:
    """All elements by their lowest bits: the digits of all passes are counted at once, then each pass moves keys and
    values to where they belong by its digit, in one sweep over them. A pass first clears the state by which blocks tell
    those after them how many elements they have of each digit. `results`: where they end; else in scratch 1 and 2."""
    given = [spec for spec in (keys, values) if spec is not None]
    moved = [scratch(spec, number) for number, spec in enumerate(given, 1)]
    if keys.numel <= SINGLE_TILE:
        return (_sorted_in_one_tile(call, given, results or moved, bits),)
    digits = ceil(bits / DIGIT_BITS)
    counting = (LOAD_OPERATIONS + COUNT_OPERATIONS * digits) * keys.numel
    counted = make_cost(
        call, SORTING, read=(keys,), written=(), access="stream", index_operations=counting, kernels=COUNTING_KERNELS
    )
    tile = TILE_THREADS * TILE_ITEMS
    grid = ThreadGrid(
        ceil(keys.numel / tile), TILE_THREADS, 1, operations=RANK_OPERATIONS * TILE_ITEMS, chains=TILE_ITEMS
    )
    between = [moved] * (digits - 1)
    return counted, *(
        make_cost(call, SORTING, read=read, written=written, access="stream", grid=grid, kernels=2)
        for read, written in zip((given, *between), (*between, results or moved), strict=True)
    )


def _sorted_in_one_tile(call: Call, given: Sequence[TensorSpec], results: Sequence[TensorSpec], bits: int) -> Cost:
    items = SINGLE_TILE // SINGLE_TILE_THREADS
    operations = ceil(bits / SEGMENT_DIGIT_BITS) * items * RANK_OPERATIONS
    grid = ThreadGrid(1, SINGLE_TILE_THREADS, 1, operations=operations, chains=items)
    return make_cost(call, SORTING, read=given, written=results, access="stream", grid=grid)


@rule(aten.randperm)
def randperm(call: Call) -> tuple[Cost, ...]:
    """Numbers sorted by random keys. The keys have enough bits to make it likely (.9) that no two are equal; equal
    ones, which are neighbours then, are found and put in a random order (Randperm.cu)."""
    (out,) = call.outputs
    n = out.numel
    if n <= 1:
        return (make_cost(call, MOVEMENT),)
    bits = min(64, ceil(log2(n - (6 * n * n + 1) / (12 * log(LIKELY_APART)))))
    keys = scratch(out, 3)._replace(dtype=torch.int32 if bits <= INT32_BITS else torch.int64)
    numbers, ordered = scratch(out, 4), scratch(keys, 5)
    drawing = integer_operations(n, 2 ** (BITS_OF_BYTE * keys.dtype.itemsize))
    drawn = make_cost(call, RANDOM, read=(), written=(keys,), index_operations=drawing, random_numbers=n)
    counted = make_cost(call, MOVEMENT, read=(), written=(numbers,))
    compared = make_cost(call, SORTING, read=(ordered,), written=(), access="stream")
    return drawn, counted, *radix_sort(call, keys, numbers, bits, (ordered, out)), compared


@rule(aten.sort)
def sort(call: Call) -> tuple[Cost, ...]:
    """Values and the places that they had."""
    x, (values, places) = call.inputs[0], _results(call)
    dim = call.argument("dim")
    size = x.shape[dim] if x.shape else 1
    if x.numel <= 1 or size <= 1:
        return (make_cost(call, SORTING),)
    copied = make_cost(call, MOVEMENT, read=(x,), written=(values,))  # as `sort_stable_out` does for all devices
    rows = x.numel // size
    if size <= MOST_IN_BLOCK:
        numbered = make_cost(call, MOVEMENT, read=(), written=(places,), kernels=2)  # one row, then all
        in_blocks = _sorted_in_blocks(call, values, places, size, is_stable=bool(call.get("stable")))
        return copied, copied, numbered, in_blocks
    if rows == 1 or size >= LEAST_ROW_ALONE:
        return copied, *_sorted_alone(call, rows, size)
    return copied, *(_sorted_together(call, rows) if rows < LEAST_SEGMENTS else _sorted_in_segments(call, rows, size))


def _sorted_in_blocks(call: Call, values: TensorSpec, places: TensorSpec, size: int, *, is_stable: bool) -> Cost:
    """Sorts rows of that many elements in place, with one block for each row or for a few."""
    rows, moved = values.numel // size, (values, places)
    if size <= NETWORK_ELEMENTS and rows >= LEAST_NETWORK_ROWS and not is_stable:
        grid = ThreadGrid(
            ceil(rows / NETWORK_ROWS),
            NETWORK_ROWS * NETWORK_THREADS,
            1,
            cycles=NETWORK_STEPS * NETWORK_CYCLES,
            operations=NETWORK_STEPS * NETWORK_OPERATIONS,
        )
    else:
        items = SHORT_ITEMS if size <= SHORT_ROW else LONG_ITEMS
        padded = SHORT_ROW if size <= SHORT_ROW else max(LEAST_LONG_ROW, power_of_two_from(size))
        digits = values.dtype.itemsize * BITS_OF_BYTE // BLOCK_DIGIT_BITS
        operations = digits * (items * BLOCK_RANK_OPERATIONS + BLOCK_SCAN_OPERATIONS)
        grid = ThreadGrid(rows, padded // items, 1, operations=operations, chains=items)
    return make_cost(call, SORTING, read=moved, written=moved, access="stream", grid=grid)


def _numbers(call: Call, numbers: TensorSpec) -> Cost:
    """The place of each element in its row."""
    return make_cost(call, MOVEMENT, read=(), written=(numbers,), index_operations=NUMBER_OPERATIONS * numbers.numel)


def _sorted_alone(call: Call, rows: int, size: int) -> tuple[Cost, ...]:
    """One row after another, each on the whole device."""
    results = [in_one_piece(spec, (size,)) for spec in _results(call)]
    row, numbers = in_one_piece(call.inputs[0], (size,)), scratch(results[1], 3)
    return _numbers(call, numbers), *radix_sort(call, row, numbers, bits_of(row), results) * rows


def _sorted_together(call: Call, rows: int) -> tuple[Cost, ...]:
    """Sorts all rows together, first by value and then by row. Each element carries the numbers of its row and of its
    place in it, and finally looks up its value."""
    x, (values, places) = call.inputs[0], _results(call)
    pairs = scratch(places, 3)  # two numbers of four bytes
    by_row = radix_sort(call, scratch(places, 2), None, ceil(log2(rows)))
    looked_up = make_cost(
        call, SORTING, read=(scratch(places), x), written=(values, places), access="gather",
        index_operations=LOOK_UP_OPERATIONS * x.numel,
    )  # fmt: skip
    return _numbers(call, pairs), *radix_sort(call, x, pairs, bits_of(x)), *by_row, looked_up


def _sorted_in_segments(call: Call, rows: int, size: int) -> tuple[Cost, ...]:
    """A block for each row. In each pass it counts the digits of its row, then ranks and moves tile by tile."""
    x, (values, places) = call.inputs[0], _results(call)
    numbers, moved = scratch(places, 3), (values, places)
    tiles = ceil(size / (TILE_THREADS * TILE_ITEMS))
    operations = tiles * TILE_ITEMS * RANK_OPERATIONS
    grid = ThreadGrid(rows, TILE_THREADS, 2 * tiles, operations=operations, chains=TILE_ITEMS)
    passes = ceil(bits_of(x) / SEGMENT_DIGIT_BITS)
    return _numbers(call, numbers), *(
        make_cost(call, SORTING, read=read, written=moved, access="stream", grid=grid)
        for read in ((x, numbers), *[moved] * (passes - 1))
    )


def _results(call: Call) -> tuple[TensorSpec, TensorSpec]:
    """Values and places. A compiled graph drops what nobody reads, but the kernels write it all the same."""
    x, found = call.inputs[0], call.outputs
    values = next((spec for spec in found if spec.dtype == x.dtype), scratch(found[0]._replace(dtype=x.dtype), 5))
    return values, found[-1] if found[-1] != values else scratch(values._replace(dtype=torch.int64), 5)


def bits_of(spec: TensorSpec) -> int:
    return spec.dtype.itemsize * BITS_OF_BYTE


@rule(aten.topk)
def topk(call: Call) -> tuple[Cost, ...]:
    """The k-th value of each row, then what is above it; sorted by kernels of its own unless that is not wanted."""
    x, (values, places) = call.inputs[0], _results(call)
    dim, k = call.argument("dim"), call.argument("k")
    size = x.shape[dim] if x.shape else 1
    if not values.numel or size <= 1:
        return (make_cost(call, SORTING),)
    rows = x.numel // size
    shares = next(least for most, least in SHARED_ROWS if rows <= most) <= size
    chosen = _chosen_by_blocks(call, rows, size) if shares else (_chosen_by_block(call, rows, size),)
    if k == 1 or not call.argument("sorted"):
        return chosen
    return *chosen, _sorted_in_blocks(call, values, places, k, is_stable=False)


def _chosen_by_block(call: Call, rows: int, size: int) -> Cost:
    """One block for each row counts two bits a pass of the elements that are left. Then it writes those that are large
    enough: each thread learns at a barrier how many the threads before it have."""
    threads = min(CHOOSING_THREADS, ceil(size / WARP_THREADS) * WARP_THREADS)
    steps = CHOOSING_PASSES * ceil(size / threads)
    return make_cost(call, SORTING, access="stream", grid=ThreadGrid(rows, threads, steps, cycles=CHOOSING_CYCLES))


def _chosen_by_blocks(call: Call, rows: int, size: int) -> tuple[Cost, ...]:
    """Several blocks for each row count one byte a pass; two small kernels sum what the blocks have of each digit. A
    last one gathers what is above the k-th value, each block after what the blocks before it have."""
    x = call.inputs[0]
    blocks_of_row, fewest_of_row = (ceil(size / (COUNT_THREADS * items)) for items in (COUNT_ITEMS, MOST_COUNT_ITEMS))
    blocks = rows * blocks_of_row

    def kernel(grid: ThreadGrid, kernels: int = 1, *, reads: bool = True, writes: bool = False) -> Cost:
        written = call.outputs if writes else ()
        return make_cost(call, SORTING, read=(x,) * reads, written=written, access="stream", grid=grid, kernels=kernels)

    counts = kernel(
        ThreadGrid(blocks, COUNT_THREADS, COUNT_ITEMS, COUNT_ITEMS, operations=COUNT_ITEMS * TOPK_COUNT_OPERATIONS)
    )
    sums = kernel(ThreadGrid(rows, COUNT_THREADS, 2 + ceil(blocks_of_row / SUMS_AT_A_TIME)), reads=False)
    finds = kernel(ThreadGrid(rows * fewest_of_row, COUNT_THREADS, FINDING_STEPS), reads=False)
    gathers = kernel(
        ThreadGrid(
            blocks, COUNT_THREADS, COUNT_ITEMS, cycles=GATHERING_CYCLES, operations=COUNT_ITEMS * GATHER_OPERATIONS
        ),
        BESIDE_GATHERING,
        writes=True,
    )
    return *(counts, sums, finds) * x.dtype.itemsize, gathers


@rule(aten._unique, aten._unique2)
def unique(call: Call) -> tuple[Cost, ...]:
    """Sorted; then one sweep keeps what differs from the element before it."""
    x = call.inputs[0]
    if x.numel <= 1:
        return (make_cost(call, SORTING),)
    return *radix_sort(call, x, None, bits_of(x)), make_cost(
        call, SORTING, read=(scratch(x, 1),), access="scan", kernels=2
    )


@rule(aten.nonzero)
def nonzero(call: Call) -> tuple[Cost, ...]:
    """How many there are, which the host learns before it makes room for their places; the places, in one sweep whose
    blocks tell those after them how many they have; and of each place a quotient and a remainder a dimension."""
    (x,), (out,) = call.inputs, call.outputs
    found, dims = out.shape
    one, numbers = (in_one_piece(scratch(out, n), shape) for n, shape in ((1, ()), (2, (found,))))
    counts = 1 + (x.numel > COUNTED_TILE)
    counted = make_cost(call, SORTING, read=(x,), written=(one,), access="stream", kernels=counts, blocks_host=False)
    told = make_cost(call, MOVEMENT, read=(one,), written=(), work=HostCopy(torch.int32.itemsize), blocks_host=True)
    if not dims or not x.numel:
        return counted, told
    grid = ThreadGrid(
        ceil(x.numel / (SELECT_THREADS * SELECT_ITEMS)), SELECT_THREADS, 1, operations=SELECT_OPERATIONS * SELECT_ITEMS,
        chains=SELECT_ITEMS,
    )  # fmt: skip
    selected = make_cost(
        call,
        SORTING,
        read=(x,),
        written=(out if dims == 1 else numbers,),
        access="stream",
        grid=grid,
        kernels=2,
        blocks_host=False,
    )
    if dims == 1 or not found:
        return counted, told, selected
    parted = make_cost(
        call, SORTING, read=(numbers,), access="stream", blocks_host=False,
        index_operations=2 * dims * LONG_QUOTIENT_OPERATIONS * found,
    )  # fmt: skip
    return counted, told, selected, parted
