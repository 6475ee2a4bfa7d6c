"""Grouped convolutions by cuDNN on Hopper: tiles of several groups, and kernels that give each group a width for tiles.

Set on an H100 (torch 2.11, cuDNN 9.19, 2026-11: h100_kernels_conv, h100_kernels_groups, h100_regnet_train and
h100_wav2vec2_train of validation/traces), on groups of 4 to 56 channels in 16 bits.
"""

from __future__ import annotations

from math import ceil, prod

from flopmeter.device.hardware import Hardware
from flopmeter.records import Convolution, Matmul
from flopmeter.records.powers_of_two import power_of_two_from
from flopmeter.timing.bandwidth import cycles_to_seconds, integer_seconds

# Bytes of channels that a tile is deep and elements that it is wide, full or not: with 64 channels in 16 bits (`g8` and
# tilesize128x64x64 in the kernels' names) or 32 in tf32, but 64 in a gradient of filters there, the filters of other
# groups than a pixel's are zero.
PACKED_BYTES = 128
FILTER_GRADIENT_CHANNELS = 64
# Share of the sustained matrix rate that these tiles reach, zeros included, by bytes of an element: 235 to 460 TFLOP/s
# in bf16, most of them 300 to 390; 105 to 110 in tf32.
PACKED_SHARE = {2: 0.45, 4: 0.34}

# Up to this many groups whose channels are no power of two run forward one by one (each on a stream of its own, so that
# one starts in the last wave of another), on kernels with Ampere's instructions that take 32 channels at a time and 64
# filters: 3, 4 and 8 groups did in channels-last and 4 in NCHW; 9 and 10 did not, nor 8 in NCHW, nor any gradient.
# Together they reach 205 to 290 TFLOP/s, zeros included.
MOST_GROUPS_ALONE_CHANNELS_LAST, MOST_GROUPS_ALONE = 8, 4
ALONE_DEPTH, ALONE_WIDTH, ALONE_SHARE = 32, 64, 0.38
# `nhwcSliceCKernel` copies the channels of one group out and its result back, in rows of some 50 bytes: at these shares
# of the bandwidth.
SLICE_SHARE_READ, SLICE_SHARE_WRITTEN = 0.5, 0.35

# CUTLASS's kernels keep a mask of 32 bits of a filter's positions along each side, and take no longer one
# (conv2d_fprop_activation_tile_access_iterator_optimized.h). Groups of longer ones (48 channels at 128 places) run
# forward on vector units (`implicit_convolve_sgemm`): the last images of a batch alone, one group after another, in
# blocks that multiply one channel at one place in this many cycles, waits for the other images' blocks included.
LONGEST_FILTER_SIDE = 32
LONG_FILTER_STEP_CYCLES = 230

# Else `tensorTransformGeneric` brings each group to a power of two of channels, and the result back: 170 and 128
# elements (of the wider tensor) a nanosecond for tensors of 16 to 154 million, as integer operations of an element. A
# kernel takes 9 to 16 µs for a few thousand elements.
WIDENING_OPERATIONS, NARROWING_OPERATIONS = 98, 131
TRANSFORM_SECONDS = 10e-6


def has_long_filters(shape: Convolution, implicit: Matmul) -> bool:
    """Whether groups run on vector units because their filters are too long for tiles."""
    return shape.computes == "output" and implicit.batch > 1 and max(shape.kernel) > LONGEST_FILTER_SIDE


def long_filter_seconds(implicit: Matmul, hardware: Hardware) -> float:
    """Seconds of the last image's blocks, one group after another."""
    return cycles_to_seconds(implicit.batch * implicit.k * LONG_FILTER_STEP_CYCLES, hardware)


def packs_groups(shape: Convolution, implicit: Matmul, item_bytes: float) -> bool:
    """Whether groups, of several channels, are narrower than a tile."""
    return implicit.batch > 1 and shape.channels < PACKED_BYTES // item_bytes


def packed_seconds(shape: Convolution, implicit: Matmul, item_bytes: float, flop_per_s: float) -> float:
    """Seconds of the multiply-adds, with those by zero. A gradient of the input meets the whole filter at each position
    of the input, also where a stride left it out."""
    is_filter_gradient = shape.computes == "filter gradient"
    positions, filters = (implicit.k, implicit.m) if is_filter_gradient else (implicit.m, implicit.n)
    if shape.computes == "input gradient":
        positions = shape.tensors[-1].images * shape.tensors[-1].positions
    if _runs_alone(shape, implicit):
        columns = implicit.batch * _filled(filters, ALONE_WIDTH)
        depth, share = _filled(shape.channels, ALONE_DEPTH), ALONE_SHARE
    else:
        depth = FILTER_GRADIENT_CHANNELS if is_filter_gradient else int(PACKED_BYTES // item_bytes)
        share = PACKED_SHARE[4 if item_bytes > 2 else 2]
        columns = _filled(implicit.batch * power_of_two_from(filters), depth)
    return 2 * positions * columns * depth * prod(shape.kernel) / (flop_per_s * share)


def layout_seconds(shape: Convolution, implicit: Matmul, item_bytes: float, hardware: Hardware) -> float:
    """Seconds of the kernels around that, except those that convert NCHW (and widen groups, but not the filters)."""
    wider = power_of_two_from(shape.channels) / shape.channels
    if wider == 1 or not shape.tensors:
        return 0.0
    *read, written = shape.tensors
    if _runs_alone(shape, implicit):
        if not shape.channels_last:
            return 0.0
        copied = read[0].numel / SLICE_SHARE_READ + written.numel / SLICE_SHARE_WRITTEN
        starts = 2 * implicit.batch * hardware.kernel_floor_seconds
        return starts + 2 * copied * item_bytes / hardware.sustained_bandwidth_bytes_per_s
    if not shape.channels_last:
        return TRANSFORM_SECONDS
    operations = sum(WIDENING_OPERATIONS * tensor.numel for tensor in read) + NARROWING_OPERATIONS * written.numel
    return len(shape.tensors) * TRANSFORM_SECONDS + integer_seconds(int(operations * wider), hardware)


def _runs_alone(shape: Convolution, implicit: Matmul) -> bool:
    most = MOST_GROUPS_ALONE_CHANNELS_LAST if shape.channels_last else MOST_GROUPS_ALONE
    is_power = power_of_two_from(shape.channels) == shape.channels
    return shape.computes == "output" and implicit.batch <= most and not is_power


def _filled(number: int, side: int) -> int:
    """The size rounded up to full tiles of this side."""
    return ceil(number / side) * side
