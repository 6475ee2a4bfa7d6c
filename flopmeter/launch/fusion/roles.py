"""How inductor treats an op: what it may share a kernel with, and over which elements it iterates."""

from __future__ import annotations

from math import ceil, inf, prod
from typing import NamedTuple

import torch
from torch._ops import OpOverloadPacket

from flopmeter.costs.dense_operands import a_library_reads, inductor_reads
from flopmeter.records import (
    ELEMENTWISE,
    INDEXING,
    MOVEMENT,
    NORMALIZATION,
    RANDOM,
    REDUCTION,
    Call,
    Cost,
    Region,
    TensorSpec,
    VectorWork,
)
from flopmeter.records.memory_format import dense_strides, is_channels_last
from flopmeter.torch_names.operators import aten


class Loops(NamedTuple):
    """The loops of a reduction: `kept` results over `reduced` elements each. A kernel has one such pair."""

    kept: int
    reduced: int
    is_inner: bool  # over the innermost dimensions, so that a row of the tensor makes one result
    takes_neighbours: bool = True  # over the innermost dimension, among others: neighbours in memory make one result


class Role(NamedTuple):
    """What an op may share its kernel with."""

    joins_producers: bool  # with the kernels that compute its inputs
    joins_consumers: bool  # with the kernels that read its outputs
    loops: Loops | None = None
    elements: int = 0  # that it computes
    lists: int = 0  # how many tensors each list of a foreach op has
    repeats: bool = True  # recomputation gives the same numbers: they are not random
    scatters: bool = False  # into memory that holds something already
    rereads: bool = False  # an operand: what it is decomposed into reads it more than once

    @property
    def wants_inlined(self) -> bool:
        """Whether producers fuse only by being computed inside of these loops: inductor does that for split loops over
        other than the innermost dimensions, where nothing else needs the value."""
        return self.loops is not None and not self.loops.takes_neighbours and splits_of(self.loops) > 1


OPAQUE = Role(False, False)
"""A kernel of a library, or one that inductor leaves to eager PyTorch."""


def _packets(names: str) -> frozenset[OpOverloadPacket]:
    return frozenset(aten.present(*names.split()))


# They read each input several times or at computed places, so inductor writes the input to memory first
# (`realize` in torch/_inductor/lowering.py); what follows them fuses.
_WINDOWS = _packets("""
    max_pool2d_with_indices max_pool2d_with_indices_backward max_pool3d_with_indices
    avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
    _adaptive_avg_pool2d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward
    adaptive_max_pool2d adaptive_max_pool3d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d
    upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    upsample_nearest1d_backward upsample_nearest2d_backward upsample_nearest3d_backward upsample_linear1d_backward
    upsample_bilinear2d_backward upsample_trilinear3d_backward upsample_bicubic2d_backward
    _upsample_bilinear2d_aa_backward _upsample_bicubic2d_aa_backward grid_sampler_2d im2col
""")
_FALLBACKS = _packets("""
    randperm multinomial poisson binomial _sample_dirichlet _standard_gamma median nanmedian mode kthvalue
    cummax cummin logcumsumexp max_pool3d_with_indices_backward adaptive_max_pool2d_backward
    adaptive_max_pool3d_backward _cdist_forward _pack_padded_sequence
    _native_multi_head_attention _transformer_encoder_layer_fwd
    sort topk _unique _unique2 _embedding_bag_backward _embedding_bag_dense_backward
""")

_LOOKUPS = ("gather", "rows")  # accesses that are loads at a computed place

# A loop over what is written, into memory that a kernel before has filled (index_put, scatter_reduce_ and what is
# decomposed into them, in torch/_inductor/lowering.py).
_SCATTERS = _packets("""
    index_put index_put_ _index_put_impl_ _unsafe_index_put _unsafe_masked_index_put_accumulate index_add index_add_
    index_copy index_copy_ index_fill index_fill_ scatter scatter_ scatter_add scatter_add_ scatter_reduce
    scatter_reduce_ embedding_dense_backward
""")
# Activations that are decomposed into several ops, which cast their input to fp32 and read that more than once.
_ACTIVATIONS = _packets("""
    silu silu_ gelu gelu_ hardswish hardswish_ mish mish_ elu elu_ leaky_relu leaky_relu_ selu selu_ celu celu_
    softplus silu_backward gelu_backward hardswish_backward mish_backward
""")
_NOT_ATOMIC = (torch.int64, torch.bool)  # needs_fallback_due_to_atomic_add_limitations in torch/_inductor/utils.py

