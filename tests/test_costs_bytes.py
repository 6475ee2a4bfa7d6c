"""Touched bytes by experiment: change one element of a storage at a time and see what becomes different.

An element was read if changing it changes anything but itself. It was written if the program leaves another
value there. What the program allocates and returns was written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from costs_support import costs_in
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flopmeter.records import Region


def counting(*shape: int) -> Tensor:
    """Distinct positive numbers, none of them 1."""
    size = torch.Size(shape).numel()
    return (torch.arange(size, dtype=torch.float32) * 0.37 + 2).reshape(shape)


Program = Callable[..., Any]
I = torch.tensor  # noqa: E741

# What it does to which tensors; each is one kernel beside its views.
READS_AND_WRITES: dict[str, tuple[Program, Sequence[Tensor]]] = {
    "a view": (lambda x: x[1:3].t(), [counting(4, 6)]),
    "a slice, copied": (lambda x: x[1:3].clone(), [counting(4, 6)]),
    "columns, copied": (lambda x: x[:, ::2].contiguous(), [counting(4, 6)]),
    "a select, copied": (lambda x: x[2].clone(), [counting(4, 6)]),
    "a transpose, copied": (lambda x: x.t().contiguous(), [counting(4, 6)]),
    "a diagonal, copied": (lambda x: x.diagonal().clone(), [counting(4, 6)]),
    "overlapping windows, copied": (lambda x: x.unfold(0, 3, 1).clone(), [counting(8)]),
    "an expanded tensor, copied": (lambda x: x.expand(5, 6).clone(), [counting(6)]),
    "a cast": (lambda x: x.to(torch.float64), [counting(6)]),
    "an op on a slice": (lambda x: x[1:3] * 2, [counting(4, 6)]),
    "a tensor times itself": (lambda x: x * x, [counting(6)]),
    "a sum of two": (lambda x, y: x + y, [counting(6), counting(6)]),
    "a broadcast sum": (lambda x, y: x + y, [counting(4, 6), counting(6)]),
    "an expanded sum": (lambda x, y: x + y.expand(4, 6), [counting(4, 6), counting(1, 6)]),
    "in place": (lambda x: x.mul_(2), [counting(6)]),
    "in place on a slice": (lambda x: x[1:3].mul_(2), [counting(4, 6)]),
    "in place from another": (lambda x, y: x.add_(y), [counting(4, 6), counting(6)]),
    "fill_": (lambda x: x.fill_(0), [counting(6)]),
    "zero_ of a slice": (lambda x: x[1:3].zero_(), [counting(4, 6)]),
    "copy_": (lambda x, y: x.copy_(y), [counting(6), counting(6) * 3]),
    "a cache written at one position, by slice": (
        lambda cache, k: cache[:, :, 2:3].copy_(k), [counting(2, 2, 5, 3), counting(2, 2, 1, 3) * 3]
    ),
    "a cache written at one position, by index": (
        lambda cache, i, k: torch.ops.aten.index_put_(cache, [None, None, i], k),
        [counting(2, 2, 5, 3), I([2]), counting(2, 2, 1, 3) * 3],
    ),
    "a cache written at one position, by index_copy_": (
        lambda cache, i, k: cache.index_copy_(2, i, k), [counting(2, 2, 5, 3), I([2]), counting(2, 2, 1, 3) * 3]
    ),
    "cat": (lambda x, y: torch.cat([x, y]), [counting(4, 6), counting(2, 6)]),
    "cat of a slice": (lambda x, y: torch.cat([x[:2], y]), [counting(4, 6), counting(2, 6)]),
    "stack": (lambda x, y: torch.stack([x, y]), [counting(6), counting(6)]),
    "repeat": (lambda x: x.repeat(3, 1), [counting(6)]),
    "roll": (lambda x: x.roll(2), [counting(6)]),
    "flip": (lambda x: x.flip(0), [counting(6)]),
    "embedding": (lambda table, i: F.embedding(i, table), [counting(9, 3), I([1, 4])]),
    "gather": (lambda x, i: x.gather(1, i), [counting(4, 6), I([[0, 3], [1, 2], [1, 4], [2, 0]])]),
    "index_select": (lambda x, i: x.index_select(0, i), [counting(9, 3), I([1, 4])]),
    "advanced indexing": (lambda x, i: x[i], [counting(9, 3), I([1, 4])]),
    "advanced indexing of columns": (lambda x, i: x[:, i], [counting(3, 9), I([1, 4])]),
    "take": (lambda x, i: x.take(i), [counting(4, 6), I([3, 17])]),
    "index_put_": (lambda x, i, y: x.index_put_([i], y), [counting(9, 3), I([1, 4]), counting(2, 3) * 3]),
    "index_put_, broadcast": (lambda x, i, y: x.index_put_([i], y), [counting(9, 3), I([1, 4]), counting(3) * 3]),
    "index_put_, adding": (
        lambda x, i, y: torch._index_put_impl_(x, [i], y, True, True), [counting(9, 3), I([1, 4]), counting(2, 3)]
    ),  # without the checks, which read the places twice more
    "index_add_": (lambda x, i, y: x.index_add_(0, i, y), [counting(9, 3), I([1, 4]), counting(2, 3)]),
    "index_fill_": (lambda x, i: x.index_fill_(0, i, 0.0), [counting(9, 3), I([1, 4])]),
    "scatter_": (lambda x, i, y: x.scatter_(0, i, y), [counting(9, 3), I([[1, 4, 2]]), counting(1, 3) * 3]),
    "scatter_add_": (lambda x, i, y: x.scatter_add_(0, i, y), [counting(9, 3), I([[1, 4, 2]]), counting(1, 3)]),
    "scatter_, from a larger source": (
        lambda x, i, y: x.scatter_(0, i, y), [counting(9, 3), I([[1, 4]]), counting(3, 3) * 3]
    ),
    "trace": (lambda x: x.trace(), [counting(4, 4)]),
    "a product": (lambda x, y: x @ y, [counting(4, 6), counting(6, 2)]),
    "a product of a transpose": (lambda x, y: x.t() @ y, [counting(6, 4), counting(6, 2)]),
    "an addmm": (lambda b, x, y: torch.addmm(b, x, y), [counting(2), counting(4, 6), counting(6, 2)]),
    "an addmm, beta 0": (lambda b, x, y: torch.addmm(b, x, y, beta=0), [counting(2), counting(4, 6), counting(6, 2)]),
    "a sum": (lambda x: x.sum(), [counting(4, 6)]),
    "a sum of an expanded tensor": (lambda x: x.expand(5, 6).sum(), [counting(6)]),
    "a running sum": (lambda x: x.cumsum(0), [counting(6)]),
    "softmax": (lambda x: x.softmax(-1), [counting(4, 6) / 5]),
    "a pair of foreach lists": (lambda x, y: torch._foreach_add_([x], [y]), [counting(6), counting(6)]),
    "item": (lambda x: x[2].item(), [counting(6)]),
    "a matrix times its transpose": (lambda x: x @ x.mT, [counting(4, 6)]),
    "a sum of neighbours": (lambda x: x[:-1] + x[1:], [counting(6)]),
    "a sum of neighbours in each row": (lambda x: x[:, :-1] + x[:, 1:], [counting(4, 6)]),
    "even and odd columns": (lambda x: x[:, ::2] * x[:, 1::2], [counting(4, 6)]),
    "a row of the matrix that it is taken from": (lambda x: x - x[:1], [counting(4, 6)]),
    "a matrix and itself as a row": (lambda x: torch.cat([x.view(-1), x[1]]), [counting(4, 6)]),
    "cat of overlapping slices": (lambda x: torch.cat([x[:3], x[1:]]), [counting(4, 6)]),
    "a part, in place from its neighbour": (lambda x: x[:, :2].add_(x[:, 1:3]), [counting(4, 6)]),
    "windows of every other element, copied": (lambda x: x[::2].unfold(0, 3, 1).clone(), [counting(12)]),
    "patches, copied": (lambda x: x.unfold(0, 3, 2).unfold(1, 3, 2).clone(), [counting(7, 7)]),
    "windows with a gap, copied": (lambda x: x.as_strided([4, 3], [2, 3]).clone(), [counting(16)]),
    "a lower triangle": (lambda x: x.tril(), [counting(5, 5)]),
    "an upper triangle above the diagonal": (lambda x: x.triu(1), [counting(2, 4, 6)]),
    "a lower triangle and more, of a tall matrix": (lambda x: x.tril(1), [counting(6, 4)]),
    "an upper triangle far below the diagonal": (lambda x: x.triu(-9), [counting(4, 6)]),
    "a lower triangle in place": (lambda x: x.tril_(-1), [counting(4, 6)]),
    "an upper triangle in place": (lambda x: x.triu_(), [counting(2, 4, 6)]),
    "a point convolution with steps": (
        lambda x, w: F.conv2d(x, w, stride=2), [counting(1, 2, 7, 6), counting(3, 2, 1, 1)]
    ),
    "a convolution with a gap between its windows": (
        lambda x, w: F.conv1d(x, w, stride=5), [counting(1, 2, 21), counting(3, 2, 3)]
    ),
    "a dilated convolution with padding": (
        lambda x, w: F.conv1d(x, w, stride=4, dilation=2, padding=3), [counting(1, 2, 20), counting(3, 2, 3)]
    ),
    "a pooling with a gap between its windows": (
        lambda x: F.max_pool2d(x, 1, 3, return_indices=True), [counting(1, 2, 7, 8)]
    ),
    "an average with a gap between its windows": (lambda x: F.avg_pool2d(x, 2, 3), [counting(1, 2, 8, 8)]),
    "nearest neighbours, fewer": (lambda x: F.interpolate(x, (2, 3)), [counting(1, 2, 7, 8)]),
    "nearest neighbours, more": (lambda x: F.interpolate(x, (9, 8)), [counting(1, 2, 3, 4)]),
    "lines between neighbours, fewer": (
        lambda x: F.interpolate(x, (2, 2), mode="bilinear"), [counting(1, 1, 8, 8)]
    ),
    "patches with a gap, as columns": (lambda x: F.unfold(x, 2, stride=3), [counting(1, 2, 8, 8)]),
}  # fmt: skip


@pytest.mark.parametrize("name", READS_AND_WRITES)
def test_bytes_are_those_that_an_experiment_finds(name):
    program, tensors = READS_AND_WRITES[name]
    arguments = copies(tensors)
    costs = costs_in(lambda: program(*arguments))
    read, written = experiment(program, tensors)
    assert sum(of_tensors(cost.reads) for cost in costs) == read
    assert sum(of_tensors(cost.writes) for cost in costs) == written


def of_tensors(regions: Sequence[Region]) -> int:
    """Bytes of tensors that the program can see, and not of what the kernels of an op hand to one another."""
    return sum(region.nbytes for region in regions if region.spec is None or region.spec.storage >= 0)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def experiment(program: Program, tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Bytes read and written, one run for each element of each tensor."""
    returned, after = run(program, copies(tensors))
    read = 0
    written = fresh_bytes(program, tensors)
    for position, before in enumerate(tensors):
        for element in range(before.numel()):
            changed = copies(tensors)
            flat = changed[position].view(-1)
            flat[element] = flat[element] + 1
            other_value = flat[element].clone()
            other_returned, other_after = run(program, changed)
            was_written = after[position].view(-1)[element] != before.view(-1)[element]
            written += before.itemsize * bool(was_written)
            if not was_written and other_after[position].view(-1)[element] == other_value:
                other_after[position].view(-1)[element] = after[position].view(-1)[element]  # it just stayed
                same_returned = aliases_all(program, tensors) or same(returned, other_returned)
            else:
                same_returned = same(returned, other_returned)
            read += before.itemsize * (not same_returned or not same(after, other_after))
    return read, written


