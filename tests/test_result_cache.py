"""Results made again without the op: nobody can tell them from those of the op."""

import random

import pytest
import torch
import torch.nn.functional as F
from op_samples import inputs_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.common_methods_invocations import (
    foreach_binary_op_db,
    foreach_other_op_db,
    foreach_pointwise_op_db,
    foreach_unary_op_db,
    op_db,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from flopmeter import FlopMeter
from flopmeter.trace.recorder import Recorder

SAMPLE = random.Random(0).sample(range(len(op_db)), 120)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def geometry(tree, inputs=()):
    """All that can be seen of tensors on meta; storages by the first leaf that has them."""
    leaves = [*tree_leaves(inputs), *tree_leaves(tree)]
    storages = {}
    described = []
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            first = storages.setdefault(storage._cdata, place)
            flags = (leaf.requires_grad, leaf.is_conj(), leaf.is_neg(), leaf.is_inference(), type(leaf))
            layout = (leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device)
            described.append((layout, flags, first, storage.nbytes(), leaf._version))
        else:
            described.append(type(leaf))
    return described


def on_meta(x):
    return x.detach().to("meta").requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def call(op, sample):
    """The op on meta twins of the sample's tensors, then a backward pass where there is one."""
    sample = sample.transform(on_meta)
    inputs = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, Tensor)]
    result = op(sample.input, *sample.args, **sample.kwargs)
    outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.requires_grad]
    gradients = ()
    if outputs and op.supports_autograd:
        leaves = [x for x in inputs if x.requires_grad]
        gradients = torch.autograd.grad(outputs, leaves, [torch.empty_like(x) for x in outputs], allow_unused=True)
    return geometry((result, gradients), inputs)


def disagreements(op, samples=2):
    """Samples on which the second call inside of a recorder differs from a call outside."""
    found = []
    drawn = inputs_of(op, requires_grad=op.supports_autograd)
    for _, sample in zip(range(samples), drawn, strict=False):
        try:
            outside = call(op, sample)
        except Exception:  # torch cannot run it on meta
            continue
        with Recorder():
            first, second = call(op, sample), call(op, sample)
        if first != second or unversioned(first) != unversioned(outside):
            found.append(sample)
    return found


def unversioned(described):
    """Without the version counters: torch.zeros writes once in torch 2.15; under any dispatch mode neither it nor a
    foreach op does."""
    return [item[:-1] if isinstance(item, tuple) else item for item in described]


@pytest.mark.parametrize("op", [op_db[place] for place in SAMPLE], ids=lambda op: op.formatted_name)
def test_a_call_made_again_returns_what_it_returns_outside(op):
    if torch.float32 in op.dtypes:
        assert disagreements(op) == []


@pytest.mark.slow
@pytest.mark.parametrize("op", op_db, ids=lambda op: op.formatted_name)
def test_every_op_made_again_returns_what_it_returns_outside(op):
    if torch.float32 in op.dtypes:
        assert disagreements(op, samples=6) == []


def test_repeated_ops_on_meta_skip_their_kernels():
    calls = 0

    def gelu(x, approximate="none"):
        nonlocal calls
        calls += 1
        return torch.empty_like(x)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("gelu", gelu, "Meta", allow_override=True)
        x = torch.empty(4, device="meta")
        with Recorder() as recorder:
            for _ in range(3):
                F.gelu(x)
            F.gelu(x[:2])
    assert calls == 2
    assert len({op.outputs[0].storage for op in recorder.trace.ops if op.call.name == "gelu"}) == 4


def test_an_op_in_place_returns_its_argument_each_time():
    with Recorder():
        for _ in range(3):
            x = torch.empty(4, device="meta")
            version = x._version
            assert x.mul_(2) is x
            assert x._version == version + 1


def test_tensors_on_the_cpu_are_computed_each_time():
    x = torch.zeros(3)
    with Recorder():
        for _ in range(3):
            x.add_(1)
            y = x + 1
    assert y.tolist() == [4, 4, 4]


