"""What CUDA runs, but meta does not, where a program subscripts tensors or makes them of numbers."""

import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flopmeter
from flopmeter import FlopMeter

H100 = "h100-sxm5-80gb"


class Names(TorchDispatchMode):
    """The ops of torch itself, without the one that wraps a number of Python."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.lift_fresh.default:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def recorded(program: Callable[[Tensor], Any], **options: Any) -> tuple[list[str], FlopMeter]:
    """The ops that the program runs on a tensor of 64 x 32, and the meter."""
    with FlopMeter(hardware=H100, **options) as meter:
        x = torch.zeros(64, 32, device="meta")
        before = len(meter.trace.ops)
        program(x)
    ops = [op for op in meter.trace.ops[before:] if op.call.name != "lift_fresh"]  # which does nothing
    return [str(op.call.func) for op in ops], meter


def put(*index: Any) -> Callable[[Tensor], None]:
    return lambda x: x.__setitem__(index[0] if len(index) == 1 else index, 3.0)


@pytest.mark.parametrize(
    "program",
    [put(slice(1, 3)), put(2), put(slice(None), 5), put(2, 3), put(...), put(None), put(True, slice(2))],
    ids=["rows", "row", "column", "element", "all", "new dimension", "true"],
)
def test_a_number_that_is_put_into_a_tensor_runs_what_it_runs_on_tensors_of_the_host(program: Callable[[Tensor], None]):
    """THPVariable_setitem makes a tensor of the host of the number, for tensors of the host and of CUDA alike."""
    with Names() as host:
        program(torch.zeros(64, 32))
    ran, _ = recorded(program)
    if host.names[-1] == "aten.index_put_.default":  # True is a place: the number is copied to the device
        assert ran[-2:] == ["aten._to_copy.default", "aten.index_put_.default"]
    elif "index_fill_" not in host.names[-1]:  # the same for True, from torch 2.15 on: its place is made otherwise
        assert ran == host.names[1:]  # without the zeros


def test_a_number_that_is_put_into_an_element_is_sent_and_waited_for():
    ran, meter = recorded(put(2, 3))
    if ran[-1] == "aten.fill_.Scalar":
        return  # from torch 2.15 on it is filled in
    (copy,) = [kernel for kernel in meter.report().kernels if kernel.op.call.name == "copy_"]
    assert copy.cost.link_bytes == 4
    assert copy.cost.blocks_host


def test_what_is_put_into_a_known_mask_stays_known():
    with FlopMeter(hardware=H100):
        mask = torch.zeros(4, 6, dtype=torch.bool, device="meta")
        mask[1:3, ::2] = True
        mask[0] = 1
        assert int(mask.sum()) == 2 * 3 + 6


def test_a_number_under_a_mask_is_filled_in_by_one_kernel_that_nobody_waits_for():
    ran, meter = recorded(lambda x: x.__setitem__(x > 0, -1))
    assert ran == ["aten.gt.Scalar", "aten.masked_fill_.Scalar"]
    assert meter.report().assumptions == ()
    assert not any(kernel.cost.blocks_host for kernel in meter.report().kernels)


@pytest.mark.parametrize("shape", [(64,), (64, 32)], ids=["of rows", "of elements"])
def test_a_mask_that_is_filled_in_reaches_over_whole_rows(shape: tuple[int, ...]):
    """As torch does it on the host: the mask gets a dimension for each that it does not have."""
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[::2] = True
    with FlopMeter():
        x = torch.zeros(64, 32, dtype=torch.int64, device="meta")
        x[mask.to("meta")] = 5
        assert int(x.sum()) == 32 * 32 * 5


def test_a_mask_of_columns_is_filled_in_over_all_rows():
    with FlopMeter():
        x = torch.zeros(64, 32, dtype=torch.int64, device="meta")
        x[:, (torch.arange(32) < 3).to("meta")] = 1
        assert int(x.sum()) == 64 * 3
        assert x[:, 3:].sum() == 0


def test_a_number_at_places_is_copied_to_the_device_first():
    ran, meter = recorded(lambda x: x.__setitem__(torch.arange(4, device="meta"), 1.0))
    if ran[-1] == "aten.index_fill_.int_Scalar":
        return  # from torch 2.15 on it is filled in
    assert ran == ["aten.arange.default", "aten._to_copy.default", "aten.index_put_.default"]
    (copy,) = [kernel for kernel in meter.report().kernels if kernel.op.call.name == "_to_copy"]
    assert (copy.cost.link_bytes, copy.cost.blocks_host) == (4, True)


def test_the_places_of_a_mask_are_found_by_nonzero_for_which_the_host_waits():
    """An H100's profile of `features[mask]` has aten::nonzero inside of aten::index, with two kernels that count, a
    copy to the host, two that select and one that makes coordinates of numbers (validation/traces, kernels_reduce)."""
    ran, meter = recorded(lambda x: x[x.bernoulli() > 0], mask_fraction=0.25)
    assert ran[-3:] == ["aten.gt.Scalar", "aten.nonzero.default", "aten.index.Tensor"]
    report = meter.report()
    kernels = [kernel.cost for kernel in report.kernels if kernel.op.call.name == "nonzero"]
    assert [cost.blocks_host for cost in kernels] == [False, True, False, False]
    assert kernels[1].link_bytes == 4
    assert sum(region.nbytes for region in kernels[3].writes) == 64 * 32 // 4 * 2 * 8
    assert report.ran.inputs == ()


@pytest.mark.parametrize(
    ("shape", "kernels"), [((4000,), 1 + 2), ((10_000,), 2 + 2), ((64, 8192), 2 + 2 + 1), ((4, 8), 1 + 2 + 1)]
)
def test_nonzero_launches_as_many_kernels_as_on_an_h100(shape: tuple[int, ...], kernels: int):
    with FlopMeter(hardware=H100, mask_fraction=0.1) as meter:
        (torch.rand(shape, device="meta") > 0.5).nonzero()
    work = [kernel.cost.work for kernel in meter.report().kernels if kernel.op.call.name == "nonzero"]
    assert sum(each.kernels for each in work if hasattr(each, "kernels")) == kernels


def test_the_gradient_of_a_masked_index_finds_the_places_again():
    def program(x: Tensor) -> None:
        x.requires_grad_()
        x[(torch.arange(64) % 2 == 0).to("meta")].sum().backward()

    ran, _ = recorded(program)
    assert ran.count("aten.nonzero.default") == 2
    assert ran[ran.index("aten._index_put_impl_.default") - 1] == "aten.nonzero.default"


def test_that_a_mask_holds_nowhere_is_known_when_all_of_it_was_looked_at():
    _, meter = recorded(lambda x: x[(x > 0)])
    kernels = [kernel.cost for kernel in meter.report().kernels if kernel.op.call.name == "nonzero"]
    assert [cost.blocks_host for cost in kernels] == [False, True, False]
    assert not any(kernel.op.call.name == "index" for kernel in meter.report().kernels)


def test_indices_of_the_host_are_copied_to_the_device_one_by_one():
    ran, _ = recorded(lambda x: x[torch.arange(4), torch.arange(4)])
    assert ran[-3:] == ["aten._to_copy.default", "aten._to_copy.default", "aten.index.Tensor"]
    ran, _ = recorded(lambda x: x[torch.ones(64, dtype=torch.bool)])
    assert ran[-2:] == ["aten._to_copy.default", "aten.index.Tensor"]


def test_indices_that_are_repeated_differently_are_written_out_first():
    """A row of places for each column of places: torch's CUDA kernel wants both with the same strides."""

    def program(x: Tensor) -> None:
        rows, columns = (torch.arange(n, device="meta") for n in (64, 32))
        assert x[rows[:, None], columns].shape == (64, 32)
        assert x[rows[:32], columns].shape == (32,)

    ran, meter = recorded(program)
    assert ran[2:] == ["aten.unsqueeze.default", *["aten.clone.default"] * 2, "aten.index.Tensor", *ran[-2:]]
    assert ran[-1] == "aten.index.Tensor"
    written = [op for op in meter.trace.ops if op.call.name == "clone"]
    assert [op.call.outputs[0].nbytes for op in written] == [64 * 32 * 8] * 2