# Ops on lists that inductor writes itself, one loop for each place of the lists in one kernel (`foreach_ops` in
# torch/_inductor/lowering.py; lerp by decomposition). With a list of numbers it knows lerp only.
_FOREACH = _packets(
    " ".join(
        f"_foreach_{name} _foreach_{name}_"
        for name in (
            "add", "sub", "mul", "div", "neg", "abs", "sign", "pow", "sqrt", "rsqrt", "reciprocal", "maximum",
            "minimum", "clamp_min", "clamp_max", "addcmul", "addcdiv", "lerp", "copy", "clone",
        )
    )
)  # fmt: skip
_WITH_NUMBERS = _packets("_foreach_lerp _foreach_lerp_")

# A reduction with too few results to fill a device, and many elements for each, is split into two kernels
# (`Reduction.num_splits` in torch/_inductor/ir.py and `reduction_split_factor` in choices.py; taken here for the 108
# SMs of an A100): rows of over 8192 elements (on Blackwell 524,288) with under two results per SM; columns of over 4
# times 32 elements with under 64 results per SM. What reads its result then needs another kernel.
SPLIT_REDUCED_ELEMENTS = 8192
SPLIT_KEPT_ELEMENTS = 2 * 108
SPLIT_OUTER_ELEMENTS = 4 * 32
SPLIT_OUTER_KEPT_ELEMENTS = 64 * 108


def role_of(call: Call, cost: Cost) -> Role:
    """The role of one kernel of the call."""
    packet = call.func.overloadpacket
    if packet in _FOREACH and (packet in _WITH_NUMBERS or not call.func.name().endswith(".ScalarList")):
        tensors = call.outputs or call.args[0]
        return Role(True, True, elements=sum(spec.numel for spec in tensors), lists=len(tensors))
    if packet in _FALLBACKS or call.func.namespace != "aten" or cost.link_bytes or _takes_lists(call):
        return OPAQUE
    if any(spec.dtype.is_complex or not spec.is_strided for spec in (*call.inputs, *call.outputs)):
        return OPAQUE  # eager PyTorch's kernel runs (`unsupported_input_tensor` in torch/_inductor/lowering.py)
    elements = max((region.spec.numel for region in cost.writes if region.spec is not None), default=0)
    if cost.op_class == MOVEMENT and _is_for_library(call, cost):
        return OPAQUE
    if packet in _SCATTERS and cost.op_class == INDEXING:
        return _role_of_scatter(call, cost)
    if packet in _WINDOWS:
        return Role(False, True, elements=elements)
    if cost.op_class in (ELEMENTWISE, MOVEMENT, RANDOM) or cost.access in _LOOKUPS:
        return Role(True, True, None, elements, repeats=cost.op_class != RANDOM, rereads=packet in _ACTIVATIONS)
    if cost.op_class == NORMALIZATION:
        return Role(True, True, _loops_of_normalization(call, cost, elements), elements)
    if cost.op_class == REDUCTION and _reduces_nothing(call, cost, elements):
        return Role(True, True, elements=elements)
    if cost.op_class == REDUCTION:
        loops = _loops_of_reduction(call, cost, elements)
        return Role(True, True, loops, elements)
    return OPAQUE


def _is_for_library(call: Call, cost: Cost) -> bool:
    """A copy that a library reads or adds to, such as that of a slice for a convolution. It does not fuse: then the
    published compiled times of mixnet, res2net and cspresnet (timm) are predicted better."""
    written = [region.spec for region in cost.writes if region.spec is not None]
    is_scratch = bool(written) and all(spec.storage < 0 for spec in written)
    return a_library_reads(call) or (is_scratch and not inductor_reads(call))


def _role_of_scatter(call: Call, cost: Cost) -> Role:
    written = {region.spec for region in cost.writes}
    adds = any(region.spec in written for region in cost.reads)
    by_mask = any(spec.dtype is torch.bool for spec in call.inputs[1:])
    if by_mask or (adds and any(spec is not None and spec.dtype in _NOT_ATOMIC for spec in written)):
        return OPAQUE
    elements = _elements_of(cost.writes[-1]) if cost.writes else 0  # none: no place was given
    return Role(True, False, elements=elements, scatters=True)


def _takes_lists(call: Call) -> bool:
    """Whether it is another foreach or fused optimizer op. (`cat` and `stack` return one tensor.)"""
    arguments, returns = call.func._schema.arguments, call.func._schema.returns
    returns_a_tensor = len(returns) == 1 and isinstance(returns[0].type, torch.TensorType)
    return bool(arguments) and isinstance(arguments[0].type, torch.ListType) and not returns_a_tensor


