"""What a program computes itself between its ops: environments that it plays, texts that it tokenizes, figures of
NumPy. A prediction leaves that out, as it does the loading of data.

While the program runs, its thread is looked at every few milliseconds. Where the innermost code is the program's own,
or that of a package which is neither torch nor flopmeter, what the thread has computed since the last look counts.
Looks are few: the figure may be a quarter off.

A look comes late: it waits until the thread gives way, which it does when an op has returned to the program as well as
anywhere else. So what follows an op at once is taken for the op's launch, which the prediction has.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import threading
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from flopmeter.report.quantities import duration
from flopmeter.run.own_code import is_own

INTERVAL_S = 0.002
GIVES_WAY_S = 1e-4  # how long a thread goes on when another waits for it; ops return in a tenth of that
LEAST_SECONDS = 10 * INTERVAL_S  # of ten looks in all steps, so that chance decides little
LEAST_SHARE = 0.25  # of a step's predicted time
_OTHERS = ("torch", "flopmeter")
_OF_ITS_CALLER = "namedtuple_"  # the module in which the standard library writes the code that makes a named tuple
_NOT_IN_A_STEP = (
    "torch._",  # the compiler, which runs what it has made of the program on tensors of its own
    "torch.fx", "torch.export", "torch.jit",
    "torch.utils.data",  # loading.py
)  # fmt: skip


class OwnWork(NamedTuple):
    """What the program computes itself in a step, on this machine."""

    seconds: float
    where: str  # 'file:line' of the program, where it was found most, and what runs there
    share: float  # that was found there

    def told(self) -> str:
        about, most = duration(float(f"{self.seconds:.2g}")), "most" if self.share > 0.5 else "the largest part"
        return (
            f"the program itself computes for some {about} in each step on this machine, {most} of it at {self.where}: "
            "left out of the prediction, and the device would wait for it"
        )


class _OwnLook(NamedTuple):
    ops: int  # until then
    seconds: float  # computed since the last look
    part: str  # the program's file and what runs there
    line: int


class HostWork:
    """Looks at the thread that opens `watched()`. `now`: the number of ops so far."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now, self._is_own = now, functools.cache(is_own)
        self._found: list[_OwnLook] = []
        self._op_ended = 0.0  # on the thread's clock

    def on_op(self) -> None:
        self._op_ended = time.thread_time()

    @contextmanager
    def watched(self) -> Iterator[None]:
        if not hasattr(time, "pthread_getcpuclockid"):  # neither Windows nor macOS tells of another thread's time
            yield
            return
        ended, switch_interval = threading.Event(), sys.getswitchinterval()
        sys.setswitchinterval(GIVES_WAY_S)  # else a look waits until the thread gives way by itself, as NumPy does
        arguments = threading.get_ident(), ended
        threading.Thread(target=self._watch, args=arguments, name="flopmeter", daemon=True).start()
        try:
            yield
        finally:
            ended.set()
            sys.setswitchinterval(switch_interval)

    def of(self, steps: Sequence[range], step_seconds: float) -> OwnWork | None:
        """An average over these steps; None where it is little beside the step's time."""
        moments = [look.ops for look in self._found]
        parts = (slice(bisect_left(moments, step.start), bisect_left(moments, step.stop)) for step in steps)
        found = [look for part in parts for look in self._found[part]]
        seconds = sum(look.seconds for look in found)
        if seconds < max(LEAST_SECONDS, LEAST_SHARE * step_seconds * len(steps)):
            return None
        by_part = defaultdict[str, float](float)
        for look in found:
            by_part[look.part] += look.seconds
        part, there = max(by_part.items(), key=lambda each: each[1])
        ((line, _),) = Counter(look.line for look in found if look.part == part).most_common(1)
        file, _, what = part.partition(", ")
        return OwnWork(seconds / len(steps), f"{file}:{line}" + (what and f", in {what}"), there / seconds)

    def _watch(self, thread: int, ended: threading.Event) -> None:
        clock = time.pthread_getcpuclockid(thread)
        last = time.clock_gettime(clock)
        while not ended.wait(INTERVAL_S):
            computed = time.clock_gettime(clock)
            if computed - self._op_ended > GIVES_WAY_S and (place := self._place(sys._current_frames().get(thread))):
                self._found.append(_OwnLook(self._now(), computed - last, *place))
            last = computed

    def _place(self, frame: FrameType | None) -> tuple[str, int] | None:
        """Where the program works; None while torch or flopmeter do. What runs the script lies below it."""
        found = package = None
        while frame is not None and frame.f_code.co_filename not in ("<frozen runpy>", runpy.__file__):
            module, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
            if module.startswith(_NOT_IN_A_STEP):
                return None
            if found is None and not module.startswith(_OF_ITS_CALLER):
                if module.partition(".")[0] in _OTHERS:
                    return None
                if self._is_own(module, file):
                    what = package or frame.f_code.co_qualname.partition(".<locals>")[0].replace("<module>", "")
                    found = ", ".join(filter(None, (os.path.basename(file), what))), frame.f_lineno
                package = package or module.partition(".")[0]
            frame = frame.f_back
        return found
