"""Data movement, indexing, random numbers and sorting: little arithmetic, bytes by what is touched."""

from __future__ import annotations

import torch

from flopmeter.costs.rules import FREE, make_cost, rule
from flopmeter.records import INDEXING, MOVEMENT, RANDOM, SORTING, Call, Cost, TensorSpec

aten = torch.ops.aten


@rule(
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided,
    aten._unsafe_view, aten._reshape_alias, aten.lift_fresh, aten.resize_, aten.set_, aten.detach_, aten.squeeze_,
    aten.unsqueeze_, aten.transpose_, aten.t_, aten.as_strided_, aten.swapaxes_, aten.swapdims_, aten.is_same_size,
    aten.record_stream, aten._has_compatible_shallow_copy_type, aten.is_pinned, aten._version,
)  # fmt: skip
def no_kernel(call: Call) -> tuple[Cost, ...]:
    """Allocation and metadata: the host's work, nothing on the device."""
    return FREE


@rule(
    aten.zeros, aten.zeros_like, aten.ones, aten.ones_like, aten.full, aten.full_like, aten.new_zeros, aten.new_ones,
    aten.new_full, aten.arange, aten.linspace, aten.logspace, aten.eye, aten.scalar_tensor, aten.tril_indices,
    aten.triu_indices,
)  # fmt: skip
def factory(call: Call) -> Cost:
    """Writes its output; what it is 'like' is not read."""
    return make_cost(call, MOVEMENT, read=0)


@rule(aten.fill_, aten.zero_)
def fill(call: Call) -> Cost:
    """Overwrites; the old content is not read."""
    return make_cost(call, MOVEMENT, read=call.inputs[1:])


@rule(
    aten.cat, aten.stack, aten.constant_pad_nd, aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d,
    aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d, aten.roll, aten.flip, aten.rot90,
    aten.repeat, aten.tril, aten.triu, aten.tril_, aten.triu_, aten.pixel_shuffle, aten.pixel_unshuffle,
    aten.channel_shuffle, aten.native_channel_shuffle, aten.upsample_nearest1d, aten.upsample_nearest2d,
    aten.upsample_nearest3d, aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d,
    aten._upsample_nearest_exact3d, aten._foreach_copy_, aten.diag_embed, aten._pin_memory,
)  # fmt: skip
def rearrange(call: Call) -> Cost:
    """Reads what moves, writes where it goes."""
    return make_cost(call, MOVEMENT)


@rule(aten.slice_backward, aten.select_backward, aten.diagonal_backward, aten.unfold_backward)
def scatter_into_zeros(call: Call) -> tuple[Cost, Cost]:
    """The gradient of a view: a tensor of zeros, then the gradient copied into its part."""
    grad, (out,) = call.inputs[0], call.outputs
    return (make_cost(call, MOVEMENT, read=0), make_cost(call, MOVEMENT, read=(grad,), written=min(grad.nbytes, out.nbytes)))


@rule(aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter, aten.as_strided_scatter)
def scatter_copy(call: Call) -> tuple[Cost, Cost]:
    """A copy of the whole tensor, then the part written over it."""
    base, part = call.inputs[:2]
    return (make_cost(call, MOVEMENT, read=(base,)), make_cost(call, MOVEMENT, read=(part,), written=(part,)))


@rule(aten.embedding, aten.index_select, aten.gather, aten.take, aten.index)
def gather(call: Call) -> Cost:
    """Reads the elements that it returns and the indices, never the whole table."""
    (out,) = call.outputs
    indices = [spec for spec in call.inputs[1:] if not spec.is_floating]
    return make_cost(call, INDEXING, read=out.numel * call.inputs[0].dtype.itemsize + _nbytes(indices))


@rule(aten.embedding_dense_backward)
def embedding_backward(call: Call) -> Cost:
    """Zeros for the table, then each row of the gradient is added to its own: one add an element."""
    grad, indices = call.inputs
    (table,) = call.outputs
    rows = min(grad.nbytes, table.nbytes)
    return make_cost(call, INDEXING, grad.numel, read=grad.nbytes + indices.nbytes + rows, written=table.nbytes + rows)


