"""Index arithmetic of element-wise kernels: the integer operations that compute the address of each element.

torch walks operands that lie alike as one run of memory, 16 bytes a load. Where one is repeated, sliced or transposed,
every thread works out where each of its elements lies in each operand: it divides by the size of each dimension that
is left once neighbouring ones are merged (TensorIterator.cpp, coalesce_dimensions; CUDALoops.cuh, gpu_kernel_impl).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from flopmeter.records import TensorSpec, ThreadGrid

# Integer instructions for each element, as torch's source has them. For each dimension: a comparison whether there is
# one more (OffsetCalculator.cuh), multiply-high, add and shift for the quotient, a multiply-subtract for the remainder
# (IntegerDivider.cuh), and in each operand a multiply-add. Then an address for each, of 64 bits in two additions.
DIMENSION_OPERATIONS = 5
STEP_OPERATIONS = 1
ADDRESS_OPERATIONS = 2
# A kernel that loads and stores elements one by one does more than one that takes four at a time: more loads and
# stores, conversions of fp16 and tests for the end. Set on a trace of an H100 (AMD-AGI/TraceLens): a multiplication by
# a repeated row, of 9.2 million bf16 elements, takes 25 µs, of which its bytes take 13. That implies 12
# operations; image models on an RTX 3090 (pytorch-image-models, results/) imply none.
SINGLE_OPERATIONS = 8

# A copy to another type asks each element's type at run time (LoadWithCast and StoreWithCast in MemoryAccess.cuh), but
# from fp32 to fp16 and bf16, and from all three to floats of 8 bits, which have kernels of their own (Copy.cu). 9.2
# million elements from bf16 to fp32 take 29 µs on an H100, the other way 18 (trace in AMD-AGI/TraceLens); to fp8 ten
# copies of 10 to 125 µs reach 2.8 to 2.95 TB/s, as copies of one type do (validation/traces).
CAST_OPERATIONS = 40
# An element-wise kernel whose operands have several types does the same: 12.6 million sums of an fp32 and a bf16 number
# take 54 µs on an H100, of which their bytes take 43 (validation/traces, gpt2). Where it also finds the place of each
# element, which it then loads and stores one by one in any case, it takes this many more: from quotients and products
# by repeated rows, 24 to 35.
SINGLE_CAST_OPERATIONS = 24

# A thread of a pooling or an interpolation divides its number by sizes that it learns at run time (and again for where
# windows begin and end), some of 64 bits, and then visits the elements of its window one by one (DilatedMaxPool2d.cu,
# UpSampleBilinear2d.cu). On an H100 (torch 2.11, 2026-11: validation/traces) poolings of 2 x 2 and 3 x 3 take 190 and
# 250 operations for each maximum, their gradients 150 and 170 for each element of the input, whether in fp16 or fp32;
# an average takes 200 and 230, an interpolation 150.
PLACE_OPERATIONS = 140
VISIT_OPERATIONS = 15
# Sizes of 64 bits, by which the kernels for channels-last divide: averages take 170 operations more
# (avg_pool2d_out_cuda_frame_nhwc), as five quotients of 35 do. Nearest neighbours take three of them and nothing else
# (upsample_nearest2d_nhwc_out_frame: 103 to 105). In NCHW a thread of these finds its place once and copies four
# elements, in 38 operations each. Set on half of h100_kernels_vision's shapes.
LONG_QUOTIENT_OPERATIONS = 35
QUOTIENTS_OF_AVERAGE, QUOTIENTS_OF_NEAREST = 5, 3
NEAREST_OPERATIONS = 38

# `roll` finds the source of each element by a remainder and a quotient of 64 bits (roll_cuda_kernel in
# TensorTransformations.cu), which test for 32 bits first and then divide these. From 50 million bf16 elements on an
# H100, 235 µs (validation/traces); 26 million in fp32, in a step of Swin, imply the same.
ROLL_OPERATIONS = 72

# Instructions of a thread of `tril` and `triu`, which finds its row and column by two divisions of 64 bits; of one more
# division for each further dimension; and of an element, with the test for the triangle, its load and its store (the
# machine code of torch 2.15 for compute capability 9.0, without the slow paths). A thread takes up to 8 bytes of a row.
TRIANGLE_OPERATIONS, TRIANGLE_DIMENSION_OPERATIONS, TRIANGLE_ELEMENT_OPERATIONS = 100, 45, 25
TRIANGLE_BYTES = 8

# Ten rounds of Philox for four numbers, each of two products of 64 bits, which pass a unit for 32 bits twice, and four
# exclusive-ors and additions (Philox4x32 in curand_philox4x32_x.h), in all 80 instructions. Box-Muller's logarithm,
# square root, sine and cosine for two numbers are as long as 17 integer instructions a number: 67 million normal ones
# take 153 µs on an H100 (validation/traces).
RANDOM_OPERATIONS = 20
NORMAL_OPERATIONS = 17
# A random integer is the remainder of such a number by the size of the range. From a range of 2**28 on (random_from_to
# in DistributionTemplates.h) it takes two of the four numbers, and the remainder is one of 64 bits, of 64 instructions
# and 11 to call them (the machine code of torch 2.15 for compute capability 9.0); else 18 are taken, not counted: all
# measured ones are over in 3 µs.
WIDE_RANGE = 2**28
WIDE_REMAINDER_OPERATIONS, REMAINDER_OPERATIONS = 75, 18

# Threads of a block that takes elements one by one, and elements of a thread, by the bytes of a result
# (launch_legacy_kernel in CUDALoops.cuh).
ELEMENT_THREADS = 128
NARROW_ELEMENTS, WIDE_ELEMENTS, WIDE_BYTES = 4, 2, 4


# As long as a thread takes for a number that `bincount` counts, by an atomic addition in shared memory, where others of
# its warp may ask for the same place. Set on 10 million numbers and few bins on an H100, whose kernel takes 86 µs
# (validation/traces, kernels_index); 1 million there and 8 million in kernels_select imply the same.
COUNTING_OPERATIONS = 144


class MergedDimension(NamedTuple):
    """Dimensions that all operands walk as one: how many elements, and how far apart they lie in each operand."""

    size: int
    steps: tuple[int, ...]


def index_operations(operands: Sequence[TensorSpec]) -> int:
    """Integer operations of a kernel that walks these operands, outputs first; 0 where they all lie alike."""
    on_device, runs = walked_runs(operands)
    if not runs or (len(runs) == 1 and set(runs[0].steps) == {1}):
        return 0
    steps = len(runs) * (DIMENSION_OPERATIONS + STEP_OPERATIONS * len(on_device))
    return operands[0].numel * (steps + ADDRESS_OPERATIONS * len(on_device) + SINGLE_OPERATIONS)


def elements_grid(operands: Sequence[TensorSpec], operations: int) -> ThreadGrid | None:
    """The grid of a kernel that needs this many operations to work out where its elements lie. A thread loads, computes
    and stores one element after another, since what it stores might be what it loads next. None where vectors are
    loaded, or only repeated elements, for which a thread does not wait."""
    out, *inputs = operands
    if not operations or all(2 * spec.distinct_elements <= out.numel for spec in inputs):
        return None
    of_thread = elements_of_thread(out)
    blocks = ceil(out.numel / of_thread / ELEMENT_THREADS)
    return ThreadGrid(blocks, ELEMENT_THREADS, min(of_thread, ceil(out.numel / ELEMENT_THREADS)), by_element=True)


def elements_of_thread(out: TensorSpec) -> int:
    return NARROW_ELEMENTS if out.dtype.itemsize < WIDE_BYTES else WIDE_ELEMENTS


def place_operations(threads: int, visited: int = 0) -> int:
    """Integer operations of a kernel whose threads each find one element's place, and that many others one by one."""
    return PLACE_OPERATIONS * threads + VISIT_OPERATIONS * visited


