"""Times, kernels and memory by the one respect that decides."""

from __future__ import annotations

from math import ceil, prod
from types import SimpleNamespace

import pytest
import torch
from test_timing_by_hand import vector_seconds
from torch import nn

from flopmeter import FlopMeter, load_hardware
from flopmeter.records import AttentionShape, ConvolutionWork, Mask, MatmulWork, Reread
from flopmeter.timing.attention import Grid, _covered, _filled_share, _grid, kernel_of, tile_of

HALF = torch.float16


def meta(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("name", "multiprocessors", "hz", "lanes", "issued"),
    [
        ("p100-pcie-16gb", 56, 1.329e9, 64, 64),
        ("v100-sxm2-32gb", 80, 1.53e9, 64, 128),
        ("a100-sxm4-80gb", 108, 1.41e9, 64, 128),
        ("rtx-4090", 128, 1.05 * 2.52e9, 128, 128),  # its matrix units reach 1.05 of their peak at the boost clock
        ("mi300x", 304, 2.1e9, 64, 64),
    ],
)
def test_a_multiprocessor_starts_as_many_instructions_as_its_schedulers_and_as_much_arithmetic_as_its_lanes(
    name, multiprocessors, hz, lanes, issued
):
    """A million rows of 256 threads, each with 10,000 operations in fp32, or of every kind on its elements."""
    device, operations = load_hardware(name), 10**6 * 256 * 10**4 / (multiprocessors * hz)
    combining, elements = (
        vector_seconds(device, rereads=(Reread(0, 10**6, 0, 256, **{kind: 10**4}),)).memory_seconds
        for kind in ("operations", "element_operations")
    )
    assert combining == pytest.approx(operations / lanes, rel=0.02)
    assert elements == pytest.approx(operations / issued, rel=0.02)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_on_hopper_rows_of_images_that_begin_at_8_bytes_slow_a_plain_product_down_in_nchw(layout):
    """14 x 14 positions of two bytes are no multiple of 16 bytes, 16 x 16 are; in NHWC rows are channels."""

    def of_a_position(side: int, device: str) -> float:
        image = meta(64, 1024, side, side).to(memory_format=layout)
        filters = meta(1024, 1024, 1, 1).to(memory_format=layout)
        with FlopMeter(device) as meter:
            nn.functional.conv2d(image, filters)
        found = zip(meter.report().kernels, meter.report().timings, strict=True)
        (timing,) = [timing for kernel, timing in found if isinstance(kernel.cost.work, ConvolutionWork)]
        return timing.work_seconds / side**2

    hopper = of_a_position(14, "h100-sxm5-80gb") / of_a_position(16, "h100-sxm5-80gb")
    assert (hopper > 1.2) == (layout is torch.contiguous_format)
    assert of_a_position(14, "a100-sxm4-80gb") / of_a_position(16, "a100-sxm4-80gb") < 1.15


