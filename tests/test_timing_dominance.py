"""No GPU is slower than one that it beats in every figure, no wider type faster than a narrower one, and nothing faster
for being larger: over all pairs of NVIDIA's GPUs, at the clocks that their power leaves them."""

import functools
from itertools import permutations, product

import pytest
from test_timing_laws import ITEM_BYTES, SWITCHES, attention_cost, plain_cost, product_cost

from flopmeter import available_hardware, load_hardware
from flopmeter.records import ELEMENTWISE, AttentionShape, Mask
from flopmeter.timing.energy import KernelClocks

# What rates of their own profiles differ by, where each was measured by somebody else: B300 and GB200 in bf16, H100 NVL
# and GH200 in streams.
TOLERANCE = 1.06
LEAST_SECONDS = 1e-5  # below, clock and latencies decide, and a larger GPU may well have slower ones
CLOCKS = 0.98  # so much less clock is no figure that a GPU is beaten in: B200 and H200 differ by a hundredth

GPUS = {name: load_hardware(name) for name in available_hardware() if load_hardware(name).vendor == "nvidia"}
WITH_FP16 = [name for name in available_hardware() if "fp16" in load_hardware(name).matrix_tflop_per_s]
CAUSAL = Mask(None, 0, bottom_right=True)


def attention(queries, keys, backend, is_backward=False):
    return attention_cost(AttentionShape(4, 32, 8, queries, keys, 128, 128, CAUSAL, is_backward), backend, "bf16")


KERNELS = {
    f"{dtype} GEMM of {m} rows": (dtype, product_cost((1, m, 14336, 4096), dtype))
    for m, dtype in product((1, 64, 1024, 16384), ("bf16", "fp8"))
    if ITEM_BYTES.setdefault(dtype, 1)
} | {
    "prefill, flash": ("bf16", attention(4096, 4096, "flash")),
    "prefill, cuDNN": ("bf16", attention(4096, 4096, "cudnn")),
    "prefill, efficient": ("bf16", attention(4096, 4096, "efficient")),
    "decoding, flash": ("bf16", attention(1, 8192, "flash")),
    "decoding, cuDNN": ("bf16", attention(1, 8192, "cudnn")),
    "training, flash": ("bf16", attention(2048, 2048, "flash", is_backward=True)),
    "addition": ("bf16", plain_cost(ELEMENTWISE, 2**26, 2**28, "bf16")),
}


@functools.cache
def clocks(name):
    return KernelClocks(GPUS[name], SWITCHES, "sustained")


def seconds(name, cost):
    law = clocks(name)
    return law.prices(cost, 0.0, law(cost, 0.0)).busy.seconds + GPUS[name].kernel_floor_seconds


def reaches_less(one, other, kernel):
    """Whether its generation was measured to reach a smaller share there: RTX Blackwell of its memory, which is GDDR7,
    and by attention written for Ampere (an RTX 5090)."""
    is_product = "GEMM" in kernel
    return not is_product and one.compute_capability >= (12, 0) > other.compute_capability


def figures(gpu, dtype):
    """What a kernel of this type may be bound by. Of one multiprocessor, too: a wave of tiles is as fast as that."""
    peak = gpu.matrix_tflop_per_s[dtype]
    vector = gpu.vector_tflop_per_s["fp32"]
    of_all = (peak, vector, gpu.memory_bandwidth_gb_per_s, gpu.l2_cache_mb or 0, gpu.sm_count, gpu.tdp_w)
    return (*of_all, peak / gpu.sm_count, vector / gpu.sm_count, gpu.boost_clock_mhz)


