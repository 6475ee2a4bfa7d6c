"""How a kernel walks its memory, and whether the host waits for it. These facts of an op decide its time, not its
counts. `make_cost` adds them to every cost; an op that is not here walks as its op class does.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import NamedTuple

import torch
from torch._ops import OpOverloadPacket

from flopmeter.costs.index_arithmetic import CAST_OPERATIONS, elements_grid, index_operations
from flopmeter.costs.reduce_grid import grid_of
from flopmeter.costs.scatter import scatter_of
from flopmeter.records import Access, Call, HostCopy, Scatter, TensorSpec, ThreadGrid
from flopmeter.torch_names.operators import aten

HALVES = (torch.float16, torch.bfloat16)
_COPIES = (aten.clone, aten._to_copy, aten.copy_, aten.copy)
_ACCESS: dict[OpOverloadPacket, Access] = {
    **dict.fromkeys(
        (
            aten.max_pool2d_with_indices, aten.max_pool3d_with_indices, aten.max_pool2d_with_indices_backward,
            aten.max_pool3d_with_indices_backward, aten.adaptive_max_pool2d, aten.adaptive_max_pool3d, aten.avg_pool2d,
            aten.avg_pool3d, aten.avg_pool2d_backward, aten.avg_pool3d_backward, aten.im2col, aten.col2im,
        ),
        "window",
    ),
    **dict.fromkeys(
        (
            aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put, aten.index_add,
            aten.index_add_, aten.scatter_add, aten.scatter_add_, aten.scatter_reduce, aten.scatter_reduce_,
        ),
        "scatter",
    ),
    **dict.fromkeys(
        (
            aten.native_batch_norm_backward, aten.batch_norm_backward, aten.cudnn_batch_norm_backward,
            aten.native_group_norm, aten.native_group_norm_backward,
        ),
        "channels",
    ),
}  # fmt: skip

# torch's NCHW kernels of these give each output position one thread, which loops over batch and channels
# (UpSampleBilinear2d.cu, UpSampleBicubic2d.cu).
_LOOP_OVER_PLANES = (aten.upsample_bilinear2d, aten._upsample_bilinear2d_aa, aten.upsample_bicubic2d)
_PLANE_THREADS = 1024  # of a block

# Integer instructions that join two values of a reduction, and of one in 16 bits. An extremum asks whether each is a
# number, a pair with an index compares both, var follows mean and squares (SharedReduceOps.h). Fitted on an H100
# (validation/traces, kernels_reduce): sums 1 to 2; extrema 3 to 5, in bf16 5 to 8; pairs 9 to 13; var 9 to 12.
_SUM, _EXTREMUM, _PAIR, _MOMENTS = (2, 2), (4, 6), (11, 11), (10, 10)
# Cycles of a thread for a value of an extremum in 16 bits: it jumps over the comparison where the first value is no
# number, and threads meet again behind it (two branches a value in the machine code of torch 2.15; none in fp32, nor
# where several values are loaded at once). Set on maxima of the columns of 300 x 300 on an H200, where few threads do
# nothing else meanwhile: 22.4 µs, 9.6 in fp32.
BRANCH_CYCLES = 83
_REDUCES: dict[OpOverloadPacket, tuple[int, int]] = {
    **dict.fromkeys((aten.sum, aten.nansum, aten.mean, aten.prod, aten.linalg_vector_norm, aten.norm), _SUM),
    **dict.fromkeys((aten.any, aten.all, aten.amax, aten.amin, aten.max, aten.min), _EXTREMUM),
    **dict.fromkeys((aten.argmax, aten.argmin, aten.aminmax), _PAIR),
    **dict.fromkeys((aten.var, aten.var_mean, aten.std, aten.std_mean), _MOMENTS),
}
_ASKS_FOR_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class Walk(NamedTuple):
    """The fields of `Cost` that follow from the op alone."""

    access: Access | None = None
    index_operations: int = 0
    scatter: Scatter = Scatter()
    grid: ThreadGrid | None = None
    link: HostCopy | None = None  # of a copy between host and device
    blocks_host: bool = False

    def over(self, operands: Sequence[TensorSpec]) -> Walk:
        """The same, for a kernel that walks these operands together, outputs first."""
        looked_up = index_operations(operands)
        return self._replace(
            index_operations=looked_up, scatter=scatter_of(operands), grid=elements_grid(operands, looked_up)
        )


def walk(call: Call) -> Walk:
    """How the kernel of the op walks its memory, whatever its rule says."""
    walked, packet = Walk(), call.func.overloadpacket
    if packet in _COPIES:
        walked = _copy(call)
    elif packet in _ACCESS:
        walked = Walk(access=_ACCESS[packet])
    elif packet in _LOOP_OVER_PLANES:
        x, *_ = call.inputs
        images, channels, *positions = call.outputs[0].shape
        if x.stride[1] != 1:
            walked = Walk(grid=ThreadGrid(ceil(prod(positions) / _PLANE_THREADS), _PLANE_THREADS, images * channels))
    elif packet in _REDUCES and len(call.inputs) == 1:  # of two tensors, max and min are element-wise
        walked = _reduction(call, _REDUCES[packet])
    if any(tag in call.func.tags for tag in _ASKS_FOR_DATA) and _shape_depends_on_data(call):
        return walked._replace(blocks_host=True)
    return walked


def _reduction(call: Call, joining: tuple[int, int]) -> Walk:
    """How a reduction over some dimensions, or over all, walks its input. `joining`: instructions to join two values,
    and two in 16 bits."""
    x, dims = call.inputs[0], call.get("dim")
    has_indices = len(call.outputs) == 2 and call.func.overloadpacket in (aten.max, aten.min)
    joining = _PAIR if has_indices else joining
    if dims is None or dims == ():
        reduced: Sequence[int] = range(len(x.shape))
    else:
        reduced = [dim % max(1, len(x.shape)) for dim in ((dims,) if isinstance(dims, int) else dims)]
    return _walk_of_reduction(x, reduced, joining)


def walk_of_sum(x: TensorSpec, dims: Sequence[int]) -> Walk:
    """How a sum over those dimensions walks its input."""
    return _walk_of_reduction(x, dims, _SUM)


def walk_of_extremum(x: TensorSpec, dims: Sequence[int]) -> Walk:
    """How a maximum or a minimum over those dimensions does."""
    return _walk_of_reduction(x, dims, _EXTREMUM)


def walk_of_place(x: TensorSpec, dims: Sequence[int]) -> Walk:
    """How it does that also finds where the maximum or minimum is."""
    return _walk_of_reduction(x, dims, _PAIR)


def _walk_of_reduction(x: TensorSpec, dims: Sequence[int], joining: tuple[int, int]) -> Walk:
    operations = joining[x.dtype in HALVES]
    branches = joining is _EXTREMUM and x.dtype in HALVES
    grid = grid_of(x, dims, operations, BRANCH_CYCLES * branches)
    return Walk(index_operations=operations * x.numel if grid else 0, grid=grid)


def _copy(call: Call) -> Walk:
    """How a copy between host and device goes over their link, blocking unless asked not to; or how a cast, a plain
    copy or a change of layout walks memory.

    Memory of the host that is not page-locked is staged. A new result there is page-locked if nothing waits for it
    (`_to_copy` in TensorConversions.cpp); in a program that cannot pin memory here, so counts what it does not wait
    for.
    """
    is_onto = call.func.overloadpacket in (aten.copy_, aten.copy)
    (target,) = call.outputs
    waits = not call.get("non_blocking")  # a clone stays where it is
    if is_onto and len(call.inputs) == 1:  # of a number torch makes a tensor on the host, as large as the target
        link = HostCopy(target.nbytes, is_staged=True)
        return Walk() if target.device == "cpu" else Walk(link=link, blocks_host=waits)
    source = call.inputs[1 if is_onto else 0]
    if source.device != target.device:
        is_made = target.device == "cpu" and not is_onto
        pinned = (source if source.device == "cpu" else target).is_pinned
        is_staged = waits if is_made or pinned is None else not pinned
        return Walk(link=HostCopy(source.nbytes, is_staged), blocks_host=waits)
    access: Access | None = "strided" if _order(source) != _order(target) else None
    walked = Walk(access).over((target, source))
    cast = cast_operations(source.dtype, target.dtype) * target.numel
    return walked._replace(index_operations=walked.index_operations + cast)


def cast_operations(source: torch.dtype, target: torch.dtype) -> int:
    """Integer operations of a cast, for each element."""
    is_float8 = target.is_floating_point and target.itemsize == 1 and source in (torch.float32, *HALVES)
    has_own_kernel = is_float8 or (source == torch.float32 and target in HALVES)
    return 0 if source == target or has_own_kernel else CAST_OPERATIONS


def _order(spec: TensorSpec) -> list[int]:
    """The dimensions from the slowest to the fastest in memory, without those of one element."""
    wide = [dim for dim, size in enumerate(spec.shape) if size > 1]
    return sorted(wide, key=lambda dim: -spec.stride[dim])


def _shape_depends_on_data(call: Call) -> bool:
    """Whether the host has to learn the size of the result. For an index that is so only if it is a mask; bincount
    copies it to the host before its last kernel."""
    if call.func.overloadpacket is aten.bincount:
        return False
    if call.func.overloadpacket is aten.index:
        return any(spec.dtype in (torch.bool, torch.uint8) for spec in call.inputs[1:])
    return True
