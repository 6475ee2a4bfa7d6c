"""An op of several kernels fuses by what its rule says that each reads and writes; nothing else names the op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from costs_support import call_by_hand, meta
from torch import Tensor

from flopmeter import FlopMeter
from flopmeter.costs import kernels_of
from flopmeter.launch.fusion import fuse
from flopmeter.records import Op, Storage, Trace
from flopmeter.trace.recorder import Recorder

aten = torch.ops.aten
ROWS, WIDTH = 64, 32
NBYTES = ROWS * WIDTH * 4


def compiled(program: Any) -> list[tuple[str, int, int]]:
    with Recorder() as recorder:
        result = program()
    fused = fuse(kernels_of(recorder.trace), recorder.trace).kernels
    del result
    return [(kernel.cost.name, kernel.cost.bytes_read, kernel.cost.bytes_written) for kernel in fused]


def by_hand(*steps: tuple[Any, tuple[Any, ...], tuple[Tensor, ...]]) -> list[tuple[str, int, int]]:
    """The same of ops that need a GPU; all tensors are held to the end."""
    numbers: dict[int, int] = {}
    trace = Trace(devices={"meta": None})
    for func, args, outputs in steps:
        tensors = [value for value in (*args, *outputs) if isinstance(value, Tensor)]
        keys = dict.fromkeys(tensor.untyped_storage()._cdata for tensor in tensors)
        storages = tuple(numbers.setdefault(key, len(numbers)) for key in keys)
        trace.ops.append(Op(call_by_hand(func, args, outputs), storages, "", "forward", None))
        trace.module_calls.append(0)
    trace.storages += [Storage(nbytes=0, device="meta", born=0) for _ in numbers]
    return [
        (kernel.cost.name, kernel.cost.bytes_read, kernel.cost.bytes_written)
        for kernel in fuse(kernels_of(trace), trace).kernels
    ]


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_cross_entropy_with_logits_is_one_kernel(reduction: str, weighted: bool):
    x, y, w = meta(ROWS, WIDTH), meta(ROWS, WIDTH), meta(ROWS, WIDTH)
    weight = w if weighted else None
    kernels = compiled(lambda: F.binary_cross_entropy_with_logits(x.cos(), y, weight, reduction=reduction))
    written = 4 if reduction == "mean" else NBYTES
    assert kernels == [("fused(cos, binary_cross_entropy_with_logits)", (2 + weighted) * NBYTES, written)]


def test_a_slice_scatter_fuses_with_what_makes_its_operands_and_writes_all():
    x, part = meta(ROWS, WIDTH), meta(ROWS // 2, WIDTH)
    kernels = compiled(lambda: aten.slice_scatter(x.cos(), part.sin(), 0, 0, ROWS // 2))
    assert kernels == [("fused(cos, sin, slice_scatter)", NBYTES + NBYTES // 2, NBYTES)]


@pytest.mark.parametrize("op", ["slice_backward", "constant_pad_nd"])
def test_what_is_filled_first_and_then_written_in_part_is_written_in_full(op: str):
    x = meta(ROWS // 2, WIDTH)
    programs = {
        "slice_backward": lambda: aten.slice_backward(x.cos(), [ROWS, WIDTH], 0, 0, ROWS // 2, 1),
        "constant_pad_nd": lambda: F.pad(x.cos(), (0, 0, 0, ROWS // 2)),
    }
    assert compiled(programs[op]) == [(f"fused(cos, {op})", NBYTES // 2, NBYTES)]


def test_a_copy_that_a_convolution_needs_stays_apart():
    x, filters = meta(2, 8, 8, 4), meta(5, 4, 3, 3)  # the product reads [2, 4, 8, 8] in dense order
    nbytes = 2 * 8 * 8 * 4 * 4
    first, copied, *_ = compiled(lambda: F.conv2d(x.cos().permute(0, 3, 1, 2), filters))
    assert (first, copied) == (("cos", nbytes, nbytes), ("convolution", nbytes, nbytes))


def test_a_safe_softmax_is_one_pass_once_compiled():
    x = meta(ROWS, WIDTH)
    assert compiled(lambda: aten._safe_softmax(x, -1)) == [("_safe_softmax", NBYTES, NBYTES)]


def test_batch_norm_with_statistics_of_all_ranks_fuses_by_its_rule_alone():
    x, before, out, after = (meta(8, 16, 4, 4) for _ in range(4))
    mean, invstd, weight, bias, sum_dy, sum_dy_xmu, dw, db = (meta(16) for _ in range(8))
    nbytes, channels = 8 * 16 * 4 * 4 * 4, 16 * 4
    cos, relu = (aten.cos.default, (x,), (before,)), (aten.relu.default, (out,), (after,))
    applied = (aten.batch_norm_elemt.default, (before, weight, bias, mean, invstd, 1e-5), (out,))
    assert by_hand(cos, applied, relu) == [
        ("fused(cos, batch_norm_elemt, relu)", nbytes + 4 * channels, 3 * nbytes)  # all three results are held
    ]
    operands, results = (before, x, mean, invstd, weight), (sum_dy, sum_dy_xmu, dw, db)
    reduced = (aten.batch_norm_backward_reduce.default, (*operands, True, True, True), results)
    assert by_hand(cos, reduced, (aten.neg.default, (sum_dy,), (meta(16),))) == [
        ("fused(cos, batch_norm_backward_reduce, neg)", nbytes + 3 * channels, nbytes + 5 * channels)
    ]
    gradient = (aten.batch_norm_backward_elemt.default, (*operands, sum_dy, sum_dy_xmu, meta(2)), (out,))
    assert by_hand(cos, gradient, relu) == [
        ("fused(cos, batch_norm_backward_elemt, relu)", nbytes + 5 * channels + 8, 3 * nbytes)
    ]


def test_a_gather_fuses_with_what_makes_its_operand_and_with_what_reads_its_result():
    """`index` and `_unsafe_index` are one lowering of inductor's (torch/_inductor/lowering.py)."""
    x, rows = meta(ROWS, WIDTH), meta(ROWS, dtype=torch.long)
    kernels = compiled(lambda: aten._unsafe_index(x.cos(), [rows]).sin())
    assert kernels == [("fused(cos, _unsafe_index, sin)", NBYTES + 8 * ROWS, NBYTES)]


