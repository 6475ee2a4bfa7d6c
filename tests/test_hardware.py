"""Profiles against their second entry and datasheet digits, the lookup of names, and the loader against bad files."""

import copy
import gzip
import importlib.util
import pickle
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flopmeter.device.hardware import PROFILES, Hardware, HardwareError, available_hardware, load_hardware
from flopmeter.device.schema import plain
from flopmeter.records.dtypes import MATRIX_DTYPES

NAMES = available_hardware()
EVERY_PROFILE = pytest.mark.parametrize("name", NAMES)

MINIMAL = """\
title: A device
vendor: acme
year: 2024
architecture: Test
sm_count: 4
vector_tflop_per_s: {fp32: 2}
memory_type: DDR5
memory_bandwidth_gb_per_s: 100
achieved: {vector: 0.8, memory: 0.8, source: guessed}
kernel_floor_us: 3
sources: {default: invented}
"""

# --- the figures ---------------------------------------------------------------------------------------------------

# Rates whose second entry nobody publishes; each file says why.
WITHOUT_COMPUTE_CHECK = {
    "a10g": {"matrix int8", "matrix int4"},  # the source contradicts the die
    "cpu-i7-12700h": {"vector fp64", "vector fp32"},  # two kinds of core
    "gb300-per-gpu": {"vector fp64", "matrix fp64"},  # 1.26, printed as 1.3
    "h20-96gb": {"vector fp64", "vector fp32", "matrix fp64"},  # do not follow from 78 SMs
    "h800-sxm5-80gb": {"vector fp64", "matrix fp64"},  # what export rules leave
}
WITHOUT_TENSOR_CLOCK = {"gb200-per-gpu", "gb300-per-gpu", "h100-nvl-94gb", "h200-nvl-141gb"}
WITHOUT_ANY_COMPUTE_CHECK = {
    *("b300-sxm-288gb", "inferentia2", "trainium1", "trainium2"),
    *("tpu-v3", "tpu-v5p", "tpu-v6e", "tpu-v7x"),
}
WITHOUT_MEMORY_CHECK = {
    # rounded down in print
    *("gh200-144gb", "h200-nvl-141gb", "h200-sxm-141gb", "m2-ultra-76c", "m3-max-40c", "mi325x", "mi350x", "mi355x"),
    *("b300-sxm-288gb", "inferentia2", "trainium1", "trainium2"),
    *("tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x"),
}
UNITS = ("vector", "matrix", "matrix_fp16_accumulate")


def spec(device: Hardware, unit: str) -> dict[str, float]:
    return dict(getattr(device, f"{unit}_tflop_per_s"))


@EVERY_PROFILE
def test_each_rate_equals_sms_times_flop_per_clock_times_clock(name: str) -> None:
    device = load_hardware(name)
    checked = set()
    for entry in device.check.compute:
        for dtype, flop_per_clock in entry.flop_per_clock_per_sm.items():
            tflop_per_s = device.sm_count * flop_per_clock * entry.clock_mhz / 1e6
            assert spec(device, entry.unit)[dtype] == pytest.approx(tflop_per_s, rel=0.02), (entry.unit, dtype)
            checked.add(f"{entry.unit} {dtype}")
    unchecked = {f"{unit} {dtype}" for unit in UNITS for dtype in spec(device, unit)} - checked
    if name in WITHOUT_ANY_COMPUTE_CHECK:
        assert not checked
    elif name in WITHOUT_TENSOR_CLOCK:
        assert unchecked - WITHOUT_COMPUTE_CHECK.get(name, set()) == {
            f"matrix {dtype}" for dtype in spec(device, "matrix") if dtype != "fp64"
        }
    else:
        assert unchecked == WITHOUT_COMPUTE_CHECK.get(name, set())


@EVERY_PROFILE
def test_the_bandwidth_equals_bus_width_times_pin_rate(name: str) -> None:
    device = load_hardware(name)
    assert (device.check.memory is None) == (name in WITHOUT_MEMORY_CHECK)
    if device.check.memory is not None:
        gb_per_s = device.check.memory.bus_bits * device.check.memory.gbit_per_s_per_pin / 8
        assert device.memory_bandwidth_gb_per_s == pytest.approx(gb_per_s, rel=0.02)


# Products that are sold at less than their die does: an L40 multiplies at half an L40S's rate by both datasheets, in
# every type; an H20 at a quarter of an H100's. Vendors define the peaks of Hopper's and Blackwell's parts at clocks of
# their own, which moves them by up to 9 %.
SOLD_AT_LESS = {"l40": 1 / 2, "h20-96gb": 1 / 4}


