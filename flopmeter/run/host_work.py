"""What a program computes itself between its ops: environments that it plays, texts that it tokenizes, figures of
NumPy. A prediction leaves that out, as it does the loading of data.

While the program runs, its thread is looked at every few milliseconds. Where no frame of torch or of flopmeter is above
the program's own code, the program works itself, and what the thread has computed since the last look counts. Looks
are few: the figure may be a quarter off.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from flopmeter.report.quantities import duration
from flopmeter.run.own_code import is_own

INTERVAL_S = 0.005
LEAST_LOOKS = 10  # in all steps, so that chance decides little
LEAST_SHARE = 0.25  # of a step's predicted time
_OTHERS = ("torch", "flopmeter")


class OwnWork(NamedTuple):
    """What the program computes itself in a step, on this machine."""

    seconds: float
    where: str  # 'file:line', where it was found most

    def told(self) -> str:
        about = duration(float(f"{self.seconds:.2g}"))
        return (
            f"the program itself computes for some {about} in each step on this machine, most of it at {self.where}: "
            "left out of the prediction, and the device would wait for it"
        )


class HostWork:
    """Looks at the thread that opens `watched()`. `now`: the number of ops so far."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now, self._is_own = now, functools.cache(is_own)
        self._found: list[tuple[int, float, str]] = []  # ops until then, computed since the last look, and the line

    @contextmanager
    def watched(self) -> Iterator[None]:
        if not hasattr(time, "pthread_getcpuclockid"):  # neither Windows nor macOS tells of another thread's time
            yield
            return
        ended, switch_interval = threading.Event(), sys.getswitchinterval()
        sys.setswitchinterval(INTERVAL_S / 50)  # else a look waits until the thread gives way by itself, as NumPy does
        arguments = threading.get_ident(), ended
        threading.Thread(target=self._watch, args=arguments, name="flopmeter", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            sys.setswitchinterval(switch_interval)

    def of(self, steps: Sequence[range], step_seconds: float) -> OwnWork | None:
        """An average over these steps; None where it is little beside the step's time."""
        moments = [op for op, *_ in self._found]
        parts = (slice(bisect_left(moments, step.start), bisect_left(moments, step.stop)) for step in steps)
        found = [look for part in parts for look in self._found[part]]
        own_seconds = sum(seconds for _, seconds, _ in found) / max(len(steps), 1)
        if len(found) < LEAST_LOOKS or own_seconds < LEAST_SHARE * step_seconds:
            return None
        ((where, _),) = Counter(where for *_, where in found).most_common(1)
        return OwnWork(own_seconds, where)

    def _watch(self, thread: int, ended: threading.Event) -> None:
        clock = time.pthread_getcpuclockid(thread)
        last = time.clock_gettime(clock)
        while not ended.wait(INTERVAL_S):
            computed = time.clock_gettime(clock)
            line = self._own_line(sys._current_frames().get(thread))
            if line is not None:
                self._found.append((self._now(), computed - last, line))
            last = computed

    def _own_line(self, frame: FrameType | None) -> str | None:
        """The program's line that works; None while torch or flopmeter do. What runs the script lies below it."""
        line = None
        while frame is not None and frame.f_code.co_filename not in ("<frozen runpy>", runpy.__file__):
            module, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
            if module.partition(".")[0] in _OTHERS:
                return None
            if line is None and self._is_own(module, file):
                line = f"{os.path.basename(file)}:{frame.f_lineno}"
            frame = frame.f_back
        return line
