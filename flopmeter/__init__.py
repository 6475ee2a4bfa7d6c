"""flopmeter: what a PyTorch program will cost on a GPU, and why, metered without one."""

from flopmeter.compare import Comparison, compare
from flopmeter.costs import UncountedError, register_cost
from flopmeter.hardware import Hardware, HardwareError, available_hardware, load_hardware
from flopmeter.known_values import Assumption, DataDependentError, on_meta
from flopmeter.meter import FlopMeter, StreamError
from flopmeter.report import Report, Row
from flopmeter.sweep import Sweep, sweep

__version__ = "0.1.0"
__all__ = [
    "Assumption",
    "Comparison",
    "DataDependentError",
    "FlopMeter",
    "Hardware",
    "HardwareError",
    "Report",
    "Row",
    "Sweep",
    "StreamError",
    "UncountedError",
    "available_hardware",
    "compare",
    "load_hardware",
    "on_meta",
    "sweep",
    "register_cost",
]