@rule(
    aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put, aten.index_add, aten.index_add_,
    aten.index_copy, aten.index_copy_, aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_,
    aten.scatter_reduce, aten.scatter_reduce_, aten.index_fill, aten.index_fill_, aten.masked_scatter,
    aten.masked_scatter_,
)  # fmt: skip
def scatter(call: Call) -> Cost:
    """Writes the elements that the indices name; a functional form copies the whole tensor first.
    Where it accumulates, the old elements are read and one add each is done."""
    target, source, indices = call.inputs[0], _source(call), [s for s in call.inputs[1:] if not s.is_floating]
    touched = min(_touched_elements(call, source), target.numel) * target.dtype.itemsize
    adds = _accumulates(call)
    in_place = not call.outputs or call.outputs[0].storage == target.storage
    copied = 0 if in_place else target.nbytes
    source_bytes = source.nbytes if source is not None and source not in indices else 0
    read = copied + _nbytes(indices) + source_bytes + touched * adds
    flops = touched // target.dtype.itemsize * adds
    return make_cost(call, INDEXING, flops, read=read, written=copied + touched)


@rule(
    aten.rand, aten.rand_like, aten.randn, aten.randn_like, aten.randint, aten.randint_like, aten.randperm,
    aten.bernoulli_, aten.normal_, aten.uniform_, aten.exponential_, aten.random_, aten.cauchy_, aten.log_normal_,
    aten.geometric_,
)  # fmt: skip
def random_fill(call: Call) -> Cost:
    """Writes its output; the tensor that is overwritten, or only lends its shape, is not read. Random
    numbers are integer work, 0 FLOP."""
    return make_cost(call, RANDOM, read=call.inputs[1:])


@rule(
    aten.bernoulli, aten.normal, aten.multinomial, aten.poisson, aten.binomial, aten._sample_dirichlet,
    aten._standard_gamma,
)  # fmt: skip
def random_sample(call: Call) -> Cost:
    """Reads probabilities or parameters, writes the samples."""
    return make_cost(call, RANDOM)


@rule(
    aten.sort, aten.argsort, aten.topk, aten.msort, aten.kthvalue, aten.unique_dim, aten._unique2,
    aten.unique_consecutive, aten.searchsorted, aten.bucketize, aten.isin, aten.nonzero, aten.bincount,
    aten.histc,
)  # fmt: skip
def sorting(call: Call) -> Cost:
    """Comparisons: 0 FLOP. Bytes of one pass over inputs and outputs, the least that any method moves."""
    return make_cost(call, SORTING)


@rule(aten._local_scalar_dense)
def item(call: Call) -> Cost:
    """One element copied to the host, which waits for it."""
    return make_cost(call, MOVEMENT, written=call.inputs[0].dtype.itemsize)


def _nbytes(specs: list[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in set(specs))


def _source(call: Call) -> TensorSpec | None:
    names = [argument.name for argument in call.func._schema.arguments]
    for name in ("values", "source", "src"):
        if name in names:
            value = call.argument(name)
            return value if isinstance(value, TensorSpec) else None
    return None


def _touched_elements(call: Call, source: TensorSpec | None) -> int:
    """How many elements of the target the call writes."""
    target, packet = call.inputs[0], call.func.overloadpacket
    if packet in (aten.scatter, aten.scatter_):
        index = call.argument("index")
        return int(index.numel)
    if packet in (aten.index_fill, aten.index_fill_):
        size = target.shape[call.argument("dim")] if target.shape else 1
        return int(target.numel // max(size, 1) * call.argument("index").numel)
    if packet in (aten.masked_scatter, aten.masked_scatter_):
        return target.numel
    if source is None:
        return target.numel
    return max(source.numel, _indexed_elements(call))


def _indexed_elements(call: Call) -> int:
    """For index_put with a value that is broadcast: the size of what the indices select."""
    names = [argument.name for argument in call.func._schema.arguments]
    if "indices" not in names:
        return 0
    target, indices = call.inputs[0], call.argument("indices")
    shape = torch.broadcast_shapes(*(index.shape for index in indices if index is not None))
    if any(index is not None and index.dtype is torch.bool for index in indices):
        return target.numel
    kept = [size for size, index in zip(target.shape, indices, strict=False) if index is None]
    rest = target.shape[len(indices) :]
    return int(torch.Size((*shape, *kept, *rest)).numel())


def _accumulates(call: Call) -> bool:
    packet = call.func.overloadpacket
    if packet in (aten.index_add, aten.index_add_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_):
        return True
    names = [argument.name for argument in call.func._schema.arguments]
    return "accumulate" in names and bool(call.argument("accumulate"))
