"""An optimizer that runs under torch.compile is fused as inductor fuses it; one that does not stays eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.optim import SGD, Adadelta, Adam, Adamax, AdamW, NAdam, RMSprop

from flopmeter import FlopMeter, Report


def two_layers() -> nn.Module:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    give_gradients(model)
    return model


def give_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)


def kernels(report: Report) -> list[str]:
    return [kernel.cost.name for kernel in report.kernels]


# The counts of torch's own test/inductor/test_compiled_optimizers.py, for these two layers: (foreach, for loops). The
# step counters are one kernel, and the rest of a step is another.
KERNELS = {
    Adam: (2, 8), AdamW: (2, 8), NAdam: (2, 8), RMSprop: (2, 8), Adadelta: (2, 8), Adamax: (2, 8),
}  # fmt: skip


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("foreach", [True, False])
def test_a_compiled_step_has_the_kernels_that_torch_expects_of_inductor(kind: Any, foreach: bool) -> None:
    optimizer = kind(two_layers().parameters(), foreach=foreach)
    step = torch.compile(optimizer.step)
    for _ in range(2):
        with FlopMeter("h100-sxm5-80gb", compile="rules") as meter:
            step()
    eager, compiled = meter.report(), meter.report(mode="compiled")
    assert len(kernels(compiled)) == KERNELS[kind][not foreach]
    assert len(kernels(eager)) > 2 * len(kernels(compiled))
    assert compiled.flops == eager.flops
    assert compiled.bytes_read < eager.bytes_read
    assert compiled.bytes_written < eager.bytes_written


def test_a_compiled_step_reads_and_writes_each_tensor_once() -> None:
    """SGD with momentum: gradient, buffer and parameter in; buffer and parameter out."""
    model = two_layers()
    step = torch.compile(SGD(model.parameters(), momentum=0.9, foreach=True).step)
    for _ in range(2):
        with FlopMeter(compile="rules") as meter:
            step()
    compiled = meter.report(mode="compiled")
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert len(kernels(compiled)) == 1
    assert (compiled.bytes_read, compiled.bytes_written) == (3 * 4 * parameters, 2 * 4 * parameters)


def test_counters_that_an_eager_step_left_on_the_cpu_move_to_the_device() -> None:
    optimizer = AdamW(two_layers().parameters())
    with FlopMeter(compile="rules"):
        optimizer.step()
    with FlopMeter(compile="rules") as meter:
        torch.compile(optimizer.step)()
    assert len(kernels(meter.report(mode="compiled"))) == 2
    assert {state["step"].device.type for state in optimizer.state.values()} == {"meta"}


def test_a_fused_optimizer_stays_one_kernel_of_torchs() -> None:
    with FlopMeter(compile="rules") as meter:
        torch.compile(AdamW(two_layers().parameters(), fused=True).step)()
    assert kernels(meter.report(mode="compiled"))[-1] == "_fused_adamw_"


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(self.orthogonal(parameter.grad), alpha=-0.02)

    @staticmethod
    @torch.compile
    def orthogonal(x: torch.Tensor) -> torch.Tensor:
        x = x.bfloat16()
        x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
        for _ in range(5):
            a = x @ x.mT
            b = -4.775 * a + 2.0315 * a @ a
            x = 3.4445 * x + b @ x
        return x


def test_a_compiled_function_inside_of_an_optimizers_step_is_fused() -> None:
    """By hand: the norm in two stages, the division, and five times three products, each followed by the element-wise
    ops between it and the next; the uncompiled update is a kernel of its own."""
    with torch.device("meta"):
        weights = [nn.Parameter(torch.empty(128, 128)) for _ in range(4)]
    for weight in weights:
        weight.grad = torch.empty_like(weight)
    with FlopMeter(compile="rules") as meter:
        Muon(weights).step()
    names = kernels(meter.report(mode="compiled"))
    assert names.count("mm") == 4 * 15
    assert len(names) == 4 * (3 + 5 * (3 + 3) + 1)
    assert len(names) < len(kernels(meter.report()))


def test_an_optimizer_that_is_not_compiled_stays_eager() -> None:
    def optimizer_kernels(model: nn.Module, mode: str) -> list[str]:
        optimizer = AdamW(model.parameters())
        with FlopMeter(compile="rules") as meter:
            model(torch.empty(4, 10, device="meta")).sum().backward()
            optimizer.step()
        return [kernel.cost.name for kernel in meter.report(mode=mode).kernels if kernel.ops[0].phase == "optimizer"]

    eager = optimizer_kernels(two_layers(), "eager")
    assert optimizer_kernels(two_layers(), "compiled") == eager
    with FlopMeter(compile="rules"):
        compiled_model = torch.compile(two_layers())
    assert optimizer_kernels(compiled_model, "compiled") == eager


def test_a_compiled_training_step_has_a_graph_for_each_of_forward_backward_and_optimizer() -> None:
    model = two_layers()
    optimizer = SGD(model.parameters(), lr=0.1)

    def train(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    with FlopMeter(compile="rules") as meter:
        torch.compile(train)(torch.empty(4, 10, device="meta"))
    launches = meter.report(mode="compiled").launches
    phases = {graph: kernel.ops[0].phase for graph, kernel in zip(launches.graphs, launches.kernels, strict=True)}
    assert phases == {0: "forward", 1: "backward", 2: "optimizer"}


def test_a_compiled_step_in_a_hook_of_the_backward_pass_is_fused() -> None:
    model = two_layers()
    optimizers = {parameter: AdamW([parameter]) for parameter in model.parameters()}
    steps = {parameter: torch.compile(optimizer.step) for parameter, optimizer in optimizers.items()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: steps[parameter]())
    for _ in range(2):  # the first makes the state
        model.zero_grad()
        with FlopMeter(compile="rules") as meter:
            model(torch.empty(4, 10, device="meta")).sum().backward()
    report = meter.report(mode="compiled")
    assert len([kernel for kernel in report.kernels if kernel.ops[0].phase == "optimizer"]) == 4 * 2
