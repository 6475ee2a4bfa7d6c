"""Watts, joules and the clock of a run: laws that hold for any device, and figures by hand."""

import operator
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopmeter import FlopMeter, available_hardware, compare, load_hardware, sweep
from flopmeter.timing import Host

H200 = "h200-sxm-141gb"
NO_HOST = Host(launch_seconds=0.0, view_seconds=0.0, module_call_seconds=0.0)
GPUS = [name for name in available_hardware() if load_hardware(name).tdp_w and not load_hardware(name).is_cpu]


def halves(*shape):
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def report_of(program, hardware=H200, *, clocks="sustained", mode="eager", host=NO_HOST):
    with torch.inference_mode(), FlopMeter(hardware, clocks=clocks, host=host) as meter:
        program()
    return meter.report(mode=mode)


def products(size=8192, times=8):
    x = halves(size, size)
    return lambda: [x @ x for _ in range(times)]


def streams(times=8):
    x = halves(2**27)
    return lambda: [torch.relu(x) for _ in range(times)]


def layers():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, dtype=torch.bfloat16) for _ in range(4)), nn.LayerNorm(4096))
    return lambda: model.bfloat16()(halves(2048, 4096))


PROGRAMS = {"products": products(), "streams": streams(), "small products": products(256, 40), "layers": layers()}


@pytest.fixture(params=PROGRAMS)
def program(request):
    return PROGRAMS[request.param]


@pytest.mark.parametrize("name", GPUS)
def test_no_run_draws_more_than_the_limit(name, program):
    report, device = report_of(program, name), load_hardware(name)
    assert 0 < report.clock.idle_watts < report.watts <= device.tdp_w * 1.0001
    assert report.joules == pytest.approx(report.watts * report.seconds)


@pytest.mark.parametrize("name", [H200, "a100-sxm4-80gb", "l4", "mi300x", "rtx-4090", "gaudi2"])
def test_a_burst_is_never_slower_and_a_higher_limit_never_either(name, program):
    device = load_hardware(name)
    burst = report_of(program, device, clocks="burst")
    seconds = [report_of(program, device.replace(tdp_w=share * device.tdp_w)).seconds for share in (0.4, 0.7, 1, 1.5)]
    assert all(slower >= faster * (1 - 5e-3) for slower, faster in pairwise(seconds))
    assert burst.seconds <= report_of(program, device).seconds
    assert (burst.clocks, burst.clock.ratio) == ("burst", 1.0)


@pytest.mark.parametrize("by", ["class", "op", "phase", "kernel"])
def test_joules_of_rows_add_up_to_those_of_the_run(by):
    report = report_of(layers(), host=None)
    assert sum(row.joules for row in report.rows(by)) == pytest.approx(report.joules)


def test_a_program_that_only_makes_views_draws_idle_power():
    x = torch.empty(8, 8, device="meta")
    report = report_of(lambda: x.t())
    assert (report.joules, report.watts) == (0.0, pytest.approx(0.18 * 700))


def test_a_device_that_waits_draws_next_to_idle_power_and_keeps_its_clock():
    report = report_of(products(64, 50), host=Host(launch_seconds=1e-3))
    assert report.watts == pytest.approx(126, rel=0.01)
    assert report.clock.ratio == 1.0


def test_a_long_run_of_products_on_an_h200_is_held_by_its_power():
    """690 of 700 W at 680 TFLOP/s, 6 to 13 % longer than in a burst (aiconfigurator's GEMM database, 1e11 to 1e12
    FLOP)."""
    report, burst = report_of(products()), report_of(products(), clocks="burst")
    assert report.watts == pytest.approx(690, rel=0.02)
    assert 1.05 < report.seconds / burst.seconds < 1.14
    assert burst.watts > 700  # which no controller lets last


def test_a_kernel_meets_the_limit_whatever_runs_beside_it():
    """Neither idle time nor kernels that draw less make up for a product; they keep the boost clock."""
    alone = report_of(products())
    waiting = report_of(products(), host=Host(launch_seconds=alone.kernel_seconds / 4))
    assert waiting.idle_seconds > 0.4 * waiting.seconds
    assert waiting.kernel_seconds == alone.kernel_seconds
    mixed = report_of(lambda: (products()(), streams()()))
    clocks = [timing.clock for timing in mixed.timings]
    assert clocks == [alone.timings[0].clock] * 8 + [1.0] * 8
    work = [timing.work_seconds for timing in mixed.timings]
    assert mixed.clock.ratio == pytest.approx(sum(map(operator.mul, clocks, work)) / sum(work))
    assert alone.clock.ratio < 0.95
    assert alone.clock.ratio < mixed.clock.ratio