@pytest.mark.parametrize("dtype", ["fp16", "fp8"])
def test_parts_of_one_die_multiply_alike_in_an_sm_and_a_clock(dtype: str) -> None:
    """GeForce and the A10G add in fp32 at half rate, so of two rates of a part the faster one is its die's."""
    dies: dict[str, dict[str, float]] = {}
    for name in available_hardware():
        device = load_hardware(name)
        found = [spec(device, unit)[dtype] for unit in UNITS[1:] if dtype in spec(device, unit)]
        if found and device.vendor == "nvidia" and device.boost_clock_mhz:
            of_sm = max(found) / device.sm_count / device.boost_clock_mhz / SOLD_AT_LESS.get(name, 1.0)
            dies.setdefault(device.architecture, {})[name] = of_sm
    assert sum(len(parts) > 1 for parts in dies.values()) >= 6
    for die, parts in dies.items():
        assert max(parts.values()) == pytest.approx(min(parts.values()), rel=0.09), (die, parts)


TRACES = Path(__file__).parents[1] / "validation" / "traces"
PUBLISHED_TOTALS = {  # bytes: totalGlobalMem in profiles of torch.profiler, device_memory_size in openxla/xla's specs
    "mi300x": 206_141_652_992,
    "v100-sxm2-16gb": 16_945_512_448,
    "a100-sxm4-80gb": 85_100_068_864,
    "a100-sxm4-40gb": 42_331_013_120,
    "b200-sxm-180gb": 191_514_411_008,
    "gb200-per-gpu": 197_897_748_480,
    "rtx-a6000": 51_041_271_808,
}


def test_the_memory_of_a_device_is_what_its_profiles_report() -> None:
    """The head of a trace holds it as torch's profiler writes it: 85,017,493,504 bytes on an `80 GB` H100."""
    reported = dict(PUBLISHED_TOTALS)
    for trace in sorted(TRACES.glob("*.json.gz")):
        with gzip.open(trace, "rt") as file:
            found = re.search(r'"name": ?"([^"]+)",\s*"totalGlobalMem": ?(\d+)', file.read(4000))
        if found:
            reported[found[1]] = int(found[2])
    assert {"NVIDIA H100 80GB HBM3", "NVIDIA H200"} <= set(reported)
    for name, nbytes in reported.items():
        assert load_hardware(name).memory_bytes == pytest.approx(nbytes, rel=3e-3), name


@EVERY_PROFILE
def test_a_card_has_the_binary_gigabytes_of_its_name_less_what_driver_and_ecc_take(name: str) -> None:
    """Of GDDR with ECC check bits take a sixteenth; a driver keeps up to 3 %."""
    device = load_hardware(name)
    named = re.search(r"-(\d+)gb$", name)
    if named is None or device.vendor not in ("nvidia", "amd") or "unified" in device.memory_type:
        return
    assert device.memory_bytes is not None
    # The name of a B300 counts in SI gigabytes, and so does its sheet.
    named_bytes = int(named[1]) * (1e9 * 1.04 if name == "b300-sxm-288gb" else 2**30)
    if name == "gh200-144gb":
        named_bytes = 141 * 2**30  # of 144 GB of HBM3e the driver shows 141
    ecc = 15 / 16 if device.memory_type.startswith("GDDR") and "ECC" in device.memory_type else 1.0
    assert 0.97 < device.memory_bytes / named_bytes / ecc <= 1.0


# Digits of the datasheets: fp32 vector, dense product (fp16, or bf16 where it has it), GB/s, W.
@pytest.mark.parametrize(
    ("name", "fp32", "dtype", "product", "gb_per_s", "watts"),
    [
        ("p100-pcie-16gb", 9.53, "fp32", 9.53, 732.2, 250),
        ("v100-sxm2-16gb", 15.7, "fp16", 125, 900, 300),
        ("t4", 8.1, "fp16", 65, 320, 70),
        ("a100-sxm4-40gb", 19.5, "bf16", 312, 1555, 400),
        ("a100-sxm4-80gb", 19.5, "bf16", 312, 2039, 400),
        ("a100-pcie-40gb", 19.5, "bf16", 312, 1555, 250),
        ("l4", 30.3, "bf16", 121, 300, 72),
        ("h100-pcie-80gb", 51.2, "bf16", 756, 2039, 350),
        ("h100-sxm5-80gb", 66.9, "bf16", 989.4, 3350, 700),
        ("h200-sxm-141gb", 66.9, "bf16", 989.4, 4800, 700),
        ("b200-sxm-180gb", 75, "bf16", 2250, 7700, 1000),
        ("rtx-4090", 82.6, "bf16", 165.2, 1008, 450),
        ("mi300x", 163.4, "bf16", 1307.4, 5300, 750),
        ("mi250x-gcd", 23.9, "bf16", 191.5, 1638.4, 250),
    ],
)
def test_profiles_have_the_digits_of_the_datasheet(
    name: str, fp32: float, dtype: str, product: float, gb_per_s: float, watts: float
) -> None:
    device = load_hardware(name)
    assert device.vector_peak("fp32").flop_per_s == pytest.approx(fp32 * 1e12)
    assert device.contraction_peak(dtype).flop_per_s == pytest.approx(product * 1e12)
    assert device.bandwidth_bytes_per_s == pytest.approx(gb_per_s * 1e9)
    assert device.tdp_w == watts


