"""Softmax and its logarithm, forward and backward, by the kernels of torch (aten/src/ATen/native/cuda): a warp for a
row that its registers hold (PersistentSoftmax.cuh), a block for a longer one (SoftMax.cu)."""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

import torch

from flopmeter.costs.arithmetic.normalization import (
    LOAD_BYTES,
    OPERATIONS_TO_COMBINE,
    WARP_THREADS,
    read_by_another_kernel,
)
from flopmeter.costs.rules import make_cost, rule, scratch
from flopmeter.records import ELEMENTWISE, NORMALIZATION, REDUCTION, Call, Cost, Reread, TensorSpec, ThreadGrid
from flopmeter.records.powers_of_two import power_of_two_from, power_of_two_up_to
from flopmeter.torch_names.operators import aten

MOST_THREADS = 1024  # of a block
WIDE_ROWS = 64  # several threads share rows of this many elements if no more rows lie side by side
NARROW_INSTRUCTIONS = 2  # more in those loops on an element of two bytes
NARROW_OPERATIONS = 24  # more on an element of two bytes, which are converted to fp32 and back
# Two numbers of each thread are combined with those of other lanes in five steps of a shuffle, which counts as four
# operations (an SM does them for 32 threads in a cycle, arithmetic for 128), and an addition.
OPERATIONS_OF_SHUFFLES = 25
STEPS_OF_WARP = 5  # 32 lanes, then 16, down to one
# A block of 1024 threads does so in two stages, and computes each exponential twice.
REGISTER_ELEMENT_OPERATIONS = 72
# From this many elements of a thread on these kernels take more than 32 registers for each, at most 48, by the compute
# capability that they are compiled for, times ten (torch 2.11's library for CUDA 13): an SM holds one block.
MORE_REGISTERS = ((75, 7), (80, 8), (90, 7), (100, 5))


class _Kernels(NamedTuple):
    """The kernels of one direction. Operations on an element count its load, its store and their addresses."""

    passes: int  # over a row that no registers hold, after the first
    longest_in_warp: int
    longest_in_block: int  # whose registers hold it; 0: there is no such kernel
    element_operations: int  # of a warp's thread, in fp32
    # Of a thread on an element of a row that it walks, in fp32; such blocks have as many threads as there may be. 0:
    # they were not counted, and blocks have half as many threads as a long row has loads.
    loop_instructions: float = 0.0


# Set on rows of 32 to 1,024 elements in bf16 and fp32 (H100 SXM, torch 2.11, 2026-11: validation/traces,
# h100_kernels_norm), those of a block on rows of 4,096, and fp32 also on an A100, which a thousand elements keep at its
# memory's rate ([NeuSight]). torch 2.1 had other kernels for rows of more than 1,024.
# Loops: as in the machine code of torch 2.15 for compute capability 9.0 (cunn_SoftMaxForward), 334 and 158
# instructions for eight elements of bf16, 162 and 70 for four of fp32.
FORWARD = _Kernels(2, 2048, 9216, 24, 40.5)
FORWARD_LOG = FORWARD._replace(element_operations=12, loop_instructions=17.5)  # no division
BACKWARD = _Kernels(1, 1024, 0, 8)  # no exponential
BACKWARD_LOG = BACKWARD._replace(element_operations=12)


@rule(aten._softmax, aten._log_softmax, aten.softmax, aten.log_softmax)  # the last two where `out=` is given
def softmax(call: Call) -> Cost:
    """Subtract the maximum, exp, sum, divide (log: subtract the logarithm): 4; the maximum is 0."""
    (x,) = call.inputs
    is_log = call.func.overloadpacket in (aten._log_softmax, aten.log_softmax)
    rereads, grid = _threads(call, x, FORWARD_LOG if is_log else FORWARD)
    return make_cost(call, NORMALIZATION, 4 * x.numel, transcendentals=x.numel, rereads=rereads, grid=grid)


@rule(aten._safe_softmax)
def safe_softmax(call: Call) -> tuple[Cost, ...]:
    """A softmax, then 0 for each row that is masked throughout: which elements are -inf, which rows have no others,
    and the choice (aten/src/ATen/native/SoftMax.cpp)."""
    (x,), (out,) = call.inputs, call.outputs
    made, masked = scratch(out, 1), scratch(x._replace(dtype=torch.bool), 2)
    dim = call.argument("dim") % max(1, len(x.shape))
    of_row = (size if place != dim else 1 for place, size in enumerate(x.shape))
    rows = scratch(masked._replace(shape=tuple(of_row)), 3)
    n = x.numel
    rereads, grid = _threads(call, x, FORWARD)
    return (
        make_cost(call, NORMALIZATION, 4 * n, transcendentals=n, written=(made,), rereads=rereads, grid=grid),
        make_cost(call, ELEMENTWISE, written=(masked,)),
        make_cost(call, REDUCTION, read=(masked,), written=(rows,)),
        make_cost(call, ELEMENTWISE, read=(made, rows)),
    )


