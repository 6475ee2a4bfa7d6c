"""Pipelines: against closed forms, against torch's own tables of actions, and against real processes."""

from __future__ import annotations

import functools
import json
import re
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gloo import printed_by_ranks
from pipeline_paths import MESSAGES_SENT_ALONE, longest_path
from pipeline_programs import PROGRAMS, Step, around_a_ring, coalesced, scheduled
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble

from flopmeter import FlopMeter, Report
from flopmeter.ask.pipeline import Pipeline, pipeline_ranks, time_pipeline
from flopmeter.costs import kernels_of
from flopmeter.costs.data_movement.communication import is_message, message_ends
from flopmeter.device.cluster import Cluster, Link
from flopmeter.device.hardware import HardwareError
from flopmeter.distributed import WorldError, world
from flopmeter.distributed.ranks import run_ranks
from flopmeter.report.page.gantt import _LEFT, _exposed_and_hidden, lanes_of
from flopmeter.timing import HangError, Host

pytestmark = pytest.mark.filterwarnings("ignore")
SCRIPT = Path(__file__).with_name("pipeline_programs.py")
H100 = "h100-sxm5-80gb"
# Links and a host that take no time, so that the closed forms hold.
FREE = Link(name="free", transport="nvlink", bandwidth_gb_per_s=1e5, achieved=1.0, source="none")
NO_LATENCY = Cluster(name="free", title="free links", gpus_per_node=64, start_us=0.0, intra=FREE)
NO_HOST = Host(
    launch_seconds=0.0, library_seconds=0.0, view_seconds=0.0, module_call_seconds=0.0, triton_launch_seconds=0.0
)
# Products of 4.4 TFLOP, of microbatches whose activations are small.
LARGE = {"rows": 32768, "width": 1024, "hidden": 65536, "dtype": torch.bfloat16}
ROWS, WIDTH, HIDDEN, BF16 = 32768, 1024, 65536, 2
RELEASES_SENT = hasattr(PipelineStage, "release_fwd_send_outputs")
# Before that, a rank of two stages in a row sent a first message to itself, which NCCL can and gloo cannot.
WARMS_UP_BY_PAIRS = hasattr(ScheduleInterleaved1F1B, "_warmup_p2p")


@functools.cache
def ideal(schedule: type, ranks: int, microbatches: int, chunks: int = 1, **options: object) -> Pipeline:
    program = partial(scheduled, schedule, chunks=chunks, microbatches=microbatches, **(LARGE | options))
    return time_pipeline(program, {"pp": ranks}, H100, NO_LATENCY, host=NO_HOST, clocks="burst")


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 8), (8, 16)])
def test_the_bubble_of_gpipe_and_1f1b_is_that_of_the_papers(schedule: type, ranks: int, microbatches: int):
    """(p - 1) / (m + p - 1) of the step: GPipe, arXiv 1811.06965; PipeDream-2BW and Megatron-LM, arXiv 2104.04473."""
    found = ideal(schedule, ranks, microbatches)
    assert found.bubble_share == pytest.approx((ranks - 1) / (microbatches + ranks - 1), rel=0.01)


@pytest.mark.parametrize(("ranks", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 8, 4)])
def test_stages_of_v_parts_make_the_bubble_v_times_smaller(ranks: int, microbatches: int, chunks: int):
    """Megatron-LM, arXiv 2104.04473, section 2.2: the time of the bubble over that of the work is (p - 1) / (v m).

    The last part takes a little longer: its products copy the gradient of a sum, one number for all elements. With
    torch 2.11 only two ranks reach that: with more a result waits behind messages that nobody needs yet."""
    found = ideal(ScheduleInterleaved1F1B, ranks, microbatches, chunks)
    over_work = found.bubble_share / (1 - found.bubble_share)
    expected = (ranks - 1) / (chunks * microbatches)
    if not MESSAGES_SENT_ALONE and ranks > 2:
        work = 3 * chunks * microbatches
        path = longest_path(ScheduleInterleaved1F1B, ranks, microbatches, chunks)
        assert path > (1 + expected) * work
        expected = path / work - 1
    assert over_work == pytest.approx(expected, rel=0.02)


