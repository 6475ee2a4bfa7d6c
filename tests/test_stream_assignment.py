"""Compute and communication side by side: what runs at once and what waits is what the program says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.fsdp import fully_shard

from flopmeter import FlopMeter
from flopmeter.ask.what_if import what_if
from flopmeter.device.cluster import cluster_of, load_cluster, price_collective
from flopmeter.device.hardware import HardwareError, load_hardware
from flopmeter.distributed import world
from flopmeter.models.gpt2 import GPT2, GPT2_124M
from flopmeter.records import Collective, Kernel, Timing
from flopmeter.report.report import Report
from flopmeter.trace.streams import MetaEvent, MetaStream, stream

pytestmark = pytest.mark.filterwarnings("ignore")
HARDWARE = "h100-sxm5-80gb"
RANKS = tuple(range(8))
WIDE = 8192  # [8192, 8192] fp32: 268 MB; a product takes tens of milliseconds, its all-reduce about one


def square() -> torch.Tensor:
    return torch.empty(WIDE, WIDE, device="meta")


def report_of(program) -> Report:
    """Of the program, run as rank 0 of 8."""
    with world(8) as mesh, FlopMeter(HARDWARE) as meter:
        program(mesh)
    return meter.report()


def timed(report: Report, name: str) -> list[Timing]:
    """The timings of the kernels of that op, in order."""
    pairs: list[tuple[Kernel, Timing]] = list(zip(report.kernels, report.timings, strict=True))
    return [timing for kernel, timing in pairs if kernel.cost.name == name]


ALL_REDUCE = Collective("all_reduce", WIDE * WIDE * 4, RANKS)
ALL_REDUCE_SECONDS = price_collective(ALL_REDUCE, cluster_of(load_hardware(HARDWARE))).seconds


def test_a_collective_takes_what_the_cluster_says_and_is_bound_by_communication():
    report = report_of(lambda mesh: dist.all_reduce(square()))
    (row,) = report.rows()
    assert row.name == "communication"
    assert row.regime == report.regime == "communication"
    assert row.seconds == pytest.approx(ALL_REDUCE_SECONDS)
    assert report.exposed_seconds == pytest.approx(ALL_REDUCE_SECONDS)
    assert report.cluster == cluster_of(load_hardware(HARDWARE))


def test_what_is_waited_for_at_once_is_exposed_and_what_compute_hides_is_not():
    def waits_at_once(mesh):
        x, y = square(), square()
        dist.all_reduce(x, async_op=True).wait()
        y @ y

    def waits_after_a_product(mesh):
        x, y = square(), square()
        work = dist.all_reduce(x, async_op=True)
        y @ y
        work.wait()
        x.add_(1)

    exposed, hidden = report_of(waits_at_once), report_of(waits_after_a_product)
    assert exposed.exposed_seconds == pytest.approx(ALL_REDUCE_SECONDS, rel=0.05)  # less the launch of the product
    assert hidden.exposed_seconds == 0
    (collective,), (product,) = timed(hidden, "c10d::allreduce_"), timed(hidden, "mm")
    assert collective.start_seconds < product.start_seconds < collective.end_seconds
    (collective,), (product,) = timed(exposed, "c10d::allreduce_"), timed(exposed, "mm")
    assert product.start_seconds == pytest.approx(collective.end_seconds)


def test_a_synchronous_collective_runs_in_the_order_of_the_program():
    def program(mesh):
        x, y = square(), square()
        dist.all_reduce(x)
        y @ y

    report = report_of(program)
    (collective,), (product,) = timed(report, "c10d::allreduce_"), timed(report, "mm")
    assert product.start_seconds >= collective.end_seconds
    assert report.exposed_seconds == pytest.approx(ALL_REDUCE_SECONDS, rel=0.01)


def test_a_collective_waits_for_what_the_program_gave_the_device_before_it():
    def program(mesh):
        y = square() @ square()
        dist.all_reduce(y, async_op=True)

    report = report_of(program)
    (collective,), (product,) = timed(report, "c10d::allreduce_"), timed(report, "mm")
    assert collective.start_seconds == pytest.approx(product.end_seconds)
    assert report.exposed_seconds == pytest.approx(ALL_REDUCE_SECONDS)  # nobody waits, but the step ends with it
    assert report.seconds == pytest.approx(collective.end_seconds)


def test_compiled_code_waits_for_a_functional_collective_at_once_by_the_rules_and_by_torchs_compiler():
    """torch's compiler itself says the order: nothing runs beside the gather, which the eager program hides."""

    def program(shard, x, group):
        whole = funcol.all_gather_tensor(shard, 0, group)
        return x @ x + whole.sum()

    def run(compiled: bool) -> FlopMeter:
        with world(8) as mesh, FlopMeter(HARDWARE) as meter:
            shard, x = (torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16) for _ in range(2))
            (torch.compile(program) if compiled else program)(shard, x, mesh.get_group())
        return meter

    eager, torchs = run(False), run(True).report()
    rules = eager.report(mode="compiled")
    assert eager.report().exposed_seconds < 0.7 * torchs.communication_seconds
    assert torchs.exposed_seconds == pytest.approx(torchs.communication_seconds, rel=0.01)  # but for one launch
    assert rules.exposed_seconds == pytest.approx(torchs.exposed_seconds, rel=0.01)
    assert rules.seconds == pytest.approx(torchs.seconds, rel=0.03)  # whose addmm copies what it adds