# Figures that popular tables get wrong by sparsity, by accumulation in fp16 or by taking another part's.
@pytest.mark.parametrize(
    ("name", "dtype", "dense", "trap"),
    [
        ("rtx-2080-ti", "fp16", 56.9, 113.8),
        ("rtx-3090", "bf16", 71.2, 142),
        ("rtx-4090", "bf16", 165.2, 330.3),
        ("rtx-4090", "fp8", 330.3, 660.6),
        ("rtx-5090", "bf16", 209.5, 838),
        ("rtx-5090", "fp4", 1676, 3352),
        ("rtx-5080", "fp4", 900.5, 1801),
        ("rtx-5070-ti", "fp4", 703, 1406),
        ("rtx-5070", "fp4", 494, 988),
        ("rtx-5060-ti-16gb", "fp4", 379.5, 759),
        ("rtx-4080-super", "int8", 418, 836),
        ("rtx-4070-ti-super", "int8", 353, 706),
        ("rtx-4070", "int8", 233, 466),
        ("a10g", "bf16", 70, 125),
        ("l40", "bf16", 181.05, 362),
        ("l4", "fp8", 242, 485),
        ("rtx-a6000", "bf16", 154.8, 309.7),
        ("rtx-6000-ada", "fp8", 728.5, 1457),
        ("h100-sxm5-80gb", "bf16", 989.4, 1979),
        ("h100-sxm5-80gb", "fp8", 1979, 3958),
        ("b200-sxm-180gb", "fp4", 9000, 18000),
        ("b300-sxm-288gb", "int8", 153.5, 4500),
        ("jetson-agx-orin-64gb", "int8", 85, 275),
        ("mi250x-gcd", "int8", 191.5, 383),
        ("mi355x", "fp8", 5033, 10066),
        ("trainium2", "fp8", 1299, 2563),
        ("gaudi3", "bf16", 1677, 1835),
        ("gaudi3", "fp16", 459, 1677),
        ("v100-sxm2-16gb", "bf16", 10.3, 125),
        ("p100-pcie-16gb", "fp16", 8.4, 19.05),
    ],
)
def test_no_inflated_figure_stands_in_a_dense_field(name: str, dtype: str, dense: float, trap: float) -> None:
    found = load_hardware(name).contraction_peak(dtype).flop_per_s / 1e12
    assert found == pytest.approx(dense, rel=1e-3)
    assert found != pytest.approx(trap, rel=0.05)


@EVERY_PROFILE
def test_nvidia_units_appear_with_their_generation(name: str) -> None:
    device = load_hardware(name)
    if device.compute_capability is None:
        return
    since = {"fp16": (7, 0), "int8": (7, 5), "bf16": (8, 0), "tf32": (8, 0), "fp8": (8, 9), "fp4": (10, 0)}
    for dtype, capability in since.items():
        assert (dtype in device.matrix_tflop_per_s) == (device.compute_capability >= capability), dtype
    assert "int4" not in device.matrix_tflop_per_s or device.compute_capability < (9, 0)


@EVERY_PROFILE
def test_every_device_has_a_product_and_an_fp32_rate_for_the_rest(name: str) -> None:
    device = load_hardware(name)
    assert device.vector_peak("fp32") == device.vector_peak("bf16") == device.vector_peak("fp16")
    assert device.contraction_peak("fp32").flop_per_s >= device.vector_peak("fp32").flop_per_s
    assert any(dtype in device.matrix_tflop_per_s for dtype in ("bf16", "fp16")) or not device.matrix_tflop_per_s


@EVERY_PROFILE
def test_what_a_device_lacks_is_an_error_that_names_what_it_has(name: str) -> None:
    device = load_hardware(name)
    everything = {**device.vector_tflop_per_s, **device.matrix_tflop_per_s, **device.emulated_tflop_per_s}
    for dtype in MATRIX_DTYPES:
        if dtype in everything or dtype == "tf32":
            assert device.contraction_peak(dtype).flop_per_s > 0
            continue
        with pytest.raises(HardwareError, match=rf"{name} has no rate .* in {dtype}") as raised:
            device.contraction_peak(dtype)
        listed = str(raised.value).partition("it has: ")[2].split(", ")
        assert sorted(listed) == sorted(everything)


# --- the form of the files -----------------------------------------------------------------------------------------


@EVERY_PROFILE
def test_a_profile_opens_with_a_comment_and_keeps_the_order_of_the_fields(name: str) -> None:
    source = (PROFILES / f"{name}.yaml").read_text()
    assert source.startswith("# ")
    assert max(map(len, source.splitlines())) <= 120
    keys = [key for key in yaml.safe_load(source) if key != "extends"]
    assert keys == [field for field in Hardware.__dataclass_fields__ if field in keys]


@EVERY_PROFILE
def test_a_profile_says_where_its_figures_come_from(name: str) -> None:
    device = load_hardware(name)
    assert {"default", "kernel_floor_us"} <= set(device.sources)
    assert ("emulated_tflop_per_s" in device.sources) == bool(device.emulated_tflop_per_s)
    assert "check" in device.sources or not (device.check.compute or device.check.memory)
    for figure in (
        "vector",
        "memory",
        *(["matrix"] if device.achieved.matrix else []),
        *device.achieved.matrix_by_dtype,
    ):
        assert figure in device.achieved.source


