"""What an op reads and writes, by experiment on ops that torch's own database runs: one element is changed at a time.

An element matters if another value of it changes what the op returns or leaves behind. Then it was read. A tensor none
of whose elements matters to any value that was tried was not.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from costs_support import ops_of, run_sample
from op_samples import inputs_of
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from flopmeter.costs import costs_of
from flopmeter.costs.traffic import is_view
from flopmeter.records import Call, Region

pytestmark = pytest.mark.filterwarnings("ignore")  # the database uses deprecated forms on purpose

MOST_ELEMENTS = 60  # of all tensors of a call, each of which is changed
SAMPLES = 3  # of an entry of the database
ENTRIES = {
    ".".join(filter(None, (each.name, each.variant_test_name))): each
    for each in op_db
    if torch.float32 in each.dtypes and "sparse" not in each.name and "jiterator" not in each.name
}
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Small(TorchDispatchMode):
    """Keeps a call of each op that computes on few numbers, and on nothing random."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, Arguments] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        is_computed = not is_view(func) and torch.Tag.nondeterministic_seeded not in func.tags
        if is_computed and 1 < sum(tensor.numel() for tensor in tensors_in(given)) <= MOST_ELEMENTS:
            self.calls.setdefault(func, copied(given))
        return func(*args, **given[1])


def is_plain(leaf: Any) -> bool:
    return not isinstance(leaf, Tensor) or leaf.layout is torch.strided


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def copied(given: Arguments) -> Arguments:
    def copy(leaf: Any) -> Any:
        return leaf.detach().clone(memory_format=torch.contiguous_format) if isinstance(leaf, Tensor) else leaf

    return tree_map(copy, given)


def calls_of_entry(entry: Any) -> dict[Any, Arguments]:
    torch.manual_seed(0)
    small = Small()
    samples = inputs_of(entry, requires_grad=entry.supports_autograd)
    for sample in itertools.islice(samples, SAMPLES):
        with small:
            run_sample(entry, sample, entry.supports_autograd)
    return small.calls


def others(tensors: list[Tensor], position: int, element: int) -> Iterator[Any]:
    """Values for an element: of integers those that are there already, since they may be places in something."""
    own = tensors[position].flatten()
    value = own[element]
    if own.dtype is torch.bool:
        yield ~value
    elif not own.dtype.is_floating_point:
        yield from (own[(element + 1) % len(own)], torch.zeros_like(value))
    else:
        beside = [
            each.flatten()[element % each.numel()] for each in tensors if each.dtype == own.dtype and each.numel()
        ]
        yield from (value + 1, torch.zeros_like(value), value - 100, value + 100, -value, *beside)


def outcome(func: Any, given: Arguments) -> list[Any] | None:
    """What is returned, and what became of the arguments; None where the op refuses them."""
    try:
        return tree_leaves((func(*given[0], **given[1]), tensors_in(given)))
    except (RuntimeError, IndexError):
        return None


def same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def matters(func: Any, given: Arguments, plain: list[Any], position: int, element: int) -> bool:
    place = position - len(tensors_in(given))
    is_written = not same(plain[place].view(-1)[element], tensors_in(given)[position].view(-1)[element])
    for value in others(tensors_in(given), position, element):
        changed = copied(given)
        flat = tensors_in(changed)[position].view(-1)
        before, flat[element] = flat[element].clone(), value
        found = outcome(func, changed)
        if found is None:
            return True
        if not is_written and same(flat[element], value):
            flat[element] = before  # it just stayed
        if not all(map(same, plain, found)):
            return True
    return False


def bytes_of(regions: Iterable[Region]) -> dict[int, int]:
    """By the number of the storage."""
    found = defaultdict[int, int](int)
    for region in regions:
        if region.spec is not None:
            found[region.spec.storage] += region.nbytes
    return found


def call_of(func: Any, given: Arguments) -> Call:
    return ops_of(lambda: func(*given[0], **given[1]))[-1].call


def bytes_read(call: Call) -> list[int]:
    """Of each tensor among the arguments."""
    found = bytes_of(region for cost in costs_of(call) for region in cost.reads)
    return [found[spec.storage] for spec in call.inputs]


# Metadata alone.
FREE = {
    "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "unsafe_split", "transpose_", "unsqueeze_",
}  # fmt: skip


