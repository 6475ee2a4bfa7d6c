"""Sorting and what torch sorts for, against what an H100 and an H200 took (torch 2.11, 2026-11, validation/traces) and
against the kernels that those traces show."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from costs_support import costs_in, meta

from flopmeter import FlopMeter

BF16, FP32, I64 = torch.bfloat16, torch.float32, torch.int64
H100, H200 = "h100-sxm5-80gb", "h200-sxm-141gb"


def ids(count):
    return meta(count, dtype=I64)


def table_gradient(indices, rows, width, dtype=FP32):
    return torch.ops.aten.embedding_dense_backward(meta(indices, width, dtype=dtype), ids(indices), rows, -1, False)


def bag_gradient(indices, bags, rows, width):
    kept = ids(indices), ids(bags), ids(0)
    return torch.ops.aten._embedding_bag_dense_backward(meta(bags, width), ids(indices), *kept, rows, False, 0, None)


# Microseconds. None set a constant, but the tables of positions and words did: others are from sorts and choices in
# bf16, and sorts of 4,096 and 8,388,608 int64.
MEASURED = {
    "sort, rows of 64": (30.6, H100, lambda: meta(4096, 64).sort()),
    "sort, rows of 128": (104.7, H100, lambda: meta(16384, 128).sort()),
    "sort, rows of 1,000": (305.4, H100, lambda: meta(8192, 1000).sort()),
    "sort, 256 rows of 8,192": (184.7, H100, lambda: meta(256, 8192).sort()),
    "sort, 16 rows of 32,000": (91.1, H100, lambda: meta(16, 32000).sort()),
    "sort, 64 rows of a vocabulary": (674.4, H100, lambda: meta(64, 128256).sort()),
    "sort, one row of a vocabulary": (53.5, H100, lambda: meta(1, 128256).sort()),
    "sort, 10,000 numbers": (70.1, H100, lambda: ids(10_000).sort()),
    "sort, 50,000 numbers": (70.5, H200, lambda: ids(50_000).sort()),
    "sort, 3 million numbers": (357.1, H200, lambda: ids(3_000_000).sort()),
    "sort, 10 million numbers": (1220.7, H100, lambda: ids(10_000_000).sort()),
    "unique, 10,000 numbers": (70.5, H100, lambda: torch.ops.aten._unique2(ids(10_000))),
    "topk, the experts of tokens": (38.6, H100, lambda: meta(4096, 128).topk(8)),
    "topk, rows of 1,000": (270.2, H100, lambda: meta(8192, 1000).topk(8)),
    "topk, 256 rows of 8,192": (73.9, H100, lambda: meta(256, 8192).topk(8)),
    "topk, 64 rows of a vocabulary": (155.4, H100, lambda: meta(64, 128256).topk(8)),
    "topk, one row of a vocabulary": (59.8, H100, lambda: meta(1, 128256).topk(8)),
    "table of positions": (29.7, H100, lambda: table_gradient(1024, 1024, 768)),
    "table of words": (61.2, H100, lambda: table_gradient(700, 33278, 650)),
    "table of token positions, BERT": (16.4, H100, lambda: table_gradient(512, 512, 1024)),
    "table of GPT-2": (366.5, H100, lambda: table_gradient(16384, 50304, 768)),
    "table of GPT-2, bf16": (334.4, H100, lambda: table_gradient(16384, 50304, 768, BF16)),
    "narrow table": (208.0, H100, lambda: table_gradient(32768, 1_000_000, 64)),
    "table of few rows": (95.9, H100, lambda: table_gradient(8192, 512, 768)),
    "table of 32,000 rows": (373.2, H200, lambda: table_gradient(8192, 32000, 2048)),
    "bags of DLRM": (211.9, H100, lambda: bag_gradient(32768, 8192, 1_000_000, 64)),
    "bags of few rows": (138.0, H200, lambda: bag_gradient(50000, 12500, 1000, 512)),
    "numbers counted": (31.4, H100, lambda: torch.bincount(ids(1_048_576), minlength=64)),
    "a tenth of these counted": (13.8, H100, lambda: torch.bincount(ids(10_000), minlength=64)),
    "sum by index, bf16": (85.0, H100, lambda: meta(50304, 768, dtype=BF16).index_put_((ids(16384),), V, True)),
    "sum by index, narrow": (75.2, H100, lambda: meta(1_000_000, 64).index_put_((ids(32768),), meta(32768, 64), True)),
    "gradient of an index, bf16": (  # whose places are not checked again
        68.5,
        H100,
        lambda: torch._index_put_impl_(meta(50304, 768, dtype=BF16), (ids(16384),), V, True, True),
    ),
    "gradient of an index, narrow": (
        53.2,
        H100,
        lambda: torch._index_put_impl_(meta(1_000_000, 64), (ids(32768),), meta(32768, 64), True, True),
    ),
}
V = meta(16384, 768, dtype=BF16)


def seconds(program, hardware=H100):
    with torch.inference_mode(), FlopMeter(hardware) as meter:
        program()
    return meter.report().kernel_seconds


@pytest.mark.parametrize("name", MEASURED)
def test_an_op_takes_about_as_long_as_it_did(name):
    microseconds, hardware, program = MEASURED[name]
    assert seconds(program, hardware) * 1e6 == pytest.approx(microseconds, rel=0.2)


def test_numbers_are_read_for_their_bounds_before_they_are_counted():
    """`_bincount_cuda_template` in SummaryOps.cu: the host waits for the minimum, and for the maximum."""
    with FlopMeter(H100) as meter:
        torch.bincount(ids(1000), minlength=64)
    costs = [kernel.cost for kernel in meter.report().kernels]
    assert [cost.bytes_read for cost in costs if cost.bytes_read >= 8000] == [8000] * 3
    assert [cost.link_bytes for cost in costs if cost.blocks_host] == [8, 8]


def passes(program):
    """Kernels of a sort that read and write all keys of the same number of bytes."""
    return [cost for cost in costs_in(program) if cost.op_class == "sorting" and cost.bytes_written]


@pytest.mark.parametrize(
    ("program", "count"),
    [
        (lambda: ids(1 << 20).sort(), 8),
        (lambda: meta(1 << 20).sort(), 4),
        (lambda: meta(1 << 20, dtype=BF16).sort(), 2),
        (lambda: meta(256, 8192).sort(), 6),
        (lambda: meta(256, 8192, dtype=BF16).sort(), 3),
        (lambda: meta(4096, 64).sort(), 1),
    ],
    ids=["int64", "fp32", "bf16", "fp32, rows", "bf16, rows", "short rows"],
)
def test_a_sort_has_as_many_passes_as_its_trace_shows(program, count):
    assert len(passes(program)) == count


def test_a_pass_over_numbers_moves_keys_and_places_once():
    n = 1 << 20
    assert {(cost.bytes_read, cost.bytes_written) for cost in passes(lambda: ids(n).sort())} == {(16 * n, 16 * n)}


def test_rows_of_one_element_are_only_copied():
    (cost,) = costs_in(lambda: meta(100, 1).sort())
    assert (cost.bytes_read, cost.bytes_written) == (400, 400 + 800)


@pytest.mark.parametrize(("rows", "size", "kernels"), [(4000, 800, 3 * 4 + 2), (4000, 799, 2), (4001, 400, 3 * 4 + 2)])
def test_blocks_share_the_rows_of_a_choice_where_torch_says(rows, size, kernels):
    """`should_use_multiblock` in TensorTopK.cu; three kernels for each byte, one that gathers and one that sorts."""
    assert len(costs_in(lambda: meta(rows, size).topk(8))) == kernels


def test_a_choice_that_need_not_be_sorted_is_not():
    x = meta(4096, 128)
    assert seconds(lambda: x.topk(8, sorted=False)) < seconds(lambda: x.topk(8))


def test_gradients_of_a_table_are_counted_once_however_they_are_added():
    for indices in (1024, 8192):
        costs = costs_in(lambda indices=indices: table_gradient(indices, 512, 64))
        assert sum(cost.flops for cost in costs) == indices * 64


def test_a_table_of_few_rows_has_no_sums_of_parts():
    """Token types of BERT: 8192 indices of 2 rows. compute_grad_weight_atomic_accumulate adds each part to its row."""
    few, many = (costs_in(lambda rows=rows: table_gradient(8192, rows, 1024)) for rows in (2, 30522))
    assert len(few) == len(many) - 1


def test_embeddings_train_as_their_op_is_priced():
    weight = meta(50304, 768).requires_grad_()
    with FlopMeter(H100) as meter:
        F.embedding(meta(16384, dtype=I64), weight).sum().backward()
    (row,) = [row for row in meter.report().rows("op") if "embedding_dense_backward" in row.name]
    assert row.seconds == pytest.approx(seconds(lambda: table_gradient(16384, 50304, 768)), rel=0.1)
