"""`cat` and `stack`: which of torch's kernels copies the inputs, how many blocks it starts and what a thread computes.

Shape.cu in aten/src/ATen/native/cuda, alike in torch 2.11 to 2.13. Three kernels take all inputs at once, with a row of
blocks for each as long as the longest input needs: where rows are multiples of 16 bytes a thread copies 16 at a time;
else it finds the place of each element by divisions; where inputs have gaps, twice. What none of them takes is copied
one input after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import ceil, prod
from typing import NamedTuple

from flopmeter.costs.access import cast_operations
from flopmeter.costs.index_arithmetic import ADDRESS_OPERATIONS, index_operations
from flopmeter.costs.rules import in_one_piece, make_cost, rule
from flopmeter.costs.scatter import SECTOR_BYTES, scatter_of
from flopmeter.records import MOVEMENT, Call, Cost, GridLoop, Scatter, TensorSpec, ThreadGrid, VectorWork
from flopmeter.records.memory_format import is_channels_last, is_dense
from flopmeter.torch_names.operators import aten

MOST_DIMENSIONS = 4  # CAT_ARRAY_MAX_INPUT_DIMS
MOST_OFFSET = 2**31 - 1  # canUse32BitIndexMath in IndexUtils.cuh
LOAD_BYTES = 16
SHORT_LOAD_BYTES = 8  # of elements in 16 bits that are stored one by one
# Threads of a block, and blocks of an input on an SM: of a kernel that loads several elements at a time
# (getCatGridContig), and of one that does not (getCatGrid).
LONG_THREADS, LONG_BLOCKS_PER_SM = 128, 32
SINGLE_THREADS, SINGLE_BLOCKS_PER_SM = 512, 2

# A kernel divides by numbers that it learns at run time: 'up to 20 instructions' (CUDA C++ Programming Guide,
# Arithmetic Instructions), of which a loop finds the reciprocal once; then the remainder and a step. On an H100, six
# divisions for each of 19 and 58 million elements (validation/traces: Swin, ViT) and three for each of 6.4 million more
# (DenseNet) imply 6 to 8, and six for each of 9.2 million (AMD-AGI/TraceLens) 8.
DIVISION_OPERATIONS = 7
STEP_OPERATIONS = 2
# Clock cycles of one, which waits for the one before. An input alone has half of an SM's threads, too few to hide that
# and the load after it. Set on caches of keys with gaps on an H100 (validation/traces, kernels_select): six divisions.
# On an A100 that decodes with three (Hugging Face optimum-benchmark, torch 2.1) the largest batches are within 7 %.
DIVISION_CYCLES = 85


class CatKernel(NamedTuple):
    """A kernel that takes all inputs at once."""

    at_a_time: int  # elements that a thread loads
    threads: int  # of a block
    blocks_per_sm: int  # of an input
    divisions: int  # for a place
    places: int = 1  # found for each element: where it goes, and, if inputs have gaps, comes from; 0: of loads alone


@rule(aten.cat, aten.stack)
def cat(call: Call) -> Cost | tuple[Cost, ...]:
    """Reads what moves, writes where it goes."""
    (out,) = call.outputs
    dim = call.argument("dim") % len(out.shape)
    inputs = [_unsqueezed(spec, call, dim) for spec in call.inputs if spec.numel]
    parts, kernel = _parts(call, inputs, dim), _kernel(inputs, dim)
    if kernel is None:
        return tuple(_copy(call, part, spec) for part, spec in zip(parts, inputs, strict=True))
    written = parts if prod(parts[0].shape[dim:]) * out.dtype.itemsize < SECTOR_BYTES else None
    return make_cost(call, MOVEMENT, written=written, work=work_of(kernel, inputs))


def work_of(kernel: CatKernel, inputs: Sequence[TensorSpec]) -> VectorWork:
    """What its threads do besides moving bytes. Inputs without elements are left out."""
    if not kernel.places:
        return VectorWork(grid=_grid(kernel, inputs))
    divided = kernel.places * kernel.divisions * (DIVISION_OPERATIONS + STEP_OPERATIONS)
    return VectorWork(
        index_operations=sum(spec.numel for spec in inputs) * (divided + 2 * ADDRESS_OPERATIONS),
        grid=_grid(kernel, inputs),
        scatter=_scatter(inputs) if kernel.places == 2 else Scatter(),
    )


def _copy(call: Call, part: TensorSpec, spec: TensorSpec) -> Cost:
    operations = index_operations((part, spec)) + cast_operations(spec.dtype, part.dtype) * spec.numel
    return make_cost(call, MOVEMENT, read=(spec,), written=(part,), walks=(part, spec), index_operations=operations)


def _unsqueezed(spec: TensorSpec, call: Call, dim: int) -> TensorSpec:
    """The input as `cat` sees it. One that is stacked along the last dimension has one more; else `stack` is a `cat`
    whose result is viewed with one more (TensorShape.cpp)."""
    is_stacked = call.func.overloadpacket is aten.stack and dim == len(spec.shape)
    return spec._replace(shape=(*spec.shape, 1), stride=(*spec.stride, 1)) if is_stacked else spec


def _kernel(inputs: Sequence[TensorSpec], dim: int) -> CatKernel | None:
    """The kernel that takes all inputs at once; None if none does."""
    if not _can_be_taken_at_once(inputs):
        return None
    is_last = all(is_channels_last(spec.shape, spec.stride) for spec in inputs)
    is_without_gaps = all(is_dense(spec.shape, spec.stride, channels_last=is_last) for spec in inputs)
    if is_last and not is_without_gaps:
        return None
    item_bytes, divisions = inputs[0].dtype.itemsize, len(inputs[0].shape) - 1
    if not is_without_gaps:
        return CatKernel(1, SINGLE_THREADS, SINGLE_BLOCKS_PER_SM, divisions, places=2)
    is_aligned = all(spec.offset * item_bytes % LOAD_BYTES == 0 for spec in inputs)
    if is_aligned and not is_last and all(prod(spec.shape[dim:]) * item_bytes % LOAD_BYTES == 0 for spec in inputs):
        return CatKernel(LOAD_BYTES // item_bytes, LONG_THREADS, LONG_BLOCKS_PER_SM, dim, places=0)
    if is_aligned and 1 < item_bytes <= LOAD_BYTES // 2:
        at_a_time = (SHORT_LOAD_BYTES if item_bytes == 2 else LOAD_BYTES) // item_bytes
        return CatKernel(at_a_time, LONG_THREADS, LONG_BLOCKS_PER_SM, divisions)
    return CatKernel(1, SINGLE_THREADS, SINGLE_BLOCKS_PER_SM, divisions)


def _can_be_taken_at_once(inputs: Sequence[TensorSpec]) -> bool:
    first, *others = inputs or (None,)
    if first is None or not others or len(first.shape) > MOST_DIMENSIONS:
        return False
    are_alike = all(spec.is_strided and (spec.dtype, spec.device) == (first.dtype, first.device) for spec in inputs)
    return are_alike and sum(spec.numel for spec in inputs) <= MOST_OFFSET


def _grid(kernel: CatKernel, inputs: Sequence[TensorSpec]) -> ThreadGrid:
    needed = [ceil(spec.numel / kernel.at_a_time / kernel.threads) for spec in inputs]
    loop = GridLoop(len(inputs), max(needed), kernel.blocks_per_sm)
    cycles = max(1, kernel.places) * kernel.divisions * DIVISION_CYCLES
    return ThreadGrid(sum(needed), kernel.threads, 1, cycles=cycles, by_element=True, loop=loop)


def _scatter(inputs: Sequence[TensorSpec]) -> Scatter:
    """Threads take the elements of each input in the order of its shape."""
    ordered = (in_one_piece(spec, spec.shape) for spec in inputs)
    lookups, requests, lines = zip(*(scatter_of(pair) for pair in zip(ordered, inputs, strict=True)), strict=True)
    return Scatter(sum(lookups), sum(requests), max(lines))


def _parts(call: Call, inputs: Sequence[TensorSpec], dim: int) -> list[TensorSpec]:
    """Where in the result each input goes."""
    (out,) = call.outputs
    is_viewed = bool(inputs) and len(out.shape) > len(inputs[0].shape)
    stride = out.stride[:dim] + out.stride[dim + 1 :] if is_viewed else out.stride
    ends = accumulate((spec.shape[dim] * stride[dim] for spec in inputs), initial=out.offset)
    return [out._replace(shape=spec.shape, stride=stride, offset=next(ends)) for spec in inputs]
