"""How kernels walk over what they read: threads, loads and second reads, by torch's own source and by hand."""

from __future__ import annotations

import pytest
import torch
from costs_support import calls_of, costs_in, meta

from flopmeter.costs.data_movement.concatenation import (
    LONG_BLOCKS_PER_SM,
    LONG_THREADS,
    SINGLE_BLOCKS_PER_SM,
    SINGLE_THREADS,
    _kernel,
)
from flopmeter.costs.fused import walk_of
from flopmeter.records import ThreadGrid, VectorWork


@pytest.mark.parametrize(
    ("dtype", "elements"),
    [
        (torch.uint8, 1),
        (torch.float16, 4),
        (torch.float32, 4),
        (torch.float64, 2),
        (torch.complex64, 2),
        (torch.complex128, 1),
    ],
)
def test_parts_of_odd_length_are_loaded_16_bytes_at_a_time_8_of_two_byte_elements_and_one_by_one_of_others(
    dtype, elements
):
    """`CatArrayBatchedCopy_alignedK_contig` in Shape.cu, for elements of 2 to 8 bytes."""
    *_, call = calls_of(lambda: torch.cat([meta(64, 3, dtype=dtype), meta(64, 5, dtype=dtype)], 1))
    kernel = _kernel(call.inputs, 1)
    assert kernel is not None
    assert kernel.at_a_time == elements


@pytest.mark.parametrize(
    ("dtype", "is_by_one"), [(torch.uint8, True), (torch.float32, False), (torch.complex128, True)]
)
def test_in_channels_last_elements_of_16_bytes_have_the_kernel_of_single_ones(dtype, is_by_one):
    images = [meta(2, 4, 3, 3, dtype=dtype).to(memory_format=torch.channels_last) for _ in range(2)]
    *_, call = calls_of(lambda: torch.cat(images, 1))
    kernel = _kernel(call.inputs, 1)
    assert kernel is not None
    by_one, others = (1, SINGLE_THREADS, SINGLE_BLOCKS_PER_SM), (4, LONG_THREADS, LONG_BLOCKS_PER_SM)
    assert kernel[:3] == (by_one if is_by_one else others)


@pytest.mark.parametrize(("dim", "elements"), [(0, 8), (1, 4)])
def test_parts_of_whole_16_bytes_are_copied_in_those(dim, elements):
    """64 x 4 halves are 512 bytes in one piece, 4 are 8; along the second dimension each row has a part of its own."""
    *_, call = calls_of(lambda: torch.cat([meta(64, 4, dtype=torch.float16)] * 2, dim))
    kernel = _kernel(call.inputs, dim)
    assert kernel is not None
    assert kernel.at_a_time == elements


@pytest.mark.parametrize(("rows", "grid"), [(8, ThreadGrid(4, 128, 8)), (16, ThreadGrid(4, 128, 16))])
def test_a_thread_of_a_short_selection_goes_through_all_of_its_rows(rows, grid):
    """`indexSelectSmallIndex` in Indexing.cu: up to 16 rows; 128 threads of a block for as many of 512 columns."""
    table, index = meta(1000, 512), meta(rows, dtype=torch.int64)
    (cost,) = costs_in(lambda: torch.index_select(table, 0, index))
    assert isinstance(cost.work, VectorWork)
    assert cost.work.grid == grid


def test_what_is_read_twice_in_one_kernel_is_charged_once_and_what_has_no_bytes_is_no_region():
    x = meta(100)
    (cost,) = costs_in(lambda: x + x)
    assert [region.nbytes for region in cost.reads] == [400]
    (cost,) = costs_in(lambda: torch.addcmul(x, x[:50].repeat(2)[:100], x[:1].expand(100)))[-1:]
    assert [region.nbytes for region in cost.reads] == [400, 400]


LONG = 2**17  # elements of a row that no registers hold


@pytest.mark.parametrize(
    ("reduced", "written", "is_inner", "reads"),
    [
        (1, 40, True, None),  # nothing is reduced
        (64, 40 * 64, False, None),  # a walk across rows that one pass does
        (65, 40 * 65, False, (40 * 65, 0)),
        (1024, 40 * 1024, True, (0, 1)),
        (LONG, 40, True, (0, 1)),  # it writes one number a row: one pass
        (LONG, 40, False, None),
        (LONG, 40 * LONG, True, (40 * LONG, 2)),
        (LONG, 20 * LONG, True, (40 * LONG, 2)),
        (LONG, 20 * LONG - 1, True, (0, 1)),
        (LONG, 40 * LONG, False, (40 * LONG, 0)),
    ],
)
def test_rows_that_are_too_long_for_registers_are_read_again_for_a_result_of_their_size(
    reduced, written, is_inner, reads
):
    """Ten rows of fp32. Each pass of a walk along rows has as many accesses; of one across them nothing is known."""
    walk = walk_of(10, reduced, 40 * reduced, written, is_inner=is_inner)
    assert walk_of(0, reduced, 0, 0, is_inner=is_inner) == ()
    if reads is None:
        assert walk == ()
        return
    nbytes, passes = reads
    (row,) = walk
    (once,) = walk_of(10, reduced, 40 * reduced, 0, is_inner=True)
    assert (row.nbytes, row.rows, row.row_bytes) == (nbytes, 10, 4 * reduced)
    assert row.accesses == passes * once.accesses
    assert once.accesses * once.threads <= reduced