def run(program: Program, tensors: list[Tensor]) -> tuple[list[Any], list[Tensor]]:
    """What it returned, as it stood then, and what became of its arguments."""
    leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in tree_leaves(program(*tensors))]
    return leaves, tensors


def same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(some, others, strict=True))


def aliases_all(program: Program, tensors: Sequence[Tensor]) -> bool:
    """Whether what is returned lies in the arguments: a view, or the result of an in-place op."""
    arguments = copies(tensors)
    storages = {tensor.untyped_storage().data_ptr() for tensor in arguments}
    leaves = tree_leaves(program(*arguments))
    return all(
        isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in storages
        for leaf in leaves
        if leaf is not None
    )


def fresh_bytes(program: Program, tensors: Sequence[Tensor]) -> int:
    """Bytes of what it returned that lie in no argument; a number is copied to the host."""
    arguments = copies(tensors)
    storages = {tensor.untyped_storage().data_ptr() for tensor in arguments}
    total = 0
    for leaf in tree_leaves(program(*arguments)):
        if isinstance(leaf, Tensor):
            total += leaf.nbytes if leaf.untyped_storage().data_ptr() not in storages else 0
        elif leaf is not None:
            total += tensors[0].itemsize
    return total


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation"), [(3, 1, 0, 2), (2, 3, 1, 4), (3, 2, 1, 1), (4, 1, 2, 3), (3, 3, 0, 4)]
)
def test_columns_of_patches_read_the_elements_that_torch_puts_there(kernel, stride, padding, dilation):
    numbered = 1 + torch.arange(121, dtype=torch.float32).view(1, 1, 11, 11)
    columns = F.unfold(numbered, kernel, dilation, padding, stride)
    x = numbered.to("meta")
    (cost,) = costs_in(lambda: F.unfold(x, kernel, dilation, padding, stride))
    assert cost.bytes_read == 4 * len(columns[columns > 0].unique())
    assert cost.bytes_written == 4 * columns.numel()
