"""torch.nn.attention.varlen: attention over sequences of several lengths that lie end to end."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch
from costs_support import costs_in
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import FlopCounterMode

from flopmeter import FlopMeter, on_meta
from flopmeter.records import ATTENTION, MOVEMENT

HEADS, HEAD = 4, 64


def packed(lengths, *, longest=None, heads=HEADS, **options):
    """Attention of bf16 sequences of these lengths, and its output."""
    tokens, longest = sum(lengths), longest or max(lengths)
    query = torch.empty(tokens, HEADS, HEAD, dtype=torch.bfloat16, device="meta", requires_grad=True)
    key, value = (torch.empty(tokens, heads, HEAD, dtype=torch.bfloat16, device="meta") for _ in range(2))
    starts = torch.empty(len(lengths) + 1, dtype=torch.int32, device="meta")
    return varlen_attn(query, key, value, starts, starts, longest, longest, **options)


def attention_costs(program):
    return [cost for cost in costs_in(program) if cost.op_class == ATTENTION]


def test_a_program_with_varlen_attn_is_reported():
    with FlopMeter("a100-sxm4-80gb") as meter:
        packed([128, 128]).sum().backward()
    report = meter.report()
    with FlopCounterMode(display=False) as counter:
        packed([128, 128]).sum().backward()
    assert 2 * report.macs == 14 * 2 * HEADS * 128 * 128 * HEAD
    assert counter.get_total_flops() in (2 * report.macs, 0)  # torch 2.11 has no formula
    assert report.uncounted == []


def test_that_sequences_are_taken_to_be_of_one_length_is_told():
    with FlopMeter("a100-sxm4-80gb") as meter:
        packed([100, 20, 8])
    told = "sequences packed for torch_attn::_varlen_attn are all as long as the longest"
    assert told in meter.report().assumptions
    with FlopMeter("a100-sxm4-80gb") as meter:
        torch.empty(2, 2, device="meta") + 1
    assert meter.report().assumptions == ()


def test_a_forward_pass_fills_the_state_of_the_random_numbers_and_nothing_else():
    """Two numbers of 64 bits that dropout would draw from."""
    _, fill = costs_in(lambda: packed([100, 20, 8]))
    assert (fill.op_class, fill.bytes_read, fill.bytes_written) == (MOVEMENT, 0, 2 * 8)


@pytest.mark.parametrize("lengths", [[128, 128], [100, 60], [100, 1], [7, 7, 7]])
def test_no_token_is_left_out(lengths):
    """Each query meets at most the longest sequence's keys: no fewer pairs than that for the tokens there are, and
    no more than torch's counter has, which pads every sequence to the longest."""
    (cost,) = attention_costs(lambda: packed(lengths))
    of_a_pair = 2 * 2 * HEADS * HEAD
    assert sum(lengths) * max(lengths) * of_a_pair <= cost.flops <= len(lengths) * max(lengths) ** 2 * of_a_pair


@pytest.mark.parametrize("starts", [[0, 64, 96, 128], [64, 96, 128], [32, 96, 128], [0, 0, 5, 5, 128]])
def test_where_each_sequence_begins_is_known_and_the_first_may_begin_anywhere(starts):
    """Each query meets the keys of its own sequence."""
    query = torch.empty(128, HEADS, HEAD, dtype=torch.bfloat16, device="meta")
    with FlopMeter("a100-sxm4-80gb") as meter:
        known = on_meta(torch.tensor(starts, dtype=torch.int32))
        varlen_attn(query, query, query, known, known, 128, 128)
    report = meter.report()
    assert 2 * report.macs == 2 * 2 * HEADS * HEAD * sum((end - start) ** 2 for start, end in pairwise(starts))
    assert report.assumptions == ()


def test_a_causal_window_hides_half_and_a_sliding_one_more():
    """Of 8 queries and 8 keys a causal mask hides 28 of 64 pairs; a window of 2 keys before, 43 of them."""
    pairs = 2 * 2 * HEADS * HEAD
    (causal,) = attention_costs(lambda: packed([8], window_size=(-1, 0)))
    (sliding,) = attention_costs(lambda: packed([8], window_size=(2, 0)))
    (full,) = attention_costs(lambda: packed([8]))
    assert (full.masked_flops, causal.masked_flops, sliding.masked_flops) == (0, 28 * pairs, 43 * pairs)


def test_grouped_heads_are_read_once_and_counted_for_each_query_head():
    if "enable_gqa" not in varlen_attn.__kwdefaults__:
        pytest.skip("this torch has no grouped varlen_attn")
    (cost,) = attention_costs(lambda: packed([64], heads=1, enable_gqa=True))
    assert cost.flops == 2 * 2 * HEADS * 64 * 64 * HEAD
    assert cost.bytes_read == (HEADS + 2) * 64 * HEAD * 2 + 2 * 4
    assert cost.bytes_written == HEADS * 64 * HEAD * 2 + HEADS * 64 * 4 + 2 * 8


