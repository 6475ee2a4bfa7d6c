"""Modes: which kernels a mode launches, and in how many graphs."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import nn

from flopmeter import FlopMeter
from flopmeter.costs import kernels_of
from flopmeter.launch.fusion import fuse
from flopmeter.launch.modes import MODES, Mode, compiled_region, launches, modes_beyond
from flopmeter.records import Kernel, Trace
from flopmeter.trace.recorder import Recorder


@pytest.fixture(scope="module")
def step() -> tuple[list[Kernel], Trace]:
    """One training step of two layers, with an optimizer."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Recorder() as recorder:
            model(torch.empty(8, 64)).sum().backward()
            optimizer.step()
    return kernels_of(recorder.trace), recorder.trace


def test_an_eager_program_has_no_graphs(step: tuple[list[Kernel], Trace]):
    kernels, trace = step
    assert launches(kernels, trace, MODES["eager"])[:3] == (kernels, [None] * len(kernels), MODES["eager"])


@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if mode.has_graphs])
def test_forward_and_backward_are_a_graph_each_and_the_optimizer_none(name: str, step: tuple[list[Kernel], Trace]):
    made = launches(*step, MODES[name])
    by_phase = {kernel.ops[0].phase: graph for kernel, graph in zip(made.kernels, made.graphs, strict=True)}
    assert by_phase == {"forward": 0, "backward": 1, "optimizer": None}


def test_compiled_and_replayed_programs_run_the_fused_kernels(step: tuple[list[Kernel], Trace]):
    kernels, trace = step
    fused = [kernel.cost.name for kernel in fuse(kernels, trace).kernels]
    for name in ("compiled", "cudagraph"):
        assert [kernel.cost.name for kernel in launches(kernels, trace, MODES[name]).kernels] == fused
    assert launches(kernels, trace, MODES["eager-cudagraph"]).kernels == kernels


def test_what_is_not_marked_stays_eager_in_every_mode(step: tuple[list[Kernel], Trace]):
    kernels, trace = step
    for mode in MODES.values():
        made = launches(kernels, trace, mode, lambda op: None)
        assert made[:3] == (kernels, [None] * len(kernels), mode)


def test_of_a_program_with_compiled_parts_only_these_are_compiled():
    with FlopMeter(compile="rules") as meter:
        x = torch.empty(8, device="meta")
        torch.compile(torch.sin)(x.cos()).exp()
    marked = compiled_region(meter.trace.ops)
    assert [op.call.name for op in meter.trace.ops if marked(op) is not None] == ["sin"]


def test_of_a_program_without_compiled_parts_all_is_compiled(step: tuple[list[Kernel], Trace]):
    _, trace = step
    forward = [op for op in trace.ops if op.phase == "forward"]
    assert all(compiled_region(trace.ops)(op) is not None for op in forward)


def test_replaying_costs_the_host_a_call_and_compiling_a_launch_for_each_kernel():
    """A call of a compiled model takes 0.1 to 0.4 ms of the host, of a graph captured by hand less."""
    model_tensors = 200
    for mode in MODES.values():
        assert mode.replays_graph == (mode.node_seconds > 0)
        assert mode.has_graphs or mode == ("eager", mode.title, "", False, False, False, 0.0, 0.0, 0.0)
        if mode.fuses:
            assert 1e-4 <= mode.graph_call_seconds + model_tensors * mode.graph_tensor_seconds <= 4e-4


LAYERS = 4


@pytest.mark.parametrize("compile", [True, "rules"])
def test_a_compiled_call_hands_over_its_parameters_its_input_and_what_backward_needs(compile):
    """Forward: a weight and a bias for each layer, the input, and the outputs, of which the last goes to the loss.
    Backward: the gradient of the output, the weights but the first, and what the layers multiplied."""
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(LAYERS)))
        x = torch.empty(2, 8)
    compiled = torch.compile(model)
    with FlopMeter(compile=compile) as meter:
        compiled(x).sum().backward()
    tensors = meter.report(mode="compiled").launches.tensors
    assert list(tensors.values()) == [2 * LAYERS + 1 + LAYERS, 1 + (LAYERS - 1) + LAYERS]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(self.norm(x))


