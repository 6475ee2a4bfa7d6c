"""An op of your own, such as a Triton kernel, with its own cost rule.

    python scripts/examples/custom_op.py

Without a rule it costs the kernels that its Python launches, here two; a rule says that it is one kernel, which reads
each input once. An op whose Python cannot run without a GPU is listed as uncounted until it has a rule.
"""

from __future__ import annotations

import torch
from tabulate import tabulate
from torch import Tensor

import flopmeter
from flopmeter.records import Call


@torch.library.custom_op("examples::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up in one kernel; this stands for the launch of a real one."""
    return torch.nn.functional.silu(gate) * up


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    """What it returns, so that it runs on meta tensors (and under torch.compile)."""
    return torch.empty_like(gate)


def swiglu_cost(call: Call) -> int:
    """exp, add, divide and two multiplies for each element: silu(g) · u = g / (1 + exp(-g)) · u."""
    return 5 * call.outputs[0].numel


def main() -> None:
    gate, up = torch.empty(2, 4096, 14336, dtype=torch.bfloat16, device="meta").unbind()
    with flopmeter.FlopMeter("h100-sxm5-80gb") as meter:
        torch.ops.examples.swiglu(gate, up)
    before = meter.report().rows()
    flopmeter.register_cost(swiglu)(swiglu_cost)  # or as a decorator of the rule: @flopmeter.register_cost(swiglu)
    after = meter.report().rows()  # the same trace: rules are looked up when a report is made
    headers = ("rule", "class", "FLOPs", "bytes read", "bytes written", "µs", "bound by")
    rows = [
        (rule, row.name, row.flops, row.bytes_read, row.bytes_written, row.seconds * 1e6, row.regime)
        for rule, (row,) in (("none", before), ("swiglu_cost", after))
    ]
    print(tabulate(rows, headers=headers, floatfmt=",.0f", intfmt=","))


if __name__ == "__main__":
    main()
