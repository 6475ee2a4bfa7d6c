"""Embeddings with sparse=True: what a step moves is the rows that were looked up, not the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flopmeter import FlopMeter, Report
from flopmeter.records import Cost

ROWS, WIDTH, LOOKED_UP, BAGS = 1_000_000, 64, 2048, 32
VALUES, INDICES = LOOKED_UP * WIDTH * 4, LOOKED_UP * 8  # bytes

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "sgd with momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sparse adam": lambda parameters: torch.optim.SparseAdam(list(parameters)),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters),
}


def step(
    optimizer: Callable[[Any], torch.optim.Optimizer], rows: int = ROWS, device: str = "meta", backwards: int = 1
) -> Callable[[], None]:
    bag = nn.EmbeddingBag(rows, WIDTH, sparse=True, mode="sum", device=device)
    chosen = optimizer(bag.parameters())
    ids = torch.zeros(BAGS, LOOKED_UP // BAGS, dtype=torch.long, device=device)

    def run() -> None:
        for _ in range(backwards):
            bag(ids).sum().backward()
        chosen.step()
        chosen.zero_grad()

    return run


def report(run: Callable[[], None], mode: str = "eager") -> Report:
    with FlopMeter("h100-sxm5-80gb") as meter:
        run()
    return meter.report(mode=mode)


def costs(report: Report, name: str) -> list[Cost]:
    return [kernel.cost for kernel in report.kernels if kernel.cost.name == name]


@pytest.mark.parametrize("name", ["sgd", "sgd with momentum"])
def test_a_step_of_sgd_reads_the_gradient_and_touches_its_rows_alone(name):
    """w[i] -= lr·g: values and indices read, the rows read and written; a multiply and an add each."""
    (update,) = costs(report(step(OPTIMIZERS[name])), "add_")
    assert (update.bytes_read, update.bytes_written) == (VALUES + INDICES + VALUES, VALUES)
    assert update.flops == 2 * LOOKED_UP * WIDTH


def test_momentum_copies_values_and_indices_of_the_gradient():
    """The buffer begins as a copy of the gradient: it is cloned, or copied into a new sparse tensor."""
    found = report(step(OPTIMIZERS["sgd with momentum"]))
    copies = [*costs(found, "clone"), *costs(found, "copy_sparse_to_sparse_")]
    assert (VALUES + INDICES, VALUES + INDICES) in [(copy.bytes_read, copy.bytes_written) for copy in copies]
    assert not found.uncounted


def test_a_step_costs_the_same_for_a_table_of_any_size():
    small, large = (report(step(OPTIMIZERS["sgd"], rows=rows)) for rows in (10_000, ROWS))
    assert (small.flops, small.bytes_read, small.bytes_written) == (large.flops, large.bytes_read, large.bytes_written)
    assert not large.uncounted


@pytest.mark.parametrize("name", ["sparse adam", "adagrad"])
def test_an_adaptive_step_on_sparse_gradients_moves_no_more_than_its_rows(name):
    """Sorting them, each of some 20 ops reads or writes the rows a few times; only the first step's state is as large
    as the table."""
    run = step(OPTIMIZERS[name])
    report(run)
    second = report(run)
    assert not second.uncounted
    assert max(kernel.cost.bytes for kernel in second.kernels) <= 4 * (VALUES + INDICES)
    (joined,) = costs(second, "_coalesce")
    assert (joined.bytes_read, joined.bytes_written) == (VALUES + INDICES, VALUES + INDICES)
    assert joined.flops == LOOKED_UP * WIDTH  # each row is added to those of its index
    assert joined.blocks_host
    gathered = costs(second, "sparse_mask")[0]
    assert (gathered.bytes_read, gathered.bytes_written) == (VALUES + INDICES, VALUES)
    assert any("coalesce" in note for note in second.notes)


class _Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_sparse_step_on_meta_runs_the_ops_of_a_real_one(name):
    """The CPU's, from the gradient on; the CPU looks up how large bags are by other ops."""
    with _Names() as real:
        step(OPTIMIZERS[name], rows=5000, device="cpu")()
    with FlopMeter("h100-sxm5-80gb") as meter:
        step(OPTIMIZERS[name])()
    optimizer = [str(op.call.func) for op in meter.trace.ops if op.phase == "optimizer"]
    assert len(optimizer) >= 1
    assert real.names[-len(optimizer) :] == optimizer