# Of these more is read than is seen to matter in any sample.
MORE = {
    # several kernels or passes
    "_safe_softmax", "logsumexp", "binary_cross_entropy_with_logits", "convolution_backward", "_fft_c2c",
    "_linear_cross_entropy_batch_chunked", "_linear_cross_entropy_batch_chunked_no_reduction", "_trilinear",
    "soft_margin_loss_backward",
    "nonzero",  # counts before it looks for places
    "addmm",  # with out=: what is added is copied there, and read again
    # what lies in the other half of a matrix is multiplied by zero, or comes twice
    "cholesky", "_linalg_eigh", "linalg_cholesky_ex", "linalg_householder_product", "linalg_ldl_factor_ex",
    "linalg_ldl_solve", "linalg_matrix_sqrth", "linalg_solve_triangular", "ormqr",
    # values decide, or there is one place only: masks, bounds, comparisons
    "_pdist_backward", "_segment_reduce_backward", "_embedding_bag_backward", "_linalg_check_errors", "bucketize",
    "bitwise_and", "bitwise_and_", "bitwise_or_", "grid_sampler_3d", "grid_sampler_3d_backward", "hardshrink_backward",
    "hardsigmoid_backward", "hardtanh_backward", "heaviside", "igamma", "igammac", "isnan", "lerp_", "logical_and_",
    "logical_or", "logical_or_", "mul_", "nll_loss2d_backward", "nll_loss2d_forward", "relu_", "remainder",
    "rrelu_with_noise_backward", "special_zeta", "threshold_backward",
    # copied as a whole first, and part of it overwritten
    "as_strided_scatter", "diagonal_scatter",
    # gradients that do not depend on what is given to them: the bias, the running statistics
    "native_layer_norm_backward", "batch_norm_backward",
}  # fmt: skip
if "nn.functional.linear_cross_entropy" not in ENTRIES:  # before torch 2.13; in its samples alone each target matters
    MORE |= {"gather", "nll_loss_forward", "nll_loss_backward"}
MORE_BY_NAME = re.compile(
    r"_?(unsafe_)?(masked|index|scatter|histogramdd|multi(label)?_margin|special_.*polynomial)_?.*"
)


@functools.cache
def experiments(name: str) -> list[tuple[str, int, int, int]]:
    """Of each tensor of each call of an entry: the op, its place, the bytes that are read and those that matter."""
    found = []
    for func, given in calls_of_entry(ENTRIES[name]).items():
        plain = outcome(func, copied(given))
        if func.overloadpacket.__name__ in FREE or plain is None or not all(map(is_plain, plain)):
            continue
        read = bytes_read(call_of(func, copied(given)))
        for position, tensor in enumerate(tensors_in(given)):
            needed = sum(matters(func, given, plain, position, element) for element in range(tensor.numel()))
            found.append((str(func), position, read[position], needed * tensor.itemsize))
    return found


@pytest.mark.parametrize("name", ENTRIES)
def test_an_op_reads_every_element_that_changes_its_result(name):
    assert [row for row in experiments(name) if row[2] < row[3]] == []


def test_an_op_reads_no_more_than_changes_its_result_in_some_sample():
    most = defaultdict[tuple[str, int], float](float)
    for name in ENTRIES:
        for op, position, read, needed in experiments(name):
            most[op, position] = max(most[op, position], needed / read if read else 1.0)
    assert len(most) > 650
    more = {op.split(".")[1] for (op, _), share in most.items() if share < 1}
    assert {op for op in more - MORE if MORE_BY_NAME.fullmatch(op) is None} == set()


ZEROS_FIRST = {"embedding_dense_backward", "_embedding_bag_backward"}  # in one kernel, and then what is not zero


@pytest.mark.parametrize("name", ENTRIES)
def test_an_op_writes_each_new_tensor_and_in_one_kernel_once(name):
    for func, given in calls_of_entry(ENTRIES[name]).items():
        call = call_of(func, copied(given))
        costs, old = costs_of(call), {spec.storage for spec in call.inputs}
        written = bytes_of(region for cost in costs for region in cost.writes)
        for spec in call.outputs:
            if spec.storage not in old and call.name not in FREE:
                assert written[spec.storage] >= spec.nbytes, func
                assert written[spec.storage] == spec.nbytes or len(costs) > 1 or call.name in ZEROS_FIRST, func
