"""How kernels are priced on devices whose products run in a systolic array: by hand, and against their profiles."""

import pytest
import torch
from torch.nn import functional as F

from flopmeter import FlopMeter, available_hardware, load_hardware
from flopmeter.records import AttentionShape, AttentionWork, FormulaWork
from flopmeter.timing.systolic import filled_share

# 100 TFLOP/s in an array of 128 x 128, 1 TFLOP/s beside it, 1 TB/s from memory, nothing lost anywhere.
TPU = load_hardware("tpu-v5e").replace(
    vector_tflop_per_s={"fp32": 1},
    matrix_tflop_per_s={"bf16": 100, "int8": None},
    achieved={"matrix": 1, "vector": 1, "memory": 1},
    memory_bandwidth_gb_per_s=1000,
    pcie={"generation": 4, "bidirectional_gb_per_s": 64},
    check=None,
    unverified=[],
)
WITH_ARRAY = [name for name in available_hardware() if load_hardware(name).systolic_array]


def priced(program, hardware=TPU):
    """The one kernel that the program runs."""
    with torch.inference_mode(), FlopMeter(hardware) as meter:
        program()
    (timing,) = meter.report().timings
    return timing


def meta(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def test_a_product_that_fills_the_array_takes_its_flops_at_the_peak():
    timing = priced(lambda: meta(4096, 4096) @ meta(4096, 4096))
    assert timing.compute_seconds == pytest.approx(2 * 4096**3 / 100e12)
    assert timing.memory_seconds == pytest.approx(3 * 2 * 4096**2 / 1e12)


@pytest.mark.parametrize(
    ("rows", "depth", "columns", "padded"),
    [
        (200, 100, 300, 200 * 128 * 384),  # the right one in three parts of the array, through which 200 rows pass
        (256, 128, 130, 256 * 128 * 130),  # the left one stays, in two parts, since 256 x 256 are more
        (5, 300, 128, 128 * 384 * 128),  # it takes as long as 128 rows to put a part there
        (0, 300, 128, 0),
    ],
)
def test_a_matrix_is_padded_to_the_array_and_the_rows_that_pass_are_not(rows, depth, columns, padded):
    with torch.inference_mode(), FlopMeter(TPU) as meter:
        meta(rows, depth) @ meta(depth, columns)
    assert sum(each.compute_seconds for each in meter.report().timings) == pytest.approx(2 * padded / 100e12)


def test_few_rows_take_as_long_as_the_rows_that_load_the_array():
    few, full = (priced(lambda rows=rows: meta(rows, 1024) @ meta(1024, 1024)) for rows in (16, 128))
    assert few.compute_seconds == pytest.approx(full.compute_seconds)


def test_heads_of_attention_narrower_than_the_array_take_as_long_as_it_is_wide():
    def attention(depth):
        q = meta(1, 8, 1024, depth)
        return priced(lambda: F.scaled_dot_product_attention(q, q, q)).compute_seconds

    scores = 8 * 1024 * 1024
    products, softmax = (
        2 * 2 * scores * 128 / 100e12,
        5 * scores / (0.5 * 1e12),
    )  # no fused multiply-adds: half the rate
    assert attention(64) == pytest.approx(attention(128))
    assert attention(128) == pytest.approx(products + softmax)


def test_sequences_of_several_lengths_are_padded_one_by_one():
    """Of four heads: 128 numbers of a query and a key, 256 of a value."""
    short, long = (2, 100, 300), (1, 500, 64)  # how many, queries, keys
    shape = AttentionShape(3, 4, 4, 500, 300, 128, 256, is_packed=True, lengths=(short, long))
    wanted = 4 * (2 * 100 * 300 + 500 * 64) * (128 + 256)
    # Queries of a short one stay, as 128 rows, while 300 keys pass; its scores do, 128 by 384, or its values. Of the
    # long one 64 keys and values stay, as 128, while 500 queries and scores pass.
    taken = 4 * (2 * (128 * 300 * 128 + 128 * 256 * 384) + 500 * 128 * 128 + 500 * 256 * 128)
    assert filled_share(AttentionWork("flash", shape, wanted, 0, 0), 128) == pytest.approx(wanted / taken)


def test_products_of_unknown_shapes_are_not_padded():
    assert filled_share(FormulaWork(1000), 128) == 1


def test_what_a_causal_mask_hides_is_not_computed():
    def attention(is_causal):
        q = meta(1, 8, 1024, 128)
        return priced(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=is_causal)).compute_seconds

    assert attention(True) == pytest.approx(attention(False) / 2, rel=0.01)


def test_a_type_that_the_array_lacks_is_multiplied_beside_it_without_padding():
    device = TPU.replace(emulated_tflop_per_s={"fp32": None})
    timing = priced(lambda: torch.empty(200, 100, device="meta") @ torch.empty(100, 300, device="meta"), device)
    assert timing.compute_seconds == pytest.approx(2 * 200 * 100 * 300 / 1e12)


def test_products_of_integers_run_on_the_array():
    left, right = (torch.empty(4096, 4096, dtype=torch.int8, device="meta") for _ in range(2))
    timing = priced(lambda: torch._int_mm(left, right), TPU.replace(matrix_tflop_per_s={"int8": 200}))
    assert timing.compute_seconds == pytest.approx(2 * 4096**3 / 200e12)


def test_a_depthwise_convolution_runs_beside_the_array():
    x, weight = meta(8, 256, 32, 32), meta(256, 1, 3, 3)
    timing = priced(lambda: F.conv2d(x, weight, padding=1, groups=256))
    assert timing.compute_seconds == pytest.approx(2 * 9 * 8 * 256 * 32 * 32 / 1e12)


def test_an_addition_takes_its_bytes_and_its_flops_are_told():
    timing = priced(lambda: meta(2**25) + meta(2**25))
    assert timing.work_seconds == pytest.approx(3 * 2 * 2**25 / 1e12, rel=0.1)
    assert timing.compute_seconds == pytest.approx(2**25 / (0.5 * 1e12))
    assert not timing.is_compute


def test_additions_of_a_type_that_has_no_products_take_their_bytes():
    timing = priced(lambda: torch.empty(2**22, dtype=torch.int64, device="meta") + 1)
    assert timing.compute_seconds == 0
    assert timing.memory_seconds == pytest.approx(2 * 8 * 2**22 / 1e12)


def test_a_copy_from_the_host_takes_the_link():
    x = torch.empty(2**24, dtype=torch.bfloat16)
    timing = priced(lambda: x.to("meta"))
    assert timing.memory_seconds > 2 * 2**24 / 32e9


@pytest.mark.parametrize("name", WITH_ARRAY)
def test_large_products_reach_what_the_profile_says(name):
    device = load_hardware(name)
    timing = priced(lambda: meta(8192, 8192) @ meta(8192, 8192), device)
    share = 2 * 8192**3 / timing.work_seconds / (device.matrix_tflop_per_s["bf16"] * 1e12)
    assert share == pytest.approx(device.achieved.matrix, rel=0.02)


@pytest.mark.parametrize("name", WITH_ARRAY)
def test_a_layer_norm_runs_at_a_good_part_of_the_bandwidth(name):
    device = load_hardware(name)
    timing = priced(lambda: F.layer_norm(meta(8192, 4096), (4096,)), device)
    share = 2 * 2 * 8192 * 4096 / timing.work_seconds / device.bandwidth_bytes_per_s
    assert 0.3 < share <= device.achieved.memory