@pytest.mark.skipif(not MESSAGES_SENT_ALONE, reason="this torch's receives hold up its sends: there is a bubble")
def test_zero_bubble_v_has_no_bubble_as_its_paper_counts_it():
    """arXiv 2401.10241: from a rank's first kernel to its last, where F, B and W take equally long."""
    found = ideal(ScheduleZBVZeroBubble, 4, 8, 2)
    for row, report in zip(found.rows, found.reports.values(), strict=True):
        computing = [timing for timing in report.timings if timing.stream == 0]
        span = computing[-1].end_seconds - computing[0].start_seconds
        assert span == pytest.approx(row.computing_seconds, rel=0.01)


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [
        (ScheduleGPipe, 1),  # torch's table of 1F1B, which it only draws, lacks a microbatch of the last rank
        (ScheduleInterleaved1F1B, 2),
        (ScheduleLoopedBFS, 2),
        (ScheduleInterleavedZeroBubble, 2),
        (ScheduleZBVZeroBubble, 2),
        (ScheduleDualPipeV, 2),
    ],
)
def test_a_step_takes_the_longest_path_through_torchs_own_table_of_actions(schedule: type, chunks: int):
    """F, I and W of two products each take one unit, and torch says in which order each rank runs them and sends. Wide
    layers make what is not a product small: torch 2.11 adds 0 to each gradient that W starts from."""
    ranks, microbatches = 4, 8
    found = ideal(schedule, ranks, microbatches, chunks, width=16384)
    work = 3 * chunks * microbatches  # units of a rank
    unit = min(row.computing_seconds for row in found.rows) / work
    assert found.seconds / unit == pytest.approx(longest_path(schedule, ranks, microbatches, chunks), rel=0.015)


@pytest.mark.parametrize(("schedule", "held"), [(ScheduleGPipe, [8, 8, 8, 8]), (Schedule1F1B, [4, 3, 2, 1])])
def test_each_stage_holds_the_activations_of_the_microbatches_in_flight(schedule: type, held: list[int]):
    """By hand: of each the shifted input, the hidden rows and the result, in bf16. What is received is a buffer of the
    stage's own. Since torch 2.15 a stage lets go of a result that it has sent, and receives each microbatch into a
    buffer of its own."""
    found = ideal(schedule, 4, 8)
    results = ROWS * WIDTH * BF16
    for row, microbatches in zip(found.rows, held, strict=True):
        most = max(found.reports[row.rank].memory.timeline["activations"])
        kept = 8 - microbatches if row.place == 3 else 0  # results of the last stage, for the caller of step()
        of_each = 2
        if RELEASES_SENT:
            of_each, kept = (1, 1) if row.place == 0 else (2, 1)
        expected = microbatches * (ROWS * HIDDEN * BF16 + of_each * results) + kept * results
        if row.place < 3 or not RELEASES_SENT:
            # a gradient of the result may be there at the same time
            assert abs(most - expected) <= results, row.place
            assert row.in_flight == pytest.approx(microbatches, abs=0.15)


def one_more_in_the_third(stage: int) -> int:
    return 2 if stage == 2 else 1


def test_a_stage_with_twice_the_layers_is_named_the_slowest():
    found = ideal(Schedule1F1B, 4, 8, layers=one_more_in_the_third)
    assert found.slowest.rank == 2
    assert "slowest: rank 2" in str(found)
    assert max(found.rows, key=lambda row: row.bubble_seconds).rank != 2
    assert found.rows[0].peak_memory_bytes < ideal(ScheduleGPipe, 4, 8).rows[0].peak_memory_bytes


def test_warm_up_steady_state_and_cool_down_of_1f1b():
    """The first stage of p runs p microbatches before its first backward pass, which comes once the others' p - 1
    forward and backward passes are done; the last one has no warm-up but its wait and one forward pass."""
    found = ideal(Schedule1F1B, 4, 8)
    unit = found.rows[1].computing_seconds / 8 / 3  # a forward pass; a backward pass takes two
    first, last = found.rows[0], found.rows[3]
    assert first.warm_up_seconds == pytest.approx((4 + 3 * 2) * unit, rel=0.03)
    assert last.warm_up_seconds == pytest.approx(4 * unit, rel=0.03)
    assert last.cool_down_seconds == pytest.approx(2 * unit, rel=0.05)
    for row in found.rows:
        whole = row.warm_up_seconds + row.steady_seconds + row.cool_down_seconds
        assert whole == pytest.approx(row.seconds, rel=0.02)
        assert row.computing_seconds + row.bubble_seconds == pytest.approx(found.seconds, rel=0.01)


