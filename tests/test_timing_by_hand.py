"""Parts of a kernel's time by hand: bytes over bandwidth, tiles over multiprocessors, steps one after another."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from test_timing import MEASURED_ROWS, MEASURED_SHARES

from flopmeter import FlopMeter, load_hardware
from flopmeter.records import (
    ELEMENTWISE,
    INDEXING,
    MOVEMENT,
    NORMALIZATION,
    RANDOM,
    REDUCTION,
    Convolution,
    Cost,
    Matmul,
    Region,
    Reread,
    Switches,
    VectorWork,
)
from flopmeter.timing.bands import BANDS, HOST_BAND, UNVALIDATED_DEFAULT
from flopmeter.timing.convolution import convolution
from flopmeter.timing.gemm_kernels import MMA, SIMT, WARP_SPECIALIZED, gemm_kernels
from flopmeter.timing.kernels import price
from flopmeter.timing.matmul import MatmulBytes, Rates, overlap, price_matmul, side_by_side

A100, V100 = load_hardware("a100-sxm4-80gb"), load_hardware("v100-sxm2-32gb")
FP32, FP16 = torch.float32, torch.float16


def meta(*shape, dtype=FP16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def only(program, hardware=A100):
    with torch.inference_mode(), FlopMeter(hardware) as meter:
        program()
    (timing,) = meter.report().timings
    return timing


def bytes_moved(timing, hardware, share=1.0):
    """At the bandwidth of copies, or at a share of it."""
    return timing.memory_seconds * hardware.sustained_bandwidth_bytes_per_s * share


def rates(flop_per_s, bytes_per_s, sm_count, kernels=SIMT):
    """Of a device with a clock so fast that waiting takes no time."""
    return Rates(flop_per_s, flop_per_s, bytes_per_s, sm_count, 1e18, kernels)


def test_kernels_that_unpack_weights_have_tiles_of_few_rows_and_none_of_few_columns():
    """Tokens are the rows: 16 of them take half of what 32 do, as many outputs take what 64 do. By tiles of 16 x 256,
    and of 64 x 64, which are the narrowest otherwise. Both 16 and 32 rows have a tile of half the columns."""
    family = gemm_kernels(A100, A100.contraction_peak("fp16"), unpacks_weights=True)

    def seconds(m: int, n: int) -> float:
        return price_matmul(Matmul(1, m, n, 4096), MatmulBytes(0, 0, 2), rates(1e15, 1e18, 1, family)).work_seconds

    assert seconds(16, 4096) < 0.6 * seconds(32, 4096) < 0.6 * 0.6 * seconds(64, 4096)
    assert seconds(4096, 16) == pytest.approx(seconds(4096, 64), rel=0.01)
    assert seconds(32, 128) / seconds(32, 256) == pytest.approx(seconds(16, 128) / seconds(16, 256))


# --- convolutions on vector units ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("images", "channels", "filters", "side"), [(64, 64, 128, 56), (16, 256, 128, 28), (3, 512, 384, 30)]
)
def test_winograd_moves_each_transformed_number_there_and_back(images, channels, filters, side):
    """F(4x4, 3x3) of Lavin and Gray (arXiv 1509.09308): 36 numbers for each patch and channel, in and out, and for each
    filter, each written by one kernel and read by the next, besides the tensors themselves."""
    x, weight = meta(images, channels, side, side, dtype=FP32), meta(filters, channels, 3, 3, dtype=FP32)
    timing = only(lambda: F.conv2d(x, weight, padding=1), V100)
    assert timing.kernel_class == "convolution, fp32 on vector units"
    patches = images * math.ceil(side / 4) ** 2
    transformed = 36 * (patches * (channels + filters) + channels * filters)
    tensors = images * side**2 * (channels + filters) + 9 * channels * filters
    assert bytes_moved(timing, V100) == pytest.approx(4 * (2 * transformed + tensors), rel=1e-3)
    assert timing.compute_seconds == pytest.approx(2 * 9 * images * side**2 * channels * filters / 15.7e12)  # no faster


def test_winograd_multiplies_36_numbers_where_direct_products_multiply_144():
    """4 x 4 outputs of 9 multiply-adds each, at 1 TFLOP/s and with no bytes to speak of; tiles fill the device."""
    shape, implicit = Convolution(512, (3, 3), (64, 64), True), Matmul(1, 16 * 64 * 64, 512, 512 * 9)
    fast, moved = rates(1e12, 1e18, 8), MatmulBytes(1, 0, 4)
    winograd = convolution(shape, implicit, moved, fast, on_matrix_units=False)
    strided = convolution(shape._replace(is_dense=False), implicit, moved, fast, on_matrix_units=False)
    assert strided.work_seconds == pytest.approx(2 * implicit.m * implicit.n * implicit.k / 1e12, rel=0.02)
    assert winograd.work_seconds == pytest.approx(strided.work_seconds / 4, rel=0.02)


def test_winograds_transforms_wait_for_the_products_between_them():
    """Three kernels: 36 numbers of 4 bytes for 16² patches of 16 images with 512 channels in and as many out, and for
    512 x 512 filters, written by the transforms and not overlapped; at 100 GB/s."""
    shape, implicit = Convolution(512, (3, 3), (64, 64), True), Matmul(1, 16 * 64 * 64, 512, 512 * 9)
    busy = convolution(shape, implicit, MatmulBytes(1, 0, 4), rates(1e12, 1e11, 8), on_matrix_units=False)
    transforms = 36 * 4 * (16 * 16**2 * 1024 + 512**2) / 1e11
    assert busy.memory_seconds == pytest.approx(2 * transforms, rel=1e-6)
    assert busy.compute_seconds + transforms <= busy.work_seconds <= busy.compute_seconds + 2 * transforms


def test_a_depthwise_convolution_with_two_filters_a_channel_computes_twice_as_much():
    one, two = (only(lambda n=n: F.conv2d(meta(64, 512, 56, 56), meta(n, 1, 3, 3), groups=512)) for n in (512, 1024))
    assert one.kernel_class == two.kernel_class == "depthwise convolution, fp16"
    assert two.compute_seconds == pytest.approx(2 * one.compute_seconds)


# --- products --------------------------------------------------------------------------------------------------------


def test_the_slices_of_a_depth_each_write_a_partial_result_that_is_read_once():
    """One tile of 128 x 128 for 108 multiprocessors: the depth is split into a power of two of slices."""
    m, n, depth = 128, 96, 65536
    timing = only(lambda: meta(m, depth) @ meta(depth, n))
    operands = 2 * (m * depth + depth * n + m * n)
    slices = (bytes_moved(timing, A100, MMA.memory_share) - operands) / (2 * 4 * m * n)
    assert slices > 8
    assert math.log2(slices) == pytest.approx(round(math.log2(slices)))


def test_four_slices_for_four_multiprocessors_move_four_partial_results_there_and_back():
    """128 x 128 numbers of 4 bytes each, besides 1 MB of operands; four tiles of 64 x 64 would not reach the rate."""
    busy = price_matmul(Matmul(1, 128, 128, 65536), MatmulBytes(1e6, 0, 4), rates(1e12, 1e12, 4))
    assert busy.compute_seconds == pytest.approx(2 * 128 * 128 * 65536 / 1e12)
    assert busy.memory_seconds == pytest.approx((1e6 + 4 * 2 * 4 * 128 * 128) / 1e12)


def test_partial_results_that_fit_into_the_l2_cache_do_not_go_to_memory():
    """The same 256 KiB, written to a cache a million times as fast as memory: only the operands' 1 MB take time."""
    shape, moved = Matmul(1, 128, 128, 65536), MatmulBytes(1e6, 0, 4)
    fits, does_not = (
        price_matmul(shape, moved, rates(1e12, 1e12, 4)._replace(cache=cache)) for cache in (4 * 2**16, 4 * 2**16 - 1)
    )
    assert fits.memory_seconds == pytest.approx(1e6 / 1e12)
    assert does_not.memory_seconds == pytest.approx((1e6 + 2 * 4 * 2**16) / 1e12)


