"""Values that go through compiled graphs: experts that tokens pick by a stated law, lengths that a graph works on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopmeter import DataDependentError, FlopMeter, on_meta
from flopmeter.records import GroupedMatmulWork
from flopmeter.report.report import Report

TOKENS, WIDTH, HIDDEN, EXPERTS, CHOICES = 32, 64, 128, 8, 2


class Experts(nn.Module):
    """A loop over experts, whose lengths leave the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.empty(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.empty(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = torch.topk(self.gate(x).softmax(-1), CHOICES)
        order = chosen.flatten().argsort(stable=True)
        lengths = torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist()
        rows = x[order // CHOICES].split(lengths)
        parts = [F.silu(part @ up) @ down for part, up, down in zip(rows, self.up, self.down, strict=True)]
        outputs = torch.cat(parts) * weights.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, order // CHOICES, outputs)


def experts_report(routing: object, *, learns: bool = False) -> Report:
    with torch.device("meta"):
        model, x = Experts(), torch.empty(TOKENS, WIDTH)
    model = torch.compile(model)
    with FlopMeter("h100-sxm5-80gb", routing=routing) as meter, torch.set_grad_enabled(learns):
        out = model(x)
        if learns:
            out.sum().backward()
    return meter.report()


def products(report: Report) -> int:
    return next(row.flops for row in report.rows() if row.name == "tensor contraction")


GATE, OF_ROWS = 2 * TOKENS * WIDTH * EXPERTS, 2 * 2 * TOKENS * CHOICES * WIDTH * HIDDEN


@pytest.mark.parametrize("routing", ["balanced", {"imbalance": 1.5}])
def test_the_routing_that_is_stated_holds_for_experts_picked_in_a_compiled_graph(routing):
    report = experts_report(routing)
    assert products(report) == GATE + OF_ROWS
    assert any(line.startswith("routing=") and "topk" in line for line in report.assumptions)


def test_the_backward_graphs_of_such_experts_cost_twice_the_forward_ones():
    """Of the gate there is one product: its input needs no gradient."""
    assert products(experts_report("balanced", learns=True)) == 2 * GATE + 3 * OF_ROWS - OF_ROWS // 2


def grouped(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """The first products of experts, as one grouped product; its offsets stay in the graph."""
    chosen = (x @ gate).topk(CHOICES).indices.flatten()
    lengths = torch.histc(chosen.int(), bins=EXPERTS, min=0, max=EXPERTS - 1)
    rows = x[chosen.argsort(stable=True) // CHOICES]
    return F.grouped_mm(rows, up, offs=lengths.cumsum(0, dtype=torch.int32))


@pytest.mark.parametrize("routing", ["balanced", {"imbalance": 1.5}, None])
def test_groups_inside_of_a_graph_are_those_of_the_eager_run(routing):
    def groups(function: Callable[..., Tensor]) -> list[tuple[Any, ...]]:
        x, gate, up = (
            torch.empty(shape, dtype=torch.bfloat16, device="meta", requires_grad=True)
            for shape in ((TOKENS, WIDTH), (WIDTH, EXPERTS), (EXPERTS, WIDTH, HIDDEN))
        )
        with FlopMeter("h100-sxm5-80gb", routing=routing) as meter:
            function(x, gate, up).square().sum().backward()
        report = meter.report()
        assert ("groups of equal length" in str(report)) is (routing is None)
        forward = (kernel for graph in report.graphs if graph.part == "forward" for kernel in graph.kernels)
        assert not any(origin.is_recomputed for kernel in forward for origin in kernel.origins)
        costs = [kernel.cost for kernel in report.kernels]
        return sorted((cost.flops, cost.work.matmuls) for cost in costs if isinstance(cost.work, GroupedMatmulWork))

    in_graph = groups(torch.compile(grouped))
    assert in_graph == groups(grouped)
    assert len(in_graph) == 3
    lengths = {matmul.m for _, matmuls in in_graph for matmul in matmuls}
    assert (TOKENS * CHOICES // EXPERTS * 3 // 2 in lengths) is isinstance(routing, dict)  # the busiest expert's


def test_without_a_stated_routing_the_lengths_are_unknown_as_in_eager_mode():
    with pytest.raises(DataDependentError, match="routing"):
        experts_report(None)


def test_integers_that_a_graph_makes_of_known_ones_are_known():
    with FlopMeter("a100-sxm4-80gb"):
        lengths = on_meta(torch.tensor([3, 1, 2]))
        ends = torch.compile(lambda lengths, x: (lengths.cumsum(0) * 2, x + 1))(lengths, torch.empty(4, device="meta"))
        assert ends[0].tolist() == [6, 8, 12]


def test_a_tensor_that_a_graph_writes_to_is_not_known_by_what_it_was():
    def overwrite(lengths: Tensor, x: Tensor) -> Tensor:
        lengths.copy_(x.argmax(-1))
        return lengths + 1

    with FlopMeter("a100-sxm4-80gb"):
        lengths = on_meta(torch.tensor([3, 1, 2]))
        more = torch.compile(overwrite)(lengths, torch.empty(3, 8, device="meta"))
        with pytest.raises(DataDependentError):
            more.tolist()


def test_what_a_graph_computes_on_the_cpu_is_computed():
    """Numbers of a program that lie on the CPU, returned or changed in place, among kernels of the device."""

    def run(x: Tensor, count: Tensor, rate: Tensor) -> tuple[Tensor, ...]:
        count += 1
        return x * 2, count * 10, rate * 3.0

    count, rate = torch.tensor(3, device="cpu"), torch.tensor(2.0, device="cpu")
    with FlopMeter("a100-sxm4-80gb") as meter:
        compiled = torch.compile(run)
        results = [compiled(torch.empty(8, device="meta"), count, rate)[1:] for _ in range(2)]
    assert [[number.item() for number in each] for each in results] == [[40, 6.0], [50, 6.0]]
    assert count.item() == 5
    assert meter.report().flops == 2 * 8


def test_an_assertion_inside_of_a_compiled_kernel_is_counted():
    def checked(x: Tensor) -> Tensor:
        torch._assert_async((x > 0).all(), "positive")
        return x + 1

    with FlopMeter("h100-sxm5-80gb", checks="hold") as meter:
        torch.compile(checked)(torch.empty(8, device="meta"))
    assert not [note for note in meter.report().notes if note.startswith("uncounted")]
    assert meter.report().flops == 8


def test_a_meter_inside_of_another_one_sees_the_kernels_of_functions_that_were_compiled_before_it():
    compiled = torch.compile(lambda x: (x * 2 + 1).relu())
    x = torch.randn(1000, device="meta")
    with FlopMeter(hardware="h100-sxm5-80gb"):
        compiled(x)
        with FlopMeter(hardware="h100-sxm5-80gb") as inner:
            compiled(x)
        compiled(x)
    report = inner.report()
    assert (report.bytes_read, report.bytes_written) == (4 * 1000, 4 * 1000)


def test_a_learned_vector_put_where_a_mask_says_leaves_its_function_to_eager_torch() -> None:
    """Its gradient has a length that hangs on values, which AOTAutograd refuses, and Dynamo ends the graph: so a
    Wav2Vec2 masks its frames. Recorded is the eager stream, and the report says so."""

    def masked(x: Tensor, vector: Tensor, mask: Tensor) -> Tensor:
        x = x * 2
        x[mask] = vector
        return x

    names = []
    for run in (masked, torch.compile(masked)):
        vector = torch.empty(WIDTH, device="meta", requires_grad=True)
        with FlopMeter("h100-sxm5-80gb", mask_fraction=0.5) as meter:
            mask = torch.empty(TOKENS, dtype=torch.bool, device="meta")
            run(torch.empty(TOKENS, WIDTH, device="meta"), vector, mask).sum().backward()
        names.append([kernel.cost.name for kernel in meter.report().kernels])
    assert names[0] == names[1]
    assert "not compiled, so run eagerly: masked" in meter.report().render()
