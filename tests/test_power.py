"""The law of power against published measurements of devices that differ in power, and against arithmetic by hand."""

import pytest

from flopmeter import HardwareError, available_hardware, load_hardware
from flopmeter.device import power

# Best dense bf16 or fp16 product over the dense spec peak: stas00/ml-engineering compute/accelerator@744d01e and
# zzc0721/torch-performance-test-data 2026-01-12. Typical large products are .07 below.
BEST = {
    "v100-sxm2-16gb": 0.76,
    "t4": 0.65,
    "a100-pcie-40gb": 0.76,
    "a100-sxm4-80gb": 0.86,
    "rtx-a6000": 0.80,
    "l4": 0.59,
    "l40s": 0.74,
    "h100-pcie-80gb": 0.66,
    "h100-sxm5-80gb": 0.80,
    "b200-sxm-180gb": 0.78,
    "mi300x": 0.51,
    "mi325x": 0.60,
}
HALVED = {"rtx-3090": 1.08, "rtx-4090": 1.05, "a10g": 0.99}


def by_law(device):
    """The profile without its measurements."""
    return device.replace(achieved=None)


@pytest.mark.parametrize("name", BEST)
def test_matrix_units_reach_what_their_power_leaves(name):
    peak = by_law(load_hardware(name)).contraction_peak("fp16")
    assert peak.achieved + 0.07 == pytest.approx(BEST[name], rel=0.10)


@pytest.mark.parametrize("name", HALVED)
def test_a_geforce_that_halves_its_rate_is_not_held_back(name):
    peak = by_law(load_hardware(name)).contraction_peak("fp16")
    assert peak.achieved == pytest.approx(HALVED[name], rel=0.10)


def test_dies_of_one_generation_take_the_same_energy_for_a_flop():
    """An RTX 5080 (GB203) has the multiprocessors of a 5090 (GB202), and not those of a B200 (GB100)."""
    large = by_law(load_hardware("rtx-5090"))
    small = large.replace(architecture="Blackwell GB203")
    assert small.contraction_peak("bf16") == large.contraction_peak("bf16")
    assert large.contraction_peak("bf16").picojoules_per_flop > (
        by_law(load_hardware("b200-sxm-180gb")).contraction_peak("bf16").picojoules_per_flop
    )


def test_the_clock_is_where_power_meets_the_limit():
    """At half of the clock the voltage is three quarters: arithmetic draws 1/2 x 9/16 of what it draws at boost."""
    assert power.squared_voltage(0.5) == 9 / 16
    assert power.clock_within(9 / 32, 1.0, 0.0) == pytest.approx(0.5)
    assert power.clock_within(0.5 * (9 / 16 + 0.4), 1.0, 0.4) == pytest.approx(0.5)
    assert power.clock_within(1.5, 1.0, 0.4) == 1.0
    assert power.squared_voltage(0.1) == power.LEAST_VOLTAGE**2  # below that a process does not work


def test_the_h200_reaches_seven_tenths_when_its_power_is_logged():
    """672 to 718 TFLOP/s at 690 of 700 W in bf16 products of 1e11 FLOP or more (aiconfigurator's GEMM database)."""
    peak = load_hardware("h200-sxm-141gb").contraction_peak("bf16")
    assert peak.sustained_flop_per_s / 1e12 == pytest.approx(690, rel=0.03)
    assert peak.burst / peak.achieved == pytest.approx(1.11, rel=0.03)  # rows at 690 W are 11 % longer than bursts


@pytest.mark.parametrize("name", ["mi100", "mi210"])
def test_fp32_costs_cdna_more_than_fp16(name):
    """.65 of the peak of 46.1 and 45.3 TFLOP/s (NeuSight); fp16 is not as much held back."""
    device = load_hardware(name)
    assert device.contraction_peak("fp32").achieved == pytest.approx(0.65, abs=0.01)
    assert device.contraction_peak("fp32").achieved < device.contraction_peak("fp16").achieved
    assert device.contraction_peak("fp32").burst == device.contraction_peak("fp16").burst


def test_types_whose_energy_falls_as_their_rate_rises_reach_the_same_share():
    peaks = [load_hardware("h100-sxm5-80gb").replace(achieved=None).contraction_peak(name) for name in ("bf16", "fp8")]
    assert peaks[0].achieved == pytest.approx(peaks[1].achieved, rel=0.01)
    assert peaks[0].picojoules_per_flop == 2 * peaks[1].picojoules_per_flop


@pytest.mark.parametrize("name", available_hardware())
def test_a_narrower_type_reaches_no_larger_share_of_its_peak_than_fp16_unless_it_was_measured_to(name):
    device = load_hardware(name)
    half = "fp16" if "fp16" in device.matrix_tflop_per_s else "bf16"
    for dtype in {"fp8", "fp6", "fp4", "int8"} & device.matrix_tflop_per_s.keys():
        measured = 0.0 if device.achieved is None else device.achieved.matrix_by_dtype.get(dtype, 0.0)
        assert device.contraction_peak(dtype).burst <= max(device.contraction_peak(half).burst, measured), dtype


def test_more_power_than_the_unit_needs_gains_nothing():
    device = by_law(load_hardware("a100-sxm4-80gb"))
    assert device.replace(tdp_w=800).contraction_peak("bf16") == device.replace(tdp_w=600).contraction_peak("bf16")
    assert by_law(load_hardware("p100-pcie-16gb")).vector_peak("fp32").achieved == 0.90


def test_a_70_watt_part_sustains_about_half_of_its_fp32_peak():
    """T4: 4.0 to 4.3 of 8.1 TFLOP/s measured. L4: 9 of 30.3 in products of more than 1 ms (NeuSight)."""
    assert by_law(load_hardware("t4")).vector_peak("fp32").achieved == pytest.approx(0.53, rel=0.25)
    assert load_hardware("l4").vector_peak("fp32").achieved == pytest.approx(0.30, rel=0.1)


