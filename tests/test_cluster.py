"""Clusters and what collectives take on them."""

import dataclasses
import math
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flopmeter import available_hardware, load_hardware
from flopmeter.cli import main, plan_command, serve_command
from flopmeter.device.cluster import (
    CLUSTERS,
    Cluster,
    Link,
    available_clusters,
    cluster_of,
    load_cluster,
    price_collective,
)
from flopmeter.device.hardware import Hardware, HardwareError
from flopmeter.records import Collective

MB = 2**20
A100, H100 = load_cluster("dgx-a100"), load_cluster("dgx-h100")
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather", "scatter")
EVERY_CLUSTER = pytest.mark.parametrize("name", available_clusters())

# One node of 8 and nodes of 2 on links without any odd factor: 100 and 10 GB/s, all of it reached.
PLAIN = Cluster(
    name="plain",
    title="plain",
    gpus_per_node=8,
    start_us=5,
    intra=Link(name="in", transport="nvlink", bandwidth_gb_per_s=100, achieved=1, source="none"),
    inter=Link(name="between", transport="network", bandwidth_gb_per_s=10, achieved=1, source="none"),
)
PAIRS = dataclasses.replace(PLAIN, gpus_per_node=2)


def price(kind, nbytes, ranks, cluster=PLAIN):
    return price_collective(Collective(kind, nbytes, tuple(ranks)), cluster)


# --- bytes on the wire, by hand --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "sent_mb", "copied_mb"),
    [
        ("all_reduce", 1400, 100 / 3),  # 2 x 7/8: reduce-scatter, then all-gather; a part's copy takes a third
        ("all_gather", 700, 100 / 3),  # each rank passes on all parts but one
        ("reduce_scatter", 700, 100 / 3),
        ("all_to_all", 700, 100 / 3),  # an eighth to each of seven others
        ("broadcast", 800, 0),  # in a pipeline: each passes on the whole
        ("reduce", 800, 0),
        ("gather", 700, 100 / 3),  # the root takes from seven
        ("scatter", 700, 100 / 3),
    ],
)
def test_eight_ranks_of_a_node_send_the_bytes_of_the_closed_form(kind, sent_mb, copied_mb):
    found = price(kind, 800 * MB, range(8))
    assert (found.wire_bytes, found.link, found.protocol) == (sent_mb * MB, "in", "Simple")
    assert found.bandwidth_seconds == pytest.approx((sent_mb + copied_mb) * MB / 100e9)


@pytest.mark.parametrize(
    ("kind", "sent_mb"),
    [
        ("all_reduce", 1500 / 8),  # 2 x 15/16 of 800 MB, over eight ports side by side
        ("all_gather", 750 / 8),
        ("reduce_scatter", 750 / 8),
        ("all_to_all", 400),  # half of it goes to the other node, each rank through its own port
        ("broadcast", 100),
    ],
)
def test_two_nodes_of_eight_share_the_ring_among_their_ports(kind, sent_mb):
    found = price(kind, 800 * MB, range(16))
    assert (found.wire_bytes, found.link) == (sent_mb * MB, "between")
    assert found.bandwidth_seconds == pytest.approx(sent_mb * MB / 10e9)


def test_one_rank_on_each_node_has_one_port():
    found = price("all_gather", 800 * MB, range(0, 64, 8))
    assert (found.wire_bytes, found.link) == (700 * MB, "between")


def test_the_link_within_the_node_paces_the_ring_where_it_is_the_slower():
    fast_network = dataclasses.replace(PLAIN, inter=dataclasses.replace(PLAIN.inter, bandwidth_gb_per_s=50))
    found = price("all_gather", 800 * MB, range(16), fast_network)  # 750 MB at 100 GB/s, 94 MB at 50 GB/s
    assert (found.wire_bytes, found.link) == (750 * MB, "in")


def test_uneven_nodes_are_paced_by_the_one_with_fewest_ranks():
    assert price("all_gather", 800 * MB, (0, 1, 2, 8)).wire_bytes == 600 * MB  # node 1 has one port


