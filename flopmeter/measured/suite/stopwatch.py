"""How long a case takes: samples on the wall clock of a CPU, and on the events of a GPU.

A GPU's kernels are recorded in a CUDA graph, so that no launch by the host is in the time, and replayed in samples of a
few milliseconds. Burst: the device rests between samples, nine times as long as it worked, and keeps its boost clock.
Sustained: it works for seconds before and during the samples, so that its clock has fallen as far as it will.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flopmeter.measured.calibration import CLOCKS, Clock, DeviceType
from flopmeter.measured.suite.cases import CaseRun
from flopmeter.measured.suite.nvml import Gpu
from flopmeter.records import Clocks

WARM_UPS = 2  # calls of each copy: libraries choose and load their kernels
LEAST_SECONDS = 1e-9  # of a call, if the clock did not move
SAMPLE_SECONDS = 4e-3  # of one sample's work, where a call is not longer
MOST_CALLS = 2000  # of a kernel in one sample
LEAST_SAMPLES, MOST_SAMPLES = 5, 200
REST = 9  # times a sample's length, before the next one
MOST_REST_SECONDS = 1.0
HEAT_SECONDS = 2.0  # of work before the first sample at sustained clocks
SHOWN_KERNELS = 20  # of a call, by their time


class Effort(NamedTuple):
    """How long to measure, in seconds of the samples of one case."""

    burst_seconds: float = 0.06  # of work; ten times as long with the rests
    sustained_seconds: float = 2.0
    heat_seconds: float = HEAT_SECONDS


class Reading(NamedTuple):
    """The reading of one call: seconds, and how they were taken."""

    seconds: float  # the median of the samples
    seconds_min: float
    seconds_max: float
    samples: int
    calls: int  # in a sample
    method: str
    watts: float | None = None  # of the board, on average over the samples
    sm_clock_mhz: int | None = None  # in the midst of them


class ProfiledKernel(NamedTuple):
    """A kernel of one call (on a CPU: an op, without those that it calls), as torch.profiler saw it."""

    name: str
    calls: int
    seconds: float


def profiled(run: CaseRun, device: DeviceType) -> tuple[float, list[ProfiledKernel]]:
    """One call under torch.profiler: the seconds of all of its kernels, and the longest of them."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it reports each profile on stderr
    kind = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[kind], acc_events=True) as profiler:
        run()
        _wait(device)
    found = [
        ProfiledKernel(event.key, event.count, 1e-6 * _own_microseconds(event, device))
        for event in profiler.key_averages()
    ]
    found = sorted((kernel for kernel in found if kernel.seconds), key=lambda kernel: -kernel.seconds)
    return sum(kernel.seconds for kernel in found), found[:SHOWN_KERNELS]


def _own_microseconds(event: Any, device: DeviceType) -> float:
    if device == "cpu":
        return float(event.self_cpu_time_total)
    return float(event.self_device_time_total) if event.device_type.name == "CUDA" else 0.0


