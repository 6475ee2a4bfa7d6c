"""flopmeter: what a PyTorch program will cost on a GPU, and why, metered without one."""

from flopmeter.costs import UncountedError
from flopmeter.hardware import Hardware, HardwareError, available_hardware, load_hardware
from flopmeter.meter import FlopMeter
from flopmeter.report import Report, Row

__version__ = "0.1.0"
__all__ = [
    "FlopMeter",
    "Hardware",
    "HardwareError",
    "Report",
    "Row",
    "UncountedError",
    "available_hardware",
    "load_hardware",
]