def test_the_link_to_the_host_is_pcie_one_way_unless_there_is_a_better_one() -> None:
    assert load_hardware("h100-sxm5-80gb").host_link_bytes_per_s == 64e9
    assert load_hardware("gh200-96gb").host_link_bytes_per_s == 450e9
    assert load_hardware("m3-max-40c").host_link_bytes_per_s is None


# --- rates ---------------------------------------------------------------------------------------------------------


def test_a_product_takes_the_matrix_unit_then_emulation_then_the_vector_units() -> None:
    v100 = load_hardware("v100-sxm2-16gb")
    assert v100.contraction_peak("fp16").unit == "matrix"
    assert v100.contraction_peak("bf16").unit == "emulated"
    assert v100.contraction_peak("fp32").unit == "vector"
    assert load_hardware("mi300x").contraction_peak("fp32").unit == "matrix"


def test_fp32_products_on_nvidia_use_the_vector_rate_and_tf32_its_own() -> None:
    a100 = load_hardware("a100-sxm4-40gb")
    assert a100.contraction_peak("fp32").flop_per_s == pytest.approx(19.5e12)
    assert a100.contraction_peak("tf32").flop_per_s == pytest.approx(156e12)


def test_tf32_changes_nothing_on_a_device_without_it() -> None:
    t4 = load_hardware("t4")
    assert t4.contraction_peak("tf32") == t4.contraction_peak("fp32")


def test_half_precision_element_wise_work_is_computed_in_fp32() -> None:
    p4 = load_hardware("p4")  # where fp16 itself runs at 1/64
    assert p4.vector_peak("fp16").flop_per_s == pytest.approx(5.7e12)


def test_element_wise_work_in_a_type_without_rate_is_an_error() -> None:
    with pytest.raises(HardwareError, match=r"tpu-v4 has no rate for element-wise work in fp64; it has: fp32"):
        load_hardware("tpu-v4").vector_peak("fp64")


def test_geforce_doubles_when_it_may_accumulate_in_fp16_and_others_do_not() -> None:
    for name, factor in (("rtx-4090", 2), ("rtx-3090", 2), ("rtx-a6000", 1), ("a100-sxm4-80gb", 1)):
        device = load_hardware(name)
        wide, narrow = (device.contraction_peak("fp16", fp16_accumulate=on).flop_per_s for on in (False, True))
        assert narrow / wide == pytest.approx(factor, rel=2e-3)


def test_a_sustained_rate_is_the_peak_times_the_fraction_of_its_unit_and_type() -> None:
    device = load_hardware("h100-sxm5-80gb").replace(
        achieved={"matrix": 0.5, "vector": 0.25, "memory": 0.75, "matrix_by_dtype": {"fp8": 0.125}},
        emulated_tflop_per_s={"fp6": 100},
    )
    assert device.contraction_peak("bf16").sustained_flop_per_s == pytest.approx(494.7e12)
    assert device.contraction_peak("fp8").sustained_flop_per_s == pytest.approx(1979e12 / 8)
    assert device.contraction_peak("fp6").sustained_flop_per_s == pytest.approx(100e12)
    assert device.vector_peak("fp32").sustained_flop_per_s == pytest.approx(66.9e12 / 4)
    assert device.sustained_bandwidth_bytes_per_s == pytest.approx(3350e9 * 0.75)


def test_the_ridge_point_of_the_a100_is_near_the_articles() -> None:
    # 312 TFLOP/s over 1.5 TB/s is the article's 208 FLOP/B; the datasheet's bandwidth is 1.555.
    assert load_hardware("a100-sxm4-40gb").replace(memory_bandwidth_gb_per_s=1500).ridge_point("fp16") == 208
    assert load_hardware("a100-sxm4-40gb").ridge_point("fp16") == pytest.approx(200.6, abs=0.05)


def test_si_properties_follow_from_the_units_in_the_names() -> None:
    t4 = load_hardware("t4")
    assert (t4.memory_bytes, t4.l2_cache_bytes, t4.kernel_floor_seconds) == (15_900_000_000, 4_194_304, 1.3e-6)
    assert load_hardware("cpu-epyc-9654").memory_bytes is None
    assert load_hardware("tpu-v4").l2_cache_bytes is None


# --- names ---------------------------------------------------------------------------------------------------------


def test_the_names_are_the_stems_of_the_files() -> None:
    assert sorted(path.stem for path in PROFILES.iterdir() if path.is_file()) == NAMES  # clusters have a folder
    assert all(load_hardware(name).name == name for name in NAMES)


def test_a_hardware_is_its_own_profile() -> None:
    device = load_hardware("t4")
    assert load_hardware(device) is device