def test_what_runs_eagerly_beside_compiled_code_still_hides_a_functional_collective():
    """Only what torch.compile traces waits for it at once."""

    with world(8) as mesh, FlopMeter(HARDWARE, compile="rules") as meter:
        shard, x = (torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16) for _ in range(2))
        torch.compile(torch.sin)(x)
        whole = funcol.all_gather_tensor(shard, 0, mesh.get_group())
        (x @ x).add_(whole.sum())
    eager, report = meter.report(mode="eager"), meter.report(mode="compiled")
    assert report.exposed_seconds == pytest.approx(eager.exposed_seconds, rel=0.05)
    assert report.exposed_seconds < 0.8 * report.communication_seconds


def test_wait_tensor_waits_for_the_collective_that_made_the_tensor_and_for_no_later_one():
    def program(mesh):
        first = funcol.all_reduce(square(), "sum", mesh.get_group())
        second = funcol.all_reduce(square(), "sum", mesh.get_group())
        first.add(1)  # its first use waits
        second.add(1)

    report = report_of(program)
    one, two = timed(report, "_c10d_functional::all_reduce")
    early, late = timed(report, "add")
    assert two.start_seconds == pytest.approx(one.end_seconds)  # one group: one after the other
    assert early.start_seconds == pytest.approx(one.end_seconds)
    assert late.start_seconds >= two.end_seconds


def test_groups_of_their_own_run_at_once():
    def program(mesh):
        dist.all_reduce(square(), group=groups["dp"].get_group(), async_op=True)
        dist.all_reduce(square(), group=groups["tp"].get_group(), async_op=True)

    with world(8, {"dp": 2, "tp": 4}) as groups, FlopMeter(HARDWARE) as meter:
        program(groups)
    one, two = timed(meter.report(), "c10d::allreduce_")
    assert two.start_seconds < one.end_seconds


def test_streams_and_events_of_the_program_order_its_kernels():
    def program(mesh):
        side, event = MetaStream(), MetaEvent()
        x = square() @ square()
        event.record()
        square() @ square()
        with stream(side):
            side.wait_event(event)
            x.add(1)

    report = report_of(lambda mesh: (program(mesh), dist.barrier()))
    (first, second), (addition,) = timed(report, "mm"), timed(report, "add")
    assert addition.start_seconds == pytest.approx(first.end_seconds)
    assert addition.start_seconds < second.end_seconds


def test_what_a_kernel_of_another_stream_writes_is_not_read_before():
    """DDP's reducer waits in C++, where nobody hears it: its copies out of the buckets tell."""

    def program(mesh):
        x = square()
        dist.all_reduce(x, async_op=True)
        x.add(1)

    report = report_of(program)
    (collective,), (addition,) = timed(report, "c10d::allreduce_"), timed(report, "add")
    assert addition.start_seconds == pytest.approx(collective.end_seconds)


def test_ddp_hides_all_buckets_but_the_last_behind_the_backward_pass():
    with world(8) as mesh:
        layers = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096, device="meta") for _ in range(8)))
        model = torch.nn.parallel.DistributedDataParallel(layers, device_mesh=mesh, bucket_cap_mb=60)
        x = torch.empty(8192, 4096, device="meta")
        model(x).sum().backward()
        with FlopMeter(HARDWARE) as meter:
            model(x).sum().backward()
    report = meter.report()
    buckets = timed(report, "c10d::allreduce_")
    assert len(buckets) >= 7
    assert report.exposed_seconds < 3 * max(bucket.seconds for bucket in buckets)
    assert report.communication_seconds > 2 * report.exposed_seconds


@pytest.fixture(scope="module")
def fsdp_meter() -> FlopMeter:
    """A step of GPT-2 under FSDP2 on 8 GPUs."""
    with world(8) as mesh:
        with torch.device("meta"):
            model, tokens = GPT2(GPT2_124M), torch.empty(8, 1024, dtype=torch.long)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        with FlopMeter(HARDWARE) as meter:
            model.loss(tokens).backward()
    return meter