def test_a_batched_product_is_never_split_in_its_depth():
    """cuBLAS has no such kernels: eight tiles leave 100 of 108 multiprocessors idle, however deep they are."""
    depth = 65536
    batched = only(lambda: meta(2, 128, depth) @ meta(2, depth, 128))
    alone = only(lambda: meta(128, depth) @ meta(depth, 128))
    on_one_multiprocessor = 2 * 64 * 64 * depth / (312e12 / 108)  # the smallest tile
    assert batched.compute_seconds > on_one_multiprocessor
    assert alone.compute_seconds < on_one_multiprocessor / 4
    assert bytes_moved(batched, A100, MMA.memory_share) == pytest.approx(2 * 2 * (2 * 128 * depth + 128 * 128))


def test_small_products_of_a_batch_fill_tiles_of_64():
    """A tile is computed whole: 32 x 32 results take as long as 64 x 64 in a batch, and less than that alone on vector
    units, whose libraries have narrower tiles. (Only the stores of matrix units tell both apart.)"""
    small, full = (only(lambda n=n: meta(4096, n, 4096) @ meta(4096, 4096, n)).compute_seconds for n in (32, 64))
    assert small == pytest.approx(full, rel=0.1)
    x = meta(512, 32 * 4096, dtype=FP32)
    rows, tile = (only(lambda n=n: meta(n, 512, dtype=FP32) @ x, V100).compute_seconds for n in (32, 64))
    assert rows < 0.75 * tile


