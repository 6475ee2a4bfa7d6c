"""Convolutions: an implicit GEMM, and why real convolutions are slower than that."""

from __future__ import annotations

from math import ceil, prod

from flopmeter.device.hardware import Hardware
from flopmeter.records import Convolution, Matmul
from flopmeter.timing import constants
from flopmeter.timing.matmul import Busy, MatmulBytes, Rates, fastest, overlap, price_matmul


def convolution(
    shape: Convolution, implicit: Matmul, moved: MatmulBytes, rates: Rates, *, on_matrix_units: bool
) -> Busy:
    """The faster of the implicit GEMM and, on vector units, Winograd's algorithm. The GEMMs of groups are too narrow
    for tiles; their rate depends only on the number of channels."""
    if implicit.batch > 1:
        return _grouped(shape, implicit, moved, rates, on_matrix_units)
    if on_matrix_units:
        return price_matmul(implicit, moved, rates.slowed(channel_share(shape)))
    direct = price_matmul(implicit, moved, rates)
    if not suits_winograd(shape, implicit):
        return direct
    return fastest((direct, _winograd(shape, implicit, moved, rates)))


def conversions(shape: Convolution, groups: int, moved: MatmulBytes, hardware: Hardware) -> float:
    """Seconds that a library takes to bring tensors in NCHW into its layout and back: kernels that copy each of them.
    cuDNN has kernels without a matrix unit for groups, which take NCHW."""
    kernels = constants.CONVERSIONS.get((hardware.vendor, moved.item_bytes), 0)
    if not kernels or shape.channels_last or (groups > 1 and hardware.vendor == "nvidia"):
        return 0.0
    copies = 2 * moved.memory_bytes / (hardware.sustained_bandwidth_bytes_per_s * constants.ACCESS_SHARE["strided"])
    return kernels * hardware.kernel_floor_seconds + copies


def _grouped(shape: Convolution, implicit: Matmul, moved: MatmulBytes, rates: Rates, on_matrix_units: bool) -> Busy:
    compute = 2 * implicit.macs / (rates.flop_per_s * grouped_share(shape, on_matrix_units))
    memory = moved.memory_bytes / rates.bytes_per_s
    return Busy(compute, memory, overlap(compute, memory, rates.kernels.overlap_exponent))


def is_depthwise(shape: Convolution, implicit: Matmul) -> bool:
    """Whether each filter sees one input channel, so that no GEMM is left."""
    return shape.channels == 1 and implicit.batch > 1


def depthwise(
    shape: Convolution, implicit: Matmul, moved: MatmulBytes, vector_flop_per_s: float, bytes_per_s: float
) -> Busy:
    """Each output reads its window: far below the vector peak, or bound by memory."""
    compute = 2 * implicit.macs / (vector_flop_per_s * depthwise_share(shape))
    memory = moved.memory_bytes / bytes_per_s
    return Busy(compute, memory, max(compute, memory))


def depthwise_share(shape: Convolution) -> float:
    """The share of the vector peak: in channels-last neighbouring threads read neighbouring channels."""
    if not shape.channels_last:
        return constants.DEPTHWISE_SHARE
    is_large = max(shape.kernel) > constants.DEPTHWISE_MOST_SIDE
    return constants.DEPTHWISE_SHARE_LARGE if is_large else constants.DEPTHWISE_SHARE_CHANNELS_LAST


def channel_share(shape: Convolution) -> float:
    """The share of the rate that dense filters over this number of channels reach."""
    half = constants.HALF_RATE_CHANNELS_LAST if shape.channels_last else constants.HALF_RATE_CHANNELS
    return shape.channels / (shape.channels + half)


def grouped_share(shape: Convolution, on_matrix_units: bool) -> float:
    """The same of filters over the channels of one group. What packs groups into tiles are kernels of matrix units."""
    channels = shape.channels
    is_power_of_two = channels & (channels - 1) == 0
    if on_matrix_units and not is_power_of_two:
        tile = constants.GROUP_TILE_CHANNELS if shape.channels_last else constants.GROUP_TILE_CHANNELS_NCHW
        return channels / (ceil(channels / tile) * tile + constants.HALF_RATE_TILE_CHANNELS)
    if on_matrix_units and shape.channels_last:
        return channel_share(shape)
    return channels / (channels + constants.HALF_RATE_CHANNELS_GROUPED)


def suits_winograd(shape: Convolution, implicit: Matmul) -> bool:
    """Whether vector units may run it as Winograd, with a quarter of the multiply-adds."""
    return shape.is_dense and shape.kernel == (3, 3) and implicit.batch == 1 and len(shape.positions) == 2


def _winograd(shape: Convolution, implicit: Matmul, moved: MatmulBytes, rates: Rates) -> Busy:
    """Transform the input, multiply, transform back: three kernels that exchange data through memory."""
    images = implicit.m // max(1, prod(shape.positions))
    patches = images * prod(ceil(size / constants.WINOGRAD_OUTPUT) for size in shape.positions)
    numbers = constants.WINOGRAD_PATCH**2
    inner = Matmul(numbers, patches, implicit.n, shape.channels)
    one_number = numbers * moved.item_bytes
    read = one_number * shape.channels * (patches + implicit.n)
    written = one_number * patches * implicit.n
    busy = price_matmul(inner, MatmulBytes(read + written, written, moved.item_bytes), rates)
    transforms = (moved.memory_bytes + read + written) / rates.bytes_per_s
    return busy._replace(memory_seconds=busy.memory_seconds + transforms, work_seconds=busy.work_seconds + transforms)
