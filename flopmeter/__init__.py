"""flopmeter: what a PyTorch program will cost on a GPU, and why, metered without one."""

from flopmeter.costs import UncountedError
from flopmeter.hardware import Hardware, HardwareError, available_hardware, load_hardware
from flopmeter.known_values import Assumption, DataDependentError, on_meta
from flopmeter.meter import FlopMeter
from flopmeter.report import Report, Row

__version__ = "0.1.0"
__all__ = [
    "Assumption",
    "DataDependentError",
    "FlopMeter",
    "Hardware",
    "HardwareError",
    "Report",
    "Row",
    "UncountedError",
    "available_hardware",
    "load_hardware",
    "on_meta",
]
