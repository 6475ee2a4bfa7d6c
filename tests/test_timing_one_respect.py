"""Times, kernels and memory by the one respect that decides."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, prod
from types import SimpleNamespace

import pytest
import torch
from test_timing_by_hand import vector_seconds
from torch import nn

from flopmeter import FlopMeter, load_hardware
from flopmeter.records import (
    NORMALIZATION,
    AttentionShape,
    ConvolutionWork,
    Cost,
    Mask,
    MatmulWork,
    RecurrentWork,
    Region,
    Reread,
    VectorWork,
)
from flopmeter.timing.attention import Grid, _covered, _filled_share, _grid, kernel_of, tile_of
from flopmeter.timing.bandwidth import cache_bytes_per_s, memory_seconds, share_of_stream
from flopmeter.timing.energy import energy
from flopmeter.timing.kernels import price

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
        (SEVERAL._replace(heads=4), 2, 4 * 264 / (2 * (4 + 4 + 2) * 64)),  # two heads share a block
        (SEVERAL._replace(is_backward=True), 1, (2 * 100 * 130 + 64 * 64) / (13 * 64 * 64)),
    ],
)
def test_tiles_are_filled_as_far_as_there_are_queries_and_keys(shape, heads, share):
    """Forward by the rows of the blocks, and by the columns where there are fewer keys than a tile has."""
    launch = SimpleNamespace(rows=64, columns=64, heads=heads, grid=_grid(shape, 64, 64, shape.heads // heads))
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


def rows(nbytes=0, count=10**4, threads=256, **more):
    return Reread(nbytes, count, max(nbytes // count, 1), threads, **more)


def test_what_a_kernel_reads_again_of_two_tensors_adds_up():
    """On a device without a cache all of it comes from memory; so does what both combine."""
    device = load_hardware("a100-sxm4-80gb").replace(l2_cache_mb=None)
    first, second = rows(10**9), rows(2 * 10**9)
    both = vector_seconds(device, rereads=(first, second)).memory_seconds
    assert both == pytest.approx(3e9 / device.sustained_bandwidth_bytes_per_s)
    for kind in ("operations", "element_operations"):
        first, second = rows(**{kind: 10**5}), rows(count=3 * 10**4, **{kind: 10**5})
        alone = [vector_seconds(device, rereads=(each,)).memory_seconds for each in (first, second)]
        assert alone[1] == pytest.approx(3 * alone[0])
        assert vector_seconds(device, rereads=(first, second)).memory_seconds == pytest.approx(sum(alone))


def test_the_last_of_two_rows_to_end_ends_the_kernel_in_whatever_order_they_stand():
    device = load_hardware("a100-sxm4-80gb")
    short, long = rows(count=1, accesses=10), rows(count=1, accesses=1000)
    many, few = rows(count=10**6, accesses=10), rows(count=10**4, accesses=10)
    for slow, quick in ((long, short), (many, few)):
        alone = vector_seconds(device, rereads=(slow,)).work_seconds
        for order in ((slow, quick), (quick, slow)):
            assert vector_seconds(device, rereads=order).work_seconds == pytest.approx(alone)


def test_a_row_of_32_threads_takes_a_wavefront_of_64_on_amd_where_its_kernel_does():
    nvidia, amd = load_hardware("a100-sxm4-80gb"), load_hardware("mi300x")
    narrow, wide = rows(threads=32, operations=1000), rows(threads=64, operations=1000)
    either = narrow._replace(amd_threads=64)
    for device, same in ((amd, wide), (nvidia, narrow)):
        assert vector_seconds(device, rereads=(either,)) == vector_seconds(device, rereads=(same,))
    assert vector_seconds(amd, rereads=(narrow,)) != vector_seconds(amd, rereads=(wide,))


def test_instructions_are_known_to_take_time_on_gpus_alone():
    for name, is_known in (("a100-sxm4-80gb", True), ("mi300x", True), ("tpu-v5e", False)):
        device = load_hardware(name)
        longer = vector_seconds(device, instructions=10**12).work_seconds > vector_seconds(device).work_seconds
        assert longer == is_known


def test_sectors_of_which_a_kernel_uses_a_part_come_from_the_cache_with_that_part():
    """One of 16 elements of two bytes fills a sixteenth of a sector: a copy of them reads 32 bytes for two."""
    device, x = load_hardware("a100-sxm4-80gb"), meta(2**20, 16)
    with FlopMeter(device) as meter:
        x[:, 0].clone()
    (cost,) = [kernel.cost for kernel in meter.report().kernels]
    none, half, whole = (memory_seconds(cost, VectorWork(), device, cost.bytes * share) for share in (0, 0.5, 1))
    assert half == pytest.approx((none + whole) / 2)
    assert whole == pytest.approx(2 * 2 * 2**20 / cache_bytes_per_s(device))
    bandwidth = 2 * 2 * 2**20 / memory_seconds(replace(cost, reads=cost.writes), VectorWork(), device)
    assert none == pytest.approx((32 + 2) * 2**20 / bandwidth)


def test_statistics_of_a_batch_reach_less_of_gddr_than_of_hbm_in_every_type():
    """An RTX 3090 in training ([timm]); other kernels lose there in narrow types alone."""
    gddr, hbm = load_hardware("rtx-3090"), load_hardware("a100-sxm4-80gb")
    region = (Region(None, 10**6),)

    def share(device, access, dtype):
        return share_of_stream(
            Cost("op", NORMALIZATION, (), region, region, dtype, VectorWork(), access=access), device
        )

    assert share(gddr, "statistics", "fp16") == share(gddr, "statistics", "fp32") < share(hbm, "statistics", "fp32")
    assert share(gddr, "normalize", "fp16") < share(gddr, "normalize", "fp32") == share(hbm, "normalize", "fp16")


@pytest.mark.parametrize(
    ("changes", "keeps"),
    [
        ({}, True),
        ({"sm_count": 98}, True),
        ({"sm_count": 97}, False),
        ({"compute_capability": (8, 6)}, False),
        ({"compute_capability": (8, 9)}, True),
        ({"compute_capability": (9, 0)}, True),
        ({"compute_capability": (7, 5)}, False),
        ({"compute_capability": (7, 0), "sm_count": 80}, True),
    ],
)
def test_weights_of_a_large_network_stay_on_the_chips_that_torch_asks_cudnn_to_keep_them_on(changes, keeps):
    """`use_persist_device_heuristics` in RNN.cpp: from 8.0 on with 98 multiprocessors, but 8.6; before, Volta alone."""
    device = load_hardware("a100-sxm4-80gb")
    with torch.device("meta"):
        network, x = nn.LSTM(1024, 1024, dtype=HALF), meta(100, 64, 1024)
    with torch.inference_mode(), FlopMeter(device) as meter:
        network(x)
    (cost,) = [kernel.cost for kernel in meter.report().kernels if isinstance(kernel.cost.work, RecurrentWork)]

    def seconds(where):
        work = cost.work._replace(recurrence=cost.work.recurrence._replace(keeps_weights=where))
        return price(replace(cost, work=work), device.replace(**changes), meter.trace.switches).busy.work_seconds

    assert seconds("on large devices") == seconds("everywhere" if keeps else "nowhere")
    assert seconds("everywhere") != seconds("nowhere")


@pytest.mark.parametrize(
    ("device", "dtype", "share"),
    [("p100-pcie-16gb", torch.float32, 1 / 4), ("p100-pcie-16gb", HALF, 1 / 4), ("a100-sxm4-80gb", HALF, 1)],
)
def test_winograd_takes_a_quarter_of_the_energy_of_multiply_adds_without_matrix_units(device, dtype, share):
    """Six by six products for four by four results of nine taps each: 36 of 144."""
    hardware = load_hardware(device)
    image, filters = meta(16, 256, 56, 56, dtype=dtype), meta(256, 256, 3, 3, dtype=dtype)
    with torch.inference_mode(), FlopMeter(hardware) as meter:
        nn.functional.conv2d(image, filters, padding=1)
    (cost,) = [kernel.cost for kernel in meter.report().kernels if isinstance(kernel.cost.work, ConvolutionWork)]
    direct = replace(cost, work=cost.work._replace(shape=cost.work.shape._replace(is_dense=False)))
    found, plain = (energy(each, hardware, meter.trace.switches).arithmetic for each in (cost, direct))
    assert found / plain == pytest.approx(share)
