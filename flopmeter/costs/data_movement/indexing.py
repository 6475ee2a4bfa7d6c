"""Gather and scatter: the elements that the indices name, and the indices; never the whole table."""

from __future__ import annotations

from math import ceil, log2, prod

import torch

from flopmeter.costs.data_movement.table_gradients import WARP_THREADS, sorted_additions
from flopmeter.costs.rules import COMPLEX_ADD, COMPLEX_MULTIPLY, is_complex, make_cost, rule, scratch
from flopmeter.costs.traffic import distinct_bytes
from flopmeter.records import ELEMENTWISE, INDEXING, MOVEMENT, SORTING, Call, Cost, Region, TensorSpec, ThreadGrid
from flopmeter.records.memory_format import is_dense
from flopmeter.torch_names.operators import aten

# From torch 2.8 on, rows of a multiple of 16 bytes are copied by vectors, with hardly any address to compute, and a
# thread block for each row and 4 KiB of it (vectorized_gather_kernel in ATen/native/cuda/IndexKernelUtils.cu). Of other
# rows each element is looked up: a division tells row from column, and both lie in three tensors. Up to 16 rows of an
# embedding or index_select take a kernel whose threads go from row to row (index_select_out_cuda_impl in Indexing.cu).
VECTOR_BYTES, VECTOR_THREADS = 16, 256
LOOKUP_OPERATIONS = 20
FEW_ROWS, FEW_ROWS_THREADS = 16, 128
_SELECTS = (aten.embedding, aten.index_select)

# Of a bag each column is added up by a thread, row by row; a block's eight warps take 32 columns of a bag, and then
# those of a later one (EmbeddingBag.cu). Each row is a load that waits for its index, and integer operations: 200 for a
# bag of four, from 94 us for 12,500 such bags of 512 columns, in bf16 and fp32, on an H200 (torch 2.11, 2026-11:
# validation/traces), of which finding the place is taken to be as much as in depthwise convolutions.
BAG_BLOCKS, BAG_WARPS, BAG_COLUMNS = 1024, 8, 32
BAG_OPERATIONS, BAG_ROW_OPERATIONS = 72, 32

# Integer operations with which a thread finds the places of an element by divisions, and adds it there atomically: in
# numbers of 4 bytes or more, and in narrower ones, of which it adds the pair that a word holds. Fitted to 39 calls on
# an H100 and an H200 (torch 2.11, 2026-11: validation/traces), 9 % off: index_add adds 150 million elements of fp32 in
# a millisecond and 125 of bf16, scatter_add 350 and 260.
PLACE_OPERATIONS = {
    aten.index_add: (110, 135), aten.index_add_: (110, 135), aten.scatter_add: (38, 62), aten.scatter_add_: (38, 62),
    aten.index_copy: (42, 42), aten.index_copy_: (42, 42),
}  # fmt: skip
WORD_BYTES = 4


@rule(
    aten.embedding, aten.index_select, aten.gather, aten.take, aten.index, aten._unsafe_index,
    aten._unsafe_masked_index, aten.masked_select,
)  # fmt: skip
def gather(call: Call) -> Cost:
    """Reads the elements that it returns, each once however often it is named, and the indices."""
    source, (out,) = call.inputs[0], call.outputs
    read: tuple[Region | TensorSpec, ...] = (_rows(out.numel, source), *call.inputs[1:])
    packet = call.func.overloadpacket
    if packet is aten.masked_select:  # its result has no known size: it is never compiled
        return make_cost(call, INDEXING, read=read)
    grid = _grid_of_rows(call)
    if grid is not None:
        return make_cost(call, INDEXING, read=read, access="rows", index_operations=0, grid=grid)
    looked_up = LOOKUP_OPERATIONS * out.numel if packet in _SELECTS else None
    return make_cost(call, INDEXING, read=read, access="gather", index_operations=looked_up)


