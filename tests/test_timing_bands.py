"""Error bands: what a class is validated on, and how classes add up to a run."""

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopmeter import FlopMeter, available_hardware, load_hardware
from flopmeter.measured import check
from flopmeter.records import ELEMENTWISE, OP_CLASSES, Timing
from flopmeter.timing import uncertainty
from flopmeter.timing.bands import BANDS, HOST_BAND, UNVALIDATED, band

TRACES = Path(__file__).parent.parent / "validation" / "traces"
NAMES = ("v100-pcie-32gb", "h100-sxm5-80gb", "b200-sxm-180gb", "mi300x")
V100, H100, B200, MI300X = (load_hardware(name) for name in NAMES)


def timing(kernel_class, seconds):
    return Timing(0.0, seconds, seconds, 0.0, 0.0, 0.0, kernel_class, 0.0)


@pytest.mark.parametrize("kernel_class", BANDS)
def test_a_validated_class_names_profiles_that_exist(kernel_class):
    devices = BANDS[kernel_class].devices
    assert devices
    assert set(devices) <= set(available_hardware())


def test_no_class_is_both_validated_and_not():
    assert not set(BANDS) & set(UNVALIDATED)


def test_a_band_is_wider_on_a_device_that_the_class_was_not_validated_on():
    on_v100, on_b200, on_mi300x = (band(ELEMENTWISE, device) for device in (V100, B200, MI300X))
    assert on_v100.below < on_b200.below < on_mi300x.below
    assert on_v100.above < on_b200.above < on_mi300x.above


@pytest.mark.parametrize("kernel_class", ["product, fp8", "attention, bf16", "never heard of", *OP_CLASSES])
def test_every_class_has_a_band(kernel_class):
    below, above, _ = band(kernel_class, H100)
    assert 0 < below < 1
    assert above > 0


def test_a_run_of_one_class_has_its_band():
    entry = BANDS[ELEMENTWISE]
    result = uncertainty([timing(ELEMENTWISE, 0.25)] * 4, 1.0, V100)
    assert result.low == pytest.approx(1 - entry.below)
    assert result.high == pytest.approx(1 + entry.above)
    assert result.validated == (ELEMENTWISE,)


def test_errors_of_two_classes_partly_cancel():
    """Half correlated: errors e and f add up to sqrt(0.5·(e + f)² + 0.5·(e² + f²)), less than e + f."""
    first, second = BANDS["pooling"].above, BANDS["strided copy"].above
    both = uncertainty([timing("pooling", 1.0), timing("strided copy", 1.0)], 2.0, load_hardware("rtx-3090"))
    e, f = first, second
    assert both.high - 2 == pytest.approx((0.5 * (e + f) ** 2 + 0.5 * (e**2 + f**2)) ** 0.5)
    assert both.high - 2 < e + f


def test_waiting_for_the_host_is_as_sure_as_the_host():
    result = uncertainty([], 1.0, V100)
    assert result.low == pytest.approx(1 - HOST_BAND.below)
    assert result.high == pytest.approx(1 + HOST_BAND.above)


def test_classes_are_marked_validated_transferred_or_extrapolated():
    run = [timing(ELEMENTWISE, 1.0), timing("host copy", 1.0), timing("product, fp16", 1.0)]
    result = uncertainty(run, 3.0, load_hardware("rtx-5090"))
    assert result.validated == ()
    assert result.transferred == (ELEMENTWISE, "product, fp16")
    assert result.extrapolated == ("host copy",)


@pytest.mark.parametrize(
    ("backend", "dtype", "measured"),
    [
        (SDPBackend.FLASH_ATTENTION, torch.float16, True),
        (SDPBackend.CUDNN_ATTENTION, torch.bfloat16, True),
        (SDPBackend.CUDNN_ATTENTION, torch.float16, False),
    ],
)
def test_a_backward_pass_of_attention_counts_as_measured_in_the_types_that_were(backend, dtype, measured):
    """FlashAttention-2's published curves, and profiles of cuDNN's in bf16."""
    q, k, v = (torch.empty(1, 8, 1024, 64, dtype=dtype, device="meta", requires_grad=True) for _ in range(3))
    with FlopMeter("h100-sxm5-80gb") as meter, sdpa_kernel(backend):
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    report = meter.report()
    found = uncertainty(report.timings, report.seconds, H100)
    assert any(name.startswith("attention, ") for name in found.validated)
    assert any(name.startswith("attention backward") for name in found.extrapolated) is not measured