def test_places_to_add_to_are_checked_unless_they_come_from_an_index():
    """An H100's profile of index_put_(..., accumulate=True) begins with max, lt, assert, min, ge, assert; that of an
    index's gradient does not (validation/traces, kernels_index)."""

    def launches(program: Callable[[Tensor], Any]) -> int:
        _, meter = recorded(program)
        return sum(kernel.cost.work.kernels for kernel in meter.report().kernels if "index_put" in kernel.op.call.name)

    def adds(x: Tensor) -> None:
        x.index_put_((torch.arange(64, device="meta"),), torch.ones(64, 32, device="meta"), accumulate=True)

    def differentiates(x: Tensor) -> None:
        x.requires_grad_()[torch.arange(64, device="meta")].sum().backward()

    assert launches(adds) == launches(differentiates) + 6


def test_a_script_may_put_numbers_of_any_type():
    with flopmeter.cuda(H100):
        x = torch.zeros(4, 4, device="cuda")
        x[0], x[1, 1], x[:, 2] = 1, True, 2.5
        x[torch.tensor([1, 2])] = 7
        flags = torch.zeros(4, dtype=torch.uint8, device="cuda")
        flags[1:] = 3
        assert int(flags.sum()) == 9
    y = torch.zeros(4, device="meta")
    y[0] = 1  # without a meter, as ever


