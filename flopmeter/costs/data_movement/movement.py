"""Data movement, random numbers and sorting: no arithmetic, bytes by what is touched."""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log2, prod

import torch

from flopmeter.costs.access import walk_of_extremum, walk_of_place, walk_of_sum
from flopmeter.costs.index_arithmetic import (
    COUNTING_OPERATIONS,
    NORMAL_OPERATIONS,
    ROLL_OPERATIONS,
    TRIANGLE_BYTES,
    TRIANGLE_DIMENSION_OPERATIONS,
    TRIANGLE_ELEMENT_OPERATIONS,
    TRIANGLE_OPERATIONS,
    integer_operations,
)
from flopmeter.costs.multi_tensor import in_launches
from flopmeter.costs.rules import FREE, make_cost, reduced, rule, scratch, zeros
from flopmeter.costs.scatter import LINE_BYTES, SECTOR_BYTES, WARP
from flopmeter.costs.windows import covered
from flopmeter.records import (
    ELEMENTWISE,
    MOVEMENT,
    RANDOM,
    REDUCTION,
    SORTING,
    Call,
    Cost,
    HostCopy,
    Region,
    Scatter,
    TensorSpec,
    VectorWork,
)
from flopmeter.torch_names.dispatcher import running_version
from flopmeter.torch_names.operators import aten


@rule(
    aten.empty, aten.empty_like, aten.empty_strided, aten.empty_permuted, aten.new_empty, aten.new_empty_strided,
    aten._unsafe_view, aten._reshape_alias, aten.lift_fresh, aten.resize_, aten.set_, aten.detach_, aten.squeeze_,
    aten.unsqueeze_, aten.transpose_, aten.t_, aten.as_strided_, aten.is_same_size, aten.is_set_to,
    aten.record_stream, aten.is_pinned, aten._has_same_storage_numel,
    aten._efficientzerotensor, aten.resize_as_, aten.unsafe_split, aten.unsafe_split_with_sizes,
    aten.shallow_copy_data_,  # torch 2.15
)  # fmt: skip
def no_kernel(call: Call) -> tuple[Cost, ...]:
    """Allocation and metadata: the host's work, nothing on the device."""
    return FREE


@rule(
    aten.zeros, aten.zeros_like, aten.ones, aten.ones_like, aten.full, aten.full_like, aten.new_zeros, aten.new_ones,
    aten._new_zeros_with_same_feature_meta, aten.new_full, aten.arange, aten.linspace, aten.logspace, aten.eye,
    aten.scalar_tensor, aten.tril_indices, aten.triu_indices,
)  # fmt: skip
def factory(call: Call) -> Cost:
    """Writes its output; a tensor that only gives the shape is not read."""
    return make_cost(call, MOVEMENT, read=())


@rule(aten.fill, aten.fill_, aten.zero, aten.zero_)
def fill(call: Call) -> Cost:
    """Overwrites; the old content is not read."""
    return make_cost(call, MOVEMENT, read=call.inputs[1:])


@rule(aten._foreach_copy_, aten._foreach_copy)
def foreach_copy(call: Call) -> Cost:
    """Reads the sources; the old content of the targets is not read."""
    cost = make_cost(call, MOVEMENT, read=call.argument("src"))
    return in_launches(cost, (spec.numel for spec in call.argument("src")), 2)


@rule(
    aten._chunk_cat, aten.reflection_pad1d,
    aten.reflection_pad2d, aten.reflection_pad3d, aten.replication_pad1d, aten.replication_pad2d,
    aten.replication_pad3d, aten.rot90, aten.repeat, aten.pixel_shuffle, aten.pixel_unshuffle,
    aten.channel_shuffle, aten.native_channel_shuffle, aten.repeat_interleave,
    aten._foreach_clone, aten.lu_unpack,
)  # fmt: skip
def rearrange(call: Call) -> Cost:
    """Reads what moves, writes where it goes."""
    return make_cost(call, MOVEMENT)


@rule(aten.block_diag, aten.diag_embed)
def onto_diagonals(call: Call) -> tuple[Cost, ...]:
    """Zeros, and a copy of each input onto them."""
    (out,) = call.outputs
    copies = (
        make_cost(call, MOVEMENT, read=(x,), written=(Region(out, x.numel * out.dtype.itemsize),)) for x in call.inputs
    )
    return zeros(call, out), *copies