@pytest.mark.parametrize("trace", ["h200_kernels_moves", "h100_kernels_select"])
def test_most_of_the_time_in_a_profile_lies_in_the_bands_of_its_kernels(trace):
    """Profiles of many single kernels: of every class that takes a millisecond there, 70 % of the time."""
    found = check(TRACES / f"{trace}.json.gz")
    measured, inside = Counter(), Counter()
    for row in found.rows:
        if row.kernel_class:
            measured[row.kernel_class] += row.measured_seconds
            if band(row.kernel_class, found.hardware).holds(row.measured_seconds, row.predicted_seconds):
                inside[row.kernel_class] += row.measured_seconds
    shares = {name: inside[name] / seconds for name, seconds in measured.items() if seconds > 1e-3}
    assert len(shares) > 3
    assert {name: share for name, share in shares.items() if share < 0.7} == {}


def test_a_kind_of_kernel_in_a_type_that_was_not_measured_has_the_widest_band_of_the_kind():
    """GEMMs were measured in fp32, fp16, bf16 and fp8: below at most .18, above at most .42."""
    h200 = load_hardware("h200-sxm-141gb")
    of_kind = [entry for name, entry in BANDS.items() if name.startswith("product,")]
    widest = (max(entry.below for entry in of_kind), max(entry.above for entry in of_kind))
    assert widest == (0.18, 0.42)
    unknown = band("product, fp64", h200)
    assert (unknown.below, unknown.above, unknown.devices) == (0.18 * 1.5, 0.42 * 1.5, ())


# What each source of measurements has: NeuSight operators in fp32, timm image models under AMP, aiconfigurator products
# and attention of language models, nccl-tests collectives.
MEASURED = {
    "v100-pcie-32gb": (
        "product, fp32 on vector units", "small product, fp32 on vector units", "batched product, fp32 on vector units",
        "convolution, fp32 on vector units", "element-wise", "statistical normalization",
    ),
    "rtx-3090": (
        "product, fp16", "batched product, fp16", "convolution, fp16", "grouped convolution, fp16",
        "depthwise convolution, fp16", "attention, fp16", "element-wise", "statistical normalization", "data movement",
        "reduction", "strided copy", "pooling",
    ),
    "rtx-4090": ("convolution, fp16", "fused"),
    "h100-sxm5-80gb": (
        "product, fp16", "product, bf16", "small product, fp16", "small product, bf16", "product, fp8",
        "grouped product, bf16", "attention, fp16", "attention, bf16", "communication",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("device", "kernel_class"), [(name, each) for name in MEASURED for each in MEASURED[name]])
def test_a_class_that_was_measured_on_a_device_is_validated_there(device, kernel_class):
    assert uncertainty([timing(kernel_class, 1.0)], 1.0, load_hardware(device)).validated == (kernel_class,)


def test_kernels_that_run_at_the_same_time_leave_the_host_no_time_to_be_unsure_of():
    """Two seconds of kernels in one: what counts is their band, of all of their time."""
    entry = BANDS[ELEMENTWISE]
    result = uncertainty([timing(ELEMENTWISE, 1.0)] * 2, 1.0, V100)
    assert 1 - result.low == pytest.approx(2 * entry.below)
    assert result.high - 1 == pytest.approx(2 * entry.above)


def test_every_class_of_a_run_is_marked_in_whatever_order_they_ran():
    classes = ("host copy", ELEMENTWISE, "product, bf16")
    for order in (classes, classes[::-1]):
        result = uncertainty([timing(each, 1.0) for each in order], 3.0, V100)
        marked = result.validated, result.transferred, result.extrapolated
        assert marked == ((ELEMENTWISE,), ("product, bf16",), ("host copy",))