def integer_operations(numbers: int, size_of_range: int) -> int:
    """Integer operations of so many random integers of a range, but those of one random number for each."""
    is_wide = size_of_range >= WIDE_RANGE
    return numbers * (RANDOM_OPERATIONS + WIDE_REMAINDER_OPERATIONS if is_wide else REMAINDER_OPERATIONS)


def walked_runs(operands: Sequence[TensorSpec]) -> tuple[list[TensorSpec], list[MergedDimension]]:
    """The operands on the device and their runs. A number on the host is a plain argument of the kernel. There are no
    runs where the tensors are walked one by one."""
    shape, device = operands[0].shape, operands[0].device
    on_device = [spec for spec in operands if spec.device == device]
    if not all(spec.is_strided and len(spec.shape) <= len(shape) for spec in on_device):
        return on_device, []
    return on_device, _runs(shape, [_strides(spec, len(shape)) for spec in on_device])


def _strides(spec: TensorSpec, dimensions: int) -> tuple[int, ...]:
    """The operand's stride in each dimension of the output; 0 where the operand is repeated."""
    own = tuple(0 if size == 1 else stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    return (0,) * (dimensions - len(own)) + own


def _runs(shape: Sequence[int], strides: list[tuple[int, ...]]) -> list[MergedDimension]:
    """The dimensions that are left after merging, from the fastest to the slowest. A dimension is merged with the next
    one if in all operands both are one run of memory."""
    by_dimension = list(zip(shape, zip(*strides, strict=True), strict=True))
    runs: list[MergedDimension] = []
    ends: tuple[int, ...] | None = None  # where the last run of each operand ends
    for size, steps in sorted(by_dimension, key=lambda entry: entry[1]):
        if size == 1:
            continue
        if steps == ends:
            runs[-1] = MergedDimension(runs[-1].size * size, runs[-1].steps)
        else:
            runs.append(MergedDimension(size, steps))
        ends = tuple(size * step for step in steps)
    return runs
