"""Laws that hold whatever the formulas: batch, transposition, strides, expansion, splitting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from costs_support import costs_in, flops, meta
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

size = st.integers(1, 12)
aten = torch.ops.aten

# Functions of a batch: twice the rows, twice the work, and twice the bytes of what depends on the rows.
OF_A_BATCH: dict[str, Callable[[Tensor], Any]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "softmax": lambda x: x.softmax(-1),
    "sum": lambda x: x.sum(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "max": lambda x: x.max(-1),
    "sort": lambda x: x.sort(-1),
    "fft": torch.fft.fft,
    "clone": lambda x: x.clone(),
    "square": lambda x: x * x,
    "cat": lambda x: torch.cat([x, x], -1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "silu": F.silu,
    "var": lambda x: x.var(-1),
    "roll": lambda x: x.roll(1, -1),
}


@pytest.mark.parametrize("name", OF_A_BATCH)
@given(rows=size, width=size)
@settings(max_examples=15)
def test_twice_the_batch_is_twice_the_work_and_the_bytes(name, rows, width):
    function = OF_A_BATCH[name]
    once, twice = (costs_in(lambda n=n: function(meta(n * rows, width))) for n in (1, 2))
    assert sum(cost.flops for cost in twice) == 2 * sum(cost.flops for cost in once)
    assert sum(cost.bytes for cost in twice) == 2 * sum(cost.bytes for cost in once)


@pytest.mark.parametrize("name", OF_A_BATCH)
@given(first=size, second=size, width=size)
@settings(max_examples=15)
def test_the_parts_of_a_split_batch_cost_what_the_whole_does(name, first, second, width):
    function, whole = OF_A_BATCH[name], meta(first + second, width)
    parts = whole.split([first, second])
    in_parts = [cost for part in parts for cost in costs_in(lambda part=part: function(part))]
    at_once = costs_in(lambda: function(whole))
    assert sum(cost.flops for cost in in_parts) == sum(cost.flops for cost in at_once)
    assert sum(cost.bytes for cost in in_parts) == sum(cost.bytes for cost in at_once)


@pytest.mark.parametrize("name", OF_A_BATCH)
@given(rows=size, width=size)
@settings(max_examples=15)
def test_permuted_strides_change_nothing_but_for_a_copy_where_the_kernel_walks_dense_memory(name, rows, width):
    function, x = OF_A_BATCH[name], meta(width, rows).t()
    if name == "fft":
        pytest.skip("fft copies a strided input first")
    plain, permuted = costs_in(lambda: function(meta(rows, width))), costs_in(lambda: function(x))
    copied = 2 * x.nbytes if name in ("softmax", "layer norm", "cumsum") and not x.is_contiguous() else 0
    assert sum(cost.flops for cost in permuted) == sum(cost.flops for cost in plain)
    assert sum(cost.bytes for cost in permuted) == sum(cost.bytes for cost in plain) + copied


@given(m=size, n=size, k=size)
def test_a_product_and_its_transpose_cost_the_same(m, n, k):
    a, b = meta(m, k), meta(k, n)
    (plain,) = costs_in(lambda: a @ b)
    (transposed,) = costs_in(lambda: b.t() @ a.t())
    assert (plain.flops, plain.bytes_read, plain.bytes_written) == (
        transposed.flops,
        transposed.bytes_read,
        transposed.bytes_written,
    )


@given(m=size, n=size, first=size, second=size)
def test_a_product_split_in_its_depth_is_the_sum_of_the_parts(m, n, first, second):
    def product(k: int) -> int:
        return flops(lambda: meta(m, k) @ meta(k, n))

    assert product(first) + product(second) == product(first + second)


@given(batch=size, m=size, n=size, k=size)
def test_a_batched_product_is_as_many_products(batch, m, n, k):
    assert flops(lambda: torch.bmm(meta(batch, m, k), meta(batch, k, n))) == batch * flops(
        lambda: meta(m, k) @ meta(k, n)
    )


@given(groups=st.integers(1, 4), channels=st.integers(1, 4), width=st.integers(3, 9))
def test_a_grouped_convolution_is_as_many_small_ones(groups, channels, width):
    def backward(x: Tensor, weight: Tensor, groups: int) -> Any:
        out = F.conv1d(x.requires_grad_(), weight.requires_grad_(), groups=groups)
        out.backward(torch.empty_like(out))

    grouped = flops(lambda: backward(meta(2, groups * channels, width), meta(groups * channels, channels, 3), groups))
    single = flops(lambda: backward(meta(2, channels, width), meta(channels, channels, 3), 1))
    assert grouped == groups * single


@given(rows=size, width=size, copies=st.integers(2, 5))
def test_an_expanded_operand_is_computed_on_in_full_and_read_once(rows, width, copies):
    x = meta(1, width)
    (cost,) = costs_in(lambda: x.expand(copies * rows, width) * 2)
    assert cost.flops == copies * rows * width
    assert cost.bytes_read == 4 * width
    assert cost.bytes_written == 4 * copies * rows * width


@pytest.mark.parametrize("name", OF_A_BATCH)
def test_rows_that_repeat_are_computed_on_as_often(name):
    repeated = meta(1, 9).expand(5, 9)
    assert flops(lambda: OF_A_BATCH[name](repeated)) == flops(lambda: OF_A_BATCH[name](meta(5, 9)))


# Functions of four images, and of the gradient that autograd hands back.
OF_IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "batch norm": lambda x: F.batch_norm(x, None, None, meta(4), meta(4), training=True),
    "batch norm that is trained": lambda x: F.batch_norm(x, meta(4), meta(4), training=False),
    "group norm": lambda x: F.group_norm(x, 2, meta(4), meta(4)),
    "layer norm": lambda x: F.layer_norm(x, (8, 8), meta(8, 8), meta(8, 8)),
    "log softmax": lambda x: x.log_softmax(1),
    "average pooling": lambda x: F.avg_pool2d(x, 2),
    "adaptive pooling": lambda x: F.adaptive_avg_pool2d(x, 3),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "bicubic, smoothed": lambda x: F.interpolate(x, size=(3, 3), mode="bicubic", antialias=True),
    "variance": lambda x: x.var((2, 3)),
    "norm": lambda x: x.norm(dim=(2, 3)),
    "distance": lambda x: torch.dist(x, x + 1)[None],
    "gelu": F.gelu,
    "random slopes": lambda x: F.rrelu(x, training=True),
    "error of squares": lambda x: F.mse_loss(x, x + 1, reduction="none"),
    "entropy": lambda x: F.binary_cross_entropy_with_logits(x, x + 1, reduction="none"),
    "Huber's error": lambda x: F.smooth_l1_loss(x, x + 1, reduction="none"),
    "grid": lambda x: F.grid_sample(x, meta(5, 6, 6, 2), align_corners=False),
}


@pytest.mark.parametrize("name", OF_IMAGES)
def test_images_that_repeat_are_computed_on_as_often_and_so_are_gradients(name):
    """`sum().backward()` hands back one number, expanded."""
    function = OF_IMAGES[name]
    images = meta(5, 4, 8, 8)
    assert flops(lambda: function(meta(1, 4, 8, 8).expand(5, 4, 8, 8))) == flops(lambda: function(images)) > 0
    out = function(images.requires_grad_())
    full, expanded = (
        flops(lambda given=given: torch.autograd.grad(out, images, given, retain_graph=True))
        for given in (torch.empty_like(out), meta().expand_as(out))
    )
    assert full == expanded > 0


@given(rows=size, width=size)
def test_in_place_is_read_once_and_written_once(rows, width):
    x = meta(rows, width)
    (cost,) = costs_in(lambda: x.mul_(2))
    assert cost.bytes_read == cost.bytes_written == x.nbytes


@given(rows=size, width=size, dtype=st.sampled_from([torch.float64, torch.bfloat16, torch.float16]))
def test_bytes_go_by_the_width_of_the_type_and_flops_do_not(rows, width, dtype):
    (single,) = costs_in(lambda: meta(rows, width) + 1)
    (other,) = costs_in(lambda: meta(rows, width, dtype=dtype) + 1)
    assert other.flops == single.flops
    assert other.bytes * 4 == single.bytes * dtype.itemsize


OVER_LISTS = ["exp", "sqrt", "sigmoid", "tanh", "neg", "abs", "reciprocal", "rsqrt", "round", "erf", "lgamma", "sin"]
OVER_TWO_LISTS = ["add", "sub", "mul", "div", "maximum", "clamp_min"]


@pytest.mark.parametrize("name", OVER_LISTS + OVER_TWO_LISTS)
def test_an_op_over_lists_is_the_op_on_each(name):
    operands = 1 if name in OVER_LISTS else 2
    shapes = [(2, 3), (5,)]
    (at_once,) = costs_in(
        lambda: getattr(torch, f"_foreach_{name}")(*([meta(*s) for s in shapes] for _ in range(operands)))
    )
    each = [costs_in(lambda s=s: getattr(torch, name)(*(meta(*s) for _ in range(operands))))[-1] for s in shapes]
    assert at_once.flops == sum(cost.flops for cost in each)
    assert at_once.bytes == sum(cost.bytes for cost in each)
    assert at_once.transcendentals == sum(cost.transcendentals for cost in each)


def test_a_scalar_may_come_before_the_list():
    (cost,) = costs_in(lambda: torch._foreach_pow(2.0, [meta(2, 3), meta(5)]))
    assert cost.flops == 11


def norm_gradients(name: str, mask: list[bool]) -> int:
    grad, x, ones, rows, groups = meta(8, 4, 6, 6), meta(8, 4, 6, 6), meta(4), meta(8, 1, 1, 1), meta(8, 2)
    calls = {
        "layer": lambda: aten.native_layer_norm_backward(grad, x, [4, 6, 6], rows, rows, x[0], x[0], mask),
        "group": lambda: aten.native_group_norm_backward(grad, x, groups, groups, ones, 8, 4, 36, 2, mask),
        "batch": lambda: aten.native_batch_norm_backward(
            grad, x, ones, ones, ones, ones, ones, True, 1e-5, mask
        ),
        "batch that is trained": lambda: aten.native_batch_norm_backward(
            grad, x, ones, ones, ones, ones, ones, False, 1e-5, mask
        ),
    }  # fmt: skip
    return flops(calls[name])


@pytest.mark.parametrize("name", ["layer", "group", "batch", "batch that is trained"])
def test_the_gradients_of_a_norm_that_are_asked_for_add_up(name):
    """Of frozen weights there are none."""
    alone = [norm_gradients(name, [place == wanted for place in range(3)]) for wanted in range(3)]
    assert min(alone) > 0
    for mask in ([True, True, False], [True, False, True], [True, True, True]):
        assert norm_gradients(name, mask) == sum(found for found, wanted in zip(alone, mask, strict=True) if wanted)


# Of matrices and of their transposes: the longer side counts the same whichever it is.
DECOMPOSED: dict[str, Callable[[Tensor], Any]] = {
    "reduced svd": lambda x: torch.linalg.svd(x, full_matrices=False),
    "singular values": torch.linalg.svdvals,
    "pseudo-inverse": torch.linalg.pinv,
}


@pytest.mark.parametrize("name", DECOMPOSED)
@pytest.mark.parametrize("sides", [(20, 30), (20, 33), (30, 600), (3, 20, 30), (3, 20, 33), (5, 5)])
def test_a_matrix_and_its_transpose_decompose_alike(name, sides):
    wide, high = (costs_in(lambda x=x: DECOMPOSED[name](x)) for x in (meta(*sides), meta(*sides).mT))
    assert sum(cost.flops for cost in wide) == sum(cost.flops for cost in high)
    assert sum(cost.work.kernels for cost in wide) == sum(cost.work.kernels for cost in high)
