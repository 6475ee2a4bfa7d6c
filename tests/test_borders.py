"""Where one kernel, count or rule ends and the next begins: at the border itself, and in the calls that alone tell a
part of a condition or of a sum. Borders and kernels are those of torch's CUDA sources, sums are done by hand."""

from __future__ import annotations

from math import ceil

import pytest
import torch
import torch.nn.functional as F
from costs_support import call_by_hand, costs_in, meta, metered
from torch import nn

from flopmeter import FlopMeter
from flopmeter.costs import costs_of

BF16, F16, F64, I32 = torch.bfloat16, torch.float16, torch.float64, torch.int32
aten = torch.ops.aten


# --- sorting (aten/src/ATen/native/cuda/Sort.cpp, SortStable.cu)

# Copied and numbered in place, then a kernel for all rows; else a copy, the places, and passes of eight bits of fp32
# behind a count of all digits: of all rows and then of their numbers, or of one row after another; or six passes of six
# bits in which each row has a block.
ROWS_IN_BLOCKS, TWO_ROWS_AT_ONCE, TWO_ROWS_IN_TURN, ROW_BY_BLOCK = 4, 2 + (1 + 4) + (1 + 1) + 1, 2 + 2 * (1 + 4), 2 + 6


@pytest.mark.parametrize(
    ("rows", "size", "costs"),
    [
        (2, 4096, ROWS_IN_BLOCKS),
        (2, 4097, TWO_ROWS_AT_ONCE),
        (2, 999_999, TWO_ROWS_AT_ONCE),
        (2, 1_000_000, TWO_ROWS_IN_TURN),
        (127, 5000, TWO_ROWS_AT_ONCE),
        (128, 5000, ROW_BY_BLOCK),
    ],
)
def test_rows_are_sorted_in_blocks_together_one_by_one_or_each_by_a_block(rows, size, costs):
    assert len(costs_in(lambda: meta(rows, size).sort())) == costs


def test_a_stable_sort_of_short_rows_is_not_done_by_the_network_which_is_not_stable():
    """The network takes five rows a block, what is stable one."""
    *_, network = costs_in(lambda: meta(4096, 32).sort())
    *_, stable = costs_in(lambda: meta(4096, 32).sort(stable=True))
    *_, long = costs_in(lambda: meta(4096, 33).sort())
    assert [each.work.grid.blocks for each in (network, stable, long)] == [ceil(4096 / 5), 4096, 4096]


def test_the_largest_of_a_row_need_not_be_sorted():
    largest, two = (costs_in(lambda k=k: meta(4, 1000).topk(k)) for k in (1, 2))
    assert len(two) == len(largest) + 1


@pytest.mark.parametrize("x", [meta(0, 5), meta(4, 1), meta()])
def test_what_has_nothing_to_order_has_no_order_to_find(x):
    for program in (lambda: x.sort(-1), lambda: x.topk(min(1, x.numel()), -1)):
        assert sum(cost.bytes for cost in costs_in(program) if cost.op_class == "sorting") <= 2 * (4 + 8) * x.numel()


# --- joining (Shape.cu)

LIKE = {
    "another type": meta(4, 8, dtype=BF16),
    "not aligned": meta(33)[1:].view(4, 8),
    "with gaps": meta(4, 16)[:, ::2],
    "a short row": meta(4, 7),
}


@pytest.mark.parametrize("other", LIKE)
def test_tensors_are_joined_by_the_same_kernel_wherever_the_one_that_decides_stands(other):
    tensors = [meta(4, 8), meta(4, 8), LIKE[other]]
    ways = []
    for place in range(3):
        order = tensors[:2]
        order.insert(place, tensors[2])
        costs = costs_in(lambda order=order: torch.cat(order, dim=1))
        ways.append((len(costs), sorted(getattr(cost.work, "grid", None) or () for cost in costs)))
    assert ways[0] == ways[1] == ways[2]


@pytest.mark.parametrize(("dtype", "at_a_time"), [(BF16, 4), (torch.float32, 4), (F64, 2), (torch.complex128, 1)])
def test_aligned_tensors_are_joined_16_bytes_at_a_time_8_of_two_bytes_and_one_by_one_of_16(dtype, at_a_time):
    """Rows of three elements are no multiple of 16 bytes."""
    (cost,) = costs_in(lambda: torch.cat([meta(4096, 3, dtype=dtype)] * 2, dim=1))
    grid = cost.work.grid
    assert grid.blocks == 2 * ceil(4096 * 3 / at_a_time / grid.threads)


def test_bytes_are_joined_one_by_one_as_what_is_not_aligned():
    (unaligned,) = costs_in(lambda: torch.cat([meta(4097)[1:].view(4096, 1), meta(4096, 1)], dim=1))
    (of_bytes,) = costs_in(lambda: torch.cat([meta(4096, 3, dtype=torch.uint8)] * 2, dim=1))
    assert of_bytes.work.grid.threads == unaligned.work.grid.threads
    assert of_bytes.work.grid.loop.blocks_per_sm == unaligned.work.grid.loop.blocks_per_sm


# --- attention


def test_heads_wider_than_all_that_the_kernel_has_tiles_for_take_the_widest():
    def seconds(size):
        q = meta(1, 8, 2048, size)
        with FlopMeter("a100-sxm4-80gb") as meter:
            F.scaled_dot_product_attention(q, q, q)
        return meter.report().kernel_seconds

    assert 1.5 * seconds(256) < seconds(512) < 4 * seconds(256)


