"""The gradient of a table whose rows were looked up: indices are sorted, so that those of a row lie side by side, and a
thread adds up the rows of one element (Embedding.cu, EmbeddingBackwardKernel.cu and EmbeddingBag.cu in
aten/src/ATen/native/cuda)."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2, prod

import torch

from flopmeter.costs.access import walk_of_extremum
from flopmeter.costs.data_movement.sorting import bits_of, radix_sort
from flopmeter.costs.rules import in_one_piece, make_cost, reduced, rule, scratch
from flopmeter.records import ELEMENTWISE, INDEXING, MOVEMENT, Call, Cost, Region, TensorSpec, ThreadGrid
from flopmeter.torch_names.operators import aten

# Up to this many indices, a block of 32 rows of 32 threads walks all of them for 32 columns of the table, 32 at a time:
# it loads their gradients, and after a barrier one thread for each row of the table adds them to it. Cycles between two
# loads: 500 in nanoGPT's table of positions, which the cache holds, and in an LSTM's of words, which it does not, on an
# H100 (validation/traces). All steps below are counted in torch's source.
FEW_INDICES, FEATURE_THREADS, FEATURE_COLUMNS, FEATURE_ROWS, FEATURE_STEPS = 3072, 1024, 32, 32, 2
FEATURE_CYCLES = 500

# Kernels that find where the indices of each row begin, and those of each part of at most this many rows.
FINDING_KERNELS, PART_ROWS = 8, 10
# Loads of a thread of which each waits for the one before: the number of parts, the bounds of its part, an index and
# what it names; and of the last kernel, in which it finds the row of the table, too. Rows are added four at a time.
BOUNDS_STEPS, SUM_STEPS, ROWS_AT_A_TIME = 3, 5, 4
MOST_THREADS, WARP_THREADS = 1024, 32

# `index_put` with `accumulate`: a warp adds what one place gets to 128 elements of it, and four warps are a block. A
# thread looks up the place, its neighbour's, where its value lies, the value and what is there; then the same next.
ADDED_ELEMENTS, ADDING_WARPS, ADDING_STEPS = 128, 4, 8
# One number for each place: remainder and product for each index, and the sum of those; a quotient; numbers in order.
KERNELS_OF_INDEX, NUMBERING_KERNELS = 3, 1
# Where the last kernel would have few blocks, and each many parts to add, parts are added to the table at once.
FEW_BLOCKS, MANY_PARTS = 512, 4


@rule(aten.embedding_dense_backward)
def embedding_backward(call: Call) -> tuple[Cost, ...]:
    """Zeros for the table, then each row of the gradient is added to its own: one add an element."""
    (grad, indices), (table,) = call.inputs, call.outputs
    zeros = make_cost(call, MOVEMENT, read=(), written=(table,))
    if indices.numel > FEW_INDICES or call.argument("scale_grad_by_freq"):
        return zeros, *_sorted_sums(call, indices, [grad], grad.numel)
    rows = Region(table, min(grad.nbytes, table.nbytes))
    steps = FEATURE_STEPS * ceil(indices.numel / FEATURE_ROWS)
    grid = ThreadGrid(ceil(table.shape[1] / FEATURE_COLUMNS), FEATURE_THREADS, steps, cycles=FEATURE_CYCLES)
    added = make_cost(
        call, INDEXING, grad.numel, read=(grad, indices, rows), written=(rows,), access="stream", grid=grid
    )
    return zeros, added


@rule(aten._embedding_bag_backward, aten._embedding_bag_dense_backward)
def embedding_bag_backward(call: Call) -> tuple[Cost, ...]:
    """Zeros for the table, then the bag's gradient added to each row that went in, weighted or divided."""
    (grad, indices, *others), (table,) = call.inputs, call.outputs
    weights, mode = call.argument("per_sample_weights"), call.argument("mode")
    elements = (grad.shape[0] if mode == 2 else indices.numel) * table.shape[1]
    flops = elements * (1 + (weights is not None or mode == 1))
    zeros = make_cost(call, MOVEMENT, read=(), written=(table,))
    if mode == 2:  # of a maximum, one row of each bag, added atomically
        rows = Region(table, min(elements, table.numel) * table.dtype.itemsize)
        return zeros, make_cost(call, INDEXING, flops, read=(*call.inputs, rows), written=(rows,))
    return zeros, *_sorted_sums(call, indices, [grad, *others], flops)


