"""What runs at the same time, by hand: ports that are shared, SMs and memory that transfers take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from flopmeter import FlopMeter
from flopmeter.device.cluster import CollectivePrice
from flopmeter.device.hardware import Host
from flopmeter.distributed import world
from flopmeter.records import Collective
from flopmeter.timing.concurrency import Activity, HangError, Party, run_concurrently
from flopmeter.timing.contention import Demand, Transfer, transfer_of
from flopmeter.trace.streams import MetaStream, current_stream, stream

pytestmark = pytest.mark.filterwarnings("ignore")
BOTH = (("nic", "out"), ("nic", "in"))
COMPUTE, MEMORY, STREAM_2, STREAM_3 = Demand(1.0, 0.0), Demand(0.0, 1.0), 2, 3


def transfer(ports: tuple[tuple[str, str], ...] = BOTH, latency: float = 0.0, sms: float = 0.0, memory: float = 0.0):
    return Transfer(latency, ports, sms, memory)


def kernel(seconds: float, demand: Demand = COMPUTE, **more: object) -> Activity:
    return Activity(0.0, seconds, False, 0, demand=demand, **more)


def on_link(seconds: float, stream: int, demand: Transfer, **more: object) -> Activity:
    return Activity(0.0, seconds, False, stream, demand=demand, **more)


def ends(*works: Activity) -> list[float]:
    return [span.end_seconds for span in run_concurrently({0: works})[0]]


def test_two_transfers_of_11_ms_on_one_port_take_22():
    assert ends(on_link(11.0, STREAM_2, transfer()), on_link(11.0, STREAM_3, transfer())) == pytest.approx([22, 22])


def test_the_shorter_of_two_ends_when_it_has_moved_its_bytes_at_half_the_rate():
    """5 s of the first take 10; then 6 of the second's 11 are left, alone."""
    assert ends(on_link(5.0, STREAM_2, transfer()), on_link(11.0, STREAM_3, transfer())) == pytest.approx([10, 16])


def test_other_ports_and_the_other_way_are_not_shared():
    out, back, nvlink = transfer((("nic", "out"),)), transfer((("nic", "in"),)), transfer((("nvlink", "out"),))
    assert ends(on_link(4.0, 1, out), on_link(4.0, 2, back), on_link(4.0, 3, nvlink)) == pytest.approx([4, 4, 4])


def test_a_collective_is_as_slow_as_the_port_that_most_share():
    """Another transfer goes out beside it; nothing else comes in. The bytes of memory that both take are as few."""
    out, memory = transfer((("nic", "out"),), memory=0.5), kernel(1.0, MEMORY)
    assert ends(on_link(4.0, 1, transfer()), on_link(4.0, 2, out)) == pytest.approx([8, 8])
    at_half = ends(on_link(9.0, 1, transfer(memory=0.5)), on_link(9.0, 2, out), memory)
    assert at_half[-1] == pytest.approx(1.5)


def test_latencies_are_not_stretched():
    """2 s until bytes move; then both move 4 s of bytes at half the rate."""
    both = [on_link(6.0, stream, transfer(latency=2.0)) for stream in (STREAM_2, STREAM_3)]
    assert ends(*both) == pytest.approx([10, 10])


def test_a_kernel_of_arithmetic_lacks_the_sms_that_a_transfer_takes():
    """In 5 s beside the transfer it does 3 s of its work, with 60 % of the SMs; then 7 s alone."""
    assert ends(kernel(10.0), on_link(5.0, STREAM_2, transfer(sms=0.4))) == pytest.approx([12, 5])
    assert ends(kernel(10.0, MEMORY), on_link(5.0, STREAM_2, transfer(sms=0.4))) == pytest.approx([10, 5])


def test_a_kernel_of_memory_traffic_and_a_transfer_slow_each_other():
    """They ask for 1.25 of the memory's bandwidth, so that both run at 0.8: 4 s take 5, and the kernel has 6 left."""
    assert ends(kernel(10.0, MEMORY), on_link(4.0, STREAM_2, transfer(memory=0.25))) == pytest.approx([11, 5])
    half = Demand(1.0, 0.5)  # leaves room for both
    assert ends(kernel(10.0, half), on_link(4.0, STREAM_2, transfer(memory=0.25))) == pytest.approx([10, 4])


def test_a_kernel_that_starts_beside_a_transfer_is_slowed_until_that_ends():
    works = (on_link(4.0, STREAM_2, transfer(sms=0.5)), kernel(1.0), kernel(10.0))
    assert ends(*works) == pytest.approx([4, 2, 2 + 2 + 9])