def test_a_message_to_a_peer_passes_one_link():
    assert price("send", 8 * MB, (0, 7))[2:4] == (8 * MB, "in")
    assert price("recv", 8 * MB, (0, 8))[2:4] == (8 * MB, "between")


def test_a_group_of_one_sends_nothing():
    found = price("all_reduce", 800 * MB, (3,))
    assert (found.algorithm, found.wire_bytes, found.link, found.seconds) == ("none", 0, "", 0)


def test_a_barrier_is_all_latency():
    found = price("barrier", 0, range(16))
    assert (found.wire_bytes, found.bandwidth_seconds, found.link) == (0, 0, "between")
    assert found.seconds == found.latency_seconds > 0


def test_an_all_reduce_in_the_switch_sends_nine_eighths():
    found = price("all_reduce", 800 * MB, range(8), H100)
    assert (found.algorithm, found.wire_bytes) == ("in-switch", 900 * MB)
    assert price("all_reduce", 800 * MB, range(16), H100).algorithm != "in-switch"
    assert price("all_reduce", 800 * MB, range(8), A100).algorithm == "ring"


# --- latency and the choice of algorithm -----------------------------------------------------------------------------


def test_small_messages_take_the_low_latency_protocol_and_large_ones_the_simple_one():
    protocols = [price("all_gather", size, range(8), A100).protocol for size in (1024, 1024 * MB)]
    assert protocols == ["LL", "Simple"]


def test_the_latency_of_a_ring_is_the_machines_start_and_a_hop_a_step():
    # LL: 5 us, 0.8 us a step on NVLink, 2.7 us on the network (tuning.cc)
    assert price("all_gather", 8, range(8)).latency_seconds == pytest.approx((5 + 7 * 0.8) * 1e-6, rel=1e-3)
    assert price("all_gather", 8, range(16)).latency_seconds == pytest.approx((5 + 14 * 0.8 + 2.7) * 1e-6, rel=1e-3)


# The largest message of nccl-tests that still went by LL, and the smallest that did not: the time doubles there
# (collectives of two and four GPUs in the NCCL database of ai-dynamo/aiconfigurator).
@pytest.mark.parametrize(
    ("cluster", "kind", "ranks", "last", "first"),
    [
        ("dgx-a100", "reduce_scatter", 2, 1, 2),  # 20 us, then 39
        ("dgx-a100", "all_gather", 4, 1, 2),  # 23 us, then 53
        ("dgx-a100", "all_reduce", 2, 0.5, 1),  # 20 us, then 41
        ("dgx-h100", "all_gather", 4, 2, 4),  # 19 us, then 37
        ("dgx-h100", "reduce_scatter", 2, 2, 4),  # 16 us, then 25
        ("dgx-h100", "all_reduce", 2, 1, 2),  # 15 us, then 28
    ],
)
def test_nccl_leaves_the_low_latency_protocol_where_measured_times_jump(cluster, kind, ranks, last, first):
    before, after = (price(kind, int(size * MB), range(ranks), load_cluster(cluster)) for size in (last, first))
    assert (before.protocol, after.protocol) == ("LL", "Simple")
    assert after.seconds > 1.3 * before.seconds


def test_the_switch_adds_floats_among_eight_and_no_bytes():
    # H100, 128 MB: 579 us in half, 721 us in int8; among four GPUs NCCL keeps to rings
    found = [
        price_collective(Collective("all_reduce", 128 * MB, tuple(range(ranks)), None, is_added), H100).algorithm
        for ranks, is_added in ((8, True), (8, False), (4, True))
    ]
    assert found == ["in-switch", "ring", "ring"]


def test_nccl_has_no_ll128_on_pcie():
    found = {price("all_gather", 2**size, range(8), load_cluster("pcie4-box")).protocol for size in range(10, 30)}
    assert found == {"LL", "Simple"}


