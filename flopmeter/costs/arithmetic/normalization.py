"""Statistical normalization: layer, batch, group and RMS norms (softmax.py has the softmax).

FLOPs per element; the statistics' own work per row or channel is left out, as in the paper's table.
"""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

import torch

from flopmeter.costs.index_arithmetic import index_operations
from flopmeter.costs.rules import in_one_piece, make_cost, rule
from flopmeter.records import NORMALIZATION, BlockTime, Call, Cost, Registers, Reread, TensorSpec, ThreadGrid
from flopmeter.records.memory_format import is_channels_last
from flopmeter.records.powers_of_two import power_of_two_from, power_of_two_up_to
from flopmeter.torch_names.operators import aten

# torch's CUDA kernels (aten/src/ATen/native/cuda): layer norm has 128 threads a row, which read it once for the
# statistics and once for the result (layer_norm_kernel.cu).
LAYER_NORM_THREADS = 128
LAYER_NORM_ELEMENTS = 4  # of a load
MOST_SAMPLES_OF_THREAD = 128  # that one thread adds up for the gradients of a group norm's weights
SAMPLES_OF_TILE = 32  # where there are more (kReduceTileSize in group_norm_kernel.cu)
PLAIN_THREADS = 256  # of blocks that load one element at a time (kCUDANumThreads in block_reduce.cuh)
BLOCK_THREADS = 512  # group norm, and all kernels that reduce a whole channel
AMD_BLOCK_THREADS = 256  # the same (MAX_BLOCK_SIZE in Normalization.cuh)
LOAD_BYTES = 16
WARP_THREADS = 32
AMD_WARP_THREADS = 64
# Operations of each thread besides those on its elements: the partial results of 32 lanes and of several warps are
# combined in steps of a shuffle, a division and a few multiply-adds (WelfordOps, BlockReduce), twice or three times a
# row. Layer norm and softmax in NeuSight's measurements (Lee et al., ASPLOS 2025; five cards) are met equally well with
# 250 to 450; image models on RTX 3090 and 4090 (pytorch-image-models, results/) imply 300.
OPERATIONS_TO_COMBINE = 350
# The same where no mean is subtracted, or sums of products are taken: a shuffle and an addition in each step. Kernels
# over a million rows of 32 elements, one block each, take .65 to .8 of a millisecond, and 1.1 to 1.5 with a mean (H100
# SXM, torch 2.11, 2026-11: validation/traces).
OPERATIONS_TO_ADD = 170
# The gradients of weight and bias (GammaBetaBackwardCUDAKernelTemplate in layer_norm_kernel.cu): one block takes 32
# columns, with 32 warps, or fewer over fewer rows. Each warp takes eight rows at a time, or twice eight if not all
# blocks are full. Over more than this many rows, blocks of one warp take 32 rows each, and another kernel adds up
# what they found (where the columns fill less than half of the SMs; taken to be so for all).
COLUMNS_OF_BLOCK = 32
ROWS_OF_WARP = 8
BLOCK_HEIGHTS = ((256, 32), (128, 16), (64, 8), (0, 1))  # (from this many rows on, block height)
MOST_ROWS_UNSPLIT = 64 * 1024
# Instructions of its threads for a row, in the machine code of torch 2.15 for compute capability 9.0: with a shuffle
# for the mean and one for the deviation, or the latter alone; more where blocks are not full, and for elements of 16
# bits.
ROW_INSTRUCTIONS_WITH_MEAN, ROW_INSTRUCTIONS = 16.5, 12.5
RAGGED_INSTRUCTIONS, NARROW_INSTRUCTIONS = 4, 2
# Operations of a thread on each of its elements: it updates the mean and the sum of squares, with a reciprocal
# (cuWelfordOnlineSum).
WELFORD_OPERATIONS = 10


class _RowKernel(NamedTuple):
    """The kernel for aligned rows. Operations are of a thread, cycles of a block that is alone on its SM."""

    combining: int  # operations to combine its result with those of other threads
    updating: int  # operations to add an element to its result
    operations: int  # all on an element
    combining_cycles: int
    element_cycles: int  # to add an element
    among_others: int  # as in BlockTime
    registers: Registers