def test_transfers_leave_a_kernel_a_tenth_of_the_sms():
    """Three that ask for 40 % each: in 5 s beside them it does half a second of its work."""
    links = [on_link(5.0, stream, transfer(((f"nic {stream}", "out"),), sms=0.4)) for stream in (1, 2, 3)]
    assert ends(kernel(10.0), *links)[0] == pytest.approx(5 + 9.5)


def on_stream(number: int, seconds: float, demand: Demand) -> Activity:
    return Activity(0.0, seconds, False, number, demand=demand)


def test_kernels_that_fill_the_device_run_in_the_order_in_which_they_came():
    first, second, third = (on_stream(number, 10.0, COMPUTE) for number in range(3))
    spans = run_concurrently({0: [first, second, third]})[0]
    assert [(span.start_seconds, span.end_seconds) for span in spans] == [(0, 10), (10, 20), (20, 30)]


def test_kernels_of_few_blocks_run_side_by_side_and_the_last_gets_the_sms_that_are_left():
    """40 % each: the third has 20 % for 10 s, half of what it keeps alone, and then 5 s of its work are left."""
    assert ends(*(on_stream(number, 10.0, Demand(1.0, 0.0, 0.4)) for number in range(3))) == pytest.approx([10, 10, 15])


def test_kernels_of_few_blocks_share_the_bandwidth_of_memory():
    """Each would use three quarters: together they ask for 1.5."""
    draws = Demand(1.0, 0.75, 0.4)
    assert ends(on_stream(0, 10.0, draws), on_stream(1, 10.0, draws)) == pytest.approx([10 * 1.125, 10 * 1.125])


def test_a_copy_by_the_engine_of_the_link_waits_for_no_sms():
    for kernel in (COMPUTE, MEMORY):
        assert ends(on_stream(0, 10.0, kernel), on_stream(1, 4.0, Demand(0.0, 4.0, 0.0))) == pytest.approx([10, 4])


def test_a_kernel_of_few_blocks_loses_none_to_a_transfer_that_leaves_enough():
    few = Demand(1.0, 0.0, 0.5)
    assert ends(on_stream(0, 10.0, few), on_link(5.0, STREAM_2, transfer(sms=0.4))) == pytest.approx([10, 5])


def seconds_on_streams(times: int, aside: bool, work: Callable[[], object]) -> float:
    """By a host that takes no time."""
    with FlopMeter("h100-sxm5-80gb", clocks="burst", host=Host(relative_time=1e-9)) as meter, torch.no_grad():
        for _ in range(times):
            with stream(MetaStream() if aside else current_stream()):
                work()
    return meter.report().seconds


def test_two_large_products_or_copies_on_two_streams_take_as_long_as_on_one():
    x, y = (torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta") for _ in range(2))
    for work in (lambda: x @ y, x.clone):
        beside, behind = (seconds_on_streams(2, aside, work) for aside in (True, False))
        assert beside == pytest.approx(behind, rel=0.01)


def test_attention_of_16_blocks_fits_eight_times_on_an_h100_of_132_sms():
    """A block has 128 queries of a head; all heads share their keys, so that memory is hardly needed."""
    query, key = (
        torch.empty(1, n, size, 128, dtype=torch.bfloat16, device="meta") for n, size in ((16, 128), (1, 8192))
    )

    def attend() -> None:
        torch.nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)

    one, eight, sixteen = (seconds_on_streams(times, True, attend) for times in (1, 8, 16))
    assert eight == pytest.approx(one)
    assert sixteen == pytest.approx(2 * one, rel=0.01)


def test_a_transfer_without_bytes_takes_sms_for_its_latency_alone():
    """2 s at half the SMs, then 9 s of work are left; another one that waits on its port is not hindered."""
    empty = transfer(latency=2.0, sms=0.5)
    assert ends(kernel(10.0), on_link(2.0, STREAM_2, empty)) == pytest.approx([11, 2])
    assert ends(on_link(2.0, STREAM_2, empty), on_link(0.0, STREAM_3, transfer())) == pytest.approx([2, 0])


