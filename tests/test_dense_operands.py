"""Kernels that walk dense memory: torch copies operands that lie otherwise."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from costs_support import costs_in, meta
from torch.profiler import profile

from flopmeter import FlopMeter
from flopmeter.records import MOVEMENT, NORMALIZATION

PROGRAMS = {
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "group norm": lambda x: F.group_norm(x, 4),
    "softmax": lambda x: torch.softmax(x, -1),
    "softmax of another dimension": lambda x: torch.softmax(x, 1),
    "log softmax": lambda x: torch.log_softmax(x, -1),
}
ORDERS = {
    "dense": lambda x: x,
    "permuted": lambda x: x.transpose(1, 2),
    "sliced": lambda x: x[..., :32],
    "repeated": lambda x: x[:1].expand(8, -1, -1),
    "one row of each, turned": lambda x: x[:, :1].expand(-1, 4, -1).reshape(8, 4, 64, 1).transpose(2, 3)[:, :, 0],
}


def copies_by_torchs_profiler(program, x):
    with profile() as profiler:
        program(x)
    return sum(event.name == "aten::clone" for event in profiler.events())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_as_many_copies_as_torch_makes(program, order):
    costs = costs_in(lambda: PROGRAMS[program](ORDERS[order](meta(8, 64, 64))))
    made = copies_by_torchs_profiler(PROGRAMS[program], ORDERS[order](torch.ones(8, 64, 64)))
    assert sum(cost.op_class == MOVEMENT for cost in costs) == made
    assert sum(cost.op_class == NORMALIZATION for cost in costs) == 1


def test_a_permuted_row_is_copied_and_then_normalized_as_a_dense_one():
    dense = costs_in(lambda: F.layer_norm(meta(2, 196, 768), (768,)))
    copy, norm = costs_in(lambda: F.layer_norm(meta(2, 768, 196).transpose(1, 2), (768,)))
    assert (copy.flops, copy.bytes_read, copy.bytes_written) == (0, 4 * 2 * 196 * 768, 4 * 2 * 196 * 768)
    assert [(each.flops, each.bytes, each.work) for each in dense] == [(norm.flops, norm.bytes, norm.work)]


def test_a_permuted_gradient_is_copied_in_the_backward_pass():
    def step():
        x = meta(4, 32, 16).requires_grad_()
        return F.layer_norm(x, (16,)).transpose(1, 2).mul(meta(4, 16, 32)).sum().backward()

    names = [cost.op_class for cost in costs_in(step) if cost.name == "native_layer_norm_backward"]
    assert names == [MOVEMENT, NORMALIZATION]


def test_code_of_a_compiler_reads_a_permuted_row_where_it_lies():
    x = meta(2, 768, 196)
    with FlopMeter("a100-sxm4-80gb") as meter:
        F.layer_norm(x.transpose(1, 2), (768,)).add(1)
    (kernel,) = meter.report(mode="compiled").kernels
    assert (kernel.cost.bytes_read, kernel.cost.bytes_written) == (x.nbytes, x.nbytes)


def test_a_cumulative_sum_of_a_transposed_matrix_copies_it():
    copy, scan = costs_in(lambda: meta(64, 32).t().cumsum(-1))
    assert (copy.op_class, copy.bytes_written) == (MOVEMENT, 4 * 64 * 32)
    assert scan.bytes_read == 4 * 64 * 32
