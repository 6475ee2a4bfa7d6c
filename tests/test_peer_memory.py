"""All-reduces of serving engines: kernels that read the memory of peers."""

import pytest

from flopmeter import load_hardware
from flopmeter.device.cluster import cluster_of, load_cluster, price_collective
from flopmeter.device.peer_memory import all_reduce_seconds
from flopmeter.records import Collective

H100 = "h100-sxm5-80gb"
RATE = 0.755 * 450e9  # of an H100's NVLinks, sustained
TRIP = 0.8e-6  # NCCL's 0.6 us of a step with LL, and a third more as measured


def seconds(nbytes, ranks, device=H100):
    hardware = load_hardware(device)
    return all_reduce_seconds(nbytes, ranks, hardware, cluster_of(hardware))


def by_nccl(nbytes, ranks, device=H100):
    group = tuple(range(ranks))
    return price_collective(Collective("all_reduce", nbytes, group), cluster_of(load_hardware(device))).seconds


def test_a_small_message_takes_a_kernel_and_four_trips_by_hand():
    """1.3 us of the smallest kernel; a flag, the question, the answer, a flag; 7 times 16 kB over the links."""
    assert seconds(16384, 8) == pytest.approx(1.3e-6 + 4 * TRIP + 7 * 16384 / RATE)


def test_a_large_message_moves_as_much_as_a_ring_does():
    """In two stages each rank reads 7/8 of it twice."""
    assert seconds(4 << 20, 8) - seconds(2 << 20, 8) == pytest.approx(2 * 7 / 8 * (2 << 20) / RATE)


def test_two_ranks_read_no_faster_than_their_loads_in_flight_allow():
    """36 blocks of 512 threads with 16 bytes each, once in two trips."""
    assert seconds(8 << 20, 2) - seconds(4 << 20, 2) == pytest.approx((4 << 20) / (36 * 512 * 16) * 2 * TRIP)


@pytest.mark.parametrize("device", ["a100-sxm4-80gb", H100, "b200-sxm-180gb", "mi300x", "l40s"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_it_is_never_slower_than_nccl_and_more_bytes_never_take_less(device, ranks):
    sizes = [1 << power for power in range(10, 26)]
    times = [seconds(size, ranks, device) for size in sizes]
    assert times == sorted(times)
    assert all(time <= by_nccl(size, ranks, device) for time, size in zip(times, sizes, strict=True))


def test_what_engines_have_no_kernel_for_is_nccls():
    """Three ranks, more than 8 MB, four on PCIe, more than a node has, a rack's sixteen."""
    assert seconds(16384, 3) == by_nccl(16384, 3)
    assert seconds((8 << 20) + 1, 8) == by_nccl((8 << 20) + 1, 8)
    assert seconds(16384, 4, "l40s") == by_nccl(16384, 4, "l40s") > seconds(16384, 2, "l40s")
    rack = load_cluster("gb200-nvl72")
    sixteen = price_collective(Collective("all_reduce", 16384, tuple(range(16))), rack).seconds
    assert all_reduce_seconds(16384, 16, load_hardware("gb200-per-gpu"), rack) == sixteen