def _loops_of_normalization(call: Call, cost: Cost, results: int) -> Loops | None:
    """None if the statistics are given, as for a batch norm in evaluation, which is element-wise."""
    x, dim, normalized, groups = call.inputs[0], *map(call.get, ("dim", "normalized_shape", "group"))
    if dim is not None:
        return _loops(x.shape, (dim,), x)
    if normalized is not None:
        return _loops(x.shape, tuple(range(-len(normalized), 0)))
    if groups is not None:  # native_group_norm: [N, C, HxW] in `group` rows for each of N
        rows = int(call.argument("N")) * int(groups)
        return Loops(rows, x.numel // max(rows, 1), True)
    has_rows = (
        cost.access not in ("stream", "channels") and isinstance(cost.work, VectorWork) and bool(cost.work.rereads)
    )
    is_elementwise = not has_rows and results >= x.numel
    if is_elementwise:
        return None
    of_planes = cost.access == "statistics" and not is_channels_last(x.shape, x.stride)  # each in one piece
    return _loops(x.shape, _all_but_channels(x.shape))._replace(is_inner=of_planes, takes_neighbours=of_planes)


def _reduces_nothing(call: Call, cost: Cost, results: int) -> bool:
    """Whether it is a loss for each element, or the gradient of one that reads what its targets name."""
    return call.get("reduction") == 0 or results > sum(map(_elements_of, cost.reads))


def _elements_of(region: Region) -> int:
    """The iterations of a loop over the tensor: an element that is repeated counts as often as the tensor has it."""
    spec = region.spec
    if spec is None:
        return 0
    return spec.numel if region.nbytes == spec.nbytes else region.nbytes // spec.dtype.itemsize


def _loops_of_reduction(call: Call, cost: Cost, results: int) -> Loops:
    """The loops run over the dimensions that the op is given; without any over all, or all but the channels if each
    channel has a result."""
    dims = call.get("dim")
    if isinstance(dims, int):
        dims = (dims,)
    shape = call.inputs[0].shape
    picked = max(map(_elements_of, cost.reads))
    if not dims and picked < prod(shape):  # a loss reads what its targets name
        return Loops(results, picked // max(results, 1), True)
    if not dims and results > 1 and shape[1:2] == (results,):
        dims = _all_but_channels(shape)
    read = next((region.spec for region in cost.reads if region.spec is not None and region.spec.shape == shape), None)
    if read is not None and not is_channels_last(read.shape, read.stride):
        read = None  # eager PyTorch's layout of a result that inductor may never write
    return _loops(shape, tuple(dims) if dims else tuple(range(len(shape))), read)


def _all_but_channels(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim for dim in range(len(shape)) if dim != 1)


def _loops(shape: tuple[int, ...], dims: tuple[int, ...], spec: TensorSpec | None = None) -> Loops:
    """`spec`: that of the tensor in memory; without one its last dimension lies innermost."""
    rank = len(shape)
    reduced = {dim % rank for dim in dims} if rank else set()
    count = prod(shape[dim] for dim in reduced)
    strides = dense_strides(shape, channels_last=False) if spec is None else spec.stride
    outermost_first = sorted(range(rank), key=lambda dim: (strides[dim] or inf, shape[dim]), reverse=True)
    is_inner = reduced == set(outermost_first[rank - len(reduced) :])
    return Loops(prod(shape) // max(count, 1), count, is_inner, not rank or outermost_first[-1] in reduced)


def splits_of(loops: Loops) -> int:
    """Into how many parts inductor splits a reduction, whose results another kernel adds up; 1: into none."""
    if loops.takes_neighbours:
        is_split = loops.reduced > SPLIT_REDUCED_ELEMENTS and loops.kept < SPLIT_KEPT_ELEMENTS
        return ceil(loops.reduced / SPLIT_REDUCED_ELEMENTS) if is_split else 1
    is_split = loops.reduced > SPLIT_OUTER_ELEMENTS and loops.kept < SPLIT_OUTER_KEPT_ELEMENTS
    return ceil(loops.reduced / SPLIT_OUTER_ELEMENTS) if is_split else 1


def is_pointwise(role: Role) -> bool:
    """Whether each element of the result follows from a few elements of the inputs, so that a reader can compute it."""
    return role.joins_producers and role.joins_consumers and role.loops is None and not role.lists and role.repeats
