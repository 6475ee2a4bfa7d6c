"""Index arithmetic of element-wise kernels, against TensorIterator's rules by hand.

A dimension that is left once neighbouring ones are merged: a comparison, a division in four instructions and a
multiply-add for each operand. An operand: an address in two. To load and store one by one what others do four at a
time: eight more. Outputs are operands; of an op in place, the tensor is
one twice.
"""

import pytest
import torch
from costs_support import calls_of, costs_in, meta
from hypothesis import given
from hypothesis import strategies as st

from flopmeter import FlopMeter
from flopmeter.costs import costs_of
from flopmeter.records import VectorWork

aten = torch.ops.aten
T = meta


def operations_of(program) -> int:
    work = costs_in(program)[-1].work
    return work.index_operations if isinstance(work, VectorWork) else 0


def per_element(dimensions: int, operands: int) -> int:
    return dimensions * (1 + 4 + operands) + 2 * operands + 8


def transposed(*shape: int) -> torch.Tensor:
    """[batch, tokens, heads, features] in memory, [batch, heads, tokens, features] to the eye."""
    batch, heads, tokens, features = shape
    return T(batch, tokens, heads, features).transpose(1, 2)


WALKS = {
    "two matrices": (lambda: T(4, 6) + T(4, 6), 0),
    "two matrices, both transposed": (lambda: T(6, 4).t() + T(6, 4).t(), 0),
    "a matrix and a number of the host": (lambda: T(4, 6) * 2.0, 0),
    "a copy": (lambda: T(4, 6).clone(), 0),
    "a cast": (lambda: T(4, 6).to(torch.bfloat16), 0),
    "a cast that asks for the type of each element": (lambda: T(4, 6).to(torch.float64), 24 * 40),
    "a matrix and a row": (lambda: T(4, 6) + T(6), 24 * per_element(2, 3)),
    "a matrix and a column": (lambda: T(4, 6) + T(4, 1), 24 * per_element(2, 3)),
    "a row onto a matrix": (lambda: aten.add_(T(4, 6), T(6)), 24 * per_element(2, 3)),
    "a matrix and a number of the device": (lambda: T(4, 6) + T(1), 24 * per_element(1, 3)),
    "scores and a causal mask": (lambda: T(2, 3, 5, 5) + T(1, 1, 5, 5), 150 * per_element(2, 3)),
    "scores and the mask of a batch": (lambda: T(2, 3, 5, 5) + T(2, 1, 5, 5), 150 * per_element(3, 3)),
    "heads and rotary cosines": (lambda: transposed(2, 3, 5, 8) * T(1, 1, 5, 8), 240 * per_element(4, 3)),
    "heads into one row": (lambda: transposed(2, 3, 5, 8).contiguous(), 240 * per_element(4, 2)),
    "the first half of each row": (lambda: T(4, 6)[:, :3].neg(), 12 * per_element(2, 2)),
    "every other row": (lambda: T(4, 6)[::2] * 2.0, 12 * per_element(2, 2)),
    "a mask that fills": (lambda: T(4, 6).masked_fill_(T(6, dtype=torch.bool), 0.0), 24 * per_element(2, 3)),
    "a choice": (lambda: torch.where(T(6, dtype=torch.bool), T(4, 6), T(4, 6)), 24 * per_element(2, 4)),
    "a matrix product": (lambda: T(4, 6) @ T(6, 4), 0),
}


@pytest.mark.parametrize("name", WALKS)
def test_each_element_is_looked_up_in_the_dimensions_that_cannot_be_merged(name):
    program, operations = WALKS[name]
    assert operations_of(program) == operations


def test_the_bias_of_a_convolution_is_looked_up_by_channel():
    convolution = lambda: aten.convolution(  # noqa: E731
        T(2, 3, 8, 8), T(4, 3, 1, 1), T(4), [1, 1], [0, 0], [1, 1], False, [0, 0], 1
    )
    product, bias = costs_in(convolution)
    assert not isinstance(product.work, VectorWork)  # nothing that computes indices
    assert bias.work.index_operations == 2 * 4 * 64 * per_element(3, 3)


