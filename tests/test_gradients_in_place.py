"""Gradients that are added to zeros: the ops under a meter are those that torch runs without a mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

from flopmeter import FlopMeter
from flopmeter.trace.recorder import Recorder

WRITES = {
    "scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_", "index_put", "index_put_",
    "_index_put_impl_", "copy_", "clone",
}  # fmt: skip


def ids(x: Tensor, *shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device=x.device)


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda x: x.max(1).values,
    "max, kept": lambda x: x.max(1, keepdim=True).values,
    "sort": lambda x: x.sort(1).values,
    "topk": lambda x: x.topk(3, 1).values,
    "median": lambda x: x.median(1).values,
    "kthvalue": lambda x: x.kthvalue(2, 1).values,
    "cummax": lambda x: x.cummax(1).values,
    "gather": lambda x: x.gather(1, ids(x, 4, 2)),
    "take along": lambda x: torch.take_along_dim(x, ids(x, 4, 2), 1),
    "index_select": lambda x: x.index_select(0, ids(x, 2)),
    "rows": lambda x: x[ids(x, 2)],
    "elements": lambda x: x[ids(x, 2), ids(x, 2)],
}


def writes_by_torchs_profiler(program: Callable[[], object]) -> list[str]:
    """Not those that another of them makes."""
    with profile() as profiler:
        program()

    def is_inside(event) -> bool:
        outer = event.cpu_parent
        return outer is not None and (outer.name.removeprefix("aten::") in WRITES or is_inside(outer))

    found = [event for event in profiler.events() if event.name.removeprefix("aten::") in WRITES]
    return [event.name.removeprefix("aten::") for event in found if not is_inside(event)]


def writes_in(recorder: Recorder) -> list[str]:
    return [op.call.name for op in recorder.trace.ops if op.call.name in WRITES]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_gradient_goes_into_zeros_as_it_does_without_a_meter(name, device):
    def leaf(on: str) -> Tensor:
        return torch.ones(4, 8, device=on, requires_grad=True)

    out, recorded = PROGRAMS[name](leaf("cpu")), PROGRAMS[name](leaf(device))
    gradients = torch.ones_like(out), torch.ones_like(recorded)
    recorder = Recorder()
    with recorder:
        recorded.backward(gradients[1])
    assert writes_in(recorder) == writes_by_torchs_profiler(lambda: out.backward(gradients[0]))


class Scattered(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x[:, :2] * 1

    @staticmethod
    def backward(context, gradient):
        return gradient.new_zeros(4, 8).scatter_add(1, ids(gradient, 4, 2), gradient)


def test_a_function_of_the_program_that_asks_for_a_copy_gets_one():
    x = torch.ones(4, 8, device="meta", requires_grad=True)
    recorder = Recorder()
    with recorder:
        Scattered.apply(x).sum().backward()
    assert writes_in(recorder) == ["scatter_add"]


def test_under_a_transform_torch_copies_the_zeros_without_a_meter_too():
    x = torch.ones(3, 4, 8, device="meta")
    with FlopMeter("h100-sxm5-80gb") as meter:
        torch.vmap(torch.func.grad(lambda row: row.gather(1, ids(row, 4, 2)).sum()))(x)
    assert "scatter_add" in {op.call.name for op in meter.trace.ops}


def test_the_gradient_of_looked_up_rows_moves_the_zeros_and_the_rows_alone():
    """Zeros of 1,000 rows of 64; then 5 rows read with their ids and added: the table itself is not read."""
    table = torch.ones(1000, 64, device="meta", requires_grad=True)
    with FlopMeter("h100-sxm5-80gb") as meter:
        rows = table[torch.zeros(5, dtype=torch.int64, device="meta")]
        rows.backward(torch.ones(5, 64, device="meta"))
    *_, zeros, _, _, added = (kernel.cost for kernel in meter.report().kernels)  # ids are sorted in between
    assert [cost.bytes_written for cost in (zeros, added)] == [1000 * 64 * 4, 5 * 64 * 4]
    assert added.bytes_read <= 2 * 5 * 8 + 2 * 5 * 64 * 4
