"""Streams and events for programs on meta tensors, with the interface of those in `torch.cuda`.

Nothing runs on meta, so nothing waits here. But the order in which kernels could run on a GPU depends on which stream
each op was given to and what that stream waited for. So recorders listen, and the launch timeline uses what they wrote.
Stream 0 is the default one. Each thread has its own current stream, as on CUDA.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import UntypedStorage

from flopmeter.records import DEFAULT_STREAM, Sync, Trace


class Listener:
    """Writes down in a trace what the program does with streams and storages between its ops.

    `op_of` gives the op that returned the handle of a collective; `resize` is told of a storage before it is resized.
    """

    def __init__(self, trace: Trace, op_of: Callable[[Any], int | None], resize: Callable[[UntypedStorage, int], None]):
        self._ops, self._use = trace.ops, trace.stream_use
        self._op_of = op_of
        self.on_resize = resize

    def on_event(self, event: int, stream: int) -> None:
        """The event is recorded: it happens when the stream has done all that it was given so far."""
        self._use.syncs.append(Sync(len(self._ops), stream, "record", event))

    def on_wait(self, event: int, stream: int) -> None:
        """What the stream is given later runs after the event."""
        self._use.syncs.append(Sync(len(self._ops), stream, "wait for event", event))

    def on_wait_for_work(self, work: Any, stream: int) -> None:
        """What the stream is given later runs after the collective with this handle."""
        op = self._op_of(work)
        if op is not None:
            self._use.syncs.append(Sync(len(self._ops), stream, "wait for op", op))

    def on_host_wait(self) -> None:
        """The host waits until the device, or a stream of it, has done what it was given so far."""
        self._use.host_waits.append(len(self._ops))

    def on_batch(self, messages: int) -> None:
        """So many sends and receives follow, which NCCL runs as one kernel (batch_isend_irecv)."""
        self._use.batches[len(self._ops)] = messages


listeners: list[Listener] = []  # the open ones, the innermost last
_numbers = itertools.count(DEFAULT_STREAM + 1)
_events = itertools.count()


class _Current(threading.local):
    stream = DEFAULT_STREAM


_current = _Current()


def current() -> int:
    """The number of the stream that this thread's ops are given to."""
    return _current.stream


def host_waits(device: Any = None) -> None:
    """torch.cuda.synchronize. Nothing takes time here, but on a GPU the host does not run ahead of this."""
    for listener in listeners:
        listener.on_host_wait()


class MetaEvent:
    """An event with the interface of torch.cuda.Event, except that it measures no time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._number: int | None = None  # None: not recorded yet, so no stream waits for it

    def record(self, stream: MetaStream | None = None) -> None:
        """Stand for all that the stream was given so far."""
        self._number = next(_events)
        for listener in listeners:
            listener.on_event(self._number, current() if stream is None else stream.number)

    def wait(self, stream: MetaStream | None = None) -> None:
        """What the stream is given from now on runs after the event."""
        if self._number is not None:
            for listener in listeners:
                listener.on_wait(self._number, current() if stream is None else stream.number)

    def query(self) -> bool:
        """Whether it has happened: nothing takes time here."""
        return True

    def synchronize(self) -> None:
        """The host waits until it has happened."""
        host_waits()


class MetaStream:
    """torch.cuda.Stream. `number` is unique in the process."""

    device_index = 0  # meta is one device
    device_type = 14  # Meta in c10/core/DeviceType.h

    def __init__(self, *args: Any, number: int | None = None, **kwargs: Any) -> None:
        self.number = next(_numbers) if number is None else number

    @property
    def stream_id(self) -> int:
        """The number by which torch's own code knows a stream."""
        return self.number

    def wait_event(self, event: MetaEvent) -> None:
        """What this stream is given from now on runs after the event."""
        event.wait(self)

    def wait_stream(self, stream: MetaStream) -> None:
        """What this stream is given from now on runs after all that the other was given so far."""
        self.wait_event(stream.record_event())

    def record_event(self, event: MetaEvent | None = None) -> MetaEvent:
        """An event that stands for all that this stream was given so far."""
        event = MetaEvent() if event is None else event
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether it is done: nothing takes time here."""
        return True

    def synchronize(self) -> None:
        """The host waits until it is done."""
        host_waits()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MetaStream) and other.number == self.number

    def __hash__(self) -> int:
        return hash(self.number)


def current_stream(device: Any = None) -> MetaStream:
    """The stream that this thread's ops are given to."""
    return MetaStream(number=current())


def default_stream(device: Any = None) -> MetaStream:
    """The stream of programs that choose none."""
    return MetaStream(number=DEFAULT_STREAM)


def set_stream(stream: MetaStream) -> None:
    """Give this thread's ops to the stream from now on."""
    _current.stream = stream.number


@contextmanager
def stream(stream: MetaStream | None) -> Iterator[None]:
    """Give this thread's ops to the stream; None changes nothing."""
    before = current()
    if stream is not None:
        _current.stream = stream.number
    try:
        yield
    finally:
        _current.stream = before
