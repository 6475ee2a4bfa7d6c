"""Parts of the time of fused attention, told by what else stays the same: depths of keys and of values, masks and
dropout, caches that hold partial results, functions of scores."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_timing_laws import SWITCHES, attention_cost

from flopmeter import load_hardware
from flopmeter.records import AttentionShape, Mask
from flopmeter.timing import attention_kernels, constants
from flopmeter.timing.attention import attention, tile_of
from flopmeter.timing.bandwidth import cache_bytes_per_s
from flopmeter.timing.kernels import price

A100, H100, MI300X = (load_hardware(name) for name in ("a100-sxm4-80gb", "h100-sxm5-80gb", "mi300x"))
SQUARE = AttentionShape(8, 33, 33, 4096, 4096, 128, 128)
MIB = 2**20


def busy(shape, backend="cudnn", hardware=H100, **work):
    """The time of the kernel where it moves the same bytes, whatever the depths."""
    cost, of_128 = (attention_cost(each, backend) for each in (shape, shape._replace(head_dim=128, value_dim=128)))
    moved = {"reads": of_128.reads, "writes": of_128.writes}
    return price(replace(cost, work=cost.work._replace(**work), **moved), hardware, SWITCHES).busy


def depths(keys, values, **changes):
    return SQUARE._replace(head_dim=keys, value_dim=values, **changes)


def test_forward_the_depth_of_values_counts_as_much_as_that_of_keys():
    """A product with each."""
    narrow, keys, values, both = (
        busy(depths(*pair)).compute_seconds for pair in ((64, 64), (128, 64), (64, 128), (128, 128))
    )
    assert keys == pytest.approx(values)
    assert keys - narrow == pytest.approx((both - narrow) / 2)


def test_backward_there_are_three_products_as_deep_as_keys_and_two_as_deep_as_values():
    """The scores again and the gradients of queries and keys; the gradients of scores and of values."""
    narrow, keys, values = (
        busy(depths(*pair, is_backward=True)).compute_seconds for pair in ((64, 64), (128, 64), (64, 128))
    )
    assert (keys - narrow) / (values - narrow) == pytest.approx(3 / 2)


def test_the_gradient_of_queries_in_fp32_is_as_deep_as_keys():
    """16 bytes of memory beside the op's own for each of its elements (FlashAttention's backward pass)."""
    narrow, keys, values = (
        busy(depths(*pair, is_backward=True)).memory_seconds for pair in ((64, 64), (128, 64), (64, 128))
    )
    assert values == narrow
    moved = 16 * SQUARE.sequences * SQUARE.heads * SQUARE.queries * 64
    assert keys - narrow == pytest.approx(moved / H100.sustained_bandwidth_bytes_per_s)


@pytest.mark.parametrize(("backend", "times"), [("cudnn", 1), ("flash", 1), ("flash_3", 0)])
def test_gradients_of_heads_that_share_keys_are_read_once_more_to_be_summed(backend, times):
    """32 heads of queries write gradients of keys and values, of which those of four are added up; FlashAttention-3
    adds within a block."""

    def beside_the_ops_own(key_heads):
        shape = SQUARE._replace(heads=32, key_heads=key_heads, is_backward=True)
        own_bytes = attention_cost(shape, backend).bytes
        return busy(shape, backend).memory_seconds * H100.sustained_bandwidth_bytes_per_s - own_bytes

    again = 2 * SQUARE.sequences * 32 * SQUARE.keys * (128 + 128)
    assert beside_the_ops_own(8) - beside_the_ops_own(32) == pytest.approx(times * again, rel=1e-6, abs=1.0)


@pytest.mark.parametrize("queries", [1, 128, 129, 256])
def test_flash_attention_adds_gradients_to_a_copy_of_a_multiple_of_128_queries(queries):
    """12 bytes an element of the copy, whose heads of 40 are padded to 64, and 4 of the output for the sums of rows."""
    shape = AttentionShape(8, 4, 4, queries, 4096, 40, 40, is_backward=True)
    beside = busy(shape, "flash").memory_seconds * H100.sustained_bandwidth_bytes_per_s
    own = attention_cost(shape._replace(head_dim=128, value_dim=128), "flash").bytes
    rows = 128 if queries <= 128 else 256
    assert beside - own == pytest.approx(8 * 4 * (12 * rows * 64 + 4 * queries * 40), rel=1e-6)


@pytest.mark.parametrize("name", ["FLASH_2", "FLASH_3", "EFFICIENT", "AOTRITON", "FLASH_2_SPLIT"])
@pytest.mark.parametrize("is_backward", [False, True])
def test_the_depth_of_keys_alone_decides_the_tile(name, is_backward):
    kernel = getattr(attention_kernels, name)
    for keys in (64, 96, 128, 256):
        tiles = {tile_of(kernel, depths(keys, values, is_backward=is_backward), A100) for values in (64, 128, 256)}
        assert len(tiles) == 1


@pytest.mark.parametrize("is_backward", [False, True])
def test_a_mask_in_memory_and_dropout_each_take_their_time_of_every_score(is_backward):
    shape = SQUARE._replace(is_backward=is_backward)
    plain, masked, dropped, both = (
        busy(shape, adds_bias=adds_bias, drops=drops).compute_seconds
        for adds_bias, drops in ((False, False), (True, False), (False, True), (True, True))
    )
    assert masked > plain
    assert dropped > plain
    assert both - dropped == pytest.approx(masked - plain)


def test_a_number_for_dropout_takes_an_a100_a_ninth_of_a_cycle():
    """Ten rounds of Philox give 16 of 8 bits by 80 instructions on 64 lanes, and each is compared and selects."""
    shape = AttentionShape(216, 1, 1, 4096, 4096, 64, 64)
    dropped, plain = (busy(shape, "flash", A100, drops=drops).compute_seconds for drops in (True, False))
    cycles = (80 / 16 / 64 + 2 / 64) * 216 * 4096**2 / 108  # all SMs are busy to the end
    assert dropped - plain == pytest.approx(cycles / (A100.boost_clock_mhz * 1e6), rel=0.01)


def decoding(heads, hardware, keys=65_536):
    return busy(AttentionShape(1, heads, heads, 1, keys, 128, 128), "flash", hardware).memory_seconds


def test_partial_results_that_the_cache_holds_are_not_written_to_memory():
    """Of slices of keys: each byte of cache spares one that is written, and one that is read, until all are held."""
    none, one, two, all_held, more = (
        decoding(8, A100.replace(l2_cache_mb=mib)) for mib in (None, 0.0125, 0.025, 40, 80)
    )
    assert (
        none - one == pytest.approx(one - two) == pytest.approx(2 * 0.0125 * MIB / A100.sustained_bandwidth_bytes_per_s)
    )
    assert two > all_held == more


@pytest.mark.parametrize(("heads", "is_split"), [(172, True), (173, False), (215, False)])
def test_keys_are_split_where_blocks_are_fewer_than_four_fifths_of_those_that_the_device_holds(heads, is_split):
    """216 on an A100, two an SM; without a cache partial results go to memory."""
    held = decoding(heads, A100.replace(l2_cache_mb=40))
    assert (decoding(heads, A100.replace(l2_cache_mb=None)) > held) == is_split


def test_queries_that_are_copied_for_heads_that_share_keys_come_from_the_cache_if_both_copies_fit():
    """Eight heads of 8,192 queries over pages, by FlashAttention-2: 16 MiB, read and written."""
    shape = AttentionShape(8192, 8, 1, 1, 128, 128, 128)
    fits, not_quite = (busy(shape, "paged", A100.replace(l2_cache_mb=mib)).work_seconds for mib in (32, 32 - 2**-16))
    slower = 1 / A100.sustained_bandwidth_bytes_per_s - 1 / cache_bytes_per_s(A100)
    assert not_quite - fits == pytest.approx(2 * 16 * MIB * slower)


@pytest.mark.parametrize("extra", [1, 3])
def test_a_function_of_a_score_counts_as_many_operations_as_the_tables_say(extra):
    """Its arithmetic is known by op: an exp is one of them, and stands for several instructions."""
    shape = SQUARE._replace(head_dim=64, value_dim=64)
    of_exp = constants.SCORE_FUNCTION_OPERATIONS
    functions = busy(shape, "flex", A100, score_flops=40 + extra, score_functions=extra).compute_seconds
    arithmetic = busy(shape, "flex", A100, score_flops=40 + extra * of_exp).compute_seconds
    less = busy(shape, "flex", A100, score_flops=40).compute_seconds
    assert functions == pytest.approx(arithmetic)
    assert functions > less


def test_two_queries_see_what_is_masked_for_the_first_of_them():
    """Causal: the first query masks the last key; a single query masks none."""
    for backend in ("flash", "cudnn"):
        alone, masked = (
            busy(AttentionShape(64, 32, 32, 1, 8192, 128, 128, mask), backend).compute_seconds
            for mask in (Mask(), Mask(None, 0, bottom_right=True))
        )
        assert alone == pytest.approx(masked)


def test_backward_flex_attention_has_four_products_as_deep_as_keys_and_three_as_deep_as_values():
    """Blocks that keep keys and blocks that keep queries each compute the scores and their gradients, and sum a
    gradient: of values and of keys, or of queries."""
    narrow, keys, values = (
        busy(depths(*pair, is_backward=True), "flex").compute_seconds for pair in ((64, 64), (128, 64), (64, 128))
    )
    assert (keys - narrow) / (values - narrow) == pytest.approx(4 / 3)


def test_flex_attention_multiplies_by_hoppers_own_instructions_and_flash_attention_2_by_amperes():
    """Their tiles, of 128 x 128 with heads of 64, and their softmax are alike."""
    shape = depths(64, 64)
    flex, flash = (busy(shape, backend).compute_seconds for backend in ("flex", "flash"))
    assert flex < 0.9 * flash
    on_a100 = [busy(shape, backend, A100).compute_seconds for backend in ("flex", "flash")]
    assert on_a100[0] == pytest.approx(on_a100[1])


def test_warps_of_flash_attention_2_read_long_heads_from_shared_memory_no_faster_than_it_delivers():
    """A tile of 64 x 64 with heads of 256: each of four warps reads all keys and values, 64 x 512 bytes each, and all
    together the queries once, which takes 2,304 cycles at 128 bytes in each. 264 heads of 64 x 64 tiles are on 132
    SMs. The softmax follows, .1 cycles a score. By its products, at .62 of what an SM's matrix unit does, a tile would
    take 2,000 cycles, and the softmax."""
    of_tile = (4 * 2 * 64 * 512 + 64 * 512) / 128 + 0.1 * 64 * 64
    seconds = 2 * 64 * 64 * of_tile / (H100.boost_clock_mhz * 1e6)
    assert busy(depths(256, 256), "flash").compute_seconds == pytest.approx(seconds, rel=0.02)


def test_a_function_of_a_score_takes_a_lane_for_each_of_its_operations():
    """40 of them on 64 lanes of an SM are five eighths of a cycle, behind the products of flex_attention."""
    shape = AttentionShape(216, 1, 1, 4096, 4096, 64, 64)
    with_it, without = (busy(shape, "flex", A100, score_flops=flops).compute_seconds for flops in (40, 0))
    cycles = 40 / 64 * 216 * 4096**2 / 108
    assert with_it - without == pytest.approx(cycles / (A100.boost_clock_mhz * 1e6), rel=0.01)


def test_memory_efficient_kernels_leave_all_keys_of_a_query_to_one_block():
    """None of CUTLASS's splits them: twice as many keys take an idle device twice as long, eight more heads nothing."""
    one, twice, more_heads = (
        busy(AttentionShape(1, heads, heads, 1, keys, 64, 64), "efficient", A100).compute_seconds
        for heads, keys in ((1, 2**16), (1, 2**17), (9, 2**16))
    )
    assert twice == pytest.approx(2 * one, rel=0.01)
    assert more_heads == pytest.approx(one)


