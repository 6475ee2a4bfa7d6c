"""Streams, events and CUDA graphs of the device named cuda. Events tell predicted time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol

import torch

from flopmeter.records import DEFAULT_STREAM
from flopmeter.run.graph_pools import GraphPool, graph_pool_handle
from flopmeter.trace import streams


class Moments(Protocol):
    """The run, as events and graphs see it. A moment is the number of ops that ran before it."""

    takes_times: bool  # the program times itself, and will print what it finds

    def now(self) -> int: ...

    def seconds_between(self, start: int, end: int) -> float:
        """Predicted wall-clock of the ops from one moment to another."""

    def replay(self, ops: range, stream: int) -> None:
        """The device runs the ops of the range again, as one graph. `stream`: on which they were captured."""

    def pool(self, handle: object) -> GraphPool:
        """The memory that graphs with this handle share."""


class CudaStream(streams.MetaStream):
    """torch.cuda.Stream. It may be entered: then it is the current one."""

    device_type = 1  # CUDA in c10/core/DeviceType.h
    device = torch.device("cuda", 0)

    def __init__(self, device: Any = None, priority: int = 0, *, number: int | None = None, **kwargs: Any) -> None:
        super().__init__(number=number)
        self.priority = priority
        self._before: list[StreamContext] = []

    @staticmethod
    def priority_range() -> tuple[int, int]:
        """The lowest and the highest priority: torch keeps four (c10/cuda/CUDAStream.h)."""
        return 0, -3

    def is_capturing(self) -> bool:
        return CudaGraph.capturing

    @property
    def cuda_stream(self) -> int:
        """The handle; it only tells streams apart."""
        return self.number

    def __enter__(self) -> CudaStream:
        self._before.append(StreamContext(self))
        self._before[-1].__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._before.pop().__exit__(*exception)

    __hash__ = streams.MetaStream.__hash__


def current_stream(device: Any = None) -> CudaStream:
    return CudaStream(number=streams.current())


def default_stream(device: Any = None) -> CudaStream:
    return CudaStream(number=DEFAULT_STREAM)


class StreamContext:
    """torch.cuda.StreamContext, and torch.cuda.stream: gives the ops inside to the stream. It is a class since Dynamo
    expects one."""

    def __init__(self, stream: streams.MetaStream | None) -> None:
        self.stream = stream
        self._inside = streams.stream(stream)

    def __enter__(self) -> None:
        self._inside.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._inside.__exit__(*exception)


set_stream = streams.set_stream


class CudaEvent(streams.MetaEvent):
    """torch.cuda.Event. `elapsed_time` is what the ops between two events are predicted to take."""

    clock: ClassVar[Moments]

    def __init__(self, enable_timing: bool = False, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self._moment: int | None = None
        self._times = enable_timing
        self.clock.takes_times |= enable_timing

    def record(self, stream: Any = None) -> None:
        super().record(stream)
        self._moment = self.clock.now()

    def elapsed_time(self, end_event: CudaEvent) -> float:
        """Milliseconds from this event to the other one, as predicted. Raises as torch does."""
        if not self._times or not end_event._times:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._moment is None or end_event._moment is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return self.clock.seconds_between(self._moment, end_event._moment) * 1e3


class CudaGraph:
    """torch.cuda.CUDAGraph. Ops during the capture are recorded as they run; each replay runs them again."""

    clock: ClassVar[Moments]
    capturing: ClassVar[bool] = False

    def __init__(self, keep_graph: bool = False) -> None:
        self._start: int | None = None
        self._stream = DEFAULT_STREAM
        self._ops: range | None = None
        self._pool = graph_pool_handle()

    def capture_begin(self, pool: Any = None, *args: Any, **kwargs: Any) -> None:
        CudaGraph.capturing, self._start, self._stream = True, self.clock.now(), streams.current()
        self._pool = pool or self._pool

    def capture_end(self) -> None:
        if self._start is None:
            raise RuntimeError("capture_end() without capture_begin()")
        CudaGraph.capturing, self._ops = False, range(self._start, self.clock.now())
        self.clock.pool(self._pool).keep(self._ops)

    def replay(self) -> None:
        if self._ops is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self.clock.replay(self._ops, self._stream)

    def instantiate(self) -> None:
        """Does nothing: the driver would prepare the graph, which is work of the host."""

    def reset(self) -> None:
        if self._ops is not None:
            self.clock.pool(self._pool).give_back(self._ops)
        self._start = self._ops = None

    def pool(self) -> tuple[int, int]:
        return self._pool

    def enable_debug_mode(self) -> None:
        """Does nothing: there is no driver that could keep the graph for printing."""


@contextmanager
def captured(cuda_graph: CudaGraph, pool: Any = None, stream: Any = None, **kwargs: Any) -> Iterator[None]:
    """torch.cuda.graph: captures what runs inside."""
    cuda_graph.capture_begin(pool)
    try:
        yield
    finally:
        cuda_graph.capture_end()
