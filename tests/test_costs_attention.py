"""Fused attention: products by hand, masks against brute force."""

from __future__ import annotations

import pytest
import torch
from costs_support import call_by_hand, calls_of, meta
from hypothesis import given
from hypothesis import strategies as st

from flopmeter.costs import costs_of
from flopmeter.costs.contractions.attention import CAUSAL, Mask, visible_pairs
from flopmeter.records import ATTENTION, Call, Cost

aten = torch.ops.aten
B, H, SQ, SK, D, DV = 2, 4, 3, 7, 8, 16
FORWARD = 2 * B * H * SQ * SK * (D + DV)
BACKWARD = 2 * B * H * SQ * SK * (3 * D + 2 * DV)


def heads_first(*, kv_heads: int = H, dv: int = DV) -> tuple[torch.Tensor, ...]:
    return meta(B, H, SQ, D), meta(B, kv_heads, SK, D), meta(B, kv_heads, SK, dv)


def out(dv: int = DV) -> torch.Tensor:
    """Tokens lie whole, as the library writes and reads them without a copy."""
    return meta(B, SQ, H, dv).transpose(1, 2)


def cost_of(call: Call) -> Cost:
    (cost,) = costs_of(call)
    return cost


def brute_force(queries: int, keys: int, mask: Mask) -> int:
    shift = keys - queries if mask.bottom_right else 0
    seen = 0
    for query in range(queries):
        for key in range(keys):
            too_late = mask.right is not None and key > query + shift + mask.right
            too_early = mask.left is not None and key < query + shift - mask.left
            seen += not too_late and not too_early
    return seen


window = st.none() | st.integers(0, 12)


@given(st.integers(0, 12), st.integers(0, 12), st.builds(Mask, window, window, st.booleans()))
def test_visible_pairs_are_those_that_brute_force_counts(queries, keys, mask):
    assert visible_pairs(queries, keys, mask) == brute_force(queries, keys, mask)


SDPA_FORWARD = {
    aten._scaled_dot_product_flash_attention.default: (),
    aten._scaled_dot_product_efficient_attention.default: (None, True),
    aten._scaled_dot_product_cudnn_attention.default: (None, True),
    aten._scaled_dot_product_flash_attention_for_cpu.default: (),
    aten._scaled_dot_product_fused_attention_overrideable.default: (None,),
}