def test_one_rank_on_each_of_many_nodes_gathers_by_aggregated_trees():
    # 2,048 nodes: a ring has 2,047 steps of 5 us or more. PAT: 11 of 4 us, and 2.8 us for each rank's part (tuning.cc)
    ranks = range(0, 8 * 2048, 8)
    for kind in ("all_gather", "reduce_scatter"):
        found = price(kind, 214_000_000, ranks, H100)
        assert found.algorithm == "pat"
        assert found.latency_seconds == pytest.approx(11 * 4e-6 + 2048 * 2.8e-6, rel=0.01)
    assert (
        price("all_gather", 214_000_000, range(2048), H100).algorithm == "ring"
    )  # eight on each node: PAT has no such
    assert price("all_gather", 2**30, range(0, 32, 8), H100).algorithm == "ring"  # PAT has .75 of the bandwidth


def test_neighbours_on_one_switch_have_a_rate_of_their_own():
    box = load_cluster("l40s-box")
    pair, apart, four, all_of_them = (
        price("all_gather", 512 * MB, ranks, box).seconds for ranks in ((0, 1), (1, 2), range(4), range(8))
    )
    assert pair < apart / 4  # ranks 1 and 2 are neighbours by number alone
    assert pair < four < all_of_them


def test_trees_win_on_many_nodes_and_rings_where_bandwidth_counts():
    # 128 nodes: 254 steps in a row around the ring, 14 up and down the tree
    assert price("all_reduce", 64 * 1024, range(0, 1024, 8)).algorithm == "tree"
    assert price("all_reduce", 1024 * MB, range(16)).algorithm == "ring"


def test_added_latency_counts_for_each_step_between_nodes():
    slow = dataclasses.replace(PLAIN, inter=dataclasses.replace(PLAIN.inter, added_latency_us=10))
    before, after = (price("all_gather", 8, range(32), cluster) for cluster in (PLAIN, slow))
    assert after.latency_seconds - before.latency_seconds == pytest.approx(3 * 10e-6)
    assert price("all_gather", 8, range(8), slow) == price("all_gather", 8, range(8))


# Microseconds in NVIDIA's NCCL database (ai-dynamo/aiconfigurator 0.12.0, Apache 2.0; fp16, out of place).
@pytest.mark.parametrize(
    ("cluster", "kind", "ranks", "nbytes", "microseconds"),
    [
        ("dgx-a100", "all_gather", 8, 512 * MB, 2288),
        ("dgx-a100", "reduce_scatter", 8, 64 * MB, 327),
        ("dgx-a100", "all_reduce", 8, 128 * MB, 1169),
        ("dgx-a100", "all_gather", 4, 256 * MB, 1106),
        ("dgx-h100", "all_gather", 8, 256 * MB, 730),
        ("dgx-h100", "reduce_scatter", 8, 512 * MB, 1400),
        ("dgx-h100", "all_reduce", 8, 512 * MB, 2112),
        ("dgx-h100", "all_reduce", 4, 512 * MB, 2306),
        ("dgx-h100", "all_to_all", 8, 256 * MB, 764),
        ("dgx-h100", "all_reduce", 8, 32 * 1024, 19),
        ("dgx-a100", "all_gather", 2, 512, 9.0),
        ("dgx-a100", "all_gather", 8, MB, 26.5),
        ("dgx-a100", "all_gather", 4, 2 * MB, 53),
        ("dgx-h100", "all_gather", 4, 2 * MB, 19),
        ("dgx-h100", "all_gather", 4, 4 * MB, 37),
        ("dgx-h100", "all_reduce", 8, 8 * MB, 79),
        ("l40s-box", "all_gather", 2, 32 * MB, 868),
        ("l40s-box", "all_gather", 4, 32 * MB, 5270),
        ("dgx-b200", "all_gather", 8, 512 * MB, 761),
        ("pcie5-box", "all_gather", 8, 256 * MB, 10275),
    ],
)
def test_collectives_within_a_node_take_what_was_measured(cluster, kind, ranks, nbytes, microseconds):
    found = price(kind, nbytes, range(ranks), load_cluster(cluster)).seconds
    assert found == pytest.approx(microseconds * 1e-6, rel=0.2)


# --- laws ------------------------------------------------------------------------------------------------------------

sizes = st.integers(0, 2**34)
kinds = st.sampled_from(KINDS)


