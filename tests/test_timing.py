"""Prices of single kernels against arithmetic by hand and published measurements."""

import pytest
import torch
import torch.nn.functional as F

from flopmeter import FlopMeter, load_hardware
from flopmeter.costs import costs_of
from flopmeter.costs.arithmetic import normalization

A100 = load_hardware("a100-sxm4-80gb")


def meta(*shape, dtype=torch.float16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def timings(program, hardware=A100, clocks="sustained"):
    with torch.inference_mode(), FlopMeter(hardware, clocks=clocks) as meter:
        program()
    return meter.report().timings


def only(program, hardware=A100, clocks="sustained"):
    (timing,) = timings(program, hardware, clocks)
    return timing


# --- products ------------------------------------------------------------------------------------------------------

# Share of the dense bf16 peak that compute-bound products reach, by FLOPs: 10th and 90th percentile of
# aiconfigurator's GEMM database@095f58a (NVIDIA, Apache-2.0).
MEASURED_SHARES = {
    ("a100-sxm4-80gb", 2048): (0.54, 0.79),
    ("a100-sxm4-80gb", 4096): (0.70, 0.85),
    ("a100-sxm4-80gb", 8192): (0.75, 0.84),
    ("h100-sxm5-80gb", 2048): (0.64, 0.79),
    ("h100-sxm5-80gb", 4096): (0.70, 0.82),
    ("h100-sxm5-80gb", 8192): (0.68, 0.81),
    ("h200-sxm-141gb", 2048): (0.59, 0.79),
    ("h200-sxm-141gb", 8192): (0.66, 0.80),
    ("b200-sxm-180gb", 4096): (0.57, 0.71),
    ("b200-sxm-180gb", 8192): (0.58, 0.73),
    ("l40s", 8192): (0.47, 0.72),
}


@pytest.mark.parametrize(("device", "size"), MEASURED_SHARES)
def test_a_square_product_reaches_a_share_of_the_peak_that_was_measured(device, size):
    hardware = load_hardware(device)
    a = meta(size, size, dtype=torch.bfloat16)
    share = 2 * size**3 / only(lambda: a @ a, hardware, "burst").seconds / hardware.contraction_peak("bf16").flop_per_s
    low, high = MEASURED_SHARES[device, size]
    assert low <= share <= high


@pytest.mark.parametrize("device", ["a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm-180gb"])
def test_a_decoding_product_reads_its_weights_at_the_measured_bandwidth(device):
    """m <= 16 and weights of four times the L2: 0.69 to 0.90 of the spec bandwidth, 10th to 90th percentile of the
    three devices in the same database."""
    hardware = load_hardware(device)
    x, weight = meta(1, 16384), meta(16384, 32768)
    timing = only(lambda: x @ weight, hardware)
    assert timing.regime == "memory"
    share = 2 * 16384 * 32768 / timing.seconds / hardware.bandwidth_bytes_per_s
    assert 0.69 <= share <= 0.90


def test_an_fp32_matrix_times_a_vector_takes_as_long_as_reading_the_matrix():
    matrix, vector = meta(16384, 16384, dtype=torch.float32), meta(16384, dtype=torch.float32)
    read = 16384**2 * 4 / (0.84 * 2039e9)
    assert only(lambda: matrix @ vector).seconds == pytest.approx(read, rel=0.05)


def test_one_tile_more_than_the_device_has_multiprocessors_takes_a_second_wave():
    """108 tiles of 128 x 128 fill an A100 once; the 109th row of tiles has it run twice."""
    b = meta(4096, 128)
    one_wave = only(lambda: meta(108 * 128, 4096) @ b, clocks="burst").compute_seconds
    two_waves = only(lambda: meta(2 * 108 * 128, 4096) @ b, clocks="burst").compute_seconds
    assert two_waves == pytest.approx(2 * one_wave)


def test_a_product_with_few_tiles_splits_its_depth():
    """One tile of 128 x 128 would leave 107 of 108 multiprocessors idle for a depth of 65536."""
    a, b = meta(128, 65536), meta(65536, 128)
    on_one_multiprocessor = 2 * 128 * 128 * 65536 / (0.79 * 312e12 / 108)
    assert only(lambda: a @ b).seconds < on_one_multiprocessor / 10


def test_an_unpadded_vocabulary_makes_the_last_layer_three_times_slower():
    """A. Karpathy, nanoGPT, 2023: padding 50257 to 50304 took a compiled step from 135 to 108 ms, of which the last
    layer's products take 12."""
    x = meta(16384, 768, dtype=torch.bfloat16)
    odd, even = (only(lambda n=n: x @ meta(768, n, dtype=torch.bfloat16)).seconds for n in (50257, 50304))
    assert 2.6 < odd / even < 3.4


def test_fp32_products_on_vector_units_do_not_care_for_alignment():
    x = meta(4096, 768, dtype=torch.float32)
    odd, even = (only(lambda n=n: x @ meta(768, n, dtype=torch.float32)).seconds for n in (50257, 50304))
    assert odd / even == pytest.approx(1, abs=0.01)


def test_a_product_is_classed_by_its_unit_and_by_whether_it_fills_the_device():
    a, small, batch = meta(4096, 4096), meta(256, 4096), meta(64, 512, 512)
    assert only(lambda: a @ a).kernel_class == "product, fp16"
    assert only(lambda: small @ a).kernel_class == "small product, fp16"
    assert only(lambda: batch @ batch).kernel_class == "batched product, fp16"


# --- convolutions ----------------------------------------------------------------------------------------------------


def convolution_seconds(channels, groups=1, *, filters=256, kernel=3, dtype=torch.float16, hardware=A100):
    x, weight = meta(64, channels * groups, 56, 56, dtype=dtype), meta(filters, channels, kernel, kernel, dtype=dtype)
    return only(lambda: F.conv2d(x, weight, padding=kernel // 2, groups=groups), hardware)


def test_few_input_channels_waste_matrix_units():
    """FLOPs grow eightfold from 8 to 64 channels, time less: the fragments of 8 channels are mostly padding."""
    few, many = (convolution_seconds(channels, dtype=torch.float32).compute_seconds for channels in (8, 64))
    assert few < many < 5 * few


def test_channels_last_spares_few_channels_the_padding():
    x, weight = meta(64, 16, 56, 56, dtype=torch.float32), meta(256, 16, 3, 3, dtype=torch.float32)
    last, weight_last = (tensor.to(memory_format=torch.channels_last) for tensor in (x, weight))
    planes = only(lambda: F.conv2d(x, weight, padding=1))
    together = only(lambda: F.conv2d(last, weight_last, padding=1))
    assert together.compute_seconds < 0.6 * planes.compute_seconds


def test_groups_of_a_power_of_two_of_channels_share_tiles_in_channels_last_alone():
    """Images a second that pytorch-image-models publishes for an RTX 3090 (torch 2.4, AMP), in NCHW and in
    channels-last: 8,146 and 10,657 of RegNetX-800MF, whose groups have 16 channels; 4,590 and 4,239 of RegNetX-1.6GF,
    of 24."""

    def seconds(channels, order):
        x, weight = meta(64, channels * 32, 28, 28), meta(channels * 32, channels, 3, 3)
        x, weight = (tensor.to(memory_format=order) for tensor in (x, weight))
        return only(lambda: F.conv2d(x, weight, padding=1, groups=32)).compute_seconds

    assert seconds(24, torch.channels_last) > 1.5 * seconds(32, torch.channels_last)
    assert seconds(24, torch.channels_last) > seconds(24, torch.contiguous_format)
    assert seconds(16, torch.channels_last) < seconds(16, torch.contiguous_format)


def test_groups_of_two_channels_lose_in_channels_last_where_those_of_four_win():
    """Images a second that pytorch-image-models publishes for an RTX 3090 (torch 2.4, AMP), in NCHW and in
    channels-last: 6,864 and 5,517 of DLA-46-X-C, whose widest grouped layers have groups of 2 channels; 2,506 and 3,141
    of DLA-60-X, of 4."""

    def gain(channels):
        x, weight = meta(64, 128, 56, 56), meta(128, channels, 3, 3)
        orders = [
            [tensor.to(memory_format=order) for tensor in (x, weight)]
            for order in (torch.contiguous_format, torch.channels_last)
        ]
        planes, together = (
            only(lambda pair=pair: F.conv2d(*pair, padding=1, groups=128 // channels), "rtx-3090").seconds
            for pair in orders
        )
        return planes / together

    assert gain(2) < 1 < gain(4)


def test_a_depthwise_convolution_runs_far_below_the_vector_peak():
    x, weight = meta(64, 512, 56, 56), meta(512, 1, 7, 7)
    timing = only(lambda: F.conv2d(x, weight, padding=3, groups=512))
    flops = 2 * 64 * 512 * 56 * 56 * 49
    assert timing.kernel_class == "depthwise convolution, fp16"
    assert 0.02 < flops / timing.seconds / 19.5e12 < 0.2


def test_a_large_fp32_convolution_on_volta_is_faster_than_its_direct_products_by_winograd():
    """But never faster than its FLOPs at the spec peak."""
    v100 = load_hardware("v100-sxm2-16gb")
    timing = convolution_seconds(256, dtype=torch.float32, hardware=v100)
    flops = 2 * 64 * 256 * 56 * 56 * 256 * 9
    assert flops / 15.7e12 <= timing.seconds < flops / (0.9 * 15.7e12)


def flop_per_s(channels, groups=1, kernel=3):
    timing = convolution_seconds(channels, groups, kernel=kernel, dtype=torch.float32, hardware="v100-sxm2-16gb")
    return 2 * 64 * 256 * 56 * 56 * channels * kernel**2 / timing.seconds


def test_only_dense_filters_of_3_by_3_exceed_the_rate_of_products_on_vector_units():
    """And their forward pass and the gradient of the input alone: Winograd's filters have no place for a gradient."""
    of_products = flop_per_s(256, kernel=1)
    assert flop_per_s(256) > 1.1 * of_products
    assert flop_per_s(256, kernel=5) < 1.1 * of_products
    assert flop_per_s(128, groups=2) < 1.1 * of_products

    x, grad, weight = (
        meta(*of, dtype=torch.float32) for of in ((64, 256, 56, 56), (64, 256, 56, 56), (256, 256, 3, 3))
    )
    options = [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1
    of_input, of_weight = timings(
        lambda: torch.ops.aten.convolution_backward(grad, x, weight, *options, [True, True, False]), "v100-sxm2-16gb"
    )
    assert of_weight.seconds > 1.1 * of_input.seconds


def test_groups_fill_no_tiles_on_vector_units():
    """Between 16 and 32 channels the rate grows without a step, where matrix units pad 24 to 32."""
    few, some, many = (flop_per_s(channels, groups=32) for channels in (16, 24, 32))
    assert few < some < many


def test_a_convolution_over_grey_images_is_not_depthwise():
    assert convolution_seconds(1).kernel_class == "convolution, fp16"


# --- attention -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "measured"), [(64, 180e12), (128, 220e12)])
def test_flash_attention_on_an_a100_runs_at_its_published_speed(depth, measured):
    """Dao, FlashAttention-2, arXiv 2307.08691, figure 4: forward, no mask, 16k tokens in all, hidden size 2048."""
    q = meta(4, 2048 // depth, 4096, depth)
    timing = only(lambda: F.scaled_dot_product_attention(q, q, q))
    flops = 4 * 4 * 2048 * 4096**2
    assert flops / timing.seconds == pytest.approx(measured, rel=0.15)


def test_a_causal_mask_halves_the_time_of_long_flash_attention():
    q = meta(2, 16, 16384, 128)
    full = only(lambda: F.scaled_dot_product_attention(q, q, q)).seconds
    causal = only(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True)).seconds
    assert causal / full == pytest.approx(0.5, abs=0.03)


# --- memory ----------------------------------------------------------------------------------------------------------


def test_an_element_wise_kernel_streams_at_the_achieved_bandwidth():
    x = meta(1 << 28, dtype=torch.float32)
    assert only(lambda: x + 1).memory_seconds == pytest.approx(8 * 2**28 / (0.84 * 2039e9))


def test_layer_norm_reads_long_rows_twice_and_short_ones_once():
    """Rows in flight: 108 multiprocessors x 16 blocks of 128 threads. Of 64 kB rows they overflow 40 MB of L2."""

    def passes(columns):
        x = meta(1 << 29, dtype=torch.float32).view(-1, columns)
        return only(lambda: F.layer_norm(x, (columns,))).memory_seconds * 0.84 * 2039e9 / (4 * 2**29)

    assert passes(16384) == pytest.approx(3, abs=0.1)
    assert passes(2048) < 2.6


def test_softmax_keeps_rows_of_up_to_1024_elements_in_registers():
    v100 = load_hardware("v100-sxm2-16gb")
    short, long = (meta(1 << 27, dtype=torch.float32).view(-1, columns) for columns in (1024, 16384))
    ratio = only(lambda: long.softmax(-1), v100).seconds / only(lambda: short.softmax(-1), v100).seconds
    assert ratio == pytest.approx(2, abs=0.15)  # 3 reads and a write against a read and a write


@pytest.mark.parametrize("device", ["a100-sxm4-80gb", "h100-sxm5-80gb", "mi300x"])
def test_four_short_rows_of_a_softmax_take_no_longer_than_one_of_their_length(device):
    """A warp works on as many rows as fit beside each other. On an MI300X 301,056 rows of 8 take 11 µs
    (AMD-AGI/TraceLens, a trace of a TimeSformer)."""
    whole, quarters = (meta(n, columns).bfloat16() for n, columns in ((75264, 32), (301056, 8)))
    one, four = (only(lambda x=x: x.softmax(-1), load_hardware(device)).seconds for x in (whole, quarters))
    assert four <= one
    assert device != "mi300x" or 8e-6 < four < 20e-6


def test_a_transposing_copy_is_slower_than_a_plain_one():
    x = meta(8192, 8192)
    assert only(lambda: x.t().contiguous()).seconds > 1.2 * only(lambda: x.clone()).seconds


def test_bilinear_upsampling_loops_over_batch_and_channels():
    """[timm] efficientformerv2 on an RTX 4090: 14 x 14 outputs are 196 threads, each with batch x channels steps."""
    x = meta(256, 384, 7, 7)
    assert only(lambda: F.interpolate(x, scale_factor=2, mode="bilinear")).seconds > 256 * 384 * 0.2e-6
    last = x.to(memory_format=torch.channels_last)
    assert only(lambda: F.interpolate(last, scale_factor=2, mode="bilinear")).seconds < 1e-3


# --- the fused-multiply curve ----------------------------------------------------------------------------------------

# `for _ in range(repeat): x = x * 2`, fused, 2^24 fp32 numbers on an A100-40GB: microseconds, read from the plot in
# Horace He, 'Making Deep Learning Go Brrrr From First Principles' (2022).
CURVE = {1: 101.3, 2: 101.5, 4: 101.5, 8: 101.5, 16: 101.5, 32: 104.5, 64: 137.1, 128: 247.3, 256: 463}


@pytest.mark.parametrize("repeat", CURVE)
def test_a_fused_chain_of_multiplies_bends_where_it_was_measured_to_bend(repeat):
    with FlopMeter("a100-sxm4-40gb") as meter:
        x = meta(1 << 24, dtype=torch.float32)
        for _ in range(repeat):
            x = x * 2
    report = meter.report(mode="compiled")
    (timing,) = (timing for timing in report.timings if timing.work_seconds)
    assert timing.seconds * 1e6 == pytest.approx(CURVE[repeat], rel=0.10)


# --- recurrent layers ----------------------------------------------------------------------------------------------


def recurrent_seconds(steps, sequences, width=512, **options):
    with torch.device("meta"):
        layer = torch.nn.LSTM(width, width, **options).half()
        tokens = torch.empty(*((sequences, steps) if options.get("batch_first") else (steps, sequences)), width).half()
    (timing,) = [each for each in timings(lambda: layer(tokens)) if each.kernel_class.startswith("recurrent")]
    return timing.seconds


def test_the_steps_of_a_recurrent_layer_wait_for_one_another():
    """A step takes microseconds, however little it computes (Diamos et al., 'Persistent RNNs', ICML 2016)."""
    assert 1e-3 < recurrent_seconds(1000, 1) < 20e-3
    assert recurrent_seconds(2000, 1) == pytest.approx(2 * recurrent_seconds(1000, 1), rel=0.01)
    assert recurrent_seconds(1000, 4) == pytest.approx(recurrent_seconds(1000, 1), rel=0.1)  # latency, not work
    assert recurrent_seconds(1000, 1, batch_first=True) == recurrent_seconds(1000, 1)


def test_an_lstm_in_fp32_runs_two_kernels_a_step_and_layer():
    """On an H100 cuDNN 9.19 runs 2 layers of 35 steps of 20 sequences and 650 units as 70 products of 9.6 µs and 70
    kernels for the gates of 2.1 µs, and 0.28 ms of other kernels (validation/traces/h100_lstm_train, forward). Rows of
    650 do not suit vector loads, which makes such products slower than predicted."""
    with torch.device("meta"):
        layer, tokens = torch.nn.LSTM(650, 650, num_layers=2), torch.empty(35, 20, 650)
    with torch.inference_mode(), FlopMeter("h100-sxm5-80gb") as meter:
        layer(tokens)
    (timing,) = [each for each in meter.report().timings if each.kernel_class.startswith("recurrent")]
    assert 70 * (4.8e-6 + 1.5e-6) < timing.seconds < 1.1 * 1.10e-3


@pytest.mark.parametrize(
    ("options", "dtype", "sequences", "keeps"),
    [
        ({"width": 1024}, torch.float16, 8, "on large devices"),
        ({"width": 1024}, torch.bfloat16, 8, "nowhere"),
        ({"width": 1024}, torch.float16, 12, "nowhere"),
        ({"width": 1024, "num_layers": 2}, torch.float16, 8, "nowhere"),
        ({"width": 192}, torch.float32, 12, "everywhere"),
        ({"width": 192}, torch.float64, 12, "nowhere"),
        ({"width": 200}, torch.float32, 12, "nowhere"),
    ],
)
def test_persistent_kernels_run_where_torch_asks_for_them(options, dtype, sequences, keeps):
    """By `get_algo` in aten/src/ATen/native/cudnn/RNN.cpp."""
    options = dict(options)
    width = options.pop("width")
    with torch.device("meta"):
        layer, tokens = torch.nn.LSTM(width, width, **options).to(dtype), torch.empty(5, sequences, width, dtype=dtype)
    with torch.inference_mode(), FlopMeter("h100-sxm5-80gb") as meter:
        layer(tokens)
    (call,) = [op.call for op in meter.trace.ops if op.call.func is torch.ops.aten._cudnn_rnn.default]
    (work,) = [cost.work for cost in costs_of(call)]
    assert work.recurrence.keeps_weights == keeps


def test_layers_and_directions_of_a_recurrent_network_add_up():
    one = recurrent_seconds(1000, 1)
    assert recurrent_seconds(1000, 1, num_layers=3) == pytest.approx(3 * one, rel=0.01)
    assert recurrent_seconds(1000, 1, bidirectional=True) == pytest.approx(2 * one, rel=0.01)


def test_a_recurrent_layer_with_many_sequences_is_bound_by_its_products():
    """2·4·512·512·2 FLOP for each of 100 · 16,384 tokens, at .4 to .9 of 312 TFLOP/s."""
    flops = 2 * 4 * 512 * 512 * 2 * 100 * 16384
    assert flops / (0.9 * 312e12) < recurrent_seconds(100, 16384) < flops / (0.4 * 312e12)


# --- looking elements up ---------------------------------------------------------------------------------------------


def test_looking_elements_up_takes_the_integer_units_of_a_gpu():
    """4 Mi elements in two runs of three operands, 22 operations each, and 8 to load it alone, at 64 lanes x 304 CUs x
    2.1 GHz: 3.08 µs (on NVIDIA's, threads wait for memory too).
    Looking up and loading take turns, as squares; a number in place of the row needs no looking up."""
    matrix, row = meta(4096, 1024), meta(1024)
    looked_up, loaded = (only(lambda y=y: matrix + y, load_hardware("mi300x")).memory_seconds for y in (row, 1.0))
    assert (looked_up**2 - loaded**2) ** 0.5 == pytest.approx(3.08e-6, rel=0.01)


def test_a_filter_that_fills_a_step_of_the_main_loop_runs_on_hoppers_own_kernels():
    """32 channels of 2 bytes. Over fewer it runs kernels with the instructions of Ampere, as a trace of a ViT shows."""

    def conv(channels):
        x, weight = meta(128, channels, 112, 112), meta(256, channels, 3, 3)
        return only(lambda: F.conv2d(x, weight, padding=1), load_hardware("h100-sxm5-80gb")).seconds

    assert conv(32) < 0.9 * conv(31)


# --- rows ------------------------------------------------------------------------------------------------------------

# Microseconds from event to event in NeuSight's measurements (Lee et al., ASPLOS 2025, fp32, torch 2.1) by operator,
# card, rows and columns; 26 (softmax) and 38 (layer norm) pass before the launch (scripts/validate_neusight.py).
BEFORE_LAUNCH = {"softmax": 26, "layer_norm": 38}
MEASURED_ROWS = {
    ("softmax", "v100-pcie-32gb", 65536, 512): 344,
    ("softmax", "a100-pcie-40gb", 327680, 1024): 1976,
    ("softmax", "a100-pcie-40gb", 32768, 10240): 2692,
    ("softmax", "t4", 32768, 1024): 1255,
    ("softmax", "p100-pcie-16gb", 327680, 1024): 5141,
    ("layer_norm", "p100-pcie-16gb", 131072, 2048): 6641,
    ("layer_norm", "p100-pcie-16gb", 16384, 4096): 1679,
    ("layer_norm", "a100-pcie-40gb", 786432, 2048): 9695,
    ("layer_norm", "a100-pcie-40gb", 15584, 284): 109,
    ("layer_norm", "a100-pcie-40gb", 2008, 3732): 117,
}


def test_nine_of_ten_row_kernels_take_what_was_measured_to_a_fifth(monkeypatch):
    """From rows that stay in registers or in the cache to rows that are read two or three times, and short ones whose
    threads do little but combine what they have. (Softmax of 1,025 to 9,216 elements had other kernels in torch 2.1,
    and the layer norm more registers, as its library states them.)
    """
    registers = ((60, 44), (70, 40), (80, 38))
    monkeypatch.setattr(normalization, "LAYER_NORM_FP32", normalization.LAYER_NORM_FP32._replace(registers=registers))
    errors = {}
    for (operator, device, rows, columns), measured in MEASURED_ROWS.items():
        x = meta(rows, columns, dtype=torch.float32)
        norm = (lambda x=x: x.softmax(-1)) if operator == "softmax" else (lambda x=x: F.layer_norm(x, x.shape[1:]))
        predicted = only(norm, load_hardware(device)).seconds * 1e6 + BEFORE_LAUNCH[operator]
        errors[operator, device, rows, columns] = predicted / measured - 1
    assert sum(abs(error) <= 0.2 for error in errors.values()) >= 9, errors
    assert all(abs(error) <= 0.4 for error in errors.values()), errors


def test_a_row_more_than_are_in_flight_takes_no_second_wave():
    """Of 12 blocks of 128 threads on each of an A40's 84 SMs 1008 rows are in flight. Layer norm of 904, 1088 and 1328
    rows of 2560 in fp16 takes 15, 22 and 27 µs there (microsoft/vidur, phi-2)."""
    a40 = load_hardware("a40")
    full, one_more, two = (
        only(lambda n=n: F.layer_norm(meta(n, 2560), (2560,)), a40).work_seconds for n in (1008, 1009, 2016)
    )
    assert one_more < 1.05 * full
    assert 1.7 * full < two < 2.1 * full
