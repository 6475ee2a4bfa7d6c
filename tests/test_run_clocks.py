"""What a script reads from the host's clocks is predicted time; what packages read is the true time."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch
import torch.utils.benchmark

import flopmeter

SIDE = 4096
CLOCKS: dict[str, Callable[[], float]] = {
    "time": lambda: time.time(),
    "perf_counter": lambda: time.perf_counter(),
    "monotonic": lambda: time.monotonic(),
    "time_ns": lambda: time.time_ns() * 1e-9,
    "perf_counter_ns": lambda: time.perf_counter_ns() * 1e-9,
    "monotonic_ns": lambda: time.monotonic_ns() * 1e-9,
}


def matrices() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty(SIDE, SIDE, device="cuda"), torch.empty(SIDE, SIDE, device="cuda")


@pytest.mark.parametrize("clock", CLOCKS.values(), ids=CLOCKS)
def test_a_script_that_waits_for_the_device_reads_the_time_that_events_tell(clock):
    with flopmeter.cuda("a100-sxm4-80gb"):
        x, y = matrices()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begun = clock()
        start.record()
        for _ in range(20):
            x @ y
        end.record()
        torch.cuda.synchronize()
        took = clock() - begun
        assert took == pytest.approx(start.elapsed_time(end) * 1e-3, abs=1e-6)  # which a clock since 1970 resolves
    assert took > 20 * 2 * SIDE**3 / 19.5e12  # not faster than the datasheet's fp32


def test_a_script_that_does_not_wait_reads_when_all_was_sent():
    with flopmeter.cuda("a100-sxm4-80gb"):
        x, y = matrices()
        begun = time.perf_counter()
        for _ in range(20):
            x @ y
        sent = time.perf_counter() - begun
        torch.cuda.synchronize()
        done = time.perf_counter() - begun
    assert sent < 1e-3  # of 20 ops
    assert done > 20 * 2 * SIDE**3 / 19.5e12


def test_a_value_that_is_read_waits_for_the_device():
    with flopmeter.cuda("a100-sxm4-80gb"):
        x, y = matrices()
        begun = time.perf_counter()
        (x @ y).sum().item()
        took = time.perf_counter() - begun
    assert took > 2 * SIDE**3 / 19.5e12


def test_the_host_alone_takes_the_time_that_it_takes_here():
    with flopmeter.cuda("a100-sxm4-80gb"):
        begun = time.perf_counter()
        time.sleep(0.05)
        assert 0.05 <= time.perf_counter() - begun < 5


def test_packages_and_threads_read_the_true_time():
    read = time.time
    with flopmeter.cuda("p100-pcie-16gb"):
        x, y = matrices()
        time.time()
        for _ in range(100):
            x @ y  # 15 ms each
        torch.cuda.synchronize()
        assert time.time() - read() > 0.5  # ahead of this machine
        assert abs(logging.makeLogRecord({}).created - read()) < 0.5
        of_thread: list[float] = []
        thread = threading.Thread(target=lambda: of_thread.append(time.time()))
        thread.start()
        thread.join()
        assert abs(of_thread[0] - read()) < 0.5
    assert time.time is read


def test_a_reading_looks_at_what_ran_since_the_one_before_it_and_not_at_the_whole_program(monkeypatch):
    """A search in a tree reads the clock at each call of its net: thousands of times."""
    looks: list[int] = []
    monkeypatch.setattr(flopmeter.meter, "note_copies_of_weights", lambda part, whole: looks.append(len(whole.ops)))
    with flopmeter.cuda("a100-sxm4-80gb") as device:
        net = (
            torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).cuda().eval()
        )  # statistics: no role
        x = torch.randn(8, 64, device="cuda")
        for _ in range(20):
            begun = time.time()
            net(x).cpu()
            assert time.time() > begun
        assert not looks
    device.report()
    assert looks  # of the step alone


def test_torchs_timer_measures_the_device(monkeypatch):
    """Imported anew, as by a script: torch 2.11 looks for a device when it is imported, and later ones at each call."""
    for name in [name for name in sys.modules if name.startswith("torch.utils.benchmark")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(torch.utils, "benchmark", torch.utils.benchmark)  # the import puts another one there
    with flopmeter.cuda("a100-sxm4-80gb"):
        benchmark = importlib.import_module("torch.utils.benchmark")
        x, y = matrices()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        x @ y
        end.record()
        measured = benchmark.Timer("x @ y", globals={"x": x, "y": y}).timeit(10).mean
        assert measured == pytest.approx(start.elapsed_time(end) * 1e-3, rel=0.05)