def test_an_sm_stores_each_tile_at_8_bytes_a_clock_before_it_begins_the_next():
    """512 x 512 numbers of 2 bytes on 4 SMs at 1 GHz: 16,384 cycles, whatever the tiles. A warp-specialised kernel
    hides all but the last tile of an SM, one of at least 64 x 64: 1,024. Of the 16 that each SM computes it loads 64
    rows and, of 64 columns, the half that its neighbour does not: 96 x 128 bytes at 64 a cycle are 192 cycles."""
    shape, moved = Matmul(1, 512, 512, 64), MatmulBytes(2 * 512 * 512, 2 * 512 * 512, 2)
    stores, last = (
        price_matmul(shape, moved, Rates(1e18, 1e18, 1e18, 4, 1e9, kernels)) for kernels in (MMA, WARP_SPECIALIZED)
    )
    assert stores.compute_seconds == pytest.approx(16384e-9, rel=1e-3)
    assert last.compute_seconds == pytest.approx(1024e-9 + 16 * 192e-9, rel=1e-3)


def test_a_main_loop_may_run_faster_than_power_allows_while_sms_are_idle():
    """One tile of 64 x 64 on 4 SMs, which has .660 of the rate of 128 x 256, an eighth to the power of .2: the
    sustained rate, which power limits, is for all four; one alone computes at its quarter of the peak."""
    shape, moved = Matmul(1, 64, 64, 64), MatmulBytes(0, 0, 2)
    one = price_matmul(shape, moved, Rates(2e12, 4e12, 1e18, 4, 1e18, MMA))
    all_of_them = price_matmul(shape._replace(m=256), moved, Rates(2e12, 4e12, 1e18, 4, 1e18, MMA))
    assert one.work_seconds == pytest.approx(2 * 64**3 / (0.660e12), rel=1e-3)
    assert all_of_them.work_seconds == pytest.approx(4 * 2 * 64**3 / 2e12)


def test_registers_that_bound_a_convolution_bound_its_sustained_rate_and_that_of_its_main_loop():
    as_it_is = Rates(3e12, 4e12, 1e12, 100, 1e9, MMA)
    limits = {2e12: (2e12, 2e12), 3.5e12: (3e12, 3.5e12), 5e12: (3e12, 4e12)}
    assert {limit: as_it_is.within(limit)[:2] for limit in limits} == limits


def test_a_matmul_waits_for_its_first_loads_and_last_stores():
    """2,200 clock cycles, at the 1.41 GHz of an A100, beside the device's floor of 1.3 µs."""
    timing = only(lambda: meta(64, 64) @ meta(64, 64))
    assert timing.floor_seconds == pytest.approx(1.3e-6 + 2200 / 1.41e9)


# --- recurrent layers ------------------------------------------------------------------------------------------------


