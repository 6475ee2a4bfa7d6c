"""PyTorch's caching allocator with expandable segments, by hand: what c10/cuda/CUDACachingAllocator.cpp does."""

from __future__ import annotations

import pytest

from flopmeter.timing.allocator import MIB, CachingAllocator, OutOfMemoryError


@pytest.fixture(autouse=True)
def expandable(monkeypatch):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")


def allocated(allocator, *sizes):
    return [allocator.allocate(size * MIB) for size in sizes]


def test_a_segment_grows_by_no_more_than_its_free_end_lacks():
    """Four of 20 MiB are free at the end; a request of 24 takes one page of 20 more, and 24 more another two."""
    allocator = CachingAllocator()
    allocated(allocator, 16, 24)
    assert allocator.reserved_bytes == 40 * MIB
    allocated(allocator, 24)
    assert allocator.reserved_bytes == 80 * MIB


def test_what_is_free_at_the_end_again_is_one_piece_with_what_was_never_used():
    allocator = CachingAllocator()
    first, second, third = allocated(allocator, 6, 6, 6)
    for piece in (third, first, second):  # neighbours merge on both sides
        allocator.free(piece)
    allocated(allocator, 20)
    assert allocator.reserved_bytes == 20 * MIB


def test_free_pages_in_the_middle_go_back_before_memory_runs_out_and_are_asked_for_again():
    """Without expandable segments only whole segments go back."""
    allocator = CachingAllocator(capacity=40 * MIB)
    _, middle, _ = allocated(allocator, 10, 20, 10)
    allocator.free(middle)
    small = allocator.allocate(MIB // 2)  # the small pool: pages of its own
    assert allocator.reserved_bytes == 22 * MIB
    allocated(allocator, 18)  # the free middle, mapped again
    assert allocator.reserved_bytes == pytest.approx(40 * MIB, abs=2 * MIB)
    allocator.free(small)
    with pytest.raises(OutOfMemoryError):
        allocated(allocator, 20)
    assert allocator.peak_reserved_bytes <= 40 * MIB


@pytest.mark.parametrize(("nbytes", "segment"), [(MIB, 2), (MIB + 1, 20)])
def test_a_mebibyte_is_the_largest_request_of_the_small_pool(nbytes, segment, monkeypatch):
    for setting in ("expandable_segments:True", ""):
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
        allocator = CachingAllocator()
        allocator.allocate(nbytes)
        assert allocator.reserved_bytes == segment * MIB


@pytest.mark.parametrize(("setting", "left", "kept"), [("", 1, 1), ("", 1.5, 0), ("expandable_segments:True", 1, 0)])
def test_a_mebibyte_that_is_left_of_a_large_block_stays_with_it_but_in_an_expandable_segment(
    setting, left, kept, monkeypatch
):
    """`should_split`: of 20 MiB more than kSmallSize has to be left."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", setting)
    allocator = CachingAllocator()
    allocator.allocate(9 * MIB)
    rest = int((11 - left) * MIB)
    assert allocator.allocate(rest).nbytes == rest + kept * MIB