@EVERY_PROFILE
def test_an_alias_finds_its_device_and_no_other_spelling_does(name: str) -> None:
    for alias in load_hardware(name).aliases:
        assert load_hardware(alias).name == name
        assert alias not in NAMES
        for other in (alias.lower(), alias.upper(), f" {alias}", f"{alias}X"):
            if other != alias and other not in NAMES:
                with pytest.raises(HardwareError):
                    load_hardware(other)


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm5-80gb"),
        ("NVIDIA H100 PCIe", "h100-pcie-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_what_torch_reports_as_the_name_of_a_device_is_an_alias(reported: str, name: str) -> None:
    assert load_hardware(reported).name == name


@EVERY_PROFILE
def test_a_truncated_name_never_falls_back_to_a_device(name: str) -> None:
    if name[:-1] not in NAMES:
        with pytest.raises(HardwareError, match=name):
            load_hardware(name[:-1])


@EVERY_PROFILE
def test_the_name_of_its_family_leads_to_every_profile(name: str) -> None:
    family = name.rpartition("-")[0]
    aliases = {alias for each in NAMES for alias in load_hardware(each).aliases}
    if family and family not in {*NAMES, *aliases}:
        with pytest.raises(HardwareError, match=name):
            load_hardware(family)


@pytest.mark.parametrize("family", ["a100", "A100", "NVIDIA A100"])
def test_a_family_name_lists_its_members(family: str) -> None:
    members = "a100-pcie-40gb, a100-pcie-80gb, a100-sxm4-40gb, a100-sxm4-80gb"
    with pytest.raises(HardwareError, match=f"no hardware is named '{family}'; its family has {members}"):
        load_hardware(family)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("a100-sxm4-80", "a100-sxm4-80gb"), ("a100_sxm_80gb", "a100-sxm4-80gb"), ("h100-smx5-80gb", "h100-sxm5-80gb")],
)
def test_a_misspelt_name_is_an_error_with_the_nearest_names(wrong: str, near: str) -> None:
    with pytest.raises(HardwareError, match=f"no hardware is named '{wrong}'; near to it: {near}"):
        load_hardware(wrong)


@pytest.mark.parametrize("name", ["", "quantum-9000", "/", "..", "\0", "x" * 10_000, None, 5, b"t4", ["t4"]])
def test_anything_else_is_an_error_too(name: object) -> None:
    with pytest.raises(HardwareError):
        load_hardware(name)  # type: ignore[arg-type]


# --- files ---------------------------------------------------------------------------------------------------------


def written(folder: Path, content: str, name: str = "mine.yaml") -> Path:
    path = folder / name
    path.write_text(content)
    return path


def complaint(path: Path) -> str:
    with pytest.raises(HardwareError) as raised:
        load_hardware(path)
    return str(raised.value)


def test_a_file_of_ones_own_is_found_by_its_path(tmp_path: Path) -> None:
    path = written(tmp_path, MINIMAL)
    assert load_hardware(path) == load_hardware(str(path))
    assert load_hardware(path).name == "mine"
    assert load_hardware(path).contraction_peak("fp32").flop_per_s == 2e12


@EVERY_PROFILE
def test_a_profile_survives_being_written_and_read_again(name: str, tmp_path: Path) -> None:
    device = load_hardware(name)
    values = {key: value for key, value in plain(device).items() if key != "name"}
    assert load_hardware(written(tmp_path, yaml.safe_dump(values), f"{name}.yaml")) == device


@pytest.mark.parametrize("name", ["nothing.yaml", ".", "\0.yaml", "x" * 10_000 + ".yaml"])
def test_a_path_without_a_readable_file_is_an_error_that_names_it(name: str, tmp_path: Path) -> None:
    assert name in complaint(tmp_path / name) or name == "."


REPLACED = {line.partition(":")[0]: line for line in MINIMAL.splitlines()}


