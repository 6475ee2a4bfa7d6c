"""The time of fused attention: published curves, single measurements, tiles by brute force, and laws."""

from __future__ import annotations

from dataclasses import replace
from inspect import signature
from math import ceil

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_timing_laws import attention_cost, work

from flopmeter import FlopMeter, load_hardware
from flopmeter.ask.serve.engine import with_newest_attention
from flopmeter.costs import kernels_of
from flopmeter.records import AttentionShape, Mask
from flopmeter.timing import attention_kernels, constants
from flopmeter.timing.attention import blocks_at_a_time, kernel_of, template_tile_of, tile_grid, tile_of
from flopmeter.timing.kernels import price

aten = torch.ops.aten
A100, H100, L40S, MI300X = (load_hardware(name) for name in ("a100-sxm4-80gb", "h100-sxm5-80gb", "l40s", "mi300x"))
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="meta")


def seconds(program, device):
    with torch.inference_mode(), FlopMeter(device) as meter:
        program()
    return meter.report(mode="eager-cudagraph").timings[-1].seconds


def packed(device, batch, queries, heads, head_dim, *, left=-1):
    """Causal, sequences of one length one after another in one tensor."""
    q, k, v = (meta(batch * queries, heads, head_dim) for _ in range(3))
    starts = meta(batch + 1, dtype=torch.int32)
    return seconds(
        lambda: aten._flash_attention_forward(
            q, k, v, starts, starts, queries, queries, 0.0, left < 0, False, window_size_left=left, window_size_right=0
        ),
        device,
    )


def flash(device, batch, queries, heads, head_dim, *, key_heads=None, keys=None, causal=False, left=-1):
    q, k, v = (
        meta(batch, tokens, count, head_dim)
        for tokens, count in ((queries, heads), *((keys or queries, key_heads or heads),) * 2)
    )
    right = 0 if causal or left >= 0 else -1
    return seconds(
        lambda: aten._flash_attention_forward(
            q, k, v, None, None, queries, keys or queries, 0.0, causal, False,
            window_size_left=left, window_size_right=right,
        ),
        device,
    )  # fmt: skip


def cudnn(device, batch, queries, heads, head_dim, *, key_heads=None, keys=None, causal=False, mask=None, dropout=0.0):
    q, k, v = (
        meta(batch, count, tokens, head_dim)
        for tokens, count in ((queries, heads), *((keys or queries, key_heads or heads),) * 2)
    )
    return seconds(lambda: aten._scaled_dot_product_cudnn_attention(q, k, v, mask, False, dropout, causal), device)


def cudnn_backward(device, batch, length, heads, head_dim, *, causal=False, mask=None, dropout=0.0):
    q, k, v, out, gradient = (meta(batch, heads, length, head_dim) for _ in range(5))
    lse, state = meta(batch, heads, length, 1, dtype=torch.float32), meta(2, dtype=torch.uint64)
    return seconds(
        lambda: aten._scaled_dot_product_cudnn_attention_backward(
            gradient, q, k, v, out, lse, state, state, mask, None, None, length, length, dropout, causal
        ),
        device,
    )


def paged(device, batch, heads, key_heads, keys, head_dim=128, *, left=-1):
    """One new token for each sequence, over a cache of pages, by the kernel of a server."""
    q, k, v = (meta(batch, tokens, count, head_dim) for tokens, count in ((1, heads), *((keys, key_heads),) * 2))
    right = -1 if left < 0 else 0
    with torch.inference_mode(), FlopMeter(device) as meter:
        aten._flash_attention_forward(
            q, k, v, None, None, 1, keys, 0.0, False, False, window_size_left=left, window_size_right=right
        )
    (kernel,) = with_newest_attention(kernels_of(meter.trace), device)
    return price(kernel.cost, device, meter.trace.switches).busy.seconds


def test_inputs_that_the_cache_holds_are_read_faster_but_no_faster_than_the_cache():
    """40 heads of 4,000 keys and values are 82 MB in bf16: an L40S keeps them in its 96 MB, an A100 not in its 40."""
    q, k, v = meta(1, 1, 40, 128), meta(1, 4000, 40, 128), meta(1, 4000, 40, 128)

    def attend(times):
        for _ in range(times):
            aten._flash_attention_forward(q, k, v, None, None, 1, 4000, 0.0, False, False)

    for device, is_cached in ((L40S, True), (A100, False)):
        once, again = seconds(lambda: attend(1), device), seconds(lambda: attend(2), device)
        on_cache = (
            2 * k.numel() * 2 / (constants.CACHE_BYTES_PER_CYCLE * device.sm_count * device.boost_clock_mhz * 1e6)
        )
        assert (again < once) == is_cached
        assert again > on_cache