def test_blocks_compiled_one_by_one_cost_the_host_more_than_the_model_and_less_than_a_model_each():
    def host_seconds(compiles_blocks: bool) -> float:
        with torch.device("meta"):
            blocks, x = nn.ModuleList(Block() for _ in range(8)), torch.empty(2, 8)

        def model(x: torch.Tensor) -> torch.Tensor:
            for block in blocks:
                x = block(x)
            return x

        if compiles_blocks:
            for block in blocks:
                block.compile()
        run = model if compiles_blocks else torch.compile(model)
        with FlopMeter() as meter, torch.no_grad():
            run(x)
        return meter.report().launch_seconds

    whole, regional = host_seconds(False), host_seconds(True)
    assert whole + 7 * 20e-6 < regional < whole + 7 * 100e-6  # as the smallest function was timed, and a small model


def test_the_type_of_a_mode_lists_the_modes_of_the_table():
    assert get_args(Mode) == tuple(MODES)


def test_a_function_that_asks_whether_it_is_compiled_is_told_so_where_the_rules_run_it():
    def asking(x: torch.Tensor) -> torch.Tensor:
        return x.sin() if torch.compiler.is_compiling() else x.cos()

    with FlopMeter(compile="rules") as meter:
        x = torch.empty(8, device="meta")
        torch.compile(asking)(x)
        asking(x)
    assert [op.call.name for op in meter.trace.ops] == ["empty", "sin", "cos"]
    assert not torch.compiler.is_compiling()


def test_what_the_rules_fuse_beside_compiled_code_are_graphs_of_their_own():
    """Such as functions that torch's compiler could not take: here two, before and after one that it took."""
    with FlopMeter() as meter:
        x = torch.empty(8, device="meta")
        y = torch.compile(torch.cos)(x.sin()).exp()
    regions = {"sin": 1, "exp": 2}
    meter.trace.ops[:] = [op._replace(region=regions.get(op.call.name)) for op in meter.trace.ops]
    graphs = launches(kernels_of(meter.trace), meter.trace, MODES["compiled"]).graphs
    del y
    assert len({graph for graph in graphs if graph is not None}) == 3


@pytest.mark.parametrize(
    ("own", "beyond"),
    [
        ("eager", [{"compiled", "eager-cudagraph"}, {"cudagraph"}]),
        ("compiled", [{"cudagraph"}]),
        ("eager-cudagraph", [{"cudagraph"}]),
        ("cudagraph", []),
    ],
)
def test_beyond_a_mode_are_those_that_fuse_or_replay_too_and_the_one_that_does_both_comes_last(own, beyond):
    names = [mode.name for mode in modes_beyond(own)]
    at = 0
    for group in beyond:
        assert set(names[at : at + len(group)]) == group
        at += len(group)
    assert at == len(names)


def test_a_recurrent_layer_breaks_the_graph_that_dynamo_traces_and_none_that_is_captured():
    """Dynamo's own count of graphs is the oracle."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).relu()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.lstm, self.after = Block(), nn.LSTM(8, 8), Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.after(self.lstm(self.before(x))[0])

    traced: list[object] = []
    torch.compile(Net(), backend=lambda graph, _: traced.append(graph) or graph)(torch.zeros(5, 2, 8))
    torch._dynamo.reset()
    with FlopMeter("a100-sxm4-80gb") as meter, torch.no_grad():
        with torch.device("meta"):
            net, x = Net(), torch.zeros(5, 2, 8)
        net(x)
    graphs = {
        mode: {graph for graph in meter.report(mode=mode).launches.graphs if graph is not None}
        for mode in ("compiled", "cudagraph", "eager-cudagraph")
    }
    assert len(traced) == 2
    assert [len(each) for each in graphs.values()] == [2, 2, 1]
