"""Profiles and clusters that nobody shipped: what alone tells a part of their rules, by hand and by what may not
matter."""

from __future__ import annotations

import dataclasses

import pytest

from flopmeter import load_hardware
from flopmeter.device.cluster import ASSUMED_SHARE, Cluster, Link, cluster_of, price_collective
from flopmeter.device.hardware import Achieved, Hardware, HardwareError
from flopmeter.device.power import memory_share
from flopmeter.device.profile_parts import Host
from flopmeter.records import Collective

H100, MI300X = load_hardware("h100-sxm5-80gb"), load_hardware("mi300x")


def link(transport="nvlink", rate=100, **fields):
    return Link(name="in", transport=transport, bandwidth_gb_per_s=rate, achieved=1, source="none", **fields)


def cluster(intra, **between):
    network = Link(name="net", transport="network", bandwidth_gb_per_s=10, achieved=1, source="none", **between)
    return Cluster(name="mine", title="mine", gpus_per_node=8, start_us=5, intra=intra, inter=network)


def seconds(kind, nbytes, ranks, where, **options):
    return price_collective(Collective(kind, nbytes, tuple(ranks), **options), where).seconds


# --- clusters


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all", "broadcast", "barrier"])
@pytest.mark.parametrize("nbytes", [8, 200_000, 1 << 28])
def test_one_rank_on_each_node_does_not_feel_the_links_within_a_node(kind, nbytes):
    within = link(), link(rate=900, peers=7), link("pcie"), link("pcie", in_switch=0.5)
    one, *others = (seconds(kind, nbytes, range(0, 32, 8), cluster(each)) for each in within)
    assert others == [one] * 3


@pytest.mark.parametrize(("kind", "ranks", "steps"), [("all_gather", range(0, 4096, 8), 9), ("all_to_all", (0, 8), 1)])
def test_what_each_step_adds_counts_in_every_algorithm(kind, ranks, steps):
    """512 nodes gather in nine rounds of aggregated trees; all to all send at once."""
    plain, slow = (seconds(kind, 8, ranks, cluster(link(), added_latency_us=each)) for each in (0, 3))
    assert slow - plain == pytest.approx(steps * 3e-6)


def test_a_world_that_leaves_gpus_of_its_nodes_alone_reaches_over_twice_as_many():
    """Half of an exchange among eight goes to the other four, through a port of each: 400 of 800 MB at 10 GB/s."""
    where = cluster(link())
    full, half = (seconds("all_to_all", 800_000_000, range(8), where, gpus_per_node=each) for each in (None, 4))
    assert full == pytest.approx(0.007, rel=0.06)
    assert half == pytest.approx(0.04, rel=0.01)


def test_more_gpus_than_a_mesh_has_links_for_get_no_more_than_all_links():
    """Three others each of eight: two GPUs share one link of three, four have all, and so have eight."""
    few = cluster(link(peers=3))
    sizes = {ranks: seconds("broadcast", 10**10, range(ranks), few) for ranks in (2, 4, 8)}
    assert sizes == pytest.approx({2: 0.3, 4: 0.1, 8: 0.1}, rel=0.08)


@pytest.mark.parametrize(("device", "protocol"), [("t4", "Simple"), ("l4", "LL")])
def test_nccl_leaves_the_low_latency_earlier_where_pcie_is_slower_than_the_cpu(device, protocol):
    """Eight ranks, 7 steps, 7/8 of the bytes sent. LL takes 1.8 us and 7 times 4.7 us less before the first byte, and
    counts on half the rate: 34.7 us of 7/8 of 476 kB at 12 GB/s (PCIe 3), of 595 kB at the CPU's 15 (PCIe 4)."""
    where = cluster_of(load_hardware(device))
    assert price_collective(Collective("all_gather", 520_000, tuple(range(8))), where).protocol == protocol


def test_a_copy_of_a_device_comes_in_its_cluster_unless_it_has_other_links():
    renamed = H100.replace(name="mine")
    assert cluster_of(renamed) == cluster_of(renamed.replace(name="yours", tdp_w=500)) == cluster_of(H100)
    for other in (H100.replace(name="mine", interconnect=None), dataclasses.replace(renamed, base=None)):
        assert cluster_of(other).title.startswith("assumed")


def test_links_of_which_no_rate_is_known_leave_pcie():
    """Both ways of 16 lanes of PCIe 5 are 128 GB/s."""
    unknown = dataclasses.replace(H100, name="mine", base=None, interconnect={"name": "new"}, host_link={"name": "new"})
    assert cluster_of(unknown).intra == dataclasses.replace(
        link("pcie", 64), name="PCIe", achieved=ASSUMED_SHARE["pcie"], source=cluster_of(unknown).intra.source
    )
    assert unknown.host_link_bytes_per_s is None


# --- power


def test_without_a_power_limit_shares_are_those_that_were_measured():
    shares = {"matrix": 0.6, "matrix_burst": 0.8, "matrix_by_dtype": {"tf32": 0.5, "fp8": None}}
    known = H100.replace(tdp_w=None, achieved=shares)
    found = {dtype: known.contraction_peak(dtype) for dtype in ("bf16", "fp8", "tf32")}
    assert {dtype: (peak.achieved, peak.burst) for dtype, peak in found.items()} == {
        "bf16": (0.6, 0.8), "fp8": (0.6, 0.8), "tf32": (0.5, 0.5)
    }  # fmt: skip
    assert {peak.picojoules_per_flop for peak in found.values()} == {None}


