"""Channels-last: which strides count for it, what convolutions return, what they copy, and when inductor chooses it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch._inductor.graph import GraphLowering
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from flopmeter import FlopMeter
from flopmeter.records import CONTRACTION, MOVEMENT, ConvolutionWork
from flopmeter.records.memory_format import is_channels_last, is_dense

SIZES = st.integers(1, 3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A permuted, sliced or expanded tensor of four or five dimensions."""
    rank = draw(st.sampled_from((3, 4, 5)))
    tensor = torch.empty([draw(SIZES) for _ in range(rank)]).permute(draw(st.permutations(range(rank))))
    if draw(st.booleans()):
        tensor = tensor[..., :: draw(st.integers(1, 2))]
    if draw(st.booleans()) and tensor.shape[0] == 1:
        tensor = tensor.expand(2, *tensor.shape[1:])
    return tensor


@given(tensors())
def test_strides_count_as_channels_last_where_torch_says_so(tensor: torch.Tensor) -> None:
    suggests = suggest_memory_format(tensor) != torch.contiguous_format
    assert is_channels_last(tensor.shape, tensor.stride()) == suggests


@given(tensors())
def test_dense_means_what_is_contiguous_means(tensor: torch.Tensor) -> None:
    assert is_dense(tensor.shape, tensor.stride(), channels_last=False) == tensor.is_contiguous()
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim())
    if layout is not None:
        assert is_dense(tensor.shape, tensor.stride(), channels_last=True) == tensor.is_contiguous(memory_format=layout)