@pytest.mark.parametrize("op", SDPA_FORWARD, ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_is_two_products_over_the_full_square(op, is_causal):
    call = call_by_hand(op, (*heads_first(), *SDPA_FORWARD[op], 0.0, is_causal), (out(), meta(B, H, SQ)))
    cost = cost_of(call)
    assert cost.op_class == ATTENTION
    assert cost.flops == FORWARD
    hidden = SQ * SK - (1 + 2 + 3)  # aligned at the top left: the queries see 1, 2 and 3 keys
    assert cost.masked_flops == (FORWARD * hidden // (SQ * SK) if is_causal else 0)
    assert cost.bytes_read == 4 * (B * H * (SQ * D + SK * D + SK * DV))
    assert cost.bytes_written == 4 * (B * H * (SQ * DV + SQ))


def sdpa_backward_call(op, is_causal: bool) -> Call:
    q, k, v = heads_first()
    lse, seed = meta(B, H, SQ), meta(dtype=torch.int64)
    known = {
        "grad_out": out(), "grad_out_": out(), "query": q, "key": k, "value": v, "out": out(), "logsumexp": lse,
        "dropout_p": 0.0, "is_causal": is_causal, "max_q": SQ, "max_k": SK, "philox_seed": seed,
        "philox_offset": seed, "cum_seq_q": None, "cum_seq_k": None, "attn_bias": None,
        "grad_input_mask": [True, True, True, False],
    }  # fmt: skip
    arguments = [known[argument.name] for argument in op._schema.arguments if not argument.kwarg_only]
    return call_by_hand(op, tuple(arguments), (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)))


SDPA_BACKWARD = [
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default,
]


@pytest.mark.parametrize("op", SDPA_BACKWARD, ids=str)
def test_attention_backward_is_five_products_one_of_them_recomputed(op):
    cost = cost_of(sdpa_backward_call(op, False))
    assert cost.flops == BACKWARD
    assert cost.model_flops == BACKWARD - 2 * B * H * SQ * SK * D


def test_grouped_keys_are_counted_by_query_heads_and_read_at_their_own():
    op = aten._scaled_dot_product_flash_attention.default
    call = call_by_hand(op, (*heads_first(kv_heads=1), 0.0, False), (out(), meta(B, H, SQ)))
    assert cost_of(call).flops == FORWARD
    assert cost_of(call).bytes_read == 4 * (B * H * SQ * D + B * SK * (D + DV))


def flash_call(*, is_causal: bool, left: int = -1, right: int = -1, forward: bool = True) -> Call:
    q, k, v = meta(B, SQ, H, D), meta(B, SK, H, D), meta(B, SK, H, DV)
    o, lse, state = meta(B, SQ, H, DV), meta(B, H, SQ), meta(2, dtype=torch.int64)
    sizes = {"window_size_left": left, "window_size_right": right}
    if forward:
        arguments = (q, k, v, None, None, SQ, SK, 0.0, is_causal, False)
        return call_by_hand(aten._flash_attention_forward.default, arguments, (o, lse), **sizes)
    arguments = (o, q, k, v, o, lse, None, None, SQ, SK, 0.0, is_causal, state, state)
    return call_by_hand(aten._flash_attention_backward.default, arguments, (q, k, v), **sizes)


def test_the_flash_library_aligns_causal_masks_at_the_bottom_right():
    cost = cost_of(flash_call(is_causal=True))
    assert cost.flops == FORWARD
    assert cost.executed_flops * SQ * SK == FORWARD * (5 + 6 + 7)  # the last of 3 queries sees all 7 keys


def test_a_window_hides_what_lies_before_it():
    cost = cost_of(flash_call(is_causal=True, left=2))
    assert cost.executed_flops * SQ * SK == FORWARD * (3 + 3 + 3)


def test_keys_before_the_window_of_the_first_query_are_not_read():
    """The first of 3 queries stands at key 4 of 7 and sees keys 3 and 4: three keys are never touched."""
    whole, windowed = (cost_of(flash_call(is_causal=True, left=left)) for left in (-1, 1))
    assert whole.bytes_read - windowed.bytes_read == 3 * 4 * B * H * (D + DV)
    assert windowed.bytes_written == whole.bytes_written


def test_a_window_without_causal_mask_has_two_sides():
    cost = cost_of(flash_call(is_causal=False, left=1, right=1))
    assert cost.executed_flops * SQ * SK == FORWARD * (3 + 3 + 2)


def test_the_flash_librarys_backward_is_the_same_five_products():
    cost = cost_of(flash_call(is_causal=True, forward=False))
    assert cost.flops == BACKWARD
    assert cost.executed_flops * SQ * SK == BACKWARD * (5 + 6 + 7)


def test_packed_sequences_count_each_token_against_the_longest_row():
    tokens, longest = 12, 4  # three sequences of four at most
    q, starts = meta(tokens, H, D), meta(4, dtype=torch.int32)
    call = call_by_hand(
        aten._flash_attention_forward.default,
        (q, q, q, starts, starts, longest, longest, 0.0, False, False),
        (meta(tokens, H, D), meta(H, tokens)),
    )
    assert cost_of(call).flops == 4 * tokens * longest * H * D


EFFICIENT_VISIBLE = {0: 21, 1: 1 + 2 + 3, 2: 5 + 6 + 7}  # custom mask type: none, top left, bottom right


@pytest.mark.parametrize("kind", EFFICIENT_VISIBLE)
def test_the_efficient_kernel_knows_both_causal_masks(kind):
    q, k, v = meta(B, SQ, H, D), meta(B, SK, H, D), meta(B, SK, H, DV)
    o, lse, seed = meta(B, SQ, H, DV), meta(B, H, SQ), meta(dtype=torch.int64)
    forward = call_by_hand(
        aten._efficient_attention_forward.default, (q, k, v, None, None, None, None, None, 0.0, kind), (o, lse)
    )
    backward = call_by_hand(
        aten._efficient_attention_backward.default,
        (o, q, k, v, None, o, None, None, SQ, SK, lse, 0.0, seed, seed, kind, False),
        (q, k, v),
    )
    assert cost_of(forward).flops == FORWARD
    assert cost_of(forward).executed_flops * SQ * SK == FORWARD * EFFICIENT_VISIBLE[kind]
    assert cost_of(backward).flops == BACKWARD
    assert cost_of(backward).executed_flops * SQ * SK == BACKWARD * EFFICIENT_VISIBLE[kind]


def test_a_window_of_the_efficient_kernel_holds_its_own_key_last():
    q = meta(1, 4, 1, 8)
    call = call_by_hand(
        aten._efficient_attention_forward.default,
        (q, q, q, None, None, None, None, None, 0.0, 1),
        (q, meta(1, 1, 4)),
        window_size=2,
    )
    assert cost_of(call).executed_flops == 4 * 8 * (1 + 2 + 2 + 2)


def test_the_causal_half_of_a_long_square_is_a_little_more_than_half():
    assert visible_pairs(4096, 4096, CAUSAL) == 4096 * 4097 // 2


def attention_module_costs(*, need_weights: bool) -> list[Cost]:
    x, e = meta(2, 5, 16), 16
    call = calls_of(
        lambda: aten._native_multi_head_attention(
            x, x, x, e, 2, meta(3 * e, e), meta(3 * e), meta(e, e), meta(e), None, need_weights
        )
    )[-1]
    return list(costs_of(call))


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention_in_one_op_costs_its_four_products(need_weights):
    costs = attention_module_costs(need_weights=need_weights)
    assert sum(2 * cost.macs for cost in costs) == 2 * 10 * 16 * (48 + 16) + 4 * 2 * 25 * 16
    assert len(costs) == (6 if need_weights else 3)  # with weights the scores are kept: scale, bmm, softmax, bmm


@pytest.mark.skipif(
    not hasattr(torch.ops.aten, "_flash_attention_forward_no_dropout_inplace"), reason="this torch lacks the op"
)
def test_flash_attention_into_a_given_tensor_costs_what_it_costs_without():
    """`_flash_attention_forward_no_dropout_inplace`, which torch 2.13 added, writes what the other returns."""
    q, k, v, out = (
        torch.empty(2, length, 4, 64, dtype=torch.bfloat16, device="meta") for length in (128, 256, 256, 128)
    )
    lse = torch.empty(2, 4, 128, device="meta")
    options = (None, None, 128, 256, 0.0, False, False)
    ops = torch.ops.aten
    (plain,) = costs_of(call_by_hand(ops._flash_attention_forward.default, (q, k, v, *options), (out, lse)))
    (given,) = costs_of(
        call_by_hand(ops._flash_attention_forward_no_dropout_inplace.default, (out, q, k, v, *options), (lse,))
    )
    assert given.flops == plain.flops == 4 * 2 * 4 * 128 * 256 * 64
    assert given.bytes_read == plain.bytes_read == q.nbytes + k.nbytes + v.nbytes