@pytest.mark.parametrize(
    ("field", "line", "expected"),
    [
        ("sm_count", "", "sm_count: this field is missing"),
        ("sm_count", "sm_count: many", "sm_count: expected a whole number from 1 to 1000000, got 'many'"),
        ("sm_count", "sm_count: 4.5", "sm_count: expected a whole number from 1 to 1000000, got 4.5"),
        ("sm_count", "sm_count: -4", "sm_count: expected a whole number from 1 to 1000000, got -4"),
        ("sm_count", "sm_count: 010", "line 5: write 010 as a plain decimal number, or quote it if it is text"),
        ("sm_count", "sm_count: 1:30", "line 5: write 1:30 as a plain decimal number, or quote it if it is text"),
        ("sm_count", "sm_count: 0x10", "line 5: write 0x10 as a plain decimal number, or quote it if it is text"),
        ("sm_count", "sm_count: no", "got False (YAML reads a bare yes, no, on or off as true or false"),
        ("vendor", "vendor: no", "vendor: expected printable text, got False (YAML reads a bare"),
        ("vendor", "vendor: ''", "vendor: expected printable text, got ''"),
        ("vendor", 'vendor: "\\e[31mred"', "vendor: expected printable text"),
        ("vendor", "vendor: nvidia", "compute_capability: expected for vendor nvidia, and for no other"),
        ("year", "year: [2024]", "year: expected a whole number from 1980 to 2100, got [2024]"),
        ("year", "year: 2024-01-01", "year: expected a whole number from 1980 to 2100, got '2024-01-01'"),
        ("memory_type", "memory_tpye: x", "memory_tpye: unknown field; did you mean memory_type?"),
        ("memory_type", "memory_type: a\nname: x", "name: unknown field; the name is the stem of the file"),
        ("memory_type", "memory_type: a\nyear: 1999", "line 8: year stands twice"),
        ("memory_type", "memory_type: a\n1: 2", "line 8: keys must be plain text"),
        ("memory_type", "memory_type: a\nno: 2", "line 8: keys must be plain text"),
        ("memory_type", "memory_type: a\n<<: {tdp_w: 3}", "line 8: keys must be plain text"),
        ("memory_type", "memory_type: a\n--- {}", "but found another document"),
        ("memory_type", "memory_type: a\nunverified: [tpd_w]", "unverified: expected fields, or field.key"),
        ("memory_type", "memory_type: a\nunverified: [sm_count.x]", "unverified: expected fields, or field.key"),
        ("memory_type", "memory_type: a\naliases: T4", "aliases: expected a list, got 'T4'"),
        ("memory_type", "memory_type: a\naliases: [T4, 4]", "aliases[1]: expected printable text, got 4"),
        ("memory_type", "memory_type: a\npcie: {generation: 4}", "pcie.bidirectional_gb_per_s: this field is missing"),
        ("memory_type", "memory_type: a\nis_cpu: 1", "is_cpu: expected true or false, got 1"),
        ("memory_type", "memory_type: a\nhost: {launch_seconds: -1}", "host.launch_seconds: expected a number of sec"),
        ("memory_type", "memory_type: a\nhost: {launch_us: 8}", "host.launch_us: unknown field; did you mean launch"),
        ("memory_type", "memory_type: a\npcie: fast", "pcie: expected a mapping, got 'fast'"),
        ("vector_tflop_per_s", "vector_tflop_per_s: {}", "vector_tflop_per_s: expected at least one rate"),
        ("vector_tflop_per_s", "vector_tflop_per_s: {fp31: 2}", "_s.fp31: unknown key; the keys are fp64, fp32"),
        ("vector_tflop_per_s", "vector_tflop_per_s: {fp32: 0}", "vector_tflop_per_s.fp32: expected a number over 0"),
        ("vector_tflop_per_s", "vector_tflop_per_s: {fp32: .inf}", "line 6: write .inf as a plain decimal number"),
        ("vector_tflop_per_s", "vector_tflop_per_s: {fp32: .nan}", "line 6: write .nan as a plain decimal number"),
        ("vector_tflop_per_s", "vector_tflop_per_s: {fp32: 1e3}", "got '1e3' (text to YAML, which reads numbers"),
        ("vector_tflop_per_s", "vector_tflop_per_s: {fp32: 1.0e+300}", "_s.fp32: expected a number over 0 and"),
        ("vector_tflop_per_s", "vector_tflop_per_s: [2]", "vector_tflop_per_s: expected a mapping, got [2]"),
        ("vector_tflop_per_s", "vector_tflop_per_s: {fp32: 2", "line"),
        (
            "achieved",
            "achieved: {vector: 85, memory: 1, source: x}",
            "achieved.vector: expected a number over 0 and at most",
        ),
        ("achieved", "achieved: {vector: 0.8, memory: 1}", "achieved.source: this field is missing"),
        ("sources", "sources: {datasheet: x}", "sources.datasheet: unknown key"),
        ("sources", "sources: {tdp_w: x}", "sources.default: this field is missing"),
        (
            "sources",
            "sources: {default: x}\ncheck: {compute: [{unit: tensor, clock_mhz: 1, flop_per_clock_per_sm: {}}]}",
            "check.compute[0].unit: expected vector or matrix or matrix_fp16_accumulate, got 'tensor'",
        ),
    ],
)
def test_a_malformed_profile_gives_one_error_with_file_field_and_what_was_expected(
    field: str, line: str, expected: str, tmp_path: Path
) -> None:
    content = "\n".join({**REPLACED, field: line}.values())
    message = complaint(written(tmp_path, content))
    assert message.startswith("mine.yaml: ")
    assert expected in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "expected a mapping of fields, got None"),
        (b"- a\n- b\n", "expected a mapping of fields, got ['a', 'b']"),
        (b"just text", "expected a mapping of fields, got 'just text'"),
        (b"\xff\xfe\x00", "expected YAML text"),
        (b"title: \x00", "expected YAML text"),
        (b'title: "\\UFFFFFFFF"', "expected YAML text"),
        (b"a: [[[[[[[[[[1]]]]]]]]]]", "line 1: nested too deeply"),
        (b"[" * 60_000, "line 1: nested too deeply"),
        (b"a: " + b"9" * 5_000, "expected YAML text"),
        (b"#" * 70_000, "expected a file of at most 65536 bytes"),
    ],
)
def test_a_file_that_is_no_mapping_of_fields_gives_one_error(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    assert complaint(path).startswith(f"mine.yaml: {expected}")


@pytest.mark.parametrize(
    "attack",
    [
        '!!python/object/apply:os.system ["touch {marker}"]',
        '!!python/object/new:subprocess.Popen [["touch", "{marker}"]]',
        "!!python/name:os.system",
        "!mine {{a: 1}}",
        "!!str 5",
    ],
)
def test_a_tag_is_refused_and_executes_nothing(attack: str, tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    path = written(tmp_path, f"title: {attack.format(marker=marker)}\n")
    assert complaint(path) == "mine.yaml: line 1: tags (!) are not allowed"
    assert not marker.exists()


def test_a_billion_laughs_are_refused_at_the_first(tmp_path: Path) -> None:
    laughs = ["a0: &a0 [lol, lol]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    message = complaint(written(tmp_path, "\n".join(laughs)))
    assert message == "mine.yaml: line 1: anchors and aliases (&, *) are not allowed"


# --- extends and replace -------------------------------------------------------------------------------------------


def test_a_profile_that_extends_another_changes_only_what_it_names(tmp_path: Path) -> None:
    content = """
        extends: a100-sxm4-80gb
        title: A100 at 330 W
        tdp_w: 330
        matrix_tflop_per_s: {int4: null, fp8: 1}
        achieved: {memory: 0.83}
        interconnect: null
    """
    base, device = load_hardware("a100-sxm4-80gb"), load_hardware(written(tmp_path, content))
    assert (device.name, device.title, device.aliases) == ("mine", "A100 at 330 W", ())
    assert (device.tdp_w, device.interconnect) == (330, None)
    assert set(device.matrix_tflop_per_s) == set(base.matrix_tflop_per_s) - {"int4"} | {"fp8"}
    assert (device.achieved.memory, device.achieved.matrix) == (0.83, base.achieved.matrix)
    assert device.vector_tflop_per_s == base.vector_tflop_per_s


def test_a_profile_names_itself_though_it_extends_another(tmp_path: Path) -> None:
    assert complaint(written(tmp_path, "extends: t4\ntdp_w: 60")) == "mine.yaml: title: this field is missing"


def test_a_profile_may_extend_a_file_beside_it(tmp_path: Path) -> None:
    written(tmp_path, MINIMAL, "base.yaml")
    device = load_hardware(written(tmp_path, "extends: base.yaml\ntitle: Mine\nsm_count: 8"))
    assert (device.name, device.sm_count, device.vendor) == ("mine", 8, "acme")


@pytest.mark.parametrize("chain", [["mine"], ["a", "mine"], ["a", "b", "a"]])
def test_profiles_that_extend_each_other_in_a_circle_are_an_error(chain: list[str], tmp_path: Path) -> None:
    for name, base in zip(["mine", *chain], chain, strict=False):
        written(tmp_path, f"extends: {base}.yaml\ntitle: x\n", f"{name}.yaml")
    assert "extends this file in turn" in complaint(tmp_path / "mine.yaml")


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("a100", "mine.yaml: extends: no hardware is named 'a100'; its family has a100-pcie-40gb"),
        ("none.yaml", "none.yaml: there is no such file"),
        ("[t4]", "mine.yaml: extends: expected printable text, got ['t4']"),
        ("NVIDIA T4", "mine.yaml: extends: no hardware is named 'NVIDIA T4'; near to it: t4"),
    ],
)
def test_a_missing_base_is_an_error(base: str, expected: str, tmp_path: Path) -> None:
    assert expected in complaint(written(tmp_path, f"extends: {base}\ntitle: x\n"))


def test_an_error_in_a_base_names_the_file_of_the_base(tmp_path: Path) -> None:
    written(tmp_path, MINIMAL + "tdp_w: -1\n", "base.yaml")
    message = complaint(written(tmp_path, "extends: base.yaml\ntitle: x\n"))
    assert message == "base.yaml: tdp_w: expected a number over 0 and at most 1e9, got -1"


def test_replace_gives_a_changed_copy_and_leaves_the_device_alone() -> None:
    device = load_hardware("a100-sxm4-80gb")
    changed = device.replace(tdp_w=330, achieved={"memory": 0.83}, pcie=None)
    assert (changed.tdp_w, changed.achieved.memory, changed.pcie) == (330, 0.83, None)
    assert (device.tdp_w, device.achieved.memory) == (400, 0.84)
    assert changed.achieved.limit_w == 400  # the other shares were measured there
    back = changed.replace(tdp_w=400, achieved={"memory": 0.84, "limit_w": None}, pcie=device.pcie)
    assert back == device


def test_a_doubt_goes_with_the_figure_that_it_was_about() -> None:
    device = load_hardware("a10g")
    assert {"tdp_w", "matrix_tflop_per_s.int8", "matrix_tflop_per_s.int4"} <= set(device.unverified)
    measured = device.replace(tdp_w=150, matrix_tflop_per_s={"int8": 280, "int4": None})
    assert set(device.unverified) - set(measured.unverified) == {
        *("tdp_w", "matrix_tflop_per_s.int8", "matrix_tflop_per_s.int4")
    }


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"tdp": 3}, "tdp: unknown field; did you mean tdp_w?"),
        ({"tdp_w": -3}, "tdp_w: expected a number over 0 and at most 1e9, got -3"),
        ({"tdp_w": float("nan")}, "tdp_w: expected a number over 0 and at most 1e9, got nan"),
        ({"tdp_w": True}, "tdp_w: expected a number over 0 and at most 1e9, got True"),
        ({"sm_count": None}, "sm_count: this field is missing"),
        ({"achieved": {"memry": 1}}, "achieved.memry: unknown field; did you mean memory?"),
        ({"matrix_tflop_per_s": {"fp16": 10**400}}, "matrix_tflop_per_s.fp16: expected a number over 0"),
        ({"compute_capability": [8]}, "compute_capability: expected two whole numbers such as [9, 0], got [8]"),
    ],
)
def test_replace_obeys_the_rules_of_the_files(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(HardwareError) as raised:
        load_hardware("a100-sxm4-80gb").replace(**changes)
    assert str(raised.value).startswith(expected)


# --- the record ----------------------------------------------------------------------------------------------------


@EVERY_PROFILE
def test_a_device_can_be_copied_hashed_and_sent_to_another_process(name: str) -> None:
    device = load_hardware(name)
    for twin in (copy.deepcopy(device), pickle.loads(pickle.dumps(device))):
        assert twin == device
        assert hash(twin) == hash(device)
        assert twin.contraction_peak("fp32") == device.contraction_peak("fp32")


def test_a_device_cannot_be_changed() -> None:
    device = load_hardware("t4")
    with pytest.raises(AttributeError):
        device.tdp_w = 80  # type: ignore[misc]
    with pytest.raises(TypeError):
        device.matrix_tflop_per_s["fp16"] = 80  # type: ignore[index]


# --- fuzzing -------------------------------------------------------------------------------------------------------

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(MATRIX_DTYPES)
)
KEYS = st.sampled_from(MATRIX_DTYPES) | st.text()
VALUES = st.recursive(
    SCALARS,
    lambda below: st.lists(below, max_size=4) | st.dictionaries(KEYS, below, max_size=4),
    max_leaves=8,
)
FIELDS = st.sampled_from([*Hardware.__dataclass_fields__, "extends"])


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzzed") / "mine.yaml"


