"""What compiles is not held up by Python: its frames have room, its garbage waits."""

from __future__ import annotations

import gc
import inspect
import resource
import sys

import pytest
import torch
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.scheduler import BaseSchedulerNode, Scheduler

from flopmeter import FlopMeter
from flopmeter.compiler import pace
from flopmeter.compiler.pace import undisturbed
from flopmeter.torch_names import compiler as names

CALLS = 200
DEPTHS = range(400)  # frames of more than one chunk of 16 KiB


def _leaf() -> None:
    pass


# A larger frame than that of `_faults_at`: at some depth that one fits into the rest of a chunk, and this one does not.
_leaf.__code__ = _leaf.__code__.replace(co_stacksize=200)


def _faults_at(depth: int) -> int:
    """Pages of memory that the kernel maps while `_leaf` is called at this depth."""
    if depth:
        return _faults_at(depth - 1)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(CALLS):
        _leaf()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def _most_faults() -> int:
    return max(map(_faults_at, DEPTHS))


def test_no_depth_of_the_stack_maps_memory_anew_for_each_call() -> None:
    assert undisturbed(_most_faults)() < CALLS / 2


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="this Python may keep a chunk")
def test_without_room_some_depth_does() -> None:
    assert _most_faults() >= CALLS


def test_arguments_results_and_errors_pass_through() -> None:
    assert undisturbed(divmod)(7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        undisturbed(divmod)(7, 0)


@pytest.mark.parametrize("collects", [True, False])
def test_garbage_waits_and_is_collected_again_afterwards_if_it_was_before(collects: bool) -> None:
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        assert not undisturbed(gc.isenabled)()
        assert gc.isenabled() == collects
        with pytest.raises(ZeroDivisionError):
            undisturbed(divmod)(7, 0)
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("changes", [True, False])
def test_values_of_a_graph_are_updated_where_a_node_was_changed(changes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []

    def plain(updater: FakeTensorUpdater) -> int:
        called.append(updater)
        return 17

    graph = torch.fx.Graph()
    first, second = graph.placeholder("first"), graph.placeholder("second")
    added = graph.call_function(torch.ops.aten.add.Tensor, (first, first))
    graph.output(added)
    takes_graph = "graph" in inspect.signature(FakeTensorUpdater).parameters  # torch 2.11
    updater = FakeTensorUpdater(graph if takes_graph else torch.fx.GraphModule(torch.nn.Module(), graph))
    before = added.args  # kept: torch's hash of a node has the id of its arguments, which another tuple could get
    if changes:
        added.args = (first, second)
    assert pace.around_update(plain)(updater) == 17 * changes
    assert (added.args is before) == (not changes)
    assert len(called) == changes


def test_what_fusing_costs_in_memory_is_as_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    plain, shortened = Scheduler.can_fusion_increase_peak_memory, pace.around_memory

    def watched(scheduler: Scheduler, one: BaseSchedulerNode, other: BaseSchedulerNode) -> bool:
        asked = []
        increases = shortened(lambda *nodes: asked.append(nodes) or plain(*nodes))(scheduler, one, other)
        answers.append((increases, plain(scheduler, one, other), bool(asked)))
        return increases

    monkeypatch.setattr(names.MORE_MEMORY.parent, "can_fusion_increase_peak_memory", watched)
    monkeypatch.setattr(pace, "around_memory", lambda plain: plain)
    with torch.device("meta"):
        a, square, row, vector = (torch.empty(shape) for shape in [(4096, 64), (64, 64), (64,), (1 << 20,)])

    def program() -> tuple[torch.Tensor, ...]:
        """Two results that one kernel each reads; these share a row alone, and one kernel would keep both results."""
        results = (a.relu() @ square, a.sin() @ square)
        return *((result - row) @ square for result in results), vector.cos(), vector.sin()

    with FlopMeter("a100-sxm4-80gb"):
        torch.compile(program)()
    assert all(short == full for short, full, _ in answers)
    assert {(increases, was_asked) for increases, _, was_asked in answers} >= {(True, True), (False, False)}


def test_what_ops_a_kernel_of_an_optimizer_comes_from_is_the_same_at_that_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without what keeps a large graph from taking long."""
    seen = []
    for wraps in (True, False):
        if not wraps:
            for name in [name for name in vars(pace) if name.startswith("around_")]:
                monkeypatch.setattr(pace, name, lambda plain: plain)
        weights = [torch.nn.Parameter(torch.empty(8, size, device="meta")) for size in range(8, 20)]
        for weight in weights:
            weight.grad = torch.empty_like(weight)
        optimizer = torch.optim.AdamW(weights)
        with FlopMeter("a100-sxm4-80gb", compile=True) as meter:
            optimizer.step()
        (graph,) = meter.trace.compilation.graphs
        seen.append([(kernel.kind, kernel.scheduler_bytes, kernel.origins) for kernel in graph.kernels])
    assert seen[0] == seen[1]
    assert any(len(origins) > len(weights) for _, _, origins in seen[0])