@pytest.mark.parametrize(
    ("groups", "turned"), [((4, 4), False), ((4, 1), True), ((1, 4), True), ((1, 1), True), ((2, 1), False)]
)
def test_inductor_weighs_all_convolutions_of_a_graph_before_it_turns_them(groups, turned):
    """By its factors grouped ones take 1.358 times as long in channels-last, others .823. One of four groups has a
    quarter of the products: .3395 + .823 < 1.25; one of two groups half of them: .679 + .823 > 1.5."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Conv2d(128, 128, 3, padding=1, groups=each) for each in groups))
        x = torch.empty(8, 128, 20, 20)
    with torch.inference_mode(), FlopMeter("a100-sxm4-80gb") as meter:
        model(x)
    works = [kernel.cost.work for kernel in meter.report(mode="compiled").kernels]
    assert [work.shape.channels_last for work in works if isinstance(work, ConvolutionWork)] == [turned, turned]


def test_before_the_product_of_each_group_the_host_takes_a_part_of_either_operand_and_of_the_result():
    x, weights = meta(64, 128, dtype=torch.bfloat16), meta(4, 128, 256, dtype=torch.bfloat16)
    with FlopMeter("a100-sxm4-80gb") as meter:
        ends = torch.tensor([16, 32, 48, 64], dtype=torch.int32, device="meta")
        torch.nn.functional.grouped_mm(x, weights, offs=ends)
    products = [kernel for kernel in meter.report().kernels if isinstance(kernel.cost.work, MatmulWork)]
    assert [kernel.views for kernel in products] == [3] * 4
    assert [kernel.cost.macs for kernel in products] == [16 * 128 * 256] * 4


def test_bytes_fit_where_the_allocators_segments_do_not():
    """1,000 bytes and their square, and a segment of 2 MiB for both."""
    with FlopMeter("t4") as meter:
        meta(500).square()
    memory = meter.report().memory
    assert memory.peak_bytes == 2000
    assert [memory.fits_in(usable) for usable in (1999, 2000)] == [False, True]
    assert [memory.fits_in(usable, allocator=True) for usable in (2000, 2**21 - 1, 2**21)] == [False, False, True]


# Two sequences of 100 queries and 130 keys, and one of 64 each, in tiles of 64 x 64.
SEVERAL = AttentionShape(3, 1, 1, 100, 130, 64, 64, is_packed=True, lengths=((2, 100, 130), (1, 64, 64)))


def test_sequences_of_several_lengths_have_the_tiles_of_each():
    """2 x 2 + 1 blocks, of which the first four end with a tile of two keys. Under a causal mask the first block of
    queries sees one tile of keys, the second two, and of each the last one in part."""
    assert _grid(SEVERAL, 64, 64) == Grid(blocks=5, tiles=2 * 2 * 3 + 1, longest=3, masked=4)
    causal = SEVERAL._replace(mask=Mask(right=0))
    assert _grid(causal, 64, 64) == Grid(blocks=5, tiles=2 * 3 + 1, longest=2, masked=2 * 2 + 1)


@pytest.mark.parametrize("name", ["a100-sxm4-80gb", "h100-sxm5-80gb", "rtx-3090"])
def test_backward_a_block_keeps_keys_and_passes_over_the_queries_of_its_sequence(name):
    device, shape = load_hardware(name), SEVERAL._replace(is_backward=True)
    launch = _covered(shape, kernel_of("flash", device, in_16_bits=True, is_backward=True), device)
    assert launch.grid.blocks == 2 * ceil(130 / launch.rows) + ceil(64 / launch.rows)
    assert launch.grid.longest == ceil(100 / launch.columns)


@pytest.mark.parametrize(
    ("shape", "heads", "share"),
    [
        (SEVERAL, 1, 264 / (5 * 64)),
        (SEVERAL._replace(lengths=((2, 100, 130), (1, 64, 32))), 1, 264 / (5 * 64) * (200 + 64 / 2) / 264),
        (SEVERAL._replace(heads=4), 2, 1.0),  # two heads share a block
        (SEVERAL._replace(is_backward=True), 1, (2 * 100 * 130 + 64 * 64) / (13 * 64 * 64)),
    ],
)
def test_tiles_are_filled_as_far_as_there_are_queries_and_keys(shape, heads, share):
    """Forward by the rows of the blocks, and by the columns where there are fewer keys than a tile has."""
    launch = SimpleNamespace(rows=64, columns=64, heads=heads, grid=_grid(shape, 64, 64))
    assert _filled_share(launch, shape) == pytest.approx(share)


@pytest.mark.parametrize("name", ["p100-pcie-16gb", "a100-sxm4-80gb"])
def test_a_product_by_weights_in_8_bits_takes_what_its_flops_take_on_the_units_that_there_are(name):
    x, weights, scales = meta(512, 4096), meta(4096, 4096, dtype=torch.int8), meta(4096)
    with FlopMeter(name) as meter:
        torch.ops.aten._weight_int8pack_mm(x, weights, scales)
    (timing,) = meter.report().timings
    peak = load_hardware(name).contraction_peak("fp16")
    assert timing.kernel_class.startswith("small product")
    assert timing.work_seconds >= 2 * 512 * 4096**2 / peak.flop_per_s
    assert (timing.work_seconds < 3 * 2 * 512 * 4096**2 / peak.flop_per_s) == (peak.unit != "matrix")


@pytest.mark.parametrize("is_backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn"])
@pytest.mark.parametrize("name", ["a100-sxm4-80gb", "h100-sxm5-80gb", "rtx-3090", "v100-sxm2-32gb"])
def test_tiles_of_longer_heads_are_no_larger_beyond_the_longest_of_a_table_too(name, backend, causal, is_backward):
    """They have to fit into the same shared memory."""
    device = load_hardware(name)
    kernel = kernel_of(backend, device, in_16_bits=True, is_backward=is_backward)
    mask = Mask(right=0) if causal else Mask()
    shapes = [AttentionShape(1, 1, 1, 512, 512, head, head, mask, is_backward) for head in (128, 256, 512, 1024)]
    sizes = [prod(tile_of(kernel, shape, device)) for shape in shapes]
    assert sizes == sorted(sizes, reverse=True)