@rule(aten._softmax_backward_data, aten._log_softmax_backward_data)
def softmax_backward(call: Call) -> Cost:
    """y·dy, its sum, subtract, multiply: 4 (log: sum of dy, exp, multiply, subtract). A kernel of its own multiplies y
    and dy (softmax_backward_cuda_out in SoftMax.cu); of a long row, what is summed up is read again."""
    grad = call.argument("grad_output")
    n = grad.numel
    if call.func.overloadpacket is aten._log_softmax_backward_data:
        rereads, grid = _threads(call, grad, BACKWARD_LOG)
        return make_cost(call, NORMALIZATION, 4 * n, transcendentals=n, rereads=rereads, grid=grid)
    rereads, grid = _threads(call, grad, BACKWARD)
    return make_cost(call, NORMALIZATION, 4 * n, rereads=(*rereads, read_by_another_kernel(grad, 3)), grid=grid)


def _threads(call: Call, x: TensorSpec, kernels: _Kernels) -> tuple[tuple[Reread, ...], ThreadGrid | None]:
    """The rows of the kernel for rows like those of `x`, and its grid where a thread walks them alone."""
    dim = call.argument("dim") % max(1, len(x.shape))
    columns, inner = prod(x.shape[dim : dim + 1]), prod(x.shape[dim + 1 :])
    rows, row_bytes = x.numel // columns, columns * x.dtype.itemsize
    again = kernels.passes * x.nbytes
    if inner > 1:
        return (Reread(again, rows, row_bytes, 1),), _grid(rows // inner, columns, inner, kernels.passes)
    narrow = NARROW_OPERATIONS if x.dtype.itemsize < torch.float32.itemsize else 0
    combining = kernels.passes * OPERATIONS_OF_SHUFFLES  # as many numbers as there are passes
    if columns <= kernels.longest_in_warp:
        lanes = power_of_two_from(columns)
        threads = min(lanes, WARP_THREADS)
        steps = threads.bit_length() - 1
        elements = (kernels.element_operations + narrow) * ceil(columns / threads)
        combining = combining * steps // STEPS_OF_WARP
        return (Reread(0, rows, row_bytes, threads, combining, 1, element_operations=elements),), None
    if columns <= kernels.longest_in_block:
        return (_in_registers(columns, rows, row_bytes, 2 * combining),), None
    threads = MOST_THREADS
    if not kernels.loop_instructions:
        loads = min(MOST_THREADS, row_bytes // LOAD_BYTES)
        threads = max(WARP_THREADS, power_of_two_up_to(loads - 1))  # in [loads / 2, loads)
    accesses = (1 + kernels.passes) * ceil(row_bytes / (threads * LOAD_BYTES))
    # On AMD a full block, as a trace on an MI300X shows (AMD-AGI/TraceLens).
    row = Reread(again, rows, row_bytes, threads, OPERATIONS_TO_COMBINE, accesses, MOST_THREADS)
    if kernels.loop_instructions:
        of_element = kernels.loop_instructions + (NARROW_INSTRUCTIONS if narrow else 0)
        row = row._replace(element_operations=ceil(of_element * columns / threads))
    return (row,), None


def _in_registers(columns: int, rows: int, row_bytes: int, combining: int) -> Reread:
    """A block for each row, whose threads keep it in their registers (cunn_SoftMaxForwardReg). Warps that have no
    element go on."""
    most = ceil(columns / MOST_THREADS)
    registers = tuple((built, 48 if most >= least else 32) for built, least in MORE_REGISTERS)
    operations = REGISTER_ELEMENT_OPERATIONS * columns // MOST_THREADS
    return Reread(0, rows, row_bytes, MOST_THREADS, combining, 1, element_operations=operations, registers=registers)


def _grid(outer: int, columns: int, inner: int, passes: int) -> ThreadGrid:
    """The grid over another dimension than the last: neighbouring threads take neighbouring rows, and several threads
    share a row only where there are few (SpatialSoftMax_getBlockSize in SoftMax.cu)."""
    across, along = min(inner, MOST_THREADS), 1
    while across <= WIDE_ROWS <= columns and 2 * along <= min(columns, MOST_THREADS // across):
        along *= 2
    return ThreadGrid(outer * ceil(inner / across), across * along, (1 + passes) * ceil(columns / along))