@pytest.fixture(scope="module")
def fsdp(fsdp_meter) -> Report:
    return fsdp_meter.report()


def test_what_backward_computes_again_runs_on_the_stream_of_the_model(fsdp_meter):
    """Not on that of the first op of all, which copies a block's parameters for their gather."""
    report = fsdp_meter.report(mode="compiled")
    timings = zip(report.kernels, report.timings, strict=True)
    assert {timing.stream for kernel, timing in timings if len(kernel.ops) > 1} == {0}


def test_fsdp_gathers_the_next_block_while_this_one_computes(fsdp):
    """Its own streams and events say so: the third gather runs beside the products of the block before."""
    gathers = timed(fsdp, "c10d::_allgather_base_")
    products = [timing for timing in fsdp.timings if timing.kernel_class.startswith("product")]
    third = gathers[2]
    beside = [p for p in products if p.start_seconds < third.end_seconds and third.start_seconds < p.end_seconds]
    assert beside
    assert {timing.stream for timing in gathers} == {gathers[0].stream}
    assert gathers[0].stream != 0


def test_no_product_starts_before_its_weights_are_gathered(fsdp):
    """The root and the first block are gathered first; nothing but copies and the embedding runs before."""
    first_block = timed(fsdp, "c10d::_allgather_base_")[1]
    products = [
        timing
        for kernel, timing in zip(fsdp.kernels, fsdp.timings, strict=True)
        if kernel.cost.macs and ".blocks.0" in kernel.ops[0].module
    ]
    assert products[0].start_seconds >= first_block.end_seconds


def test_the_shares_of_the_time_add_up_also_where_streams_overlap(fsdp):
    assert set(fsdp.seconds_by_regime) == {"compute", "memory", "communication", "overhead"}
    assert sum(fsdp.seconds_by_regime.values()) == pytest.approx(fsdp.seconds)
    assert all(share >= 0 for share in fsdp.seconds_by_regime.values())
    assert 0 < fsdp.exposed_seconds < fsdp.communication_seconds
    assert fsdp.seconds < fsdp.kernel_seconds + fsdp.idle_seconds


def test_a_stream_that_is_given_little_is_not_said_to_wait_for_the_host(fsdp):
    copies = [timing for timing in fsdp.timings if timing.stream != 0 and not timing.is_collective]
    assert copies
    assert {timing.wait_seconds for timing in copies} == {0}
    assert {timing.regime for timing in copies} == {"memory"}


def test_what_is_hidden_makes_the_prediction_no_less_sure(fsdp):
    """The whole cannot be further off than all of its parts together: bands of 35 % below and 120 % above at most."""
    assert 0.3 * fsdp.seconds < fsdp.seconds_low < fsdp.seconds < fsdp.seconds_high < 2.2 * fsdp.seconds


def test_kernels_of_a_stream_do_not_overlap(fsdp):
    ends: dict[int, float] = {}
    for timing in fsdp.timings:
        assert timing.start_seconds >= ends.get(timing.stream, 0.0) - 1e-12
        ends[timing.stream] = timing.end_seconds


def test_a_program_of_one_gpu_says_nothing_of_communication():
    with FlopMeter(HARDWARE) as meter:
        square() @ square()
    report = meter.report()
    assert report.cluster is None
    assert report.launches.placements is None
    assert "communication" not in report.seconds_by_regime
    assert "communication" not in str(report)


def test_the_report_says_what_is_exposed_and_what_would_help(fsdp):
    text = str(fsdp)
    assert "collectives over NVIDIA DGX H100" in text
    assert "of the wall-clock: compute" in text
    (spot,) = report_of(lambda mesh: dist.all_reduce(square())).hot_spots
    assert spot.why == "nothing computes while it communicates"


def test_a_cluster_can_be_named_and_one_that_is_too_small_is_refused():
    with world(8), FlopMeter(HARDWARE) as meter:
        dist.all_reduce(square())
    assert meter.report(cluster="dgx-b200").seconds < meter.report(cluster="dgx-h100").seconds == meter.report().seconds
    with world(16), FlopMeter(HARDWARE) as meter:
        dist.all_reduce(square())
    small = dataclasses.replace(load_cluster("dgx-h100"), nodes=1)
    with pytest.raises(HardwareError, match=r"has 8 GPUs .* too few for a world of 16"):
        meter.report(cluster=small)


def test_faster_links_help_what_waits_for_them_and_nothing_else():
    waiting = what_if(report_of(lambda mesh: dist.all_reduce(square()))).speedup
    assert waiting["communication"] == pytest.approx(2, rel=0.05)
    assert waiting["compute"] == waiting["memory"] == pytest.approx(1)
    with FlopMeter(HARDWARE) as meter:
        square() @ square()
    assert "communication" not in what_if(meter.report()).speedup