# Registers as torch 2.11's library for CUDA 13 states them; a profile lists the same. On an H100 those of layer norm in
# fp32 leave room for 12 blocks, others for 16: a million rows of 32 take 1,519 and 1,134 µs, so that a block stays as
# long in both. Cycles and operations are set there (torch 2.11, 2026-11: validation/traces, h100_kernels_norm, rows of
# 32 to 8,192). Of the operations on an element the compiled code has 15 for the mean and about 12 to apply it; a weight
# is loaded by itself, so that a warp touches four cache lines for 32 of them in fp32 and two in 16 bits.
LAYER_NORM = _RowKernel(
    OPERATIONS_TO_COMBINE, WELFORD_OPERATIONS, 45, 2100, 91, 4050, ((75, 34), (80, 31), (90, 32), (100, 38), (120, 40))
)
LAYER_NORM_FP32 = LAYER_NORM._replace(
    operations=56, registers=((75, 39), (80, 32), (86, 37), (90, 39), (100, 40), (120, 44))
)
RMS_NORM = _RowKernel(OPERATIONS_TO_ADD, 0, 15, 680, 0, 2600, ((75, 25), (100, 32), (120, 38)))
RMS_NORM_FP32 = RMS_NORM._replace(operations=25, registers=((75, 36), (80, 32), (86, 36), (90, 32), (100, 40)))
# Batch norm (Normalization.cuh). Kernels for channels-last load four elements at a time; a thread takes 16, or more if
# there were more than 128 blocks for 32 channels. In NCHW torch's kernels have at most this many blocks.
COLUMN_LOADS = 4
ELEMENTS_OF_THREAD = 16
MOST_BLOCKS_OF_COLUMN = 128
MOST_BLOCKS = 256 * 1024
# Operations on an element, with those that compute its address: of the statistics (in channels-last each of four loads
# has a count, by which it divides), of one pass of the gradient, and of each number that is loaded in other kernels,
# cuDNN's among them. Set on shapes of ResNet-50 and MobileNet (H100 SXM, torch 2.11, 2026-11: validation/traces).
STATISTICS_OPERATIONS = 30
COUNTED_STATISTICS_OPERATIONS = 67
GRADIENT_OPERATIONS = 38
ELEMENT_OPERATIONS = 10
# The same of kernels that do nothing but apply given statistics, torch's and cuDNN's: on ResNet-50's shapes
# (h100_kernels_vision) 40 to 60. cuDNN's for channels-last has 13 blocks of 512 threads for each image.
APPLYING_OPERATIONS = 45
CUDNN_BLOCKS_OF_IMAGE = 13


@rule(aten.native_layer_norm)
def layer_norm(call: Call) -> Cost:
    """Sum 1, sum of squares 2, centre 1, divide 1, then weight 1 and bias 1 where there are any."""
    x, *affine = call.inputs
    rereads = _normalized_rows(call, x, LAYER_NORM_FP32 if x.dtype == torch.float32 else LAYER_NORM)
    return make_cost(call, NORMALIZATION, (5 + len(affine)) * x.numel, rereads=rereads)


@rule(aten.native_layer_norm_backward)
def layer_norm_backward(call: Call) -> Cost:
    """Gradients of the input 10, of the weight 2, of the bias 1, as the output mask asks for them."""
    rereads = _rows_of_gradients(call, ROW_INSTRUCTIONS_WITH_MEAN)
    return make_cost(call, NORMALIZATION, _wanted(call) * call.inputs[0].numel, rereads=rereads)


@rule(aten.native_group_norm)
def group_norm(call: Call) -> Cost:
    """As for a layer norm. One kernel takes the statistics of each group; one joins them with weight and bias of each
    channel; a last one reads everything again and walks operands that do not lie alike (group_norm_kernel.cu
    GroupNormKernelImplInternal)."""
    x, *affine = call.inputs
    groups, channels = (call.argument("N") * call.argument(name) for name in ("group", "C"))
    kernels = 2 if affine and call.argument("HxW") > 1 else 1  # and the one of the statistics
    each, of_channel = in_one_piece(x, (channels, call.argument("HxW"))), in_one_piece(x, (channels, 1))
    indexed = index_operations((each, each, of_channel, of_channel))
    return make_cost(
        call, NORMALIZATION, (5 + len(affine)) * x.numel,
        rereads=(_moments(x, groups),), index_operations=indexed, kernels=kernels,
    )  # fmt: skip