class CpuWatch:
    """The CPU's own clock: wall, or the CPU time of one thread, which other programs do not lengthen."""

    def __init__(self, effort: Effort, clock: Clock) -> None:
        self._effort, self._now = effort, CLOCKS[clock]
        self._method = {"wall": "wall clock", "cpu": "CPU time of the thread"}[clock]

    def kernel(self, runs: Sequence[CaseRun], clocks: Clocks) -> Reading:
        return self._read(lambda: [run() for run in runs], len(runs), 10 * self._effort.burst_seconds)

    def program(self, run: CaseRun) -> Reading:
        return self._read(run, 1, self._effort.sustained_seconds)

    def _read(self, around: Callable[[], object], copies: int, seconds: float) -> Reading:
        for _ in range(WARM_UPS):
            around()
        once = max(self._timed(around, 1), LEAST_SECONDS)
        rounds = max(1, min(math.ceil(SAMPLE_SECONDS / once), MOST_CALLS // copies))
        calls = rounds * copies
        samples: list[float] = []
        end = time.perf_counter() + seconds
        while len(samples) < LEAST_SAMPLES or (time.perf_counter() < end and len(samples) < MOST_SAMPLES):
            samples.append(self._timed(around, rounds) / calls)
        return reading_of(samples, calls, self._method)

    def _timed(self, around: Callable[[], object], rounds: int) -> float:
        start = self._now()
        for _ in range(rounds):
            around()
        return self._now() - start


class CudaWatch:
    """CUDA's events around replays of a graph; for programs the host's clock, from an idle device to an idle one."""

    def __init__(self, effort: Effort, gpu: Gpu | None) -> None:
        self._effort, self._gpu = effort, gpu

    def kernel(self, runs: Sequence[CaseRun], clocks: Clocks) -> Reading:
        """`runs`: copies of the kernel, called in turn."""
        replay, calls, method = self._replay(runs)
        if clocks == "burst":
            samples = self._rested(replay)
            return reading_of([sample / calls for sample in samples], calls, method)
        samples, watts, clock = self._heated(lambda: _between_events(replay))
        return reading_of([sample / calls for sample in samples], calls, method, watts, clock)

    def program(self, run: CaseRun) -> Reading:
        for _ in range(WARM_UPS):
            run()
        samples, watts, clock = self._heated(lambda: _on_the_host(run))
        return reading_of(samples, 1, "host's clock, device idle before and after", watts, clock)

    def _replay(self, runs: Sequence[CaseRun]) -> tuple[CaseRun, int, str]:
        """A function that runs the kernels, the number of calls that it makes, and how it makes them."""
        around = _in_turn(runs, 1)
        _on_a_side_stream(around)
        once = min(_between_events(around) for _ in range(3))
        rounds = max(1, min(math.ceil(SAMPLE_SECONDS / once), MOST_CALLS // len(runs)))
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                _in_turn(runs, rounds)()
        except RuntimeError as error:  # an op that waits for the device cannot be recorded
            torch.cuda.synchronize()
            reason = " ".join(str(error).split())[:80]
            return _in_turn(runs, rounds), rounds * len(runs), f"events, launches included, for no graph: {reason}"
        short = _between_events(graph.replay)  # without the host's time, a sample may hold more of them
        again = max(1, min(math.ceil(SAMPLE_SECONDS / short), MOST_CALLS // (rounds * len(runs))))
        return _in_turn([graph.replay], again), again * rounds * len(runs), "events around replays of a CUDA graph"

    def _rested(self, replay: CaseRun) -> list[float]:
        samples: list[float] = []
        worked = 0.0
        while len(samples) < LEAST_SAMPLES or (worked < self._effort.burst_seconds and len(samples) < MOST_SAMPLES):
            samples.append(_between_events(replay))
            worked += samples[-1]
            time.sleep(min(REST * samples[-1], MOST_REST_SECONDS))
        return samples

    def _heated(self, sample: Callable[[], float]) -> tuple[list[float], float | None, int | None]:
        _repeat(sample, self._effort.heat_seconds)
        before = self._gpu.energy() if self._gpu else None
        samples = _repeat(sample, self._effort.sustained_seconds / 2)
        clock = self._gpu.sm_clock_mhz() if self._gpu else None
        samples += _repeat(sample, self._effort.sustained_seconds / 2)
        after = self._gpu.energy() if self._gpu else None
        return samples, after.watts_since(before) if before and after else None, clock


def reading_of(
    samples: Sequence[float], calls: int, method: str, watts: float | None = None, sm_clock_mhz: int | None = None
) -> Reading:
    return Reading(
        statistics.median(samples), min(samples), max(samples), len(samples), calls, method, watts, sm_clock_mhz
    )


def _repeat(sample: Callable[[], float], seconds: float) -> list[float]:
    samples: list[float] = []
    end = time.perf_counter() + seconds
    while not samples or time.perf_counter() < end:
        samples.append(sample())
    return samples


def _in_turn(runs: Sequence[CaseRun], rounds: int) -> CaseRun:
    def around() -> None:
        for _ in range(rounds):
            for run in runs:
                run()

    return around


def _on_a_side_stream(around: CaseRun) -> None:
    """The warm-up that graphs ask for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            around()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()


def _between_events(work: CaseRun) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def _on_the_host(work: CaseRun) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def _wait(device: DeviceType) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