def test_of_a_paged_cache_the_pages_in_use_are_read():
    """Two sequences of up to 256 tokens in pages of 16, of a pool of 10,000: 2·256 tokens of keys and values."""
    if "block_table" not in varlen_attn.__kwdefaults__:
        pytest.skip("this torch has no paged varlen_attn")
    query = torch.empty(2, HEADS, HEAD, dtype=torch.bfloat16, device="meta")
    pool = torch.empty(10_000, 16, HEADS, HEAD, dtype=torch.bfloat16, device="meta")
    starts, used = (torch.empty(size, dtype=torch.int32, device="meta") for size in (3, 2))
    table = torch.empty(2, 16, dtype=torch.int32, device="meta")

    def decode():
        values = torch.empty_like(pool)
        varlen_attn(query, pool, values, starts, None, 1, 256, seqused_k=used, block_table=table)

    (cost,) = attention_costs(decode)
    assert cost.flops == 2 * 2 * HEADS * HEAD * 2 * 256
    cache = 2 * 2 * 256 * HEADS * HEAD * 2
    assert cost.bytes_read == cache + 2 * HEADS * HEAD * 2 + (3 + 2 + 2 * 16) * 4


def known(lengths, *, keys=None, **options):
    """Attention of bf16 sequences whose lengths the program knows."""
    starts = [on_meta(torch.tensor([0, *accumulate(each)], dtype=torch.int32)) for each in (lengths, keys or lengths)]
    sizes = (sum(lengths), sum(keys or lengths), sum(keys or lengths))
    q, k, v = (
        torch.empty(tokens, HEADS, HEAD, dtype=torch.bfloat16, device="meta", requires_grad=True) for tokens in sizes
    )
    return varlen_attn(q, k, v, *starts, max(lengths), max(keys or lengths), **options)


def one_by_one(lengths, *, keys=None, is_causal=False):
    """The same sequences, each in a call of its own."""
    for queries, of_keys in zip(lengths, keys or lengths, strict=True):
        q, k, v = (
            torch.empty(1, HEADS, tokens, HEAD, dtype=torch.bfloat16, device="meta", requires_grad=True)
            for tokens in (queries, of_keys, of_keys)
        )
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal).sum().backward()


def attention_of(program, device="a100-sxm4-80gb"):
    with FlopMeter(device) as meter:
        program()
    report = meter.report()
    timings = zip(report.kernels, report.timings, strict=True)
    return report, [(kernel.cost, timing) for kernel, timing in timings if kernel.cost.op_class == ATTENTION]


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences_of_known_lengths_cost_what_each_costs_alone(is_causal):
    lengths = [1000, 300, 17]
    window = (-1, 0) if is_causal else (-1, -1)
    report, packed_ones = attention_of(lambda: known(lengths, window_size=window).sum().backward())
    _, alone = attention_of(lambda: one_by_one(lengths, is_causal=is_causal))
    assert report.assumptions == ()
    for count in ("flops", "masked_flops"):
        assert sum(getattr(cost, count) for cost, _ in packed_ones) == sum(getattr(cost, count) for cost, _ in alone)


def test_queries_of_known_lengths_meet_their_own_keys():
    """3 queries and 50 keys, 4 queries and 20 keys: 230 pairs, 4 FLOP for each place of a head."""
    _, ((cost, _),) = attention_of(lambda: known([3, 4], keys=[50, 20]))
    assert cost.flops == (3 * 50 + 4 * 20) * 4 * HEADS * HEAD


def test_equal_sequences_take_as_long_packed_as_in_a_batch():
    (_, packed_ones), (_, batched) = (
        attention_of(lambda: known([500] * 16).sum().backward()),
        attention_of(lambda: in_a_batch(16, 500)),
    )
    assert [timing.work_seconds for _, timing in packed_ones] == pytest.approx([t.work_seconds for _, t in batched])


def test_the_gradient_of_a_sum_over_packed_sequences_is_copied_before_the_library_reads_it():
    """One number of two bytes over all tokens; `_flash_attention_backward` takes `grad_out.contiguous()`
    (aten/src/ATen/native/transformers/cuda/attention_backward.cu)."""
    with FlopMeter("a100-sxm4-80gb") as meter:
        known([500] * 16).sum().backward()
    costs = [kernel.cost for kernel in meter.report().kernels if kernel.cost.name.endswith("_varlen_attn_backward")]
    copy, gradients = costs
    of_result = 2 * 16 * 500 * HEADS * HEAD
    assert (copy.op_class, copy.bytes_read, copy.bytes_written) == (MOVEMENT, 2, of_result)
    assert gradients.bytes_read >= 5 * of_result  # queries, keys, values, the result and its gradient