@rule(aten.native_group_norm_backward)
def group_norm_backward(call: Call) -> Cost:
    """As for a layer norm, by the kernels of GroupNormBackwardKernelImplInternal in group_norm_kernel.cu."""
    rereads, kernels, indexed = (_of_vectors if call.argument("HxW") == 1 else _of_planes)(call)
    flops = _wanted(call) * call.inputs[0].numel
    return make_cost(call, NORMALIZATION, flops, rereads=rereads, index_operations=indexed, kernels=kernels)


class _GroupNormKernels(NamedTuple):
    rereads: tuple[Reread, ...]
    kernels: int  # that are no reread of their own
    index_operations: int


def _of_planes(call: Call) -> _GroupNormKernels:
    """One kernel sums dy and dy·x over each channel of each sample. Another adds these up over the samples, which gives
    the gradients of weight and bias. For the input's gradient two kernels (one without a weight) join the sums with the
    statistics, and a last one reads everything again."""
    grad, (of_input, *of_weights) = call.inputs[0], call.argument("output_mask")
    samples, channels, group = (call.argument(name) for name in ("N", "C", "group"))
    sums, kernels, indexed = _sums(grad, samples * channels), 1, 0
    if of_input:
        sums, kernels = _as_kernel(sums)._replace(nbytes=2 * grad.nbytes), 2 + (call.argument("weight") is not None)
        shape = samples * group, channels // group, call.argument("HxW")
        each, of_channel, of_group = (
            in_one_piece(grad, shape),
            in_one_piece(grad, (*shape[:2], 1)),
            in_one_piece(grad, (shape[0], 1, 1)),
        )
        indexed = index_operations((each, each, each, of_channel, of_group, of_group))
    rereads = (sums, _as_kernel(_over_samples(samples, channels, 0))) if any(of_weights) else (sums,)
    return _GroupNormKernels(rereads, kernels, indexed)


def _of_vectors(call: Call) -> _GroupNormKernels:
    """Of channels that are one number (GroupNorm1dBackward): for the input's gradient a kernel sums dy and dy·x over
    each group, and another reads all again; one more reads all for the gradients of weight and bias."""
    grad, (of_input, *of_weights) = call.inputs[0], call.argument("output_mask")
    samples, channels, group = (call.argument(name) for name in ("N", "C", "group"))
    over_samples = _over_samples(samples, channels, 2 * grad.nbytes)
    if not of_input:
        return _GroupNormKernels((over_samples._replace(nbytes=0),), 1, 0)
    shape = samples, group, channels // group
    each, of_group, weight = (
        in_one_piece(grad, shape),
        in_one_piece(grad, (*shape[:2], 1)),
        in_one_piece(grad, (1, *shape[1:])),
    )
    weights = (weight,) if call.argument("weight") is not None else ()
    indexed = index_operations((each, each, each, of_group, *weights, of_group, of_group))
    sums = _as_kernel(_sums(grad, samples * group))._replace(nbytes=2 * grad.nbytes)
    return _GroupNormKernels((sums, _as_kernel(over_samples)) if any(of_weights) else (sums,), 1, indexed)


