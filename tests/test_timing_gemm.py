"""GEMMs of language models against measurements that set no constant, and what matmuls find in the L2 cache."""

from functools import partial

import pytest
import torch

from flopmeter import FlopMeter, load_hardware
from flopmeter.timing.gemm_kernels import (
    CONVOLUTIONS,
    HALF_RATE_MMA,
    MMA,
    ON_TWO_SMS,
    SIMT,
    SYNCHRONOUS_MMA,
    WARP_SPECIALIZED,
    gemm_kernels,
    legacy_mma_share,
    named,
)
from flopmeter.timing.kernels import price

GPUS = ("a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "l40s")
# [m, k] @ [k, n] in bf16: microseconds on each of GPUS, replayed by a CUDA graph (ai-dynamo/aiconfigurator@095f58a,
# Apache-2.0; shapes of the half that is held out). Frameworks and versions differ by 1.1 to 1.4 on one shape.
MEASURED = {
    (17, 3072, 3072): (18.4, 10.2, 9.6, 32.5),
    (33, 3072, 5120): (28.1, 17.1, 13.7, 48.0),
    (97, 4096, 8192): (65.4, 28.0, 25.9, 109.1),
    (225, 3072, 5120): (47.9, 22.9, 19.8, 63.4),
    (1025, 3072, 2048): (57.5, 22.4, 19.6, 63.7),
    (1280, 8192, 1024): (105.0, 33.5, 33.0, 119.0),
    (3073, 8192, 2048): (435.4, 139.2, 139.2, 451.9),
    (8192, 5120, 3072): (998.3, 347.9, 345.6, 1185.5),
}
CASES = [(gpu, shape, row[place]) for place, gpu in enumerate(GPUS) for shape, row in MEASURED.items()]


HALF = {"dtype": torch.float16, "device": "meta"}


def seconds_of(program, gpu: str) -> float:
    with torch.inference_mode(), FlopMeter(gpu) as meter:
        program()
    return meter.report(mode="eager-cudagraph").timings[-1].seconds


def layers(m: int, n: int, k: int, count: int):
    """Matmuls of the same activations with weights of their own, into the same memory."""
    x, out = (torch.empty(m, columns, dtype=torch.bfloat16, device="meta") for columns in (k, n))
    weights = [torch.empty(n, k, dtype=torch.bfloat16, device="meta") for _ in range(count)]
    return [partial(torch.mm, x, weight.t(), out=out) for weight in weights]


def seconds(programs, hardware) -> list[float]:
    with torch.inference_mode(), FlopMeter(hardware, clocks="burst") as meter:
        for program in programs:
            program()
    return [timing.seconds for timing in meter.report(mode="eager-cudagraph").timings]


@pytest.mark.parametrize(("gpu", "shape", "microseconds"), CASES)
def test_a_gemm_takes_what_was_measured_to_a_quarter(gpu, shape, microseconds):
    six = layers(*shape, count=6)
    assert seconds([*six, *six], gpu)[-1] == pytest.approx(microseconds * 1e-6, rel=0.25)


def test_those_gemms_are_a_tenth_off_on_average():
    errors = []
    for gpu, shape, microseconds in CASES:
        six = layers(*shape, count=6)
        errors.append(abs(seconds([*six, *six], gpu)[-1] / (microseconds * 1e-6) - 1))
    assert sum(errors) / len(errors) < 0.1


@pytest.mark.parametrize(
    ("shape", "microseconds"),
    [
        ((10, 51200, 4096), 585.6),
        ((49, 51200, 4096), 655.0),
        ((97, 51200, 4096), 669.0),
        ((15, 12288, 65536), 2213.9),
        ((17, 12288, 65536), 2393.4),
        ((48, 12288, 65536), 2427.5),
        ((16, 65536, 3584), 662.4),
        ((17, 65536, 3584), 718.3),
        ((49, 65536, 3584), 730.8),
    ],
)
def test_large_weights_on_gddr_take_a_twelfth_longer_from_17_rows_on(shape, microseconds):
    """An L40S, bf16, from the same database. On HBM the rows make no such difference (below)."""
    six = layers(*shape, count=6)
    assert seconds([*six, *six], "l40s")[-1] == pytest.approx(microseconds * 1e-6, rel=0.045)


@pytest.mark.parametrize("gpu", ["a100-sxm4-80gb", "h100-sxm5-80gb"])
def test_a_seventeenth_row_costs_nothing_on_hbm(gpu):
    few, more = (seconds(layers(m, 12288, 65536, count=1), gpu) for m in (16, 17))
    assert more == pytest.approx(few, rel=0.01)


def test_weights_that_are_read_in_turn_come_from_the_cache_while_all_of_them_fit():
    """4096 x 4096 in bf16 are 32 MiB. Two of them, activations and results stay in the 96 MB of an L40S; four do not,
    and each is gone before its turn comes again."""
    for count, is_faster in ((2, True), (4, False)):
        programs = layers(1, 4096, 4096, count)
        times = seconds([*programs, *programs], "l40s")
        first, second = sum(times[:count]), sum(times[count:])
        assert (second < 0.6 * first) == is_faster
        assert is_faster or second == pytest.approx(first, rel=0.01)


def test_a_cache_slower_than_memory_brings_nothing():
    """All SMs of an H200 move 132 · 8 B · 1.98 GHz = 2.1 TB/s from and to its cache, and 4 TB/s from memory."""
    (program,) = layers(1, 1024, 1024, 1)
    once, again = seconds([program, program], "h200-sxm-141gb")
    assert again == pytest.approx(once)


def test_a_device_of_unknown_cache_has_none():
    l40s = load_hardware("l40s")
    unknown = l40s.replace(l2_cache_mb=None)
    (program,) = layers(1, 4096, 4096, 1)
    once, again = seconds([program, program], unknown)
    assert again == pytest.approx(once)
    assert seconds([program, program], l40s)[-1] < once


@pytest.mark.parametrize(
    ("gpu", "dtype", "family"),
    [
        ("h100-sxm5-80gb", "bf16", WARP_SPECIALIZED),
        ("b200-sxm-180gb", "fp8", ON_TWO_SMS),
        ("a100-sxm4-80gb", "fp16", MMA),
        ("l40s", "bf16", MMA),
        ("mi300x", "bf16", MMA),
        ("rtx-4090", "fp16", HALF_RATE_MMA),  # GeForce, also of Blackwell: `mma` with sums in fp32 at half rate
        ("rtx-5090", "bf16", HALF_RATE_MMA),
        ("t4", "fp16", SYNCHRONOUS_MMA),  # before cp.async
        ("v100-sxm2-16gb", "fp16", SYNCHRONOUS_MMA),
        ("v100-sxm2-16gb", "fp32", SIMT),
        ("h100-sxm5-80gb", "fp32", SIMT),
    ],
)
def test_a_device_runs_the_kernels_of_its_instructions(gpu, dtype, family):
    hardware = load_hardware(gpu)
    assert gemm_kernels(hardware, hardware.contraction_peak(dtype)) is family


def test_a_matrix_times_a_vector_has_tiles_on_matrix_units_only():
    """[1, 4096] @ [4096, 4096] in fp32 computes one row, in fp16 one of the 64 of a tile."""
    for dtype, rows in ((torch.float32, 1), (torch.float16, 64)):
        x, weight = (torch.empty(*shape, dtype=dtype, device="meta") for shape in ((1, 4096), (4096, 4096)))
        with torch.inference_mode(), FlopMeter("v100-sxm2-16gb") as meter:
            torch.mm(x, weight)
        (timing,) = meter.report().timings
        peak = meter.hardware.contraction_peak({torch.float32: "fp32", torch.float16: "fp16"}[dtype])
        least = 2 * rows * 4096**2 / peak.flop_per_s
        assert least < timing.compute_seconds < 5 * least


# Weights of 4 bits in gpt-fast's decoder of Llama-2-7B on an A100: 196.8 tokens/s, 862.69 GB/s of weights, with
# everything else of a step (pytorch-labs/gpt-fast, README). In: inputs, outputs and how many a token needs.
LLAMA_2_7B = {(4096, 12288): 32, (4096, 4096): 32, (4096, 11008): 64, (11008, 4096): 32, (4096, 32000): 1}


def four_bits(rows: int, inputs: int, outputs: int, gpu: str = "a100-sxm4-80gb") -> float:
    """Seconds of one call."""
    with torch.device("meta"):
        x = torch.empty(rows, inputs, dtype=torch.bfloat16)
        weight = torch.empty(outputs // 8, inputs // 128, 32, 4, dtype=torch.int32)
        scales = torch.empty(inputs // 32, outputs, 2, dtype=torch.bfloat16)
    with torch.inference_mode(), FlopMeter(gpu) as meter:
        torch.ops.aten._weight_int4pack_mm(x, weight, 32, scales)
    return meter.report().timings[0].seconds


def test_weights_of_four_bits_leave_a_fifth_of_the_token_to_the_rest_of_the_step():
    seconds = sum(count * four_bits(1, *shape) for shape, count in LLAMA_2_7B.items())
    assert 0.7 < seconds * 196.8 < 0.95


@pytest.mark.parametrize("gpu", ["a100-sxm4-80gb", "l40s", "h100-sxm5-80gb"])
def test_each_sixteen_rows_unpack_the_weights_of_four_bits_again(gpu):
    assert four_bits(16, 4096, 11008, gpu) == pytest.approx(four_bits(1, 4096, 11008, gpu), rel=0.02)
    assert four_bits(2048, 4096, 11008, gpu) == pytest.approx(2 * four_bits(1024, 4096, 11008, gpu), rel=0.05)


def eight_bits(rows: int, gpu: str = "h100-sxm5-80gb") -> float:
    """Seconds of one call: 4096 inputs, 16896 outputs, which are 8 warps of 16 for each of 132 multiprocessors."""
    x, scales = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((rows, 4096), (16896,)))
    weight = torch.empty(16896, 4096, dtype=torch.int8, device="meta")
    with torch.inference_mode(), FlopMeter(gpu) as meter:
        torch.ops.aten._weight_int8pack_mm(x, weight, scales)
    return meter.report().timings[0].seconds


def test_a_thread_for_each_output_looks_up_a_line_of_the_cache_for_each_weight():
    """8 warps x 4096 elements x 18 lines at 1.98 GHz are 298 µs, where the weights are read in 24."""
    assert eight_bits(1) == pytest.approx(298e-6, rel=0.03)
    assert eight_bits(2) == pytest.approx(eight_bits(1), rel=0.01)
    assert eight_bits(16) == pytest.approx(8 * eight_bits(1), rel=0.02)


def test_registers_bound_what_ampere_s_instructions_reach_on_newer_parts():
    """2,385 FLOP in a cycle of a multiprocessor: .63 of an H100's 3,786, all of an H20's 958, .31 of a B200's 7,737."""
    shares = {
        name: legacy_mma_share(load_hardware(name))
        for name in ("h100-sxm5-80gb", "h20-96gb", "b200-sxm-180gb", "a100-sxm4-80gb", "rtx-5090")
    }
    assert list(shares.values()) == pytest.approx([0.63, 1.0, 2385 / 7737, 1.0, 0.63], abs=1e-3)


def test_filters_over_an_image_run_at_the_rates_of_the_matrix_units_on_both_geforce_parts():
    """Both have Ampere's instructions alone: 209.5 TFLOP/s beside 165.2, so that 7x7 filters over 3 channels are faster
    on the RTX 5090. Image models with such a first layer were predicted 1.1 to 1.3 times too slow there (timm)."""

    def first_layer():
        image, filters = (
            torch.empty(*shape, **HALF).to(memory_format=torch.channels_last)
            for shape in ((256, 3, 224, 224), (64, 3, 7, 7))
        )
        torch.nn.functional.conv2d(image, filters, stride=2, padding=3)

    ada, blackwell = (seconds_of(first_layer, name) for name in ("rtx-4090", "rtx-5090"))
    assert ada / blackwell == pytest.approx(209.5 / 165.2, rel=0.1)


@pytest.mark.parametrize("family", [SIMT, CONVOLUTIONS, SYNCHRONOUS_MMA, MMA, HALF_RATE_MMA])
def test_a_tile_has_sides_of_powers_of_two_and_may_lie_across(family):
    """A warp computes a power of two of rows and columns, a block has 1, 2, 4 or 8 warps each way; to exchange the
    operands exchanges the sides."""
    assert all(side.bit_count() == 1 for tile in family.tiles for side in tile)
    assert {(columns, rows) for rows, columns in family.tiles} == set(family.tiles)


def test_a_tile_of_hopper_is_64_rows_times_a_multiple_of_16_columns_and_its_sums_fill_the_registers_of_two_warpgroups():
    """PTX ISA, `wgmma.mma_async`: m64nNk16. 256 threads keep 128 sums in fp32 each."""
    for tile in WARP_SPECIALIZED.tiles:
        assert any(side % 64 == 0 for side in tile)
        assert all(side % 16 == 0 for side in tile)
        assert tile[0] * tile[1] <= 256 * 128
    assert {(columns, rows) for rows, columns in WARP_SPECIALIZED.tiles} == set(WARP_SPECIALIZED.tiles)
    assert {(192, 160), (64, 80), (256, 128)} <= set(WARP_SPECIALIZED.tiles)


def test_rows_that_fill_five_tiles_of_64_take_no_longer_than_those_of_an_h100_that_reads_the_weights():
    """288 rows, 28672 outputs, 8192 inputs: the peak takes 137 µs, the weights at 2.85 TB/s 165 (aiconfigurator's rows
    of 257 to 300 tokens read at .74 of the bandwidth). Three tiles of 128 rows would take 182 of the peak alone."""
    (took,) = seconds([partial(torch.mm, *_operands(288, 28672, 8192))], "h100-sxm5-80gb")
    assert 165e-6 < took < 230e-6


@pytest.mark.parametrize("rows", [1, 16])
def test_few_rows_read_weights_as_fast_as_memory_does_where_matrix_units_are_few_too(rows):
    """An H20 has an eighth of an H100's matrix units: 64 rows would take 1.6 times as long as the weights."""
    h20 = load_hardware("h20-96gb")
    (took,) = seconds([partial(torch.mm, *_operands(rows, 28672, 8192))], h20)
    weights = 2 * 28672 * 8192 / h20.sustained_bandwidth_bytes_per_s
    assert weights < took < 1.25 * weights


def _operands(m: int, n: int, k: int):
    x, weight = (torch.empty(rows, k, dtype=torch.bfloat16, device="meta") for rows in (m, n))
    return x, weight.t()


def test_a_row_more_takes_no_power_for_the_tile_that_it_opens():
    """4,097 rows need the energy of 4,097: a large product is bound by power and not by its waves of tiles, of which
    that row adds 32 to 1,024."""
    more, less = (
        seconds([partial(torch.mm, *_operands(rows, 8192, 8192))], "h100-sxm5-80gb")[0] for rows in (4097, 4096)
    )
    assert more / less == pytest.approx(1.0, abs=0.005)


@pytest.mark.parametrize(
    ("name", "is_ampere", "tile", "cluster"),
    [
        ("nvjet_hsh_192x160_64x4_2x1_h_bz_coopB_NNT", False, (192, 160), 2),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x64x64_warpgroupsize1x1x1_execute", False, (128, 64), 1),
        ("sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize96x64x32_stage4_warpsize2x2x1", True, (96, 64), 1),
        ("cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x64_64x6_tn_align8", True, (128, 64), 1),
        ("ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", True, (128, 256), 1),
        ("cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_tn_align1", False, (256, 128), 1),
        ("volta_sgemm_32x32_sliced1x4_tn", False, (32, 32), 1),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x128x64_MI16x16x1_SN", False, (256, 128), 1),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >", False, None, 1),
        ("void fbgemm_gpu::permute_2D_lengths_kernel<int>(int, int, int const*)", False, None, 1),
    ],
)
def test_the_name_of_a_library_s_kernel_tells_its_tile_and_its_cluster(name, is_ampere, tile, cluster):
    assert named(name) == (is_ampere, tile, cluster)


def test_a_tile_of_hopper_waits_for_its_operands_if_no_other_block_shares_them():
    """788 x 768, depth 3072 in bf16 on an H100: each SM loads 192 rows of 6,144 bytes for its tile of 128 x 64, at 64
    bytes a cycle in 9.3 µs; it multiplies for 6.7, and launch, latency and store take 3.4. The trace of a ViT has 13.5
    (AMD-AGI/TraceLens)."""
    hardware = load_hardware("h100-sxm5-80gb")
    with torch.inference_mode(), FlopMeter(hardware) as meter:
        torch.mm(*_operands(788, 768, 3072))
    cost, switches = meter.report().kernels[0].cost, meter.trace.switches
    tile = "_tilesize128x64x64_"
    took = price(cost, hardware, switches, ran=named(tile)).busy.seconds + hardware.kernel_floor_seconds
    assert 9.3e-6 + 3.4e-6 < took < 14.5e-6
    shared = price(cost, hardware, switches, ran=named(tile)._replace(cluster=2)).busy.seconds
    assert shared < took - hardware.kernel_floor_seconds - 1e-6


def last_layer(tokens: int, features: int, words: int):
    """The products of a last layer, of the gradient of its weight and of its input, as programs."""
    x, weight, gradient = (
        torch.empty(shape, dtype=torch.bfloat16, device="meta")
        for shape in ((tokens, features), (words, features), (tokens, words))
    )
    return [lambda: x @ weight.t(), lambda: gradient.t() @ x, lambda: gradient @ weight]


@pytest.mark.parametrize(
    ("sizes", "microseconds", "tolerance"),
    [
        ((16384, 768, 50257), (13254, 8311, 8944), 0.27),  # GPT-2: the first on tiles of half the area
        ((8192, 1024, 30522), (2020, 1947, 2080), 0.1),  # BERT
    ],
)
def test_the_loads_of_unaligned_rows_bound_products_over_a_vocabulary(sizes, microseconds, tolerance):
    """Traces of an H100 (validation/traces): kernels that load 2 and 4 bytes at a time."""
    predicted = [time * 1e6 for time in seconds(last_layer(*sizes), "h100-sxm5-80gb")]
    assert predicted == pytest.approx(microseconds, rel=tolerance)


@pytest.mark.parametrize(("extra", "microseconds"), [(1, 939.6), (2, 479.5), (4, 481.5)])
def test_rows_at_multiples_of_eight_bytes_are_loaded_by_four(extra, microseconds):
    """4096 x 4096 x 4096 in bf16 on an H100 (torch 2.11, 2026-11), rows of one operand longer by so many elements."""
    a, b = (torch.empty(4096, 4096 + more, dtype=torch.bfloat16, device="meta")[:, :4096] for more in (0, extra))
    (time,) = seconds([lambda: a @ b], "h100-sxm5-80gb")
    assert time * 1e6 == pytest.approx(microseconds, rel=0.15)


@pytest.mark.parametrize(
    ("left", "right", "microseconds"),
    [
        ((16384, 49, 32), (16384, 32, 49), 117.0),
        ((16384, 49, 49), (16384, 49, 32), 144.1),
        ((8192, 49, 32), (8192, 32, 49), 60.0),
        ((8192, 49, 49), (8192, 49, 32), 73.7),
        ((1536, 197, 64), (1536, 64, 197), 190.3),
        ((24, 256, 3137), (24, 3137, 512), 195.1),
    ],
)
def test_so_they_do_with_products_of_attention_over_an_odd_number_of_tokens(left, right, microseconds):
    """Those of Swin, among others, on the same H100; an edge of the matrix cuts the loads of a tile."""
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in (left, right))
    (time,) = seconds([lambda: a @ b], "h100-sxm5-80gb")
    assert time * 1e6 == pytest.approx(microseconds, rel=0.15)


