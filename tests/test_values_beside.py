"""Where a value that stands beside the right one would do in nearly every call: the calls in which it does not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter
from flopmeter.costs import kernels_of
from flopmeter.known_values.assumptions import Assumption, in_words

H100 = "h100-sxm5-80gb"


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def costs_of(program):
    with FlopMeter(H100) as meter:
        program()
    return [kernel.cost for kernel in kernels_of(meter.trace)]


def test_a_meter_in_itself_counts_on_when_the_inner_one_ends():
    meter, x = FlopMeter(H100), meta(4)
    with meter:
        for _ in range(2):
            with meter:
                x.exp()
        with meter, meter:
            x.log()
        x.sin()
    assert [op.call.name for op in meter.trace.ops] == ["exp", "exp", "log", "sin"]


def test_an_assumption_that_two_ops_of_a_line_make_is_named_once_with_both_counts():
    uses = [Assumption("a stand-in", "aten._local_scalar_dense.default", "train.py:3", count) for count in (2, 5)]
    (text,) = in_words(uses)
    assert "train.py:3 (7x)" in text


def test_values_of_a_sparse_tensor_that_fall_on_the_same_places_touch_these_once():
    """Ten values on two rows of a tensor of 2 x 3: all of its 24 bytes are read and written, and no more."""
    places = torch.zeros(1, 10, dtype=torch.int64, device="meta")
    sparse = torch.sparse_coo_tensor(places, meta(10, 3), (2, 3), check_invariants=False)
    *_, added = costs_of(lambda: sparse.to_dense())
    assert added.bytes_written == 2 * 3 * 4


@pytest.mark.parametrize("mode", ["tanh", "relu"])
def test_both_plain_cells_keep_their_weights_up_to_as_many_hidden_units(mode):
    """cuDNN's persistent kernels take 384 of them forward, and 192 of an LSTM (get_algo in RNN.cpp)."""

    def layer(hidden):
        with torch.device("meta"):
            network = nn.RNN(64, hidden, nonlinearity=mode).eval()
        with torch.no_grad():
            (cost,) = [cost for cost in costs_of(lambda: network(meta(50, 8, 64))) if cost.macs]
        return cost.work

    kept = {hidden: layer(hidden).recurrence.keeps_weights for hidden in (384, 392)}
    assert kept == {384: "everywhere", 392: "nowhere"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_grouped_product_takes_the_type_of_its_result_where_that_is_its_own(dtype):
    offsets = torch.tensor([8, 16], dtype=torch.int32, device="meta")
    a, b = meta(16, 32, dtype=dtype), meta(2, 32, 64, dtype=dtype)

    def macs(**options):
        return sum(cost.macs for cost in costs_of(lambda: torch._grouped_mm(a, b, offs=offsets, **options)))

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