def _grid_of_rows(call: Call) -> ThreadGrid | None:
    """The grid of the kernel that copies whole rows; None where single elements are looked up."""
    (out,), count = call.outputs, _rows_named(call)
    if not count:
        return None
    if count <= FEW_ROWS and call.func.overloadpacket in _SELECTS:
        return ThreadGrid(ceil(out.numel / count / FEW_ROWS_THREADS), FEW_ROWS_THREADS, count)
    vectors, rest = divmod(out.nbytes // count, VECTOR_BYTES)
    if rest:
        return None
    threads = min(VECTOR_THREADS, ceil(vectors / WARP_THREADS) * WARP_THREADS)
    return ThreadGrid(count * ceil(vectors / VECTOR_THREADS), threads, 2)


def _rows_named(call: Call) -> int:
    """How many whole rows of a contiguous tensor are named; 0 where single elements are, or none."""
    source, packet = call.inputs[0], call.func.overloadpacket
    if not source.shape or not source.is_strided or not is_dense(source.shape, source.stride, channels_last=False):
        return 0
    if packet is aten.embedding:
        return int(call.argument("indices").numel)
    if packet is aten.index and _is_by_integers(call) and len(call.argument("indices")) == 1:
        return int(call.argument("indices")[0].numel)
    if packet is aten.index_select and call.argument("dim") in (0, -len(source.shape)):
        return int(call.argument("index").numel)
    if packet is aten.gather and len(source.shape) == 2 and call.argument("dim") in (0, -2):
        index = call.argument("index")  # by index_select and by x.gather(0, rows[:, None].expand(...))
        return int(index.shape[0]) if index.numel and not index.stride[1] else 0
    return 0


@rule(aten._jagged_to_padded_dense_forward, aten._padded_dense_to_jagged_forward)
def pad(call: Call) -> Cost:
    """Rows of different lengths into a tensor with room for the longest, whose rest is filled, or out of one."""
    source, *offsets = call.inputs
    return make_cost(call, INDEXING, read=(_rows(call.outputs[0].numel, source), *offsets))


@rule(aten._embedding_bag, aten._embedding_bag_forward_only)
def embedding_bag(call: Call) -> Cost:
    """Rows added into bags (mode 0: sum; 1: mean, divided at the end; 2: maximum), weighted where weights come.
    Reads the rows that are named."""
    table, indices, offsets = call.inputs[:3]
    weights = call.argument("per_sample_weights")
    elements, mode = indices.numel * table.shape[1], call.argument("mode")
    flops = elements * ((mode != 2) + (weights is not None)) + (call.outputs[0].numel if mode == 1 else 0)
    others = [spec for spec in (indices, offsets, weights) if spec is not None]
    read: tuple[Region | TensorSpec, ...] = (_rows(elements, table), *others)
    return make_cost(call, INDEXING, flops, read=read, access="stream", grid=_grid_of_bags(call, indices.numel))


def _grid_of_bags(call: Call, indices: int) -> ThreadGrid:
    bags, width = call.outputs[0].shape
    warps = max(1, bags * ceil(width / BAG_COLUMNS))
    blocks = min(BAG_BLOCKS, ceil(warps / BAG_WARPS))
    rounds, rows = ceil(warps / (blocks * BAG_WARPS)), indices / max(1, bags)
    operations = ceil(rounds * (BAG_OPERATIONS + rows * BAG_ROW_OPERATIONS))
    return ThreadGrid(blocks, BAG_COLUMNS * BAG_WARPS, ceil(rounds * (1 + rows)), operations=operations)


@rule(aten._embedding_bag_per_sample_weights_backward)
def embedding_bag_weights_backward(call: Call) -> Cost:
    """One dot product of the bag's gradient with each row that went in."""
    grad, table, *rest = call.inputs
    elements = rest[0].numel * table.shape[1]
    return make_cost(call, INDEXING, 2 * elements, read=(grad, _rows(elements, table), *rest))


@rule(aten.embedding_renorm_)
def embedding_renorm(call: Call) -> Cost:
    """The norm of each row that is named (2 an element) and its scale (1). Reads and writes those rows."""
    table, indices = call.inputs
    elements = indices.numel * table.shape[1]
    rows = _rows(elements, table)
    return make_cost(call, INDEXING, 3 * elements, read=(rows, indices), written=(rows,))


@rule(
    aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put, aten.index_add, aten.index_add_,
    aten.index_copy, aten.index_copy_, aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_,
    aten.scatter_reduce, aten.scatter_reduce_, aten.index_fill, aten.index_fill_, aten.masked_scatter,
    aten.masked_scatter_, aten.put, aten.put_, aten.index_reduce, aten.index_reduce_,
    aten._unsafe_masked_index_put_accumulate,
)  # fmt: skip
def scatter(call: Call) -> tuple[Cost, ...]:
    """The kernels of eager PyTorch, which sorts the places of `index_put` where it accumulates."""
    return _scattered(call, sorts=True)


def atomic_additions(call: Call) -> tuple[Cost, ...] | None:
    """Compiled code's kernels in place of sorting ones: each value is added atomically. None: nothing sorts."""
    if call.func.overloadpacket is aten.embedding_dense_backward:  # zeros, and one add an element
        grad, table = call.inputs[0], call.outputs[0]
        rows = Region(table, min(grad.nbytes, table.nbytes))
        added = make_cost(
            call, INDEXING, grad.numel, read=(*call.inputs, rows), written=(table, rows), access="scatter"
        )
        return (added,)
    return _scattered(call, sorts=False) if _accumulates(call) and _is_by_integers(call) else None


def _scattered(call: Call, *, sorts: bool) -> tuple[Cost, ...]:
    """Writes the elements that the indices name; a functional form copies the whole tensor first, by a kernel of its
    own. Where it accumulates, the old elements are read and one operation each is done (none for a maximum; two where
    `alpha` scales what is added). masked_scatter first numbers what the mask holds (8 bytes an element)."""
    target, source = call.inputs[0], _source(call)
    touched = _touched_elements(call, source)
    in_place = not call.outputs or call.outputs[0].storage == target.storage
    out = target if in_place else call.outputs[0]
    named = Region(out, min(touched, target.numel) * target.dtype.itemsize)
    accumulates = _accumulates(call)
    flops = touched * _accumulation(call) if accumulates else 0
    if _reduction(call) == "mean":
        flops += target.numel  # each sum is divided by the number of its terms
    first = [] if in_place else [make_cost(call, MOVEMENT, read=(target,))]
    read: list[TensorSpec | Region] = [*call.inputs[1:], *(named,) * accumulates]
    if source is not None and call.func.overloadpacket in _SCATTERS:
        taken = Region(source, min(touched * source.dtype.itemsize, source.nbytes))
        read = [taken if each == source else each for each in read]
    if call.func.overloadpacket in (aten.masked_scatter, aten.masked_scatter_):
        numbers = scratch(out._replace(dtype=torch.int64))
        first.append(make_cost(call, INDEXING, read=call.inputs[1:2], written=(numbers,)))
        read.append(numbers)
    if accumulates and source is not None and sorts and _is_by_integers(call):
        return *first, *sorted_additions(call, target, [source, named], named, touched, flops)
    placing = PLACE_OPERATIONS.get(call.func.overloadpacket) if sorts else None  # else compiled code finds them
    placed = placing and touched * placing[target.dtype.itemsize < WORD_BYTES]
    scattered = make_cost(call, INDEXING, flops, read=read, written=(named,), complex_factor=1, index_operations=placed)
    return *first, scattered


def accumulate_into_zeros(call: Call) -> tuple[Cost, Cost]:
    """Zeros, then each value added at its place: the gradient of what flex_attention's score_mod captured."""
    values, out = call.argument("vals"), call.outputs[0]
    named = Region(out, min(values.numel, out.numel) * out.dtype.itemsize)
    added = make_cost(call, INDEXING, values.numel, read=(*call.inputs, named), written=(named,))
    return make_cost(call, MOVEMENT, read=()), added


@rule(aten.max_unpool2d, aten.max_unpool3d, aten.masked_scatter_backward)
def scatter_into_zeros(call: Call) -> tuple[Cost, Cost]:
    """Zeros, then each value to its place (and back from its place, for the gradient of masked_scatter)."""
    (out,) = call.outputs
    fewest = min(spec.numel for spec in (*call.inputs, out))
    named = Region(out, min(fewest * out.dtype.itemsize, distinct_bytes([out])))
    return (make_cost(call, MOVEMENT, read=()), make_cost(call, INDEXING, written=(named,)))


@rule(aten.segment_reduce)
def segment_reduce(call: Call) -> Cost:
    """One add (or multiply) for each element of the data, none for a maximum; a mean divides each sum."""
    flops = 0 if _is_extremum(call) else call.argument("data").numel
    return make_cost(call, INDEXING, flops + (_reduction(call) == "mean") * call.outputs[0].numel)


@rule(aten._segment_reduce_backward)
def segment_reduce_backward(call: Call) -> Cost:
    """Each segment's gradient is copied to its elements: of a mean divided once, of a product times the product and
    divided by each element."""
    segments, elements = call.argument("grad").numel, call.argument("data").numel
    flops = {"mean": segments, "prod": segments + elements}.get(call.argument("reduce"), 0)
    return make_cost(call, INDEXING, flops)


@rule(aten.searchsorted, aten.bucketize)
def search(call: Call) -> Cost:
    """Binary search: log2 n + 1 comparisons a value, 0 FLOP. As many elements are read, at most the whole sequence."""
    is_bucketize = call.func.overloadpacket is aten.bucketize
    sequence = call.argument("boundaries" if is_bucketize else "sorted_sequence")
    values = [spec for spec in call.inputs if spec != sequence]
    steps = ceil(log2(max(sequence.shape[-1], 1))) + 1
    probed = min(call.outputs[0].numel * steps * sequence.dtype.itemsize, sequence.nbytes)
    return make_cost(call, SORTING, read=(Region(sequence, probed), *values))


@rule(aten.trace)
def trace(call: Call) -> Cost:
    """The sum of the diagonal, which is all that is read."""
    x = call.inputs[0]
    diagonal = Region(x, min(x.shape) * x.dtype.itemsize)
    return make_cost(call, ELEMENTWISE, min(x.shape), read=(diagonal,), complex_factor=2)


def _rows(elements: int, table: TensorSpec) -> Region:
    """The elements of a table that indices name; an element that is named twice is read once."""
    return Region(table, min(elements, table.distinct_elements) * table.dtype.itemsize)


def _source(call: Call) -> TensorSpec | None:
    """The tensor that is written; None if it is a number."""
    given = (call.get(name) for name in ("values", "source", "src"))
    return next((value for value in given if isinstance(value, TensorSpec)), None)


def _touched_elements(call: Call, source: TensorSpec | None) -> int:
    """How many elements of the target the call writes, those named twice counted twice."""
    target, packet = call.inputs[0], call.func.overloadpacket
    if packet in (aten.masked_scatter, aten.masked_scatter_):
        return target.numel
    if packet in (aten.index_fill, aten.index_fill_):
        size = target.shape[call.argument("dim")] if target.shape else 1
        return int(target.numel // max(size, 1) * call.argument("index").numel)
    if source is None or packet in _SCATTERS:  # a source may be larger than the index; only as many elements are taken
        index = call.get("index")
        return _indexed_elements(call) if index is None else int(index.numel)
    return max(source.numel, _indexed_elements(call))


_SCATTERS = (
    aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_,
)  # fmt: skip


def _indexed_elements(call: Call) -> int:
    """For index_put with a value that is broadcast: the size of what the indices select."""
    target, indices = call.inputs[0], call.get("indices")
    if indices is None:
        return 0
    if any(index is not None and index.dtype is torch.bool for index in indices):
        return target.numel
    shape = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))
    kept = [size for size, index in zip(target.shape, indices, strict=False) if index is None]
    return prod((*shape, *kept, *target.shape[len(indices) :]))