def test_padding_the_vocabulary_saves_on_an_a100_what_was_measured():
    """A. Karpathy, nanoGPT, 2023: with 50304 words for 50257 a compiled step of 12 x 1024 tokens, 135 ms, was 25 %
    faster."""
    odd, padded = (sum(seconds(last_layer(12 * 1024, 768, words), "a100-sxm4-80gb")) for words in (50257, 50304))
    assert 1e3 * (odd - padded) == pytest.approx(135 - 135 / 1.25, rel=0.1)


@pytest.mark.parametrize(
    ("device", "dtype", "is_slower"),
    [
        ("h100-sxm5-80gb", torch.float32, True),
        ("h100-sxm5-80gb", torch.bfloat16, False),
        ("a100-sxm4-80gb", torch.float32, False),
    ],
)
def test_a_gradient_of_weights_in_tf32_has_no_kernel_of_hoppers_own(device, dtype, is_slower):
    """Of 8,192 tokens, 512 and 2,048 wide: 99 µs by Ampere's kernel on an H100 (validation/traces,
    h100_encoder_tf32_train), where the same product with its rows along the depth takes half of that."""
    gradient, x = (torch.empty(8192, width, dtype=dtype, device="meta") for width in (512, 2048))
    along = torch.empty(512, 8192, dtype=dtype, device="meta")

    def seconds(left):
        torch.backends.cuda.matmul.allow_tf32 = True
        try:
            with torch.inference_mode(), FlopMeter(device, clocks="burst") as meter:
                left @ x
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
        (timing,) = meter.report().timings
        return timing.seconds

    assert (seconds(gradient.t()) > 1.3 * seconds(along)) is is_slower
