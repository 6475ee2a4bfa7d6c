"""Where a run could win time: the records that `Report.advice` and `Report.hot_spots` hold."""

from __future__ import annotations

from typing import NamedTuple

LEAST_GAIN = 0.03  # of the run's wall-clock: below that no advice is worth a change of the program

MINOR_FAULT = 0.05  # of the wall-clock: a fault that wins less is sorted by its gain, among other ways to run

WHOLE = "the whole program"
WAITS = "the device waits for the host before it"
WAITS_FOR_STEPS = "the host launches its kernels one by one, more slowly than the device runs them"
WAITS_FOR_LINK = "the computing stream waits for communication before it"


class HotSpot(NamedTuple):
    """The kernels of one op in one place, and their floor: the least time that their work can take. All times are
    wall-clock."""

    what: str  # the op, and how often it is called
    where: str  # modules, and the source line if the trace has it
    seconds_now: float  # what these kernels take, with the device's waits for the host before them
    floor_seconds: float  # what their FLOPs or bytes take at the rates of the datasheet
    why: str  # why they take longer than that floor
    places: tuple[str, ...]  # the op and the modules, as advice about them names them

    @property
    def over_floor(self) -> float:
        """Seconds above the floor."""
        return self.seconds_now - self.floor_seconds


class Advice(NamedTuple):
    """A change to the program, which the time model has priced. All times are wall-clock.

    `seconds_now - seconds_then` is what the whole run wins, even if the change also helps kernels other than those of
    `what`.
    """

    what: str  # the kernels that the change is about
    where: str  # modules, and the source line if the trace has it
    seconds_now: float  # what these kernels take, with the device's waits for the host before them
    floor_seconds: float  # what the FLOPs or bytes that the change leaves of them take at the rates of the datasheet
    why: str
    remedy: str
    seconds_then: float
    run_seconds_then: float  # of the whole run
    is_fault: bool  # True: work that the program does without need; False: another way to run the same program
    places: tuple[str, ...]  # op and module of each kernel that it is about; none if it is about all of them

    @property
    def gain_seconds(self) -> float:
        """Wall-clock that the run wins."""
        return self.seconds_now - self.seconds_then