@pytest.mark.parametrize("device", ["rtx-3090", "rtx-4090"])
def test_attention_of_fp16_takes_as_long_on_a_geforce_as_of_bf16(device):
    """Both add up in fp32 at half of the rate of fp16 alone."""
    costs = (attention_cost(SQUARE, "flash", dtype) for dtype in ("fp16", "bf16"))
    fp16, bf16 = (price(cost, load_hardware(device), SWITCHES).busy.work_seconds for cost in costs)
    assert fp16 == pytest.approx(bf16)


def test_backward_attention_on_blackwell_waits_for_shared_memory_where_matrix_units_keep_their_peak():
    """For a tile of 128 x 128 and a head of 128 shared memory takes 3,328 cycles: eight operands of 32 KiB, dS, and dq
    in fp32 in and out, at 128 bytes in each. A loop reaches .9 of that, and does not take the 2,560 of five products,
    of which it reaches as much, in turn with it."""
    b200 = load_hardware("b200-sxm-180gb")
    cost = attention_cost(AttentionShape(37, 16, 16, 4096, 4096, 128, 128, is_backward=True), "cudnn", "bf16")
    peak = replace(b200.contraction_peak("bf16"), achieved=1.0)
    taken = attention(cost, cost.work, b200, peak).compute_seconds * b200.boost_clock_mhz * 1e6
    assert 3328 / 0.9 < taken / (37 * 16 * 32 * 32 / 148) < (3328 + 2560) / 0.9


