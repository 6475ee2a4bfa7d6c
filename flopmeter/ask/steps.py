"""What the rows of a comparison, a scaling and a sweep have in common: each is one run (a step) on something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from flopmeter.records import Regime
from flopmeter.report.quantities import UNKNOWN, in_gb, in_ms, percent
from flopmeter.report.report import Report
from flopmeter.report.tables import ColumnOf
from flopmeter.timing.peak_memory import usable_bytes_if_known


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One run of the program. A figure that is not known is None."""

    KEYS: ClassVar[tuple[str, ...]] = ()  # what csv and json hold of a row, in this order

    seconds: float
    mfu: float
    regime: Regime
    peak_memory_bytes: int  # of the program, repeated
    usable_memory_bytes: int | None  # that tensors can have; None: unknown, as of a CPU
    watts: float | None  # of one device, on average; None: nobody knows what it may draw
    joules: float | None  # of one device
    energy_dollars: float | None  # of these joules; None without a price

    @property
    def fits(self) -> bool | None:
        return None if self.usable_memory_bytes is None else self.peak_memory_bytes <= self.usable_memory_bytes

    def as_dict(self) -> dict[str, Any]:
        """Flat, in plain types and SI units."""
        return {name: getattr(self, name) for name in self.KEYS}


def step_figures(report: Report) -> dict[str, Any]:
    """The fields of Step, as arguments of a row."""
    return {
        "seconds": report.seconds,
        "mfu": report.mfu,
        "regime": report.regime,
        "peak_memory_bytes": report.memory.steady_peak_bytes,
        "usable_memory_bytes": usable_bytes_if_known(report.hardware),
        "watts": report.watts,
        "joules": report.joules,
        "energy_dollars": report.energy_dollars,
    }


def million(value: float | None) -> float | None:
    """Dollars of a million such steps."""
    return None if value is None else 1e6 * value


TIME = ColumnOf[Step]("ms", lambda step: step.seconds, in_ms)
MFU = ColumnOf[Step]("MFU %", lambda step: percent(step.mfu, 1), str)
BOUND_BY = ColumnOf[Step]("bound by", lambda step: step.regime, str, "<")
PEAK = ColumnOf[Step]("peak GB", lambda step: step.peak_memory_bytes, in_gb)
USABLE = ColumnOf[Step]("of GB", lambda step: step.usable_memory_bytes, in_gb)
WATTS = ColumnOf[Step]("W", lambda step: step.watts)
JOULES = ColumnOf[Step]("J", lambda step: step.joules)
ENERGY_PRICE = ColumnOf[Step]("energy $/M steps", lambda step: million(step.energy_dollars))
FITS = ColumnOf[Step]("fits", lambda step: {True: "yes", False: "NO", None: UNKNOWN}[step.fits], str, "<")
