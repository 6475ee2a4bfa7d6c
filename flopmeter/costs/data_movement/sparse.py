"""Sparse tensors: their values and indices are read whole, of a dense tensor only the elements that they name.

These rules are for sparse arguments; the same ops have another rule for dense ones. An op that is not here is
uncounted.
"""

from __future__ import annotations

from math import prod

from torch._ops import OpOverload, OpOverloadPacket

from flopmeter.costs.arithmetic.pointwise import of_numbers, sum_of_scaled
from flopmeter.costs.rules import FREE, Rule, make_cost, zeros
from flopmeter.records import CONTRACTION, INDEXING, MOVEMENT, SORTING, Call, Cost, Region, TensorSpec
from flopmeter.torch_names.operators import aten, aten_overloads


def no_kernel(call: Call) -> tuple[Cost, ...]:
    """The op only puts indices and values together, or asks about them."""
    return FREE


def copy(call: Call) -> Cost:
    """Indices and values of the last argument; what the first one held is not read."""
    return make_cost(call, MOVEMENT, read=call.inputs[-1:])


def coalesce(call: Call) -> Cost:
    """Sorts the indices and adds the values of each; the host waits to know how many are left."""
    flops = _values(call.inputs[0])
    return make_cost(call, SORTING, flops, complex_factor=2, blocks_host=True)


def add(call: Call) -> Cost:
    """Added to a dense tensor: like index_add, only the named places (after a copy, unless in place).
    Added to a sparse one: both, one after the other."""
    target, source = call.inputs
    scaled = call.argument("alpha") != 1
    values, in_place = _values(source), call.outputs[0].storage == target.storage
    if not target.is_strided:
        flops = values * scaled
        return make_cost(call, MOVEMENT, flops, complex_factor=6, read=(target, source), written=call.outputs)
    counts = of_numbers(call, *sum_of_scaled(scaled))
    named = Region(call.outputs[0], min(values, target.numel) * target.dtype.itemsize)
    return make_cost(
        call,
        INDEXING,
        counts.flops * values,
        read=(*(target,) * (not in_place), source, named),
        written=(*call.outputs * (not in_place), named),
        complex_factor=1,
        access="scatter",
    )


def mask(call: Call) -> Cost:
    """A gather: the elements of a dense tensor at the places that the mask names."""
    values, sparse = call.outputs[0], call.inputs[1]
    nbytes = _values(values) * values.dtype.itemsize
    indices = Region(sparse, sparse.nbytes - _values(sparse) * sparse.dtype.itemsize)
    named = Region(call.inputs[0], min(nbytes, call.inputs[0].nbytes))
    return make_cost(call, INDEXING, read=(named, indices), written=(Region(values, nbytes),), access="gather")


def product(call: Call) -> Cost:
    """A product of a sparse and a dense matrix, in either order: for each value a multiply-add of a row or column of
    the dense one, by cuSPARSE on vector units (SparseCUDABlas.cpp). `addmm` adds beta·c."""
    *added, left, right = call.inputs
    sparse, dense, width = (right, left, left.shape[0]) if left.is_strided else (left, right, prod(right.shape[1:]))
    beta = call.argument("beta") if added else 0
    flops = 2 * _values(sparse) * width + (call.outputs[0].numel if beta else 0)
    rows = Region(dense, min(dense.nbytes, _values(sparse) * width * dense.dtype.itemsize))
    read = (sparse, rows, *(added if beta else ()))
    return make_cost(call, CONTRACTION, flops, read=read, access="gather")


def to_dense(call: Call) -> tuple[Cost, Cost]:
    """Fills the result with zeros, and adds the values at their places."""
    values, out = call.inputs[0], call.outputs[0]
    named = Region(out, min(out.nbytes, _values(values) * out.dtype.itemsize))
    return (
        zeros(call, out),
        make_cost(call, INDEXING, _values(values), read=(values, named), written=(named,), access="scatter"),
    )


def bag_gradient(call: Call) -> Cost:
    """Each bag's gradient goes to each row that went in, weighted or, for a mean, divided by their number. The indices
    are the given ones."""
    grad, bags, weights = (call.argument(name) for name in ("grad", "offset2bag", "per_sample_weights"))
    rows = _values(call.outputs[0])
    is_mean = call.argument("mode") == 1
    read = [grad, bags, *([weights] if weights is not None else []), *([call.argument("bag_size")] if is_mean else [])]
    flops = rows * ((weights is not None) + is_mean)
    written = Region(call.outputs[0], rows * grad.dtype.itemsize)
    return make_cost(call, INDEXING, flops, read=read, written=(written,), access="gather")


def sparse_rule(call: Call) -> Rule | None:
    """The rule of a call with a sparse argument. None: its work depends on values, as in the product of two sparse
    matrices, where it counts which of them meet."""
    rule = SPARSE.get(call.func) or SPARSE.get(call.func.overloadpacket)
    return None if rule is product and not any(spec.is_strided for spec in call.inputs[-2:]) else rule


def _values(spec: TensorSpec) -> int:
    return spec.held_values or 0


SPARSE: dict[OpOverloadPacket | OpOverload, Rule] = {
    **dict.fromkeys(
        (
            aten.is_coalesced, aten._coalesced_, aten._nnz, aten.sparse_dim, aten.dense_dim, aten.values,
            aten.crow_indices, aten.col_indices, aten.ccol_indices, aten.row_indices,
            aten._sparse_coo_tensor_with_dims_and_tensors, aten._sparse_coo_tensor_with_dims,
        ),
        no_kernel,
    ),
    **dict.fromkeys((aten.clone, aten.copy_, aten.copy_sparse_to_sparse_, aten._to_copy, aten._to_sparse_csr), copy),
    **dict.fromkeys((aten.mm, aten.addmm, aten._sparse_addmm, aten.mv, aten.addmv), product),
    aten._coalesce: coalesce,
    aten.sparse_mask: mask,
    aten._embedding_bag_backward: bag_gradient,
    aten._to_dense: to_dense,
    aten_overloads.add.Tensor: add,
    aten_overloads.add_.Tensor: add,
}  # fmt: skip