def _sorted_sums(call: Call, indices: TensorSpec, given: Sequence[TensorSpec], flops: int) -> tuple[Cost, ...]:
    """The rows of each part are summed in fp32, then the parts of each row of the table. `given`: what is summed, and
    the indices that say how; `flops`: of the additions."""
    (table,) = call.outputs
    count, (rows, width) = indices.numel, table.shape
    named = min(count, rows)
    parts = count // PART_ROWS + named
    numbers, starts = scratch(indices, 2), scratch(indices, 3)
    of_part = min(PART_ROWS, ceil(count / named))
    found = make_cost(
        call, INDEXING, read=(scratch(indices),), written=(starts,), access="stream", kernels=FINDING_KERNELS
    )
    written = Region(table, named * width * table.dtype.itemsize)
    grid = _threads(parts, width, BOUNDS_STEPS + ceil(of_part / ROWS_AT_A_TIME))
    in_order = (*radix_sort(call, indices, numbers, bits_of(indices)), found)
    read = (*given, numbers, starts)
    last = _threads(named, width, SUM_STEPS - 1 + ceil(count / named / PART_ROWS))
    if last.blocks < FEW_BLOCKS and parts > MANY_PARTS * last.blocks:
        return *in_order, make_cost(call, INDEXING, flops, read=read, written=(written,), access="stream", grid=grid)
    itemsize = max(table.dtype.itemsize, torch.float32.itemsize)
    sums = Region(scratch(table, 4), parts * width * itemsize)
    return (
        *in_order,
        make_cost(call, INDEXING, flops, read=read, written=(sums,), access="stream", grid=grid),
        make_cost(call, INDEXING, read=(sums, starts), written=(written,), access="stream", grid=last),
    )


def sorted_additions(
    call: Call, target: TensorSpec, read: Sequence[TensorSpec | Region], written: Region, touched: int, flops: int
) -> tuple[Cost, ...]:
    """The kernels of an accumulating `index_put`, which sorts the places first, so that no two warps add to the same
    one (Indexing.cu, index_put_with_sort_kernel)."""
    indices = call.argument("indices")
    taken = [place for place, index in enumerate(indices) if index is not None]
    count = prod(torch.broadcast_shapes(*(indices[place].shape for place in taken)))
    before = prod(target.shape[: taken[0]])
    places = in_one_piece(scratch(target._replace(dtype=torch.int64), 3), (count,))
    numbers = scratch(places, 4)
    bits = max(1, ceil(log2(prod(target.shape[place] for place in taken))))
    numbered = make_cost(
        call,
        MOVEMENT,
        read=[index for index in indices if index is not None],
        written=(places, numbers),
        kernels=KERNELS_OF_INDEX * len(taken) + NUMBERING_KERNELS,
    )
    checked = [cost for place in taken for cost in _checked(call, indices[place])]
    slices = ceil(touched / max(1, count * before) / ADDED_ELEMENTS)
    grid = ThreadGrid(ceil(count / ADDING_WARPS) * slices * before, ADDING_WARPS * WARP_THREADS, ADDING_STEPS)
    in_order = radix_sort(call, places, numbers, bits)
    read = (*read, scratch(places, 1), scratch(places, 2))
    added = make_cost(
        call, INDEXING, flops, read=read, written=(written,), access="stream", grid=grid, complex_factor=1
    )
    return *checked, numbered, *in_order, added


def _checked(call: Call, index: TensorSpec) -> tuple[Cost, ...]:
    """The largest and the smallest place, of each of which a kernel says whether it is allowed, and one stops the
    program otherwise. Gradients of an index, whose places were checked before, do without (wrapIndexOnce)."""
    if call.get("unsafe") or not index.numel:
        return ()
    one = in_one_piece(scratch(index, 5), ())
    found = reduced(call, index, one, walked=walk_of_extremum(index, range(len(index.shape))))
    allowed = make_cost(call, ELEMENTWISE, read=(one,), written=(one,), kernels=2)
    return found, allowed, found, allowed


def _threads(rows: int, width: int, steps: int) -> ThreadGrid:
    """A grid with a thread for each element of that many rows."""
    of_row = ceil(width / WARP_THREADS) * WARP_THREADS
    threads = min(of_row, MOST_THREADS)
    return ThreadGrid(ceil(rows * of_row / threads), threads, steps)
