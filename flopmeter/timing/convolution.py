"""Convolutions: an implicit GEMM, and why real convolutions are slower than that."""

from __future__ import annotations

from math import ceil, gcd, prod

from flopmeter.costs.scatter import WARP
from flopmeter.device.hardware import Hardware
from flopmeter.records import Convolution, ConvolutionWork, Cost, Matmul, Planes
from flopmeter.records.dtypes import item_bytes_of
from flopmeter.timing import constants
from flopmeter.timing.bandwidth import cycles_to_seconds, integer_seconds
from flopmeter.timing.gemm_kernels import legacy_mma_share
from flopmeter.timing.grouped_convolution import (
    has_long_filters,
    layout_seconds,
    long_filter_seconds,
    packed_seconds,
    packs_groups,
)
from flopmeter.timing.matmul import Busy, MatmulBytes, Rates, fastest, overlap, price_matmul


def convolution(
    shape: Convolution, implicit: Matmul, moved: MatmulBytes, rates: Rates, *, on_matrix_units: bool
) -> Busy:
    """The faster of the implicit GEMM and, on vector units, Winograd's algorithm. The GEMMs of groups are too narrow
    for tiles; their rate depends only on the number of channels."""
    if implicit.batch > 1:
        return _grouped(shape, implicit, moved, rates, on_matrix_units)
    if rates.kernels.shared_memory_passes:
        return _from_shared_memory(shape, implicit, moved, rates)
    if on_matrix_units:
        return price_matmul(implicit, moved, rates.slowed(channel_share(shape)))
    direct = price_matmul(implicit, moved, rates)
    if not suits_winograd(shape, implicit):
        return direct
    return fastest((direct, _winograd(shape, implicit, moved, rates)))