def test_each_tile_of_a_kernel_for_groups_waits_for_its_group_and_its_first_loads():
    """25 groups of one tile on 10 multiprocessors: three waves. A tile reads the end of its group and its pointers (480
    cycles each), and then waits as a whole kernel does (2,200); what it multiplies and moves is next to nothing."""
    rates = Rates(1e30, 1e30, 1e30, 10, 1e9, MMA)
    busy = side_by_side([Matmul(1, 128, 128, 64)] * 25, MatmulBytes(0.0, 0.0, 2), rates)
    assert busy.compute_seconds == pytest.approx(3 * (2 * 480 + 2200) * 1e-9, rel=1e-3)


def test_a_recurrent_layer_takes_no_less_than_its_steps_one_after_another():
    """8 sequences of 100 steps, 1024 units: [8, 1024] @ [1024, 4096] a step, while the inputs go through at once."""
    with torch.device("meta"):
        layer, x = torch.nn.LSTM(1024, 1024).half(), torch.empty(100, 8, 1024).half()
    timings = []
    for program in (lambda: layer(x), lambda: F.linear(x[0], layer.weight_hh_l0)):
        with torch.inference_mode(), FlopMeter(A100) as meter:
            program()
        timings += [timing for timing in meter.report().timings if "product" in timing.kernel_class]
    whole, step = timings
    assert whole.kernel_class.startswith("recurrent")
    assert whole.compute_seconds == pytest.approx(100 * step.compute_seconds, rel=0.1)
    assert whole.work_seconds >= whole.compute_seconds
    read = 2 * (8 * 1024**2 + 100 * 8 * 1024)  # eight matrices and the inputs, once
    assert read / 2039e9 <= whole.memory_seconds < 3 * read / 2039e9


def recurrent(device, steps=1000, layers=1, batch=64, size=128):
    """A network on one device; the last kernel is that of its library."""
    with torch.device("meta"):
        network, x = torch.nn.LSTM(size, size, layers), torch.empty(steps, batch, size)
    with torch.inference_mode(), FlopMeter(device) as meter:
        network(x)
    return meter.report().timings[-1]


@pytest.mark.parametrize("device", ["a100-sxm4-80gb", "h100-sxm5-80gb", "rtx-4090", "t4", "v100-sxm2-32gb", "mi300x"])
def test_a_recurrent_network_takes_as_long_for_each_step_of_each_layer(device):
    """Whether its weights stay on the chip, or each step launches two kernels or more."""
    one, longer, deeper = (recurrent(device, **sizes).work_seconds for sizes in ({}, {"steps": 2000}, {"layers": 2}))
    assert longer == pytest.approx(2 * one, rel=0.05)
    assert deeper == pytest.approx(2 * one, rel=0.05)


def test_steps_whose_weights_no_kernel_keeps_launch_two_kernels_each():
    """`use_persist_device_heuristics` in RNN.cpp: devices of few multiprocessors, or of capability 8.6, keep none."""
    for device in ("rtx-3090", "t4"):
        floor = load_hardware(device).kernel_floor_seconds
        assert recurrent(device, batch=1, size=200).work_seconds > 2 * 1000 * floor


# --- rows ------------------------------------------------------------------------------------------------------------


def test_rows_that_no_cache_holds_are_read_twice_and_no_more():
    """Layer norm of 64 rows of 64 MB each: read for the statistics, read again, written; at the same share of bandwidth
    as one copy of it."""
    x = meta(64, 2**24, dtype=FP32)
    norm, copy = only(lambda: F.layer_norm(x, (2**24,))), only(lambda: x.clone())
    assert norm.memory_seconds == pytest.approx(1.5 * copy.memory_seconds, rel=0.01)


# --- a CPU -----------------------------------------------------------------------------------------------------------


