"""What `torch.tensor` and its kin hold on meta tensors is what they would hold on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flopmeter import DataDependentError, FlopMeter, on_meta

MADE = {
    "rounded down by its type": lambda: torch.tensor(1.9, dtype=torch.int64),
    "of a wider type than its numbers": lambda: torch.tensor([7, 200], dtype=torch.float64),
    "truth of numbers": lambda: torch.tensor([0, 2, -1], dtype=torch.bool),
    "of rounded numbers": lambda: torch.as_tensor([0.1, 1.0], dtype=torch.float16),
    "of another's type": lambda: torch.zeros(1, dtype=torch.int32).new_tensor([3.7, 4.2]),
    "nested": lambda: torch.tensor([[1, 2], [3, 4]]),
    "of tensors": lambda: torch.tensor([torch.tensor(2), torch.tensor(5)]),
    "by name": lambda: torch.tensor(data=[4, 5], dtype=torch.uint8),
    "of an array": lambda: torch.asarray(obj=[2, 3], dtype=torch.int16),
}


@pytest.mark.parametrize("name", MADE)
def test_a_tensor_that_is_made_on_meta_holds_what_it_would_on_the_cpu(name):
    true = MADE[name]()
    with torch.device("meta"), FlopMeter():
        made = MADE[name]()
        assert made.is_meta
        assert made.dtype is true.dtype
        assert made.numpy().tolist() == true.tolist()
        assert made.numpy().dtype == true.numpy().dtype


def test_a_weight_that_becomes_whole_numbers_on_meta_is_known():
    """A weight's own numbers are not kept: nothing but a cast to integers asks for them."""
    weight = torch.nn.Parameter(torch.tensor([2.9, 3.1]))
    with FlopMeter():
        assert weight.to("meta", torch.int64).tolist() == [2, 3]
        with pytest.raises(DataDependentError):
            weight.to("meta", torch.float64).tolist()


def test_a_share_of_a_mask_is_assumed_where_it_is_small():
    few, many, part = (torch.empty(size, dtype=torch.bool, device="meta") for size in (8, 1 << 26, 8))
    with FlopMeter(mask_fraction=0.5):
        assert few.nonzero().shape == (4, 1)
        with pytest.raises(DataDependentError):
            many.nonzero()
        assert part[::2].nonzero().shape == (2, 1)
        assert part[:4].nonzero().shape == (2, 1)


def test_values_are_kept_on_the_cpu_whatever_the_programs_own_device_is():
    with FlopMeter():
        kept = torch.tensor([3, 4, 5]).to("meta")
        with torch.device("meta"):
            assert kept[1:].tolist() == [4, 5]
            assert (kept.view(3, 1) + kept)[2].tolist() == [8, 9, 10]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("index", torch.arange(4), persistent=False)

    def _init_weights(self, module: nn.Module) -> None: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()


def test_to_copy_the_value_of_a_twin_is_no_op_of_the_program() -> None:
    twin, x = on_meta((Positions(), torch.rand(4)))
    with FlopMeter() as meter:
        twin(x)
    assert [op.call.name for op in meter.trace.ops] == ["tanh"]


def test_a_function_of_a_twin_is_linearized() -> None:
    layer, x = on_meta((nn.Linear(3, 2), torch.rand(4, 3)))
    with FlopMeter():
        _, linear = torch.func.linearize(layer, x)
        assert linear(x).shape == (4, 2)