def test_a_message_is_as_slow_as_the_fuller_of_its_two_ports():
    """Rank 0 sends to 1 and to 2 through one port; 2 also receives from 1. Of two that share a port each has half."""
    out, back = transfer((("nic", "out"),)), transfer((("nic", "in"),))
    spans = run_concurrently(
        {
            0: [
                on_link(4.0, 1, out, party=Party((0, 1, 2), (0, 1))),
                on_link(4.0, 2, out, party=Party((0, 1, 2), (0, 2))),
            ],
            1: [
                on_link(4.0, 1, back, party=Party((0, 1, 2), (0, 1))),
                on_link(4.0, 3, out, party=Party((0, 1, 2), (1, 2))),
            ],
            2: [
                on_link(4.0, 2, back, party=Party((0, 1, 2), (0, 2))),
                on_link(4.0, 3, back, party=Party((0, 1, 2), (1, 2))),
            ],
        }
    )
    assert [[span.end_seconds for span in spans[rank]] for rank in range(3)] == [[8, 8], [8, 8], [8, 8]]


def test_a_message_waits_for_both_sides_and_a_batch_for_all_of_its_messages():
    """Rank 1 computes for 3 s first. The batch of rank 0 ends with its second message, and what follows it waits."""
    parties = {"there": Party((0, 1), (0, 1)), "back": Party((0, 1), (1, 0))}
    out, back = transfer((("nic", "out"),)), transfer((("nic", "in"),))
    spans = run_concurrently(
        {
            0: [
                on_link(1.0, 1, out, batch=1, party=parties["there"]),
                on_link(2.0, 1, back, batch=1, party=parties["back"]),
                on_link(1.0, 1, out, party=Party((5,), (0, 9))),
            ],
            1: [
                kernel(3.0),
                on_link(1.0, 1, back, batch=1, after=(0,), party=parties["there"]),
                on_link(2.0, 1, out, batch=1, party=parties["back"]),
            ],
        }
    )
    assert [(span.start_seconds, span.end_seconds) for span in spans[0]] == [(3, 4), (3, 5), (5, 6)]
    assert [(span.start_seconds, span.end_seconds) for span in spans[1]] == [(0, 3), (3, 4), (3, 5)]


def test_sides_that_never_meet_are_named():
    out = transfer((("nic", "out"),))
    with pytest.raises(HangError, match=r"rank 0 in its message to rank 1"):
        run_concurrently({0: [on_link(1.0, 1, out, party=Party((0, 1), (0, 1)))], 1: [kernel(1.0)]})


def test_a_message_waits_for_none_of_its_own_batch():
    assert ends(on_link(1.0, 1, transfer(), batch=1), on_link(0.0, 1, transfer(), batch=1, after=(0,))) == [1, 0]


THERE, BACK, ALL = Party((0, 1), (0, 1)), Party((0, 1), (1, 0)), Party((0, 1))


def sides(*parties: Party, **more: object) -> list[Activity]:
    return [on_link(1.0, 1, transfer(), party=party, **more) for party in parties]


@pytest.mark.parametrize(
    ("ranks", "blamed"),
    [
        ({0: [*sides(THERE), kernel(1.0, after=(0,))], 1: [kernel(1.0)]}, "rank 0 in its message to rank 1"),
        ({0: sides(THERE, BACK, batch=1), 1: sides(THERE)}, "rank 0 in its message from rank 1"),
        (
            {0: sides(ALL, THERE), 1: sides(THERE, ALL)},
            "rank 0 in its collective of 2 ranks; rank 1 in its message from rank 0",
        ),
    ],
    ids=["what waits behind a message", "a message of the batch that met its other side", "another order"],
)
def test_only_what_never_began_though_its_turn_had_come_is_blamed_for_a_hang(ranks, blamed):
    with pytest.raises(HangError) as stopped:
        run_concurrently(ranks)
    assert str(stopped.value).partition("for ever: ")[2] == blamed


def test_steps_that_are_cut_at_different_messages_wait_only_for_those_that_both_have():
    """Rank 0's step begins with the answer to rank 1's last step: a server that steps before it answers."""
    earlier = {0: Counter({THERE: 1, BACK: 2}), 1: Counter({THERE: 2, BACK: 2})}
    ranks = {0: sides(THERE, BACK), 1: [kernel(5.0), *sides(BACK, THERE, after=(0,))]}
    spans = run_concurrently(ranks, earlier=earlier)
    assert [span.end_seconds for span in spans[0]] == [1, 6]  # the answer at once; then what rank 1 sends after 5 s
    assert [span.end_seconds for span in spans[1]] == [5, 6, 7]
    with pytest.raises(HangError):
        run_concurrently(ranks)


