"""The host's clocks as a script reads them: predicted time, so that what it prints of its own speed is the device's.

Only the script's own lines get it, and torch.utils.benchmark, which takes times for them. Packages that wait, log or
draw progress bars keep the true clocks.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from flopmeter.report import Report
from flopmeter.run.own_code import is_own
from flopmeter.run.patches import Patch

_CLOCKS = ("time", "monotonic", "perf_counter")
_TIMERS = {"torch.utils.benchmark.utils.timer"}


class ClockedRun(Protocol):
    """The run, as its clock sees it. A moment is the number of ops that ran before it."""

    takes_times: bool  # the program times itself, and will print what it finds

    def now(self) -> int: ...

    def is_on_device(self, ops: range) -> bool: ...

    def report_of(self, ops: range) -> Report: ...

    def host_waits_at(self, moment: int) -> bool:
        """Whether the host waited for the device after the last op."""


class HostClock:
    """How far the host is since the script first read a clock.

    The host sends ops and goes on; where it waits for the device (`torch.cuda.synchronize`, `.item()`) it is as far as
    the device. Between two readings without an op on the device it worked alone: that takes what it takes here.
    """

    def __init__(self, run: ClockedRun) -> None:
        self._run = run
        self._is_own = functools.cache(is_own)
        self._moment: int | None = None  # of the last reading
        self._read_seconds = 0.0  # what the true clock said then
        self._host_seconds = self._device_seconds = 0.0  # when the host was there, and when the device is done

    def patches(self) -> Iterator[Patch]:
        why = "a script sees how long the device takes"
        for name in _CLOCKS:
            clock, nanoseconds = getattr(time, name), getattr(time, f"{name}_ns")
            predicted = self._predicted(clock, lambda seconds: seconds)
            yield Patch(time, name, predicted, why)
            yield Patch(time, f"{name}_ns", self._predicted(nanoseconds, lambda seconds: round(seconds * 1e9)), why)
            if clock is timeit.default_timer:
                yield Patch(timeit, "default_timer", predicted, "torch.utils.benchmark takes it")

    def _predicted(self, clock: Callable[[], Any], in_its_unit: Callable[[float], Any]) -> Callable[[], Any]:
        start = clock()

        @functools.wraps(clock)
        def read() -> Any:
            caller = sys._getframe(1)
            module, file = caller.f_globals.get("__name__", ""), caller.f_code.co_filename
            is_asked = module in _TIMERS or self._is_own(module, file)
            if is_asked and threading.current_thread() is threading.main_thread():
                return start + in_its_unit(self._seconds())
            return clock()

        return read

    def _seconds(self) -> float:
        """Predicted seconds of the host from the first reading to now."""
        self._run.takes_times = True
        before, moment = self._moment, self._run.now()
        if before is not None and self._run.is_on_device(range(before, moment)):
            self._go_on(self._run.report_of(range(before, moment)))
        elif before is not None:
            self._host_seconds += _TRUE() - self._read_seconds
        if self._run.host_waits_at(moment):
            self._host_seconds = max(self._host_seconds, self._device_seconds)
        self._moment, self._read_seconds = moment, _TRUE()
        return self._host_seconds

    def _go_on(self, report: Report) -> None:
        begun, is_done = self._host_seconds, bool(report.kernels) and report.kernels[-1].cost.blocks_host
        self._device_seconds = max(begun + report.seconds, self._device_seconds + report.kernel_seconds)
        sent = report.timings[-1].enqueued_seconds if report.timings else 0.0
        self._host_seconds = self._device_seconds if is_done else begun + max(sent, report.host_seconds)


_TRUE = time.perf_counter
