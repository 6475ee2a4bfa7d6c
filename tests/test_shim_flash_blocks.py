"""FlashAttention one way and block by block, as ring attention calls it: its work is that of a computation by hand."""

from __future__ import annotations

import inspect

import pytest
import torch

import flopmeter
from flopmeter.run.session import Wishes

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, HEAD = 1, 8, 2, 512, 1024, 64
PRODUCT = 2 * BATCH * HEADS * QUERIES * KEYS * HEAD  # FLOPs of one of attention's matmuls


def recorded(program):
    """The kernels of a program in which flash_attn's interface is a shim, by name."""
    with flopmeter.cuda("h100-sxm5-80gb", wishes=Wishes(shims=("flash_attn",))) as device:
        from flash_attn import flash_attn_interface

        program(flash_attn_interface)
    return {row.name.rpartition("::")[2]: row for row in device.report().step.rows("op")}


def tensors(*shape_of_queries):
    q = torch.empty(*shape_of_queries, HEADS, HEAD, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.empty(BATCH, KEYS, KEY_HEADS, HEAD, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return q, k, v


def test_a_block_has_two_products_forward_and_five_backward_which_writes_into_what_it_is_given():
    def program(interface):
        q, k, v = tensors(BATCH, QUERIES)
        out, sums, *_ = interface._flash_attn_forward(q, k, v, 0.0, None, False)
        assert (out.shape, sums.shape, sums.dtype) == (q.shape, (BATCH, HEADS, QUERIES), torch.float32)
        given = [torch.empty_like(each) for each in (q, k, v)]
        interface._flash_attn_backward(out, q, k, v, out, sums, *given, 0.0, None, False)

    found = recorded(program)
    assert set(found) == {"flash_attn_2", "flash_attn_2_backward"}  # no copy into the buffers of gradients
    assert found["flash_attn_2"].flops == 2 * PRODUCT
    assert found["flash_attn_2_backward"].flops == 5 * PRODUCT


def test_a_block_takes_the_time_of_the_package_s_whole_function():
    def block(interface):
        interface._flash_attn_forward(*tensors(BATCH, QUERIES), 0.0, None, True)

    def whole(interface):
        interface.flash_attn_func(*tensors(BATCH, QUERIES), causal=True)

    times = [[row.seconds for row in recorded(each).values()] for each in (block, whole)]
    assert times[0] == pytest.approx(times[1])


def test_packed_blocks_cost_their_own_squares_both_ways():
    def program(interface):
        q, k, v = (each.flatten(0, 1) for each in tensors(BATCH, KEYS))
        starts = torch.tensor([0, KEYS // 2, KEYS], dtype=torch.int32, device="cuda")
        lengths = (starts, starts, KEYS // 2, KEYS // 2)
        out, sums, *_ = interface._flash_attn_varlen_forward(q, k, v, *lengths, 0.0, None, False)
        assert sums.shape == (HEADS, KEYS)
        given = [torch.empty_like(each) for each in (q, k, v)]
        interface._flash_attn_varlen_backward(out, q, k, v, out, sums, *given, *lengths, 0.0, None, False)

    found = recorded(program)
    product = 2 * HEADS * 2 * (KEYS // 2) ** 2 * HEAD
    assert found["flash_attn_2"].flops == 2 * product
    assert found["flash_attn_2_backward"].flops == 5 * product


def test_a_program_can_ask_which_arguments_a_block_takes_as_ring_attention_does():
    def program(interface):
        for name in ("_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_forward"):
            assert {"window_size_left", "softcap", "alibi_slopes"} <= set(
                inspect.getfullargspec(getattr(interface, name)).args
            )
        torch.ones(1, device="cuda")

    recorded(program)


@pytest.mark.parametrize("name", ["dropout_p", "softcap"])
def test_what_a_block_of_the_shim_does_not_have_is_an_error(name):
    def program(interface):
        options = {"dropout_p": 0.0, "softmax_scale": None, "causal": False, name: 0.5}
        with pytest.raises(NotImplementedError, match=name):
            interface._flash_attn_forward(*tensors(BATCH, QUERIES), **options)
        torch.ones(1, device="cuda")

    recorded(program)
