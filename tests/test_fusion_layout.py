"""When a compiled region runs in channels-last, and what becomes of its convolutions."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from flopmeter import FlopMeter
from flopmeter.launch.fusion import layout
from flopmeter.records import ConvolutionWork, MatmulWork


def test_the_speed_ups_are_those_in_torchs_own_source():
    graph = pytest.importorskip("torch._inductor.graph")
    source = inspect.getsource(graph.GraphLowering.decide_layout_opt)
    theirs = {name: float(value) for name, value in re.findall(r"(\w+_MULTIPLIER) = ([\d.]+)", source)}
    assert theirs == {
        "GROUPED_MULTIPLIER": layout.GROUPED,
        "DEFAULT_MULTIPLIER": layout.DEFAULT,
        "IN_OUT_MULTIPLIER": layout.NARROWING,
        "SMALL_MULTIPLIER": layout.SMALL,
    }


def compiled(model, *shape):
    """The convolutions and the other products, compiled for inference: whether they run in channels-last."""
    with torch.inference_mode(), FlopMeter("a100-sxm4-80gb") as meter:
        model(torch.empty(shape, device="meta"))
    costs = [kernel.cost for kernel in meter.report(mode="compiled").kernels]
    convolutions = [cost.work.shape.channels_last for cost in costs if isinstance(cost.work, ConvolutionWork)]
    return convolutions, [cost for cost in costs if isinstance(cost.work, MatmulWork)]


def test_every_convolution_of_a_region_is_converted_and_its_other_products_stay():
    with torch.device("meta"):
        model = nn.Sequential(
            nn.Conv2d(128, 128, 3), nn.Conv2d(128, 256, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)
        )
    convolutions, products = compiled(model, 8, 128, 20, 20)
    assert convolutions == [True, True]
    assert len(products) == 1
    assert products[0].macs == 8 * 256 * 10


def test_torchs_own_switch_turns_the_choice_off(monkeypatch):
    with torch.device("meta"):
        model = nn.Conv2d(128, 128, 3)
    assert compiled(model, 8, 128, 20, 20)[0] == [True]
    monkeypatch.setenv("TORCHINDUCTOR_LAYOUT_OPTIMIZATION", "0")
    assert compiled(model, 8, 128, 20, 20)[0] == [False]


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_as_by_torchs_own_compiler_only_images_are_turned_not_signals_and_volumes(dimensions):
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions - 1]
    norm = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dimensions - 1]
    with torch.device("meta"):
        model = nn.Sequential(convolution(128, 128, 3), norm(128), nn.ReLU(), convolution(128, 256, 3)).eval()
    shape = (4, 128) + (12,) * dimensions
    by_rules, _ = compiled(model, *shape)
    by_the_compiler, _ = compiled(torch.compile(model), *shape)
    assert by_rules == by_the_compiler == [dimensions == 2] * 2


def test_a_compiled_backward_pass_takes_images_as_the_forward_pass_left_them():
    """AOTAutograd gives the backward graph's compiler the strides that inductor chose for what is kept, so that dense
    convolutions go on in channels-last; by the rules as by the compiler."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(128, 128, 3), nn.ReLU(), nn.Conv2d(128, 128, 3), nn.ReLU(), nn.Flatten())
        image = torch.empty(8, 128, 20, 20, requires_grad=True)
    for run in (model, torch.compile(model)):
        with FlopMeter("a100-sxm4-80gb") as meter:
            run(image).sum().backward()
        backward = [
            kernel.cost.work for kernel in meter.report(mode="compiled").kernels if kernel.op.phase == "backward"
        ]
        assert [work.shape.channels_last for work in backward if isinstance(work, ConvolutionWork)] == [True] * 4


@pytest.mark.parametrize("order", ["forward in backward", "backward in forward"])
def test_filters_are_found_by_name_where_a_convolution_runs_in_the_other_pass(order):
    """Gradients of single samples call a convolution in the backward pass; torch.nn.grad its gradient anywhere."""

    class ForwardInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, image, filters):
            ctx.save_for_backward(image, filters)
            return nn.functional.conv2d(image, filters, padding=1)

        @staticmethod
        def backward(ctx, gradient):
            _, filters = ctx.saved_tensors
            return nn.functional.conv2d(gradient, filters, padding=1), None

    image = torch.empty(8, 128, 20, 20, device="meta", requires_grad=True)
    filters = torch.empty(128, 128, 3, 3, device="meta", requires_grad=True)
    with FlopMeter("a100-sxm4-80gb") as meter:
        y = nn.functional.conv2d(image, filters, padding=1)
        if order == "backward in forward":
            y = y + torch.nn.grad.conv2d_input(image.shape, filters, y.detach(), padding=1)
        ForwardInBackward.apply(y, filters).sum().backward()
    works = [kernel.cost.work for kernel in meter.report(mode="compiled").kernels]
    convolutions = [work for work in works if isinstance(work, ConvolutionWork)]
    assert [work.shape.channels_last for work in convolutions] == [True] * (5 if order == "forward in backward" else 7)


def test_what_runs_in_channels_last_already_stays():
    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(128, 128, 3), nn.Conv2d(128, 256, 3)).to(memory_format=torch.channels_last)
    with torch.inference_mode(), FlopMeter("a100-sxm4-80gb") as meter:
        model(torch.empty(8, 128, 20, 20, device="meta").to(memory_format=torch.channels_last))
    eager, compiled = meter.report(), meter.report(mode="compiled")
    works = [[kernel.cost.work for kernel in report.kernels] for report in (eager, compiled)]
    shapes = [[work.shape for work in of_mode if isinstance(work, ConvolutionWork)] for of_mode in works]
    assert shapes[0] == shapes[1]
    assert all(shape.channels_last for shape in shapes[0])