def test_slower_links_make_the_step_longer_and_its_kernels_hardly():
    def on(bandwidth: float) -> Pipeline:
        link = Link(name="slow", transport="nvlink", bandwidth_gb_per_s=bandwidth, achieved=1.0, source="none")
        cluster = Cluster(name="slow", title="slow", gpus_per_node=64, start_us=0.0, intra=link)
        program = partial(scheduled, Schedule1F1B, microbatches=8, **LARGE)
        return time_pipeline(program, {"pp": 4}, H100, cluster, host=NO_HOST, clocks="burst")

    slow, fast = on(20.0), on(200.0)
    assert slow.seconds > fast.seconds
    assert slow.rows[0].computing_seconds == pytest.approx(fast.rows[0].computing_seconds, rel=0.01)  # it lends SMs


def test_both_sides_of_a_message_run_at_the_same_time_and_a_batch_ends_as_a_whole():
    found = ideal(Schedule1F1B, 4, 8)
    sides: dict[tuple[tuple[int, int], int], list[tuple[float, float]]] = {}
    for report in found.reports.values():
        counts: dict[tuple[int, int], int] = {}
        for kernel, timing in messages(report):
            ends = message_ends(kernel)
            counts[ends] = counts.get(ends, 0) + 1
            sides.setdefault((ends, counts[ends]), []).append((timing.start_seconds, timing.end_seconds))
    assert len(sides) == 2 * 3 * 8  # two ways between three pairs, for each microbatch
    assert all(len(both) == 2 and both[0] == both[1] for both in sides.values())


def messages(report: Report) -> list[tuple[object, object]]:
    return [
        (kernel, timing)
        for kernel, timing in zip(report.kernels, report.timings, strict=True)
        if is_message(kernel.cost)
    ]


def test_the_messages_of_a_batch_are_one_kernel_on_the_stream_of_the_group():
    """Two batches of two ranks: the numbers, then the rows. Both of a batch start together."""
    report = time_pipeline(around_a_ring, {"pp": 2}, H100).reports[0]
    placements = [p for k, p in zip(report.kernels, report.launches.placements, strict=True) if is_message(k.cost)]
    assert [placement.batch for placement in placements] == [1, 1, 2, 2]
    assert len({placement.stream for placement in placements}) == 1


def unequal(mesh: DeviceMesh, *, is_async: bool) -> Step:
    """Rank n multiplies n + 1 times; then all sum one number, and multiply once more."""
    with torch.device("meta"):
        x, number = torch.empty(4096, 4096, dtype=torch.bfloat16), torch.empty(1)

    def step() -> None:
        for _ in range(dist.get_rank() + 1):
            torch.mm(x, x)
        work = dist.all_reduce(number, group=mesh.get_group("pp"), async_op=is_async)
        if work is not None:
            work.wait()
        torch.mm(x, x)

    return step


@pytest.mark.parametrize("is_async", [False, True])
def test_ranks_wait_for_each_other_at_a_collective_of_all(is_async: bool):
    program = partial(unequal, is_async=is_async)
    found = time_pipeline(program, {"pp": 4}, H100, NO_LATENCY, host=NO_HOST, clocks="burst")
    product = found.rows[0].computing_seconds / 2
    assert [row.seconds for row in found.rows] == pytest.approx([5 * product] * 4, rel=0.01)
    assert [row.bubble_seconds for row in found.rows] == pytest.approx(
        [3 * product, 2 * product, product, 0], abs=0.01 * product
    )


def test_ranks_whose_steps_have_other_numbers_of_a_collective_do_not_wait():
    def program(mesh: DeviceMesh) -> Step:
        step = unequal(mesh, is_async=False)
        return lambda: [step() for _ in range(1 + dist.get_rank() % 2)] and None

    found = time_pipeline(program, {"pp": 2}, H100, NO_LATENCY, host=NO_HOST, clocks="burst")
    assert found.rows[1].seconds == pytest.approx(3 * found.rows[0].seconds, rel=0.01)


# --- against real processes


def over_gloo(size: int, programs: list[str], folder: Path) -> list[dict[str, list[list[object]]]]:
    """The messages of each process, by program."""
    return printed_by_ranks(SCRIPT, size, folder, *programs)