def _over_samples(samples: int, channels: int, nbytes: int) -> Reread:
    """The kernel that adds up `nbytes` of terms over the samples: a thread for each channel (GammaBetaBackward-
    CUDAKernel1), or for more samples tiles of 32 channels and 32 samples, of which a thread takes two at a time."""
    if samples <= MOST_SAMPLES_OF_THREAD:
        blocks, threads, rounds = ceil(channels / PLAIN_THREADS), PLAIN_THREADS, samples
    else:
        blocks, threads, rounds = ceil(channels / WARP_THREADS), BLOCK_THREADS, ceil(samples / SAMPLES_OF_TILE)
    return Reread(nbytes, blocks, nbytes // max(1, blocks), threads, 0, rounds)


def _wanted(call: Call) -> int:
    """FLOPs for an element: of the gradients of input, weight and bias, those that are asked for."""
    mask = call.argument("output_mask")
    return sum(flops for flops, wanted in zip((10, 2, 1), mask, strict=True) if wanted)


@rule(aten._fused_rms_norm)
def rms_norm(call: Call) -> Cost:
    """Square and sum 2, multiply by the reciprocal root 1, weight 1."""
    x, *weight = call.inputs
    rereads = _normalized_rows(call, x, RMS_NORM_FP32 if x.dtype == torch.float32 else RMS_NORM)
    return make_cost(call, NORMALIZATION, (3 + len(weight)) * x.numel, rereads=rereads)


@rule(aten._fused_rms_norm_backward)
def rms_norm_backward(call: Call) -> Cost:
    """Input: dy·w 1, its sum with x 2, normalized x 1, scale and subtract 2, times the reciprocal root 1;
    weight: multiply and sum 2."""
    wants_input, wants_weight = call.argument("output_mask")
    rereads = _rows_of_gradients(call, ROW_INSTRUCTIONS)
    flops = (7 * wants_input + 2 * wants_weight) * call.inputs[0].numel
    return make_cost(call, NORMALIZATION, flops, rereads=rereads)


@rule(
    aten.native_batch_norm,
    aten._native_batch_norm_legit,
    aten._native_batch_norm_legit_no_training,
    aten._batch_norm_with_update,
    aten._batch_norm_no_update,
    aten.cudnn_batch_norm,
)
def batch_norm(call: Call) -> Cost:
    """Training: as layer norm, 5, weight 1, bias 1. Evaluation, with known statistics: centre 1, divide 1,
    weight 1, bias 1."""
    x = call.inputs[0]
    affine = sum(call.argument(name) is not None for name in ("weight", "bias"))
    is_cudnn = call.func.overloadpacket is aten.cudnn_batch_norm
    if not _is_training(call):  # torch has a kernel for the reciprocal root
        return _with_given_statistics(call, 2 + affine, kernels=1 if is_cudnn else 2)
    flops = (5 + affine) * x.numel
    if not is_cudnn:  # running statistics have a kernel of their own
        grid, elements = _applying(x, is_cudnn=False)
        rereads = (_statistics(x), elements)
        return make_cost(call, NORMALIZATION, flops, access="statistics", rereads=rereads, grid=grid, kernels=2)
    again = read_by_another_kernel(x)  # by blocks that have waited for all others
    if not _has_channels_last(x):
        rounds = 2 * ceil(x.numel / x.shape[1] / (BLOCK_THREADS * COLUMN_LOADS))
        again = _channels(x, 1, COLUMN_LOADS * ELEMENT_OPERATIONS, rounds)
    return make_cost(call, NORMALIZATION, flops, access="statistics", rereads=(again,))


@rule(aten.native_batch_norm_backward, aten.batch_norm_backward, aten.cudnn_batch_norm_backward)
def batch_norm_backward(call: Call) -> Cost:
    """Training: input 10, weight 2, bias 1. Evaluation: the statistics are constants, so the input's
    gradient is dy times weight times the reciprocal root, 2."""
    is_training = call.get("train", call.get("update", True))
    mask = call.get("output_mask", (True, True, True))
    flops = (10 if is_training else 2, 2, 1)
    grad = call.get("grad_out", call.inputs[1])
    assert isinstance(grad, TensorSpec)
    per_element = sum(f for f, wanted in zip(flops, mask, strict=True) if wanted)
    if not is_training:
        return make_cost(call, NORMALIZATION, per_element * grad.numel)
    is_cudnn = call.func.overloadpacket is aten.cudnn_batch_norm_backward
    grid = None
    if not _has_channels_last(grad):  # one kernel, whose threads go over a channel twice
        operations = 2 * ELEMENT_OPERATIONS if is_cudnn else GRADIENT_OPERATIONS
        rereads: tuple[Reread, ...] = (_channels(grad, 2, operations, 2 * _rounds_of_channel(grad)),)
    elif is_cudnn:
        rereads = (read_by_another_kernel(grad, 2),)
    else:
        grid, elements = _applying(grad, is_cudnn=False)
        rereads = (_columns(grad, 2, ELEMENT_OPERATIONS), elements)
    return make_cost(call, NORMALIZATION, per_element * grad.numel, access="statistics", rereads=rereads, grid=grid)


@rule(aten.batch_norm_stats)
def batch_norm_stats(call: Call) -> Cost:
    """nn.SyncBatchNorm's, as are the next four: sum 1, sum of squares 2, for each channel."""
    (x,) = call.inputs
    return make_cost(call, NORMALIZATION, 3 * x.numel)


@rule(aten.batch_norm_gather_stats_with_counts)
def batch_norm_gather_stats(call: Call) -> Cost:
    """FLOPs for each rank and channel: its weighted variance 4; both sides' weights 2; the joint variance 7; the joint
    mean 5; the count 1. The input only gives the type."""
    means = call.argument("mean")
    return make_cost(call, NORMALIZATION, 19 * means.numel, read=call.inputs[1:])


@rule(aten.batch_norm_elemt)
def batch_norm_elemt(call: Call) -> Cost:
    """With the statistics of all ranks: centre 1, divide 1, weight 1, bias 1."""
    affine = sum(call.argument(name) is not None for name in ("weight", "bias"))
    return _with_given_statistics(call, 2 + affine)


@rule(aten.batch_norm_backward_reduce)
def batch_norm_backward_reduce(call: Call) -> Cost:
    """For each channel the sum of dy (1) and that of dy·(x - mean) (3)."""
    return make_cost(call, NORMALIZATION, 4 * call.inputs[0].numel)


@rule(aten.batch_norm_backward_elemt)
def batch_norm_backward_elemt(call: Call) -> Cost:
    """(dy - mean of dy - (x - mean)·a)·b, with a and b for each channel: 5."""
    return _with_given_statistics(call, 5)


def _with_given_statistics(call: Call, flops: int, kernels: int = 1) -> Cost:
    x = call.inputs[0]
    grid, elements = _applying(x, is_cudnn=call.func.overloadpacket is aten.cudnn_batch_norm)
    flops *= x.numel
    return make_cost(call, NORMALIZATION, flops, access="stream", rereads=(elements,), grid=grid, kernels=kernels)


def _is_training(call: Call) -> bool:
    """Whether the batch's statistics are used. The no-training overloads have no such argument."""
    packet = call.func.overloadpacket
    if packet is aten._batch_norm_with_update:
        return True
    if packet in (aten._native_batch_norm_legit_no_training, aten._batch_norm_no_update):
        return False
    return bool(call.argument("training"))


def _normalized_rows(call: Call, x: TensorSpec, kernel: _RowKernel) -> tuple[Reread, ...]:
    """Layer and RMS norm: `kernel` loads four elements at a time, and takes no rows of another number."""
    if prod(call.argument("normalized_shape")) % LAYER_NORM_ELEMENTS:
        return _element_by_element(call, x)
    return _forward_rows(call, x, kernel)


def _rows_of_gradients(call: Call, instructions: float) -> tuple[Reread, ...]:
    """Their backward passes: the gradient and x are read again, and once more by the kernel for the gradients of the
    weights, where these are asked for. `instructions`: of a thread of that kernel for a row in fp32."""
    grad = call.inputs[0]
    rereads = _row_rereads(call, grad, 2, OPERATIONS_TO_ADD)
    return rereads + _over_rows(call, grad, instructions) if any(call.argument("output_mask")[1:]) else rereads


def _row_rereads(call: Call, x: TensorSpec, tensors: int, operations: int) -> tuple[Reread, ...]:
    """Each row of that many tensors like `x` is read again. `operations`: of a thread."""
    columns = max(1, prod(call.argument("normalized_shape")))
    rows, row_bytes = x.numel // columns, tensors * columns * x.dtype.itemsize
    accesses = 2 * ceil(columns / (LAYER_NORM_THREADS * LAYER_NORM_ELEMENTS))
    return (Reread(tensors * x.nbytes, rows, row_bytes, LAYER_NORM_THREADS, operations, accesses),)


def _element_by_element(call: Call, x: TensorSpec) -> tuple[Reread, Reread]:
    """The kernels for other rows: one takes the statistics, another applies them (LayerNormForwardCUDAKernel)."""
    columns = prod(call.argument("normalized_shape"))
    rounds, rows = ceil(columns / PLAIN_THREADS), x.numel // columns
    operations = ELEMENT_OPERATIONS * rounds
    applied = Reread(0, rows, columns * x.dtype.itemsize, PLAIN_THREADS, operations, rounds)
    return _moments(x, rows, least_threads=BLOCK_THREADS), applied


def _forward_rows(call: Call, x: TensorSpec, kernel: _RowKernel) -> tuple[Reread, ...]:
    elements = ceil(prod(call.argument("normalized_shape")) / LAYER_NORM_THREADS)
    (rows,) = _row_rereads(call, x, 1, kernel.combining + kernel.updating * elements)
    alone = kernel.combining_cycles + kernel.element_cycles * elements
    block, issued = BlockTime(alone, kernel.among_others), kernel.operations * elements
    return (rows._replace(element_operations=issued, block=block, registers=kernel.registers),)


def _over_rows(call: Call, x: TensorSpec, instructions: float) -> tuple[Reread, ...]:
    """The kernel that sums over all rows of two tensors like `x` for the gradients of weight and bias."""
    columns = max(1, prod(call.argument("normalized_shape")))
    rows, blocks = x.numel // columns, ceil(columns / COLUMNS_OF_BLOCK)
    height, taken = next(height for least, height in BLOCK_HEIGHTS if rows >= least), rows
    if rows > MOST_ROWS_UNSPLIT:
        height, taken = 1, WARP_THREADS
        blocks *= ceil(rows / taken)
    is_ragged = bool(rows % (height * ROWS_OF_WARP) or columns % COLUMNS_OF_BLOCK)
    instructions += RAGGED_INSTRUCTIONS * is_ragged + NARROW_INSTRUCTIONS * (x.dtype.itemsize == 2)
    issued = ceil(instructions * ceil(taken / height))
    threads, rounds = COLUMNS_OF_BLOCK * height, ceil(taken / (height * ROWS_OF_WARP * (1 + is_ragged)))
    nbytes = 2 * x.nbytes
    return (
        Reread(
            nbytes, blocks, nbytes // blocks, threads,
            accesses=rounds, is_kernel=True, element_operations=issued, in_turns=height > 1,
        ),
    )  # fmt: skip


def _moments(x: TensorSpec, rows: int, least_threads: int = WARP_THREADS) -> Reread:
    """The kernel that takes mean and deviation of each row, element by element (RowwiseMomentsCUDAKernel)."""
    block = _block_of_row(x, rows, STATISTICS_OPERATIONS, OPERATIONS_TO_COMBINE, least_threads)
    return _as_kernel(block)._replace(nbytes=x.nbytes)


def _sums(x: TensorSpec, rows: int) -> Reread:
    """The kernel that sums up two tensors like `x` over each row (ComputeInternalGradientsCUDAKernel)."""
    return _block_of_row(x, rows, 2 * ELEMENT_OPERATIONS, OPERATIONS_TO_ADD)


def _block_of_row(
    x: TensorSpec, rows: int, operations: int, combining: int, least_threads: int = WARP_THREADS
) -> Reread:
    """A block for each row, of as few threads as that for a short one, with that many operations on each element."""
    columns = ceil(x.numel / max(1, rows))
    threads = least_threads if columns < BLOCK_THREADS else BLOCK_THREADS
    rounds, row_bytes = ceil(columns / threads), columns * x.dtype.itemsize
    return Reread(0, rows, row_bytes, threads, combining + operations * rounds, rounds, max(threads, AMD_WARP_THREADS))


def _has_channels_last(x: TensorSpec) -> bool:
    """Whether torch takes the kernels for it (batch_norm_use_channels_last_kernels in Normalization.cu)."""
    return is_channels_last(x.shape, x.stride) or (len(x.shape) == 2 and x.stride[1] == 1)


def _statistics(x: TensorSpec) -> Reread:
    """The kernel for mean and deviation of each channel, one element after the other."""
    if _has_channels_last(x):
        return _columns(x, 1, COUNTED_STATISTICS_OPERATIONS)
    return _as_kernel(_channels(x, 1, STATISTICS_OPERATIONS, _rounds_of_channel(x)))


def _channels(x: TensorSpec, tensors: int, operations: int, rounds: int) -> Reread:
    """A kernel with a block for each channel, whose threads walk its planes. It reads that many tensors again."""
    channels = x.shape[1] if len(x.shape) > 1 else 1
    row_bytes = tensors * x.nbytes // channels
    operations = OPERATIONS_TO_COMBINE + operations * rounds
    return Reread(tensors * x.nbytes, channels, row_bytes, BLOCK_THREADS, operations, rounds, AMD_BLOCK_THREADS)


def _rounds_of_channel(x: TensorSpec) -> int:
    """How many elements a thread takes one after another: a block has as many neighbouring threads as a plane has
    elements, rounded up, and walks several planes at a time (batch_norm_collect_statistics_kernel and
    batch_norm_backward_kernel)."""
    images, *planes = x.shape[:1] + x.shape[2:]
    plane = prod(planes)
    return ceil(images / (BLOCK_THREADS // _threads_of_plane(plane))) * ceil(plane / _threads_of_plane(plane))


def _threads_of_plane(elements: int) -> int:
    """Threads for a plane: 32, 64, ... or 512 (getNumThreads in Normalization.cuh)."""
    return min(BLOCK_THREADS, max(WARP_THREADS, power_of_two_from(max(1, elements))))


def _columns(x: TensorSpec, tensors: int, operations: int) -> Reread:
    """The kernel that reduces that many tensors in channels-last, with that many operations on an element."""
    blocks, threads, elements = _columns_grid(x)
    operations = OPERATIONS_TO_COMBINE + operations * elements
    nbytes, rounds = tensors * x.nbytes, ceil(elements / COLUMN_LOADS)
    return Reread(nbytes, blocks, nbytes // blocks, threads, operations, rounds, is_kernel=True)


def _columns_grid(x: TensorSpec) -> tuple[int, int, int]:
    """Blocks, their threads, and elements of a thread in channels-last (flexible_launch_configs)."""
    channels = x.shape[1]
    rows = max(1, x.numel // channels)
    width = min(WARP_THREADS, power_of_two_up_to(channels))
    height = min(power_of_two_up_to(ceil(rows / COLUMN_LOADS)), BLOCK_THREADS // width)
    blocks_of_column = min(MOST_BLOCKS_OF_COLUMN, ceil(rows / (height * ELEMENTS_OF_THREAD)))
    return ceil(channels / width) * blocks_of_column, width * height, ceil(rows / (height * blocks_of_column))


def _applying(x: TensorSpec, *, is_cudnn: bool) -> tuple[ThreadGrid, Reread]:
    """The blocks of the kernel that applies given statistics (batch_norm_elementwise in Normalization.cu; cuDNN's
    bn_fw_inf), and what their threads do."""
    at_a_time = 1
    if len(x.shape) > 1 and not _has_channels_last(x):
        blocks, threads, elements = _planes_grid(x, most_blocks=x.numel if is_cudnn else MOST_BLOCKS)
    elif is_cudnn or len(x.shape) < 2:
        blocks, threads = CUDNN_BLOCKS_OF_IMAGE * max(1, prod(x.shape[:1])), BLOCK_THREADS
        elements = ceil(x.numel / (blocks * threads))
    else:
        blocks, threads, elements = _columns_grid(x)
        at_a_time = COLUMN_LOADS
    rows = Reread(0, blocks, x.nbytes // max(1, blocks), threads, APPLYING_OPERATIONS * elements, 0)
    return ThreadGrid(blocks, threads, elements, at_a_time), rows


def _planes_grid(x: TensorSpec, most_blocks: int) -> tuple[int, int, int]:
    """Blocks, their threads, and elements of a thread in NCHW: a block takes a channel's planes of one or several
    images (batch_norm_elemt_cuda_template)."""
    (images, channels), plane = x.shape[:2], prod(x.shape[2:])
    width = max(_threads_of_plane(plane // 4), min(_threads_of_plane(plane), 64))
    height = max(64 // width, 1)
    of_channel = max(1, min(most_blocks // max(1, channels), ceil(images / height)))
    return channels * of_channel, width * height, ceil(images / (of_channel * height)) * ceil(plane / width)


def _as_kernel(rows: Reread) -> Reread:
    return rows._replace(is_kernel=True)


def read_by_another_kernel(x: TensorSpec, tensors: int = 1) -> Reread:
    """A second kernel that reads that many tensors like `x`, before or after the first goes through all of it."""
    return _as_kernel(Reread(tensors * x.nbytes, 1, tensors * x.nbytes, BLOCK_THREADS))