def _convolve(
    device: str, *, input_last: bool, weight_last: bool, channels: int, groups: int, size: int
) -> torch.Tensor:
    formats = {True: torch.channels_last, False: torch.contiguous_format}
    images = torch.zeros(2, channels, size, size, device=device).to(memory_format=formats[input_last])
    filters = torch.zeros(8, channels // groups, 3, 3, device=device).to(memory_format=formats[weight_last])
    return nn.functional.conv2d(images, filters, padding=1, groups=groups)


@pytest.mark.parametrize(("of_result", "of_input"), [(True, False), (False, True)])
def test_the_gradients_of_a_convolution_have_the_layout_of_input_and_weight(of_result: bool, of_input: bool) -> None:
    """`determine_backend_memory_format(input, weight, backend)` in aten/src/ATen/native/Convolution.cpp: the gradient
    of the result has no say. So a leaf's gradient is not copied."""
    formats = {True: torch.channels_last, False: torch.contiguous_format}
    images, filters = (
        torch.empty(shape, device="meta", dtype=torch.bfloat16).to(memory_format=formats[of_input]).requires_grad_()
        for shape in ((2, 4, 6, 6), (8, 4, 3, 3))
    )
    with FlopMeter("h100-sxm5-80gb") as meter:
        out = nn.functional.conv2d(images, filters, padding=1)
        out.backward(torch.empty_like(out, memory_format=formats[of_result]))
    assert [kernel.cost.name for kernel in meter.report().kernels].count("copy_") == 0
    for leaf in (images, filters):
        assert leaf.grad is not None
        assert leaf.grad.is_contiguous(memory_format=formats[of_input])


@pytest.mark.parametrize("input_last", [True, False])
@pytest.mark.parametrize("weight_last", [True, False])
@pytest.mark.parametrize(("channels", "groups", "size"), [(4, 1, 6), (8, 8, 6), (4, 1, 1), (1, 1, 6)])
def test_a_convolution_returns_the_layout_that_real_kernels_return(
    input_last: bool, weight_last: bool, channels: int, groups: int, size: int
) -> None:
    case = {"input_last": input_last, "weight_last": weight_last, "channels": channels, "groups": groups, "size": size}
    with FlopMeter("a100-sxm4-80gb"):
        metered = _convolve("meta", **case)
    assert metered.stride() == _convolve("cpu", **case).stride()


def test_a_double_precision_convolution_stays_in_nchw() -> None:
    with FlopMeter("a100-sxm4-80gb"):
        images = torch.zeros(2, 4, 6, 6, device="meta", dtype=torch.float64).to(memory_format=torch.channels_last)
        out = nn.functional.conv2d(images, torch.zeros(8, 4, 3, 3, device="meta", dtype=torch.float64))
    assert out.is_contiguous()


def test_an_operand_in_the_other_layout_is_copied_first() -> None:
    with FlopMeter("a100-sxm4-80gb") as meter:
        images = torch.zeros(2, 4, 6, 6, device="meta")
        filters = torch.zeros(8, 4, 3, 3, device="meta").to(memory_format=torch.channels_last)
        nn.functional.conv2d(images, filters)
    copy, product = [kernel.cost for kernel in meter.report().kernels if kernel.cost.name == "convolution"]
    assert (copy.op_class, product.op_class) == (MOVEMENT, CONTRACTION)
    assert copy.bytes_read == copy.bytes_written == 4 * 2 * 4 * 6 * 6
    assert isinstance(product.work, ConvolutionWork)
    assert product.work.shape.channels_last


def _block(channels: int, *, groups: int = 1, out: int | None = None, kernel: int = 3) -> nn.Sequential:
    out = out or channels
    return nn.Sequential(nn.Conv2d(channels, out, kernel, groups=groups, bias=False), nn.BatchNorm2d(out), nn.ReLU())


NETWORKS = {
    "dense": lambda: nn.Sequential(_block(128), _block(128, kernel=1)),
    "grouped": lambda: nn.Sequential(_block(128, groups=4), _block(128, groups=2)),
    "grouped, mostly dense": lambda: nn.Sequential(_block(128), _block(128), _block(128, groups=8)),
    "depthwise": lambda: nn.Sequential(_block(128, groups=128), _block(128, kernel=1)),
    "narrowing": lambda: nn.Sequential(_block(128), _block(128, out=32)),
    "to few channels, pointwise": lambda: nn.Sequential(_block(128, out=32, kernel=1), _block(32, out=128, kernel=1)),
    "small": lambda: nn.Sequential(_block(32), _block(32)),
    "no convolution": lambda: nn.Sequential(nn.BatchNorm2d(128), nn.ReLU()),
    "hardly any convolution": lambda: nn.Sequential(_block(128), *(nn.Sigmoid() for _ in range(400))),
}


def _inductor_decides(name: str, *, is_inference: bool) -> bool:
    """Torch's own code, on a graph of fake tensors; with mkldnn it would always say yes, for CPUs."""
    with torch.backends.mkldnn.flags(enabled=False), FakeTensorMode(), torch.no_grad():
        graph = make_fx(NETWORKS[name]().train(not is_inference))(_images(name))
        return bool(GraphLowering.decide_layout_opt(graph, is_inference=is_inference))


def _images(name: str) -> torch.Tensor:
    return torch.zeros(4, 32 if name == "small" else 128, 16, 16)


@pytest.mark.parametrize("is_inference", [True, False], ids=["inference", "training"])
@pytest.mark.parametrize("name", NETWORKS)
def test_compiled_convolutions_run_in_the_layout_that_inductor_decides_on(name: str, is_inference: bool) -> None:
    expected = _inductor_decides(name, is_inference=is_inference)
    with torch.device("meta"):
        model, images = NETWORKS[name]().train(not is_inference), _images(name)
    with FlopMeter("a100-sxm4-80gb") as meter, torch.set_grad_enabled(not is_inference):
        out = model(images)
        if not is_inference:
            out.sum().backward()
    eager, compiled = (
        {
            kernel.cost.work.shape.channels_last
            for kernel in report.kernels
            if isinstance(kernel.cost.work, ConvolutionWork)
        }
        for report in (meter.report(), meter.report(mode="compiled"))
    )
    assert compiled == ({expected} if name != "no convolution" else set())
    assert eager <= {False}