@pytest.mark.parametrize("name", ["h100-sxm5-80gb", "a100-sxm4-80gb", "l40s", "mi300x", "b200-sxm-180gb", "gaudi3"])
def test_a_lower_power_limit_lowers_measured_and_unmeasured_shares(name):
    """And a higher one never does; memory has its own clock."""
    for device in (load_hardware(name), by_law(load_hardware(name))):
        limits = [share * device.tdp_w for share in (0.3, 0.5, 0.7, 0.9, 1.0, 1.2, 2.0)]
        capped = [device.replace(tdp_w=limit) for limit in limits]
        of_vectors = [each.vector_peak("bf16").sustained_flop_per_s for each in capped]
        assert of_vectors == sorted(of_vectors)
        rates = [each.contraction_peak("bf16").sustained_flop_per_s for each in capped]
        assert rates == sorted(rates)
        assert rates[0] < rates[-1] or device.achieved is None  # unknown energy: the limit says what it needs
        assert len({each.sustained_bandwidth_bytes_per_s for each in capped}) == 1


def test_an_h100_at_500_watts_reaches_half_to_six_tenths():
    """.51 to .62 of the peak, fitted to torchtitan's published training on H100s capped at 500 W."""
    peak = load_hardware("h100-sxm5-80gb").replace(tdp_w=500).contraction_peak("bf16")
    assert 0.51 <= peak.achieved <= 0.62


def test_a_measured_share_goes_before_the_law():
    device = load_hardware("p4").replace(achieved={"vector": 0.5})
    assert device.vector_peak("fp32").achieved == 0.5
    device = load_hardware("h100-sxm5-80gb").replace(achieved={"matrix_burst": None, "matrix": 0.6})
    assert device.contraction_peak("bf16").achieved == 0.6
    both = load_hardware("h100-sxm5-80gb").replace(achieved={"matrix_burst": 0.8, "matrix": 0.6})
    assert (both.contraction_peak("bf16").achieved, both.contraction_peak("bf16").burst) == (0.6, 0.8)
    assert both.contraction_peak("bf16").picojoules_per_flop > device.contraction_peak("bf16").picojoules_per_flop


def test_an_operators_limit_leaves_the_idle_power_alone():
    device = load_hardware("h100-sxm5-80gb")
    capped = device.replace(power_limit_w=500)
    assert capped.idle_watts == device.idle_watts == pytest.approx(126)
    assert 0.51 <= capped.contraction_peak("bf16").achieved < 0.9 * device.contraction_peak("bf16").achieved


def test_a_measured_share_was_measured_at_the_limit_of_then():
    device = load_hardware("mi300x")
    capped = device.replace(tdp_w=500)
    assert capped.achieved.limit_w == 750
    assert capped.contraction_peak("bf16").achieved < device.contraction_peak("bf16").achieved
    assert capped.contraction_peak("bf16").burst == device.contraction_peak("bf16").burst
    anew = device.replace(tdp_w=500, achieved={"matrix": 0.4})
    assert (anew.achieved.limit_w, anew.contraction_peak("bf16").achieved) == (None, 0.4)


@pytest.mark.parametrize("name", ["h100-sxm5-80gb", "h200-sxm-141gb", "b200-sxm-180gb", "a100-sxm4-80gb", "l40s"])
def test_two_chips_in_one_reach_the_share_that_each_reaches(name):
    """Twice the rates for twice the watts: each half feels the limit that it felt before."""
    one = load_hardware(name)
    tables = ("vector_tflop_per_s", "matrix_tflop_per_s")
    rates = {table: {dtype: 2 * rate for dtype, rate in getattr(one, table).items()} for table in tables}
    two = one.replace(title="two in one", tdp_w=2 * one.tdp_w, **rates)
    assert two.idle_watts == pytest.approx(2 * one.idle_watts)
    assert two.vector_peak("fp32").achieved == pytest.approx(one.vector_peak("fp32").achieved)
    for dtype in one.matrix_tflop_per_s:
        assert two.contraction_peak(dtype).achieved == pytest.approx(one.contraction_peak(dtype).achieved), dtype


@pytest.mark.parametrize("name", ["h200-sxm-141gb", "t4", "rtx-4090", "mi210", "v100-sxm2-16gb", "tpu-v4"])
def test_a_clock_scales_every_rate_but_that_of_memory(name):
    device = load_hardware(name)
    boost, half = device.at_clock(1.0), device.at_clock(0.5)
    for dtype in device.matrix_tflop_per_s:
        burst = device.contraction_peak(dtype).burst * device.contraction_peak(dtype).flop_per_s
        assert boost.contraction_peak(dtype).sustained_flop_per_s == pytest.approx(burst)
        assert half.contraction_peak(dtype).sustained_flop_per_s == pytest.approx(burst / 2)
    assert half.vector_peak("fp32").sustained_flop_per_s * 2 == boost.vector_peak("fp32").sustained_flop_per_s
    assert half.sustained_bandwidth_bytes_per_s == device.sustained_bandwidth_bytes_per_s


def test_memory_streams_by_its_kind():
    assert power.memory_share("HBM3") < power.memory_share("GDDR6X")
    assert power.memory_share("punched cards") == 0.80
    assert power.byte_picojoules("punched cards") == power.byte_picojoules("HBM3")


def test_a_burst_share_is_a_fraction():
    with pytest.raises(HardwareError, match=r"achieved\.matrix_burst: expected a number over 0"):
        load_hardware("t4").replace(achieved={"matrix_burst": 77})