def test_the_default_dtype_of_the_moment_counts():
    n = torch.empty(3, dtype=torch.int64, device="meta")
    with Recorder() as recorder:
        first = n / n
        try:
            torch.set_default_dtype(torch.float64)
            second = n / n
        finally:
            torch.set_default_dtype(torch.float32)
    assert (first.dtype, second.dtype) == (torch.float32, torch.float64)
    assert [op.outputs[0].dtype for op in recorder.trace.ops] == [torch.float32, torch.float64]


def test_modes_around_the_meter_see_every_op():
    x = torch.empty(4, device="meta")
    with Names() as names, FlopMeter(as_cuda=False):
        for _ in range(3):
            x = x.sin() * 2
    assert names.names == ["sin", "mul"] * 3


def test_fake_tensors_stay_fake():
    with FakeTensorMode(), FlopMeter():
        x = torch.empty(4, device="meta")
        assert all(type(x.sin()) is FakeTensor for _ in range(3))


def test_views_are_of_the_storage_that_they_are_passed():
    x = torch.empty(4, 4, device="meta")
    with Recorder():
        for _ in range(3):
            assert x.t().untyped_storage()._cdata == x.untyped_storage()._cdata
            assert torch.ops.aten._unsafe_view(x, [16]).untyped_storage()._cdata == x.untyped_storage()._cdata


def test_transforms_get_results_that_they_can_wrap():
    weight, x = torch.empty(4, 4, device="meta"), torch.empty(5, 4, device="meta")
    gradient = torch.func.vmap(torch.func.grad(lambda row: (weight @ row).tanh().sum()))
    with Recorder():
        assert {gradient(x).shape for _ in range(3)} == {(5, 4)}


def test_a_meter_inside_of_a_transform_does_no_harm():
    def metered(row):
        with Recorder():
            return [row.sin() * 2 for _ in range(3)][-1]

    assert torch.vmap(metered)(torch.empty(5, 4, device="meta")).shape == (5, 4)


FOREACH = (*foreach_unary_op_db, *foreach_binary_op_db, *foreach_pointwise_op_db, *foreach_other_op_db)


@pytest.mark.parametrize("op", FOREACH, ids=lambda op: op.name)
def test_a_foreach_op_on_lists_of_mixed_shapes_returns_what_it_returns_outside(op):
    """Each sample's lists are doubled, so that every geometry comes twice."""
    checked = 0
    for sample in inputs_of(op):
        args = [arg + arg if isinstance(arg, list) else arg for arg in (sample.input, *sample.args)]
        for function in filter(None, (op.method_variant, op.inplace_variant)):
            outside, inside = (tree_map(fresh_on_meta, args) for _ in range(2))
            try:
                expected = function(*outside, **sample.kwargs)
            except Exception:  # torch cannot run it on meta
                continue
            with Recorder():
                result = function(*inside, **sample.kwargs)
            assert unversioned(geometry(result, inside)) == unversioned(geometry(expected, outside))
            checked += 1
    assert checked


def fresh_on_meta(x):
    return torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x


def test_a_foreach_op_runs_once_for_each_geometry():
    calls = []

    def sqrt(x):
        calls.append(tuple(x.shape))
        return torch.empty_like(x)

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("sqrt", sqrt, "Meta", allow_override=True)
        with Recorder() as recorder:
            roots = torch._foreach_sqrt([torch.empty(size, device="meta") for size in (3, 4, 3, 4, 4)])
    assert calls == [(3,), (4,)]
    assert [root.numel() for root in roots] == [3, 4, 3, 4, 4]
    assert len({output.storage for output in recorder.trace.ops[-1].call.outputs}) == 5


def test_a_shape_that_does_not_fit_is_an_error_at_every_place_of_a_foreach_op():
    lists = [[torch.empty(size, device="meta") for size in sizes] for sizes in ((3, 4, 4), (3, 4, 5))]
    with Recorder(), pytest.raises(RuntimeError, match="broadcastable"):
        torch._foreach_add_(*lists)
    with Recorder(), pytest.raises(RuntimeError, match="same"):
        torch._foreach_add_(lists[0], lists[1][:2])