@rule(aten.im2col)
def im2col(call: Call) -> Cost:
    """Reads what the windows cover, and writes it once for each of them."""
    (x,) = call.inputs
    options = [call.argument(name) for name in ("kernel_size", "stride", "padding", "dilation")]
    windows = [
        (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
        for size, kernel, stride, padding, dilation in zip(x.shape[-2:], *options, strict=True)
    ]
    return make_cost(call, MOVEMENT, read=(covered(x, windows, *options),))


@rule(aten.tril, aten.triu, aten.tril_, aten.triu_)
def triangle(call: Call) -> Cost:
    """Reads the elements that it keeps and writes all, zeros for the rest. In place, the elements that it keeps are not
    touched."""
    (x,), (out,) = call.inputs, call.outputs
    *batch, rows, columns = x.shape
    is_lower = call.func.overloadpacket in (aten.tril, aten.tril_)
    first = call.argument("diagonal") + is_lower  # columns of the first row below the diagonal; one more in each row

    def of_all_rows(start: int) -> int:
        """start + (start + 1) + ..., where that is positive."""
        before, after = max(start - 1, 0), max(start + rows - 1, 0)
        return (after * (after + 1) - before * (before + 1)) // 2

    below = of_all_rows(first) - of_all_rows(first - columns)
    kept = prod(batch) * (below if is_lower else rows * columns - below) * x.dtype.itemsize
    if out.storage == x.storage:
        return make_cost(call, MOVEMENT, read=(), written=(Region(x, max(0, x.nbytes - kept)),))
    return make_cost(call, MOVEMENT, read=(Region(x, min(kept, x.nbytes)),), work=_work_on_triangle(out))


def _work_on_triangle(out: TensorSpec) -> VectorWork:
    """A thread takes neighbours, up to 8 bytes of a row, and loads and stores them one by one, so that each store of a
    warp touches the same sectors as the one before (triu_tril_kernel in TriangularOps.cu)."""
    of_thread = max(1, TRIANGLE_BYTES // out.dtype.itemsize)
    *_, columns = out.shape
    threads = out.numel // max(columns, 1) * ceil(columns / of_thread)
    of_place = TRIANGLE_OPERATIONS + TRIANGLE_DIMENSION_OPERATIONS * (len(out.shape) - 2)
    instructions = threads * (of_place + of_thread * TRIANGLE_ELEMENT_OPERATIONS)
    sectors, lines = (WARP * TRIANGLE_BYTES // nbytes for nbytes in (SECTOR_BYTES, LINE_BYTES))
    again = ceil(threads / WARP) * (of_thread - 1)
    return VectorWork(instructions=instructions, scatter=Scatter(2 * again * lines, again * sectors))


@rule(aten.flip)
def flip(call: Call) -> Cost:
    """A copy from the other end: along those dimensions the input is walked backwards (flip_kernel_impl in
    TensorTransformations.cu)."""
    (x,), (out,) = call.inputs, call.outputs
    flipped = {dim % max(len(x.shape), 1) for dim in call.argument("dims")}
    steps = tuple(-step if dim in flipped else step for dim, step in enumerate(x.stride))
    return make_cost(call, MOVEMENT, walks=(out, x._replace(stride=steps)))


@rule(aten.roll)
def roll(call: Call) -> tuple[Cost, ...]:
    """One kernel for each dimension, of a copy each (aten/src/ATen/native/cuda/TensorTransformations.cu)."""
    (x,), (out,) = call.inputs, call.outputs
    places = [x, *(scratch(out, number) for number in range(1, len(call.argument("dims")))), out]
    return tuple(
        make_cost(call, MOVEMENT, read=(source,), written=(target,), index_operations=ROLL_OPERATIONS * out.numel)
        for source, target in pairwise(places)
    )


@rule(
    aten.alias_copy, aten.as_strided_copy, aten.detach_copy, aten.diagonal_copy, aten.expand_copy, aten.narrow_copy,
    aten.permute_copy, aten.select_copy, aten.slice_copy, aten.split_copy, aten.split_with_sizes_copy,
    aten.squeeze_copy, aten.t_copy, aten.transpose_copy, aten.unbind_copy, aten.unfold_copy, aten.unsqueeze_copy,
    aten.view_copy, aten.view_as_complex_copy, aten.view_as_real_copy, aten._reshape_alias_copy,
    aten.lift_fresh_copy,
)  # fmt: skip
def view_copy(call: Call) -> Cost:
    """A view and a copy of it: reads no more than it writes, and an expanded tensor at its base size."""
    (x,), written = call.inputs, sum(spec.nbytes for spec in call.outputs)
    return make_cost(call, MOVEMENT, read=(Region(x, min(x.nbytes, written)),))


def _part_of(whole: TensorSpec, part: TensorSpec) -> Region:
    """The region that the part is written to: every element once, even of an expanded part (a sum's gradient)."""
    return Region(whole, min(part.numel * part.dtype.itemsize, whole.nbytes))


@rule(aten.slice_backward, aten.select_backward, aten.diagonal_backward)
def scatter_into_zeros(call: Call) -> tuple[Cost, Cost]:
    """The gradient of a view: a tensor of zeros, then the gradient copied into its part."""
    (grad,), (out,) = call.inputs, call.outputs
    placed = make_cost(call, MOVEMENT, written=(_part_of(out, grad),))
    return zeros(call, out), placed


@rule(aten.slice_scatter, aten.select_scatter, aten.diagonal_scatter, aten.as_strided_scatter)
def scatter_copy(call: Call) -> tuple[Cost, Cost]:
    """A copy of the whole tensor, then the part written over it."""
    (base, part), (out,) = call.inputs, call.outputs
    placed = make_cost(call, MOVEMENT, read=(part,), written=(_part_of(out, part),))
    return (make_cost(call, MOVEMENT, read=(base,)), placed)


@rule(aten.masked_fill)
def masked_fill(call: Call) -> tuple[Cost, Cost]:
    """A clone, then `masked_fill_` on it (ATen/native/TensorAdvancedIndexing.cpp). Selecting is 0 FLOP."""
    x, *rest = call.inputs
    (out,) = call.outputs
    fill = make_cost(call, ELEMENTWISE, read=(out, *rest), walks=(out, out, *rest))
    return (make_cost(call, MOVEMENT, read=(x,)), fill)


@rule(aten.constant_pad_nd)
def constant_pad(call: Call) -> tuple[Cost, Cost]:
    """The whole output is filled, then the input copied into it, line by line (ATen/native/PadNd.cpp)."""
    (x,) = call.inputs
    (out,) = call.outputs
    inside = tuple(map(min, x.shape, out.shape))
    written = (Region(out, min(x.numel, out.numel) * x.dtype.itemsize),)
    walks = (out._replace(shape=inside), x._replace(shape=inside))
    return make_cost(call, MOVEMENT, read=()), make_cost(call, MOVEMENT, written=written, walks=walks)


@rule(
    aten.rand, aten.rand_like, aten.randn, aten.randn_like, aten.randint, aten.randint_like,
    aten.bernoulli_, aten.normal_, aten.uniform_, aten.exponential_, aten.random_, aten.cauchy_, aten.log_normal_,
    aten.geometric_, aten._philox_normal_, aten._philox_uniform_, aten._philox_randint_,  # the last since torch 2.15
    aten._philox_normal, aten._philox_uniform, aten._philox_randint,
)  # fmt: skip
def random_fill(call: Call) -> Cost:
    """Writes its output; the tensor that is overwritten, or only lends its shape, is not read. Random numbers are
    integer work, 0 FLOP."""
    is_normal = "normal" in call.func.overloadpacket.__name__ or "randn" in call.func.overloadpacket.__name__
    written = sum(spec.numel for spec in call.outputs)
    operations = NORMAL_OPERATIONS * is_normal * written
    if call.func.overloadpacket in (aten.randint, aten.randint_like, aten.random_):
        operations = integer_operations(written, _size_of_range(call))
    return make_cost(call, RANDOM, read=call.inputs[1:], index_operations=operations, random_numbers=written)


def _size_of_range(call: Call) -> int:
    """How many different integers may be drawn. 0 where no bound is given, or by a tensor."""
    low, high = (call.get("low") or call.get("from") or 0), (call.get("high") or call.get("to"))
    return high - low if isinstance(low, int) and isinstance(high, int) else 0


@rule(
    aten.bernoulli, aten.normal, aten.poisson, aten.binomial, aten._sample_dirichlet,
    aten._standard_gamma, aten._philox_key_split, aten._philox_key_fold_in,
)  # fmt: skip
def random_sample(call: Call) -> Cost:
    """Reads probabilities, parameters or keys, writes the samples or keys."""
    return make_cost(call, RANDOM)


_BOUNDS_AT_ONCE = running_version() >= (2, 12)  # by aminmax; before that by min and max, one after the other


@rule(aten.multinomial)
def multinomial(call: Call) -> tuple[Cost, ...]:
    """One sample, or samples without replacement, are where p / q is largest, with q drawn from an exponential
    distribution. Before that kernels check p: it has to be finite and not negative, and no row's sum 0
    (aten/src/ATen/native/Distributions.cpp)."""
    (p,), (samples,) = call.inputs, call.outputs
    draws = call.argument("num_samples")
    if call.argument("replacement") and draws > 1:
        return _with_replacement(call, p, samples)
    rows = p.shape[:-1]
    q, sums, one = scratch(p), *(scratch(p, n)._replace(shape=s, stride=(1,) * len(s)) for n, s in ((2, rows), (3, ())))
    found, flag = (spec._replace(dtype=torch.bool, storage=spec.storage - 2) for spec in (sums, one))

    def kernel(op_class: str, read: tuple[TensorSpec, ...], written: tuple[TensorSpec, ...], flops: int = 0) -> Cost:
        return make_cost(call, op_class, flops, read=read, written=written)

    of_all, last = walk_of_extremum(p, range(len(p.shape))), (len(p.shape) - 1,)
    bounds = [(one, one)] if _BOUNDS_AT_ONCE else [(one,), (one,)]
    largest = reduced(call, q, samples, walked=walk_of_place(q, last))
    turned, asserted = kernel(ELEMENTWISE, (flag,), (flag,)), kernel(MOVEMENT, (flag,), ())
    return (
        *(reduced(call, p, *written, walked=of_all) for written in bounds),
        *(kernel(ELEMENTWISE, (one,), (flag,)),) * 2,
        *(turned, asserted),
        reduced(call, p, sums, walked=walk_of_sum(p, last), flops=p.numel),
        kernel(ELEMENTWISE, (sums,), (found,)),
        *((kernel(REDUCTION, (found,), (flag,)),) if rows else ()),
        *(turned, asserted),
        kernel(RANDOM, (), (q,)),
        kernel(ELEMENTWISE, (p, q), (q,), p.numel),
        largest if draws == 1 else kernel(SORTING, (q,), (samples,)),
    )


def _with_replacement(call: Call, p: TensorSpec, samples: TensorSpec) -> tuple[Cost, ...]:
    """p, copied twice, is divided by the sums of its rows and summed up; then each sample is looked for in the running
    sums, at log2 n + 1 places (aten/src/ATen/native/cuda/MultinomialKernel.cu)."""
    kept, normalized, sums = (scratch(p, number) for number in (1, 2, 3))
    probed = samples.numel * (ceil(log2(p.shape[-1])) + 1) * p.dtype.itemsize
    return (
        make_cost(call, MOVEMENT, written=(kept,)),
        make_cost(call, MOVEMENT, read=(kept,), written=(normalized,)),
        make_cost(call, REDUCTION, 2 * p.numel, read=(normalized,), written=(normalized,)),
        make_cost(call, REDUCTION, p.numel, read=(normalized,), written=(sums,)),
        make_cost(call, RANDOM, read=(Region(sums, min(probed, sums.nbytes)),)),
    )


@rule(
    aten.kthvalue, aten.unique_dim, aten.unique_consecutive, aten.isin, aten.nonzero_static,
    aten.histc, aten.histogram, aten._histogramdd_bin_edges, aten._histogramdd_from_bin_cts,
    aten._histogramdd_from_bin_tensors,
)  # fmt: skip
def sorting(call: Call) -> Cost:
    """Comparisons: 0 FLOP. Bytes of one pass over inputs and outputs, the least that any method moves."""
    return make_cost(call, SORTING)


@rule(aten.bincount)
def bincount(call: Call) -> tuple[Cost, ...]:
    """The smallest and the largest number, of which the host learns each before it goes on; zeros; and the numbers
    counted (aten/src/ATen/native/cuda/SummaryOps.cu)."""
    x, *weights = call.inputs
    (out,) = call.outputs
    if not x.numel:
        return (zeros(call, out),)
    one = scratch(x)._replace(shape=(), stride=())
    found = reduced(call, x, one, walked=walk_of_extremum(x, range(len(x.shape))))
    asked = make_cost(call, MOVEMENT, read=(one,), written=(), work=HostCopy(one.nbytes), blocks_host=True)
    counted = make_cost(call, REDUCTION, read=(x, *weights), index_operations=COUNTING_OPERATIONS * x.numel)
    return found, asked, found, asked, zeros(call, out), counted


@rule(aten._assert_async)
def assertion(call: Call) -> Cost:
    """One thread looks at one number (aten/src/ATen/native/cuda/TensorCompare.cu); the host does not wait for it."""
    return make_cost(call, MOVEMENT)


@rule(aten._local_scalar_dense, aten._linalg_check_errors)
def item(call: Call) -> Cost:
    """One element (or the status of each matrix) copied to the host, which waits for it."""
    (read,) = call.inputs
    return make_cost(call, MOVEMENT, written=(Region(None, read.nbytes),))