def test_multiply_adds_of_a_cpu_run_at_its_vector_peak_and_other_arithmetic_at_half():
    cpu = load_hardware("cpu-xeon-8480plus")
    a, b, c = (torch.empty(1000, dtype=FP32, device="meta") for _ in range(3))
    seconds = {}
    for name, program in {"add": lambda: a + b, "addcmul": lambda: torch.addcmul(a, b, c)}.items():
        with torch.inference_mode(), FlopMeter(cpu, as_cuda=False) as meter:
            program()
        (timing,) = meter.report().timings
        seconds[name] = timing.compute_seconds
    peak = cpu.vector_peak("fp32")
    assert 2000 / peak.flop_per_s <= seconds["addcmul"] <= 2000 / peak.sustained_flop_per_s * 1.001
    assert seconds["add"] == pytest.approx(seconds["addcmul"])  # half the operations at half the rate


# --- bands -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("never_measured", [UNVALIDATED_DEFAULT, HOST_BAND])
def test_what_was_never_measured_is_as_unsure_to_either_side(never_measured):
    """In factors: a third low is as likely as half as much again."""
    assert 0.9 < (1 - never_measured.below) * (1 + never_measured.above) < 1.25


@pytest.mark.parametrize("measured", [ELEMENTWISE, MOVEMENT, REDUCTION, INDEXING, RANDOM])
def test_what_was_never_measured_is_less_sure_than_what_was(measured):
    assert UNVALIDATED_DEFAULT.below > BANDS[measured].below
    assert UNVALIDATED_DEFAULT.above > BANDS[measured].above


def test_bands_name_the_devices_of_the_measurements_that_they_come_from():
    """Products in bf16: aiconfigurator's database of GEMMs; norms: NeuSight's rows (tests/test_timing.py)."""
    assert set(BANDS["product, bf16"].devices) == {device for device, _ in MEASURED_SHARES}
    assert set(BANDS[NORMALIZATION].devices) > {device for _, device, *_ in MEASURED_ROWS}


def test_a_kernel_that_computes_and_moves_nothing_takes_no_time_but_its_floor():
    assert overlap(0.0, 0.0, 2.0) == 0.0
    assert overlap(0.0, 3.0, 2.0) == overlap(3.0, 0.0, 2.0) == 3.0
    assert overlap(3.0, 4.0, 2.0) == pytest.approx(5.0)
    assert overlap(4.0, 3.0, 1.0) == pytest.approx(7.0)