# --- published curves ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "measured"), list(zip(LENGTHS, (191e12, 260e12, 298e12, 319e12, 333e12, 335e12), strict=True))
)
def test_flash_2_on_an_h100_speeds_up_with_the_sequence_as_published(length, measured):
    """Shah et al., FlashAttention-3, arXiv 2407.08608, figure 5: FlashAttention-2, causal, head dimension 128, hidden
    size 2048, 16k tokens in all."""
    batch = 16384 // length
    flops = 4 * batch * 2048 * length**2 / 2
    assert flops / flash(H100, batch, length, 16, 128, causal=True) == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(("length", "measured"), [(512, 214e12), (16384, 322e12)])
def test_flash_2_backward_on_an_h100_speeds_up_with_the_sequence_as_published(length, measured):
    """The same paper, figure 6: backward, no mask."""
    batch = 16384 // length
    flops = 10 * batch * 2048 * length**2
    assert flops / flash_backward(H100, batch, 16, length, 128, causal=False) == pytest.approx(measured, rel=0.1)


def flash_backward(device, batch, heads, tokens, head_dim, *, causal):
    tensors = [meta(batch, tokens, heads, head_dim) for _ in range(5)]
    lse, state = meta(batch, heads, tokens, dtype=torch.float32), meta(2, dtype=torch.uint64)
    return seconds(
        lambda: aten._flash_attention_backward(*tensors, lse, None, None, tokens, tokens, 0.0, causal, state, state),
        device,
    )


def test_flash_2_backward_on_an_a100_reaches_the_published_rate():
    """Dao, FlashAttention-2, arXiv 2307.08691, figure 6: 175 TFLOP/s, head dimension 128. No constant of the backward
    pass was set on it."""
    flops = 10 * 16 * 16384**2 * 128
    assert flops / flash_backward(A100, 1, 16, 16384, 128, causal=False) == pytest.approx(175e12, rel=0.05)


@pytest.mark.parametrize(
    ("gpu", "batch", "heads", "tokens", "head_dim", "causal", "microseconds"),
    [
        ("h100-sxm5-80gb", 8, 16, 512, 64, False, 113),
        ("h100-sxm5-80gb", 128, 12, 197, 64, False, 467),  # two tiles of 128 each way
        ("h100-sxm5-80gb", 1, 24, 4608, 128, False, 2251),
        ("h100-sxm5-80gb", 4, 32, 1024, 128, True, 464),
        ("h100-sxm5-80gb", 1, 16, 16384, 128, True, 8663),  # a head's blocks nearly fill the device
        ("h100-sxm5-80gb", 2, 16, 2048, 256, True, 880),  # twice the gradient of queries for a block of keys
        ("h200-sxm-141gb", 32, 16, 257, 80, False, 333),
        ("h200-sxm-141gb", 1, 8, 8192, 64, False, 1210),
    ],
)
def test_flash_2_backward_takes_the_time_of_profiles(gpu, batch, heads, tokens, head_dim, causal, microseconds):
    """All three kernels (validation/traces, kernels_attention), without copies of gradients that lie otherwise."""
    predicted = flash_backward(load_hardware(gpu), batch, heads, tokens, head_dim, causal=causal)
    assert predicted * 1e6 == pytest.approx(microseconds, rel=0.08)


# --- single measurements ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "cached", "heads", "key_heads", "measured"),
    [
        (8, 16383, 32, 32, 0.698e-3),
        (128, 4095, 32, 8, 0.696e-3),
        (256, 1023, 12, 12, 0.559e-3),
        (512, 31, 48, 48, 0.721e-3),
    ],
)
def test_decoding_on_an_h100_takes_as_long_as_measured(batch, cached, heads, key_heads, measured):
    """ai-dynamo/aiconfigurator@095f58a: FlashAttention-3 as sglang calls it, head dimension 128; no constant is set on
    these shapes."""
    predicted = cudnn(H100, batch, 1, heads, 128, key_heads=key_heads, keys=cached + 1)
    assert predicted == pytest.approx(measured, rel=0.15)


def test_flash_3_reads_a_long_cache_faster_than_a_copy_moves_memory():
    """The same database: .91 to .92 of an H100's 3.35 TB/s in the median of such shapes, where copies reach .85."""
    cache = 2 * 2 * 64 * 32 * 128 * 8192
    assert cache / paged(H100, 64, 32, 32, 8192) / 3.35e12 == pytest.approx(0.915, abs=0.04)


@pytest.mark.parametrize(
    ("heads", "key_heads", "keys", "measured"),
    [(2, 1, 8192, 29.5e-6), (40, 2, 8192, 35.2e-6), (48, 4, 8192, 33.4e-6), (64, 4, 16384, 47.9e-6)],
)
def test_slices_of_keys_are_combined_in_the_time_measured_on_an_a100(heads, key_heads, keys, measured):
    """vLLM's FlashAttention-2 in the same database, one sequence; the row also holds two kernels of some 3 µs. Reading
    the keys takes 2 to 20 µs; up to 64 slices are added one after another."""
    assert 0.7 * measured < paged(A100, 1, heads, key_heads, keys) < measured


