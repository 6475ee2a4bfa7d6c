"""FlopMeter(compile=True): a program is compiled as if it called torch.compile itself, and nothing is left behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim import SGD, AdamW, Optimizer, SparseAdam
from torch.optim import optimizer as optimizer_hooks
from torch.optim.lr_scheduler import StepLR

from flopmeter import FlopMeter, Report
from flopmeter.records import Op


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def two_blocks() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(Block(), Block())


BATCH = torch.empty(8, 16, device="meta")


def train(model: Any, step: Any) -> None:
    out = model(BATCH)
    (out * out).mean().backward()
    step()


def metered(run: Any, **options: Any) -> tuple[list[Op], Report]:
    with FlopMeter("h100-sxm5-80gb", **options) as meter:
        run()
    return meter.trace.ops, meter.report()


def test_kernels_are_those_of_the_program_that_compiles_itself() -> None:
    found = []
    for compile_, prepared in ((False, torch.compile), (True, lambda function: function)):
        model = two_blocks()
        optimizer = AdamW(model.parameters())

        def program(prepared: Any = prepared, model: Any = model, optimizer: Any = optimizer) -> None:
            compiled, step = prepared(model), prepared(optimizer.step)
            train(compiled, step)
            train(compiled, step)

        ops, report = metered(program, compile=compile_)
        graphs = [
            (graph.part, graph.calls, [(k.name, k.kind, k.reads, k.writes, k.origins) for k in graph.kernels])
            for graph in report.graphs
        ]
        rows = [
            (op.module, op.phase, op.graph, kernel.cost.name, kernel.cost.bytes_read, kernel.cost.bytes_written)
            for op, kernel in zip(ops, report.kernels, strict=False)
        ]
        found.append((report.mode, len(ops), graphs, rows))
    assert found[0] == found[1]
    assert found[1][0] == "compiled"
    assert [(part, calls) for part, calls, _ in found[1][2]] == [("forward", 2), ("backward", 2), ("inference", 2)]


def test_a_scheduled_or_kept_step_is_compiled_too() -> None:
    model = two_blocks()
    optimizer = SGD(model.parameters(), momentum=0.9)
    kept = optimizer.step
    scheduler = StepLR(optimizer, 1)
    train(model, optimizer.step)  # makes its state
    for step in (kept, optimizer.step):
        ops, _ = metered(lambda step=step: train(model, step), compile=True)
        assert {op.graph is None for op in ops if op.phase == "optimizer"} == {False}
    scheduler.step()


def test_what_lies_between_compiled_modules_stays_eager() -> None:
    """The square and the mean are the program's own, as is the gradient that they start with."""
    model = two_blocks()
    ops, report = metered(lambda: train(model, lambda: None), compile=True)
    assert [op.call.name for op in ops if op.graph is None and op.phase == "forward"][:2] == ["mul", "mean"]
    assert any("such as a loss outside of a module" in note for note in report.notes)


def test_modules_called_one_by_one_are_compiled_one_by_one_and_keep_their_names() -> None:
    with torch.no_grad():
        first, second = two_blocks(), nn.Softmax(-1)
        ops, report = metered(lambda: second(first(BATCH)), compile=True)
    assert [graph.part for graph in report.graphs] == ["inference", "inference"]
    assert {op.module.partition(".")[0] for op in ops} == {"Sequential", "Softmax"}


def test_a_module_that_the_program_compiles_is_left_as_it_is() -> None:
    model = torch.compile(two_blocks(), mode="reduce-overhead")
    with torch.no_grad():
        _, report = metered(lambda: model(BATCH), compile=True)
    assert [graph.replays for graph in report.graphs] == [True]