def test_on_gddr_all_types_narrower_than_four_bytes_stream_at_one_rate_below_that_of_fp32():
    """[timm]: .87 of spec where fp32 reaches .93."""
    device = load_hardware("rtx-3090")
    types = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8)
    narrow = {
        4 * 2**24 / only(lambda t=t: meta(4 * 2**24 // t.itemsize, dtype=t).clone(), device).memory_seconds
        for t in types
    }
    wide = 4 * 2**24 / only(lambda: meta(2**24, dtype=FP32).clone(), device).memory_seconds
    assert max(narrow) == pytest.approx(min(narrow))
    assert max(narrow) / wide == pytest.approx(0.87 / 0.93, abs=0.01)


# --- layouts of convolutions -----------------------------------------------------------------------------------------


def test_cudnn_turns_image_filters_and_result_of_a_tf32_convolution_in_nchw():
    """Of 1 x 1 filters, which move memory: two more passes over all that the convolution itself moves once, as fast as
    memory streams. Not with TF32 switched off, not in fp16, not for groups, and not before Ampere, where no unit takes
    tf32."""

    def extra(dtype=FP32, hardware=A100, groups=1):
        nchw, nhwc = (
            tuple(
                meta(*shape, dtype=dtype).contiguous(memory_format=order)
                for shape in ((32, 256, 56, 56), (256, 256 // groups, 1, 1))
            )
            for order in (torch.contiguous_format, torch.channels_last)
        )
        return [only(lambda x=x: torch.conv2d(*x, groups=groups), hardware).work_seconds for x in (nchw, nhwc)]

    planes, together = extra()
    nbytes = 4 * (2 * 32 * 256 * 56 * 56 + 256 * 256)
    assert planes - together == pytest.approx(2 * nbytes / A100.sustained_bandwidth_bytes_per_s, rel=0.1)
    for plain in (extra(FP16), extra(groups=8), extra(hardware=load_hardware("v100-sxm2-16gb"))):
        assert plain[0] < 1.6 * plain[1]
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        planes, together = extra()
    assert planes < 1.6 * together


def test_a_16_bit_convolution_in_nchw_brings_five_more_kernels_on_amd():
    """torch.profiler's trace of a ResNet on an MI300X (AMD-AGI/TraceLens): of 46 µs for [10, 64, 56, 56] under 64
    filters of 3 x 3 the convolution itself takes 13.5. In NHWC, and in fp32, nothing is converted."""
    mi300x = load_hardware("mi300x").at_boost()

    def seconds(dtype, memory_format, hardware=mi300x):
        x, filters = (
            meta(*shape, dtype=dtype).contiguous(memory_format=memory_format)
            for shape in ((10, 64, 56, 56), (64, 64, 3, 3))
        )
        return only(lambda: torch.conv2d(x, filters, padding=1), hardware).work_seconds

    nchw, nhwc = torch.contiguous_format, torch.channels_last
    extra = seconds(torch.bfloat16, nchw) - seconds(torch.bfloat16, nhwc)
    nbytes = 2 * (2 * 10 * 64 * 56 * 56 + 64 * 64 * 9)
    slower = mi300x.replace(kernel_floor_us=2 * mi300x.kernel_floor_us)
    added = seconds(torch.bfloat16, nchw, slower) - seconds(torch.bfloat16, nchw)
    assert added == pytest.approx(5 * mi300x.kernel_floor_seconds)
    assert extra > 5 * mi300x.kernel_floor_seconds + 2 * nbytes / mi300x.bandwidth_bytes_per_s
    assert seconds(FP32, nchw, slower) == seconds(FP32, nchw)


# --- kernels of vector units -----------------------------------------------------------------------------------------


def vector_seconds(device=A100, *, nbytes=0, dtype="fp32", flops=0, transcendentals=0, **work):
    regions = (Region(None, nbytes // 2),)
    cost = Cost("op", REDUCTION, ((REDUCTION, flops),), regions, regions, dtype, VectorWork(**work), transcendentals)
    return price(cost, device, Switches(False, False, False)).busy


def test_rows_beyond_those_that_a_device_holds_wait_for_them():
    """An A100 holds 108 x 2048 threads: 864 rows of 256. A row makes 100 accesses, one after another, of no bytes."""
    few, all_held, twice = (
        vector_seconds(rereads=(Reread(0, rows, 0, 256, 0, 100),)).work_seconds for rows in (1, 864, 1728)
    )
    none = vector_seconds().work_seconds
    assert few == all_held
    assert few - none == pytest.approx(99 * none)  # an access instead of one of 100
    assert twice == pytest.approx(2 * few)


def test_fewer_rows_than_multiprocessors_compute_as_much_longer():
    """54 of 108, and 108: each thread has a million operations, which take longer than the latency of each."""
    half, full = (vector_seconds(rereads=(Reread(0, rows, 0, 2048, 10**6, 1),)).work_seconds for rows in (54, 108))
    assert half == pytest.approx(full, rel=1e-3)
    operations = 108 * 2048 * 10**6
    assert full > operations / A100.vector_peak("fp32").flop_per_s


def test_further_kernels_of_an_op_add_their_times():
    kernels = [
        Reread(2**20, 24, 2**16, 1024, 100, 64, is_kernel=True),
        Reread(2**28, 10**4, 2**14, 128, is_kernel=True),
    ]
    alone = [vector_seconds(rereads=(each,)) for each in kernels]
    none, both = vector_seconds(), vector_seconds(rereads=tuple(kernels))
    for name in ("memory_seconds", "work_seconds"):
        of_none, *of_each = (getattr(busy, name) for busy in (none, *alone))
        assert getattr(both, name) == pytest.approx(sum(of_each) - of_none)
        assert min(of_each) > of_none


def test_a_unit_of_amd_starts_no_more_operations_than_it_has_lanes():
    """64 for each of 304 compute units, at 2.1 GHz, though the peak counts two in one instruction."""
    hardware = load_hardware("mi300x")
    busy = vector_seconds(hardware, rereads=(Reread(0, 10**6, 0, 256, 10**4),))
    assert busy.memory_seconds == pytest.approx(10**6 * 256 * 10**4 / (64 * 304 * 2.1e9), rel=0.05)