def _from_shared_memory(shape: Convolution, implicit: Matmul, moved: MatmulBytes, rates: Rates) -> Busy:
    """The time of Hopper's kernels. A gradient of filters is a product for each position of the filter, since no tile
    takes two (`wgrad_indexed`: 64 columns for 64 channels). Its depth are pixels, whose channels lie side by side:
    `wgmma` transposes operands of 16 bits itself; those of 32 bits leave shared memory and return transposed first."""
    if shape.computes == "filter gradient":
        positions = 1 if _loads_pixels(shape, moved.item_bytes) else prod(shape.kernel)
        implicit = Matmul(positions, implicit.m, implicit.n // positions, implicit.k)
        if moved.item_bytes == constants.TF32_BYTES:
            rates = rates._replace(kernels=rates.kernels._replace(shared_memory_passes=3))
    return price_matmul(implicit, moved, rates)


def with_conversions(busy: Busy, cost: Cost, work: ConvolutionWork, hardware: Hardware, flop_per_s: float) -> Busy:
    """The time on matrix units of that sustained rate with what a library does around an implicit GEMM: it brings
    tensors into its layout and back and, on Hopper, loads pixels of few channels one by one and packs narrow groups."""
    shape, implicit, item_bytes = work.shape, work.implicit, item_bytes_of(cost.dtype)
    if is_depthwise(shape, implicit):
        return busy
    if converts_layout(shape, implicit, item_bytes, hardware):
        extra = _conversion_seconds(shape, item_bytes, hardware)
    elif not is_hopper(hardware):
        extra = _copies(cost, work, hardware)
    elif has_long_filters(shape, implicit):
        busy, extra = _computing(busy, long_filter_seconds(implicit, hardware)), 0.0
    elif packs_groups(shape, implicit, item_bytes):
        busy = _computing(busy, packed_seconds(shape, implicit, item_bytes, flop_per_s))
        extra = layout_seconds(shape, implicit, item_bytes, hardware)
        extra += 0.0 if shape.channels_last else _conversion_seconds(shape, item_bytes, hardware)
    else:
        extra = (_padding if shape.channels_last else _conversion_seconds)(shape, item_bytes, hardware)
        if _loads_pixels(shape, item_bytes) and not _is_first_of_resnet(shape, implicit, cost.dtype):
            return _over_pixels(busy, cost, work, extra, hardware)
    return busy.with_traffic(extra)


def _over_pixels(busy: Busy, cost: Cost, work: ConvolutionWork, extra: float, hardware: Hardware) -> Busy:
    """The time over pixels of few channels, on matrix units with conversions that take `extra` seconds or, where the
    outputs fill the device, on vector units without."""
    shape, implicit, item_bytes = work.shape, work.implicit, item_bytes_of(cost.dtype)
    pixels = _pixel_seconds(shape, implicit, item_bytes, hardware)
    padded = busy._replace(work_seconds=max(busy.work_seconds, pixels)).with_traffic(extra)
    if shape.computes == "filter gradient" or item_bytes != 2 or _pixel_tiles(implicit) < hardware.sm_count:
        return padded
    return fastest((padded, _computing(busy, _direct_seconds(shape, implicit, hardware))))


def _direct_seconds(shape: Convolution, implicit: Matmul, hardware: Hardware) -> float:
    """Seconds on vector units, over images as they lie."""
    filters, depth = constants.DIRECT_TILE
    macs = implicit.m * ceil(implicit.n / filters) * filters * ceil(implicit.k / depth) * depth
    share = constants.DIRECT_SHARE["channels-last" if shape.channels_last else "contiguous"]
    return 2 * macs / (hardware.vector_peak("fp32").flop_per_s * share)


def _computing(busy: Busy, seconds: float) -> Busy:
    """The same bytes with that many seconds of arithmetic."""
    return busy._replace(compute_seconds=seconds, work_seconds=max(seconds, busy.memory_seconds))


def _copies(cost: Cost, work: ConvolutionWork, hardware: Hardware) -> float:
    """Seconds of kernels that copy each tensor in NCHW. cuDNN has kernels without a matrix unit for groups, which take
    NCHW."""
    kernels = constants.CONVERSIONS.get((hardware.vendor, item_bytes_of(cost.dtype)))
    if kernels is None or work.shape.channels_last or (work.implicit.batch > 1 and hardware.vendor == "nvidia"):
        return 0.0
    copies = 2 * cost.bytes / (hardware.sustained_bandwidth_bytes_per_s * constants.ACCESS_SHARE["strided"])
    return kernels * hardware.kernel_floor_seconds + copies


def converts_layout(shape: Convolution, implicit: Matmul, item_bytes: float, hardware: Hardware) -> bool:
    """Whether images in NCHW are converted for kernels in 16 bits that only take NHWC, which are all that cuDNN has
    from Ampere on (`..._nhwckrsc_nhwc`; those of Volta and Turing write NCHW, `..._nhwc2nchw`). On Hopper, where the
    parts of this were measured, filters over few channels have a rate of their own."""
    if item_bytes != 2 or shape.channels_last or implicit.batch > 1:
        return False
    capability = hardware.compute_capability
    return capability is not None and capability >= (8, 0) and not is_hopper(hardware)


def is_hopper(hardware: Hardware) -> bool:
    return hardware.compute_capability is not None and hardware.compute_capability[0] == 9


def _conversion_seconds(shape: Convolution, item_bytes: float, hardware: Hardware) -> float:
    """Seconds to convert each tensor by a kernel, in tiles; or, where images are matrices as they lie, of the parts of
    a filter's gradient, which another kernel adds up."""
    if _is_plain_product(shape, item_bytes):
        parts = _part_bytes(shape)
        return hardware.kernel_floor_seconds + parts / hardware.sustained_bandwidth_bytes_per_s if parts else 0.0
    bytes_per_s, has_tiles = hardware.sustained_bandwidth_bytes_per_s, is_hopper(hardware)
    seconds = len(shape.tensors) * hardware.kernel_floor_seconds
    for planes in shape.tensors:
        memory_seconds = _converted_bytes(planes, item_bytes) / bytes_per_s
        if has_tiles:
            memory_seconds = overlap(_tile_seconds(planes, hardware), memory_seconds, constants.VECTOR_OVERLAP)
        seconds += memory_seconds + _clearing(planes, item_bytes, hardware)
    return seconds


def _tile_seconds(planes: Planes, hardware: Hardware) -> float:
    """How long the tiles of a tensor keep the SMs, besides their traffic; measured only on Hopper."""
    side = constants.CONVERTED_TILE_SIDE
    tiles = planes.images * ceil(planes.channels / side) * ceil(planes.positions / side)
    return cycles_to_seconds(tiles * constants.CONVERTED_TILE_CYCLES / hardware.sm_count, hardware)


def _is_plain_product(shape: Convolution, item_bytes: float) -> bool:
    """Whether filters of one element are applied to images in NCHW as they lie. Rows are as long as an image has
    positions, so 7 x 7 of them are no multiple of any load. A gradient of filters has a product for each image: it is
    one only if the parts of these are fewer bytes than converted images."""
    if not shape.is_dense or max(shape.kernel) > 1 or not shape.tensors:
        return False
    positions = shape.tensors[0].positions
    converted = sum(_converted_bytes(planes, item_bytes) for planes in shape.tensors)
    return positions == 1 or (positions % 2 == 0 and _part_bytes(shape) <= converted)


def image_alignment_bytes(shape: Convolution, item_bytes: float) -> int:
    """The alignment of the rows of images that a plain product takes as they lie, at most 16: 14 x 14 positions of two
    bytes are not a multiple of the 16 that loads for `wgmma` ask for."""
    if not _is_plain_product(shape, item_bytes) or shape.tensors[0].positions == 1:
        return constants.FULL_ALIGNMENT_BYTES
    return gcd(int(shape.tensors[0].positions * item_bytes), constants.FULL_ALIGNMENT_BYTES)


def _converted_bytes(planes: Planes, item_bytes: float) -> float:
    """Bytes that are read, and written with the channels padded."""
    channels = planes.channels + _padded_channels(planes, item_bytes)
    return planes.images * planes.positions * channels * item_bytes


def _part_bytes(shape: Convolution) -> int:
    """Written and read of the parts of a filter's gradient, in fp32, one for each image."""
    if shape.computes != "filter gradient" or shape.tensors[0].positions == 1:
        return 0
    return 2 * 4 * shape.tensors[0].images * shape.tensors[-1].numel


def _padding(shape: Convolution, item_bytes: float, hardware: Hardware) -> float:
    return sum(
        hardware.kernel_floor_seconds
        + integer_seconds(constants.PADDING_OPERATIONS * planes.numel, hardware)
        + _clearing(planes, item_bytes, hardware)
        for planes in shape.tensors
        if _padded_channels(planes, item_bytes) != planes.channels
    )


def _clearing(planes: Planes, item_bytes: float, hardware: Hardware) -> float:
    """What has more channels than the tensor is set to zero before."""
    padded = _padded_channels(planes, item_bytes)
    if padded == planes.channels:
        return 0.0
    nbytes = planes.images * planes.positions * padded * item_bytes
    return hardware.kernel_floor_seconds + nbytes / hardware.sustained_bandwidth_bytes_per_s


def _padded_channels(planes: Planes, item_bytes: float) -> int:
    multiple = int(constants.PADDED_BYTES // item_bytes)
    return ceil(planes.channels / multiple) * multiple


def _pixel_seconds(shape: Convolution, implicit: Matmul, item_bytes: float, hardware: Hardware) -> float:
    """Seconds of an implicit GEMM over pixels of few channels: its steps, tile by tile, or where depth are the pixels
    themselves, their loads."""
    if shape.computes == "filter gradient":
        side = constants.FULL_TILE_SIDE
        loads = implicit.k * ceil(implicit.m / side) + implicit.m * ceil(implicit.k / side)
        cycles = prod(shape.kernel) * loads * constants.PIXEL_LOAD_CYCLES / hardware.sm_count
        return cycles_to_seconds(cycles, hardware)
    macs = prod(constants.PIXEL_TILES[0]) * prod(shape.kernel) * constants.PIXEL_STEP_BYTES / item_bytes
    rate = hardware.contraction_peak("bf16" if item_bytes == 2 else "tf32").flop_per_s * legacy_mma_share(hardware)
    waves = ceil(_pixel_tiles(implicit) / hardware.sm_count)
    return waves * hardware.sm_count * 2 * macs / (rate * constants.PIXEL_STEP_SHARE)


def _pixel_tiles(implicit: Matmul) -> int:
    return min(ceil(implicit.m / rows) * ceil(implicit.n / columns) for rows, columns in constants.PIXEL_TILES)


def _loads_pixels(shape: Convolution, item_bytes: float) -> bool:
    """Whether all channels of a pixel come by one load."""
    return shape.channels * item_bytes <= constants.PADDED_BYTES


def _is_first_of_resnet(shape: Convolution, implicit: Matmul, dtype: str) -> bool:
    """For 64 filters of 7 x 7 over up to 4 channels, with a stride, cuDNN has a kernel of its own in fp16, which takes
    rows of an image (`image_first_layer_..._k64c4r7s7_stride2x2`, in a compiled ResNet-50 on an H100)."""
    fits = (shape.computes, shape.kernel, implicit.n) == ("output", (7, 7), 64) and shape.channels <= 4
    return fits and not shape.is_dense and dtype == "fp16"


def _grouped(shape: Convolution, implicit: Matmul, moved: MatmulBytes, rates: Rates, on_matrix_units: bool) -> Busy:
    compute = 2 * implicit.macs / (rates.flop_per_s * grouped_share(shape, on_matrix_units))
    memory = moved.memory_bytes / rates.bytes_per_s
    return Busy(compute, memory, overlap(compute, memory, rates.kernels.overlap_exponent))


def is_depthwise(shape: Convolution, implicit: Matmul) -> bool:
    """Whether each filter sees one input channel, so that no GEMM is left."""
    return shape.channels == 1 and implicit.batch > 1


def depthwise(
    shape: Convolution, implicit: Matmul, moved: MatmulBytes, hardware: Hardware, bytes_per_s: float, dtype: str
) -> Busy:
    """Each output reads its window: far below the vector peak, or bound by memory."""
    if hardware.vendor == "nvidia" and not shape.channels_last and dtype != "fp16":
        compute = integer_seconds(_depthwise_operations(shape, implicit), hardware)
    else:
        visits = _depthwise_elements(shape, implicit) * prod(shape.kernel)
        share = depthwise_share(shape, in_16_bits=item_bytes_of(dtype) == 2)
        compute = 2 * visits / (hardware.vector_peak("fp32").flop_per_s * share)
    memory = moved.memory_bytes / bytes_per_s
    return Busy(compute, memory, max(compute, memory))


def _depthwise_elements(shape: Convolution, implicit: Matmul) -> int:
    """That threads compute one by one, going over all taps of their windows: the input's, of its gradient."""
    if shape.computes == "input gradient" and shape.tensors:
        return shape.tensors[-1].numel
    return implicit.macs // prod(shape.kernel)


def _depthwise_operations(shape: Convolution, implicit: Matmul) -> int:
    """Integer operations of torch's own kernels."""
    taps = prod(shape.kernel)
    if shape.computes == "filter gradient":
        positions = implicit.k // shape.tensors[0].images  # of an image
        turns = ceil(positions / WARP)
        instructions = constants.DEPTHWISE_IMAGE_INSTRUCTIONS + constants.DEPTHWISE_POSITIONS_INSTRUCTIONS * turns
        return WARP * instructions * (implicit.macs // positions)
    of_element = constants.DEPTHWISE_PLACE_OPERATIONS + constants.DEPTHWISE_VISIT_OPERATIONS * taps
    if shape.computes == "input gradient":
        of_long = constants.DEPTHWISE_PLACE_OPERATIONS + constants.DEPTHWISE_GRADIENT_VISIT_OPERATIONS * taps
        of_element = constants.DEPTHWISE_GRADIENT_OPERATIONS.get(taps, of_long)
    return of_element * _depthwise_elements(shape, implicit)


def depthwise_share(shape: Convolution, *, in_16_bits: bool = True) -> float:
    """The share of the vector peak: in channels-last neighbouring threads read neighbouring channels."""
    if not shape.channels_last:
        return constants.DEPTHWISE_SHARE
    if max(shape.kernel) > constants.DEPTHWISE_MOST_SIDE:
        return constants.DEPTHWISE_SHARE_LARGE
    if shape.computes == "input gradient" or not in_16_bits:
        return constants.DEPTHWISE_SHARE_UNSPECIALIZED
    return constants.DEPTHWISE_SHARE_CHANNELS_LAST


def channel_share(shape: Convolution) -> float:
    """The share of the rate that dense filters over this number of channels reach."""
    half = constants.HALF_RATE_CHANNELS_LAST if shape.channels_last else constants.HALF_RATE_CHANNELS
    return shape.channels / (shape.channels + half)


def grouped_share(shape: Convolution, on_matrix_units: bool) -> float:
    """The same for filters over one group's channels. Kernels that pack groups into tiles use matrix units."""
    channels = shape.channels
    is_power_of_two = channels & (channels - 1) == 0
    if on_matrix_units and shape.channels_last and channels < constants.LEAST_PACKED_CHANNELS:
        return constants.NARROWEST_GROUP_SHARE
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
    images = implicit.m // prod(shape.positions)
    patches = images * prod(ceil(size / constants.WINOGRAD_OUTPUT) for size in shape.positions)
    numbers = constants.WINOGRAD_PATCH**2
    inner = Matmul(numbers, patches, implicit.n, shape.channels)
    one_number = numbers * moved.item_bytes
    read = one_number * shape.channels * (patches + implicit.n)
    written = one_number * patches * implicit.n
    busy = price_matmul(inner, MatmulBytes(read + written, written, moved.item_bytes), rates)
    return busy.with_traffic((moved.memory_bytes + read + written) / rates.bytes_per_s)