@given(kinds, sizes, sizes, st.sampled_from([range(2), range(8), range(32), range(0, 64, 8)]))
def test_more_bytes_never_take_less_time(kind, size, more, ranks):
    assert price(kind, size, ranks, H100).seconds <= price(kind, size + more, ranks, H100).seconds


@given(kinds, sizes, sizes, st.integers(2, 8), st.sampled_from(available_clusters()))
def test_more_bytes_never_take_less_time_where_nccl_chooses_badly(kind, size, more, ranks, name):
    less, larger = (price(kind, nbytes, range(ranks), load_cluster(name)) for nbytes in (size, size + more))
    assert less.seconds <= larger.seconds * (1 + 1e-9)


@given(kinds, sizes, st.integers(1, 7))
def test_more_ranks_on_a_node_never_take_less_time_on_rings(kind, size, ranks):
    """As long as NCCL takes the same protocol: a larger group may keep to the quick one for larger messages. 2 MB take
    four A100 53 µs and eight 34."""
    fewer, more = (price(kind, size, range(count), A100) for count in (ranks, ranks + 1))
    assert fewer.seconds <= more.seconds or fewer.protocol != more.protocol


@given(kinds, sizes, st.integers(2, 200), st.sampled_from([1, 2, 8]))
def test_more_nodes_never_take_less_time(kind, size, nodes, per_node):
    def group(count):
        return [8 * node + local for node in range(count) for local in range(per_node)]

    assert price(kind, size, group(nodes), A100).seconds <= price(kind, size, group(nodes + 1), A100).seconds


