"""Kernels of torch's compiler: their FLOPs, bytes, names and lines, by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flopmeter
from flopmeter.records import Kernel

FP32, INT32, INT64 = 4, 4, 8


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, device="meta", dtype=dtype)


def the_kernel(function: Callable[..., Any], *arguments: Tensor, **options: Any) -> Kernel:
    """The only one of the compiled function."""
    torch._dynamo.reset()
    with flopmeter.FlopMeter("h100-sxm5-80gb", **options) as meter:
        torch.compile(function)(*arguments)
    (kernel,) = meter.report().kernels
    return kernel


def test_what_a_graph_computes_from_nothing_it_is_given_has_its_flops():
    """As tables of positions: of 1,000 places a product, a sine and its exponential. Places and constants are none."""
    table = the_kernel(lambda: (torch.arange(1000, device="meta") * 0.5).sin().exp())
    assert (table.cost.flops, table.cost.transcendentals, table.cost.bytes_read) == (3 * 1000, 2 * 1000, 0)
    assert (table.cost.name, table.cost.op_class) == ("fused(arange, mul, sin, exp)", "element-wise")
    places = the_kernel(lambda: torch.arange(1000, device="meta"))
    (origin,) = places.op.call.kwargs["kernel"].origins
    assert (origin.op, places.cost.op_class, places.cost.flops) == ("arange", "data movement", 0)


@pytest.mark.parametrize("reads", [True, False])
def test_floats_between_integers_are_computed_in_fp32(reads):
    """As the buckets of T5's relative positions: the kernel reads and writes integers, of which no GPU has a rate."""
    given = [on_meta(1000, dtype=torch.int64)] if reads else []
    kernel = the_kernel(lambda *given: ((given or [torch.arange(1000, device="meta")])[0] * 0.5).sin().long(), *given)
    assert (kernel.cost.dtype, kernel.cost.flops) == ("fp32", 2 * 1000)


def test_a_softmax_that_finds_maximum_and_sum_at_once_subtracts_and_exponentiates_twice():
    """For each element: a difference, an exponential and an addition, then a difference, an exponential and a
    quotient."""
    kernel = the_kernel(lambda x: x.softmax(-1), on_meta(1024, 8192))
    assert kernel.cost.flops == 6 * 1024 * 8192
    assert kernel.cost.transcendentals == 2 * 1024 * 8192


def test_a_fused_kernel_has_the_line_of_its_ops():
    def doubled(x: Tensor) -> Tensor:
        return (x * 2).relu()

    line = doubled.__code__.co_firstlineno + 1
    kernel = the_kernel(doubled, on_meta(64, 64), source=True)
    source = kernel.op.source
    assert source is not None
    assert (Path(source.rpartition(":")[0]).name, int(source.rpartition(":")[2])) == (Path(__file__).name, line)


@pytest.mark.parametrize(("dtype", "index_bytes"), [(torch.int32, INT32), (torch.int64, INT64)])
def test_a_lookup_that_a_row_shares_reads_one_value_a_row(dtype: torch.dtype, index_bytes: int):
    rows, columns = 64, 128
    table, index = on_meta(1_000_000), on_meta(rows, dtype=dtype)
    kernel = the_kernel(lambda x, t, i: x * t[i][:, None], on_meta(rows, columns), table, index)
    assert kernel.cost.bytes_read == rows * columns * FP32 + rows * (index_bytes + FP32)
    assert kernel.cost.bytes_written == rows * columns * FP32


def test_what_a_crop_leaves_out_is_not_read_and_the_crop_is_named():
    kernel = the_kernel(lambda x: F.pad(x, (-8, -8)) + 1, on_meta(64, 64))
    assert kernel.cost.name == "fused(constant_pad_nd, add)"
    assert kernel.cost.bytes_read == 64 * 48 * FP32


@pytest.mark.parametrize(
    "made", [lambda numbers: torch.tensor(numbers).cuda(), lambda numbers: torch.tensor(numbers, device="cuda")]
)
def test_constants_that_a_program_moves_to_the_gpu_are_there_before_its_compiled_code_runs(made):
    numbers = [float(number) for number in range(64)]
    torch._dynamo.reset()
    with flopmeter.cuda("h100-sxm5-80gb") as device:
        x = torch.randn(64, device="cuda")
        added = torch.compile(lambda x: x + made(numbers))
        for _ in range(3):
            added(x)
    (kernel,) = (kernel for kernel in device.report().step.kernels if kernel.op.graph is not None)
    assert (kernel.cost.name, kernel.cost.bytes_read) == ("add", 2 * 64 * FP32)  # and no copy


@pytest.mark.parametrize("places", [[0, 2, 1], (slice(None), [0, 2, 1])], ids=["rows", "columns"])
def test_places_in_a_list_are_written_into_the_kernel_that_takes_from_them(places: Any):
    kernel = the_kernel(lambda x: x[places] * 2, on_meta(64, 64))
    assert kernel.cost.bytes_written == 3 * 64 * FP32
    assert kernel.cost.bytes_read == 3 * 64 * FP32


def test_a_step_that_takes_columns_by_a_list_is_compiled_forward_and_backward():
    torch._dynamo.reset()
    with flopmeter.FlopMeter("h100-sxm5-80gb") as meter:
        torch.compile(lambda x: x[:, [0, 2, 1]].square().sum())(on_meta(64, 64).requires_grad_()).backward()
    report = meter.report()
    assert [graph.part for graph in report.graphs] == ["forward", "backward"]
    assert not any("not compiled" in note for note in report.notes)


class Inner(nn.Module):
    """Compiles a method of its own."""

    @torch.compile
    def halved(self, x: Tensor) -> Tensor:
        return x * 0.5 + 1

    def forward(self, x: Tensor) -> Tensor:
        return self.halved(x)


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Inner()

    @torch.compile
    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).relu()


def test_kernels_of_compiled_methods_belong_to_the_module_whose_method_it_is():
    x = on_meta(64, 64)
    paths = []
    for net, call in ((Outer(), Outer.forward), (Outer().first, Inner.halved)):
        torch._dynamo.reset()
        with flopmeter.FlopMeter("h100-sxm5-80gb") as meter:
            call(net, x)
        paths.append([kernel.op.module.partition(".")[0] for kernel in meter.report().kernels])
    assert paths == [["Outer"], ["Inner"]]


def test_modules_that_a_compiled_function_calls_have_the_paths_of_an_eager_call():
    with torch.device("meta"):
        net, x = nn.Sequential(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))), torch.empty(4, 64)

    class Plain:
        def __init__(self) -> None:
            self.model = net

        def call(self, x: Tensor) -> Tensor:
            return self.model(x)

    def paths(function: Callable[..., Any], *arguments: Any) -> list[str]:
        torch._dynamo.reset()
        with flopmeter.FlopMeter("h100-sxm5-80gb") as meter:
            function(*arguments)
        return [kernel.op.module for kernel in meter.report().kernels]

    def closing_over_it(x: Tensor) -> Tensor:
        return net(x)

    def given_it(net: nn.Module, x: Tensor) -> Tensor:
        return net(x)

    eager = paths(net, x)
    assert eager == ["Sequential.0.0", "Sequential.0.1"]
    assert paths(torch.compile(closing_over_it), x) == eager
    assert paths(torch.compile(given_it), net, x) == eager
    assert paths(torch.compile(Plain().call), x) == eager
    assert paths(torch.compile(net), x) == eager