def test_gradients_of_two_passes_are_kept_one_after_the_other():
    *_, update = costs(report(step(OPTIMIZERS["sgd"], backwards=2)), "add_")
    assert update.flops == 2 * 2 * LOOKED_UP * WIDTH
    assert (update.bytes_read, update.bytes_written) == (2 * (VALUES + INDICES) + 2 * VALUES, 2 * VALUES)


def test_a_dense_tensor_plus_a_sparse_one_is_a_copy_and_its_rows():
    table = torch.empty(100, WIDTH, device="meta")
    indices, values = torch.zeros(1, 7, dtype=torch.long, device="meta"), torch.empty(7, WIDTH, device="meta")
    sparse = torch.sparse_coo_tensor(indices, values, table.shape, check_invariants=False)
    (cost,) = costs(report(lambda: torch.add(table, sparse)), "add")
    rows, all_rows = 7 * WIDTH * 4, 100 * WIDTH * 4
    assert (cost.bytes_read, cost.bytes_written) == (all_rows + rows + 7 * 8 + rows, all_rows + rows)
    assert cost.flops == 7 * WIDTH


def test_sparse_gradients_stay_with_eager_kernels_where_the_rest_is_compiled():
    eager, compiled = (report(step(OPTIMIZERS["sgd"]), mode) for mode in ("eager", "compiled"))
    assert costs(compiled, "add_")[0].bytes == costs(eager, "add_")[0].bytes


def test_a_mean_of_bags_scales_each_row_of_its_gradient():
    bag = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, mode="mean", device="meta")
    ids = torch.zeros(BAGS, LOOKED_UP // BAGS, dtype=torch.long, device="meta")
    (cost,) = costs(
        report(lambda: bag(ids).backward(torch.empty(BAGS, WIDTH, device="meta"))), "_embedding_bag_backward"
    )
    # each bag's gradient, which bag a row is of, and how large bags are
    assert (cost.bytes_read, cost.bytes_written) == (BAGS * WIDTH * 4 + INDICES + BAGS * 8, VALUES)
    assert cost.flops == LOOKED_UP * WIDTH


def test_outside_of_the_meter_nothing_of_it_is_left():
    inherited = torch.Tensor.new
    report(step(OPTIMIZERS["sparse adam"]))
    assert torch.Tensor.new is inherited
    assert "new" not in vars(torch.Tensor)


def sparse(rows: int, dtype: torch.dtype) -> torch.Tensor:
    indices, values = torch.zeros(1, rows, dtype=torch.long, device="meta"), torch.empty(rows, 4, device="meta")
    return torch.sparse_coo_tensor(indices, values.to(dtype), (100, 4), check_invariants=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sparse_tensors_on_meta_keep_their_type_and_know_whether_they_are_coalesced(dtype):
    """As torch documents them: coalesce() gives a coalesced tensor, a sum of two is not, a copy is what it copies."""
    with FlopMeter("h100-sxm5-80gb"):
        gradient = sparse(7, dtype)
        joined, dense = gradient.coalesce(), torch.empty(100, 4, dtype=dtype, device="meta")
        made = {
            "joined": (joined, True), "copied": (joined.clone(), True), "its copy": (gradient.clone(), False),
            "sum": (joined + joined, False), "masked": (dense.sparse_mask(joined), True),
        }  # fmt: skip
        for name, (tensor, is_coalesced) in made.items():
            assert (tensor.dtype, tensor.is_coalesced()) == (dtype, is_coalesced), name
            assert (tensor._values().dtype, tensor.shape) == (dtype, (100, 4)), name


@pytest.mark.parametrize(("dtype", "real_operations"), [(torch.float32, 1), (torch.complex64, 2)])
def test_coalescing_adds_each_value_to_those_of_its_index(dtype, real_operations):
    (joined,) = costs(report(lambda: sparse(7, dtype).coalesce()), "_coalesce")
    assert joined.flops == 7 * 4 * real_operations


def test_the_sum_of_sparse_tensors_has_the_wider_type_as_on_the_cpu():
    with FlopMeter():
        total = sparse(3, torch.float16) + sparse(2, torch.float32)
        back = sparse(2, torch.float32) + sparse(3, torch.float16)
    assert total.dtype is back.dtype is torch.float32
