"""The parts that fusion is made of: loops of an op (results kept, elements reduced to each, whether a row makes a
result), what may join what, regions in common, and what must come before what."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from costs_support import calls_of, meta

from flopmeter.costs import costs_of, kernels_of
from flopmeter.launch.fusion import fuse
from flopmeter.launch.fusion.dataflow import Touch, _covers, _overlap
from flopmeter.launch.fusion.roles import OPAQUE, Loops, Role, role_of
from flopmeter.launch.fusion.traffic import _common
from flopmeter.trace.recorder import Recorder

aten = torch.ops.aten
T = meta


def role(program):
    call = calls_of(program)[-1]
    return role_of(call, costs_of(call)[-1])


def batch_norm(training):
    return lambda: aten.native_batch_norm(T(2, 3, 4, 4), T(3), T(3), T(3), T(3), training, 0.1, 1e-5)


LOOPS = {
    "softmax of rows": (lambda: aten._softmax(T(4, 6), 1, False), Loops(4, 6, True)),
    "softmax of rows, counted from the end": (lambda: aten._softmax(T(4, 6), -1, False), Loops(4, 6, True)),
    "softmax of columns": (lambda: aten._softmax(T(4, 6), 0, False), Loops(6, 4, False, False)),
    "layer norm": (lambda: aten.native_layer_norm(T(5, 4, 6), [6], None, None, 1e-5), Loops(20, 6, True)),
    "layer norm of matrices": (
        lambda: aten.native_layer_norm(T(5, 4, 6), [4, 6], None, None, 1e-5), Loops(5, 24, True)
    ),
    "group norm": (lambda: aten.native_group_norm(T(5, 4, 6), None, None, 5, 4, 6, 2, 1e-5), Loops(10, 12, True)),
    "batch norm": (batch_norm(True), Loops(3, 32, True)),
    "batch norm in evaluation": (batch_norm(False), None),
    "sum": (lambda: aten.sum(T(4, 6)), Loops(1, 24, True)),
    "sum of rows": (lambda: aten.sum(T(4, 6), [1]), Loops(4, 6, True)),
    "sum of columns": (lambda: aten.sum(T(4, 6), [0]), Loops(6, 4, False, False)),
    "softmax of a transposed tensor's rows": (lambda: aten._softmax(T(4, 6).t(), 1, False), Loops(6, 4, False, False)),
    "sum of outer and inner": (lambda: aten.sum(T(4, 5, 6), [0, 2]), Loops(5, 24, False)),
    "mean of a number": (lambda: aten.mean(T()), Loops(1, 1, True)),
    "argmax": (lambda: aten.argmax(T(4, 6), 1), Loops(4, 6, True)),
    "sine": (lambda: aten.sin(T(4, 6)), None),
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_an_op_has_the_loops_of_its_definition(name):
    program, loops = LOOPS[name]
    assert role(program).loops == loops


ON_ROWS = {
    "batch norm": lambda x: aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5),
    "batch norm in evaluation": lambda x: aten.native_batch_norm(x, None, None, T(6), T(6), False, 0.1, 1e-5),
    "layer norm": lambda x: aten.native_layer_norm(x, [6], None, None, 1e-5),
    "softmax": lambda x: aten._softmax(x, 1, False),
    "sum": lambda x: aten.sum(x, [1]),
    "mean": lambda x: aten.mean(x, [0]),
    "all of it": aten.sum.default,
    "sine": aten.sin.default,
    "loss": lambda x: aten.mse_loss(x, x, 1),
}


@pytest.mark.parametrize("name", ON_ROWS)
def test_rows_that_lie_in_memory_once_are_looped_over_as_often_as_the_tensor_has_them(name):
    dense, repeated = (role(lambda x=x: ON_ROWS[name](x)) for x in (T(8, 6), T(1, 6).expand(8, 6)))
    assert (repeated.loops is None, repeated.elements) == (dense.loops is None, dense.elements)
    if dense.loops is not None:
        assert repeated.loops[:2] == dense.loops[:2]


def test_an_element_wise_op_computes_the_elements_of_its_result():
    assert role(lambda: T(4, 6) + T(6)).elements == 24
    assert role(lambda: aten.add_(T(4, 6), T(6))).elements == 24


@pytest.mark.parametrize(
    "program",
    [
        lambda: aten.mm(T(4, 6), T(6, 5)),
        lambda: aten.randperm(6, device="meta"),
        lambda: aten.median(T(4, 6), 1),
        lambda: aten._foreach_norm([T(6), T(5)], 2),
        lambda: aten._foreach_mul([T(6), T(5)], [2.0, 3.0]),
        lambda: aten.mul(T(6).to(torch.complex64), T(6)),
    ],
)
def test_what_inductor_leaves_to_libraries_and_to_eager_is_opaque(program):
    assert role(program) is OPAQUE


@pytest.mark.parametrize(
    "program",
    [
        lambda: aten._foreach_add([T(6), T(5)], [T(6), T(5)]),
        lambda: aten._foreach_mul_([T(6), T(5)], 2.0),
        lambda: aten._foreach_pow(2.0, [T(6), T(5)]),
        lambda: aten._foreach_lerp_([T(6), T(5)], [T(6), T(5)], [0.1, 0.2]),
    ],
)
def test_element_wise_foreach_ops_fuse_with_those_on_as_many_tensors(program):
    assert role(program) == Role(True, True, elements=11, lists=2)


@pytest.mark.parametrize(
    ("kept", "reduced", "dim", "is_split"),
    [
        (4, 8192, 1, False), (4, 8193, 1, True), (215, 9000, 1, True), (216, 9000, 1, False),
        (6911, 129, 0, True), (6912, 129, 0, False), (512, 128, 0, False),
    ],
)  # fmt: skip
def test_a_long_reduction_to_few_results_is_split(kept, reduced, dim, is_split):
    """`Reduction.num_splits` of inductor, on the 108 SMs of an A100: another kernel adds up the partial results."""
    x = T(kept, reduced) if dim == 1 else T(reduced, kept)
    kernels = fused(lambda: aten.sum(x, [dim]))
    assert len(kernels) == 1 + is_split
    assert kernels[0][1] == x.nbytes
    assert kernels[-1][2] == kept * 4


def test_what_reads_windows_joins_its_readers_alone():
    pooled = role(lambda: aten.max_pool2d_with_indices(T(1, 3, 4, 4), [2, 2]))
    assert (pooled.joins_producers, pooled.joins_consumers) == (False, True)
    plain = role(lambda: aten.sin(T(4)))
    assert (plain.joins_producers, plain.joins_consumers) == (True, True)


# --- regions


def dense(start, stop):
    return Touch(0, start, stop, stop - start, stop - start)


def test_the_bytes_that_two_dense_regions_share_are_those_in_both():
    for a, b in product([(i, j) for i in range(6) for j in range(i + 1, 7)], repeat=2):
        assert _common(dense(*a), dense(*b)) == len(set(range(*a)) & set(range(*b)))


def test_one_dense_region_covers_or_overlaps_another_as_its_bytes_do():
    for a, b in product([(i, j) for i in range(5) for j in range(i + 1, 6)], repeat=2):
        first, second = set(range(*a)), set(range(*b))
        assert _covers(dense(*a), dense(*b)) == (second <= first)
        assert _overlap(dense(*a), dense(*b)) == bool(first & second)


def test_a_region_with_gaps_covers_itself_alone():
    gaps = Touch(0, 10, 20, 6, 6)
    assert _covers(gaps, gaps)
    assert _covers(dense(10, 20), gaps)
    assert not _covers(gaps, dense(12, 14))
    assert not _covers(gaps, Touch(0, 12, 18, 3, 3))


def test_a_dense_region_that_holds_one_with_gaps_shares_all_of_it():
    gaps = Touch(0, 10, 20, 6, 6)
    assert _common(dense(10, 20), gaps) == _common(gaps, dense(5, 25)) == 6
    assert _common(gaps, gaps) == 6
    assert _common(gaps, Touch(0, 12, 22, 6, 6)) == 0  # nobody knows: none
    assert _common(dense(12, 22), gaps) == 0


# --- order and bytes of programs


def fused(program):
    with Recorder() as recorder:
        result = program()
    kernels = fuse(kernels_of(recorder.trace), recorder.trace).kernels
    del result
    return [(kernel.cost.name, kernel.cost.bytes_read, kernel.cost.bytes_written) for kernel in kernels]


N = 32 * 32 * 4  # bytes of a matrix below


def test_what_overwrites_a_result_comes_after_it_though_nobody_read_it():
    """The copy could run with its source, which is ready before the sort: both wait. The places are wanted."""
    x, y, places = T(32, 32), T(32, 32), torch.empty(32, 32, dtype=torch.int64, device="meta")

    def program():
        ready = x.sin()
        torch.sort(x, out=(y, places))
        y.copy_(ready)
        return ready

    *sorting, last = fused(program)
    assert {each if isinstance(each, str) else each[0] for each in sorting} == {"sort"}
    assert last == ("fused(sin, copy_)", N, 2 * N)


def test_a_product_that_is_overwritten_before_anyone_reads_it_is_not_computed():
    x, y, weight = T(32, 32), T(32, 32), T(32, 32)

    def program():
        torch.mm(x, weight, out=y)
        y.copy_(x)

    assert fused(program) == [("copy_", N, N)]


def test_the_gradient_of_a_convolutions_bias_reads_the_gradient_alone():
    image, weight, bias = (x.requires_grad_() for x in (T(2, 8, 16, 16), T(8, 8, 3, 3), T(8)))
    gradient = T(2, 8, 16, 16)

    def program():
        F.conv2d(image, weight, bias, padding=1).backward(gradient)
        return image.grad, weight.grad, bias.grad

    large, small = 2 * 8 * 16 * 16 * 4, 8 * 4
    *_, total = fused(program)  # in one kernel: of neighbours in memory up to 8192 are added up at once
    assert total[1:] == (large, small)


def test_fused_kernels_have_no_quirks_of_eager_ones():
    with Recorder() as recorder:
        kept = aten.upsample_bilinear2d(T(2, 5, 3, 3), [6, 6], False).relu()
    kernels = kernels_of(recorder.trace)
    (kernel,) = fuse(kernels, recorder.trace).kernels
    assert kernels[0].cost.work.grid.steps == 10
    assert (kernel.cost.work.grid, kernel.cost.access) == (None, "fused")
    del kept


def test_a_result_that_grew_counts_as_large_as_it_is():
    x = T(32, 32)

    def program():
        out = T(0)
        torch.exp(x, out=out)
        return out, out * 2

    assert fused(program) == [("fused(exp, mul)", N, 2 * N)]


def test_a_kernel_that_only_moves_is_of_the_class_that_moves_most():
    """A gather of 8 rows reads 8 B a row more than the cast behind it writes less."""
    with Recorder() as recorder:
        kept = aten.embedding(T(50, 32), T(8, dtype=torch.int64)).to(torch.bfloat16)
    (kernel,) = fuse(kernels_of(recorder.trace), recorder.trace).kernels
    assert kernel.cost.op_class == "indexing"
    del kept


def test_what_it_writes_tells_of_a_kernel_that_only_moves_too():
    """8 rows of 128 B are read, and by the gather 8 places of 8 B as well; the copy writes each row 16 times."""
    with Recorder() as recorder:
        kept = aten.embedding(T(50, 32), T(8, dtype=torch.int64)).unsqueeze(1).expand(8, 16, 32).clone()
    (kernel,) = fuse(kernels_of(recorder.trace), recorder.trace).kernels
    assert kernel.cost.op_class == "data movement"
    del kept


@pytest.mark.parametrize("function", [torch.neg, torch.clone])
def test_what_reads_a_sparse_tensor_fuses_with_nothing(function):
    assert role(lambda: function(torch.eye(4).to_sparse())) is OPAQUE


@pytest.mark.parametrize(("is_kept", "kernels"), [(True, 2), (False, 1)])
def test_a_value_that_a_longer_loop_reads_shares_its_kernel_only_where_nobody_else_wants_it(is_kept, kernels):
    """A result of the graph is written by a loop of its own length; what nobody wants is computed by its reader."""
    with Recorder() as recorder:
        row = T(512).sin()
        sums = T(64, 512) + row
        row = row if is_kept else None
    assert len(fuse(kernels_of(recorder.trace), recorder.trace).kernels) == kernels
    del row, sums
