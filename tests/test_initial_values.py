"""Models that a script builds on the CPU before it moves them to the device named cuda."""

import os

import pytest
import torch
from torch import nn

import flopmeter

H100 = "h100-sxm5-80gb"


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="asks Linux how much memory this process has")
@pytest.mark.parametrize(
    "draw_again",
    [
        None,
        lambda weight: nn.init.trunc_normal_(weight),  # as a script finds it, which the run started
        lambda weight: weight.data.normal_(0, 0.02),
    ],
)
@pytest.mark.parametrize("cast", [nn.Module.float, nn.Module.half, lambda model: model.to(torch.bfloat16)])
def test_a_large_model_built_on_the_cpu_takes_no_memory_of_this_machine(draw_again, cast):
    with flopmeter.cuda(H100) as device:
        before = resident_bytes()
        model = nn.Linear(16384, 16385, bias=False)  # over 1 GiB
        if draw_again:
            draw_again(model.weight)
        dtype = cast(model).weight.dtype
        assert resident_bytes() - before < 100e6
        model.cuda()(torch.zeros(8, 16384, device="cuda", dtype=dtype))
    report = device.report().step
    assert report.macs == 8 * 16384 * 16385
    assert dtype == cast(nn.Linear(1, 1)).weight.dtype
    assert "weights that are made on the CPU, beyond the first GiB, get no random values" in report.notes


def test_small_weights_and_large_data_on_the_cpu_are_drawn_as_ever():
    with flopmeter.cuda(H100):
        small, data = nn.Linear(64, 64), torch.empty(4096, 4096).normal_()
        small.cuda()(torch.zeros(1, 64, device="cuda"))
        assert data.std().item() == pytest.approx(1, rel=0.01)
        assert nn.Linear(4096, 4096).weight.std() > 0
        nn.Linear(16384, 16385).cuda()  # its memory on the CPU may become that of others
        assert torch.full((4096, 4096), 2.0).half().mean().item() == 2
    assert nn.Linear(4096, 4096).weight.std() > 0  # after the run