def test_a_tensor_made_of_numbers_is_sent_to_the_device_and_waited_for():
    """internal_new_from_data in torch's tensor_new.cpp makes it on the host, and then calls `.to(device)`."""

    def program(x: Tensor) -> None:
        torch.tensor([[1.0, 2.0]], device="meta")
        x.new_tensor([1, 2, 3])
        torch.as_tensor(3, device="meta")
        torch.tensor(4)  # stays on the host

    ran, meter = recorded(program)
    assert ran == ["aten._to_copy.default"] * 3
    copies = [kernel.cost for kernel in meter.report().kernels if kernel.op.call.name == "_to_copy"]
    assert [(copy.link_bytes, copy.blocks_host) for copy in copies] == [(8, True), (12, True), (8, True)]
    assert meter.report().ran.inputs == ()


@pytest.mark.parametrize(
    "made", [lambda step: torch.tensor(0.5 * step, device="meta"), lambda step: torch.full((), step).to("meta")]
)
def test_the_advice_for_numbers_in_the_loop_is_to_make_them_on_the_device(made: Callable[[int], Tensor]):
    with FlopMeter(hardware=H100) as meter:
        x = torch.zeros(1 << 22, device="meta")
        for step in range(8):
            x = torch.relu(x * made(step))
    advice = str(meter.report())
    assert "made on the device (torch.full, torch.where; for a list of indices a slice), or moved there once" in advice
    assert "pin_memory" not in advice


def test_a_list_of_places_is_sent_to_the_device_and_waited_for():
    places = [3, 1]

    def program(x: Tensor) -> None:
        x[:, [2, 1, 0]]
        x[places]

    ran, meter = recorded(program)
    assert [name for name in ran if "slice" not in name] == ["aten._to_copy.default", "aten.index.Tensor"] * 2
    assert [kernel.cost.link_bytes for kernel in meter.report().kernels if kernel.cost.link_bytes] == [24, 16]
    assert meter.report().ran.inputs == ()


def test_a_tensor_of_the_host_may_be_filled_in_at_places_or_under_a_mask():
    """Its number is read on the host, where nobody waits for it (index_fill_ and masked_fill_ take it by `.item()`)."""

    def program(x: Tensor) -> None:
        value = torch.tensor(2.0)
        x.index_fill_(0, torch.arange(3, device="meta"), value)
        x.index_fill(1, torch.arange(3, device="meta"), value)
        x.masked_fill_(x > 0, value)

    ran, meter = recorded(program)
    assert [name for name in ran if "fill" in name] == [
        "aten.index_fill_.int_Scalar", "aten.index_fill.int_Scalar", "aten.masked_fill_.Scalar"
    ]  # fmt: skip
    assert not any(kernel.cost.link_bytes for kernel in meter.report().kernels)


def test_the_gradient_of_a_masked_index_is_kept_as_it_is_and_not_copied():
    """AccumulateGrad copies a gradient that something else still holds (torch/csrc/autograd/functions)."""

    def program(x: Tensor) -> None:
        x.requires_grad_()
        x[(torch.arange(64) % 2 == 0).to("meta")].sum().backward()

    ran, _ = recorded(program)
    assert ran[-2:] == ["aten._index_put_impl_.default", "aten.detach.default"]


def looking_for_places(find: Callable[[Tensor], Tensor]) -> FlopMeter:
    """Four large products, each with a search for what a mask holds and thirty small kernels after it."""
    with FlopMeter(hardware=H100, mask_fraction=0.5) as meter, torch.no_grad():
        x, small = torch.rand(4096, 4096, device="meta"), torch.rand(64, device="meta")
        for _ in range(4):
            y = x @ x
            places = find(y[0] > 0)
            for _ in range(30):
                small = small * 2.0
            y[0].index_fill_(0, places.flatten(), 0.0)
    return meter


def test_the_advice_where_the_host_waits_for_a_mask_is_worth_what_the_mended_program_is():
    report = looking_for_places(lambda mask: mask.nonzero()).report()
    mended = looking_for_places(lambda mask: torch.nonzero_static(mask, size=2048)).report()
    (advice,) = [each for each in report.advice if "how many places a mask holds" in each.why]
    assert "4 times" in advice.why
    assert advice.run_seconds_then == pytest.approx(mended.seconds, rel=0.03)
    assert mended.seconds < 0.97 * report.seconds


def test_an_array_of_numpy_is_sent_once():
    array = numpy.zeros((4, 3), numpy.float32)
    for make in (torch.tensor, torch.as_tensor, torch.asarray):
        ran, _ = recorded(functools.partial(lambda make, x: make(array, device="meta"), make))
        assert ran == ["aten._to_copy.default"]