def test_a_window_of_keys_holds_that_of_the_query_itself():
    """Memory-efficient attention with a causal mask: of 6 x 6 pairs 1 + 2 + 3 * 4 are in a window of three."""
    q = meta(1, 6, 1, 8, dtype=F16)
    args = (q, q, q, None, None, None, None, None, 0.0, 1)
    out, lse, number = meta(1, 6, 1, 8, dtype=F16), meta(1, 1, 6), torch.zeros((), dtype=torch.int64)
    call = call_by_hand(aten._efficient_attention_forward.default, args, (out, lse, number, number), window_size=3)
    (cost,) = [cost for cost in costs_of(call) if cost.macs]
    assert 2 * cost.macs - cost.masked_flops == 2 * 2 * 8 * (1 + 2 + 3 * 4)


@pytest.mark.parametrize("cross", [False, True])
def test_attention_of_the_fast_path_counts_queries_and_keys_apart(cross):
    """Three projections of 16 x 16, scores and values of 4 heads of 4, and a projection of the result."""
    queries, keys = 6, 10 if cross else 6
    q = meta(2, queries, 16)
    k = meta(2, keys, 16) if cross else q
    weights = meta(48, 16), meta(48), meta(16, 16), meta(16)
    program = aten._native_multi_head_attention.default
    outputs = meta(2, queries, 16), meta(2, queries, keys)
    (*costs,) = costs_of(call_by_hand(program, (q, k, k, 16, 4, *weights), outputs))
    projected = 2 * 16 * 16 * (2 * queries + 2 * keys)
    assert sum(cost.macs for cost in costs) == projected + 2 * 2 * 16 * queries * keys


def test_values_of_another_tensor_are_projected_apart_on_the_fast_path():
    """Where queries, keys and values are one tensor one product makes them all."""
    x, other = meta(2, 6, 16), meta(2, 6, 16)
    weights = meta(48, 16), meta(48), meta(16, 16), meta(16)

    def products(v):
        call = (x, x, v, 16, 4, *weights), (meta(2, 6, 16), meta(2, 6, 6))
        return [cost.macs for cost in costs_of(call_by_hand(aten._native_multi_head_attention.default, *call))]

    assert products(x)[0] == 2 * 6 * 16 * 48
    assert products(other)[:3] == [2 * 6 * 16 * 16] * 3


# --- groups


def test_depths_of_groups_that_leave_tokens_out_write_every_product_in_full():
    """Of 32 tokens 24 are of a group: both products are of 16 x 64 numbers in bf16."""
    a, b = meta(16, 32, dtype=BF16), meta(32, 64, dtype=BF16)
    program = lambda: torch._grouped_mm(a, b, offs=torch.tensor([8, 24], dtype=I32).to("meta"))  # noqa: E731
    (cost,) = [cost for cost in metered(program) if cost.macs]
    assert cost.bytes_written == 2 * 16 * 64 * 2


# --- recurrent layers (`get_algo` in aten/src/ATen/native/cudnn/RNN.cpp)

PLAIN = {"cell": nn.LSTM, "inputs": 256, "hidden": 512, "batch": 64, "layers": 1, "both": False, "dtype": F16}


def keeps_weights(**changed):
    given = PLAIN | changed
    with torch.device("meta"):
        layer = given["cell"](given["inputs"], given["hidden"], given["layers"], bidirectional=given["both"])
    x = meta(50, given["batch"], given["inputs"], dtype=given["dtype"])
    with torch.no_grad():
        costs = metered(lambda: layer.eval().to(given["dtype"])(x))
    return next(cost.work for cost in costs if cost.macs).recurrence.keeps_weights


STAYS = (
    {}, {"hidden": 1024}, {"batch": 128}, {"batch": 128, "hidden": 1024}, {"inputs": 128},
    {"cell": nn.RNN, "batch": 88, "hidden": 1024}, {"cell": nn.RNN, "batch": 96, "hidden": 768},
)  # fmt: skip
GOES = (
    {"hidden": 1152}, {"hidden": 520}, {"inputs": 200}, {"batch": 60}, {"batch": 136}, {"layers": 2}, {"both": True},
    {"cell": nn.GRU}, {"cell": nn.RNN, "batch": 96, "hidden": 896}, {"dtype": BF16}, {"dtype": torch.float32},
)  # fmt: skip


@pytest.mark.parametrize("changed", STAYS, ids=str)
def test_a_layer_of_a_convenient_size_keeps_its_weights_in_fp16_on_a_large_device(changed):
    assert keeps_weights(**changed) == "on large devices"


@pytest.mark.parametrize("changed", GOES, ids=str)
def test_one_inconvenience_and_a_layer_reads_its_weights_in_each_step(changed):
    assert keeps_weights(**changed) == "nowhere"


# --- enlarging (UpSampleNearest2d.cu)


@pytest.mark.parametrize(("size", "blocks"), [((2, 256), 1), ((3, 300), 4), ((256, 2), 1), ((300, 3), 4)])
def test_threads_of_an_enlarged_image_fill_blocks_of_its_own_width_and_height(size, blocks):
    """Blocks of 256 x 2 threads and of 2 x 256: two of them each way for 300 x 3 results."""
    one, own = (costs_in(lambda size=size: F.interpolate(meta(1, 8, 2, 2), size=size)) for size in ((2, 256), size))
    assert own[-1].work.index_operations == blocks * one[-1].work.index_operations


# --- running sums (ScanUtils.cuh)


def test_a_running_sum_is_along_the_dimension_that_is_named_from_either_end():
    (from_front,), (from_back,), (other,) = (
        costs_in(lambda dim=dim: meta(3, 500, 40).cumsum(dim)) for dim in (1, -2, -1)
    )
    assert from_front.work == from_back.work
    assert from_front.work != other.work
