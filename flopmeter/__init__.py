"""flopmeter: what a PyTorch program will cost on a GPU, and why, metered without one."""

from typing import TYPE_CHECKING, Any

from flopmeter.compare import Comparison, compare
from flopmeter.costs import UncountedError, register_cost
from flopmeter.generation import Generation, time_generation
from flopmeter.hardware import Hardware, HardwareError, available_hardware, load_hardware
from flopmeter.known_values import Assumption, DataDependentError, on_meta
from flopmeter.largest_batch import largest_batch
from flopmeter.memory import Memory
from flopmeter.meter import FlopMeter, StreamError
from flopmeter.report import Report, Row
from flopmeter.sweep import Sweep, sweep

if TYPE_CHECKING:
    from flopmeter.measured import Check, ProfileError, check

__version__ = "0.1.0"
__all__ = [
    "Assumption",
    "Check",
    "Comparison",
    "DataDependentError",
    "FlopMeter",
    "Generation",
    "Hardware",
    "HardwareError",
    "Memory",
    "ProfileError",
    "Report",
    "Row",
    "Sweep",
    "StreamError",
    "UncountedError",
    "available_hardware",
    "check",
    "compare",
    "largest_batch",
    "load_hardware",
    "on_meta",
    "sweep",
    "time_generation",
    "register_cost",
]


def __getattr__(name: str) -> Any:
    """What reads profiles is imported when it is first asked for: metering does without."""
    if name in ("Check", "ProfileError", "check"):
        from flopmeter import measured

        return getattr(measured, name)
    raise AttributeError(f"module 'flopmeter' has no attribute {name!r}")
