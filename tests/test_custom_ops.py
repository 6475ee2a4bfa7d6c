"""Custom ops implemented in Python: one op of the program, with the kernels that the implementation launches."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from costs_support import meta
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from flopmeter import FlopMeter

ROWS, INSIDE, WIDTH = 64, 128, 256
runs: list[str] = []


@torch.library.custom_op("flopmeter_python::mm_gelu", mutates_args=())
def mm_gelu(x: Tensor, weight: Tensor) -> Tensor:
    runs.append("mm_gelu")
    return F.gelu(x @ weight)


@mm_gelu.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@torch.library.custom_op("flopmeter_python::add_all", mutates_args={"total"})
def add_all(total: Tensor, others: list[Tensor]) -> None:
    for other in others:
        total.add_(other)


@torch.library.custom_op("flopmeter_python::by_value", mutates_args=())
def by_value(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 0 else x.clone()


@by_value.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("flopmeter_python::head_of_kept", mutates_args=())
def head_of_kept(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return (x[(labels >= 0).nonzero().squeeze(-1)] @ weight).sum()


@head_of_kept.register_fake
def _(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return x.new_empty(())


@torch.library.custom_op("flopmeter_python::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


@torch.library.custom_op("flopmeter_python::compiled_inside", mutates_args=())
def compiled_inside(x: Tensor, weight: Tensor) -> Tensor:
    return torch.compile(lambda x: x @ weight)(x)


@compiled_inside.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


library = torch.library.Library("flopmeter_python_library", "DEF")
library.define("square(Tensor x) -> Tensor")
library.impl("square", lambda x: x @ x, "CUDA")
library.impl("square", lambda x: torch.empty_like(x), "Meta")


def metered(program, **options):
    with FlopMeter("h100-sxm5-80gb", **options) as meter:
        program()
    return meter.report()


def moved(report):
    return [(k.cost.name.partition("(")[2], k.cost.bytes_read, k.cost.bytes_written) for k in report.kernels]


def test_an_op_costs_the_kernels_of_its_implementation():
    x, weight = meta(ROWS, INSIDE), meta(INSIDE, WIDTH)
    report = metered(lambda: mm_gelu(x, weight))
    inside = metered(lambda: F.gelu(x @ weight))
    with FlopCounterMode(display=False) as counter:
        F.gelu(x @ weight)
    assert report.flops == inside.flops > counter.get_total_flops() == 2 * ROWS * INSIDE * WIDTH
    hidden = 4 * ROWS * WIDTH
    assert moved(report) == [("mm)", 4 * (ROWS * INSIDE + INSIDE * WIDTH), hidden), ("gelu)", hidden, hidden)]
    assert not report.uncounted
    assert any("flopmeter_python::mm_gelu" in line for line in report.assumptions)


def test_the_program_sees_one_op_and_its_implementation_runs_once_for_each_geometry():
    x, row, weight = meta(ROWS, INSIDE), meta(1, INSIDE), meta(INSIDE, WIDTH)
    before = len(runs)
    with FlopMeter("h100-sxm5-80gb") as meter:
        for _ in range(3):
            mm_gelu(x, weight)
        mm_gelu(row, weight)
    assert [op.call.name for op in meter.trace.ops] == ["flopmeter_python::mm_gelu"] * 4
    assert len(runs) - before == 2
    assert len(meter.report().kernels) == 8


def test_an_op_that_writes_into_its_arguments_writes_them_for_each():
    total, other = meta(ROWS), meta(ROWS)
    report = metered(lambda: add_all(total, [other, other]))
    assert moved(report) == [("add_)", 2 * 4 * ROWS, 4 * ROWS)] * 2


def test_an_implementation_that_needs_values_is_uncounted_and_the_report_says_why():
    report = metered(lambda: by_value(meta(ROWS)))
    assert [row.name for row in report.uncounted] == ["flopmeter_python::by_value"]
    assert any(line.startswith("uncounted: flopmeter_python::by_value, whose Python") for line in report.notes)


def test_an_implementation_knows_the_labels_that_the_program_brought_from_the_host():
    """As a fused loss of a language model, which leaves out the tokens whose label is -100."""
    kept = 24
    with FlopMeter("h100-sxm5-80gb", strict=True) as meter:
        labels = torch.full((ROWS,), -100)
        labels[:kept] = 1
        head_of_kept(meta(ROWS, INSIDE), meta(INSIDE, WIDTH), labels.to("meta"))
        after = torch.ones(ROWS, device="meta").nonzero()
    assert meter.report().macs == kept * INSIDE * WIDTH
    assert after.shape == (ROWS, 1)  # what the program itself knows is as before


def test_an_implementation_that_asks_for_what_is_not_known_runs_by_the_share_that_is_stated():
    labels = torch.empty(ROWS, device="meta", dtype=torch.int64)
    report = metered(
        lambda: head_of_kept(meta(ROWS, INSIDE), meta(INSIDE, WIDTH), labels), strict=True, mask_fraction=0.25
    )
    assert report.macs == ROWS // 4 * INSIDE * WIDTH
    assert any("mask_fraction=0.25" in each for each in report.assumptions)


def test_attention_inside_takes_the_backend_of_the_device():
    q, k, v = (meta(2, 8, 512, 64, dtype=torch.bfloat16) for _ in range(3))
    inside = metered(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    report = metered(lambda: attend(q, k, v))
    assert [name for name, _, _ in moved(report)] == [f"{kernel.cost.name})" for kernel in inside.kernels]
    assert report.flops == inside.flops


def test_without_a_copy_before_it_an_op_costs_what_it_costs_in_the_program_that_makes_none():
    q, k = (meta(8, 8, 1024, 64, dtype=torch.bfloat16) for _ in range(2))
    plain, mended = metered(lambda: attend(q.clone(), k, k)), metered(lambda: attend(q, k, k))
    (told,) = (each for each in plain.advice if "no .contiguous() or .clone()" in each.remedy)
    assert told.gain_seconds == pytest.approx(plain.seconds - mended.seconds, abs=1e-9)


class Multiplied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(meta(WIDTH, WIDTH))

    def forward(self, x):
        return mm_gelu(torch.relu(x), self.weight)


def test_in_a_larger_batch_an_op_does_as_much_more_and_is_taken_to_launch_as_many_kernels_more():
    """What else its implementation would do with other sizes is not known. So only `relu` gains here, which is one of
    three launches: twice the batch takes 5 instead of 6, 64 times nearly 2 / 3 of the time."""
    model, x = Multiplied(), meta(ROWS, WIDTH)
    report = metered(lambda: model(x))
    (told,) = (each for each in report.advice if "times the batch" in each.remedy)
    assert told.gain_seconds / report.seconds < 1 / 3


def test_a_function_compiled_inside_an_op_is_recorded_op_by_op():
    x, weight = meta(ROWS, INSIDE), meta(INSIDE, WIDTH)
    assert metered(lambda: compiled_inside(x, weight)).flops == 2 * ROWS * INSIDE * WIDTH


@pytest.mark.parametrize("compile", [True, "rules"])
def test_the_compiler_fuses_nothing_with_what_is_inside_an_op(compile):
    x, weight = meta(ROWS, INSIDE), meta(INSIDE, WIDTH)

    @torch.compile
    def program(x):
        return (mm_gelu(x.sin(), weight) * 2).cos()

    with FlopMeter("h100-sxm5-80gb", compile=compile) as meter:
        program(x)
    kernels = meter.report(mode="compiled" if compile == "rules" else None).kernels
    op = "flopmeter_python::mm_gelu"
    assert [kernel.cost.name for kernel in kernels] == ["sin", f"{op}(mm)", f"{op}(gelu)", "fused(mul, cos)"]


def test_a_kernel_that_a_library_registers_for_cuda_in_python_counts_too():
    report = metered(lambda: torch.ops.flopmeter_python_library.square(meta(ROWS, ROWS)))
    assert report.flops == 2 * ROWS**3


def test_gradients_of_an_op_flow_as_without_the_meter():
    weight = meta(INSIDE, WIDTH)
    product = torch.library.custom_op(
        "flopmeter_python::product", lambda x, w: x @ w, mutates_args=(), schema="(Tensor x, Tensor w) -> Tensor"
    )
    product.register_fake(lambda x, w: x.new_empty(x.shape[0], w.shape[1]))
    product.register_autograd(
        lambda ctx, grad: (product(grad, ctx.saved_tensors[0].t()), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
    )
    x = meta(ROWS, INSIDE).requires_grad_()
    report = metered(lambda: product(x, weight).sum().backward())
    assert x.grad is not None
    assert sum(k.cost.flops for k in report.kernels if "product" in k.cost.name) == 2 * 2 * ROWS * INSIDE * WIDTH


@torch.library.custom_op("flopmeter_python::sine_of_second", mutates_args=())
def sine_of_second(x: Tensor, y: Tensor) -> Tensor:
    return torch.sin(y)


@sine_of_second.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(y)


def test_a_kernel_inside_an_op_reads_and_writes_the_tensors_of_the_program():
    x, y = meta(ROWS), meta(ROWS)
    inside, after = metered(lambda: sine_of_second(x, y).add_(y)).kernels
    ((read,), (written,)) = (
        [inside.op.storages[region.spec.storage] for region in regions]
        for regions in (inside.cost.reads, inside.cost.writes)
    )
    added_to, added = (after.op.storages[spec.storage] for spec in after.op.call.inputs)
    assert (read, written) == (added, added_to)


@torch.library.custom_op("flopmeter_python::without_fake", mutates_args=())
def without_fake(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(x @ weight)


bare = torch.library.Library("flopmeter_python_bare", "DEF")
bare.define("mm_gelu(Tensor x, Tensor weight) -> Tensor")
bare.impl("mm_gelu", lambda x, weight: F.gelu(x @ weight), "CUDA")


@pytest.mark.parametrize("op", [without_fake, torch.ops.flopmeter_python_bare.mm_gelu])
def test_an_op_in_python_without_a_fake_kernel_runs_as_the_ops_that_it_consists_of(op):
    """As on a GPU, where only compilers ask for a fake kernel."""
    x, weight = meta(ROWS, INSIDE), meta(INSIDE, WIDTH)
    assert [kernel.cost.name for kernel in metered(lambda: op(x, weight)).kernels] == ["mm", "gelu"]


def test_an_op_of_aten_that_a_library_replaces_runs_as_the_replacement_until_it_is_taken_back():
    """As torch.nn.attention.activate_flash_attention_impl puts FlashAttention-3 in the place of torch's kernels."""
    x = meta(ROWS, WIDTH)
    replaced = torch.library.Library("aten", "IMPL")
    with FlopMeter("h100-sxm5-80gb") as meter:
        F.silu(x)
        replaced.impl("silu", lambda x: x * torch.sigmoid(x), "CUDA")
        F.silu(x)
        replaced._destroy()
        F.silu(x)
    assert [kernel.cost.name for kernel in meter.report().kernels] == ["silu", "sigmoid", "mul", "silu"]