def test_flash_2_splits_the_keys_of_a_paged_cache_only_for_heads_that_share_them():
    """The same: one sequence of 8,192 tokens takes 198 µs for eight heads of keys, 29.5 for two that share one."""
    ratio = paged(A100, 1, 8, 8, 8192) / paged(A100, 1, 2, 1, 8192)
    assert ratio == pytest.approx(198 / 29.5, rel=0.2)


@pytest.mark.parametrize(("device", "longer"), [(A100, 6.1e-6), (L40S, 3.6e-6)])
def test_several_sequences_and_key_heads_change_the_order_of_queries_and_result(device, longer):
    """The same: medians of 54 and 46 calls over fewer than 128 keys, 18.9 and 12.8 µs on an A100 (L40S: 12.6, 9.0)."""
    both = paged(device, 4, 16, 2, 64)
    assert both - paged(device, 8, 16, 1, 64) == pytest.approx(longer, rel=0.2)
    assert both - paged(device, 1, 32, 4, 64) == pytest.approx(longer, rel=0.2)


def test_no_key_head_of_its_own_copies_nothing_and_neither_does_an_amd_kernel():
    """Where each head has keys of its own there is no block to share. ROCm's kernels take the queries as they lie."""
    copied = paged(A100, 4, 16, 2, 64) - paged(A100, 4, 2, 2, 64)
    assert 5e-6 < copied < 9e-6
    assert abs(paged(MI300X, 4, 16, 2, 64) - paged(MI300X, 4, 2, 2, 64)) < 1e-6


@pytest.mark.parametrize(
    ("tokens", "heads", "key_heads", "measured"),
    [(4096, 24, 8, 0.653e-3), (8192, 24, 4, 2.22e-3), (10240, 2, 1, 0.503e-3), (16384, 16, 1, 5.49e-3)],
)
def test_prefill_on_an_a100_takes_as_long_as_measured(tokens, heads, key_heads, measured):
    """The same database: FlashAttention-2, causal, one sequence."""
    assert flash(A100, 1, tokens, heads, 128, key_heads=key_heads, causal=True) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(("batch", "heads", "tokens", "measured"), [(1, 8, 141, 9.12e-6), (4, 12, 197, 10.24e-6)])
def test_a_grid_that_fills_no_wave_takes_as_long_as_one_block(batch, heads, tokens, measured):
    """Kernels of a BERT and of a ViT in traces of an H100 (AMD-AGI/TraceLens@171dd747): 16 and 96 blocks."""
    assert flash(H100, batch, tokens, heads, 64) == pytest.approx(measured, rel=0.25)


@pytest.mark.parametrize(("name", "measured"), [("rtx-3090", 3.0e-12), ("rtx-4090", 1.45e-12)])
def test_half_rate_matmuls_of_a_geforce_hide_the_softmax(name, measured):
    """Seconds per score at head dimension 64, from the difference of ViTs at 384 and 224 pixels (timm, torch 2.4)."""
    device, tokens = load_hardware(name), 16384
    assert flash(device, 1, tokens, 12, 64) / (12 * tokens**2) == pytest.approx(measured, rel=0.25)


# --- tiles -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "head_dim", "causal", "tile"),
    [
        ("a100-sxm4-80gb", 64, True, (128, 128)),
        ("a100-sxm4-80gb", 128, True, (128, 64)),
        ("a100-sxm4-80gb", 256, False, (128, 64)),
        ("h100-sxm5-80gb", 256, False, (64, 64)),
        ("rtx-4090", 64, False, (128, 128)),
        ("rtx-4090", 96, False, (128, 64)),
        ("rtx-4090", 96, True, (64, 64)),
        ("rtx-4090", 128, False, (128, 32)),
        ("rtx-4090", 128, True, (64, 64)),
        ("rtx-4090", 192, True, (128, 64)),
        ("rtx-4090", 256, True, (64, 64)),
        ("rtx-5090", 128, True, (128, 64)),
    ],
)
def test_tiles_are_those_of_flash_attentions_launch_templates(gpu, head_dim, causal, tile):
    """Dao-AILab/flash-attention@0251105, csrc/flash_attn/src/flash_fwd_launch_template.h: `is_sm8x` is 8.6 to 8.9, not
    12.0; the longest heads take tiles by the shared memory."""
    shape = AttentionShape(1, 1, 1, 64, 64, head_dim, head_dim, Mask(right=0) if causal else Mask())
    assert tile_of(attention_kernels.FLASH_2, shape, load_hardware(gpu)) == tile


