"""Ops on meta tensors in other threads than the meter's. They are counted, so that the report can say how many it
misses. Where such a thread reads a value, as one that logs a loss does or generates text, it is told what the meter's
own would be.

Works around: a dispatch mode sees only the ops of the thread that entered it.
Until: a mode can be entered for all threads.

So each thread that starts while a meter is on, and each task of a ThreadPoolExecutor (asyncio.to_thread uses one), runs
under a mode of its own that only counts. The ops of a thread that was running before are not counted, but its module
calls are (ModulePaths.missed).
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flopmeter.known_values import KnownValues
from flopmeter.known_values.assumptions import caller
from flopmeter.known_values.entry_points import known_in_this_thread
from flopmeter.records.tensors import tensors_in
from flopmeter.torch_names.around import around
from flopmeter.torch_names.operators import aten_overloads
from flopmeter.torch_names.shared_patch import SharedPatch
from flopmeter.trace.mode_flags import tell_modes
from flopmeter.trace.module_paths import ModulePaths


class ThreadCopy(NamedTuple):
    """A copy between host and device in another thread, after so many ops of the meter's own."""

    after: int
    nbytes: int
    where: str  # file:line


class OtherThreads:
    """A context. `ops` counts the ops on meta tensors in threads that are started inside it, directly or indirectly,
    and `copies` has those between host and device. `values` answers what they read; `now` is the number of the meter's
    own ops so far."""

    def __init__(self, values: KnownValues | None = None, now: Callable[[], int] = lambda: 0) -> None:
        self.ops, self.values, self.now = 0, values, now
        self.copies: list[ThreadCopy] = []
        self.is_open = False

    def __enter__(self) -> OtherThreads:
        self.is_open = True
        _here.counters += (self,)
        _patches.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self.is_open = False
        _here.counters = tuple(counter for counter in _here.counters if counter is not self)
        _patches.__exit__()


def caution(modules: ModulePaths) -> str:
    """What the reader must know of a program that calls modules in other threads."""
    calls = "1 call" if modules.missed == 1 else f"{modules.missed:,} calls"
    return (
        f"{modules.first_missed} runs in another thread ({calls} of modules), which is not metered: the time is of all"
        " else; call it in the main thread"
    )


@contextmanager
def uncounted() -> Iterator[None]:
    """Threads that are given work in this context do it for flopmeter, not for the program."""
    before, _here.counters = _here.counters, ()
    try:
        yield
    finally:
        _here.counters = before


class _Here(threading.local):
    counters: tuple[OtherThreads, ...] = ()  # those of this thread's meters, and those that count this thread
    starts_worker = False  # a pool starts a thread: it outlives the meter, so its tasks are counted, not the thread


_here = _Here()
_lock = threading.Lock()
_plain_start: Any = threading.Thread.start
_plain_submit: Any = ThreadPoolExecutor.submit


def _install() -> ExitStack:
    undo = ExitStack()
    undo.enter_context(mock.patch.object(threading.Thread, "start", _start))
    undo.enter_context(mock.patch.object(ThreadPoolExecutor, "submit", _submit))
    return undo


_patches = SharedPatch(_install)


@functools.wraps(_plain_start)
def _start(self: threading.Thread) -> None:
    if _here.counters and not _here.starts_worker:
        self.run = _counted(_here.counters, self.run)  # type: ignore[method-assign]
    _plain_start(self)


@functools.wraps(_plain_submit)
def _submit(self: ThreadPoolExecutor, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if _here.counters:
        function = _counted(_here.counters, function)
    _here.starts_worker = True
    try:
        return _plain_submit(self, function, *args, **kwargs)
    finally:
        _here.starts_worker = False


@around
def _counted(counters: tuple[OtherThreads, ...], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    before, _here.counters = _here.counters, counters
    try:
        # A copy knows the same, and keeps apart what it notes of the op that it runs.
        values = [copy.copy(counter.values) for counter in counters if counter.is_open and counter.values]
        with known_in_this_thread(values), _Count(counters, values):
            return function(*args, **kwargs)
    finally:
        _here.counters = before


class _Count(TorchDispatchMode):
    """Counts ops on meta tensors and lets all pass as they are. The last of `values` answers those that read."""

    supports_higher_order_operators = True

    def __init__(self, counters: tuple[OtherThreads, ...], values: Sequence[KnownValues]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counters, self._values = counters, values

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Guards of compiled functions need not see it."""
        return True

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        tell_modes()

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_in((args, kwargs)))
        result = self._values[-1].run(func, args, kwargs, tensors) if self._values else func(*args, **kwargs)
        if any(tensor.is_meta for tensor in (*tensors, *tensors_in(result))):
            nbytes = _between_host_and_device(func, result, tensors)
            with _lock:
                for counter in filter(lambda counter: counter.is_open, self._counters):
                    counter.ops += 1
                    if nbytes:
                        counter.copies.append(ThreadCopy(counter.now(), nbytes, caller()))
        return result


def _between_host_and_device(func: Any, result: Any, tensors: Sequence[Tensor]) -> int:
    """How many bytes the op copies from one to the other."""
    if func not in _COPIES or not isinstance(result, Tensor):
        return 0
    source = tensors[-1]  # copy_ has the target first
    return result.nbytes if source.is_meta != result.is_meta else 0


_COPIES = (aten_overloads.copy_.default, aten_overloads._to_copy.default)