_ALWAYS_ACCUMULATE = (
    aten.index_add, aten.index_add_, aten.scatter_add, aten.scatter_add_, aten._unsafe_masked_index_put_accumulate,
)  # fmt: skip


def _accumulates(call: Call) -> bool:
    always = call.func.overloadpacket in _ALWAYS_ACCUMULATE
    return always or bool(call.get("accumulate")) or _reduction(call) is not None


def _is_by_integers(call: Call) -> bool:
    """Whether the op has a list of indices, as index and index_put do, and none of them is a mask."""
    given = [index for index in call.get("indices") or () if index is not None]
    return bool(given) and all(index.dtype not in (torch.bool, torch.uint8) for index in given)


def _accumulation(call: Call) -> int:
    """Real operations that combine an element with the old one."""
    if _is_extremum(call):
        return 0
    is_product = _reduction(call) in ("prod", "multiply")
    scaled = call.func.overloadpacket in (aten.index_add, aten.index_add_) and call.argument("alpha") != 1
    if not is_complex(call):
        return 1 + scaled
    return COMPLEX_MULTIPLY if is_product else COMPLEX_ADD + COMPLEX_MULTIPLY * scaled


def _is_extremum(call: Call) -> bool:
    return _reduction(call) in ("amax", "amin", "max", "min")


def _reduction(call: Call) -> str | None:
    """The reduction that the op was given by name: 'sum', 'mean', 'prod', ..."""
    return call.get("reduce")
