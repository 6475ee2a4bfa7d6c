"""Short kernels, caches and latencies against quoted measurements and laws."""

import pytest
import torch
import torch.nn.functional as F

from flopmeter import FlopMeter, load_hardware
from flopmeter.device.power import memory_share
from flopmeter.records import NORMALIZATION, Cost, Region, Reread, Switches, VectorWork
from flopmeter.timing import constants
from flopmeter.timing.kernels import price

BF16, FP32 = torch.bfloat16, torch.float32


def meta(*shape, dtype=BF16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def last(program, device):
    """The timing of the last kernel."""
    with torch.inference_mode(), FlopMeter(device) as meter:
        program()
    return meter.report().timings[-1]


def written(*shape, dtype=BF16):
    return meta(*shape, dtype=dtype).zero_()


def _rotated_half(heads):
    return torch.cat((-heads[..., 32:], heads[..., :32]), -1)


# Microseconds on an H100, medians of traces of a ViT, a small BERT and Qwen1.5-0.5B (AMD-AGI/TraceLens@171dd747).
H100_KERNELS = {
    "GELU of a ViT": (lambda: F.gelu(written(4, 197, 3072)), 5.06),
    "GELU of a small BERT": (lambda: F.gelu(written(1, 141, 2048)), 1.97),
    "an addition of a ViT": (lambda: written(4, 197, 768) + written(4, 197, 768), 2.22),
    "an addition of a small BERT": (lambda: written(1, 141, 512) + written(1, 141, 512), 1.63),
    "an addition of Qwen": (lambda: written(16, 559, 1024) + written(16, 559, 1024), 17.9),
    "SiLU of Qwen": (lambda: F.silu(written(16, 559, 2816)), 38.4),
    "a root of 8944 numbers": (lambda: written(16, 559, 1, dtype=FP32).rsqrt(), 1.6),
    "a cast to fp32": (lambda: written(16, 559, 1024).float(), 29.2),
    "a cast from fp32": (lambda: written(16, 559, 1024, dtype=FP32).to(BF16), 18.2),
    "layer norm of a ViT": (lambda: F.layer_norm(written(788, 768), (768,), meta(768), meta(768)), 4.45),
    "layer norm of a small BERT": (lambda: F.layer_norm(written(141, 512), (512,), meta(512), meta(512)), 3.06),
    "a class token before patches that a convolution made": (
        lambda: torch.cat(
            (written(1, 1, 768).expand(4, -1, -1), written(4, 768, 14, 14).flatten(2).transpose(1, 2)), 1
        ),
        7.26,
    ),
    "rotating half of each head of Qwen": (lambda: _rotated_half(written(16, 559, 16, 64).transpose(1, 2)), 41.9),
}


@pytest.mark.parametrize(("width", "longest"), [(1024, 1.6), (1023, 3.0)])
def test_an_embedding_copies_rows_by_vectors_where_they_are_aligned(width, longest):
    """Unaligned rows are looked up element by element; neither takes the four divisions of torch 2.7 (52 µs here)."""
    timing = last(lambda: F.embedding(written(16, 559, dtype=torch.int64), meta(151936, width)), "h100-sxm5-80gb")
    at_spec = (2 * 2 * width + 8) * 16 * 559 / 3.35e12
    assert at_spec < timing.seconds < longest * at_spec
    assert (
        width == 1024
        or timing.seconds
        > 1.02
        * last(lambda: F.embedding(written(16, 559, dtype=torch.int64), meta(151936, 1024)), "h100-sxm5-80gb").seconds
    )


@pytest.mark.parametrize("name", H100_KERNELS)
def test_a_kernel_takes_what_a_trace_of_an_h100_shows(name):
    program, microseconds = H100_KERNELS[name]
    assert last(program, "h100-sxm5-80gb").seconds == pytest.approx(microseconds * 1e-6, rel=0.2)


@pytest.mark.parametrize(("device", "microseconds"), [("a100-sxm4-80gb", 7), ("a40", 14)])
def test_an_addition_of_tensors_that_were_just_written_is_faster_than_memory(device, microseconds):
    """640 and 416 tokens of 4096 fp16 numbers, 15.7 and 10.2 MB read and written (microsoft/vidur, microseconds)."""
    tokens = {"a100-sxm4-80gb": 640, "a40": 416}[device]
    just_written = last(lambda: written(tokens, 4096) + written(tokens, 4096), device).seconds
    cold = last(lambda: meta(tokens, 4096) + meta(tokens, 4096), device).seconds
    assert just_written < 0.9 * cold
    assert just_written == pytest.approx(microseconds * 1e-6, rel=0.25)


@pytest.mark.parametrize("device", ["a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm-180gb", "rtx-4090", "mi300x"])
def test_what_no_cache_can_hold_is_read_from_memory_again(device):
    x = (meta(2**28), meta(2**28))
    just_written = last(lambda: x[0].zero_() + x[1].zero_(), device).seconds
    assert just_written == last(lambda: x[0] + x[1], device).seconds


def test_a_tensor_that_others_have_pushed_out_is_not_in_the_cache():
    def program(between):
        x = written(2**20)
        for _ in range(between):
            written(2**20)
        x + 1.0

    times = [last(lambda n=n: program(n), "a100-sxm4-80gb").seconds for n in (0, 8, 16, 64)]
    assert times == sorted(times)
    assert times[-1] == last(lambda: meta(2**20) + 1.0, "a100-sxm4-80gb").seconds


def test_each_device_has_the_latency_of_memory_in_its_shortest_kernel():
    """480 cycles: 340 ns at 1.41 GHz, 242 ns at 1.98 GHz."""
    for device, nanoseconds in (("a100-sxm4-80gb", 340), ("h100-sxm5-80gb", 242)):
        work = last(lambda: meta(8) + 1.0, device).work_seconds
        assert work == pytest.approx(nanoseconds * 1e-9, rel=0.01)


def norm_cost(rows, accesses, threads=1024):
    row = Reread(0, rows, 2 * 4096, threads, 0, accesses)
    regions = (Region(None, rows * 2 * 4096),)
    return Cost("norm", NORMALIZATION, ((NORMALIZATION, 0),), regions, regions, "fp16", VectorWork((row,)))


def seconds(cost, device):
    return price(cost, load_hardware(device), Switches(False, False, False)).busy.work_seconds


@pytest.mark.parametrize("device", ["a100-sxm4-80gb", "a40", "h100-sxm5-80gb", "mi300x", "rtx-5090"])
def test_rows_wait_for_each_access_and_each_wave_for_the_one_before(device):
    """A norm of few rows takes its accesses one after another, and never less if there are more rows."""
    hardware = load_hardware(device)
    access = constants.MEMORY_LATENCY_CYCLES / (hardware.boost_clock_mhz * 1e6)
    assert seconds(norm_cost(8, 16), device) == pytest.approx(16 * access, rel=0.1)
    by_rows = [seconds(norm_cost(rows, 16), device) for rows in (1, 100, 1000, 10_000, 100_000)]
    assert by_rows == sorted(by_rows)
    in_flight = hardware.sm_count * (
        1 if device in ("a40", "rtx-5090") else 2
    )  # of 1,024 threads in 1,536, or in 2,048
    assert by_rows[-1] >= 100_000 / in_flight * 16 * access


def test_batch_norm_in_training_walks_each_channel_with_one_block():
    """MI300X, 10 bf16 images of 64 channels: the statistics of 112 x 112 positions take 140 µs, and three kernels 161;
    of 56 x 56, 42 and 54 (trace of a ResNet, AMD-AGI/TraceLens). The bytes alone would take 10 and 3 µs."""
    statistics = meta(64, dtype=FP32)

    def train(side):
        return lambda: F.batch_norm(written(10, 64, side, side), *(statistics,) * 4, training=True)

    large, small = (last(train(side), "mi300x").seconds for side in (112, 56))
    assert 60e-6 < large < 161e-6
    assert small < large / 2


def test_gddr_with_ecc_carries_its_check_bits_and_hbm_does_not():
    assert memory_share("GDDR6 with ECC") == pytest.approx(memory_share("GDDR6") * 16 / 17)
    assert memory_share("HBM3 with ECC") == memory_share("HBM3")
    assert 0.82 <= memory_share("GDDR7") <= 0.85


@pytest.mark.parametrize(("device", "measured"), [("t4", 239 / 320), ("l4", 235 / 300), ("a40", 578 / 696 / 0.94)])
def test_streams_on_gddr_with_ecc_are_those_that_were_measured(device, measured):
    """T4: Habitat (Yu et al., USENIX ATC 2021). L4: NeuSight. A40: fp16 in microsoft/vidur, .94 of fp32."""
    hardware = load_hardware(device)
    assert hardware.sustained_bandwidth_bytes_per_s / hardware.bandwidth_bytes_per_s == pytest.approx(
        measured, rel=0.02
    )


def test_the_gradients_of_a_layer_norm_over_no_rows_are_priced():
    """As of an expert that no token chose."""
    norm = torch.nn.LayerNorm(64, device="meta")
    with FlopMeter("h100-sxm5-80gb") as meter:
        norm(torch.empty(0, 64, device="meta")).sum().backward()
    assert 0 < meter.report().kernel_seconds < 1e-3


def test_cat_gives_each_operand_threads_for_half_of_the_device():
    """getCatGrid of torch's Shape.cu: half of the threads are too few to hide how long each waits. In profiles of an
    H100 a token joined to a cache whose rows have gaps takes 5.9 ps an element, two as long caches 4.1."""

    def joined(*lengths):
        parts = [meta(16, 32, length, 256)[..., :128] for length in lengths]
        return last(lambda: torch.cat(parts, 2), "a100-sxm4-80gb")

    assert joined(1024, 1).seconds == pytest.approx(5.9 / (2 * 4.1) * joined(1024, 1024).seconds, rel=0.1)
    assert joined(1024, 1024).seconds == pytest.approx(2 * joined(512, 512).seconds, rel=0.05)


def test_weight_norm_of_a_few_columns_takes_as_long_as_its_threads_walk():
    """wav2vec2's position convolution, [768, 48, 128] by its last dimension: 361 and 425 µs on an H100, in 8 blocks
    (validation/traces/h100_wav2vec2_train.json.gz). Twice the rows take twice as long, twice the columns do not."""

    def seconds(*shape):
        v, g = (torch.empty(sizes, device="meta", requires_grad=True) for sizes in (shape, (1, 1, shape[-1])))
        with FlopMeter("h100-sxm5-80gb", clocks="burst") as meter:
            torch._weight_norm(v, g, 2).sum().backward()
        report = meter.report()
        timed = zip(report.kernels, report.timings, strict=True)
        return sum(t.work_seconds + t.floor_seconds for kernel, t in timed if "weight_norm" in kernel.cost.name)

    assert seconds(768, 48, 128) == pytest.approx(361e-6 + 425e-6, rel=0.25)
    assert seconds(1536, 48, 128) == pytest.approx(2 * seconds(768, 48, 128), rel=0.3)
    assert seconds(768, 48, 256) == pytest.approx(seconds(768, 48, 128), rel=0.3)
