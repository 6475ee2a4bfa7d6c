"""Compiled products of one row and other reductions, which inductor writes itself: what they read, their class, their
time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config

from flopmeter import FlopMeter, Report
from flopmeter.records import CONTRACTION
from flopmeter.torch_names.dispatcher import running_version

SEEDS_OF = "native_dropout" if running_version() >= (2, 15) else "inductor_seeds"  # the origin of the seeds' kernel
ROW, CACHE = 4 * 8 * 64, 4 * 8 * 1024 * 64  # bytes of a token's keys, and of 1,024 of them


def metered(run: Callable[[], Any], device: str = "h100-sxm5-80gb") -> Report:
    with torch.inference_mode(), config.patch(coordinate_descent_tuning=True), FlopMeter(device) as meter:
        run()
    return meter.report()


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_coordinate_descent_makes_a_reduction_of_a_matrix_times_a_vector() -> None:
    """As torch decomposes it then (torch/_inductor/decomposition.py); gpt-fast asks for that."""
    with torch.device("meta"):
        layer, x = nn.Linear(256, 512, bias=False), torch.empty(1, 256)
    report = metered(lambda: torch.compile(lambda x: F.relu(layer(x)))(x))
    (kernel,) = report.graphs[0].kernels
    assert kernel.kind == "triton"
    assert 2 * 256 * 512 <= report.flops <= 2 * 256 * 512 + 512
    (row,) = [row for row in report.rows() if row.name == CONTRACTION]
    assert row.flops == 2 * 256 * 512


def test_conversions_of_int8_weights_take_longer_than_reading_them() -> None:
    """45 million at 16 a cycle on 108 multiprocessors of 1.41 GHz are 18.5 µs, the products and sums beside them 10.3;
    the weights alone are read in 25 (an A100 decodes in int8 at .77 of the bandwidth of bf16: gpt-fast)."""
    with torch.device("meta"):
        weight, scales = torch.empty(11008, 4096, dtype=torch.int8), torch.empty(11008, dtype=torch.bfloat16)
        x = torch.empty(1, 1, 4096, dtype=torch.bfloat16)
    report = metered(lambda: torch.compile(lambda x: F.linear(x, weight.to(x.dtype)) * scales)(x), "a100-sxm4-80gb")
    (timing,) = report.timings
    assert 18.5e-6 < timing.compute_seconds < (18.5 + 10.3) * 1e-6
    assert timing.seconds > 1.1 * timing.memory_seconds


def test_an_embedding_inside_of_a_product_reads_the_row_that_it_names() -> None:
    """One token of a table of 1,000 rows of 512 floats, and all of the weight. Each of the 256 results goes over the
    row again, which the cache holds."""
    table, weight, token = meta(1000, 512), meta(256, 512), meta(1, dtype=torch.int64)
    report = metered(lambda: torch.compile(lambda i: F.linear(F.embedding(i, table), weight))(token))
    (kernel,) = report.graphs[0].kernels
    assert kernel.bytes_read == 4 * 512 + 4 * 256 * 512 + 8


def test_tokens_are_looked_up_once_each() -> None:
    """Seven of them, though the index of the table moves over 7 x 512 elements for each of 256 outputs."""
    table, weight, tokens = meta(1000, 512), meta(256, 512), meta(7, 1, dtype=torch.int64)
    product = torch.compile(lambda i: (F.embedding(i, table) * weight).sum(-1))
    (kernel,) = metered(lambda: product(tokens)).graphs[0].kernels
    assert kernel.bytes_read == 4 * 7 * 512 + 4 * 256 * 512 + 7 * 8


@pytest.mark.parametrize(
    ("look_up", "elements"),
    [
        (lambda x, places: x[:, places], 100 * 5),
        (lambda x, places: x.gather(1, places.expand(100, 5)), 100 * 5),
        (lambda x, places: F.interpolate(x[None, None], scale_factor=2.0), 100 * 64),
    ],
)
def test_what_is_looked_up_along_the_innermost_dimension_is_read(
    look_up: Callable[[Tensor, Tensor], Tensor], elements: int
) -> None:
    """Five columns of 64 that are named, or all of them twice."""
    x, places = meta(100, 64), meta(5, dtype=torch.int64)
    report = metered(lambda: torch.compile(look_up)(x, places))
    assert report.bytes_read == 4 * elements + (5 * 8 if elements == 100 * 5 else 0)


@pytest.mark.parametrize(
    "scatter",
    [
        lambda table, x, ids: torch.zeros_like(table).index_add(0, ids, x),
        lambda table, x, ids: table.index_add(0, ids, x),
        lambda table, x, ids: table.index_put((ids,), x, accumulate=True),
        lambda table, x, ids: torch.ops.aten.embedding_dense_backward(x, ids, 1000, -1, False),
    ],
)
def test_the_kernel_that_scatters_has_the_additions(scatter: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """64 rows of 32 are added to a table of 1,000, which another kernel has filled: with zeros, or with a copy."""
    table, x, ids = meta(1000, 32), meta(64, 32), meta(64, dtype=torch.int64)
    report = metered(lambda: torch.compile(scatter)(table, x, ids))
    filled, scattered = report.kernels
    assert (filled.cost.flops, scattered.cost.flops) == (0, 64 * 32)
    assert scattered.cost.bytes_written == 4 * 64 * 32


@pytest.mark.parametrize(
    ("write", "read_bytes", "written_bytes"),
    [
        (lambda cache, row, place: cache.index_copy_(1, place, row), ROW + 8, ROW),
        (lambda cache, row, place: cache[:, 3:4].copy_(row), ROW, ROW),
        (lambda cache, row, place: cache.zero_(), 0, CACHE),
        (lambda cache, row, place: cache.copy_(row.expand(8, 1024, 64)), ROW, CACHE),
        (lambda cache, row, place: cache.index_add_(1, place, row), ROW + 8 + ROW, ROW),  # it reads what it adds to
        (lambda cache, row, place: cache.add_(row), ROW + CACHE, CACHE),
    ],
)
def test_a_kernel_that_writes_into_a_cache_reads_it_only_where_it_adds(
    write: Callable[[Tensor, Tensor, Tensor], Any], read_bytes: int, written_bytes: int
) -> None:
    cache, row, place = meta(8, 1024, 64), meta(8, 1, 64), torch.tensor([3], device="meta")

    def update(row: Tensor, place: Tensor) -> None:
        write(cache, row, place)

    report = metered(lambda: torch.compile(update)(row, place))
    assert [(kernel.cost.bytes_read, kernel.cost.bytes_written) for kernel in report.kernels] == [
        (read_bytes, written_bytes)
    ]


@pytest.mark.parametrize("read", [lambda cache, q: cache.sum(-1), lambda cache, q: (cache * q).sum(-1), torch.matmul])
@pytest.mark.parametrize(
    "write",
    [lambda cache, row, place: cache[:, 3:4].copy_(row), lambda cache, row, place: cache.index_copy_(1, place, row)],
)
def test_after_a_kernel_has_written_into_a_cache_all_of_it_is_read(
    write: Callable[[Tensor, Tensor, Tensor], Any], read: Callable[[Tensor, Tensor], Any]
) -> None:
    """As a step of a decoder does: the new token's keys, and then those of all tokens."""
    cache, row, place, q = meta(8, 1024, 64), meta(8, 1, 64), torch.tensor([3], device="meta"), meta(8, 64, 1)

    def step(row: Tensor, place: Tensor, q: Tensor) -> Any:
        write(cache, row, place)
        return read(cache, q if read is torch.matmul else q.mT)

    report = metered(lambda: torch.compile(step)(row, place, q))
    written, attended = report.kernels
    assert written.cost.bytes_written == ROW
    assert CACHE <= attended.cost.bytes_read <= CACHE + ROW