def metered(program: str, size: int) -> list[list[list[object]]]:
    """The same of the ranks on meta."""

    def run(rank: int) -> list[list[object]]:
        with world(size, {"pp": size}, rank) as mesh:
            step, meter = PROGRAMS[program](mesh, "meta"), FlopMeter(H100)
            for _ in range(2):
                with meter:
                    step()
        found = []
        for kernel in kernels_of(meter.trace):
            if kernel.cost.collective is not None:
                peer = next(end for end in message_ends(kernel) if end != rank)
                found.append([kernel.cost.collective.kind, peer, kernel.cost.collective.nbytes])
        return found

    return list(run_ranks(range(size), run).values())


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_messages_are_those_of_real_processes_one_by_one_and_in_order(size: int, tmp_path: Path):
    programs = [program for program in PROGRAMS if WARMS_UP_BY_PAIRS or program not in ("zero bubble v", "dualpipe v")]
    found = over_gloo(size, programs, tmp_path)
    for program in programs:
        assert metered(program, size) == [process[program] for process in found], program


# --- programs that cannot be


def test_a_message_that_nobody_sends_is_one_error_that_names_it():
    def program(mesh: DeviceMesh) -> Step:
        def step() -> None:
            if dist.get_rank() == 1:
                dist.recv_object_list([None], 0)

        return step

    with pytest.raises(WorldError, match=r"would hang: rank 1 waits for objects 1 from rank 0 to rank 1\. It is never"):
        time_pipeline(program, {"pp": 2}, H100)
    assert not dist.is_initialized()


def test_two_ranks_that_both_receive_first_hang_as_on_gpus():
    def program(mesh: DeviceMesh) -> Step:
        x = torch.zeros(4, device="meta")

        def step() -> None:
            dist.recv(x, 1 - dist.get_rank())
            dist.send(x, 1 - dist.get_rank())

        return step

    with pytest.raises(HangError, match=r"rank 0 in its message from rank 1; rank 1 in its message from rank 0"):
        time_pipeline(program, {"pp": 2}, H100)


def test_more_ranks_than_the_cluster_has_gpus_are_refused_before_anything_runs():
    with pytest.raises(HardwareError, match=r"pcie4-box has 8 GPUs .*, too few for a world of 9"):
        time_pipeline(lambda mesh: pytest.fail("must not run"), {"pp": 9}, "a100-pcie-80gb", cluster="pcie4-box")


def test_a_mesh_without_a_dimension_for_stages_says_so():
    with pytest.raises(WorldError, match=r"has no dimension 'pp': name the one of the pipeline, stages=\.\.\."):
        time_pipeline(around_a_ring, {"dp": 2}, H100)


# --- worlds


def test_a_list_of_gathers_runs_on_meta_and_is_waited_for():
    """`all_gather_coalesced` in the background, as old pipelines and DDP-like wrappers call it."""
    with world(4), FlopMeter("h100-sxm5-80gb") as meter:
        whole = [[torch.empty(3, device="meta") for _ in range(2)] for _ in range(4)]
        dist.all_gather_coalesced(whole, [torch.empty(3, device="meta") for _ in range(2)], async_op=True).wait()
    assert sum(row.calls for row in meter.report().rows("class") if row.name == "communication") == 1


def test_a_batch_of_messages_is_checked_as_torch_checks_it():
    with world(4), FlopMeter("h100-sxm5-80gb"):
        message = dist.P2POp(dist.isend, torch.empty(3, device="meta"), 1)
        other = dist.P2POp(dist.isend, torch.empty(3, device="meta"), 1, dist.new_group([0, 1]))
        with pytest.raises(ValueError, match="same group"):
            dist.batch_isend_irecv([message, other])


def test_coalesced_collectives_run_on_meta():
    with world(4, {"pp": 4}) as mesh, FlopMeter(H100) as meter:
        coalesced(mesh)()
    (kernel,) = [kernel for kernel in kernels_of(meter.trace) if kernel.cost.collective]
    assert kernel.cost.collective.kind == "all_reduce"
    assert kernel.cost.collective.nbytes == (8 + 3) * 4


def test_a_world_leaves_no_hook_and_no_backend_behind():
    before = sys.excepthook, [*dist.Backend.backend_capability["fake"]]
    with world(4):
        assert "meta" in dist.Backend.backend_capability["fake"]
    assert (sys.excepthook, dist.Backend.backend_capability["fake"]) == before


def test_other_dimensions_have_their_first_rank_stand_for_all():
    found = time_pipeline(partial(scheduled, ScheduleGPipe), {"pp": 2, "dp": 4}, H100)
    assert [row.rank for row in found.rows] == [0, 4]
    assert [*pipeline_ranks({"dp": 2, "pp": 4, "tp": 3}, "pp")] == [0, 3, 6, 9]