@pytest.mark.parametrize(("by_mask", "graphs"), [(False, 1), (True, 2)])
def test_only_an_index_by_a_mask_breaks_a_graph(by_mask: bool, graphs: int):
    x = torch.empty(64, 64, device="meta")
    index = torch.empty(64, dtype=torch.bool if by_mask else torch.long, device="meta")
    with FlopMeter("h100-sxm5-80gb", mask_fraction=0.5, compile="rules") as meter:
        (x.exp()[index] + 1).exp()
    report = meter.report(mode="compiled")
    assert len({graph for graph in report.launches.graphs if graph is not None}) == graphs


def test_repeats_of_a_stated_length_break_no_graph():
    x, times = torch.empty(64, 64, device="meta"), torch.empty(64, dtype=torch.long, device="meta")
    with FlopMeter("h100-sxm5-80gb", compile="rules") as meter:
        torch.repeat_interleave(x.exp(), times, dim=0, output_size=128).exp()
    report = meter.report(mode="compiled")
    assert None not in report.launches.graphs


def test_an_op_that_eager_pytorch_composes_is_computed_again_as_a_whole():
    """A focal loss: backward reads what the loss was given, and nothing that the forward pass made."""
    x, y = meta(ROWS, WIDTH).requires_grad_(), meta(ROWS, WIDTH)

    def loss() -> torch.Tensor:
        return (F.binary_cross_entropy_with_logits(x, y, reduction="none") * (1 - torch.sigmoid(x)) ** 2).sum()

    with FlopMeter("a100-sxm4-80gb", compile="rules") as meter:
        torch.compile(loss)().backward()
    forward, backward = (
        [k.cost for k in meter.report(mode="compiled").kernels if k.op.phase == phase and k.op.region]
        for phase in ("forward", "backward")
    )
    assert sum(cost.bytes_written for cost in forward) < NBYTES
    assert [(round(c.bytes_read / NBYTES), c.bytes_written) for c in backward] == [(2, NBYTES)]


def test_gradients_of_slices_of_slices_are_one_loop_over_the_whole():
    """Each element is the one number that comes in, or 0. Inductor makes one kernel of it, too."""
    x = meta(ROWS, WIDTH).requires_grad_()
    with FlopMeter("a100-sxm4-80gb", compile="rules") as meter:
        torch.compile(lambda: torch.cat([x[:, :7], x[:, 9:]], 1)[:, 3:].sum())().backward()
    kernels = meter.report(mode="compiled").kernels
    backward = [kernel.cost for kernel in kernels if kernel.op.phase == "backward"]
    assert [(cost.bytes_read, cost.bytes_written) for cost in backward] == [(4, NBYTES)]


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("loss", [F.binary_cross_entropy_with_logits, F.soft_margin_loss])
def test_an_op_of_several_kernels_counts_no_flop_twice_where_they_become_one(loss: Any, reduction: str):
    x, y = meta(ROWS, WIDTH), meta(ROWS, WIDTH)
    with Recorder() as recorder:
        result = loss(x.cos(), y, reduction=reduction)
    kernels = kernels_of(recorder.trace)
    fused = fuse(kernels, recorder.trace).kernels
    del result
    assert len(fused) < len(kernels)
    assert sum(kernel.cost.flops for kernel in fused) == sum(kernel.cost.flops for kernel in kernels)
