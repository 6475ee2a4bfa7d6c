"""What random numbers cost: torch's kernels use all four of a Philox call, those that inductor writes one."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flopmeter import FlopMeter, load_hardware
from flopmeter.records import VectorWork

H100 = "h100-sxm5-80gb"
HOW = pytest.mark.parametrize("how", [True, "rules"])


class Residual(nn.Module):
    """BERT's: dropout, the residual in fp32 and a layer norm over 768."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(768, device="meta")

    def forward(self, x, residual):
        return self.norm(F.dropout(x, 0.1) + residual).bfloat16()


def kernels_of(how, *, grad=True):
    model = Residual()
    x = torch.empty(12288, 768, device="meta", dtype=torch.bfloat16, requires_grad=grad)
    residual = torch.empty(12288, 768, device="meta", requires_grad=grad)
    with FlopMeter(H100, compile=how, clocks="burst") as meter, torch.set_grad_enabled(grad):
        model(x, residual)
    report = meter.report(mode="compiled" if how == "rules" else None)
    return [(k.cost, t.seconds) for k, t in zip(report.kernels, report.timings, strict=True)]


def numbers(cost):
    return cost.work.random_numbers if isinstance(cost.work, VectorWork) else 0


@HOW
@pytest.mark.parametrize("grad", [True, False])
def test_a_compiled_kernel_draws_a_dropouts_numbers_once(how, grad):
    assert sum(numbers(cost) for cost, _ in kernels_of(how, grad=grad)) == 12288 * 768


@HOW
def test_a_compiled_dropout_with_a_layer_norm_takes_what_an_h100_took(how):
    """76.1 us for 22 of them, of which 40 would be the memory's (validation/traces, h100_bert_mask_train_compiled)."""
    drawing = [seconds for cost, seconds in kernels_of(how) if numbers(cost)]
    assert drawing == [pytest.approx(76.1e-6, rel=0.15)]


def test_a_drawn_number_is_four_times_as_many_instructions_compiled_as_in_a_kernel_of_torchs():
    x = torch.empty(2**20, device="meta")
    works = []
    for how in (None, True):
        function = (lambda x: F.dropout(x, 0.5)) if how is None else torch.compile(lambda x: F.dropout(x, 0.5))
        with FlopMeter(H100) as meter:
            function(x)
        works.append(next(k.cost.work for k in meter.report().kernels if numbers(k.cost)))
    eager, compiled = works
    assert eager.random_numbers == compiled.random_numbers == 2**20
    assert compiled.index_operations == 4 * eager.index_operations == 80 * 2**20


def test_a_large_compiled_dropout_is_bound_by_the_integer_units():
    """80 instructions on 64 lanes of 132 SMs at 1.98 GHz; the memory's part is a fourth of that."""
    n = 2**28
    x = torch.empty(n, device="meta", dtype=torch.bfloat16)
    with FlopMeter(H100, clocks="burst") as meter:
        torch.compile(lambda x: F.dropout(x, 0.5))(x)
    clock = load_hardware(H100).boost_clock_mhz * 1e6
    assert meter.report().kernel_seconds == pytest.approx(80 * n / (64 * 132 * clock), rel=0.1)
