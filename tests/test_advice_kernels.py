"""The changed runs that advice is priced by, kernel by kernel, beside the programs that are mended by hand."""

from __future__ import annotations

import pytest
import torch
from faults import FAULTS
from torch import nn

from flopmeter import FlopMeter
from flopmeter.report.advice.remedies import REMEDIES, trace_of
from flopmeter.report.advice.tables import dense_gradients_of_embeddings

# What differs elsewhere is small: advice leaves the type of a norm's statistics, layouts of gradients and the like.
SAME_BYTES = (
    "contiguous copies before attention", "heads repeated for attention", "a mask repeated for all sequences",
    "a one-hot product", "scores of all tokens", "a cache grown by cat", "an LSTM called for each step",
    "a GRU called for each step", "a mask for is_causal", "gradients filled with zeros", "eager attention",
    "vocabulary of 50257", "sync in the loop", "recompute without need", "unpinned copies", "NCHW under AMP",
    "dense gradient of a table",
)  # fmt: skip
SAME_FLOPS = ("casts around norms", "fp32 by accident", "tiny batch", "no fused optimizer")
SAME_ON_THE_HOST = (
    "contiguous copies before attention", "a mask repeated for all sequences", "scores of all tokens",
    "a mask for is_causal", "gradients filled with zeros", "vocabulary of 50257", "sync in the loop",
    "unpinned copies", "casts around norms", "fp32 by accident", "tiny batch", "no fused optimizer",
)  # fmt: skip
COPY = dict.fromkeys(("copy_", "_to_copy", "clone"), "copy")


def told_of(fault):
    """The changed run of the advice that the fault is to get."""
    report = fault.report(is_mended=False)
    proposals = (each for remedy in REMEDIES for each in remedy(report, trace_of(report)))
    return next(each.then for each in proposals if each.remedy.startswith(fault.remedy))


def kernels_in(report):
    named = ((COPY.get(kernel.cost.name, kernel.cost.name), kernel) for kernel in report.kernels)
    costs = sorted((name, kernel.op.phase, kernel.cost.flops, kernel.cost.bytes) for name, kernel in named)
    return [each[:3] for each in costs], [each[3] for each in costs]


@pytest.mark.parametrize("name", [*SAME_BYTES, *SAME_FLOPS])
def test_the_change_that_is_priced_runs_the_kernels_of_the_mended_program(name):
    """Seeds, of 16 bytes, and numbers of steps apart. What lays an image otherwise is a copy by another name."""
    then, mended = told_of(FAULTS[name]), FAULTS[name].report(is_mended=True)
    (kernels, nbytes), (expected, expected_bytes) = kernels_in(then), kernels_in(mended)
    assert kernels == expected
    assert nbytes == pytest.approx(expected_bytes, rel=1e-4 if name in SAME_BYTES else 0.02, abs=4096)
    assert then.seconds == pytest.approx(mended.seconds, rel=0.05)
    if name in SAME_ON_THE_HOST:
        assert sum(kernel.views for kernel in then.kernels) == sum(kernel.views for kernel in mended.kernels)
        assert sum(kernel.module_calls for kernel in then.kernels) == sum(each.module_calls for each in mended.kernels)


@pytest.mark.parametrize("name", ["a backward pass for each loss", "NCHW under AMP", "recompute without need"])
def test_the_change_that_is_priced_takes_as_long_as_the_mended_program(name):
    assert told_of(FAULTS[name]).seconds == pytest.approx(FAULTS[name].report(is_mended=True).seconds, rel=1e-3)


def test_rows_of_a_table_are_added_to_it_as_by_sgd_with_sparse_gradients():
    def report(*, is_sparse):
        with torch.device("meta"):
            table, tail = nn.Embedding(2_000_000, 64, sparse=is_sparse), nn.Linear(64, 1)
            words = torch.empty(4096, 10, dtype=torch.long)
        optimizer = torch.optim.SGD([*table.parameters(), *tail.parameters()], lr=0.1)
        with FlopMeter("h100-sxm5-80gb") as meter:
            tail(table(words)).sum().backward()
            optimizer.step()
        return meter.report()

    dense, mended = report(is_sparse=False), report(is_sparse=True)
    (told,) = dense_gradients_of_embeddings(dense, trace_of(dense))
    assert kernels_in(told.then) == kernels_in(mended)