@given(kinds, sizes, st.sampled_from([2, 4, 8]), st.sampled_from([1, 2, 4]))
def test_a_group_is_never_faster_across_nodes_than_within_one(kind, size, ranks, per_node):
    within = price(kind, size, range(ranks), A100)
    spread = [8 * (rank // per_node) + rank % per_node for rank in range(ranks)]
    assert price(kind, size, spread, A100).seconds >= within.seconds


@given(kinds, st.integers(1, 2**34), st.sampled_from([2, 4, 8]), st.sampled_from(available_clusters()))
def test_no_collective_beats_the_datasheets_rate(kind, size, ranks, name):
    cluster = load_cluster(name)
    found = price(kind, size, range(ranks), cluster)
    assert found.seconds > found.wire_bytes / cluster.intra.bandwidth_bytes_per_s


@given(kinds, st.integers(2**30, 2**34))
def test_twice_the_bandwidth_takes_half_of_the_bandwidth_part(kind, size):
    faster = dataclasses.replace(PLAIN, intra=dataclasses.replace(PLAIN.intra, bandwidth_gb_per_s=200))
    one, two = (price(kind, size, range(8), cluster) for cluster in (PLAIN, faster))
    assert two.bandwidth_seconds == pytest.approx(one.bandwidth_seconds / 2)
    assert two.latency_seconds == pytest.approx(one.latency_seconds)


# --- what ships ------------------------------------------------------------------------------------------------------


def test_the_clusters_that_ship_have_names_and_are_no_devices():
    assert {"dgx-a100", "dgx-h100", "dgx-b200", "l40s-box", "pcie4-box", "pcie5-box"} <= set(available_clusters())


@pytest.mark.parametrize(
    ("device", "gpus", "port"),
    [("gb200-per-gpu", 72, 50), ("gb300-per-gpu", 72, 100), ("b300-sxm-288gb", 8, 100), ("b200-sxm-180gb", 8, 50)],
)
def test_a_blackwell_gpu_comes_in_a_cluster_of_as_many_nodes_as_a_program_needs(device: str, gpus: int, port: int):
    cluster = cluster_of(load_hardware(device))
    cluster.check_size(4096)
    assert (cluster.gpus_per_node, cluster.inter.bandwidth_gb_per_s) == (gpus, port)
    assert cluster.intra.bandwidth_gb_per_s == load_hardware(device).interconnect.bidirectional_gb_per_s / 2
    assert not set(available_clusters()) & set(available_hardware())


@EVERY_CLUSTER
def test_a_cluster_file_opens_with_a_comment_and_keeps_the_order_of_the_fields(name):
    source = (CLUSTERS / f"{name}.yaml").read_text()
    assert source.startswith("# ")
    assert max(map(len, source.splitlines())) <= 120
    content = yaml.safe_load(source)
    for mapping, cls in ((content, Cluster), (content["intra"], Link), (content.get("inter", {}), Link)):
        assert list(mapping) == [field.name for field in dataclasses.fields(cls) if field.name in mapping]


@EVERY_CLUSTER
def test_the_links_of_a_cluster_agree_with_the_profiles_of_its_devices(name):
    cluster = load_cluster(name)
    for device in map(load_hardware, cluster.devices):
        assert cluster.intra.bandwidth_gb_per_s == device.interconnect.bidirectional_gb_per_s / 2
        assert cluster_of(device) is cluster


@pytest.mark.parametrize(
    ("device", "transport", "gb_per_s"),
    [("v100-sxm2-16gb", "nvlink", 150), ("mi300x", "nvlink", 448), ("rtx-4090", "pcie", 32), ("a30", "pcie", 32)],
)
def test_a_device_without_a_cluster_is_assumed_to_come_in_a_node_of_eight(device, transport, gb_per_s):
    cluster = cluster_of(load_hardware(device))
    assert cluster.title.startswith("assumed: one node of 8 x ")
    assert (cluster.intra.transport, cluster.intra.bandwidth_gb_per_s, cluster.gpus) == (transport, gb_per_s, 8)
    assert "assumed" in cluster.intra.source


def test_few_devices_of_a_mesh_use_only_the_links_between_them():
    """Each MI300X has a link of 64 GB/s to each of seven others, of which .75 are assumed, 120/128 with LL128."""
    cluster = cluster_of(load_hardware("mi300x"))
    for ranks, links in ((2, 1), (4, 3), (8, 7)):
        seconds = price_collective(Collective("broadcast", 8000 * MB, tuple(range(ranks))), cluster).seconds
        assert seconds == pytest.approx(8e9 / (links * 64e9 * 0.75 * 120 / 128), rel=0.07)


def test_a_collective_is_priced_on_the_devices_own_cluster_unless_another_is_named():
    call = Collective("all_gather", 800 * MB, tuple(range(8)))
    device = load_hardware("a100-sxm4-40gb")
    own, box = (price_collective(call, cluster_of(device, asked)).seconds for asked in (None, "pcie4-box"))
    assert own == price_collective(call, A100).seconds
    assert box > 10 * own


@pytest.mark.parametrize(
    ("cluster", "device"),
    [
        ("dgx-b200", "b200-sxm-180gb"),
        ("dgx-h100", "h100-sxm5-80gb"),  # the first of two
        ("pcie4-box", None),  # the command's own, as the box names none
    ],
)
def test_a_command_that_is_told_the_cluster_alone_takes_its_gpu(cluster, device, monkeypatch):
    asked = []

    def ask(*arguments, **options):
        asked.extend(device.name if isinstance(device, Hardware) else device for device in arguments)
        raise ValueError("that was all")

    monkeypatch.setattr(plan_command, "plan", ask)
    monkeypatch.setattr(serve_command, "serving", ask)
    main(["plan", "gpt2-124m", "--gpus", "8", "--cluster", cluster])
    main(["serve", "llama-3-8b", "--gpus", "8", "--prompt", "64", "--output", "8", "--cluster", cluster])
    assert asked[2] == (device or "a100-sxm4-80gb")
    assert asked[-1] == [device or "h100-sxm5-80gb"]


def test_a_cluster_around_other_gpus_than_its_own_says_which_these_are():
    box, plain = load_cluster("dgx-b200"), load_cluster("pcie4-box")
    assert box.title_around(load_hardware("b200-sxm-180gb")) == box.title
    assert box.title_around(load_hardware("l4")).endswith("whose own GPU is b200-sxm-180gb")
    assert plain.title_around(load_hardware("l4")) == plain.title


# --- errors ----------------------------------------------------------------------------------------------------------

VALID = """
title: two boxes
nodes: 2
gpus_per_node: 4
intra: {name: NVLink, transport: nvlink, bandwidth_gb_per_s: 300, achieved: 0.7, source: mine}
inter: {name: Ethernet, transport: network, bandwidth_gb_per_s: 12.5, achieved: 0.8, source: mine}
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return path

    return write


def test_a_file_of_ones_own_is_a_cluster(written):
    cluster = load_cluster(written(VALID))
    assert (cluster.name, cluster.gpus, cluster.inter.sustained_bytes_per_s) == ("mine", 8, 10e9)
    assert load_cluster(str(written(VALID))) == cluster
    assert load_cluster(cluster) is cluster


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("nodes: 2", "nodes: 0", "mine.yaml: nodes: expected a whole number from 1"),
        ("gpus_per_node: 4", "gpus_per_node: 4.5", "mine.yaml: gpus_per_node: expected a whole number"),
        ("gpus_per_node: 4\n", "", "mine.yaml: gpus_per_node: this field is missing"),
        ("gpus_per_node: 4", "gpu_per_node: 4", "unknown field; did you mean gpus_per_node?"),
        ("bandwidth_gb_per_s: 300", "bandwidth_gb_per_s: -1", "intra.bandwidth_gb_per_s: expected a number over 0"),
        ("achieved: 0.7", "achieved: 70", "intra.achieved: expected a number over 0 and at most 1, got 70"),
        ("transport: nvlink", "transport: carrier pigeon", "intra.transport: expected nvlink or pcie or network"),
        ("transport: nvlink", "transport: network", "intra.transport: expected nvlink or pcie"),
        ("transport: network", "transport: pcie", "inter.transport: expected network"),
        (", source: mine", "", "intra.source: this field is missing"),
        ("title: two boxes", "title: two boxes\nname: other", "the name is the stem of the file"),
        (VALID[VALID.index("inter: {") :], "", "2 nodes need a link between them"),
        ("title: two boxes", "- a list", "mine.yaml: line"),
    ],
)
def test_a_file_that_is_not_valid_is_one_error_that_says_what_to_do(written, before, after, message):
    assert before in VALID
    with pytest.raises(HardwareError) as raised:
        load_cluster(written(VALID.replace(before, after, 1)))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_an_unknown_cluster_names_the_near_ones():
    with pytest.raises(HardwareError, match="no cluster is named 'dgx-h10'; known: dgx-h100"):
        load_cluster("dgx-h10")
    with pytest.raises(HardwareError, match="expected the name of a cluster, a path or a Cluster, got 8"):
        load_cluster(8)
    with pytest.raises(HardwareError, match=r"nowhere\.yaml: this file cannot be read"):
        load_cluster(Path("nowhere.yaml"))


def test_a_cluster_that_is_too_small_says_so():
    with pytest.raises(HardwareError, match=r"pcie4-box has 8 GPUs \(1 x 8\), too few for a world of 9"):
        price("all_reduce", MB, (0, 8), load_cluster("pcie4-box"))
    with pytest.raises(HardwareError, match="too few for a world of 9"):
        dataclasses.replace(A100, nodes=1).check_size(9)
    A100.check_size(10_000)  # as many nodes as are asked for


@pytest.mark.parametrize("ranks", [(), (-1, 0), (1, 1)])
def test_a_group_that_is_none_is_an_error(ranks):
    with pytest.raises(HardwareError, match="a group needs ranks from 0 on, each once"):
        price("all_reduce", MB, ranks)


def test_a_device_without_any_link_asks_for_a_cluster():
    with pytest.raises(
        HardwareError, match="cpu-epyc-9654 has no link to other devices in its profile: name a cluster"
    ):
        cluster_of(load_hardware("cpu-epyc-9654"))


def test_every_price_is_finite():
    for name in available_clusters():
        for kind in (*KINDS, "send", "recv", "barrier"):
            assert math.isfinite(price(kind, 2**40, range(2, 8), load_cluster(name)).seconds)