@pytest.mark.parametrize(
    ("gpu", "head_dim", "tile"),
    [
        ("a100-sxm4-80gb", 64, (128, 128)),
        ("a100-sxm4-80gb", 96, (128, 64)),
        ("h100-sxm5-80gb", 128, (128, 64)),
        ("h100-sxm5-80gb", 192, (64, 64)),
        ("h100-sxm5-80gb", 256, (64, 64)),
        ("rtx-4090", 32, (128, 128)),
        ("rtx-3090", 64, (128, 64)),
        ("rtx-5090", 128, (64, 64)),
        ("l40s", 256, (32, 64)),
    ],
)
def test_backward_tiles_of_keys_and_queries_are_those_of_flash_attentions_launch_templates(gpu, head_dim, tile):
    """csrc/flash_attn/src/flash_bwd_launch_template.h: by the shared memory that a block may have."""
    shape = AttentionShape(1, 1, 1, 64, 64, head_dim, head_dim, is_backward=True)
    assert (
        tile_of(kernel_of("flash", load_hardware(gpu), in_16_bits=True, is_backward=True), shape, load_hardware(gpu))
        == tile
    )


def test_under_a_window_flash_attention_has_the_tiles_of_a_kernel_that_is_not_causal():
    """flash_api.cpp: `is_causal = window_size_left < 0 && window_size_right == 0`."""
    windowed = AttentionShape(1, 1, 1, 4096, 4096, 128, 128, Mask(left=1024, right=0))
    assert tile_of(attention_kernels.FLASH_2, windowed, load_hardware("rtx-4090")) == (128, 32)


@pytest.mark.parametrize("gpu", ["a100-sxm4-80gb", "l40s", "h100-sxm5-80gb", "b200-sxm-180gb", "rtx-5090"])
@pytest.mark.parametrize("head_dim", [16, 63, 64, 96, 128, 160, 192, 256, 257])
def test_tiles_of_flex_attention_are_those_that_inductor_takes_without_tuning(gpu, head_dim, monkeypatch):
    heuristics = pytest.importorskip("torch._inductor.template_heuristics.triton", reason="elsewhere in this torch")
    hardware = load_hardware(gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: hardware.compute_capability)
    chooser = heuristics.CUDAConfigHeuristic()
    takes_queries = "seq_len" in signature(chooser.get_flex_attn_fwd_configs).parameters  # from torch 2.15 on, for AMD
    asked = {"head_dim": head_dim, "dtype": torch.bfloat16} | ({"seq_len": 512} if takes_queries else {})
    (forward,) = chooser.get_flex_attn_fwd_configs(**asked)
    (backward,) = chooser.get_flex_attn_bwd_configs(head_dim, torch.bfloat16)
    values = 128 if head_dim == 64 else 64  # their width decides nothing
    shape = AttentionShape(1, 1, 1, 512, 512, head_dim, values)
    assert template_tile_of(shape, hardware) == (forward.block_m, forward.block_n)
    assert template_tile_of(shape._replace(is_backward=True), hardware) == (backward.block_n1, backward.block_m1)


@pytest.mark.parametrize(
    ("gpu", "kernel", "tile", "head_dim", "blocks"),
    [
        ("a100-sxm4-80gb", attention_kernels.FLASH_2_SPLIT, (64, 128), 128, 2),  # 80 of 164 kB
        ("l40s", attention_kernels.FLASH_2_SPLIT, (64, 128), 128, 1),  # 80 of 100 kB
        # 48 kB: "since we get 2 CTAs per SM", says its launch template.
        ("l40s", attention_kernels.FLASH_2, (128, 32), 128, 2),
        ("a100-sxm4-80gb", attention_kernels.FLASH_2_SPLIT, (64, 64), 256, 1),  # 96 of 164
        # 96 of 228 kB: "since then we can get 2 CTAs per SM".
        ("h100-sxm5-80gb", attention_kernels.FLASH_2, (64, 64), 256, 2),
    ],
)
def test_an_sm_holds_as_many_blocks_as_its_shared_memory_has_place_for(gpu, kernel, tile, head_dim, blocks):
    assert blocks_at_a_time(kernel, *tile, head_dim, load_hardware(gpu)) == blocks


@pytest.mark.parametrize(
    ("device", "batch", "heads", "key_heads", "keys", "head_dim", "window", "measured"),
    [
        (L40S, 256, 48, 8, 4, 128, 128, 332e-6),
        (L40S, 2048, 64, 8, 64, 64, 128, 4325e-6),
        (L40S, 1024, 32, 4, 4, 192, 128, 756e-6),
        (A100, 512, 16, 16, 8, 128, None, 289e-6),
    ],
)
def test_thousands_of_short_blocks_take_as_long_as_measured(
    device, batch, heads, key_heads, keys, head_dim, window, measured
):
    """ai-dynamo/aiconfigurator@095f58a: decoding over a few keys by vLLM's FlashAttention-2. An L40S holds one block of
    an SM at a time, an A100 two."""
    left = -1 if window is None else window - 1
    predicted = flash(device, batch, 1, heads, head_dim, key_heads=key_heads, keys=keys, left=left)
    assert predicted == pytest.approx(measured, rel=0.13)