def loads_or_complains(path: Path) -> None:
    try:
        device = load_hardware(path)
    except HardwareError as error:
        assert "\n" not in str(error)  # noqa: PT017 - either outcome is right
    else:
        assert device.bandwidth_bytes_per_s > 0


@given(content=st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
@settings(max_examples=150)
def test_any_bytes_are_a_device_or_one_error(fuzzed: Path, content: bytes) -> None:
    fuzzed.write_bytes(content)
    loads_or_complains(fuzzed)


@given(
    cut=st.integers(0, len(MINIMAL)), inserted=st.text(alphabet=":{}[]&*!|>-'\"\\%@#,?<= \n\t019.eaxno~", max_size=12)
)
@settings(max_examples=300)
def test_a_damaged_profile_is_a_device_or_one_error(fuzzed: Path, cut: int, inserted: str) -> None:
    fuzzed.write_text(MINIMAL[:cut] + inserted + MINIMAL[cut:])
    loads_or_complains(fuzzed)


@given(changes=st.dictionaries(FIELDS, VALUES, min_size=1, max_size=3))
@settings(max_examples=200)
def test_any_values_in_the_fields_are_a_device_or_one_error(fuzzed: Path, changes: dict[str, object]) -> None:
    fuzzed.write_text(yaml.safe_dump({**yaml.safe_load(MINIMAL), **changes}, allow_unicode=True), errors="replace")
    loads_or_complains(fuzzed)


# --- scripts/list_hardware.py --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def list_hardware() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "list_hardware.py"
    found = importlib.util.spec_from_file_location("list_hardware", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_list_has_a_line_for_each_device(list_hardware: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_hardware.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2 : 2 + len(NAMES)]] == NAMES
    v100 = next(line.split() for line in lines if line.startswith("v100-sxm2-16gb"))
    assert v100 == ["v100-sxm2-16gb", "2017", "7.8", "15.7", "125", "~10.3", "16.9", "900", "300", "139", "1"]


def test_a_named_profile_is_shown_in_full_with_its_doubts(
    list_hardware: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list_hardware.main(["NVIDIA T4", "v100-sxm2-16gb"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["matrix_tflop_per_s.fp16", "65"] in shown
    assert ["tdp_w", "300", "unverified"] in shown


@pytest.mark.parametrize("arguments", [["a100"], ["t4", "nothing.yaml"], ["--colour"]])
def test_bad_arguments_exit_with_2_and_no_traceback(
    arguments: list[str], list_hardware: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = list_hardware.main(arguments)
    except SystemExit as stopped:  # how argparse leaves
        code = stopped.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert "list_hardware" in captured.err
    assert "Traceback" not in captured.err
