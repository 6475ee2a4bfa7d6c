"""Experts of transformers where torch has no grouped matmul for them: an op that runs one matmul after the other."""

from __future__ import annotations

import pytest
import torch

import flopmeter
from flopmeter import FlopMeter

moe = pytest.importorskip("transformers.integrations.moe")
EXPERTS, IN, OUT = 4, 32, 48
ROWS = (5, 0, 8, 3)


def experts(device="meta"):
    """Rows sorted by expert, the weights, and where each expert's rows end."""
    x = torch.ones(sum(ROWS), IN, device=device, requires_grad=True)
    weight = torch.ones(EXPERTS, IN, OUT, device=device, requires_grad=True)
    ends = torch.tensor(ROWS).cumsum(0)
    return x, weight, flopmeter.on_meta(ends) if device == "meta" else ends


def loop(x, weight, ends):
    return torch.ops.transformers.grouped_mm_fallback(x, weight, offs=ends)


def test_both_passes_have_the_matmuls_of_experts_with_rows_and_the_bytes_of_their_weights_alone():
    with FlopMeter("v100-sxm2-16gb") as meter:
        out = loop(*experts())
        out.backward(torch.empty_like(out))
    report = meter.report()
    assert report.uncounted == []
    loops = [kernel.cost for kernel in report.kernels if "grouped_mm_fallback" in kernel.cost.name]
    products = [cost for cost in loops if cost.macs]
    assert len(products) == 3 + 2 * 3  # the second expert has no row
    assert sum(cost.macs for cost in products) == 3 * sum(ROWS) * IN * OUT
    filled = [rows for rows in ROWS if rows]
    read = sum(rows * IN + IN * OUT for rows in filled)  # forward
    read += sum(rows * OUT + IN * OUT for rows in filled) + sum(rows * (IN + OUT) for rows in filled)
    assert sum(cost.bytes_read for cost in products) == 4 * read
    fills = [(cost.bytes_read, cost.bytes_written) for cost in loops if not cost.macs and cost.bytes_written]
    assert fills == [(0, 4 * sum(ROWS) * OUT), (0, 4 * sum(ROWS) * IN), (0, 4 * EXPERTS * IN * OUT)]
    (first, second) = [cost.work.matmuls[0] for cost in products[3:5]]  # backward, of the first expert
    assert (first.m, first.n, first.k) == (filled[0], IN, OUT)
    assert (second.m, second.n, second.k) == (IN, OUT, filled[0])


def test_the_matmuls_are_those_that_torch_runs_inside_of_the_op():
    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.macs = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.out:
                self.macs.append(args[0].shape[0] * args[0].shape[1] * args[1].shape[1])
            return func(*args, **(kwargs or {}))

    x, weight, ends = experts("cpu")
    with torch.no_grad(), Counted() as counted:
        moe._grouped_mm_fallback(x, weight, ends)
        moe._grouped_mm_fallback_bwd(x, weight, ends, torch.ones(sum(ROWS), OUT))
    with FlopMeter("v100-sxm2-16gb") as meter:
        loop(*experts()).sum().backward()
    ours = [kernel.cost.macs for kernel in meter.report().kernels if kernel.cost.macs]
    assert ours == counted.macs


def test_the_host_waits_for_the_offsets():
    with torch.no_grad(), FlopMeter("v100-sxm2-16gb") as meter:
        loop(*experts())
    assert [kernel.cost.blocks_host for kernel in meter.report().kernels if kernel.cost.link_bytes] == [True]


def test_groups_that_are_not_known_are_taken_as_equal_and_that_is_told():
    x, weight, _ = experts()
    ends = torch.empty(EXPERTS, dtype=torch.long, device="meta")
    with torch.no_grad(), FlopMeter("v100-sxm2-16gb") as meter:
        loop(x, weight, ends)
    report = meter.report()
    assert [kernel.cost.macs for kernel in report.kernels if kernel.cost.macs] == [4 * IN * OUT] * EXPERTS
    (told,) = report.assumptions
    assert told.startswith("groups of equal length for transformers.grouped_mm_fallback")


@pytest.mark.slow
def test_a_compiled_graph_has_them_too_with_the_lengths_that_are_known():
    compiled = torch.compile(loop)
    with torch.no_grad(), FlopMeter("h100-sxm5-80gb") as meter:
        compiled(*experts())
    report = meter.report()
    assert [kernel.cost.macs for kernel in report.kernels if kernel.cost.macs] == [
        rows * IN * OUT for rows in ROWS if rows
    ]
    assert not report.assumptions
