"""Gradients of norms that torch.compile makes in one kernel for rows and columns, beside what an H100 ran
(torch 2.11, validation/traces/h100_gpt_medium_train_compiled)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopmeter import FlopMeter, Report
from flopmeter.torch_names import compiler as names

ROWS, COLUMNS = 8192, 1024
ELEMENTS = ROWS * COLUMNS


class Normed(nn.Module):
    """A residual stream in fp32 whose norm goes to a product in bf16, as in a GPT under autocast."""

    def __init__(self, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(COLUMNS, bias=bias, device="meta", dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x).to(torch.bfloat16)


def backward_of(module: nn.Module, x: Tensor, device: str = "h100-sxm5-80gb") -> Report:
    compiled = torch.compile(module)
    with FlopMeter(device, clocks="burst") as meter:
        out = compiled(x.requires_grad_())
        start = len(meter.trace.ops)
        torch.autograd.backward(out, torch.empty_like(out))
    return meter.report(ops=range(start, len(meter.trace.ops)))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_blocks_of_16_rows_write_their_sums_and_torch_adds_them_up() -> None:
    """There the kernel had 512 blocks, and a reduce_kernel of torch's followed it."""
    report = backward_of(Normed(), meta(ROWS, COLUMNS))
    gradient, summed = report.kernels
    assert gradient.cost.bytes_written == 4 * ELEMENTS + 4 * (ROWS // 16) * COLUMNS
    assert summed.cost.name == "sum"
    assert (summed.cost.bytes_read, summed.cost.bytes_written) == (4 * (ROWS // 16) * COLUMNS, 4 * COLUMNS)


def test_the_gradient_of_a_norm_takes_what_an_h100_took() -> None:
    """31.9 us, and 45.6 where the gradient of the residual stream is added."""
    x = meta(ROWS, COLUMNS)
    alone = backward_of(Normed(), x).timings[0]
    assert 1e6 * alone.seconds == pytest.approx(31.9, rel=0.15)

    class Residual(Normed):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), x + 1

    out = torch.compile(Residual())
    with FlopMeter("h100-sxm5-80gb", clocks="burst") as meter:
        results = out(x.detach().requires_grad_())
        start = len(meter.trace.ops)
        torch.autograd.backward(results, [torch.empty_like(each) for each in results])
    added = meter.report(ops=range(start, len(meter.trace.ops))).timings[0]
    assert 1e6 * added.seconds == pytest.approx(45.6, rel=0.15)


def test_each_sum_of_columns_has_a_sum_of_its_own_and_a_cast_where_weights_are_in_bf16() -> None:
    report = backward_of(Normed(bias=True), meta(ROWS, COLUMNS))
    assert [kernel.cost.name for kernel in report.kernels[1:]] == ["sum", "sum"]
    report = backward_of(Normed(dtype=torch.bfloat16), meta(ROWS, COLUMNS, dtype=torch.bfloat16))
    assert [kernel.cost.bytes_written for kernel in report.kernels[1:]] == [4 * COLUMNS, 2 * COLUMNS]


def test_fewer_multiprocessors_take_more_rows_each() -> None:
    """8 blocks for each of an L4's 58 multiprocessors would have 17 rows; a power of two is taken. Of 32,768 rows they
    have 64, where an H100's blocks have 16 (its 1,056 would have 31)."""
    written = {}
    for device in ("l4", "h100-sxm5-80gb"):
        first, *_ = backward_of(Normed(), meta(32768, COLUMNS), device).kernels
        written[device] = first.cost.bytes_written - 4 * 32768 * COLUMNS
    assert written == {"l4": 4 * 512 * COLUMNS, "h100-sxm5-80gb": 4 * 2048 * COLUMNS}


def test_what_rows_and_columns_need_is_computed_once() -> None:
    """The gradient of a norm behind a GELU computes it again: one erf of 28 instructions and one exp of 9 for all sums
    over rows and over columns, beside some 30 multiplications and additions."""

    class Activated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(COLUMNS, device="meta", dtype=torch.bfloat16)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(F.gelu(x))

    first, *_ = backward_of(Activated(), meta(ROWS, COLUMNS, dtype=torch.bfloat16)).kernels
    assert 28 + 9 < first.cost.work.instructions / ELEMENTS < 2 * (28 + 9)


def test_few_rows_keep_a_kernel_for_each_order() -> None:
    """Inductor takes both orders into one kernel from 4,096 rows on, and two rows for each column."""
    names = [kernel.cost.name for kernel in backward_of(Normed(), meta(2048, COLUMNS)).kernels]
    assert "sum" not in names


def test_sizes_that_change_are_planned_for_each_call() -> None:
    module = Normed()
    compiled = torch.compile(module, dynamic=True)
    read = []
    for rows in (8192, 16384):
        with FlopMeter("h100-sxm5-80gb") as meter:
            compiled(meta(rows, COLUMNS).requires_grad_()).sum().backward()
        (summed,) = [
            kernel
            for kernel in meter.report().kernels
            if kernel.cost.name == "sum" and kernel.cost.bytes_written == 4 * COLUMNS
        ]
        read.append(summed.cost.bytes_read)
        module.zero_grad()
    assert read == [4 * 512 * COLUMNS, 4 * 1024 * COLUMNS]


def test_the_sum_has_the_place_of_the_norm_and_its_buffers_are_given_back() -> None:
    report = backward_of(Normed(), meta(ROWS, COLUMNS))
    _, summed = report.kernels
    assert summed.op.module.endswith("norm")
    workspace = 4 * (ROWS // 16) * COLUMNS
    (of_workspace,) = [block for block in report.memory.blocks if block[0] == workspace]
    assert of_workspace[2] is not None


def test_no_device_is_started_between_the_compilers_of_two_graphs() -> None:
    """Where inductor lays out a tensor that the backward graph takes otherwise than it was traced, such as the padded
    labels of a language model of 2,048 tokens (torch 2.11), torch makes its twin on the device."""
    started = names.START_OF_DEVICE
    with FlopMeter("h100-sxm5-80gb"):
        torch.compile(lambda x: x + 1)(meta(8))
        started.value(torch.device("cuda"))