HALF = torch.float16
# Blocks take 512 neighbours of the output where these have two bytes, 256 where they have four, in warps of 32. Below:
# blocks, what a block looks up and asks for, and the lines that it would, if neighbours were neighbours everywhere.
SCATTERED = {
    # 64 channels lie 128 bytes apart: each of 512 positions of one channel is in a line of its own.
    "an image into planes": (
        lambda: T(2, 64, 64, 64, dtype=HALF).to(memory_format=torch.channels_last).contiguous(), 1024, 512, 512, 16
    ),
    # 8 positions of each of 64 channels, 16 bytes at a time: they are looked up anew, but the first brings them all.
    "planes into an image": (
        lambda: T(2, 64, 64, 64, dtype=HALF).contiguous(memory_format=torch.channels_last), 1024, 512, 64, 16
    ),
    # Eight planes of 64 positions, four of which are in one line; all channels of a position are in one sector.
    "a small image into planes": (
        lambda: T(512, 16, 8, 8, dtype=HALF).to(memory_format=torch.channels_last).contiguous(), 1024, 128, 16, 16
    ),
    # Ten planes of 49 positions and a part of another one: a warp's 32 lie in eight to ten lines, 148 in all.
    "a smaller image into planes": (
        lambda: T(512, 16, 7, 7, dtype=HALF).to(memory_format=torch.channels_last).contiguous(), 784, 148, 16, 16
    ),
    "a matrix, transposed": (lambda: T(1024, 1024).t().contiguous(), 4096, 256, 256, 8),
    "a sum with a matrix that is transposed": (lambda: T(1024, 1024) + T(1024, 1024).t(), 4096, 256, 256, 8),
    # Of an operand in channels-last only: the other one lies as its shape says.
    "two images joined": (
        lambda: torch.cat((T(2, 64, 64, 64).to(memory_format=torch.channels_last), T(2, 8, 64, 64)), 1),
        2048, 256, 256, 8,
    ),
    "a transposed factor and a row": (
        lambda: torch.addcmul(T(1024, 1024), T(1024, 1024).t(), T(1024)), 4096, 256, 256, 8
    ),
    "two transposed factors": (
        lambda: torch.addcmul(T(1024, 1024), T(1024, 1024).t(), T(1024, 1024).t()), 4096, 512, 512, 16
    ),
    "a column of 300": (lambda: T(300, 64)[:, 0] * T(300), 2, 256, 256, 8),
    "heads into one row": (lambda: transposed(2, 16, 128, 64).contiguous(), 0, 0, 0, 0),
    "both transposed": (lambda: T(1024, 1024).t() * T(1024, 1024).t(), 0, 0, 0, 0),
    "a row and a matrix": (lambda: T(1024, 1024) * T(1024), 0, 0, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", SCATTERED)
def test_neighbours_that_lie_far_apart_are_looked_up_one_by_one(name):
    program, blocks, looked_up, asked_for, of_neighbours = SCATTERED[name]
    scatter = costs_in(program)[-1].work.scatter
    assert scatter.lookups == blocks * (looked_up - of_neighbours)
    assert scatter.requests == blocks * (asked_for - of_neighbours)


# From validation/traces (kernels_conv, kernels_norm; torch 2.11): microseconds of `.contiguous()` from NCHW to NHWC.
TO_CHANNELS_LAST = [
    ("h100-sxm5-80gb", (256, 64, 56, 56), torch.bfloat16, 228.0),  # what a block touches stays in its SM's cache
    ("h100-sxm5-80gb", (256, 64, 56, 56), torch.float32, 269.7),
    ("h200-sxm-141gb", (128, 144, 56, 56), torch.bfloat16, 278.1),
    ("h200-sxm-141gb", (128, 144, 56, 56), torch.float32, 358.7),
    ("h100-sxm5-80gb", (256, 256, 56, 56), torch.bfloat16, 1399.5),  # it does not: most sectors come again
    ("h100-sxm5-80gb", (256, 256, 56, 56), torch.float32, 1617.3),
    ("h100-sxm5-80gb", (256, 1024, 14, 14), torch.float32, 407.4),
]


@pytest.mark.parametrize(("device", "shape", "dtype", "microseconds"), TO_CHANNELS_LAST)
def test_images_turned_into_channels_last_take_what_an_h100_took(device, shape, dtype, microseconds):
    with FlopMeter(device, clocks="burst") as meter:
        T(*shape, dtype=dtype).contiguous(memory_format=torch.channels_last)
    assert meter.report().kernel_seconds == pytest.approx(microseconds * 1e-6, rel=0.13)


def test_a_copy_across_memory_is_slower_than_one_of_whole_rows_as_in_a_trace_of_an_mi300x():
    """A TimeSformer in bf16 turns keys of 8 x 12 x 3,137 x 64 around in 159 µs, and moves whole heads of as many in
    29 µs (AMD-AGI/TraceLens, a trace of torch.profiler)."""
    keys = T(8, 3137, 3, 12, 64, dtype=torch.bfloat16)[:, :, 1]
    across, whole = (FlopMeter("mi300x") for _ in range(2))
    with across:
        keys.permute(0, 2, 3, 1).contiguous()
    with whole:
        keys.permute(0, 2, 1, 3).contiguous()
    assert across.report().kernel_seconds == pytest.approx(159e-6, rel=0.15)
    assert whole.report().kernel_seconds == pytest.approx(29e-6, rel=0.3)


CATS = {
    "of rows of 16 bytes": (lambda: torch.cat([T(4, 8), T(4, 4)], 1), 0),
    "of rows of 24 bytes": (lambda: torch.cat([T(4, 6), T(4, 6)], 1), 2 * 24 * (9 + 4)),
    "of matrices, one below the other": (lambda: torch.cat([T(4, 6), T(4, 6)]), 0),
    "of images, channels last": (
        lambda: torch.cat([T(2, 4, 4, 4).to(memory_format=torch.channels_last) for _ in range(2)], 1),
        2 * 128 * (3 * 9 + 4),
    ),
    "of a matrix and a part of one": (
        lambda: torch.cat([T(4, 6), T(4, 8)[:, :6]]), 2 * 24 * (2 * 9 + 4)
    ),
    "of three parts": (lambda: torch.cat([T(4, 8)[:, :6] for _ in range(3)]), 3 * 24 * (2 * 9 + 4)),
    "of halves, turned by a rotary embedding": (
        lambda: torch.cat([T(2, 3, 5, 4), T(2, 3, 5, 8)[..., :4]], -1), 2 * 120 * (2 * 3 * 9 + 4)
    ),
    "of rows that are stacked": (lambda: torch.stack([T(4, 8), T(4, 8)]), 0),
    "of columns that are stacked": (lambda: torch.stack([T(4, 8), T(4, 8)], -1), 2 * 32 * (2 * 9 + 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", CATS)
def test_cat_divides_for_each_element_unless_its_rows_are_whole_loads(name):
    """A division in 7 instructions, remainder and step, for each dimension but the slowest: of where an element goes,
    and of where it comes from if an input has gaps. Two addresses in two."""
    program, operations = CATS[name]
    assert operations_of(program) == operations


def in_channels_last(*shape):
    return T(*shape).to(memory_format=torch.channels_last)


COPIED_ONE_BY_ONE = {
    "of five dimensions": (lambda: torch.cat([T(2, 2, 2, 2, 8), T(2, 2, 2, 2, 8)], -1), 2),
    "of columns of four dimensions, stacked": (lambda: torch.stack([T(2, 2, 2, 8) for _ in range(3)], -1), 3),
    "of two types": (lambda: torch.cat([T(4, 8), T(4, 8, dtype=torch.float16)]), 2),
    "of channels of images, channels last": (lambda: torch.cat(in_channels_last(2, 8, 4, 4).chunk(2, 1), 1), 2),
    "of one": (lambda: torch.cat([T(4, 8)]), 1),
}  # fmt: skip


@pytest.mark.parametrize("name", COPIED_ONE_BY_ONE)
def test_what_no_kernel_of_cat_takes_is_copied_one_input_after_another(name):
    """As `cat_out_cuda` in aten/src/ATen/native/cuda/Shape.cu."""
    program, copies = COPIED_ONE_BY_ONE[name]
    costs = costs_of(calls_of(program)[-1])
    (out,) = calls_of(program)[-1].outputs
    assert len(costs) == copies
    assert sum(cost.bytes_written for cost in costs) == out.nbytes


sizes = st.lists(st.integers(2, 5), min_size=1, max_size=4)


@given(sizes, st.integers(2, 4), st.data())
def test_splitting_a_dimension_of_all_operands_changes_nothing(shape, parts, data):
    rest = [size if data.draw(st.booleans()) else 1 for size in shape]
    repeated = data.draw(st.booleans())
    first, joined = ([1, 1], [1]) if repeated else ([parts, 3], [parts * 3])
    split = operations_of(lambda: T(parts, 3, *shape) + T(*first, *rest))
    assert split == operations_of(lambda: T(parts * 3, *shape) + T(*joined, *rest))


@given(sizes, st.data())
def test_the_order_of_the_dimensions_does_not_matter_where_all_operands_have_the_same(shape, data):
    row = [size if data.draw(st.booleans()) else 1 for size in shape]
    order = data.draw(st.permutations(range(len(shape))))
    plain = operations_of(lambda: T(*shape) + T(*row))
    assert operations_of(lambda: T(*shape).permute(order) + T(*row).permute(order)) == plain