def test_a_share_of_a_long_run_is_kept_whatever_else_is_known():
    lower_at_first = H100.replace(achieved={"matrix": 0.7, "matrix_burst": 0.6}).contraction_peak("bf16")
    assert (lower_at_first.achieved, lower_at_first.burst) == (0.7, 0.7)
    limit_alone = H100.replace(tdp_w=None, power_limit_w=400, achieved={"matrix": 0.6}).contraction_peak("bf16")
    assert limit_alone.achieved == 0.6


def test_a_generation_whose_energy_nobody_knows_runs_narrow_types_as_fp16():
    unknown = H100.replace(architecture="Rubin", achieved=None)
    assert unknown.contraction_peak("fp8").achieved == unknown.contraction_peak("bf16").achieved


def test_hbm_has_bits_of_its_own_for_ecc_and_gddr_has_not():
    assert memory_share("HBM3 with ECC") == memory_share("HBM3")
    assert memory_share("GDDR6 with ECC") == pytest.approx(memory_share("GDDR6") * 16 / 17)


def test_a_device_of_which_nothing_was_measured_has_a_clock_too():
    half = H100.replace(achieved=None).at_clock(0.5)
    assert half.sustained_bandwidth_bytes_per_s == H100.replace(achieved=None).sustained_bandwidth_bytes_per_s
    assert half.contraction_peak("bf16").flop_per_s == pytest.approx(H100.contraction_peak("bf16").flop_per_s / 2)


# --- changes


@pytest.mark.parametrize("device", ["h100-sxm5-80gb", "p100-pcie-16gb"])
def test_twice_the_power_limit_does_not_change_under_which_limit_shares_were_measured(device):
    before = load_hardware(device)
    changed = before.replace(tdp_w=2 * before.tdp_w)
    assert changed.achieved.limit_w == (before.achieved.limit_w or before.tdp_w)


def test_shares_that_are_given_with_a_power_limit_were_measured_under_it():
    """As a record or as a mapping; where no limit was known none was kept; nor is a type compared that is gone."""
    given = Achieved(matrix=0.5, source="mine")
    for change in (given, {"matrix": 0.5}):
        assert H100.replace(tdp_w=500, achieved=change).achieved.limit_w is None
    assert dataclasses.replace(H100, tdp_w=None, achieved=given).replace(tdp_w=500).achieved.limit_w is None
    assert H100.replace(tdp_w=350, matrix_tflop_per_s={"fp16": None}).achieved.limit_w == H100.tdp_w


def test_a_doubt_that_is_named_stays_though_its_figure_is_replaced():
    changed = H100.replace(tdp_w=500, unverified=["tdp_w"])
    assert changed.unverified == ("tdp_w",)
    assert changed.replace(tdp_w=400).unverified == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_gb": True}, "memory_gb: expected a number over 0"),
        ({"sm_count": True}, "sm_count: expected a whole number from 1"),
        ({"year": 2101}, "year: expected a whole number from 1980 to 2100"),
        ({"unverified": ["matrix_tflop_per_s.fp64_x"]}, "unverified: expected fields, or field.key"),
        ({"title": "two\u202elines"}, "title: expected printable text"),
    ],
)
def test_a_change_obeys_the_rules_of_a_file(changes, message):
    with pytest.raises(HardwareError) as raised:
        H100.replace(**changes)
    assert message in str(raised.value)


def test_a_profile_finds_the_one_that_it_extends_beside_itself(tmp_path, monkeypatch):
    (tmp_path / "below").mkdir()
    files = {
        "mine.yaml": "extends: below/theirs.yaml\ntitle: mine\n",
        "below/theirs.yaml": "extends: base.yaml\ntitle: theirs\ntdp_w: 500\n",
        "below/base.yaml": "extends: h100-sxm5-80gb\ntitle: base\nl2_cache_mb: 40\n",
        "round.yaml": "extends: below/../round.yaml\ntitle: round\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    mine: Hardware = load_hardware("mine.yaml")
    assert (mine.title, mine.tdp_w, mine.l2_cache_mb, mine.sm_count) == ("mine", 500, 40, H100.sm_count)
    assert cluster_of(mine) == cluster_of(H100)
    with pytest.raises(HardwareError, match="extends this file in turn"):
        load_hardware("round.yaml")


# --- the host


def test_a_host_that_takes_twice_as_long_does_so_for_all_that_it_does():
    one, two = Host(), Host(relative_time=2)
    assert two.before_op_seconds(3, 2) == 2 * one.before_op_seconds(3, 2)
    assert one.before_op_seconds(3, 2) == pytest.approx(3 * 3.2e-6 + 2 * 6e-6)
    assert two.op_seconds(is_library=True) == 2 * one.op_seconds(is_library=True)
    assert two.further_launch_seconds == 2 * one.further_launch_seconds
