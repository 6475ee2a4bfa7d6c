"""Operators of packages of kernels: composites with a kernel for meta tensors, and sizes that depend on data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import flopmeter
from flopmeter import DataDependentError, FlopMeter
from flopmeter.as_cuda import CudaTarget, emulate_cuda

ROWS, WIDTH = 64, 32
NAMESPACE = "flopmeter_package"


@torch.library.custom_op(f"{NAMESPACE}::ends", mutates_args=())
def ends(lengths: Tensor) -> Tensor:
    return lengths.cumsum(0)


@ends.register_fake
def _(lengths: Tensor) -> Tensor:
    return torch.empty_like(lengths)


@torch.library.custom_op(f"{NAMESPACE}::packed", mutates_args=())
def packed(padded: Tensor, lengths: Tensor) -> Tensor:
    return padded[torch.arange(padded.shape[1]) < lengths[:, None]]


@packed.register_fake
def _(padded: Tensor, lengths: Tensor) -> Tensor:
    return padded.new_empty(torch.library.get_ctx().new_dynamic_size(), padded.shape[2])


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    yield library
    library._destroy()


def _define_doubled(library: torch.library.Library) -> None:
    """As a C++ library does it: a composite, and shapes for meta tensors."""
    library.define("doubled(Tensor x) -> Tensor")
    library.impl("doubled", lambda x: x * 2, "CompositeImplicitAutograd")
    library.m.impl("doubled", "Meta", torch.empty_like)


def _step(device: str) -> None:
    first, second = (torch.ones(WIDTH, WIDTH, device=device, requires_grad=True) for _ in range(2))
    doubled = torch.ops.flopmeter_package.doubled(torch.ones(ROWS, WIDTH, device=device) @ first)
    (doubled @ second).sum().backward()


def test_a_gradient_passes_through_a_composite_that_has_a_kernel_for_meta_tensors(
    library: torch.library.Library,
) -> None:
    _define_doubled(library)
    with FlopCounterMode(display=False) as counter:
        _step("cpu")
    with FlopMeter("h100-sxm5-80gb") as meter:
        _step("meta")
    assert 2 * meter.report().macs == counter.get_total_flops()


def test_an_operator_of_a_library_that_is_loaded_later_is_a_composite_too(library: torch.library.Library) -> None:
    with emulate_cuda(CudaTarget((9, 0))):
        _define_doubled(library)
        x = torch.ones(2, device="meta", requires_grad=True)
        torch.ops.load_library(next(Path(torch.__file__).parent.glob("lib/*c10.*")))
        assert type(torch.ops.flopmeter_package.doubled(x).grad_fn).__name__ == "MulBackward0"
    assert type(torch.ops.flopmeter_package.doubled(x).grad_fn).__name__ != "MulBackward0"


def test_a_result_is_as_long_as_known_lengths_make_it() -> None:
    weight = torch.ones(WIDTH, 8, device="meta")
    padded = torch.ones(3, 16, WIDTH, device="meta")
    with FlopMeter("h100-sxm5-80gb") as meter:
        for lengths in ([4, 5, 6], [1, 1, 16]):  # of one shape: the size is not that of the first call
            rows = packed(padded, torch.tensor(lengths).to("meta"))
            assert rows.is_meta
            assert rows.shape == (sum(lengths), WIDTH)
            rows @ weight
    assert meter.report().macs == (15 + 18) * WIDTH * 8
    (assumed,) = meter.report().assumptions
    assert assumed.startswith("the size of a result depends on integers, not on unknown floats for")


def test_a_size_that_depends_on_unknown_integers_is_an_error() -> None:
    with FlopMeter("h100-sxm5-80gb"), pytest.raises(DataDependentError, match="packed"):
        packed(torch.ones(3, 16, WIDTH, device="meta"), torch.randint(16, (3,), device="meta"))


def test_integers_that_an_operator_makes_of_known_ones_are_known() -> None:
    with flopmeter.FlopMeter("h100-sxm5-80gb"):
        assert ends(torch.tensor([4, 5, 6]).to("meta"))[-1].item() == 15


class Image(torch.Tensor):
    """As torchvision's TVTensor: it passes the question for its device on."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return super().device


def test_a_subclass_that_asks_for_its_device_itself_runs_on_the_device_named_cuda() -> None:
    with flopmeter.cuda("h100-sxm5-80gb") as device:
        images = torch.ones(3, 8, 8, device="cuda").as_subclass(Image)
        assert images.device.type == "cuda"
        torch.nn.Conv2d(3, 4, 3).cuda()(images.unsqueeze(0))
    assert device.report().step.macs == 4 * 6 * 6 * 3 * 3 * 3
