"""What a step of a long run waits for besides the program: batches, checkpoints, the slowest of many ranks."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

from flopmeter.ask.checks import check_not_negative, check_whole
from flopmeter.report.quantities import duration, percent


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """What a step waits for; nothing by default, since nobody can know it from the program.

    data_seconds: time in which the hosts prepare the batch of one step, while the GPUs work: no step is shorter.
    checkpoint_seconds: how long all ranks stop to save; checkpoint_every: how many steps lie between two checkpoints.
    straggling: standard deviation of the time of a rank's step, as a share of it. Times are assumed to be normally
        distributed and independent from rank to rank and from step to step; all ranks wait for the slowest.

    Raises ValueError for what is negative or no number.
    """

    data_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    checkpoint_every: int = 1
    straggling: float = 0.0

    def __post_init__(self) -> None:
        check_not_negative(
            data_seconds=self.data_seconds, checkpoint_seconds=self.checkpoint_seconds, straggling=self.straggling
        )
        check_whole(checkpoint_every=self.checkpoint_every)

    def step_seconds(self, seconds: float, ranks: int) -> float:
        """The average time of a step that takes `seconds` on a rank without delays."""
        slowest = seconds * (1.0 + self.straggling * expected_maximum(ranks))
        return max(slowest, self.data_seconds) + self.checkpoint_seconds / self.checkpoint_every

    def __str__(self) -> str:
        """'a batch every 2 s, a checkpoint of 30 s every 500 steps, ranks that differ by 2 %'; '' without any."""
        parts = []
        if self.data_seconds:
            parts.append(f"a batch every {duration(self.data_seconds)}")
        if self.checkpoint_seconds:
            parts.append(f"a checkpoint of {duration(self.checkpoint_seconds)} every {self.checkpoint_every:,} steps")
        if self.straggling:
            parts.append(f"ranks that differ by {percent(self.straggling, 1)} %")
        return ", ".join(parts)


NO_DELAYS = Delays()


def checked_delays(delays: object) -> Delays:
    if not isinstance(delays, Delays):
        raise TypeError(f"delays must be a flopmeter.Delays, not {delays!r}")
    return delays


def delay_notes(delays: Delays) -> list[str]:
    return [f"each step also waits: {delays}"] if str(delays) else []


def expected_maximum(count: int) -> float:
    """The expected maximum of `count` independent standard normal numbers, by Blom's approximation
    ('Statistical Estimates and Transformed Beta-Variables', 1958): 5 % too large for 2, 1 % for 8."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
