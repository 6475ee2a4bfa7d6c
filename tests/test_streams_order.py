"""What a stream waits for is what an event stood for when it was recorded."""

from __future__ import annotations

import pytest
import torch

from flopmeter import FlopMeter
from flopmeter.costs import kernels_of
from flopmeter.launch.stream_assignment import assign_streams
from flopmeter.report.advice.rewrite import with_ops
from flopmeter.trace.streams import MetaEvent, MetaStream, stream

SIZES = {"first": 4096, "second": 4095, "aside": 4094}


def timings(program):
    """By the rows of the product that it is."""
    with FlopMeter("h100-sxm5-80gb") as meter:
        program({name: torch.empty(size, 4096, device="meta") for name, size in SIZES.items()})
    report = meter.report()
    rows = {
        kernel.cost.work.matmuls[0].m: timing for kernel, timing in zip(report.kernels, report.timings, strict=True)
    }
    return {name: rows[size] for name, size in SIZES.items()}


def test_an_event_stands_for_what_its_stream_was_given_before_it_and_for_nothing_after_it():
    weight = torch.empty(4096, 4096, device="meta")

    def program(inputs):
        side, event = MetaStream(), MetaEvent()
        inputs["first"] @ weight
        event.record()
        inputs["second"] @ weight
        side.wait_event(event)
        with stream(side):
            inputs["aside"] @ weight

    timed = timings(program)
    assert timed["aside"].start_seconds >= timed["first"].end_seconds
    assert timed["aside"].start_seconds < timed["second"].end_seconds


def test_without_an_event_a_stream_waits_for_nobody():
    weight = torch.empty(4096, 4096, device="meta")

    def program(inputs):
        inputs["first"] @ weight
        inputs["second"] @ weight
        with stream(MetaStream()):
            inputs["aside"] @ weight

    timed = timings(program)
    assert timed["aside"].start_seconds < timed["first"].end_seconds


def test_where_advice_leaves_an_op_out_the_others_keep_their_streams_and_their_waits():
    x, side = torch.empty(1024, device="meta"), MetaStream()
    with FlopMeter("h100-sxm5-80gb") as meter:
        x.sin()
        with stream(side):
            x.relu()
        side.record_event().wait()
        x.exp()

    def placed(trace):
        kernels = kernels_of(trace)
        names = [kernel.cost.name for kernel in kernels]
        placements = assign_streams(kernels, trace)
        waits = [[names[before] for before in place.after] for place in placements]
        return dict(zip(names, zip((each.stream for each in placements), waits, strict=True), strict=True))

    expected = {"relu": (side.number, []), "exp": (0, ["relu"])}
    assert placed(meter.trace) == {"sin": (0, []), **expected}
    assert placed(with_ops(meter.trace, [0])) == expected


def step(x, weight):
    for _ in range(8):
        x = torch.tanh(x @ weight)
    return x


def on_side(program, before=lambda: None):
    """The report of a program on a stream of its own, which waits for what ran before on the default one."""
    with FlopMeter("h100-sxm5-80gb") as meter, torch.no_grad():
        before()
        side, event = MetaStream(), MetaEvent()
        event.record()
        side.wait_event(event)
        with stream(side):
            program()
    return meter.report()


def test_a_program_on_a_stream_of_its_own_is_told_the_same_as_on_the_default_one():
    """As PyTorch's pages on CUDA graphs warm a program up."""
    x, weight = torch.empty(8192, 4096, device="meta"), torch.empty(4096, 4096, device="meta")
    with FlopMeter("h100-sxm5-80gb") as meter, torch.no_grad():
        step(x, weight)
    plain, aside = meter.report(), on_side(lambda: step(x, weight))
    assert aside.seconds == pytest.approx(plain.seconds)
    assert aside.seconds_by_regime == pytest.approx(plain.seconds_by_regime)
    regions = [report.speed_up().regions for report in (plain, aside)]
    assert [each.eager.seconds for each in regions[1]] == pytest.approx(
        [each.eager.seconds for each in regions[0]], rel=0.01
    )
    told = [[each.remedy.partition(":")[0] for each in report.advice] for report in (plain, aside)]
    assert told[0] == told[1]
    assert plain.advice


def test_the_device_is_idle_on_no_stream_while_one_of_them_computes():
    """One after the other on two streams; each regime's share is that of both, and all sum up to the wall-clock."""
    x, weight = torch.empty(8192, 4096, device="meta"), torch.empty(4096, 4096, device="meta")
    both = on_side(lambda: step(x, weight), before=lambda: step(x, weight))
    alone = on_side(lambda: step(x, weight))
    assert both.seconds == pytest.approx(2 * alone.seconds, rel=0.02)
    assert both.idle_seconds < 0.02 * both.seconds
    assert sum(both.seconds_by_regime.values()) == pytest.approx(both.seconds)
    assert both.seconds_by_regime["compute"] == pytest.approx(2 * alone.seconds_by_regime["compute"], rel=0.02)


def test_what_runs_beside_the_computing_stream_adds_nothing_to_the_wall_clock():
    x, weight = torch.empty(8192, 4096, device="meta"), torch.empty(4096, 4096, device="meta")
    with FlopMeter("h100-sxm5-80gb") as meter, torch.no_grad():
        with stream(MetaStream()):
            x[:64] @ weight
        step(x, weight)
    report = meter.report()
    assert sum(report.seconds_by_regime.values()) == pytest.approx(report.seconds, rel=0.02)