def test_a_row_waits_for_its_loads_and_for_its_threads() -> None:
    """The sum of one row of 65,536 floats has one block, which loads 2,048 elements 32 times, one after another, each
    after 480 cycles of 1.41 GHz: 10.9 µs, where its bytes take .2 µs of the bandwidth."""
    many, one = meta(1, 16384), meta(16384, 1)
    in_a_row = metered(lambda: torch.compile(lambda x: x.sum(-1))(many), "a100-sxm4-80gb")
    apart = metered(lambda: torch.compile(lambda x: x + 1)(one), "a100-sxm4-80gb")
    waits = in_a_row.kernel_seconds - apart.kernel_seconds
    assert 7 * 480 / 1.41e9 < waits < 9 * 480 / 1.41e9


REGIONS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], int, int]] = {
    # name: function, arguments, elements of 4 bytes read, and written
    "halves": (lambda x: x[:50] + x[50:], (meta(100),), 100, 50),
    "neighbours": (lambda x: x[:-1] + x[1:], (meta(100),), 100, 99),
    "every other one": (lambda x: x[::2] + 1, (meta(100),), 50, 50),
    "both sides of one matrix": (lambda x: x + x.T, (meta(64, 64),), 64 * 64, 64 * 64),
    "a row for all rows": (lambda x, row: x * row, (meta(50, 20), meta(20)), 50 * 20 + 20, 50 * 20),
    "several loops over one row": (lambda x: F.softmax(x, -1), (meta(8, 3000),), 8 * 3000, 8 * 3000),
    "one buffer for two results": (lambda x: (x + 1, x.sum(0)), (meta(50, 20),), 50 * 20, 50 * 20 + 20),
    "rows of a table": (lambda table, i: table[i] + 1, (meta(1000, 16), meta(10, dtype=torch.int32)), 10 * 17, 160),
    "one number a row": (
        lambda x, i: x.gather(1, i.long()) + 1, (meta(50, 1000), meta(50, 1, dtype=torch.int32)), 50 + 50, 50
    ),
    "more picks than a table has": (
        lambda table, i: table[i] + 1, (meta(5, 16), meta(100, dtype=torch.int32)), 5 * 16 + 100, 1600
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REGIONS)
def test_a_kernel_touches_each_element_that_it_needs_once(name: str) -> None:
    run, arguments, read, written = REGIONS[name]
    report = metered(lambda: torch.compile(run)(*arguments))
    assert (report.bytes_read, report.bytes_written) == (4 * read, 4 * written)


IDS = {"dtype": torch.int64}
KERNELS: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], list[tuple[Any, ...]]]] = {
    # name: function, arguments, of each kernel its kind, bytes read and written, FLOPs, ops and random numbers
    "a chain": (
        lambda x, y: (x + y).relu() * 2, (meta(1000), meta(1000)), [("triton", 8000, 4000, 2000, "add relu mul", 0)]
    ),
    "a copy of another layout": (
        lambda x: x.t().contiguous() + 1, (meta(100, 16),), [("triton", 6400, 6400, 1600, "clone add", 0)]
    ),
    "a product, and its bias with what follows": (
        lambda x, w, b: F.linear(x, w, b).relu(), (meta(64, 32), meta(16, 32), meta(16)),
        [("library", 4 * (64 * 32 + 16 * 32), 4096, 2 * 64 * 32 * 16, "addmm", 0),
         ("triton", 4096 + 64, 4096, 1024, "addmm relu", 0)],
    ),
    "parts that are joined": (
        lambda x, y: torch.cat([x, y], -1) + 1, (meta(100, 8), meta(100, 4)),
        [("triton", 4800, 4800, 1200, "cat add", 0)],
    ),
    "in place": (lambda x: x.add_(1), (meta(1000),), [("triton", 4000, 4000, 1000, "add copy_", 0)]),
    "rows that are put into a copy": (
        lambda x, i, y: x.index_put((i,), y), (meta(1000, 16), meta(10, **IDS), meta(10, 16)),
        [("triton", 64000, 64000, 0, "", 0), ("triton", 640 + 80, 640, 0, "index_put", 0)],
    ),
    "numbers that are added to a copy": (
        lambda x, i, y: x.scatter_add(0, i, y), (meta(1000), meta(100, **IDS), meta(100)),
        [("triton", 4000, 4000, 0, "", 0), ("triton", 400 + 800 + 400, 400, 100, "scatter_add", 0)],
    ),
    "a sum in two stages, of 512 parts": (
        lambda x: x.sum(), (meta(2**22),), [("triton", 2**24, 2048, 2**22, "sum", 0), ("triton", 2048, 4, 0, "", 0)]
    ),
    "dropout, by a seed": (
        lambda x: F.dropout(x, 0.5), (meta(1000),),
        [("library", 0, 8, 0, SEEDS_OF, 0), ("triton", 4008, 4000, 2000, "native_dropout", 1000)],
    ),
    "a scan": (lambda x: x.cumsum(-1), (meta(64, 1000),), [("triton", 256000, 256000, 64000, "cumsum", 0)]),
    "a sort of a library, which also writes the places of 8 bytes that nobody reads": (
        lambda x: (x + 1).sort()[0], (meta(5000),),
        [("triton", 20000, 20000, 5000, "add", 0), ("library", 20000, 60000, 0, "sort", 0)],
    ),
    "a maximum and its place": (lambda x: x.max(-1), (meta(64, 1000),), [("triton", 256000, 64 * 12, 0, "max", 0)]),
    "two results": (lambda x: (x.exp(), x.sin()), (meta(1000),), [("triton", 4000, 8000, 2000, "exp sin", 0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_what_is_compiled_has_these_kernels(name: str) -> None:
    run, arguments, expected = KERNELS[name]
    with torch.no_grad(), FlopMeter("h100-sxm5-80gb") as meter:
        torch.compile(run)(*arguments)
    assert [
        (
            kernel.kind, kernel.bytes_read, kernel.bytes_written, kernel.flops,
            " ".join(dict.fromkeys(each.op for each in kernel.origins)),
            sum(each.random_numbers for each in kernel.origins),
        )
        for kernel in meter.report().graphs[0].kernels
    ] == expected  # fmt: skip


class Conditioned(nn.Module):
    """A layer whose forward pass the program compiles, given a condition that all layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)

    @torch.compile
    def forward(self, condition, x):
        return self.linear(condition * x).tanh() + x


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = Conditioned(), Conditioned(), Conditioned()

    def forward(self, condition, x):
        return self.last(condition, self.second(condition, self.first(condition, x)))


def test_a_backward_pass_belongs_to_its_layer_though_all_layers_keep_the_same_condition():
    """Each layer's products are its forward pass, the gradient of its weights, and that of its input."""
    with torch.device("meta"):
        model, condition, x = Chain(), torch.empty(64, 256), torch.empty(64, 256, requires_grad=True)
    with FlopMeter("h100-sxm5-80gb") as meter:
        model(condition, x).sum().backward()
    macs = dict.fromkeys(("first", "second", "last"), 0)
    for kernel in meter.report().kernels:
        if kernel.cost.macs:
            macs[kernel.op.module.split(".")[1]] += kernel.cost.macs
    assert macs == dict.fromkeys(macs, 3 * 64 * 256 * 256)


class Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, 0.1, batch_first=True)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.1)

    def forward(self, x):
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class Normed(nn.Sequential):
    """Whose batch norms sum over all images."""

    def __init__(self, width: int):
        super().__init__(nn.Conv2d(width, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 8, 3), nn.Flatten())


def larger_batch_of(model: Callable[[int], nn.Module], sizes: tuple[int, ...], batch: int) -> tuple[Report, list[Any]]:
    """The report of a training step that is compiled, and what it says of a larger batch."""
    torch._dynamo.reset()
    with torch.device("meta"):
        layers, x = model(sizes[-1] if len(sizes) == 2 else sizes[0]), torch.empty(batch, *sizes)
    run = torch.compile(layers)
    with FlopMeter("h100-sxm5-80gb") as meter, torch.autocast("cuda", torch.bfloat16):
        run(x).sum().backward()
    report = meter.report()
    return report, [each for each in report.advice if "times the batch" in each.remedy]


def test_a_larger_batch_of_a_compiled_program_takes_what_the_program_takes_that_is_compiled_for_it():
    """Its kernels read, write and compute as many times more; the compiler parts some of its sums in another way."""
    small, (told,) = larger_batch_of(Layer, (128, 256), 4)
    times = int(told.remedy.split()[0])
    large, _ = larger_batch_of(Layer, (128, 256), 4 * times)
    assert times >= 16
    assert small.seconds - told.gain_seconds == pytest.approx(large.seconds / times, rel=0.05)


def test_no_larger_batch_is_told_where_a_compiled_kernel_sums_over_the_images_that_it_normalizes():
    """At 64 times as many images the compiler makes four kernels of each such kernel (16 % more time)."""
    assert not larger_batch_of(Normed, (3, 32, 32), 4)[1]
