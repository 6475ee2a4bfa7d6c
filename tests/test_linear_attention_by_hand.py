"""Kernels that servers run in layers with a state of fixed size: what each computes, reads and writes, by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from costs_support import meta, metered

from flopmeter.ask.serve.linear_attention import FUNCTIONS
from flopmeter.records import Matmul

HALF, SINGLE = torch.float16, torch.float32


def half(*shape: int) -> torch.Tensor:
    return meta(*shape, dtype=HALF)


def figures(program: Callable[[], Any]) -> list[tuple[int, int, int]]:
    """FLOPs and bytes read and written of each kernel."""
    return [(cost.flops, cost.bytes_read, cost.bytes_written) for cost in metered(program)]


def products(program: Callable[[], Any]) -> list[tuple[Matmul, ...]]:
    """The matmuls of each kernel that has any."""
    return [cost.work.matmuls for cost in metered(program) if cost.macs]


def test_a_convolution_over_time_weighs_four_tokens_adds_a_bias_and_is_activated():
    """4 products, 3 sums, a bias and 4 operations of SiLU for each of 60 numbers."""
    x, weight, bias = half(2, 6, 5), half(6, 4), half(6)
    whole, step = FUNCTIONS["causal_conv1d_fn"], FUNCTIONS["causal_conv1d_update"]
    assert figures(lambda: whole(x, weight, bias)) == [(60 * 12, 120 + 48 + 12, 120)]
    assert figures(lambda: whole(x, weight)) == [(60 * 11, 120 + 48, 120)]
    (cost,) = metered(lambda: whole(x, weight, bias))
    assert cost.transcendentals == 60
    assert whole(x, weight).shape == x.shape
    new, state = half(2, 6, 1), half(2, 6, 4)
    assert figures(lambda: step(new, state, weight, bias)) == [(12 * 12, 24 + 96 + 48 + 12, 24 + 96)]


def test_a_token_decays_reads_updates_and_asks_each_element_of_its_state():
    """7 operations on each of 2 x 6 x 16 elements, which are read and written in fp32, and an exponential for each."""
    state, x, dt, a = meta(2, 6, 16), half(2, 6), half(2, 6), meta(6, 16)
    b, c, d, z, bias = half(2, 16), half(2, 16), half(6), half(2, 6), half(6)
    step = FUNCTIONS["mamba_selective_state_update"]
    (cost,) = metered(lambda: step(state, x, dt, a, b, c, d, z=z, dt_bias=bias))
    assert (cost.flops, cost.transcendentals) == (7 * 192, 192)
    assert cost.bytes_read == 4 * 192 + 2 * 24 + 4 * 96 + 2 * 64 + 2 * 6 + 24 + 12
    assert cost.bytes_written == 4 * 192 + 24


def test_heads_of_the_second_mamba_have_one_decay_each():
    """Four heads of 8 x 16 elements in two sequences: 8 exponentials."""
    state, x = meta(2, 4, 8, 16), half(2, 4, 8)
    dt, a = half(2, 4, 1).expand(2, 4, 8), meta(4, 1, 1).expand(4, 8, 16)
    (cost,) = metered(lambda: FUNCTIONS["mamba2_selective_state_update"](state, x, dt, a, half(2, 2, 16)))
    assert (cost.flops, cost.transcendentals) == (7 * 2 * 4 * 8 * 16, 8)


def test_a_scan_of_a_prompt_goes_through_each_state_for_each_token_and_hands_over_the_last():
    """2 x 6 channels of 5 tokens with 3 states, which are fp32."""
    x, a = half(2, 6, 5), meta(6, 3)
    scan = FUNCTIONS["mamba_selective_scan"]
    (cost,) = metered(lambda: scan(x, half(2, 6, 5), a, half(2, 3, 5), z=half(2, 6, 5), delta_bias=half(6)))
    assert (cost.flops, cost.transcendentals) == (7 * 60 * 3, 60 * 3)
    assert (cost.bytes_read, cost.bytes_written) == (120 + 120 + 72 + 60 + 120 + 12, 120 + 4 * 2 * 6 * 3)
    out, last = scan(x, half(2, 6, 5), a, return_last_state=True)
    assert (out.shape, out.dtype, last.shape, last.dtype) == ((2, 6, 5), HALF, (2, 6, 3), SINGLE)
    assert scan(x, half(2, 6, 5), a).shape == (2, 6, 5)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("torch_recurrent_gated_delta_rule", 1),
        ("torch_chunk_gated_delta_rule", 3),
        ("recurrent_kimi_delta_attention", 16),
        ("chunk_kimi_delta_attention", 2),
    ],
)
def test_few_tokens_of_a_delta_rule_update_the_state_one_after_another_in_one_kernel(name, tokens):
    """A state of 16 x 32 in each of 4 heads of 2 sequences, which moves once; a decay for each token of a head."""
    query, key, value = half(2, tokens, 4, 16), half(2, tokens, 4, 16), half(2, tokens, 4, 32)
    g, beta, state = meta(2, tokens, 4), half(2, tokens, 4), meta(2, 4, 16, 32)
    rule = FUNCTIONS[name]
    (cost,) = metered(lambda: rule(query, key, value, g, beta, initial_state=state))
    rows, elements = 2 * tokens * 4, 2 * 4 * 16 * 32
    assert (cost.flops, cost.transcendentals) == (7 * elements * tokens, rows)
    assert cost.bytes_read == 4 * elements + rows * (2 * (16 + 16 + 32) + 4 + 2)
    assert cost.bytes_written == 4 * elements + 2 * 32 * rows
    out, after = rule(query, key, value, g, beta)
    assert (out.shape, after.shape, after.dtype) == (value.shape, state.shape, SINGLE)


def test_a_chunk_of_a_delta_rule_takes_five_kernels_that_hand_squares_and_states_on():
    """Two heads of 192 tokens in blocks of 64: 6 blocks. Keys have 16 numbers, values 32; products of keys are fp32,
    their triangular inverses, the turned keys and values and the states between blocks are in 16 bits."""
    query, key, value = half(1, 192, 2, 16), half(1, 192, 2, 16), half(1, 192, 2, 32)
    g, beta = meta(1, 192, 2), half(1, 192, 2)
    of_keys, of_values, square, states, last = 2 * 384 * 16, 2 * 384 * 32, 384 * 64, 2 * 6 * 16 * 32, 4 * 2 * 16 * 32
    rule = FUNCTIONS["torch_chunk_gated_delta_rule"]
    assert figures(lambda: rule(query, key, value, g, beta)) == [
        (2 * 6 * 64 * 64 * 16, of_keys + (4 + 2) * 384, 4 * square),
        (6 * 64**3 // 3, 4 * square, 2 * square),
        (2 * 6 * 64 * 64 * (16 + 32), of_keys + of_values + 2 * square, of_keys + of_values),
        (2 * 6 * 2 * 64 * 16 * 32, 2 * of_keys + of_values + last, states + of_values + last),
        (2 * 6 * 64 * (32 * 16 + 64 * 16 + 64 * 32), 2 * of_keys + of_values + states, of_values),
    ]
    assert products(lambda: rule(query, key, value, g, beta)) == [
        ((6, 64, 64, 16),),
        ((6, 64, 16 + 32, 64),),
        ((2, 64, 32, 16), (2, 16, 32, 64)) * 3,  # one block after another, of keys by states and keys by values
        ((6, 64, 32, 16), (6, 64, 64, 16), (6, 64, 32, 64)),
    ]
    out, after = rule(query, key, value, g, beta)
    assert (out.shape, after.shape, after.dtype) == (value.shape, (1, 2, 16, 32), SINGLE)


def test_a_chunk_of_the_second_mamba_takes_four_kernels_and_heads_of_a_group_share_their_scores():
    """100 tokens are two blocks of 64, of 4 heads in 2 groups and of 2 sequences: 16 blocks of heads, 8 of groups. The
    states of 16 x 8, the scores and the steps are fp32. A prompt shorter than a block is a block of its own."""
    x, b, c, dt, a = half(2, 100, 4, 8), half(2, 100, 2, 16), half(2, 100, 2, 16), half(2, 100, 4), half(4)
    of_x, of_b, states, scores, steps = 2 * 6400, 2 * 6400, 4 * 16 * 16 * 8, 4 * 8 * 64 * 64, 4 * 800
    chunk = FUNCTIONS["mamba2_chunk_scan"]
    assert figures(lambda: chunk(x, dt, a, b, c, 64, D=half(4))) == [
        (2 * 16 * 8 * 16 * 64, of_x + of_b + steps, states),
        (2 * 16 * 16 * 8, states, states),
        (2 * 8 * 64 * 64 * 16, 2 * of_b, scores),
        (2 * 16 * 64 * 8 * (16 + 64), of_x + of_b + states + scores + steps, of_x),
    ]
    assert products(lambda: chunk(x, dt, a, b, c, 64)) == [
        ((16, 8, 16, 64),),
        ((8, 64, 64, 16),),
        ((16, 64, 8, 16), (16, 64, 8, 64)),
    ]
    out, last = chunk(x, dt, a, b, c, 64, return_final_states=True)
    assert (out.shape, last.shape, last.dtype) == (x.shape, (2, 4, 8, 16), SINGLE)
    assert chunk(x, dt, a, b, c, 64).shape == x.shape
    short = [each[:, :32] for each in (x, dt, b, c)]
    first, *_ = figures(lambda: chunk(short[0], short[1], a, short[2], short[3], 64))
    assert first[0] == 2 * (2 * 4) * 8 * 16 * 32