def beats(one, other, dtype):
    *mine, my_clock = figures(one, dtype)
    *theirs, their_clock = figures(other, dtype)
    return all(map(float.__ge__, map(float, mine), map(float, theirs))) and my_clock >= CLOCKS * their_clock


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_gpu_is_slower_than_one_that_it_beats_in_every_figure(kernel):
    dtype, cost = KERNELS[kernel]
    have = {name: gpu for name, gpu in GPUS.items() if dtype in gpu.matrix_tflop_per_s}
    taken = {name: seconds(name, cost) for name in have}
    pairs = [
        (one, other)
        for one, other in permutations(have, 2)
        if beats(have[one], have[other], dtype) and not reaches_less(have[one], have[other], kernel)
    ]
    assert ("h200-sxm-141gb", "h100-sxm5-80gb") in pairs
    slower = [
        (one, other) for one, other in pairs if taken[other] >= LEAST_SECONDS and taken[one] > TOLERANCE * taken[other]
    ]
    assert not slower


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_b200_is_no_slower_than_an_h200_and_that_no_slower_than_an_a100(kernel):
    """Its clock is lower by a hundredth, and torch's flash kernels, written for Ampere, gain little on it."""
    dtype, cost = KERNELS[kernel]
    b200, h200 = (seconds(name, cost) for name in ("b200-sxm-180gb", "h200-sxm-141gb"))
    assert b200 <= h200
    assert dtype == "fp8" or h200 <= seconds("a100-sxm4-80gb", cost)


@pytest.mark.parametrize("name", [name for name, gpu in GPUS.items() if "bf16" in gpu.matrix_tflop_per_s])
def test_a_narrower_type_makes_no_large_product_slower(name):
    types = [dtype for dtype in ("fp8", "bf16") if dtype in GPUS[name].matrix_tflop_per_s] + ["fp32"]
    for rows in (16, 4096):
        taken = [seconds(name, product_cost((1, rows, 8192, 8192), dtype)) for dtype in types]
        assert taken == sorted(taken)


@pytest.mark.parametrize("name", ["a100-sxm4-80gb", "h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "l40s"])
@pytest.mark.parametrize(("backend", "is_backward"), [("flash", False), ("flash", True), ("cudnn", False)])
def test_attention_over_a_longer_or_a_further_sequence_takes_no_less(name, backend, is_backward):
    def taken(sequences, length):
        shape = AttentionShape(sequences, 32, 8, length, length, 128, 128, CAUSAL, is_backward)
        return seconds(name, attention_cost(shape, backend, "bf16"))

    lengths, counts = (512, 1024, 1536, 4096, 8192), (1, 2, 3, 4, 8, 16)
    for count in counts:
        of_lengths = [taken(count, length) for length in lengths]
        assert of_lengths == sorted(of_lengths)
    for length in lengths:
        of_counts = [taken(count, length) for count in counts]
        assert of_counts == sorted(of_counts)


FINER_TILES_SHOW = ("l40", "rtx-pro-6000-blackwell", "rtx-pro-6000-blackwell-maxq")


@pytest.mark.parametrize("name", WITH_FP16)
@pytest.mark.parametrize("is_backward", [False, True])
def test_kernels_that_take_a_mask_are_no_faster_than_those_that_take_none(name, is_backward):
    """AMD's are one library's; on NVIDIA's GPUs CUTLASS's are slower than FlashAttention's. On three devices,
    where little else tells them apart, what their tiles of 64 by 64 leave out of a short causal square and tiles of 128
    by 128 do not (at 512, 36 of 64 tiles' area against 10 of 16: a tenth of the scores) makes up for that. Heads share
    no keys, which CUTLASS's cannot."""
    device = load_hardware(name)
    law = KernelClocks(device, SWITCHES, "sustained")
    for length, head_dim in product((512, 4096), (64, 128, 256)):
        shape = AttentionShape(4, 32, 32, length, length, head_dim, head_dim, CAUSAL, is_backward)
        costs = (attention_cost(shape, backend, "fp16") for backend in ("flash", "efficient"))
        flash, efficient = (law.prices(cost, 0.0, law(cost, 0.0)).busy.seconds for cost in costs)
        assert flash <= efficient * (1.03 if name in FINER_TILES_SHOW and length == 512 else 1.0 + 1e-9)