class Refused(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def test_what_torch_fails_to_compile_runs_eagerly_with_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo import convert_frame

    plain = convert_frame.ConvertFrame.__call__

    def fails(self: Any, frame: Any, *args: Any, **options: Any) -> Any:
        if frame.f_code is Refused.forward.__code__:
            raise RuntimeError("no such opcode")
        return plain(self, frame, *args, **options)

    monkeypatch.setattr(convert_frame.ConvertFrame, "__call__", fails)
    model = two_blocks()
    with torch.no_grad():
        ops, report = metered(lambda: Refused()(model(BATCH)), compile=True)
    assert [op.call.name for op in ops if op.graph is None] == ["sin"]
    assert len(report.graphs) == 1
    assert any("run eagerly: forward" in note and "no such opcode" in note for note in report.notes)
    assert any("run eagerly: Refused: torch compiles nothing of it" in note for note in report.notes)


def test_a_step_with_a_closure_runs_eagerly_and_the_model_in_it_compiled() -> None:
    model = two_blocks()
    optimizer = SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        loss = model(BATCH).sum()
        loss.backward()
        return loss

    ops, report = metered(lambda: optimizer.step(closure), compile=True)
    assert any("SGD.step: it is given a closure" in note for note in report.notes)
    assert [graph.part for graph in report.graphs] == ["forward", "backward"]
    assert ops[-1].graph is None


class OfTwoFunctions(Optimizer):
    """Two compiled functions and an eager op between them, as optimizers that shard their update have."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.scale = torch.compile(lambda weight, grad: weight.mul_(0.9).add_(grad))
        self.shift = torch.compile(lambda weight: weight.sub_(0.1))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for weight in self.param_groups[0]["params"]:
            self.scale(weight, weight.grad)
            torch.sin(weight)
            self.shift(weight)


def test_what_an_optimizer_compiles_itself_belongs_to_its_step() -> None:
    model = two_blocks()
    optimizer = OfTwoFunctions(model.parameters())
    ops, report = metered(lambda: [train(model, optimizer.step) for _ in range(3)])
    compiled = [op for op in ops if op.graph is not None]
    assert len(compiled) == 3 * 2 * len(list(model.parameters()))
    assert {op.phase for op in compiled} == {"optimizer"}
    assert "3 steps of an optimizer" in str(report)


def test_an_optimizer_that_torch_refuses_runs_eagerly_with_a_note() -> None:
    """torch marks LBFGS and SparseAdam as not to be compiled (TorchPatcher in torch/_dynamo/eval_frame.py)."""
    with torch.device("meta"):
        weight = nn.Parameter(torch.empty(8, 4))
    weight.grad = torch.sparse_coo_tensor(torch.tensor([[1, 5]]), torch.ones(2, 4), (8, 4)).to("meta")
    optimizer = SparseAdam([weight])
    ops, report = metered(optimizer.step, compile=True)
    assert any("SparseAdam.step: torch compiles nothing of it" in note for note in report.notes)
    assert ops
    assert not report.graphs


def state() -> list[Any]:
    steps = {kind: vars(kind).get("step") for kind in (AdamW, SGD, Optimizer)}
    cells = [step.__closure__[0].cell_contents for step in steps.values() if getattr(step, "__closure__", None)]
    hooks = [
        dict(module_hooks._global_forward_hooks), dict(module_hooks._global_forward_pre_hooks),
        dict(optimizer_hooks._global_optimizer_pre_hooks), dict(optimizer_hooks._global_optimizer_post_hooks),
    ]  # fmt: skip
    return [nn.Module.__call__, steps, cells, hooks, dict(vars(torch._dynamo.eval_frame)), torch.compile]


@pytest.mark.parametrize("fails", [False, True], ids=["in order", "after an exception"])
def test_nothing_is_left_behind(fails: bool) -> None:
    model = two_blocks()
    optimizer = AdamW(model.parameters())

    def program() -> None:
        train(model, optimizer.step)
        if fails:
            raise KeyError("the program's own")

    metered(program if not fails else lambda: train(model, optimizer.step), compile=True)  # imports what it imports
    before, modules = state(), [dict(vars(module)) for module in model.modules()]
    if fails:
        with pytest.raises(KeyError):
            metered(program, compile=True)
    else:
        metered(program, compile=True)
    assert state() == before
    assert [vars(module).keys() for module in model.modules()] == [each.keys() for each in modules]
    assert not any("_orig_mod" in name for name in model.state_dict())
    ops, _ = metered(lambda: train(model, optimizer.step))
    assert all(op.graph is None for op in ops)


def test_an_error_of_the_program_comes_through() -> None:
    with pytest.raises(RuntimeError, match="17"):
        metered(lambda: two_blocks()(torch.empty(8, 17, device="meta")), compile=True)
    assert nn.Module.__call__.__module__.startswith("torch.")


def test_it_is_for_the_device_alone() -> None:
    with pytest.raises(ValueError, match="as_cuda"):
        FlopMeter(compile=True, as_cuda=False)
    with pytest.raises(ValueError, match="one of False, True, 'rules'"):
        FlopMeter(compile="yes")  # type: ignore[arg-type]