@pytest.mark.parametrize(
    ("head_dim", "tile"), [(40, (64, 64)), (64, (64, 64)), (65, (64, 128)), (128, (64, 128)), (129, (32, 128))]
)
def test_memory_efficient_kernels_have_the_tiles_that_torch_compiled(head_dim, tile):
    """kQueriesPerBlock and kKeysPerBlock by kMaxK: mem_eff_attention/kernels/cutlassF.h."""
    shape = AttentionShape(1, 1, 1, 128, 128, head_dim, head_dim)
    assert tile_of(attention_kernels.EFFICIENT, shape, load_hardware("a100-sxm4-80gb")) == tile


def visible(query, key, queries, keys, mask):
    shift = keys - queries if mask.bottom_right else 0
    too_late = mask.right is not None and key > query + shift + mask.right
    return not too_late and not (mask.left is not None and key < query + shift - mask.left)


edge = st.none() | st.integers(0, 20)


sides = st.sampled_from((1, 2, 4, 8))


@given(st.integers(1, 24), st.integers(1, 24), sides, sides, edge, edge, st.integers(1, 3), st.booleans())
def test_a_block_takes_every_tile_in_which_a_query_sees_a_key(
    queries, keys, rows, columns, left, right, group, from_window
):
    """Rows are the queries of `group` heads side by side; the first tile may begin with the first key of a window."""
    mask = Mask(left, right, bottom_right=True)
    grid = tile_grid(queries, keys, rows, columns, mask, group, from_window)
    packed = [place // group for place in range(queries * group)]
    needed = whole = 0
    for block in (packed[i : i + rows] for i in range(0, len(packed), rows)):
        seen = [all(visible(query, key, queries, keys, mask) for query in block) for key in range(keys)]
        touched = [any(visible(query, key, queries, keys, mask) for query in block) for key in range(keys)]
        begins_at = max(block[0] + keys - queries - left, 0) if from_window and left is not None else 0
        for j in range(begins_at % columns - columns, keys, columns):
            tile = range(max(j, 0), min(j + columns, keys))
            needed += any(touched[key] for key in tile)
            whole += len(tile) == columns and all(seen[key] for key in tile)
    assert grid.blocks == ceil(queries * group / rows)
    assert grid.longest <= ceil(keys / columns)
    assert needed <= grid.tiles <= needed + grid.blocks  # between two queries' windows there may be a gap
    assert grid.tiles - grid.masked == whole


# --- laws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [A100, H100, L40S], ids=lambda device: device.name)
def test_the_keys_of_one_long_sequence_are_split_among_all_multiprocessors(device):
    """Eight heads over 131,072 keys: no more than three times what the whole device needs to read them."""
    cache = 2 * 2 * 131_072 * 8 * 128
    one = flash(device, 1, 1, 8, 128, keys=131_072)
    assert cache / device.bandwidth_bytes_per_s < one < 3 * cache / device.sustained_bandwidth_bytes_per_s


def test_heads_that_share_keys_decode_in_the_time_of_their_keys():
    """32 heads over 8 heads of keys read a quarter of what 32 over 32 do."""
    shared, apart = (flash(A100, 32, 1, 32, 128, key_heads=heads, keys=8192) for heads in (8, 32))
    assert shared == pytest.approx(apart / 4, rel=0.15)


def test_heads_that_share_keys_and_fill_more_than_a_tile_still_read_them_together():
    """Falcon-7B has 71 heads on one head of keys, and a tile has 64 rows: two blocks for each slice of the keys."""
    shared, apart = (flash(A100, 32, 1, 71, 64, key_heads=heads, keys=8192) for heads in (1, 71))
    assert shared < apart / 10


def test_flash_2_masks_a_tile_more_of_each_block_where_lengths_may_not_fill_its_tiles():
    """flash_fwd_kernel.h: ceil(128 / 64) + 1 of the tiles of 128 x 64, not 2. On an A100 a score is masked by four
    instructions on 64 lanes. 64 heads of 4,096 tokens have 64 x 32 blocks."""
    cycles = 64 * 32 * (128 * 64) * 4 / 64 / A100.sm_count
    more = packed(A100, 1, 4096, 64, 128) - flash(A100, 1, 4096, 64, 128, causal=True)
    assert more == pytest.approx(cycles / (A100.boost_clock_mhz * 1e6), rel=0.15)


def test_flash_2_masks_every_tile_under_a_window():
    """One of 4,095 keys hides one score more of 4,096 tokens than a causal mask does. Of 2 + 4 + ... + 64 tiles of each
    head a causal kernel masks 3 of each of 32 blocks."""
    cycles = 64 * (1056 - 3 * 32) * (128 * 64) * 4 / 64 / A100.sm_count
    more = packed(A100, 1, 4096, 64, 128, left=4094) - packed(A100, 1, 4096, 64, 128)
    assert more == pytest.approx(cycles / (A100.boost_clock_mhz * 1e6), rel=0.15)


@pytest.mark.parametrize(
    ("name", "batch", "heads", "key_heads", "keys", "head_dim", "measured"),
    [
        ("h100-sxm5-80gb", 1024, 4, 1, 512, 64, 52.1e-6),
        ("h100-sxm5-80gb", 512, 4, 4, 512, 64, 108.5e-6),
        ("h200-sxm-141gb", 512, 24, 8, 1024, 64, 205.4e-6),
        ("h200-sxm-141gb", 1024, 4, 2, 1024, 128, 90.0e-6),
    ],
)
def test_one_query_under_a_narrow_window_takes_a_whole_tile_of_flash_3(
    name, batch, heads, key_heads, keys, head_dim, measured
):
    """ai-dynamo/aiconfigurator@095f58a, vLLM: a window of 128 keys, in blocks of 192 rows at head dimension 64."""
    device = load_hardware(name)
    predicted = paged(device, batch, heads, key_heads, keys, head_dim, left=127)
    assert predicted == pytest.approx(measured, rel=0.2)


def test_a_window_that_holds_all_keys_is_none_to_flash_3():
    """flash_api.cpp of FlashAttention-3: `window_size_left >= seqlen_k - 1` is -1."""
    device = load_hardware("h100-sxm5-80gb")
    plain, whole, short = (paged(device, 512, 4, 4, 512, 64, left=left) for left in (-1, 511, 510))
    assert whole == plain != short


def test_rows_of_a_tile_without_a_query_take_time_but_no_power():
    """Two blocks of 128 rows for 130 queries as for 256; an L40S cannot keep its clock while all of them multiply."""
    keys = meta(8, 16, 8192, 128)

    def of(queries):
        return seconds(lambda: F.scaled_dot_product_attention(meta(8, 16, queries, 128), keys, keys), L40S)

    assert 0.7 * of(256) < of(130) < 0.9 * of(256)


def test_a_window_bounds_the_time_of_decoding():
    short, long = (flash(L40S, 64, 1, 8, 128, keys=keys, left=1023) for keys in (2048, 32768))
    assert long == pytest.approx(short, rel=0.02)
    assert long < flash(L40S, 64, 1, 8, 128, keys=32768) / 10


# Decoding under a window of 128 on an L40S, whose keys are all visible: (sequences, heads, heads of keys, keys): µs
# (vLLM's FlashAttention-2 in aiconfigurator's database@095f58a). Without a window, 4 keys of 8 or 4 heads take a tenth.
WINDOWED = {(512, 48, 4, 8): 645.0, (1024, 12, 2, 4): 332.0, (512, 48, 1, 32): 654.0}


@pytest.mark.parametrize(("shape", "microseconds"), WINDOWED.items())
def test_heads_do_not_share_blocks_under_a_window(shape, microseconds):
    sequences, heads, key_heads, keys = shape
    windowed, plain = (
        flash(L40S, sequences, 1, heads, 128, key_heads=key_heads, keys=keys, left=left) for left in (127, -1)
    )
    assert windowed == pytest.approx(microseconds * 1e-6, rel=0.5)
    assert plain < windowed / 3


@pytest.mark.parametrize("head_dim", [40, 48, 56])
def test_a_head_dimension_between_two_multiples_of_32_takes_as_long_as_the_larger(head_dim):
    odd, padded = (flash(A100, 2, 4096, 8, size) for size in (head_dim, 64))
    assert odd == pytest.approx(padded, rel=0.02)


CAUSAL = Mask(right=0)
EFFICIENT_IN_PROFILES = [
    ("h100-sxm5-80gb", (1, 16, 16384, 128), CAUSAL, 6422.0, 21204.9),
    ("h100-sxm5-80gb", (1, 32, 4096, 128), CAUSAL, 904.6, 3006.0),
    ("h100-sxm5-80gb", (2, 8, 4096, 40), Mask(), 546.9, 1830.4),
    ("h100-sxm5-80gb", (128, 12, 197, 64), Mask(), 214.6, 701.8),
    ("h200-sxm-141gb", (4, 10, 2304, 64), Mask(), 428.7, 1342.2),
    ("h200-sxm-141gb", (1, 40, 3000, 128), CAUSAL, 624.8, 2316.0),
]


@pytest.mark.parametrize(("device", "sizes", "mask", "forward", "backward"), EFFICIENT_IN_PROFILES)
def test_memory_efficient_kernels_take_the_time_of_profiles(device, sizes, mask, forward, backward):
    """Microseconds, bf16 (validation/traces, kernels_attention); none of these shapes set a constant."""
    sequences, heads, length, head = sizes
    for is_backward, microseconds in ((False, forward), (True, backward)):
        shape = AttentionShape(sequences, heads, heads, length, length, head, head, mask, is_backward)
        took = work(attention_cost(shape, "efficient"), load_hardware(device))
        assert took == pytest.approx(1e-6 * microseconds, rel=0.2)


def test_memory_efficient_kernels_need_twice_as_long_without_asynchronous_copies():
    """The same SMs, said to be of Volta."""
    shape = AttentionShape(4, 16, 16, 2048, 2048, 64, 64)
    older = replace(A100, compute_capability=(7, 0))
    cost = attention_cost(shape, "efficient")
    assert work(cost, older) == pytest.approx(2 * work(cost, A100), rel=0.1)


@given(st.integers(8, 64), st.integers(1, 30), st.integers(0, 20), st.booleans())
def test_more_tiles_of_keys_take_no_less(sequences, tiles, more, is_backward):
    sizes = (128 * tiles, 128 * (tiles + more))
    shapes = [AttentionShape(sequences, 8, 8, 512, keys, 128, 128, Mask(), is_backward) for keys in sizes]
    fewer, larger = (work(attention_cost(shape), A100) for shape in shapes)
    assert larger >= fewer * (1 - 1e-9)


def test_short_sequences_run_at_a_lower_rate_than_long_ones():
    rates = [length / flash(A100, 16384 // length, length, 16, 128, causal=True) for length in LENGTHS]
    assert rates == sorted(rates)


def test_amd_runs_the_kernels_of_aotriton_and_nvidia_those_of_flash_attention():
    mi300x = load_hardware("mi300x")
    assert kernel_of("flash", mi300x, in_16_bits=True, splits=False) is attention_kernels.AOTRITON
    assert kernel_of("flash", mi300x, in_16_bits=True, is_backward=True) is attention_kernels.AOTRITON
    assert kernel_of("flash", mi300x, in_16_bits=True, splits=True) is attention_kernels.AMD_SPLIT
    assert kernel_of("flash", H100, in_16_bits=True, splits=False) is attention_kernels.FLASH_2
    assert kernel_of("cudnn", H100, in_16_bits=True, splits=False) is attention_kernels.CUDNN_HOPPER


def test_on_data_centre_blackwell_the_softmax_runs_beside_the_matmuls():
    """A tile of 128 x 128 takes 1,024 cycles of multiply-adds at head dimension 128 (8,192 FLOP a cycle and SM), and as
    many of exp (16): in turns they would reach half of the peak. What GEMMs reach there is .65."""
    b200, length = load_hardware("b200-sxm-180gb"), 32768
    rate = 4 * 16 * 128 * length**2 / cudnn(b200, 1, length, 16, 128)
    assert 0.5 * 2250e12 < rate <= 0.65 * 2250e12
    narrow = 4 * 16 * 64 * length**2 / cudnn(b200, 1, length, 16, 64)  # exp alone takes twice as long as the matmuls
    assert narrow < 0.5 * 8192 * 148 * 1965e6


@pytest.mark.parametrize("heads", [8, 32, 64])
def test_few_queries_decode_as_near_to_the_bandwidth_on_blackwell_as_on_hopper(heads):
    """A multiprocessor of a B200 gets 27 bytes in a cycle, one of an H200 18: 19 cycles a key of 128 elements, and its
    value. In 8 cycles its shared memory delivers both to the matrix unit, in 1 it computes the exp of 16 queries."""
    shares = []
    for name in ("h200-sxm-141gb", "b200-sxm-180gb"):
        device = load_hardware(name)
        cache = 2 * 2 * 64 * 8192 * 8 * 128
        shares.append(cache / cudnn(device, 64, 1, heads, 128, key_heads=8, keys=8192) / device.bandwidth_bytes_per_s)
    assert shares[1] == pytest.approx(shares[0], rel=0.05)


def test_blackwell_ultra_passes_the_bound_that_exp_sets_on_blackwell():
    """At head dimension 64 a score takes 256 FLOP and one exp. 16 of them in a cycle allow 4,096 FLOP; Ultra has 32."""
    b300, length = load_hardware("b300-sxm-288gb"), 32768
    rate = 4 * 16 * 64 * length**2 / cudnn(b300, 1, length, 16, 64)
    bound = 4096 * b300.sm_count * b300.boost_clock_mhz * 1e6
    assert bound < rate < 2 * bound


def test_a_paged_cache_has_tiles_of_64_queries():
    """flash_fwd_launch_template.h, `run_mha_fwd_splitkv_dispatch`: FlashAttention-2's only kernel for such a cache."""
    kernel = kernel_of("paged", A100, in_16_bits=True)
    shapes = [AttentionShape(1, 1, 1, 4096, 4096, head_dim, head_dim, Mask(right=0)) for head_dim in (64, 128, 256)]
    assert [tile_of(kernel, shape, A100) for shape in shapes] == [(64, 256), (64, 128), (64, 64)]


@pytest.mark.parametrize(
    ("batch", "heads", "key_heads", "keys", "measured"),
    [
        (1, 1, 1, 131072, 3017),  # one block, whose SM takes tile after tile
        (1, 1, 1, 8192, 193),
        (8, 2, 2, 65536, 1516),
        (16, 8, 1, 65536, 347),  # heads that share a block, and split keys
        (256, 8, 1, 1024, 116),
        (64, 64, 8, 128, 48),  # short: half of it are copies of queries and results
        (64, 64, 8, 16, 37),
    ],
)
def test_vllm_decodes_over_pages_on_an_a100_in_the_time_measured(batch, heads, key_heads, keys, measured):
    """Microseconds of vLLM's kernel with the writing of the cache (ai-dynamo/aiconfigurator@095f58a)."""
    written = 3.0
    assert 1e6 * paged(A100, batch, heads, key_heads, keys) + written == pytest.approx(measured, rel=0.2)


def test_backward_attention_on_blackwell_is_bound_by_shared_memory():
    """For a tile of 128 x 128 and a head of 128, five products of 2 x 128^3 FLOP take 2,560 cycles of an SM at 8,192
    FLOP each, and shared memory 3,328: eight operands of 32 KiB, dS, and dq in fp32 in and out, at 128 bytes a cycle.
    Both in turns would take their sum."""
    b200, length = load_hardware("b200-sxm-180gb"), 8192
    taken = cudnn_backward(b200, 4, length, 16, 128)
    tiles = 4 * 16 * (length / 128) ** 2 / b200.sm_count
    assert 3328 < taken / tiles * b200.boost_clock_mhz * 1e6 < 3328 + 2560


# Of models on an H100 (torch 2.11: validation/traces), microseconds: cuDNN's kernels, forward and backward.
CUDNN_CALLS = {
    "ViT-B/16": ((128, 197, 12, 64), {}, 88.1, 333.6),
    "GPT-2": ((16, 1024, 12, 64), {"causal": True}, 84.1, 292.3),
    "Llama-3.2-1B": ((2, 2048, 32, 64), {"causal": True}, 101.3, 303.9),
    "32 heads of 128": ((4, 1024, 32, 128), {"causal": True}, 84.7, 316.8),
    "BERT-base with dropout": ((32, 384, 12, 64), {"dropout": 0.1}, 93.8, 204.2),
    "BERT-base with dropout and a mask": (
        (32, 384, 12, 64), {"dropout": 0.1, "mask": meta(32, 1, 384, 384)}, 146.4, 266.9
    ),
    "BERT-large with dropout": ((16, 512, 16, 64), {"dropout": 0.1}, 107.9, 211.0),
    "a Llama with a mask": ((4, 2048, 32, 64), {"mask": meta(4, 1, 2048, 2048)}, 591.0, 1525.9),
}  # fmt: skip


@pytest.mark.parametrize("name", CUDNN_CALLS)
def test_cudnns_attention_takes_what_an_h100_took(name):
    call, options, forward, backward = CUDNN_CALLS[name]
    assert 1e6 * cudnn(H100, *call, **options) == pytest.approx(forward, rel=0.15)
    assert 1e6 * cudnn_backward(H100, *call, **options) == pytest.approx(backward, rel=0.15)


def test_two_tiles_of_128_cost_197_tokens_as_much_as_256():
    """As their grids in profiles say: two blocks of 128 queries, which pass over two tiles of 128 keys."""
    assert cudnn(H100, 64, 197, 16, 64) == pytest.approx(cudnn(H100, 64, 256, 16, 64), rel=0.1)


@pytest.mark.parametrize("device", ["m2-ultra-76c", "m4-max-40c", "max-1550"])
def test_a_single_query_reads_its_cache_at_half_the_bandwidth_or_more_where_tiles_need_no_filling(device):
    """As CUDA's kernels with 64 rows an Apple GPU, which has no matrix units, would take 40 times as long."""
    query, cache = (torch.empty(8, 32, tokens, 128, dtype=torch.bfloat16, device="meta") for tokens in (1, 8192))
    with torch.inference_mode(), FlopMeter(device) as meter:
        F.scaled_dot_product_attention(query, cache, cache)
    (timing,) = meter.report().timings
    bytes_of_cache = 2 * 2 * cache.numel()
    assert timing.work_seconds < bytes_of_cache / (0.5 * load_hardware(device).bandwidth_bytes_per_s)
