"""One turn of a loop: the host is ahead of the device, as far as the turns before let it come."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from flopmeter import FlopMeter, load_hardware
from flopmeter.distributed import world
from flopmeter.run.script import Script, run
from flopmeter.run.session import ScriptSession, Wishes

H100 = dataclasses.replace(load_hardware("h100-sxm5-80gb"), l2_cache_mb=None)  # else later turns find more in it
SMALL, LARGE = torch.empty(64, device="meta"), torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16)


def host_first():
    """The device waits at first and has more to do in all."""
    for _ in range(40):
        SMALL.sin()
    for _ in range(4):
        LARGE @ LARGE


def device_first():
    for _ in range(2):
        LARGE @ LARGE
    for _ in range(40):
        SMALL.sin()


def host_bound():
    for _ in range(80):
        SMALL.sin()
    LARGE @ LARGE


def reads_a_value():
    host_first()
    SMALL.sum().item()
    for _ in range(3):
        LARGE @ LARGE


def ends_with_a_value():
    """The next turn begins with an idle device."""
    host_first()
    SMALL.sum().item()


@pytest.mark.parametrize("turn", [host_first, device_first, host_bound, reads_a_value, ends_with_a_value])
def test_a_turn_takes_what_one_more_turn_adds_to_a_long_loop(turn):
    with FlopMeter(H100, clocks="burst", unknown="stand-in") as meter:
        for _ in range(12):
            turn()
    count = len(meter.trace.ops) // 12
    long, longer = (meter.report(ops=range(turns * count)).seconds for turns in (11, 12))
    assert meter.report(ops=range(count), repeats=True).seconds == pytest.approx(longer - long, rel=1e-6)


def sums_beside(products: int):
    """A sum over ranks runs beside the products, and the next turn begins when it is done."""
    handle = dist.all_reduce(LARGE, async_op=True)
    for _ in range(40):
        SMALL.sin()
    for _ in range(products):
        LARGE @ LARGE
    handle.wait()
    LARGE.sin()


@pytest.mark.parametrize("products", [1, 8])  # the host is the slower one, or the device is
def test_a_turn_of_a_rank_takes_what_one_more_turn_adds_to_a_long_loop(products):
    with world(8), FlopMeter(H100, clocks="burst") as meter:
        for _ in range(12):
            sums_beside(products)
    count = len(meter.trace.ops) // 12
    once, long, longer = (meter.report(ops=range(turns * count)).seconds for turns in (1, 11, 12))
    turn = meter.report(ops=range(count), repeats=True).seconds
    assert turn == pytest.approx(longer - long, rel=1e-6)
    assert turn < 0.97 * once


def test_a_turn_of_a_loop_in_which_nobody_waits_takes_the_longer_of_host_and_device():
    with FlopMeter(H100, clocks="burst") as meter:
        host_first()
    alone, turn = meter.report(), meter.report(repeats=True)
    assert turn.seconds == pytest.approx(max(alone.kernel_seconds, alone.launch_seconds))
    assert turn.idle_seconds == pytest.approx(0, abs=1e-9)
    assert alone.seconds > 1.1 * turn.seconds


SCRIPT = """
import sys, torch
layer = torch.nn.Linear(4096, 4096, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD(layer.parameters())
x = torch.empty(4096, 4096, device="cuda", dtype=torch.bfloat16)
for _ in range(3):
    for _ in range(40):
        x[0].sin()
    layer(x).sum().backward()
    optimizer.step()
    WAIT
"""
WAITS = ("torch.cuda.synchronize()", "torch.accelerator.synchronize()", "torch.cuda.current_stream().synchronize()")


def step_of(tmp_path: Path, wait: str):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("WAIT", wait))
    session = ScriptSession("h100-sxm5-80gb", Wishes(steps=3))
    with session.open():
        run(Script(str(script), ()), session)
        return session.report("train.py").step


@pytest.mark.parametrize("wait", WAITS)
def test_a_script_that_waits_for_the_device_in_each_step_pays_for_it(tmp_path, wait):
    ahead, waiting = step_of(tmp_path, "pass"), step_of(tmp_path, wait)
    assert waiting.seconds > ahead.seconds + 100e-6
    assert waiting.kernel_seconds == pytest.approx(ahead.kernel_seconds)


def test_the_timeline_of_a_turn_begins_at_zero_with_the_host(tmp_path):
    with FlopMeter(H100, clocks="burst") as meter:
        host_first()
    path = tmp_path / "trace.json"
    meter.report(repeats=True).save_trace(path)
    starts = [event["ts"] for event in json.loads(path.read_text())["traceEvents"] if "ts" in event]
    assert min(starts) == 0