def test_while_a_memory_efficient_block_begins_or_ends_the_other_one_on_its_sm_computes():
    """An SM of an A100 holds two, whatever their tiles: of 4,000 cycles that each block takes besides them, 2,000 are
    seen. A head of 8,192 queries has 128 blocks of 64; twice as many heads of half the keys have as many tiles."""
    long, short = (
        busy(AttentionShape(216 * count, 1, 1, 8192, 8192 // count, 64, 64), "efficient", A100).compute_seconds
        for count in (1, 2)
    )
    more_blocks = 216 * 128 / 108
    assert short - long == pytest.approx(more_blocks * 2000 / (A100.boost_clock_mhz * 1e6), rel=0.01)


def test_on_vector_units_16_bits_have_no_memory_efficient_kernel_of_their_own():
    """A P100 has no matrix units: its kernel is that of fp32."""
    p100 = load_hardware("p100-pcie-16gb")
    cost, peak = attention_cost(SQUARE, "efficient", "fp16"), p100.contraction_peak("fp32")
    fp32 = replace(cost, dtype="fp32")
    half, single = (attention(each, each.work, p100, peak).compute_seconds for each in (cost, fp32))
    assert half == pytest.approx(single)


def test_no_kernel_combines_slices_of_a_backward_flex_attention():
    """Its blocks add nothing up in memory: a single tile of 64 queries and 64 keys takes less than a combining kernel,
    and nothing is moved beside the op's own bytes."""
    shape = AttentionShape(1, 1, 1, 64, 64, 64, 64, is_backward=True)
    cost = attention_cost(shape, "flex")
    found = price(cost, A100.replace(l2_cache_mb=None), SWITCHES).busy
    assert found.memory_seconds * A100.sustained_bandwidth_bytes_per_s == pytest.approx(cost.bytes)
