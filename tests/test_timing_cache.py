"""What matmuls find in the L2 cache: the memory that was read before, and no other part of the same tensor."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from flopmeter import FlopMeter, load_hardware, on_meta
from flopmeter.costs import kernels_of
from flopmeter.timing.cache import _ByteRange, cached_bytes

BF16 = {"dtype": torch.bfloat16, "device": "meta"}


def test_experts_one_after_another_are_not_found_in_the_cache_of_the_one_before():
    """Each reads its own part of the stacked weights: 32 MB, of a cache of 96."""
    x, weights = torch.empty(16, 2048, **BF16), torch.empty(64, 2048, 8192, **BF16)
    device = load_hardware("l40s")
    with FlopMeter(device) as loop:
        for expert in range(64):
            x @ weights[expert]
    assert loop.report().kernel_seconds > weights.nbytes / device.bandwidth_bytes_per_s
    offsets = on_meta(torch.arange(16, 1025, 16, dtype=torch.int32))
    with FlopMeter(device) as grouped:
        torch._grouped_mm(torch.empty(1024, 2048, **BF16), weights, offs=offsets)
    assert grouped.report().kernel_seconds > weights.nbytes / device.bandwidth_bytes_per_s


def test_the_same_weights_twice_are_found_in_the_cache():
    x, weights = torch.empty(16, 2048, **BF16), torch.empty(64, 2048, 8192, **BF16)
    device = load_hardware("l40s")
    with FlopMeter(device) as meter:
        for _ in range(64):
            x @ weights[0]
    assert meter.report().kernel_seconds < weights.nbytes / device.bandwidth_bytes_per_s


def test_the_other_half_of_a_tensor_is_not_in_the_cache():
    x, weights = torch.empty(16, 2048, **BF16), torch.empty(2, 2048, 2048, **BF16)
    with FlopMeter("l40s") as meter:
        for half in (weights[0], weights[1], weights[1]):
            x @ half
    _, other, again = cached_bytes(kernels_of(meter.trace), load_hardware("l40s").l2_cache_bytes)
    assert again - other == weights[1].nbytes


@pytest.mark.parametrize(("columns", "share"), [(2048, 1.0), (2112, 1 - 0.03125 / 0.1), (2304, 0.0)])
def test_weights_that_fill_little_more_than_the_cache_are_found_in_part(columns, share):
    """Six of 4096 rows in turn: of 2048 columns of 2 bytes they are the 96 MB of an L40S; of 2112 a thirty-second more;
    of 2304 an eighth. Rows of the input and the output are 3 in a thousand of that."""
    weights = [torch.empty(columns, 4096, **BF16).t() for _ in range(6)]
    x, out = torch.empty(1, 4096, **BF16), torch.empty(1, columns, **BF16)
    with torch.inference_mode(), FlopMeter("l40s") as meter:
        for weight in (*weights, weights[0]):
            torch.mm(x, weight, out=out)
    *first_time, again = kernels_of(meter.trace)
    found = cached_bytes([*first_time, again], load_hardware("l40s").l2_cache_bytes)
    assert found[-1] / again.cost.bytes == pytest.approx(share, abs=0.01)


def test_a_token_written_into_each_sequence_leaves_no_more_than_these_tokens_in_the_cache():
    """Keys of 8 sequences of 2049 tokens, 34 MB: the new tokens lie far apart, nearly from end to end."""
    held = torch.empty(8, 2049, 8, 128, **BF16)
    device = load_hardware("l40s")
    with FlopMeter(device) as meter:
        held[:, 2048:].copy_(torch.empty(8, 1, 8, 128, **BF16))
        held.sum()
    found = cached_bytes(kernels_of(meter.trace), device.l2_cache_bytes)
    assert found[-1] < 0.01 * held.nbytes
    assert meter.report().kernel_seconds > held.nbytes / device.bandwidth_bytes_per_s


def test_a_slice_of_columns_is_found_after_it_was_written_and_the_columns_beside_it_are_not():
    both, part = torch.empty(4096, 1024, **BF16), torch.empty(4096, 512, **BF16)

    def found_of(*columns):
        with FlopMeter("l40s") as meter:
            both[:, :512].copy_(part)
            torch.neg(both[:, slice(*columns)])
        write, read = kernels_of(meter.trace)
        return cached_bytes([write, read], load_hardware("l40s").l2_cache_bytes)[-1] - read.cost.bytes_written

    assert found_of(512) == part.nbytes
    assert found_of(1024) == pytest.approx(part.nbytes, rel=0.01)


def test_tensors_without_elements_leave_nothing():
    with FlopMeter("l40s") as meter:
        torch.empty(4, 0, 8, **BF16).transpose(0, 1).neg()
        torch.ones(0, device="meta").add_(1)
    assert cached_bytes(kernels_of(meter.trace), 10**6) == [0.0] * len(kernels_of(meter.trace))


@pytest.mark.parametrize("by", ["the rules", "the compiler"])
def test_compiled_code_finds_what_a_matmul_wrote_as_eager_kernels_do(by):
    """A GELU reads 32 MB, of an L40S's 96, and writes as many: with memory alone that takes 78 µs at 864 GB/s."""
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.GELU()).to(**BF16)
    x, device = torch.empty(4096, 1024, **BF16), load_hardware("l40s")
    run = torch.compile(model) if by == "the compiler" else model
    with FlopMeter(device) as meter, torch.no_grad():
        run(x)
    report = meter.report() if by == "the compiler" else meter.report(mode="compiled")
    _, gelu = report.timings
    assert gelu.seconds < 2 * 4096 * 4096 * 2 / device.bandwidth_bytes_per_s


def rows_in_turn(rows: list[torch.Tensor]) -> list[float]:
    """What kernels find that write one row after the other and then read some of them."""
    with FlopMeter("l40s") as meter:
        for before, row in pairwise(rows):
            row.copy_(before)
        for row in rows[::7]:
            row + 1
    return cached_bytes(kernels_of(meter.trace), load_hardware("l40s").l2_cache_bytes)


@pytest.mark.parametrize("width", [1024, 400_000], ids=["all stay in the cache", "most are gone"])
def test_many_rows_of_one_tensor_are_found_as_tensors_of_their_own_are(width):
    """Rows at least of a line of the cache each; 500 of the larger ones are 381 MB of a cache of 96."""
    whole, apart = torch.empty(500, width, **BF16), [torch.empty(width, **BF16) for _ in range(500)]
    assert rows_in_turn(list(whole)) == rows_in_turn(apart)


def test_of_many_rows_each_is_compared_with_few_others(monkeypatch):
    """A step that writes 20,000 rows of one tensor took minutes, since each was compared with all before it."""
    compared, share_of = [], _ByteRange.share_of
    monkeypatch.setattr(_ByteRange, "share_of", lambda one, other: compared.append(other) or share_of(one, other))
    rows_in_turn(list(torch.empty(2000, 64, **BF16)))
    assert len(compared) < 20 * 2000
