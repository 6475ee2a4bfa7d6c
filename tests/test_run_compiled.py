"""torch.compile under the device named cuda: the compiler's own kernels, as if the program were metered on meta."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import flopmeter
from flopmeter import FlopMeter
from flopmeter.records import Trace
from flopmeter.run.session import ScriptSession, Wishes
from flopmeter.torch_names.dispatcher import running_version

H100 = "h100-sxm5-80gb"

# What other tests leave behind makes Dynamo compile again: test_run_compiled_alone.py runs these in a new process.
pytestmark = pytest.mark.slow


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2)
        return x + self.down(F.gelu(self.up(x)))


class LanguageModel(nn.Module):
    def __init__(self, width: int = 32, vocabulary: int = 128) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.block, self.head = Block(width), nn.Linear(width, vocabulary, bias=False)
        self.words.weight = self.head.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        places = torch.arange(0, tokens.size(1), dtype=torch.long, device=tokens.device)
        logits = self.head(self.block(self.words(tokens) + self.places(places)))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def train(device: str) -> None:
    """Two steps of two batches each: a compiled model, a fused optimizer, autocast, clipped gradients."""
    with torch.device(device):
        model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    compiled = torch.compile(model)
    for _ in range(2):
        for _ in range(2):
            batch = torch.randint(128, (4, 16), device=device)
            with torch.autocast("cuda", torch.bfloat16):
                _, loss = compiled(batch, batch)
                (loss / 2).backward()
        nn.utils.clip_grad_norm_(compiled.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def on_cuda(program: Callable[[], Any], hardware: str = H100, **wishes: Any) -> ScriptSession:
    session = ScriptSession(hardware, Wishes(**wishes))
    with session.open():
        program()
    return session


def graphs_of(trace: Trace) -> list[Any]:
    assert not trace.compilation.failures
    return [
        (graph.part, graph.calls, graph.recompiled_because, graph.breaks, graph.saved_bytes, graph.kernels)
        for graph in trace.compilation.graphs
    ]


def without_place(graph: Any) -> Any:
    *facts, kernels = graph
    return (*facts, [(each.name, each.kind, each.reads, each.writes, each.scheduler_bytes) for each in kernels])


def test_a_training_script_has_the_kernels_that_a_meter_on_meta_sees() -> None:
    named = on_cuda(lambda: train("cuda")).meter.trace
    with FlopMeter(H100) as meter:
        train("meta")
    found, expected = (list(map(without_place, graphs_of(trace))) for trace in (named, meter.trace))
    assert found == expected
    assert [graph[:4] for graph in found] == [("forward", 4, None, ()), ("backward", 4, None, ())]
    ops = [[(op.call.name, op.phase, op.module, op.graph) for op in trace.ops] for trace in (named, meter.trace)]
    compiled = [[op for op in each if op[3] is not None] for each in ops]
    assert compiled[0] == compiled[1]


def test_each_part_of_a_run_has_the_graphs_that_ran_in_it() -> None:
    report = on_cuda(lambda: train("cuda")).report("train")
    assert report.by_part["setup"].mode == "eager"
    for name in ("first step", "steady step"):
        assert report.by_part[name].mode == "compiled"
        assert [(graph.part, graph.calls) for graph in report.by_part[name].graphs] == [("forward", 2), ("backward", 2)]


def test_a_traced_tensor_tells_cuda_and_takes_it() -> None:
    def asks(x: Tensor) -> Tensor:
        assert x.is_cuda
        assert not x.is_meta
        assert x.device == torch.device("cuda:0")
        assert x.device.type == "cuda"
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            raise RuntimeError("told wrongly")
        with torch.autocast(x.device.type, torch.bfloat16):
            product = x @ x
        product = product + torch.arange(8, device="cuda") + torch.ones(8).cuda() + x.new_zeros(8)
        return (product + torch.tensor([2.0] * 8, device=x.device)).to("cuda").to(0).to(x.device)

    def program() -> None:
        compiled = torch.compile(asks, fullgraph=True)
        for _ in range(3):
            assert compiled(torch.ones(8, 8, device="cuda")).is_cuda

    assert [graph[:3] for graph in graphs_of(on_cuda(program).meter.trace)] == [("inference", 3, None)]


def test_a_compiled_function_reads_the_properties_of_the_device() -> None:
    """An H100 has 132 SMs, and capability 9.0."""

    def told(x: Tensor) -> Tensor:
        facts = torch.cuda.get_device_properties(x.device)
        return x.new_ones(facts.multi_processor_count, facts.major)

    def program() -> None:
        out = torch.compile(told, fullgraph=True)(torch.ones(8, device="cuda"))
        assert out.shape == (132, 9)

    on_cuda(program)


def test_another_gpu_is_refused_in_a_compiled_function_too() -> None:
    with pytest.raises(Exception, match="there is no cuda:3 among 1"):
        on_cuda(lambda: torch.compile(lambda x: x.to("cuda:3"), fullgraph=True)(torch.ones(8, device="cuda")))


@pytest.mark.parametrize("fused", [False, True])
def test_a_compiled_optimizer_ends_the_steps(fused: bool) -> None:
    def program() -> None:
        model = nn.Linear(8, 8, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
        step = torch.compile(optimizer.step)
        for _ in range(4):
            model(torch.ones(4, 8, device="cuda")).sum().backward()
            step()
            optimizer.zero_grad()

    session = on_cuda(program)
    assert session.steps.parts(session.now()).count == 4
    ops = session.meter.trace.ops
    assert {op.phase for op in ops if op.graph is not None} == (set() if fused else {"optimizer"})
    assert sum(op.phase == "optimizer" for op in ops) >= 4  # of the fused one no graph comes


def test_calls_of_a_module_that_compiled_itself_are_steps() -> None:
    def program() -> None:
        model = Block().cuda()
        model.compile()
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(1, 8, 32, device="cuda"))

    session = on_cuda(program)
    parts = session.steps.parts(session.now())
    assert (parts.count, parts.marked_by) == (3, "calls of Block")


def test_an_evaluation_before_the_training_of_a_module_that_compiled_itself_is_setup() -> None:
    """The compiled call runs inside of autograd, which remembers nothing there."""

    def program() -> None:
        model = Block().cuda()
        optimizer = torch.optim.SGD(model.parameters())
        model.compile()
        with torch.no_grad():
            model.eval()(torch.ones(1, 8, 32, device="cuda"))
        for _ in range(2):
            model.train()(torch.ones(1, 8, 32, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    parts = on_cuda(program).report("train").by_part
    assert parts["setup"].macs > 0
    assert parts["first step"].macs == parts["steady step"].macs


def test_a_model_compiled_before_ddp_wraps_it_has_its_own_products_and_memory() -> None:
    """torch splits its graph where a bucket of gradients is full, and traces each part with results of the one
    before. Before torch 2.13 the gradient that comes into a graph lives until its end."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).relu()
            return x

    def program(compiles: bool) -> None:
        model = Layers().cuda()
        dist.init_process_group("nccl")
        ddp = nn.parallel.DistributedDataParallel(torch.compile(model) if compiles else model, device_ids=[0])
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        for _ in range(3):
            ddp(torch.zeros(64, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    eager, compiled = (
        on_cuda(lambda compiles=compiles: program(compiles), gpus=2).report("train").by_part  # type: ignore[misc]
        for compiles in (False, True)
    )
    assert compiled["steady step"].mode == "compiled"
    for name in ("first step", "steady step"):
        assert compiled[name].macs == eager[name].macs
        held = 64 * 1024 * 4 if running_version() < (2, 13) else 0
        assert compiled[name].peak_memory_bytes <= eager[name].peak_memory_bytes + held


def test_small_constants_are_written_into_kernels_and_compiled_once() -> None:
    """A row of 4 floats is read and written; the constant is part of the code."""

    def scaled(x: Tensor) -> Tensor:
        return x * torch.tensor([1.0, 2.0, 3.0, 4.0], device=x.device)

    with FlopMeter(H100) as meter:
        compiled = torch.compile(scaled)
        for _ in range(2):
            compiled(torch.empty(1, 4, device="meta"))
    ((part, calls, *_, kernels),) = graphs_of(meter.trace)
    assert (part, calls) == ("inference", 2)
    assert [(kernel.kind, kernel.bytes_read, kernel.bytes_written) for kernel in kernels] == [("triton", 16, 16)]


@pytest.mark.parametrize(("hardware", "kind"), [("a100-sxm4-80gb", "library"), (H100, "triton")])
def test_adding_up_bf16_by_indices_is_triton_s_from_hopper_on(hardware: str, kind: str) -> None:
    """Atomics on bf16 are slow before compute capability 9.0, so inductor leaves index_put to torch there
    (needs_fallback_due_to_atomic_add_limitations in torch/_inductor/utils.py)."""

    def add_up(table: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        return table.index_put((index,), rows, accumulate=True)

    with FlopMeter(hardware) as meter, torch.device("meta"):
        rows = torch.empty(64, 16, dtype=torch.bfloat16)
        torch.compile(add_up)(rows, torch.empty(64, dtype=torch.long), rows)
    ((*_, kernels),) = graphs_of(meter.trace)
    assert kernels[-1].kind == kind


def test_a_compiled_function_may_call_one_of_another_file_that_defines_a_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo ends the graph there, and the code that it writes holds the other file's globals, a dictionary, as a
    constant: such code has no hash."""
    (tmp_path / "products_of_another_file.py").write_text(
        "def twice(x, w):\n"
        "    product = x @ w\n"
        "    class Held:\n"
        "        def __init__(self, value):\n"
        "            self.value = value\n"
        "    return Held(product).value @ w\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    twice = importlib.import_module("products_of_another_file").twice
    compiled = torch.compile(lambda x, w: twice(x, w) + 1)
    with flopmeter.cuda(H100, steps=3) as device:
        x, w = torch.zeros(64, 64, device=device), torch.zeros(64, 64, device=device)
        while True:
            compiled(x, w)
    assert device.report().step.macs == 2 * 64 * 64 * 64
