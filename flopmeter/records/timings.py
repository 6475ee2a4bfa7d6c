"""When a kernel runs on a device, how long, and what bounds it."""

from __future__ import annotations

from typing import Literal, NamedTuple

Regime = Literal["compute", "memory", "communication", "overhead"]
Clocks = Literal["sustained", "burst"]  # of a long run under the power limit, or of one too short for the limit to act


class RunClock(NamedTuple):
    """The clocks at which a run was priced, and what the device draws when idle."""

    clocks: Clocks
    ratio: float  # of the boost clock, on average over the work of the kernels
    idle_watts: float | None  # None: nobody gave the device's power limit
    limit_watts: float | None


UNKNOWN_POWER = RunClock("sustained", 1.0, None, None)


class Timing(NamedTuple):
    """One kernel on one device. It ends at `start_seconds + seconds` of the launch timeline."""

    compute_seconds: float
    memory_seconds: float
    work_seconds: float  # both, overlapped: between the larger of the two and their sum
    floor_seconds: float  # ramp and drain: the time of a kernel without work
    wait_seconds: float  # time in which the device was idle before this kernel, waiting for the host
    start_seconds: float
    kernel_class: str  # which has an error band (timing/bands.py)
    enqueued_seconds: float  # when the host has launched it, on the same clock as start_seconds
    stream: int = 0  # 0: the one that computes
    link_wait_seconds: float = 0.0  # time in which its stream was idle after the launch, waiting for other streams
    is_collective: bool = False
    joules: float = 0.0  # for the work, in addition to what the device draws all the time
    clock: float = 1.0  # of the boost clock
    few_flops: bool = False  # at the datasheet's rates its arithmetic takes less than half as long as its bytes

    @property
    def is_compute(self) -> bool:
        """Whether arithmetic bounds the work. It does not where a kernel has few FLOPs for its bytes, even if mostly
        empty tiles take long, as in attention with one query."""
        return self.compute_seconds >= self.memory_seconds and not self.few_flops

    @property
    def seconds(self) -> float:
        """Device time."""
        return self.work_seconds + self.floor_seconds

    @property
    def end_seconds(self) -> float:
        """When it has finished."""
        return self.start_seconds + self.seconds

    @property
    def regime(self) -> Regime:
        """What most of its device time goes to: launch and drain (overhead), arithmetic, memory traffic, or the links
        to other ranks. The time that the device waits before the kernel does not count: it is no property of the
        kernel."""
        if self.is_collective:
            return "communication"
        if self.floor_seconds > self.work_seconds:
            return "overhead"
        return "compute" if self.is_compute else "memory"