def test_a_trace_of_all_ranks_has_a_host_and_a_device_for_each(tmp_path: Path):
    found = time_pipeline(partial(scheduled, ScheduleGPipe), {"pp": 2}, H100)
    found.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert [names[pid][:13] for pid in sorted(names)] == [
        "rank 0: NVIDI",
        "rank 0: host ",
        "rank 1: NVIDI",
        "rank 1: host ",
    ]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    assert len(kernels) == sum(len(report.timings) for report in found.reports.values())
    starts, ends = ([event["id"] for event in events if event["ph"] == kind] for kind in "sf")
    assert len(set(starts)) == len(starts) == len(ends)


def test_one_rank_alone_is_timed_as_by_its_own_report():
    """Also its clock, which the power limit lowers, and its energy."""

    def program(mesh: DeviceMesh) -> Step:
        x, y = (torch.empty(8192, 8192, dtype=torch.bfloat16, device="meta") for _ in range(2))

        def step() -> None:
            for _ in range(4):
                x @ y
            dist.all_reduce(x)

        return step

    together = time_pipeline(program, {"pp": 1, "dp": 8}, H100).reports[0]
    with world(8, {"pp": 1, "dp": 8}) as mesh:
        step = program(mesh)
        with FlopMeter(H100) as meter:
            step()
    alone = meter.report()
    assert together.clock.ratio < 1
    assert together.clock.ratio == pytest.approx(alone.clock.ratio, rel=0.005)
    assert together.seconds == pytest.approx(alone.seconds, rel=0.005)
    assert together.joules == pytest.approx(alone.joules, rel=0.01)


def test_a_collective_is_hidden_where_the_computing_stream_is_busy():
    parts = list(_exposed_and_hidden(1.0, 10.0, [(0.0, 2.0), (4.0, 6.0), (6.0, 7.0), (20.0, 30.0)]))
    hidden = [(bar.start, bar.end) for bar in parts if bar.kind == "communication, hidden"]
    exposed = [(bar.start, bar.end) for bar in parts if bar.kind == "communication, exposed"]
    assert hidden == [(1.0, 2.0), (4.0, 6.0), (6.0, 7.0)]
    assert exposed == [(2.0, 4.0), (7.0, 10.0)]


def test_the_chart_of_a_pipeline_has_a_track_for_each_stream_and_bars_as_long_as_the_kernels():
    found = ideal(ScheduleGPipe, 2, 4)
    for row in found.rows:
        computing, *others = lanes_of("rank", found.reports[row.rank])
        assert sum(bar.end - bar.start for bar in computing.bars) == pytest.approx(row.computing_seconds)
        streams = {timing.stream for timing in found.reports[row.rank].timings}
        assert len(others) == len(streams) - 1
        sent = sum(timing.seconds for timing in found.reports[row.rank].timings if timing.is_collective)
        assert sum(bar.end - bar.start for track in others for bar in track.bars) == pytest.approx(sent)


def test_the_page_of_a_pipeline_shows_every_rank_and_fetches_nothing():
    text = ideal(ScheduleGPipe, 2, 4).render("html")
    assert ">rank 0</text>" in text
    assert ">rank 1</text>" in text
    assert text.count("<tbody>") == 1
    assert not re.search(r"""(src|href)=["'](?!#|data:,)""", text)
    with pytest.raises(ValueError, match="unknown format"):
        ideal(ScheduleGPipe, 2, 4).render("pdf")


def test_the_name_of_a_lane_has_room_left_of_the_chart_on_a_phone_too():
    """There text is 15 pixels high (page.css), and a letter about .58 of that wide."""
    assert len("communication 10") * 15 * 0.58 <= _LEFT - 8


def test_a_stage_that_gathers_what_it_received_waits_for_the_message_and_not_for_the_gather():
    """The second stage does nothing until the first one has made its product, which takes nearly all of the step."""

    def program(mesh):
        rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
        peer = dist.get_process_group_ranks(group)[1 - rank]
        x = torch.empty(8192, 8192, device="meta")

        def step() -> None:
            if rank == 0:
                dist.send(x @ x, peer)
                return
            dist.recv(x, peer)
            torch.ops._c10d_functional.wait_tensor(all_gather_tensor(x[:64], 0, mesh["tp"])) @ x

        return step

    pipeline = time_pipeline(program, {"pp": 2, "tp": 2}, "h100-sxm5-80gb")
    first, second = pipeline.rows
    assert second.bubble_seconds > 0.9 * first.computing_seconds
    assert second.exposed_seconds < 0.1 * first.computing_seconds
