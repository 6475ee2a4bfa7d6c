"""torch.nn.attention.varlen: attention over sequences of several lengths that lie end to end."""

from __future__ import annotations

import pytest
import torch
from costs_support import costs_in
from torch.nn.attention.varlen import varlen_attn
from torch.utils.flop_counter import FlopCounterMode

from flopmeter import FlopMeter
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