def in_a_batch(sequences, length):
    q, k, v = (
        torch.empty(sequences, length, HEADS, HEAD, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for _ in range(3)
    )
    heads_first = (each.transpose(1, 2) for each in (q, k, v))
    torch.nn.functional.scaled_dot_product_attention(*heads_first).sum().backward()


def test_short_sequences_beside_a_long_one_take_less_time_than_if_all_were_long():
    lengths = [4096] + [256] * 16
    _, ((_, known_ones),) = attention_of(lambda: known(lengths))
    _, ((_, guessed),) = attention_of(lambda: packed(lengths))
    assert 0.4 < known_ones.work_seconds / guessed.work_seconds < 0.7  # pairs: 17.8 of 33.6 million


def test_a_compiled_program_knows_the_lengths_of_its_sequences_too():
    lengths = [1000, 300, 17]
    with FlopMeter("a100-sxm4-80gb") as meter, torch.no_grad():
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to("meta")
        q = torch.empty(sum(lengths), HEADS, HEAD, dtype=torch.bfloat16, device="meta")
        torch.compile(lambda q, starts: varlen_attn(q, q, q, starts, starts, 1000, 1000) * 2)(q, starts)
    report = meter.report()
    assert report.assumptions == ()
    assert 2 * report.macs == sum(length**2 for length in lengths) * 4 * HEADS * HEAD


def paged_decode(**options):
    """One query each behind 250 and 20 tokens, in pages of 16 of a pool of 10,000."""
    if "block_table" not in varlen_attn.__kwdefaults__:
        pytest.skip("this torch has no paged varlen_attn")
    query = torch.empty(2, HEADS, HEAD, dtype=torch.bfloat16, device="meta")
    keys, values = (torch.empty(10_000, 16, HEADS, HEAD, dtype=torch.bfloat16, device="meta") for _ in range(2))
    table = torch.empty(2, 16, dtype=torch.int32, device="meta")
    starts, used = (on_meta(torch.tensor(each, dtype=torch.int32)) for each in ([0, 1, 2], [250, 20]))
    varlen_attn(query, keys, values, starts, None, 1, 256, seqused_k=used, block_table=table, **options)


def test_of_a_paged_cache_as_many_pages_are_read_as_each_sequence_fills():
    """250 and 20 tokens in pages of 16: 16 and 2 pages."""
    _, ((cost, _),) = attention_of(paged_decode)
    assert cost.flops == (250 + 20) * 4 * HEADS * HEAD
    cache = 2 * (16 + 2) * 16 * HEADS * HEAD * 2
    assert cost.bytes_read == cache + 2 * HEADS * HEAD * 2 + (3 + 2 + 2 * 16) * 4


def test_sequences_of_two_lengths_take_as_long_packed_as_one_after_the_other_where_both_fill_the_device():
    """Forward and backward, 32 sequences of 512 tokens and 32 of 1,024: only the ends of the kernels overlap."""
    _, mixed = attention_of(lambda: known([512] * 32 + [1024] * 32).sum().backward())
    apart = [attention_of(lambda length=length: in_a_batch(32, length))[1] for length in (512, 1024)]
    for packed_ones, *each in zip(mixed, *apart, strict=True):
        together = sum(timing.work_seconds for _, timing in each)
        assert 0.93 * together < packed_ones[1].work_seconds < 1.04 * together


def test_each_sequence_leaves_out_the_keys_before_the_window_of_its_first_query():
    """One query each behind 100 and 40 keys, of which it sees 8 before it and itself: 9 + 9 of 140 keys and values."""
    window = {"window_size": (8, 0)}
    _, ((seen, _),) = attention_of(lambda: known([1, 1], keys=[100, 40], **window))
    _, ((whole, _),) = attention_of(lambda: known([1, 1], keys=[100, 40]))
    assert whole.bytes_read - seen.bytes_read == 2 * (140 - 18) * HEADS * HEAD * 2
    assert 2 * seen.macs - seen.masked_flops == 18 * 4 * HEADS * HEAD


def test_of_a_paged_cache_the_pages_before_a_window_are_not_read():
    """Of 250 and 20 tokens in pages of 16 a window of 32 sees the last 33 and all: keys 217 to 249 lie in 3 pages."""
    _, ((cost, _),) = attention_of(lambda: paged_decode(window_size=(32, 0)))
    assert cost.bytes_read == 2 * (3 + 2) * 16 * HEADS * HEAD * 2 + 2 * HEADS * HEAD * 2 + (3 + 2 + 2 * 16) * 4
