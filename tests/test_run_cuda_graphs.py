"""CUDA graphs that a program captures itself, under the device named cuda: each replay is launched at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flopmeter
from flopmeter import FlopMeter, Report
from flopmeter.launch.modes import GRAPH_LAUNCH_SECONDS
from flopmeter.run.script import Script, run
from flopmeter.run.session import ScriptSession, Wishes

A100 = "a100-sxm4-80gb"
DEPTH = 20


def adds(x: torch.Tensor) -> torch.Tensor:
    for _ in range(DEPTH):
        x = x + 1
    return x


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(DEPTH)))


def graphs_of(report: Report) -> set[int]:
    return {graph for graph in report.launches.graphs if graph is not None}


def test_a_replay_takes_what_its_kernels_take_and_one_launch():
    with flopmeter.cuda(A100) as device:
        x, graph = torch.zeros(1024, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            adds(x)
        for _ in range(3):
            graph.replay()
    step = device.report().step
    assert len(step.kernels) == DEPTH
    assert step.launch_seconds == pytest.approx(GRAPH_LAUNCH_SECONDS)
    on_device = sum(timing.seconds for timing in step.timings)
    assert step.seconds == pytest.approx(max(GRAPH_LAUNCH_SECONDS, on_device))  # replays are launched ahead
    with FlopMeter(A100) as meter:
        adds(torch.zeros(1024, device="meta"))
    ops = range(len(meter.trace.ops) - DEPTH, len(meter.trace.ops))
    whole = meter.report(mode="eager-cudagraph", ops=ops, repeats=True)
    assert step.seconds == pytest.approx(whole.seconds)


def test_a_training_step_that_is_captured_whole_is_one_graph_and_each_replay_a_step():
    with flopmeter.cuda(A100) as device:
        model, x, graph = layers().cuda(), torch.zeros(8, 64, device="cuda"), torch.cuda.CUDAGraph()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.cuda.graph(graph):
            model(x).sum().backward()
            optimizer.step()
        for _ in range(3):
            graph.replay()
    report = device.report()
    assert {kernel.op.phase for kernel in report.step.kernels} == {"forward", "backward", "optimizer"}
    assert graphs_of(report.step) == {0}
    assert report.step.launch_seconds == pytest.approx(GRAPH_LAUNCH_SECONDS)
    assert (report.parts.count, report.parts.marked_by) == (4, "optimizer.step()")  # the capture is the first


def test_graphed_callables_replay_a_graph_in_each_direction_after_copies_of_what_they_are_given():
    with flopmeter.cuda(A100) as device:
        sample, x = (torch.zeros(8, 64, device="cuda") for _ in range(2))
        model = layers().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model = torch.cuda.make_graphed_callables(model, (sample,))
        for _ in range(3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    step = device.report().step
    kernels = [(kernel.op.is_replayed, kernel.op.phase, kernel.cost.name) for kernel in step.kernels]
    assert kernels.count((True, "forward", "addmm")) == DEPTH
    assert kernels.count((True, "backward", "mm")) == 2 * DEPTH - 1  # the input needs no gradient
    assert [phase for replayed, phase, name in kernels if name == "copy_"] == ["forward", "backward"]
    assert len(graphs_of(step)) == 2


def test_a_graph_keeps_the_memory_that_its_capture_needed():
    size = 4 * (1 << 20)

    def kept(between=lambda graph: None) -> int:
        with flopmeter.cuda(A100) as device:
            x, graph = torch.zeros(1 << 20, device="cuda"), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                adds(x)  # holds what it adds to and what it makes; nobody keeps the sum
            between(graph)
            for _ in range(3):
                graph.replay()
        return device.report().step.memory.at_peak["temporaries"]

    def another(graph, **options) -> None:
        y, other = torch.zeros(1 << 20, device="cuda"), torch.cuda.CUDAGraph()
        with torch.cuda.graph(other, **options):
            adds(y)

    assert kept() == 2 * size
    assert kept(lambda graph: another(graph)) == 4 * size
    assert kept(lambda graph: another(graph, pool=graph.pool())) == 2 * size


def test_a_step_of_graphed_callables_needs_no_less_memory_than_an_eager_one():
    def peak(make=lambda model, sample: model) -> int:
        with flopmeter.cuda(A100) as device:
            sample, model = torch.zeros(4096, 64, device="cuda"), layers().cuda()
            model = make(model, (sample,))
            for _ in range(3):
                model(sample).sum().backward()
                model.zero_grad()
        return device.report().step.peak_memory_bytes

    eager, graphed = peak(), peak(torch.cuda.make_graphed_callables)
    assert eager > DEPTH * 4096 * 64 * 4  # an activation of each layer
    assert eager <= graphed <= 1.2 * eager


def test_a_replay_of_compiled_kernels_checks_no_guards_and_fuses_nothing_more():
    with flopmeter.cuda(A100) as device:
        x, graph, compiled = torch.zeros(1024, device="cuda"), torch.cuda.CUDAGraph(), torch.compile(adds)
        compiled(x)
        with torch.cuda.graph(graph):
            compiled(x).exp().sin()
        for _ in range(3):
            graph.replay()
    step = device.report().step
    assert [len(kernel.ops) > 0 for kernel in step.kernels] == [True] * 3  # one of the compiler's, exp, sin
    assert step.launch_seconds == pytest.approx(GRAPH_LAUNCH_SECONDS)


def test_a_replay_runs_on_the_stream_that_it_is_launched_on():
    def milliseconds(*, captured_aside: bool) -> float:
        with flopmeter.cuda(A100):
            x, y = (torch.zeros(1 << 26, device="cuda") for _ in range(2))
            graph, (start, end) = torch.cuda.CUDAGraph(), (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(torch.cuda.Stream() if captured_aside else torch.cuda.current_stream()):
                graph.capture_begin()
                adds(x)
                graph.capture_end()
            start.record()
            graph.replay()
            adds(y)
            end.record()
            return start.elapsed_time(end)

    assert milliseconds(captured_aside=True) == pytest.approx(milliseconds(captured_aside=False))


def test_tensors_have_one_address_where_they_share_memory_and_else_two():
    with flopmeter.cuda(A100):
        x, y = (torch.zeros(4, 4, device="cuda") for _ in range(2))
        assert x.data_ptr() == x.view(16).data_ptr() != y.data_ptr()
        assert x[1].data_ptr() - x.data_ptr() == 4 * 4
        assert len({parameter.data_ptr() for parameter in layers().cuda().parameters()}) == 2 * DEPTH
    assert torch.zeros(2, device="meta").data_ptr() == 0


WHOLE_STEP = """
import torch
from torch import nn