def test_memory_traffic_does_not_stretch_with_the_clock():
    """A byte takes 100 pJ, and a comparison is no FLOP. Under a cap below that the clock is low, and memory waits."""
    report = report_of(streams())
    assert report.clock.ratio == 1.0
    moved = report.bytes_read + report.bytes_written
    assert report.joules - 126 * report.seconds == pytest.approx(100e-12 * moved)
    capped = report_of(streams(), load_hardware(H200).replace(tdp_w=440))
    assert capped.clock.ratio < 0.3
    assert 1 < capped.kernel_seconds / report.kernel_seconds < 1.45  # (440 W - 126) of 437; latency stretches too


def test_the_energy_of_a_product_by_hand():
    """In a burst 2 x 8192^3 FLOP at .85 pJ and 2 x 128 MiB at 100 pJ."""
    report = report_of(products(times=1), clocks="burst")
    (row,) = report.rows("op")
    work = 2 * 8192**3 * 0.85e-12 + 2 * 2 * 8192**2 * 100e-12
    assert row.joules == pytest.approx(work + 126 * report.seconds)  # the host's launch included


def test_the_report_says_which_clock_it_prices():
    assert "sustained clocks: 9" in report_of(products()).render()
    assert "% of boost" in report_of(products()).render()
    text = report_of(products(), clocks="burst").render()
    assert "burst clocks: boost" in text
    report = report_of(products())
    assert f"power {report.watts:.0f} of 700 W on average" in report.render("markdown")
    unknown = report_of(products(), load_hardware(H200).replace(tdp_w=None))
    assert (unknown.watts, unknown.joules, unknown.rows()[0].joules) == (None, None, None)
    assert "power unknown" in unknown.render()
    assert '"watts": null' in unknown.render("json")


def test_unknown_clocks_are_refused():
    with pytest.raises(ValueError, match="unknown clocks 'boost'; known: sustained, burst"):
        FlopMeter(clocks="boost")


def test_other_modes_and_devices_keep_the_clocks():
    with FlopMeter(H200, clocks="burst") as meter:
        layers()()
    assert meter.report(mode="compiled").clocks == "burst"
    assert meter.report(hardware="h100-sxm5-80gb").compiled.clocks == "burst"


def test_energy_costs_its_kilowatt_hours_and_nothing_without_a_price():
    """A device of 700 W that is busy for an hour at its limit would take 0.7 kWh."""
    with FlopMeter(H200, dollars_per_kwh=0.3) as meter:
        products()()
    report = meter.report()
    hour = report.watts * 3600 / 3.6e6  # kWh of an hour of such runs
    assert report.energy_dollars * 3600 / report.seconds == pytest.approx(0.3 * hour)
    assert "of energy for a million runs at $0.3 a kWh" in str(report)
    assert "for a million runs" in report.render("html")
    assert report_of(products()).energy_dollars is None
    assert "a kWh" not in str(report_of(products()))


def test_comparisons_and_sweeps_show_what_energy_costs():
    compared = compare(products(), [H200, "l4"], dollars_per_kwh=0.36)
    swept = sweep(lambda size: products(256 * size)(), [1, 4], H200, dollars_per_kwh=0.36)
    for answer, rows in ((compared, compared.rows), (swept, swept.points)):
        assert "energy $/M steps" in str(answer)
        for row in rows:
            assert row.energy_dollars == pytest.approx(row.joules * 1e-7)
    assert "energy $" not in str(compare(products(), [H200]))
    assert "energy $" not in str(sweep(lambda size: products(256)(), [1], H200))


@pytest.mark.parametrize("price", [-0.1, float("inf"), float("nan")])
def test_what_is_no_price_of_energy_is_refused(price):
    with pytest.raises(ValueError, match=r"dollars per kWh, such as 0\.3, not"):
        FlopMeter(H200, dollars_per_kwh=price)


@pytest.mark.parametrize(
    ("backend", "length", "forward", "backward"),
    [("CUDNN", 16384, 3817e-6, 10628e-6), ("FLASH", 16384, 6723e-6, 17914e-6), ("FLASH", 32768, 26.13e-3, None)],
)
def test_attention_on_an_h100_is_held_back_by_its_700_watts_as_measured(backend, length, forward, backward):
    """Runs of a second, causal, 32 heads of 128: 694 to 740 W (torch 2.11, 2026-11; the length of 32,768 set nothing).
    At the boost clock cuDNN's forward pass alone would be 8 % faster, FlashAttention-2's 12."""
    q, k, v = halves(3, 1, 32, length, 128).requires_grad_().unbind()
    with sdpa_kernel(getattr(SDPBackend, f"{backend}_ATTENTION")), FlopMeter("h100-sxm5-80gb") as meter:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).backward(torch.empty_like(v))
    report = meter.report()
    timed = [each for each in report.timings if each.kernel_class.startswith("attention")]
    for timing, measured in zip(timed, (forward, backward), strict=True):
        if measured is not None:
            assert timing.seconds == pytest.approx(measured, rel=0.03)
            assert timing.joules / timing.seconds + report.clock.idle_watts == pytest.approx(700, rel=0.01)