def test_grouped_convolutions_stay_as_they_are_since_inductor_found_them_slower():
    with torch.device("meta"):
        model = nn.Conv2d(128, 128, 3, groups=4)
    assert compiled(model, 8, 128, 20, 20)[0] == [False]


def followed_by(count, make, convolutions=1):
    """Convolutions of 128 channels, and so many ops after them: inductor converts them by themselves."""
    with torch.device("meta"):
        first = (nn.Conv2d(128, 128, 3, bias=False) for _ in range(convolutions))
        model = nn.Sequential(*first, *(make() for _ in range(count))).eval()
    return compiled(model, 8, 128, 20, 20)[0]


def test_a_graph_of_many_nodes_for_each_convolution_is_not_worth_a_conversion():
    """300 nodes for one: a normalization is nine of them, another op one (see layout.py), and the input is made."""
    assert followed_by(297, nn.Tanh) == [True]
    assert followed_by(298, nn.Tanh) == [False]
    assert followed_by(33, lambda: nn.BatchNorm2d(128)) == [True]  # 2 + 33·9 = 299
    assert followed_by(34, lambda: nn.BatchNorm2d(128)) == [False]
    assert followed_by(596, nn.Tanh, convolutions=2) == [True] * 2
    assert followed_by(597, nn.Tanh, convolutions=2) == [False] * 2


@pytest.mark.parametrize(("pixels", "kernels"), [(20, ["mean", "fused(mean, silu)"]), (10, ["fused(mean, silu)"])])
def test_a_mean_over_many_pixels_is_split_where_the_channels_lie_innermost(pixels, kernels):
    """Inductor splits a reduction over more than 4 * 32 elements that lie apart, if it has few results: here 8 * 128
    means over 400 pixels, or over 100."""

    class Squeeze(nn.Module):
        def forward(self, x):
            return nn.functional.silu(x.mean((2, 3)))

    with torch.device("meta"):
        model = nn.Sequential(nn.Conv2d(128, 128, 1, bias=False), Squeeze())
    with torch.inference_mode(), FlopMeter("a100-sxm4-80gb") as meter:
        model(torch.empty(8, 128, pixels, pixels, device="meta"))
    report = meter.report(mode="compiled")
    (place,) = (number for number, each in enumerate(report.kernels) if isinstance(each.cost.work, ConvolutionWork))
    assert [kernel.cost.name for kernel in report.kernels[place + 1 :]] == kernels


# Filters of the convolutions of one graph: groups, channels in and out, side.
GRAPHS = {
    "as many": [(1, 128, 128, 3)],
    "few": [(1, 64, 64, 3)],
    "few but one": [(1, 64, 64, 3), (1, 65, 64, 3)],
    "few in alone": [(1, 64, 65, 3)],
    "few out alone": [(1, 65, 64, 3)],
    "half as many": [(1, 256, 128, 3), (1, 128, 128, 3)],
    "half as many, by pixels": [(1, 256, 128, 1), (1, 128, 128, 3)],
    "more than half": [(1, 254, 128, 3), (1, 128, 128, 3)],
    "few, half as many": [(1, 64, 32, 3), (1, 128, 128, 3)],
    "in groups": [(4, 512, 512, 3)],
    "in groups beside as much": [(4, 512, 512, 3), (1, 128, 128, 3)],
    "in groups beside twice as much": [(4, 512, 512, 3), (1, 128, 128, 3), (1, 128, 128, 3)],
    "in groups beside three times as much": [(4, 512, 512, 3), *[(1, 128, 128, 3)] * 12],
    "each channel by itself": [(128, 128, 128, 3), (1, 128, 128, 3)],
    "few groups of few": [(2, 32, 32, 3), (1, 128, 128, 3)],
}


@pytest.mark.parametrize("is_inference", [True, False])
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_is_converted_where_inductor_says_so(name, is_inference):
    """By the function of torch that decides, on the same graph."""
    graph = pytest.importorskip("torch._inductor.graph")
    shapes = GRAPHS[name]
    images = [torch.empty(2, channels, 12, 12, device="meta") for _, channels, _, _ in shapes]
    filters = [torch.empty(out, within // groups, side, side, device="meta") for groups, within, out, side in shapes]

    def convolved(images, filters):
        several = zip(images, filters, shapes, strict=True)
        return [nn.functional.conv2d(image, taps, groups=groups) for image, taps, (groups, *_) in several]

    says = graph.GraphLowering.decide_layout_opt(make_fx(convolved)(images, filters), is_inference=is_inference)
    with torch.set_grad_enabled(not is_inference), FlopMeter("a100-sxm4-80gb") as meter:
        outputs = convolved(images, [each.requires_grad_(not is_inference) for each in filters])
        if not is_inference:
            sum(out.sum() for out in outputs).backward()
    kernels = [kernel for kernel in meter.report(mode="compiled").kernels if kernel.op.phase == "forward"]
    found = {
        kernel.cost.work.shape.channels_last for kernel in kernels if isinstance(kernel.cost.work, ConvolutionWork)
    }
    assert found == {says}
