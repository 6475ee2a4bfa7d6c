"""What the tests of Transformer Engine's shim share: programs of one layer, and what a report says of them."""

from __future__ import annotations

import torch
from torch import nn

import flopmeter
from flopmeter.run.session import Wishes

A100, H100, B200 = "a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm-180gb"
T, IN, OUT = 512, 256, 384  # tokens, features
BF16 = torch.bfloat16


def ran(program, hardware=H100, **options):
    """The report of all that the program ran."""
    with flopmeter.cuda(hardware, wishes=Wishes(shims=("transformer_engine",)), **options) as device:
        program()
    return device.report().step


def names(report) -> list[str]:
    """Kernels in order, without those that make inputs."""
    found = (kernel.cost.name.rpartition("::")[2] for kernel in report.kernels)
    return [name for name in found if name not in ("zeros", "ones", "randn", "normal_", "empty", "fill_", "zero_")]


def work(report) -> list[tuple[str, int, int, int]]:
    """Products in any order (torch takes the weight's gradient first), each with FLOPs and bytes."""
    costs = sorted(
        (kernel.cost for kernel in report.kernels if "mm" in kernel.cost.name), key=lambda cost: cost.bytes_read
    )
    return [(cost.name, cost.flops, cost.bytes_read, cost.bytes_written) for cost in costs]


def moved(report, name: str) -> list[tuple[int, int]]:
    """Bytes read and written by each kernel of that name."""
    costs = [kernel.cost for kernel in report.kernels if kernel.cost.name.rpartition("::")[2] == name]
    return [(cost.bytes_read, cost.bytes_written) for cost in costs]


def package():
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    return te, recipe


def once(layer_of, recipe=None, x_of=lambda: torch.zeros(T, IN, device="cuda", dtype=BF16, requires_grad=True), **call):
    """Forward and backward of a layer, once."""

    def program():
        te, recipes = package()
        layer, x = layer_of(te), x_of()
        chosen = None if recipe is None else getattr(recipes, recipe)()
        with te.fp8_autocast(enabled=chosen is not None, fp8_recipe=chosen):
            out = layer(x, **call)
        gradient = torch.empty_like(out)
        out.backward(gradient)
        assert x.grad.shape == x.shape
        assert all(each.grad.shape == each.shape for each in layer.parameters())

    return program


def linear(bias=False, **options):
    return lambda te: te.Linear(IN, OUT, bias=bias, params_dtype=BF16, **{"init_method": nn.init.zeros_, **options})


def collectives(report) -> list[tuple[str, int]]:
    """Their kinds, and the bytes that they write, without those of a few numbers."""
    found = [(kernel.cost.collective, kernel.cost) for kernel in report.kernels if kernel.cost.collective]
    return [(collective.kind, cost.bytes_written) for collective, cost in found if cost.bytes_written > 64]


class Once(nn.Module):
    """A program as one call of a module, which is then the step of the report."""

    def __init__(self, program):
        super().__init__()
        self.program, self.weight = program, nn.Parameter(torch.zeros(1, device="cuda"))

    def forward(self):
        self.program()
