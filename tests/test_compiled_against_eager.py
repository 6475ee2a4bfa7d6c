"""Compiled programs against the same programs run eagerly: a library's kernel does the same work in both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from flopmeter import FlopMeter, Report
from flopmeter.compiler import replay
from flopmeter.torch_names.dispatcher import running_version

N, ITEM = 64, 4  # of the matrices, and the bytes of an element
MATRIX = ITEM * N**2

Program = Callable[..., object]


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def metered(program: Program, *args: Tensor, compiled: bool, **options: bool) -> Report:
    torch._dynamo.reset()
    with FlopMeter("h100-sxm5-80gb") as meter:
        (torch.compile(program, **options) if compiled else program)(*(args or (meta(N, N), meta(N, N))))
    return meter.report()


def both(program: Program, *args: Tensor) -> tuple[Report, Report]:
    return metered(program, *args, compiled=False), metered(program, *args, compiled=True)


def moved(report: Report, name: str) -> list[tuple[int, int, int]]:
    """FLOPs, bytes read and bytes written of the kernels of that name."""
    costs = (kernel.cost for kernel in report.kernels if kernel.cost.name == name)
    return [(cost.flops, cost.bytes_read, cost.bytes_written) for cost in costs]


def side_by_side(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([x @ w, w @ x], 1)


def stacked(x: Tensor, w: Tensor) -> Tensor:
    return torch.stack([x @ w, w @ x])


def one_of_them_read_again(x: Tensor, w: Tensor) -> Tensor:
    product = x @ w
    return torch.cat([product, x, product @ w])


@pytest.mark.parametrize("program", [side_by_side, stacked, one_of_them_read_again])
def test_a_product_that_is_written_into_its_part_of_a_result_writes_that_part_alone(program: Program) -> None:
    eager, compiled = both(program)
    assert moved(compiled, "mm") == moved(eager, "mm") == 2 * [(2 * N**3, 2 * MATRIX, MATRIX)]


HEADS, WIDTH, POOLED = 4, 16, 7
ATTENDED = [meta(1, HEADS, N, WIDTH, dtype=torch.bfloat16) for _ in range(3)]


@pytest.mark.parametrize(
    ("program", "args", "name", "read", "unread"),
    [
        (  # the sums of its softmax, a seed and an offset
            F.scaled_dot_product_attention, ATTENDED, "_scaled_dot_product_cudnn_attention",
            2 * HEADS * N * WIDTH, ITEM * HEADS * N + 16,
        ),
        (torch.linalg.det, [meta(N, N)], "_linalg_det", ITEM, MATRIX + ITEM * N),  # the factors and their pivots
        (  # the places of the maxima
            lambda x: F.adaptive_max_pool2d(x, POOLED), [meta(1, 1, N, N)], "adaptive_max_pool2d",
            ITEM * POOLED**2, 8 * POOLED**2,
        ),
    ],
)  # fmt: skip
def test_a_result_that_nobody_reads_is_written_by_the_librarys_kernel(
    program: Program, args: list[Tensor], name: str, read: int, unread: int
) -> None:
    eager, compiled = both(program, *args)
    ((_, _, written),) = moved(compiled, name)
    assert written == read + unread
    assert moved(compiled, name) == moved(eager, name)


def test_a_result_that_nobody_reads_takes_memory_while_the_librarys_kernel_runs() -> None:
    rows = 5000
    x = meta(rows)
    report = metered(lambda x: (x + 1).sort()[0].sum(), x, compiled=True)
    of_numbers, of_places = 3 * ITEM * rows, 8 * rows  # x, what is sorted, and what comes of it
    assert report.peak_memory_bytes == of_numbers + of_places


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_op_that_only_checks_does_not_keep_a_graph_from_being_compiled(dynamic: bool) -> None:
    def factor(x: Tensor, w: Tensor) -> Tensor:
        return torch.linalg.cholesky(x) @ w

    eager, compiled = metered(factor, compiled=False), metered(factor, compiled=True, dynamic=dynamic)
    assert not [note for note in compiled.notes if "not compiled" in note]
    assert compiled.graphs
    checks = ["_linalg_check_errors"] * (running_version() >= (2, 13))  # 2.11 drops it, as nothing reads its result
    for name in ("linalg_cholesky_ex", *checks, "mm"):
        assert moved(compiled, name) == moved(eager, name) != []


def test_a_copy_of_complex_numbers_is_counted() -> None:
    """Inductor copies them with copy_, which has no node in its graph."""
    report = metered(lambda x, w: torch.fft.fft2(x), compiled=True)
    assert moved(report, "copy_") == [(0, MATRIX, 2 * MATRIX)]
    assert not [note for note in report.notes if "uncounted" in note]


def test_a_copy_into_a_part_of_complex_numbers_writes_that_part() -> None:
    def copied(x: Tensor, w: Tensor) -> Tensor:
        w[:, 1:].copy_(x[:, 1:])
        return w * 2

    args = meta(N, N, dtype=torch.complex64), meta(N, N, dtype=torch.complex64)
    part = 2 * ITEM * N * (N - 1)
    assert moved(metered(copied, *args, compiled=True), "copy_") == [(0, part, part)]


VECTORS: list[tuple[Program, int]] = [
    (lambda x, w: torch.mv(x, w[0]), N**2),
    (lambda x, w: torch.dot(x[0], w[0]), N),
    (lambda x, w: torch.addmv(x[0], x, w[0]), N**2),
    (lambda x, w: torch.mm(x.reshape(-1, 1), w[:1]).relu(), N**3),
    (lambda x, w: torch.bmm(x.view(N, N, 1), w.view(N, 1, N)), N**3),
]


@pytest.mark.parametrize(("program", "macs"), VECTORS)
def test_a_product_of_vectors_has_its_multiply_adds_where_inductor_writes_it_as_a_loop(
    program: Program, macs: int
) -> None:
    eager, compiled = both(program)
    assert compiled.macs == eager.macs == macs
    for report in (eager, compiled):
        counted = Counter[str]()
        for kernel in report.kernels:
            counted.update(dict(kernel.cost.flops_by_class))
        assert counted["tensor contraction"] == 2 * macs


def test_a_row_times_a_matrix_has_its_multiply_adds_with_coordinate_descent_tuning() -> None:
    def decode(x: Tensor, w: Tensor) -> Tensor:
        return F.silu(F.linear(x[:1], w))

    with FlopCounterMode(display=False) as counted:
        decode(meta(N, N), meta(N, N))
    with config.patch(coordinate_descent_tuning=True):
        report = metered(decode, compiled=True)
    assert not moved(report, "mm")
    assert 2 * report.macs == counted.get_total_flops() == 2 * N**2


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_a_graph_whose_kernels_cannot_be_planned_runs_eagerly_with_a_note(
    monkeypatch: pytest.MonkeyPatch, fails_in: str, dynamic: bool
) -> None:
    plain = replay.plan_of

    def fails(*args: Any, is_backward: bool) -> Any:
        if is_backward == (fails_in == "backward"):
            raise RuntimeError("no such plan")
        return plain(*args, is_backward=is_backward)

    def step(x: Tensor, w: Tensor) -> Tensor:
        return torch.sin(x @ w) @ w

    def run(compiled: bool) -> Report:
        torch._dynamo.reset()
        x, w = meta(N, N).requires_grad_(), meta(N, N).requires_grad_()
        with FlopMeter("h100-sxm5-80gb") as meter:
            (torch.compile(step, dynamic=dynamic) if compiled else step)(x, w).sum().backward()
        assert x.grad is not None
        return meter.report()

    eager = run(compiled=False)
    monkeypatch.setattr(replay, "plan_of", fails)
    compiled = run(compiled=True)
    assert compiled.macs == eager.macs == 6 * N**3
    assert [note for note in compiled.notes if "not compiled" in note and "no such plan" in note]