model, x, aside = nn.Linear(64, 64).cuda(), torch.zeros(8, 64, device="cuda"), torch.cuda.Stream()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def step():
    optimizer.zero_grad(set_to_none=True)
    model(x).sum().backward()
    optimizer.step()

aside.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(aside):
    for _ in range(11):
        step()
torch.cuda.current_stream().wait_stream(aside)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    step()
for _ in range(100):
    graph.replay()
"""


def test_steps_that_warm_up_for_a_capture_on_a_stream_of_their_own_do_not_end_the_run(tmp_path):
    """As torch's notes on CUDA graphs have it, with the warm-up of DDP: the third step is the second replay."""
    script = tmp_path / "captures.py"
    script.write_text(WHOLE_STEP)
    session = ScriptSession(A100, Wishes(steps=3))
    with session.open():
        ending = run(Script(str(script)), session)
        assert ending.error is None, ending
        report = session.report("captures.py").step
    assert len(graphs_of(report)) == 1
    assert report.launch_seconds == pytest.approx(GRAPH_LAUNCH_SECONDS)


def test_what_a_captured_graph_runs_eagerly_beside_what_is_compiled_is_told_to_be_compiled_too():
    """As of a model whose flex_attention alone is compiled. Twenty passes over the memory become one, and the time is
    that of the program that compiles them."""

    def captured(is_mended: bool) -> Report:
        attend = torch.compile(lambda x: x.sin().cos())
        rest = torch.compile(adds) if is_mended else adds
        with flopmeter.cuda(A100) as device:
            x, graph = torch.zeros(1 << 24, device="cuda"), torch.cuda.CUDAGraph()
            attend(rest(x))
            with torch.cuda.graph(graph):
                rest(attend(rest(x)))
            for _ in range(3):
                graph.replay()
        return device.report().step

    now, mended = captured(False), captured(True)
    (advice,) = now.advice
    assert advice.remedy == "torch.compile on these, too"
    assert advice.what == f"{2 * DEPTH} kernels"
    assert now.seconds - advice.gain_seconds == pytest.approx(mended.seconds, rel=0.01)
    assert not mended.advice