def test_the_host_waits_where_it_is_told_to():
    works = [Activity(1.0, 5.0, True, 0), Activity(1.0, 1.0, False, 0), Activity(1.0, 1.0, False, 1)]
    assert [span.sent_seconds for span in run_concurrently({0: works})[0]] == [1, 7, 8]
    assert ends(*works) == [6, 8, 9]


@pytest.mark.parametrize("ways", [1, 2])
def test_groups_of_a_program_that_share_a_network_port_share_its_bandwidth(ways: int):
    """Rank 0 sums over ranks of other nodes, in one group or in two of the same size."""
    with world(32, {"a": 2, "b": 2, "node": 8}) as mesh, FlopMeter("h100-sxm5-80gb") as meter:
        works = [
            dist.all_reduce(torch.empty(2**28, device="meta"), group=mesh[name].get_group(), async_op=True)
            for name in ("a", "b")[:ways]
        ]
        for work in works:
            work.wait()
    with world(32, {"a": 2, "b": 2, "node": 8}) as mesh, FlopMeter("h100-sxm5-80gb") as alone:
        dist.all_reduce(torch.empty(2**28, device="meta"), group=mesh["a"].get_group())
    assert meter.report().seconds == pytest.approx(ways * alone.report().seconds, rel=0.01)


def test_products_beside_a_collective_take_longer_and_after_it_as_long_as_ever():
    def products(beside: bool) -> list[float]:
        with world(8), FlopMeter("h100-sxm5-80gb", clocks="burst") as meter:
            x, y = (torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta") for _ in range(2))
            if beside:
                dist.all_gather_into_tensor(
                    torch.empty(2**30, device="meta"), torch.empty(2**27, device="meta"), async_op=True
                )
            for _ in range(20):
                x @ y
        report = meter.report()
        return [t.seconds for t, k in zip(report.timings, report.kernels, strict=True) if k.cost.macs]

    slowed, alone = products(True), products(False)
    assert slowed[0] / alone[0] == pytest.approx(1 / (1 - 24 / 132), rel=0.02)  # 24 blocks of NCCL on 132 SMs
    assert slowed[-1] == pytest.approx(alone[-1])


@pytest.mark.parametrize(
    ("kind", "algorithm", "transport", "between_nodes", "channels"),
    [
        ("all_gather", "ring", "nvlink", False, 24),
        ("all_reduce", "in-switch", "nvlink", False, 16),
        ("all_reduce", "ring", "nvlink", True, 16),
        ("all_reduce", "ring", "pcie", False, 2),
        ("send", "ring", "nvlink", False, 16),
        ("recv", "ring", "nvlink", True, 2),
    ],
)
def test_each_channel_that_nccl_opens_takes_an_sm(kind, algorithm, transport, between_nodes, channels):
    """Channels as users of NCCL report them, with 100 SMs."""
    price = CollectivePrice(algorithm, "simple", 1 << 20, "link", 1e-6, 1e-3, between_nodes)
    assert transfer_of(Collective(kind, 1 << 20, (0, 1)), price, transport, 100, 1e12).sms == channels / 100


def ports(kind: str) -> set[tuple[str, str]]:
    price = CollectivePrice("ring", "simple", 1 << 20, "link", 1e-6, 1e-3, False)
    return {*transfer_of(Collective(kind, 1 << 20, (0, 1)), price, "nvlink", 100, 1e12).ports}


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
def test_what_is_sent_and_what_is_received_each_share_a_port_with_a_collective_and_not_with_one_another(kind: str):
    """Links are full-duplex, and a collective fills both ways."""
    assert ports("send") | ports("recv") == ports(kind)
    assert not ports("send") & ports("recv")
    assert ports("send")
    assert ports("recv")


def test_a_kernel_that_neither_computes_nor_moves_anything_takes_its_own_time_beside_another():
    nothing = kernel(1.0, Demand(0.0, 0.0, sms=0.1))._replace(stream=STREAM_2)
    assert ends(kernel(2.0, Demand(2.0, 0.0, sms=0.5)), nothing) == pytest.approx([2, 1])


def test_a_group_of_one_uses_no_port_and_no_sm():
    """It sends nothing over any link."""
    price = CollectivePrice("ring", "simple", 0, "", 1e-6, 0.0, False)
    alone = transfer_of(Collective("all_reduce", 1 << 20, (0,)), price, "nvlink", 100, 1e12)
    assert (alone.ports, alone.sms, alone.memory) == ((), 0.0, 0.0)
    assert ends(on_link(1e-6, STREAM_2, alone), kernel(1.0)) == pytest.approx([1e-6, 1])
