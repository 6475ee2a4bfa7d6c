"""Where a value that stands beside the right one would do in nearly every call: the calls in which it does not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from costs_support import call_by_hand, meta, metered
from torch import nn

from flopmeter import FlopMeter
from flopmeter.costs import costs_of, kernels_of
from flopmeter.known_values.assumptions import (
    CONDITION_FAILS,
    CONDITION_HOLDS,
    LOOP_ENDS,
    Assumption,
    guess_of_length,
    in_words,
)
from flopmeter.records import ATTENTION
from flopmeter.timing.allocator import CachingAllocator

H100 = "h100-sxm5-80gb"
aten = torch.ops.aten


def test_a_meter_in_itself_counts_on_when_the_inner_one_ends():
    """Attention is still one kernel, as on CUDA."""
    meter, x = FlopMeter(H100), meta(1, 2, 64, 64, dtype=torch.bfloat16)
    with meter:
        for _ in range(2):
            with meter:
                x.exp()
        F.scaled_dot_product_attention(x, x, x)
    assert [op.call.name for op in meter.trace.ops if op.call.inputs][:2] == ["exp", "exp"]
    (attention,) = [kernel.cost for kernel in kernels_of(meter.trace) if kernel.cost.macs]
    assert attention.op_class == ATTENTION


def test_an_assumption_that_two_ops_of_a_line_make_is_named_once_with_both_counts():
    uses = [Assumption("a stand-in", "aten._local_scalar_dense.default", "train.py:3", count) for count in (2, 5)]
    (text,) = in_words(uses)
    assert "train.py:3 (7x)" in text


def asked(*uses):
    """What is told of these rules, places and counts, in either order."""
    found = [Assumption(rule, "aten._local_scalar_dense.default", where, count) for rule, where, count in uses]
    told, reversed_ = guess_of_length(found), guess_of_length(reversed(found))
    assert told == reversed_
    return told


def test_of_several_guesses_of_length_the_one_that_is_asked_most_is_told_and_a_loop_before_a_condition():
    assert "the loop at b.py:2" in asked((LOOP_ENDS, "a.py:1", 3), (LOOP_ENDS, "b.py:2", 5))
    assert "the loop at a.py:1" in asked((LOOP_ENDS, "a.py:1", 3), (CONDITION_FAILS, "b.py:2", 500))
    assert "b.py:2 asked 500 times" in asked((CONDITION_FAILS, "a.py:1", 200), (CONDITION_HOLDS, "b.py:2", 500))
    assert asked((CONDITION_HOLDS, "b.py:2", 500)).endswith("told yes, as for a value of 1.0")
    assert "told no" in asked((CONDITION_FAILS, "b.py:2", 500))
    assert asked((CONDITION_FAILS, "a.py:1", 99), (CONDITION_HOLDS, "b.py:2", 99), ("a stand-in", "c.py:3", 500)) == ""


@pytest.mark.parametrize(("rows", "nbytes"), [(1, 12), (2, 24), (10, 24)])
def test_values_of_a_sparse_tensor_touch_as_many_places_and_the_same_ones_once(rows, nbytes):
    """Rows of three values, added to a tensor of 2 x 3, whose 24 bytes are read and written, and no more."""
    places = torch.zeros(1, rows, dtype=torch.int64, device="meta")
    sparse = torch.sparse_coo_tensor(places, meta(rows, 3), (2, 3), check_invariants=False)
    *_, added = metered(lambda: sparse.to_dense())
    assert added.bytes_written == nbytes


@pytest.mark.parametrize("mode", ["tanh", "relu"])
def test_both_plain_cells_keep_their_weights_up_to_as_many_hidden_units(mode):
    """cuDNN's persistent kernels take 384 of them forward, and 192 of an LSTM (get_algo in RNN.cpp)."""

    def layer(hidden):
        with torch.device("meta"):
            network = nn.RNN(64, hidden, nonlinearity=mode).eval()
        with torch.no_grad():
            (cost,) = [cost for cost in metered(lambda: network(meta(50, 8, 64))) if cost.macs]
        return cost.work

    kept = {hidden: layer(hidden).recurrence.keeps_weights for hidden in (384, 392)}
    assert kept == {384: "everywhere", 392: "nowhere"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_grouped_product_takes_the_type_of_its_result_where_that_is_its_own(dtype):
    offsets = torch.tensor([8, 16], dtype=torch.int32, device="meta")
    a, b = meta(16, 32, dtype=dtype), meta(2, 32, 64, dtype=dtype)

    def macs(**options):
        return sum(cost.macs for cost in metered(lambda: torch._grouped_mm(a, b, offs=offsets, **options)))

    assert macs(out_dtype=dtype) == macs() == 16 * 32 * 64


def test_a_mask_of_bytes_picks_as_one_of_bools_does():
    """PyTorch still takes uint8 for a mask, with a warning."""
    picked = {}
    for dtype in (torch.bool, torch.uint8):
        with FlopMeter(H100) as meter:
            picked[dtype] = meta(4, 6)[torch.tensor([1, 0, 1, 1], dtype=dtype, device="meta")].shape
        assert not meter.report().assumptions
    assert picked == dict.fromkeys(picked, (3, 6))


def test_by_the_rules_a_sum_over_no_elements_is_compiled():
    with FlopMeter(H100) as meter:
        meta(0, 8).sum(0)
    assert meter.report(mode="compiled").seconds > 0


def test_all_free_segments_go_back_to_the_device_and_not_the_largest_alone():
    allocator = CachingAllocator()
    for piece in [allocator.allocate(nbytes * 2**20) for nbytes in (30, 40, 50)]:
        allocator.free(piece)
    allocator.give_back()
    assert allocator.reserved_bytes == 0


@pytest.mark.parametrize(("alpha", "multiplies"), [(None, 0), (1, 0), (1.0, 0), (0.5, 1)])
def test_what_cudnn_adds_to_a_convolution_is_multiplied_where_alpha_is_no_one(alpha, multiplies):
    """The bias and z are added to 2 x 8 x 4 x 4 results, and z is scaled."""
    x, weight, z, bias = meta(2, 3, 4, 4), meta(8, 3, 1, 1), meta(2, 8, 4, 4), meta(8)
    args = (x, weight, z, alpha, bias, [1, 1], [0, 0], [1, 1], 1)
    call = call_by_hand(aten.cudnn_convolution_add_relu.default, args, (z.clone(),))
    (cost,) = [cost for cost in costs_of(call) if cost.macs]
    assert cost.flops - 2 * cost.macs == (2 + multiplies) * z.numel()
